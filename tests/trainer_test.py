import functools
import gc
import os
import shutil
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune.calling import call
from finetune.export import FrozenElementsMoved
from finetune.loading import from_module, load
from finetune.optimizer import MaskedOptimizer
from finetune.preemption import Preempted
from finetune.pruning import prune
from finetune.runs import RunMismatch
from finetune.selection import Selection
from finetune.selectors import (
    boolean,
    columns,
    elements,
    everything,
    model_state,
    nonzeros,
    nothing,
    random,
    rows,
    smallest,
)
from finetune.task import Task
from finetune.trainer import NonFiniteError, Trainer, readable


@pytest.fixture(scope="session")
def real_task(tmp_path_factory) -> Task:
    from finetune.examples.korean_spacing import korean_spacing_task

    return korean_spacing_task(data_dir=tmp_path_factory.mktemp("tfds"))


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


def evaluation_of(trainer, step) -> dict[str, float]:
    (found,) = [line for line in trainer.evaluations if line["global_step"] == step]
    return found


def scalars_in(folder: Path) -> dict[str, dict[int, float]]:
    scalars: dict[str, dict[int, float]] = {}
    for file in sorted(folder.iterdir()):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                scalars.setdefault(value.tag, {})[event.step] = number
    return scalars


# What moves and what does not.


def test_training_moves_exactly_what_the_rules_name(tmp_path):
    base = base_of()
    rules = [("w", elements([[0, 0], [2, 0]])), ("b", nothing())]
    trainer = trainer_of(tmp_path, base, rules, optimizer=keras.optimizers.AdamW(0.05))
    result = trainer.train(20)
    assert result["global_step"] == trainer.global_step == 20
    certificate = trainer.certificate()
    assert certificate.ok
    assert (certificate.trainable, certificate.changed, certificate.total) == (2, 2, 7)
    moved = base.module.w.numpy() != base.read("w")
    assert moved.tolist() == [[True, False], [False, False], [True, False]]


def test_the_loss_goes_down_and_is_returned(tmp_path):
    trainer = trainer_of(tmp_path)
    first = trainer.train(5)["loss"]
    assert trainer.train(200)["loss"] < first / 10


def test_the_loop_is_traced_once_whatever_the_steps_and_intervals(tmp_path):
    trainer = trainer_of(tmp_path, steps_per_loop=4, eval_every=3, checkpoint_every=5)
    for target in (1, 2, 9, 30):
        trainer.train(target)
        trainer.evaluate()
    assert trainer.traces == 1
    assert trainer._eval_loop.traces == 1


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_intervals_decide_nothing_about_the_result(tmp_path, dtype):
    found = []
    for number, intervals in enumerate(
        [
            {"steps_per_loop": 30},
            {"steps_per_loop": 1, "eval_every": 7},
            {"steps_per_loop": 4, "eval_every": 5, "checkpoint_every": 3, "keep": 1},
        ]
    ):
        trainer = trainer_of(
            tmp_path / str(number), base_of(Linear(dtype)), [(".*", random(share=0.5))], **intervals
        )
        trainer.train(30)
        found.append(values_of(trainer))
    assert found[0] == found[1] == found[2]


def test_with_everything_trainable_it_equals_a_plain_keras_loop_bit_for_bit(tmp_path):
    def build():
        keras.utils.set_random_seed(3)
        layers = [
            keras.Input([3]),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(1),
        ]
        return keras.Sequential(layers)

    def loss_of(y, outputs):
        return keras.losses.mean_squared_error(y[:, None], outputs)

    trained = build()
    trainer = trainer_of(tmp_path, from_module(trained), task=task_of(loss=loss_of), batch_size=5)
    trainer.train(40)

    plain = build()
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(plain.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(y, plain(x, training=True)))
        variables = plain.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for x, y in task_of().train_dataset(5, 0).repeat().take(40):
        step(x, y)
    assert len(plain.variables) == 4
    for one, other in zip(plain.variables, trained.variables, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes(), one.path


def test_the_real_model_trains_and_comes_out_as_a_saved_model(tmp_path, real_task, quickspacer_dir):
    from finetune.examples import quickspacer

    ascii_rows = quickspacer.ascii_rows()
    trainer = Trainer(
        quickspacer_dir,
        [("embedding/embeddings", rows(ascii_rows)), (".*", nothing())],
        real_task,
        keras.optimizers.Adam(1e-2),
        str(tmp_path),
        num_steps=30,
        progress=False,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["f1"] > before["f1"]
    assert after["loss"] < before["loss"]

    tuned = tf.saved_model.load(trainer.export())
    changed = (tuned.embedding.embeddings.numpy() != trainer.base.read("embedding/embeddings")).any(
        1
    )
    assert set(changed.nonzero()[0]) <= set(ascii_rows)
    assert changed.sum() > 60
    ids = tf.constant([[5, 2, 900, 15, 3]])
    assert tuned(ids, False).numpy().tobytes() == trainer.base.module(ids, False).numpy().tobytes()


def test_a_pruned_model_keeps_its_zeros(tmp_path):
    base = prune(base_of(), [("w", smallest(share=0.5)), ("b", nothing())])
    trainer = trainer_of(tmp_path, base, [("w", nonzeros()), ("b", everything())])
    trainer.train(10)
    assert (base.module.w.numpy() == 0).sum() == 3
    assert trainer.certificate().ok


def test_a_base_is_the_base_again_for_the_next_trainer(tmp_path):
    """A sweep in a notebook loads its base once."""
    base = base_of()
    first = trainer_of(tmp_path / "a", base)
    first.train(10)
    second = trainer_of(tmp_path / "b", base, [("b", everything()), (".*", nothing())])
    assert base.module.w.numpy().tobytes() == base.read("w").tobytes()
    assert second.certificate().changed == 0
    second.train(10)
    assert second.certificate().ok
    for use in (first.train, first.evaluate, first.export, first.certificate):
        with pytest.raises(ValueError, match="in the hands of a Trainer that was made later"):
            use()


def test_another_base_may_be_trained_beside(tmp_path):
    one, other = trainer_of(tmp_path / "a"), trainer_of(tmp_path / "b")
    one.train(5)
    other.train(10)
    one.train(10)
    assert values_of(one) == values_of(other)


# Going on.


def both_ways(tmp_path, make):
    """The values after 40 steps at once, and after 20 and 20 in a second Trainer."""
    whole = make(tmp_path / "whole")
    whole.train(40)
    make(tmp_path / "parts").train(20)
    again = make(tmp_path / "parts")
    assert again.global_step == 20
    again.train(40)
    return (values_of(whole), whole.evaluations), (values_of(again), again.evaluations)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam with a schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.1, 35)
    ),
    "ema": lambda: keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9),
    "ema that overwrites": lambda: keras.optimizers.SGD(
        0.05, use_ema=True, ema_overwrite_frequency=7
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=3),
    "clipping": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=2.0**10, dynamic_growth_steps=4
    ),
    "ftrl": lambda: keras.optimizers.Ftrl(0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_halves_are_the_whole(tmp_path, name):
    rules = [("w", columns([0])), ("b", everything())]
    make = lambda folder: trainer_of(  # noqa: E731
        folder, rules=rules, optimizer=OPTIMIZERS[name](), eval_every=10
    )
    whole, parts = both_ways(tmp_path, make)
    assert whole == parts


def test_two_halves_are_the_whole_with_dropout_and_statistics(tmp_path):
    make = lambda folder: trainer_of(  # noqa: E731
        folder,
        from_module(model_with_state()),
        [
            ("sequential/batch_normalization/.*", everything()),
            ("sequential/batch_normalization_1/moving_mean", model_state()),
            (".*", everything()),
        ],
        task=column_task(),
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        eval_every=10,
    )
    whole, parts = both_ways(tmp_path, make)
    assert whole == parts


def test_two_halves_are_the_whole_of_the_real_model(tmp_path, real_task, quickspacer_dir):
    make = lambda folder: Trainer(  # noqa: E731
        quickspacer_dir,
        [("embedding/embeddings", rows(range(1000))), (".*", everything())],
        real_task,
        keras.optimizers.Adam(1e-3),
        str(folder),
        steps_per_loop=7,
        batch_size=4,
        progress=False,
    )
    whole, parts = both_ways(tmp_path, make)
    assert whole == parts


def test_two_halves_are_the_whole_of_a_users_shuffled_data_over_several_epochs(tmp_path):
    """12 examples in batches of 5: 40 steps are more than 13 epochs."""
    data = tf.data.Dataset.from_tensor_slices((ROWS, SUMS))
    task = Task(
        lambda batch_size, seed: data.shuffle(8, seed=seed).batch(batch_size).prefetch(2),
        lambda batch_size: data.batch(batch_size),
        squared_error,
    )
    make = lambda folder: trainer_of(folder, task=task, batch_size=5, seed=7)  # noqa: E731
    whole, parts = both_ways(tmp_path, make)
    assert whole == parts


def test_the_base_itself_may_go_on_in_the_same_process(tmp_path):
    whole = trainer_of(tmp_path / "whole")
    whole.train(40)
    base = base_of()
    trainer_of(tmp_path / "parts", base).train(20)
    again = trainer_of(tmp_path / "parts", base)
    again.train(40)
    assert values_of(whole) == values_of(again)


def test_evaluating_and_exporting_in_between_decides_nothing(tmp_path):
    make = functools.partial(
        trainer_of,
        optimizer=OPTIMIZERS["ema"](),
        task=task_of(metrics=lambda: [distance()]),
        eval_every=5,
        best_metric="mae",
        best_mode="min",
    )
    whole = make(tmp_path / "whole")
    whole.train(40)
    busy = make(tmp_path / "busy", optimizer=OPTIMIZERS["ema"]())
    busy.evaluate()
    for target in (13, 20, 31, 40):
        busy.train(target)
        busy.export(overwrite=True)
        busy.evaluate()
        busy.certificate()
    assert values_of(whole) == values_of(busy)


def test_a_moved_folder_goes_on(tmp_path):
    whole = trainer_of(tmp_path / "whole")
    whole.train(40)
    trainer_of(tmp_path / "here").train(20)
    shutil.move(tmp_path / "here", tmp_path / "there")
    again = trainer_of(tmp_path / "there")
    again.train(40)
    assert values_of(whole) == values_of(again)


def test_a_damaged_newest_checkpoint_costs_steps_and_no_bits(tmp_path, caplog):
    whole = trainer_of(tmp_path / "whole")
    whole.train(40)
    trainer_of(tmp_path / "parts", checkpoint_every=5).train(20)
    path = tmp_path / "parts" / "checkpoints" / "ckpt-20.data-00000-of-00001"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again = trainer_of(tmp_path / "parts")
    assert again.global_step == 15
    assert "ckpt-20 is damaged" in caplog.text
    again.train(40)
    assert values_of(whole) == values_of(again)


def test_what_the_run_does_not_depend_on_may_change(tmp_path):
    trainer_of(tmp_path).train(10)
    again = trainer_of(tmp_path, steps_per_loop=3, eval_every=4, keep=1, num_steps=20)
    assert again.train()["global_step"] == 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"rules": [("w", rows([0])), ("b", everything())]},
            r"`rules\[0\]` was \"\('w', rows\(\[1",
        ),
        ({"rules": ALL}, r"`rules` was \[\"\('w', rows\(\[1, 2"),
        ({"optimizer": keras.optimizers.SGD(0.05)}, "`optimizer.class_name` was 'Adam', is 'SGD'"),
        (
            {"optimizer": keras.optimizers.Adam(0.25)},
            r"`optimizer.config.learning_rate` was 0\.05\d*, is 0\.25",
        ),
        (
            {"optimizer": keras.optimizers.Adam(0.05, use_ema=True)},
            "`optimizer.config.use_ema` was False, is True",
        ),
        (
            {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05))},
            "`optimizer.class_name` was 'Adam', is 'LossScaleOptimizer'",
        ),
        ({"mode": "dense"}, "`mode` was 'auto', is 'dense'"),
        ({"seed": 1}, "`seed` was 0, is 1"),
        ({"batch_size": 3}, "`batch_size` was 4, is 3"),
    ],
)
def test_a_run_that_began_otherwise_is_refused_with_the_difference(tmp_path, change, text):
    begun = {"rules": [("w", rows([1, 2])), ("b", everything())]}
    trainer_of(tmp_path, **begun).train(5)
    with pytest.raises(RunMismatch, match=f"holds a run that began otherwise:\n  - {text}"):
        trainer_of(tmp_path, **{**begun, **change})


def test_another_base_is_refused(tmp_path):
    trainer_of(tmp_path).train(5)
    other = Linear()
    other.b.assign([1.0])
    with pytest.raises(RunMismatch, match="`base` was '[0-9a-f]{64}', is '[0-9a-f]{64}'"):
        trainer_of(tmp_path, base_of(other))


def test_another_pruning_is_another_base(tmp_path):
    pruned = prune(base_of(), [("w", smallest(count=1)), ("b", nothing())])
    trainer_of(tmp_path, pruned).train(5)
    with pytest.raises(RunMismatch, match="`base` was"):
        trainer_of(tmp_path, base_of())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rows([*range(60), 90]), rows([*range(60), 91])),
        (boolean(np.eye(100, 1) > 0), boolean(np.eye(100, 1, -1) > 0)),
        (Selection.from_flat((100, 1), [3]), Selection.from_flat((100, 1), [4])),
        (~boolean(np.eye(100, 1) > 0), ~boolean(np.eye(100, 1, -1) > 0)),
        (np.eye(100, 1) > 0, np.eye(100, 1, -1) > 0),
    ],
)
def test_rules_that_only_look_the_same_are_refused(tmp_path, one, other):
    module = tf.Module()
    module.w = tf.Variable(tf.ones([100, 1]))
    task = task_of(forward=lambda module, x, training: x[:, 0] * tf.reduce_sum(module.w))
    trainer_of(tmp_path, from_module(module), [("w", one)], task).train(1)
    with pytest.raises(RunMismatch, match=r"`rules\[0\]` was"):
        trainer_of(tmp_path, from_module(module), [("w", other)], task)


def test_a_predicate_is_asked_once_in_the_life_of_a_run(tmp_path):
    asked = []

    def negative(spec):
        asked.append(spec.path)
        return spec.read() < 0

    rules = [("w", negative), ("b", everything())]
    base = base_of()
    first = trainer_of(tmp_path, base, rules)
    first.train(60)
    assert asked == ["w"]
    again = trainer_of(tmp_path, base_of(), rules)
    assert asked == ["w"]
    assert again.coverage == first.coverage
    assert again.coverage.table() == first.coverage.table()


def test_a_start_that_was_refused_leaves_no_run_behind(tmp_path):
    with pytest.raises(ValueError, match="nothing is trainable"):
        trainer_of(tmp_path, rules=[(".*", nothing())])
    trainer_of(tmp_path, seed=1)
    trainer_of(tmp_path, seed=2, rules=[("w", everything()), ("b", nothing())]).train(5)
    assert (
        trainer_of(tmp_path, seed=2, rules=[("w", everything()), ("b", nothing())]).global_step == 5
    )


# Checkpoints.


def checkpoint_bytes(model_dir, step) -> int:
    files = Path(model_dir, "checkpoints").glob(f"ckpt-{step}.*")
    return sum(file.stat().st_size for file in files)


class Big(tf.Module):
    """400,000 weights as a table, as many that nobody may train, and a bias."""

    def __init__(self):
        super().__init__()
        self.table = tf.Variable(tf.zeros([4000, 100]))
        self.fixed = tf.Variable(tf.zeros([4000, 100]), trainable=False)
        self.b = tf.Variable(0.0)

    def __call__(self, x):
        ids = tf.cast(tf.abs(x[:, 0]) * 100, tf.int32)
        both = tf.gather(self.table, ids) + tf.gather(self.fixed, ids)
        return tf.reduce_sum(both, axis=1) + self.b


def test_a_checkpoint_is_as_large_as_what_is_trainable(tmp_path):
    rules = [("table", random(share=0.01)), ("b", everything())]
    trainer_of(tmp_path, from_module(Big()), rules).train(5)
    # 4,000 values, each with two slots of Adam; the table alone would be 1,600,000.
    assert 48_000 < checkpoint_bytes(tmp_path, 5) < 56_000


def test_a_frozen_keras_layer_takes_no_room_in_a_checkpoint(tmp_path):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(10_000), keras.layers.Dense(1)])
    model.layers[0].trainable = False
    task = task_of(loss=lambda y, outputs: squared_error(y[:, None], outputs))
    rules = [("sequential.*/dense_.*/bias", everything()), (".*", nothing())]
    trainer_of(tmp_path, from_module(model), rules, task).train(2)
    assert checkpoint_bytes(tmp_path, 2) < 10_000


def test_a_checkpoint_holds_the_fingerprint_of_its_base(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train(5)
    reader = tf.train.load_checkpoint(str(tmp_path / "checkpoints" / "ckpt-5"))
    found = reader.get_tensor("identity/base/.ATTRIBUTES/VARIABLE_VALUE").decode()
    assert found == trainer.base.fingerprint


def test_a_checkpoint_of_another_base_that_was_copied_into_the_run_is_refused(tmp_path):
    trainer_of(tmp_path / "a").train(5)
    other = Linear()
    other.b.assign([1.0])
    trainer_of(tmp_path / "b", base_of(other)).train(5)
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    shutil.copytree(tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    with pytest.raises(RunMismatch, match="ckpt-5 was made with another base: it has "):
        trainer_of(tmp_path / "a")


def test_checkpoints_come_at_their_interval_and_the_latest_are_kept(tmp_path):
    trainer_of(tmp_path, checkpoint_every=4, keep=2).train(18)
    steps = {file.stem for file in (tmp_path / "checkpoints").glob("*.index")}
    assert steps == {"ckpt-16", "ckpt-18"}


def test_all_checkpoints_damaged_is_an_error(tmp_path):
    trainer_of(tmp_path).train(5)
    for file in (tmp_path / "checkpoints").glob("*.index"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"None of the checkpoints .* \(steps 5, 0\) is whole"):
        trainer_of(tmp_path)


# NaN and Inf.


def poisoned(step, value=np.nan):
    """Data whose batch of four at `step`, counted from 1, is broken."""
    x = np.tile(ROWS, [4, 1])
    x[4 * (step - 1) + 2, 1] = value
    return task_of(x, np.tile(SUMS, 4))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path, value):
    good = trainer_of(tmp_path / "good")
    good.train(7)
    bad = trainer_of(tmp_path / "bad", task=poisoned(8, value), checkpoint_every=5)
    with pytest.raises(NonFiniteError) as error:
        bad.train(20)
    assert str(error.value).startswith(
        "The loss or a gradient is not finite at step 8. The step was not taken; the last good "
        f"checkpoint in {tmp_path / 'bad'} is of step 5."
    )
    assert bad.global_step == 7
    assert values_of(bad) == values_of(good)
    assert trainer_of(tmp_path / "bad", task=poisoned(8, value)).global_step == 5


def test_a_run_whose_first_loss_is_nan_has_moved_nothing(tmp_path):
    trainer = trainer_of(tmp_path, task=poisoned(1))
    with pytest.raises(NonFiniteError, match=r"finite at step 1\. .* is of step 0\."):
        trainer.train(20)
    assert trainer.certificate().changed == 0
    assert trainer_of(tmp_path, task=poisoned(1)).global_step == 0


def test_a_resumed_run_names_the_same_step(tmp_path):
    trainer_of(tmp_path, task=poisoned(8)).train(6)
    with pytest.raises(NonFiniteError, match="at step 8"):
        trainer_of(tmp_path, task=poisoned(8)).train(20)


def test_statistics_are_finite_after_a_nan_even_if_they_may_move(tmp_path):
    rules = [(".*moving_.*", model_state()), (".*", everything())]
    base = from_module(model_with_state())
    x, y = ROWS.copy(), SUMS[:, None]
    x[9, 1] = np.nan
    trainer = trainer_of(tmp_path, base, rules, column_task(x, y))
    with pytest.raises(NonFiniteError, match="at step 3"):
        trainer.train(20)
    for path, named in base.variables.items():
        assert np.isfinite(named.variable.numpy()).all(), path


def test_a_nan_elsewhere_never_reaches_a_frozen_element(tmp_path):
    base = base_of()
    rules = [("w", elements([[0, 0]])), ("b", nothing())]
    trainer = trainer_of(tmp_path, base, rules, poisoned(3))
    with pytest.raises(NonFiniteError):
        trainer.train(20)
    assert trainer.certificate().ok
    assert np.isfinite(base.module.w.numpy()).all()


# State that the model moves by itself.


def model_with_state() -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
            keras.layers.BatchNormalization(momentum=0.5),
        ],
        name="sequential",
    )


def column_task(x=ROWS, y=SUMS[:, None], **others):
    return task_of(x, y, loss=keras.losses.MeanSquaredError(reduction=None), **others)


def test_statistics_and_seeds_are_the_bases_after_training(tmp_path):
    base = from_module(model_with_state())
    trainer = trainer_of(tmp_path, base, task=column_task())
    trainer.train(12)
    state = [path for path, named in base.variables.items() if not named.trainable]
    assert len(state) == 5
    for path in state:
        assert base.variables[path].variable.numpy().tobytes() == base.read(path).tobytes(), path
    assert trainer.certificate().ok
    trainer.export()


def test_a_rule_lets_the_model_move_its_statistics(tmp_path):
    base = from_module(model_with_state())
    rules = [(".*normalization/moving_mean", model_state()), (".*", everything())]
    trainer = trainer_of(tmp_path, base, rules, column_task())
    trainer.train(12)
    model = base.module
    assert (model.layers[1].moving_mean.numpy() != 0).all()
    assert model.layers[1].moving_variance.numpy().tolist() == [1.0] * 4
    assert trainer.certificate().ok


def test_statistics_are_live_while_training_goes_on(tmp_path):
    """The same numbers as in a model whose statistics may move, for they play no part in training.

    They play one in the evaluation: the frozen model is evaluated with the base's.
    """
    frozen = trainer_of(tmp_path / "a", from_module(model_with_state()), task=column_task())
    frozen.train(12)
    rules = [(".*moving_.*", model_state()), (".*", everything())]
    moving = trainer_of(tmp_path / "b", from_module(model_with_state()), rules, column_task())
    moving.train(12)
    for path, named in frozen.base.variables.items():
        same = (
            named.variable.numpy().tobytes()
            == moving.base.variables[path].variable.numpy().tobytes()
        )
        assert same == ("moving" not in path), path
    assert frozen.evaluate()["loss"] != moving.evaluate()["loss"]


def test_dropout_draws_anew_in_every_loop_and_every_step(tmp_path):
    masks = tf.Variable(tf.zeros([0, 4, 50]), shape=[None, 4, 50], trainable=False)
    layer = keras.layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input([50]), layer])
    model.w = keras.Variable([1.0], name="w")

    def forward(model, x, training):
        outputs = model(x, training=training)
        if training:
            masks.assign(tf.concat([masks, outputs[tf.newaxis]], axis=0))
        return tf.reduce_sum(outputs, axis=1) * model.w

    task = task_of(np.ones([4, 50], np.float32), np.ones([4], np.float32), forward=forward)
    rules = [("w", everything())]
    trainer_of(tmp_path, from_module(model), rules, task, steps_per_loop=2).train(6)
    drawn = masks.numpy()
    assert len(drawn) == 6
    assert len({mask.tobytes() for mask in drawn}) == 6


def test_a_frozen_variable_that_the_model_writes_is_put_back_although_it_claims_to_be_trainable(
    tmp_path,
):
    """Keras' exports say so of BatchNorm's statistics."""
    model = model_with_state()
    model.export(str(tmp_path / "exported"), verbose=False)
    base = load(str(tmp_path / "exported"))
    statistics = [p for p, n in base.variables.items() if n.shape == (1,) and n.trainable]
    trainer = trainer_of(
        tmp_path / "run",
        base,
        [("|".join(statistics), nothing()), (".*", everything())],
        column_task(forward=functools.partial(call, endpoint="serve")),
    )
    trainer.train(6)
    assert trainer.certificate().ok
    trainer.export()


# Evaluations, the best state, early stopping.


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


def test_evaluations_come_at_their_interval_with_loss_and_metrics(tmp_path):
    trainer = bowl_trainer(tmp_path, eval_every=2, best_metric=None)
    result = trainer.train(5)
    assert [line["global_step"] for line in trainer.evaluations] == [2, 4]
    last = evaluation_of(trainer, 4)
    assert (last["loss"], last["score"]) == (result["eval_loss"], result["eval_score"])
    assert evaluation_of(trainer, 2)["score"] == -(0.3125**2)


def test_an_untrained_model_can_be_evaluated(tmp_path):
    trainer = bowl_trainer(tmp_path)
    assert trainer.evaluate() == {"loss": 9.0, "score": -1.0}
    assert trainer.evaluations == [{"global_step": 0, "loss": 9.0, "score": -1.0}]


def test_training_stops_when_the_metric_gets_no_better(tmp_path):
    """The scores are -1/16, then -0.098, -0.54: the second is worse, and so is the third."""
    trainer = bowl_trainer(tmp_path, patience=2)
    assert trainer.train(20)["global_step"] == 3
    assert trainer.train(20) == {"global_step": 3}
    again = bowl_trainer(tmp_path, patience=2)
    assert again.train(20) == {"global_step": 3}


def test_patience_counts_on_after_a_resume(tmp_path):
    bowl_trainer(tmp_path, patience=2).train(2)
    assert bowl_trainer(tmp_path, patience=2).train(20)["global_step"] == 3


def test_the_best_state_is_exported_and_the_present_one_stays(tmp_path):
    trainer = bowl_trainer(tmp_path)
    trainer.train(6)
    now = float(trainer.base.module.w)
    assert now > 2
    assert exported_w(trainer) == 0.75
    assert float(trainer.base.module.w) == now
    assert exported_w(bowl_trainer(tmp_path)) == 0.75
    assert bowl_trainer(tmp_path).global_step == 6


def test_best_can_mean_least(tmp_path):
    trainer = bowl_trainer(tmp_path, bowl_task(sign=1.0), best_mode="min")
    trainer.train(6)
    assert exported_w(trainer) == 0.75


def test_the_loss_can_decide_what_is_best(tmp_path):
    trainer = bowl_trainer(tmp_path, best_metric="loss", best_mode="min")
    trainer.train(6)
    assert exported_w(trainer) == float(trainer.base.module.w)


def test_a_nan_metric_is_never_better(tmp_path):
    def metrics():
        def score(y, outputs):
            return tf.where(outputs > 0.8, np.nan, outputs)

        return [keras.metrics.MeanMetricWrapper(score, name="score")]

    trainer = bowl_trainer(tmp_path, task_of(y=np.full([12], 3.0, np.float32), metrics=metrics))
    trainer.train(4)
    assert exported_w(trainer) == 0.75


def test_best_and_latest_do_not_delete_each_other(tmp_path):
    bowl_trainer(tmp_path, keep=1).train(6)
    kept = {folder: {f.stem for f in (tmp_path / folder).glob("*.index")} for folder in
            ("best", "checkpoints")}  # fmt: skip
    assert kept == {"best": {"ckpt-1"}, "checkpoints": {"ckpt-6"}}


def test_without_a_best_metric_the_present_state_is_exported(tmp_path):
    trainer = bowl_trainer(tmp_path, best_metric=None)
    trainer.train(6)
    assert exported_w(trainer) == float(trainer.base.module.w)


def test_an_export_does_not_touch_the_checkpoints(tmp_path):
    trainer = bowl_trainer(tmp_path, checkpoint_every=2)
    trainer.train(3)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "checkpoints").iterdir()}
    trainer.export()
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "checkpoints").iterdir()}
    assert after == before


def test_the_events_hold_what_one_wants_to_see(tmp_path):
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(0.125, 4, 0.0625))
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(
        tmp_path, from_module(Bowl()), rules, bowl_task(), optimizer, steps_per_loop=2, eval_every=4
    )
    trainer.train(4)
    scalars = scalars_in(tmp_path / "train")
    assert set(scalars) == {
        "loss", "learning_rate", "gradient_norm", "trainable_share", "steps_per_second"
    }  # fmt: skip
    assert scalars["trainable_share"] == {0: 0.5}
    assert scalars["learning_rate"] == {2: 0.09375, 4: 0.0625}
    assert scalars["loss"].keys() == scalars["gradient_norm"].keys() == {2, 4}
    # At w = 0 the gradient is -6, at 0.75 it is -4.5.
    assert scalars["gradient_norm"][2] == 5.25
    assert all(rate > 0 for rate in scalars["steps_per_second"].values())
    evaluated = scalars_in(tmp_path / "eval")
    assert evaluated.keys() == {"loss", "score"}
    assert evaluated["score"][4] == pytest.approx(evaluation_of(trainer, 4)["score"])


def test_events_of_a_resumed_run_go_on(tmp_path):
    bowl_trainer(tmp_path, steps_per_loop=1).train(2)
    bowl_trainer(tmp_path, steps_per_loop=1).train(4)
    assert set(scalars_in(tmp_path / "train")["loss"]) == {1, 2, 3, 4}


# What optimizers offer.


def test_accumulated_gradients_are_one_step_of_their_mean(tmp_path):
    """Batches of 4 and 4 with accumulation move as one batch of 8 does."""
    parts = trainer_of(
        tmp_path / "parts",
        task=task_of(ROWS[:8], SUMS[:8]),
        optimizer=keras.optimizers.SGD(0.25, gradient_accumulation_steps=2),
    )
    parts.train(1)
    assert parts.certificate().changed == 0
    parts.train(2)
    whole = trainer_of(
        tmp_path / "whole",
        task=task_of(ROWS[:8], SUMS[:8]),
        optimizer=keras.optimizers.SGD(0.25),
        batch_size=8,
    )
    whole.train(1)
    np.testing.assert_allclose(
        parts.base.module.w.numpy(), whole.base.module.w.numpy(), rtol=1e-6, atol=0
    )
    assert parts.certificate().changed == 4


def test_the_clip_norm_counts_trainable_elements_only(tmp_path):
    """The gradient of the one trainable element is far larger than 0.5, so it moves by 0.5."""
    base = base_of()
    trainer = trainer_of(
        tmp_path,
        base,
        [("w", elements([[0, 0]])), ("b", nothing())],
        task_of(y=SUMS * 100),
        keras.optimizers.SGD(1.0, global_clipnorm=0.5),
    )
    trainer.train(1)
    assert abs(float(base.module.w[0, 0]) - 0.5) == pytest.approx(0.5)


def test_averages_are_evaluated_and_exported_while_training_goes_on_from_raw_values(tmp_path):
    """SGD takes w to 0.75, 1.3125; their average with 0.5 is 0.75, then 1.03125."""
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(
        tmp_path,
        from_module(Bowl()),
        rules,
        bowl_task(),
        keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.5),
    )
    trainer.train(2)
    assert float(trainer.base.module.w) == 1.3125
    assert trainer.evaluate()["score"] == -(0.03125**2)
    assert exported_w(trainer) == 1.03125
    assert trainer.certificate().variables[0].largest_change == 1.03125
    assert float(trainer.base.module.w) == 1.3125


def test_averages_of_partly_trainable_variables_keep_the_frozen_bits(tmp_path):
    rules = [("w", random(share=0.5)), ("b", nothing())]
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_overwrite_frequency=3)
    trainer = trainer_of(tmp_path, rules=rules, optimizer=optimizer)
    trainer.train(10)
    assert trainer.certificate().ok
    trainer.export()


def test_a_loss_scale_finds_its_size_and_training_goes_on(tmp_path):
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.125), initial_scale=2.0**127
    )
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(tmp_path, from_module(Bowl()), rules, bowl_task(), optimizer)
    trainer.train(10)
    assert float(trainer.optimizer.inner.dynamic_scale) < 2.0**127
    assert float(trainer.base.module.w) > 1.0


def mixed_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(8, activation="tanh", name="first"),
            keras.layers.Dense(1, name="second"),
        ]
    )


def check_mixed(tmp_path, base):
    assert base.module.layers[0].compute_dtype == "bfloat16"
    rules = [(".*first/kernel", random(share=0.5)), (".*second/.*", everything()),
             (".*", nothing())]  # fmt: skip
    trainer = trainer_of(tmp_path, base, rules, column_task())
    first = trainer.train(5)["loss"]
    assert trainer.train(100)["loss"] < first / 2
    certificate = trainer.certificate()
    assert certificate.ok
    assert certificate.changed == certificate.trainable == 12 + 8 + 1


def test_mixed_precision_of_a_checkpoint_by_policy(tmp_path):
    prefix = tf.train.Checkpoint(mixed_model()).write(str(tmp_path / "ckpt"))
    base = load(prefix, module_fn=mixed_model, dtype_policy="mixed_bfloat16")
    check_mixed(tmp_path / "run", base)


def test_mixed_precision_of_a_keras_model_in_memory(tmp_path):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = mixed_model()
    finally:
        keras.config.set_dtype_policy(before)
    check_mixed(tmp_path, from_module(model))


def test_variables_of_low_precision_train_and_keep_their_frozen_bits(tmp_path):
    base = base_of(Linear(tf.bfloat16))
    trainer = trainer_of(tmp_path, base, [("w", elements([[0, 0], [1, 0]])), ("b", everything())])
    trainer.train(20)
    certificate = trainer.certificate()
    assert certificate.ok
    assert certificate.changed == 3


# How models are called, and what data looks like.


def test_a_model_with_named_inputs_trains(tmp_path):
    left, right = keras.Input([3], name="left"), keras.Input([3], name="right")
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([left, right]))
    model = keras.Model({"left": left, "right": right}, outputs)
    task = column_task({"left": ROWS, "right": ROWS[::-1].copy()})
    trainer = trainer_of(tmp_path, from_module(model), task=task)
    assert trainer.train(5)["loss"] > trainer.train(100)["loss"]


class Signed(tf.Module):
    """A model of which only signatures are left; two of them."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable([[0.5], [0.5], [0.5]])
        self.other = tf.Variable([[0.0], [0.0], [0.0]])

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def first(self, x):
        return {"y": tf.squeeze(x @ self.w, axis=1)}

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def second(self, x):
        return {"y": tf.squeeze(x @ self.other, axis=1)}


def signed_dir(tmp_path) -> str:
    module = Signed()
    folder = str(tmp_path / "signed")
    bare = tf.train.Checkpoint(w=module.w, other=module.other)
    signatures = {"serving_default": module.first, "second": module.second}
    tf.saved_model.save(bare, folder, signatures=signatures)
    return folder


def test_a_model_that_has_signatures_only_trains(tmp_path):
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(tmp_path / "run", signed_dir(tmp_path), rules)
    assert trainer.train(5)["loss"] > trainer.train(50)["loss"]
    tuned = tf.saved_model.load(trainer.export())
    out = tuned.signatures["serving_default"](x=tf.constant(ROWS))["y"]
    assert trainer.evaluate()["loss"] == pytest.approx(float(np.mean((out - SUMS) ** 2)))


def test_the_endpoint_of_the_base_is_called(tmp_path):
    base = load(signed_dir(tmp_path), endpoint="second")
    rules = [("other", everything()), ("w", nothing())]
    trainer = trainer_of(tmp_path / "run", base, rules)
    assert trainer.evaluate()["loss"] == pytest.approx(float(np.mean(SUMS**2)))
    trainer.train(10)
    assert trainer.certificate().changed == 3


def test_a_forward_of_ones_own_decides_itself_what_is_called(tmp_path):
    base = load(signed_dir(tmp_path), endpoint="second")
    rules = [("w", everything()), ("other", nothing())]
    task = task_of(forward=lambda module, x, training: module.signatures["serving_default"](x)["y"])
    trainer = trainer_of(tmp_path / "run", base, rules, task)
    trainer.train(5)
    assert trainer.certificate().changed == 3


@pytest.mark.parametrize("argument", ["training", "is_training"])
def test_a_saved_model_is_called_by_the_arguments_that_it_takes(tmp_path, argument):
    namespace = {"tf": tf}
    exec(
        f"def __call__(self, x, {argument}=False):\n"
        f"    return (x @ self.w)[:, 0] + (100.0 if {argument} else 0.0)",
        namespace,
    )
    kind = type("Named", (tf.Module,), {"__call__": tf.function(namespace["__call__"])})
    module = kind()
    module.w = tf.Variable([[0.5], [0.5], [0.5]])
    for training in (True, False):
        module.__call__.get_concrete_function(tf.TensorSpec([None, 3]), training)
    tf.saved_model.save(module, str(tmp_path / "saved"))
    task = task_of(metrics=lambda: [distance()])
    trainer = trainer_of(tmp_path / "run", str(tmp_path / "saved"), task=task)
    loss = trainer.train(1)["loss"]
    # Only an argument that is called `training` is given.
    assert (loss > 5_000) == (argument == "training")
    assert trainer.evaluate()["mae"] < 50


def test_weights_decide_what_counts(tmp_path):
    """Half of the examples are nonsense and have no weight."""
    y = np.where(np.arange(12) % 2 == 0, SUMS, 1000.0).astype(np.float32)
    weights = (np.arange(12) % 2 == 0).astype(np.float32)
    trainer = trainer_of(tmp_path, task=task_of(ROWS, y, weights), optimizer=OPTIMIZERS["ftrl"]())
    trainer.train(300)
    assert trainer.evaluate()["loss"] < 0.05


def test_a_regularizer_counts_in_training_only(tmp_path):
    task = task_of(regularizer=lambda module: 100.0 * tf.reduce_sum(tf.square(module.w[:, 0])))
    trainer = trainer_of(tmp_path, task=task)
    before = trainer.evaluate()["loss"]
    assert trainer.train(1)["loss"] > 10 * before
    trainer.train(200)
    assert np.abs(trainer.base.module.w.numpy()[:, 0]).max() < 0.05


def test_the_first_batch_can_be_looked_at_and_stays_the_first(tmp_path):
    trainer = trainer_of(tmp_path / "a")
    x, y = trainer.first_batch()
    assert (x.numpy() == ROWS[:4]).all()
    assert (y.numpy() == SUMS[:4]).all()
    trainer.train(5)
    plain = trainer_of(tmp_path / "b")
    plain.train(5)
    assert values_of(trainer) == values_of(plain)


# What is refused, and what is warned of.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, r"`batch_size` \(0\) must be whole numbers of 1 or more\."),
        ({"batch_size": 2.0}, r"`batch_size` \(2\.0\) must be whole"),
        ({"keep": True}, r"`keep` \(True\) must be whole"),
        (
            {"num_steps": -1, "steps_per_loop": 0, "eval_every": 0, "checkpoint_every": "5"},
            r"`num_steps` \(-1\), `steps_per_loop` \(0\), `eval_every` \(0\), "
            r"`checkpoint_every` \('5'\) must be whole",
        ),
        ({"patience": 0}, r"`patience` \(0\) must be whole"),
        ({"seed": 0.5}, r"`seed` \(0\.5\) must be a whole number"),
        ({"seed": None}, r"`seed` \(None\) must be a whole number"),
        ({"best_mode": "most"}, r"`best_mode` \('most'\) must be 'max' or 'min'"),
        ({"patience": 2}, r"`patience` \(2\) needs a `best_metric` to watch"),
        ({"best_metric": "loss"}, r"`best_metric` \('loss'\) needs `eval_every`"),
        (
            {"best_metric": "mea", "eval_every": 5},
            r"`best_metric` \('mea'\) is not among the task's metrics, which are: mae, loss\.",
        ),
        ({"mode": "sparse"}, r"`mode` \('sparse'\) must be one of 'auto', 'packed', 'dense'"),
        ({"optimizer": "adam"}, r"`optimizer` \('adam'\) must be a Keras 3 optimizer"),
        (
            {"optimizer": MaskedOptimizer(keras.optimizers.Adam(), ALL)},
            "`optimizer` is a MaskedOptimizer already: give the Trainer the optimizer inside it",
        ),
        ({"base": 3}, r"`base` \(3\) must be a finetune.Base, as"),
        ({"base": Linear}, "`base` is a function that returned <.*Linear.*>, not a finetune.Base"),
        ({"base": "nowhere"}, r"`source` \(nowhere\) does not exist"),
        ({"rules": []}, r"`rules` \(\[\]\) must be a list of \(pattern, selector\) pairs"),
        ({"rules": None}, r"`rules` \(None\) must be a list"),
        ({"rules": [("w", everything)]}, r"rule 1 .*`everything` must be called: write everything"),
        ({"rules": [("w",)]}, r"rule 1 \(\('w',\)\) is no \(pattern, selector\) pair"),
        ({"rules": [("v", everything())]}, "pattern `v` matches no variable"),
        ({"rules": [(".*", nothing())]}, r"nothing is trainable: the rules \[\('\.\*', nothing"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path, arguments, text):
    arguments = {"task": task_of(metrics=lambda: [distance()]), **arguments}
    if arguments.get("base") == 3:
        with pytest.raises(ValueError, match=text):
            Trainer(3, ALL, task_of(), keras.optimizers.Adam(), str(tmp_path))
        return
    if "rules" in arguments and not arguments["rules"]:
        with pytest.raises(ValueError, match=text):
            Trainer(
                base_of(), arguments["rules"], task_of(), keras.optimizers.Adam(), str(tmp_path)
            )
        return
    with pytest.raises(ValueError, match=text):
        trainer_of(tmp_path, **arguments)


def test_numpy_integers_are_whole_numbers(tmp_path):
    trainer = trainer_of(tmp_path, batch_size=np.int64(4), seed=np.int32(1), num_steps=np.int64(2))
    assert trainer.train()["global_step"] == 2


def test_a_remote_folder_is_refused():
    with pytest.raises(ValueError, match=r"`model_dir` \(gs://bucket/run\) must be a local folder"):
        trainer_of("gs://bucket/run")


def test_the_step_to_stop_at_must_be_given_somewhere(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match=r"`num_steps` \(None\) must be given, to the Trainer or"):
        trainer.train()
    with pytest.raises(ValueError, match=r"`num_steps` \(2\.5\) must be whole numbers"):
        trainer.train(2.5)


def test_a_finished_run_has_nothing_to_do(tmp_path):
    trainer = trainer_of(tmp_path, num_steps=6)
    assert set(trainer.train()) == {"global_step", "loss"}
    before = values_of(trainer)
    assert trainer.train() == {"global_step": 6}
    assert trainer.train(3) == {"global_step": 6}
    assert values_of(trainer) == before


def test_training_may_go_on_where_it_ended(tmp_path):
    trainer = trainer_of(tmp_path / "a", num_steps=6)
    trainer.train()
    trainer.train(12)
    whole = trainer_of(tmp_path / "b")
    whole.train(12)
    assert values_of(trainer) == values_of(whole)


def test_no_gradient_at_all_is_an_error_before_the_run_begins(tmp_path):
    rules = [("other", everything()), ("w", nothing())]
    trainer = trainer_of(tmp_path, from_module(Bowl()), rules, bowl_task())
    with pytest.raises(ValueError, match=r"No gradient reaches any trainable variable \(other\)"):
        trainer.train(5)
    assert not (tmp_path / "checkpoints").exists()


def test_a_variable_without_gradient_is_warned_of_and_does_not_move(tmp_path, caplog):
    trainer = trainer_of(tmp_path, from_module(Bowl()), ALL, bowl_task())
    trainer.train(5)
    assert (
        "No gradient reaches other: trainable by the rules, but they will not move." in caplog.text
    )
    assert float(trainer.base.module.other) == 5.0


@pytest.mark.parametrize("resumed", [False, True])
def test_random_ops_that_no_resume_repeats_are_warned_of(tmp_path, caplog, resumed):
    task = task_of(forward=lambda module, x, training: tf.nn.dropout(module(x), 0.5))
    trainer_of(tmp_path, task=task).train(5)
    if resumed:
        caplog.clear()
        trainer_of(tmp_path, task=task).train(10)
    assert "A resume of this run will not be bit-exact: RandomUniform " in caplog.text
    assert "draw random numbers from a state that cannot be saved" in caplog.text


def test_a_variable_that_no_checkpoint_holds_is_warned_of(tmp_path, caplog):
    calls = tf.Variable(0.0, name="calls")

    def loss(y, outputs):
        return tf.square(outputs - y) + 0 * calls.assign_add(1.0)

    trainer_of(tmp_path, task=task_of(loss=loss)).train(5)
    assert "a step writes to the variables calls:0, which the module does not hold" in caplog.text


def test_nothing_is_warned_of_without_a_reason(tmp_path, caplog):
    trainer_of(tmp_path).train(5)
    trainer_of(tmp_path / "b", from_module(model_with_state()), task=column_task()).train(5)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda *arguments: [(ROWS, SUMS)], "gave a list, it must give a tf.data.Dataset"),
        (
            lambda *arguments: tf.data.Dataset.from_tensors(ROWS),
            r"gives elements TensorSpec.*: they must be tuples \(x, y\) or \(x, y, weights\)",
        ),
        (
            lambda *arguments: tf.data.Dataset.from_tensors({"x": ROWS, "y": SUMS}),
            r"gives elements \{'x': TensorSpec.*: they must be tuples",
        ),
    ],
)
def test_data_that_is_no_data_is_refused(tmp_path, name, make, text):
    task = task_of()
    others = {"train_dataset": task.train_dataset, "eval_dataset": task.eval_dataset}
    task = Task(**{**others, name: make}, loss=squared_error)
    with pytest.raises(ValueError, match=f"`task.{name}` {text}"):
        trainer_of(tmp_path, task=task)


def test_no_training_data_is_an_error(tmp_path):
    trainer = trainer_of(tmp_path, task=task_of(ROWS[:0], SUMS[:0]))
    with pytest.raises(ValueError, match=r"`task\.train_dataset` holds no batch: nothing to train"):
        trainer.train(5)


def test_no_evaluation_data_is_an_error(tmp_path):
    trainer = trainer_of(tmp_path, task=task_of(ROWS[:0], SUMS[:0]))
    with pytest.raises(ValueError, match=r"`task\.eval_dataset` holds no batch: nothing can be"):
        trainer.evaluate()


def test_an_evaluation_that_would_never_end_is_refused(tmp_path):
    data = tf.data.Dataset.from_tensors((ROWS, SUMS)).repeat()
    task = Task(lambda batch_size, seed: data, lambda batch_size: data, squared_error)
    with pytest.raises(ValueError, match=r"`task\.eval_dataset` never ends"):
        trainer_of(tmp_path, task=task)


def test_data_from_a_generator_is_refused_before_the_first_step(tmp_path):
    def batches(batch_size, seed=0):
        specs = (tf.TensorSpec([12, 3]), tf.TensorSpec([12]))
        return tf.data.Dataset.from_generator(lambda: iter([(ROWS, SUMS)]), output_signature=specs)

    trainer = trainer_of(tmp_path, task=Task(batches, batches, squared_error))
    with pytest.raises(ValueError, match=r"`task\.train_dataset` cannot be saved.*PyFunc is state"):
        trainer.train(5)
    assert trainer.certificate().changed == 0


def test_when_the_data_fails_training_goes_on_from_the_last_checkpoint_exactly(tmp_path):
    whole = trainer_of(tmp_path / "whole")
    whole.train(12)

    def batches(batch_size, seed=0):
        data = task_of().train_dataset(batch_size, seed).repeat().enumerate()

        def checked(number, batch):
            with tf.control_dependencies(
                [tf.debugging.assert_less(number, tf.constant(limit, tf.int64), "no such file")]
            ):
                return tf.nest.map_structure(tf.identity, batch)

        return data.map(checked)

    limit = 7
    task = Task(batches, task_of().eval_dataset, squared_error)
    failing = trainer_of(tmp_path / "parts", task=task, checkpoint_every=5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no such file"):
        failing.train(12)
    assert failing.global_step == 7
    limit = 100
    again = trainer_of(tmp_path / "parts", task=task, checkpoint_every=5)
    assert again.global_step == 5
    again.train(12)
    assert values_of(again) == values_of(whole)


def test_an_export_replaces_nothing_unless_told_to(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train(5)
    folder = trainer.export()
    assert folder == str(tmp_path / "export")
    with pytest.raises(ValueError, match=r"`directory` \(.*export\) exists: choose another"):
        trainer.export()
    trainer.train(10)
    trainer.export(overwrite=True)
    assert trainer.export(str(tmp_path / "elsewhere")) == str(tmp_path / "elsewhere")


def test_a_frozen_element_that_somebody_moved_is_not_exported(tmp_path):
    trainer = trainer_of(tmp_path, rules=[("w", columns([0])), ("b", nothing())])
    trainer.train(5)
    trainer.base.module.b.assign([0.5])
    with pytest.raises(FrozenElementsMoved, match=r"b \(2\. \('b', nothing\(\)\)\): 1 of 1 moved"):
        trainer.export()


def test_a_metric_that_is_no_number_is_an_error(tmp_path):
    task = column_task(metrics=lambda: [keras.metrics.Mean(name="loss")])
    with pytest.raises(ValueError, match="the loss are called loss, loss: give each metric a name"):
        trainer_of(tmp_path, from_module(mixed_model()), task=task)


# SIGTERM, output, and the rest.


def sigterm_at(step):
    """A loss that sends SIGTERM when the data says so."""

    def send(at):
        if at:
            os.kill(os.getpid(), 15)
        return np.float32(0)

    def loss(y, outputs):
        extra = tf.numpy_function(send, [tf.reduce_any(y > 1e6)], tf.float32)
        return tf.square(outputs - tf.minimum(y, 1.0)) + tf.ensure_shape(extra, [])

    y = np.tile(SUMS, 4)
    y[4 * (step - 1)] = 1e7
    return task_of(np.tile(ROWS, [4, 1]), y, loss=loss)


def test_sigterm_saves_and_exits_with_42_and_the_run_goes_on(tmp_path):
    trainer = trainer_of(tmp_path, task=sigterm_at(8), checkpoint_every=100)
    with pytest.raises(Preempted) as stopped:
        trainer.train(12)
    assert stopped.value.code == 42
    assert stopped.value.global_step == 10  # The end of its loop of five.
    again = trainer_of(tmp_path, task=sigterm_at(8))
    assert again.global_step == 10
    assert values_of(again) == values_of(trainer)


def test_training_works_in_a_thread(tmp_path):
    trainer = trainer_of(tmp_path)
    thread = threading.Thread(target=trainer.train, args=[10])
    thread.start()
    thread.join()
    assert trainer.global_step == 10


@pytest.mark.parametrize("progress", [True, False])
def test_evaluations_are_printed_unless_nothing_is_to_be_shown(tmp_path, capsys, progress):
    bowl_trainer(tmp_path, eval_every=2, progress=progress).train(2)
    shown = "step 2: loss 2.848  score -0.09766\n" if progress else ""
    assert capsys.readouterr().out == shown


def test_metrics_are_readable():
    assert readable({"loss": 0.00012345, "f1": 1.0}) == "loss 0.0001234  f1 1"


def test_a_trainer_does_not_outlive_its_last_reference(tmp_path):
    base = base_of()
    trainer_of(tmp_path, base).train(5)
    gc.collect()
    from finetune.trainer import _trainer_of

    assert _trainer_of[base.module]() is None
