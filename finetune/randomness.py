"""Random numbers inside a loaded SavedModel that a resumed run draws again.

A stateful op such as `RandomUniform` (a dropout, say) keeps its state in its kernel, where nothing
can save it or set it. `load_resumable` replaces such ops by their stateless twins, whose seed comes
from a variable that holds (seed, step); `set_random_state` sets it.
"""

import dataclasses
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2
from tensorflow.core.protobuf import saved_model_pb2, saved_object_graph_pb2

_GRAPH_FILE = "saved_model.pb"
_ATTRIBUTE = "_finetune_random_state"
_STATE = "finetune_random_state"  # The variable, and each function argument that carries a seed.
_OUTER, _INNER = "_finetune_outer", "_finetune_inner"  # Get the variable; get a seed.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_PHILOX = 1
_INT64, _RESOURCE = tf.int64.as_datatype_enum, tf.resource.as_datatype_enum


@dataclasses.dataclass(frozen=True)
class _Twin:
    """Inputs are (shape, ...) for a stateful op, (shape, key, counter, alg, ...) for its twin."""

    op: str
    attributes: Mapping[str, str]  # The twin's name of each attribute.


_TWINS = {
    "RandomUniform": _Twin("StatelessRandomUniformV2", {"dtype": "dtype", "T": "Tshape"}),
    "RandomStandardNormal": _Twin("StatelessRandomNormalV2", {"dtype": "dtype", "T": "Tshape"}),
    "TruncatedNormal": _Twin("StatelessTruncatedNormalV2", {"dtype": "dtype", "T": "Tshape"}),
    "RandomUniformInt": _Twin("StatelessRandomUniformIntV2", {"Tout": "dtype", "T": "Tshape"}),
}
_WITHOUT_TWIN = frozenset(
    [
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomCrop",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "ThreadUnsafeUnigramCandidateSampler",
        "UniformCandidateSampler",
    ]
)


def load_resumable(directory: str) -> Any:
    """The SavedModel, loaded so that `set_random_state` decides what its random ops draw.

    On disk nothing changes. Distributions stay what they were, and a function without random ops is
    the one that was saved, bit for bit. Two ops, or one op called from two places, draw from
    streams of their own. Replaced are uniform and (truncated) normal ops in functions and in what
    those call; other kinds of op, and any op in a branch or body of control flow, in a custom
    gradient, or in a TF1 graph, stay as they are: `stateful_random_ops` finds them.

    Until the state is set it is (0, 0): every call draws the same. To save the module again with
    `tf.saved_model.save`, load it with `tf.saved_model.load` instead.

    Args:
      directory: A folder with a `saved_model.pb`. One that is not on this machine's file system is
        loaded as it is.

    Returns:
      What `tf.saved_model.load` returns; under a strategy's scope, its variables distributed.
    """
    rewritten = _rewritten_copy(directory) if os.path.isdir(directory) else None
    if rewritten is None:
        return tf.saved_model.load(directory)
    variables = []

    def keep(next_creator: Any, **kwargs: Any) -> tf.Variable:
        variable = next_creator(**kwargs)
        if kwargs.get("name") == _STATE:
            variables.append(variable)
        return variable

    try:
        # Functions hold their variables weakly and this one is nobody's attribute, so that it is
        # neither restored nor taken for one of the model's.
        with tf.variable_creator_scope(keep):
            module = tf.saved_model.load(rewritten)
    except BaseException:
        shutil.rmtree(rewritten)
        raise
    (variable,) = variables
    setattr(module, _ATTRIBUTE, _RandomState(variable, rewritten))
    set_random_state(module, 0, 0)
    return module


def set_random_state(
    module: Any, seed: int | tf.Tensor, step: int | tf.Tensor
) -> tf.Operation | None:
    """What the random ops in `module` draw next depends on `seed` and `step` alone.

    Two calls of the module under one state draw the same numbers, so give each call of a step (each
    micro-batch) a `step` of its own. Call it eagerly or in a `tf.function`, which then orders it
    before the calls of the module that follow, inside loops too. Under a strategy each replica
    draws from a stream of its own, whether this is called in `strategy.run` or outside.

    Args:
      module: What `load_resumable` returned, or any object that holds such modules. Ops that
        `load_resumable` did not replace, and modules loaded otherwise, are not affected.
      seed: The run's seed, an integer or an int64 scalar.
      step: The number of the step, an integer or an int64 scalar.

    Returns:
      In a `tf.function` the operation that sets the state, else None.

    Example:

    >>> module = tf.Module()
    >>> module.noise = tf.function(lambda: tf.random.uniform([]), input_signature=[])
    >>> folder = tempfile.mkdtemp()
    >>> tf.saved_model.save(module, folder)
    >>> loaded = load_resumable(folder)
    >>> set_random_state(loaded, seed=1, step=10)
    >>> first = float(loaded.noise())
    >>> set_random_state(loaded, seed=1, step=11)
    >>> float(loaded.noise()) == first
    False
    >>> set_random_state(loaded, seed=1, step=10)
    >>> float(loaded.noise()) == first
    True
    """
    context = tf.distribute.get_replica_context()
    assignments = []
    for state in _random_states(module):
        if tf.distribute.has_strategy() and context is not None:
            targets = [(context.replica_id_in_sync_group, state.variable)]
        else:
            targets = list(enumerate(_components(state.variable)))
        for replica, variable in targets:
            stream = tf.cast(seed, tf.int64) + tf.cast(replica, tf.int64) * 2**32
            value = tf.stack([stream, tf.cast(step, tf.int64)])
            # In `strategy.run`, where `assign` is refused, `handle` is this replica's own.
            assign = tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
            assignments.append(assign)
    return None if tf.executing_eagerly() else tf.group(*assignments)


def stateful_random_ops(function: Any) -> list[str]:
    """The random ops in `function` whose draws cannot be repeated after a resume.

    Args:
      function: A `ConcreteFunction`, or the graph of one.

    Returns:
      For each such op, in what the function calls too, its type and name:
      `"RandomShuffle shuffled/RandomShuffle"`, behind the name of the inner function it is in, if
      any. Empty if every draw follows from variables and inputs.

    Example:

    >>> @tf.function
    ... def shuffled(x):
    ...     return tf.random.shuffle(x)
    >>> stateful_random_ops(shuffled.get_concrete_function(tf.TensorSpec([3])))
    ['RandomShuffle RandomShuffle']
    """
    graph_def = getattr(function, "graph", function).as_graph_def()
    functions = {f.signature.name: f for f in graph_def.library.function}
    found = []
    queue = [("", graph_def.node)]
    seen: set[str] = set()
    for prefix, nodes in queue:
        for node in nodes:
            if node.op in _TWINS or node.op in _WITHOUT_TWIN:
                found.append(f"{node.op} {prefix}{node.name}")
            for name in _referenced(node) & functions.keys() - seen:
                seen.add(name)
                queue.append((f"{name}/", functions[name].node_def))
    return sorted(found)


class _RandomState:
    """Keeps the variable, and the folder that the module was loaded from, as long as the module."""

    def __init__(self, variable: tf.Variable, folder: str):
        self.variable = variable
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


def _random_states(module: Any) -> list[_RandomState]:
    if not hasattr(module, "_trackable_children"):
        return []
    owners = tf.train.TrackableView(module).descendants()
    return [vars(o)[_ATTRIBUTE] for o in owners if _ATTRIBUTE in getattr(o, "__dict__", {})]


def _components(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    distributed = isinstance(variable, tf.distribute.DistributedValues)
    return variable.values if distributed else (variable,)


def _rewritten_copy(directory: str) -> str | None:
    """A temporary folder that differs from `directory` in its graph, or None: no random ops."""
    directory = os.path.abspath(directory)
    with open(os.path.join(directory, _GRAPH_FILE), "rb") as file:
        saved_model = saved_model_pb2.SavedModel.FromString(file.read())
    graph = saved_model.meta_graphs[0]
    if not _rewrite(graph.graph_def.library, graph.object_graph_def):
        return None
    folder = tempfile.mkdtemp(prefix="finetune-")
    for name in os.listdir(directory):
        if name not in (_GRAPH_FILE, "fingerprint.pb"):
            os.symlink(os.path.join(directory, name), os.path.join(folder, name))
    with open(os.path.join(folder, _GRAPH_FILE), "wb") as file:
        file.write(saved_model.SerializeToString())
    return folder


def _rewrite(
    library: function_pb2.FunctionDefLibrary, objects: saved_object_graph_pb2.SavedObjectGraph
) -> bool:
    """What Python calls now reads the seed from a variable, and passes it down as an argument.

    The functions that draw get copies and stay themselves: others, such as the body of a loop, go
    on calling them as they are.
    """
    functions = {function.signature.name: function for function in library.function}
    random = _functions_that_draw(functions)
    callables = [node for node in objects.nodes if random.intersection(_concrete_functions(node))]
    if not callables:
        return False
    outer = {name for node in callables for name in _concrete_functions(node)} & random

    variable_id = len(objects.nodes)
    variable = objects.nodes.add().variable
    variable.name, variable.dtype = _STATE, _INT64
    variable.shape.dim.add(size=2)
    inner = set()
    for name in sorted(outer):
        reading = _copy(library, functions[name], _OUTER)
        inner |= _seed(reading, _read_variable(reading), random)
        objects.concrete_functions[name + _OUTER].CopyFrom(objects.concrete_functions[name])
        objects.concrete_functions[name + _OUTER].bound_inputs.append(variable_id)
    for node in callables:
        _rename_concrete_functions(node, {name: name + _OUTER for name in outer})

    done: set[str] = set()
    while inner - done:
        name = min(inner - done)
        done.add(name)
        seeded = _copy(library, functions[name], _INNER)
        seeded.signature.input_arg.add(name=_STATE, type=_INT64)
        if "_input_shapes" in seeded.attr:
            seeded.attr["_input_shapes"].list.shape.add().dim.add(size=2)
        inner |= _seed(seeded, _STATE, random)
    return True


def _concrete_functions(node: saved_object_graph_pb2.SavedObject) -> list[str]:
    """The functions that Python gets to call by this object."""
    bare = node.bare_concrete_function.concrete_function_name
    return [*node.function.concrete_functions, *([bare] if bare else [])]


def _rename_concrete_functions(
    node: saved_object_graph_pb2.SavedObject, renamed: Mapping[str, str]
) -> None:
    names = [renamed.get(name, name) for name in _concrete_functions(node)]
    if node.HasField("function"):
        node.function.concrete_functions[:] = names
    else:
        (node.bare_concrete_function.concrete_function_name,) = names


def _copy(
    library: function_pb2.FunctionDefLibrary, function: function_pb2.FunctionDef, suffix: str
) -> function_pb2.FunctionDef:
    copy = library.function.add()
    copy.CopyFrom(function)
    copy.signature.name += suffix
    return copy


def _read_variable(function: function_pb2.FunctionDef) -> str:
    """The name of the tensor with the seed, read from a new last argument."""
    argument = function.signature.input_arg.add(name=_STATE, type=_RESOURCE)
    argument.handle_data.add(dtype=_INT64).shape.dim.add(size=2)
    if "_input_shapes" in function.attr:
        function.attr["_input_shapes"].list.shape.add()
    read = function.node_def.add(name=f"{_STATE}/Read", op="ReadVariableOp", input=[_STATE])
    read.attr["dtype"].type = _INT64
    # Without it the next iteration of a loop may set the variable before this one has read it.
    function.signature.control_output.append(read.name)
    function.control_ret[read.name] = read.name
    return f"{read.name}:value:0"


def _seed(function: function_pb2.FunctionDef, seed: str, random: set[str]) -> set[str]:
    """Makes the function draw from tensor `seed`; returns the functions that it passes seeds to."""
    callees = set()
    for node in list(function.node_def):
        callee = node.attr["f"].func.name if node.op in _CALLS else ""
        if node.op in _TWINS:
            _to_twin(function, node, _own_seed(function, node, seed))
        elif callee in random:
            inputs = sum(not name.startswith("^") for name in node.input)
            node.input.insert(inputs, _own_seed(function, node, seed))
            node.attr["Tin"].list.type.append(_INT64)
            node.attr["f"].func.name = callee + _INNER
            callees.add(callee)
    return callees


def _own_seed(function: function_pb2.FunctionDef, node: node_def_pb2.NodeDef, seed: str) -> str:
    """The name of a new tensor: `seed` mixed with what is particular to this place."""
    name = function.signature.name.removesuffix(_OUTER).removesuffix(_INNER)
    salt = np.frombuffer(hashlib.sha256(f"{name}/{node.name}".encode()).digest()[:16], np.int64)
    constant = _add_constant(function, f"{_STATE}/{node.name}/salt", salt)
    mixed = function.node_def.add(
        name=f"{_STATE}/{node.name}/seed", op="BitwiseXor", input=[seed, constant]
    )
    mixed.attr["T"].type = _INT64
    return f"{mixed.name}:z:0"


def _to_twin(function: function_pb2.FunctionDef, node: node_def_pb2.NodeDef, seed: str) -> None:
    algorithm = _add_constant(function, f"{_STATE}/{node.name}/algorithm", np.int32(_PHILOX))
    key = function.node_def.add(
        name=f"{_STATE}/{node.name}/key", op="StatelessRandomGetKeyCounter", input=[seed]
    )
    key.attr["Tseed"].type = _INT64
    twin = _TWINS[node.op]
    shape, *others = node.input
    node.op = twin.op
    node.input[:] = [shape, f"{key.name}:key:0", f"{key.name}:counter:0", algorithm, *others]
    types = {new: node.attr[old].type for old, new in twin.attributes.items()}
    for old in ("seed", "seed2", *twin.attributes):
        node.attr.pop(old, None)
    for new, dtype in types.items():
        node.attr[new].type = dtype


def _add_constant(function: function_pb2.FunctionDef, name: str, value: Any) -> str:
    node = function.node_def.add(name=name, op="Const")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    node.attr["dtype"].type = node.attr["value"].tensor.dtype
    return f"{name}:output:0"


def _functions_that_draw(functions: Mapping[str, function_pb2.FunctionDef]) -> set[str]:
    """Those with an op to replace, in what they call too."""
    callers: dict[str, set[str]] = {name: set() for name in functions}
    found = set()
    for name, function in functions.items():
        for node in function.node_def:
            if node.op in _TWINS:
                found.add(name)
            elif node.op in _CALLS:
                callers[node.attr["f"].func.name].add(name)
    new = set(found)
    while new:
        new = set().union(*(callers[name] for name in new)) - found
        found |= new
    return found


def _referenced(node: node_def_pb2.NodeDef) -> set[str]:
    """Every name in `node` that may be a function's."""
    names = {node.op}
    for value in node.attr.values():
        names.add(value.func.name)
        names.update(function.name for function in value.list.func)
    return names
