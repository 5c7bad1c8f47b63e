import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from finetune.bundle import digest, fingerprint
from finetune.certificate import Certificate, certify, differing
from finetune.loading import from_module
from finetune.selection import Selection

BFLOAT16 = tf.bfloat16.as_numpy_dtype


def module_of(**values) -> tf.Module:
    """A module with one variable for each value; `state` is not trainable."""
    module = tf.Module()
    for name, value in values.items():
        setattr(module, name, tf.Variable(value, trainable=not name.startswith("state")))
    return module


def certificate_of(before: dict, after: dict, selections: dict, **kwargs) -> Certificate:
    base = from_module(module_of(**before))
    now = {**before, **after}
    return certify(base, selections, lambda path: np.asarray(now[path]), **kwargs)


def elements(*flat: int, of: tuple[int, ...] = (2, 2)) -> Selection:
    return Selection.from_flat(of, flat)


def test_the_corners_of_a_2x2_variable_changed_and_the_others_are_proved_to_be_kept():
    x = np.float32([[1, 2], [3, 4]])
    tuned = np.float32([[1.5, 2], [3, 2]])
    certificate = certificate_of(
        {"x": x}, {"x": tuned}, {"x": elements(0, 3)}, decided_by={"x": "1. ('x', corners)"}
    )
    (record,) = certificate.variables
    assert certificate.ok
    assert (record.path, record.shape, record.dtype) == ("x", (2, 2), "float32")
    assert (record.total, record.trainable, record.changed, record.moved) == (4, 2, 2, 0)
    assert record.largest_change == 2.0
    assert record.decided_by == "1. ('x', corners)"
    assert record.frozen_before == record.frozen_after == digest(np.float32([2, 3]))
    assert certificate.base_fingerprint == fingerprint({"x": digest(x)})
    assert certificate.tuned_fingerprint == fingerprint({"x": digest(tuned)})


def test_a_frozen_element_that_moved_by_its_sign_bit_alone_is_found():
    before, after = np.float32([[0, 0], [0, 0]]), np.float32([[0, 0], [-0.0, 0]])
    certificate = certificate_of({"x": before}, {"x": after}, {"x": elements(0, 3)})
    (record,) = certificate.offenders()
    assert not certificate.ok
    assert (record.changed, record.moved) == (0, 1)
    assert record.first_moved == "[1, 0] was 0.0, is -0.0"
    assert record.frozen_before != record.frozen_after


def test_values_that_print_alike_are_told_apart_by_their_bits():
    before = np.array([0x7FC00000], np.uint32).view(np.float32)
    after = np.array([0x7FC00001], np.uint32).view(np.float32)
    certificate = certificate_of({"x": before}, {"x": after}, {})
    assert certificate.variables[0].first_moved == "[0] was nan (0x7fc00000), is nan (0x7fc00001)"
    assert certificate_of({"x": before}, {"x": before}, {}).ok


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.array([True, False]), np.array([True, True])),
        (np.array([1.0, 0.0], BFLOAT16), np.array([1.0, -0.0], BFLOAT16)),
        (np.array([1, 2], np.int64), np.array([1, 2**53], np.int64)),
        (np.array([1, 2**63], np.uint64), np.array([1, 2**63 + 1], np.uint64)),
        (np.array([1, 0], np.complex128), np.array([1, complex(0, -0.0)], np.complex128)),
        (np.array([b"a", b"b"], object), np.array([b"a", b"c"], object)),
        (np.float16([1, 2]), np.float16([1, np.nan])),
    ],
    ids=lambda array: str(array.dtype),
)
def test_every_dtype_is_compared_by_its_bits(before, after):
    assert differing(before, after).tolist() == [False, True]
    assert certificate_of({"state": before}, {"state": after}, {}).moved == 1
    moving = certificate_of({"state": before}, {"state": after}, {}, moving_state={"state"})
    assert (moving.ok, moving.changed) == (True, 1)


def test_float8_is_compared_by_its_bits():
    float8 = tf.as_dtype("float8_e5m2").as_numpy_dtype
    assert differing(np.array([0.0, 1], float8), np.array([-0.0, 1], float8)).tolist() == [
        True,
        False,
    ]


def test_a_scalar_and_an_empty_variable_have_records_too():
    before = {"scalar": np.float32(1), "empty": np.zeros([0, 3], np.float32), "state": b"old"}
    chosen = {"scalar": Selection.all(()), "empty": Selection.all((0, 3))}
    certificate = certificate_of(before, {"scalar": np.float32(2), "state": b"new"}, chosen)
    assert (certificate.total, certificate.trainable, certificate.changed) == (2, 1, 1)
    assert [record.first_moved for record in certificate.offenders()] == [
        "[] was b'old', is b'new'"
    ]


def test_a_variable_without_a_selection_is_frozen():
    values = {"x": np.float32([1, 2]), "y": np.float32([1])}
    certificate = certificate_of(values, {"y": np.float32([2])}, {"x": Selection.all((2,))})
    assert [(r.path, r.trainable, r.moved) for r in certificate.variables] == [
        ("x", 2, 0),
        ("y", 0, 1),
    ]


def test_state_is_frozen_unless_it_may_move():
    values = {"x": np.float32([1]), "state": np.float32([1, 2])}
    moved = {"state": np.float32([1, 3])}
    # Even a rule that matched it does not make state trainable.
    certificate = certificate_of(values, moved, {"state": Selection.all((2,))})
    (offender,) = certificate.offenders()
    assert (offender.path, offender.state, offender.moved) == ("state", True, 1)
    allowed = certificate_of(values, moved, {}, moving_state={"state"})
    assert allowed.ok
    assert (allowed.trainable, allowed.changed) == (2, 1)
    assert "of these, state that may move: 2 elements in state" in allowed.summary()


def test_nan_and_infinite_weights_are_counted_and_do_not_hide_the_largest_change():
    before = np.float32([1, 2, 3, np.nan])
    after = np.float32([1.25, np.nan, np.inf, 5])
    certificate = certificate_of({"x": before}, {"x": after}, {"x": Selection.all((4,))})
    (record,) = certificate.variables
    assert (record.changed, record.not_finite, record.largest_change) == (4, 2, 0.25)
    assert "NaN or infinite now: 2 elements in x" in certificate.summary()
    assert Certificate.from_json(certificate.to_json()) == certificate


def test_a_change_too_large_for_a_float_is_still_a_number_in_json():
    huge = np.finfo(np.float64).max
    values = {"x": np.float64([-huge])}, {"x": np.float64([huge])}
    certificate = certificate_of(*values, {"x": Selection.all((1,))})
    assert certificate.variables[0].largest_change == huge
    assert "Infinity" not in certificate.to_json()


def test_a_value_edited_on_purpose_counts_as_the_base():
    base = from_module(module_of(x=np.float32([0.1, 2]))).edited({"x": np.float32([0, 2])})
    tuned = np.float32([0, 3])
    certificate = certify(base, {"x": elements(1, of=(2,))}, lambda path: tuned)
    assert certificate.ok
    assert certificate.variables[0].edited
    assert certificate.base_fingerprint == fingerprint({"x": digest(np.float32([0, 2]))})
    assert "base values were replaced on purpose before training in x" in certificate.summary()
    revived = certify(base, {"x": elements(1, of=(2,))}, lambda path: np.float32([0.1, 3]))
    assert revived.variables[0].first_moved == "[0] was 0.0, is 0.1"


def test_the_summary_is_a_few_lines_for_a_terminal():
    before = np.zeros([1000, 4], np.float32)
    after = before.copy()
    after[7] = [1, 0, 0, 0.5]
    selections = {"table": Selection.from_rows((1000, 4), [7])}
    certificate = certificate_of({"table": before, "bias": before[0]}, {"table": after}, selections)
    assert certificate.summary().splitlines() == [
        "variables: 2, trainable in whole or part: 1",
        "trainable elements: 4 of 4,004 (0.0999 %), changed: 2",
        "largest change: 1, in table",
        "frozen elements moved: 0 of 4,000 — proved by digest",
        f"base {certificate.base_fingerprint[:16]}, tuned {certificate.tuned_fingerprint[:16]} "
        "(fingerprints)",
    ]


def test_the_summary_names_the_worst_offenders_first():
    before = {f"v{i}": np.zeros([9], np.float32) for i in range(7)}
    after = {f"v{i}": np.float32([1] * i + [0] * (9 - i)) for i in range(7)}
    lines = certificate_of(before, after, {}).summary().splitlines()
    assert lines[2:9] == [
        "frozen elements moved: 21 of 63 — NOT the base's bits any more:",
        "  v6: 6 of 9, the first at [0] was 0.0, is 1.0",
        "  v5: 5 of 9, the first at [0] was 0.0, is 1.0",
        "  v4: 4 of 9, the first at [0] was 0.0, is 1.0",
        "  v3: 3 of 9, the first at [0] was 0.0, is 1.0",
        "  v2: 2 of 9, the first at [0] was 0.0, is 1.0",
        "  and 1 more variables",
    ]


def test_json_carries_everything_and_the_totals_for_other_readers():
    certificate = certificate_of(
        {"x": np.float32([1, 2]), "state": "가".encode()},
        {"x": np.float32([1, 3])},
        {"x": elements(1, of=(2,))},
    )
    document = json.loads(certificate.to_json())
    assert (document["ok"], document["total"], document["changed"]) == (True, 3, 1)
    assert document["variables"][0]["shape"] == [2]
    assert Certificate.from_json(certificate.to_json()) == certificate


def test_a_certificate_that_was_made_to_say_ok_is_not_believed():
    moved = certificate_of({"x": np.float32([1])}, {"x": np.float32([2])}, {})
    forged = moved.to_json().replace('"ok": false', '"ok": true')
    assert not Certificate.from_json(forged).ok
    hidden = dataclasses.replace(moved.variables[0], moved=0)
    assert not dataclasses.replace(moved, variables=(hidden,)).ok


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "`text` is no JSON"),
        ("[]", r"`text` has the format \(None\), expected finetune-certificate-1"),
        ('{"format": "finetune-certificate-1"}', "`text` is no whole certificate: KeyError"),
    ],
)
def test_text_that_is_no_certificate_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Certificate.from_json(text)


def test_everything_that_does_not_fit_the_base_is_listed_at_once():
    values = {"embedding": np.float32([1, 2]), "state": np.float32([1])}
    with pytest.raises(ValueError, match="does not fit the base") as caught:
        certificate_of(
            values,
            {},
            {"embeding": Selection.all((2,)), "embedding": Selection.all((3,))},
            moving_state={"embedding", "stat"},
            decided_by={"x": "1. everything()"},
        )
    assert str(caught.value).splitlines()[1:] == [
        "  `selections` (embeding): no such variable, nearest: embedding, state",
        "  `moving_state` (stat): no such variable, nearest: state, embedding",
        "  `decided_by` (x): no such variable, nearest: embedding, state",
        "  `selections` (embedding): shape (3,), must be the variable's, (2,)",
        "  `moving_state` (embedding): is a weight, select it in `selections` instead",
    ]


def test_values_of_another_dtype_or_shape_cannot_be_certified():
    values = {"x": np.float32([1, 2]), "y": np.float32([1])}
    with pytest.raises(ValueError, match="`current` gives values unlike the base's") as caught:
        certificate_of(values, {"x": np.float64([1, 2]), "y": np.float32([[1]])}, {})
    assert str(caught.value).splitlines()[1:] == [
        "  x: float64 (2,), must be float32 (2,)",
        "  y: float32 (1, 1), must be float32 (1,)",
    ]


def test_where_all_is_trainable_nothing_is_said_to_be_proved():
    base = from_module(module_of(x=np.float32([1, 2])))
    certificate = certify(base, {"x": Selection.all((2,))}, lambda path: np.float32([1, 3]))

    assert "no element was frozen: there is nothing to prove" in certificate.summary()
    assert "proved" not in certificate.summary()
