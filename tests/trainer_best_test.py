from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_runs import Bowl, bowl_task, bowl_trainer, exported_w, task_of, trainer_of

from finetune.loading import from_module
from finetune.selectors import (
    everything,
    nothing,
)


def evaluation_of(trainer, step) -> dict[str, float]:
    (found,) = [line for line in trainer.evaluations if line["global_step"] == step]
    return found


def scalars_in(folder: Path) -> dict[str, dict[int, float]]:
    scalars: dict[str, dict[int, float]] = {}
    for file in sorted(folder.iterdir()):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                scalars.setdefault(value.tag, {})[event.step] = number
    return scalars


def test_evaluations_come_at_their_interval_with_loss_and_metrics(tmp_path):
    trainer = bowl_trainer(tmp_path, eval_every=2, best_metric=None)
    result = trainer.train(5)
    assert [line["global_step"] for line in trainer.evaluations] == [2, 4]
    last = evaluation_of(trainer, 4)
    assert (last["loss"], last["score"]) == (result["eval_loss"], result["eval_score"])
    assert evaluation_of(trainer, 2)["score"] == -(0.3125**2)


def test_an_untrained_model_can_be_evaluated(tmp_path):
    trainer = bowl_trainer(tmp_path)
    assert trainer.evaluate() == {"loss": 9.0, "score": -1.0}
    assert trainer.evaluations == [{"global_step": 0, "loss": 9.0, "score": -1.0}]


def test_training_stops_when_the_metric_gets_no_better(tmp_path):
    """The scores are -1/16, then -0.098, -0.54: the second is worse, and so is the third."""
    trainer = bowl_trainer(tmp_path, patience=2)
    assert trainer.train(20)["global_step"] == 3
    assert trainer.train(20) == {"global_step": 3}
    again = bowl_trainer(tmp_path, patience=2)
    assert again.train(20) == {"global_step": 3}


def test_patience_counts_on_after_a_resume(tmp_path):
    bowl_trainer(tmp_path, patience=2).train(2)
    assert bowl_trainer(tmp_path, patience=2).train(20)["global_step"] == 3


def test_the_best_state_is_exported_and_the_present_one_stays(tmp_path):
    trainer = bowl_trainer(tmp_path)
    trainer.train(6)
    now = float(trainer.base.module.w)
    assert now > 2
    assert exported_w(trainer) == 0.75
    assert float(trainer.base.module.w) == now
    assert exported_w(bowl_trainer(tmp_path)) == 0.75
    assert bowl_trainer(tmp_path).global_step == 6


def test_best_can_mean_least(tmp_path):
    trainer = bowl_trainer(tmp_path, bowl_task(sign=1.0), best_mode="min")
    trainer.train(6)
    assert exported_w(trainer) == 0.75


def test_the_loss_can_decide_what_is_best(tmp_path):
    trainer = bowl_trainer(tmp_path, best_metric="loss", best_mode="min")
    trainer.train(6)
    assert exported_w(trainer) == float(trainer.base.module.w)


def test_a_nan_metric_is_never_better(tmp_path):
    def metrics():
        def score(y, outputs):
            return tf.where(outputs > 0.8, np.nan, outputs)

        return [keras.metrics.MeanMetricWrapper(score, name="score")]

    trainer = bowl_trainer(tmp_path, task_of(y=np.full([12], 3.0, np.float32), metrics=metrics))
    trainer.train(4)
    assert exported_w(trainer) == 0.75


def test_the_best_average_is_exported_where_averages_are_evaluated(tmp_path):
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(
        tmp_path,
        from_module(Bowl()),
        rules,
        bowl_task(),
        keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.5),
        eval_every=1,
        best_metric="score",
    )
    trainer.train(6)
    best = max(line["score"] for line in trainer.evaluations)
    assert best == evaluation_of(trainer, 2)["score"] == -((exported_w(trainer) - 1) ** 2)


def test_best_and_latest_do_not_delete_each_other(tmp_path):
    bowl_trainer(tmp_path, keep=1).train(6)
    kept = {folder: {f.stem for f in (tmp_path / folder).glob("*.index")} for folder in
            ("best", "checkpoints")}  # fmt: skip
    assert kept == {"best": {"ckpt-1"}, "checkpoints": {"ckpt-6"}}


def test_without_a_best_metric_the_present_state_is_exported(tmp_path):
    trainer = bowl_trainer(tmp_path, best_metric=None)
    trainer.train(6)
    assert exported_w(trainer) == float(trainer.base.module.w)


def test_an_export_does_not_touch_the_checkpoints(tmp_path):
    trainer = bowl_trainer(tmp_path, checkpoint_every=2)
    trainer.train(3)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "checkpoints").iterdir()}
    trainer.export()
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "checkpoints").iterdir()}
    assert after == before


def test_the_events_hold_what_one_wants_to_see(tmp_path):
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.PolynomialDecay(0.125, 4, 0.0625))
    rules = [("w", everything()), ("other", nothing())]
    trainer = trainer_of(
        tmp_path, from_module(Bowl()), rules, bowl_task(), optimizer, steps_per_loop=2, eval_every=4
    )
    trainer.train(4)
    scalars = scalars_in(tmp_path / "train")
    assert set(scalars) == {
        "loss", "learning_rate", "gradient_norm", "trainable_share", "steps_per_second"
    }  # fmt: skip
    assert scalars["trainable_share"] == {0: 0.5}
    assert scalars["learning_rate"] == {2: 0.09375, 4: 0.0625}
    assert scalars["loss"].keys() == scalars["gradient_norm"].keys() == {2, 4}
    # At w = 0 the gradient is -6, at 0.75 it is -4.5.
    assert scalars["gradient_norm"][2] == 5.25
    assert all(rate > 0 for rate in scalars["steps_per_second"].values())
    evaluated = scalars_in(tmp_path / "eval")
    assert evaluated.keys() == {"loss", "score"}
    assert evaluated["score"][4] == pytest.approx(evaluation_of(trainer, 4)["score"])


def test_events_of_a_resumed_run_go_on(tmp_path):
    bowl_trainer(tmp_path, steps_per_loop=1).train(2)
    bowl_trainer(tmp_path, steps_per_loop=1).train(4)
    assert set(scalars_in(tmp_path / "train")["loss"]) == {1, 2, 3, 4}
