import keras
import numpy as np
import pytest
import tensorflow as tf
from small_runs import (
    ALL,
    ROWS,
    SUMS,
    Bowl,
    Linear,
    base_of,
    bowl_task,
    column_task,
    distance,
    mixed_model,
    model_with_state,
    squared_error,
    task_of,
    trainer_of,
    values_of,
)

from finetune.exporting import FrozenElementsMoved
from finetune.loading import from_module
from finetune.optimizer import MaskedOptimizer
from finetune.runs import RunMismatch
from finetune.selectors import (
    columns,
    everything,
    nothing,
)
from finetune.task import Task
from finetune.trainer import Trainer


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, r"`batch_size` \(0\) must be a whole number of 1 or more\."),
        ({"batch_size": 2.0}, r"`batch_size` \(2\.0\) must be a whole"),
        ({"keep": True}, r"`keep` \(True\) must be a whole"),
        (
            {"num_steps": -1, "steps_per_loop": 0, "eval_every": 0, "checkpoint_every": "5"},
            r"`num_steps` \(-1\), `steps_per_loop` \(0\), `eval_every` \(0\), "
            r"`checkpoint_every` \('5'\) must be whole",
        ),
        ({"patience": 0}, r"`patience` \(0\) must be a whole"),
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
        ({"task": task_of}, r"`task` \(<function task_of.*\) must be a finetune\.Task; a function"),
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


def test_an_optimizer_that_took_steps_elsewhere_is_refused(tmp_path):
    optimizer = keras.optimizers.Adam(0.05)
    trainer_of(tmp_path / "a", optimizer=optimizer)  # Takes none.
    trainer_of(tmp_path / "b", optimizer=optimizer).train(5)
    with pytest.raises(ValueError, match="`optimizer` has taken steps in another Trainer already"):
        trainer_of(tmp_path / "c", optimizer=optimizer)


def test_a_remote_folder_is_refused():
    with pytest.raises(ValueError, match=r"`model_dir` \(gs://bucket/run\) must be a local folder"):
        trainer_of("gs://bucket/run")


def test_the_step_to_stop_at_must_be_given_somewhere(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match=r"`num_steps` \(None\) must be given, to the Trainer or"):
        trainer.train()
    with pytest.raises(ValueError, match=r"`num_steps` \(2\.5\) must be a whole number"):
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


def test_a_model_given_as_the_base_is_told_from_a_function(tmp_path):
    with pytest.raises(
        ValueError, match=r"`base` \(Linear\) is a model: give finetune.from_module"
    ):
        trainer_of(tmp_path, Linear())


def test_other_evaluation_data_in_the_same_folder_is_refused(tmp_path):
    trainer_of(tmp_path, base_of(Linear()), task=task_of()).train(2)

    with pytest.raises(RunMismatch, match="`eval_data` was"):
        trainer_of(tmp_path, base_of(Linear()), task=task_of(x=ROWS + 1))


def test_a_model_dir_that_is_no_path_is_refused():
    for model_dir in ("", 7):
        with pytest.raises(ValueError, match=r"`model_dir` \(.*\) must be the path of the run"):
            Trainer(base_of(Linear()), ALL, task_of(), keras.optimizers.Adam(), model_dir)


def test_a_saved_model_is_no_model_dir(quickspacer_dir):
    with pytest.raises(ValueError, match="holds a SavedModel: choose"):
        trainer_of(quickspacer_dir)
