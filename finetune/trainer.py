"""The Trainer: a base, rules and a task become a tuned model and its certificate."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from finetune import arguments, runs
from finetune.bundle import digest
from finetune.calling import call
from finetune.certificate import Certificate, certify
from finetune.data import Passes, check_dataset, digest_of_first_batch
from finetune.exporting import export
from finetune.loading import Base
from finetune.loop import EvalLoop, LoopResult, TrainLoop, joined
from finetune.optimizer import MaskedOptimizer
from finetune.paths import nearest
from finetune.preemption import Preempted, sigterm_noted
from finetune.progress import Progress
from finetune.rules import Rules, resolve
from finetune.selection import selections_digest
from finetune.state import components
from finetune.summaries import write_scalars
from finetune.task import Task


class NonFiniteError(ValueError):
    """The loss, a gradient or a trainable element became NaN or infinite."""


# The Trainer that has a module's values in its hands: another one begins with the base's again.
_trainer_of: weakref.WeakKeyDictionary[Any, weakref.ref[Trainer]] = weakref.WeakKeyDictionary()
# Optimizers that took steps in a Trainer, and would not start anew in another.
_used: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()


class Trainer:
    """Trains exactly the elements that the rules name, and goes on where an earlier run stopped.

    Making a Trainer decides the coverage and gives the module the base's values; when `model_dir`
    holds a run already, its newest whole checkpoint is restored: trainable elements, slots, step,
    random state, data position. A run killed at any step and started again ends bit-identical to
    one that was not. State that the model moves by itself, statistics and seeds, is live in
    training and the base's again after it, unless a rule says `model_state()`.

    Make and use it outside of the strategy's scope. A base serves one Trainer at a time.

    Args:
      base: what to start from: a `finetune.Base`, the path of a SavedModel, or a function that
        returns a Base (called inside the strategy's scope).
      rules: (pattern, selector) pairs; the first that matches a variable's whole path wins.
      task: data, loss and metrics. Its default `forward` calls the base's `endpoint`.
      optimizer: any Keras 3 optimizer, a new one for each Trainer; clipping, EMA, accumulation,
        loss scale and schedules are its arguments.
      model_dir: local folder where the run keeps its checkpoints, TensorBoard events and
        evaluations.
      strategy: a tf.distribute.MirroredStrategy or OneDeviceStrategy; by default none.
      batch_size: examples in a global batch.
      num_steps: the step at which `train` stops, counted from the base. Each batch is a step, with
        gradient accumulation too.
      steps_per_loop: steps in one call of the compiled loop; SIGTERM is heeded between two calls.
      eval_every: steps between evaluations; by default only `evaluate` evaluates.
      checkpoint_every: steps between checkpoints; by default `eval_every`, else ten loops.
      seed: of the data order and of the model's random ops.
      best_metric: 'loss' or the name of a metric, which decides what is kept in `best/` and
        exported.
      best_mode: 'max' or 'min': which value of `best_metric` is better.
      patience: stop after so many evaluations in a row without a better `best_metric`.
      mode: how partly trainable variables are updated: 'auto', 'packed' or 'dense'.
      keep: how many of the latest checkpoints to keep.
      progress: False shows no progress.

    Raises:
      ValueError: for arguments out of range, rules or data that do not fit, a strategy that is not
        supported, or a base that was not made under it.
      finetune.runs.RunMismatch: when `model_dir` holds a run that began otherwise: of another base,
        other rules, another optimizer or arguments of it, `seed`, `batch_size` or `mode`.

    Example: see the README; a run needs a model and data.
    """

    def __init__(
        self,
        base: Base | str | Callable[[], Base],
        rules: Rules,
        task: Task,
        optimizer: keras.optimizers.Optimizer,
        model_dir: str,
        *,
        strategy: tf.distribute.Strategy | None = None,
        batch_size: int = 32,
        num_steps: int | None = None,
        steps_per_loop: int = 50,
        eval_every: int | None = None,
        checkpoint_every: int | None = None,
        seed: int = 0,
        best_metric: str | None = None,
        best_mode: str = "max",
        patience: int | None = None,
        mode: str = "auto",
        keep: int = 3,
        progress: bool = True,
    ):
        arguments.check_counts(
            batch_size=batch_size, num_steps=num_steps, steps_per_loop=steps_per_loop,
            eval_every=eval_every, checkpoint_every=checkpoint_every, patience=patience, keep=keep,
        )  # fmt: skip
        arguments.check_best(best_metric, best_mode, patience, eval_every)
        arguments.check_others(task, optimizer, model_dir, seed)
        self.strategy = arguments.supported(strategy)
        self.base = arguments.loaded(base, self.strategy)
        self.task = task
        self.model_dir = os.fspath(model_dir)
        self.batch_size = int(batch_size)
        self.num_steps = num_steps
        self.steps_per_loop = steps_per_loop
        self.eval_every = eval_every
        self.checkpoint_every = checkpoint_every or eval_every or 10 * steps_per_loop
        self.seed = int(seed)
        self.best_metric = best_metric
        self.best_mode = best_mode
        self.patience = patience
        self.progress = progress

        if task.forward is call and self.base.endpoint is not None:
            task = dataclasses.replace(
                task, forward=functools.partial(call, endpoint=self.base.endpoint)
            )
        self._eval_loop = EvalLoop(self.base.module, task)
        if best_metric is not None and best_metric not in self._eval_loop.names:
            raise ValueError(
                f"`best_metric` ({best_metric!r}) is not among the task's metrics, which are: "
                f"{', '.join(nearest(best_metric, self._eval_loop.names, 100))}."
            )
        self._data = Passes(lambda seed: task.train_dataset(self.batch_size, seed), self.seed)
        self._eval_dataset = task.eval_dataset(self.batch_size)
        check_dataset("eval_dataset", self._eval_dataset)
        if self._eval_dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("`task.eval_dataset` never ends: an evaluation is one pass over it.")

        self.coverage = runs.open_run(
            self.model_dir,
            lambda: resolve(rules, self.base.specs()),
            {
                "base": self.base.fingerprint,
                "rules": arguments.described_rules(rules, self.base),
                "optimizer": arguments.described_optimizer(optimizer),
                "mode": mode,
                "seed": self.seed,
                "batch_size": self.batch_size,
                # Metrics of other data must not stand beside those of the run so far.
                "eval_data": digest_of_first_batch(self._eval_dataset),
            },
        )
        trained = {
            path: selection
            for path, selection in self.coverage.selections.items()
            if selection.count and path not in self.coverage.state
        }
        variables = {path: named.variable for path, named in self.base.variables.items()}
        if optimizer in _used:
            raise ValueError(
                "`optimizer` has taken steps in another Trainer already, whose count and slots it "
                "holds: make a new optimizer for each Trainer."
            )
        self._given_optimizer = optimizer
        self.optimizer = MaskedOptimizer(optimizer, trained, mode=mode)
        _take(self.base, self)
        self.optimizer.build([variables[path] for path in trained], list(trained))
        self._not_finite_in_base = self._not_finite()
        self._global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._best_value = tf.Variable(math.nan, dtype=tf.float64, trainable=False)
        self._stale = tf.Variable(0, dtype=tf.int64, trainable=False)
        moving = {path: variables[path] for path in sorted(self.coverage.moving_state)}
        self._train_loop = TrainLoop(
            self.base.module,
            {path: variables[path] for path in trained},
            {p: v for p, v in sorted(variables.items()) if p not in trained and p not in moving},
            moving,
            self.optimizer,
            task,
            self.strategy,
            self._global_step,
            self._seed_random_ops,
            self._data.iterator.element_spec,
        )
        self._checkpoints = runs.Checkpoints(
            self.model_dir,
            self._saved_values(),
            {
                "working_state": self._train_loop.state.working,
                "global_step": self._global_step,
                "best_value": self._best_value,
                "stale": self._stale,
                "data": self._data.position,
            },
            {
                "base": self.base.fingerprint,
                "selections": selections_digest(self.coverage.selections),
            },
            keep,
            lambda reader: self._data.go_to(int(reader.get_tensor(_PASS))),
        )
        self._summaries: dict[str, tf.summary.SummaryWriter] = {}
        self._saved_step: int | None = None
        if self._checkpoints.restore_latest() is not None:
            self._after_restore()
            self._saved_step = self.global_step
            logging.info("Going on from step %d of %s.", self.global_step, self.model_dir)

    @property
    def global_step(self) -> int:
        """How many steps the trainable elements are away from the base."""
        return int(self._global_step)

    @property
    def traces(self) -> int:
        """How often the training loop was traced: 1 after training, whatever its length."""
        return self._train_loop.traces

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """The evaluations of the run so far, by step; step 0 is the base."""
        return runs.evaluations(self.model_dir)

    def train(self, num_steps: int | None = None) -> dict[str, float]:
        """Trains until `num_steps` steps from the base are taken, or early stopping says enough.

        Args:
          num_steps: the step to stop at; by default the constructor's.

        Returns:
          {'global_step': the step it stopped at}; when any step was taken, also 'loss', its mean
          over the last loop; and the last evaluation's numbers as 'eval_loss' and so on.

        Raises:
          NonFiniteError: when the loss or a gradient is NaN or infinite, which names the step and
            leaves the values before it; or when values are, at a checkpoint that is then not
            saved. The last good checkpoint stays.
          Preempted: after SIGTERM, when the state is saved; exits with status 42 if not caught.
          ValueError: when no gradient reaches a trainable variable, or the data is empty or its
            position cannot be saved.
        """
        self._check_in_hand()
        arguments.check_counts(num_steps=num_steps)
        target = num_steps if num_steps is not None else self.num_steps
        if target is None:
            raise ValueError("`num_steps` (None) must be given, to the Trainer or to `train`.")
        if self.global_step >= target or self._enough():
            logging.info("Nothing to do: step %d of %d is reached.", self.global_step, target)
            return {"global_step": self.global_step}
        result: dict[str, float] = {}
        with (
            sigterm_noted() as preempted,
            Progress(target, self.global_step, self.progress) as progress,
        ):
            if not self._train_loop.traces:
                self._warn(self._train_loop.trace(self._data.iterator))
            if self._saved_step is None:
                # Shows at once whether a resume is possible, and is the last good state of a run
                # whose first loss is NaN.
                self._save()
                share = self.coverage.trainable / max(self.coverage.total, 1)
                self._write("train", {"trainable_share": share})
            while self.global_step < target and not self._enough():
                loop = self._loop(self._steps_to_go(target))
                result["loss"] = loop.loss
                progress.update(self.global_step, loop.loss)
                if self.eval_every and self.global_step % self.eval_every == 0:
                    metrics = self.evaluate()
                    result |= {f"eval_{name}": value for name, value in metrics.items()}
                    self._note_best(metrics)
                    progress.write(f"step {self.global_step}: {readable(metrics)}")
                if preempted():
                    self._save()
                    raise Preempted(self.global_step, self.model_dir)
                if self.global_step % self.checkpoint_every == 0:
                    self._save()
            self._save()
        return {"global_step": self.global_step, **result}

    def evaluate(self) -> dict[str, float]:
        """Returns {'loss': ..., metric: ...} of the present model over the evaluation data.

        With `use_ema` the moving averages are evaluated. The result is also written to TensorBoard
        and to evaluations.jsonl. The regularizer is no part of this loss.

        Raises:
          ValueError: when there is no data, or a metric is not a single number.
        """
        self._check_in_hand()
        with self._averaged():
            metrics = self._eval_loop.run(self._eval_dataset)
        self._write("eval", metrics)
        runs.record_evaluation(self.model_dir, self.global_step, metrics)
        return metrics

    def certificate(self) -> Certificate:
        """Returns what changed against the base in the present model, and proof of what did not.

        With `use_ema` of the moving averages, as everywhere.
        """
        self._check_in_hand()
        with self._averaged():
            return certify(
                self.base,
                self.coverage.selections,
                self._value,
                moving_state=self.coverage.moving_state,
                decided_by=self.coverage.decided_by,
            )

    def export(self, directory: str | None = None, *, overwrite: bool = False) -> str:
        """Writes the tuned model in the base's own format, with its certificate.

        With `best_metric` the best state is exported, else the present one; with `use_ema` the
        moving averages.

        Args:
          directory: must not exist yet; by default `model_dir`/export.
          overwrite: True replaces an earlier export.

        Returns:
          The directory.

        Raises:
          finetune.exporting.FrozenElementsMoved: when a frozen element differs from the base.
          ValueError: when the directory exists.
        """
        self._check_in_hand()
        directory = os.path.join(self.model_dir, "export") if directory is None else directory
        with self._exported_state(), self._averaged():
            export(
                self.base,
                self.coverage.selections,
                directory,
                moving_state=self.coverage.moving_state,
                current=self._value,
                decided_by=self.coverage.decided_by,
                overwrite=overwrite,
            )
        return directory

    def first_batch(self) -> Any:
        """Returns the first training batch of a new run, for a look at the data.

        Raises:
          ValueError: when there is none.
        """
        for batch in self.task.train_dataset(self.batch_size, self.seed).take(1):
            return batch
        raise ValueError(_NO_BATCH)

    def _loop(self, num_steps: int) -> LoopResult:
        _used.add(self._given_optimizer)
        began = time.monotonic()
        parts = [self._train_loop.run(self._data.iterator, num_steps)]
        while parts[-1].ended:
            self._data.next_pass()
            left = num_steps - sum(part.steps for part in parts)
            parts.append(self._train_loop.run(self._data.iterator, left))
            if parts[-1].ended and not parts[-1].steps:
                raise ValueError(_NO_BATCH)
        loop = joined(parts)
        if loop.bad_step is not None:
            raise NonFiniteError(
                f"The loss or a gradient is not finite at step {loop.bad_step}. The step was not "
                f"taken; the last good checkpoint in {self.model_dir} is of step "
                f"{self._saved_step}. A lower learning rate, `global_clipnorm`, or a look at the "
                "data around that step may help."
            )
        scalars = {
            "loss": loop.loss,
            "gradient_norm": loop.gradient_norm,
            "steps_per_second": loop.steps / (time.monotonic() - began),
        }
        # A MultiOptimizer has no learning rate of its own.
        rate = getattr(self.optimizer, "learning_rate", None)
        if rate is not None:
            scalars["learning_rate"] = float(rate)
        self._write("train", scalars)
        return loop

    def _steps_to_go(self, target: int) -> int:
        """Returns how many steps to take before the next thing to do between two loops."""
        step = self.global_step
        stops = [target, step + self.steps_per_loop]
        for every in (self.eval_every, self.checkpoint_every):
            if every:
                stops.append((step // every + 1) * every)
        return min(stops) - step

    def _note_best(self, metrics: dict[str, float]) -> None:
        if self.best_metric is None:
            return
        value, best = metrics[self.best_metric], float(self._best_value)
        sign = 1 if self.best_mode == "max" else -1
        if math.isnan(best) or sign * value > sign * best:
            self._best_value.assign(value)
            self._stale.assign(0)
            self._checkpoints.save_best(self.global_step)
        else:
            self._stale.assign_add(1)

    def _enough(self) -> bool:
        return self.patience is not None and int(self._stale) >= self.patience

    def _save(self) -> None:
        if self._saved_step != self.global_step:
            if self._not_finite() > self._not_finite_in_base:
                raise NonFiniteError(
                    f"Trainable elements are not finite any more after step {self.global_step}, "
                    f"which is not saved; the last good checkpoint in {self.model_dir} is of step "
                    f"{self._saved_step}. A lower learning rate or `global_clipnorm` may help."
                )
            self.optimizer.frozen_slots_to_zero()
            self._checkpoints.save(self.global_step)
            self._saved_step = self.global_step

    def _not_finite(self) -> int:
        """Returns how many trainable elements are NaN or infinite."""
        variables = [self.base.variables[update.path].variable for update in self.optimizer.updates]
        packed = self.optimizer.pack(
            [components(variable)[0].read_value() for variable in variables]
        )
        return sum(int(tf.math.count_nonzero(~tf.math.is_finite(value))) for value in packed)

    def _after_restore(self) -> None:
        _used.add(self._given_optimizer)
        for update in self.optimizer.updates:
            update.before()
            update.push()

    def _saved_values(self) -> dict[str, Any]:
        """Returns what makes the model and its optimizer what they are, by path.

        O(trainable elements) where they are packed.
        """
        return {
            "values": {u.path: u.inner_variable.value for u in self.optimizer.updates},
            "slots": {
                path: {name: slot.value for name, slot in slots.items()}
                for path, slots in self.optimizer.slots.items()
            },
            "shared": {n: slot.value for n, slot in self.optimizer.shared_slots.items()},
            "moving_state": {
                path: self.base.variables[path].variable
                for path in sorted(self.coverage.moving_state)
            },
        }

    @contextlib.contextmanager
    def _exported_state(self) -> Iterator[None]:
        """Gives the model its best state inside the `with`, if one is kept, then the present."""
        if self.best_metric is None or not self._checkpoints.has_best:
            yield
            return
        variables = tf.nest.flatten(self._saved_values())
        present = [tf.identity(components(variable)[0].read_value()) for variable in variables]
        try:
            self._checkpoints.restore_best()
            self._after_restore()
            yield
        finally:
            for variable, value in zip(variables, present, strict=True):
                variable.assign(value)
            self._after_restore()

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        with self.optimizer.averaged():
            yield

    def _value(self, path: str) -> np.ndarray:
        return components(self.base.variables[path].variable)[0].numpy()

    def _seed_random_ops(self, global_step: tf.Tensor) -> Any:
        return self.base.set_random_state(self.seed, global_step)

    def _check_in_hand(self) -> None:
        if tf.distribute.has_strategy():
            raise ValueError(arguments.IN_SCOPE)
        if _trainer_of[self.base.module]() is not self:
            raise ValueError(
                f"The base's module is in the hands of a Trainer that was made later, so its "
                f"values are no more those of the run in {self.model_dir}. Make this Trainer "
                "again to go on from its last checkpoint, or load a base for each Trainer."
            )

    def _warn(self, random_ops: list[str]) -> None:
        """Says before the first step what will not move, and what a resume will not repeat."""
        if self._train_loop.without_gradient:
            logging.warning(
                "No gradient reaches %s: trainable by the rules, but they will not move.",
                _some(self._train_loop.without_gradient),
            )
        if random_ops:
            logging.warning(
                "A resume of this run will not be bit-exact: %s draw random numbers from a state "
                "that cannot be saved. Keras layers and stateless random ops can.",
                _some(random_ops),
            )
        if forgetful := self._data.forgetful():
            logging.warning(
                "A resume of this run may not be bit-exact: `task.train_dataset` shuffles, then "
                "%s, then repeats, and TensorFlow cannot save how a pass will be shuffled before "
                "it begins. Return one pass, without `repeat`, or repeat right after the shuffle.",
                forgetful,
            )
        if self._train_loop.untracked:
            logging.warning(
                "A resume of this run will not be bit-exact: a step writes to the variables %s, "
                "which the module does not hold, so they are not saved.",
                _some(self._train_loop.untracked),
            )

    def _write(self, name: str, scalars: dict[str, float]) -> None:
        if name not in self._summaries:
            folder = os.path.join(self.model_dir, name)
            self._summaries[name] = tf.summary.create_file_writer(folder)
        write_scalars(self._summaries[name], self.global_step, scalars)


def readable(metrics: dict[str, float]) -> str:
    """Returns metrics as one line for people.

    Example:
      >>> readable({"loss": 0.25, "f1": 0.8531234})
      'loss 0.25  f1 0.8531'
    """
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


_PASS = "data/number/.ATTRIBUTES/VARIABLE_VALUE"
_NO_BATCH = "`task.train_dataset` holds no batch: nothing to train on."


def _take(base: Base, trainer: Trainer) -> None:
    """Gives the module the base's values, which an earlier Trainer may have moved."""
    _trainer_of[base.module] = weakref.ref(trainer)
    digests = base.digests
    for path, named in base.variables.items():
        text = object if named.dtype == tf.string else None
        values = [np.asarray(copy.numpy(), text) for copy in components(named.variable)]
        if any(digest(value) != digests[path] for value in values):
            named.variable.assign(base.read(path))


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
