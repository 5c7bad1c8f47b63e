"""Train x[0, 0] and x[1, 1] of a 2 x 2 variable and keep the other two, whatever is in the loss."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

from finetune import MaskedOptimizer, elements

DIAGONAL = [[0, 0], [1, 1]]
TRAINABLE = np.eye(2, dtype=np.bool_)
# -0 and a denormal: what even x * 1 + 0 would change.
BASE = np.array([[1.0, -0.0], [1e-41, -2.0]], np.float32)

INNER: dict[str, Callable[[], optimizers.Optimizer]] = {
    "AdamW": lambda: optimizers.AdamW(0.25, weight_decay=0.125),
    "SGD with decay and momentum": lambda: optimizers.SGD(0.25, momentum=0.5, weight_decay=0.125),
    "Ftrl": lambda: optimizers.Ftrl(0.25, l2_regularization_strength=0.125),
    "Ftrl with decay": lambda: optimizers.Ftrl(0.25, weight_decay=0.125),
    "EMA": lambda: optimizers.AdamW(0.25, use_ema=True, ema_momentum=0.5),
    "EMA that overwrites": lambda: optimizers.SGD(
        0.25, weight_decay=0.125, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "clipped by norm": lambda: optimizers.SGD(0.25, weight_decay=0.125, clipnorm=0.5),
    "clipped by global norm": lambda: optimizers.AdamW(0.25, global_clipnorm=0.5),
    "clipped by value": lambda: optimizers.AdamW(0.25, clipvalue=0.5),
    "all at once": lambda: optimizers.AdamW(
        0.25, weight_decay=0.125, global_clipnorm=0.5, use_ema=True, ema_momentum=0.5,
        ema_overwrite_frequency=2, gradient_accumulation_steps=2,
    ),
}  # fmt: skip


def loss_of(x: Any) -> tf.Tensor:
    """Wants every element to be 3, with an L2 penalty on all of x."""
    return tf.reduce_sum((x - 3.0) ** 2) + tf.nn.l2_loss(x)


def gradient_at(x: Any) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = loss_of(x)
    return tape.gradient(loss, x)


def train(optimizer: Any, x: Any, execution: str, steps: int = 6) -> None:
    def step() -> None:
        optimizer.apply([gradient_at(x)], [x])

    if execution != "eager":
        step = tf.function(step, jit_compile=execution == "jit")
    for _ in range(steps):
        step()


def assert_only_the_diagonal_moved(x: np.ndarray, base: np.ndarray = BASE) -> None:
    moved = x.view(np.uint32) != base.view(np.uint32)
    assert moved.tolist() == TRAINABLE.tolist()


def test_the_example_of_the_readme():
    x = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    optimizer = MaskedOptimizer(
        optimizers.AdamW(0.1, weight_decay=0.01), [(x, elements([[0, 0], [1, 1]]))]
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x**3) + tf.nn.l2_loss(x)
    optimizer.apply([tape.gradient(loss, x)], [x])
    # AdamW's first step: x * (1 - 0.1 * 0.01) - 0.1.
    assert x.numpy().tolist() == pytest.approx(np.array([[0.899, 2.0], [3.0, 3.896]]))
    assert x.numpy()[~TRAINABLE].tolist() == [2.0, 3.0]


def test_a_step_can_be_worked_out_by_hand():
    x = tf.Variable([[1.0, 1.0], [1.0, 2.0]])
    inner = optimizers.SGD(0.25, weight_decay=0.5)
    train(MaskedOptimizer(inner, [(x, elements(DIAGONAL))]), x, "eager", steps=1)
    # x * (1 - 0.25 * 0.5) - 0.25 * (2 * (x - 3) + x)
    assert x.numpy().tolist() == [[0.875 + 0.75, 1.0], [1.0, 1.75 + 0.0]]


@pytest.mark.parametrize("mode", ["packed", "dense"])
@pytest.mark.parametrize("execution", ["eager", "function", "jit"])
@pytest.mark.parametrize("name", INNER)
def test_the_other_two_elements_keep_their_bits(name, execution, mode):
    x = tf.Variable(BASE, name="x")
    optimizer = MaskedOptimizer(INNER[name](), [("x", elements(DIAGONAL))], mode=mode)
    train(optimizer, x, execution)
    assert_only_the_diagonal_moved(x.numpy())


@pytest.mark.parametrize("mode", ["packed", "dense"])
@pytest.mark.parametrize("name", INNER)
def test_the_two_elements_take_the_steps_of_a_variable_of_two_elements(name, mode):
    x, two = tf.Variable(BASE, name="x"), tf.Variable(BASE[TRAINABLE], name="two")
    train(MaskedOptimizer(INNER[name](), [("x", elements(DIAGONAL))], mode=mode), x, "function")
    train(INNER[name](), two, "function")
    np.testing.assert_array_max_ulp(x.numpy()[TRAINABLE], two.numpy(), maxulp=0)


@pytest.mark.parametrize("mode", ["packed", "dense"])
@pytest.mark.parametrize("name", INNER)
def test_slots_that_are_warm_do_not_drift(name, mode):
    x = tf.Variable(BASE, name="x")
    warm = INNER[name]()
    train(warm, x, "eager")
    base = x.numpy()
    optimizer = MaskedOptimizer(warm, [("x", elements(DIAGONAL))], mode=mode)
    train(optimizer, x, "eager")
    assert_only_the_diagonal_moved(x.numpy(), base)


@pytest.mark.parametrize("mode", ["packed", "dense"])
def test_momentum_carries_the_trainable_elements_on_and_no_other(mode):
    x = tf.Variable([[0.0, 0.0], [0.0, 0.0]])
    warm = optimizers.SGD(1.0, momentum=0.5)
    warm.apply([tf.fill([2, 2], -8.0)], [x])
    optimizer = MaskedOptimizer(warm, [(x, elements(DIAGONAL))], mode=mode)
    optimizer.apply([tf.zeros([2, 2])], [x])
    assert x.numpy().tolist() == [[12.0, 8.0], [8.0, 12.0]]


@pytest.mark.parametrize("name", ["AdamW", "SGD with decay and momentum", "Ftrl", "all at once"])
def test_masking_the_gradient_alone_moves_the_other_two(name):
    x = tf.Variable([[1.0, 1.0], [1.0, 1.0]])
    optimizer = INNER[name]()
    for _ in range(2):
        optimizer.apply([tf.where(TRAINABLE, gradient_at(x), 0.0)], [x])
    assert (x.numpy() != 1.0).all()


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str)
@pytest.mark.parametrize("name", INNER)
def test_fit_keeps_the_other_two_elements(name, options):
    layer = keras.layers.Dense(2, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.5))
    model = keras.Sequential([keras.Input([2]), layer])
    layer.kernel.assign(BASE)
    model.compile(
        MaskedOptimizer(INNER[name](), [(layer.kernel, elements(DIAGONAL))]), "mse", **options
    )
    inputs = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], np.float32)
    model.fit(inputs, inputs[:, ::-1] * 3, batch_size=1, epochs=2, verbose=0)
    assert_only_the_diagonal_moved(layer.kernel.numpy())
