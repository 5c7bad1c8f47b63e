import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune import calling

IDS = tf.constant([[1, 2, 3, 4]])


class Plain(tf.Module):
    def __call__(self, x):
        return x + 1


class Moded(tf.Module):
    """Returns whether it was called in training, as 1 or 0."""

    @tf.function
    def __call__(self, x, training=False):
        return x * (1.0 if training else 0.0)


class Several(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name) for name in "ab"])
    def __call__(self, a, b):
        return a - b

    @tf.function(input_signature=[{name: tf.TensorSpec([None], tf.float32, name) for name in "ab"}])
    def of_dict(self, pair):
        return {"difference": pair["a"] - pair["b"], "sum": pair["a"] + pair["b"]}


class SignaturesOnly(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, "x")])
    def _one(self, x):
        return {"y": self.w * x}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, n) for n in ("x", "bias")])
    def _two(self, x, bias):
        return {"y": self.w * x + bias, "bias": bias}


A, B = tf.constant([5.0]), tf.constant([3.0])


def reload(module, folder, **signatures):
    tf.saved_model.save(module, str(folder), signatures=signatures or None)
    return tf.saved_model.load(str(folder))


@pytest.fixture(scope="module")
def spacer(quickspacer_dir):
    return tf.saved_model.load(quickspacer_dir)


def number(x) -> float:
    return float(tf.squeeze(x))


def test_a_loaded_model_gets_training_and_its_dropout_is_live(spacer):
    live = [calling.call(spacer, IDS, training=True) for _ in range(2)]
    still = [calling.call(spacer, IDS, training=False) for _ in range(2)]
    assert np.any(live[0] != live[1])
    assert np.all(still[0] == still[1])
    assert np.all(still[0] == spacer(IDS, False))


def test_an_endpoint_of_a_loaded_model_is_called_by_name(spacer):
    probabilities = calling.call(spacer, IDS, training=False, endpoint="model_inference")
    assert np.all(probabilities == spacer(IDS, False))
    spaced = calling.call(spacer, ["무엇"], training=False, endpoint="serving_default")
    assert spaced.numpy()[0].decode() == "무엇"


@pytest.mark.parametrize("loaded", [False, True])
def test_a_function_is_given_training_if_it_takes_it(loaded, tmp_path):
    module = Moded()
    for training in (True, False):
        module(A, training=training)
    if loaded:
        module = reload(module, tmp_path / "saved")
    assert number(calling.call(module, A, training=True)) == 5
    assert number(calling.call(module, A, training=False)) == 0


def test_a_function_that_does_not_take_training_is_called_without():
    assert number(calling.call(Plain(), A, training=True)) == 6
    assert number(calling.call(lambda x: x + 1, A, training=True)) == 6


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("inputs", [(A, B), [A, B], {"b": B, "a": A}])
def test_several_inputs_go_to_the_parameters_of_a_function(loaded, inputs, tmp_path):
    module = reload(Several(), tmp_path / "saved") if loaded else Several()
    assert number(calling.call(module, inputs, training=True)) == 2


@pytest.mark.parametrize("loaded", [False, True])
def test_a_dict_is_one_argument_where_no_parameters_carry_its_names(loaded, tmp_path):
    module = reload(Several(), tmp_path / "saved") if loaded else Several()
    outputs = calling.call(module, {"a": A, "b": B}, training=True, endpoint="of_dict")
    assert {name: number(y) for name, y in outputs.items()} == {"difference": 2, "sum": 8}


def test_keras_models_and_layers_get_training_and_inputs_of_any_structure():
    dropout = keras.layers.Dropout(0.5)
    assert np.any(calling.call(dropout, tf.ones([100]), training=True) == 0)
    assert np.all(calling.call(dropout, tf.ones([100]), training=False) == 1)

    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    by_name, by_place = keras.Model({"a": a, "b": b}, a - b), keras.Model([a, b], a - b)
    x, y = tf.constant([[5.0]]), tf.constant([[3.0]])
    assert number(calling.call(by_name, {"b": y, "a": x}, training=True)) == 2
    assert number(calling.call(by_place, [x, y], training=True)) == 2

    class Difference(keras.layers.Layer):
        def call(self, a, b):
            return a - b

    assert number(calling.call(Difference(), (x, y), training=True)) == 2


def test_a_keras_export_is_called_by_its_serve_function(tmp_path):
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    keras.Model({"a": a, "b": b}, a - b).export(str(tmp_path / "saved"), verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    inputs = {"a": tf.constant([[5.0]]), "b": tf.constant([[3.0]])}
    assert number(calling.call(loaded, inputs, training=True)) == 2


def test_a_model_with_signatures_only_is_called_and_differentiated(tmp_path):
    module = SignaturesOnly()
    loaded = reload(module, tmp_path / "saved", only=module._one)
    assert list(calling.endpoints(loaded)) == ["only"]
    with tf.GradientTape() as tape:
        y = calling.call(loaded, [5.0], training=True)
    assert number(y) == 10
    assert number(tape.gradient(y, loaded.w)) == 5
    assert number(calling.call(loaded, {"x": A}, training=True)) == 10


def test_a_signature_with_several_outputs_gives_them_by_name(tmp_path):
    module = SignaturesOnly()
    loaded = reload(module, tmp_path / "saved", serving_default=module._two, other=module._one)
    outputs = calling.call(loaded, {"x": A, "bias": B}, training=False)
    assert {name: number(y) for name, y in outputs.items()} == {"y": 13, "bias": 3}


def test_a_call_inside_a_function_is_traced_once(spacer):
    traces = []

    @tf.function
    def step(ids):
        traces.append(1)
        return calling.call(spacer, ids, training=True)

    for _ in range(3):
        step(IDS)
    assert len(traces) == 1


def test_endpoints_show_what_each_takes(spacer):
    assert calling.endpoints(spacer) == {
        "serving_default": "(texts=string[None])",
        "model_inference": "(tokens=int32[None, None])",
        "__call__": "(inputs=int32[None, None], training=False) | "
        "(inputs=int32[None, None], training=True)",
        "call_and_return_all_conditional_losses": "(inputs=int32[None, None], training=False) | "
        "(inputs=int32[None, None], training=True)",
    }
    assert calling.endpoints(Moded()) == {"__call__": "(x, training=False)"}


def test_an_unknown_endpoint_is_an_error_that_lists_what_there_is(spacer):
    with pytest.raises(ValueError, match=r"`endpoint` \('model_inferenc'\).*there are: \n  model_"):
        calling.call(spacer, IDS, training=True, endpoint="model_inferenc")


def test_inputs_that_fit_no_variant_are_an_error_that_lists_the_variants(spacer):
    match = (
        r"`inputs`, given to '__call__' as \(int64\[1, 4\]\), {'training': True}, fit none of its "
        r"variants: \(inputs=int32\[None, None\], training=False\) \|"
    )
    with pytest.raises(ValueError, match=match):
        calling.call(spacer, tf.cast(IDS, tf.int64), training=True)


@pytest.mark.parametrize(
    "inputs", [{"tokens": tf.zeros([1])}, {"token": IDS}, (IDS, IDS), tf.constant("x")]
)
def test_inputs_that_do_not_fit_a_signature_are_an_error_that_shows_it(spacer, inputs):
    match = r"`inputs` \(.*\) do not fit .*'model_inference', which takes \(tokens=int32\[None, N"
    with pytest.raises(ValueError, match=match):
        calling.call(spacer, inputs, training=True, endpoint="model_inference")


def test_a_choice_between_signatures_is_left_to_the_caller(tmp_path):
    module = SignaturesOnly()
    loaded = reload(module, tmp_path / "saved", one=module._one, two=module._two)
    with pytest.raises(ValueError, match=r"has no call.*`endpoint`: \n  one\(x=float32\[None\]\)"):
        calling.call(loaded, A, training=True)
    with pytest.raises(ValueError, match=r"`module` \(Module\) has no call.*: nothing"):
        calling.call(tf.Module(), A, training=True)
