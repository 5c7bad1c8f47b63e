"""How many elements a selector may take, and which ones by rank: the same on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import numbers
from typing import Any

import numpy as np

from finetune.selection import Selection


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many elements of a variable: a share of it, or a number; `budget_of` makes one."""

    share: float | None
    count: int | None

    @property
    def arguments(self) -> dict[str, float | int]:
        """The keyword argument that was given."""
        if self.count is not None:
            return {"count": self.count}
        assert self.share is not None
        return {"share": self.share}

    def of(self, size: int) -> int:
        """Returns how many of `size` elements these are; a share is rounded, a half upwards.

        Raises:
          ValueError: when the count exceeds the size.
        """
        if self.count is None:
            assert self.share is not None
            return math.floor(self.share * size + 0.5)
        if self.count > size:
            raise ValueError(f"`count` ({self.count}) exceeds the variable's {size:,} elements.")
        return self.count


def budget_of(share: float | None, count: int | None) -> Budget:
    """Returns the budget that exactly one of the two arguments gives.

    Args:
      share: of a variable, in [0, 1].
      count: of elements, 0 or more.

    Raises:
      ValueError: when both or none are given, or one is out of range.

    Example:
      >>> budget_of(0.5, None).of(5)
      3
    """
    if (share is None) == (count is None):
        raise ValueError(
            f"`share` ({share!r}) and `count` ({count!r}): give exactly one of the two, a share of "
            "each variable in [0, 1] or a number of elements."
        )
    if share is None:
        count = whole("count", count)
        if count < 0:
            raise ValueError(f"`count` ({count}) must be a number of elements, 0 or more.")
        return Budget(None, count)
    number = isinstance(share, numbers.Real) and not isinstance(share, bool)
    if not number or not 0 <= share <= 1:
        raise ValueError(f"`share` ({share!r}) must be a number in [0, 1]: 0.2 is 20 %.")
    return Budget(float(share), None)


def whole(name: str, value: Any) -> int:
    """Returns an integer as Python's own, which goes into JSON; 20.0 is one too."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return int(value)
    raise ValueError(f"`{name}` ({value!r}) must be a whole number.")


def by_magnitude(values: np.ndarray, budget: Budget, *, largest: bool) -> Selection:
    """Selects the elements of largest or smallest magnitude, exactly as many as the budget says.

    Args:
      values: real or complex, of any shape.
      budget: how many.
      largest: False selects the smallest.

    Raises:
      ValueError: when a value is NaN.
    """
    shape = values.shape
    if values.dtype not in (np.float32, np.float64, np.complex64, np.complex128):
        # float64 holds the narrow floats exactly, so no tie is made or broken.
        values = values.astype(np.float64)
    scores = np.abs(values).reshape(-1)
    unordered = np.count_nonzero(np.isnan(scores))
    if unordered:
        raise ValueError(f"{unordered:,} elements of the base are NaN, which has no magnitude.")
    if largest:
        np.negative(scores, out=scores)
    return lowest(shape, scores, budget.of(scores.size))


def at_random(path: str, shape: tuple[int, ...], budget: Budget, seed: int) -> Selection:
    """Selects elements by the path and the seed alone, the same ones on every machine."""
    digest = hashlib.sha256(json.dumps([seed, path]).encode()).digest()
    # Raw bits, not Generator.choice: NumPy keeps the bit streams stable between releases only.
    generator = np.random.PCG64(int.from_bytes(digest[:16], "big"))
    size = math.prod(shape)
    return lowest(shape, generator.random_raw(size), budget.of(size))


def lowest(shape: tuple[int, ...], scores: np.ndarray, budget: int) -> Selection:
    """Selects the `budget` elements of lowest score, ties to the lower flat index."""
    if budget in (0, scores.size):
        return Selection.none(shape) if budget == 0 else Selection.all(shape)
    threshold = np.partition(scores, budget - 1)[budget - 1]
    below = scores < threshold
    ties = np.flatnonzero(scores == threshold)
    below[ties[: budget - np.count_nonzero(below)]] = True
    return Selection.from_bool(below.reshape(shape))
