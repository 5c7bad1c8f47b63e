import json
from pathlib import Path

import pytest

from finetune.examples import installed, korean_strings


def all_strings():
    return korean_strings.read_strings(
        installed.package_file("jupyterlab_language_pack_ko_KR", "locale/ko_KR/LC_MESSAGES")
    )


def test_the_language_pack_holds_1912_strings_and_each_lies_in_one_fold(tmp_path):
    builder = korean_strings.prepared(tmp_path)
    folds = [
        {example["text"].decode() for example in builder.as_dataset(split).as_numpy_iterator()}
        for split in sorted(builder.info.splits)
    ]

    assert sum(map(len, folds)) == len(set.union(*folds)) == 1912
    assert set.union(*folds) == set(all_strings())


def test_two_spellings_of_one_string_lie_in_the_same_fold():
    spellings: dict[str, set[int]] = {}
    for text in all_strings():
        spellings.setdefault(text.replace(" ", ""), set()).add(korean_strings.fold_of(text))

    assert len(spellings) == 1911
    assert all(len(folds) == 1 for folds in spellings.values())


def test_strings_are_collapsed_deduplicated_and_left_out_without_hangul_or_space(tmp_path):
    header = {"": {"language": "ko KR"}}
    first = header | {"Open": ["파일  열기"], "Close": ["닫기"], "%1 cells": ["셀 %1\n개 "]}
    second = header | {"Open file": ["파일 열기"], "Dark": ["JupyterLab Dark"], "New": [""]}
    (tmp_path / "a.json").write_text(json.dumps(first))
    (tmp_path / "b.json").write_text(json.dumps(second), encoding="utf-8")

    assert korean_strings.read_strings(tmp_path) == ["셀 %1 개", "파일 열기"]


def test_a_folder_without_translations_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`folder` .*must hold \*\.json files"):
        korean_strings.read_strings(tmp_path)


def test_a_process_that_prepares_the_strings_second_uses_those_of_the_first(tmp_path, monkeypatch):
    read = korean_strings.read_strings

    def read_while_another_process_prepares(folder: Path) -> list[str]:
        monkeypatch.setattr(korean_strings, "read_strings", read)
        korean_strings.prepared(tmp_path)
        return read(folder)

    monkeypatch.setattr(korean_strings, "read_strings", read_while_another_process_prepares)

    builder = korean_strings.prepared(tmp_path)

    assert sum(split.num_examples for split in builder.info.splits.values()) == 1912


def test_a_data_dir_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        korean_strings.prepared(tmp_path / "file")
