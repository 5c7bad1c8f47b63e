"""What an optimizer is built on: variables, their names, and what rules say of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from finetune.paths import named_variables
from finetune.rules import Coverage
from finetune.selectors import SelectorLike, VariableSpec, as_selector

Variable: TypeAlias = tf.Variable | keras.Variable
MaskedRules: TypeAlias = Sequence[tuple[str | Variable, SelectorLike]] | Mapping[str, SelectorLike]


def native(variable: Variable) -> tf.Variable:
    """Returns the tf.Variable, of a keras.Variable its value."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def own_name(variable: Variable) -> str:
    """Returns what the variable calls itself: its Keras path, or its name without `:0`."""
    return variable.path if isinstance(variable, keras.Variable) else variable.name.split(":")[0]


def components(variable: tf.Variable) -> list[tf.Variable]:
    """Returns the copies of a variable, one for each local replica."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return list(variable.values)
    return [variable]


def names_of(
    variables: Sequence[Variable], paths: Sequence[str] | None, module: Any
) -> list[tuple[str, ...]]:
    """Returns the names of each variable, its path first.

    Args:
      variables: the variables.
      paths: their paths where they are known.
      module: else what holds them; else their own names count, numbered where they repeat.

    Raises:
      ValueError: when the module does not hold them all.
    """
    if paths is not None:
        return [(path,) for path in paths]
    if module is not None:
        named = {id(n.variable): (n.path, *n.aliases) for n in named_variables(module).values()}
        unknown = [own_name(v) for v in variables if id(native(v)) not in named]
        if unknown:
            raise ValueError(f"`module` does not hold the variables {unknown}.")
        return [named[id(native(v))] for v in variables]
    own = [own_name(variable) for variable in variables]
    # Names are no identity in TensorFlow; numbers make them one as long as the order stays.
    seen: dict[str, int] = {}
    names: list[tuple[str, ...]] = []
    for name in own:
        seen[name] = seen.get(name, -1) + 1
        names.append((f"{name}_{seen[name]}" if seen[name] else name,))
    return names


def as_pairs(rules: Any, path_of: Any) -> list[tuple[str, Any]]:
    """Returns rules with patterns only: a variable stands for its exact path."""
    if isinstance(rules, Mapping):
        return [(re.escape(path), as_selector(selector)) for path, selector in rules.items()]
    return [
        (target if isinstance(target, str) else re.escape(path_of(target)), as_selector(selector))
        for target, selector in rules
    ]


def coverage_by_path(
    rules: Mapping[str, SelectorLike], specs: Mapping[str, VariableSpec]
) -> Coverage:
    """Returns what rules by exact path decide.

    Raises:
      ValueError: unless they name every variable once, and leave something trainable.
    """
    unknown = [path for path in rules if path not in specs]
    missing = [path for path in specs if path not in rules]
    if unknown or missing:
        raise ValueError(
            f"`rules` by path must name every variable once: unknown {unknown}, missing {missing}; "
            f"the variables are {list(specs)}."
        )
    selections = {path: as_selector(rules[path])(spec) for path, spec in specs.items()}
    if not any(selection.count for selection in selections.values()):
        raise ValueError(f"nothing is trainable: the rules freeze all of {list(specs)}.")
    return Coverage(selections, {path: as_selector(rules[path]).text for path in specs})


def specs_of(
    names: Sequence[tuple[str, ...]], variables: Sequence[tf.Variable]
) -> dict[str, VariableSpec]:
    """Returns what selectors may know of each variable: its present value is the base value."""
    return {
        own[0]: VariableSpec(own[0], tuple(v.shape), v.dtype.name, _reader(v), own)
        for own, v in zip(names, variables, strict=True)
    }


def _reader(variable: tf.Variable) -> Any:
    def read() -> np.ndarray:
        with tf.init_scope():
            return variable.numpy()

    return read
