"""What a run keeps in its `model_dir`, and how it finds its way back.

- run.json: what the run is, base, rules, seed and batch size.
- selections.safetensors: which elements are trainable, decided once, on the base.
- checkpoints/: the latest states, O(trainable elements) each.
- best/: the state with the best metric, out of reach of the latest ones.
- evaluations.jsonl: one line for each evaluation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from finetune.rules import Coverage
from finetune.selection import Selection, load_selections, save_selections

_FORMAT = 1


class RunMismatch(ValueError):
    """The `model_dir` belongs to another run than the one that was asked for."""


def open_run(model_dir: str, coverage_fn: Any, description: Mapping[str, Any]) -> Coverage:
    """Returns what the run's rules decided: as saved in `model_dir`, or now, and then saved.

    Selections are never derived again, since predicates would see moved weights.

    Args:
      model_dir: folder of the run, made when it does not exist.
      coverage_fn: makes the Coverage of a new run.
      description: what must stay the same for the life of a run, JSON-able.

    Raises:
      RunMismatch: when the folder holds a run of another description; names every difference.
    """
    path = os.path.join(model_dir, "run.json")
    selections_path = os.path.join(model_dir, "selections.safetensors")
    if not os.path.exists(path):
        coverage = coverage_fn()
        os.makedirs(model_dir, exist_ok=True)
        save_selections(selections_path, coverage.selections)
        decided = {
            "decided_by": dict(coverage.decided_by),
            "moving_state": sorted(coverage.moving_state),
            "state": sorted(coverage.state),
        }
        # Last, since its presence says that the selections are complete.
        write_text(path, json.dumps({"format": _FORMAT, **description, **decided}, indent=2))
        return coverage
    with open(path, encoding="utf-8") as file:
        saved = json.load(file)
    differences = [
        f"`{name}` was {saved.get(name)!r}, now {value!r}"
        for name, value in json.loads(json.dumps(dict(description))).items()
        if saved.get(name) != value
    ]
    if differences:
        raise RunMismatch(
            f"`model_dir` ({model_dir}) holds a run that began otherwise: "
            + "; ".join(differences)
            + ". Choose another `model_dir`, or start it as it began to go on."
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
      objects: {name: trackable} of everything that a resume needs.
      identity: {name: string} that a checkpoint must agree with before it is read.
      keep: how many of the latest to keep.
    """

    def __init__(
        self,
        model_dir: str,
        objects: Mapping[str, Any],
        identity: Mapping[str, str],
        keep: int,
    ):
        self._identity = dict(identity)
        marks = {name: tf.Variable(text, trainable=False) for name, text in identity.items()}
        self._checkpoint = tf.train.Checkpoint(identity=marks, **objects)
        self._latest = tf.train.CheckpointManager(
            self._checkpoint, os.path.join(model_dir, "checkpoints"), max_to_keep=keep
        )
        self._best = tf.train.CheckpointManager(
            self._checkpoint, os.path.join(model_dir, "best"), max_to_keep=1
        )

    @property
    def best(self) -> str | None:
        """The prefix of the best state, or None."""
        found = _found(self._best)
        return found[0] if found else None

    def save(self, global_step: int) -> None:
        """Saves the present state as the latest.

        Raises:
          ValueError: when the position in the training data cannot be saved.
        """
        self._save(self._latest, global_step)

    def save_best(self, global_step: int) -> None:
        """Saves the present state as the best."""
        self._save(self._best, global_step)

    def restore_latest(self) -> str | None:
        """Restores the newest state that is whole; returns its prefix, or None without any.

        Raises:
          RunMismatch: when a checkpoint is of another base or another selection.
          ValueError: when there are checkpoints and none is readable.
        """
        prefixes = _found(self._latest)
        for prefix in prefixes:
            try:
                self.restore(prefix)
            except tf.errors.OpError as error:
                logging.warning(
                    "Checkpoint %s is damaged (%s); going back to the one before.",
                    prefix,
                    str(error.message).splitlines()[0],
                )
            else:
                return prefix
        if prefixes:
            raise ValueError(
                f"None of the checkpoints {prefixes} can be read. Delete the folder "
                f"{os.path.dirname(prefixes[0])} to start the run again from the base."
            )
        return None

    def restore(self, prefix: str) -> None:
        """Restores one state after it proved to be of the same base and selections."""
        reader = tf.train.load_checkpoint(prefix)
        for name, expected in self._identity.items():
            key = f"identity/{name}/.ATTRIBUTES/VARIABLE_VALUE"
            found = reader.get_tensor(key).decode() if reader.has_tensor(key) else "none"
            if found != expected:
                raise RunMismatch(
                    f"The checkpoint {prefix} was made with another {name}: it has {found}, this "
                    f"run has {expected}. Start from the same base and rules, or choose another "
                    "`model_dir`."
                )
        status = self._checkpoint.restore(prefix)
        try:
            status.assert_consumed()
        except AssertionError as error:
            raise RunMismatch(
                f"The checkpoint {prefix} does not fit this run (another optimizer?): "
                f"{str(error).splitlines()[0]} Start as the run began, or choose another "
                "`model_dir`."
            ) from error

    def _save(self, manager: tf.train.CheckpointManager, global_step: int) -> None:
        try:
            manager.save(checkpoint_number=global_step)
        except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
            raise ValueError(
                "The position in the training data cannot be saved, so a resume would not be "
                f"exact: {str(error.message).splitlines()[0]} Use no from_generator, py_function "
                "or tf.random in `train_dataset`; stateless random ops are fine."
            ) from error


def record_evaluation(model_dir: str, global_step: int, metrics: Mapping[str, float]) -> None:
    """Appends one evaluation to evaluations.jsonl."""
    with open(os.path.join(model_dir, "evaluations.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps({"global_step": global_step, **metrics}) + "\n")


def evaluations(model_dir: str) -> list[dict[str, float]]:
    """Returns the run's evaluations, one for each step, oldest first; [] without any."""
    path = os.path.join(model_dir, "evaluations.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        # A run killed while writing leaves a last line without its end.
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    # A resumed run evaluates some steps again.
    by_step = {line["global_step"]: line for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def write_text(path: str, text: str) -> None:
    """Writes a text file, complete or not at all."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _found(manager: tf.train.CheckpointManager) -> Sequence[str]:
    """Returns the prefixes in the manager's folder, newest first, wherever it was moved to."""
    folder = manager.directory
    if not os.path.isdir(folder):
        return []
    steps = [
        int(name.removeprefix("ckpt-").removesuffix(".index"))
        for name in os.listdir(folder)
        if name.startswith("ckpt-") and name.endswith(".index")
    ]
    return [os.path.join(folder, f"ckpt-{step}") for step in sorted(steps, reverse=True)]


def _in_order(
    selections: Mapping[str, Selection], paths: Mapping[str, Any]
) -> dict[str, Selection]:
    return {path: selections[path] for path in paths}
