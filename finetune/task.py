"""What a model is trained on: its data, how it is called, what counts as loss and as success."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from finetune.calling import call


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, loss and metrics of a fine-tuning run; a bundle of functions, nothing else.

    A batch is `(x, y)` or `(x, y, weights)`, as in Keras; x, y and weights may be nested.

    Attributes:
      train_dataset: (batch_size, seed) -> tf.data.Dataset of batches, one pass or endless. It must
        be the same data in the same order for the same seed, and made of ops whose position
        TensorFlow can save, so that a resumed run goes on with the same examples. If it is one
        pass, it is asked for every pass anew, with another seed each time. What it holds back, in
        `shuffle` or `cache`, is in every checkpoint.
      eval_dataset: (batch_size) -> finite tf.data.Dataset of batches, always in the same order.
      loss: (y, outputs) -> the loss of each position, not reduced; a Keras loss made with
        `reduction=None` fits. Trained on is the mean weighted by `weights`.
      metrics: () -> fresh Keras metrics, updated with (y, outputs, sample_weight=weights).
      forward: (module, x, training=...) -> outputs.
      regularizer: (module) -> a scalar that is added to the loss, once for each global batch. The
        losses that a Keras model collects are `lambda model: tf.add_n(model.losses)`.
      describe: (batch) -> readable lines, for a look at the data before training.

    Raises:
      ValueError: when a part is not callable; names them all.

    Example:
      >>> def dataset(batch_size, seed=0):
      ...     return tf.data.Dataset.from_tensor_slices(([[1.], [2.]], [[2.], [4.]])).batch(2)
      >>> task = Task(dataset, dataset, keras.losses.MeanSquaredError(reduction=None))
      >>> task.loss(tf.constant([[2.], [4.]]), tf.constant([[1.], [4.]])).numpy().tolist()
      [1.0, 0.0]
    """

    train_dataset: Callable[[int, int], tf.data.Dataset]
    eval_dataset: Callable[[int], tf.data.Dataset]
    loss: Callable[[Any, Any], tf.Tensor]
    metrics: Callable[[], Sequence[keras.metrics.Metric]] = tuple
    forward: Callable[..., Any] = call
    regularizer: Callable[[Any], tf.Tensor] | None = None
    describe: Callable[[Any], str] | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"`{field.name}` ({getattr(self, field.name)!r})"
            for field in dataclasses.fields(self)
            if not callable(getattr(self, field.name))
            and not (field.default is None and getattr(self, field.name) is None)
        ]
        if wrong:
            raise ValueError(f"Task: {', '.join(wrong)} must be functions; see finetune.Task.")
