"""The state of a Keras optimizer by variable: which slot belongs to which.

Keras keeps an optimizer's variables in one list, by position. Here they are told apart: slots by
the variable they belong to and by name, and what all variables share (iterations, learning rate,
loss scale). So state can follow a variable by its path when positions change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

_KERAS_MADE_NAME = re.compile(r"variable(_\d+)?")


@dataclasses.dataclass(frozen=True)
class Slots:
    """The variables of a built optimizer.

    Attributes:
      of_variable: for each variable that the optimizer was built on, {slot name: keras.Variable}.
      shared: {name: keras.Variable} of what belongs to no single variable.
    """

    of_variable: Sequence[dict[str, keras.Variable]]
    shared: dict[str, keras.Variable]


def build_with_slots(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> Slots:
    """Builds the optimizer on the variables and returns its slots by variable.

    Args:
      optimizer: a Keras optimizer that is not built yet.
      variables: Keras variables with names that differ from each other.

    Example:
      >>> v = keras.Variable([1., 2.], name="v")
      >>> slots = build_with_slots(keras.optimizers.Adam(), [v])
      >>> sorted(slots.of_variable[0]), sorted(slots.shared)
      (['momentum', 'velocity'], ['iteration', 'learning_rate'])
    """
    assert not optimizer.built, optimizer
    owners: dict[int, tuple[int, str]] = {}
    with tf.init_scope(), contextlib.ExitStack() as stack:
        for part in chain(optimizer):
            stack.enter_context(_recorded(part, variables, owners))
        optimizer.build(list(variables))
    of_variable: list[dict[str, keras.Variable]] = [{} for _ in variables]
    shared: dict[str, keras.Variable] = {}
    attributes = _variables_in_attributes(optimizer)
    for slot in optimizer.variables:
        if id(slot) in attributes:
            index, name = None, attributes[id(slot)]
        else:
            index, name = owners.get(id(slot)) or _owner_by_name(slot.name, variables, of_variable)
        table = shared if index is None else of_variable[index]
        table[_unused(name, table)] = slot
    return Slots(of_variable, shared)


def chain(optimizer: keras.optimizers.Optimizer) -> Iterator[keras.optimizers.Optimizer]:
    """Yields the optimizer and all that it wraps, outermost first.

    Example:
      >>> wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
      >>> [type(part).__name__ for part in chain(wrapped)]
      ['LossScaleOptimizer', 'SGD']
    """
    yield optimizer
    wrapped = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    for part in wrapped:
        if part is not None:
            yield from chain(part)


@contextlib.contextmanager
def _recorded(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    owners: dict[int, tuple[int, str]],
) -> Iterator[None]:
    """Notes whose slot each new variable is while the optimizer builds itself."""
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    original = optimizer.add_variable_from_reference

    def add_variable_from_reference(
        reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> keras.Variable:
        slot = original(reference_variable, name=name, initializer=initializer)
        if id(reference_variable) in numbers:
            owners[id(slot)] = (numbers[id(reference_variable)], name or "var")
        return slot

    # Straight into the instance: Keras would track an attribute that is set the usual way.
    vars(optimizer)["add_variable_from_reference"] = add_variable_from_reference
    try:
        yield
    finally:
        del vars(optimizer)["add_variable_from_reference"]


def _variables_in_attributes(optimizer: keras.optimizers.Optimizer) -> dict[int, str]:
    """Returns the names of variables that are attributes: no single model variable owns these."""
    return {
        # Nadam's product has no name of its own, only one that Keras numbers anew each time.
        id(value): attribute.strip("_") if _KERAS_MADE_NAME.fullmatch(value.name) else value.name
        for part in chain(optimizer)
        for attribute, value in vars(part).items()
        if isinstance(value, keras.Variable)
    }


def _owner_by_name(
    name: str,
    variables: Sequence[keras.Variable],
    of_variable: Sequence[Mapping[str, keras.Variable]],
) -> tuple[int | None, str]:
    """Finds the owner of a slot that was not made by reference, as Adafactor's factors are not.

    Optimizers that a MultiOptimizer's function makes during the build are not recorded either;
    their slots are named after their variable's path, and `a/b` and `a_b` look alike there: of
    these the first that lacks such a slot is the owner, as slots are made in the variables' order.
    """
    best: tuple[int, int | None, str] = (0, None, name)
    for number, variable in enumerate(variables):
        if name == variable.name:
            return number, "factor"
        prefix = variable.path.replace("/", "_") + "_"
        slot_name = name[len(prefix) :]
        longer = name.startswith(prefix) and len(prefix) > best[0]
        if longer and slot_name not in of_variable[number]:
            best = (len(prefix), number, slot_name)
    return best[1], best[2]


def _unused(name: str, taken: dict[str, Any]) -> str:
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
