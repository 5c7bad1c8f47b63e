"""What fine-tuning starts from: a SavedModel, a checkpoint, or a module in memory."""

import collections
import contextlib
import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from finetune import calling, randomness
from finetune.bundle import Bundle, digest, fingerprint
from finetune.paths import NamedVariable, escape, named_variables, nearest
from finetune.selectors import VariableSpec

_GRAPH_FILE = "saved_model.pb"
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"
# What others keep beside a model's variables.
_BOOKKEEPING = frozenset(["save_counter", "optimizer", ".OPTIMIZER_SLOT", "global_step"])


@dataclasses.dataclass(eq=False, repr=False)
class Base:
    """A model as it was before fine-tuning, and the model itself, which training changes.

    `load` and `from_module` make one. It keeps its module alive, whose functions need it.

    Attributes:
      module: the model: what `tf.saved_model.load` or `module_fn` returned.
      variables: its variables by path.
      format: 'saved_model', 'checkpoint' or 'module'.
      directory: the folder of the SavedModel or the checkpoint; None for a module.
      bundle: the variables' values on disk; None for a module.
      endpoint: the function to call, None for the one that `calling.call` takes by itself.
      edits: base values that were replaced on purpose before training, by path.

    Example:

    >>> module = tf.Module()
    >>> module.w = tf.Variable([1.0, 2.0])
    >>> base = from_module(module)
    >>> _ = module.w.assign([3.0, 3.0])
    >>> base.read("w")
    array([1., 2.], dtype=float32)
    """

    module: Any
    variables: dict[str, NamedVariable]
    format: str
    directory: str | None = None
    bundle: Bundle | None = None
    endpoint: str | None = None
    edits: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    _keys: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    _snapshot: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    _digests: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        where = f" in {self.directory}" if self.directory else ""
        return f"<Base: {self.format}{where}, {len(self.variables)} variables>"

    def read(self, path: str) -> np.ndarray:
        """Returns a fresh array with the base value of the variable, whatever training did to it.

        Args:
          path: one of `variables`.

        Raises:
          ValueError: there is no such variable, or its value on disk is damaged.
        """
        self._check(path)
        if path in self.edits:
            return np.array(self.edits[path])
        return self._unedited(path)

    def key_of(self, path: str) -> str:
        """Returns the key under which `bundle` holds the variable.

        Raises:
          ValueError: there is no such variable, or `bundle` does not hold it.
        """
        self._check(path)
        if path in self._keys:
            return self._keys[path]
        where = f"the checkpoint {self.bundle.prefix}" if self.bundle else "any file"
        raise ValueError(f"`path` ({path}) is a variable whose value is not in {where}.")

    @property
    def digests(self) -> dict[str, str]:
        """The digest of every variable's base value, by path; read once, one at a time."""
        for path in self.variables.keys() - self._digests.keys():
            self._digests[path] = digest(self._unedited(path))
        return {
            path: digest(self.edits[path]) if path in self.edits else self._digests[path]
            for path in self.variables
        }

    @property
    def fingerprint(self) -> str:
        """One digest of all paths and base values: equal for equal bases, wherever they lie."""
        return fingerprint(self.digests)

    def specs(self) -> dict[str, VariableSpec]:
        """Returns what selectors may know of each variable, by path."""
        return {
            path: VariableSpec(
                path=path,
                shape=named.shape,
                dtype=named.dtype.name,
                read=functools.partial(self.read, path),
                names=(path, *named.aliases),
                trainable=named.trainable,
            )
            for path, named in self.variables.items()
        }

    def edited(self, edits: Mapping[str, np.ndarray]) -> "Base":
        """Returns a base whose values are these, in its module too, which it shares with this one.

        Args:
          edits: new base values by path, of the variables' own shapes and dtypes.

        Raises:
          ValueError: a path, shape or dtype does not fit; all of them are listed.
        """
        wrong = []
        for path, value in edits.items():
            if path not in self.variables:
                wrong.append(f"{path}: no such variable, nearest: {nearest(path, self.variables)}")
                continue
            named = self.variables[path]
            if (value.shape, value.dtype) != (named.shape, named.dtype.as_numpy_dtype):
                wrong.append(
                    f"{path}: {value.dtype} {value.shape}, must be {named.dtype.name} {named.shape}"
                )
        if wrong:
            raise ValueError("`edits` do not fit the base:" + _lines(wrong))
        for path, value in edits.items():
            self.variables[path].variable.assign(value)
        base = copy.copy(self)
        base.edits = {**self.edits, **edits}
        return base

    def set_random_state(self, seed: int | tf.Tensor, step: int | tf.Tensor) -> Any:
        """What the module's replaced random ops draw next depends on `seed` and `step` alone.

        See `randomness.set_random_state`.
        """
        return randomness.set_random_state(self.module, seed, step)

    def _unedited(self, path: str) -> np.ndarray:
        if self.bundle is not None and path in self._keys:
            return self.bundle.read(self._keys[path])
        return self._snapshot[path].copy()

    def _check(self, path: str) -> None:
        if path not in self.variables:
            raise ValueError(
                f"`path` ({path}) is no variable of the base; nearest: "
                f"{nearest(path, self.variables)}."
            )


def load(
    source: str | os.PathLike[str],
    *,
    module_fn: Callable[[], Any] | None = None,
    dtype_policy: str | None = None,
    endpoint: str | None = None,
) -> Base:
    """Returns the base that lies at `source`; its module holds the values from there, all of them.

    A SavedModel is loaded so that its dropout can be repeated (`randomness.load_resumable`). A
    checkpoint is restored into what `module_fn` returns: each variable of the module must be in the
    checkpoint with its own shape and dtype, and each of the checkpoint's in the module. Only an
    optimizer's variables, save counters and global steps may be left over. If the checkpoint holds
    the module as a part (`tf.train.Checkpoint(model=...)`), it is found there, and other parts do
    not count. Load under a strategy's scope to have the variables distributed.

    Args:
      source: the folder of a SavedModel; or a checkpoint's prefix, or the folder that it is in,
        where the latest is taken: what the file `checkpoint` names, or else the only one.
      module_fn: makes the module, built, for a checkpoint.
      dtype_policy: Keras' global dtype policy while `module_fn` runs, such as 'mixed_bfloat16'.
      endpoint: the function or signature to call, if not the one that `calling.call` takes.

    Raises:
      ValueError: there is nothing at `source`, it does not fit the module (everything that does not
        is listed), or an argument does not fit the format.

    Usable eagerly only.

    >>> import tempfile
    >>> def make():
    ...     module = tf.Module()
    ...     module.w = tf.Variable([0.0, 0.0])
    ...     return module
    >>> module = make()
    >>> _ = module.w.assign([1.0, 2.0])
    >>> prefix = tf.train.Checkpoint(model=module).save(tempfile.mkdtemp() + "/ckpt")
    >>> base = load(prefix, module_fn=make)
    >>> base.module.w.numpy(), base.key_of("w")
    (array([1., 2.], dtype=float32), 'model/w/.ATTRIBUTES/VARIABLE_VALUE')
    """
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(
            f"`source` ({type(source).__name__}) must be a path; for a model in memory write "
            "finetune.from_module(model)."
        )
    source = os.fspath(source)
    if source.endswith((".keras", ".h5", ".hdf5")):
        raise ValueError(
            f"`source` ({source}) is a Keras file: let Keras load it, with "
            "finetune.from_module(keras.models.load_model(...)), or for weights alone "
            "model.load_weights(...) and finetune.from_module(model)."
        )
    if tf.io.gfile.exists(os.path.join(source, _GRAPH_FILE)):
        base = _load_saved_model(source, module_fn, dtype_policy)
    else:
        base = _load_checkpoint(_prefix(source), module_fn, dtype_policy)
    if endpoint is not None:
        offered = calling.endpoints(base.module)
        if endpoint not in offered:
            raise ValueError(
                f"`endpoint` ({endpoint!r}) is not offered by {source}. There are: {offered}."
            )
        base.endpoint = endpoint
    return base


def from_module(module: Any) -> Base:
    """Returns a base with the values that `module` has now; they are copied.

    Args:
      module: a `tf.Module`, a Keras model that is built, or another object with variables.

    Raises:
      ValueError: `module` has no variables.
    """
    variables = _variables(module, "`module`")
    return Base(module, variables, "module", _snapshot=_values(variables))


def _load_saved_model(
    directory: str, module_fn: Callable[[], Any] | None, dtype_policy: str | None
) -> Base:
    if module_fn is not None:
        raise ValueError(
            f"`module_fn` is given, but `source` ({directory}) is a SavedModel, which brings its "
            "own functions: leave it out, or give the prefix "
            f"{os.path.join(directory, 'variables', 'variables')} to restore its variables alone."
        )
    if dtype_policy is not None:
        raise ValueError(
            f"`dtype_policy` ({dtype_policy!r}) cannot be had from a SavedModel ({directory}): its "
            "compute dtypes are fixed in its graph. Use a checkpoint and `module_fn`."
        )
    bundle = Bundle(os.path.join(directory, "variables", "variables"))
    module = randomness.load_resumable(directory)
    variables = _variables(module, f"`source` ({directory})")
    used = _used_by_functions(module)
    for path, named in variables.items():
        # A Keras 3 export holds a second copy of each weight, which no function reads.
        if id(named.variable) not in used:
            variables[path] = dataclasses.replace(named, trainable=False)
    root = _objects(bundle)
    keys = {path: key for path, named in variables.items() if (key := root.key_of(named))}
    unsaved = {path: named for path, named in variables.items() if path not in keys}
    return Base(
        module, variables, "saved_model", directory, bundle,
        _keys=keys, _snapshot=_values(unsaved),
    )  # fmt: skip


def _used_by_functions(module: Any) -> set[int]:
    # Signatures are no descendants.
    functions = list(getattr(module, "signatures", {}).values())
    for owner in tf.train.TrackableView(module).descendants():
        functions += getattr(owner, "concrete_functions", [])
    return {id(variable) for function in functions for variable in function.variables}


def _prefix(source: str) -> str:
    """The prefix of the checkpoint at `source`, found in the folder it is in now."""
    if tf.io.gfile.exists(source + ".index") or not tf.io.gfile.isdir(source):
        if not tf.io.gfile.exists(source) and not tf.io.gfile.exists(source + ".index"):
            folder = os.path.dirname(source.rstrip("/")) or "."
            there = sorted(tf.io.gfile.listdir(folder)) if tf.io.gfile.isdir(folder) else []
            raise ValueError(
                f"`source` ({source}) does not exist, neither as a folder nor as the prefix of a "
                f"checkpoint. In {folder} there is, nearest first: "
                f"{', '.join(nearest(os.path.basename(source), there)) or 'nothing'}."
            )
        return source
    found = sorted(
        name.removesuffix(".index")
        for name in tf.io.gfile.listdir(source)
        if name.endswith(".index")
    )
    state = tf.train.get_checkpoint_state(source)
    if state is not None and state.model_checkpoint_path:
        # A folder that was moved still names the place where it was written.
        latest = os.path.basename(state.model_checkpoint_path)
        if latest not in found:
            raise ValueError(
                f"`source` ({source}): its file `checkpoint` names {latest}, which is not there. "
                f"There is: {', '.join(found) or 'none'}. Give the prefix of one of them."
            )
        return os.path.join(source, latest)
    if len(found) == 1:
        return os.path.join(source, found[0])
    if found:
        raise ValueError(
            f"`source` ({source}) holds several checkpoints and no file `checkpoint` that tells "
            f"which is the latest: {', '.join(found)}. Give the prefix of one of them."
        )
    below = [
        name.rstrip("/")
        for name in sorted(tf.io.gfile.listdir(source))
        if tf.io.gfile.exists(os.path.join(source, name, _GRAPH_FILE))
    ]
    hint = f" There are SavedModels below it: {', '.join(below)}." if below else ""
    raise ValueError(
        f"`source` ({source}) holds neither a SavedModel ({_GRAPH_FILE}) nor a checkpoint "
        f"(*.index).{hint}"
    )


def _load_checkpoint(
    prefix: str, module_fn: Callable[[], Any] | None, dtype_policy: str | None
) -> Base:
    if module_fn is None:
        raise ValueError(
            f"`module_fn` is missing: `source` ({prefix}) is a checkpoint, which has no functions. "
            "Give a function that returns the module, built."
        )
    bundle = Bundle(prefix)
    with _dtype_policy(dtype_policy):
        module = module_fn()
    variables = _variables(module, "what `module_fn` returned")
    name, part = _find_part(_objects(bundle), variables)
    keys = {path: key for path, named in variables.items() if (key := part.key_of(named))}
    _check_match(bundle, name, part, variables, keys)
    for path, key in keys.items():
        variables[path].variable.assign(bundle.read(key))
    unsaved = {path: named for path, named in variables.items() if path not in keys}
    return Base(
        module, variables, "checkpoint", os.path.dirname(prefix) or ".", bundle,
        _keys=keys, _snapshot=_values(unsaved),
    )  # fmt: skip


@contextlib.contextmanager
def _dtype_policy(policy: str | None) -> Iterator[None]:
    before = keras.config.dtype_policy()
    if policy is not None:
        keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@dataclasses.dataclass(eq=False)
class _Node:
    """An object in a checkpoint: the key of its value, if it is a variable, and its attributes.

    Keys alone would not do: a weight that an optimizer refers to may be saved under a key that
    begins with `optimizer/`, and the model's own path to it is in the object graph only.
    """

    key: str | None = None
    children: dict[str, "_Node"] = dataclasses.field(default_factory=dict)

    def at(self, path: str) -> "_Node | None":
        node: _Node | None = self
        for name in path.split("/"):
            node = node and node.children.get(name)
        return node

    def key_of(self, named: NamedVariable) -> str | None:
        nodes = map(self.at, (named.path, *named.aliases))
        return next((node.key for node in nodes if node and node.key), None)

    def walk(self) -> Iterator[tuple[str, "_Node"]]:
        """Every object once, breadth first, with the path to it; optimizers are left out."""
        seen = {id(self)}
        queue = collections.deque([("", self)])
        while queue:
            path, node = queue.popleft()
            yield path, node
            for name, child in node.children.items():
                if id(child) not in seen and name not in _BOOKKEEPING:
                    seen.add(id(child))
                    queue.append((f"{path}/{name}".lstrip("/"), child))


def _objects(bundle: Bundle) -> _Node:
    """The root object of a checkpoint; without an object graph the names make one."""
    keys = bundle.keys()
    if _OBJECT_GRAPH not in keys:
        root = _Node()
        for key in keys:
            node = root
            for name in key.split("/"):
                node = node.children.setdefault(name, _Node())
            node.key = key
        return root
    graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
        bundle.read(_OBJECT_GRAPH).item()
    )
    nodes = [_Node() for _ in graph.nodes]
    for node, proto in zip(nodes, graph.nodes, strict=True):
        node.key = next((a.checkpoint_key for a in proto.attributes if a.name == _VALUE), None)
        for child in proto.children:
            node.children[escape(child.local_name)] = nodes[child.node_id]
    return nodes[0]


def _find_part(root: _Node, variables: Mapping[str, NamedVariable]) -> tuple[str, _Node]:
    """The object in the checkpoint that is the module: where all variables, or most, are found."""
    wanted = [named for named in variables.values() if not _is_never_saved(named)]
    parts = list(root.walk())
    fitting = [(name, part) for name, part in parts if all(map(part.key_of, wanted))]
    if not fitting:
        return max(parts, key=lambda item: sum(bool(item[1].key_of(named)) for named in wanted))
    names = [name for name, _ in fitting]
    if len(fitting) > 1 and names[0]:
        raise ValueError(
            f"`source` holds several objects with all the variables of the module: {names}. "
            "Let `module_fn` return a module that has the one that you mean as an attribute of "
            "that name."
        )
    return fitting[0]


def _check_match(
    bundle: Bundle,
    name: str,
    part: _Node,
    variables: Mapping[str, NamedVariable],
    keys: Mapping[str, str],
) -> None:
    used = set(keys.values())
    unused = {path: node.key for path, node in part.walk() if node.key and node.key not in used}
    wrong = [
        f"{path}: missing in the checkpoint, nearest: {', '.join(nearest(path, unused, 3)) or '-'}"
        for path, named in variables.items()
        if path not in keys and not _is_never_saved(named)
    ]
    wrong += [f"{path}: in the checkpoint, but not in the module" for path in unused]
    for path, key in keys.items():
        named = variables[path]
        if bundle.shape(key) != named.shape:
            wrong.append(f"{path}: shape {named.shape}, in the checkpoint {bundle.shape(key)}")
        if bundle.dtype(key) != named.dtype:
            wrong.append(
                f"{path}: dtype {named.dtype.name}, in the checkpoint {bundle.dtype(key).name}"
            )
    if wrong:
        where = f"its part {name}" if name else "it"
        raise ValueError(
            f"`source` ({bundle.prefix}) does not fit the module: {where} has {len(used)} of "
            f"{len(variables)} variables by name, and these do not fit:{_lines(wrong)}\n"
            "Nothing is left out, reshaped or cast: let `module_fn` make the module that was saved."
        )


def _is_never_saved(named: NamedVariable) -> bool:
    """Whether TensorFlow's checkpoints leave it out: the state of a Keras SeedGenerator."""
    return not named.trainable and "seed_generator_state" in named.variable.name


def _variables(module: Any, what: str) -> dict[str, NamedVariable]:
    variables = named_variables(module)
    if not variables:
        raise ValueError(
            f"{what} has no variables ({type(module).__name__}): a Keras model has them once it is "
            "built (called once), a tf.Module once they are attributes."
        )
    return variables


def _values(variables: Mapping[str, NamedVariable]) -> dict[str, np.ndarray]:
    values = {}
    for path, named in variables.items():
        distributed = isinstance(named.variable, tf.distribute.DistributedValues)
        value = (named.variable.values[0] if distributed else named.variable).numpy()
        values[path] = np.asarray(value, object if named.dtype == tf.string else None)
    return values


def _lines(items: list[str]) -> str:
    return "".join(f"\n  {item}" for item in items)
