"""The Korean strings of JupyterLab's user interface, as a tfds dataset that needs no download."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from finetune.examples import installed

_HANGUL = re.compile("[\uac00-\ud7a3]")


class KoreanStrings(tfds.core.GeneratorBasedBuilder):
    """Distinct Korean strings with at least one space, in the splits `train` and `test`.

    They are the translations in the package jupyterlab-language-pack-ko-KR (1,912 in its version
    4.5.post3): labels of buttons, messages, descriptions of settings. Every run of whitespace,
    line breaks included, became one space, and none is left at either end. Placeholders such as
    `%1` and `{0}` stand as they are: a server that spaces such strings meets them too.

    A string's split depends on nothing but its characters other than spaces (`split_of`), so that
    two spellings of one string never lie on both sides, and the splits stay as they are when
    strings are added. The order of the examples is fixed as well.

    Features: `text`, a string.

    Example:

    >>> import tempfile
    >>> builder = KoreanStrings(data_dir=tempfile.mkdtemp())
    >>> builder.download_and_prepare()
    >>> {name: split.num_examples for name, split in sorted(builder.info.splits.items())}
    {'test': 382, 'train': 1530}
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
        folder = installed.package_file(
            "jupyterlab_language_pack_ko_KR", "locale/ko_KR/LC_MESSAGES"
        )
        strings = read_strings(folder)
        return {
            split: self._generate_examples([s for s in strings if split_of(s) == split])
            for split in ("train", "test")
        }

    def _generate_examples(self, strings: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
        for text in strings:
            yield text, {"text": text}


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


def split_of(text: str) -> str:
    """`train` for about four strings in five, `test` for the others; blind to spaces.

    Example:

    >>> split_of("변경 사항") == split_of("변경사항")
    True
    """
    digest = hashlib.sha256(text.replace(" ", "").encode("utf-8")).digest()
    return "test" if int.from_bytes(digest[:8], "big") % 5 == 0 else "train"
