"""What users write to say which elements of a variable may change.

A selector is a function from one variable (its path, shape, dtype and base value) to a
`Selection`. Selectors are evaluated once, on the base, before training starts; they combine with
`|`, `&`, `-` and `~`. Any function of one argument that returns a `Selection` or a boolean array
is a selector too. True always means trainable.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from finetune.selection import Selection


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
      text: how a user would write it, for tables and messages.
      config: a JSON-able description from which `selector_from_config` makes it again, or None
        when it holds arrays or functions of the user.

    Example:
      >>> spec = VariableSpec("w", (2, 3), "float32", lambda: np.arange(6.).reshape(2, 3))
      >>> selector = columns([0]) | nonzeros()
      >>> selector(spec).to_bool().tolist()
      [[True, True, True], [True, True, True]]
      >>> (selector - rows([1])).text
      '((columns([0]) | nonzeros()) - rows([1]))'
    """

    __slots__ = ("_select", "config", "moves_state", "text")

    def __init__(
        self,
        text: str,
        select: Callable[[VariableSpec], Any],
        config: Mapping[str, Any] | None = None,
        moves_state: bool = False,
    ):
        """Wraps `select`; `moves_state` marks `model_state`, which only state accepts."""
        self.text = text
        self.config = config
        self.moves_state = moves_state
        self._select = select

    def __call__(self, spec: VariableSpec) -> Selection:
        """Returns the selection for one variable.

        Raises:
          ValueError: when the selector does not fit the variable; the message names its path.
        """
        try:
            return _as_selection(self._select(spec), spec.shape)
        except ValueError as error:
            raise ValueError(f"{self.text} does not fit `{spec.path}`: {error}") from error

    def __or__(self, other: SelectorLike) -> Selector:
        return union([self, other])

    def __and__(self, other: SelectorLike) -> Selector:
        return intersection([self, other])

    def __sub__(self, other: SelectorLike) -> Selector:
        return difference(self, other)

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

    Example:
      >>> spec = VariableSpec("x", (2, 2), "float32", lambda: np.zeros([2, 2]))
      >>> elements([[0, 0], [1, 1]])(spec).flat_indices().tolist()
      [0, 3]
    """
    return _named(
        "elements", lambda spec: _select_elements(indices, spec.shape), indices=_plain(indices)
    )


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
    return _named("slices", lambda spec: _select_slices(text, index, spec.shape), text=text)


def rows(indices: Any) -> Selector:
    """Selects whole rows: everything at the given numbers of axis 0, as in an embedding.

    Args:
      indices: row numbers, a list or a range; negative ones count from the end.
    """
    return _named(
        "rows", lambda spec: Selection.from_rows(spec.shape, indices), indices=_plain(indices)
    )


def columns(indices: Any) -> Selector:
    """Selects whole columns: everything at the given numbers of the last axis, as in classes.

    Args:
      indices: column numbers, a list or a range; negative ones count from the end.
    """
    return _named(
        "columns", lambda spec: _select_columns(indices, spec.shape), indices=_plain(indices)
    )


def boolean(trainable: Any) -> Selector:
    """Selects the elements at which a boolean array is True.

    Args:
      trainable: an array of the variable's shape, or the path of a `.npy` file that holds one.
    """
    if isinstance(trainable, (str, os.PathLike)):
        path = os.fspath(trainable)
        return _named("boolean", lambda spec: _load_boolean(path), trainable=path)
    array = np.asarray(trainable)
    return Selector(f"boolean(array of shape {array.shape})", lambda spec: array)


def zeros() -> Selector:
    """Selects the elements that are zero in the base (either sign)."""
    return _named("zeros", lambda spec: spec.read() == 0)


def nonzeros() -> Selector:
    """Selects the elements that are not zero in the base: a pruned network stays pruned."""
    return _named("nonzeros", lambda spec: spec.read() != 0)


def largest(share: float | None = None, count: int | None = None) -> Selector:
    """Selects the elements of largest magnitude in the base, each variable by itself.

    Ties go to the lower flat index, so every machine selects the same elements.

    Args:
      share: how much of the variable, in [0, 1]; rounded to the nearest number of elements.
      count: or how many elements exactly.

    Raises:
      ValueError: unless exactly one of `share` and `count` is given, in range.
    """
    _check_budget(share, count)
    return _named(
        "largest", lambda spec: _by_magnitude(spec, share, count, -1), share=share, count=count
    )


def smallest(share: float | None = None, count: int | None = None) -> Selector:
    """Selects the elements of smallest magnitude in the base; see `largest`."""
    _check_budget(share, count)
    return _named(
        "smallest", lambda spec: _by_magnitude(spec, share, count, 1), share=share, count=count
    )


def random(share: float | None = None, count: int | None = None, seed: int = 0) -> Selector:
    """Selects elements at random, the same ones on every machine.

    The choice depends on `seed` and the variable's path alone, not on the order of variables.

    Args:
      share: how much of the variable, in [0, 1]; rounded to the nearest number of elements.
      count: or how many elements exactly.
      seed: another seed, another choice.

    Raises:
      ValueError: unless exactly one of `share` and `count` is given, in range.
    """
    _check_budget(share, count)
    return _named(
        "random", lambda spec: _at_random(spec, share, count, seed), share=share, count=count,
        seed=seed,
    )  # fmt: skip


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
    return _combined("union", " | ", selectors, lambda parts: _reduce(parts, Selection.__or__))


def intersection(selectors: Sequence[SelectorLike]) -> Selector:
    """Selects what all of the selectors select: `a & b`."""
    return _combined(
        "intersection", " & ", selectors, lambda parts: _reduce(parts, Selection.__and__)
    )


def difference(selector: SelectorLike, without: SelectorLike) -> Selector:
    """Selects what `selector` selects and `without` does not: `a - b`."""
    return _combined("difference", " - ", [selector, without], lambda parts: parts[0] - parts[1])


def complement(selector: SelectorLike) -> Selector:
    """Selects what `selector` does not: `~a`."""
    return _combined("complement", None, [selector], lambda parts: ~parts[0])


def as_selector(value: SelectorLike) -> Selector:
    """Returns `value` as a `Selector`: a selector, a selection, a boolean array or a function.

    Raises:
      ValueError: for anything else, such as a selector that was not called.
    """
    if isinstance(value, Selector):
        return value
    if isinstance(value, Selection):
        return Selector(repr(value), lambda spec: value)
    if isinstance(value, np.ndarray):
        return boolean(value)
    if value in _SELECTORS.values():
        name = value.__name__
        raise ValueError(f"`{name}` must be called: write {name}(...), in gin @{name}().")
    if callable(value):
        return Selector(getattr(value, "__name__", repr(value)), value)
    raise ValueError(
        f"`selector` ({value!r}) must be a selector such as rows([0, 1]), a Selection, a boolean "
        f"array, or a function of one variable; selectors are: {', '.join(sorted(_SELECTORS))}."
    )


def selector_from_config(config: Mapping[str, Any]) -> Selector:
    """Returns the selector that `Selector.config` describes."""
    arguments = dict(config["arguments"])
    for name, value in arguments.items():
        if name in ("selector", "without"):
            arguments[name] = selector_from_config(value)
        elif name == "selectors":
            arguments[name] = [selector_from_config(part) for part in value]
        elif isinstance(value, Mapping):
            arguments[name] = range(*value["range"])
    return _SELECTORS[config["name"]](**arguments)


_PUBLIC = (
    everything, nothing, elements, slices, rows, columns, boolean, zeros, nonzeros, largest,
    smallest, random, model_state, union, intersection, difference, complement,
)  # fmt: skip

_SELECTORS: dict[str, Callable[..., Selector]] = {make.__name__: make for make in _PUBLIC}


def _named(name: str, select: Callable[[VariableSpec], Any], **arguments: Any) -> Selector:
    given = {key: value for key, value in arguments.items() if value is not None}
    shown = [f"{value!r}" if key in ("indices", "text") else f"{key}={value!r}"
             for key, value in given.items()]  # fmt: skip
    shown = [text if len(text) <= 40 else text[:36] + " ..." + text[-1] for text in shown]
    plain = {
        key: {"range": [value.start, value.stop, value.step]} if isinstance(value, range) else value
        for key, value in given.items()
    }
    return Selector(f"{name}({', '.join(shown)})", select, {"name": name, "arguments": plain})


def _combined(
    name: str,
    symbol: str | None,
    selectors: Sequence[SelectorLike],
    merge: Callable[[list[Selection]], Selection],
) -> Selector:
    parts = [as_selector(selector) for selector in selectors]
    if not parts:
        raise ValueError(f"`selectors` ([]) of {name} must hold at least one selector.")
    for part in parts:
        if part.moves_state:
            raise ValueError("`model_state()` stands alone in a rule; it cannot be combined.")
    text = f"~{parts[0].text}" if symbol is None else f"({symbol.join(p.text for p in parts)})"
    config = None
    if all(part.config is not None for part in parts):
        configs = [part.config for part in parts]
        config = {"name": name, "arguments": {
            "complement": lambda: {"selector": configs[0]},
            "difference": lambda: {"selector": configs[0], "without": configs[1]},
        }.get(name, lambda: {"selectors": configs})()}  # fmt: skip
    return Selector(text, lambda spec: merge([part(spec) for part in parts]), config)


def _reduce(parts: Sequence[Selection], merge: Callable[..., Selection]) -> Selection:
    total = parts[0]
    for part in parts[1:]:
        total = merge(total, part)
    return total


def _plain(indices: Any) -> Any:
    """Returns indices as a range or nested lists, which print well and go into JSON."""
    return indices if isinstance(indices, range) else np.asarray(indices).tolist()


def _as_selection(value: Any, shape: tuple[int, ...]) -> Selection:
    selection = value if isinstance(value, Selection) else Selection.from_bool(value)
    if selection.shape != tuple(shape):
        raise ValueError(
            f"it selects in shape {selection.shape}, but the variable's shape is {tuple(shape)}."
        )
    return selection


def _select_elements(indices: Any, shape: tuple[int, ...]) -> Selection:
    array = np.asarray(indices)
    if array.size == 0:
        return Selection.none(shape)
    if len(shape) == 1 and array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] != len(shape) or array.dtype.kind not in "iu":
        raise ValueError(
            f"`indices` (shape {array.shape}, dtype {array.dtype}) must be a list of integer "
            f"tuples with {len(shape)} numbers each, one for every axis of shape {shape}."
        )
    limits = np.asarray(shape)
    outside = ((array < -limits) | (array >= limits)).any(axis=1)
    if outside.any():
        shown = ", ".join(str(tuple(index)) for index in array[outside][:5].tolist())
        more = f" and {outside.sum() - 5} more" if outside.sum() > 5 else ""
        raise ValueError(f"`indices` ({shown}{more}) out of range for shape {shape}.")
    wrapped = np.where(array < 0, array + limits, array)
    return Selection.from_flat(shape, np.ravel_multi_index(tuple(wrapped.T), shape))


def _select_columns(indices: Any, shape: tuple[int, ...]) -> Selection:
    if not shape:
        raise ValueError("`columns` need a variable of one axis at least, this one is a scalar.")
    chosen = Selection.from_flat(shape[-1:], indices)
    return Selection.from_bool(np.broadcast_to(chosen.to_bool(), shape))


def _parse_index(text: str) -> tuple[Any, ...]:
    """Returns the index that `text` spells, without evaluating code."""
    wrong = ValueError(
        f"`text` ({text!r}) must be a NumPy-style index of integers, slices, at most one ellipsis "
        'and at most one list of integers, for instance "[:, 5:8]".'
    )
    try:
        tree = ast.parse(f"x{text.strip()}", mode="eval").body
    except (SyntaxError, AttributeError) as error:
        raise wrong from error
    if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
        raise wrong
    if tree.value.id != "x":
        raise wrong
    parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]

    def integer(node: ast.expr | None) -> int | None:
        if node is None:
            return None
        value = ast.literal_eval(node)
        if type(value) is not int:
            raise wrong
        return value

    def part(node: ast.expr) -> Any:
        if isinstance(node, ast.Slice):
            return slice(integer(node.lower), integer(node.upper), integer(node.step))
        if isinstance(node, ast.List):
            return [integer(item) for item in node.elts]
        if isinstance(node, ast.Constant) and node.value is Ellipsis:
            return Ellipsis
        return integer(node)

    try:
        index = tuple(part(node) for node in parts)
    except ValueError as error:
        raise wrong from error
    if sum(p is Ellipsis for p in index) > 1 or sum(isinstance(p, list) for p in index) > 1:
        raise wrong
    return index


def _select_slices(text: str, index: tuple[Any, ...], shape: tuple[int, ...]) -> Selection:
    trainable = np.zeros(shape, np.bool_)
    try:
        trainable[index] = True
    except IndexError as error:
        raise ValueError(f"`text` ({text!r}) with shape {shape}: {error}.") from error
    if not trainable.any():
        raise ValueError(f"`text` ({text!r}) selects no element of shape {shape}.")
    return Selection.from_bool(trainable)


def _load_boolean(path: str) -> np.ndarray:
    if not os.path.exists(path):
        raise ValueError(f"`trainable` ({path}) does not exist: expected a .npy file.")
    return np.load(path, allow_pickle=False)


def _check_budget(share: float | None, count: int | None) -> None:
    if (share is None) == (count is None):
        raise ValueError(
            f"`share` ({share}) and `count` ({count}): give exactly one of the two, a share of "
            "each variable in [0, 1] or a number of elements."
        )
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"`share` ({share}) must lie in [0, 1]: 0.2 is 20 %.")
    if count is not None and (count < 0 or int(count) != count):
        raise ValueError(f"`count` ({count}) must be a whole number of elements, 0 or more.")


def _budget(share: float | None, count: int | None, size: int) -> int:
    if share is not None:
        return math.floor(share * size + 0.5)
    assert count is not None
    if count > size:
        raise ValueError(f"`count` ({count}) exceeds the variable's {size} elements.")
    return int(count)


def _by_magnitude(
    spec: VariableSpec, share: float | None, count: int | None, sign: int
) -> Selection:
    # float64 holds every float16, bfloat16 and float32 exactly, so no tie is made or broken.
    scores = sign * np.abs(spec.read().astype(np.float64)).reshape(-1)
    if np.isnan(scores).any():
        raise ValueError(f"{np.isnan(scores).sum()} elements of the base are NaN: no order exists.")
    return _lowest(spec.shape, scores, _budget(share, count, scores.size))


def _at_random(spec: VariableSpec, share: float | None, count: int | None, seed: int) -> Selection:
    digest = hashlib.sha256(json.dumps([int(seed), spec.path]).encode()).digest()
    # Raw bits, not Generator.choice: NumPy keeps the bit streams stable between releases only.
    generator = np.random.PCG64(int.from_bytes(digest[:16], "big"))
    size = math.prod(spec.shape)
    return _lowest(spec.shape, generator.random_raw(size), _budget(share, count, size))


def _lowest(shape: tuple[int, ...], scores: np.ndarray, budget: int) -> Selection:
    """Selects the `budget` elements of lowest score, ties to the lower flat index."""
    if budget in (0, scores.size):
        return Selection.none(shape) if budget == 0 else Selection.all(shape)
    threshold = np.partition(scores, budget - 1)[budget - 1]
    below = np.flatnonzero(scores < threshold)
    ties = np.flatnonzero(scores == threshold)[: budget - len(below)]
    return Selection.from_flat(shape, np.concatenate([below, ties]))


def selector_names() -> Iterable[str]:
    """Returns the names of all selectors of this module, sorted."""
    return sorted(_SELECTORS)
