import gc
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune import loading
from finetune.bundle import digest

TABLE = "embedding/embeddings"
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def module_of(**values) -> tf.Module:
    module = tf.Module()
    for name, value in values.items():
        setattr(module, name, tf.Variable(value, name=name))
    return module


def ones() -> tf.Module:
    return module_of(w=[[1.0, 1.0]], b=[1.0])


def zeros() -> tf.Module:
    return module_of(w=[[0.0, 0.0]], b=[0.0])


def saved_ones(folder, name="ckpt") -> str:
    return tf.train.Checkpoint(ones()).write(os.path.join(folder, name))


def dense_model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])


def values(base) -> dict[str, list]:
    return {path: named.variable.numpy().tolist() for path, named in base.variables.items()}


ONES = {"w": [[1.0, 1.0]], "b": [1.0]}


# SavedModels.


@pytest.fixture(scope="module")
def spacer(quickspacer_dir):
    return loading.load(quickspacer_dir)


def test_a_real_saved_model_is_a_base_with_every_value_as_on_disk(spacer, quickspacer_dir):
    assert (spacer.format, spacer.directory) == ("saved_model", quickspacer_dir)
    assert list(spacer.variables) == [
        TABLE, "conv/kernel", "conv/bias", "dense/kernel", "dense/bias",
    ]  # fmt: skip
    for path, named in spacer.variables.items():
        assert spacer.key_of(path) == path + SUFFIX
        assert spacer.read(path).tobytes() == named.variable.numpy().tobytes()
        assert spacer.read(path).tobytes() == spacer.bundle.read(path + SUFFIX).tobytes()


def test_the_random_ops_of_a_saved_model_follow_seed_and_step(spacer):
    ids = tf.constant([[1, 2, 3, 4, 5, 6, 7, 8]])

    def at(seed, step):
        spacer.set_random_state(seed, step)
        return spacer.module(ids, True).numpy().tobytes()

    assert at(1, 2) == at(1, 2)
    assert len({at(1, 2), at(1, 3), at(2, 2)}) == 3


def test_the_function_to_call_can_be_chosen(quickspacer_dir):
    base = loading.load(quickspacer_dir, endpoint="model_inference")
    assert base.endpoint == "model_inference"


def test_the_base_stays_what_it_was_when_training_moves_the_module(quickspacer_dir):
    base = loading.load(quickspacer_dir)
    before, fingerprint = base.read("dense/bias"), base.fingerprint
    base.variables["dense/bias"].variable.assign([5.0])
    assert base.read("dense/bias").tobytes() == before.tobytes()
    assert base.fingerprint == fingerprint
    assert loading.load(quickspacer_dir).fingerprint == fingerprint


def test_a_signature_works_while_only_the_base_is_kept(quickspacer_dir):
    base = loading.load(quickspacer_dir)
    signature = base.module.signatures["model_inference"]
    gc.collect()
    assert signature(tokens=tf.constant([[1, 2]]))["output_0"].shape == (1, 2)


def test_copies_that_no_function_of_a_keras_export_reads_are_no_weights(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.export(str(tmp_path / "export"), verbose=False)
    base = loading.load(tmp_path / "export")
    x = tf.constant([[1.0, 2.0]])
    weights = {path: n.variable for path, n in base.variables.items() if n.trainable}
    assert len(base.variables) == 4
    assert len(weights) == 2
    with tf.GradientTape() as tape:
        y = base.module.serve(x)
    assert all(g is not None for g in tape.gradient(y, list(weights.values())))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dtype_policy": "mixed_bfloat16"}, r"`dtype_policy` \('mixed_bfloat16'\).*in its graph"),
        ({"module_fn": zeros}, r"`module_fn` is given, but .* is a SavedModel"),
        ({"endpoint": "serv"}, r"`endpoint` \('serv'\) is not offered by .*'model_inference'"),
    ],
)
def test_arguments_that_a_saved_model_cannot_follow_are_errors(quickspacer_dir, arguments, match):
    with pytest.raises(ValueError, match=match):
        loading.load(quickspacer_dir, **arguments)


# Where a checkpoint is.


def test_a_checkpoint_is_found_by_its_prefix_or_alone_in_its_folder(tmp_path):
    prefix = saved_ones(tmp_path)
    for source in (prefix, tmp_path, str(tmp_path) + "/"):
        base = loading.load(source, module_fn=zeros)
        assert values(base) == ONES
        assert (base.format, base.directory) == ("checkpoint", str(tmp_path).rstrip("/"))
        assert base.bundle.prefix == prefix


def test_the_latest_checkpoint_of_a_moved_folder_is_found_there(tmp_path):
    saved_ones(tmp_path, "ckpt-9")
    tf.train.Checkpoint(zeros()).write(str(tmp_path / "ckpt-10"))
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/another/machine/ckpt-9"\n')
    assert values(loading.load(tmp_path, module_fn=zeros)) == ONES


def test_a_folder_that_does_not_tell_its_latest_checkpoint_is_an_error(tmp_path):
    saved_ones(tmp_path, "a")
    saved_ones(tmp_path, "b")
    with pytest.raises(ValueError, match=r"holds several checkpoints .*: a, b. Give the prefix"):
        loading.load(tmp_path, module_fn=zeros)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "c"\n')
    with pytest.raises(ValueError, match=r"names c, which is not there. There is: a, b"):
        loading.load(tmp_path, module_fn=zeros)


def test_a_source_that_does_not_exist_is_an_error(tmp_path, quickspacer_dir):
    saved_ones(tmp_path, "ckpt-1")
    with pytest.raises(ValueError, match=r"`source` \(.*/ckpt-2\) does not exist.*ckpt-1.index"):
        loading.load(tmp_path / "ckpt-2", module_fn=zeros)
    with pytest.raises(ValueError, match=r"`source` \(/no/such\) does not exist.*: nothing"):
        loading.load("/no/such", module_fn=zeros)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"`source` \(.*/empty\) holds neither a SavedModel"):
        loading.load(tmp_path / "empty", module_fn=zeros)
    with pytest.raises(ValueError, match=r"There are SavedModels below it: 1, 2, 3."):
        loading.load(os.path.dirname(quickspacer_dir))


def test_a_truncated_checkpoint_is_an_error(tmp_path):
    data = saved_ones(tmp_path) + ".data-00000-of-00001"
    os.truncate(data, 4)
    with pytest.raises(ValueError, match="cut short"):
        loading.load(tmp_path, module_fn=zeros)


# What is in it.


def test_everything_that_does_not_match_is_in_one_error(tmp_path):
    saved = module_of(same=[1.0], shape=tf.ones([2, 3]), dtype=[1.0], only_saved=[1.0], kernel=1.0)
    prefix = tf.train.Checkpoint(saved).write(str(tmp_path / "ckpt"))

    def make():
        # As many elements, transposed: it must not be made to fit.
        return module_of(same=[0.0], shape=tf.zeros([3, 2]), dtype=[0], kernels=0.0)

    with pytest.raises(ValueError, match="does not fit the module: it has 3 of 4") as error:
        loading.load(prefix, module_fn=make)
    lines = str(error.value).splitlines()[1:-1]
    assert [line.strip() for line in lines] == [
        "kernels: missing in the checkpoint, nearest: kernel, only_saved",
        "only_saved: in the checkpoint, but not in the module",
        "kernel: in the checkpoint, but not in the module",
        "shape: shape (3, 2), in the checkpoint (2, 3)",
        "dtype: dtype int32, in the checkpoint float32",
    ]


def test_nothing_is_restored_when_something_does_not_match(tmp_path):
    prefix = saved_ones(tmp_path)
    made = []

    def make():
        made.append(module_of(w=[[0.0, 0.0]], b=[0.0, 0.0]))
        return made[0]

    with pytest.raises(ValueError, match=r"b: shape \(2,\), in the checkpoint \(1,\)"):
        loading.load(prefix, module_fn=make)
    assert made[0].w.numpy().tolist() == [[0.0, 0.0]]


def test_a_module_is_found_as_a_part_and_what_an_optimizer_keeps_may_be_left_over(tmp_path):
    model = dense_model()
    model.compile("adam", "mse")
    model.train_on_batch(tf.ones([2, 2]), tf.ones([2, 1]))
    whole = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=tf.Variable(7))
    base = loading.load(whole.save(str(tmp_path / "ckpt")), module_fn=dense_model)
    kernel, bias = model.get_layer(index=0).weights
    assert [n.variable.numpy().tolist() for n in base.variables.values() if n.trainable] == [
        kernel.numpy().tolist(),
        bias.numpy().tolist(),
    ]
    # The shortest way to the kernel leads through the optimizer; the checkpoint has it there.
    (path,) = (p for p in base.variables if p.endswith("kernel"))
    assert base.key_of(path) == "optimizer/_trainable_variables/0" + SUFFIX
    assert base.read(path).tolist() == kernel.numpy().tolist()


def test_the_seed_of_a_keras_dropout_is_in_no_checkpoint_and_stays_as_it_was_made(tmp_path):
    prefix = tf.train.Checkpoint(dense_model()).write(str(tmp_path / "ckpt"))
    base = loading.load(prefix, module_fn=dense_model)
    (path,) = (p for p in base.variables if p.endswith("seed_generator/state"))
    assert base.read(path).tolist() == base.variables[path].variable.numpy().tolist()
    with pytest.raises(ValueError, match=rf"`path` \({path}\) is a variable whose value is not in"):
        base.key_of(path)


def test_two_parts_that_both_fit_are_an_error(tmp_path):
    both = tf.train.Checkpoint(teacher=ones(), student=ones())
    with pytest.raises(ValueError, match=r"several objects .*: \['student', 'teacher'\]"):
        loading.load(both.write(str(tmp_path / "ckpt")), module_fn=zeros)


def test_a_name_based_checkpoint_is_restored_by_the_names_of_variables(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in (("scope/w", [[1.0, 1.0]]), ("scope/b", [1.0])):
            tf.compat.v1.get_variable(name, initializer=tf.constant(value))
        tf.compat.v1.train.create_global_step()
        session.run(tf.compat.v1.global_variables_initializer())
        prefix = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))

    def make():
        module = tf.Module()
        module.layer = tf.Module()
        module.layer.weight = tf.Variable([[0.0, 0.0]], name="scope/w")
        module.layer.bias = tf.Variable([0.0], name="scope/b")
        return module

    for source in (prefix, tmp_path):
        base = loading.load(source, module_fn=make)
        assert values(base) == {"layer/weight": [[1.0, 1.0]], "layer/bias": [1.0]}
        assert base.key_of("layer/weight") == "scope/w"


def test_a_dictionary_key_with_a_slash_or_a_dot_is_restored(tmp_path):
    def make(value=0.0):
        module = tf.Module()
        module.parts = {"a/b": tf.Variable(value), "c.d": tf.Variable(value)}
        return module

    base = loading.load(tf.train.Checkpoint(make(1.0)).write(f"{tmp_path}/ckpt"), module_fn=make)
    assert values(base) == {"parts/a.Sb": 1.0, "parts/c..d": 1.0}


def test_a_checkpoint_needs_a_function_that_makes_a_module_with_variables(tmp_path):
    prefix = saved_ones(tmp_path)
    with pytest.raises(ValueError, match=r"`module_fn` is missing: .*ckpt\) is a checkpoint"):
        loading.load(prefix)
    with pytest.raises(ValueError, match=r"what `module_fn` returned has no variables \(Module\)"):
        loading.load(prefix, module_fn=tf.Module)


def test_a_dtype_policy_holds_while_the_module_is_made_and_no_longer(tmp_path):
    prefix = tf.train.Checkpoint(dense_model()).write(str(tmp_path / "ckpt"))
    base = loading.load(prefix, module_fn=dense_model, dtype_policy="mixed_bfloat16")
    assert base.module(tf.ones([1, 2])).dtype == tf.bfloat16
    assert {n.dtype for n in base.variables.values() if n.trainable} == {tf.float32}
    assert keras.config.dtype_policy().name == "float32"

    def broken():
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        loading.load(prefix, module_fn=broken, dtype_policy="mixed_bfloat16")
    assert keras.config.dtype_policy().name == "float32"


def test_a_base_made_under_a_strategy_is_distributed_and_reads_the_same(tmp_path):
    prefix = saved_ones(tmp_path)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        base = loading.load(prefix, module_fn=zeros)
        alone = loading.from_module(ones())
    assert isinstance(base.variables["w"].variable, tf.distribute.DistributedValues)
    assert values(base) == ONES
    assert base.fingerprint == alone.fingerprint == loading.from_module(ones()).fingerprint


# Modules in memory, and every base.


def test_a_base_of_a_module_keeps_the_values_that_it_had():
    module = ones()
    base = loading.from_module(module)
    module.b.assign([9.0])
    base.read("b")[0] = 8.0
    assert base.read("b").tolist() == [1.0]
    assert base.digests == {"w": digest(np.float32([[1, 1]])), "b": digest(np.float32([1]))}
    assert (base.format, base.directory, base.bundle) == ("module", None, None)
    with pytest.raises(ValueError, match=r"`path` \(b\) is a variable whose value is not in any"):
        base.key_of("b")


def test_edits_are_the_base_from_then_on(tmp_path):
    base = loading.load(saved_ones(tmp_path), module_fn=zeros)
    before = base.fingerprint
    edited = base.edited({"w": np.float32([[1, 0]])})
    assert values(edited)["w"] == edited.read("w").tolist() == [[1.0, 0.0]]
    assert edited.fingerprint == loading.from_module(edited.module).fingerprint != before
    assert list(edited.edits) == ["w"]
    assert base.read("w").tolist() == [[1.0, 1.0]]
    assert edited.edited({"b": np.float32([2])}).read("w").tolist() == [[1.0, 0.0]]


def test_edits_that_do_not_fit_are_in_one_error():
    wrong = {"v": np.float32([1]), "w": np.float32([1, 2]), "b": np.float64([1])}
    match = re.escape("w: float32 (2,), must be float32 (1, 2)\n  b: float64 (1,), must be")
    with pytest.raises(ValueError, match=r"(?s)v: no such variable, nearest.*" + match):
        loading.from_module(ones()).edited(wrong)


def test_selectors_are_told_every_name_and_the_base_value():
    module = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(name="norm")])
    specs = loading.from_module(module).specs()
    assert {path.rsplit("/", 1)[-1] for path, s in specs.items() if not s.trainable} == {
        "moving_mean",
        "moving_variance",
    }
    (gamma,) = (spec for path, spec in specs.items() if path.endswith("gamma"))
    assert (gamma.shape, gamma.dtype, gamma.read().tolist()) == ((2,), "float32", [1.0, 1.0])
    assert gamma.names[0] == gamma.path
    assert gamma.names[1].endswith("norm/gamma")


def test_a_path_that_does_not_exist_is_an_error_that_names_the_nearest():
    base = loading.from_module(module_of(kernel=1.0, bias=1.0))
    with pytest.raises(ValueError, match=r"`path` \(kernels\) is no variable .* \['kernel'"):
        base.read("kernels")


def test_a_module_without_variables_is_an_error():
    with pytest.raises(ValueError, match=r"`module` has no variables \(Module\)"):
        loading.from_module(tf.Module())


def test_a_keras_file_is_said_to_be_loaded_by_keras(tmp_path):
    for name in ("own.keras", "own.weights.h5"):
        with pytest.raises(ValueError, match=r"is a Keras file: .*from_module\(keras.models.load"):
            loading.load(tmp_path / name)


def test_a_model_in_memory_is_no_source():
    with pytest.raises(ValueError, match=r"`source` \(Module\) must be a path; .*from_module"):
        loading.load(tf.Module())


def test_a_base_prints_on_one_line():
    module = tf.Module()
    module.w = tf.Variable([1.0])

    assert repr(loading.from_module(module)) == "<Base: module, 1 variables>"
