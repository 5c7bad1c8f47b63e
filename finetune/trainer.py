"""The Trainer: a base, rules and a task become a tuned model and its certificate."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from finetune import runs
from finetune.certificate import Certificate, certify
from finetune.export import export
from finetune.loading import Base, load
from finetune.loop import EvalLoop, LoopResult, TrainLoop
from finetune.optimizer import MaskedOptimizer
from finetune.preemption import Preempted, sigterm_noted
from finetune.progress import Progress
from finetune.rules import Rules, resolve
from finetune.selection import selections_digest
from finetune.selectors import as_selector
from finetune.summaries import write_scalars
from finetune.task import Task


class NonFiniteError(ValueError):
    """The loss or a gradient was NaN or infinite; nothing of that step reached the model."""


class Trainer:
    """Trains exactly the elements that the rules name, and goes on where an earlier run stopped.

    Making a Trainer decides the coverage and, when `model_dir` holds a run already, restores its
    newest whole checkpoint: trainable elements, slots, step, random state, data position. A run
    killed at any step and started again ends bit-identical to one that was not.

    Args:
      base: what to start from: a `finetune.Base`, the path of a SavedModel, or a function that
        returns a Base (called inside the strategy's scope).
      rules: (pattern, selector) pairs; the first that matches a variable's whole path wins.
      task: data, loss and metrics.
      optimizer: any Keras 3 optimizer; clipping, EMA, accumulation, loss scale and schedules are
        its arguments.
      model_dir: where the run keeps its checkpoints, TensorBoard events and evaluations.
      strategy: a tf.distribute strategy; by default the current one.
      batch_size: examples in a global batch.
      num_steps: the step at which `train` stops, counted from the base.
      steps_per_loop: steps in one call of the compiled loop; SIGTERM is heeded between two calls.
      eval_every: steps between evaluations; by default only `evaluate` evaluates.
      checkpoint_every: steps between checkpoints; by default `eval_every`, else ten loops.
      seed: of the data order and of the model's random ops.
      best_metric: name of the metric that decides what is kept in `best/` and exported.
      best_mode: 'max' or 'min': which value of `best_metric` is better.
      patience: stop after so many evaluations in a row without a better `best_metric`.
      mode: how partly trainable variables are updated: 'auto', 'packed' or 'dense'.
      keep: how many of the latest checkpoints to keep.
      progress: False shows no progress.

    Raises:
      ValueError: for arguments out of range, rules that do not fit the base, or a base that was
        not made under the strategy.
      finetune.runs.RunMismatch: when `model_dir` holds a run that began otherwise.

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
        _check_counts(
            batch_size=batch_size, num_steps=num_steps, steps_per_loop=steps_per_loop,
            eval_every=eval_every, checkpoint_every=checkpoint_every, patience=patience, keep=keep,
        )  # fmt: skip
        _check_best(best_metric, best_mode, patience, eval_every)
        if isinstance(optimizer, MaskedOptimizer):
            raise ValueError("`optimizer` is a MaskedOptimizer already: give the Trainer the inner")
        self.strategy = strategy or tf.distribute.get_strategy()
        self.base = _base(base, self.strategy)
        self.task = task
        self.model_dir = os.fspath(model_dir)
        self.batch_size = batch_size
        self.num_steps = num_steps
        self.steps_per_loop = steps_per_loop
        self.eval_every = eval_every
        self.checkpoint_every = checkpoint_every or eval_every or 10 * steps_per_loop
        self.seed = seed
        self.best_metric = best_metric
        self.best_mode = best_mode
        self.patience = patience
        self.progress = progress

        self.coverage = runs.open_run(
            self.model_dir,
            lambda: resolve(rules, self.base.specs()),
            {
                "base": self.base.fingerprint,
                "rules": [[pattern, as_selector(selector).text] for pattern, selector in rules],
                "seed": seed,
                "batch_size": batch_size,
            },
        )
        trained = {
            path: selection
            for path, selection in self.coverage.selections.items()
            if selection.count and path not in self.coverage.state
        }
        variables = {path: self.base.variables[path].variable for path in trained}
        self.optimizer = MaskedOptimizer(optimizer, trained, mode=mode)
        self.optimizer.build(list(variables.values()), list(variables))
        frozen_state = {
            path: self.base.variables[path].variable
            for path in self.coverage.state - self.coverage.moving_state
        }
        self._train_loop = TrainLoop(
            self.base.module, list(variables.values()), self.optimizer, task, self.strategy,
            dict(sorted(frozen_state.items())), self._seed_random_ops,
        )  # fmt: skip
        self._eval_loop = EvalLoop(self.base.module, task)
        self._iterator = iter(_endless(task.train_dataset(batch_size, seed)))
        self._eval_dataset = task.eval_dataset(batch_size)

        self._global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._best_value = tf.Variable(math.nan, dtype=tf.float64, trainable=False)
        self._stale = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._checkpoints = runs.Checkpoints(
            self.model_dir,
            self._checkpointed(),
            {
                "base": self.base.fingerprint,
                "selections": selections_digest(self.coverage.selections),
            },
            keep,
        )
        self._summaries = {
            name: tf.summary.create_file_writer(os.path.join(self.model_dir, name))
            for name in ("train", "eval")
        }
        self._saved_step: int | None = None
        if self._checkpoints.restore_latest() is not None:
            self._after_restore()
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
          {'global_step': ..., 'loss': mean of the last loop}, and the last evaluation's metrics.

        Raises:
          NonFiniteError: when loss or gradients are NaN or infinite; names the step. The last
            good checkpoint and the values before that step stay.
          Preempted: after SIGTERM, when the state is saved; exits with status 42 if not caught.
          ValueError: when no gradient reaches a trainable variable, or the data is empty or its
            position cannot be saved.
        """
        target = num_steps if num_steps is not None else self.num_steps
        if target is None:
            raise ValueError("`num_steps` (None) must be given, to the Trainer or to `train`.")
        result: dict[str, float] = {}
        if self.global_step >= target or self._enough():
            logging.info("Nothing to do: step %d of %d is reached.", self.global_step, target)
            return {"global_step": self.global_step, **result}
        with (
            sigterm_noted() as preempted,
            Progress(target, self.global_step, self.progress) as progress,
        ):
            if self._saved_step is None:
                # Shows at once whether a resume is possible, and is the last good state of a run
                # whose first loss is NaN.
                self._save()
                self._write("train", {"trainable_share": self.coverage.trainable /
                                      max(self.coverage.total, 1)})  # fmt: skip
                self._warn_of_randomness()
            while self.global_step < target and not self._enough():
                loop = self._loop(self._steps_to_go(target))
                result = {"loss": loop.loss}
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
        and to evaluations.jsonl.
        """
        with self._averaged():
            metrics = self._eval_loop.run(self._eval_dataset)
        self._write("eval", metrics)
        runs.record_evaluation(self.model_dir, self.global_step, metrics)
        return metrics

    def certificate(self) -> Certificate:
        """Returns what changed against the base in the present model, and proof of what did not."""
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
          overwrite: True replaces what stands there.

        Returns:
          The directory.

        Raises:
          finetune.export.FrozenElementsMoved: when a frozen element differs from the base.
          ValueError: when the directory exists.
        """
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
        """Returns the first training batch of a new run, for a look at the data."""
        return next(iter(self.task.train_dataset(self.batch_size, self.seed)))

    def _loop(self, num_steps: int) -> LoopResult:
        began = time.monotonic()
        first = self.global_step
        try:
            loop = self._train_loop.run(self._iterator, first, num_steps)
        except tf.errors.OutOfRangeError as error:
            raise ValueError("`task.train_dataset` holds no batch: nothing to train on.") from error
        self._global_step.assign_add(loop.steps)
        if self._train_loop.traces == 1 and first == 0 and self._train_loop.without_gradient:
            logging.warning(
                "No gradient reaches %s: trainable by the rules, but they will not move.",
                ", ".join(self._train_loop.without_gradient),
            )
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
        if self.best_metric not in metrics:
            raise ValueError(
                f"`best_metric` ({self.best_metric!r}) is not among the task's metrics: "
                f"{', '.join(metrics)}."
            )
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
            self.optimizer.frozen_slots_to_zero()
            self._checkpoints.save(self.global_step)
            self._saved_step = self.global_step

    def _after_restore(self) -> None:
        for update in self.optimizer.updates:
            update.before()
            update.push()
        self._saved_step = self.global_step

    def _checkpointed(self) -> dict[str, Any]:
        """Returns everything that a resume needs, by path; O(trainable elements) when packed."""
        return {
            "values": {u.path: u.inner_variable.value for u in self.optimizer.updates},
            "slots": {
                path: {name: slot.value for name, slot in slots.items()}
                for path, slots in self.optimizer.slots.items()
            },
            "shared": {n: slot.value for n, slot in self.optimizer.shared_slots.items()},
            "working_state": self._train_loop.working_state,
            "moving_state": {
                path: self.base.variables[path].variable
                for path in sorted(self.coverage.moving_state)
            },
            "global_step": self._global_step,
            "best_value": self._best_value,
            "stale": self._stale,
            "iterator": self._iterator,
        }

    @contextlib.contextmanager
    def _exported_state(self) -> Iterator[None]:
        """Gives the model its best state inside the `with`, if one is kept, then the latest."""
        best = self._checkpoints.best if self.best_metric else None
        if best is None:
            yield
            return
        self._save()
        self._checkpoints.restore(best)
        self._after_restore()
        try:
            yield
        finally:
            self._checkpoints.restore_latest()
            self._after_restore()

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        # Before the first step there is no average yet, and the slots hold zeros.
        with contextlib.ExitStack() as stack:
            if self.global_step:
                stack.enter_context(self.optimizer.averaged())
            yield

    def _value(self, path: str) -> np.ndarray:
        variable = self.base.variables[path].variable
        if isinstance(variable, tf.distribute.DistributedValues):
            variable = variable.values[0]
        return variable.numpy()

    def _seed_random_ops(self, global_step: tf.Tensor) -> Any:
        return self.base.set_random_state(self.seed, global_step)

    def _warn_of_randomness(self) -> None:
        names = self._train_loop.stateful_random_ops(self._iterator)
        if names:
            logging.warning(
                "A resume of this run will not be bit-exact: %s draw random numbers from a state "
                "that cannot be saved. Keras layers and stateless random ops can.",
                ", ".join(names[:10]),
            )

    def _write(self, writer: str, scalars: dict[str, float]) -> None:
        write_scalars(self._summaries[writer], self.global_step, scalars)


def readable(metrics: dict[str, float]) -> str:
    """Returns metrics as one line for people.

    Example:
      >>> readable({"loss": 0.25, "f1": 0.8531234})
      'loss 0.25  f1 0.8531'
    """
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _base(base: Base | str | Callable[[], Base], strategy: tf.distribute.Strategy) -> Base:
    if not isinstance(base, Base):
        with strategy.scope():
            base = load(base) if isinstance(base, (str, os.PathLike)) else base()
    if strategy.num_replicas_in_sync > 1:
        plain = [
            path for path, named in base.variables.items()
            if not isinstance(named.variable, tf.distribute.DistributedValues)
        ]  # fmt: skip
        if plain:
            raise ValueError(
                f"`base` was not loaded under the strategy ({type(strategy).__name__}): "
                f"`{plain[0]}` is a single copy. Pass a path or a function that returns the Base, "
                "or load it inside `with strategy.scope():`."
            )
    return base


def _endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        dataset = dataset.repeat()
    return dataset.with_options(options)


def _check_counts(**counts: int | None) -> None:
    wrong = [
        f"`{name}` ({value!r})" for name, value in counts.items()
        if value is not None and (not isinstance(value, int) or value < 1)
    ]  # fmt: skip
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must be whole numbers of 1 or more.")


def _check_best(
    best_metric: str | None, best_mode: str, patience: int | None, eval_every: int | None
) -> None:
    if best_mode not in ("max", "min"):
        raise ValueError(f"`best_mode` ({best_mode!r}) must be 'max' or 'min'.")
    if patience is not None and best_metric is None:
        raise ValueError(f"`patience` ({patience}) needs a `best_metric` to watch.")
    if best_metric is not None and eval_every is None:
        raise ValueError(
            f"`best_metric` ({best_metric!r}) needs `eval_every`: without evaluations during "
            "training there is no best state."
        )
