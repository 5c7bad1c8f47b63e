"""Fine-tune any TensorFlow model, training exactly the elements one names.

The names below are the public ones; each module's docstring says what it is about.
"""

from finetune.calling import call, endpoints
from finetune.certificate import Certificate, certify
from finetune.export import FrozenElementsMoved, export
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
from finetune.version import __version__

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
