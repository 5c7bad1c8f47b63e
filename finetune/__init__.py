"""Fine-tune any TensorFlow model, training exactly the elements one names.

The names below are the public ones; each module's docstring says what it is about.
"""

from finetune.optimizer import MaskedOptimizer
from finetune.paths import NamedVariable, named_variables
from finetune.rules import Coverage, resolve
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
from finetune.version import __version__

__all__ = [
    "Coverage",
    "MaskedOptimizer",
    "NamedVariable",
    "Selection",
    "Selector",
    "VariableSpec",
    "__version__",
    "boolean",
    "columns",
    "complement",
    "difference",
    "elements",
    "everything",
    "intersection",
    "largest",
    "load_selections",
    "model_state",
    "named_variables",
    "nonzeros",
    "nothing",
    "random",
    "resolve",
    "rows",
    "save_selections",
    "slices",
    "smallest",
    "union",
    "zeros",
]
