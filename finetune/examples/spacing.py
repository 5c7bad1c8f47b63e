"""Text with spaces <-> character ids, and whether a space follows each character."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from finetune.examples import quickspacer


def id_table(vocabulary: Sequence[str]) -> tf.Tensor:
    """The id of every code point that `encode` may meet.

    Args:
      vocabulary: The entries in the order of their ids; those that are not one character long are
        never met in a text.

    Returns:
      int32 `[highest code point in the vocabulary + 2]`: at a code point its id, or that of
      unknown characters; the last entry stands for every code point beyond.
    """
    ids = {ord(entry): i for i, entry in enumerate(vocabulary) if len(entry) == 1}
    table = np.full(max(ids, default=0) + 2, quickspacer.UNKNOWN, np.int32)
    table[list(ids)] = list(ids.values())
    return tf.constant(table)


def encode(text: tf.Tensor, table: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """One text as what the model sees, what it should say, and which positions count.

    Works eagerly, in a `tf.function` and in `tf.data`, and keeps no state. A run of spaces counts
    as one; other whitespace counts as a character.

    Args:
      text: A string scalar in UTF-8.
      table: From `id_table`.

    Returns:
      ids: int32 `[length]`, of the characters that are not spaces.
      labels: float32 `[length]`, 1 where a space follows.
      weights: float32 `[length]`, 1 but for the last character, which nothing can follow.

    Example:

    >>> table = id_table(["<PAD>", "<UNK>", " ", "a", "b"])
    >>> for part in encode(tf.constant("a  bc a"), table):
    ...     print(part.numpy())
    [3 4 1 3]
    [1. 0. 1. 0.]
    [1. 1. 1. 0.]
    """
    codes = tf.strings.unicode_decode(text, "UTF-8")
    is_space = tf.equal(codes, ord(" "))
    space_follows = tf.concat([is_space, [False]], axis=0)[1:]
    characters = tf.boolean_mask(codes, ~is_space)
    ids = tf.gather(table, tf.minimum(characters, tf.size(table) - 1))
    labels = tf.cast(tf.boolean_mask(space_follows, ~is_space), tf.float32)
    positions = tf.range(tf.size(ids))
    weights = tf.cast(positions < tf.size(ids) - 1, tf.float32)
    return ids, labels * weights, weights


def decode(
    ids: Sequence[int],
    labels: Sequence[float],
    vocabulary: Sequence[str],
) -> str:
    """The text behind one row of a batch, padding dropped and spaces put back.

    Args:
      ids: `[length]`, as `encode` gives them, perhaps padded.
      labels: `[length]`; a space follows where they are above 0.5 (so probabilities do as well).
      vocabulary: The entries in the order of their ids.

    Returns:
      The text; an unknown character reads `\N{REPLACEMENT CHARACTER}`.

    Example:

    >>> decode([3, 4, 1, 3, 0], [1, 0, 1, 0, 0], ["<PAD>", "<UNK>", " ", "a", "b"])
    'a b� a'
    """
    pieces = []
    for i, label in zip(ids, labels, strict=True):
        if i == quickspacer.PADDING:
            break
        pieces.append("\N{REPLACEMENT CHARACTER}" if i == quickspacer.UNKNOWN else vocabulary[i])
        if label > 0.5:
            pieces.append(" ")
    return "".join(pieces)
