import json
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from finetune.selection import Selection
from finetune.selectors import (
    VariableSpec,
    as_selector,
    boolean,
    columns,
    complement,
    difference,
    elements,
    everything,
    intersection,
    largest,
    model_state,
    nonzeros,
    nothing,
    random,
    rows,
    selector_from_config,
    slices,
    smallest,
    union,
    zeros,
)

TABLE = np.float32([[0, -4, 1], [2, -0.0, -3]])


def spec_of(value, path="w") -> VariableSpec:
    value = np.asarray(value)
    return VariableSpec(path, value.shape, value.dtype.name, lambda: value)


def spec_of_shape(*shape: int) -> VariableSpec:
    """A variable that no selector may read."""

    def read() -> np.ndarray:
        raise AssertionError("read without need")

    return VariableSpec("w", shape, "float32", read)


def flat(selector, spec: VariableSpec) -> list[int]:
    return as_selector(selector)(spec).flat_indices().tolist()


# By place.


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (everything(), [0, 1, 2, 3, 4, 5]),
        (nothing(), []),
        (elements([[0, 0], [1, 1]]), [0, 4]),
        (elements([(-1, -1), (1, 2)]), [5]),
        (elements([]), []),
        (rows([1]), [3, 4, 5]),
        (rows([-1]), [3, 4, 5]),
        (rows(range(2)), [0, 1, 2, 3, 4, 5]),
        (rows([]), []),
        (columns([0, 2]), [0, 2, 3, 5]),
        (columns([-1]), [2, 5]),
        (columns(range(0)), []),
        (slices("[0]"), [0, 1, 2]),
        (slices("[:, 1:]"), [1, 2, 4, 5]),
        (slices("[1, -1]"), [5]),
        (slices("[..., ::2]"), [0, 2, 3, 5]),
        (slices("[::-1, 0]"), [0, 3]),
        (slices("[[1, 0], 2]"), [2, 5]),
        (slices(" [ :1 , 1:99 ] "), [1, 2]),
        (boolean([[True, False, False], [False, False, True]]), [0, 5]),
        (model_state(), [0, 1, 2, 3, 4, 5]),
    ],
    ids=repr,
)
def test_selectors_by_place_select_those_elements_without_reading_the_base(selector, expected):
    assert flat(selector, spec_of_shape(2, 3)) == expected


def test_selectors_by_place_work_in_any_number_of_axes():
    kernel = spec_of_shape(2, 1, 2, 2, 3)
    assert flat(elements([[1, 0, 1, 1, 2]]), kernel) == [23]
    assert rows([1])(kernel).flat_indices().tolist() == list(range(12, 24))
    assert columns([2])(kernel).flat_indices().tolist() == list(range(2, 24, 3))
    assert flat(slices("[0, ..., 1, 0]"), kernel) == [3, 9]

    bias = spec_of_shape(3)
    assert flat(elements([0, 2]), bias) == flat(elements([[0], [2]]), bias) == [0, 2]
    assert flat(rows([1]), bias) == flat(columns([1]), bias) == flat(slices("[1]"), bias) == [1]

    scalar = spec_of_shape()
    assert flat(elements([[]]), scalar) == flat(slices("[...]"), scalar) == [0]
    assert flat(everything(), scalar) == flat(boolean(True), scalar) == [0]
    assert flat(elements([]), scalar) == flat(nothing(), scalar) == []


def test_empty_variables_have_no_elements_to_select():
    for selector in (everything(), zeros(), largest(share=0.5), random(share=1.0), columns([0])):
        assert selector(spec_of(np.zeros([0, 3]))).kind == "none"


@pytest.mark.parametrize(
    "indices",
    [
        {1},
        iter([1]),
        (i for i in [1]),
        np.array([1], np.uint64),
        tf.constant([1]),
        range(1, 2),
        [np.int64(1)],
    ],
    ids=lambda indices: type(indices).__name__,
)
def test_an_iterator_of_indices_serves_more_than_one_variable(indices):
    selector = rows(indices)

    assert flat(selector, spec_of_shape(2, 2)) == [2, 3]
    assert flat(selector, spec_of_shape(3, 1)) == [1]
    assert flat(selector_from_config(selector.config), spec_of_shape(3, 1)) == [1]


def test_element_indices_may_be_of_any_integer_dtype():
    for dtype in (np.uint8, np.int16, np.uint64, np.int64):
        assert flat(elements(np.array([[1, 2]], dtype)), spec_of_shape(2, 3)) == [5]


def test_a_selector_keeps_what_it_was_given():
    mask, indices = np.array([True, False]), [0]
    by_mask, by_rows = boolean(mask), rows(indices)
    mask[:], indices[0] = True, 1

    assert flat(by_mask, spec_of_shape(2)) == [0]
    assert flat(by_rows, spec_of_shape(2)) == [0]


def test_a_boolean_file_is_read_when_the_selector_is_evaluated(tmp_path):
    path = tmp_path / "mask.npy"
    selector = boolean(path)
    np.save(path, [True, False, True])

    assert flat(selector, spec_of_shape(3)) == [0, 2]
    assert flat(selector_from_config(selector.config), spec_of_shape(3)) == [0, 2]


INDEX_PARTS = st.one_of(
    st.integers(-3, 2).map(str),
    st.tuples(
        *[st.none() | st.integers(-4, 4)] * 2, st.none() | st.sampled_from([-2, -1, 1, 2])
    ).map(lambda ends: ":".join("" if end is None else str(end) for end in ends)),
)


@given(st.lists(INDEX_PARTS, min_size=1, max_size=3), st.booleans())
def test_slices_select_what_numpy_does(parts, ellipsis):
    text = f"[{', '.join([*parts, '...'] if ellipsis else parts)}]"
    expected = np.zeros([3, 3, 3], np.bool_)
    exec(f"expected{text} = True")

    if expected.any():
        assert np.array_equal(slices(text)(spec_of_shape(3, 3, 3)).to_bool(), expected)
    else:
        with pytest.raises(ValueError, match="selects no element"):
            slices(text)(spec_of_shape(3, 3, 3))


# By value.


@pytest.mark.parametrize(
    "dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "int8"]
)
def test_selectors_by_value_read_the_base_in_every_dtype(dtype):
    spec = spec_of(TABLE.astype(dtype))

    assert flat(zeros(), spec) == [0, 4]
    assert flat(nonzeros(), spec) == [1, 2, 3, 5]
    assert flat(largest(count=2), spec) == [1, 5]
    assert flat(smallest(count=3), spec) == [0, 2, 4]


def test_zero_of_either_sign_is_zero_and_the_smallest_denormal_is_not():
    assert flat(zeros(), spec_of(np.float32([0.0, -0.0, 1e-45, np.nan]))) == [0, 1]
    assert flat(nonzeros(), spec_of(np.float32([0.0, -0.0, 1e-45, np.nan]))) == [2, 3]


def test_magnitude_is_that_of_complex_numbers_too():
    assert flat(largest(count=1), spec_of(np.complex64([3, 2 + 3j, -3]))) == [1]


def test_infinity_is_the_largest():
    assert flat(largest(count=2), spec_of(np.float32([1, np.inf, 9, -np.inf]))) == [1, 3]


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 0), (0.1, 0), (0.125, 1), (0.3, 1), (0.375, 2), (1.0, 4), (1, 4)]
)
def test_a_share_is_rounded_to_the_nearest_number_of_elements(share, count):
    value = np.float32([1, 2, 3, 4])

    assert flat(largest(share=share), spec_of(value)) == list(range(4 - count, 4))
    assert flat(smallest(share=share), spec_of(value)) == list(range(count))
    assert random(share=share)(spec_of(value)).count == count


def test_ties_go_to_the_lower_index():
    equal = spec_of(np.float32([1, -1, 0, 1, -1]))

    assert flat(largest(count=3), equal) == [0, 1, 3]
    assert flat(smallest(count=3), equal) == [0, 1, 2]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.data())
def test_largest_and_smallest_follow_a_stable_sort(values, data):
    count = data.draw(st.integers(0, len(values)))
    magnitude = np.abs(values)

    spec = spec_of(np.float32(values))
    order = np.argsort(magnitude, kind="stable")
    assert flat(smallest(count=count), spec) == sorted(order[:count].tolist())
    order = np.argsort(-magnitude, kind="stable")
    assert flat(largest(count=count), spec) == sorted(order[:count].tolist())


def test_nan_has_no_place_in_an_order():
    with pytest.raises(
        ValueError, match=r"^largest\(share=0.5\) does not fit `w`: 2 elements of the base are NaN"
    ):
        largest(share=0.5)(spec_of(np.float32([np.nan, 1, np.nan])))


def test_random_selects_the_same_elements_on_every_machine():
    assert flat(random(count=4), spec_of_shape(5, 4)) == [0, 3, 11, 19]
    assert flat(random(count=4, seed=1), spec_of_shape(5, 4)) == [0, 7, 11, 19]
    assert flat(random(count=4, seed=-1), spec_of_shape(5, 4)) == [4, 7, 10, 11]


def test_random_depends_on_the_path_but_not_on_the_order_of_variables():
    def chosen(path: str) -> list[int]:
        return flat(random(share=0.5), spec_of(np.zeros([40]), path))

    assert chosen("a") != chosen("b")
    assert chosen("a") == chosen("a")


def test_a_larger_random_share_holds_the_smaller_one():
    few, many = (random(share=share)(spec_of_shape(100)) for share in (0.2, 0.7))

    assert few.count == 20
    assert few - many == Selection.none((100,))


def test_random_elements_are_spread_evenly():
    chosen = random(share=0.3)(spec_of_shape(100, 100)).to_bool()

    # Of 1,000 places in each tenth 300 are expected, with a standard deviation of about 14.
    assert all(230 < tenth.sum() < 370 for tenth in np.split(chosen, 10))


# Combinations.

LEAVES = st.sampled_from(
    [
        (everything(), np.ones([2, 3], np.bool_)),
        (nothing(), np.zeros([2, 3], np.bool_)),
        (rows([1]), np.array([[False] * 3, [True] * 3])),
        (columns([-1]), np.array([[False, False, True]] * 2)),
        (zeros(), TABLE == 0),
        (slices("[:, 1:]"), np.array([[False, True, True]] * 2)),
        (largest(count=1), TABLE == -4),
    ]
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        parts.map(lambda a: (~a[0], ~a[1])),
        st.tuples(parts, parts).map(lambda p: (p[0][0] | p[1][0], p[0][1] | p[1][1])),
        st.tuples(parts, parts).map(lambda p: (p[0][0] & p[1][0], p[0][1] & p[1][1])),
        st.tuples(parts, parts).map(lambda p: (p[0][0] - p[1][0], p[0][1] & ~p[1][1])),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_combined_selectors_are_combined_booleans(expression):
    selector, expected = expression

    assert np.array_equal(selector(spec_of(TABLE)).to_bool(), expected)


@given(EXPRESSIONS)
def test_a_selector_comes_back_from_its_configuration(expression):
    selector, expected = expression
    again = selector_from_config(json.loads(json.dumps(selector.config)))

    assert (again.text, again.config) == (selector.text, selector.config)
    assert np.array_equal(again(spec_of(TABLE)).to_bool(), expected)


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (everything(), "everything()"),
        (elements([[0, 1]]), "elements([[0, 1]])"),
        (rows(range(32, 128)), "rows(range(32, 128))"),
        (rows(np.arange(2)), "rows([0, 1])"),
        (rows(list(range(50))), "rows([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1 ...])"),
        (slices("[:, 5:8]"), "slices('[:, 5:8]')"),
        (boolean(np.ones([2, 3], np.bool_)), "boolean(array of shape (2, 3))"),
        (boolean("mask.npy"), "boolean('mask.npy')"),
        (largest(share=np.float32(0.5)), "largest(share=0.5)"),
        (smallest(count=np.int64(3)), "smallest(count=3)"),
        (random(share=0.1, seed=7), "random(share=0.1, seed=7)"),
        (zeros() | rows([0]) - columns([1]), "(zeros() | (rows([0]) - columns([1])))"),
        (~(zeros() & nonzeros()), "~(zeros() & nonzeros())"),
        (union([zeros(), rows([0]), rows([1])]), "(zeros() | rows([0]) | rows([1]))"),
        (model_state(), "model_state()"),
        (as_selector(Selection.all((2,))), "Selection(all, 2 of 2)"),
    ],
)
def test_a_selector_reads_as_it_is_written(selector, text):
    assert repr(selector) == selector.text == text


def test_every_selector_with_plain_arguments_has_a_json_configuration():
    for selector in (
        elements(np.array([[0, 1]], np.uint8)),
        rows(iter([0])),
        columns(range(0, 6, 2)),
        slices("[0]"),
        boolean("mask.npy"),
        largest(share=np.float32(0.25)),
        smallest(count=np.int64(2)),
        random(count=2, seed=np.int32(3)),
        model_state(),
        ~(zeros() | nonzeros()) - everything() & nothing(),
    ):
        config = json.loads(json.dumps(selector.config))
        assert config == selector.config
        assert selector_from_config(config).text == selector.text


def test_selectors_with_arrays_or_functions_have_no_configuration():
    array, function = boolean(np.array([True])), as_selector(lambda spec: np.array([True]))

    assert array.config is None
    assert function.config is None
    assert (array | zeros()).config is None
    assert (~function).config is None


def test_selections_arrays_and_functions_combine_with_selectors_on_either_side():
    mask = TABLE < 0
    chosen = Selection.from_bool(mask)

    def negative(spec: VariableSpec) -> np.ndarray:
        return spec.read() < 0

    for other in (mask, chosen, negative):
        assert flat(rows([0]) | other, spec_of(TABLE)) == [0, 1, 2, 5]
        assert flat(other | rows([0]), spec_of(TABLE)) == [0, 1, 2, 5]
        assert flat(other & rows([0]), spec_of(TABLE)) == [1]
        assert flat(other - rows([0]), spec_of(TABLE)) == [5]
        assert flat(rows([0]) - other, spec_of(TABLE)) == [0, 2]
    assert flat(union([mask]), spec_of(TABLE)) == [1, 5]
    assert flat(intersection([mask, chosen]), spec_of(TABLE)) == [1, 5]
    assert flat(difference(negative, chosen), spec_of(TABLE)) == []
    assert flat(complement(chosen), spec_of(TABLE)) == [0, 2, 3, 4]


def test_a_function_may_return_a_selection_an_array_or_a_tensor():
    for answer in (Selection.from_rows((2, 3), [0]), np.array([[True] * 3, [False] * 3])):
        assert flat(lambda spec, answer=answer: answer, spec_of(TABLE)) == [0, 1, 2]
    assert flat(lambda spec: tf.constant(spec.read()) > 0, spec_of(TABLE)) == [2, 3]


# Errors at once, where the selector is written.


@pytest.mark.parametrize("make", [elements, rows, columns])
def test_indices_that_are_no_integers_are_refused_at_once(make):
    for indices, message in [
        ([True, False], r"`indices` \(True, False\) must be integers, not True and False: boolean"),
        ([0.5], r"`indices` \(0.5\) must be a list of integers, its dtype is float64\."),
        (["[:, 1]"], r"`indices` \(\[:, 1\]\) must be a list of integers"),
        (7, r"`indices` \(7\) must be a list of integers; write \[7\] for one|write \[3\] for one"),
        ([[0], [1, 2]], r"`indices` \(\[\[0\], \[1, 2\]\]\) is no array: "),
    ]:
        with pytest.raises(ValueError, match=message):
            make(indices)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not one pair of brackets"),
        ("0:3", "invalid syntax"),
        ("[0][1]", "it is not one pair of brackets"),
        ("y[0]", "it is not one pair of brackets"),
        ("[len(x)]", r"'len\(x\)' is no integer"),
        ("[__import__('os').getcwd()]", "is no integer"),
        ("[1.5]", "'1.5' is no integer"),
        ("[True]", "'True' is no integer"),
        ("[None]", "'None' is no integer"),
        ("['a']", "is no integer"),
        ("[--1]", "'--1' is no integer"),
        ("[::0]", "a step of 0 leads nowhere"),
        ("[..., ...]", "it holds several of what it may hold once"),
        ("[[0], [1]]", "it holds several of what it may hold once"),
        ("[[[0]]]", r"'\[0\]' is no integer"),
        ("[*a]", r"'\*a' is no integer"),
        ("[0", "'\\[' was never closed"),
        ("[\0]", "null byte"),
        (5, "it is a int"),
        ([0, 1], "it is a list"),
    ],
)
def test_a_text_that_is_no_index_is_refused_at_once(text, reason):
    with pytest.raises(
        ValueError, match=r"(?s)^`text` \(.*\) must be a NumPy-style index of .*" + reason
    ):
        slices(text)


@pytest.mark.parametrize("make", [largest, smallest, random])
def test_a_budget_is_one_share_or_one_count(make):
    one_of = r"`share` \(.*\) and `count` \(.*\): give exactly one of the two"
    for arguments, message in [
        ({}, one_of),
        ({"share": 0.5, "count": 1}, one_of),
        ({"share": 1.5}, r"`share` \(1.5\) must be a number in \[0, 1\]: 0.2 is 20 %"),
        ({"share": -0.1}, r"`share` \(-0.1\) must be a number in"),
        ({"share": float("nan")}, r"`share` \(nan\) must be a number in"),
        ({"share": "0.5"}, r"`share` \('0.5'\) must be a number in"),
        ({"share": True}, r"`share` \(True\) must be a number in"),
        ({"count": -1}, r"`count` \(-1\) must be a number of elements, 0 or more"),
        ({"count": 1.5}, r"`count` \(1.5\) must be a whole number"),
        ({"count": float("inf")}, r"`count` \(inf\) must be a whole number"),
        ({"count": "3"}, r"`count` \('3'\) must be a whole number"),
        ({"count": True}, r"`count` \(True\) must be a whole number"),
    ]:
        with pytest.raises(ValueError, match="^" + message):
            make(**arguments)


def test_a_seed_is_a_whole_number():
    with pytest.raises(ValueError, match=r"^`seed` \(0.5\) must be a whole number\.$"):
        random(share=0.5, seed=0.5)


@pytest.mark.parametrize("not_boolean", [[0, 1], np.float32([0.5]), 3])
def test_an_array_that_is_not_boolean_is_refused_at_once(not_boolean):
    with pytest.raises(ValueError, match=r"^`trainable` \(dtype .*\) must be a boolean array"):
        boolean(not_boolean)


def test_a_selector_that_was_not_called_is_told_so():
    with pytest.raises(
        ValueError, match=r"^`rows` must be called: write rows\(\.\.\.\), in gin @rows\(\)\.$"
    ):
        as_selector(rows)
    with pytest.raises(ValueError, match=r"^`nothing` must be called"):
        rows([0]) | nothing


@pytest.mark.parametrize("value", ["rows", [True, False], None, 3, tf.constant([True])])
def test_what_is_no_selector_is_told_what_is(value):
    with pytest.raises(
        ValueError, match=r"(?s)^`selector` \(.*\) must be a selector such as .*boolean, columns, c"
    ):
        as_selector(value)


def test_a_combination_needs_a_list_of_selectors():
    for wrong in ([], rows([0]), None):
        with pytest.raises(
            ValueError, match=r"^`selectors` \(.*\) of union must be a list of at least one sel"
        ):
            union(wrong)


def test_model_state_is_not_combined():
    for combine in (lambda: model_state() | zeros(), lambda: ~model_state()):
        with pytest.raises(ValueError, match=r"model_state\(\).* stands alone in a rule"):
            combine()


def test_an_unknown_selector_in_a_configuration_is_told_the_nearest():
    with pytest.raises(ValueError, match=r"^`name` \('row'\) is no selector; nearest: rows, "):
        selector_from_config({"name": "row", "arguments": {}})


# Errors where the selector meets a variable that it does not fit.


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (
            rows([0, 7, -3]),
            r"rows\(\[0, 7, -3\]\) does not fit `w`: `indices` \(7, -3\) out of range: axis 0 of "
            r"shape \(2, 3\) allow -2 to 1\.",
        ),
        (
            columns([3]),
            r"columns\(\[3\]\) does not fit `w`: `indices` \(3\) out of range: axis 1 of shape "
            r"\(2, 3\) allow -3 to 2\.",
        ),
        (
            elements([[0, 3], [0, 0], [2, 0]]),
            r".* does not fit `w`: `indices` \(\(0, 3\), \(2, 0\)\) out of range: each must lie in "
            r"shape \(2, 3\)",
        ),
        (
            elements([[9, i] for i in range(7)]),
            r".*\(9, 4\) and 2 more\) out of range: each must lie in shape \(2, 3\)",
        ),
        (
            elements([0, 1]),
            r".*`indices` \(of shape \(2,\)\) must be a list of tuples with 2 integers each",
        ),
        (elements([[0, 0, 0]]), r".*`indices` \(of shape \(1, 3\)\) must be a list of tuples"),
        (elements([[]]), r".*`indices` \(of shape \(1, 0\)\) must be a list of tuples"),
        (
            rows([[0]]),
            r".*`indices` \(\[0\]\) must be a flat list of integers, its shape is \(1, 1",
        ),
        (slices("[2]"), r".*`text` \('\[2\]'\) does not fit shape \(2, 3\): index 2 is out of bou"),
        (slices("[0, 0, 0]"), r".*does not fit shape \(2, 3\): too many indices"),
        (slices(f"[{10**30}]"), r".*does not fit shape \(2, 3\): "),
        (slices("[:, 3:]"), r".*selects no element of shape \(2, 3\); write nothing\(\) to freeze"),
        (slices("[[]]"), r".*selects no element of shape \(2, 3\)"),
        (boolean([True]), r".*it selects in shape \(1,\), the variable's shape is \(2, 3\)\."),
        (largest(count=7), r".*`count` \(7\) exceeds the variable's 6 elements\."),
        (random(count=7), r".*`count` \(7\) exceeds the variable's 6 elements\."),
    ],
)
def test_a_selector_that_does_not_fit_names_the_variable(selector, message):
    with pytest.raises(ValueError, match="^" + message):
        selector(spec_of(TABLE))


def test_all_parts_that_do_not_fit_are_named_at_once():
    with pytest.raises(
        ValueError,
        match=r"^\(rows\(\[9\]\) \| zeros\(\) \| columns\(\[8\]\)\) does not fit `w`: "
        r"rows\(\[9\]\): `indices` \(9\) out of range: .* "
        r"columns\(\[8\]\): `indices` \(8\) out of range: ",
    ):
        union([rows([9]), zeros(), columns([8])])(spec_of(TABLE))


@pytest.mark.parametrize("make", [rows, columns])
def test_a_scalar_has_neither_rows_nor_columns(make):
    with pytest.raises(
        ValueError, match=r"does not fit `w`: `indices` \(0\) need a variable of one axis at least"
    ):
        make([0])(spec_of_shape())


def test_a_file_that_holds_no_boolean_array_is_named(tmp_path):
    def refused(name: str) -> str:
        with pytest.raises(ValueError, match="does not fit `w`: ") as error:
            boolean(str(tmp_path / name))(spec_of_shape(2))
        return str(error.value).split("does not fit `w`: ")[1]

    np.save(tmp_path / "integers.npy", [0, 1])
    np.save(tmp_path / "long.npy", [True] * 3)
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    np.savez(tmp_path / "several.npz", a=[True], b=[False])
    (tmp_path / "empty.npy").touch()

    assert "absent.npy) is no file: expected a .npy file." in refused("absent.npy")
    assert "is no file" in refused(".")
    assert refused("integers.npy").startswith("`trainable` (dtype int64) must be a boolean array")
    assert refused("long.npy") == "it selects in shape (3,), the variable's shape is (2,)."
    assert "objects.npy) is no readable .npy file: " in refused("objects.npy")
    assert "several.npz) is no readable .npy file: the magic string" in refused("several.npz")
    assert "empty.npy) is no readable .npy file: " in refused("empty.npy")


def test_a_function_that_answers_something_else_is_named():
    def answer(value):
        def my_choice(spec):
            return value

        return my_choice

    for value, message in [
        (None, r"`trainable` \(dtype object\) must be a boolean array"),
        (np.int32([[1, 0, 0]] * 2), r"`trainable` \(dtype int32\) must be a boolean array"),
        (zeros(), r"it returned zeros\(\), a selector that must be called in its turn\."),
    ]:
        with pytest.raises(ValueError, match=r"^my_choice does not fit `w`: " + message):
            as_selector(answer(value))(spec_of(TABLE))


# Size.


@pytest.fixture(scope="module")
def big_value() -> np.ndarray:
    value = np.random.default_rng(0).standard_normal([4096, 4096], np.float32)
    value[value < -1] = 0
    return value


@pytest.mark.parametrize(
    "selector",
    [
        slices("[:, 5:3000]"),
        columns(range(1000)),
        elements(np.stack(np.divmod(np.arange(0, 4096 * 4096, 16), 4096), axis=-1)),
        nonzeros(),
        largest(share=0.5),
        smallest(share=0.8),
        random(share=0.5),
        ~random(share=0.01),
        (zeros() | random(share=0.3)) - random(share=0.2, seed=1),
    ],
    ids=repr,
)
def test_sixteen_million_elements_take_less_than_two_seconds_and_a_gigabyte(selector, big_value):
    tracemalloc.start()
    started = time.process_time()

    selector(spec_of(big_value))

    seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 2
    assert peak < 2**30
