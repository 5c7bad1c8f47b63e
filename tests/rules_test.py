import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.rules import Coverage, resolve
from finetune.selection import Selection
from finetune.selectors import (
    VariableSpec,
    columns,
    elements,
    everything,
    largest,
    model_state,
    nothing,
    rows,
    slices,
    zeros,
)


def specs_of(*names: str | tuple[str, ...], state: tuple[str, ...] = ()) -> dict[str, VariableSpec]:
    """Variables of shape [4, 2]; a tuple holds a path and its aliases."""
    all_names = [(name,) if isinstance(name, str) else name for name in (*names, *state)]
    return {
        known[0]: VariableSpec(
            known[0], (4, 2), "float32", lambda: np.zeros([4, 2]), known, known[0] not in state
        )
        for known in all_names
    }


SMALL = specs_of("embedding", "dense/kernel", "dense/bias", state=("bn/mean",))


def refused(rules, specs=SMALL) -> list[str]:
    """The lines of the error, the heading left out."""
    with pytest.raises(ValueError, match=r"^`rules` ") as error:
        resolve(rules, specs)
    heading, *lines = str(error.value).split("\n  - ")
    assert heading in ("`rules` do not fit the model:", "`rules` are malformed:")
    return lines


# What is decided.


def test_the_first_rule_that_matches_wins():
    coverage = resolve(
        [
            ("dense/bias", rows([0])),
            ("dense/.*", rows([1])),
            (".*", nothing()),
        ],
        SMALL,
    )

    assert coverage.selections == {
        "embedding": Selection.none((4, 2)),
        "dense/kernel": Selection.from_rows((4, 2), [1]),
        "dense/bias": Selection.from_rows((4, 2), [0]),
        "bn/mean": Selection.none((4, 2)),
    }
    assert coverage.decided_by == {
        "embedding": "3. ('.*', nothing())",
        "dense/kernel": "2. ('dense/.*', rows([1]))",
        "dense/bias": "1. ('dense/bias', rows([0]))",
        "bn/mean": "state stays frozen",
    }
    assert (coverage.trainable, coverage.total) == (4, 32)


def test_a_pattern_must_match_the_whole_path():
    assert refused([("dense", everything()), (".*", nothing())]) == [
        "rule 1: pattern `dense` matches no variable (patterns must match the whole path); nearest "
        "of 4 variables: `dense/bias`, `dense/kernel`, `bn/mean`, `embedding`."
    ]


def test_any_unique_name_of_a_variable_will_do():
    specs = specs_of(("encoder/table", "shared/table", "w"), "bias")

    for name in ("encoder/table", "shared/table", "w"):
        coverage = resolve([(name, everything()), ("bias", nothing())], specs)
        assert coverage.selections["encoder/table"].kind == "all"


def test_selectors_may_be_selections_arrays_and_functions():
    chosen = np.zeros([4, 2], np.bool_)
    chosen[2] = True
    expected = Selection.from_rows((4, 2), [2])

    for selector in (expected, chosen, lambda spec: chosen):
        coverage = resolve([("embedding", selector), (".*", nothing())], SMALL)
        assert coverage.selections["embedding"] == expected


def test_a_selector_is_evaluated_once_for_each_variable_that_its_rule_decides():
    asked = []

    def ask(spec: VariableSpec) -> Selection:
        asked.append(spec.path)
        return Selection.all(spec.shape)

    resolve([("embedding", everything()), (".*", ask)], SMALL)

    assert asked == ["dense/kernel", "dense/bias"]


def test_a_predicate_sees_the_base_and_its_answer_does_not_follow_the_weights():
    value = np.float32([0, 1, 0])
    coverage = resolve([("w", zeros())], {"w": VariableSpec("w", (3,), "float32", lambda: value)})
    value[:] = 1

    assert coverage.selections["w"].flat_indices().tolist() == [0, 2]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=4))
def test_every_variable_gets_what_a_plain_loop_over_the_rules_gives_it(written):
    specs = specs_of("a", "b", "c")
    expected = {path: next((row for name, row in written if name == path), None) for path in specs}

    coverage = resolve([(name, rows([row])) for name, row in written] + [(".*", nothing())], specs)

    assert coverage.selections == {
        path: Selection.none((4, 2)) if row is None else Selection.from_rows((4, 2), [row])
        for path, row in expected.items()
    }


# Non-trainable state.


def test_state_stays_frozen_unless_a_rule_says_model_state():
    frozen = resolve([(".*", everything())], SMALL)
    assert frozen.selections["bn/mean"].kind == "none"
    assert frozen.moving_state == frozenset()
    assert frozen.state == {"bn/mean"}

    moving = resolve([("bn/mean", model_state()), (".*", everything())], SMALL)
    assert moving.moving_state == {"bn/mean"}
    assert moving.decided_by["bn/mean"] == "1. ('bn/mean', model_state())"
    # The model moves it, the optimizer does not.
    assert moving.trainable == frozen.trainable == 24


def test_state_needs_no_rule():
    coverage = resolve([("embedding", everything()), ("dense/.*", nothing())], SMALL)

    assert coverage.decided_by["bn/mean"] == "state stays frozen"


def test_model_state_is_not_for_weights():
    assert refused([("(bn|dense)/.*", model_state()), (".*", everything())]) == [
        "rule 1 ('(bn|dense)/.*', model_state()) matches `dense/kernel`, a weight: model_state() "
        "is for non-trainable state only; use everything() or nothing().",
        "rule 1 ('(bn|dense)/.*', model_state()) matches `dense/bias`, a weight: model_state() is "
        "for non-trainable state only; use everything() or nothing().",
    ]


def test_a_rule_that_would_train_nothing_but_state_is_refused():
    assert refused([("bn/.*", everything()), (".*", everything())]) == [
        "rule 1 ('bn/.*', everything()) matches only non-trainable state (`bn/mean`), which no "
        "optimizer trains; model_state() lets the model move it."
    ]
    resolve([("bn/.*", nothing()), (".*", everything())], SMALL)


def test_a_model_all_of_whose_rules_move_state_trains_nothing():
    assert refused([("bn/.*", model_state()), (".*", nothing())]) == [
        "nothing is trainable: the rules [('bn/.*', model_state()), ('.*', nothing())] select none "
        "of the elements of 3 weights."
    ]


# One variable under several names.

TIED = specs_of(("encoder/table", "decoder/table"), "bias")


def test_two_rules_that_claim_a_tied_variable_under_two_names_conflict():
    assert refused(
        [("encoder/.*", everything()), ("decoder/.*", nothing()), ("bias", everything())], TIED
    ) == [
        "`encoder/table` is one variable with several names: rule 1 ('encoder/.*', everything()) "
        "matches it as `encoder/table` and rule 2 ('decoder/.*', nothing()) as `decoder/table`; "
        "keep one of the two rules."
    ]


def test_the_order_of_conflicting_rules_does_not_matter():
    (line,) = refused(
        [("decoder/.*", nothing()), ("encoder/.*", rows([0])), (".*", nothing())], TIED
    )

    assert "rule 1 ('decoder/.*', nothing()) matches it as `decoder/table` and rule 2" in line


def test_rules_that_agree_about_a_tied_variable_do_not_conflict():
    coverage = resolve(
        [("encoder/.*", rows([1])), ("decoder/.*", rows([1])), ("bias", nothing())], TIED
    )

    assert coverage.selections["encoder/table"].rows.tolist() == [1]


def test_a_catch_all_does_not_conflict_with_a_rule_for_one_of_the_names():
    for name in ("encoder/table", "decoder/table"):
        coverage = resolve([(name, everything()), (".*", nothing())], TIED)
        assert coverage.selections["encoder/table"].kind == "all"


def test_long_lists_that_differ_where_the_text_is_cut_conflict():
    first, second = list(range(3)) * 9 + [0], list(range(3)) * 9 + [3]
    assert rows(first).text == rows(second).text

    (line,) = refused(
        [("encoder/.*", rows(first)), ("decoder/.*", rows(second)), (".*", nothing())], TIED
    )
    assert line.startswith("`encoder/table` is one variable with several names: ")


def test_two_functions_of_one_name_conflict():
    rules = [("encoder/.*", lambda spec: None), ("decoder/.*", lambda spec: None)]

    (line,) = refused([*rules, (".*", nothing())], TIED)
    assert line.startswith("`encoder/table` is one variable with several names: ")


# What is wrong.


def test_a_pattern_that_matches_nothing_is_told_the_nearest_names():
    specs = specs_of("conv/bias", ("embedding/embeddings", "table:shared"))

    (line,) = refused([("embeding/embeddings", everything()), (".*", nothing())], specs)
    assert "nearest of 2 variables: `embedding/embeddings`, " in line
    (line,) = refused([("table:share", everything()), (".*", nothing())], specs)
    assert "nearest of 2 variables: `table:shared`, " in line


def test_a_weight_that_no_rule_covers_is_named():
    assert refused([("dense/.*", everything())]) == [
        "no rule covers `embedding`; end with ('.*', nothing()) to freeze the rest."
    ]


def test_many_uncovered_weights_are_counted():
    specs = specs_of("a", *(f"layer/{i}" for i in range(25)))

    (line,) = refused([("a", everything())], specs)
    assert "`layer/19` and 5 more; end with" in line


def test_nothing_trainable_is_an_error_that_names_the_rules():
    assert refused([("embedding", rows([])), (".*", nothing())]) == [
        "nothing is trainable: the rules [('embedding', rows([])), ('.*', nothing())] select none "
        "of the elements of 3 weights."
    ]


def test_a_rule_that_an_earlier_one_always_overtakes_is_an_error():
    assert refused([(".*", everything()), ("embedding", nothing())]) == [
        "rule 2 ('embedding', nothing()) never decides: rule 1 ('.*', everything()) comes first "
        "and matches all that it does and more; put rule 2 before it."
    ]
    assert refused([(".*", everything()), ("bn/mean", model_state())]) == [
        "rule 2 ('bn/mean', model_state()) never decides: rule 1 ('.*', everything()) comes first "
        "and matches all that it does and more; put rule 2 before it."
    ]


def test_a_general_rule_may_find_nothing_left_to_decide():
    everywhere = [
        ("dense/bias", everything()),
        ("dense/kernel", everything()),
        (".*/(bias|kernel)", nothing()),
        ("embedding", nothing()),
        (".*", nothing()),
    ]

    assert resolve(everywhere, SMALL).trainable == 16
    assert resolve([(".*", everything()), ("embedding", everything())], SMALL).trainable == 24


def test_all_misfits_are_told_at_once():
    lines = refused(
        [
            ("embed", everything()),
            ("embedding", rows([9, -7])),
            ("dense/kernel", elements([[0, 2]]) | columns([5])),
            ("bn/.*", everything()),
        ]
    )

    assert [line[:60] for line in lines] == [
        "rule 1: pattern `embed` matches no variable (patterns must m",
        "rule 4 ('bn/.*', everything()) matches only non-trainable st",
        "rule 2: rows([9, -7]) does not fit `embedding`: `indices` (9",
        "rule 3: (elements([[0, 2]]) | columns([5])) does not fit `de",
        "no rule covers `dense/bias`; end with ('.*', nothing()) to f",
    ]


def test_a_selector_that_does_not_fit_every_variable_of_its_rule_names_each():
    lines = refused([("dense/.*", slices("[7]")), (".*", nothing())])

    assert [line[:60] for line in lines] == [
        "rule 1: slices('[7]') does not fit `dense/kernel`: `text` ('",
        "rule 1: slices('[7]') does not fit `dense/bias`: `text` ('[7",
    ]


def test_a_model_without_variables_fits_no_rule():
    assert refused([(".*", everything())], {}) == [
        "rule 1: pattern `.*` matches no variable (patterns must match the whole path); nearest of "
        "0 variables: none."
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("a[", nothing()), "rule 2: `a[` is no regular expression: unterminated character set"),
        (("a",), "rule 2 (('a',)) is no (pattern, selector) pair: not enough values to unpack"),
        ("abc", "rule 2 ('abc') is no (pattern, selector) pair: too many values to unpack"),
        (7, "rule 2 (7) is no (pattern, selector) pair: cannot unpack non-iterable int"),
        ((b"a", nothing()), "is no (pattern, selector) pair: the pattern is a bytes, not text."),
        ((nothing(), "a"), "is no (pattern, selector) pair: the pattern is a Selector, not text."),
        (("a", "rows"), "is no (pattern, selector) pair: `selector` ('rows') must be a selector"),
        (("a", nothing), "pair: `nothing` must be called: write nothing(...), in gin @nothing()."),
    ],
)
def test_a_malformed_rule_is_shown(rule, message):
    (line,) = refused([("embedding", everything()), rule])

    assert message in line


def test_all_malformed_rules_are_told_at_once():
    assert len(refused([("a[", nothing()), ("a", None), ("b", rows)])) == 3


@pytest.mark.parametrize("rules", [[], (), None, ".*", {".*": nothing()}, nothing(), 3])
def test_rules_are_a_list_of_pairs(rules):
    with pytest.raises(
        ValueError, match=r"^`rules` \(.*\) must be a list of \(pattern, selector\) pairs, for inst"
    ):
        resolve(rules, SMALL)


# The table.


def test_the_table_shows_shape_trainable_frozen_and_total_counts_and_the_rule():
    specs = {
        "embedding": VariableSpec("embedding", (1000, 2), "float32", lambda: np.zeros([1000, 2])),
        "scale": VariableSpec("scale", (), "float32", lambda: np.ones([])),
        "bn/mean": VariableSpec("bn/mean", (2,), "float32", lambda: np.ones([2]), trainable=False),
    }
    coverage = resolve(
        [("embedding", rows(range(600))), ("bn/.*", model_state()), (".*", nothing())], specs
    )

    assert coverage.table() == "\n".join(
        [
            "variable   shape   trainable  frozen  total    share  decided by",
            "embedding  1000x2      1,200     800  2,000     60 %  "
            "1. ('embedding', rows(range(0, 600)))",
            "scale      scalar          0       1      1      0 %  3. ('.*', nothing())",
            "bn/mean    2               0       2      2      0 %  2. ('bn/.*', model_state())",
            "all                    1,200     803  2,003  59.91 %",
        ]
    )


def test_the_table_of_nothing_has_a_heading_and_a_sum():
    table = Coverage({}, {}).table()

    assert [line.split()[0] for line in table.splitlines()] == ["variable", "all"]


def test_a_share_is_taken_of_each_variable_by_itself():
    values = {"a": np.float32([1, 2, 3, 4]), "b": np.float32([10, 20, 30, 40])}
    specs = {
        path: VariableSpec(path, (4,), "float32", lambda value=value: value)
        for path, value in values.items()
    }

    coverage = resolve([(".*", largest(share=0.5))], specs)

    assert [s.flat_indices().tolist() for s in coverage.selections.values()] == [[2, 3], [2, 3]]
