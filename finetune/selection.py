"""Which elements of one variable may change.

A `Selection` is a set of elements of one shape, kept in the smallest of four forms: none, all,
whole rows (along axis 0) or single elements. The form is canonical, so two selections of the same
elements are equal however they were made. True always means trainable.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

_FORMAT = "finetune-selections-1"


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

    def __init__(self, shape: Sequence[int], kind: str, indices: np.ndarray | None = None):
        """Holds `indices` as they are; use the named constructors, which check and sort."""
        object.__setattr__(self, "shape", tuple(int(n) for n in shape))
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "_indices", indices)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"`{name}` ({value!r}) cannot be set: a Selection is immutable.")

    @classmethod
    def none(cls, shape: Sequence[int]) -> Selection:
        """Returns the selection of no element of `shape`."""
        return cls(shape, "none")

    @classmethod
    def all(cls, shape: Sequence[int]) -> Selection:
        """Returns the selection of every element of `shape`."""
        return cls(shape, "all" if math.prod(shape) else "none")

    @classmethod
    def from_rows(cls, shape: Sequence[int], rows: Any) -> Selection:
        """Returns the selection of whole rows along axis 0.

        Args:
          shape: the variable's shape, one axis at least.
          rows: row numbers in [-n, n) in any order; repeats count once, negative ones count from
            the end.

        Raises:
          ValueError: for a scalar shape, or row numbers that are no integers or out of range.
        """
        if not shape:
            raise ValueError("`rows` need a variable of one axis at least, this one is a scalar.")
        rows = _checked_integers("rows", rows, shape[0], f"axis 0 of shape {tuple(shape)}")
        if len(shape) == 1:
            return cls._from_sorted_flat(shape, rows)
        if math.prod(shape) == 0 or len(rows) == 0:
            return cls.none(shape)
        if len(rows) == shape[0]:
            return cls.all(shape)
        return cls(shape, "rows", _narrow(rows, shape[0]))

    @classmethod
    def from_flat(cls, shape: Sequence[int], indices: Any) -> Selection:
        """Returns the selection of single elements by their index in flat, row-major order.

        Args:
          shape: the variable's shape.
          indices: flat indices in [-size, size) in any order; repeats count once.

        Raises:
          ValueError: for indices that are no integers or out of range.
        """
        size = math.prod(shape)
        flat = _checked_integers("indices", indices, size, f"the {size} elements of {tuple(shape)}")
        return cls._from_sorted_flat(shape, flat)

    @classmethod
    def from_bool(cls, trainable: Any) -> Selection:
        """Returns the selection of the elements at which `trainable` is True.

        Args:
          trainable: boolean array of the variable's shape.

        Raises:
          ValueError: when the array is not boolean.
        """
        trainable = np.asarray(trainable)
        if trainable.dtype != np.bool_:
            raise ValueError(
                f"`trainable` (dtype {trainable.dtype}) must be a boolean array, True where an "
                "element may change; compare it with a threshold first, for instance `array > 0`."
            )
        return cls._from_sorted_flat(trainable.shape, np.flatnonzero(trainable))

    @classmethod
    def _from_sorted_flat(cls, shape: Sequence[int], flat: np.ndarray) -> Selection:
        """Picks the canonical form of sorted, unique, valid flat indices."""
        size = math.prod(shape)
        if len(flat) == 0:
            return cls.none(shape)
        if len(flat) == size:
            return cls.all(shape)
        width = size // shape[0]
        if len(shape) > 1 and len(flat) % width == 0:
            blocks = flat.reshape(-1, width)
            starts = blocks[:, 0]
            if (starts % width == 0).all() and (blocks[:, -1] - starts == width - 1).all():
                return cls(shape, "rows", _narrow(starts // width, shape[0]))
        return cls(shape, "elements", _narrow(flat, size))

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
        return self._combined(other, np.union1d)

    def __and__(self, other: Selection) -> Selection:
        return self._combined(other, lambda a, b: np.intersect1d(a, b, assume_unique=True))

    def __sub__(self, other: Selection) -> Selection:
        return self._combined(other, lambda a, b: np.setdiff1d(a, b, assume_unique=True))

    def __invert__(self) -> Selection:
        return Selection.all(self.shape) - self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        return (
            self.shape == other.shape
            and self.kind == other.kind
            and (self._indices is None or np.array_equal(self._indices, other._indices))
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.kind, self.count))

    def __repr__(self) -> str:
        return f"Selection({self.kind}, {self.count:,} of {self.size:,})"

    def _combined(self, other: Selection, merge: Any) -> Selection:
        if self.shape != other.shape:
            raise ValueError(
                f"Selections of shapes {self.shape} and {other.shape} cannot be combined: "
                "both must be of the same variable."
            )
        # Row arithmetic keeps a selection of few rows of a huge variable small.
        whole_rows = all(s.kind != "elements" for s in (self, other)) and len(self.shape) > 1
        if whole_rows and self.size:
            return Selection.from_rows(self.shape, merge(self._row_set(), other._row_set()))
        merged = merge(self.flat_indices(), other.flat_indices())
        return Selection._from_sorted_flat(self.shape, merged)

    def _row_set(self) -> np.ndarray:
        if self.kind == "rows":
            return self._indices
        return np.arange(self.shape[0] if self.kind == "all" else 0)


def save_selections(path: str, selections: Mapping[str, Selection]) -> None:
    """Writes the selections of a run as one safetensors file, complete or not at all.

    A path that is wholly trainable or wholly frozen takes no room; rows are kept as rows.

    Args:
      path: the file to write; it is written beside its target and renamed.
      selections: {variable path: Selection}.
    """
    tensors = {
        name: selection._indices
        for name, selection in selections.items()
        if selection._indices is not None
    }
    forms = {name: [s.kind, list(s.shape)] for name, s in selections.items()}
    metadata = {"format": _FORMAT, "selections": json.dumps(forms)}
    temporary = f"{path}.{os.getpid()}.tmp"
    safetensors.numpy.save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, path)


def load_selections(path: str) -> dict[str, Selection]:
    """Returns the selections that `save_selections` wrote, by variable path.

    Args:
      path: a file written by `save_selections`.

    Raises:
      ValueError: when the file is missing, is no such file, or its indices do not fit its shapes.
    """
    if not os.path.exists(path):
        raise ValueError(f"`path` ({path}) does not exist: expected a file of selections.")
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
    forms = json.loads(metadata["selections"])
    return {name: _from_form(*form, tensors.get(name)) for name, form in forms.items()}


def selections_digest(selections: Mapping[str, Selection]) -> str:
    """Returns a sha256 (hex) that is equal exactly when all paths select the same elements."""
    digest = hashlib.sha256()
    for name, selection in sorted(selections.items()):
        digest.update(json.dumps([name, selection.kind, selection.shape]).encode())
        if selection._indices is not None:
            digest.update(selection._indices.astype("<i8").tobytes())
    return digest.hexdigest()


def _from_form(kind: str, shape: Sequence[int], indices: np.ndarray | None) -> Selection:
    if kind == "none":
        return Selection.none(shape)
    if kind == "all":
        return Selection.all(shape)
    make = Selection.from_rows if kind == "rows" else Selection.from_flat
    return make(shape, indices if indices is not None else [])


def _checked_integers(name: str, values: Any, limit: int, what: str) -> np.ndarray:
    """Returns sorted unique int64 values in [0, limit), negative ones counted from the end."""
    array = np.asarray(list(values) if isinstance(values, range) else values)
    if array.size == 0:
        return np.zeros([0], np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` (shape {array.shape}, dtype {array.dtype}) must be a list of integers."
        )
    wide = array.astype(np.int64)
    outside = wide[(wide < -limit) | (wide >= limit)]
    if len(outside):
        shown = ", ".join(str(value) for value in outside[:5])
        more = f" and {len(outside) - 5} more" if len(outside) > 5 else ""
        raise ValueError(
            f"`{name}` ({shown}{more}) out of range: {what} allow {-limit} to {limit - 1}."
        )
    return np.unique(np.where(wide < 0, wide + limit, wide))


def _index_dtype(limit: int) -> type:
    return np.int32 if limit <= np.iinfo(np.int32).max else np.int64


def _narrow(indices: np.ndarray, limit: int) -> np.ndarray:
    narrow = np.ascontiguousarray(indices, _index_dtype(limit))
    narrow.setflags(write=False)
    return narrow
