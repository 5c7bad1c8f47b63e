"""What `launch/train.py` does, in the order in which one sees it on stdout."""

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from finetune import calling, configurables, runs
from finetune.certificate import Certificate
from finetune.exporting import CERTIFICATE_FILE
from finetune.paths import nearest
from finetune.preemption import Preempted
from finetune.trainer import Trainer, readable

__all__ = ["Preempted", "dry_run", "run"]


def run(gin_files: Sequence[str], gin_params: Sequence[str], model_dir: str, mode: str) -> None:
    """Does what `mode` says with the run that gin describes; the run lies in `model_dir`.

    Args:
      gin_files: see `configurables.parse`.
      gin_params: the same.
      model_dir: the run's folder, new or of an earlier start of the same run.
      mode: 'train', 'evaluate', 'export', or 'train_and_evaluate', which does all of it.

    Raises:
      ValueError: whatever is wrong with the configuration, the model or the data.
      Preempted: after SIGTERM while training, when the state is saved.
    """
    configurables.parse(gin_files, gin_params)
    if mode == "export" and not os.path.exists(os.path.join(model_dir, "run.json")):
        raise ValueError(
            f"`model_dir` ({model_dir}) holds no run to export. Runs beside it: "
            f"{', '.join(_runs_beside(model_dir)) or 'none'}."
        )
    trainer = configurables.make_trainer(model_dir)
    runs.write_text(
        os.path.join(model_dir, "operative_config.gin"), configurables.operative_config()
    )
    if mode == "train":
        _show_coverage(trainer)
        _train(trainer)
        _show("certificate", trainer.certificate().summary())
    elif mode == "evaluate":
        _show_metrics(trainer.global_step, trainer.evaluate())
    elif mode == "export":
        _export(trainer)
    else:
        _show_coverage(trainer)
        _show_baseline(trainer)
        _train(trainer)
        _show_metrics(trainer.global_step, trainer.evaluate())
        _show_best(trainer)
        _export(trainer)


def dry_run(gin_files: Sequence[str], gin_params: Sequence[str]) -> None:
    """Shows coverage, bindings and the first batch; trains nothing and keeps nothing.

    Args:
      gin_files: see `configurables.parse`.
      gin_params: the same.

    Raises:
      ValueError: as `run` would before training.
    """
    configurables.parse(gin_files, gin_params)
    with tempfile.TemporaryDirectory() as folder:
        trainer = configurables.make_trainer(folder)
        _show_coverage(trainer)
        _show("gin bindings", configurables.bindings().rstrip())
        batch = trainer.first_batch()
        describe = trainer.task.describe or _describe
        _show("first batch", describe(batch))
        print("\nDry run: nothing was trained or written.")


def _runs_beside(model_dir: str) -> list[str]:
    folder = os.path.dirname(os.path.abspath(model_dir))
    names = os.listdir(folder) if os.path.isdir(folder) else []
    runs_there = [n for n in names if os.path.exists(os.path.join(folder, n, "run.json"))]
    return nearest(os.path.basename(model_dir), runs_there)


def _show(title: str, text: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}\n{text}", flush=True)


def _show_coverage(trainer: Trainer) -> None:
    _show("variables", trainer.coverage.table())


def _show_metrics(step: int, metrics: dict[str, float]) -> None:
    _show(f"held out, step {step}", readable(metrics))


def _show_baseline(trainer: Trainer) -> None:
    if trainer.global_step == 0:
        _show_metrics(0, trainer.evaluate())
        return
    for evaluation in trainer.evaluations:
        if evaluation.pop("global_step") == 0:
            _show_metrics(0, evaluation)


def _show_best(trainer: Trainer) -> None:
    """Shows the state that is exported, where that is not the last one."""
    if trainer.best_metric is None or trainer.eval_every is None:
        return
    candidates = [
        evaluation
        for evaluation in trainer.evaluations
        if evaluation["global_step"] and evaluation["global_step"] % trainer.eval_every == 0
    ]
    if not candidates:
        return
    choose = max if trainer.best_mode == "max" else min
    best = choose(candidates, key=lambda evaluation: evaluation[trainer.best_metric or ""])
    step = int(best.pop("global_step"))
    _show(f"held out, step {step}, the best by {trainer.best_metric}: exported", readable(best))


def _train(trainer: Trainer) -> None:
    before = trainer.global_step
    trainer.train()
    if trainer.global_step == before:
        print(f"\n{trainer.model_dir} is finished: nothing is left to train.", flush=True)


def _export(trainer: Trainer) -> None:
    target = os.path.join(trainer.model_dir, "export")
    path = os.path.join(target, CERTIFICATE_FILE)
    # A folder without our certificate is somebody's, and stays.
    trainer.export(target, overwrite=os.path.exists(path))
    with open(path, encoding="utf-8") as file:
        _show("certificate", Certificate.from_json(file.read()).summary())
    _show(f"tuned model: {target}", _loading_lines(trainer, os.path.abspath(target)))


def _loading_lines(trainer: Trainer, target: str) -> str:
    """Returns lines of Python that load the exported model."""
    if trainer.base.format != "saved_model":
        return f"import finetune\nbase = finetune.load({target!r}, module_fn=...)"
    offered = calling.endpoints(trainer.base.module)
    lines = ["import tensorflow as tf", f"model = tf.saved_model.load({target!r})"]
    for name, takes in offered.items():
        # Keras 2 saves it beside each call, and nobody calls it.
        if name == "call_and_return_all_conditional_losses":
            continue
        spelled = {"__call__": "model"}.get(name, f"model.{name}")
        if name in trainer.base.module.signatures and not hasattr(trainer.base.module, name):
            spelled = f"model.signatures[{name!r}]"
        lines += [f"# {spelled}{variant}" for variant in takes.split(" | ")]
    return "\n".join(lines)


def _describe(batch: Any) -> str:
    """Returns dtypes and shapes of a batch."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    parts = {"x": x, "y": y, "weights": weights}
    return "\n".join(
        f"{name}: {tf.nest.map_structure(lambda t: f'{t.dtype.name}{list(t.shape)}', part)}"
        for name, part in parts.items()
        if part is not None
    )
