import numpy as np
import pytest

from finetune.budget import at_random, budget_of, by_magnitude, lowest, whole


@pytest.mark.parametrize(("share", "size", "elements"), [(0.5, 5, 3), (0.1, 4, 0), (1, 7, 7)])
def test_a_share_is_rounded_to_the_nearest_number_of_elements(share, size, elements):
    assert budget_of(share, None).of(size) == elements


def test_a_count_above_the_size_is_refused():
    with pytest.raises(ValueError, match=r"`count` \(9\) exceeds the variable's 8 elements"):
        budget_of(None, 9).of(8)


def test_ties_go_to_the_lower_flat_index():
    selection = lowest((2, 3), np.array([1, 0, 1, 1, 0, 1]), 3)

    assert selection.flat_indices().tolist() == [0, 1, 4]


def test_magnitude_does_not_see_the_sign():
    selection = by_magnitude(np.array([1.0, -3.0, 2.0]), budget_of(None, 1), largest=True)

    assert selection.flat_indices().tolist() == [1]


def test_nan_has_no_magnitude():
    with pytest.raises(ValueError, match="1 elements of the base are NaN"):
        by_magnitude(np.array([np.nan, 1.0]), budget_of(None, 1), largest=False)


def test_the_random_choice_is_this_one_on_every_machine():
    # Written down once: another platform or NumPy release must give the same elements.
    selection = at_random("dense/kernel", (4, 5), budget_of(None, 4), seed=0)

    assert selection.flat_indices().tolist() == [0, 2, 8, 10]


def test_another_path_is_another_choice():
    choices = {
        tuple(at_random(path, (1000,), budget_of(None, 5), seed=0).flat_indices())
        for path in ("a", "b", "c")
    }

    assert len(choices) == 3


def test_a_float_that_is_whole_counts_as_an_integer():
    assert whole("seed", 20.0) == 20
    with pytest.raises(ValueError, match=r"`seed` \(0.5\) must be a whole number"):
        whole("seed", 0.5)
