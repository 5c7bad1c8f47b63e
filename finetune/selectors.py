"""What users write to say which elements of a variable may change.

A selector is a function from one variable (its path, shape, dtype and base value) to a
`Selection`. Selectors are evaluated once, on the base, before training starts; they combine with
`|`, `&`, `-` and `~`. Any function of one argument that returns a `Selection` or a boolean array
is a selector too. True always means trainable.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from finetune.paths import nearest
from finetune.selection import Selection, indices_along, integers, selections_digest


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
    return _by_indices("elements", indices, _select_elements)


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
    index = _parse_index(text)
    return _named(
        "slices", lambda spec: _select_slices(text, index, spec.shape), {"text": text}, repr(text)
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
    return _by_indices("rows", indices, _select_rows)


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
    return _by_indices("columns", indices, _select_columns)


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
    budget = _budget(share, count)
    return _named(
        "largest", lambda spec: _by_magnitude(spec, budget, largest=True), budget.arguments
    )


def smallest(share: float | None = None, count: int | None = None) -> Selector:
    """Selects the elements of smallest magnitude in the base; see `largest`."""
    budget = _budget(share, count)
    return _named(
        "smallest", lambda spec: _by_magnitude(spec, budget, largest=False), budget.arguments
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
    budget = _budget(share, count)
    seed = _whole("seed", seed)
    return _named(
        "random",
        lambda spec: _at_random(spec, budget, seed),
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


@dataclasses.dataclass(frozen=True)
class _Budget:
    """How many elements of a variable: a share of it, or a number."""

    share: float | None
    count: int | None

    @property
    def arguments(self) -> dict[str, float | int]:
        if self.count is not None:
            return {"count": self.count}
        assert self.share is not None
        return {"share": self.share}

    def of(self, size: int) -> int:
        if self.count is None:
            assert self.share is not None
            return math.floor(self.share * size + 0.5)
        if self.count > size:
            raise ValueError(f"`count` ({self.count}) exceeds the variable's {size:,} elements.")
        return self.count


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


def _select_elements(indices: np.ndarray, shape: tuple[int, ...]) -> Selection:
    if len(indices) == 0:
        return Selection.none(shape)
    if len(shape) == 1 and indices.ndim == 1:
        indices = indices[:, np.newaxis]
    if indices.ndim != 2 or indices.shape[1] != len(shape):
        raise ValueError(
            f"`indices` (of shape {indices.shape}) must be a list of tuples with {len(shape)} "
            f"integers each, one for every axis of shape {shape}."
        )
    if not shape:
        return Selection.all(shape)
    limits = np.asarray(shape)
    outside = ((indices < -limits) | (indices >= limits)).any(axis=1)
    if outside.any():
        shown = ", ".join(str(tuple(index)) for index in indices[outside][:5].tolist())
        more = f" and {outside.sum() - 5} more" if outside.sum() > 5 else ""
        raise ValueError(
            f"`indices` ({shown}{more}) out of range: each must lie in shape {shape}, negative "
            "ones counted from the end."
        )
    wrapped = np.where(indices < 0, indices + limits, indices).astype(np.int64)
    return Selection.from_flat(shape, np.ravel_multi_index(tuple(wrapped.T), shape))


def _select_rows(indices: np.ndarray, shape: tuple[int, ...]) -> Selection:
    return Selection.from_rows(shape, indices_along(0, "indices", indices, shape))


def _select_columns(indices: np.ndarray, shape: tuple[int, ...]) -> Selection:
    trainable: np.ndarray = np.zeros(shape, np.bool_)
    trainable[..., indices_along(-1, "indices", indices, shape)] = True
    return Selection.from_bool(trainable)


def _parse_index(text: str) -> tuple[Any, ...]:
    """Returns the index that `text` spells, without evaluating code."""
    try:
        if not isinstance(text, str):
            raise ValueError(f"it is a {type(text).__name__}")
        tree = ast.parse(f"x{text.strip()}", mode="eval").body
        if not isinstance(tree, ast.Subscript) or ast.unparse(tree.value) != "x":
            raise ValueError("it is not one pair of brackets")
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        index = tuple(_index_part(node) for node in parts)
        if sum(p is Ellipsis for p in index) > 1 or sum(isinstance(p, list) for p in index) > 1:
            raise ValueError("it holds several of what it may hold once")
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"`text` ({text!r}) must be a NumPy-style index of integers, slices, at most one "
            f'ellipsis and at most one list of integers, for instance "[:, 5:8]"; {error}.'
        ) from error
    return index


def _index_part(node: ast.expr) -> Any:
    if isinstance(node, ast.Slice):
        ends = (node.lower, node.upper, node.step)
        part = slice(*(None if end is None else _integer(end) for end in ends))
        if part.step == 0:
            raise ValueError("a step of 0 leads nowhere")
        return part
    if isinstance(node, ast.List):
        return [_integer(item) for item in node.elts]
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return Ellipsis
    return _integer(node)


def _integer(node: ast.expr) -> int:
    sign, digits = 1, node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, digits = -1, node.operand
    if isinstance(digits, ast.Constant) and type(digits.value) is int:
        return sign * digits.value
    raise ValueError(f"{ast.unparse(node)!r} is no integer")


def _select_slices(text: str, index: tuple[Any, ...], shape: tuple[int, ...]) -> Selection:
    trainable: np.ndarray = np.zeros(shape, np.bool_)
    try:
        trainable[index] = True
    except IndexError as error:
        raise ValueError(f"`text` ({text!r}) does not fit shape {shape}: {error}.") from error
    if not trainable.any():
        raise ValueError(
            f"`text` ({text!r}) selects no element of shape {shape}; write nothing() to freeze "
            "all of it."
        )
    return Selection.from_bool(trainable)


def _load_boolean(path: str) -> np.ndarray:
    if not os.path.isfile(path):
        raise ValueError(f"`trainable` ({path}) is no file: expected a .npy file.")
    try:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"`trainable` ({path}) is no readable .npy file: {error}") from error


def _budget(share: float | None, count: int | None) -> _Budget:
    if (share is None) == (count is None):
        raise ValueError(
            f"`share` ({share!r}) and `count` ({count!r}): give exactly one of the two, a share of "
            "each variable in [0, 1] or a number of elements."
        )
    if share is None:
        count = _whole("count", count)
        if count < 0:
            raise ValueError(f"`count` ({count}) must be a number of elements, 0 or more.")
        return _Budget(None, count)
    number = isinstance(share, numbers.Real) and not isinstance(share, bool)
    if not number or not 0 <= share <= 1:
        raise ValueError(f"`share` ({share!r}) must be a number in [0, 1]: 0.2 is 20 %.")
    return _Budget(float(share), None)


def _whole(name: str, value: Any) -> int:
    """Returns an integer as Python's own, which goes into JSON; 20.0 is one too."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return int(value)
    raise ValueError(f"`{name}` ({value!r}) must be a whole number.")


def _by_magnitude(spec: VariableSpec, budget: _Budget, *, largest: bool) -> Selection:
    values = spec.read()
    if values.dtype not in (np.float32, np.float64, np.complex64, np.complex128):
        # float64 holds the narrow floats exactly, so no tie is made or broken.
        values = values.astype(np.float64)
    scores = np.abs(values).reshape(-1)
    unordered = np.count_nonzero(np.isnan(scores))
    if unordered:
        raise ValueError(f"{unordered:,} elements of the base are NaN, which has no magnitude.")
    if largest:
        np.negative(scores, out=scores)
    return _lowest(spec.shape, scores, budget.of(scores.size))


def _at_random(spec: VariableSpec, budget: _Budget, seed: int) -> Selection:
    digest = hashlib.sha256(json.dumps([seed, spec.path]).encode()).digest()
    # Raw bits, not Generator.choice: NumPy keeps the bit streams stable between releases only.
    generator = np.random.PCG64(int.from_bytes(digest[:16], "big"))
    size = math.prod(spec.shape)
    return _lowest(spec.shape, generator.random_raw(size), budget.of(size))


def _lowest(shape: tuple[int, ...], scores: np.ndarray, budget: int) -> Selection:
    """Selects the `budget` elements of lowest score, ties to the lower flat index."""
    if budget in (0, scores.size):
        return Selection.none(shape) if budget == 0 else Selection.all(shape)
    threshold = np.partition(scores, budget - 1)[budget - 1]
    lowest = scores < threshold
    ties = np.flatnonzero(scores == threshold)
    lowest[ties[: budget - np.count_nonzero(lowest)]] = True
    return Selection.from_bool(lowest.reshape(shape))


def _names() -> str:
    return ", ".join(sorted(_SELECTORS))
