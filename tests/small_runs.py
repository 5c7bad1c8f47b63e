"""Small models, tasks and runs that the tests of the Trainer share."""

import keras
import numpy as np
import tensorflow as tf

from finetune.loading import from_module
from finetune.selectors import (
    everything,
    nothing,
)
from finetune.task import Task
from finetune.trainer import Trainer

ALL = [(".*", everything())]
ROWS = np.random.default_rng(0).normal(size=[12, 3]).astype(np.float32)
SUMS = ROWS.sum(axis=1) + 1


def squared_error(y, outputs):
    return tf.square(outputs - y)


def task_of(x=ROWS, y=SUMS, weights=None, loss=squared_error, **others) -> Task:
    parts = (x, y) if weights is None else (x, y, weights)

    def batches(batch_size, seed=0):
        return tf.data.Dataset.from_tensor_slices(parts).batch(batch_size)

    return Task(batches, batches, loss, **others)


def distance(name="mae") -> keras.metrics.Metric:
    return keras.metrics.MeanMetricWrapper(lambda y, outputs: tf.abs(y - outputs), name=name)


class Linear(tf.Module):
    """outputs = x @ w + b; w is [3, 2] and its second column leads nowhere."""

    def __init__(self, dtype=tf.float32):
        super().__init__()
        self.w = tf.Variable(tf.cast([[0.5, 9.0], [-0.5, 8.0], [0.25, 7.0]], dtype))
        self.b = tf.Variable(tf.cast([0.0], dtype))

    def __call__(self, x):
        x = tf.cast(x, self.w.dtype)
        return tf.cast((x @ self.w)[:, 0] + self.b, tf.float32)


def base_of(module=None):
    return from_module(module or Linear())


def trainer_of(model_dir, base=None, rules=ALL, task=None, optimizer=None, **more) -> Trainer:
    more = {"batch_size": 4, "steps_per_loop": 5, "progress": False, **more}
    return Trainer(
        base or base_of(),
        rules,
        task or task_of(),
        optimizer or keras.optimizers.Adam(0.05),
        str(model_dir),
        **more,
    )


def values_of(trainer) -> dict[str, bytes]:
    """Every variable's bits, and every slot's."""
    values = {
        path: named.variable.numpy().tobytes() for path, named in trainer.base.variables.items()
    }
    for path, slots in trainer.optimizer.slots.items():
        values |= {f"{path}.{name}": slot.numpy().tobytes() for name, slot in slots.items()}
    for name, slot in trainer.optimizer.shared_slots.items():
        values[name] = slot.numpy().tobytes()
    return values


def model_with_state() -> keras.Model:
    """Two normalizations, `first` and `second`, and a dropout between."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(momentum=0.5, name="first"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
            keras.layers.BatchNormalization(momentum=0.5, name="second"),
        ]
    )


def column_task(x=ROWS, y=SUMS[:, None], **others):
    return task_of(x, y, loss=keras.losses.MeanSquaredError(reduction=None), **others)


def mixed_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(8, activation="tanh", name="first"),
            keras.layers.Dense(1, name="second"),
        ]
    )


class Bowl(tf.Module):
    """One weight; the evaluation likes it at 1, training pulls it from 0 to 3."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(0.0)
        self.other = tf.Variable(5.0)

    def __call__(self, x):
        return self.w + 0 * x[:, 0]


def bowl_task(metric="score", sign=-1.0):
    def metrics():
        return [
            keras.metrics.MeanMetricWrapper(
                lambda y, outputs: sign * tf.square(outputs - 1.0), name=metric
            )
        ]

    return task_of(y=np.full([12], 3.0, np.float32), metrics=metrics)


def bowl_trainer(model_dir, task=None, **more):
    """SGD with 0.125 takes w from 0 to 0.75, 1.3125, 1.734375, ..."""
    more = {"eval_every": 1, "best_metric": "score", **more}
    rules = [("w", everything()), ("other", nothing())]
    return trainer_of(
        model_dir,
        from_module(Bowl()),
        rules,
        task or bowl_task(),
        keras.optimizers.SGD(0.125),
        **more,
    )


def exported_w(trainer) -> float:
    reader = tf.train.load_checkpoint(trainer.export(overwrite=True))
    return float(reader.get_tensor("w/.ATTRIBUTES/VARIABLE_VALUE"))
