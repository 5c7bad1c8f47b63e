"""Which elements of one variable may change.

A `Selection` is a set of elements of one shape, kept in the smallest of four forms: none, all,
whole rows (along axis 0) or single elements. The form is canonical, so two selections of the same
elements are equal however they were made. True always means trainable.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

_FORMAT = "finetune-selections-1"
_KINDS = ("none", "all", "rows", "elements")


class Selection:
    """The elements of one variable that may change; immutable, and equal when the elements are.

    Build one with `none`, `all`, `from_rows`, `from_flat` or `from_bool`, combine with `|`, `&`,
    `-` and `~`. NumPy only: nothing here touches TensorFlow.

    Attributes:
      shape: the variable's shape.
      kind: 'none', 'all', 'rows' (whole rows of a variable of two or more axes) or 'elements'.

    Example:
      >>> corners = Selection.from_flat((2, 2), [0, 3])
      >>> corners.to_bool().tolist()
      [[True, False], [False, True]]
      >>> (corners | Selection.from_rows((2, 2), [0]), corners.count)
      (Selection(elements, 3 of 4), 2)
      >>> ~corners == Selection.from_bool(np.array([[False, True], [True, False]]))
      True
    """

    __slots__ = ("_indices", "kind", "shape")

    kind: str
    shape: tuple[int, ...]
    _indices: np.ndarray  # Sorted row numbers or flat indices; empty for the other two kinds.

    def __init__(self, shape: tuple[int, ...], kind: str, indices: np.ndarray | None = None):
        """Holds `indices` as they are; use the named constructors, which check and sort."""
        limit = shape[0] if kind == "rows" else math.prod(shape)
        narrow: np.ndarray = np.array([] if indices is None else indices, _index_dtype(limit))
        narrow.setflags(write=False)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "_indices", narrow)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"`{name}` ({value!r}) cannot be set: a Selection is immutable.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"`{name}` cannot be deleted: a Selection is immutable.")

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection, (self.shape, self.kind, self._indices)

    @classmethod
    def none(cls, shape: Sequence[int]) -> Selection:
        """Returns the selection of no element of `shape`."""
        return cls(_checked_shape(shape), "none")

    @classmethod
    def all(cls, shape: Sequence[int]) -> Selection:
        """Returns the selection of every element of `shape`."""
        shape = _checked_shape(shape)
        return cls(shape, "all" if math.prod(shape) else "none")

    @classmethod
    def from_rows(cls, shape: Sequence[int], rows: Any) -> Selection:
        """Returns the selection of whole rows along axis 0.

        Args:
          shape: the variable's shape, one axis at least.
          rows: integers in [-n, n) in any order, n = shape[0]; repeats count once, negative ones
            count from the end.

        Raises:
          ValueError: for a scalar shape, or row numbers that are no integers or out of range.
        """
        shape = _checked_shape(shape)
        return cls._from_sorted_rows(shape, indices_along(0, "rows", integers("rows", rows), shape))

    @classmethod
    def from_flat(cls, shape: Sequence[int], indices: Any) -> Selection:
        """Returns the selection of single elements by their index in flat, row-major order.

        Args:
          shape: the variable's shape.
          indices: integers in [-size, size) in any order; repeats count once, negative ones count
            from the end.

        Raises:
          ValueError: for indices that are no integers or out of range.
        """
        shape = _checked_shape(shape)
        size = math.prod(shape)
        whole = f"the {size:,} elements of shape {shape}"
        flat = _sorted_within(size, whole, "indices", integers("indices", indices))
        return cls._from_sorted_flat(shape, flat)

    @classmethod
    def from_bool(cls, trainable: Any) -> Selection:
        """Returns the selection of the elements at which `trainable` is True.

        Args:
          trainable: boolean array of the variable's shape.

        Raises:
          ValueError: when the array is not boolean.
        """
        array = _as_array("trainable", trainable)
        if array.dtype != np.bool_:
            raise ValueError(
                f"`trainable` (dtype {array.dtype}) must be a boolean array, True where an "
                "element may change; compare it with a threshold first, for instance `array > 0`."
            )
        return cls._from_sorted_flat(array.shape, np.flatnonzero(array))

    @classmethod
    def _from_sorted_rows(cls, shape: tuple[int, ...], rows: np.ndarray) -> Selection:
        """Picks the canonical form of sorted, unique, valid row numbers."""
        if len(shape) == 1:
            return cls._from_sorted_flat(shape, rows)
        if math.prod(shape) == 0 or len(rows) == 0:
            return cls(shape, "none")
        return cls(shape, "all") if len(rows) == shape[0] else cls(shape, "rows", rows)

    @classmethod
    def _from_sorted_flat(cls, shape: tuple[int, ...], flat: np.ndarray) -> Selection:
        """Picks the canonical form of sorted, unique, valid flat indices."""
        if len(flat) == 0:
            return cls(shape, "none")
        size = math.prod(shape)
        if len(flat) == size:
            return cls(shape, "all")
        width = size // shape[0]
        if len(shape) > 1 and len(flat) % width == 0:
            blocks = flat.reshape(-1, width)
            starts = blocks[:, 0]
            if (starts % width == 0).all() and (blocks[:, -1] - starts == width - 1).all():
                return cls(shape, "rows", starts // width)
        return cls(shape, "elements", flat)

    @property
    def size(self) -> int:
        """How many elements the variable has."""
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """How many elements may change."""
        if self.kind == "none":
            return 0
        if self.kind == "all":
            return self.size
        per_index = self.size // self.shape[0] if self.kind == "rows" else 1
        return len(self._indices) * per_index

    @property
    def density(self) -> float:
        """The share of elements that may change, 0 for an empty variable."""
        return self.count / self.size if self.size else 0.0

    @property
    def rows(self) -> np.ndarray | None:
        """Sorted row numbers when whole rows are selected (kind 'rows'), else None."""
        return self._indices if self.kind == "rows" else None

    def flat_indices(self) -> np.ndarray:
        """Returns the sorted flat indices of the trainable elements, int32 where they fit."""
        if self.kind == "elements":
            return self._indices
        dtype = _index_dtype(self.size)
        if self.kind == "none":
            return np.zeros([0], dtype)
        if self.kind == "all":
            return np.arange(self.size, dtype=dtype)
        width = self.size // self.shape[0]
        starts = self._indices.astype(dtype)[:, None] * dtype(width)
        return (starts + np.arange(width, dtype=dtype)).reshape(-1)

    def to_bool(self) -> np.ndarray:
        """Returns a boolean array of the variable's shape, True where an element may change."""
        trainable = np.full(self.shape, self.kind == "all")
        if self.kind == "rows":
            trainable[self._indices] = True
        elif self.kind == "elements":
            trainable.reshape(-1)[self._indices] = True
        return trainable

    def __or__(self, other: Selection) -> Selection:
        return self._combined(other, np.logical_or)

    def __and__(self, other: Selection) -> Selection:
        return self._combined(other, np.logical_and)

    def __sub__(self, other: Selection) -> Selection:
        # Of booleans, a > b is a and not b.
        return self._combined(other, np.greater)

    def __invert__(self) -> Selection:
        return Selection.all(self.shape) - self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        return (
            self.shape == other.shape
            and self.kind == other.kind
            and np.array_equal(self._indices, other._indices)
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.kind, self.count))

    def __repr__(self) -> str:
        return f"Selection({self.kind}, {self.count:,} of {self.size:,})"

    def _combined(self, other: Selection, keep: Callable[..., np.ndarray]) -> Selection:
        if not isinstance(other, Selection):
            return NotImplemented
        if self.shape != other.shape:
            raise ValueError(
                f"Selections of shapes {self.shape} and {other.shape} cannot be combined: "
                "both must be of the same variable."
            )
        # Row arithmetic keeps a selection of few rows of a huge variable small.
        whole_rows = all(s.kind != "elements" for s in (self, other)) and len(self.shape) > 1
        if whole_rows and self.size:
            rows = _merged(self._row_set(), other._row_set(), self.shape[0], keep)
            return Selection._from_sorted_rows(self.shape, rows)
        flat = _merged(self.flat_indices(), other.flat_indices(), self.size, keep)
        return Selection._from_sorted_flat(self.shape, flat)

    def _row_set(self) -> np.ndarray:
        if self.kind == "rows":
            return self._indices
        return np.arange(self.shape[0] if self.kind == "all" else 0)


def save_selections(path: str | os.PathLike[str], selections: Mapping[str, Selection]) -> None:
    """Writes the selections of a run as one safetensors file, complete or not at all.

    A path that is wholly trainable or wholly frozen takes no room; rows are kept as rows.

    Args:
      path: the file to write; it is written beside its target and renamed. Its folder must exist.
      selections: {variable path: Selection}.

    Raises:
      ValueError: when the folder does not exist.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"`path` ({path}): the folder {folder} does not exist; make it first.")
    tensors = {name: s._indices for name, s in selections.items() if len(s._indices)}
    forms = {name: [s.kind, list(s.shape)] for name, s in selections.items()}
    metadata = {"format": _FORMAT, "selections": json.dumps(forms)}
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    safetensors.numpy.save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, path)


def load_selections(path: str | os.PathLike[str]) -> dict[str, Selection]:
    """Returns the selections that `save_selections` wrote, by variable path, in the same order.

    Args:
      path: a file written by `save_selections`.

    Raises:
      ValueError: when the file is missing, is no such file, or its indices do not fit its shapes.
    """
    if not os.path.isfile(path):
        raise ValueError(f"`path` ({path}) is no file: expected one that `save_selections` wrote.")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"`path` ({path}) is no readable safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"`path` ({path}) holds format {metadata.get('format')!r}, expected {_FORMAT!r}: "
            "it was not written by `save_selections`."
        )
    selections = {}
    for name, (kind, shape) in json.loads(metadata["selections"]).items():
        try:
            selections[name] = _from_form(kind, shape, tensors.get(name))
        except ValueError as error:
            raise ValueError(f"`path` ({path}) is damaged at `{name}`: {error}") from error
    return selections


def selections_digest(selections: Mapping[str, Selection]) -> str:
    """Returns a sha256 (hex) that is equal exactly when all paths select the same elements."""
    digest = hashlib.sha256()
    for name, selection in sorted(selections.items()):
        head = [name, selection.kind, selection.shape, selection.count]
        digest.update(json.dumps(head).encode())
        digest.update(selection._indices.astype("<i8").tobytes())
    return digest.hexdigest()


def integers(name: str, values: Any) -> np.ndarray:
    """Returns what a user gave as numbers of rows or elements, as an array of its own.

    Args:
      name: the argument's name, for messages.
      values: integers, nested as they may be: an array, a tensor, a list, a range, a set, an
        iterator (which is used up).

    Returns:
      An array of int64, or of Python integers where those do not fit.

    Raises:
      ValueError: when they are no integers; booleans are none.
    """
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step)
    if isinstance(values, Iterable) and not isinstance(values, (Sequence, Mapping)):
        values = values if hasattr(values, "__array__") else list(values)
    array = _as_array(name, values)
    if array.ndim == 0:
        raise ValueError(f"`{name}` ({values!r}) must be a list of integers; write [3] for one.")
    if array.size == 0:
        return np.zeros(array.shape, np.int64)
    if array.dtype == np.bool_:
        raise ValueError(
            f"`{name}` ({_shown(array)}) must be integers, not True and False: "
            "boolean() and Selection.from_bool take those."
        )
    whole = array.dtype.kind in "iu" or all(type(value) is int for value in array.flat)
    if not whole:
        raise ValueError(
            f"`{name}` ({_shown(array)}) must be a list of integers, its dtype is {array.dtype}."
        )
    least, most = (int(end) for end in (array.min(), array.max()))
    fits = np.iinfo(np.int64).min <= least and most <= np.iinfo(np.int64).max
    return array.astype(np.int64 if fits else object)


def indices_along(axis: int, name: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns sorted unique numbers along one axis of `shape`, negative ones counted from the end.

    Args:
      axis: the axis, negative ones counted from the end.
      name: the argument's name, for messages.
      values: what `integers` returned.
      shape: the variable's shape.

    Raises:
      ValueError: for a scalar shape, or values that are out of range or nested.
    """
    if not shape:
        raise ValueError(
            f"`{name}` ({_shown(values)}) need a variable of one axis at least, this one is a "
            "scalar: everything() or nothing()."
        )
    limit, number = shape[axis], axis % len(shape)
    return _sorted_within(limit, f"axis {number} of shape {shape}", name, values)


def _sorted_within(limit: int, what: str, name: str, values: np.ndarray) -> np.ndarray:
    if values.ndim != 1 and values.size:
        raise ValueError(
            f"`{name}` ({_shown(values)}) must be a flat list of integers, its shape is "
            f"{values.shape}."
        )
    outside = values[(values < -limit) | (values >= limit)]
    if len(outside):
        raise ValueError(
            f"`{name}` ({_shown(outside)}) out of range: {what} allow "
            + (f"{-limit} to {limit - 1}." if limit else "none.")
        )
    fitting = values.reshape(-1).astype(np.int64)
    return _sorted_unique(np.where(fitting < 0, fitting + limit, fitting))


def _sorted_unique(values: np.ndarray) -> np.ndarray:
    # np.unique hashes, which takes seconds for some millions of indices.
    if (values[1:] <= values[:-1]).any():
        values = np.sort(values)
        values = values[np.append(True, values[1:] > values[:-1])]
    return values


def _merged(
    a: np.ndarray, b: np.ndarray, limit: int, keep: Callable[..., np.ndarray]
) -> np.ndarray:
    """Returns the sorted numbers below `limit` for which `keep(in a, in b)` holds."""
    if (len(a) + len(b)) * 8 >= limit:
        return np.flatnonzero(keep(*(_mask(indices, limit) for indices in (a, b))))
    # A boolean of the whole variable would outweigh two short lists.
    either = _sorted_unique(np.concatenate([a, b]))
    return either[keep(*(_contains(indices, either) for indices in (a, b)))]


def _mask(indices: np.ndarray, limit: int) -> np.ndarray:
    mask: np.ndarray = np.zeros(limit, np.bool_)
    mask[indices] = True
    return mask


def _contains(indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Tells for each value whether it is among the sorted indices."""
    if len(indices) == 0:
        return np.zeros(len(values), np.bool_)
    places = np.searchsorted(indices, values)
    return indices[np.minimum(places, len(indices) - 1)] == values


def _from_form(kind: str, shape: Sequence[int], indices: np.ndarray | None) -> Selection:
    if kind not in _KINDS:
        raise ValueError(f"`kind` ({kind!r}) must be one of {', '.join(_KINDS)}.")
    if kind in ("none", "all"):
        return Selection.none(shape) if kind == "none" else Selection.all(shape)
    if indices is None:
        raise ValueError(f"the indices of its {kind} are missing.")
    make = Selection.from_rows if kind == "rows" else Selection.from_flat
    return make(shape, indices)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = tuple(operator.index(length) for length in shape)
    except TypeError as error:
        raise ValueError(f"`shape` ({shape}) must be a sequence of whole numbers.") from error
    if any(length < 0 for length in lengths):
        raise ValueError(f"`shape` ({shape}) must hold no negative lengths.")
    return lengths


def _as_array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"`{name}` ({values!r}) is no array: {error}") from error


def _shown(values: np.ndarray) -> str:
    """Returns the first few values, as text that stays short."""
    rows = values[:5].tolist() if values.ndim else [values.item()]
    more = f" and {len(values) - 5} more" if values.ndim and len(values) > 5 else ""
    return ", ".join(map(str, rows)) + more


def _index_dtype(limit: int) -> type:
    return np.int32 if limit <= np.iinfo(np.int32).max else np.int64
