"""What users write to say which elements of a variable may change.

A selector is a function from one variable (its path, shape, dtype and base value) to a
`Selection`. Selectors are evaluated once, on the base, before training starts; they combine with
`|`, `&`, `-` and `~`. Any function of one argument that returns a `Selection` or a boolean array
is a selector too. True always means trainable.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from finetune.budget import at_random, budget_of, by_magnitude, whole
from finetune.indexing import at_columns, at_elements, at_rows, at_slices, parse_index
from finetune.paths import nearest
from finetune.selection import Selection, integers, selections_digest


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """What a selector may know of one variable.

    Attributes:
      path: the variable's path.
      shape: its shape.
      dtype: its dtype's name, for instance 'float32'.
      read: returns the base value as an array of `shape`; called only by selectors that need it.
      names: every name that rules may use for the variable, the path first.
      trainable: False for non-trainable state, such as BatchNorm statistics.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    names: tuple[str, ...] = ()
    trainable: bool = True


class Selector:
    """A function from one variable to the selection of its elements that may change.

    Attributes:
      text: how a user would write it, for tables and messages; long lists are cut.
      moves_state: whether it is `model_state()`, which only non-trainable state accepts.

    Example:
      >>> spec = VariableSpec("w", (2, 3), "float32", lambda: np.arange(6.).reshape(2, 3))
      >>> selector = columns([0]) | nonzeros()
      >>> selector(spec).to_bool().tolist()
      [[True, True, True], [True, True, True]]
      >>> (selector - rows([1])).text
      '((columns([0]) | nonzeros()) - rows([1]))'
    """

    __slots__ = ("_config", "_identity", "_select", "moves_state", "text")

    # Lets `array | selector` come here instead of to NumPy, which would go element by element.
    __array_ufunc__ = None

    def __init__(
        self,
        text: str,
        select: Callable[[VariableSpec], Any],
        config: Mapping[str, Any] | None = None,
        moves_state: bool = False,
        identity: str | None = None,
    ):
        self.text = text
        self._identity = identity
        self.moves_state = moves_state
        self._config = config
        self._select = select

    @property
    def config(self) -> Mapping[str, Any] | None:
        """A JSON-able description from which `selector_from_config` makes the selector again.

        None when it holds boolean arrays or functions of the user.
        """
        return _plain(self._config)

    @property
    def identity(self) -> str:
        """Text that is another for a selector that selects otherwise, as `text` may not be.

        Functions of the user are told apart by their names only.
        """
        if self._config is not None:
            return json.dumps(self.config, sort_keys=True)
        return self._identity or self.text

    def __call__(self, spec: VariableSpec) -> Selection:
        """Returns the selection for one variable.

        Raises:
          ValueError: when the selector does not fit the variable; the message names its path.
        """
        try:
            return self._selection(spec)
        except ValueError as error:
            raise ValueError(f"{self.text} does not fit `{spec.path}`: {error}") from error

    def _selection(self, spec: VariableSpec) -> Selection:
        return _as_selection(self._select(spec), tuple(spec.shape))

    def __or__(self, other: SelectorLike) -> Selector:
        return union([self, other])

    def __ror__(self, other: SelectorLike) -> Selector:
        return union([other, self])

    def __and__(self, other: SelectorLike) -> Selector:
        return intersection([self, other])

    def __rand__(self, other: SelectorLike) -> Selector:
        return intersection([other, self])

    def __sub__(self, other: SelectorLike) -> Selector:
        return difference(self, other)

    def __rsub__(self, other: SelectorLike) -> Selector:
        return difference(other, self)

    def __invert__(self) -> Selector:
        return complement(self)

    def __repr__(self) -> str:
        return self.text


SelectorLike = Selector | Selection | np.ndarray | Callable[[VariableSpec], Any]


def everything() -> Selector:
    """Selects every element."""
    return _named("everything", lambda spec: Selection.all(spec.shape))


def nothing() -> Selector:
    """Selects no element: the variable is frozen."""
    return _named("nothing", lambda spec: Selection.none(spec.shape))


def elements(indices: Any) -> Selector:
    """Selects single elements by a list of index tuples.

    Args:
      indices: integers of shape [k, number of axes]; for a variable of one axis also [k].
        Negative ones count from the end of their axis.

    Raises:
      ValueError: at once, when they are no integers.

    Example:
      >>> spec = VariableSpec("x", (2, 2), "float32", lambda: np.zeros([2, 2]))
      >>> elements([[0, 0], [1, 1]])(spec).flat_indices().tolist()
      [0, 3]
    """
    return _by_indices("elements", indices, at_elements)


def slices(text: str) -> Selector:
    """Selects what a NumPy-style index expression selects.

    Args:
      text: for instance "[:, 5:8]", "[0]", "[..., ::2]" or "[[1, 4], :]". Integers, slices, one
        ellipsis and at most one list of integers; as in NumPy, a slice is cut at the axis' end.

    Raises:
      ValueError: at once, when the text is no such expression.

    Example:
      >>> spec = VariableSpec("x", (2, 3), "float32", lambda: np.zeros([2, 3]))
      >>> slices("[:, 1:]")(spec).to_bool().tolist()
      [[False, True, True], [False, True, True]]
    """
    index = parse_index(text)
    return _named(
        "slices", lambda spec: at_slices(text, index, spec.shape), {"text": text}, repr(text)
    )


def rows(indices: Any) -> Selector:
    """Selects whole rows: everything at the given numbers of axis 0, as in an embedding.

    Args:
      indices: row numbers, a range or any other collection of integers; negative ones count from
        the end.

    Raises:
      ValueError: at once, when they are no integers.

    Example:
      >>> spec = VariableSpec("x", (3, 2), "float32", lambda: np.zeros([3, 2]))
      >>> rows([0, -1])(spec).flat_indices().tolist()
      [0, 1, 4, 5]
    """
    return _by_indices("rows", indices, at_rows)


def columns(indices: Any) -> Selector:
    """Selects whole columns: everything at the given numbers of the last axis, as in classes.

    Args:
      indices: column numbers, a range or any other collection of integers; negative ones count
        from the end.

    Raises:
      ValueError: at once, when they are no integers.

    Example:
      >>> spec = VariableSpec("x", (2, 3), "float32", lambda: np.zeros([2, 3]))
      >>> columns([0, -1])(spec).flat_indices().tolist()
      [0, 2, 3, 5]
    """
    return _by_indices("columns", indices, at_columns)


def boolean(trainable: Any) -> Selector:
    """Selects the elements at which a boolean array is True.

    Args:
      trainable: an array of the variable's shape, which is copied; or the path of a `.npy` file
        that holds one, which is read when the selector is evaluated.

    Raises:
      ValueError: at once, when it is neither a boolean array nor a path.

    Example:
      >>> spec = VariableSpec("x", (3,), "float32", lambda: np.zeros([3]))
      >>> boolean([True, False, True])(spec).flat_indices().tolist()
      [0, 2]
    """
    if isinstance(trainable, (str, os.PathLike)):
        path = os.fspath(trainable)
        return _named("boolean", lambda spec: _load_boolean(path), {"trainable": path}, repr(path))
    selection = Selection.from_bool(trainable)
    text = f"boolean(array of shape {selection.shape})"
    return Selector(text, lambda spec: selection, identity=_identity_of(selection))


def zeros() -> Selector:
    """Selects the elements that are zero in the base (either sign)."""
    return _named("zeros", lambda spec: spec.read() == 0)


def nonzeros() -> Selector:
    """Selects the elements that are not zero in the base: a pruned network stays pruned.

    NaN is not zero.
    """
    return _named("nonzeros", lambda spec: spec.read() != 0)


def largest(share: float | None = None, count: int | None = None) -> Selector:
    """Selects the elements of largest magnitude in the base, each variable by itself.

    Ties go to the lower flat index, so every machine selects the same elements.

    Args:
      share: how much of each variable, in [0, 1]; rounded to the nearest number of elements, a
        half upwards.
      count: or how many elements of each variable exactly.

    Raises:
      ValueError: at once, unless exactly one of `share` and `count` is given, in range.

    Example:
      >>> spec = VariableSpec("x", (4,), "float32", lambda: np.array([1., -3., 2., 0.]))
      >>> largest(share=0.5)(spec).flat_indices().tolist()
      [1, 2]
    """
    budget = budget_of(share, count)
    return _named(
        "largest", lambda spec: by_magnitude(spec.read(), budget, largest=True), budget.arguments
    )


def smallest(share: float | None = None, count: int | None = None) -> Selector:
    """Selects the elements of smallest magnitude in the base; see `largest`."""
    budget = budget_of(share, count)
    return _named(
        "smallest", lambda spec: by_magnitude(spec.read(), budget, largest=False), budget.arguments
    )


def random(share: float | None = None, count: int | None = None, seed: int = 0) -> Selector:
    """Selects elements at random, the same ones on every machine.

    The choice depends on `seed` and the variable's path alone, not on the order of variables.

    Args:
      share: how much of each variable, in [0, 1]; rounded to the nearest number of elements, a
        half upwards.
      count: or how many elements of each variable exactly.
      seed: an integer; another seed, another choice.

    Raises:
      ValueError: at once, unless exactly one of `share` and `count` is given, in range.

    Example:
      >>> spec = VariableSpec("x", (4,), "float32", lambda: np.zeros([4]))
      >>> random(count=2)(spec) == random(share=0.5)(spec)
      True
    """
    budget = budget_of(share, count)
    seed = whole("seed", seed)
    return _named(
        "random",
        lambda spec: at_random(spec.path, tuple(spec.shape), budget, seed),
        {**budget.arguments, "seed": seed},
    )


def model_state() -> Selector:
    """Lets the model itself move a variable that is non-trainable state.

    BatchNorm statistics, seeds and counters stay as they are in the base unless a rule says
    `model_state()`. No optimizer touches them either way.
    """
    return Selector(
        "model_state()",
        lambda spec: Selection.all(spec.shape),
        {"name": "model_state", "arguments": {}},
        moves_state=True,
    )


def union(selectors: Sequence[SelectorLike]) -> Selector:
    """Selects what any of the selectors selects: `a | b`."""
    parts = _parts("union", selectors)
    return _combined("union", " | ", parts, Selection.__or__, selectors=_configs(parts))


def intersection(selectors: Sequence[SelectorLike]) -> Selector:
    """Selects what all of the selectors select: `a & b`."""
    parts = _parts("intersection", selectors)
    return _combined("intersection", " & ", parts, Selection.__and__, selectors=_configs(parts))


def difference(selector: SelectorLike, without: SelectorLike) -> Selector:
    """Selects what `selector` selects and `without` does not: `a - b`."""
    parts = _parts("difference", [selector, without])
    whole, cut = _configs(parts)
    return _combined("difference", " - ", parts, Selection.__sub__, selector=whole, without=cut)


def complement(selector: SelectorLike) -> Selector:
    """Selects what `selector` does not: `~a`."""
    (part,) = _parts("complement", [selector])
    return Selector(
        f"~{part.text}",
        lambda spec: ~part._selection(spec),
        part._config and {"name": "complement", "arguments": {"selector": part._config}},
        identity=None if part._config else f"~{part.identity}",
    )


def as_selector(value: SelectorLike) -> Selector:
    """Returns `value` as a `Selector`: a selector, a selection, a boolean array or a function.

    Raises:
      ValueError: for anything else, such as a selector that was not called.
    """
    if isinstance(value, Selector):
        return value
    if isinstance(value, Selection):
        return Selector(repr(value), lambda spec: value, identity=_identity_of(value))
    if isinstance(value, np.ndarray):
        return boolean(value)
    if not callable(value):
        raise ValueError(
            f"`selector` ({value!r}) must be a selector such as rows([0, 1]), a Selection, a "
            f"boolean array, or a function of one variable; selectors are: {_names()}."
        )
    # gin hands out wrappers of what it knows.
    if any(inspect.unwrap(value) is make for make in _PUBLIC):
        name = value.__name__
        raise ValueError(f"`{name}` must be called: write {name}(...), in gin @{name}().")
    return Selector(getattr(value, "__name__", repr(value)), value)


def selector_from_config(config: Mapping[str, Any]) -> Selector:
    """Returns the selector that `Selector.config` describes.

    Raises:
      ValueError: for a selector that does not exist, or whose arguments do not fit it.

    Example:
      >>> selector_from_config((rows(range(3)) - zeros()).config)
      (rows(range(0, 3)) - zeros())
    """
    make = _SELECTORS.get(config["name"])
    if make is None:
        close = ", ".join(nearest(config["name"], _SELECTORS))
        raise ValueError(f"`name` ({config['name']!r}) is no selector; nearest: {close}.")
    arguments = dict(config["arguments"])
    for name, value in arguments.items():
        if name in ("selector", "without"):
            arguments[name] = selector_from_config(value)
        elif name == "selectors":
            arguments[name] = [selector_from_config(part) for part in value]
        elif isinstance(value, Mapping):
            arguments[name] = range(*value["range"])
    return make(**arguments)


_PUBLIC = (
    everything, nothing, elements, slices, rows, columns, boolean, zeros, nonzeros, largest,
    smallest, random, model_state, union, intersection, difference, complement,
)  # fmt: skip

_SELECTORS: dict[str, Callable[..., Selector]] = {make.__name__: make for make in _PUBLIC}


def _named(
    name: str,
    select: Callable[[VariableSpec], Any],
    arguments: Mapping[str, Any] | None = None,
    shown: str | None = None,
) -> Selector:
    """Returns a selector that can be made again from its name and arguments."""
    arguments = arguments or {}
    if shown is None:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return Selector(f"{name}({shown})", select, {"name": name, "arguments": arguments})


def _by_indices(
    name: str, indices: Any, select: Callable[[np.ndarray, tuple[int, ...]], Selection]
) -> Selector:
    # Copied and checked now: a list may change, and an iterator can be read only once.
    array = integers("indices", indices)
    shown = repr(indices if isinstance(indices, range) else array[:20].tolist())
    shown = shown if len(shown) <= 40 else f"{shown[:36]} ...]"
    kept = indices if isinstance(indices, range) else array
    return _named(name, lambda spec: select(array, tuple(spec.shape)), {"indices": kept}, shown)


def _plain(config: Any) -> Any:
    """Returns a configuration as JSON can hold it; only on demand, indices may be many."""
    if isinstance(config, Mapping):
        return {key: _plain(value) for key, value in config.items()}
    if isinstance(config, list):
        return [_plain(value) for value in config]
    if isinstance(config, range):
        return {"range": [config.start, config.stop, config.step]}
    return config.tolist() if isinstance(config, np.ndarray) else config


def _parts(name: str, selectors: Sequence[SelectorLike]) -> list[Selector]:
    if not isinstance(selectors, Sequence) or not selectors:
        raise ValueError(
            f"`selectors` ({selectors!r}) of {name} must be a list of at least one selector."
        )
    parts = [as_selector(selector) for selector in selectors]
    if any(part.moves_state for part in parts):
        raise ValueError(
            f"`selectors` of {name} ({', '.join(part.text for part in parts)}): model_state() "
            "stands alone in a rule; it cannot be combined."
        )
    return parts


def _configs(parts: Sequence[Selector]) -> list[Mapping[str, Any] | None]:
    return [part._config for part in parts]


def _combined(
    name: str,
    symbol: str,
    parts: Sequence[Selector],
    merge: Callable[[Selection, Selection], Selection],
    **arguments: Any,
) -> Selector:
    def select(spec: VariableSpec) -> Selection:
        selections, problems = [], []
        for part in parts:
            try:
                selections.append(part._selection(spec))
            except ValueError as error:
                problems.append(f"{part.text}: {error}")
        if problems:
            raise ValueError(" ".join(problems))
        return functools.reduce(merge, selections)

    again = {"name": name, "arguments": arguments} if all(_configs(parts)) else None
    return Selector(
        f"({symbol.join(part.text for part in parts)})",
        select,
        again,
        # Index lists may be long; nobody may ever ask.
        identity=None if again else f"({symbol.join(part.identity for part in parts)})",
    )


def _identity_of(selection: Selection) -> str:
    return selections_digest({"": selection})


def _as_selection(value: Any, shape: tuple[int, ...]) -> Selection:
    if isinstance(value, Selector):
        raise ValueError(f"it returned {value.text}, a selector that must be called in its turn.")
    selection = value if isinstance(value, Selection) else Selection.from_bool(value)
    if selection.shape != shape:
        raise ValueError(f"it selects in shape {selection.shape}, the variable's shape is {shape}.")
    return selection


def _load_boolean(path: str) -> np.ndarray:
    if not os.path.isfile(path):
        raise ValueError(f"`trainable` ({path}) is no file: expected a .npy file.")
    try:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"`trainable` ({path}) is no readable .npy file: {error}") from error


def _names() -> str:
    return ", ".join(sorted(_SELECTORS))
