import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from finetune.rules import Coverage
from finetune.runs import (
    Checkpoints,
    RunMismatch,
    evaluations,
    open_run,
    record_evaluation,
    write_text,
)
from finetune.selection import Selection

COVERAGE = Coverage(
    selections={
        "z": Selection.from_flat((2, 2), [0, 3]),
        "a": Selection.none((3,)),
        "mean": Selection.all((3,)),
    },
    decided_by={"z": "1. ('z', ...)", "a": "2. ('.*', nothing())", "mean": "3. model_state()"},
    moving_state=frozenset(["mean"]),
    state=frozenset(["mean"]),
)
DESCRIPTION = {
    "base": "f00d",
    "rules": ["('z', rows([0]))", "('.*', nothing())"],
    "optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.1, "beta_1": 0.9}},
    "seed": 0,
}


def never():
    raise AssertionError("selections are not derived again")


class State:
    """A small state and its checkpoints."""

    def __init__(self, model_dir, keep=3, base="f00d", dataset=None, **more):
        self.value = tf.Variable([0.0, 0.0])
        self.step = tf.Variable(0, dtype=tf.int64)
        position = {"step": self.step}
        if dataset is not None:
            position["iterator"] = iter(dataset)
        values = {"value": self.value, **more}
        self.checkpoints = Checkpoints(str(model_dir), values, position, {"base": base}, keep)

    def save(self, *steps):
        for step in steps:
            self.value.assign([step, -step])
            self.step.assign(step)
            self.checkpoints.save(step)
        return self


def steps_in(folder):
    return sorted(int(f.stem.removeprefix("ckpt-")) for f in folder.glob("ckpt-*.index"))


def restored(model_dir, **arguments):
    state = State(model_dir, **arguments)
    state.checkpoints.restore_latest()
    assert state.value.numpy().tolist() == [float(state.step), -float(state.step)]
    return int(state.step)


def test_a_new_run_decides_and_a_resumed_one_reads_what_was_decided(tmp_path):
    folder = str(tmp_path / "runs" / "a")
    assert open_run(folder, lambda: COVERAGE, DESCRIPTION) is COVERAGE
    State(folder).save(0)
    again = open_run(folder, never, DESCRIPTION)
    assert again == COVERAGE
    assert list(again.selections) == ["z", "a", "mean"]


def test_without_a_checkpoint_there_is_no_run_yet(tmp_path):
    open_run(str(tmp_path), lambda: COVERAGE, DESCRIPTION)
    other = Coverage({"z": Selection.all((2, 2))}, {"z": "1."})
    assert open_run(str(tmp_path), lambda: other, {**DESCRIPTION, "seed": 1}) is other
    State(tmp_path).save(0)
    assert open_run(str(tmp_path), never, {**DESCRIPTION, "seed": 1}) == other


def test_every_difference_to_the_run_that_lies_there_is_named(tmp_path):
    open_run(str(tmp_path), lambda: COVERAGE, DESCRIPTION)
    State(tmp_path).save(0)
    other = {
        "base": "beef",
        "rules": ["('z', rows([1]))", "('.*', nothing())"],
        "optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.2, "beta_1": 0.9}},
        "seed": 1,
    }
    with pytest.raises(RunMismatch) as error:
        open_run(str(tmp_path), never, other)
    assert str(error.value).splitlines() == [
        f"`model_dir` ({tmp_path}) holds a run that began otherwise:",
        "  - `base` was 'f00d', is 'beef'",
        "  - `rules[0]` was \"('z', rows([0]))\", is \"('z', rows([1]))\"",
        "  - `optimizer.config.learning_rate` was 0.1, is 0.2",
        "  - `seed` was 0, is 1",
        "Choose another `model_dir`, or start it as it began to go on.",
    ]


def test_of_another_optimizer_only_the_class_is_named(tmp_path):
    open_run(str(tmp_path), lambda: COVERAGE, DESCRIPTION)
    State(tmp_path).save(0)
    other = {**DESCRIPTION, "optimizer": {"class_name": "SGD", "config": {"momentum": 0.9}}}
    with pytest.raises(RunMismatch) as error:
        open_run(str(tmp_path), never, other)
    assert str(error.value).count("\n  - ") == 1
    assert "`optimizer.class_name` was 'Adam', is 'SGD'" in str(error.value)


def test_a_run_of_another_format_is_refused(tmp_path):
    open_run(str(tmp_path), lambda: COVERAGE, DESCRIPTION)
    State(tmp_path).save(0)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(RunMismatch, match="`format` was 99, is 1"):
        open_run(str(tmp_path), never, DESCRIPTION)


def test_the_latest_state_is_restored_and_only_the_latest_few_are_kept(tmp_path):
    State(tmp_path, keep=2).save(0, 10, 20)
    assert steps_in(tmp_path / "checkpoints") == [10, 20]
    assert restored(tmp_path) == 20


def test_steps_are_numbers_not_texts(tmp_path):
    State(tmp_path).save(9, 10)
    assert restored(tmp_path) == 10


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    state = State(tmp_path)
    assert state.checkpoints.restore_latest() is None
    assert state.checkpoints.restore_best() is None
    assert not state.checkpoints.has_best


def test_a_moved_folder_is_resumed_and_cleaned_up(tmp_path):
    State(tmp_path / "here", keep=2).save(10, 20)
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert restored(tmp_path / "there") == 20
    State(tmp_path / "there", keep=2).save(30)
    assert steps_in(tmp_path / "there" / "checkpoints") == [20, 30]


def test_best_and_latest_live_apart_and_do_not_delete_each_other(tmp_path):
    state = State(tmp_path, keep=1).save(10)
    state.checkpoints.save_best(10)
    state.save(20, 30)
    assert steps_in(tmp_path / "best") == [10]
    assert steps_in(tmp_path / "checkpoints") == [30]
    state.value.assign([40, -40])
    state.checkpoints.save_best(40)
    assert steps_in(tmp_path / "best") == [40]
    assert steps_in(tmp_path / "checkpoints") == [30]


def test_the_best_state_comes_without_a_position(tmp_path):
    state = State(tmp_path).save(10)
    state.checkpoints.save_best(10)
    state.save(20)
    assert state.checkpoints.restore_best() is not None
    assert state.value.numpy().tolist() == [10, -10]
    assert int(state.step) == 20


def damaged(tmp_path, damage, caplog):
    """Restores after the newest of two checkpoints was damaged; returns the step and the log."""
    State(tmp_path).save(10, 20)
    damage(tmp_path / "checkpoints")
    caplog.clear()
    step = restored(tmp_path)
    return step, "\n".join(record.getMessage() for record in caplog.records)


def cut(name, to):
    def damage(folder):
        file = folder / name
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * to)])

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        cut("ckpt-20.index", 0.0),
        cut("ckpt-20.index", 0.5),
        cut("ckpt-20.data-00000-of-00001", 0.0),
        cut("ckpt-20.data-00000-of-00001", 0.5),
        cut("ckpt-20.json", 0.5),
        lambda folder: (folder / "ckpt-20.index").unlink(),
        lambda folder: (folder / "ckpt-20.data-00000-of-00001").unlink(),
        lambda folder: (folder / "ckpt-20.json").write_text("[]"),
    ],
)
def test_a_cut_newest_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path, damage, caplog):
    step, log = damaged(tmp_path, damage, caplog)
    assert step == 10
    assert f"Checkpoint {tmp_path}/checkpoints/ckpt-20 is damaged (" in log
    assert "going back to the one before." in log


@pytest.mark.parametrize("file", ["index", "data-00000-of-00001"])
def test_no_flipped_bit_is_taken_for_a_whole_checkpoint(tmp_path, file, caplog):
    State(tmp_path, dataset=tf.data.Dataset.range(9)).save(10, 20)
    path = tmp_path / "checkpoints" / f"ckpt-20.{file}"
    whole = path.read_bytes()
    state = State(tmp_path, dataset=tf.data.Dataset.range(9))
    for place in range(0, len(whole), max(len(whole) // 60, 1)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        state.checkpoints.restore_latest()
        assert int(state.step) == 10, place
    path.write_bytes(whole)
    state.checkpoints.restore_latest()
    assert int(state.step) == 20


def test_all_damaged_is_an_error_that_says_what_to_do(tmp_path):
    State(tmp_path).save(10, 20)
    for step in (10, 20):
        cut(f"ckpt-{step}.index", 0.5)(tmp_path / "checkpoints")
    with pytest.raises(
        ValueError, match=r"None of the checkpoints in .*checkpoints \(steps 20, 10\) is whole"
    ):
        State(tmp_path).checkpoints.restore_latest()


def test_a_damaged_best_state_is_an_error(tmp_path):
    state = State(tmp_path).save(10)
    state.checkpoints.save_best(10)
    cut("ckpt-10.data-00000-of-00001", 0.5)(tmp_path / "best")
    with pytest.raises(ValueError, match=r"None of the checkpoints in .*best \(steps 10\)"):
        state.checkpoints.restore_best()


def test_going_on_after_a_fallback_replaces_the_damaged_checkpoint(tmp_path, caplog):
    step, _ = damaged(tmp_path, cut("ckpt-20.index", 0.5), caplog)
    assert step == 10
    State(tmp_path).save(20)
    assert restored(tmp_path) == 20


def test_what_lies_after_the_present_step_goes_with_the_next_save(tmp_path):
    State(tmp_path, keep=2).save(10, 20)
    state = State(tmp_path, keep=2)
    state.checkpoints.save_best(20)
    state.checkpoints.save_best(15)
    state.save(15)
    assert steps_in(tmp_path / "checkpoints") == [10, 15]
    assert steps_in(tmp_path / "best") == [15]


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_with_the_next_save(tmp_path):
    State(tmp_path).save(10, 20)
    folder = tmp_path / "checkpoints"
    (folder / "ckpt-20.json").unlink()  # Killed before the seal,
    (folder / "ckpt-30_temp").mkdir()  # while TensorFlow wrote,
    (folder / "ckpt-30_temp" / "part-00000-of-00001.index").touch()
    (folder / "ckpt-40.json.123.tmp").touch()  # while the seal was written.
    assert restored(tmp_path) == 10
    State(tmp_path).save(50)
    assert {file.name.partition(".")[0] for file in folder.iterdir()} == {"ckpt-10", "ckpt-50"}


def test_other_peoples_files_in_the_folder_stay(tmp_path):
    State(tmp_path).save(10)
    (tmp_path / "checkpoints" / "notes.txt").touch()
    (tmp_path / "checkpoints" / "ckpt-mine.json").touch()
    State(tmp_path, keep=1).save(20)
    assert (tmp_path / "checkpoints" / "notes.txt").exists()
    assert (tmp_path / "checkpoints" / "ckpt-mine.json").exists()
    assert restored(tmp_path) == 20


def test_a_checkpoint_holds_what_it_belongs_to_and_refuses_another(tmp_path):
    State(tmp_path, base="f00d").save(10)
    reader = tf.train.load_checkpoint(str(tmp_path / "checkpoints" / "ckpt-10"))
    assert reader.get_tensor("identity/base/.ATTRIBUTES/VARIABLE_VALUE") == b"f00d"
    with pytest.raises(RunMismatch, match="ckpt-10 was made with another base: it has f00d, this"):
        State(tmp_path, base="beef").checkpoints.restore_latest()


def test_a_state_of_other_parts_is_refused(tmp_path):
    State(tmp_path, velocity=tf.Variable([0.0])).save(10)
    with pytest.raises(
        RunMismatch, match=r"does not fit this run, its optimizer or its data: .*velo"
    ):
        State(tmp_path).checkpoints.restore_latest()
    with pytest.raises(RunMismatch, match="does not fit this run"):
        State(tmp_path, momentum=tf.Variable([0.0])).checkpoints.restore_latest()


def test_a_state_of_other_shapes_is_refused(tmp_path):
    State(tmp_path, velocity=tf.Variable([0.0])).save(10)
    with pytest.raises(RunMismatch, match="does not fit this run"):
        State(tmp_path, velocity=tf.Variable([0.0, 0.0])).checkpoints.restore_latest()


def test_the_position_in_the_data_is_saved(tmp_path):
    dataset = tf.data.Dataset.range(100).shuffle(10, seed=1).repeat()
    state = State(tmp_path, dataset=dataset)
    iterator = state.checkpoints._all.iterator
    seen = [int(next(iterator)) for _ in range(150)]
    state.save(10)
    expected = [int(next(iterator)) for _ in range(150)]

    again = State(tmp_path, dataset=dataset)
    again.checkpoints.restore_latest()
    assert [int(next(again.checkpoints._all.iterator)) for _ in range(150)] == expected != seen


def generator_dataset():
    return tf.data.Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec([]))


@pytest.mark.parametrize(
    ("dataset", "op"),
    [
        (generator_dataset, "PyFunc"),
        (
            lambda: tf.data.Dataset.range(3).map(
                lambda x: tf.numpy_function(lambda y: y, [x], tf.int64)
            ),
            "PyFunc",
        ),
        (lambda: tf.data.Dataset.range(3).map(lambda x: tf.random.uniform([])), "RandomUniform"),
    ],
)
def test_a_position_that_cannot_be_saved_is_an_error_that_names_the_op(tmp_path, dataset, op):
    with pytest.raises(ValueError, match="cannot be saved") as error:
        State(tmp_path, dataset=dataset()).save(0)
    assert str(error.value) == (
        "The position in the data of `task.train_dataset` cannot be saved, so a resume would not "
        f"be exact: {op} is stateful. Use no from_generator, py_function or tf.random in it; "
        "stateless random ops are fine."
    )


def test_evaluations_come_back_by_step_and_the_last_of_a_step_counts(tmp_path):
    assert evaluations(str(tmp_path)) == []
    for step, f1 in [(0, 0.1), (20, 0.2), (10, 0.3), (20, 0.4)]:
        record_evaluation(str(tmp_path), step, {"f1": f1})
    assert evaluations(str(tmp_path)) == [
        {"global_step": 0, "f1": 0.1},
        {"global_step": 10, "f1": 0.3},
        {"global_step": 20, "f1": 0.4},
    ]


def test_evaluations_are_lines_of_json(tmp_path):
    record_evaluation(str(tmp_path), 5, {"loss": 0.5, "f1": 0.25})
    record_evaluation(str(tmp_path), 10, {"loss": 0.25, "f1": 0.5})
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["f1"] for line in lines] == [0.25, 0.5]


def test_numbers_come_back_exactly(tmp_path):
    value = float(np.nextafter(0.1, 1))
    record_evaluation(str(tmp_path), 1, {"loss": value})
    assert evaluations(str(tmp_path))[0]["loss"] == value


def test_text_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_text(str(path), "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(str(path), "new \ud800")
    assert path.read_text() == "old"
    write_text(str(path), "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]
