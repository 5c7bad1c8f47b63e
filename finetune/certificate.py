"""What fine-tuning changed, and the proof of what it did not.

A certificate compares a tuned model with its base, variable by variable and bit by bit. The digests
of the frozen elements, before and after, let anybody check the claim against the files later on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import tensorflow as tf

from finetune.bundle import digest, fingerprint
from finetune.loading import Base
from finetune.paths import nearest
from finetune.selection import Selection

_FORMAT = "finetune-certificate-1"
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class VariableRecord:
    """What became of one variable.

    Attributes:
      path: the variable's path.
      shape: its shape.
      dtype: TensorFlow's name of its dtype.
      total: how many elements it has.
      trainable: how many of them were allowed to change.
      changed: how many of those differ from the base in at least one bit.
      moved: how many of the others, the frozen ones, differ; must be 0.
      first_moved: where and how the first of these moved, such as `[3, 5] was 0.1, is 0.2`, or "".
      frozen_before: `bundle.digest` of the base's frozen elements as a vector, in flat order.
      frozen_after: the same of the tuned value's frozen elements.
      tuned: `bundle.digest` of the whole tuned value.
      largest_change: the largest |new - old| of the trainable elements that were and are finite
        numbers, in float64; None if there is none.
      not_finite: how many trainable elements are NaN or infinite now.
      decided_by: the rule that decided, in words.
      state: True for non-trainable state, such as BatchNorm statistics.
      edited: True if the base's own value was replaced on purpose before training, as by pruning.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    total: int
    trainable: int
    changed: int
    moved: int
    first_moved: str
    frozen_before: str
    frozen_after: str
    tuned: str
    largest_change: float | None
    not_finite: int
    decided_by: str = ""
    state: bool = False
    edited: bool = False

    @property
    def frozen(self) -> int:
        """How many elements had to keep their bits."""
        return self.total - self.trainable

    @property
    def ok(self) -> bool:
        """No frozen element moved."""
        return self.moved == 0 and self.frozen_before == self.frozen_after


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The records of all variables, and the fingerprints of the base and of the tuned model.

    Attributes:
      variables: one record a variable, in the module's order.
      base_fingerprint: `bundle.fingerprint` of the base's values, by path.
      tuned_fingerprint: the same of the tuned values.
    """

    variables: tuple[VariableRecord, ...]
    base_fingerprint: str
    tuned_fingerprint: str

    @property
    def ok(self) -> bool:
        """No frozen element moved, of weights or of state."""
        return all(record.ok for record in self.variables)

    @property
    def total(self) -> int:
        """How many elements all variables have."""
        return sum(record.total for record in self.variables)

    @property
    def trainable(self) -> int:
        """How many elements were allowed to change."""
        return sum(record.trainable for record in self.variables)

    @property
    def changed(self) -> int:
        """How many of the trainable elements differ from the base."""
        return sum(record.changed for record in self.variables)

    @property
    def frozen(self) -> int:
        """How many elements had to keep their bits."""
        return self.total - self.trainable

    @property
    def moved(self) -> int:
        """How many frozen elements differ from the base; must be 0."""
        return sum(record.moved for record in self.variables)

    def offenders(self) -> tuple[VariableRecord, ...]:
        """The variables with frozen elements that moved, those with the most first."""
        return tuple(
            sorted((r for r in self.variables if not r.ok), key=lambda r: r.moved, reverse=True)
        )

    def to_json(self) -> str:
        """JSON text that `from_json` turns into an equal certificate; it holds no NaN.

        Beside the fields it holds the totals and `ok`, for readers other than this program.
        """
        totals = {
            name: getattr(self, name)
            for name in ("ok", "total", "trainable", "changed", "frozen", "moved")
        }
        fields = {
            "base_fingerprint": self.base_fingerprint,
            "tuned_fingerprint": self.tuned_fingerprint,
            "variables": [dataclasses.asdict(record) for record in self.variables],
        }
        document = {"format": _FORMAT, **totals, **fields}
        return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The certificate that `to_json` wrote.

        `ok` and the totals are computed anew from the records, not believed.

        Raises:
          ValueError: the text is no JSON, or no certificate of this format.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"`text` is no JSON: {error}.") from error
        found = document.get("format") if isinstance(document, dict) else None
        if found != _FORMAT:
            raise ValueError(f"`text` has the format ({found}), expected {_FORMAT}.")
        try:
            records = tuple(
                VariableRecord(**{**record, "shape": tuple(record["shape"])})
                for record in document["variables"]
            )
            return cls(records, document["base_fingerprint"], document["tuned_fingerprint"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"`text` is no whole certificate: {error!r}.") from error

    def summary(self) -> str:
        """A few lines for a terminal: what was trainable, what changed, whether all else held."""
        touched = [record for record in self.variables if record.trainable and not record.state]
        moving = [record for record in self.variables if record.trainable and record.state]
        lines = [
            f"variables: {len(self.variables):,}, trainable in whole or part: {len(touched):,}",
            f"trainable elements: {self.trainable:,} of {self.total:,} "
            f"({_percent(self.trainable, self.total)}), changed: {self.changed:,}",
        ]
        if moving:
            lines.append(f"of these, state that may move: {_counted(moving, 'trainable')}")
        if edited := [record for record in self.variables if record.edited]:
            paths = ", ".join(record.path for record in edited)
            lines.append(f"base values were replaced on purpose before training in {paths}")
        if not_finite := [record for record in self.variables if record.not_finite]:
            lines.append(f"NaN or infinite now: {_counted(not_finite, 'not_finite')}")
        known = [record for record in self.variables if record.largest_change is not None]
        if known:
            largest = max(known, key=lambda record: record.largest_change or 0.0)
            lines.append(f"largest change: {largest.largest_change:.4g}, in {largest.path}")
        if self.frozen:
            lines.append(
                f"frozen elements moved: {self.moved:,} of {self.frozen:,} — "
                + ("proved by digest" if self.ok else "NOT the base's bits any more:")
            )
        else:
            lines.append("no element was frozen: there is nothing to prove")
        lines += _offender_lines(self.offenders())
        lines.append(
            f"base {self.base_fingerprint[:16]}, tuned {self.tuned_fingerprint[:16]} (fingerprints)"
        )
        return "\n".join(lines)


def certify(
    base: Base,
    selections: Mapping[str, Selection],
    current: Callable[[str], np.ndarray],
    moving_state: AbstractSet[str] = frozenset(),
    decided_by: Mapping[str, str] | None = None,
) -> Certificate:
    """What the current values hold against the base, bit by bit, for every variable of `base`.

    Values are compared by their bits, strings by equality, one variable at a time. It certifies
    also where frozen elements moved: `ok` says whether they did.

    Args:
      base: what fine-tuning started from; a value that was edited on purpose counts as the base's.
      selections: which elements were trainable, by path; a variable that is not named is frozen.
      current: gives the value of a variable now, by path, with its own shape and dtype.
      moving_state: paths of non-trainable state that was allowed to move. All other state is
        frozen, whatever `selections` says.
      decided_by: the rule that decided, in words, by path.

    Returns:
      One record for each of `base.variables`, in their order.

    Raises:
      ValueError: a path that `base` does not have, a selection or a current value that does not fit
        its variable, `moving_state` that is a weight; all of them at once.

    Usable eagerly only.

    >>> from finetune.loading import from_module
    >>> module = tf.Module()
    >>> module.x = tf.Variable(tf.zeros([2, 2]))
    >>> base = from_module(module)
    >>> _ = module.x.assign([[1.0, 0.0], [0.0, -0.0]])
    >>> corner = Selection.from_flat((2, 2), [0])
    >>> certificate = certify(base, {"x": corner}, lambda path: module.x.numpy())
    >>> certificate.changed, certificate.moved, certificate.variables[0].first_moved
    (1, 1, '[1, 1] was 0.0, is -0.0')
    """
    decided_by = decided_by or {}
    _check_paths(base, selections, moving_state, decided_by)
    records = []
    wrong = []
    for path, named in base.variables.items():
        if named.trainable:
            selection = selections.get(path, Selection.none(named.shape))
        elif path in moving_state:
            selection = Selection.all(named.shape)
        else:
            selection = Selection.none(named.shape)
        text = object if named.dtype == tf.string else None
        before = np.asarray(base.read(path), text)
        after = np.asarray(current(path), text)
        if (after.shape, after.dtype) != (before.shape, before.dtype):
            wrong.append(
                f"{path}: {after.dtype} {after.shape}, must be {before.dtype} {before.shape}"
            )
            continue
        records.append(
            VariableRecord(
                path=path,
                shape=named.shape,
                dtype=named.dtype.name,
                decided_by=decided_by.get(path, ""),
                state=not named.trainable,
                edited=path in base.edits,
                **_compared(before, after, selection),
            )
        )
    if wrong:
        raise ValueError(
            "`current` gives values unlike the base's, which cannot be compared bit by bit:\n  "
            + "\n  ".join(wrong)
        )
    tuned = fingerprint({record.path: record.tuned for record in records})
    return Certificate(tuple(records), base.fingerprint, tuned)


def differing(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Where two arrays of one shape and dtype differ in at least one bit (strings: at all).

    Returns:
      Boolean vector in flat order: 0.0 and -0.0 differ, two NaNs with the same bits do not.

    >>> differing(np.float32([0.0, np.nan, 1.0]), np.float32([-0.0, np.nan, 1.0]))
    array([ True, False, False])
    """
    if before.dtype.kind in "OSU":
        return np.asarray(before.reshape(-1) != after.reshape(-1), dtype=bool)
    different: np.ndarray = _bits(before) != _bits(after)
    return np.asarray(different.any(axis=1)) if different.ndim == 2 else different


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers; those of 16 bytes as two each, along a second axis."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.itemsize <= 8:
        return flat.view(f"u{flat.itemsize}")
    return flat.view(np.uint64).reshape(flat.size, -1)


def _check_paths(
    base: Base,
    selections: Mapping[str, Selection],
    moving_state: AbstractSet[str],
    decided_by: Mapping[str, str],
) -> None:
    wrong = []
    arguments: dict[str, Iterable[str]] = {
        "selections": selections,
        "moving_state": sorted(moving_state),
        "decided_by": decided_by,
    }
    for argument, paths in arguments.items():
        for path in paths:
            if path not in base.variables:
                close = ", ".join(nearest(path, base.variables, 3))
                wrong.append(f"`{argument}` ({path}): no such variable, nearest: {close}")
    for path, selection in selections.items():
        if path in base.variables and selection.shape != base.variables[path].shape:
            wrong.append(
                f"`selections` ({path}): shape {selection.shape}, must be the variable's, "
                f"{base.variables[path].shape}"
            )
    for path in sorted(moving_state & set(base.variables)):
        if base.variables[path].trainable:
            wrong.append(f"`moving_state` ({path}): is a weight, select it in `selections` instead")
    if wrong:
        raise ValueError("What was trainable does not fit the base:\n  " + "\n  ".join(wrong))


def _compared(before: np.ndarray, after: np.ndarray, selection: Selection) -> dict[str, Any]:
    """The counts, digests and extremes of one variable's record."""
    old, new = before.reshape(-1), after.reshape(-1)
    different = differing(before, after)
    if selection.kind in ("none", "all"):
        trainable: Any = slice(0, old.size if selection.kind == "all" else 0)
        frozen: Any = slice(selection.count, None)
        moved = different[frozen].nonzero()[0] + selection.count
    else:
        trainable = selection.to_bool().reshape(-1)
        frozen = ~trainable
        moved = (different & frozen).nonzero()[0]
    largest, not_finite = _largest_change(old[trainable], new[trainable])
    return {
        "total": old.size,
        "trainable": selection.count,
        "changed": int(np.count_nonzero(different[trainable])),
        "moved": len(moved),
        "first_moved": _move(before, after, int(moved[0])) if len(moved) else "",
        "frozen_before": digest(old[frozen]),
        "frozen_after": digest(new[frozen]),
        "tuned": digest(after),
        "largest_change": largest,
        "not_finite": not_finite,
    }


def _largest_change(old: np.ndarray, new: np.ndarray) -> tuple[float | None, int]:
    """The largest |new - old| where both are finite, and how many of `new` are not."""
    if old.dtype.kind in "OSU":
        return None, 0
    wide = np.complex128 if old.dtype.kind == "c" else np.float64
    old, new = old.astype(wide), new.astype(wide)
    finite = np.isfinite(new)
    not_finite = new.size - int(np.count_nonzero(finite))
    finite &= np.isfinite(old)
    with np.errstate(over="ignore"):
        changes = np.abs(new[finite] - old[finite])
    if not changes.size:
        return None, not_finite
    # The difference of two finite numbers can overflow, and JSON has no infinity.
    return float(min(changes.max(), np.finfo(np.float64).max)), not_finite


def _move(before: np.ndarray, after: np.ndarray, flat: int) -> str:
    index = [int(i) for i in np.unravel_index(flat, before.shape)]
    old, new = before.reshape(-1)[flat], after.reshape(-1)[flat]
    texts = [str(old), str(new)]
    if texts[0] == texts[1]:
        # Two NaNs, say: only the bits tell them apart.
        texts = [f"{value} (0x{np.asarray(value).tobytes()[::-1].hex()})" for value in (old, new)]
    return f"{index} was {texts[0]}, is {texts[1]}"


def _offender_lines(offenders: tuple[VariableRecord, ...]) -> list[str]:
    lines = [
        f"  {record.path}: {record.moved:,} of {record.frozen:,}, the first at {record.first_moved}"
        for record in offenders[:_SHOWN]
    ]
    if len(offenders) > _SHOWN:
        lines.append(f"  and {len(offenders) - _SHOWN:,} more variables")
    return lines


def _counted(records: list[VariableRecord], field: str) -> str:
    """Says how many elements, and in which variables, the first few by name."""
    count = sum(getattr(record, field) for record in records)
    names = ", ".join(record.path for record in records[:3])
    more = f" and {len(records) - 3:,} more" if len(records) > 3 else ""
    return f"{count:,} elements in {names}{more}"


def _percent(count: int, total: int) -> str:
    return f"{100 * count / total if total else 0.0:.4g} %"
