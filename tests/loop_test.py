import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune.loop import EvalLoop, TrainLoop, weighted_sum
from finetune.optimizer import MaskedOptimizer
from finetune.task import Task


def no_data(*arguments):
    raise AssertionError("loops are given their data")


def squared_error(y, outputs):
    return tf.square(outputs - y)


def linear(module, x, training):
    return tf.linalg.matvec(x, module.w)


def weights_module(*values) -> tf.Module:
    module = tf.Module()
    module.w = tf.Variable(values)
    return module


def task_of(loss=squared_error, forward=linear, **others) -> Task:
    return Task(no_data, no_data, loss, forward=forward, **others)


class Loop:
    """A TrainLoop over batches, with its optimizer and iterator."""

    def __init__(
        self, module, batches, task=None, optimizer=None, selector=None, others=(), **more
    ):
        trained = {"w": module.w}
        rules = {"w": selector or (lambda spec: np.ones(spec.shape, np.bool_))}
        self.optimizer = MaskedOptimizer(optimizer or keras.optimizers.SGD(0.5), rules)
        self.optimizer.build(list(trained.values()), list(trained))
        self.step = tf.Variable(0, dtype=tf.int64)
        self.seeds = []
        self.iterator = iter(batches)
        self.loop = TrainLoop(
            module,
            trained,
            dict(others),
            more.get("moving", {}),
            self.optimizer,
            task or task_of(),
            tf.distribute.get_strategy(),
            self.step,
            self.seeds.append,
            batches.element_spec,
        )

    def run(self, steps):
        return self.loop.run(self.iterator, steps)


def batches_of(*batches) -> tf.data.Dataset:
    """One batch after the other, whatever their sizes, over and over."""
    parts = [tf.data.Dataset.from_tensors(tf.nest.map_structure(tf.constant, b)) for b in batches]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.concatenate(part)
    return whole.repeat()


EYE = ([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0])


def test_a_step_by_hand():
    """w = [1, 2] gives the outputs 1 and 2, the losses 1 and 4, the gradient [1, 2]."""
    module = weights_module(1.0, 2.0)
    result = Loop(module, batches_of(EYE)).run(1)
    assert module.w.numpy().tolist() == [0.5, 1.0]
    assert (result.steps, result.loss, result.bad_step) == (1, 2.5, None)
    assert result.gradient_norm == pytest.approx(math.sqrt(5))


def test_loss_and_gradient_norm_are_means_over_the_steps():
    module = weights_module(1.0, 2.0)
    result = Loop(module, batches_of(EYE)).run(2)
    assert module.w.numpy().tolist() == [0.25, 0.5]
    assert result.loss == (2.5 + 0.625) / 2
    assert result.gradient_norm == pytest.approx((math.sqrt(5) + math.sqrt(1.25)) / 2)


def test_only_trainable_elements_count_in_the_gradient_norm():
    module = weights_module(1.0, 2.0)
    selector = lambda spec: np.array([True, False])  # noqa: E731
    assert Loop(module, batches_of(EYE), selector=selector).run(1).gradient_norm == 1.0
    assert module.w.numpy().tolist() == [0.5, 2.0]


def test_a_partial_batch_is_a_mean_over_its_own_size():
    module = weights_module(1.0, 2.0)
    loop = Loop(module, batches_of(EYE, ([[0.0, 1.0]], [0.0])), optimizer=keras.optimizers.SGD(0.0))
    assert loop.run(1).loss == 2.5
    assert loop.run(1).loss == 4.0


def test_a_masked_mean_counts_only_what_has_weight():
    module = weights_module(1.0, 2.0)
    batch = (*EYE, [0.0, 0.5])
    assert Loop(module, batches_of(batch)).run(1).loss == 4.0
    assert module.w.numpy().tolist() == [1.0, 0.0]


def test_a_batch_without_weight_has_no_loss_and_moves_nothing():
    module = weights_module(1.0, 2.0)
    result = Loop(module, batches_of((*EYE, [0.0, 0.0]))).run(1)
    assert (result.steps, result.loss, result.bad_step) == (1, 0.0, None)
    assert module.w.numpy().tolist() == [1.0, 2.0]


def test_the_regularizer_is_added_to_the_mean():
    """2.5 + 0.1 * (1 + 4); the gradient of the penalty is 0.2 * w."""
    module = weights_module(1.0, 2.0)
    task = task_of(regularizer=lambda module: 0.1 * tf.reduce_sum(tf.square(module.w)))
    result = Loop(module, batches_of(EYE), task).run(1)
    assert result.loss == pytest.approx(3.0)
    assert module.w.numpy().tolist() == pytest.approx([0.4, 0.8])


def test_losses_that_a_keras_model_collects_are_a_regularizer():
    inputs = keras.Input([2])
    outputs = keras.layers.Dense(1, use_bias=False, kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, keras.layers.Reshape([])(outputs))
    model.w = model.layers[1].kernel.value
    model.w.assign([[1.0], [2.0]])
    task = task_of(
        forward=lambda model, x, training: model(x, training=training),
        regularizer=lambda model: tf.add_n(model.losses),
    )
    assert Loop(model, batches_of(EYE), task).run(1).loss == pytest.approx(2.5 + 0.01 * 5)


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(0.5, loss_scale_factor=1024.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
    ],
)
def test_a_loss_scale_shows_neither_in_the_loss_nor_in_the_norm(optimizer):
    module = weights_module(1.0, 2.0)
    result = Loop(module, batches_of(EYE), optimizer=optimizer).run(1)
    assert module.w.numpy().tolist() == [0.5, 1.0]
    assert result.loss == 2.5
    assert result.gradient_norm == pytest.approx(math.sqrt(5))


def test_the_loop_is_traced_once_whatever_the_number_of_steps_and_the_batch_sizes():
    loop = Loop(weights_module(1.0, 2.0), batches_of(EYE, ([[0.0, 1.0]], [0.0])))
    assert loop.loop.traces == 0
    loop.loop.trace(loop.iterator)
    for steps in (1, 2, 5, 1):
        loop.run(steps)
    assert loop.loop.traces == 1
    assert int(loop.step) == 9


def test_the_random_ops_are_seeded_by_the_global_step():
    loop = Loop(weights_module(1.0, 2.0), batches_of(EYE))
    loop.run(3)
    (step,) = loop.seeds  # Once a trace; what it is given counts on.
    assert (step.dtype, step.shape) == (tf.int64, [])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_loss_that_is_not_finite_ends_the_loop_before_its_step_is_taken(bad, taken):
    module = weights_module(1.0, 2.0)
    broken = ([[bad, 0.0], [0.0, 1.0]], [0.0, 0.0])
    loop = Loop(module, batches_of(*[EYE] * taken, broken), optimizer=keras.optimizers.Adam(0.5))
    result = loop.run(5)
    assert (result.steps, result.bad_step, int(loop.step)) == (taken, taken + 1, taken)
    assert int(loop.optimizer.iterations) == taken
    assert np.isfinite(module.w.numpy()).all()
    assert np.isfinite(result.loss)
    for slot in loop.optimizer.slots["w"].values():
        assert np.isfinite(slot.numpy()).all()


def test_a_gradient_that_is_not_finite_ends_the_loop_too():
    """The loss is 0, but the derivative of the square root at 0 is infinite."""
    module = weights_module(0.0, 0.0)
    task = task_of(loss=lambda y, outputs: tf.sqrt(outputs))
    result = Loop(module, batches_of(EYE), task).run(1)
    assert (result.steps, result.bad_step) == (0, 1)
    assert module.w.numpy().tolist() == [0.0, 0.0]


def test_a_nan_gradient_at_a_frozen_element_does_not_end_the_loop():
    """The second column would get the gradient 0 / 0, and is frozen."""
    module = weights_module(1.0, 0.0)
    task = task_of(loss=lambda y, outputs: tf.where(y == 0, outputs, tf.math.sqrt(outputs) * 0))
    selector = lambda spec: np.array([True, False])  # noqa: E731
    batch = ([[1.0, 0.0], [0.0, 1.0]], [0.0, 1.0])
    result = Loop(module, batches_of(batch), task, selector=selector).run(1)
    assert (result.steps, result.bad_step) == (1, None)
    assert module.w.numpy().tolist() == [0.75, 0.0]


def test_infinite_gradients_are_left_to_a_loss_scale():
    """The scale starts at 2 ** 125 and is halved until the gradient [1, 2] fits."""
    module = weights_module(1.0, 2.0)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=2.0**127
    )
    result = Loop(module, batches_of(EYE), optimizer=optimizer).run(3)
    assert (result.steps, result.bad_step) == (3, None)
    assert module.w.numpy().tolist() != [1.0, 2.0]


class Counting(tf.Module):
    """A linear model that adds each batch's mean to a total, and counts."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable([1.0, 2.0])
        self.total = tf.Variable([0.0, 0.0])
        self.calls = tf.Variable(0)
        self.table = tf.Variable(tf.zeros([1000]))

    def __call__(self, x, training):
        if training:
            self.total.assign_add(tf.reduce_mean(x, 0))
            self.calls.assign_add(1)
        return tf.linalg.matvec(x, self.w) + self.table[0]

    def others(self):
        return {"total": self.total, "calls": self.calls, "table": self.table}


CALL = task_of(forward=lambda module, x, training: module(x, training))


def test_state_is_live_inside_the_loop_and_the_bases_outside():
    module = Counting()
    loop = Loop(module, batches_of(EYE), CALL, others=module.others())
    loop.run(2)
    loop.run(1)
    assert module.total.numpy().tolist() == [0.0, 0.0]
    assert int(module.calls) == 0
    assert loop.loop.state.working["total"].numpy().tolist() == [1.5, 1.5]
    assert int(loop.loop.state.working["calls"]) == 3


def test_only_what_the_model_writes_is_kept_as_state():
    module = Counting()
    loop = Loop(module, batches_of(EYE), CALL, others=module.others())
    assert set(loop.loop.state.working) == {"total", "calls"}
    assert loop.loop.untracked == []


def test_moving_state_moves():
    module = Counting()
    others = {"calls": module.calls}
    Loop(module, batches_of(EYE), CALL, others=others, moving={"total": module.total}).run(2)
    assert module.total.numpy().tolist() == [1.0, 1.0]
    assert int(module.calls) == 0


def test_a_step_that_is_not_taken_does_not_count_in_the_state_either():
    module = Counting()
    broken = ([[math.nan, 0.0], [0.0, 1.0]], [0.0, 0.0])
    loop = Loop(
        module,
        batches_of(EYE, broken),
        CALL,
        others={"calls": module.calls},
        moving={"total": module.total},
    )
    loop.run(5)
    assert module.total.numpy().tolist() == [0.5, 0.5]
    assert int(loop.loop.state.working["calls"]) == 1


def test_when_the_data_fails_the_steps_before_it_are_taken_and_counted():
    module = Counting()

    def checked(x, y):
        with tf.control_dependencies([tf.debugging.assert_less(x[0, 0], 5.0)]):
            return tf.identity(x), y

    far = ([[9.0, 0.0], [0.0, 1.0]], [0.0, 0.0])
    data = batches_of(EYE, EYE, far).map(checked)
    loop = Loop(module, data, CALL, others=module.others())
    with pytest.raises(tf.errors.InvalidArgumentError):
        loop.run(5)
    assert int(loop.step) == int(loop.optimizer.iterations) == 2
    assert module.w.numpy().tolist() == [0.25, 0.5]
    assert int(module.calls) == 0
    assert int(loop.loop.state.working["calls"]) == 2


def test_a_variable_that_nobody_saves_is_found():
    counter = tf.Variable(0.0, name="mine")

    def loss(y, outputs):
        counter.assign_add(1.0)
        return tf.square(outputs - y)

    loop = Loop(weights_module(1.0, 2.0), batches_of(EYE), task_of(loss))
    assert loop.loop.untracked == ["mine:0"]


def test_no_gradient_at_all_is_an_error():
    task = task_of(forward=lambda module, x, training: x[:, 0])
    with pytest.raises(ValueError, match=r"No gradient reaches any trainable variable \(w\): the"):
        Loop(weights_module(1.0, 2.0), batches_of(EYE), task).run(1)


def test_stateful_random_ops_are_named():
    task = task_of(
        forward=lambda module, x, training: tf.nn.dropout(linear(module, x, training), 0.5)
    )
    loop = Loop(weights_module(1.0, 2.0), batches_of(EYE), task)
    (name,) = loop.loop.trace(loop.iterator)
    assert name.startswith("RandomUniform ")


# Losses and weights.


def totals(losses, weights=None):
    total, count = weighted_sum(losses, weights)
    assert total.dtype == count.dtype == tf.float32
    return float(total), float(count)


def test_without_weights_every_position_counts_one():
    assert totals(tf.constant([[1.0, 2.0], [3.0, 4.0]])) == (10.0, 4.0)


def test_weights_of_examples_hold_for_all_their_positions():
    assert totals(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([1.0, 0.5])) == (6.5, 3.0)
    assert totals(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[1.0], [0.5]])) == (6.5, 3.0)


def test_weights_of_positions():
    weights = tf.constant([[1, 0], [0, 2]])
    assert totals(tf.constant([[1.0, 2.0], [3.0, 4.0]]), weights) == (9.0, 3.0)


def test_what_has_no_weight_may_be_nan():
    assert totals(tf.constant([math.nan, 2.0]), tf.constant([0.0, 1.0])) == (2.0, 1.0)


def test_low_precision_is_summed_in_float32():
    assert totals(tf.ones([3000], tf.bfloat16)) == (3000.0, 3000.0)


@pytest.mark.parametrize("weights", [None, [1.0, 1.0]])
def test_a_reduced_loss_is_refused(weights):
    with pytest.raises(ValueError, match=r"`task.loss` gives one number .* need reduction=None"):
        weighted_sum(tf.constant(3.0), weights)


def test_weights_with_more_axes_than_the_losses_are_refused():
    with pytest.raises(
        ValueError, match=r"`weights` \(shape \(2, 1\)\) have more axes than the loss"
    ):
        weighted_sum(tf.constant([3.0, 4.0]), tf.constant([[1.0], [1.0]]))


def test_a_saved_model_traced_for_another_batch_size_is_refused(tmp_path):
    """TensorFlow takes other batches, but tells the traced size, by which a mean would divide."""
    module = tf.Module()
    module.w = tf.Variable([[1.0]])
    module.__call__ = tf.function(lambda x: tf.matmul(x, module.w), reduce_retracing=True)
    for size in (8, 3):
        module.__call__(tf.zeros([size, 1]))
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    pairs = tf.data.Dataset.from_tensor_slices((tf.zeros([3, 1]), tf.zeros([3, 1])))
    task = task_of(
        loss=keras.losses.MeanSquaredError(reduction=None),
        forward=lambda module, x, training: module(x),
    )

    with pytest.raises(ValueError, match="batch size any the losses claim batch size 8"):
        EvalLoop(loaded, task).run(pairs.batch(2))


def test_a_loss_that_does_not_fit_the_outputs_is_named_with_their_shapes():
    task = task_of(loss=lambda y, outputs: tf.reshape(outputs - y, [7]))
    with pytest.raises(ValueError, match=r"`task.loss` does not take y float32\[.*\] and outputs"):
        evaluate(([[1.0, 2.0]], [2.0]), task=task)


# Evaluation.


def evaluate(*batches, task=None, module=None):
    loop = EvalLoop(module or weights_module(1.0, 2.0), task or task_of())
    data = batches_of(*batches).take(len(batches))
    return loop.run(data)


def absolute_error():
    return keras.metrics.MeanMetricWrapper(lambda y, outputs: tf.abs(y - outputs), name="mae")


def test_an_evaluation_weighs_a_partial_batch_by_its_size():
    """Losses 1, 4 and 4; errors 1, 2 and 2."""
    task = task_of(metrics=lambda: [absolute_error()])
    result = evaluate(EYE, ([[0.0, 1.0]], [0.0]), task=task)
    assert result == {"loss": 3.0, "mae": pytest.approx(5 / 3)}


def test_an_evaluation_weighs_by_weights():
    task = task_of(metrics=lambda: [absolute_error()])
    assert evaluate((*EYE, [3.0, 1.0]), task=task) == {"loss": 1.75, "mae": 1.25}


def test_an_evaluation_knows_no_regularizer_and_runs_as_in_inference():
    task = task_of(
        forward=lambda module, x, training: (
            linear(module, x, training) + (100.0 if training else 0)
        ),
        regularizer=lambda module: tf.constant(1000.0),
    )
    assert evaluate(EYE, task=task) == {"loss": 2.5}


def test_evaluations_do_not_add_up():
    loop = EvalLoop(weights_module(1.0, 2.0), task_of(metrics=lambda: [absolute_error()]))
    data = batches_of(EYE).take(1)
    assert loop.run(data) == loop.run(data) == {"loss": 2.5, "mae": 1.5}
    assert loop.traces == 1


def test_a_long_evaluation_is_summed_exactly():
    """2 ** 24 + 1 has no place in float32."""
    module = weights_module(1.0)
    task = task_of(loss=lambda y, outputs: outputs)
    result = evaluate(([[2.0**24]], [0.0]), ([[1.0]], [0.0]), task=task, module=module)
    assert result["loss"] == (2**24 + 1) / 2


def test_no_data_is_an_error():
    loop = EvalLoop(weights_module(1.0, 2.0), task_of())
    with pytest.raises(ValueError, match=r"`task.eval_dataset` holds no batch"):
        loop.run(batches_of(EYE).take(0))


def test_a_metric_must_be_one_number():
    task = task_of(metrics=lambda: [keras.metrics.F1Score(average=None, name="f1")])
    data = ([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]])
    task = Task(
        no_data, no_data, squared_error, metrics=task.metrics, forward=lambda module, x, training: x
    )
    with pytest.raises(ValueError, match=r"`task.metrics`: f1 gives .*, not one number"):
        evaluate(data, task=task)


@pytest.mark.parametrize("names", [("f1", "f1"), ("loss",)])
def test_names_must_be_distinct(names):
    task = task_of(metrics=lambda: [keras.metrics.Mean(name=name) for name in names])
    with pytest.raises(ValueError, match=f"the loss are called loss, {', '.join(names)}: give"):
        EvalLoop(weights_module(1.0), task)
