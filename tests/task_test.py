import dataclasses

import keras
import pytest
import tensorflow as tf

from finetune.calling import call
from finetune.task import Task


def dataset(batch_size, seed=0):
    return tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [[2.0], [4.0]])).batch(batch_size)


def loss(labels, outputs):
    return tf.square(labels - outputs)


def test_data_and_a_loss_are_all_that_a_task_needs():
    task = Task(dataset, dataset, loss)

    assert list(task.metrics()) == []
    assert task.forward is call
    assert task.regularizer is None
    assert task.describe is None


def test_the_default_forward_runs_the_model_as_in_training_or_not():
    dropout = keras.layers.Dropout(0.5, seed=0)
    task = Task(dataset, dataset, loss)
    ones = tf.ones([1, 100])

    assert float(tf.reduce_max(task.forward(dropout, ones, training=False))) == 1.0
    assert float(tf.reduce_max(task.forward(dropout, ones, training=True))) == 2.0


def test_a_keras_loss_without_reduction_gives_the_loss_of_each_position():
    task = Task(dataset, dataset, keras.losses.MeanSquaredError(reduction=None))

    assert task.loss(tf.constant([[2.0], [4.0]]), tf.constant([[1.0], [1.0]])).shape == (2,)


def test_every_part_that_is_no_function_is_named_with_its_value():
    with pytest.raises(ValueError, match=r"(?s)`train_dataset` \(3\).*`loss` \('mse'\).*`metrics`"):
        Task(3, dataset, "mse", metrics=[keras.metrics.MeanSquaredError()])  # type: ignore[arg-type]


def test_a_part_that_must_be_given_may_not_be_none():
    with pytest.raises(ValueError, match=r"`eval_dataset` \(None\)"):
        Task(dataset, None, loss)  # type: ignore[arg-type]


def test_a_task_is_changed_by_making_another():
    task = Task(dataset, dataset, loss)

    regularized = dataclasses.replace(task, regularizer=lambda module: tf.constant(0.5))

    assert regularized.loss is task.loss
    assert float(regularized.regularizer(None)) == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.loss = regularized.loss
