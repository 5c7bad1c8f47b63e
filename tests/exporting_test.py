import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune.bundle import Bundle, digest, rewrite
from finetune.certificate import Certificate
from finetune.exporting import FrozenElementsMoved, export
from finetune.loading import Base, from_module, load
from finetune.selection import Selection

TABLE = "embedding/embeddings"
ROWS = Selection.from_rows((4250, 64), [40, 41])
TOKENS = [[40, 41, 1000, 7], [2, 40, 0, 0]]


class Small(tf.Module):
    """Variables of many dtypes, an asset and two signatures."""

    def __init__(self, vocabulary: str):
        super().__init__()
        self.kernel = tf.Variable([[1.0, 2.0], [3.0, 4.0]], dtype=tf.bfloat16)
        self.step = tf.Variable(7, dtype=tf.int64, trainable=False)
        self.labels = tf.Variable(["no", "yes"], trainable=False)
        index = tf.lookup.TextFileIndex
        lines = tf.lookup.TextFileInitializer(
            vocabulary, tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER
        )
        self.lookup = tf.lookup.StaticHashTable(lines, default_value=-1)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.bfloat16)])
    def apply(self, x):
        return {"y": tf.matmul(x, self.kernel)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def numbers(self, words):
        return {"numbers": self.lookup.lookup(words)}


@pytest.fixture
def small_dir(tmp_path) -> Path:
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("a\nb\n")
    module = Small(str(vocabulary))
    folder = tmp_path / "small"
    tf.saved_model.save(module, str(folder), {"serve": module.apply, "numbers": module.numbers})
    vocabulary.unlink()
    (folder / "assets.extra").mkdir()
    (folder / "assets.extra" / "requests").write_bytes(b"warm up")
    (folder / "keras_metadata.pb").write_bytes(b"\x00")
    return folder


@pytest.fixture
def tuned_small(small_dir) -> tuple[Base, dict]:
    """The small base with the first column of its kernel trained."""
    base = load(str(small_dir))
    variable(base, "kernel").assign([[1.5, 2.0], [3.5, 4.0]])
    return base, {"kernel": Selection.from_flat((2, 2), [0, 2])}


def variable(base: Base, path: str) -> tf.Variable:
    return base.variables[path].variable


def files_below(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def in_another_process(script: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        timeout=120,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


LOAD_PLAINLY = """
    import json, sys
    import tensorflow as tf
    folder, tokens = sys.argv[1], json.loads(sys.argv[2])
    model = tf.saved_model.load(folder)
    outputs = model(tf.constant(tokens), False).numpy()
    by_signature = model.signatures["model_inference"](tokens=tf.constant(tokens))
    spaced = model.signatures["serving_default"](texts=tf.constant(["안녕하세요세계"]))
    assert "finetune" not in sys.modules
    print(json.dumps({
        "signatures": {
            name: [repr(f.structured_input_signature), repr(f.structured_outputs)]
            for name, f in sorted(model.signatures.items())
        },
        "outputs": outputs.tobytes().hex(),
        "by_signature": by_signature["output_0"].numpy().tobytes().hex(),
        "spaced": spaced["spaced_sentences"].numpy()[0].decode(),
    }))
"""


def test_a_tuned_saved_model_serves_in_a_process_without_this_project(quickspacer_dir, tmp_path):
    base = load(quickspacer_dir)
    table = base.read(TABLE)
    table[40:42] += 1
    variable(base, TABLE).assign(table)
    certificate = export(base, {TABLE: ROWS}, tmp_path / "tuned", decided_by={TABLE: "1. rows"})
    assert (certificate.ok, certificate.trainable, certificate.changed) == (True, 128, 128)

    live = base.module(tf.constant(TOKENS), False).numpy().tobytes().hex()
    reports = {}
    for folder in (quickspacer_dir, tmp_path / "tuned"):
        run = in_another_process(LOAD_PLAINLY, folder, json.dumps(TOKENS))
        assert run.returncode == 0, run.stderr
        reports[folder] = json.loads(run.stdout)
    before, after = reports.values()
    assert after["signatures"] == before["signatures"]
    assert sorted(after["signatures"]) == ["model_inference", "serving_default"]
    assert after["outputs"] == after["by_signature"] == live
    assert after["outputs"] != before["outputs"]
    assert after["spaced"].replace(" ", "") == "안녕하세요세계"


def test_the_graph_the_assets_and_the_keys_of_a_saved_model_stay(quickspacer_dir, tmp_path):
    base = load(quickspacer_dir)
    variable(base, TABLE).scatter_update(tf.IndexedSlices(tf.zeros([1, 64]), [41]))
    export(base, {TABLE: ROWS}, tmp_path / "tuned")
    before, after = files_below(quickspacer_dir), files_below(tmp_path / "tuned")
    certificate = Certificate.from_json(after.pop("certificate.json").decode())
    assert set(after) == set(before)
    assert {name for name in before if before[name] != after[name]} == {
        "variables/variables.index",
        "variables/variables.data-00000-of-00001",
    }
    tuned = Bundle(tmp_path / "tuned" / "variables" / "variables")
    assert tuned.keys() == base.bundle.keys()
    for key in tuned.keys():  # noqa: SIM118
        if key != base.key_of(TABLE):
            assert digest(tuned.read(key)) == digest(base.bundle.read(key))
    table = tuned.read(base.key_of(TABLE))
    assert not table[41].any()
    assert digest(np.delete(table, 41, 0)) == digest(np.delete(base.read(TABLE), 41, 0))
    assert digest(table) == next(r.tuned for r in certificate.variables if r.path == TABLE)


def test_a_frozen_element_that_moved_is_refused_and_nothing_is_written(quickspacer_dir, tmp_path):
    base = load(quickspacer_dir)
    table = base.read(TABLE)
    table[[5, 9], [0, 3]] = [-1, 2]
    variable(base, TABLE).assign(table)
    with pytest.raises(
        FrozenElementsMoved, match="frozen elements do not have the base's"
    ) as caught:
        export(base, {TABLE: ROWS}, tmp_path / "tuned", decided_by={TABLE: "1. ascii rows"})
    message = str(caught.value)
    assert rf"{TABLE} (1. ascii rows): 2 of 271,872 moved, the first at [5, 0] was" in message
    assert "is -1.0" in message
    assert "MaskedOptimizer" in message
    assert caught.value.certificate.moved == 2
    assert os.listdir(tmp_path) == []


def test_state_that_moved_is_refused_unless_it_was_allowed_to(tuned_small, tmp_path):
    base, selections = tuned_small
    variable(base, "step").assign_add(1)
    with pytest.raises(FrozenElementsMoved, match=r"step \(state, not trainable\): 1 of 1 moved"):
        export(base, selections, tmp_path / "tuned")
    certificate = export(base, selections, tmp_path / "tuned", moving_state={"step"})
    assert certificate.ok
    assert variable(load(str(tmp_path / "tuned")), "step").numpy() == 8


def test_assets_extras_strings_integers_and_bfloat16_come_along(tuned_small, small_dir, tmp_path):
    base, selections = tuned_small
    export(base, selections, tmp_path / "out" / "tuned")
    before, after = files_below(small_dir), files_below(tmp_path / "out" / "tuned")
    # A stale hash of the variables would be worse than none.
    assert set(before) - set(after) == {"fingerprint.pb"}
    assert set(after) - set(before) == {"certificate.json"}
    for name in (
        "saved_model.pb",
        "assets/words.txt",
        "assets.extra/requests",
        "keras_metadata.pb",
    ):
        assert after[name] == before[name]
    model = tf.saved_model.load(str(tmp_path / "out" / "tuned"))
    one = tf.constant([[1.0, 0.0]], tf.bfloat16)
    assert model.signatures["serve"](x=one)["y"].numpy().tolist() == [[1.5, 2.0]]
    numbers = model.signatures["numbers"](words=tf.constant(["b", "?"]))["numbers"]
    assert numbers.numpy().tolist() == [1, -1]
    assert model.labels.numpy().tolist() == [b"no", b"yes"]
    assert model.step.numpy() == 7


def test_a_base_in_several_data_files_is_exported_in_one(small_dir, tmp_path):
    rewrite(
        Bundle(small_dir / "variables" / "variables"),
        {},
        tmp_path / "v" / "variables",
        group_bytes=8,
    )
    shutil.rmtree(small_dir / "variables")
    (tmp_path / "v").rename(small_dir / "variables")
    base = load(str(small_dir))
    assert len(base.bundle.files) > 3
    export(base, {}, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out" / "variables")) == [
        "variables.data-00000-of-00001",
        "variables.index",
    ]
    assert tf.saved_model.load(str(tmp_path / "out")).kernel.numpy().tolist() == [[1, 2], [3, 4]]


def test_an_export_can_be_tuned_and_exported_again(tuned_small, tmp_path):
    base, selections = tuned_small
    first = export(base, selections, tmp_path / "first")
    again = load(str(tmp_path / "first"))
    variable(again, "kernel").assign([[1.5, 2.0], [9.0, 4.0]])
    second = export(again, selections, tmp_path / "second")
    assert second.base_fingerprint == first.tuned_fingerprint
    assert second.changed == 1
    written = (tmp_path / "second" / "certificate.json").read_text(encoding="utf-8")
    assert Certificate.from_json(written) == second


def test_values_can_be_given_instead_of_the_live_ones(tuned_small, tmp_path):
    base, selections = tuned_small
    averaged = {path: base.read(path) for path in base.variables}
    averaged["kernel"][0, 0] = 5
    export(base, selections, tmp_path / "tuned", current=averaged.__getitem__)
    kernel = variable(load(str(tmp_path / "tuned")), "kernel").numpy()
    assert kernel.tolist() == [[5, 2], [3, 4]]


def test_a_base_edited_on_purpose_is_the_one_that_must_be_kept(small_dir, tmp_path):
    base = load(str(small_dir))
    pruned = base.read("kernel")
    pruned[0, 0] = 0
    base = base.edited({"kernel": pruned})
    selections = {"kernel": Selection.from_flat((2, 2), [3])}
    assert export(base, selections, tmp_path / "tuned").variables[0].edited
    assert variable(load(str(tmp_path / "tuned")), "kernel").numpy()[0, 0] == 0
    variable(base, "kernel").assign([[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(FrozenElementsMoved, match=r"at \[0, 0\] was 0, is 1"):
        export(base, selections, tmp_path / "revived")


def checkpoint_module() -> tf.Module:
    module = tf.Module()
    module.x = tf.Variable([1.0, 2.0])
    module.tied = [module.x]
    module.state = tf.Variable("start", trainable=False)
    return module


def test_a_checkpoint_keeps_its_name_and_keys_and_restores(tmp_path):
    prefix = tf.train.Checkpoint(checkpoint_module()).write(str(tmp_path / "base" / "ckpt-100"))
    base = load(prefix, module_fn=checkpoint_module)
    variable(base, "x").assign([1.0, 5.0])
    export(base, {"x": Selection.from_flat((2,), [1])}, tmp_path / "tuned")
    assert sorted(os.listdir(tmp_path / "tuned")) == [
        "certificate.json",
        "checkpoint",
        "ckpt-100.data-00000-of-00001",
        "ckpt-100.index",
    ]
    moved = (tmp_path / "tuned").rename(tmp_path / "moved")
    assert tf.train.latest_checkpoint(moved) == str(moved / "ckpt-100")
    assert Bundle(moved / "ckpt-100").keys() == base.bundle.keys()
    module = checkpoint_module()
    tf.train.Checkpoint(module).read(str(moved / "ckpt-100")).assert_consumed()
    assert module.x.numpy().tolist() == [1, 5]
    assert module.state.numpy() == b"start"


def test_a_module_made_in_memory_becomes_a_checkpoint(tmp_path):
    module = checkpoint_module()
    base = from_module(module)
    module.x.assign([1.0, 5.0])
    average = {"x": np.float32([1, 4]), "state": np.array(b"start", object)}
    selections = {"x": Selection.from_flat((2,), [1])}
    certificate = export(base, selections, tmp_path / "tuned", current=average.__getitem__)
    assert certificate.variables[0].largest_change == 2
    restored = checkpoint_module()
    latest = tf.train.latest_checkpoint(tmp_path / "tuned")
    tf.train.Checkpoint(restored).read(latest).assert_consumed()
    assert restored.x.numpy().tolist() == [1, 4]
    assert module.x.numpy().tolist() == [1, 5]


def test_a_compiled_keras_model_is_written_though_its_optimizer_refers_to_the_weights(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
    model.compile("adam", "mse")
    model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    base = from_module(model)
    (kernel,) = (path for path in base.variables if path.endswith("kernel"))
    variable(base, kernel).assign([[5.0], [6.0]])
    export(base, {kernel: Selection.all((2, 1))}, tmp_path / "tuned")
    variable(base, kernel).assign([[0.0], [0.0]])
    tf.train.Checkpoint(model).read(str(tmp_path / "tuned" / "ckpt")).assert_consumed()
    assert variable(base, kernel).numpy().tolist() == [[5], [6]]


def test_a_tuned_variable_that_the_bases_files_do_not_hold_is_not_lost_in_silence(
    tuned_small, tmp_path
):
    base, selections = tuned_small
    base = dataclasses.replace(base, _keys={}, _snapshot={p: base.read(p) for p in base.variables})
    with pytest.raises(ValueError, match=r"no key for them, .* would be lost: kernel\. Freeze"):
        export(base, selections, tmp_path / "out" / "tuned")
    assert os.listdir(tmp_path / "out") == []


def test_a_target_that_exists_is_kept_unless_it_is_an_export_to_overwrite(tuned_small, tmp_path):
    base, selections = tuned_small
    target = tmp_path / "tuned"
    export(base, selections, target)
    (target / "left_over").touch()
    with pytest.raises(ValueError, match=r"`directory` \(.*tuned\) exists: choose another"):
        export(base, selections, target)
    variable(base, "kernel").assign([[8.0, 2.0], [3.5, 4.0]])
    export(base, selections, target, overwrite=True)
    assert variable(load(str(target)), "kernel").numpy()[0, 0] == 8
    assert not (target / "left_over").exists()

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"mine\) is no export .* delete it yourself"):
        export(base, selections, tmp_path / "mine", overwrite=True)
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("below", [".", "tuned", ".."])
def test_the_bases_own_folder_is_never_written_to(tuned_small, small_dir, below):
    base, selections = tuned_small
    before = files_below(small_dir)
    with pytest.raises(ValueError, match="overlaps with the base's folder"):
        export(base, selections, small_dir / below, overwrite=True)
    assert files_below(small_dir) == before


def test_only_local_folders_are_written_to(tuned_small):
    base, selections = tuned_small
    with pytest.raises(ValueError, match=r"`directory` \(gs://bucket/tuned\) is not in the local"):
        export(base, selections, "gs://bucket/tuned")


def test_a_failure_in_the_middle_leaves_nothing(tuned_small, tmp_path):
    base, selections = tuned_small
    calls = []

    def failing(path: str) -> np.ndarray:
        calls.append(path)
        if calls.count("kernel") == 3:
            raise OSError("the device is gone")
        return np.asarray(variable(base, path).numpy())

    with pytest.raises(OSError, match="the device is gone"):
        export(base, selections, tmp_path / "out" / "tuned", current=failing)
    assert os.listdir(tmp_path / "out") == []


def test_values_that_change_under_way_are_noticed_before_they_get_a_name(tuned_small, tmp_path):
    base, selections = tuned_small

    def training_goes_on(path: str) -> np.ndarray:
        value = variable(base, path)
        if path == "kernel":
            value.assign(value + tf.constant([[0, 1], [0, 0]], tf.bfloat16))
        return np.asarray(value.numpy())

    variable(base, "kernel").assign_sub(tf.constant([[0, 1], [0, 0]], tf.bfloat16))
    with pytest.raises(RuntimeError, match=r"do not hold what was meant, under the keys kernel/"):
        export(base, selections, tmp_path / "out" / "tuned", current=training_goes_on)
    assert os.listdir(tmp_path / "out") == []


def test_exporting_inside_a_tf_function_is_refused(tuned_small, tmp_path):
    base, selections = tuned_small
    with pytest.raises(RuntimeError, match="call it outside graphs"):
        tf.function(lambda: export(base, selections, tmp_path / "tuned"))()


KILLED_WHEN_WRITTEN = """
    import os, signal, sys
    from finetune.exporting import export
    from finetune.loading import load
    from finetune.selection import Selection
    base = load(sys.argv[1])
    base.variables["kernel"].variable.assign([[9.0, 2.0], [3.0, 4.0]])
    # All files lie there by the time they are flushed; only the name is missing.
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    export(base, {"kernel": Selection.from_flat((2, 2), [0])}, sys.argv[2], overwrite=True)
"""


def test_a_killed_export_leaves_the_earlier_one_or_nothing(tuned_small, small_dir, tmp_path):
    base, selections = tuned_small
    export(base, selections, tmp_path / "earlier")
    before = files_below(tmp_path / "earlier")
    for target in ("never", "earlier"):
        run = in_another_process(KILLED_WHEN_WRITTEN, small_dir, tmp_path / target)
        assert run.returncode == -signal.SIGKILL, run.stderr
        (hidden,) = tmp_path.glob(f".{target}.export-*")
        assert (hidden / "new" / "saved_model.pb").exists()
    assert not (tmp_path / "never").exists()
    assert files_below(tmp_path / "earlier") == before
    # What was left behind is in nobody's way.
    assert export(base, selections, tmp_path / "never").ok
