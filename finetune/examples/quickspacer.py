"""The SavedModel of the package quickspacer, which puts the spaces into Korean text.

It is an embedding of characters and two convolutions, and gives the probability that a space
follows each character of a string whose spaces were removed:

    embedding/embeddings  [4250, 64]
    conv/kernel           [9, 64, 128]   conv/bias   [128]
    dense/kernel          [3, 128, 1]    dense/bias  [1]

It is called with `(ids, training)`, the ids int32 `[batch, length]`, and returns float32
`[batch, length]`. Dropout lies between the convolutions. Padding is an ordinary embedding row, not
masked: how far a string is padded changes the outputs of its last characters.
"""

from finetune.examples import installed

PADDING = 0
UNKNOWN = 1
# An output sees this many positions to either side: 4 through `conv` and 1 through `dense`.
RECEPTIVE_FIELD = 5


def saved_model_dir() -> str:
    """The folder of the SavedModel, as `finetune.load` takes it.

    Raises:
      ModuleNotFoundError: If quickspacer is not installed.
    """
    return str(installed.package_file("quickspacer", "resources/default_saved_model/1"))


def vocabulary() -> list[str]:
    """The characters that the model knows; a character's position is its embedding row.

    Returns:
      4,250 entries, all distinct. The first two are no characters but `<PAD>` and `<UNK>`.

    Raises:
      ModuleNotFoundError: If quickspacer is not installed.

    Example:

    >>> vocabulary()[:5]
    ['<PAD>', '<UNK>', ' ', 'ㅋ', '이']
    """
    path = installed.package_file("quickspacer", "resources/vocab.txt")
    # Not splitlines(): it would also split at U+0085 and its like, and shift every later row.
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def ascii_rows() -> list[int]:
    """The embedding rows of the ASCII characters: they are few, and scattered over the vocabulary.

    Returns:
      96 ascending row numbers: of the 95 printable characters, and of U+0002.

    Raises:
      ModuleNotFoundError: If quickspacer is not installed.

    Example:

    >>> ascii_rows()[:4], "".join(vocabulary()[row] for row in ascii_rows()[1:4])
    ([2, 15, 18, 69], '?.!')
    """
    return [row for row, entry in enumerate(vocabulary()) if len(entry) == 1 and entry.isascii()]
