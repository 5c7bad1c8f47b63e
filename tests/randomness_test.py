import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from finetune import paths, randomness

CHECKOUT = Path(__file__).parent.parent
IDS = tf.constant(np.random.default_rng(0).integers(0, 4250, [8, 40]), tf.int32)


class Noise(tf.Module):
    """Draws in its own body and, twice each, in a function that it calls."""

    def __init__(self):
        super().__init__()
        self.inner = tf.function(self.draw)

    def draw(self, n):
        return tf.random.uniform([n]), tf.random.normal([n])

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32, "n")])
    def __call__(self, n):
        first, second = self.inner(n), self.inner(n)
        return {
            "uniform": first[0],
            "uniform again": second[0],
            "normal": first[1],
            "normal again": second[1],
            "truncated": tf.random.truncated_normal([n], 5.0, 2.0),
            "integers": tf.random.uniform([n], -3, 4, tf.int64),
            "half": tf.random.uniform([n], dtype=tf.bfloat16),
        }


class Controlled(tf.Module):
    """Calls one function that draws both directly and inside a loop."""

    def __init__(self):
        super().__init__()
        self.inner = tf.function(lambda n: tf.random.uniform([n]))

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)])
    def __call__(self, n):
        total = tf.zeros([n])
        for _ in tf.range(3):
            total = total + self.inner(n)
        return self.inner(n), total


def saved(module: tf.Module, folder) -> str:
    tf.saved_model.save(module, str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def spacer(quickspacer_dir):
    return randomness.load_resumable(quickspacer_dir)


def call_at(module, seed, step, x=IDS):
    randomness.set_random_state(module, seed, step)
    return module(x, True).numpy()


def run(script, *arguments) -> None:
    """Runs a Python file, because AutoGraph cannot read a function given with -c."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    subprocess.run([sys.executable, str(script), *arguments], env=environment, check=True)


def same_bits(a, b) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_dropout_of_a_real_model_is_the_same_at_the_same_seed_and_step_only(spacer):
    assert same_bits(call_at(spacer, 7, 3), call_at(spacer, 7, 3))
    assert not same_bits(call_at(spacer, 7, 3), call_at(spacer, 7, 4))
    assert not same_bits(call_at(spacer, 7, 3), call_at(spacer, 8, 3))


def test_dropout_is_the_same_in_another_process_and_another_load(spacer, quickspacer_dir, tmp_path):
    expected = call_at(spacer, 7, 3)
    assert same_bits(call_at(randomness.load_resumable(quickspacer_dir), 7, 3), expected)
    script = tmp_path / "run.py"
    script.write_text(
        """
import sys, numpy as np, tensorflow as tf
from finetune import randomness
module = randomness.load_resumable(sys.argv[1])
randomness.set_random_state(module, 7, 3)
ids = tf.constant(np.random.default_rng(0).integers(0, 4250, [8, 40]), tf.int32)
np.save(sys.argv[2], module(ids, True).numpy())
"""
    )
    run(script, quickspacer_dir, str(tmp_path / "y.npy"))
    assert same_bits(np.load(tmp_path / "y.npy"), expected)


def test_without_dropout_the_model_gives_the_bits_of_the_untouched_one(spacer, quickspacer_dir):
    untouched = tf.saved_model.load(quickspacer_dir)
    assert same_bits(spacer(IDS, False), untouched(IDS, False))
    ours = spacer.signatures["model_inference"](tokens=IDS)["output_0"]
    assert same_bits(ours, untouched.signatures["model_inference"](tokens=IDS)["output_0"])
    texts = tf.constant(["안녕하세요반갑습니다"])
    (ours,) = spacer.signatures["serving_default"](texts=texts).values()
    (theirs,) = untouched.signatures["serving_default"](texts=texts).values()
    assert ours.numpy() == theirs.numpy()


def test_the_state_is_no_variable_of_the_model(spacer, quickspacer_dir):
    untouched = tf.saved_model.load(quickspacer_dir)
    assert list(paths.named_variables(spacer)) == list(paths.named_variables(untouched))


def test_a_checkpoint_of_the_model_has_the_keys_of_the_untouched_one(spacer, tmp_path):
    prefix = tf.train.Checkpoint(spacer).write(str(tmp_path / "ckpt"))
    keys = {key for key, _ in tf.train.list_variables(prefix)}
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    paths_there = {path + suffix for path in paths.named_variables(spacer)}
    assert keys == paths_there | {"_CHECKPOINTABLE_OBJECT_GRAPH"}


def test_a_dropout_keeps_the_share_that_it_kept(spacer):
    randomness.set_random_state(spacer, 1, 2)
    kept = spacer.dropout(tf.ones([10, 100, 128]), True).numpy()
    # Survivors are scaled by 1 / (1 - 0.2); of 128,000 draws a standard deviation is 0.0011.
    assert np.unique(kept).tolist() == [0.0, 1.25]
    assert np.mean(kept == 0) == pytest.approx(0.2, abs=0.005)


def training_loop(module):
    bias = module.dense.bias

    @tf.function
    def train(step, n):
        losses = tf.TensorArray(tf.float32, n)
        for i in tf.range(n):
            randomness.set_random_state(module, 5, step + tf.cast(i, tf.int64))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(module(IDS, True))
            bias.assign_sub(tape.gradient(loss, bias))
            losses = losses.write(i, loss)
        return losses.stack()

    return train


def test_steps_in_a_compiled_loop_equal_the_same_steps_one_by_one(quickspacer_dir):
    one, two = (randomness.load_resumable(quickspacer_dir) for _ in range(2))
    looped = training_loop(one)(tf.constant(3, tf.int64), 20)
    train = training_loop(two)
    single = [train(tf.constant(3 + i, tf.int64), 1)[0] for i in range(20)]
    assert same_bits(looped, single)
    assert same_bits(one.dense.bias, two.dense.bias)
    assert len(set(looped.numpy().tolist())) == 20


def test_a_forward_only_loop_reads_the_state_of_its_own_step(spacer):
    @tf.function
    def outputs(n):
        out = tf.TensorArray(tf.float32, n)
        for i in tf.range(n):
            randomness.set_random_state(spacer, 5, i)
            out = out.write(i, spacer(IDS, True))
        return out.stack()

    assert same_bits(outputs(20), [call_at(spacer, 5, i) for i in range(20)])


def test_gradients_flow_and_an_embedding_gradient_stays_sparse(spacer):
    weights = [spacer.embedding.embeddings, spacer.conv.kernel, spacer.dense.kernel]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(spacer(IDS, True))
    table, *others = tape.gradient(loss, weights)
    assert isinstance(table, tf.IndexedSlices)
    assert all(np.abs(g.numpy()).max() > 0 for g in [table.values, *others])


def test_it_compiles_in_xla_and_repeats_there_too(spacer):
    compiled = tf.function(lambda x: spacer(x, True), jit_compile=True)

    def at(step):
        randomness.set_random_state(spacer, 5, step)
        return compiled(IDS)

    assert same_bits(at(1), at(1))
    assert not same_bits(at(1), at(2))


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    return randomness.load_resumable(saved(Noise(), tmp_path_factory.mktemp("noise")))


def test_every_replaced_op_keeps_its_distribution(noise):
    n = 100_000
    randomness.set_random_state(noise, 1, 1)
    draws = {name: value.numpy().astype(np.float64) for name, value in noise(n).items()}
    # Standard errors are below 0.01, four of them are allowed.
    for name, mean, deviation, low, high in [
        ("uniform", 0.5, 12**-0.5, 0, 1),
        ("half", 0.5, 12**-0.5, 0, 1),
        ("normal", 0, 1, -6, 6),
        ("truncated", 5, 2 * 0.8796, 1, 9),
        ("integers", 0, 2, -3, 3),
    ]:
        assert draws[name].mean() == pytest.approx(mean, abs=0.04), name
        assert draws[name].std() == pytest.approx(deviation, abs=0.04), name
        assert low <= draws[name].min(), name
        assert draws[name].max() <= high, name


def test_one_function_called_from_two_places_draws_twice(noise):
    randomness.set_random_state(noise, 1, 1)
    draws = noise(1000)
    for name in ("uniform", "normal"):
        assert abs(np.corrcoef(draws[name], draws[f"{name} again"])[0, 1]) < 0.15


def test_everything_repeats_and_nothing_stateful_is_left(noise):
    randomness.set_random_state(noise, 1, 1)
    for function in (noise, noise.signatures["serving_default"]):
        first, again = function(n=tf.constant(10)), function(n=tf.constant(10))
        assert all(same_bits(first[name], again[name]) for name in first)
    traced = tf.function(lambda: noise(10)).get_concrete_function()
    assert randomness.stateful_random_ops(traced) == []


def test_the_untouched_model_is_found_to_be_stateful(quickspacer_dir):
    untouched = tf.saved_model.load(quickspacer_dir)
    live, dead = (
        randomness.stateful_random_ops(
            tf.function(lambda x, t=training: untouched(x, t)).get_concrete_function(IDS)
        )
        for training in (True, False)
    )
    assert len(live) == 1
    assert live[0].startswith("RandomUniform ")
    assert live[0].endswith("/dropout/random_uniform/RandomUniform")
    assert dead == []


def test_draws_inside_a_loop_are_left_and_found(tmp_path):
    module = randomness.load_resumable(saved(Controlled(), tmp_path / "saved"))
    randomness.set_random_state(module, 1, 1)
    (direct, looped), (direct_again, looped_again) = module(100), module(100)
    assert same_bits(direct, direct_again)
    assert not same_bits(looped, looped_again)
    # The sum of three independent draws; of one draw three times it would be 0.87.
    assert looped.numpy().std() == pytest.approx(0.5, abs=0.15)
    traced = tf.function(lambda: module(100)).get_concrete_function()
    (left,) = randomness.stateful_random_ops(traced)
    assert left.startswith("RandomUniform ")


def test_a_model_that_draws_nothing_is_loaded_as_it_is(tmp_path):
    module = tf.Module()
    module.double = tf.function(lambda x: 2 * x, input_signature=[tf.TensorSpec([], tf.float32)])
    loaded = randomness.load_resumable(saved(module, tmp_path / "saved"))
    assert float(loaded.double(tf.constant(2.0))) == 4
    assert randomness.set_random_state(loaded, 1, 2) is None


def test_the_state_of_a_module_inside_another_is_set(spacer):
    outer = tf.Module()
    outer.parts = [spacer]
    randomness.set_random_state(outer, 7, 3)
    nested = spacer(IDS, True)
    assert same_bits(nested, call_at(spacer, 7, 3))


def test_the_saved_model_on_disk_is_untouched_and_the_temporary_folder_goes(
    tmp_path, monkeypatch, quickspacer_dir
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    graph = Path(quickspacer_dir, "saved_model.pb")
    before = graph.read_bytes()
    module = randomness.load_resumable(quickspacer_dir)
    assert len(os.listdir(tmp_path)) == 1
    call_at(module, 1, 1)
    del module
    gc.collect()
    assert os.listdir(tmp_path) == []
    assert graph.read_bytes() == before


def test_two_replicas_draw_from_streams_of_their_own(quickspacer_dir, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        """
import sys, tensorflow as tf
from finetune import randomness
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    module = randomness.load_resumable(sys.argv[1])
alone = randomness.load_resumable(sys.argv[1])
ids = tf.reshape(tf.range(64), [2, 32])

@tf.function
def outputs(n, inside):
    out = tf.TensorArray(tf.float32, n)
    for i in tf.range(n):
        if inside:
            replicas = strategy.run(lambda: step(i))
        else:
            randomness.set_random_state(module, 5, i)
            replicas = strategy.run(lambda: module(ids, True))
        out = out.write(i, tf.stack(strategy.experimental_local_results(replicas)))
    return out.stack()

def step(i):
    randomness.set_random_state(module, 5, i)
    return module(ids, True)

together = outputs(4, inside=False).numpy()
assert together.tobytes() == outputs(4, inside=True).numpy().tobytes()
randomness.set_random_state(module, 5, 0)
assert module(ids, True).numpy().tobytes() == together[0, 0].tobytes()
for step in range(4):
    randomness.set_random_state(alone, 5, step)
    assert alone(ids, True).numpy().tobytes() == together[step, 0].tobytes()
    assert together[step, 0].tobytes() != together[step, 1].tobytes()
"""
    )
    run(script, quickspacer_dir)
