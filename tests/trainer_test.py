import functools
import gc
import os
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_runs import (
    ROWS,
    SUMS,
    Linear,
    base_of,
    bowl_trainer,
    column_task,
    model_with_state,
    task_of,
    trainer_of,
    values_of,
)

from finetune.calling import call
from finetune.loading import from_module, load
from finetune.preemption import Preempted
from finetune.pruning import prune
from finetune.selectors import (
    elements,
    everything,
    model_state,
    nonzeros,
    nothing,
    random,
    rows,
    smallest,
)
from finetune.trainer import NonFiniteError, Trainer, readable


@pytest.fixture(scope="module")
def real_task(tmp_path_factory):
    from finetune.examples.korean_spacing import korean_spacing_task

    return korean_spacing_task(data_dir=tmp_path_factory.getbasetemp() / "tfds")


def test_training_moves_exactly_what_the_rules_name(tmp_path):
    base = base_of()
    rules = [("w", elements([[0, 0], [2, 0]])), ("b", nothing())]
    trainer = trainer_of(tmp_path, base, rules, optimizer=keras.optimizers.AdamW(0.05))
    result = trainer.train(20)
    assert result["global_step"] == trainer.global_step == 20
    certificate = trainer.certificate()
    assert certificate.ok
    assert (certificate.trainable, certificate.changed, certificate.total) == (2, 2, 7)
    moved = base.module.w.numpy() != base.read("w")
    assert moved.tolist() == [[True, False], [False, False], [True, False]]


def test_the_loss_goes_down_and_is_returned(tmp_path):
    trainer = trainer_of(tmp_path)
    first = trainer.train(5)["loss"]
    assert trainer.train(200)["loss"] < first / 10


def test_the_loop_is_traced_once_whatever_the_steps_and_intervals(tmp_path):
    trainer = trainer_of(tmp_path, steps_per_loop=4, eval_every=3, checkpoint_every=5)
    for target in (1, 2, 9, 30):
        trainer.train(target)
        trainer.evaluate()
    assert trainer.traces == 1
    assert trainer._eval_loop.traces == 1


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_intervals_decide_nothing_about_the_result(tmp_path, dtype):
    found = []
    for number, intervals in enumerate(
        [
            {"steps_per_loop": 30},
            {"steps_per_loop": 1, "eval_every": 7},
            {"steps_per_loop": 4, "eval_every": 5, "checkpoint_every": 3, "keep": 1},
        ]
    ):
        trainer = trainer_of(
            tmp_path / str(number),
            base_of(Linear(dtype)),
            [("w", random(share=0.5)), ("b", everything())],
            optimizer=keras.optimizers.SGD(0.05, momentum=0.5),
            **intervals,
        )
        trainer.train(30)
        assert trainer.certificate().changed >= 2
        found.append(values_of(trainer))
    assert found[0] == found[1] == found[2]


def test_with_everything_trainable_it_equals_a_plain_keras_loop_bit_for_bit(tmp_path):
    def build():
        keras.utils.set_random_seed(3)
        layers = [
            keras.Input([3]),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(1),
        ]
        return keras.Sequential(layers)

    def loss_of(y, outputs):
        return keras.losses.mean_squared_error(y[:, None], outputs)

    trained = build()
    trainer = trainer_of(tmp_path, from_module(trained), task=task_of(loss=loss_of), batch_size=5)
    trainer.train(40)

    plain = build()
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(plain.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(y, plain(x, training=True)))
        variables = plain.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for x, y in task_of().train_dataset(5, 0).repeat().take(40):
        step(x, y)
    assert len(plain.variables) == 4
    for one, other in zip(plain.variables, trained.variables, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes(), one.path


def test_the_real_model_trains_and_comes_out_as_a_saved_model(tmp_path, real_task, quickspacer_dir):
    from finetune.examples import quickspacer

    ascii_rows = quickspacer.ascii_rows()
    trainer = Trainer(
        quickspacer_dir,
        [("embedding/embeddings", rows(ascii_rows)), (".*", nothing())],
        real_task,
        keras.optimizers.Adam(1e-2),
        str(tmp_path),
        num_steps=30,
        progress=False,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["f1"] > before["f1"]
    assert after["loss"] < before["loss"]

    tuned = tf.saved_model.load(trainer.export())
    changed = (tuned.embedding.embeddings.numpy() != trainer.base.read("embedding/embeddings")).any(
        1
    )
    assert set(changed.nonzero()[0]) <= set(ascii_rows)
    assert changed.sum() > 60
    ids = tf.constant([[5, 2, 900, 15, 3]])
    assert tuned(ids, False).numpy().tobytes() == trainer.base.module(ids, False).numpy().tobytes()


def test_a_pruned_model_keeps_its_zeros(tmp_path):
    base = prune(base_of(), [("w", smallest(share=0.5)), ("b", nothing())])
    trainer = trainer_of(tmp_path, base, [("w", nonzeros()), ("b", everything())])
    trainer.train(10)
    assert (base.module.w.numpy() == 0).sum() == 3
    assert trainer.certificate().ok


def test_a_base_is_the_base_again_for_the_next_trainer(tmp_path):
    """A sweep in a notebook loads its base once."""
    base = base_of()
    first = trainer_of(tmp_path / "a", base)
    first.train(10)
    second = trainer_of(tmp_path / "b", base, [("b", everything()), (".*", nothing())])
    assert base.module.w.numpy().tobytes() == base.read("w").tobytes()
    assert second.certificate().changed == 0
    second.train(10)
    assert second.certificate().ok
    for use in (first.train, first.evaluate, first.export, first.certificate):
        with pytest.raises(ValueError, match="in the hands of a Trainer that was made later"):
            use()


def test_another_base_may_be_trained_beside(tmp_path):
    one, other = trainer_of(tmp_path / "a"), trainer_of(tmp_path / "b")
    one.train(5)
    other.train(10)
    one.train(10)
    assert values_of(one) == values_of(other)


# NaN and Inf.


def poisoned(step, value=np.nan):
    """Data whose batch of four at `step`, counted from 1, is broken."""
    x = np.tile(ROWS, [4, 1])
    x[4 * (step - 1) + 2, 1] = value
    return task_of(x, np.tile(SUMS, 4))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path, value):
    good = trainer_of(tmp_path / "good")
    good.train(7)
    bad = trainer_of(tmp_path / "bad", task=poisoned(8, value), checkpoint_every=5)
    with pytest.raises(NonFiniteError) as error:
        bad.train(20)
    assert str(error.value).startswith(
        "The loss or a gradient is not finite at step 8. The step was not taken; the last good "
        f"checkpoint in {tmp_path / 'bad'} is of step 5."
    )
    assert bad.global_step == 7
    assert values_of(bad) == values_of(good)
    assert trainer_of(tmp_path / "bad", task=poisoned(8, value)).global_step == 5


def test_a_run_whose_first_loss_is_nan_has_moved_nothing(tmp_path):
    trainer = trainer_of(tmp_path, task=poisoned(1))
    with pytest.raises(NonFiniteError, match=r"finite at step 1\. .* is of step 0\."):
        trainer.train(20)
    assert trainer.certificate().changed == 0
    assert trainer_of(tmp_path, task=poisoned(1)).global_step == 0


def test_a_resumed_run_names_the_same_step(tmp_path):
    trainer_of(tmp_path, task=poisoned(8)).train(6)
    with pytest.raises(NonFiniteError, match="at step 8"):
        trainer_of(tmp_path, task=poisoned(8)).train(20)


def test_values_that_overflow_are_not_saved(tmp_path):
    """Loss and gradient of the first step are finite, the step of 3e38 times more than 1 is not."""
    optimizer = keras.optimizers.SGD(3e38)
    trainer = trainer_of(tmp_path, optimizer=optimizer, checkpoint_every=1)
    with pytest.raises(NonFiniteError, match=r"not finite any more after step 1, .* of step 0\."):
        trainer.train(5)
    assert trainer_of(tmp_path, optimizer=keras.optimizers.SGD(3e38)).global_step == 0


def test_an_element_that_is_infinite_in_the_base_does_not_stop_a_run(tmp_path):
    module = Linear()
    module.w[1, 1].assign(-np.inf)
    base = base_of(module)
    task = task_of(forward=lambda module, x, training: tf.linalg.matvec(x, module.w[:, 0]))
    trainer_of(tmp_path, base, [("w", everything()), ("b", nothing())], task).train(5)


def test_statistics_are_finite_after_a_nan_even_if_they_may_move(tmp_path):
    rules = [(".*moving_.*", model_state()), (".*", everything())]
    base = from_module(model_with_state())
    x, y = ROWS.copy(), SUMS[:, None]
    x[9, 1] = np.nan
    trainer = trainer_of(tmp_path, base, rules, column_task(x, y))
    with pytest.raises(NonFiniteError, match="at step 3"):
        trainer.train(20)
    for path, named in base.variables.items():
        assert np.isfinite(named.variable.numpy()).all(), path


def test_a_nan_elsewhere_never_reaches_a_frozen_element(tmp_path):
    base = base_of()
    rules = [("w", elements([[0, 0]])), ("b", nothing())]
    trainer = trainer_of(tmp_path, base, rules, poisoned(3))
    with pytest.raises(NonFiniteError):
        trainer.train(20)
    assert trainer.certificate().ok
    assert np.isfinite(base.module.w.numpy()).all()


# State that the model moves by itself.


def test_statistics_and_seeds_are_the_bases_after_training(tmp_path):
    base = from_module(model_with_state())
    trainer = trainer_of(tmp_path, base, task=column_task())
    trainer.train(12)
    state = [path for path, named in base.variables.items() if not named.trainable]
    assert len(state) == 5
    for path in state:
        assert base.variables[path].variable.numpy().tobytes() == base.read(path).tobytes(), path
    assert trainer.certificate().ok
    trainer.export()


def test_a_rule_lets_the_model_move_its_statistics(tmp_path):
    base = from_module(model_with_state())
    rules = [(".*first/moving_mean", model_state()), (".*", everything())]
    trainer = trainer_of(tmp_path, base, rules, column_task())
    trainer.train(12)
    model = base.module
    assert (model.layers[1].moving_mean.numpy() != 0).all()
    assert model.layers[1].moving_variance.numpy().tolist() == [1.0] * 4
    assert trainer.certificate().ok


def test_statistics_are_live_while_training_goes_on(tmp_path):
    """The same numbers as in a model whose statistics may move, for they play no part in training.

    They play one in the evaluation: the frozen model is evaluated with the base's.
    """
    frozen = trainer_of(tmp_path / "a", from_module(model_with_state()), task=column_task())
    frozen.train(12)
    rules = [(".*moving_.*", model_state()), (".*", everything())]
    moving = trainer_of(tmp_path / "b", from_module(model_with_state()), rules, column_task())
    moving.train(12)
    for path, named in frozen.base.variables.items():
        same = (
            named.variable.numpy().tobytes()
            == moving.base.variables[path].variable.numpy().tobytes()
        )
        assert same == ("moving" not in path), path
    assert frozen.evaluate()["loss"] != moving.evaluate()["loss"]


def test_dropout_draws_anew_in_every_loop_and_every_step(tmp_path):
    masks = tf.Variable(tf.zeros([0, 4, 50]), shape=[None, 4, 50], trainable=False)
    layer = keras.layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input([50]), layer])
    model.w = keras.Variable([1.0], name="w")

    def forward(model, x, training):
        outputs = model(x, training=training)
        if training:
            masks.assign(tf.concat([masks, outputs[tf.newaxis]], axis=0))
        return tf.reduce_sum(outputs, axis=1) * model.w

    task = task_of(np.ones([4, 50], np.float32), np.ones([4], np.float32), forward=forward)
    rules = [("w", everything())]
    trainer_of(tmp_path, from_module(model), rules, task, steps_per_loop=2).train(6)
    drawn = masks.numpy()
    assert len(drawn) == 6
    assert len({mask.tobytes() for mask in drawn}) == 6


def test_a_frozen_variable_that_the_model_writes_is_put_back_although_it_claims_to_be_trainable(
    tmp_path,
):
    """Keras' exports say so of BatchNorm's statistics."""
    model = model_with_state()
    model.export(str(tmp_path / "exported"), verbose=False)
    base = load(str(tmp_path / "exported"))
    statistics = [p for p, n in base.variables.items() if n.shape == (1,) and n.trainable]
    trainer = trainer_of(
        tmp_path / "run",
        base,
        [("|".join(statistics), nothing()), (".*", everything())],
        column_task(forward=functools.partial(call, endpoint="serve")),
    )
    trainer.train(6)
    assert trainer.certificate().ok
    trainer.export()


# SIGTERM, output, and the rest.


def signal_at(step, number):
    """A task whose loss sends the signal in that step, counted from 1."""

    def send(now):
        if now and number is not None:
            os.kill(os.getpid(), number)
        return np.float32(0)

    def loss(y, outputs):
        nothing = tf.numpy_function(send, [tf.reduce_any(y > 1e6)], tf.float32)
        return tf.square(outputs - tf.minimum(y, 1.0)) + tf.ensure_shape(nothing, [])

    x, y = np.tile(ROWS, [10, 1]), np.tile(SUMS, 10)
    y[4 * (step - 1)] = 1e7
    return task_of(x, y, loss=loss)


def test_sigterm_saves_and_exits_with_42_and_the_run_goes_on(tmp_path):
    trainer = trainer_of(tmp_path, task=signal_at(8, signal.SIGTERM), checkpoint_every=100)
    with pytest.raises(Preempted) as stopped:
        trainer.train(12)
    assert stopped.value.code == 42
    assert stopped.value.global_step == 10  # The end of its loop of five.
    again = trainer_of(tmp_path, task=signal_at(8, signal.SIGTERM))
    assert again.global_step == 10
    assert values_of(again) == values_of(trainer)


def test_an_interrupted_cell_can_be_run_again(tmp_path):
    """Ctrl-C in a notebook, at the twentieth batch."""
    whole = trainer_of(tmp_path / "whole", task=signal_at(20, None))
    whole.train(30)
    trainer = trainer_of(tmp_path / "parts", task=signal_at(20, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(30)
    assert trainer.global_step == 20
    trainer.train(30)
    assert values_of(trainer) == values_of(whole)


def test_training_works_in_a_thread(tmp_path):
    trainer = trainer_of(tmp_path)
    thread = threading.Thread(target=trainer.train, args=[10])
    thread.start()
    thread.join()
    assert trainer.global_step == 10


@pytest.mark.parametrize("progress", [True, False])
def test_evaluations_are_printed_unless_nothing_is_to_be_shown(tmp_path, capsys, progress):
    bowl_trainer(tmp_path, eval_every=2, progress=progress).train(2)
    shown = "step 2: loss 2.848  score -0.09766\n" if progress else ""
    assert capsys.readouterr().out == shown


def test_metrics_are_readable():
    assert readable({"loss": 0.00012345, "f1": 1.0}) == "loss 0.0001234  f1 1"


def test_a_trainer_does_not_outlive_its_last_reference(tmp_path):
    base = base_of()
    trainer_of(tmp_path, base).train(5)
    gc.collect()
    from finetune.trainer import _trainer_of

    assert _trainer_of[base.module]() is None
