import keras
import numpy as np
import pytest
import tensorflow as tf
from small_runs import (
    ROWS,
    SUMS,
    Bowl,
    Linear,
    base_of,
    bowl_task,
    column_task,
    exported_w,
    mixed_model,
    task_of,
    trainer_of,
)

from finetune.loading import from_module, load
from finetune.selectors import (
    elements,
    everything,
    nothing,
    random,
)


def test_accumulated_gradients_are_one_step_of_their_mean(tmp_path):
    """Batches of 4 and 4 with accumulation move as one batch of 8 does."""
    parts = trainer_of(
        tmp_path / "parts",
        task=task_of(ROWS[:8], SUMS[:8]),
        optimizer=keras.optimizers.SGD(0.25, gradient_accumulation_steps=2),
    )
    parts.train(1)
    assert parts.certificate().changed == 0
    parts.train(2)
    whole = trainer_of(
        tmp_path / "whole",
        task=task_of(ROWS[:8], SUMS[:8]),
        optimizer=keras.optimizers.SGD(0.25),
        batch_size=8,
    )
    whole.train(1)
    np.testing.assert_allclose(
        parts.base.module.w.numpy(), whole.base.module.w.numpy(), rtol=1e-6, atol=0
    )
    assert parts.certificate().changed == 4


def test_the_clip_norm_counts_trainable_elements_only(tmp_path):
    """The gradient of the one trainable element is far larger than 0.5, so it moves by 0.5."""
    base = base_of()
    trainer = trainer_of(
        tmp_path,
        base,
        [("w", elements([[0, 0]])), ("b", nothing())],
        task_of(y=SUMS * 100),
        keras.optimizers.SGD(1.0, global_clipnorm=0.5),
    )
    trainer.train(1)
    assert abs(float(base.module.w[0, 0]) - 0.5) == pytest.approx(0.5)


def test_averages_are_evaluated_and_exported_while_training_goes_on_from_raw_values(tmp_path):
    """SGD takes w to 0.75, 1.3125; their average with 0.5 is 0.75, then 1.03125."""
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(
        tmp_path,
        from_module(Bowl()),
        rules,
        bowl_task(),
        keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.5),
    )
    trainer.train(2)
    assert float(trainer.base.module.w) == 1.3125
    assert trainer.evaluate()["score"] == -(0.03125**2)
    assert exported_w(trainer) == 1.03125
    assert trainer.certificate().variables[0].largest_change == 1.03125
    assert float(trainer.base.module.w) == 1.3125


def test_averages_of_partly_trainable_variables_keep_the_frozen_bits(tmp_path):
    rules = [("w", random(share=0.5)), ("b", nothing())]
    optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_overwrite_frequency=3)
    trainer = trainer_of(tmp_path, rules=rules, optimizer=optimizer)
    trainer.train(10)
    assert trainer.certificate().ok
    trainer.export()


def test_a_loss_scale_finds_its_size_and_training_goes_on(tmp_path):
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.125), initial_scale=2.0**127
    )
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(tmp_path, from_module(Bowl()), rules, bowl_task(), optimizer)
    trainer.train(10)
    assert float(trainer.optimizer.inner.dynamic_scale) < 2.0**127
    assert float(trainer.base.module.w) > 1.0


def check_mixed(tmp_path, base):
    assert base.module.layers[0].compute_dtype == "bfloat16"
    rules = [(".*first/kernel", random(share=0.5)), (".*second/.*", everything()),
             (".*", nothing())]  # fmt: skip
    trainer = trainer_of(tmp_path, base, rules, column_task())
    first = trainer.train(5)["loss"]
    assert trainer.train(100)["loss"] < first / 2
    certificate = trainer.certificate()
    assert certificate.ok
    assert certificate.changed == certificate.trainable == 12 + 8 + 1


def test_mixed_precision_of_a_checkpoint_by_policy(tmp_path):
    prefix = tf.train.Checkpoint(mixed_model()).write(str(tmp_path / "ckpt"))
    base = load(prefix, module_fn=mixed_model, dtype_policy="mixed_bfloat16")
    check_mixed(tmp_path / "run", base)


def test_mixed_precision_of_a_keras_model_in_memory(tmp_path):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = mixed_model()
    finally:
        keras.config.set_dtype_policy(before)
    check_mixed(tmp_path, from_module(model))


def test_variables_of_low_precision_train_and_keep_their_frozen_bits(tmp_path):
    base = base_of(Linear(tf.bfloat16))
    rules = [("w", elements([[0, 0], [1, 0]])), ("b", everything())]
    # Adam's beta_2 of 0.999 is 1 in bfloat16, and moves nothing.
    trainer = trainer_of(tmp_path, base, rules, optimizer=keras.optimizers.SGD(0.05))
    trainer.train(20)
    certificate = trainer.certificate()
    assert certificate.ok
    assert certificate.changed == 3
