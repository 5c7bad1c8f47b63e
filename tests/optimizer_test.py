import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

from finetune.optimizer import MaskedOptimizer
from finetune.selectors import (
    elements,
    everything,
    largest,
    nothing,
    rows,
    zeros,
)

CORNERS = np.array([[True, False], [False, True]])
ONES = tf.ones([2, 2])
KERNELS = [(".*kernel", largest(share=0.25)), (".*", nothing())]


def square() -> tf.Variable:
    return tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="x")


def masked(inner: Any, trainable: Any = CORNERS, **options: Any) -> MaskedOptimizer:
    return MaskedOptimizer(inner, [(".*", trainable)], **options)


def values(variable: Any) -> list:
    return variable.numpy().tolist()


def small_model(**dense: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4, name="first", **dense),
            keras.layers.Dense(2, name="last"),
        ]
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal([16, 3]).astype(np.float32)
    return x, x[:, :2]


def fit(model: keras.Model, epochs: int = 2, **options: Any) -> None:
    x, y = data()
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


def weights(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def assert_equal_bits(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.tobytes() == other.tobytes()


def test_only_selected_elements_move():
    x = square()
    masked(optimizers.SGD(0.5)).apply([ONES], [x])
    assert values(x) == [[0.5, 2.0], [3.0, 3.5]]


@pytest.mark.parametrize("built", [False, True])
def test_a_function_may_build_the_optimizer_and_is_not_traced_again(built):
    x = square()
    optimizer = masked(optimizers.Adam(0.5))
    if built:
        optimizer.build([x])

    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [x])

    for factor in (1.0, 2.0, 3.0):
        step(ONES * factor)
    # TensorFlow itself traces a function that makes variables a second time.
    assert step.experimental_get_tracing_count() == (1 if built else 2)
    assert int(optimizer.iterations) == 3
    assert [values(x)[0][1], values(x)[1][0]] == [2.0, 3.0]
    assert values(x)[0][0] < 0


@pytest.mark.parametrize("mode", ["packed", "dense"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_step_runs_inside_a_while_loop(mode, jit_compile):
    x = square()
    optimizer = masked(optimizers.SGD(0.5), mode=mode)
    optimizer.build([x])

    @tf.function(jit_compile=jit_compile, autograph=False)
    def steps(count):
        def body(number):
            optimizer.apply([ONES], [x])
            return [number + 1]

        return tf.while_loop(lambda number: number < count, body, [0])

    steps(tf.constant(4))
    assert values(x) == [[-1.0, 2.0], [3.0, 2.0]]


def test_variables_are_named_by_their_paths_in_a_module():
    module = tf.Module()
    module.layers = [tf.Variable([1.0, 1.0], name="w"), tf.Variable([1.0, 1.0], name="w")]
    optimizer = MaskedOptimizer(
        optimizers.SGD(1.0), [("layers/1", elements([0])), ("layers/0", nothing())], module=module
    )
    optimizer.apply([tf.ones(2), tf.ones(2)], module.layers)
    assert [values(v) for v in module.layers] == [[1.0, 1.0], [0.0, 1.0]]
    assert list(optimizer.coverage.selections) == ["layers/0", "layers/1"]


def test_without_a_module_variables_of_the_same_name_are_numbered():
    first, second = tf.Variable([1.0, 1.0], name="w"), tf.Variable([1.0, 1.0], name="w")
    optimizer = MaskedOptimizer(optimizers.SGD(1.0), [("w_1", elements([0])), ("w", nothing())])
    optimizer.apply([tf.ones(2), tf.ones(2)], [first, second])
    assert (values(first), values(second)) == ([1.0, 1.0], [0.0, 1.0])


def test_a_rule_may_name_the_variable_itself():
    first, second = tf.Variable([1.0, 1.0], name="w"), tf.Variable([1.0, 1.0], name="w")
    optimizer = MaskedOptimizer(optimizers.SGD(1.0), [(second, elements([0])), (first, nothing())])
    optimizer.apply([tf.ones(2), tf.ones(2)], [first, second])
    assert (values(first), values(second)) == ([1.0, 1.0], [0.0, 1.0])


def test_rules_by_path_must_name_every_variable():
    x, y = square(), tf.Variable([1.0], name="y")
    optimizer = MaskedOptimizer(optimizers.SGD(1.0), {"x": CORNERS, "z": everything()})
    with pytest.raises(ValueError, match=r"unknown \['z'\], missing \['y'\]"):
        optimizer.build([x, y])


def test_rules_that_fit_no_variable_fail_in_each_try_to_build():
    optimizer = MaskedOptimizer(optimizers.SGD(1.0), [("kernel", everything())])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"pattern `kernel` matches no variable.*`x`"):
            optimizer.build([square()])
    assert not optimizer.built


def test_what_replicas_exchange_is_the_trainable_elements_alone():
    x = square()
    optimizer = masked(optimizers.SGD(1.0), mode="packed")
    optimizer.build([x])
    (packed,) = optimizer.pack([tf.constant([[1.0, np.nan], [np.inf, 2.0]])])
    assert values(packed) == [1.0, 2.0]
    optimizer.update([packed * 2])
    assert values(x) == [[-1.0, 2.0], [3.0, 0.0]]


def test_update_goes_on_from_its_own_values_until_pull_takes_what_others_wrote():
    x = square()
    optimizer = masked(optimizers.SGD(1.0), mode="packed")
    optimizer.build([x])
    x.assign([[10.0, 20.0], [30.0, 40.0]])
    optimizer.update(optimizer.pack([ONES]))
    assert values(x) == [[0.0, 20.0], [30.0, 3.0]]
    x.assign([[10.0, 20.0], [30.0, 40.0]])
    optimizer.pull()
    optimizer.update(optimizer.pack([ONES]))
    assert values(x) == [[9.0, 20.0], [30.0, 39.0]]


@pytest.mark.parametrize("mode", ["packed", "dense"])
def test_apply_keeps_what_others_wrote_between_steps(mode):
    x = square()
    optimizer = masked(optimizers.SGD(1.0), mode=mode)
    optimizer.apply([ONES], [x])
    x.assign([[10.0, 20.0], [30.0, 40.0]])
    optimizer.apply([ONES], [x])
    assert values(x) == [[9.0, 20.0], [30.0, 39.0]]


def test_variables_come_in_any_order_and_number_after_the_first_step():
    x, y, z = square(), tf.Variable([1.0, 1.0], name="y"), tf.Variable([1.0], name="z")
    optimizer = MaskedOptimizer(
        optimizers.SGD(1.0), [("x", CORNERS), ("y", elements([0])), ("z", nothing())]
    )
    optimizer.apply([ONES, tf.ones(2), tf.ones(1)], [x, y, z])
    optimizer.apply([tf.ones(2) * 2, ONES], [y, x])
    optimizer.apply([tf.ones(2) * 4], [y])
    assert values(x) == [[-1.0, 2.0], [3.0, 2.0]]
    assert values(y) == [-6.0, 1.0]
    assert values(z) == [1.0]


def test_a_variable_without_a_gradient_stays():
    x, y = square(), tf.Variable([1.0, 1.0], name="y")
    optimizer = masked(optimizers.SGD(1.0), everything())
    optimizer.build([x, y])
    optimizer.apply([None, tf.ones(2)])
    assert (values(x), values(y)) == ([[1.0, 2.0], [3.0, 4.0]], [0.0, 0.0])


def test_slots_take_room_for_trainable_elements_only():
    table = tf.Variable(tf.zeros([1000, 8]), name="table")
    optimizer = masked(optimizers.Adam(), rows([1, 5]))
    optimizer.build([table])
    assert {n: tuple(s.shape) for n, s in optimizer.slots["table"].items()} == {
        "momentum": (2, 8), "velocity": (2, 8)
    }  # fmt: skip
    assert sorted(optimizer.shared_slots) == ["iteration", "learning_rate"]
    assert sum(int(np.prod(variable.shape)) for variable in optimizer.variables) == 2 * 16 + 2


class Adam(optimizers.SGD):
    """Somebody's own optimizer that carries a known name."""


@pytest.mark.parametrize(
    ("inner", "trainable", "mode"),
    [
        (optimizers.Adam(), np.ones([4, 4], np.bool_), "whole"),
        (optimizers.Adam(), elements([[0, 0], [1, 1]]), "packed"),
        (optimizers.Adam(), ~elements([[0, 0], [1, 1]]), "dense"),
        (optimizers.Adam(), rows([0]), "packed"),
        (optimizers.Adam(), rows([0, 1]), "dense"),
        (optimizers.LossScaleOptimizer(optimizers.Adam()), rows([0]), "packed"),
        (optimizers.Lamb(), rows([0]), "dense"),
        (optimizers.LossScaleOptimizer(optimizers.Lamb()), rows([0]), "dense"),
        (
            optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam())),
            rows([0]),
            "packed",
        ),
        (
            optimizers.MultiOptimizer(
                optimizers.OptimizerMap(optimizers.Adam(), {"x": optimizers.Muon()})
            ),
            rows([0]),
            "dense",
        ),
        (optimizers.MultiOptimizer(lambda variable: optimizers.Adam()), rows([0]), "dense"),
        (Adam(), rows([0]), "dense"),
    ],
    ids=lambda value: (
        str(value) if not isinstance(value, optimizers.Optimizer) else type(value).__name__
    ),
)
def test_auto_takes_what_is_safe_and_cheap(inner, trainable, mode):
    optimizer = masked(inner, trainable)
    optimizer.build([tf.Variable(tf.zeros([4, 4]), name="v")])
    assert [update.mode for update in optimizer.updates] == [mode]


def test_a_frozen_variable_has_no_update_and_no_slots():
    x, y = square(), tf.Variable([1.0], name="y")
    optimizer = MaskedOptimizer(optimizers.Adam(), [("x", nothing()), ("y", everything())])
    optimizer.build([x, y])
    assert [update.path for update in optimizer.updates] == ["y"]
    assert list(optimizer.slots) == ["y"]


def test_learning_rates_can_be_read_set_and_scheduled():
    x = square()
    optimizer = masked(optimizers.SGD(0.5))
    optimizer.apply([ONES], [x])
    optimizer.learning_rate = 0.25
    optimizer.apply([ONES], [x])
    assert values(x) == [[0.25, 2.0], [3.0, 3.25]]
    assert float(optimizer.learning_rate) == float(optimizer.inner.learning_rate) == 0.25

    x = square()
    schedule = optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    optimizer = masked(optimizers.SGD(schedule))
    optimizer.apply([ONES], [x])
    optimizer.apply([ONES], [x])
    assert values(x) == [[0.25, 2.0], [3.0, 3.25]]


def exclude_variable(optimizer: Any, variable: Any) -> None:
    optimizer.exclude_from_weight_decay(var_list=[variable])


def exclude_name(optimizer: Any, variable: Any) -> None:
    optimizer.exclude_from_weight_decay(var_names=["bi.s"])


@pytest.mark.parametrize("exclude", [exclude_variable, exclude_name])
@pytest.mark.parametrize("through", ["inner", "wrapper", "warm inner", "loss scale"])
@pytest.mark.parametrize("mode", ["packed", "dense"])
def test_an_excluded_variable_does_not_decay(exclude, through, mode):
    kernel, bias = (tf.Variable([1.0, 1.0], name=name) for name in ("kernel", "bias"))
    inner = decaying = optimizers.SGD(1.0, weight_decay=0.5)
    if through == "loss scale":
        inner = optimizers.LossScaleOptimizer(decaying)
    if through != "wrapper":
        exclude(decaying, bias)
    if through == "warm inner":
        inner.build([kernel, bias])
    optimizer = masked(inner, elements([0]), mode=mode)
    if through == "wrapper":
        exclude(optimizer, bias)
    optimizer.apply([tf.zeros(2), tf.zeros(2)], [kernel, bias])
    assert (values(kernel), values(bias)) == ([0.5, 1.0], [1.0, 1.0])


def test_an_exclusion_on_the_wrapper_reaches_every_optimizer_inside():
    kernel, bias = (tf.Variable([1.0, 1.0], name=name) for name in ("kernel", "bias"))
    decay = {"learning_rate": 1.0, "weight_decay": 0.5}
    parts = optimizers.OptimizerMap(optimizers.SGD(**decay), {"bias": optimizers.SGD(**decay)})
    optimizer = masked(optimizers.MultiOptimizer(parts), elements([0]))
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([tf.zeros(2), tf.zeros(2)], [kernel, bias])
    assert (values(kernel), values(bias)) == ([0.5, 1.0], [1.0, 1.0])


def test_excluding_after_the_build_is_an_error():
    optimizer = masked(optimizers.AdamW())
    optimizer.build([square()])
    with pytest.raises(ValueError, match="`exclude_from_weight_decay` has no effect on an"):
        optimizer.exclude_from_weight_decay(var_names=["x"])


def keras_square(constraint: Any) -> keras.Variable:
    variable = keras.Variable([[1.0, -2.0], [3.0, 4.0]], name="x")
    variable.constraint = constraint
    return variable


def tf_square(constraint: Any) -> tf.Variable:
    return tf.Variable([[1.0, -2.0], [3.0, 4.0]], name="x", constraint=constraint)


@pytest.mark.parametrize("make", [tf_square, keras_square])
@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (CORNERS, [[0.0, -2.0], [3.0, 0.0]]),
        (np.ones([2, 2], np.bool_), [[0.0, 0.0], [0.0, 0.0]]),
    ],
)
def test_a_constraint_holds_for_trainable_elements_and_leaves_frozen_ones(
    make, trainable, expected
):
    x = make(keras.constraints.NonNeg())
    optimizer = masked(optimizers.SGD(10.0), trainable)
    optimizer.apply([ONES], [x])
    assert values(x) == expected


def test_a_constraint_cannot_be_packed():
    optimizer = masked(optimizers.SGD(1.0), mode="packed")
    with pytest.raises(ValueError, match="`x` has a constraint, which needs the whole variable"):
        optimizer.build([keras_square(keras.constraints.NonNeg())])


@pytest.mark.parametrize("mode", ["packed", "dense"])
def test_averaged_shows_the_averages_and_gives_the_values_back(mode):
    x = square()
    optimizer = masked(optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5), mode=mode)
    optimizer.build([x])
    with optimizer.averaged():
        assert values(x) == [[1.0, 2.0], [3.0, 4.0]], "before the first step there is no average"
    for _ in range(2):
        optimizer.apply([ONES], [x])
    with optimizer.averaged():
        assert values(x) == [[-0.5, 2.0], [3.0, 2.5]]
    assert values(x) == [[-1.0, 2.0], [3.0, 2.0]]
    x.assign([[10.0, 20.0], [30.0, 40.0]])
    with pytest.raises(RuntimeError, match="inside"), optimizer.averaged():
        raise RuntimeError("inside")
    assert values(x) == [[10.0, 20.0], [30.0, 40.0]]
    optimizer.finalize_variable_values()
    assert values(x) == [[-0.5, 20.0], [30.0, 2.5]]


def test_averaged_changes_nothing_without_averages():
    x = square()
    optimizer = masked(optimizers.SGD(1.0))
    optimizer.apply([ONES], [x])
    with optimizer.averaged():
        assert values(x) == [[0.0, 2.0], [3.0, 3.0]]


def test_a_loss_scale_looks_at_trainable_gradients_only():
    x = square()
    optimizer = masked(optimizers.LossScaleOptimizer(optimizers.SGD(1.0), initial_scale=4.0))
    optimizer.build([x])
    assert float(optimizer.scale_loss(1.0)) == 4.0
    optimizer.apply([tf.constant([[4.0, np.nan], [np.inf, 4.0]])], [x])
    assert values(x) == [[0.0, 2.0], [3.0, 3.0]]
    optimizer.apply([tf.constant([[np.inf, 4.0], [4.0, 4.0]])], [x])
    assert values(x) == [[0.0, 2.0], [3.0, 3.0]]
    assert float(optimizer.scale_loss(1.0)) == 2.0


@pytest.mark.parametrize("trainable", [CORNERS, np.ones([2, 2], np.bool_)])
@pytest.mark.parametrize("mode", ["packed", "dense"])
def test_indexed_slices_are_unscaled_too(trainable, mode):
    x = square()
    optimizer = masked(optimizers.SGD(1.0, loss_scale_factor=4.0), trainable, mode=mode)
    optimizer.apply(
        [tf.IndexedSlices(tf.fill([2, 2], 2.0), tf.constant([1, 1]), tf.constant([2, 2]))], [x]
    )
    expected = [[1.0, 2.0], [3.0 - trainable[1, 0], 3.0]]
    assert values(x) == expected


def test_another_loss_scale_around_the_inner_one_is_an_error():
    optimizer = masked(optimizers.LossScaleOptimizer(optimizers.SGD()))
    with pytest.raises(ValueError, match=r"`inner` \(a LossScaleOptimizer\) scales the loss"):
        optimizers.LossScaleOptimizer(optimizer)


def test_a_loss_scale_around_the_optimizer_takes_a_constant_scale_off():
    optimizer = masked(optimizers.SGD(loss_scale_factor=4.0))
    assert optimizer.loss_scale_factor == 4.0
    optimizers.LossScaleOptimizer(optimizer)
    assert optimizer.loss_scale_factor is optimizer.inner.loss_scale_factor is None


def test_optimizers_that_go_by_path_are_told_keras_paths_whatever_names_the_rules_use():
    model = small_model()
    parts = optimizers.OptimizerMap(optimizers.SGD(0.0), {".*last/kernel": optimizers.SGD(1.0)})
    rules = [("_functional/_operations/[12]/_kernel", everything()), (".*", nothing())]
    optimizer = MaskedOptimizer(optimizers.MultiOptimizer(parts), rules, module=model)
    before = weights(model)
    variables = model.trainable_variables
    optimizer.apply([tf.ones_like(v) for v in variables], variables)
    assert [(a != b).any() for a, b in zip(before, weights(model), strict=True)] == [
        False, False, True, False
    ]  # fmt: skip


def test_multi_optimizer_takes_a_step_without_some_gradients():
    x, y, z = square(), tf.Variable([1.0], name="y"), tf.Variable([1.0], name="z")
    parts = optimizers.OptimizerMap(optimizers.SGD(1.0), {"x": optimizers.SGD(0.5)})
    optimizer = MaskedOptimizer(
        optimizers.MultiOptimizer(parts), [("x", CORNERS), (".*", everything())]
    )
    optimizer.build([x, y, z])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([ONES, tf.ones(1), None])
    assert (values(x), values(y), values(z)) == ([[0.5, 2.0], [3.0, 3.5]], [0.0], [1.0])


def sgd_for_all_but(pattern: str, other: optimizers.Optimizer) -> optimizers.MultiOptimizer:
    parts = optimizers.OptimizerMap(optimizers.SGD(0.25, momentum=0.5), {pattern: other})
    return optimizers.MultiOptimizer(parts)


WARM: dict[str, Callable[[], optimizers.Optimizer]] = {
    "SGD": lambda: optimizers.SGD(0.25, momentum=0.5),
    "Adam": lambda: optimizers.Adam(0.25),
    "Nadam": lambda: optimizers.Nadam(0.25),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.25), initial_scale=2.0
    ),
    "MultiOptimizer": lambda: sgd_for_all_but("y", optimizers.Adam(0.25)),
}


@pytest.mark.parametrize("mode", ["packed", "dense"])
@pytest.mark.parametrize("name", WARM)
def test_trainable_elements_go_on_as_if_nothing_had_been_frozen(name, mode):
    plain, warm = WARM[name](), WARM[name]()
    variables = [
        [keras.Variable([[1.0, 2.0], [3.0, 4.0]], name="x"), keras.Variable([1.0], name="y")]
        for _ in range(2)
    ]
    for optimizer, own in zip((plain, warm), variables, strict=True):
        for _ in range(3):
            optimizer.apply([ONES, tf.ones(1)], own)
    frozen = values(variables[1][0])
    rules = [("x", CORNERS), ("y", everything())]
    optimizer = MaskedOptimizer(warm, rules, mode=mode)
    for _ in range(3):
        plain.apply([ONES * 0.5, tf.ones(1)], variables[0])
        optimizer.apply([ONES * 0.5, tf.ones(1)], variables[1])
    (x, y), (ours, own_y) = variables
    assert (ours.numpy()[CORNERS] == x.numpy()[CORNERS]).all()
    assert [values(ours)[0][1], values(ours)[1][0]] == [frozen[0][1], frozen[1][0]]
    assert values(own_y) == values(y)
    assert int(optimizer.iterations) == int(plain.iterations) == 6


def test_warm_slots_of_other_variables_are_left_behind():
    x, other = square(), tf.Variable([1.0], name="other")
    warm = optimizers.SGD(1.0, momentum=0.5)
    warm.apply([tf.ones(1)], [other])
    optimizer = masked(warm)
    optimizer.apply([tf.zeros([2, 2])], [x])
    assert values(x) == [[1.0, 2.0], [3.0, 4.0]]


def test_warm_factors_follow_their_rows():
    x = tf.Variable(tf.ones([3, 2]), name="x")
    warm = optimizers.Adafactor(0.5)
    warm.apply([tf.constant([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])], [x])
    factors = [v.numpy() for v in warm.variables if v.shape == (3,)]
    optimizer = masked(warm, rows([0, 2]), mode="packed")
    optimizer.build([x])
    assert optimizer.slots["x"]["factor"].numpy().tolist() == factors[0][[0, 2]].tolist()


def test_warm_slots_that_cannot_be_packed_are_refused():
    x = keras.Variable(np.ones([2, 2]), name="x")
    warm = optimizers.Muon()
    warm.build([x])
    optimizer = masked(warm, mode="packed")
    with pytest.raises(ValueError, match="its slots of `x` cannot be packed: 'velocity'"):
        optimizer.build([x])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"inner": "adam"}, r"`inner` \('adam'\) must be a Keras 3 optimizer"),
        (
            {"inner": optimizers.LossScaleOptimizer(masked(optimizers.SGD()))},
            "is a MaskedOptimizer already",
        ),
        ({"mode": "sparse"}, r"`mode` \('sparse'\) must be one of 'auto', 'packed', 'dense'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        MaskedOptimizer(**{"inner": optimizers.SGD(), "rules": [(".*", everything())], **arguments})


def test_unknown_variables_are_refused():
    optimizer = masked(optimizers.SGD())
    optimizer.build([square()])
    with pytest.raises(ValueError, match=r"`y` is not among the 1 variables .* built on \(x\)"):
        optimizer.apply([tf.ones(1)], [tf.Variable([1.0], name="y")])


def test_a_variable_that_the_module_does_not_hold_is_refused():
    optimizer = masked(optimizers.SGD(), module=tf.Module())
    with pytest.raises(ValueError, match=r"`module` does not hold the variables \['x'\]"):
        optimizer.build([square()])


def test_a_variable_named_twice_is_refused():
    x = square()
    optimizer = masked(optimizers.SGD())
    optimizer.build([x])
    with pytest.raises(ValueError, match=r"`trainable_variables` name \['x'\] more than once"):
        optimizer.apply([ONES, ONES], [x, x])


def test_another_number_of_gradients_is_refused():
    optimizer = masked(optimizers.SGD())
    optimizer.build([square()])
    with pytest.raises(ValueError, match=r"`grads` \(2 gradients\) must match the 1 variables"):
        optimizer.apply([ONES, ONES])


def test_no_gradient_at_all_is_refused():
    optimizer = masked(optimizers.SGD())
    optimizer.build([square()])
    with pytest.raises(ValueError, match=r"No gradient for any trainable variable \(`x`\)"):
        optimizer.apply([None])


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer: optimizer.pack([ONES]),
        lambda optimizer: optimizer.pack([ONES], [square()]),
        lambda optimizer: optimizer.updates,
        lambda optimizer: optimizer.coverage,
        lambda optimizer: optimizer.slots,
        lambda optimizer: optimizer.shared_slots,
        lambda optimizer: optimizer.set_weights([]),
    ],
)
def test_what_needs_a_built_optimizer_says_so(use):
    with pytest.raises(ValueError, match=r"not built yet: call `build\(variables\)` first"):
        use(masked(optimizers.SGD()))


def test_the_first_apply_needs_variables():
    with pytest.raises(ValueError, match=r"`trainable_variables` \(None\) must be given"):
        masked(optimizers.SGD()).apply([ONES])


def test_apply_under_several_replicas_says_what_to_do():
    script = (
        "import keras, tensorflow as tf\n"
        "from finetune import MaskedOptimizer, everything\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "two = [tf.config.LogicalDeviceConfiguration()] * 2\n"
        "tf.config.set_logical_device_configuration(cpu, two)\n"
        "strategy = tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1'])\n"
        "with strategy.scope():\n"
        "  x = tf.Variable([1.0])\n"
        "optimizer = MaskedOptimizer(keras.optimizers.SGD(), [('.*', everything())])\n"
        "optimizer.build([x])\n"
        "try:\n"
        "  strategy.run(lambda: optimizer.apply([tf.ones(1)], [x]))\n"
        "except ValueError as error:\n"
        "  print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert "a strategy of 2 replicas" in done.stdout
    assert "Use finetune.Trainer, or call `pack` in the replicas" in done.stdout


@pytest.mark.parametrize(
    "options", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=["auto", "jit", "eager"]
)
@pytest.mark.parametrize("inner", [optimizers.Adam, optimizers.Lamb])
def test_fit_moves_selected_elements_only(options, inner):
    model = small_model()
    optimizer = MaskedOptimizer(inner(0.05), KERNELS)
    model.compile(optimizer, "mse", **options)
    before = weights(model)
    fit(model)
    moved = [before != after for before, after in zip(before, weights(model), strict=True)]
    selected = [selection.to_bool() for selection in optimizer.coverage.selections.values()]
    assert all((one == other).all() for one, other in zip(moved, selected, strict=True))
    assert [int(one.sum()) for one in moved] == [3, 0, 2, 0]


def test_fit_takes_the_same_steps_as_a_loop_of_ones_own():
    model, own = small_model(), small_model()
    model.compile(MaskedOptimizer(optimizers.Adam(0.05), KERNELS), keras.losses.MeanSquaredError())
    fit(model, epochs=1)
    optimizer = MaskedOptimizer(optimizers.Adam(0.05), KERNELS)
    x, y = data()

    @tf.function
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(labels, own(inputs, training=True))
        variables = own.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for batch in (slice(0, 8), slice(8, 16)):
        step(x[batch], y[batch])
    assert_equal_bits(weights(own), weights(model))


def test_fit_with_everything_trainable_is_plain_keras():
    model, plain = small_model(), small_model()
    model.compile(masked(optimizers.AdamW(0.05), everything()), "mse")
    plain.compile(optimizers.AdamW(0.05), "mse")
    fit(model)
    fit(plain)
    assert_equal_bits(weights(model), weights(plain))


def test_a_constraint_of_a_layer_holds_in_fit():
    model = small_model(kernel_constraint="non_neg")
    model.compile(MaskedOptimizer(optimizers.SGD(0.5), KERNELS), "mse")
    before = weights(model)[0]
    fit(model)
    after = weights(model)[0]
    moved = before != after
    assert moved.any()
    assert (after[moved] >= 0).all()
    assert (after[~moved] < 0).any()


def test_averages_are_the_last_values_of_fit_and_frozen_elements_stay():
    model = small_model()
    inner = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    optimizer = MaskedOptimizer(inner, KERNELS)
    model.compile(optimizer, "mse")
    before = weights(model)
    fit(model)
    first, trainable = weights(model)[0], optimizer.updates[0].selection.to_bool()
    assert (first[~trainable] == before[0][~trainable]).all()
    average = optimizer.slots[optimizer.updates[0].path]["average"].numpy()
    assert first[trainable].tolist() == average.reshape(-1).tolist()


@contextlib.contextmanager
def policy(name: str) -> Any:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_moves_selected_elements_only(name):
    with policy(name):
        model = small_model()
        optimizer = MaskedOptimizer(optimizers.Adam(0.05), KERNELS)
        model.compile(optimizer, "mse")
    assert isinstance(model.optimizer, optimizers.LossScaleOptimizer) == (name == "mixed_float16")
    before = weights(model)
    fit(model)
    moved = [before != after for before, after in zip(before, weights(model), strict=True)]
    selected = [selection.to_bool() for selection in optimizer.coverage.selections.values()]
    assert all((one == other).all() for one, other in zip(moved, selected, strict=True))


def test_callbacks_set_the_learning_rate():
    model = small_model()
    model.compile(MaskedOptimizer(optimizers.SGD(0.5), KERNELS), "mse")
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.25)
    fit(model, callbacks=[schedule])
    assert float(model.optimizer.learning_rate) == 0.25
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    fit(model, callbacks=[plateau], epochs=3)
    assert float(model.optimizer.learning_rate) == 0.0625


SAVED: dict[str, Callable[[keras.Model], MaskedOptimizer]] = {
    "predicates": lambda model: MaskedOptimizer(optimizers.Adam(0.05), KERNELS),
    "dense": lambda model: MaskedOptimizer(optimizers.Adam(0.05), KERNELS, mode="dense"),
    "not elementwise": lambda model: MaskedOptimizer(optimizers.Lamb(0.05), KERNELS),
    "shared state": lambda model: MaskedOptimizer(optimizers.Nadam(0.05), KERNELS),
    "rows": lambda model: MaskedOptimizer(
        optimizers.Adam(0.05), [(".*kernel", rows([0])), (".*", everything())]
    ),
    "paths of a module": lambda model: MaskedOptimizer(
        optimizers.Adam(0.05),
        [("_functional/.*kernel", largest(share=0.25)), (".*", nothing())],
        module=model,
    ),
    "a function of the user": lambda model: MaskedOptimizer(
        optimizers.Adam(0.05), [(".*kernel", lambda spec: spec.read() > 0), (".*", nothing())]
    ),
    "a rule by variable": lambda model: MaskedOptimizer(
        optimizers.Adam(0.05), [(model.trainable_variables[0], largest(count=5)), (".*", nothing())]
    ),
    "EMA, accumulation and a schedule": lambda model: MaskedOptimizer(
        optimizers.AdamW(
            optimizers.schedules.CosineDecay(0.1, 20), use_ema=True,
            ema_overwrite_frequency=2, gradient_accumulation_steps=2,
        ),
        KERNELS,
    ),
    "several optimizers": lambda model: MaskedOptimizer(
        sgd_for_all_but(".*last/kernel", optimizers.Adam()), KERNELS
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_a_model_that_was_saved_and_loaded_goes_on_bit_for_bit(name, tmp_path):
    model = small_model()
    optimizer = SAVED[name](model)
    model.compile(optimizer, "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.coverage.selections == optimizer.coverage.selections
    fit(model)
    fit(loaded)
    assert_equal_bits(weights(loaded), weights(model))
    loaded.save(tmp_path / "again.keras")
    again = keras.models.load_model(tmp_path / "again.keras")
    fit(model)
    fit(again)
    assert_equal_bits(weights(again), weights(model))


def test_the_loss_scale_around_the_optimizer_is_loaded_too(tmp_path):
    with policy("mixed_float16"):
        model = small_model()
        model.compile(MaskedOptimizer(optimizers.Adam(0.05), KERNELS), "mse")
        fit(model)
        model.optimizer.dynamic_scale.assign(8.0)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        fit(model)
        fit(loaded)
    assert float(loaded.optimizer.dynamic_scale) == 8.0
    assert int(loaded.optimizer.step_counter) == int(model.optimizer.step_counter) > 0
    assert_equal_bits(weights(loaded), weights(model))


@keras.saving.register_keras_serializable("optimizer_test")
class Unnamed(keras.Model):
    """A model whose layers Keras numbers anew in each instance."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))


def test_selections_find_their_variables_when_layers_are_numbered_anew(tmp_path):
    model = Unnamed()
    model.compile(MaskedOptimizer(optimizers.Adam(0.05), KERNELS), "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [v.path for v in model.variables] != [v.path for v in loaded.variables]
    fit(model)
    fit(loaded)
    assert_equal_bits(weights(loaded), weights(model))


def test_predicates_are_not_evaluated_again_on_tuned_values(tmp_path):
    x = keras.Input([2])
    model = keras.Model(x, keras.layers.Dense(1, use_bias=False, name="d")(x))
    model.layers[1].kernel.assign([[0.0], [1.0]])
    model.compile(MaskedOptimizer(optimizers.SGD(1.0), [(".*", zeros())]), "mse")
    batch = np.ones([1, 2], np.float32), np.zeros([1, 1], np.float32)
    model.fit(*batch, verbose=0)
    assert values(model.layers[1].kernel) == [[-2.0], [1.0]]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.fit(*batch, verbose=0)
    assert values(loaded.layers[1].kernel) == [[0.0], [1.0]]


def test_a_model_saved_before_its_first_step_resolves_its_rules_when_it_is_loaded(tmp_path):
    model = small_model()
    model.compile(MaskedOptimizer(optimizers.Adam(0.05), KERNELS), "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    fit(model)
    fit(loaded)
    assert_equal_bits(weights(loaded), weights(model))


def test_the_file_holds_each_slot_once(tmp_path):
    model = small_model()
    model.compile(MaskedOptimizer(optimizers.Adam(0.05), KERNELS), "mse")
    fit(model, epochs=1)
    model.save(tmp_path / "model", zipped=False)
    with h5py.File(tmp_path / "model" / "model.weights.h5") as file:
        names: list[str] = []
        file["optimizer"].visit(names.append)
    assert sorted(names) == [
        "vars", "vars/0.indices", "vars/0.momentum", "vars/0.velocity", "vars/2.indices",
        "vars/2.momentum", "vars/2.velocity", "vars/index", "vars/shared.iteration",
        "vars/shared.learning_rate",
    ]  # fmt: skip


def test_frozen_elements_of_dense_slots_are_saved_as_zeros(tmp_path):
    model = small_model()
    inner = optimizers.SGD(0.05, use_ema=True)
    model.compile(MaskedOptimizer(inner, KERNELS, mode="dense"), "mse")
    fit(model, epochs=1)
    model.save(tmp_path / "model", zipped=False)
    with h5py.File(tmp_path / "model" / "model.weights.h5") as file:
        assert np.count_nonzero(file["optimizer/vars/0.average"]) == 3


def test_weights_alone_can_be_saved_and_loaded_between_steps(tmp_path):
    model = small_model()
    model.compile(MaskedOptimizer(optimizers.SGD(0.05), KERNELS), "mse")
    fit(model)
    model.save_weights(tmp_path / "saved.weights.h5")
    saved = weights(model)
    fit(model)
    after = weights(model)
    model.load_weights(tmp_path / "saved.weights.h5")
    assert_equal_bits(weights(model), saved)
    fit(model)
    assert_equal_bits(weights(model), after)


def test_checkpoints_of_fit_can_be_gone_on_from(tmp_path):
    model = small_model()
    model.compile(MaskedOptimizer(optimizers.Adam(0.05), KERNELS), "mse")
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")])
    first = keras.models.load_model(tmp_path / "1.keras")
    fit(first, epochs=1)
    assert_equal_bits(weights(first), weights(model))


def test_a_model_loaded_without_its_optimizer_can_be_compiled_anew(tmp_path):
    model = small_model()
    model.compile(MaskedOptimizer(optimizers.Adam(0.05), KERNELS), "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    loaded.compile(
        MaskedOptimizer(optimizers.Adam(0.05), [(".*bias", everything()), (".*", nothing())]), "mse"
    )
    before = weights(loaded)
    fit(loaded)
    moved = [(b != a).any() for b, a in zip(before, weights(loaded), strict=True)]
    assert moved == [False, True, False, True]


def test_saved_state_of_other_variables_is_refused():
    model = small_model()
    optimizer = MaskedOptimizer(optimizers.Adam(), KERNELS)
    optimizer.build(model.trainable_variables)
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    other = masked(optimizers.Adam(), everything())
    other.build([tf.Variable(tf.zeros([5]), name="other")])
    with pytest.raises(ValueError, match=r"other variables: saved were .*first/kernel \(3, 4\).*"):
        other.load_own_variables(store)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_a_file_that_holds_no_selections_is_refused(tmp_path):
    model = small_model()
    model.compile(MaskedOptimizer(optimizers.Adam(), KERNELS), keras.losses.MeanSquaredError())
    fit(model)
    model.save(tmp_path / "model.h5")
    with pytest.raises(RuntimeError, match="come without selections, as in an HDF5 file: save the"):
        keras.models.load_model(tmp_path / "model.h5")


def test_a_configuration_makes_an_equal_optimizer():
    optimizer = MaskedOptimizer(
        optimizers.AdamW(0.25, clipnorm=1.0),
        [("a.*", rows(range(2)) | elements([[3, 0]]))],
        mode="dense",
    )
    copy = MaskedOptimizer.from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()
    assert copy.mode == "dense"
    assert float(copy.learning_rate) == 0.25
    assert copy.inner is not optimizer.inner


def test_keras_serializes_the_optimizer():
    optimizer = MaskedOptimizer(optimizers.Adam(0.25), [("x", elements([[0, 0]]))])
    copy = optimizers.deserialize(optimizers.serialize(optimizer))
    x = square()
    copy.apply([ONES], [x])
    assert (values(x)[0][1], values(x)[1]) == (2.0, [3.0, 4.0])


@pytest.mark.parametrize("built", [False, True])
def test_a_copy_of_the_configuration_evaluates_its_rules_on_its_own_variables(built):
    x = tf.Variable([0.0, 1.0], name="x")
    optimizer = MaskedOptimizer(optimizers.SGD(1.0), [(x, zeros())])
    if built:
        optimizer.build([x])
    copy = MaskedOptimizer.from_config(optimizer.get_config())
    other = tf.Variable([1.0, 0.0], name="x")
    copy.build([other])
    copy.apply([tf.ones(2)], [other])
    assert values(other) == [1.0, -1.0]


def test_a_copy_that_waits_for_saved_selections_says_so_until_its_first_step():
    copy = MaskedOptimizer.from_config(masked(optimizers.SGD(1.0), rows([0])).get_config())
    x = square()
    copy.build([x])
    with pytest.raises(ValueError, match="a copy of a configuration and has no selections yet"):
        copy.coverage  # noqa: B018
    copy.update(copy.pack([ONES]))
    assert values(x) == [[0.0, 1.0], [3.0, 4.0]]
    assert copy.coverage.selections["x"].rows.tolist() == [0]


def test_a_copy_without_the_users_function_refuses_to_be_built():
    optimizer = MaskedOptimizer(optimizers.SGD(1.0), [("x", lambda spec: CORNERS)])
    copy = MaskedOptimizer.from_config(optimizer.get_config())
    with pytest.raises(ValueError, match="the selector <lambda> was not saved with the config"):
        copy.apply([ONES], [square()])


def test_a_copy_of_the_model_trains_on_its_own():
    model = small_model()
    optimizer = MaskedOptimizer(optimizers.SGD(0.5), KERNELS)
    model.compile(optimizer, "mse")
    fit(model)
    clone = keras.models.clone_model(model)
    clone.compile(MaskedOptimizer.from_config(optimizer.get_config()), "mse")
    before, unmoved = weights(clone), weights(model)
    fit(clone)
    moved = [int((b != a).sum()) for b, a in zip(before, weights(clone), strict=True)]
    assert moved == [3, 0, 2, 0]
    assert_equal_bits(weights(model), unmoved)


def test_set_weights_takes_the_state_of_an_equal_optimizer():
    x, y = square(), square()
    one, other = masked(optimizers.Adam(0.5)), masked(optimizers.Adam(0.5))
    one.apply([ONES], [x])
    other.build([y])
    other.set_weights([variable.numpy() for variable in one.variables])
    y.assign(x)
    one.apply([ONES], [x])
    other.apply([ONES], [y])
    assert values(x) == values(y)
    with pytest.raises(ValueError, match=r"`weights` \(shapes \[\]\) must have the shapes"):
        other.set_weights([])


def test_a_tensorflow_checkpoint_restores_slots_and_steps(tmp_path):
    x, y = square(), square()
    one, other = masked(optimizers.Adam(0.5)), masked(optimizers.Adam(0.5))
    one.apply([ONES], [x])
    path = tf.train.Checkpoint(optimizer=one, x=x).save(str(tmp_path / "checkpoint"))
    other.build([y])
    tf.train.Checkpoint(optimizer=other, x=y).restore(path).assert_existing_objects_matched()
    one.apply([ONES], [x])
    other.apply([ONES], [y])
    assert values(x) == values(y)
    assert int(other.iterations) == 2
