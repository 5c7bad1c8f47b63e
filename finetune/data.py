"""The training batches, pass after pass, and a position in them that a checkpoint can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from finetune.bundle import digest

# Between a shuffle and a repeat, these drop the shuffle as soon as they have its last element, and
# with it the only place from which TensorFlow saves how the next pass will be shuffled.
_FORGETFUL = ("_BatchDataset", "_PaddedBatchDataset", "_WindowDataset", "_ConcatenateDataset")


class Passes:
    """Batches without end, whose position is saved and restored exactly.

    An endless dataset is a single pass. Of a finite one every pass is made anew, with a seed of its
    own: that much of a position is a number. (`dataset.repeat()` keeps it in the shuffle alone,
    where it gets lost at the end of a pass.)

    Args:
      make: seed -> dataset of one pass, or an endless one; the same one for the same seed.
      seed: of the first pass; those of later passes follow from it.

    Attributes:
      iterator: of the present pass.
      position: a trackable that a checkpoint saves and restores; call `go_to` before it restores.

    Raises:
      ValueError: when `make` gives no dataset of (x, y) or (x, y, weights).

    Example:
      >>> passes = Passes(lambda seed: tf.data.Dataset.from_tensors(([seed], [0])), seed=7)
      >>> x, y = next(passes.iterator)
      >>> x.numpy().tolist()
      [7]
    """

    def __init__(self, make: Callable[[int], tf.data.Dataset], seed: int):
        self._make = make
        self._seed = seed
        self._number = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.position = tf.Module()
        self.position.number = self._number
        self._dataset = self._start()

    @property
    def iterator(self) -> Any:
        """The iterator of the present pass."""
        return self.position.iterator

    def next_pass(self) -> None:
        """Begins the next pass, when the present one has ended."""
        self.go_to(int(self._number) + 1)

    def go_to(self, number: int) -> None:
        """Begins the pass of that number; the first is 0."""
        self._number.assign(number)
        self._dataset = self._start()

    def forgetful(self) -> str | None:
        """Says how the dataset loses its position at the end of a pass, or None if it does not."""
        return next(_forgetful(self._dataset, False), None)

    def _start(self) -> tf.data.Dataset:
        dataset = self._make(_seed_of_pass(self._seed, int(self._number)))
        check_dataset("train_dataset", dataset)
        options = tf.data.Options()
        options.deterministic = True
        self.position.iterator = iter(dataset.with_options(options))
        return dataset


def check_dataset(name: str, dataset: Any) -> None:
    """Returns if it is a dataset of (x, y) or (x, y, weights).

    Raises:
      ValueError: if it is not; names the task's function and what it gave.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            f"`task.{name}` gave a {type(dataset).__name__}, it must give a tf.data.Dataset."
        )
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ValueError(
            f"`task.{name}` gives elements {spec}: they must be tuples (x, y) or (x, y, weights)."
        )


def digest_of_first_batch(dataset: tf.data.Dataset) -> str:
    """Returns a digest by which a later start can tell other data; 'varies' where none can.

    Example:
      >>> ordered = tf.data.Dataset.range(4).batch(2)
      >>> digest_of_first_batch(ordered) == digest_of_first_batch(ordered.skip(1))
      False
      >>> digest_of_first_batch(tf.data.Dataset.range(1000).shuffle(1000).batch(500))
      'varies'
    """
    first, second = (_digest(dataset) for _ in range(2))
    return first if first == second else "varies"


def _digest(dataset: tf.data.Dataset) -> str:
    together = hashlib.sha256()
    for batch in dataset.take(1):
        for tensor in tf.nest.flatten(batch, expand_composites=True):
            values = np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None)
            together.update(digest(values).encode())
    return together.hexdigest()


def _seed_of_pass(seed: int, number: int) -> int:
    if number == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def _forgetful(dataset: tf.data.Dataset, repeated: bool) -> Iterator[str]:
    """Yields what stands between a repeat and a shuffle and forgets the shuffle."""
    name = type(dataset).__name__
    if repeated and name in _FORGETFUL and not _comes_out_even(dataset) and _shuffles(dataset):
        yield name.removeprefix("_").removesuffix("Dataset").lower()
    # Which datasets one is made of has no public name.
    for part in dataset._inputs():
        yield from _forgetful(part, repeated or name == "_RepeatDataset")


def _comes_out_even(dataset: tf.data.Dataset) -> bool:
    if bool(getattr(dataset, "_drop_remainder", False)):
        return True
    size = getattr(dataset, "_batch_size", None)
    (first, *_) = dataset._inputs()
    count = int(first.cardinality())
    return size is not None and count >= 0 and count % int(size) == 0


def _shuffles(dataset: tf.data.Dataset) -> bool:
    return type(dataset).__name__ == "_ShuffleDataset" or any(map(_shuffles, dataset._inputs()))
