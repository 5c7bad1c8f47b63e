import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune.arguments import described_optimizer, described_rules, supported
from finetune.loading import from_module
from finetune.selectors import everything, nothing, rows


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that does not tell what it was made of."""

    def __call__(self, step):
        return 0.5


def test_an_optimizer_is_described_by_its_class_and_arguments():
    described = described_optimizer(keras.optimizers.Adam(0.5, use_ema=True))
    assert described["class_name"] == "Adam"
    assert described["config"]["learning_rate"] == 0.5
    assert described["config"]["use_ema"] is True
    json.dumps(described)


def test_the_number_in_an_optimizers_name_does_not_count():
    first, second = keras.optimizers.Adam(0.5), keras.optimizers.Adam(0.5)
    assert first.name != second.name
    assert described_optimizer(first) == described_optimizer(second)
    wrapped = [keras.optimizers.LossScaleOptimizer(o) for o in (first, second)]
    assert described_optimizer(wrapped[0]) == described_optimizer(wrapped[1])


def test_a_schedule_is_described_too():
    described = [
        described_optimizer(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, n)))
        for n in (10, 20)
    ]
    assert described[0] != described[1]
    assert described[0]["config"]["learning_rate"]["config"]["decay_steps"] == 10


@pytest.mark.parametrize("rate", [Halving(), lambda: 0.5])
def test_what_does_not_tell_its_arguments_is_described_by_its_class(rate):
    assert described_optimizer(keras.optimizers.SGD(rate))["class_name"] == "SGD"


def test_rules_are_described_as_they_read_and_by_all_that_they_select():
    module = tf.Module()
    module.w = tf.Variable(tf.zeros([200, 1]))
    base = from_module(module)
    long = [described_rules([("w", rows([*range(100), n]))], base) for n in (150, 151)]
    assert long[0] != long[1]
    assert long[0][0].partition(" sha256 ")[0] == long[1][0].partition(" sha256 ")[0]
    arrays = [described_rules([("w", np.arange(200)[:, None] == n)], base) for n in (0, 1)]
    assert arrays[0] != arrays[1]
    (first, second) = described_rules([("w", everything()), (".*", nothing())], base)
    assert first.startswith("('w', everything()) sha256 ")
    assert second.startswith("('.*', nothing()) sha256 ")


def test_no_strategy_is_the_one_that_stands_for_none():
    none = tf.distribute.get_strategy()
    assert supported(None) is supported(none) is none
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    assert supported(one) is one
    with one.scope(), pytest.raises(ValueError, match=r"outside of `strategy\.scope\(\)`"):
        supported(one)
