import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune.state import ModelState, components, written_variables


def traced(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def test_only_variables_that_are_written_to_are_found():
    read, added, scattered = (tf.Variable(tf.zeros([3])) for _ in range(3))

    def step(x):
        added.assign_add(x + read)
        scattered.scatter_update(tf.IndexedSlices(x[:1], tf.constant([0])))
        return tf.gather(read, [0])

    found = written_variables(traced(step, tf.TensorSpec([3])))
    assert {id(v) for v in found} == {id(added), id(scattered)}


def test_writes_in_branches_loops_and_functions_are_found():
    branch, loop, inner, none = (tf.Variable(0.0) for _ in range(4))
    call = tf.function(lambda: inner.assign(none))

    def step(x):
        tf.cond(x > 0, lambda: branch.assign(x), lambda: branch.read_value())
        tf.while_loop(lambda i: i < 2, lambda i: (i + int(loop.assign_add(1.0) is None),), [0])
        return call()

    found = written_variables(traced(step, tf.TensorSpec([])))
    assert {id(v) for v in found} == {id(branch), id(loop), id(inner)}


def test_writes_of_a_loaded_saved_model_are_found(tmp_path):
    class Counting(tf.Module):
        def __init__(self):
            super().__init__()
            self.calls = tf.Variable(0)
            self.scale = tf.Variable(2.0)

        @tf.function(input_signature=[tf.TensorSpec([])])
        def __call__(self, x):
            self.calls.assign_add(1)
            return self.scale * x

    tf.saved_model.save(Counting(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    (found,) = written_variables(traced(loaded, tf.TensorSpec([])))
    assert found is loaded.calls


def test_what_a_keras_model_writes_in_training_are_statistics_and_seeds():
    model = keras.Sequential(
        [keras.Input([2]), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    )
    written = written_variables(traced(lambda x: model(x, training=True), tf.TensorSpec([4, 2])))
    normalization, dropout = model.layers
    expected = [
        normalization.moving_mean, normalization.moving_variance, dropout.seed_generator.state
    ]  # fmt: skip
    assert {id(v) for v in written} == {id(v.value) for v in expected}
    assert not written_variables(traced(lambda x: model(x, training=False), tf.TensorSpec([4, 2])))


def test_frozen_state_is_live_in_use_and_has_the_bits_of_the_base_afterwards():
    odd = np.array([0x7FC00123, 0x80000000], np.uint32).view(np.float32)
    variable = tf.Variable(odd)
    state = ModelState({"a": variable}, {})
    for expected in ([1.0, 2.0], [3.0, 4.0]):
        with state.in_use():
            variable.assign(expected)
        assert variable.numpy().tobytes() == odd.tobytes()
        assert state.working["a"].numpy().tolist() == expected
    with state.in_use():
        assert variable.numpy().tolist() == [3.0, 4.0]


def test_frozen_state_is_put_back_after_an_error():
    variable = tf.Variable(1.0)
    state = ModelState({"a": variable}, {})
    with pytest.raises(ZeroDivisionError), state.in_use():
        variable.assign(1 // 0)
    assert float(variable) == 1.0


def test_moving_state_stays_where_it_was_moved_to():
    moving = tf.Variable(1.0)
    state = ModelState({}, {"a": moving})
    with state.in_use():
        moving.assign(2.0)
    assert float(moving) == 2.0
    assert state.working == {}


def test_a_step_that_is_not_taken_leaves_no_trace_in_the_state():
    frozen, moving = tf.Variable([1, 2]), tf.Variable([1.0, 2.0])
    state = ModelState({"a": frozen}, {"b": moving})
    before = state.values()
    frozen.assign([5, 6])
    moving.assign([np.nan, 6.0])
    state.settle(tf.constant(False), before)
    assert frozen.numpy().tolist() == [1, 2]
    assert moving.numpy().tolist() == [1.0, 2.0]
    moving.assign([7.0, 8.0])
    state.settle(tf.constant(True), before)
    assert moving.numpy().tolist() == [7.0, 8.0]


def test_a_variable_without_a_strategy_is_its_only_copy():
    variable = tf.Variable(1.0)
    assert components(variable) == [variable]
