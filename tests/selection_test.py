import copy
import json
import os
import pickle

import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from finetune.selection import (
    Selection,
    load_selections,
    save_selections,
    selections_digest,
)

SHAPES = st.lists(st.integers(0, 3), max_size=5).map(tuple)
MASKS = SHAPES.flatmap(lambda shape: hnp.arrays(np.bool_, shape))
PAIRS = SHAPES.flatmap(
    lambda shape: st.tuples(hnp.arrays(np.bool_, shape), hnp.arrays(np.bool_, shape))
)
ROW_MASKS = hnp.arrays(np.bool_, st.integers(1, 5))


# What a selection says of itself.


def test_true_means_trainable():
    corners = Selection.from_bool([[True, False], [False, True]])

    assert corners.kind == "elements"
    assert (corners.count, corners.size, corners.density) == (2, 4, 0.5)
    assert corners.flat_indices().tolist() == [0, 3]
    assert corners.rows is None
    assert repr(corners) == "Selection(elements, 2 of 4)"


def test_whole_rows_are_kept_as_row_numbers():
    rows = Selection.from_rows((4, 2), [3, 0, -1])

    assert rows.kind == "rows"
    assert rows.rows.tolist() == [0, 3]
    assert (rows.count, rows.density) == (4, 0.5)
    assert rows.flat_indices().tolist() == [0, 1, 6, 7]


def test_negative_and_repeated_indices_count_once():
    assert Selection.from_flat((2, 3), [-1, 5, 5, 0]).flat_indices().tolist() == [0, 5]


@pytest.mark.parametrize(
    ("shape", "size"), [((), 1), ((0,), 0), ((3, 0), 0), ((5,), 5), ((2, 1, 2, 2, 3), 24)]
)
def test_none_and_all_hold_in_every_shape(shape, size):
    none, everything = Selection.none(shape), Selection.all(shape)

    assert (none.count, everything.count) == (0, size)
    assert none.flat_indices().tolist() == []
    assert everything.flat_indices().tolist() == list(range(size))
    assert everything.density == (1 if size else 0)
    assert (~none, ~everything) == (everything, none)


def test_indices_are_32_bits_wide_until_they_do_not_fit():
    assert Selection.from_flat((4,), [1]).flat_indices().dtype == np.int32
    wide = Selection.from_flat((2**17, 2**17), [2**33])
    assert wide.flat_indices().dtype == np.int64
    assert wide.flat_indices().tolist() == [2**33]
    # Row numbers fit although the elements' do not.
    rows = Selection.from_rows((2**17, 2**17), [2**16])
    assert rows.rows.dtype == np.int32
    assert rows.flat_indices()[[0, -1]].tolist() == [2**33, 2**33 + 2**17 - 1]


def test_a_selection_is_immutable():
    row_numbers = np.array([0, 1])
    selection = Selection.from_rows((3, 2), row_numbers)
    row_numbers[:] = 2

    assert selection.rows.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        selection.rows[0] = 2
    with pytest.raises(AttributeError, match=r"`kind` \('all'\) cannot be set.*immutable"):
        selection.kind = "all"
    with pytest.raises(AttributeError, match=r"`shape` cannot be deleted.*immutable"):
        del selection.shape


def test_a_selection_never_equals_another_thing():
    assert Selection.all((2,)) != "all"
    assert Selection.all((2, 1)) != Selection.all((1, 2))


# What it accepts.


@pytest.mark.parametrize(
    "indices",
    [
        [1, 2],
        (2, 1),
        {1, 2},
        range(1, 3),
        range(2, 0, -1),
        iter([1, 2, 1]),
        (i for i in (2, 1)),
        {1: "a", 2: "b"}.keys(),
        np.array([1, 2], np.uint8),
        np.array([1, -1], np.int16),
        np.array([2, 1], np.uint64),
        np.array([1, 2], object),
        [np.int64(1), np.int8(2)],
        tf.constant([1, 2]),
        tf.constant([2, 1], tf.uint8),
    ],
    ids=lambda indices: f"{type(indices).__name__}-{getattr(indices, 'dtype', '')}",
)
def test_any_collection_of_integers_is_a_list_of_indices(indices):
    chosen = list(indices) if not hasattr(indices, "__len__") else indices

    assert Selection.from_flat((3,), chosen).flat_indices().tolist() == [1, 2]
    assert Selection.from_rows((3, 2), chosen).rows.tolist() == [1, 2]


def test_an_iterator_is_read_once():
    assert Selection.from_rows((3, 2), iter([2])).rows.tolist() == [2]
    assert Selection.from_flat((3,), (i for i in [0, 2])).flat_indices().tolist() == [0, 2]


@pytest.mark.parametrize("nothing", [[], (), set(), range(0), np.zeros([0]), iter([])])
def test_no_indices_select_nothing(nothing):
    assert Selection.from_flat((3, 2), nothing) == Selection.none((3, 2))
    assert Selection.from_rows((3, 2), []) == Selection.none((3, 2))


def test_shapes_may_be_lists_tensor_shapes_and_numpy_integers():
    for shape in ([2, 3], tf.TensorShape([2, 3]), np.array([2, 3])):
        assert Selection.from_rows(shape, [0]).shape == (2, 3)
        assert Selection.from_flat(shape, [0]).shape == (2, 3)
        assert Selection.all(shape) == ~Selection.none(shape)
    assert Selection.from_bool(tf.constant([True, False])).count == 1


# The algebra, against NumPy's booleans.


@given(MASKS)
def test_a_boolean_array_comes_back_as_it_was(mask):
    selection = Selection.from_bool(mask)

    assert np.array_equal(selection.to_bool(), mask)
    assert selection.shape == mask.shape
    assert selection.flat_indices().tolist() == np.flatnonzero(mask).tolist()
    assert (selection.count, selection.size) == (mask.sum(), mask.size)


@given(PAIRS)
def test_union_intersection_difference_and_complement_are_those_of_booleans(pair):
    a, b = pair
    one, other = Selection.from_bool(a), Selection.from_bool(b)

    for result, expected in [
        (one | other, a | b),
        (one & other, a & b),
        (one - other, a & ~b),
        (~one, ~a),
    ]:
        # Equal selections are of one form, whichever way they were made.
        assert result == Selection.from_bool(expected)
        assert result.kind == Selection.from_bool(expected).kind
        assert hash(result) == hash(Selection.from_bool(expected))
        assert np.array_equal(result.to_bool(), expected)


@given(
    st.sampled_from([(5000,), (1000, 5), (50, 20, 5)]),
    st.sets(st.integers(0, 4999), max_size=40),
    st.sets(st.integers(0, 4999), max_size=40),
)
def test_the_algebra_of_few_elements_is_that_of_sets(shape, a, b):
    one, other = Selection.from_flat(shape, a), Selection.from_flat(shape, b)

    assert (one | other).flat_indices().tolist() == sorted(a | b)
    assert (one & other).flat_indices().tolist() == sorted(a & b)
    assert (one - other).flat_indices().tolist() == sorted(a - b)
    assert (~one).flat_indices().tolist() == sorted(set(range(5000)) - a)
    assert (one | other) - (one & other) == (one - other) | (other - one)


@given(PAIRS)
def test_two_selections_are_equal_exactly_when_their_elements_are(pair):
    a, b = pair
    one, other = Selection.from_bool(a), Selection.from_bool(b)

    assert (one == other) == np.array_equal(a, b)
    assert (selections_digest({"x": one}) == selections_digest({"x": other})) == (one == other)


@given(MASKS, st.randoms(use_true_random=False))
def test_the_order_sign_and_repetition_of_indices_do_not_matter(mask, random):
    flat = np.flatnonzero(mask).tolist()
    given_ = flat * 2
    random.shuffle(given_)
    given_ = [i - mask.size if random.random() < 0.5 else i for i in given_]

    assert Selection.from_flat(mask.shape, given_) == Selection.from_bool(mask)


@given(ROW_MASKS, SHAPES)
def test_rows_are_the_same_however_they_were_chosen(rows, tail):
    mask = np.zeros([len(rows), *tail], np.bool_)
    mask[rows] = True

    selection = Selection.from_rows(mask.shape, np.flatnonzero(rows))

    assert selection == Selection.from_bool(mask)
    assert selection == Selection.from_flat(mask.shape, np.flatnonzero(mask))
    assert selection.kind == Selection.from_bool(mask).kind


@given(MASKS)
def test_the_form_follows_from_the_elements(mask):
    selection = Selection.from_bool(mask)

    if not mask.any():
        assert selection.kind == "none"
    elif mask.all():
        assert selection.kind == "all"
    elif mask.ndim > 1 and (mask == mask.any(axis=tuple(range(1, mask.ndim)), keepdims=True)).all():
        assert selection.kind == "rows"
        assert np.array_equal(
            selection.rows, np.flatnonzero(mask.any(axis=tuple(range(1, mask.ndim))))
        )
    else:
        assert selection.kind == "elements"


def test_row_arithmetic_of_a_huge_variable_stays_small():
    shape = (100_000, 10**9)
    a, b = Selection.from_rows(shape, [1, 2]), Selection.from_rows(shape, [2, 3])

    assert (a | b).rows.tolist() == [1, 2, 3]
    assert (a & b).rows.tolist() == [2]
    assert (a - b).rows.tolist() == [1]
    assert (~a).count == (100_000 - 2) * 10**9
    assert ~~a == a


def test_few_elements_of_a_huge_variable_stay_few():
    shape = (100_000, 10**9)
    a, b = Selection.from_flat(shape, [7, 10**13]), Selection.from_flat(shape, [7])

    assert (a | b, a & b, a - b) == (a, b, Selection.from_flat(shape, [10**13]))
    assert (a & Selection.from_flat(shape, [8])).kind == "none"


# Copies and files.


@given(st.dictionaries(st.text(max_size=8).map(lambda name: "w/" + name), MASKS, max_size=4))
def test_selections_survive_their_file(tmp_path_factory, masks):
    selections = {name: Selection.from_bool(mask) for name, mask in masks.items()}
    path = tmp_path_factory.getbasetemp() / "selections.safetensors"

    save_selections(path, selections)
    loaded = load_selections(path)

    assert loaded == selections
    assert list(loaded) == list(selections)
    assert selections_digest(loaded) == selections_digest(selections)


@given(MASKS)
def test_selections_survive_pickle_and_copy(mask):
    selection = Selection.from_bool(mask)

    for again in (pickle.loads(pickle.dumps(selection)), copy.deepcopy(selection)):
        assert again == selection
        assert hash(again) == hash(selection)
        assert not again.flat_indices().flags.writeable or selection.kind != "elements"


def test_a_file_of_selections_is_written_whole_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "selections.safetensors"
    save_selections(path, {"x": Selection.all((2,))})
    save_selections(path, {"x": Selection.none((2,))})

    assert load_selections(path) == {"x": Selection.none((2,))}
    assert os.listdir(tmp_path) == ["selections.safetensors"]


def test_what_is_wholly_trainable_or_frozen_and_whole_rows_take_no_room(tmp_path):
    path = tmp_path / "selections.safetensors"
    big = (50_000, 1000)
    save_selections(
        path,
        {"a": Selection.all(big), "n": Selection.none(big), "r": Selection.from_rows(big, [7])},
    )

    assert os.path.getsize(path) < 1000


def test_the_digest_depends_on_the_paths_but_not_on_their_order():
    x, y = Selection.all((2,)), Selection.from_flat((2,), [1])

    assert selections_digest({"x": x, "y": y}) == selections_digest({"y": y, "x": x})
    assert selections_digest({"x": x, "y": y}) != selections_digest({"x": y, "y": x})
    assert selections_digest({"x": x}) != selections_digest({"x": x, "y": Selection.none((2,))})


def test_selections_are_saved_only_into_a_folder_that_exists(tmp_path):
    with pytest.raises(ValueError, match=r"^`path` \(.*x\): the folder .*absent does not exist"):
        save_selections(tmp_path / "absent" / "x", {})


def test_a_missing_file_or_a_folder_is_no_file_of_selections(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ValueError, match=r"`path` \(.*\) is no file: expected one that"):
            load_selections(path)


def test_another_kind_of_file_is_refused(tmp_path):
    junk, other = tmp_path / "junk", tmp_path / "other"
    junk.write_bytes(b"not a safetensors file")
    safetensors.numpy.save_file({"x": np.zeros([2])}, other)

    with pytest.raises(ValueError, match=r"`path` \(.*junk\) is no readable safetensors file"):
        load_selections(junk)
    with pytest.raises(ValueError, match=r"holds format None, expected 'finetune-selections-1'"):
        load_selections(other)


@pytest.mark.parametrize(
    ("form", "indices", "reason"),
    [
        (["elements", [2, 2]], [9], r"`indices` \(9\) out of range: the 4 elements of shape"),
        (["rows", [2, 2]], [0, 5], r"`rows` \(5\) out of range: axis 0 of shape \(2, 2\)"),
        (["rows", [2, 2]], None, "the indices of its rows are missing"),
        (["columns", [2, 2]], [1], r"`kind` \('columns'\) must be one of none, all, rows, ele"),
        (["all", [2, -2]], None, r"`shape` \(\[2, -2\]\) must hold no negative lengths"),
    ],
)
def test_a_damaged_file_is_refused_with_the_variable(tmp_path, form, indices, reason):
    path = tmp_path / "damaged"
    metadata = {"format": "finetune-selections-1", "selections": json.dumps({"dense/w": form})}
    tensors = {} if indices is None else {"dense/w": np.array(indices, np.int32)}
    safetensors.numpy.save_file(tensors, path, metadata=metadata)

    with pytest.raises(ValueError, match=r"damaged\) is damaged at `dense/w`: " + reason):
        load_selections(path)


# What it refuses.


def test_row_numbers_out_of_range_are_all_named():
    with pytest.raises(
        ValueError,
        match=r"^`rows` \(4, -5, 9\) out of range: axis 0 of shape \(4, 2\) allow -4 to 3\.$",
    ):
        Selection.from_rows((4, 2), [4, 0, -5, 9])


def test_many_indices_out_of_range_are_counted():
    with pytest.raises(
        ValueError,
        match=r"^`indices` \(6, 7, 8, 9, 10 and 4 more\) out of range: the 6 elements of shape "
        r"\(2, 3\) allow -6 to 5\.$",
    ):
        Selection.from_flat((2, 3), range(15))


def test_an_empty_axis_allows_no_index():
    with pytest.raises(ValueError, match=r"`rows` \(0\) out of range: axis 0 .* allow none\."):
        Selection.from_rows((0, 3), [0])


@pytest.mark.parametrize("huge", [2**70, -(2**70), 2**63, np.uint64(2**64 - 1)])
def test_an_index_beyond_64_bits_does_not_wrap_around(huge):
    with pytest.raises(ValueError, match=rf"`indices` \({huge}\) out of range: the 4 elements of"):
        Selection.from_flat((4,), [huge])


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([True, False], r"`rows` \(True, False\) must be integers, not True and False: boolean\("),
        ([1.0, 2.0], r"`rows` \(1.0, 2.0\) must be a list of integers, its dtype is float64\."),
        (["a"], r"`rows` \(a\) must be a list of integers, its dtype is <U1\."),
        ([None], r"`rows` \(None\) must be a list of integers, its dtype is object\."),
        ([[0, 1]], r"`rows` \(\[0, 1\]\) must be a flat list of integers, its shape is \(1, 2\)"),
        ([[0], [1, 2]], r"`rows` \(\[\[0\], \[1, 2\]\]\) is no array: .*inhomogeneous"),
        (3, r"`rows` \(3\) must be a list of integers; write \[3\] for one\."),
        ("3", r"`rows` \('3'\) must be a list of integers"),
        ({1: 2}, r"`rows` \({1: 2}\) must be a list of integers"),
    ],
)
def test_what_is_no_list_of_integers_is_refused(indices, message):
    with pytest.raises(ValueError, match="^" + message):
        Selection.from_rows((3, 2), indices)


def test_a_scalar_has_no_rows():
    with pytest.raises(
        ValueError, match=r"^`rows` \(0\) need a variable of one axis at least, this one is a sc"
    ):
        Selection.from_rows((), [0])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, None), r"`shape` \(\(2, None\)\) must be a sequence of whole numbers\."),
        ((2, 1.5), r"`shape` \(\(2, 1.5\)\) must be a sequence of whole numbers\."),
        (4, r"`shape` \(4\) must be a sequence of whole numbers\."),
        ((-1, 2), r"`shape` \(\(-1, 2\)\) must hold no negative lengths\."),
    ],
)
def test_a_shape_must_be_known_and_whole(shape, message):
    for make in (Selection.none, Selection.all, lambda shape: Selection.from_rows(shape, [0])):
        with pytest.raises(ValueError, match=message):
            make(shape)


@pytest.mark.parametrize("not_boolean", [[0, 1], [0.5], ["True"], [[]], None])
def test_only_booleans_say_what_is_trainable(not_boolean):
    with pytest.raises(
        ValueError, match=r"^`trainable` \(dtype .*\) must be a boolean array.*`array > 0`"
    ):
        Selection.from_bool(not_boolean)


def test_selections_of_two_shapes_do_not_mix():
    for combine in (Selection.__or__, Selection.__and__, Selection.__sub__):
        with pytest.raises(
            ValueError, match=r"^Selections of shapes \(2,\) and \(3,\) cannot be combined"
        ):
            combine(Selection.all((2,)), Selection.all((3,)))


def test_a_selection_combines_with_selections_only():
    with pytest.raises(TypeError, match="unsupported operand"):
        Selection.all((2,)) | [0]
