"""Fine-tune any TensorFlow model, training exactly the elements one names.

The names below are the public ones; each module's docstring says what it is about. A name is
imported when it is first asked for, so that `finetune-train --help` does not wait for TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

from finetune.version import __version__

if TYPE_CHECKING:
    from finetune.calling import call, endpoints
    from finetune.certificate import Certificate, certify
    from finetune.exporting import FrozenElementsMoved, export
    from finetune.loading import Base, from_module, load
    from finetune.optimizer import MaskedOptimizer
    from finetune.paths import NamedVariable, named_variables
    from finetune.preemption import EXIT_PREEMPTED, Preempted
    from finetune.pruning import prune
    from finetune.rules import Coverage, resolve
    from finetune.runs import RunMismatch
    from finetune.selection import Selection, load_selections, save_selections
    from finetune.selectors import (
        Selector,
        VariableSpec,
        boolean,
        columns,
        complement,
        difference,
        elements,
        everything,
        intersection,
        largest,
        model_state,
        nonzeros,
        nothing,
        random,
        rows,
        slices,
        smallest,
        union,
        zeros,
    )
    from finetune.task import Task
    from finetune.trainer import NonFiniteError, Trainer

__all__ = [
    "EXIT_PREEMPTED",
    "Base",
    "Certificate",
    "Coverage",
    "FrozenElementsMoved",
    "MaskedOptimizer",
    "NamedVariable",
    "NonFiniteError",
    "Preempted",
    "RunMismatch",
    "Selection",
    "Selector",
    "Task",
    "Trainer",
    "VariableSpec",
    "__version__",
    "boolean",
    "call",
    "certify",
    "columns",
    "complement",
    "difference",
    "elements",
    "endpoints",
    "everything",
    "export",
    "from_module",
    "intersection",
    "largest",
    "load",
    "load_selections",
    "model_state",
    "named_variables",
    "nonzeros",
    "nothing",
    "prune",
    "random",
    "resolve",
    "rows",
    "save_selections",
    "slices",
    "smallest",
    "union",
    "zeros",
]

_NAMES_OF_MODULE = {
    "calling": ("call", "endpoints"),
    "certificate": ("Certificate", "certify"),
    "exporting": ("FrozenElementsMoved", "export"),
    "loading": ("Base", "from_module", "load"),
    "optimizer": ("MaskedOptimizer",),
    "paths": ("NamedVariable", "named_variables"),
    "preemption": ("EXIT_PREEMPTED", "Preempted"),
    "pruning": ("prune",),
    "rules": ("Coverage", "resolve"),
    "runs": ("RunMismatch",),
    "selection": ("Selection", "load_selections", "save_selections"),
    "selectors": (
        "Selector",
        "VariableSpec",
        "boolean",
        "columns",
        "complement",
        "difference",
        "elements",
        "everything",
        "intersection",
        "largest",
        "model_state",
        "nonzeros",
        "nothing",
        "random",
        "rows",
        "slices",
        "smallest",
        "union",
        "zeros",
    ),
    "task": ("Task",),
    "trainer": ("NonFiniteError", "Trainer"),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'finetune' has no attribute {name!r}")
    module = importlib.import_module(f"finetune.{_MODULE_OF_NAME[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
