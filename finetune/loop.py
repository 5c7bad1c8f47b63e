"""The compiled loops: many training steps, and one pass of evaluation, each one tf.function.

Nothing of the host takes part in a step: the batch comes from a tf.data iterator inside the graph,
the finite check stops the loop inside the graph, and results are read once a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from finetune.optimizer import MaskedOptimizer
from finetune.packing import sum_duplicates
from finetune.randomness import stateful_random_ops
from finetune.slots import chain
from finetune.state import ModelState, components, written_variables
from finetune.task import Task


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """What some training steps did.

    Attributes:
      steps: how many steps were taken.
      loss: mean over these steps, regularizer included.
      gradient_norm: mean global norm of the gradient of the trainable elements, before clipping.
      bad_step: the number of the step whose loss or gradient was not finite and which was not
        taken, counted from 1, or None.
      ended: whether the data ended before.
    """

    steps: int
    loss: float
    gradient_norm: float
    bad_step: int | None
    ended: bool


def joined(parts: Sequence[LoopResult]) -> LoopResult:
    """Returns what several loops in a row did together.

    Example:
      >>> joined([LoopResult(3, 1.0, 4.0, None, True), LoopResult(1, 5.0, 0.0, None, False)])
      LoopResult(steps=4, loss=2.0, gradient_norm=3.0, bad_step=None, ended=False)
    """
    steps = sum(part.steps for part in parts)
    mean = max(steps, 1)
    return LoopResult(
        steps,
        sum(part.loss * part.steps for part in parts) / mean,
        sum(part.gradient_norm * part.steps for part in parts) / mean,
        parts[-1].bad_step,
        parts[-1].ended,
    )


class TrainLoop:
    """Takes training steps on the trainable elements of a module, inside one tf.function.

    A step that is not finite is not taken: variables, slots and state are as before it.

    Args:
      module: what `task.forward` calls.
      variables: {path: variable} of those with trainable elements, in the order of the optimizer's
        `build`.
      others: {path: variable} of all others; what the model writes to of these while it trains,
        statistics and seeds, is the base's again whenever the loop is not running.
      moving: {path: variable} of state that the model may move for good.
      optimizer: a built MaskedOptimizer.
      task: forward and loss.
      strategy: where replicas run; a global batch is cut into one part for each.
      global_step: int64 variable that counts the steps taken.
      randomness: called with the global step in each replica; seeds the module's random ops.
      batch_spec: the batches' `element_spec`.

    Attributes:
      state: the state that the model writes to.
      untracked: names of variables that a step writes to and that belong to nothing known here.
      without_gradient: paths of trainable variables that no gradient reaches, once it is traced.
    """

    def __init__(
        self,
        module: Any,
        variables: Mapping[str, tf.Variable],
        others: Mapping[str, tf.Variable],
        moving: Mapping[str, tf.Variable],
        optimizer: MaskedOptimizer,
        task: Task,
        strategy: tf.distribute.Strategy,
        global_step: tf.Variable,
        randomness: Callable[[tf.Tensor], Any],
        batch_spec: Any,
    ):
        self._module = module
        self._variables = list(variables.values())
        self._optimizer = optimizer
        self._task = task
        self._strategy = strategy
        self._global_step = global_step
        self._randomness = randomness
        self._loss_scaled = any(
            isinstance(part, keras.optimizers.LossScaleOptimizer) for part in chain(optimizer.inner)
        )
        self.without_gradient: list[str] = []
        self._function = tf.function(self._run, autograph=False)

        probe = tf.function(self._forward, autograph=False).get_concrete_function(batch_spec)
        written = written_variables(probe)
        copies = _copies(written)
        self.state = ModelState(
            {path: v for path, v in others.items() if _copies([v]) & copies},
            {path: v for path, v in {**moving, **variables}.items() if _copies([v]) & copies},
        )
        known = _copies([*others.values(), *moving.values(), *variables.values()])
        self.untracked = [v.name for v in written if not _copies([v]) & known]

    @property
    def traces(self) -> int:
        """How often the loop was traced; 1 unless something is wrong."""
        return self._function.experimental_get_tracing_count()

    def trace(self, iterator: Any) -> list[str]:
        """Traces the loop before its first step; returns the random ops that no resume repeats.

        Raises:
          ValueError: when no gradient reaches any trainable variable.
        """
        return stateful_random_ops(self._function.get_concrete_function(iterator, _count(0)))

    def run(self, iterator: Any, num_steps: int) -> LoopResult:
        """Takes up to `num_steps` steps, fewer when the data ends or something is not finite.

        Args:
          iterator: of global batches.
          num_steps: how many to take.
        """
        with self.state.in_use():
            done, loss, norm, bad, ended = self._function(iterator, _count(num_steps))
        steps = int(done)
        mean = max(steps, 1)
        bad_step = int(self._global_step) + 1 if bool(bad) else None
        return LoopResult(steps, float(loss) / mean, float(norm) / mean, bad_step, bool(ended))

    def _run(self, iterator: Any, num_steps: tf.Tensor) -> Any:
        self._optimizer.pull()

        def body(done: Any, loss: Any, norm: Any, bad: Any, ended: Any) -> Any:
            batch = iterator.get_next_as_optional()
            taken, step_loss, step_norm, ended = tf.cond(
                batch.has_value(),
                lambda: (*self._step(batch.get_value()), False),
                lambda: (False, 0.0, 0.0, True),
            )
            bad = ~taken & ~ended
            return done + tf.cast(taken, tf.int64), loss + step_loss, norm + step_norm, bad, ended

        return tf.while_loop(
            lambda done, loss, norm, bad, ended: (done < num_steps) & ~bad & ~ended,
            body,
            (_count(0), tf.constant(0.0), tf.constant(0.0), tf.constant(False), tf.constant(False)),
        )

    def _step(self, batch: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Takes a step if it is finite; returns whether, its loss, the gradient's norm."""
        before = self.state.values()
        loss, packed = self._gradients(batch)
        norm = tf.linalg.global_norm([_values(g) for g in packed if g is not None])
        norm /= tf.cast(self._optimizer.scale_loss(tf.constant(1.0)), norm.dtype)
        finite = tf.math.is_finite(loss)
        if not self._loss_scaled:
            # Infinite gradients are how a loss scale finds its size; the optimizer skips them.
            finite &= tf.math.is_finite(norm)
        self.state.settle(finite, before)
        tf.cond(finite, lambda: self._update(packed), lambda: tf.constant(False))
        norm = tf.cast(norm, tf.float32)
        return finite, tf.where(finite, loss, 0.0), tf.where(finite, norm, 0.0)

    def _update(self, packed: Sequence[Any]) -> tf.Tensor:
        self._optimizer.update(packed)
        # Here, so that a step and its number are one even if the data fails in the next one.
        self._global_step.assign_add(1)
        return tf.constant(True)

    def _gradients(self, batch: Any) -> tuple[tf.Tensor, list[Any]]:
        """Returns the loss of a global batch and the packed gradients, summed over replicas."""
        step = self._global_step.read_value()
        loss, packed = self._in_replicas(lambda part: self._replica_gradients(part, step), batch)
        if self._strategy.num_replicas_in_sync == 1:
            return loss, packed
        # Replicas may have touched the same rows, which Keras must see once.
        reduced = [g if g is None else sum_duplicates(self._summed(g)) for g in packed]
        return self._summed(loss), reduced

    def _in_replicas(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Returns what `function` gives for each replica's part of the batch."""
        replicas = self._strategy.num_replicas_in_sync
        if replicas == 1:
            return function(batch)

        def in_replica() -> Any:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return function(_part(batch, replica, replicas))

        return self._strategy.run(in_replica)

    def _summed(self, value: Any) -> Any:
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    def _replica_gradients(self, batch: Any, step: tf.Tensor) -> tuple[tf.Tensor, list]:
        """Returns this replica's share of the global mean loss and its packed gradients."""
        self._randomness(step)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            loss = self._replica_loss(batch)
            scaled = self._optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self._variables)
        self._check_connected(gradients)
        return loss, self._optimizer.pack(gradients)

    def _replica_loss(self, batch: Any) -> tf.Tensor:
        total, count, *_ = _summed_loss(self._task, self._module, batch, training=True)
        loss = tf.math.divide_no_nan(total, _summed_over_replicas(count))
        if self._task.regularizer is not None:
            # Once for the global batch, not once a replica.
            loss += (
                tf.cast(self._task.regularizer(self._module), loss.dtype)
                / self._strategy.num_replicas_in_sync
            )
        return loss

    def _forward(self, batch: Any) -> Any:
        return self._in_replicas(self._replica_loss, batch)

    def _check_connected(self, gradients: Sequence[Any]) -> None:
        paths = [update.path for update in self._optimizer.updates]
        missing = [p for p, g in zip(paths, gradients, strict=True) if g is None]
        self.without_gradient = missing
        if len(missing) == len(paths):
            raise ValueError(
                f"No gradient reaches any trainable variable ({', '.join(missing[:10])}): the loss "
                "does not depend on them, or an op between has no gradient. Check that "
                "`task.forward` calls the model with training=True and returns its outputs."
            )


class EvalLoop:
    """Computes loss and metrics over a finite dataset inside one tf.function.

    Args:
      module: what `task.forward` calls.
      task: forward, loss and metrics.

    Attributes:
      names: of what `run` returns: 'loss' and the metrics' names.

    Raises:
      ValueError: when two metrics, or one and the loss, have the same name.
    """

    def __init__(self, module: Any, task: Task):
        self._module = module
        self._task = task
        # In float32 a long evaluation would lose what a single batch adds.
        self._loss_sum = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._weight_sum = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._metrics = list(task.metrics())
        self.names = ["loss", *(metric.name for metric in self._metrics)]
        if len(set(self.names)) < len(self.names):
            raise ValueError(
                f"`task.metrics` and the loss are called {', '.join(self.names)}: give each metric "
                "a name of its own."
            )
        step = tf.autograph.experimental.do_not_convert(self._step)
        self._function = tf.function(functools.partial(_for_each, step))

    @property
    def traces(self) -> int:
        """How often the loop was traced."""
        return self._function.experimental_get_tracing_count()

    def run(self, dataset: tf.data.Dataset) -> dict[str, float]:
        """Returns {'loss': ..., metric name: ...} over all batches of the dataset.

        Raises:
          ValueError: when the dataset holds no batch, or a metric is not a single number.
        """
        self._loss_sum.assign(0.0)
        self._weight_sum.assign(0.0)
        for metric in self._metrics:
            metric.reset_state()
        batches = self._function(dataset)
        if int(batches) == 0:
            raise ValueError("`task.eval_dataset` holds no batch: nothing can be evaluated.")
        loss = tf.math.divide_no_nan(self._loss_sum, self._weight_sum)
        return {"loss": float(loss), **{m.name: _number(m) for m in self._metrics}}

    def _step(self, batch: Any) -> None:
        total, count, y, outputs, weights = _summed_loss(
            self._task, self._module, batch, training=False
        )
        self._loss_sum.assign_add(tf.cast(total, tf.float64))
        self._weight_sum.assign_add(tf.cast(count, tf.float64))
        for metric in self._metrics:
            metric.update_state(y, outputs, sample_weight=weights)


def weighted_sum(losses: Any, weights: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weighted sum of losses and the sum of the weights, both float32 scalars.

    Args:
      losses: the loss of each position, of one axis or more.
      weights: None, or one weight for each position, or for each leading index of `losses`.

    Raises:
      ValueError: when the losses are a single number, or the weights have more axes than they.

    Example:
      >>> total, count = weighted_sum(tf.constant([[1., 2.], [3., 4.]]), tf.constant([1., 0.]))
      >>> float(total), float(count)
      (3.0, 2.0)
    """
    losses = tf.cast(losses, tf.float32)
    if losses.shape.rank == 0:
        # Batches of different sizes would count alike, and padding would count.
        raise ValueError(
            "`task.loss` gives one number for a batch: it must not reduce, Keras losses need "
            "reduction=None, for instance keras.losses.MeanSquaredError(reduction=None)."
        )
    if weights is None:
        return tf.reduce_sum(losses), tf.cast(tf.size(losses), tf.float32)
    weights = tf.cast(weights, tf.float32)
    if weights.shape.rank > losses.shape.rank:
        raise ValueError(
            f"`weights` (shape {weights.shape}) have more axes than the losses (shape "
            f"{losses.shape}): `task.loss` must not reduce, Keras losses need reduction=None."
        )
    for _ in range(losses.shape.rank - weights.shape.rank):
        weights = weights[..., tf.newaxis]
    weights = tf.broadcast_to(weights, tf.shape(losses))
    # Padding may have produced a NaN where nothing counts, and 0 * nan is nan.
    counted = tf.where(weights != 0, losses * weights, tf.zeros_like(losses))
    return tf.reduce_sum(counted), tf.reduce_sum(weights)


def _summed_loss(
    task: Task, module: Any, batch: Any, *, training: bool
) -> tuple[tf.Tensor, tf.Tensor, Any, Any, Any]:
    """Returns sum of losses and of weights of a batch, then y, outputs and weights."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = task.forward(module, x, training=training)
    try:
        losses = tf.convert_to_tensor(task.loss(y, outputs))
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        raise ValueError(
            f"`task.loss` does not take y {_shapes(y)} and outputs {_shapes(outputs)}: {error}"
        ) from error
    _check_batch_size(x, losses)
    return *weighted_sum(losses, weights), y, outputs, weights


def _check_batch_size(x: Any, losses: tf.Tensor) -> None:
    """Refuses outputs that claim another batch size than the inputs have.

    A SavedModel may hold a function that was traced for one batch size and accepts others all the
    same; TensorFlow then believes the shape of the trace, and a mean divides by the wrong number.
    """
    inputs = tf.nest.flatten(x)
    if not inputs or not losses.shape.rank or not getattr(inputs[0], "shape", None):
        return
    given, told = inputs[0].shape[0], losses.shape[0]
    if told is not None and given != told:
        raise ValueError(
            f"For inputs of batch size {given or 'any'} the losses claim batch size {told}: the "
            "model's function seems to have been traced for that size alone. Save the model with "
            "an input_signature whose batch size is None, name another function by "
            f"`finetune.load(..., endpoint=...)`, or let the dataset give batches of {told}, with "
            "drop_remainder=True."
        )


def _shapes(tensors: Any) -> Any:
    return tf.nest.map_structure(
        lambda tensor: f"{tf.as_dtype(tensor.dtype).name}{list(tensor.shape)}", tensors
    )


def _number(metric: keras.metrics.Metric) -> float:
    result = metric.result()
    if isinstance(result, dict) or tf.size(result) != 1:
        raise ValueError(
            f"`task.metrics`: {metric.name} gives {result}, not one number: average it, or split "
            "it into several metrics."
        )
    return float(result)


def _for_each(step: Callable[[Any], None], dataset: tf.data.Dataset) -> tf.Tensor:
    batches = tf.constant(0)
    for batch in dataset:
        step(batch)
        batches += 1
    return batches


def _copies(variables: Iterable[tf.Variable]) -> set[int]:
    """Returns what tells the copies of variables from those of others."""
    return {id(copy) for variable in variables for copy in components(variable)}


def _count(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _part(batch: Any, replica: tf.Tensor, replicas: int) -> Any:
    """Returns one replica's part of a global batch; parts of a partial batch differ by size."""

    def cut(tensor: tf.Tensor) -> tf.Tensor:
        size = tf.shape(tensor)[0]
        return tensor[size * replica // replicas : size * (replica + 1) // replicas]

    return tf.nest.map_structure(cut, batch)


def _summed_over_replicas(value: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce(tf.distribute.ReduceOp.SUM, value)
