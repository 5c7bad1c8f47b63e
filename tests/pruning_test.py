import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune.loading import from_module, load
from finetune.pruning import prune
from finetune.selectors import elements, everything, nothing, smallest, zeros


def module(**values) -> tf.Module:
    made = tf.Module()
    for name, value in values.items():
        setattr(made, name, tf.Variable(value))
    return made


def test_selected_elements_become_zero_and_all_others_keep_their_bits():
    odd = np.array([0x7FC00123, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    made = module(w=np.append(odd, np.float32(5)))
    prune(from_module(made), [("w", elements([3]))])
    assert made.w.numpy().view(np.uint32).tolist() == [0x7FC00123, 0x80000000, 1, 0]


def test_bfloat16_keeps_its_bits_too():
    bits = np.array([0x7FC1, 0x8000, 0x3F80], np.uint16)
    made = module(w=bits.view(tf.bfloat16.as_numpy_dtype))
    prune(from_module(made), [("w", elements([2]))])
    assert made.w.numpy().view(np.uint16).tolist() == [0x7FC1, 0x8000, 0]


def test_a_negative_element_becomes_a_positive_zero():
    made = module(w=[-1.0, 2.0])
    prune(from_module(made), [("w", smallest(count=1))])
    assert made.w.numpy().view(np.uint32)[0] == 0


def test_the_pruned_values_are_the_base_from_then_on():
    whole = from_module(module(w=[3.0, -1.0, 2.0], b=[1.0]))
    before = whole.fingerprint
    pruned = prune(whole, [("w", smallest(share=0.34)), ("b", nothing())])
    assert pruned.read("w").tolist() == [3.0, 0.0, 2.0]
    assert set(pruned.edits) == {"w"}
    assert pruned.fingerprint != before == whole.fingerprint


def test_a_scalar_can_be_pruned():
    made = module(w=2.0)
    prune(from_module(made), [("w", everything())])
    assert float(made.w) == 0.0


def test_pruning_twice_adds_up():
    made = module(w=[4.0, 1.0, 2.0, 3.0])
    once = prune(from_module(made), [("w", smallest(count=1))])
    twice = prune(once, [("w", smallest(count=2))])
    assert made.w.numpy().tolist() == [4.0, 0.0, 0.0, 3.0]
    assert twice.read("w").tolist() == [4.0, 0.0, 0.0, 3.0]


def test_state_is_never_pruned():
    model = keras.Sequential([keras.Input([2]), keras.layers.BatchNormalization()])
    base = from_module(model)
    prune(base, [(".*", everything())])
    assert model.layers[0].moving_variance.numpy().tolist() == [1.0, 1.0]
    assert model.layers[0].gamma.numpy().tolist() == [0.0, 0.0]


def test_rules_that_do_not_fit_leave_the_base_as_it_is():
    made = module(w=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"pattern `v` matches no variable .*nearest"):
        prune(from_module(made), [("w", everything()), ("v", everything())])
    with pytest.raises(ValueError, match=r"nothing is trainable: the rules .* select none"):
        prune(from_module(made), [("w", zeros())])
    assert made.w.numpy().tolist() == [1.0, 2.0]


def test_the_real_model_has_80_percent_zeros_in_its_kernels(quickspacer_dir):
    kernels = "embedding/embeddings|conv/kernel|dense/kernel"
    whole = load(quickspacer_dir)
    pruned = prune(whole, [(kernels, smallest(share=0.8)), (".*", nothing())])
    for path, named in pruned.variables.items():
        value = named.variable.numpy()
        kept = value != 0
        if path.endswith("bias"):
            assert value.tobytes() == whole.read(path).tobytes()
        else:
            assert np.count_nonzero(~kept) == round(0.8 * value.size)
            assert value[kept].tobytes() == whole.read(path)[kept].tobytes()
            assert np.abs(value[kept]).min() >= np.abs(whole.read(path)[~kept]).max()
