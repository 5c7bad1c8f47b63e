import keras
import numpy as np
import pytest
import tensorflow as tf
from small_runs import ROWS, SUMS, column_task, distance, task_of, trainer_of, values_of

from finetune.loading import from_module, load
from finetune.selectors import (
    everything,
    nothing,
)


def test_a_model_with_named_inputs_trains(tmp_path):
    left, right = keras.Input([3], name="left"), keras.Input([3], name="right")
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([left, right]))
    model = keras.Model({"left": left, "right": right}, outputs)
    task = column_task({"left": ROWS, "right": ROWS[::-1].copy()})
    trainer = trainer_of(tmp_path, from_module(model), task=task)
    assert trainer.train(5)["loss"] > trainer.train(100)["loss"]


class Signed(tf.Module):
    """A model of which only signatures are left; two of them."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable([[0.5], [0.5], [0.5]])
        self.other = tf.Variable([[0.0], [0.0], [0.0]])

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def first(self, x):
        return {"y": tf.squeeze(x @ self.w, axis=1)}

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def second(self, x):
        return {"y": tf.squeeze(x @ self.other, axis=1)}


def signed_dir(tmp_path) -> str:
    module = Signed()
    folder = str(tmp_path / "signed")
    bare = tf.train.Checkpoint(w=module.w, other=module.other)
    signatures = {"serving_default": module.first, "second": module.second}
    tf.saved_model.save(bare, folder, signatures=signatures)
    return folder


def test_a_model_that_has_signatures_only_trains(tmp_path):
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(tmp_path / "run", signed_dir(tmp_path), rules)
    assert trainer.train(5)["loss"] > trainer.train(50)["loss"]
    tuned = tf.saved_model.load(trainer.export())
    out = tuned.signatures["serving_default"](x=tf.constant(ROWS))["y"]
    assert trainer.evaluate()["loss"] == pytest.approx(float(np.mean((out - SUMS) ** 2)))


def test_the_endpoint_of_the_base_is_called(tmp_path):
    base = load(signed_dir(tmp_path), endpoint="second")
    rules = [("other", everything()), ("w", nothing())]
    trainer = trainer_of(tmp_path / "run", base, rules)
    assert trainer.evaluate()["loss"] == pytest.approx(float(np.mean(SUMS**2)))
    trainer.train(10)
    assert trainer.certificate().changed == 3


def test_a_forward_of_ones_own_decides_itself_what_is_called(tmp_path):
    base = load(signed_dir(tmp_path), endpoint="second")
    rules = [("w", everything()), ("other", nothing())]
    task = task_of(forward=lambda module, x, training: module.signatures["serving_default"](x)["y"])
    trainer = trainer_of(tmp_path / "run", base, rules, task)
    trainer.train(5)
    assert trainer.certificate().changed == 3


@pytest.mark.parametrize("argument", ["training", "is_training"])
def test_a_saved_model_is_called_by_the_arguments_that_it_takes(tmp_path, argument):
    namespace = {"tf": tf}
    exec(
        f"def __call__(self, x, {argument}=False):\n"
        f"    return (x @ self.w)[:, 0] + (100.0 if {argument} else 0.0)",
        namespace,
    )
    kind = type("Named", (tf.Module,), {"__call__": tf.function(namespace["__call__"])})
    module = kind()
    module.w = tf.Variable([[0.5], [0.5], [0.5]])
    for training in (True, False):
        module.__call__.get_concrete_function(tf.TensorSpec([None, 3]), training)
    tf.saved_model.save(module, str(tmp_path / "saved"))
    task = task_of(metrics=lambda: [distance()])
    trainer = trainer_of(tmp_path / "run", str(tmp_path / "saved"), task=task)
    loss = trainer.train(1)["loss"]
    # Only an argument that is called `training` is given.
    assert (loss > 5_000) == (argument == "training")
    assert trainer.evaluate()["mae"] < 50


def test_weights_decide_what_counts(tmp_path):
    """Half of the examples are nonsense and have no weight."""
    y = np.where(np.arange(12) % 2 == 0, SUMS, 1000.0).astype(np.float32)
    weights = (np.arange(12) % 2 == 0).astype(np.float32)
    trainer = trainer_of(
        tmp_path, task=task_of(ROWS, y, weights), optimizer=keras.optimizers.Ftrl(0.5)
    )
    trainer.train(300)
    assert trainer.evaluate()["loss"] < 0.05


def test_a_regularizer_counts_in_training_only(tmp_path):
    task = task_of(regularizer=lambda module: 100.0 * tf.reduce_sum(tf.square(module.w[:, 0])))
    trainer = trainer_of(tmp_path, task=task)
    before = trainer.evaluate()["loss"]
    assert trainer.train(1)["loss"] > 10 * before
    trainer.train(200)
    assert np.abs(trainer.base.module.w.numpy()[:, 0]).max() < 0.05


def test_the_first_batch_can_be_looked_at_and_stays_the_first(tmp_path):
    trainer = trainer_of(tmp_path / "a")
    x, y = trainer.first_batch()
    assert (x.numpy() == ROWS[:4]).all()
    assert (y.numpy() == SUMS[:4]).all()
    trainer.train(5)
    plain = trainer_of(tmp_path / "b")
    plain.train(5)
    assert values_of(trainer) == values_of(plain)
