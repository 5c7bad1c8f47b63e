"""The trainable elements of one variable as one small tensor: gather and scatter.

Packed means holding only the trainable elements: a vector of k elements, or a block of whole rows.
Frozen elements are never written, so their bits cannot change.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np
import tensorflow as tf

# The one fact that no public call tells: whether this trace will be compiled by XLA, where
# DisableCopyOnRead and tf.unique do not exist.
from tensorflow.python.ops import control_flow_util

from finetune.selection import Selection

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

# Below this count the TF scatter (0.17 us an element) costs less than compiling an XLA one.
_XLA_SCATTER_FROM = 16_384
# The TF scatter takes coordinates of so many axes at most.
_TF_SCATTER_AXES = 7


class Packing:
    """Moves the trainable elements of one variable into a packed tensor and back, bit for bit.

    All methods work eagerly, inside a tf.function and on one replica's component of a distributed
    variable; index tensors are made once, outside of any graph.

    Args:
      selection: a selection of some rows or some elements, neither none nor all.

    Attributes:
      selection: the selection.
      packed_shape: [k], or [number of rows, ...] when whole rows are selected.

    Example:
      >>> x = tf.Variable([[1., 2.], [3., 4.]])
      >>> packing = Packing(Selection.from_flat((2, 2), [0, 3]))
      >>> packing.gather(x).numpy().tolist()
      [1.0, 4.0]
      >>> packing.scatter(x, tf.constant([9., 8.]))
      >>> x.numpy().tolist()
      [[9.0, 2.0], [3.0, 8.0]]
    """

    def __init__(self, selection: Selection):
        assert selection.kind in ("rows", "elements"), selection
        self.selection = selection
        self._by_rows = selection.kind == "rows"
        index = selection.flat_indices() if selection.rows is None else selection.rows
        self.packed_shape = (len(index), *(selection.shape[1:] if self._by_rows else ()))
        with tf.init_scope():
            self._index = tf.constant(index)

    def gather(self, variable: tf.Variable) -> tf.Tensor:
        """Returns the trainable elements of `variable`, of `packed_shape`."""
        if self._by_rows:
            return tf.gather(variable, self._index)
        return tf.gather(tf.reshape(variable, [-1]), self._index)

    def gather_gradient(self, gradient: Gradient) -> tf.Tensor:
        """Returns the gradient of the trainable elements, of `packed_shape`.

        Args:
          gradient: of the variable's shape, dense or IndexedSlices over its rows. Slices are
            summed row by row and never made dense; values at frozen elements, NaN included, are
            left behind.

        Raises:
          ValueError: when the gradient has another shape than the variable.
        """
        shape = tf.TensorShape(self.selection.shape)
        given = gradient.shape
        if isinstance(gradient, tf.IndexedSlices):
            given = shape[:1].concatenate(gradient.values.shape[1:])
        if not shape.is_compatible_with(given):
            raise ValueError(
                f"`gradient` (of shape {given}) must have the variable's shape {shape}."
            )
        if isinstance(gradient, tf.IndexedSlices):
            return self._gather_slices(gradient)
        if self._by_rows:
            return tf.gather(gradient, self._index)
        return tf.gather(tf.reshape(gradient, [-1]), self._index)

    def scatter(self, variable: tf.Variable, packed: tf.Tensor) -> None:
        """Writes the trainable elements into `variable` in place and nothing else.

        Args:
          variable: a tf.Variable of the selection's shape.
          packed: tensor of `packed_shape`; cast to the variable's dtype.

        Raises:
          ValueError: when `variable` or `packed` has another shape.
        """
        if tuple(variable.shape) != self.selection.shape:
            raise ValueError(
                f"`variable` (of shape {variable.shape}) must have the selection's shape "
                f"{self.selection.shape}."
            )
        packed = tf.cast(packed, variable.dtype)
        if not packed.shape.is_compatible_with(self.packed_shape):
            # The row scatter would broadcast what is too small.
            raise ValueError(
                f"`packed` (of shape {packed.shape}) must have the shape {self.packed_shape}."
            )
        packed = tf.ensure_shape(packed, self.packed_shape)
        if _in_xla():
            _assign_scattered(variable, self._index, packed)
        elif self._by_rows:
            variable.scatter_update(tf.IndexedSlices(packed, self._index))
            _disable_copy_on_read(variable)
        elif self._compiled_is_better:
            # XLA refuses a variable of another device than the call's.
            with tf.device(variable.device):
                self._compiled_scatter(variable, self._index, packed)
        else:
            tf.raw_ops.ResourceScatterNdUpdate(
                ref=variable.handle, indices=self._coordinates, updates=packed
            )
            _disable_copy_on_read(variable)

    @property
    def _compiled_is_better(self) -> bool:
        many_axes = len(self.selection.shape) > _TF_SCATTER_AXES
        return many_axes or self.selection.count >= _XLA_SCATTER_FROM

    @functools.cached_property
    def _compiled_scatter(self) -> tf.types.experimental.PolymorphicFunction:
        """XLA updates in place, 30 times faster than the TF scatter at 1 % of a large matrix."""
        return tf.function(_assign_scattered, jit_compile=True, autograph=False)

    @functools.cached_property
    def _coordinates(self) -> tf.Tensor:
        indices = np.unravel_index(self.selection.flat_indices(), self.selection.shape)
        with tf.init_scope():
            return tf.constant(np.stack(indices, axis=-1).astype(self._index.dtype.as_numpy_dtype))

    @functools.cached_property
    def _touched_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that hold a trainable element, and its flat index within those rows alone."""
        flat = self.selection.flat_indices()
        width = self.selection.size // self.selection.shape[0]
        row_of = flat // width
        is_first = np.append(True, row_of[1:] != row_of[:-1])
        place_of_row = np.cumsum(is_first, dtype=flat.dtype) - 1
        return row_of[is_first], place_of_row * width + flat % width

    @functools.cached_property
    def _row_lookup(self) -> tf.Tensor:
        """For each row of the variable its place among the touched rows, -1 for frozen rows."""
        rows = self._touched_rows[0] if self.selection.rows is None else self.selection.rows
        lookup: np.ndarray = np.full(self.selection.shape[0], -1, np.int32)
        lookup[rows] = np.arange(len(rows))
        with tf.init_scope():
            return tf.constant(lookup)

    @functools.cached_property
    def _within_touched_rows(self) -> tf.Tensor:
        with tf.init_scope():
            return tf.constant(self._touched_rows[1])

    def _gather_slices(self, gradient: tf.IndexedSlices) -> tf.Tensor:
        places = tf.gather(self._row_lookup, gradient.indices)
        count = len(self._index) if self._by_rows else len(self._touched_rows[0])
        # unsorted_segment_sum drops negative places: frozen rows cost nothing.
        rows = tf.math.unsorted_segment_sum(gradient.values, places, count)
        if self._by_rows:
            return rows
        return tf.gather(tf.reshape(rows, [-1]), self._within_touched_rows)


def sum_duplicates(gradient: Gradient) -> Gradient:
    """Returns the gradient with each row of an IndexedSlices at most once; dense ones as they are.

    Keras optimizers square the values of IndexedSlices one by one, so a row that occurs twice in a
    batch would get another second moment than from the equal dense gradient.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if _in_xla():
        return tf.convert_to_tensor(gradient)
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _in_xla() -> bool:
    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def _assign_scattered(variable: tf.Variable, index: tf.Tensor, packed: tf.Tensor) -> None:
    value = as_bits(tf.convert_to_tensor(variable))
    by_rows = packed.shape.rank > 1
    target = value if by_rows else tf.reshape(value, [-1])
    target = tf.tensor_scatter_nd_update(target, index[:, tf.newaxis], as_bits(packed))
    variable.assign(of_bits(tf.reshape(target, value.shape), variable.dtype))


def as_bits(value: tf.Tensor) -> tf.Tensor:
    """Returns narrow floats as unsigned integers of the same bits, anything else as it is.

    XLA on CPU computes narrow floats in float32, which quiets NaN payloads even where it copies.
    """
    if not value.dtype.is_floating or value.dtype.size > 2:
        return value
    return tf.bitcast(value, tf.uint16 if value.dtype.size == 2 else tf.uint8)


def of_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the values of `dtype` whose bits `as_bits` gave."""
    return bits if bits.dtype == dtype else tf.bitcast(bits, dtype)


def _disable_copy_on_read(variable: tf.Variable) -> None:
    # A TF scatter leaves the variable in copy-on-read mode: each later read would copy all of it.
    tf.raw_ops.DisableCopyOnRead(resource=variable.handle)
