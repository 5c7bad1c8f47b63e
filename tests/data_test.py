import itertools

import numpy as np
import pytest
import tensorflow as tf

from finetune.data import Passes, check_dataset

Dataset = tf.data.Dataset
TWELVE = Dataset.range(12).map(lambda x: (x, -x))


def taken(passes, count):
    """The next batches, whatever pass they are of, as lists."""
    batches = []
    while len(batches) < count:
        try:
            x, _ = next(passes.iterator)
        except StopIteration:
            passes.next_pass()
            continue
        batches.append(x.numpy().tolist())
    return batches


def saved_after(make, count, prefix):
    """Saves a position after so many batches, and restores it into new passes."""
    passes = Passes(make, seed=7)
    taken(passes, count)
    tf.train.Checkpoint(data=passes.position).write(prefix)
    again = Passes(make, seed=7)
    reader = tf.train.load_checkpoint(prefix)
    again.go_to(int(reader.get_tensor("data/number/.ATTRIBUTES/VARIABLE_VALUE")))
    tf.train.Checkpoint(data=again.position).read(prefix).assert_consumed()
    return again


PIPELINES = {
    "partial batches": lambda seed: TWELVE.shuffle(8, seed=seed).batch(5),
    "even batches": lambda seed: TWELVE.shuffle(8, seed=seed).batch(4),
    "prefetched": lambda seed: TWELVE.shuffle(8, seed=seed).batch(5).prefetch(2),
    "mapped in parallel": lambda seed: (
        TWELVE.shuffle(8, seed=seed).batch(5).map(lambda x, y: (x, y), num_parallel_calls=2)
    ),
    "padded": lambda seed: TWELVE.shuffle(8, seed=seed).padded_batch(5, padded_shapes=([], [])),
    "filtered": lambda seed: TWELVE.shuffle(8, seed=seed).filter(lambda x, y: x % 3 > 0).batch(3),
    "interleaved": lambda seed: (
        Dataset.range(3)
        .interleave(lambda i: TWELVE.skip(4 * i).take(4), cycle_length=2, num_parallel_calls=2)
        .shuffle(5, seed=seed)
        .batch(5)
    ),
    "cached": lambda seed: TWELVE.cache().shuffle(8, seed=seed).batch(5),
    "two sources": lambda seed: Dataset.sample_from_datasets(
        [TWELVE.shuffle(8, seed=seed), TWELVE.shuffle(8, seed=seed + 1)], seed=seed
    ).batch(5),
    "endless": lambda seed: TWELVE.shuffle(8, seed=seed).repeat().batch(5).prefetch(2),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_saved_position_goes_on_exactly_wherever_it_was_saved(tmp_path, name):
    whole = taken(Passes(PIPELINES[name], seed=7), 16)
    for count in range(8):
        again = saved_after(PIPELINES[name], count, str(tmp_path / str(count)))
        assert taken(again, 8) == whole[count : count + 8], count


def test_passes_differ_and_hold_the_same_examples():
    batches = taken(Passes(PIPELINES["even batches"], seed=7), 9)
    passes = [[*itertools.chain(*batches[i : i + 3])] for i in (0, 3, 6)]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    for one in passes:
        assert sorted(one) == list(range(12))


def test_the_same_seed_gives_the_same_passes_and_another_others():
    make = PIPELINES["partial batches"]
    assert taken(Passes(make, 7), 20) == taken(Passes(make, 7), 20) != taken(Passes(make, 8), 20)


def test_the_first_pass_has_the_seed_itself_and_later_ones_other_whole_numbers():
    seeds = []

    def make(seed):
        seeds.append(seed)
        return TWELVE.batch(12)

    taken(Passes(make, seed=7), 4)
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in seeds)


def test_an_endless_dataset_is_one_pass():
    calls = []

    def make(seed):
        calls.append(seed)
        return TWELVE.repeat().batch(5)

    taken(Passes(make, seed=7), 50)
    assert calls == [7]


def test_elements_come_in_order_although_the_dataset_allows_another():
    options = tf.data.Options()
    options.deterministic = False
    data = TWELVE.map(lambda x, y: (x, y), num_parallel_calls=4).batch(4).with_options(options)
    assert taken(Passes(lambda seed: data, 0), 3) == np.arange(12).reshape(3, 4).tolist()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: TWELVE.shuffle(8).batch(5).repeat(), "batch"),
        (lambda: TWELVE.shuffle(8).batch(5).prefetch(1).repeat().prefetch(1), "batch"),
        (lambda: TWELVE.shuffle(8).padded_batch(5, ([], [])).repeat(), "paddedbatch"),
        (lambda: TWELVE.shuffle(8).concatenate(TWELVE).batch(4).repeat(), "concatenate"),
        (lambda: TWELVE.shuffle(8).filter(lambda x, y: x > 1).batch(2).repeat(), "batch"),
        (lambda: TWELVE.shuffle(8).repeat().batch(5), None),
        (lambda: TWELVE.repeat().shuffle(8).batch(5), None),
        (lambda: TWELVE.shuffle(8).batch(4).repeat(), None),
        (lambda: TWELVE.shuffle(8).batch(5, drop_remainder=True).repeat(), None),
        (lambda: TWELVE.batch(5).repeat(), None),
        (lambda: TWELVE.shuffle(8).map(lambda x, y: (x, y)).repeat().batch(5), None),
        (lambda: TWELVE.shuffle(8).batch(5), None),
    ],
)
def test_what_makes_tensorflow_forget_a_shuffle_is_found(make, found):
    assert Passes(lambda seed: make(), 0).forgetful() == found


def test_tensorflow_does_forget_a_shuffle_that_is_batched_before_it_is_repeated(tmp_path):
    """If this fails, TensorFlow has learnt it, and `Passes` and its warning may go."""

    def make(seed):
        return TWELVE.shuffle(8, seed=seed).batch(5).repeat()

    whole = taken(Passes(make, 7), 30)
    again = (saved_after(make, count, str(tmp_path / str(count))) for count in range(1, 14))
    assert not all(taken(p, 16) == whole[n : n + 16] for n, p in enumerate(again, 1))


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ([(1, 2)], r"`task\.train_dataset` gave a list, it must give a tf\.data\.Dataset"),
        (Dataset.range(3), r"`task\.train_dataset` gives elements TensorSpec.*: they must be tup"),
        (Dataset.zip((TWELVE,) * 4), r"gives elements \(.*\): they must be tuples \(x, y\) or"),
    ],
)
def test_what_is_no_dataset_of_pairs_is_refused(dataset, text):
    with pytest.raises(ValueError, match=text):
        check_dataset("train_dataset", dataset)
    with pytest.raises(ValueError, match=text):
        Passes(lambda seed: dataset, 0)
