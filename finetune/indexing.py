"""NumPy-style indices of one variable as a selection: tuples, rows, columns, slices as text."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from finetune.selection import Selection, indices_along


def at_elements(indices: np.ndarray, shape: tuple[int, ...]) -> Selection:
    """Selects the elements at index tuples, of shape [k, axes], or [k] for one axis."""
    if len(indices) == 0:
        return Selection.none(shape)
    if len(shape) == 1 and indices.ndim == 1:
        indices = indices[:, np.newaxis]
    if indices.ndim != 2 or indices.shape[1] != len(shape):
        raise ValueError(
            f"`indices` (of shape {indices.shape}) must be a list of tuples with {len(shape)} "
            f"integers each, one for every axis of shape {shape}."
        )
    if not shape:
        return Selection.all(shape)
    limits = np.asarray(shape)
    outside = ((indices < -limits) | (indices >= limits)).any(axis=1)
    if outside.any():
        shown = ", ".join(str(tuple(index)) for index in indices[outside][:5].tolist())
        more = f" and {outside.sum() - 5} more" if outside.sum() > 5 else ""
        raise ValueError(
            f"`indices` ({shown}{more}) out of range: each must lie in shape {shape}, negative "
            "ones counted from the end."
        )
    wrapped = np.where(indices < 0, indices + limits, indices).astype(np.int64)
    return Selection.from_flat(shape, np.ravel_multi_index(tuple(wrapped.T), shape))


def at_rows(indices: np.ndarray, shape: tuple[int, ...]) -> Selection:
    """Selects everything at some numbers of the first axis."""
    return Selection.from_rows(shape, indices_along(0, "indices", indices, shape))


def at_columns(indices: np.ndarray, shape: tuple[int, ...]) -> Selection:
    """Selects everything at some numbers of the last axis."""
    trainable: np.ndarray = np.zeros(shape, np.bool_)
    trainable[..., indices_along(-1, "indices", indices, shape)] = True
    return Selection.from_bool(trainable)


def parse_index(text: str) -> tuple[Any, ...]:
    """Returns the index that `text` spells, without evaluating code.

    Raises:
      ValueError: when the text is no index of integers, slices, an ellipsis and a list of integers.

    Example:
      >>> parse_index("[..., 1:3]")
      (Ellipsis, slice(1, 3, None))
    """
    try:
        if not isinstance(text, str):
            raise ValueError(f"it is a {type(text).__name__}")
        tree = ast.parse(f"x{text.strip()}", mode="eval").body
        if not isinstance(tree, ast.Subscript) or ast.unparse(tree.value) != "x":
            raise ValueError("it is not one pair of brackets")
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        index = tuple(_index_part(node) for node in parts)
        if sum(p is Ellipsis for p in index) > 1 or sum(isinstance(p, list) for p in index) > 1:
            raise ValueError("it holds several of what it may hold once")
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"`text` ({text!r}) must be a NumPy-style index of integers, slices, at most one "
            f'ellipsis and at most one list of integers, for instance "[:, 5:8]"; {error}.'
        ) from error
    return index


def at_slices(text: str, index: tuple[Any, ...], shape: tuple[int, ...]) -> Selection:
    """Selects what the index that `text` spells selects; an error if that is nothing."""
    trainable: np.ndarray = np.zeros(shape, np.bool_)
    try:
        trainable[index] = True
    except IndexError as error:
        raise ValueError(f"`text` ({text!r}) does not fit shape {shape}: {error}.") from error
    if not trainable.any():
        raise ValueError(
            f"`text` ({text!r}) selects no element of shape {shape}; write nothing() to freeze "
            "all of it."
        )
    return Selection.from_bool(trainable)


def _index_part(node: ast.expr) -> Any:
    if isinstance(node, ast.Slice):
        ends = (node.lower, node.upper, node.step)
        part = slice(*(None if end is None else _integer(end) for end in ends))
        if part.step == 0:
            raise ValueError("a step of 0 leads nowhere")
        return part
    if isinstance(node, ast.List):
        return [_integer(item) for item in node.elts]
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return Ellipsis
    return _integer(node)


def _integer(node: ast.expr) -> int:
    sign, digits = 1, node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, digits = -1, node.operand
    if isinstance(digits, ast.Constant) and type(digits.value) is int:
        return sign * digits.value
    raise ValueError(f"{ast.unparse(node)!r} is no integer")
