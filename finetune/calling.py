"""Calling a model by what it offers: a Python call, a loaded function, or a signature only."""

import inspect
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from finetune.paths import nearest

# Tried in this order; `serve` is where Keras 3 exports a model's call.
_DEFAULT_FUNCTIONS = ("__call__", "serve")
_DEFAULT_SIGNATURE = "serving_default"


def call(module: Any, inputs: Any, *, training: bool, endpoint: str | None = None) -> Any:
    """The outputs of `module` for `inputs`, by the function that it offers for that.

    This is its call, if it has one, else the function `serve` of a Keras export, else a signature:
    `serving_default`, or the only one. A function that takes `training` is given it. One that does
    not runs as it was saved, which for a signature means inference, as a rule.

    Works eagerly and in a `tf.function`, where it adds no trace.

    Args:
      module: A Keras model or layer, a `tf.Module`, a loaded SavedModel, or a function.
      inputs: What the function takes: one tensor, or a tuple, list or dict of tensors. A dict whose
        keys name the function's parameters is spread over them, and so is a tuple or list over the
        parameters that must be given, where these are several; else it is one argument. A
        signature takes a dict, or one tensor if it has one input.
      training: Whether to run as in training, with dropout.
      endpoint: The name of another function or signature to call; `endpoints` lists them.

    Returns:
      What the function returns; for a signature its only output, or a dict of outputs by name.

    Raises:
      ValueError: If `module` offers no such endpoint, or it does not take such inputs.

    Example:

    >>> module = tf.Module()
    >>> module.scale = tf.function(lambda x, training: x * 3 if training else x)
    >>> float(call(module, tf.constant(2.0), training=True, endpoint="scale"))
    6.0
    """
    name, function = _find(module, endpoint)
    if _is_signature(function):
        return _call_signature(name, function, inputs)
    is_keras = isinstance(function, keras.layers.Layer)
    args, kwargs = _bind(function.call if is_keras else function, inputs, training)
    if is_keras:
        # Keras hands it on to the layers inside one that does not take it itself.
        kwargs["training"] = training
    if not _is_restored(function):
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        # Its graph is fixed, so the arguments are at fault.
        given = f"({', '.join(map(_show, args))}), {_show(kwargs)}"
        raise ValueError(
            f"`inputs`, given to {name!r} as {given}, fit none of its variants: "
            f"{' | '.join(_variants(function))}. Convert them, or choose another `endpoint`."
        ) from error


def endpoints(module: Any) -> dict[str, str]:
    """Every function and signature that `call` can use: its name, and what it takes.

    Args:
      module: As for `call`.

    Returns:
      By name the parameters, with dtypes and shapes where they are known; the variants that a
      SavedModel holds of one function are separated by ` | `.

    Example:

    >>> module = tf.Module()
    >>> module.scale = tf.function(lambda x, training: x * 3 if training else x)
    >>> endpoints(module)
    {'scale': '(x, training)'}
    """
    return {name: " | ".join(_variants(f)) for name, f in _offered(module).items()}


def _find(module: Any, endpoint: str | None) -> tuple[str, Any]:
    offered = _offered(module)
    if endpoint is not None and endpoint not in offered:
        raise ValueError(
            f"`endpoint` ({endpoint!r}) is not offered by `module`. Nearest first, there are: "
            + _listed({name: offered[name] for name in nearest(endpoint, offered, len(offered))})
        )
    if endpoint is not None:
        return endpoint, offered[endpoint]
    for name in (*_DEFAULT_FUNCTIONS, _DEFAULT_SIGNATURE):
        if name in offered:
            return name, offered[name]
    signatures = [name for name, function in offered.items() if _is_signature(function)]
    if len(signatures) == 1:
        return signatures[0], offered[signatures[0]]
    raise ValueError(
        f"`module` ({type(module).__name__}) has no call, and not exactly one signature to take "
        f"for it. Name one of these as `endpoint`: {_listed(offered)}"
    )


def _offered(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if callable(module):
        loaded = vars(module).get("__call__") if hasattr(module, "__dict__") else None
        found["__call__"] = loaded or module
    if not isinstance(module, keras.layers.Layer):
        for name in dir(module):
            static = inspect.getattr_static(module, name, None)
            if not name.startswith("_") and hasattr(static, "get_concrete_function"):
                found[name] = getattr(module, name)
    signatures = getattr(module, "signatures", None)
    return {**signatures, **found} if isinstance(signatures, Mapping) else found


def _is_restored(function: Any) -> bool:
    return hasattr(function, "concrete_functions")


def _is_signature(function: Any) -> bool:
    return hasattr(function, "structured_input_signature")


def _bind(function: Any, inputs: Any, training: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments."""
    parameters = dict(inspect.signature(function).parameters)
    kwargs = {"training": training} if parameters.pop("training", None) else {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: p for name, p in parameters.items() if p.kind not in variadic}
    required = [name for name, p in named.items() if p.default is p.empty]
    if isinstance(inputs, Mapping) and set(required) <= inputs.keys() <= named.keys():
        return (), {**inputs, **kwargs}
    if isinstance(inputs, (tuple, list)) and len(required) > 1:
        return tuple(inputs), kwargs
    return (inputs,), kwargs


def _call_signature(name: str, signature: Any, inputs: Any) -> Any:
    specs = signature.structured_input_signature[1]
    given = inputs
    if not isinstance(inputs, Mapping) and len(specs) == 1:
        given = {next(iter(specs)): inputs}
    if isinstance(given, Mapping) and given.keys() == specs.keys():
        tensors = {key: _converted(value, specs[key]) for key, value in given.items()}
        if all(specs[key].is_compatible_with(tensor) for key, tensor in tensors.items()):
            outputs = signature(**tensors)
            return next(iter(outputs.values())) if len(outputs) == 1 else outputs
    raise ValueError(
        f"`inputs` ({_show(inputs)}) do not fit the signature {name!r}, which takes "
        f"{_variants(signature)[0]}: give a dict with these names, dtypes and shapes."
    )


def _converted(value: Any, spec: tf.TypeSpec) -> Any:
    try:
        return value if tf.is_tensor(value) else tf.convert_to_tensor(value, spec.dtype)
    except (TypeError, ValueError):
        return value  # Which is compatible with no spec.


def _variants(function: Any) -> list[str]:
    """What it takes: a line for each graph that was saved of it."""
    if _is_signature(function):
        return [_parameters(function, {})]
    if _is_restored(function):
        names = inspect.signature(function).parameters
        found = (_parameters(f, names) for f in function.concrete_functions)
        return sorted(set(found))
    is_keras = isinstance(function, keras.layers.Layer)
    return [str(inspect.signature(function.call if is_keras else function))]


def _parameters(function: Any, names: Mapping[str, Any]) -> str:
    positional, keyword = function.structured_input_signature
    named = dict(zip(names, positional, strict=False)) | keyword
    return f"({', '.join(f'{name}={_show(value)}' for name, value in named.items())})"


def _listed(offered: Mapping[str, Any]) -> str:
    lines = (f"\n  {name}{variant}" for name, f in offered.items() for variant in _variants(f))
    return "".join(lines) or "nothing"


def _show(value: Any) -> str:
    """A tensor or its spec as dtype and shape, so that messages stay short."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_show(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_show, value)) + "]"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        shape = tf.TensorShape(value.shape)
        return f"{tf.as_dtype(value.dtype).name}{shape if shape.rank is None else list(shape)}"
    return repr(value)
