"""The variables of a module, each under one name: its path.

A variable's `name` is no identity (three variables of one model may all be called `w:0`). Its path
is: the attributes that lead from the module to it, spelled as TensorFlow's checkpoints spell them.
"""

import collections
import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

# Every module that touches Keras imports this one; other backends' variables are no tf.Variables.
if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "finetune needs Keras' TensorFlow backend, but `KERAS_BACKEND` "
        f"chose {keras.backend.backend()}: set KERAS_BACKEND=tensorflow before Keras is imported."
    )

# A shared sub-module is reached by many paths, and they multiply with each level of sharing.
_MAX_PATHS_OF_AN_OBJECT = 8


@dataclasses.dataclass(frozen=True)
class NamedVariable:
    """A variable and the names by which one may ask for it.

    Attributes:
      path: Attribute names joined by `/`, without a leading slash; unique in the module. A `.` or
        `/` inside an attribute name (a dictionary's key, say) is written `..` or `.S`, as in the
        key of a checkpoint, which is this path and `/.ATTRIBUTES/VARIABLE_VALUE`.
      variable: The `tf.Variable`; of a `keras.Variable` its `value`. Under a strategy the
        distributed variable itself.
      aliases: Every other name that no second variable of the module carries: other attribute
        paths, the path without escapes, `tf.Variable.name` without `:0`, a Keras path.
      trainable: False for state that is not a weight: BatchNorm statistics, seeds, counters.
    """

    path: str
    variable: tf.Variable
    aliases: tuple[str, ...] = ()
    trainable: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The variable's static shape."""
        return tuple(self.variable.shape.as_list())

    @property
    def dtype(self) -> tf.DType:
        """The variable's dtype."""
        return self.variable.dtype

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


def named_variables(module: Any) -> dict[str, NamedVariable]:
    """Every variable of `module` is in the result once, under its path.

    The object graph is walked breadth first, and the first path that reaches a variable is its
    path, so it is the variable's key in a checkpoint of the module, with two exceptions. Optimizers
    are walked last: a weight that a compiled Keras model also reaches through its optimizer gets a
    path through the model (the optimizer's is an alias), and what belongs to the optimizer alone is
    left out. The state of a `keras.random.SeedGenerator`, which a checkpoint leaves out, is in.

    Args:
      module: A `tf.Module`, a Keras model or layer, a loaded SavedModel, or any other object that
        `tf.train.Checkpoint` can save.

    Returns:
      The variables by path, in the order in which the walk reached them; empty if there are none.

    Raises:
      ValueError: If `module` is not such an object, or this is called where Keras variables are
        tensors, as in a `keras.StatelessScope`.

    Example:

    >>> module = tf.Module()
    >>> module.table = tf.Variable(tf.zeros([4, 2]), name="w")
    >>> module.layers = [tf.Variable(0, name="count"), module.table]
    >>> for path, named in named_variables(module).items():
    ...     print(path, named.shape, named.aliases, named.trainable)
    table (4, 2) ('w', 'layers/1') True
    layers/0 () ('count',) False
    """
    found: dict[int, _Found] = {}
    for steps, owner, through_optimizer in _walk(module):
        path = "/".join(escape(step) for step in steps)
        variable = owner.value if isinstance(owner, keras.Variable) else owner
        if not isinstance(variable, tf.Variable):
            raise ValueError(
                f"`module` (a {type(module).__name__}) holds a Keras variable, {path!r}, that has "
                "no tf.Variable behind it here: call this outside of Keras' scopes."
            )
        if id(variable) not in found:
            if through_optimizer:
                continue
            found[id(variable)] = _Found(path, variable)
        names = [path, "/".join(steps), variable.name.removesuffix(":0")]
        if isinstance(owner, keras.Variable):
            names.append(owner.path)
        found[id(variable)].names.update(dict.fromkeys(names))
        found[id(variable)].trainable &= bool(owner.trainable)

    carriers = collections.Counter(name for entry in found.values() for name in entry.names)
    paths = {entry.path for entry in found.values()}
    return {
        entry.path: NamedVariable(
            path=entry.path,
            variable=entry.variable,
            aliases=tuple(n for n in entry.names if n not in paths and carriers[n] == 1),
            trainable=entry.trainable and _is_differentiable(entry.variable.dtype),
        )
        for entry in found.values()
    }


def nearest(name: str, names: Iterable[str], n: int = 5) -> list[str]:
    """The `n` of `names` that look most like `name`, the likest first.

    Args:
      name: What was asked for.
      names: What exists.
      n: How many to return at most.

    Returns:
      Up to `n` of `names`; equally like ones stay in their order.

    Example:

    >>> nearest("embeding/embeddings", ["conv/bias", "embedding/embeddings"], n=1)
    ['embedding/embeddings']
    """

    def likeness(other: str) -> float:
        return difflib.SequenceMatcher(None, name, other).ratio()

    return sorted(dict.fromkeys(names), key=likeness, reverse=True)[:n]


def escape(name: str) -> str:
    """How an attribute name is spelled inside a path, as in the keys of checkpoints.

    Example:

    >>> escape("a/b.c")
    'a.Sb..c'
    """
    return name.replace(".", "..").replace("/", ".S")


@dataclasses.dataclass
class _Found:
    path: str
    variable: tf.Variable
    names: dict[str, None] = dataclasses.field(default_factory=dict)
    trainable: bool = True


def _walk(root: Any) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """Yields (attribute names, variable, whether an optimizer is on the way), breadth first."""
    if not hasattr(root, "_trackable_children"):
        raise ValueError(
            f"`module` ({root!r}) is not an object whose variables TensorFlow can find: pass a "
            "tf.Module, a Keras model or layer, or a loaded SavedModel."
        )
    view = tf.train.TrackableView(root)
    children: dict[int, dict[str, Any]] = {}  # Also keeps the objects alive, so ids stay theirs.
    visits: collections.Counter[int] = collections.Counter()
    queue: collections.deque = collections.deque([(root, (), ())])
    optimizers: collections.deque = collections.deque()
    while queue or optimizers:
        through_optimizer = not queue
        current, steps, ancestors = (queue or optimizers).popleft()
        if visits[id(current)] == _MAX_PATHS_OF_AN_OBJECT:
            continue
        visits[id(current)] += 1
        if isinstance(current, keras.random.SeedGenerator):
            yield (*steps, "state"), current.state, through_optimizer
            continue
        if isinstance(current, (tf.Variable, keras.Variable)):
            yield steps, current, through_optimizer
            continue
        if id(current) not in children:
            children[id(current)] = dict(view.children(current)) | _seed_generators(current)
        for name, child in children[id(current)].items():
            if id(child) in ancestors or child is current:
                continue
            last = through_optimizer or _is_optimizer(child, name)
            step = (child, (*steps, name), (*ancestors, id(current)))
            (optimizers if last else queue).append(step)


def _seed_generators(owner: Any) -> dict[str, keras.random.SeedGenerator]:
    # TensorFlow does not track these, yet the state of a Keras model's dropout is in them.
    attributes = getattr(owner, "__dict__", {})
    return {n: a for n, a in attributes.items() if isinstance(a, keras.random.SeedGenerator)}


def _is_optimizer(child: Any, name: str) -> bool:
    if isinstance(child, (keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer)):
        return True
    # In a loaded SavedModel every object is of one private class: only the attribute tells.
    restored = type(child).__name__ == "_UserObject"
    return restored and name in ("optimizer", "_optimizer")


def _is_differentiable(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_complex)
