import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from finetune.selection import Selection
from finetune.updates import DenseUpdate, PackedUpdate, WholeUpdate, inner_names, where_bits

UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
# Signalling NaNs with a payload and the smallest denormal, of either sign.
AWKWARD = {
    "float16": [0x7C01, 0xFC2A, 0x0001, 0x8001],
    "bfloat16": [0x7F81, 0xFFAA, 0x0001, 0x8001],
    "float32": [0x7F800001, 0xFFAAAAAA, 0x00000001, 0x80000001],
    "float64": [0x7FF0000000000001, 0xFFF2AAAAAAAAAAAA, 1, 0x8000000000000001],
}
MODES = ["eager", "function", "xla"]

# x[0, 1] and x[1, 0] are frozen.
CORNERS = Selection.from_flat((2, 2), [0, 3])
LAST_ROW = Selection.from_rows((2, 2), [1])


def bits(value) -> np.ndarray:
    array = np.asarray(value)
    return array.view(UNSIGNED[array.itemsize])


def awkward(dtype: str) -> np.ndarray:
    unsigned = UNSIGNED[tf.as_dtype(dtype).size]
    return np.array(AWKWARD[dtype], unsigned).view(tf.as_dtype(dtype).as_numpy_dtype)


def in_mode(mode: str, function):
    """The function as it runs eagerly, in a graph, or in XLA."""
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def step(update: WholeUpdate, optimizer: keras.optimizers.Optimizer, gradient) -> None:
    """One step as MaskedOptimizer takes it, for one variable."""
    packed = update.pack(gradient)
    update.before()
    optimizer.apply([packed], [update.inner_variable])
    update.push()


# Frozen bits, whatever the optimizer does.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", AWKWARD)
@pytest.mark.parametrize("kind", [PackedUpdate, DenseUpdate])
def test_frozen_elements_keep_their_bits_under_weight_decay_and_nan(kind, dtype, mode):
    # One is trainable, the four awkward numbers are frozen.
    start = np.concatenate([np.ones([1], awkward(dtype).dtype), awkward(dtype)])
    x = tf.Variable(start)
    update = kind("x", [x], Selection.from_flat((5,), [0]), "x")
    # Momentum and decay would move what has no gradient.
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5, weight_decay=0.5)
    optimizer.build([update.inner_variable])
    gradient = tf.constant([1, np.nan, np.inf, 1, 1], x.dtype)

    run = in_mode(mode, functools.partial(step, update, optimizer))
    for _ in range(2):
        run(gradient)

    assert bits(x)[1:].tolist() == bits(start)[1:].tolist()
    # (1 - 0.5 * 0.5) - 0.5 = 0.25, then (0.25 - 0.0625) - 0.25 - 0.5.
    assert float(x[0]) == -0.5625


@pytest.mark.parametrize("kind", [PackedUpdate, DenseUpdate])
@pytest.mark.parametrize("selection", [CORNERS, LAST_ROW], ids=repr)
@pytest.mark.parametrize("mode", MODES)
def test_packed_and_dense_give_the_same_bits(kind, selection, mode):
    start = np.float32([[1, 2], [3, 4]])
    x, free = tf.Variable(start), tf.Variable(start)
    update = kind("x", [x], selection, "x")
    optimizer, plain = (keras.optimizers.AdamW(0.1, weight_decay=0.1) for _ in range(2))
    optimizer.build([update.inner_variable])
    plain.build([free])
    gradient = tf.constant([[1.0, -2.0], [3.0, 0.5]])

    run = in_mode(mode, functools.partial(step, update, optimizer))
    run_plain = in_mode(mode, lambda gradient: plain.apply([gradient], [free]))
    for _ in range(3):
        run(gradient)
        run_plain(gradient)

    assert np.array_equal(bits(x), np.where(selection.to_bool(), bits(free), bits(start)))


@pytest.mark.parametrize("kind", [PackedUpdate, DenseUpdate])
@pytest.mark.parametrize("selection", [CORNERS, LAST_ROW], ids=repr)
@pytest.mark.parametrize("mode", MODES)
def test_slices_with_duplicates_move_a_variable_as_their_dense_sum_does(kind, selection, mode):
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, 5.0]]), tf.constant([1, 1]), tf.constant([2, 2])
    )
    results = []
    for gradient in (slices, tf.constant([[0.0, 0.0], [4.0, 7.0]])):
        x = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
        update = kind("x", [x], selection, "x")
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([update.inner_variable])
        in_mode(mode, functools.partial(step, update, optimizer))(gradient)
        results.append(bits(x).tolist())

    assert results[0] == results[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", AWKWARD)
def test_where_bits_takes_each_element_as_it_is(dtype, mode):
    ones = np.ones([4], awkward(dtype).dtype)
    condition = tf.constant([True, False, True, False])
    run = in_mode(mode, where_bits)

    picked = run(condition, tf.constant(ones), tf.constant(awkward(dtype)))
    other = run(condition, tf.constant(awkward(dtype)), tf.constant(ones))

    expected = np.where(condition, bits(ones), bits(awkward(dtype)))
    assert bits(picked).tolist() == expected.tolist()
    expected = np.where(condition, bits(awkward(dtype)), bits(ones))
    assert bits(other).tolist() == expected.tolist()


# What the optimizer is shown.


def test_a_whole_variable_is_shown_itself():
    x = tf.Variable([1.0, 2.0], constraint=keras.constraints.NonNeg())
    update = WholeUpdate("dense/bias", [x], Selection.all((2,)), "dense_bias")

    assert update.inner_variable.value is x
    assert update.inner_variable.constraint is x.constraint
    assert update.pack(tf.constant([3.0, 4.0])).numpy().tolist() == [3, 4]


@pytest.mark.parametrize("dtype", AWKWARD)
@pytest.mark.parametrize(
    ("selection", "shape"), [(CORNERS, (2,)), (LAST_ROW, (1, 2))], ids=["elements", "rows"]
)
def test_packed_shows_the_trainable_elements_alone_in_their_dtype(dtype, selection, shape):
    x = tf.Variable(tf.cast([[1, 2], [3, 4]], dtype))

    inner = PackedUpdate("x", [x], selection, "x").inner_variable

    assert tuple(inner.shape) == shape
    assert inner.dtype == dtype
    assert (
        inner.numpy().reshape(-1).tolist()
        == np.float32([[1, 2], [3, 4]])[selection.to_bool()].tolist()
    )


@pytest.mark.parametrize("kind", [WholeUpdate, PackedUpdate, DenseUpdate])
def test_the_inner_variable_carries_the_path_and_a_name(kind):
    x = tf.Variable(tf.zeros([2, 2]))

    update = kind("dense/kernel", [x], CORNERS, "dense_kernel")

    assert update.path == update.inner_variable.path == "dense/kernel"
    assert update.inner_variable.name == "dense_kernel"
    assert update.selection is CORNERS


def test_the_modes_have_names():
    assert [u.mode for u in (WholeUpdate, PackedUpdate, DenseUpdate)] == [
        "whole",
        "packed",
        "dense",
    ]


def test_a_dense_gradient_is_zero_at_frozen_elements_whatever_stood_there():
    update = DenseUpdate("x", [tf.Variable(tf.zeros([2, 2]))], CORNERS, "x")

    packed = update.pack(tf.constant([[1.0, np.nan], [-np.inf, 4.0]]))

    assert packed.numpy().tolist() == [[1, 0], [0, 4]]


def test_sparse_gradients_stay_sparse_in_dense_mode():
    update = DenseUpdate("x", [tf.Variable(tf.zeros([2, 2]))], CORNERS, "x")

    packed = update.pack(
        tf.IndexedSlices(
            tf.constant([[np.nan, 1.0], [np.inf, 2.0]]), tf.constant([1, 1]), tf.constant([2, 2])
        )
    )

    assert isinstance(packed, tf.IndexedSlices)
    assert packed.indices.numpy().tolist() == [1]
    assert packed.values.numpy().tolist() == [[0, 3]]


def test_a_whole_variable_gets_each_row_of_a_sparse_gradient_once():
    update = WholeUpdate("x", [tf.Variable(tf.zeros([3, 1]))], Selection.all((3, 1)), "x")

    packed = update.pack(
        tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 2]), tf.constant([3, 1]))
    )

    assert (packed.indices.numpy().tolist(), packed.values.numpy().tolist()) == ([2], [[3]])


# Copies on several replicas.


@pytest.mark.parametrize("kind", [WholeUpdate, PackedUpdate, DenseUpdate])
@pytest.mark.parametrize("mode", MODES)
def test_all_copies_of_a_variable_follow_the_first(kind, mode):
    copies = [tf.Variable([[1.0, 2.0], [3.0, 4.0]]) for _ in range(3)]
    selection = Selection.all((2, 2)) if kind is WholeUpdate else CORNERS
    update = kind("x", copies, selection, "x")
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([update.inner_variable])

    in_mode(mode, functools.partial(step, update, optimizer))(tf.ones([2, 2]))

    expected = [[0, 1], [2, 3]] if kind is WholeUpdate else [[0, 2], [3, 3]]
    assert [x.numpy().tolist() for x in copies] == [expected] * 3


def test_pull_takes_over_what_others_wrote_to_the_variable():
    x = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    update = PackedUpdate("x", [x], CORNERS, "x")

    x.assign([[5.0, 6.0], [7.0, 8.0]])
    update.pull()
    update.push()

    assert update.inner_variable.numpy().tolist() == [5, 8]
    assert x.numpy().tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize("kind", [WholeUpdate, DenseUpdate])
def test_the_other_ways_need_no_pull(kind):
    x = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    update = kind("x", [x], CORNERS, "x")

    x.assign([[5.0, 6.0], [7.0, 8.0]])
    update.pull()

    assert update.inner_variable.numpy().tolist() == [[5, 6], [7, 8]]


def test_dense_refuses_to_push_what_it_did_not_see_before():
    update = DenseUpdate("x", [tf.Variable(tf.zeros([2, 2]))], CORNERS, "x")

    with pytest.raises(AssertionError, match="push without before"):
        update.push()
    update.before()
    update.push()
    with pytest.raises(AssertionError, match="push without before"):
        update.push()


# Slots.


def test_slots_are_zero_at_frozen_elements_where_they_have_the_variables_shape():
    update = DenseUpdate("x", [tf.Variable(tf.zeros([2, 2]))], CORNERS, "x")
    momentum = keras.Variable([[1.0, np.nan], [3.0, 4.0]])
    factor = keras.Variable([1.0, 2.0])

    update.frozen_slots_to_zero([momentum, factor])

    assert momentum.numpy().tolist() == [[1, 0], [0, 4]]
    assert factor.numpy().tolist() == [1, 2]


@pytest.mark.parametrize("kind", [WholeUpdate, PackedUpdate])
def test_where_nothing_frozen_has_slots_they_stay(kind):
    slot = keras.Variable([[1.0, 2.0], [3.0, 4.0]])

    kind("x", [tf.Variable(tf.zeros([2, 2]))], CORNERS, "x").frozen_slots_to_zero([slot])

    assert slot.numpy().tolist() == [[1, 2], [3, 4]]


# Names.


@given(
    st.lists(st.text(alphabet="ab_/.:0가 ", max_size=4) | st.sampled_from(["a_1", "a", "a_1_1"]))
)
def test_inner_names_are_valid_and_unique(paths):
    names = inner_names(paths)

    assert len(names) == len(set(names)) == len(paths)
    for name in itertools.islice(names, 3):
        assert keras.Variable(0.0, name=name).name == name
        with tf.name_scope(name):
            pass


def test_inner_names_resemble_the_paths():
    assert inner_names(["dense/kernel", "dense_kernel", "층/가중치", "x:0", ""]) == [
        "dense_kernel",
        "dense_kernel_1",
        "variable",
        "x_0",
        "variable_1",
    ]
