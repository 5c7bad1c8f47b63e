"""Korean word spacing: the data of `korean_strings`, for the model of `quickspacer`, as a Task."""

import os
from typing import Any

import keras
import tensorflow as tf
import tensorflow_datasets as tfds

from finetune.examples import korean_strings, metrics, quickspacer, spacing
from finetune.task import Task


def korean_spacing_task(data_dir: str | os.PathLike[str] | None = None, held_out: int = 3) -> Task:
    """A task whose labels come free: the spaces that were removed from real strings.

    A batch is `(ids, labels, weights)`, each `[batch, length]`, padded with zeros: int32 ids,
    float32 labels (1 where a space follows), float32 weights (0 at padding and at each string's
    last character). The model gives probabilities; the loss of a position is the binary
    cross-entropy. The metrics are `f1` over positions and `exact_match` over strings.

    Training batches go on without end. Each epoch is a new permutation, a pure function of the
    seed and the number of the epoch: the only state of an iterator is how many strings it gave.

    Held-out batches are padded beyond their longest string, as far as the model's outputs see the
    padding: so no figure depends on the batch size. (Called with one unpadded string at a time, the
    untuned model scores 0.803 instead of 0.810.)

    Args:
      data_dir: Where the prepared strings are kept, written on first use; by default where tfds
        keeps its datasets.
      held_out: The fold, 0 to 4, to evaluate on; the others are trained on. Figures differ by
        about 0.01 from fold to fold, so compare runs on the same one, or average over the five.
        By default the one on which the untuned model does worst.

    Returns:
      The task.

    Raises:
      ModuleNotFoundError: If a package of the extra `examples` is not installed.
      ValueError: If `held_out` is no fold.

    Example:

    >>> import tempfile
    >>> task = korean_spacing_task(tempfile.mkdtemp())
    >>> print(task.describe(next(iter(task.eval_dataset(1)))))
    ids [1, 24]; the first strings, with their spaces:
    내보낼 기존 워크스페이스를 선택하십시오.
    """
    folds = range(korean_strings.FOLDS)
    if held_out not in folds:
        raise ValueError(f"`held_out` ({held_out!r}) must be one of the folds {list(folds)}.")
    vocabulary = quickspacer.vocabulary()
    table = spacing.id_table(vocabulary)
    builder = korean_strings.prepared(data_dir)

    def batches(texts: tf.data.Dataset, batch_size: int, margin: int) -> tf.data.Dataset:
        def encode(text: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return tuple(tf.pad(part, [[0, margin]]) for part in spacing.encode(text, table))

        encoded = texts.map(encode, num_parallel_calls=tf.data.AUTOTUNE)
        return encoded.padded_batch(batch_size).prefetch(tf.data.AUTOTUNE)

    def train_dataset(batch_size: int, seed: int) -> tf.data.Dataset:
        texts = _in_memory(_texts(builder, [fold for fold in folds if fold != held_out]))
        return batches(_endless_shuffle(texts, seed), batch_size, margin=0)

    def eval_dataset(batch_size: int) -> tf.data.Dataset:
        texts = _texts(builder, [held_out])
        return batches(texts, batch_size, margin=quickspacer.RECEPTIVE_FIELD)

    def describe(batch: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> str:
        ids, labels, _ = (part.numpy() for part in batch)
        lines = [spacing.decode(*row, vocabulary) for row in zip(ids[:5], labels[:5], strict=True)]
        return "\n".join([f"ids {list(ids.shape)}; the first strings, with their spaces:", *lines])

    return Task(
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        loss=_cross_entropy,
        metrics=lambda: [metrics.F1(), metrics.ExactMatch()],
        describe=describe,
    )


def _texts(builder: tfds.core.DatasetBuilder, folds: list[int]) -> tf.data.Dataset:
    dataset = builder.as_dataset(
        split="+".join(f"fold_{fold}" for fold in folds),
        shuffle_files=False,
        # Its cache would be written into every checkpoint of an iterator.
        read_config=tfds.ReadConfig(try_autocache=False),
    )
    return dataset.map(lambda example: example["text"])


def _in_memory(texts: tf.data.Dataset) -> tf.Tensor:
    return texts.batch(int(texts.cardinality())).get_single_element()


def _endless_shuffle(elements: tf.Tensor, seed: int) -> tf.data.Dataset:
    # Dataset.shuffle depends on the global seed too, and writes its buffer into each checkpoint.
    count = elements.shape[0]

    def pick(step: tf.Tensor) -> tf.Tensor:
        seeds = tf.stack([tf.constant(seed, tf.int64), step // count])
        return elements[tf.random.experimental.index_shuffle(step % count, seeds, count - 1)]

    return tf.data.Dataset.counter().map(pick)


def _cross_entropy(labels: tf.Tensor, probabilities: tf.Tensor) -> Any:
    return keras.ops.binary_crossentropy(labels, tf.cast(probabilities, tf.float32))
