"""Three ways to let an optimizer at one variable: whole, packed and dense.

Each way shows the inner optimizer one Keras variable, the inner variable, and keeps the promise
that frozen elements of the model's variable stay bit-identical whatever the optimizer does to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import keras
import tensorflow as tf

from finetune.packing import Gradient, Packing, as_bits, of_bits, sum_duplicates
from finetune.selection import Selection


class WholeUpdate:
    """Hands the variable itself to the optimizer: every element is trainable.

    Args:
      path: the variable's path, which the inner variable carries as its own.
      components: the copies of the variable, one a replica; the optimizer works on the first.
      selection: which elements are trainable.
      name: a name for the inner variable that no other inner variable has.

    Attributes:
      inner_variable: the keras.Variable that the inner optimizer is built on.
    """

    mode = "whole"

    def __init__(
        self, path: str, components: Sequence[tf.Variable], selection: Selection, name: str
    ):
        self.path = path
        self.components = list(components)
        self.selection = selection
        self.inner_variable = self._inner_variable(name)
        # Optimizers that treat variables by path (Muon, MultiOptimizer) know the model's paths.
        self.inner_variable._path = path

    def _inner_variable(self, name: str) -> keras.Variable:
        adopted = keras.Variable(self.components[0], name=name)
        if self.components[0].constraint is not None:
            adopted.constraint = self.components[0].constraint
        return adopted

    def pack(self, gradient: Gradient) -> Gradient:
        """Returns the part of the gradient that the inner optimizer and the replicas need."""
        return sum_duplicates(gradient)

    def pull(self) -> None:
        """Brings the inner variable up to date with the model's variable."""

    def before(self) -> None:
        """Runs in front of the inner optimizer's step."""

    def push(self) -> None:
        """Brings all copies of the model's variable up to date with the inner variable."""
        for component in self.components[1:]:
            component.assign(self.components[0])

    def frozen_slots_to_zero(self, slots: Sequence[keras.Variable]) -> None:
        """Sets the slots of this variable to zero at its frozen elements."""


class PackedUpdate(WholeUpdate):
    """Shows the optimizer the trainable elements alone; the frozen ones are never written."""

    mode = "packed"

    def _inner_variable(self, name: str) -> keras.Variable:
        self._packing = Packing(self.selection)
        with tf.init_scope():
            return keras.Variable(self._packing.gather(self.components[0]), name=name)

    def pack(self, gradient: Gradient) -> tf.Tensor:
        """Returns the gradient of the trainable elements alone."""
        return self._packing.gather_gradient(gradient)

    def pull(self) -> None:
        """Gathers the trainable elements from the first component."""
        self.inner_variable.value.assign(self._packing.gather(self.components[0]))

    def push(self) -> None:
        """Scatters the trainable elements into every component, in place."""
        for component in self.components:
            self._packing.scatter(component, tf.convert_to_tensor(self.inner_variable.value))


class DenseUpdate(WholeUpdate):
    """Shows the optimizer the whole variable and takes back what it did to frozen elements."""

    mode = "dense"

    def _inner_variable(self, name: str) -> keras.Variable:
        with tf.init_scope():
            self._trainable = tf.constant(self.selection.to_bool())
        self._old: tf.Tensor | None = None
        return super()._inner_variable(name)

    def pack(self, gradient: Gradient) -> Gradient:
        """Returns the gradient with zeros at frozen elements, whatever stood there."""
        # Select, do not multiply: 0 * nan is nan.
        if isinstance(gradient, tf.IndexedSlices):
            gradient = sum_duplicates(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            trainable = tf.gather(self._trainable, gradient.indices)
            values = tf.where(trainable, gradient.values, tf.zeros_like(gradient.values))
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.where(self._trainable, gradient, tf.zeros_like(gradient))

    def before(self) -> None:
        """Keeps the values that frozen elements must have again after the step."""
        self._old = tf.identity(self.components[0].read_value())

    def push(self) -> None:
        """Puts the frozen elements back, then brings the copies up to date."""
        assert self._old is not None, "push without before"
        variable = self.components[0]
        variable.assign(where_bits(self._trainable, variable.read_value(), self._old))
        self._old = None
        super().push()

    def frozen_slots_to_zero(self, slots: Sequence[keras.Variable]) -> None:
        """Sets the slots of the variable's shape to zero at frozen elements."""
        for slot in slots:
            if tuple(slot.shape) == self.selection.shape:
                kept = tf.where(self._trainable, slot.value, tf.zeros_like(slot.value))
                slot.value.assign(kept)


def where_bits(condition: tf.Tensor, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Returns `new` where the condition holds and `old` elsewhere, NaN payloads included."""
    return of_bits(tf.where(condition, as_bits(new), as_bits(old)), new.dtype)


def inner_names(paths: Sequence[str]) -> list[str]:
    """Returns one valid and unique Keras variable name for each path.

    Example:
      >>> inner_names(["dense/kernel", "dense_kernel", "x:0"])
      ['dense_kernel', 'dense_kernel_1', 'x_0']
    """
    names: dict[str, None] = {}
    for path in paths:
        stem = name = re.sub(r"[^A-Za-z0-9.]+", "_", path).strip("_") or "variable"
        number = 0
        while name in names:
            number += 1
            name = f"{stem}_{number}"
        names[name] = None
    return list(names)
