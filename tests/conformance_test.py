"""The conformance table: every public Keras optimizer under selections.

A case is an optimizer, a selection, a dtype, a way of execution and a feature. Each case takes four
steps on a variable whose frozen elements hold what arithmetic destroys (NaN payloads, infinities,
-0, denormals), packed and dense side by side, and checks all claims on the bits. Gradients are
small powers of two, so that norms, means and sums are exact in any order and in any dtype.
"""

import dataclasses
import inspect
import itertools
import math
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from finetune.optimizer import ELEMENTWISE, MaskedOptimizer
from finetune.selection import Selection

SHAPE = (6, 4)
Y = [1.5, -0.75, 0.5]
STEPS = 4
RATE = 0.125


def one(name: str, **own: Any) -> Callable[..., keras.optimizers.Optimizer]:
    return lambda **features: getattr(keras.optimizers, name)(RATE, **own, **features)


def muon(**features: Any) -> keras.optimizers.Optimizer:
    decay = features.pop("weight_decay", None)
    # Its updates are small where the pattern of gradients is; bfloat16 would round them away.
    return keras.optimizers.Muon(
        1.0, weight_decay=decay, adam_weight_decay=decay, adam_beta_1=0.5, adam_beta_2=0.75,
        epsilon=2**-7, **features,
    )  # fmt: skip


def loss_scaled(**features: Any) -> keras.optimizers.Optimizer:
    features.pop("loss_scale_factor", None)
    return keras.optimizers.LossScaleOptimizer(OPTIMIZERS["Adam"](**features), initial_scale=4.0)


def multiple(**features: Any) -> keras.optimizers.Optimizer:
    scale = features.pop("loss_scale_factor", None)
    parts = keras.optimizers.OptimizerMap(
        OPTIMIZERS["SGD"](**features), {"x": OPTIMIZERS["Adam"](**features)}
    )
    return keras.optimizers.MultiOptimizer(parts, loss_scale_factor=scale)


# Powers of two that bfloat16 and float16 hold: 0.999 is 1 in bfloat16, and Adam would stand still.
ADAM = {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 2**-7}
OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "Adadelta": one("Adadelta", rho=0.5, epsilon=0.25),
    "Adafactor": one("Adafactor", epsilon_1=2**-10),
    "Adagrad": one("Adagrad", epsilon=2**-7),
    "Adam": one("Adam", **ADAM),
    "AdamW": one("AdamW", **ADAM),
    "Adamax": one("Adamax", **ADAM),
    "Ftrl": one("Ftrl", l1_regularization_strength=2**-6, l2_regularization_strength=2**-6),
    "Lamb": one("Lamb", **ADAM),
    "Lion": one("Lion", beta_1=0.5, beta_2=0.75),
    "LossScaleOptimizer": loss_scaled,
    "MultiOptimizer": multiple,
    "Muon": muon,
    "Nadam": one("Nadam", **ADAM),
    "RMSprop": one("RMSprop", rho=0.5, momentum=0.5, epsilon=2**-7),
    "SGD": one("SGD", momentum=0.5, nesterov=True),
    "ScheduleFreeAdamW": one("ScheduleFreeAdamW", **ADAM),
}
NOT_OPTIMIZERS = {
    "Optimizer": "the abstract base",
    "OptimizerMap": "a mapping that MultiOptimizer takes",
}

SELECTIONS: dict[str, np.ndarray] = {
    "elements": np.arange(24).reshape(SHAPE) % 5 < 2,
    "rows": np.isin(np.arange(6), [0, 3, 4])[:, None].repeat(4, axis=1),
    "columns": np.isin(np.arange(4), [1, 3])[None, :].repeat(6, axis=0),
    "all": np.ones(SHAPE, np.bool_),
    "one element": np.arange(24).reshape(SHAPE) == 9,
    "all but one": np.arange(24).reshape(SHAPE) != 14,
}
DTYPES = ("float32", "float64", "bfloat16", "float16")
EXECUTIONS = ("eager", "function", "jit")
FEATURES: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "weight decay": {"weight_decay": 0.25},
    "clipnorm": {"clipnorm": 2.0},
    "global_clipnorm": {"global_clipnorm": 2.0},
    "clipvalue": {"clipvalue": 1.0},
    "EMA with overwrite": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "loss scale": {"loss_scale_factor": 4.0},
    "warm slots": {},
    "NaN and Inf gradients at frozen elements": {},
    "L2 penalty": {},
    "IndexedSlices with duplicate rows": {},
}
NON_FINITE, SLICES = list(FEATURES)[-3], list(FEATURES)[-1]

# Their step looks at norms of the whole variable: a NaN among the frozen values would be in them.
NORMS_OF_VALUES = {"Adafactor", "Lamb"}

# Where packed and dense, or IndexedSlices and dense gradients, are not equal bit for bit, and by
# how many ulp a step at most (of the largest magnitude that the element had):
# - Eigen computes rsqrt and pow of the elements that fill a SIMD register by another formula than
#   those of the rest (up to 2 ulp and 1 ulp apart), and packing moves elements from one group to
#   the other. Grappler makes x * rsqrt(y) of x / sqrt(y) in functions. Eager Ftrl calls pow, and
#   divides the difference of two of its results by the learning rate.
# - XLA contracts a * b + c to one FMA within a kernel, and for these two optimizers kernels are cut
#   in another way after a gather than after a select.
# The tests called `test_without_...` take each cause away and find the bits equal.
ULP_A_STEP = {
    ("Adadelta", "function"): 1,
    ("Adafactor", "function"): 1,
    ("Adagrad", "function"): 1,
    ("RMSprop", "function"): 1,
    ("Ftrl", "eager"): 3,
    ("Adagrad", "jit"): 1,
    ("ScheduleFreeAdamW", "jit"): 1,
}


@dataclasses.dataclass(frozen=True)
class Case:
    optimizer: str
    feature: str
    execution: str
    selection: str
    dtype: str

    def __str__(self) -> str:
        return "-".join(dataclasses.astuple(self)).replace(" ", "_")


def keras_refuses(optimizer: str, feature: str, dtype: str) -> bool:
    """What plain Keras cannot do (see `test_what_keras_refuses_...`)."""
    half = dtype in ("bfloat16", "float16")
    accumulates = feature == "gradient accumulation"
    return (optimizer == "Muon" and dtype == "float64") or (
        optimizer == "LossScaleOptimizer" and accumulates and half
    )


EXHAUSTIVE = [
    Case(optimizer, feature, execution, selection, dtype)
    for optimizer, feature, execution, selection, dtype in itertools.product(
        OPTIMIZERS, FEATURES, EXECUTIONS, SELECTIONS, DTYPES
    )
    if not keras_refuses(optimizer, feature, dtype)
]


def sampled() -> list[Case]:
    """Every optimizer x feature x execution, with selections and dtypes in turn."""
    cases = []
    for (i, optimizer), (j, feature), (k, execution) in itertools.product(
        enumerate(OPTIMIZERS), enumerate(FEATURES), enumerate(EXECUTIONS)
    ):
        selection = list(SELECTIONS)[(i + 5 * j + 2 * k) % len(SELECTIONS)]
        dtypes = [d for d in DTYPES if not keras_refuses(optimizer, feature, d)]
        dtype = dtypes[(i + j + i // 4 + j // 4 + k) % len(dtypes)]
        cases.append(Case(optimizer, feature, execution, selection, dtype))
    return cases


SAMPLE = sampled()


def test_every_public_keras_optimizer_is_in_the_table():
    public = {
        name
        for name in dir(keras.optimizers)
        if inspect.isclass(getattr(keras.optimizers, name)) and not name.startswith("_")
    }
    assert public - set(NOT_OPTIMIZERS) == set(OPTIMIZERS)
    assert set(ELEMENTWISE) == set(OPTIMIZERS) - {"Adafactor", "Lamb", "Muon"}


def test_the_table_has_13572_cases_and_the_sample_of_576_covers_every_pair(capsys):
    with capsys.disabled():
        print(f" [{len(SAMPLE)} of {len(EXHAUSTIVE)} conformance cases]", end="")
    refused = (12 * 3 * 6) * 1 + (3 * 6) * 2
    assert len(EXHAUSTIVE) == 16 * 12 * 3 * 6 * 4 - refused == 13572
    assert len(SAMPLE) == 16 * 12 * 3 == 576
    assert pairs(SAMPLE) == pairs(EXHAUSTIVE)


def pairs(cases: Sequence[Case]) -> set[tuple[Any, ...]]:
    return {
        pair
        for case in cases
        for pair in itertools.combinations(enumerate(dataclasses.astuple(case)), 2)
    }


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_sampled_case_holds(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_case_holds(optimizer, feature):
    broken = []
    for case in EXHAUSTIVE:
        if (case.optimizer, case.feature) == (optimizer, feature):
            try:
                check(case)
            except AssertionError as error:
                broken.append(f"{case}: {error}")
    assert broken == []


@pytest.mark.parametrize(
    ("optimizer", "dtype", "features"),
    [
        ("Muon", "float64", {}),
        ("LossScaleOptimizer", "bfloat16", {"gradient_accumulation_steps": 2}),
        ("LossScaleOptimizer", "float16", {"gradient_accumulation_steps": 2}),
    ],
)
def test_what_keras_refuses_it_refuses_without_a_selection_too(optimizer, dtype, features):
    x = keras.Variable(np.ones(SHAPE), name="x", dtype=dtype)
    plain = OPTIMIZERS[optimizer](**features)
    with pytest.raises((TypeError, tf.errors.InvalidArgumentError), match="float"):
        plain.apply([tf.ones(SHAPE, dtype)], [x])


@pytest.mark.parametrize("optimizer", ["Adadelta", "Adagrad", "RMSprop"])
def test_without_grapplers_rsqrt_packed_and_dense_are_equal_in_functions_too(
    optimizer, monkeypatch
):
    monkeypatch.delitem(ULP_A_STEP, (optimizer, "function"))
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    try:
        for selection in set(SELECTIONS) - {"all"}:
            check(Case(optimizer, "nothing else", "function", selection, "float32"))
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True, **before})


@pytest.mark.parametrize("execution", ["eager", "function"])
def test_without_a_real_pow_ftrl_is_equal_packed_and_dense(execution, monkeypatch):
    monkeypatch.delitem(ULP_A_STEP, ("Ftrl", "eager"))
    # x ** 1 needs no approximation.
    monkeypatch.setitem(OPTIMIZERS, "Ftrl", one("Ftrl", learning_rate_power=-1.0))
    for selection in set(SELECTIONS) - {"all"}:
        check(Case("Ftrl", "nothing else", execution, selection, "float32"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag names x86 instructions")
def test_without_fma_packed_and_dense_are_equal_in_xla_too():
    # XLA reads its flags once, so this needs a process of its own.
    script = (
        "import conformance_test as c\n"
        "c.ULP_A_STEP.clear()\n"
        "c.check(c.Case('Adagrad', 'clipnorm', 'jit', 'columns', 'float32'))\n"
        "c.check(c.Case('Adagrad', 'L2 penalty', 'jit', 'elements', 'float32'))\n"
        "c.check(c.Case('ScheduleFreeAdamW', 'clipvalue', 'jit', 'one element', 'float32'))\n"
        "c.check(c.Case('ScheduleFreeAdamW', 'global_clipnorm', 'jit', 'one element', 'float64'))\n"
    )
    folder = pathlib.Path(__file__).parent
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX",
        "PYTHONPATH": f"{folder.parent}{os.pathsep}{folder}",
    }
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def check(case: Case) -> None:
    if case.selection == "all":
        check_against_plain_keras(case)
    else:
        check_packed_against_dense(case)


def check_packed_against_dense(case: Case) -> None:
    trainable = SELECTIONS[case.selection]
    bound = STEPS * ULP_A_STEP.get((case.optimizer, case.execution), 0)
    modes = ["dense"] if case_is_refused_packed(case) else ["dense", "packed"]
    runs = [Run(case, mode) for mode in modes]
    if case.feature == SLICES:
        runs.append(Run(case, "dense", dense_gradients=True))
    for run in runs:
        assert_slots_fit(run, "after build")
    take_steps(case, runs)
    for run in runs:
        assert_bits_equal(run.x.numpy()[~trainable], run.base[~trainable], "frozen elements")
        assert run.moved[trainable].all(), "some trainable elements never moved"
        assert run.y_moved.all(), "some elements of y never moved"
        assert_slots_fit(run, "after steps")
    if case.optimizer in ELEMENTWISE:
        assert_same(runs[0], runs[1], bound, "packed and dense")
    if case.feature == SLICES:
        assert_same(runs[0], runs[-1], bound, "IndexedSlices and dense gradients")


def case_is_refused_packed(case: Case) -> bool:
    """Muon on a vector is AdamW, which needs a slot that its warm matrix does not have."""
    return (case.optimizer, case.feature) == ("Muon", "warm slots") and case.selection != "rows"


def check_against_plain_keras(case: Case) -> None:
    runs = [Run(case, "auto"), Run(case, "plain", dense_gradients=True)]
    take_steps(case, runs)
    masked, plain = runs
    assert masked.moved.all(), "some elements never moved"
    assert masked.y_moved.all(), "some elements of y never moved"
    if case.feature == SLICES and (case.optimizer, case.execution) in ULP_A_STEP:
        # IndexedSlices are divided row by row: other groups of elements than the dense gradient.
        assert_close(masked, plain, STEPS * ULP_A_STEP[case.optimizer, case.execution], "x")
        return
    assert_bits_equal(masked.x.numpy(), plain.x.numpy(), "x")
    assert_bits_equal(masked.y.numpy(), plain.y.numpy(), "y")
    for slot, expected in zip(masked.optimizer.variables, plain.optimizer.variables, strict=True):
        assert_bits_equal(slot.numpy(), expected.numpy(), slot.path)


class Run:
    """One optimizer on its own x (SHAPE, of which a part is trainable) and y (all trainable)."""

    def __init__(self, case: Case, mode: str, dense_gradients: bool = False):
        self.case = case
        self.mode = mode
        self.dense_gradients = dense_gradients
        self.trainable = SELECTIONS[case.selection]
        self.base = base_values(case)
        self.x = keras.Variable(self.base, name="x", dtype=case.dtype)
        self.y = keras.Variable(Y, name="y", dtype=case.dtype)
        assert_bits_equal(self.x.numpy(), self.base, "first values")
        inner = OPTIMIZERS[case.optimizer](**FEATURES[case.feature])
        if case.feature == "warm slots":
            self.warm_up(inner)
        rules = [("x", Selection.from_bool(self.trainable)), ("y", np.ones(3, np.bool_))]
        self.optimizer = inner if mode == "plain" else MaskedOptimizer(inner, rules, mode=mode)
        if not self.optimizer.built:
            self.optimizer.build([self.x, self.y])
        self.largest = np.zeros(SHAPE)
        self.moved = np.zeros(SHAPE, np.bool_)
        self.y_moved = np.zeros(3, np.bool_)

    def warm_up(self, inner: keras.optimizers.Optimizer) -> None:
        """Two steps on every element, then the first values again: only the slots are warm."""
        x, y = self.x.numpy(), self.y.numpy()
        self.x.assign(tf.ones(SHAPE))
        inner.build([self.x, self.y])
        for _ in range(2):
            inner.apply([tf.ones(SHAPE, x.dtype), tf.ones([3], y.dtype)], [self.x, self.y])
        self.x.assign(x)
        self.y.assign(y)

    def step(self, x_gradient: tf.Tensor, y_gradient: tf.Tensor, rows: tf.Tensor) -> None:
        if self.case.feature == "L2 penalty":
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.x.value * x_gradient) + tf.nn.l2_loss(self.x.value)
                loss = self.optimizer.scale_loss(loss)
            gradient = tape.gradient(loss, self.x.value)
        elif self.case.feature == SLICES:
            values = tf.gather(self.scaled(x_gradient), rows)
            # The first and the third slice are of one row: its gradient in two halves.
            values *= tf.constant([[0.5], [1], [0.5], [1]], values.dtype)
            gradient = tf.IndexedSlices(values, rows, tf.constant(SHAPE))
            if self.dense_gradients:
                gradient = tf.convert_to_tensor(gradient)
        else:
            gradient = self.scaled(x_gradient)
        self.optimizer.apply([gradient, self.scaled(y_gradient)], [self.x, self.y])

    def scaled(self, gradient: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.optimizer.scale_loss(gradient), gradient.dtype)

    def trainable_part(self, path: str, name: str) -> np.ndarray:
        """A slot's values at trainable elements, as a vector."""
        value = self.optimizer.slots[path][name].numpy()
        return value[self.trainable] if value.shape == SHAPE else value.reshape(-1)

    def note(self) -> None:
        """Notes which elements moved, and the largest magnitude that each ever had."""
        x, y = self.x.numpy(), self.y.numpy()
        self.moved |= bits(x) != bits(self.base)
        self.y_moved |= bits(y) != bits(np.array(Y, y.dtype))
        self.largest = np.where(self.trainable, np.maximum(self.largest, np.abs(x)), 0)


def take_steps(case: Case, runs: Sequence[Run]) -> None:
    def step(*gradients: tf.Tensor) -> None:
        for run in runs:
            run.step(*gradients)

    if case.execution != "eager":
        step = tf.function(step, jit_compile=case.execution == "jit", autograph=False)
    pattern = np.array([1, -1, 2, 1, -2, 1, 1, -1, -1, 2, -1, 1] * 2, np.float64).reshape(SHAPE)
    for number in range(STEPS):
        # The same twice, so that the mean of two accumulated gradients is exact.
        gradient = np.roll(pattern, 3 * (number // 2))
        if case.feature == NON_FINITE:
            bad = np.resize([np.nan, np.inf, -np.inf], SHAPE)
            gradient = np.where(SELECTIONS[case.selection], gradient, bad)
        step(
            tf.constant(gradient, case.dtype),
            tf.constant([1, -2, 1], case.dtype),
            tf.constant([2, 0, 2, 4]) + number % 2,
        )
        for run in runs:
            run.note()


def base_values(case: Case) -> np.ndarray:
    """Values of ordinary size, and at frozen elements also those that arithmetic destroys."""
    dtype = tf.as_dtype(case.dtype).as_numpy_dtype
    values = np.random.default_rng(7).uniform(0.5, 2, SHAPE) * np.resize([1, -1, -1], SHAPE)
    values = values.astype(dtype)
    unsigned = bits(values)
    width = 8 * unsigned.itemsize
    exponent = {"float32": 8, "float64": 11, "bfloat16": 8, "float16": 5}[case.dtype]
    mantissa = width - 1 - exponent
    infinity = ((1 << exponent) - 1) << mantissa
    sign = 1 << (width - 1)
    special = [sign, 1, sign | 3]  # -0 and denormals
    if case.optimizer not in NORMS_OF_VALUES:
        special += [infinity | 1, infinity | sign | 5, infinity, infinity | sign]
    frozen = np.flatnonzero(~SELECTIONS[case.selection])[: 2 * len(special)]
    unsigned.reshape(-1)[frozen] = np.resize(np.array(special, unsigned.dtype), len(frozen))
    return unsigned.view(dtype)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def assert_bits_equal(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    different = bits(actual) != bits(expected)
    assert not different.any(), f"{what}: {actual[different]} are not {expected[different]}"


def assert_slots_fit(run: Run, when: str) -> None:
    """Packed slots are of the size of what is trainable, dense ones are zero where it is frozen."""
    for name, slot in run.optimizer.slots["x"].items():
        if run.mode == "packed":
            of_factors = run.case.optimizer == "Adafactor" and name.startswith("factor")
            assert math.prod(slot.shape) == run.trainable.sum() or of_factors, (when, name)
        elif tuple(slot.shape) == SHAPE:
            # These are computed from frozen values or from whole rows, and reset when saved.
            if when == "after steps" and (
                name in ("average", "linear") or run.case.optimizer == "Adafactor"
            ):
                run.optimizer.frozen_slots_to_zero()
            assert (slot.numpy()[~run.trainable] == 0).all(), (when, name)


def assert_close(one: Run, other: Run, ulp: int, what: str) -> None:
    """x differs by so many ulp at most, of the largest magnitude that the element had."""
    x, expected = (run.x.numpy()[one.trainable].astype(np.float64) for run in (one, other))
    largest = np.fmax(one.largest, other.largest)[one.trainable]
    spacing = np.spacing(largest.astype(one.base.dtype)).astype(np.float64)
    off = (np.abs(x - expected) / spacing).max()
    assert off <= ulp, f"{what}: {off} ulp apart"


def assert_same(one: Run, other: Run, ulp: int, what: str) -> None:
    """Values and slots are equal at trainable elements, bit for bit when `ulp` is 0."""
    if ulp:
        return assert_close(one, other, ulp, what)
    assert_bits_equal(one.x.numpy(), other.x.numpy(), f"{what}, x")
    assert_bits_equal(one.y.numpy(), other.y.numpy(), f"{what}, y")
    for path, slots in one.optimizer.slots.items():
        for name in slots:
            values = [run.trainable_part(path, name) for run in (one, other)]
            assert_bits_equal(*values, f"{what}, {name} of {path}")
    for name, slot in one.optimizer.shared_slots.items():
        expected = other.optimizer.shared_slots[name].numpy()
        assert_bits_equal(slot.numpy(), expected, f"{what}, {name}")
