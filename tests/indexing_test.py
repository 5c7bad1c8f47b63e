import numpy as np
import pytest

from finetune.indexing import at_columns, at_elements, at_rows, at_slices, parse_index


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("[:, 5:8]", (slice(None), slice(5, 8))),
        ("[-1]", (-1,)),
        ("[..., ::2]", (Ellipsis, slice(None, None, 2))),
        ("[[1, 4], :]", ([1, 4], slice(None))),
    ],
)
def test_text_becomes_the_index_that_numpy_would_see(text, index):
    assert parse_index(text) == index


@pytest.mark.parametrize("text", ["", "5", "[", "[a]", "[1.5]", "[f(1)]", "[..., ...]", "[0][1]"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="must be a NumPy-style index"):
        parse_index(text)


def test_elements_rows_columns_and_slices_of_a_2x3_variable():
    shape = (2, 3)

    assert at_elements(np.array([[0, 0], [1, -1]]), shape).flat_indices().tolist() == [0, 5]
    assert at_rows(np.array([1]), shape).flat_indices().tolist() == [3, 4, 5]
    assert at_columns(np.array([0]), shape).flat_indices().tolist() == [0, 3]
    assert at_slices("[:, 1]", (slice(None), 1), shape).flat_indices().tolist() == [1, 4]


def test_a_slice_of_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"`text` \('\[5:\]'\) selects no element of shape \(2,\)"):
        at_slices("[5:]", (slice(5, None),), (2,))
