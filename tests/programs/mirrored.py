"""Training under strategies, in a process that has two devices of its CPU.

Started as a program with a working folder and the folder of the prepared Korean strings, it prints
one JSON object: what each function below, named `case_...`, returns, or the error it raised.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import finetune
from finetune.trainer import NonFiniteError, Trainer

GENERATOR = np.random.default_rng(0)
IDS = GENERATOR.integers(0, 6, [12, 4]).astype(np.int32)
TARGETS = GENERATOR.normal(size=[12]).astype(np.float32)
WEIGHTS = GENERATOR.uniform(0.5, 2, [12]).astype(np.float32)


class Model(tf.Module):
    """An embedding whose gradients are sparse, a kernel, a bias; one row leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(1)
        self.table = tf.Variable(generator.normal(size=[7, 3]).astype(np.float32))
        self.kernel = tf.Variable(generator.normal(size=[3, 2]).astype(np.float32))
        self.bias = tf.Variable([0.5])

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        mean = tf.reduce_mean(tf.gather(self.table, ids), axis=1)
        return tf.reduce_sum(tf.tanh(mean @ self.kernel), axis=1) + self.bias


def squared_error(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.square(outputs - y)


def task_of(x: Any = IDS, y: Any = TARGETS, weights: Any = WEIGHTS, **others: Any) -> finetune.Task:
    def batches(batch_size: int, seed: int = 0) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(batch_size)

    return finetune.Task(batches, batches, **{"loss": squared_error, **others})


def penalty(module: Model) -> tf.Tensor:
    return 0.01 * (tf.reduce_sum(tf.square(module.kernel)) + tf.reduce_sum(module.table[:6] ** 2))


PARTLY = [
    ("table", finetune.rows([0, 2, 3])),
    ("kernel", finetune.elements([[0, 0], [2, 1]])),
    ("bias", finetune.everything()),
]
WHOLLY = [(".*", finetune.everything())]
MIXED = [
    ("table", finetune.everything()),
    ("kernel", finetune.slices("[:2]")),
    ("bias", finetune.nothing()),
]


class Cases:
    """One strategy of two replicas, and runs in folders of their own."""

    def __init__(self, folder: Path, data_dir: str):
        self.two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        self._folder = folder
        self._data_dir = data_dir
        self._runs = 0

    def folder(self) -> str:
        self._runs += 1
        return str(self._folder / str(self._runs))

    def trainer(
        self,
        strategy: tf.distribute.Strategy | None,
        rules: Any = PARTLY,
        optimizer: Any = None,
        make: Callable[[], Any] = Model,
        task: finetune.Task | None = None,
        **others: Any,
    ) -> Trainer:
        return Trainer(
            lambda: finetune.from_module(make()),
            rules,
            task or task_of(regularizer=penalty),
            optimizer or keras.optimizers.Adam(0.05, global_clipnorm=0.5),
            **{
                "model_dir": self.folder(),
                "strategy": strategy,
                "batch_size": 5,
                "steps_per_loop": 4,
                "progress": False,
                **others,
            },
        )

    def pair(self, **arguments: Any) -> list[Trainer]:
        """The same run on one replica and on two."""
        optimizer = arguments.pop("optimizer", lambda: None)
        return [self.trainer(s, optimizer=optimizer(), **arguments) for s in (None, self.two)]

    def compared(self, steps: int = 12, **arguments: Any) -> dict[str, Any]:
        """How far two replicas are from one, and from each other."""
        one, two = self.pair(**arguments)
        losses = [(one.train(n)["loss"], two.train(n)["loss"]) for n in range(1, steps + 1)]
        return {
            "losses": float(np.max(ulps(*np.float32(losses).T))),
            "values": max(float(np.max(ulps(value(one, p), value(two, p)))) for p in paths(one)),
            "copies_equal": copies_equal(two),
            "ok": two.certificate().ok and one.certificate().ok,
            "changed": [one.certificate().changed, two.certificate().changed],
        }

    def case_partly_trainable(self) -> Any:
        return self.compared()

    def case_partly_trainable_dense(self) -> Any:
        return self.compared(mode="dense")

    def case_wholly_trainable_with_sparse_gradients(self) -> Any:
        return self.compared(rules=WHOLLY)

    def case_mixed(self) -> Any:
        return self.compared(rules=MIXED)

    def case_averages_and_accumulation(self) -> Any:
        return self.compared(
            optimizer=lambda: keras.optimizers.Adam(
                0.05, use_ema=True, ema_overwrite_frequency=5, gradient_accumulation_steps=2
            )
        )

    def case_loss_scale(self) -> Any:
        return self.compared(
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=2.0**10
            )
        )

    def case_a_batch_smaller_than_the_replicas(self) -> Any:
        return self.compared(steps=3, task=task_of(IDS[:6], TARGETS[:6], WEIGHTS[:6]))

    def case_evaluation(self) -> Any:
        task = task_of(metrics=lambda: [keras.metrics.MeanMetricWrapper(squared_error, name="mse")])
        one, two = self.pair(task=task)
        return [one.evaluate(), two.evaluate()]

    def case_export(self) -> Any:
        trainer = self.trainer(self.two)
        trainer.train(6)
        reader = tf.train.load_checkpoint(trainer.export())
        return all(
            reader.get_tensor(f"{p}/.ATTRIBUTES/VARIABLE_VALUE").tobytes()
            == value(trainer, p).tobytes()
            for p in paths(trainer)
        )

    def case_resume(self) -> Any:
        folder = self.folder()
        whole = self.trainer(self.two)
        whole.train(12)
        self.trainer(self.two, model_dir=folder).train(6)
        again = self.trainer(self.two, model_dir=folder)
        again.train(12)
        return [same_bits(whole, again), again.global_step, copies_equal(again)]

    def case_resume_on_one_replica(self) -> Any:
        folder = self.folder()
        self.trainer(self.two, model_dir=folder).train(6)
        again = self.trainer(None, model_dir=folder)
        again.train(12)
        return [again.global_step, again.certificate().ok]

    def case_nan_on_one_replica(self) -> Any:
        targets = TARGETS.copy()
        targets[9] = np.nan  # The last of the second batch, so in the second replica's part.
        trainer = self.trainer(self.two, task=task_of(y=targets))
        try:
            trainer.train(12)
        except NonFiniteError as error:
            finite = all(np.isfinite(value(trainer, path)).all() for path in paths(trainer))
            return [str(error).partition(" The step")[0], finite, copies_equal(trainer)]

    def case_state(self) -> Any:
        """Statistics that must not move and some that may, with dropout, in two replicas."""
        rules = [
            (".*second/moving_mean", finetune.model_state()),
            (".*", finetune.everything()),
        ]
        inputs = GENERATOR.normal(size=[12, 3]).astype(np.float32)
        task = task_of(inputs, TARGETS[:, None], loss=keras.losses.MeanSquaredError(reduction=None))
        folder = self.folder()
        make = {"make": keras_model, "rules": rules, "task": task}
        whole = self.trainer(self.two, **make)
        whole.train(6)
        self.trainer(self.two, model_dir=folder, **make).train(3)
        again = self.trainer(self.two, model_dir=folder, **make)
        again.train(6)
        moved = [
            named.aliases[-1]
            for path, named in whole.base.variables.items()
            if not named.trainable
            and value(whole, path).tobytes() != whole.base.read(path).tobytes()
        ]
        return {
            "moved": moved,
            "ok": whole.certificate().ok,
            "copies_equal": copies_equal(whole),
            "resumes": same_bits(whole, again),
        }

    def case_real_model(self) -> Any:
        from finetune.examples import korean_spacing, quickspacer

        ascii_rows = quickspacer.ascii_rows()
        trainer = Trainer(
            quickspacer.saved_model_dir(),
            [("embedding/embeddings", finetune.rows(ascii_rows)), (".*", finetune.nothing())],
            korean_spacing.korean_spacing_task(self._data_dir),
            keras.optimizers.Adam(1e-2),
            self.folder(),
            strategy=self.two,
            batch_size=8,
            progress=False,
        )
        before = trainer.evaluate()["loss"]
        trainer.train(20)
        certificate = trainer.certificate()
        return {
            "ok": certificate.ok,
            "changed": certificate.changed,
            "copies_equal": copies_equal(trainer),
            "better": trainer.evaluate()["loss"] < before,
            "traces": trainer.traces,
        }

    def case_strategies_of_one_device(self) -> Any:
        plain = self.trainer(None)
        plain.train(12)
        found = []
        for strategy in (
            tf.distribute.OneDeviceStrategy("CPU:0"),
            tf.distribute.MirroredStrategy(["CPU:0"]),
        ):
            trainer = self.trainer(strategy)
            trainer.train(12)
            found.append(same_bits(plain, trainer))
        return found

    def case_error_base_outside_of_the_scope(self) -> Any:
        Trainer(
            finetune.from_module(Model()), PARTLY, task_of(), keras.optimizers.Adam(),
            self.folder(), strategy=self.two,
        )  # fmt: skip

    def case_error_strategy_forgotten(self) -> Any:
        with self.two.scope():
            base = finetune.from_module(Model())
        Trainer(base, PARTLY, task_of(), keras.optimizers.Adam(), self.folder())

    def case_error_made_in_the_scope(self) -> Any:
        with self.two.scope():
            self.trainer(self.two)

    def case_error_used_in_the_scope(self) -> Any:
        trainer = self.trainer(self.two)
        with self.two.scope():
            trainer.train(3)

    def case_error_reduced_loss(self) -> Any:
        task = task_of(loss=lambda y, outputs: tf.reduce_mean(squared_error(y, outputs)))
        self.trainer(self.two, task=task).train(1)

    def case_error_multi_worker(self) -> Any:
        self.trainer(MULTI_WORKER)

    def case_error_central_storage(self) -> Any:
        self.trainer(tf.distribute.experimental.CentralStorageStrategy())


def keras_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(momentum=0.5, name="first"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
            keras.layers.BatchNormalization(momentum=0.5, name="second"),
        ],
        name="model",
    )


def copies(trainer: Trainer, path: str) -> list[np.ndarray]:
    variable = trainer.base.variables[path].variable
    distributed = isinstance(variable, tf.distribute.DistributedValues)
    return [copy.numpy() for copy in (variable.values if distributed else [variable])]


def value(trainer: Trainer, path: str) -> np.ndarray:
    return copies(trainer, path)[0]


def paths(trainer: Trainer) -> list[str]:
    return list(trainer.base.variables)


def copies_equal(trainer: Trainer) -> bool:
    found = [copies(trainer, path) for path in paths(trainer)]
    return all(len(c) == 2 and c[0].tobytes() == c[1].tobytes() for c in found)


def same_bits(one: Trainer, other: Trainer) -> bool:
    slots = [
        [slot.numpy().tobytes() for slots in t.optimizer.slots.values() for slot in slots.values()]
        for t in (one, other)
    ]
    return slots[0] == slots[1] and all(
        value(one, path).tobytes() == value(other, path).tobytes() for path in paths(one)
    )


def ulps(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How many float32 numbers lie between two, element by element."""
    ordered = []
    for array in (one, other):
        bits = np.ascontiguousarray(array, np.float32).view(np.int32).astype(np.int64)
        ordered.append(np.where(bits < 0, -(2**31) - bits, bits))
    return np.abs(ordered[0] - ordered[1])


def main(folder: str, data_dir: str, *names: str) -> None:
    """Runs all cases, or those of these names, and prints what they return."""
    cases = Cases(Path(folder), data_dir)
    results: dict[str, Any] = {}
    for name in names or [name for name in dir(cases) if name.startswith("case_")]:
        try:
            results[name] = getattr(cases, name)()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    # Made first of all: collectives are set up when a process starts.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    MULTI_WORKER = tf.distribute.MultiWorkerMirroredStrategy()
    main(*sys.argv[1:])
