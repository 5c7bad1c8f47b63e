"""The state of a MaskedOptimizer in a Keras file: selections and slots, by the variables' names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from finetune.selection import Selection
from finetune.selectors import VariableSpec


def write_state(
    store: Any,
    variables: Iterable[tuple[Sequence[str], Selection, Mapping[str, keras.Variable]]],
    shared: Mapping[str, keras.Variable],
) -> None:
    """Writes selections and slots into the store that Keras gives an optimizer to save itself in.

    Args:
      store: {name: array}.
      variables: for each variable its names, its selection and its slots by name.
      shared: slots that belong to no single variable.
    """
    index: list[dict[str, Any]] = []
    for number, (names, selection, slots) in enumerate(variables):
        index.append({"names": names, "kind": selection.kind, "shape": selection.shape})
        if selection.kind in ("rows", "elements"):
            indices = selection.rows if selection.kind == "rows" else selection.flat_indices()
            store[f"{number}.indices"] = indices
        for name, slot in slots.items():
            store[f"{number}.{name}"] = slot.numpy()
    for name, slot in shared.items():
        store[f"shared.{name}"] = slot.numpy()
    text = json.dumps({"variables": index})
    store["index"] = np.frombuffer(text.encode(), np.uint8)


def read_selections(
    store: Any, names: Sequence[tuple[str, ...]], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, tuple[str, ...], Selection]]:
    """Returns for each variable its place in the store, its names there and its selection.

    Raises:
      ValueError: when the saved variables are others.
    """
    saved = json.loads(bytes(np.asarray(store["index"])).decode())["variables"]
    return [
        (
            place,
            tuple(saved[place]["names"]),
            _saved_selection(saved[place], store, f"{place}.indices"),
        )
        for place in _places_of(saved, names, shapes)
    ]


def read_slots(
    store: Any,
    slots: Iterable[tuple[int, Mapping[str, keras.Variable]]],
    shared: Mapping[str, keras.Variable],
) -> None:
    """Assigns saved values to slots, given by the place of their variable in the store."""
    for place, of_variable in slots:
        for name, slot in of_variable.items():
            slot.assign(store[f"{place}.{name}"])
    for name, slot in shared.items():
        slot.assign(store[f"shared.{name}"])


def left_out(text: str) -> Any:
    """Returns a selector that refuses, for one that a configuration could not hold."""

    def refuse(spec: VariableSpec) -> Selection:
        raise ValueError(
            f"the selector {text} was not saved with the configuration, and no optimizer weights "
            "that hold its selection were loaded; make a MaskedOptimizer with rules."
        )

    return refuse


def _places_of(
    saved: Sequence[Mapping[str, Any]],
    names: Sequence[tuple[str, ...]],
    shapes: Sequence[tuple[int, ...]],
) -> list[int]:
    """Returns for each variable its place among the saved ones.

    Names decide; where they are others, as for layers that Keras numbers anew, order and shapes.

    Raises:
      ValueError: when the saved variables are others.
    """
    place_of = {name: place for place, entry in enumerate(saved) for name in entry["names"]}
    found = [next((place_of[n] for n in own if n in place_of), None) for own in names]
    places = [place for place in found if place is not None]
    if len(set(places)) < len(found):
        places = list(range(len(found)))
    if len(saved) == len(shapes) and all(
        tuple(saved[place]["shape"]) == shape for place, shape in zip(places, shapes, strict=True)
    ):
        return places
    listed = [f"{entry['names'][0]} {tuple(entry['shape'])}" for entry in saved]
    present = [f"{path} {shape}" for (path, *_), shape in zip(names, shapes, strict=True)]
    raise ValueError(
        "The saved optimizer state is of other variables: saved were "
        f"{sorted(set(listed) - set(present))}, the model has "
        f"{sorted(set(present) - set(listed))} instead."
    )


def _saved_selection(entry: Mapping[str, Any], store: Any, key: str) -> Selection:
    kind, shape = entry["kind"], entry["shape"]
    if kind in ("none", "all"):
        return Selection.none(shape) if kind == "none" else Selection.all(shape)
    make = Selection.from_rows if kind == "rows" else Selection.from_flat
    return make(shape, np.asarray(store[key]))
