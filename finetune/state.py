"""What a model writes by itself while it trains: statistics, seeds and counters.

They are no matter of an optimizer, and frozen like any other variable unless a rule lets the model
move them; yet a training step needs them live. So they are live while a loop runs and the base's
again afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

# No public call tells which resources an op writes to, functions that it calls included.
from tensorflow.python.framework import auto_control_deps_utils


class ModelState:
    """The variables that a model writes by itself, those that must not move and those that may.

    Args:
      frozen: {path: variable} of what must hold the base's bits whenever no loop runs.
      moving: {path: variable} of what the model may move for good.

    Attributes:
      working: {path: tf.Variable} with the values of `frozen` that the next loop goes on with.

    Example:
      >>> mean = tf.Variable([1.0])
      >>> state = ModelState({"mean": mean}, {})
      >>> with state.in_use():
      ...     _ = mean.assign_add([2.0])
      >>> float(mean[0]), float(state.working["mean"][0])
      (1.0, 3.0)
    """

    def __init__(self, frozen: Mapping[str, tf.Variable], moving: Mapping[str, tf.Variable]):
        self._frozen = dict(frozen)
        self._base = {path: tf.identity(_read(variable)) for path, variable in frozen.items()}
        self.working = {
            path: tf.Variable(value, trainable=False) for path, value in self._base.items()
        }
        self._written = [*frozen.values(), *moving.values()]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Gives frozen state its working values inside the `with`, then the base's. Eager only."""
        for path, variable in self._frozen.items():
            _assign(variable, self.working[path])
        try:
            yield
        finally:
            for path, variable in self._frozen.items():
                self.working[path].assign(_read(variable))
                _assign(variable, self._base[path])

    def values(self) -> list[tf.Tensor]:
        """Returns the present values of all of the state, for `settle`."""
        return [tf.identity(_read(variable)) for variable in self._written]

    def settle(self, taken: tf.Tensor, before: list[tf.Tensor]) -> None:
        """Makes the replicas' copies equal after a step: their mean, for integers the first.

        Args:
          taken: boolean scalar; False puts back the values that `values` gave.
          before: what `values` returned in front of the step.
        """
        for variable, old in zip(self._written, before, strict=True):
            copies = components(variable)
            new = _read(variable)
            if len(copies) > 1 and new.dtype.is_floating:
                new = tf.add_n([copy.read_value() for copy in copies]) / len(copies)
            _assign(variable, tf.where(taken, new, old))


def components(variable: tf.Variable) -> list[tf.Variable]:
    """Returns the copies of a variable, one a replica; without a strategy the variable alone."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return list(variable.values)
    return [variable]


def written_variables(function: Any) -> list[tf.Variable]:
    """Returns the variables that a function may write to, in what it calls too.

    Args:
      function: a ConcreteFunction.

    Example:
      >>> total, scale = tf.Variable(0.0), tf.Variable(2.0)
      >>> add = tf.function(lambda x: total.assign_add(scale * x))
      >>> written_variables(add.get_concrete_function(tf.TensorSpec([]))) == [total]
      True
    """
    graph = function.graph
    written = {
        id(tensor)
        for op in graph.get_operations()
        for tensor in auto_control_deps_utils.get_read_write_resource_inputs(op)[1]
    }
    handles = [outer for outer, inner in graph.captures if id(inner) in written]
    return [v for v in graph.variables if any(v.handle is handle for handle in handles)]


def _read(variable: tf.Variable) -> tf.Tensor:
    return components(variable)[0].read_value()


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    for copy in components(variable):
        copy.assign(value)
