"""The compiled loops: many training steps, and one pass of evaluation, each one tf.function.

Nothing of the host takes part in a step: the batch comes from a tf.data iterator inside the graph,
the finite check stops the loop inside the graph, and results are read once a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from finetune.optimizer import MaskedOptimizer
from finetune.randomness import stateful_random_ops
from finetune.slots import chain
from finetune.task import Task


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """What some training steps did.

    Attributes:
      steps: how many steps were taken.
      loss: mean over these steps, regularizer included.
      gradient_norm: mean global norm of the gradient of the trainable elements, before clipping.
      bad_step: the global step whose loss or gradient was not finite and which was not taken, or
        None.
    """

    steps: int
    loss: float
    gradient_norm: float
    bad_step: int | None


class TrainLoop:
    """Takes training steps on the trainable elements of a module, inside one tf.function.

    Args:
      module: what `task.forward` calls.
      variables: the variables with trainable elements, in the order of the optimizer's `build`.
      optimizer: a built MaskedOptimizer.
      task: forward and loss.
      strategy: where replicas run; a global batch is cut into one part for each.
      frozen_state: {path: variable} of non-trainable state that the model may use while it trains
        but that must be as in the base whenever the loop is not running.
      randomness: called with the global step in each replica; seeds the module's random ops.
    """

    def __init__(
        self,
        module: Any,
        variables: Sequence[tf.Variable],
        optimizer: MaskedOptimizer,
        task: Task,
        strategy: tf.distribute.Strategy,
        frozen_state: Mapping[str, tf.Variable],
        randomness: Callable[[tf.Tensor], Any],
    ):
        self._module = module
        self._variables = list(variables)
        self._optimizer = optimizer
        self._task = task
        self._strategy = strategy
        self._frozen_state = list(frozen_state.values())
        # Statistics and seeds go on from one loop to the next here, out of the model's sight.
        self.working_state = {
            path: tf.Variable(variable.read_value(), trainable=False)
            for path, variable in frozen_state.items()
        }
        self._randomness = randomness
        self._scaled = any(
            isinstance(part, keras.optimizers.LossScaleOptimizer) for part in chain(optimizer.inner)
        )
        self.without_gradient: list[str] = []
        self._function = tf.function(self._run, autograph=False)

    @property
    def traces(self) -> int:
        """How often the loop was traced; 1 unless something is wrong."""
        return self._function.experimental_get_tracing_count()

    def stateful_random_ops(self, iterator: Any) -> list[str]:
        """Returns the random ops of the loop that a resume cannot set back, by name."""
        return stateful_random_ops(self._function.get_concrete_function(iterator, *_steps(0, 0)))

    def run(self, iterator: Any, global_step: int, num_steps: int) -> LoopResult:
        """Takes up to `num_steps` steps, fewer when a loss or gradient is not finite.

        Args:
          iterator: of global batches; must not end.
          global_step: the number of steps taken before.
          num_steps: how many to take.
        """
        done, loss, norm, bad = self._function(iterator, *_steps(global_step, num_steps))
        steps = int(done)
        mean = max(steps, 1)
        bad_step = global_step + steps if bool(bad) else None
        return LoopResult(steps, float(loss) / mean, float(norm) / mean, bad_step)

    def _run(self, iterator: Any, global_step: tf.Tensor, num_steps: tf.Tensor) -> Any:
        base_state = [tf.identity(variable.read_value()) for variable in self._frozen_state]
        for variable, working in zip(self._frozen_state, self.working_state.values(), strict=True):
            variable.assign(working)
        self._optimizer.pull()

        def body(done: tf.Tensor, loss: tf.Tensor, norm: tf.Tensor, bad: tf.Tensor) -> Any:
            step_loss, packed = self._gradients(next(iterator), global_step + done)
            step_norm = tf.linalg.global_norm([_values(g) for g in packed if g is not None])
            finite = tf.math.is_finite(step_loss)
            if self._scaled:
                # Infinite gradients are how a loss scale finds its size; the optimizer skips them.
                step_norm /= tf.cast(self._optimizer.scale_loss(1.0), step_norm.dtype)
            else:
                finite &= tf.math.is_finite(step_norm)
            tf.cond(finite, lambda: self._update(packed), lambda: tf.constant(False))
            one = tf.cast(finite, tf.int64)
            return (
                done + one,
                loss + tf.where(finite, step_loss, 0.0),
                norm + tf.where(finite, tf.cast(step_norm, tf.float32), 0.0),
                bad | ~finite,
            )

        result = tf.while_loop(
            lambda done, loss, norm, bad: (done < num_steps) & ~bad,
            body,
            (tf.constant(0, tf.int64), tf.constant(0.0), tf.constant(0.0), tf.constant(False)),
        )
        for variable, working, base in zip(
            self._frozen_state, self.working_state.values(), base_state, strict=True
        ):
            working.assign(variable)
            variable.assign(base)
        return result

    def _update(self, packed: Sequence[Any]) -> tf.Tensor:
        self._optimizer.update(packed)
        return tf.constant(True)

    def _gradients(self, batch: Any, global_step: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        """Returns the loss of a global batch and the packed gradients, summed over replicas."""
        replicas = self._strategy.num_replicas_in_sync
        if replicas == 1:
            return self._replica_gradients(batch, global_step)

        def in_replica() -> Any:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return self._replica_gradients(_part(batch, replica, replicas), global_step)

        loss, packed = self._strategy.run(in_replica)
        reduced = [
            None if g is None else self._strategy.reduce(tf.distribute.ReduceOp.SUM, g, axis=None)
            for g in packed
        ]
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None), reduced

    def _replica_gradients(self, batch: Any, global_step: tf.Tensor) -> tuple[tf.Tensor, list]:
        """Returns this replica's share of the global mean loss and its packed gradients."""
        self._randomness(global_step)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            outputs = self._task.forward(self._module, x, training=True)
            total, count = weighted_sum(self._task.loss(y, outputs), weights)
            loss = tf.math.divide_no_nan(total, _summed_over_replicas(count))
            if self._task.regularizer is not None:
                # Once for the global batch, not once a replica.
                share = self._strategy.num_replicas_in_sync
                loss += tf.cast(self._task.regularizer(self._module), loss.dtype) / share
            scaled = self._optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self._variables)
        self._check_connected(gradients)
        return loss, self._optimizer.pack(gradients)

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
    """

    def __init__(self, module: Any, task: Task):
        self._module = module
        self._task = task
        self._loss_sum = tf.Variable(0.0, trainable=False)
        self._weight_sum = tf.Variable(0.0, trainable=False)
        self._metrics = list(task.metrics())
        step = tf.autograph.experimental.do_not_convert(self._step)
        self._function = tf.function(functools.partial(_for_each, step))

    @property
    def traces(self) -> int:
        """How often the loop was traced."""
        return self._function.experimental_get_tracing_count()

    def run(self, dataset: tf.data.Dataset) -> dict[str, float]:
        """Returns {'loss': ..., metric name: ...} over all batches of the dataset.

        Raises:
          ValueError: when the dataset holds no batch.
        """
        self._loss_sum.assign(0.0)
        self._weight_sum.assign(0.0)
        for metric in self._metrics:
            metric.reset_state()
        batches = self._function(dataset)
        if int(batches) == 0:
            raise ValueError("`eval_dataset` holds no batch: nothing can be evaluated.")
        loss = tf.math.divide_no_nan(self._loss_sum, self._weight_sum)
        results = {metric.name: float(metric.result()) for metric in self._metrics}
        return {"loss": float(loss), **results}

    def _step(self, batch: Any) -> None:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = self._task.forward(self._module, x, training=False)
        total, count = weighted_sum(self._task.loss(y, outputs), weights)
        self._loss_sum.assign_add(total)
        self._weight_sum.assign_add(count)
        for metric in self._metrics:
            metric.update_state(y, outputs, sample_weight=weights)


def weighted_sum(losses: Any, weights: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weighted sum of losses and the sum of the weights, both float32 scalars.

    Args:
      losses: the loss of each position, of any shape; a scalar counts as one position.
      weights: None, or one weight for each position, or for each leading index of `losses`.

    Raises:
      ValueError: when the weights have more axes than the losses.

    Example:
      >>> total, count = weighted_sum(tf.constant([[1., 2.], [3., 4.]]), tf.constant([1., 0.]))
      >>> float(total), float(count)
      (3.0, 2.0)
    """
    losses = tf.cast(losses, tf.float32)
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


def _for_each(step: Callable[[Any], None], dataset: tf.data.Dataset) -> tf.Tensor:
    batches = tf.constant(0)
    for batch in dataset:
        step(batch)
        batches += 1
    return batches


def _steps(global_step: int, num_steps: int) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(global_step, tf.int64), tf.constant(num_steps, tf.int64)


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
