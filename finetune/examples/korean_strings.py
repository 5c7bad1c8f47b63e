"""The Korean strings of JupyterLab's user interface, as a tfds dataset that needs no download."""

import contextlib
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from finetune.examples import installed

FOLDS = 5
_HANGUL = re.compile("[\uac00-\ud7a3]")


class KoreanStrings(tfds.core.GeneratorBasedBuilder):
    """Distinct Korean strings with at least one space, in the splits `fold_0` to `fold_4`.

    They are the translations in the package jupyterlab-language-pack-ko-KR (1,912 in its version
    4.5.post3): labels of buttons, messages, descriptions of settings. Every run of whitespace,
    line breaks included, became one space, and none is left at either end. Placeholders such as
    `%1` stand as they are: a server that spaces such strings meets them too.

    A string's fold depends on nothing but its characters other than spaces, so that two spellings
    of one string never lie on both sides of a split, and no string changes sides when others are
    added. The order within a fold is fixed as well.

    Features: `text`, a string.
    """

    # Goes up with the package's pinned version: a prepared folder is never read for another one.
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description="Korean strings of JupyterLab's user interface.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://github.com/jupyterlab/language-packs",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # Nothing is downloaded.
        strings = read_strings(
            installed.package_file("jupyterlab_language_pack_ko_KR", "locale/ko_KR/LC_MESSAGES")
        )
        return {
            f"fold_{fold}": self._generate_examples([s for s in strings if fold_of(s) == fold])
            for fold in range(FOLDS)
        }

    def _generate_examples(self, strings: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
        for text in strings:
            yield text, {"text": text}


def prepared(data_dir: str | os.PathLike[str] | None = None) -> KoreanStrings:
    """The builder, its files written if they were not there (half a second).

    Several processes may ask for it at once. tfds's forty lines of bars are not shown.

    Args:
      data_dir: Where tfds keeps the files; by default where it keeps all datasets.

    Raises:
      ModuleNotFoundError: If the language pack is not installed.

    Example:

    >>> import tempfile
    >>> builder = prepared(tempfile.mkdtemp())
    >>> [builder.info.splits[f"fold_{fold}"].num_examples for fold in range(FOLDS)]
    [376, 382, 377, 387, 390]
    """
    builder = KoreanStrings(data_dir=data_dir)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            builder.download_and_prepare()
    except Exception as error:
        # tfds ends with a rename, which fails for all but the first of several processes.
        if not (isinstance(error, OSError) and Path(builder.data_dir).exists()):
            sys.stderr.write(said.getvalue())
            raise
        builder = KoreanStrings(data_dir=data_dir)
    return builder


def read_strings(folder: Path) -> list[str]:
    """The distinct Korean strings with a space among the translations in `folder`, sorted.

    Args:
      folder: Holds `*.json` files as JupyterLab's language packs do: each an object from a string
        to the list of its translations (one for each plural form), and from "" to a header.

    Returns:
      The translations that hold Hangul and, once their whitespace is collapsed, a space.

    Raises:
      FileNotFoundError: If `folder` has no `*.json` file.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"`folder` ({folder}) must hold *.json files with translations.")
    translations = {
        " ".join(text.split())
        for file in files
        for source, texts in json.loads(file.read_text(encoding="utf-8")).items()
        if source
        for text in texts
    }
    return sorted(text for text in translations if " " in text and _HANGUL.search(text))


def fold_of(text: str) -> int:
    """The fold of a text, 0 to 4: the same on every machine, and blind to spaces.

    Example:

    >>> fold_of("변경 사항"), fold_of("변경사항")
    (4, 4)
    """
    digest = hashlib.sha256(text.replace(" ", "").encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % FOLDS
