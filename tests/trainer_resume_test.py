import functools
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_runs import (
    ALL,
    ROWS,
    SUMS,
    Linear,
    base_of,
    column_task,
    distance,
    model_with_state,
    squared_error,
    task_of,
    trainer_of,
    values_of,
)

from finetune.loading import from_module
from finetune.pruning import prune
from finetune.runs import RunMismatch
from finetune.selection import Selection
from finetune.selectors import (
    boolean,
    columns,
    everything,
    model_state,
    nothing,
    random,
    rows,
    smallest,
)
from finetune.task import Task
from finetune.trainer import Trainer


@pytest.fixture(scope="module")
def real_task(tmp_path_factory):
    from finetune.examples.korean_spacing import korean_spacing_task

    return korean_spacing_task(data_dir=tmp_path_factory.getbasetemp() / "tfds")


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


def both_ways(tmp_path, make):
    """The values after 40 steps at once, and after 20 and 20 in a second Trainer."""
    whole = make(tmp_path / "whole")
    whole.train(40)
    make(tmp_path / "parts").train(20)
    again = make(tmp_path / "parts")
    assert again.global_step == 20
    again.train(40)
    return (values_of(whole), whole.evaluations), (values_of(again), again.evaluations)


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
            (".*first/.*", everything()),
            (".*second/moving_mean", model_state()),
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
    with pytest.raises(RunMismatch, match=r"`base` was '[0-9a-f]{64}', is '[0-9a-f]{64}'"):
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
