"""What a run keeps in its `model_dir`, and how it finds its way back.

- run.json: what the run is: base, rules, optimizer, seed, batch size.
- selections.safetensors: which elements are trainable, decided once, on the base.
- checkpoints/: the latest states, O(trainable elements) each.
- best/: the state with the best metric, out of reach of the latest ones.
- evaluations.jsonl: one line for each evaluation.

A checkpoint `ckpt-20` is whole when its seal `ckpt-20.json` fits; the seal is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from finetune.rules import Coverage
from finetune.selection import Selection, load_selections, save_selections

_FORMAT = 1
_LATEST = "checkpoints"
_BEST = "best"
_EVALUATIONS = "evaluations.jsonl"
_SEAL = re.compile(r"ckpt-(\d+)\.json")
_FILE = re.compile(r"ckpt-(\d+)(\.|_temp$)")


class RunMismatch(ValueError):
    """The `model_dir` belongs to another run than the one that was asked for."""


def open_run(
    model_dir: str, coverage_fn: Callable[[], Coverage], description: Mapping[str, Any]
) -> Coverage:
    """Returns what the run's rules decided: as saved in `model_dir`, or now, and then saved.

    Once there is a checkpoint, selections are never derived again: predicates would see moved
    weights.

    Args:
      model_dir: folder of the run, made when it does not exist.
      coverage_fn: makes the Coverage of a new run.
      description: what must stay the same for the life of a run, JSON-able.

    Raises:
      RunMismatch: when the folder holds a run of another description; names every difference.
    """
    path = os.path.join(model_dir, "run.json")
    selections_path = os.path.join(model_dir, "selections.safetensors")
    description = {"format": _FORMAT, **json.loads(json.dumps(dict(description)))}
    # Without a state there is no run yet, only what a start left that was refused afterwards.
    if not os.path.exists(path) or not _steps(os.path.join(model_dir, _LATEST)):
        coverage = coverage_fn()
        os.makedirs(model_dir, exist_ok=True)
        save_selections(selections_path, coverage.selections)
        decided = {
            "decided_by": dict(coverage.decided_by),
            "moving_state": sorted(coverage.moving_state),
            "state": sorted(coverage.state),
        }
        # Last, since its presence says that the selections are complete.
        write_text(path, json.dumps({**description, **decided}, indent=2))
        return coverage
    with open(path, encoding="utf-8") as file:
        saved = json.load(file)
    differences = [
        line
        for name, value in description.items()
        for line in _differences(name, saved.get(name), value)
    ]
    if differences:
        raise RunMismatch(
            f"`model_dir` ({model_dir}) holds a run that began otherwise:\n  - "
            + "\n  - ".join(differences)
            + "\nChoose another `model_dir`, or start it as it began to go on."
        )
    return Coverage(
        _in_order(load_selections(selections_path), saved["decided_by"]),
        saved["decided_by"],
        frozenset(saved["moving_state"]),
        frozenset(saved["state"]),
    )


class Checkpoints:
    """The saved states of a run: the latest few, and apart from them the best one.

    Args:
      model_dir: folder of the run.
      values: {name: trackable} of what makes the model what it is.
      position: {name: trackable} of what else a resume needs; the best state goes without.
      identity: {name: string} that a checkpoint must agree with before it is read.
      keep: how many of the latest to keep.
      before_position: called with a CheckpointReader before a position is restored from it.
    """

    def __init__(
        self,
        model_dir: str,
        values: Mapping[str, Any],
        position: Mapping[str, Any],
        identity: Mapping[str, str],
        keep: int,
        before_position: Callable[[Any], None] | None = None,
    ):
        self._before_position = before_position
        self._latest = os.path.join(model_dir, _LATEST)
        self._best = os.path.join(model_dir, _BEST)
        self._identity = dict(identity)
        self._keep = keep
        marks = {name: tf.Variable(text, trainable=False) for name, text in identity.items()}
        self._values = tf.train.Checkpoint(identity=marks, **values)
        self._all = tf.train.Checkpoint(identity=marks, **values, **position)

    @property
    def has_best(self) -> bool:
        """Whether a best state was saved."""
        return bool(_steps(self._best))

    def save(self, global_step: int) -> None:
        """Saves the present state as the latest.

        Raises:
          ValueError: when the position in the training data cannot be saved.
        """
        try:
            _write(self._all, self._latest, global_step, self._keep)
        except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
            reason = str(error.message).rpartition("}} ")[2].partition(" [Op:")[0]
            raise ValueError(
                "The position in the data of `task.train_dataset` cannot be saved, so a resume "
                f"would not be exact: {reason} Use no from_generator, py_function or tf.random in "
                "it; stateless random ops are fine."
            ) from error

    def save_best(self, global_step: int) -> None:
        """Saves the present state as the best."""
        _write(self._values, self._best, global_step, keep=1)

    def restore_latest(self) -> str | None:
        """Restores the newest state that is whole; returns its prefix, or None without any.

        Raises:
          RunMismatch: when a checkpoint is of another base, another selection or another optimizer.
          ValueError: when there are checkpoints and none is whole.
        """
        return self._restore_newest(self._all, self._latest, self._before_position)

    def restore_best(self) -> str | None:
        """Restores the best state, but no position; else as `restore_latest`."""
        return self._restore_newest(self._values, self._best)

    def _restore_newest(
        self,
        checkpoint: tf.train.Checkpoint,
        folder: str,
        before: Callable[[Any], None] | None = None,
    ) -> str | None:
        steps = _steps(folder)
        for step in steps:
            prefix = os.path.join(folder, f"ckpt-{step}")
            try:
                _check_seal(prefix)
                reader = tf.train.load_checkpoint(prefix)
                self._check_identity(prefix, reader)
                if before is not None:
                    before(reader)
                _restore(checkpoint, prefix)
            except (_Damaged, tf.errors.OpError) as error:
                logging.warning(
                    "Checkpoint %s is damaged (%s); going back to the one before.",
                    prefix,
                    str(error).splitlines()[0],
                )
            else:
                return prefix
        if steps:
            raise ValueError(
                f"None of the checkpoints in {folder} (steps {', '.join(map(str, steps))}) is "
                "whole. Delete the folder of the run to start it again from the base."
            )
        return None

    def _check_identity(self, prefix: str, reader: Any) -> None:
        for name, expected in self._identity.items():
            key = f"identity/{name}/.ATTRIBUTES/VARIABLE_VALUE"
            found = reader.get_tensor(key).decode() if reader.has_tensor(key) else "none"
            if found != expected:
                raise RunMismatch(
                    f"The checkpoint {prefix} was made with another {name}: it has {found}, this "
                    f"run has {expected}. Start from the same base and rules, or choose another "
                    "`model_dir`."
                )


class _Damaged(Exception):
    """A checkpoint is not what was written."""


def _write(checkpoint: tf.train.Checkpoint, folder: str, global_step: int, keep: int) -> None:
    """Saves a checkpoint, then its seal, then deletes all but the newest `keep` up to this one."""
    os.makedirs(folder, exist_ok=True)
    prefix = os.path.join(folder, f"ckpt-{global_step}")
    # A damaged one of the same step may lie there: it must not get the new one's files.
    _delete(prefix)
    checkpoint.write(prefix)
    write_text(f"{prefix}.json", json.dumps(_seal(prefix)))
    # Later steps are damaged, or the run went back behind them.
    kept = [step for step in _steps(folder) if step <= global_step][:keep]
    # What a killed process left without a seal goes too.
    found = {int(match[1]) for name in os.listdir(folder) if (match := _FILE.match(name))}
    for step in found.difference(kept):
        _delete(os.path.join(folder, f"ckpt-{step}"))


def _delete(prefix: str) -> None:
    folder, name = os.path.split(prefix)
    # The seal first: without it the rest counts for nothing.
    for file in sorted(os.listdir(folder), key=lambda file: file != f"{name}.json"):
        path = os.path.join(folder, file)
        if file == f"{name}_temp":
            shutil.rmtree(path)
        elif file.startswith(f"{name}."):
            os.remove(path)


def _seal(prefix: str) -> dict[str, Any]:
    """Returns what tells a whole checkpoint from a damaged one.

    TensorFlow checks each tensor against a sum that stands in the index, but not the index.
    """
    folder, name = os.path.split(prefix)
    with open(f"{prefix}.index", "rb") as file:
        index = hashlib.sha256(file.read()).hexdigest()
    data = {
        file: os.path.getsize(os.path.join(folder, file))
        for file in sorted(os.listdir(folder))
        if file.startswith(f"{name}.data-")
    }
    return {"index_sha256": index, "data_bytes": data}


def _check_seal(prefix: str) -> None:
    try:
        with open(f"{prefix}.json", encoding="utf-8") as file:
            written = json.load(file)
        found = _seal(prefix)
    except (OSError, ValueError) as error:
        raise _Damaged(str(error)) from error
    if written != found:
        raise _Damaged("its files are not those that were written")


def _restore(checkpoint: tf.train.Checkpoint, prefix: str) -> None:
    try:
        # Restores before it tells what it did not find.
        checkpoint.read(prefix).assert_consumed()
    except (AssertionError, ValueError) as error:
        raise RunMismatch(
            f"The checkpoint {prefix} does not fit this run, its optimizer or its data: "
            f"{str(error).splitlines()[0]} Start as the run began, or choose another `model_dir`."
        ) from error


def record_evaluation(model_dir: str, global_step: int, metrics: Mapping[str, float]) -> None:
    """Notes one evaluation in evaluations.jsonl, instead of an earlier one of the same step."""
    # A resumed run evaluates some steps again.
    by_step = {line["global_step"]: line for line in evaluations(model_dir)}
    by_step[global_step] = {"global_step": global_step, **metrics}
    lines = [json.dumps(by_step[step]) + "\n" for step in sorted(by_step)]
    write_text(os.path.join(model_dir, _EVALUATIONS), "".join(lines))


def evaluations(model_dir: str) -> list[dict[str, float]]:
    """Returns the run's evaluations, one for each step, the first step first; [] without any."""
    path = os.path.join(model_dir, _EVALUATIONS)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_text(path: str, text: str) -> None:
    """Writes a text file, complete or not at all."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _steps(folder: str) -> list[int]:
    """Returns the steps of the sealed checkpoints in a folder, the newest first."""
    if not os.path.isdir(folder):
        return []
    matches = map(_SEAL.fullmatch, os.listdir(folder))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _differences(name: str, saved: Any, now: Any) -> Iterator[str]:
    """Yields what differs between two JSON values, part by part where both have the same parts."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = {**saved, **now}
        if saved.get("class_name") != now.get("class_name"):
            # What another class was made of would only distract.
            keys = {"class_name": None}
        for key in keys:
            yield from _differences(f"{name}.{key}", saved.get(key), now.get(key))
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (one, other) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(f"{name}[{number}]", one, other)
    elif saved != now:
        yield f"`{name}` was {saved!r}, is {now!r}"


def _in_order(
    selections: Mapping[str, Selection], paths: Mapping[str, Any]
) -> dict[str, Selection]:
    return {path: selections[path] for path in paths}
