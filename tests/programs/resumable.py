"""Training runs in processes of their own, which may be killed.

Started as a program, it reads lines of JSON from stdin, {"variant", "model_dir", "data_dir"}, and
for each answers with the pid of a process that trains and exports, then with its exit status. That
process is a fork, since importing TensorFlow takes seconds.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import finetune
from finetune.examples import korean_spacing, quickspacer
from finetune.trainer import Trainer

STEPS = {"saved_model": 24, "keras": 60}


def saved_model(model_dir: str, data_dir: str) -> Trainer:
    """A real SavedModel: its dropout is an op, its embedding's gradients are sparse."""
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(1e-2, 20),
        global_clipnorm=0.5,
        use_ema=True,
        ema_momentum=0.9,
        gradient_accumulation_steps=2,
    )
    return Trainer(
        quickspacer.saved_model_dir(),
        [
            ("embedding/embeddings", finetune.rows(quickspacer.ascii_rows())),
            ("conv/kernel", finetune.random(share=0.02)),
            (".*/bias", finetune.everything()),
            (".*", finetune.nothing()),
        ],
        korean_spacing.korean_spacing_task(data_dir),
        optimizer,
        model_dir,
        batch_size=8,
        num_steps=STEPS["saved_model"],
        steps_per_loop=2,
        eval_every=8,
        checkpoint_every=2,
        best_metric="f1",
        seed=3,
        progress=False,
    )


def keras_model(model_dir: str, data_dir: str) -> Trainer:
    """A Keras model with dropout and statistics, on shuffled data that starts again and again."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input([5]),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
            keras.layers.BatchNormalization(momentum=0.9),
        ]
    )
    x = tf.random.stateless_normal([40, 5], [1, 2])
    y = tf.reduce_sum(x[:, :2], axis=1, keepdims=True)
    examples = tf.data.Dataset.from_tensor_slices((x, y))
    task = finetune.Task(
        lambda batch_size, seed: examples.shuffle(16, seed=seed).batch(batch_size).prefetch(1),
        lambda batch_size: examples.batch(batch_size),
        keras.losses.MeanSquaredError(reduction=None),
        metrics=lambda: [keras.metrics.MeanAbsoluteError(name="mae")],
    )
    return Trainer(
        finetune.from_module(model),
        [
            ("sequential/batch_normalization/moving_.*", finetune.nothing()),
            ("sequential/batch_normalization_1/moving_.*", finetune.model_state()),
            ("sequential/dense/kernel", finetune.random(share=0.4)),
            (".*", finetune.everything()),
        ],
        task,
        keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.8),
        model_dir,
        batch_size=6,
        num_steps=STEPS["keras"],
        steps_per_loop=3,
        eval_every=12,
        checkpoint_every=4,
        best_metric="mae",
        best_mode="min",
        keep=2,
        seed=5,
        progress=False,
    )


def run(variant: str, model_dir: str, data_dir: str) -> None:
    """Trains to the end and exports, from wherever the run in `model_dir` is."""
    trainer = {"saved_model": saved_model, "keras": keras_model}[variant](model_dir, data_dir)
    trainer.train()
    if not Path(model_dir, "export").exists():
        trainer.export()


def _forked(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)  # Whatever hangs ends.
        with open(f"{request['model_dir']}.log", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        status = 1
        try:
            run(**request)
            status = 0
        except SystemExit as error:
            status = int(error.code or 0)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


if __name__ == "__main__":
    for line in sys.stdin:
        child = _forked(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
