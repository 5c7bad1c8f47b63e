"""A checkpoint on disk as keys -> tensors: read it, rewrite it, take its fingerprint."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from finetune.paths import nearest

_VALUE_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_DATA_FILE = re.compile(r"\.data-(\d{5})-of-(\d{5})$")
_GROUP_BYTES = 2**30


class Bundle:
    """The tensors of one checkpoint, by key; every value read is exactly the one that was saved.

    Object-based and name-based checkpoints are alike here, and so are variables saved whole or in
    partitions, in one data file or several. Opening reads the index alone: it finds missing files
    and files too short for their tensors. `read` finds damaged bytes, by TensorFlow's checksums.

    Args:
      prefix: path without `.index`, such as `.../variables/variables` or `.../ckpt-100`.

    Attributes:
      prefix: the same, as text.
      files: the paths of the index file and of the data files.

    Raises:
      ValueError: nothing lies under `prefix`, a file is missing, or the index or data is cut short.

    Usable eagerly and while a `tf.function` is traced.

    >>> folder = tempfile.mkdtemp()
    >>> prefix = tf.train.Checkpoint(x=tf.Variable([1.0, 2.0])).write(folder + "/ckpt")
    >>> bundle = Bundle(prefix)
    >>> bundle.key_of("x")
    'x/.ATTRIBUTES/VARIABLE_VALUE'
    >>> bundle.read(bundle.key_of("x"))
    array([1., 2.], dtype=float32)
    """

    def __init__(self, prefix: str | os.PathLike[str]):
        self.prefix: str = os.fspath(prefix)
        self._data_files = _data_files(self.prefix)
        self.files: list[str] = [self.prefix + ".index", *self._data_files]
        try:
            self._reader = tf.train.load_checkpoint(self.prefix)
        except (tf.errors.OpError, ValueError) as error:
            raise ValueError(
                f"`prefix` ({self.prefix}): the index file {self.prefix}.index is damaged or cut "
                f"short: {error}. Copy the checkpoint again, or use an older one."
            ) from error
        self._shapes: dict[str, list[int]] = self._reader.get_variable_to_shape_map()
        self._dtypes: dict[str, tf.DType] = self._reader.get_variable_to_dtype_map()
        self._check_size()

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return sorted(self._shapes)

    def shape(self, key: str) -> tuple[int, ...]:
        """The full shape of `key`'s tensor, also where it was saved in partitions.

        Raises:
          ValueError: there is no such key.
        """
        self._check_key(key)
        return tuple(self._shapes[key])

    def dtype(self, key: str) -> tf.DType:
        """The dtype of `key`'s tensor.

        Raises:
          ValueError: there is no such key.
        """
        self._check_key(key)
        return self._dtypes[key]

    def read(self, key: str) -> np.ndarray:
        """A fresh array with the saved value of `key`, bit for bit.

        Returns:
          An array of `shape(key)`: bfloat16, float8 and int4 in the dtypes of ml_dtypes, quantized
          integers as plain ones, strings as an object array of bytes.

        Raises:
          ValueError: there is no such key, or its bytes are damaged or missing on disk.
        """
        self._check_key(key)
        try:
            value = self._reader.get_tensor(key)
        # The reader turns a short read into an IndexError.
        except (tf.errors.OpError, IndexError) as error:
            raise self._unreadable(key, error) from error
        if self._dtypes[key] == tf.string:
            return np.asarray(value, dtype=object)
        return np.asarray(value)

    def key_of(self, path: str) -> str | None:
        """The key under which the variable `path` is saved, or None.

        `a/b` is found as `a/b/.ATTRIBUTES/VARIABLE_VALUE` (object-based) or as `a/b` itself.
        """
        for key in (path + _VALUE_SUFFIX, path):
            if key in self._shapes:
                return key
        return None

    def _restore(self, key: str) -> tf.Tensor:
        """`read` as a tensor, which saves a copy; eagerly only."""
        try:
            (tensor,) = tf.raw_ops.RestoreV2(
                prefix=self.prefix,
                tensor_names=[key],
                shape_and_slices=[""],
                dtypes=[self._dtypes[key]],
            )
        except tf.errors.OpError as error:
            raise self._unreadable(key, error) from error
        return tensor

    def __repr__(self) -> str:
        return f"Bundle({self.prefix!r}, {len(self._shapes)} keys)"

    def _check_key(self, key: str) -> None:
        if key not in self._shapes:
            raise ValueError(
                f"`key` ({key}) is not in the checkpoint {self.prefix}. Nearest: "
                f"{_listed(nearest(key, self._shapes))}."
            )

    def _check_size(self) -> None:
        needed = sum(
            int(np.prod(shape, dtype=np.int64)) * max(self._dtypes[key].size, 1)
            for key, shape in self._shapes.items()
        )
        there = sum(tf.io.gfile.stat(file).length for file in self._data_files)
        if there < needed:
            raise ValueError(
                f"`prefix` ({self.prefix}): its tensors need at least {needed:,} bytes, and only "
                f"{there:,} are there, in {_listed(self._data_files)}. It was cut short: "
                "copy it again, or use an older one."
            )

    def _unreadable(self, key: str, error: Exception) -> ValueError:
        shard = re.search(r"shard (\d+)", str(error))
        files = [self._data_files[int(shard[1])]] if shard else self._data_files
        where = files[0] if len(files) == 1 else f"one of {_listed(files)}"
        return ValueError(
            f"`key` ({key}) cannot be read from {where}: {error}. The file is damaged or cut "
            "short: copy the checkpoint again, or use an older one."
        )


def rewrite(
    bundle: Bundle,
    changes: Mapping[str, np.ndarray | tf.Tensor],
    prefix: str | os.PathLike[str],
    *,
    group_bytes: int = _GROUP_BYTES,
) -> None:
    """A checkpoint lies under `prefix` with `bundle`'s keys, shapes and dtypes, and `changes` made.

    Every tensor that is not in `changes` keeps its bytes, strings and the object graph included. A
    tensor that was saved in partitions is saved whole; it can still be restored in partitions. What
    fits into one group gives one data file, `<prefix>.data-00000-of-00001`; more gives one data
    file a group, so that about `group_bytes`, or one larger tensor, are in memory at a time.

    Args:
      bundle: what to start from; it is only read.
      changes: new values by key, with the key's own shape and dtype (strings: bytes or str).
      prefix: where to write, in a folder that belongs to the caller; nothing may lie there yet.
      group_bytes: bytes of tensors to hold in memory at a time.

    Raises:
      ValueError: a key, shape or dtype of `changes` does not fit (all of them are listed), files
        already lie under `prefix`, `group_bytes` is less than 1, or `bundle` is damaged.
      RuntimeError: called while a `tf.function` is traced, or in a graph; it runs eagerly only.

    >>> folder = tempfile.mkdtemp()
    >>> base = Bundle(tf.train.Checkpoint(x=tf.Variable([1.0, 2.0])).write(folder + "/base"))
    >>> rewrite(base, {base.key_of("x"): np.float32([1.0, 3.0])}, folder + "/tuned")
    >>> Bundle(folder + "/tuned").read(base.key_of("x"))
    array([1., 3.], dtype=float32)
    """
    prefix = os.fspath(prefix)
    if not tf.executing_eagerly():
        raise RuntimeError("`rewrite` writes files and runs eagerly only: call it outside graphs.")
    if group_bytes < 1:
        raise ValueError(f"`group_bytes` ({group_bytes}) must be at least 1.")
    _check_changes(bundle, changes)
    folder = os.path.dirname(prefix) or "."
    os.makedirs(folder, exist_ok=True)
    existing = _checkpoint_files(prefix)
    if existing:
        raise ValueError(
            f"`prefix` ({prefix}) is taken by {_listed(existing)}: choose another, or delete them."
        )
    # Beside the target: MergeV2Checkpoints renames the parts' data files.
    parts = tempfile.mkdtemp(prefix=".parts-", dir=folder)
    try:
        with tf.device("CPU:0"):
            _write_parts(bundle, changes, parts, prefix, group_bytes)
    finally:
        shutil.rmtree(parts)


def digest(array: Any) -> str:
    """The sha256 of a value's dtype, shape and bytes, as 64 hexadecimal digits.

    Equal digests mean equal bits: 0.0 and -0.0 differ, and so do two NaNs with other payloads.
    Another program gets the same digest by hashing, in this order,

    1. the header, in ASCII: TensorFlow's name of the dtype, `|`, the dimensions in decimal joined
       with `,` (nothing for a scalar), `|`: `float32|2,3|`, `string||`;
    2. the elements in C order. Numbers as their little-endian bytes: bfloat16 2 bytes, complex the
       real part first, bool and int4 one byte each. Of strings, each as the number of its bytes
       (8 bytes, little-endian) and its bytes; text is encoded as UTF-8.

    Args:
      array: an array, tensor, variable or scalar of any shape; strings as object, `S` or `U`.

    Raises:
      ValueError: a dtype that TensorFlow does not have, or an object that is no string.

    >>> layout = b"float32|1|" + bytes.fromhex("0000803f")
    >>> digest(np.float32([1.0])) == hashlib.sha256(layout).hexdigest()
    True
    """
    value = np.asarray(array)
    is_text = value.dtype.kind in "OSU"
    try:
        name = "string" if is_text else tf.as_dtype(value.dtype).name
    except TypeError as error:
        raise ValueError(
            f"`array` has dtype ({value.dtype}), which TensorFlow does not have: cast it first."
        ) from error
    hasher = hashlib.sha256(f"{name}|{','.join(map(str, value.shape))}|".encode("ascii"))
    if is_text:
        for element in value.reshape(-1):
            hasher.update(_with_length(_as_bytes(element)))
    else:
        if sys.byteorder == "big" or value.dtype.byteorder == ">":
            value = value.astype(value.dtype.newbyteorder("<"), copy=False)
        # The dtypes of ml_dtypes have no buffer interface: hash them through a view of bytes.
        hasher.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def fingerprint(digests: Mapping[str, str]) -> str:
    """One sha256, as 64 hexadecimal digits, of named digests, whatever their order.

    Another program gets it by hashing, for each name in the order of the names' UTF-8 bytes: the
    name and then its digest, each as the number of its bytes (8 bytes, little-endian) followed by
    its UTF-8 bytes.

    Args:
      digests: what `digest` gave, by name.

    >>> one, two = digest(1), digest(2)
    >>> fingerprint({"a": one, "b": two}) == fingerprint({"b": two, "a": one})
    True
    """
    hasher = hashlib.sha256()
    for name, value in sorted((name.encode(), value) for name, value in digests.items()):
        hasher.update(_with_length(name) + _with_length(value.encode()))
    return hasher.hexdigest()


def _data_files(prefix: str) -> list[str]:
    """The data files of `prefix`, by shard; raises if a file of the checkpoint is missing."""
    files = _checkpoint_files(prefix)
    if prefix + ".index" not in files:
        raise ValueError(_no_checkpoint(prefix))
    shards: dict[int, dict[int, str]] = {}
    for file in files:
        if match := _DATA_FILE.search(file):
            shards.setdefault(int(match[2]), {})[int(match[1])] = file
    for count, found in sorted(shards.items()):
        if len(found) == count:
            return [found[shard] for shard in range(count)]
    if not shards:
        raise ValueError(
            f"`prefix` ({prefix}): {prefix}.index is there, but no data file "
            f"({prefix}.data-00000-of-00001): copy the whole checkpoint."
        )
    count, found = max(shards.items(), key=lambda item: len(item[1]))
    missing = [f"{prefix}.data-{i:05d}-of-{count:05d}" for i in range(count) if i not in found]
    raise ValueError(
        f"`prefix` ({prefix}): data files are missing: {_listed(missing)}. Copy the whole "
        "checkpoint."
    )


def _checkpoint_files(prefix: str) -> list[str]:
    """The index and data files that lie under exactly `prefix`."""
    folder, name = os.path.split(prefix)
    return [
        os.path.join(folder, entry)
        for entry in _entries(folder)
        if entry == name + ".index"
        or (entry.startswith(name) and _DATA_FILE.fullmatch(entry[len(name) :]))
    ]


def _no_checkpoint(prefix: str) -> str:
    """Why there is no checkpoint under `prefix`, and what there is instead."""
    text = f"`prefix` ({prefix}): no such checkpoint, {prefix}.index does not exist."
    bare = _DATA_FILE.sub("", prefix.removesuffix(".index"))
    if bare != prefix and tf.io.gfile.exists(bare + ".index"):
        return f"{text} A prefix has no ending: use {bare}."
    if tf.io.gfile.exists(prefix) and not tf.io.gfile.isdir(prefix):
        return f"{text} The file {prefix} is no checkpoint of TensorFlow 2: save it again with it."
    folder = prefix if tf.io.gfile.isdir(prefix) else os.path.dirname(prefix)
    places = [folder, os.path.join(folder, "variables")]
    found = [
        os.path.join(place, entry.removesuffix(".index"))
        for place in places
        for entry in _entries(place)
        if entry.endswith(".index")
    ]
    if found:
        return f"{text} Nearest: {_listed(nearest(prefix, found))}."
    if not tf.io.gfile.isdir(folder or "."):
        return f"{text} The folder {folder} does not exist either."
    return f"{text} There is no checkpoint in the folder {folder or '.'}."


def _entries(folder: str) -> list[str]:
    folder = folder or "."
    return sorted(tf.io.gfile.listdir(folder)) if tf.io.gfile.isdir(folder) else []


def _check_changes(bundle: Bundle, changes: Mapping[str, np.ndarray | tf.Tensor]) -> None:
    keys = set(bundle.keys())
    wrong = []
    for key, value in changes.items():
        if key not in keys:
            wrong.append(f"{key}: no such key, nearest: {_listed(nearest(key, keys, 3))}")
            continue
        expected = _plain(bundle.dtype(key)).name
        if (dtype := _dtype_name(value)) != expected:
            wrong.append(f"{key}: dtype {dtype}, must be {expected}")
        shape = tuple(np.shape(value))
        if shape != bundle.shape(key):
            wrong.append(f"{key}: shape {shape}, must be {bundle.shape(key)}")
    if wrong:
        raise ValueError(
            f"`changes` does not fit the checkpoint {bundle.prefix}; values must have the key's "
            "own shape and dtype:\n  " + "\n  ".join(wrong)
        )


def _dtype_name(value: np.ndarray | tf.Tensor) -> str:
    if isinstance(value, tf.Tensor | tf.Variable):
        return str(_plain(value.dtype).name)
    value = np.asarray(value)
    is_text = value.dtype.kind in "SU" or (
        value.dtype.kind == "O" and all(isinstance(e, bytes | str) for e in value.reshape(-1))
    )
    return "string" if is_text else str(value.dtype)


def _plain(dtype: tf.DType) -> tf.DType:
    """`dtype`, or for a quantized integer the integer that stands for it in NumPy."""
    return tf.as_dtype(dtype.name.removeprefix("q")) if dtype.is_quantized else dtype


def _write_parts(
    bundle: Bundle,
    changes: Mapping[str, np.ndarray | tf.Tensor],
    parts: str,
    prefix: str,
    group_bytes: int,
) -> None:
    """Writes group after group into the folder `parts`, then merges them under `prefix`."""
    written: list[str] = []
    names: list[str] = []
    tensors: list[tf.Tensor] = []
    held = 0

    def write_group(target: str) -> None:
        tf.raw_ops.SaveV2(
            prefix=target,
            tensor_names=list(names),
            shape_and_slices=[""] * len(names),
            tensors=list(tensors),
        )
        names.clear()
        tensors.clear()

    keys = bundle.keys()
    for key in keys:
        size = int(np.prod(bundle.shape(key), dtype=np.int64)) * bundle.dtype(key).size
        if names and held + size > group_bytes:
            written.append(os.path.join(parts, f"part-{len(written):05d}"))
            write_group(written[-1])
            held = 0
        dtype = bundle.dtype(key)
        tensor = _tensor(changes[key], dtype) if key in changes else bundle._restore(key)
        names.append(key)
        tensors.append(tensor)
        held += size if dtype != tf.string else _text_bytes(tensor)
    if not written:
        write_group(prefix)
        return
    written.append(os.path.join(parts, f"part-{len(written):05d}"))
    write_group(written[-1])
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=written, destination_prefix=prefix, delete_old_dirs=False
    )


def _tensor(value: np.ndarray | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.is_quantized:
        return tf.bitcast(tf.convert_to_tensor(value), dtype)
    return tf.convert_to_tensor(value, dtype=dtype)


def _text_bytes(tensor: tf.Tensor) -> int:
    return int(tf.reduce_sum(tf.strings.length(tensor)))


def _as_bytes(element: Any) -> bytes:
    if isinstance(element, str):
        return element.encode("utf-8")
    if isinstance(element, bytes):
        return element
    raise ValueError(
        f"`array` holds an object ({element!r}) that is neither bytes nor text: only these can be "
        "stored."
    )


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
