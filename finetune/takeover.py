"""What a new inner optimizer takes over from the one that was given: warm slots, exclusions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from finetune.packing import Packing
from finetune.selection import Selection
from finetune.slots import Slots, build_with_slots, chain
from finetune.targets import native
from finetune.updates import WholeUpdate, inner_names


def fresh(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns an optimizer of the same configuration that is not built."""
    return type(optimizer).from_config(optimizer.get_config())


def warm_slots(optimizer: keras.optimizers.Optimizer) -> tuple[list[tf.Variable], Slots]:
    """Returns the variables of a built optimizer and its slots by variable.

    A copy, built on the same variables, tells which place in the list is whose slot.
    """
    variables = [native(variable) for variable in optimizer._trainable_variables]
    names = inner_names([variable.name for variable in variables])
    adopted = [keras.Variable(v, name=n) for v, n in zip(variables, names, strict=True)]
    for variable, own in zip(adopted, optimizer._trainable_variables, strict=True):
        variable._path = getattr(own, "path", variable.path)
    copy = fresh(optimizer)
    places = build_with_slots(copy, adopted)
    value_of = {id(c): o for c, o in zip(copy.variables, optimizer.variables, strict=True)}
    of_variable = [{n: value_of[id(s)] for n, s in slots.items()} for slots in places.of_variable]
    return variables, Slots(of_variable, {n: value_of[id(s)] for n, s in places.shared.items()})


def take_over(
    warm: tuple[list[tf.Variable], Slots],
    originals: Sequence[tf.Variable],
    updates: Sequence[WholeUpdate],
    slots: Slots,
) -> None:
    """Copies warm slots into new ones, at trainable elements where the new ones are packed."""
    known = {id(variable): number for number, variable in enumerate(warm[0])}
    for name, slot in slots.shared.items():
        slot.assign(warm[1].shared[name])
    for original, update, new in zip(originals, updates, slots.of_variable, strict=True):
        if id(original) not in known:
            continue
        old = warm[1].of_variable[known[id(original)]]
        for name, slot in new.items():
            value = _taken(old[name].value, slot, update.selection) if name in old else None
            if value is None:
                raise ValueError(
                    f"`inner` is built, and its slots of `{update.path}` cannot be packed: "
                    f"{name!r} is not kept element by element. Use mode='dense' or 'auto'."
                )
            slot.assign(value)


def decay_exclusions_of(optimizer: keras.optimizers.Optimizer) -> list[tuple[set[str], Any]]:
    """Returns what `exclude_from_weight_decay` left in each part: variable keys and a pattern."""
    return [
        (
            getattr(part, "_exclude_from_weight_decay", set()),
            getattr(part, "_exclude_from_weight_decay_pattern", None),
        )
        for part in chain(optimizer)
    ]


def exclude_from_decay(
    inner: keras.optimizers.Optimizer,
    exclusions: Sequence[tuple[set[str], Any]],
    originals: Sequence[tf.Variable],
    updates: Sequence[WholeUpdate],
) -> None:
    """Makes exclusions that were said of the model's variables hold for the inner ones."""
    for part, (keys, pattern) in zip(chain(inner), exclusions, strict=False):
        excluded = [
            update.inner_variable
            for original, update in zip(originals, updates, strict=True)
            if part._var_key(original) in keys
            or (pattern and any(map(pattern.search, (original.name, update.path))))
        ]
        if keys or pattern:
            part.exclude_from_weight_decay(var_list=excluded)


def _taken(value: tf.Variable, slot: keras.Variable, selection: Selection) -> Any:
    """Returns the part of a slot's value that fits the new slot, or None."""
    if slot.shape == value.shape:
        return value
    if slot.shape.rank == 0:
        # What Adafactor puts where a vector has no factors.
        return slot
    if tuple(value.shape) == selection.shape:
        return Packing(selection).gather(value)
    if selection.rows is not None and value.shape == selection.shape[: value.shape.rank]:
        # A number for each row, as Adafactor has.
        return tf.gather(value, selection.rows)
    return None
