import math

import numpy as np
import pytest
import tensorflow as tf

from finetune.examples import korean_strings
from finetune.examples.korean_spacing import korean_spacing_task


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tfds")


@pytest.fixture(scope="module")
def task(data_dir):
    return korean_spacing_task(data_dir)


@pytest.fixture(scope="module")
def model(quickspacer_dir):
    return tf.saved_model.load(quickspacer_dir)


def strings_of(batches, count):
    """The rows of ids of the first `count` strings, padding dropped."""
    rows: list[tuple[int, ...]] = []
    for ids, *_ in batches.as_numpy_iterator():
        rows.extend(tuple(row[row != 0].tolist()) for row in ids)
        if len(rows) >= count:
            return rows[:count]
    return rows


def test_a_batch_is_padded_with_zeros_of_the_promised_types(task):
    ids, labels, weights = next(iter(task.train_dataset(8, 0)))

    assert (ids.dtype, labels.dtype, weights.dtype) == (tf.int32, tf.float32, tf.float32)
    assert ids.shape == labels.shape == weights.shape
    lengths = np.count_nonzero(ids, axis=1)
    assert lengths.max() == ids.shape[1]
    np.testing.assert_array_equal(np.count_nonzero(weights, axis=1), lengths - 1)
    assert not np.any(labels.numpy()[weights.numpy() == 0])


def test_no_held_out_string_is_trained_on(task):
    held_out = strings_of(task.eval_dataset(32), 10_000)
    trained_on = strings_of(task.train_dataset(32, 0), 1912 - len(held_out))

    assert len(held_out) == 387
    assert not set(held_out) & set(trained_on)


def test_an_epoch_is_every_training_string_once_and_the_next_is_another_order(task):
    count = 1912 - 387
    rows = strings_of(task.train_dataset(32, 0), 2 * count)

    assert sorted(rows[:count]) == sorted(rows[count:])
    assert len(set(rows[:count])) > count - 5  # Only spellings of one string are equal.
    assert rows[:count] != rows[count:]


def test_the_order_is_a_function_of_the_seed_alone(task, tmp_path):
    prepared_anew = korean_spacing_task(tmp_path)
    orders = []
    for global_seed in (1, 2):
        tf.random.set_seed(global_seed)
        orders.append(strings_of(task.train_dataset(32, 3), 64))

    assert orders[0] == orders[1] == strings_of(prepared_anew.train_dataset(32, 3), 64)
    assert orders[0] != strings_of(task.train_dataset(32, 4), 64)
    assert strings_of(task.eval_dataset(32), 64) == strings_of(prepared_anew.eval_dataset(32), 64)


def test_a_restored_iterator_goes_on_with_the_same_batches_across_epochs(task, tmp_path):
    iterator = iter(task.train_dataset(512, 0))
    next(iterator)
    next(iterator)
    prefix = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
    expected = [next(iterator) for _ in range(3)]  # 1,525 strings: the epoch ends in the first.

    restored = iter(task.train_dataset(512, 0))
    tf.train.Checkpoint(iterator=restored).read(prefix).assert_consumed()

    for batch in expected:
        for part, again in zip(batch, next(restored), strict=True):
            np.testing.assert_array_equal(part, again)


def test_a_position_takes_little_room_whatever_the_number_of_strings(task, tmp_path):
    iterator = iter(task.train_dataset(32, 0))
    next(iterator)

    tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))

    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000


def test_the_loss_of_a_position_is_its_binary_cross_entropy(task):
    labels = tf.constant([[1.0, 0.0], [1.0, 0.0]])
    probabilities = tf.constant([[0.5, 0.5], [0.25, 0.25]], tf.bfloat16)

    loss = task.loss(labels, probabilities)

    assert loss.dtype == tf.float32
    expected = [[math.log(2), math.log(2)], [math.log(4), math.log(4 / 3)]]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 32, 387])
def test_the_untuned_model_scores_the_same_whatever_the_batch_size(task, model, batch_size):
    f1, exact_match = task.metrics()
    for ids, labels, weights in task.eval_dataset(batch_size):
        outputs = task.forward(model, ids, training=False)
        f1.update_state(labels, outputs, sample_weight=weights)
        exact_match.update_state(labels, outputs, sample_weight=weights)

    assert (f1.name, exact_match.name) == ("f1", "exact_match")
    assert float(f1.result()) == pytest.approx(0.8098, abs=1e-4)
    assert float(exact_match.result()) == pytest.approx(148 / 387)


def test_a_batch_is_described_by_its_first_strings_with_their_spaces(task, data_dir):
    fold = korean_strings.prepared(data_dir).as_dataset("fold_3").take(5)
    texts = [example["text"].decode() for example in fold.as_numpy_iterator()]

    first, *rest = task.describe(next(iter(task.eval_dataset(8)))).splitlines()

    assert first.startswith("ids [8, ")
    assert rest == texts


def test_a_fold_that_does_not_exist_is_an_error(data_dir):
    with pytest.raises(ValueError, match=r"`held_out` \(5\) must be one of .*\[0, 1, 2, 3, 4\]"):
        korean_spacing_task(data_dir, held_out=5)
