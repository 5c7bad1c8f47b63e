import pytest
import tensorflow as tf

from finetune.examples import installed, korean_strings, quickspacer, spacing

SMALL_VOCABULARY = ["<PAD>", "<UNK>", " ", "a", "b", "가"]


@pytest.fixture(scope="module")
def model(quickspacer_dir):
    return tf.saved_model.load(quickspacer_dir)


def encoded(text, vocabulary=SMALL_VOCABULARY):
    parts = spacing.encode(tf.constant(text), spacing.id_table(vocabulary))
    return [part.numpy().tolist() for part in parts]


def all_strings():
    return korean_strings.read_strings(
        installed.package_file("jupyterlab_language_pack_ko_KR", "locale/ko_KR/LC_MESSAGES")
    )


def test_a_label_is_one_where_a_space_follows_and_the_last_character_has_no_weight():
    ids, labels, weights = encoded("ab a가")

    assert ids == [3, 4, 3, 5]
    assert labels == [0, 1, 0, 0]
    assert weights == [1, 1, 1, 0]


def test_a_run_of_spaces_counts_as_one_and_spaces_at_the_ends_as_none():
    assert encoded("  a   b ") == encoded("a b") == [[3, 4], [1, 0], [1, 0]]


def test_characters_below_amid_and_beyond_the_vocabulary_are_unknown():
    ids, _, _ = encoded("!\N{HANGUL SYLLABLE GA}c\N{GRINNING FACE}a")

    assert ids == [1, 5, 1, 1, 3]


@pytest.mark.parametrize("text", ["", " "])
def test_a_text_without_characters_has_no_position(text):
    assert encoded(text) == [[], [], []]


def test_an_entry_of_several_characters_is_met_in_no_text():
    ids, _, _ = encoded("<PAD>")

    assert ids == [1, 1, 1, 1, 1]


def test_every_real_string_comes_back_from_its_ids_and_labels():
    vocabulary = quickspacer.vocabulary()
    table = spacing.id_table(vocabulary)
    unknown = str.maketrans(dict.fromkeys("©↓↔", "\N{REPLACEMENT CHARACTER}"))
    texts = all_strings()
    dataset = tf.data.Dataset.from_tensor_slices(texts).map(lambda t: spacing.encode(t, table))

    for text, (ids, labels, _) in zip(texts, dataset.as_numpy_iterator(), strict=True):
        assert spacing.decode(ids, labels, vocabulary) == text.translate(unknown)


def test_encoded_texts_are_spaced_as_the_models_own_signature_spaces_them(model):
    vocabulary = quickspacer.vocabulary()
    table = spacing.id_table(vocabulary)
    bare = [text.replace(" ", "") for text in all_strings()[::100]]

    for text in bare:
        ids, _, _ = spacing.encode(tf.constant(text), table)
        ours = spacing.decode(ids.numpy(), model(ids[None], False)[0].numpy(), vocabulary)
        served = model.signatures["serving_default"](tf.constant([text]))["spaced_sentences"]
        assert ours.rstrip() == served.numpy()[0].decode()
