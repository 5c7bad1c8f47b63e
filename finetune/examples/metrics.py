"""Metrics of yes-or-no predictions at each position of a batch of sequences."""

from typing import Any

import keras
import tensorflow as tf


class F1(keras.metrics.Metric):
    """The harmonic mean of precision and recall over all positions seen since the last reset.

    `keras.metrics.F1Score` wants a fixed number of classes; here the last axis is a length that
    varies from batch to batch.

    Args:
      threshold: A position counts as predicted where the probability is above it.
      name: The metric's name.

    Example:

    >>> f1 = F1()
    >>> f1.update_state([[1.0, 1.0, 0.0]], [[0.9, 0.1, 0.8]])
    >>> float(f1.result())
    0.5
    """

    def __init__(self, threshold: float = 0.5, name: str = "f1") -> None:
        super().__init__(name=name)
        self.threshold = threshold
        self.true_positives = self.add_variable((), "zeros", name="true_positives")
        self.false_positives = self.add_variable((), "zeros", name="false_positives")
        self.false_negatives = self.add_variable((), "zeros", name="false_negatives")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch. All three `[batch, length]`; weights default to 1."""
        actual, predicted, weights = _binary(y_true, y_pred, sample_weight, self.threshold)
        for variable, hits in (
            (self.true_positives, actual & predicted),
            (self.false_positives, ~actual & predicted),
            (self.false_negatives, actual & ~predicted),
        ):
            variable.assign_add(tf.reduce_sum(tf.where(hits, weights, 0.0)))

    def result(self) -> tf.Tensor:
        """A float32 scalar between 0 and 1; 0 where nothing is or was said to be positive."""
        twice = 2.0 * self.true_positives.value
        return tf.math.divide_no_nan(
            twice, twice + self.false_positives.value + self.false_negatives.value
        )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"threshold": self.threshold, "name": self.name}


class ExactMatch(keras.metrics.Metric):
    """The share of sequences in which every position that counts is predicted right.

    A position counts where its weight is above 0. A sequence without such a position is padding
    and is left out.

    Args:
      threshold: A position counts as predicted where the probability is above it.
      name: The metric's name.

    Example:

    >>> exact_match = ExactMatch()
    >>> exact_match.update_state(
    ...     [[1.0, 0.0], [1.0, 0.0]], [[0.9, 0.8], [0.9, 0.8]], [[1.0, 0.0], [1.0, 1.0]])
    >>> float(exact_match.result())
    0.5
    """

    def __init__(self, threshold: float = 0.5, name: str = "exact_match") -> None:
        super().__init__(name=name)
        self.threshold = threshold
        self.matches = self.add_variable((), "zeros", name="matches")
        self.sequences = self.add_variable((), "zeros", name="sequences")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch. All three `[batch, length]`; weights default to 1."""
        actual, predicted, weights = _binary(y_true, y_pred, sample_weight, self.threshold)
        counted = weights > 0.0
        right = tf.reduce_all((actual == predicted) | ~counted, axis=-1)
        present = tf.reduce_any(counted, axis=-1)
        self.matches.assign_add(tf.reduce_sum(tf.cast(right & present, tf.float32)))
        self.sequences.assign_add(tf.reduce_sum(tf.cast(present, tf.float32)))

    def result(self) -> tf.Tensor:
        """A float32 scalar between 0 and 1; 0 before the first sequence."""
        return tf.math.divide_no_nan(self.matches.value, self.sequences.value)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"threshold": self.threshold, "name": self.name}


def _binary(
    y_true: Any, y_pred: Any, sample_weight: Any, threshold: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    actual = tf.cast(y_true, tf.float32) > 0.5
    predicted = tf.cast(y_pred, tf.float32) > threshold
    if sample_weight is None:
        return actual, predicted, tf.ones(tf.shape(actual))
    return actual, predicted, tf.broadcast_to(tf.cast(sample_weight, tf.float32), tf.shape(actual))
