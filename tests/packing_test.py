import functools
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from finetune import packing
from finetune.packing import Packing, sum_duplicates
from finetune.selection import Selection

UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
DTYPES = ["float32", "float16", "bfloat16", "float64"]
MODES = ["eager", "function", "xla"]

# Signalling NaNs with a payload, the smallest denormals, zeros of both signs, infinity, one.
AWKWARD = {
    "float16": [0x7C01, 0xFE55, 0x0001, 0x8001, 0x8000, 0x0000, 0x7C00, 0x3C00],
    "bfloat16": [0x7F81, 0xFFD5, 0x0001, 0x8001, 0x8000, 0x0000, 0x7F80, 0x3F80],
    "float32": [0x7F800001, 0xFFD55555, 1, 0x80000001, 0x80000000, 0, 0x7F800000, 0x3F800000],
    "float64": [
        0x7FF0000000000001,
        0xFFFD555555555555,
        1,
        0x8000000000000001,
        0x8000000000000000,
        0,
        0x7FF0000000000000,
        0x3FF0000000000000,
    ],
}


def numbers_of(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits of the dtype, every second number an awkward one."""
    random = np.random.default_rng(seed)
    unsigned = UNSIGNED[tf.as_dtype(dtype).size]
    bits = random.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
    awkward = random.choice(np.array(AWKWARD[dtype], unsigned), shape)
    bits = np.where(random.random(shape) < 0.5, bits, awkward)
    return np.asarray(bits).view(tf.as_dtype(dtype).as_numpy_dtype)


def bits(value) -> np.ndarray:
    array = np.asarray(value)
    return array.view(UNSIGNED[array.itemsize])


def in_mode(mode: str, function):
    """The function as it runs eagerly, in a graph, or in XLA."""
    if mode in ("function", "xla"):
        return tf.function(function, jit_compile=mode == "xla", autograph=False)
    return function


@pytest.fixture(params=["eager", "function", "xla", "compiled"])
def run_of(request, monkeypatch):
    """Makes a function run in each of the modes, the last one eagerly with an XLA scatter."""
    if request.param == "compiled":
        monkeypatch.setattr(packing, "_XLA_SCATTER_FROM", 0)
    return functools.partial(in_mode, request.param)


def some_of(mask: np.ndarray) -> Selection:
    selection = Selection.from_bool(mask)
    assume(selection.kind in ("rows", "elements"))
    return selection


MASKS = hnp.arrays(np.bool_, st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple))


# Bits.


@given(MASKS, st.sampled_from(DTYPES), st.integers(0, 99))
@settings(max_examples=60)
def test_only_trainable_elements_get_other_bits(mask, dtype, seed):
    selection = some_of(mask)
    pack = Packing(selection)
    old, new = numbers_of(dtype, mask.shape, seed), numbers_of(dtype, pack.packed_shape, seed + 1)
    x = tf.Variable(old)

    pack.scatter(x, tf.constant(new))

    assert np.array_equal(bits(x)[~mask], bits(old)[~mask])
    assert np.array_equal(bits(x)[mask], bits(new).reshape(-1))
    assert np.array_equal(bits(pack.gather(x)), bits(new))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "selection",
    [
        Selection.from_flat((7,), [0, 3, 6]),
        Selection.from_flat((40, 3), range(0, 120, 7)),
        Selection.from_rows((40, 3), [0, 17, 39]),
        Selection.from_rows((40, 3), range(1, 40)),
        Selection.from_flat((2, 1, 2, 5, 3), range(5, 60, 2)),
        Selection.from_rows((4, 1, 2, 5, 3), [3]),
    ],
    ids=lambda selection: f"{selection.kind}-{'x'.join(map(str, selection.shape))}",
)
def test_no_frozen_bit_changes_in_any_mode(run_of, dtype, selection):
    pack, mask = Packing(selection), selection.to_bool()
    old, new = numbers_of(dtype, mask.shape), numbers_of(dtype, pack.packed_shape, 1)
    x = tf.Variable(old)

    gathered = run_of(lambda: pack.gather(x))()
    run_of(functools.partial(pack.scatter, x))(tf.constant(new))

    assert np.array_equal(bits(gathered).reshape(-1), bits(old)[mask])
    assert np.array_equal(bits(x)[~mask], bits(old)[~mask])
    assert np.array_equal(bits(x)[mask], bits(new).reshape(-1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_elements_of_a_large_variable_go_through_xla_and_keep_the_bits(mode, dtype):
    shape = (300, 200)
    mask = np.random.default_rng(0).random(shape) < 0.5
    selection = Selection.from_bool(mask)
    assert selection.count > packing._XLA_SCATTER_FROM
    pack = Packing(selection)
    old, new = numbers_of(dtype, shape), numbers_of(dtype, pack.packed_shape, 1)
    x = tf.Variable(old)

    in_mode(mode, functools.partial(pack.scatter, x))(tf.constant(new))

    assert np.array_equal(bits(x)[~mask], bits(old)[~mask])
    assert np.array_equal(bits(x)[mask], bits(new))


def test_several_steps_move_the_trainable_elements_one_after_the_other(run_of):
    x = tf.Variable([[0.0, 10.0], [20.0, 30.0]])
    pack = Packing(Selection.from_flat((2, 2), [1, 2]))

    def three_steps():
        for _ in range(3):
            pack.scatter(x, pack.gather(x) + 1)
        return x.read_value()

    result = run_of(three_steps)()

    assert result.numpy().tolist() == x.numpy().tolist() == [[0.0, 13.0], [23.0, 30.0]]


def test_a_packing_made_inside_a_graph_serves_outside_of_it():
    x = tf.Variable([1.0, 2.0, 3.0])
    packs = []

    @tf.function(autograph=False)
    def step():
        packs.append(Packing(Selection.from_flat((3,), [1])))
        packs[0].scatter(x, packs[0].gather(x) * 2)
        packs[0].gather_gradient(tf.IndexedSlices(tf.ones([1]), tf.constant([1])))

    step()
    packs[0].scatter(x, packs[0].gather(x) * 2)

    assert x.numpy().tolist() == [1.0, 8.0, 3.0]
    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([1]))
    assert packs[0].gather_gradient(slices).numpy().tolist() == [1.0]


def test_more_axes_than_the_tensorflow_scatter_takes_are_no_obstacle():
    x = tf.Variable(tf.zeros([2, 1, 1, 1, 1, 1, 1, 2, 2]))
    pack = Packing(Selection.from_flat(x.shape, [0, 7]))

    pack.scatter(x, [1.0, 2.0])

    assert x.numpy().reshape(-1).tolist() == [1, 0, 0, 0, 0, 0, 0, 2]


def test_a_wider_packed_value_is_rounded_to_the_variable():
    x = tf.Variable(tf.zeros([2], tf.bfloat16))

    Packing(Selection.from_flat((2,), [1])).scatter(x, tf.constant([1.001], tf.float32))

    assert x.numpy().tolist() == [0.0, 1.0]


ON_TWO_DEVICES = """
import tensorflow as tf
from finetune.packing import Packing
from finetune.selection import Selection

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    x = tf.Variable(tf.zeros([200, 200]))
for selection in (
    Selection.from_flat((200, 200), range(20_000)),
    Selection.from_flat((200, 200), range(20_000, 20_100)),
    Selection.from_rows((200, 200), [150]),
):
    pack = Packing(selection)

    def write(value):
        for copy in x.values:
            pack.scatter(copy, pack.gather(copy) + value)

    write(1.0)
    tf.function(write)(2.0)
print([float(tf.reduce_sum(copy)) for copy in x.values])
"""


def test_the_copy_of_a_variable_on_another_device_is_written_too():
    answer = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "[60900.0, 60900.0]\n"


# Copy-on-read.


def copies_on_read(x: tf.Variable) -> bool:
    """Whether two reads of a variable lie at two addresses."""
    reads = [x.read_value(), x.read_value()]
    return len({np.frombuffer(memoryview(read), np.uint8).ctypes.data for read in reads}) == 2


def test_a_plain_tensorflow_scatter_would_leave_copy_on_read_on():
    x = tf.Variable(tf.zeros([8, 4]))
    assert not copies_on_read(x)

    x.scatter_nd_update([[0, 0]], [1.0])

    assert copies_on_read(x)


@pytest.mark.parametrize(
    "selection", [Selection.from_rows((8, 4), [1]), Selection.from_flat((8, 4), [5])], ids=repr
)
def test_copy_on_read_is_off_after_a_scatter(run_of, selection):
    x = tf.Variable(tf.zeros([8, 4]))
    pack = Packing(selection)

    run_of(functools.partial(pack.scatter, x))(tf.ones(pack.packed_shape))

    assert not copies_on_read(x)
    assert x.numpy().sum() == selection.count


# Gradients.


@pytest.mark.parametrize("mode", MODES)
@given(mask=MASKS, seed=st.integers(0, 99))
@settings(max_examples=8)
def test_slices_and_the_equal_dense_gradient_pack_to_the_same_bits(mode, mask, seed):
    pack = Packing(some_of(mask))
    random = np.random.default_rng(seed)
    rows = random.integers(0, len(mask), 6)
    values = random.standard_normal((6, *mask.shape[1:])).astype(np.float32)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant(mask.shape))

    from_slices = in_mode(mode, pack.gather_gradient)(slices)
    from_dense = in_mode(mode, pack.gather_gradient)(tf.convert_to_tensor(slices))

    assert tuple(from_slices.shape) == pack.packed_shape
    assert np.array_equal(bits(from_slices), bits(from_dense))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection.from_rows((4, 2), [1, 3]), [[1 + 5, 2 + 6], [0, 0]]),
        (Selection.from_flat((4, 2), [0, 2, 3, 6]), [0, 1 + 5, 2 + 6, 0]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("index_dtype", [tf.int32, tf.int64])
def test_slices_of_one_row_are_summed_and_frozen_rows_left_behind(
    mode, selection, expected, index_dtype
):
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [np.nan, np.inf], [5.0, 6.0]]),
        tf.constant([1, 2, 1], index_dtype),
        tf.constant([4, 2], index_dtype),
    )

    packed = in_mode(mode, Packing(selection).gather_gradient)(slices)

    assert packed.numpy().tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_nan_at_frozen_elements_stays_behind(mode):
    nan = np.nan
    pack = Packing(Selection.from_flat((2, 2), [0, 3]))
    dense = tf.constant([[1.0, nan], [nan, 4.0]])
    slices = tf.IndexedSlices(dense, tf.constant([0, 1]), tf.constant([2, 2]))

    assert in_mode(mode, pack.gather_gradient)(dense).numpy().tolist() == [1, 4]
    assert in_mode(mode, pack.gather_gradient)(slices).numpy().tolist() == [1, 4]


def test_no_slices_are_a_gradient_of_zeros():
    slices = tf.IndexedSlices(tf.zeros([0, 2]), tf.zeros([0], tf.int32), tf.constant([4, 2]))

    assert Packing(Selection.from_rows((4, 2), [1])).gather_gradient(slices).numpy().tolist() == [
        [0, 0]
    ]
    assert Packing(Selection.from_flat((4, 2), [1])).gather_gradient(slices).numpy().tolist() == [0]


def test_packing_slices_makes_nothing_of_the_size_of_the_variable():
    # 4 TB if it were dense.
    shape = (10**6, 10**6)
    pack = Packing(Selection.from_flat(shape, [3, 10**6, 10**12 - 1]))
    slices = tf.IndexedSlices(
        tf.reshape(tf.range(2e6), [2, 10**6]), tf.constant([0, 10**6 - 1]), tf.constant(shape)
    )

    assert pack.gather_gradient(slices).numpy().tolist() == [3, 0, 2e6 - 1]


def test_the_gradient_of_an_embedding_is_packed_as_it_comes():
    table = tf.Variable(tf.zeros([4, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [[1, 1], [2, 1]]))
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)

    assert Packing(Selection.from_rows((4, 2), [1, 3])).gather_gradient(
        gradient
    ).numpy().tolist() == [[3, 3], [0, 0]]


# Duplicates.


@pytest.mark.parametrize("mode", MODES)
def test_duplicate_slices_are_summed(mode):
    slices = tf.IndexedSlices(
        tf.constant([[1.0], [2.0], [4.0], [8.0]]), tf.constant([3, 0, 3, 3]), tf.constant([5, 1])
    )

    summed = in_mode(mode, sum_duplicates)(slices)

    # tf.unique does not exist in XLA, where the gradient becomes dense.
    assert isinstance(summed, tf.IndexedSlices) == (mode != "xla")
    assert tf.convert_to_tensor(summed).numpy().tolist() == [[2], [0], [0], [13], [0]]
    if mode != "xla":
        assert summed.indices.numpy().tolist() == [3, 0]
        assert summed.values.numpy().tolist() == [[13], [2]]


def test_a_dense_gradient_has_no_duplicates():
    gradient = tf.constant([1.0, 2.0])

    assert sum_duplicates(gradient) is gradient


def test_no_slices_stay_no_slices():
    slices = tf.IndexedSlices(tf.zeros([0, 2]), tf.zeros([0], tf.int32), tf.constant([4, 2]))

    assert sum_duplicates(slices).values.shape == (0, 2)


# What does not fit.


def test_another_shape_of_variable_gradient_or_packed_value_is_refused():
    rows, elements = (
        Packing(Selection.from_rows((3, 2), [0, 2])),
        Packing(Selection.from_flat((3, 2), [0, 5])),
    )
    x = tf.Variable(tf.zeros([3, 2]))

    with pytest.raises(ValueError, match=r"^`variable` \(of shape \(2, 3\)\) must have .*\(3, 2\)"):
        elements.scatter(tf.Variable(tf.zeros([2, 3])), [1.0, 2.0])
    # A row scatter would broadcast one row to all.
    with pytest.raises(ValueError, match=r"^`packed` \(of shape \(1, 2\)\) must have .*\(2, 2\)"):
        rows.scatter(x, tf.ones([1, 2]))
    with pytest.raises(ValueError, match=r"^`packed` \(of shape \(3,\)\) must have .* \(2,\)\."):
        elements.scatter(x, [1.0, 2.0, 3.0])
    for pack in (rows, elements):
        with pytest.raises(ValueError, match=r"^`gradient` \(of shape \(2, 3\)\) must have .*3, 2"):
            pack.gather_gradient(tf.ones([2, 3]))
        with pytest.raises(ValueError, match=r"^`gradient` \(of shape \(3, 4\)\) must have .*3, 2"):
            pack.gather_gradient(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([0])))
    assert x.numpy().sum() == 0


# Size.


def test_sixteen_million_elements_are_packed_in_seconds():
    selection = Selection.from_bool(np.random.default_rng(0).random([4096, 4096]) < 0.3)
    x = tf.Variable(tf.zeros(selection.shape))
    rows = tf.IndexedSlices(tf.ones([2, 4096]), tf.constant([5, 5]), tf.constant([4096, 4096]))
    started = time.process_time()

    pack = Packing(selection)
    pack.scatter(x, pack.gather(x) + 1)
    gradient = pack.gather_gradient(rows)

    assert time.process_time() - started < 4
    assert float(tf.reduce_sum(x)) == selection.count
    assert float(tf.reduce_sum(gradient)) == 2 * selection.to_bool()[5].sum()
