import os

import keras
import pytest
import tensorflow as tf

from finetune import paths

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def checkpoint_paths(module, folder) -> set[str]:
    prefix = tf.train.Checkpoint(module).write(os.path.join(folder, "keys"))
    keys = (key for key, _ in tf.train.list_variables(prefix))
    return {key.removesuffix(SUFFIX) for key in keys if key.endswith(SUFFIX)}


def plain_module() -> tf.Module:
    module = tf.Module()
    module.weights = {"a/b": tf.Variable(1.0, name="w"), "c.d": tf.Variable(2.0, name="w")}
    module.layers = [tf.Variable(3.0, name="w"), (tf.Variable(4.0, name="only"),)]
    module.tied = module.weights["a/b"]
    module.deep = tf.Module()
    module.deep.count = tf.Variable(0, name="count")
    module.deep.mean = tf.Variable([0.0, 0.0], trainable=False, name="mean")
    return module


def keras_model() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="d"), keras.layers.BatchNormalization()]
    )
    model.compile("adam", "mse")
    model.train_on_batch(tf.zeros([2, 4]), tf.zeros([2, 3]))
    return model


def test_paths_are_the_keys_of_a_checkpoint(tmp_path):
    module = plain_module()
    assert set(paths.named_variables(module)) == checkpoint_paths(module, tmp_path)


def test_paths_of_a_loaded_saved_model_are_the_keys_of_its_bundle(quickspacer_dir, tmp_path):
    module = tf.saved_model.load(quickspacer_dir)
    keys = {key for key, _ in tf.train.list_variables(f"{quickspacer_dir}/variables/variables")}
    named = paths.named_variables(module)
    assert {path + SUFFIX for path in named} == keys - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    assert set(named) == checkpoint_paths(module, tmp_path)


def test_paths_of_a_keras_model_are_the_keys_of_a_checkpoint_and_the_seeds_it_leaves_out(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    named = paths.named_variables(model)
    seeds = set(named) - checkpoint_paths(model, tmp_path)
    assert seeds == {"_functional/_operations/2/seed_generator/state"}
    assert len(named) == len(model.variables)
    assert not any(named[path].trainable for path in seeds)


def test_the_object_graph_is_walked_breadth_first():
    assert list(paths.named_variables(plain_module())) == [
        "tied",
        "weights/c..d",
        "layers/0",
        "deep/count",
        "deep/mean",
        "layers/1/0",
    ]


def test_a_tied_variable_is_one_variable_with_its_other_paths_as_aliases():
    named = paths.named_variables(plain_module())["tied"]
    assert named.aliases == ("weights/a.Sb", "weights/a/b")
    assert float(named.variable) == 1.0


def test_the_variables_of_a_shared_submodule_have_aliases_through_both_owners():
    module = tf.Module()
    module.a, module.b = tf.Module(), tf.Module()
    module.a.cell = module.b.cell = tf.Module()
    module.a.cell.w = tf.Variable(0.0)
    module.a.owner = module  # A cycle adds no path.
    (named,) = paths.named_variables(module).values()
    assert named.path == "a/cell/w"
    assert named.aliases == ("Variable", "b/cell/w")


def test_a_name_carried_by_two_variables_is_no_alias():
    named = paths.named_variables(plain_module())
    assert not any("w" in n.aliases for n in named.values())
    assert named["layers/1/0"].aliases == ("only",)


def test_a_path_is_never_the_alias_of_another_variable():
    module = tf.Module()
    module.a = tf.Variable(1.0, name="b")
    module.b = tf.Variable(2.0, name="c")
    named = paths.named_variables(module)
    assert named["a"].aliases == ()
    assert named["b"].aliases == ("c",)


def test_state_is_told_from_weights():
    state = {p for p, n in paths.named_variables(plain_module()).items() if not n.trainable}
    assert state == {"deep/count", "deep/mean"}
    state = {p for p, n in paths.named_variables(keras_model()).items() if not n.trainable}
    assert {p.rsplit("/", 1)[-1] for p in state} == {"moving_mean", "moving_variance"}


def test_a_keras_variable_and_its_value_are_one_variable():
    module = tf.Module()
    module.k = keras.Variable([1.0, 2.0], name="kv")
    module.v = module.k.value
    (named,) = paths.named_variables(module).values()
    assert named.variable is module.v
    assert (named.path, named.aliases) == ("k", ("kv", "v"))
    assert (named.shape, named.dtype, named.size) == ((2,), tf.float32, 2)


def test_a_keras_variable_can_be_asked_for_by_its_keras_path():
    model = keras_model()
    aliases = {alias for named in paths.named_variables(model).values() for alias in named.aliases}
    assert {variable.path for variable in model.variables} <= aliases


def test_what_belongs_to_an_optimizer_is_left_out_and_weights_are_named_through_the_model(tmp_path):
    model = keras_model()
    named = paths.named_variables(model)
    assert len(named) == len(model.variables)
    assert not any(path.startswith("optimizer") for path in named)
    kernel = model.get_layer("d").kernel.value
    (entry,) = (n for n in named.values() if n.variable is kernel)
    assert "optimizer/_trainable_variables/0" in entry.aliases

    tf.saved_model.save(model, str(tmp_path / "saved"))
    loaded = paths.named_variables(tf.saved_model.load(str(tmp_path / "saved")))
    assert len(loaded) == len(model.variables)
    assert not any(path.startswith("optimizer") for path in loaded)


def test_a_mirrored_variable_is_returned_as_it_is():
    module = tf.Module()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        module.w = tf.Variable([1.0])
    assert paths.named_variables(module)["w"].variable is module.w


def test_an_object_without_variables_gives_an_empty_result():
    assert paths.named_variables(tf.Module()) == {}


def test_something_that_is_no_module_is_an_error():
    with pytest.raises(ValueError, match=r"`module` \(3\) is not an object whose variables"):
        paths.named_variables(3)


def test_the_nearest_names_come_first():
    names = ["conv/kernel", "embedding/embeddings", "conv/bias"]
    assert paths.nearest("conv/kernle", names, n=2) == ["conv/kernel", "conv/bias"]


def test_a_keras_variable_that_has_no_variable_behind_it_yet_is_an_error():
    module = tf.Module()
    module.layer = tf.Module()
    with keras.StatelessScope():
        module.layer.w = keras.Variable("zeros", shape=(2,), name="w")
        with pytest.raises(ValueError, match=r"`module` \(a Module\) holds .* 'layer/w', that has"):
            paths.named_variables(module)
    assert list(paths.named_variables(module)) == ["layer/w"]
