import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune.slots import build_with_slots, chain

SHARED = ["iteration", "learning_rate"]


def variables_named(*names: str) -> list[keras.Variable]:
    return [keras.Variable(tf.ones([3, 2]), name=name) for name in names]


OPTIMIZERS = {
    "SGD": (keras.optimizers.SGD, []),
    "SGD with momentum": (lambda: keras.optimizers.SGD(momentum=0.9), ["momentum"]),
    "Adam": (keras.optimizers.Adam, ["momentum", "velocity"]),
    "Adam with amsgrad": (
        lambda: keras.optimizers.Adam(amsgrad=True),
        ["momentum", "velocity", "velocity_hat"],
    ),
    "Adam with averages": (
        lambda: keras.optimizers.Adam(use_ema=True),
        ["average", "momentum", "velocity"],
    ),
    "Adam with accumulation": (
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
        ["gradient_accumulator", "momentum", "velocity"],
    ),
    "AdamW": (keras.optimizers.AdamW, ["momentum", "velocity"]),
    "Adamax": (keras.optimizers.Adamax, ["momentum", "norm"]),
    "Adagrad": (keras.optimizers.Adagrad, ["accumulator"]),
    "Adadelta": (keras.optimizers.Adadelta, ["accumulated_delta_var", "accumulated_grad"]),
    "RMSprop": (keras.optimizers.RMSprop, ["velocity"]),
    "Ftrl": (keras.optimizers.Ftrl, ["accumulator", "linear"]),
    "Lion": (keras.optimizers.Lion, ["momentum"]),
    "Lamb": (keras.optimizers.Lamb, ["momentum", "velocity"]),
    "Adafactor": (keras.optimizers.Adafactor, ["factor", "factor_1", "velocity"]),
    "Muon": (keras.optimizers.Muon, ["momentum"]),
    "ScheduleFreeAdamW": (keras.optimizers.ScheduleFreeAdamW, ["momentum", "velocity"]),
}


@pytest.mark.parametrize(("make", "names"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_slot_is_found_with_the_variable_it_belongs_to(make, names):
    # One name begins with the other, and Keras names slots by prefix.
    a, b = variables_named("a", "a_b")
    optimizer = make()

    slots = build_with_slots(optimizer, [a, b])

    assert [sorted(of_one) for of_one in slots.of_variable] == [names, names]
    assert sorted(slots.shared) == SHARED
    found = [*slots.shared.values(), *(s for d in slots.of_variable for s in d.values())]
    assert {id(slot) for slot in found} == {id(slot) for slot in optimizer.variables}


@pytest.mark.parametrize(("make", "names"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_gradient_of_one_variable_moves_only_slots_found_with_it(make, names):
    a, b = variables_named("a", "a_b")
    optimizer = make()
    slots_of_a, slots_of_b = build_with_slots(optimizer, [a, b]).of_variable
    values_of_a = {name: slot.numpy() for name, slot in slots_of_a.items()}
    values_of_b = {name: slot.numpy() for name, slot in slots_of_b.items()}

    optimizer.apply([tf.ones([3, 2])], [b])

    # Averages follow the variable, whether it has a gradient or not.
    still = {name: slot for name, slot in slots_of_a.items() if name != "average"}
    assert all(np.array_equal(values_of_a[n], slot.numpy()) for n, slot in still.items())
    moved = [n for n, slot in slots_of_b.items() if np.any(values_of_b[n] != slot.numpy())]
    assert bool(moved) == bool(names)


def test_what_all_variables_share_is_kept_apart():
    (v,) = variables_named("v")

    scaled = build_with_slots(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), [v])
    assert {"dynamic_scale", "step_counter", *SHARED} <= set(scaled.shared)
    assert scaled.of_variable == [{}]

    nadam = build_with_slots(keras.optimizers.Nadam(), variables_named("v", "w"))
    assert sorted(nadam.shared) == [*SHARED, "u_product"]
    assert [sorted(of_one) for of_one in nadam.of_variable] == [["momentum", "velocity"]] * 2


def test_a_schedule_leaves_no_learning_rate_variable():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)

    slots = build_with_slots(keras.optimizers.SGD(schedule), variables_named("v"))

    assert sorted(slots.shared) == ["iteration"]


@pytest.mark.parametrize(
    "names", [["iteration", "learning_rate"], ["dynamic", "step"], ["learning", "u"]]
)
def test_variables_called_like_shared_state_do_not_claim_it(names):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())

    slots = build_with_slots(optimizer, variables_named(*names))

    assert [sorted(of_one) for of_one in slots.of_variable] == [["momentum", "velocity"]] * 2
    assert slots.shared["dynamic_scale"] is optimizer.dynamic_scale
    assert slots.shared["step_counter"] is optimizer.step_counter


@pytest.mark.parametrize(
    "make_map",
    [
        lambda: keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(momentum=0.9), {"adam/.*": keras.optimizers.Adam()}
        ),
        lambda: (
            lambda variable: (
                keras.optimizers.Adam()
                if variable.path.startswith("adam/")
                else keras.optimizers.SGD(momentum=0.9)
            )
        ),
    ],
    ids=["map", "function"],
)
def test_several_optimizers_each_have_slots_for_their_own_variables(make_map):
    variables = variables_named("adam_w", "w", "adam_w_b")
    for variable, path in zip(variables, ("adam/w", "w", "adam/w_b"), strict=True):
        variable._path = path

    slots = build_with_slots(keras.optimizers.MultiOptimizer(make_map()), variables)

    adam, sgd = ["momentum", "velocity"], ["momentum"]
    assert [sorted(of_one) for of_one in slots.of_variable] == [adam, sgd, adam]


def test_paths_that_differ_in_a_slash_alone_each_have_their_slots():
    variables = variables_named("a_b", "a_b_1")
    for variable, path in zip(variables, ("a/b", "a_b"), strict=True):
        variable._path = path
    several = keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.Adam())

    slots = build_with_slots(several, variables)

    assert [sorted(of_one) for of_one in slots.of_variable] == [["momentum", "velocity"]] * 2


def test_matrices_and_vectors_have_the_slots_of_their_shape():
    matrix = keras.Variable(tf.ones([3, 2]), name="matrix")
    vector = keras.Variable(tf.ones([3]), name="vector")

    slots = build_with_slots(keras.optimizers.Adafactor(), [matrix, vector])

    # Of a matrix, Adafactor keeps row and column factors; of a vector, two scalars it never uses.
    assert [{n: tuple(s.shape) for n, s in d.items()} for d in slots.of_variable] == [
        {"factor": (3,), "factor_1": (2,), "velocity": (3, 2)},
        {"factor": (), "factor_1": (), "velocity": (3,)},
    ]


def test_slots_found_inside_a_graph_live_outside_of_it():
    (v,), optimizer = variables_named("v"), keras.optimizers.Adam()
    found = []

    @tf.function(autograph=False)
    def build():
        # TensorFlow traces a function twice when its first trace makes variables.
        if not found:
            found.append(build_with_slots(optimizer, [v]))

    build()
    assert found[0].of_variable[0]["momentum"].numpy().tolist() == [[0, 0]] * 3


def test_the_optimizer_is_left_as_it_was_even_when_its_build_fails():
    class Unbuildable(keras.optimizers.SGD):
        def build(self, variables):
            raise RuntimeError("no room for slots")

    good, bad = keras.optimizers.Adam(), Unbuildable()
    build_with_slots(good, variables_named("v"))
    with pytest.raises(RuntimeError, match="no room for slots"):
        build_with_slots(bad, variables_named("v"))

    for optimizer in (good, bad):
        assert "add_variable_from_reference" not in vars(optimizer)


def test_an_optimizer_of_no_variables_has_no_slots():
    assert build_with_slots(keras.optimizers.Adam(), []).of_variable == []


def test_a_chain_holds_every_optimizer_outermost_first():
    sgd, adam = keras.optimizers.SGD(), keras.optimizers.Adam()
    scaled = keras.optimizers.LossScaleOptimizer(adam)
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd, {"a": adam}))

    assert list(chain(sgd)) == [sgd]
    assert list(chain(scaled)) == [scaled, adam]
    assert [type(part).__name__ for part in chain(several)] == ["MultiOptimizer", "Adam", "SGD"]
