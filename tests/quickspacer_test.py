import string

import pytest
import tensorflow as tf

from finetune.examples import quickspacer


@pytest.fixture(scope="module")
def model(quickspacer_dir):
    return tf.saved_model.load(quickspacer_dir)


def test_a_row_of_the_embedding_is_a_line_of_the_vocabulary(model):
    entries = quickspacer.vocabulary()

    assert len(entries) == len(set(entries)) == model.embedding.embeddings.shape[0]
    assert entries[quickspacer.PADDING] == "<PAD>"
    assert entries[quickspacer.UNKNOWN] == "<UNK>"


def test_the_ascii_rows_are_those_of_every_printable_character_and_of_one_control():
    rows = quickspacer.ascii_rows()
    printable = set(string.ascii_letters + string.digits + string.punctuation + " ")

    assert {quickspacer.vocabulary()[row] for row in rows} == printable | {"\x02"}
    assert len(rows) == 96
    assert rows == sorted(rows)
