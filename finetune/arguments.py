"""What a Trainer is given: checked, made ready, and described so that a resume can compare."""

from __future__ import annotations

import hashlib
import json
import numbers
import os
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from finetune.loading import Base, load
from finetune.optimizer import MaskedOptimizer
from finetune.rules import Rules, resolve
from finetune.selectors import as_selector
from finetune.state import components
from finetune.task import Task

IN_SCOPE = (
    "A Trainer is made and used outside of `strategy.scope()`: give it the strategy as `strategy`."
)


def check_counts(**counts: int | None) -> None:
    """Returns if each is None or a whole number of 1 or more.

    Raises:
      ValueError: names all that are not.

    Example:
      >>> check_counts(batch_size=32, num_steps=None)
      >>> check_counts(batch_size=0, num_steps=1.5)
      Traceback (most recent call last):
      ...
      ValueError: `batch_size` (0), `num_steps` (1.5) must be whole numbers of 1 or more.
    """
    wrong = [
        f"`{name}` ({value!r})" for name, value in counts.items()
        if value is not None and (not _is_whole(value) or value < 1)
    ]  # fmt: skip
    if wrong:
        kind = "a whole number" if len(wrong) == 1 else "whole numbers"
        raise ValueError(f"{', '.join(wrong)} must be {kind} of 1 or more.")


def check_best(
    best_metric: str | None, best_mode: str, patience: int | None, eval_every: int | None
) -> None:
    """Returns if what they say about the best state goes together.

    Raises:
      ValueError: if it does not.
    """
    if best_mode not in ("max", "min"):
        raise ValueError(f"`best_mode` ({best_mode!r}) must be 'max' or 'min'.")
    if patience is not None and best_metric is None:
        raise ValueError(f"`patience` ({patience}) needs a `best_metric` to watch.")
    if best_metric is not None and eval_every is None:
        raise ValueError(
            f"`best_metric` ({best_metric!r}) needs `eval_every`: without evaluations during "
            "training there is no best state."
        )


def check_others(task: Any, optimizer: Any, model_dir: str, seed: Any) -> None:
    """Returns if each of these is what a Trainer takes.

    Raises:
      ValueError: if one is not.
    """
    if not isinstance(task, Task):
        raise ValueError(
            f"`task` ({task!r}) must be a finetune.Task; a function that makes one must be "
            "called, in gin @my_task()."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"`optimizer` ({optimizer!r}) must be a Keras 3 optimizer, for instance "
            "keras.optimizers.Adam(1e-3)."
        )
    if isinstance(optimizer, MaskedOptimizer):
        raise ValueError(
            "`optimizer` is a MaskedOptimizer already: give the Trainer the optimizer inside it, "
            "and the rules as `rules`."
        )
    if not isinstance(model_dir, (str, os.PathLike)) or not os.fspath(model_dir):
        raise ValueError(f"`model_dir` ({model_dir!r}) must be the path of the run's folder.")
    if "://" in os.fspath(model_dir) or os.path.isfile(model_dir):
        raise ValueError(f"`model_dir` ({model_dir}) must be a local folder.")
    if os.path.exists(os.path.join(model_dir, "saved_model.pb")):
        raise ValueError(
            f"`model_dir` ({model_dir}) holds a SavedModel: choose a folder of its own."
        )
    if not _is_whole(seed):
        raise ValueError(f"`seed` ({seed!r}) must be a whole number.")


def supported(strategy: tf.distribute.Strategy | None) -> tf.distribute.Strategy:
    """Returns the strategy to train under; for None the one that stands for no strategy.

    Raises:
      ValueError: for a kind that the Trainer cannot handle, or inside of a scope.
    """
    if tf.distribute.has_strategy():
        raise ValueError(IN_SCOPE)
    none = tf.distribute.get_strategy()
    kinds = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy, type(none))
    if strategy is not None and not isinstance(strategy, kinds):
        raise ValueError(
            f"`strategy` ({_name_of(strategy)}) is not supported yet: use MirroredStrategy for the "
            "devices of one machine, OneDeviceStrategy, or None."
        )
    return strategy or none


def loaded(base: Base | str | Callable[[], Base], strategy: tf.distribute.Strategy) -> Base:
    """Returns the base, loaded under the strategy if it is a path or a function.

    Raises:
      ValueError: if it is neither, or has not one copy of each variable for each replica.
    """
    if not isinstance(base, Base):
        if not callable(base) and not isinstance(base, (str, os.PathLike)):
            raise ValueError(
                f"`base` ({base!r}) must be a finetune.Base, as finetune.load and "
                "finetune.from_module return it, a path, or a function that returns one."
            )
        if isinstance(base, tf.Module | keras.layers.Layer):
            raise ValueError(
                f"`base` ({type(base).__name__}) is a model: give finetune.from_module(model)."
            )
        with strategy.scope():
            base = base() if callable(base) else load(base)
    if not isinstance(base, Base):
        raise ValueError(f"`base` is a function that returned {base!r}, not a finetune.Base.")
    replicas = strategy.num_replicas_in_sync
    for path, named in base.variables.items():
        copies = len(components(named.variable))
        if copies != replicas:
            raise ValueError(
                f"`base` was not loaded under `strategy` ({_name_of(strategy)}, replicas: "
                f"{replicas}): the number of copies of `{path}` is {copies}. Pass a path or a "
                "function that returns the Base, or load it inside `with strategy.scope():`."
            )
    return base


def described_rules(rules: Rules, base: Base) -> list[str]:
    """Returns a text for each rule that is another when the rule selects otherwise.

    Functions of the user are told apart by their names only.

    Raises:
      ValueError: for what are no rules.
    """
    try:
        pairs = [(getattr(p, "pattern", p), as_selector(selector)) for p, selector in rules]
    except (TypeError, ValueError):
        resolve(rules, base.specs())  # Says what is wrong, and how rules are written.
        raise
    return [
        f"('{pattern}', {s.text}) sha256 {hashlib.sha256(s.identity.encode()).hexdigest()[:16]}"
        for pattern, s in pairs
    ]


def described_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns the optimizer's class and arguments, JSON-able; the class alone if it hides them.

    Example:
      >>> described_optimizer(keras.optimizers.SGD(0.5, momentum=0.25))["config"]["momentum"]
      0.25
    """
    try:
        with warnings.catch_warnings():
            # A lambda is unsafe to load, which nobody does here.
            warnings.simplefilter("ignore")
            config = keras.saving.serialize_keras_object(optimizer)
        described: dict[str, Any] = _without_names(json.loads(json.dumps(config)))
    except (TypeError, ValueError, NotImplementedError):
        # A function or class of the user that does not tell what it was made of.
        return {"class_name": type(optimizer).__name__}
    return described


def _without_names(config: Any) -> Any:
    """Keras numbers the names of optimizers within a process: they say nothing."""
    if isinstance(config, list):
        return [_without_names(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {key: _without_names(value) for key, value in config.items() if key != "name"}


def _name_of(strategy: tf.distribute.Strategy) -> str:
    """Returns the public name of a strategy's class, if it has one."""
    if isinstance(strategy, type(tf.distribute.get_strategy())):
        return "None"
    names = (name for name in dir(tf.distribute) if getattr(tf.distribute, name) is type(strategy))
    return next(names, type(strategy).__name__)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
