"""The tuned model on disk, in its base's own format, or nothing at all.

The structure of the model did not change, so the base's files are copied and only the values in its
bundle are written anew: graph, signatures, assets, object graph and keys stay those of the base.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import numpy as np
import tensorflow as tf

from finetune.bundle import Bundle, digest, rewrite
from finetune.certificate import Certificate, certify, differing
from finetune.loading import Base
from finetune.selection import Selection

CERTIFICATE_FILE = "certificate.json"
_MODULE_PREFIX = "ckpt"
# It holds a hash of the variables, so the base's is wrong for tuned ones; TensorFlow has no public
# way to write it, and loads a SavedModel without it.
_LEFT_OUT = "fingerprint.pb"
_SHOWN = 20


class FrozenElementsMoved(ValueError):
    """Elements that had to stay the base's have other bits; nothing was written.

    Attributes:
      certificate: what changed where, of all variables.
    """

    def __init__(self, certificate: Certificate, directory: str):
        self.certificate = certificate
        offenders = certificate.offenders()
        lines = [
            f"{certificate.moved:,} of {certificate.frozen:,} frozen elements do not have the "
            f"base's bits any more, so nothing was written to `directory` ({directory}):"
        ]
        for record in offenders[:_SHOWN]:
            kind = "state, not trainable" if record.state else record.decided_by or "no rule given"
            lines.append(
                f"  {record.path} ({kind}): {record.moved:,} of {record.frozen:,} moved, the first "
                f"at {record.first_moved}"
            )
        if len(offenders) > _SHOWN:
            lines.append(f"  and {len(offenders) - _SHOWN:,} more variables")
        if any(not record.state for record in offenders):
            lines.append(
                "Weights: train through `MaskedOptimizer` or `Trainer`, which never write frozen "
                "elements (weight decay, EMA or a plain `assign` does), or select them in a rule."
            )
        if any(record.state for record in offenders):
            lines.append(
                "State: call the model with `training=False`, or let it move with the selector "
                "`model_state()`."
            )
        super().__init__("\n".join(lines))


def export(
    base: Base,
    selections: Mapping[str, Selection],
    directory: str | os.PathLike[str],
    *,
    moving_state: AbstractSet[str] = frozenset(),
    current: Callable[[str], np.ndarray] | None = None,
    decided_by: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Certificate:
    """The tuned model lies complete in `directory`, with its certificate; on any error, nothing.

    A SavedModel gives a copy of the base's folder with other values in `variables/`, and without
    `fingerprint.pb`. A checkpoint gives one with the base's own prefix name and keys, so optimizer
    slots and whatever else it holds are in it too, and a `checkpoint` file. A module that was made
    in memory gives a checkpoint `ckpt`, as `tf.train.Checkpoint(module)` writes it. Beside them
    lies `certificate.json`. State that such files do not hold, as a Keras seed generator's, is
    certified but not written.

    Everything is written into a hidden folder beside `directory`, flushed, read again and compared
    bit by bit - tuned variables with the current values, everything else with the base - and only
    then renamed. A killed process leaves at most that hidden folder, `.<name>.export-...`; killed
    in the instant between the two renames of an overwrite, it leaves the earlier export there, in
    `old`.

    Args:
      base: what fine-tuning started from.
      selections: which elements were trainable, by path; a variable that is not named is frozen.
      directory: the folder to make; the folders above it are made if they are missing.
      moving_state: paths of non-trainable state that was allowed to move.
      current: gives a variable's tuned value, by path; by default the live variable's. It is
        called several times for a path and must give the same value each time.
      decided_by: the rule that decided, in words, by path; for the certificate.
      overwrite: replace `directory` if it is empty or itself an export (holds a certificate).

    Returns:
      The certificate, as written to `certificate.json`; its `ok` is True.

    Raises:
      FrozenElementsMoved: a frozen element differs from the base in at least one bit.
      ValueError: `directory` exists, overlaps with the base's folder or is no local folder; a
        selection or value does not fit its variable (see `certify`); a tuned variable has no place
        in the base's files.
      RuntimeError: called while a `tf.function` is traced; or the files on disk do not hold what
        was written to them.

    Usable eagerly only.

    >>> from finetune.loading import from_module
    >>> module = tf.Module()
    >>> module.x = tf.Variable([1.0, 2.0])
    >>> base = from_module(module)
    >>> _ = module.x.assign([1.0, 5.0])
    >>> target = os.path.join(tempfile.mkdtemp(), "tuned")
    >>> export(base, {"x": Selection.from_flat((2,), [1])}, target).changed
    1
    >>> sorted(os.listdir(target))
    ['certificate.json', 'checkpoint', 'ckpt.data-00000-of-00001', 'ckpt.index']
    """
    if not tf.executing_eagerly():
        raise RuntimeError("`export` writes files and runs eagerly only: call it outside graphs.")
    _check_local("directory", os.fspath(directory))
    target = os.path.abspath(os.fspath(directory))
    _check_target(target, base, overwrite)

    def live(path: str) -> np.ndarray:
        return np.asarray(base.variables[path].variable.numpy())

    current = current or live
    certificate = certify(base, selections, current, moving_state, decided_by)
    if not certificate.ok:
        raise FrozenElementsMoved(certificate, target)

    parent, name = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    workplace = tempfile.mkdtemp(prefix=f".{name}.export-", dir=parent)
    try:
        # Not the workplace itself is renamed: mkdtemp makes it readable for its owner alone.
        new = os.path.join(workplace, "new")
        os.mkdir(new)
        _write(base, current, certificate, new, workplace)
        _flush(new)
        _put(new, target, os.path.join(workplace, "old"))
        _flush_entry(parent)
    finally:
        shutil.rmtree(workplace)
    return certificate


def _check_local(argument: str, path: str) -> None:
    # A rename is all or nothing in a local file system only.
    if "://" in path:
        raise ValueError(
            f"`{argument}` ({path}) is not in the local file system, where alone an export can be "
            "complete or absent: use a local folder, and copy it there or from there."
        )


def _check_target(target: str, base: Base, overwrite: bool) -> None:
    if base.bundle is not None:
        _check_local("base", base.bundle.prefix)
        source = base.directory or os.path.dirname(base.bundle.prefix)
        base_folder, real = os.path.realpath(source), os.path.realpath(target)
        shared = os.path.commonpath([base_folder, real])
        # Below a checkpoint's folder there is room; a SavedModel's folder is the model.
        if shared == real or (shared == base_folder and base.format == "saved_model"):
            raise ValueError(
                f"`directory` ({target}) overlaps with the base's folder ({source}), which is "
                "never written to: choose a folder outside of it."
            )
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ValueError(
            f"`directory` ({target}) exists: choose another, or replace an earlier export with "
            "overwrite=True."
        )
    is_folder = os.path.isdir(target) and not os.path.islink(target)
    if not is_folder or (os.listdir(target) and CERTIFICATE_FILE not in os.listdir(target)):
        raise ValueError(
            f"`directory` ({target}) is no export (it holds no {CERTIFICATE_FILE}), and "
            "overwrite=True replaces only these: delete it yourself, or choose another."
        )


def _write(
    base: Base,
    current: Callable[[str], np.ndarray],
    certificate: Certificate,
    new: str,
    workplace: str,
) -> None:
    """Fills the folder `new` and compares what it then holds with what was meant."""
    source = base.bundle or _snapshot(base, os.path.join(workplace, "module", _MODULE_PREFIX))
    keys = _keys(base, source, certificate)
    if base.format == "saved_model":
        assert base.directory is not None
        _copy_folder(base.directory, new, but=set(map(os.path.abspath, source.files)))
        prefix = os.path.join(new, os.path.relpath(source.prefix, base.directory))
    else:
        prefix = os.path.join(new, os.path.basename(source.prefix))
        _write_text(os.path.join(new, "checkpoint"), _checkpoint_state(os.path.basename(prefix)))
    rewrite(source, _Values(keys, current), prefix)
    _write_text(os.path.join(new, CERTIFICATE_FILE), certificate.to_json())
    tuned = {record.path: record.tuned for record in certificate.variables}
    _compare(Bundle(prefix), source, {key: tuned[path] for key, path in keys.items()})


def _snapshot(base: Base, prefix: str) -> Bundle:
    """The bundle that an in-memory module would be saved as."""
    os.makedirs(os.path.dirname(prefix))
    return Bundle(tf.train.Checkpoint(base.module).write(prefix))


def _keys(base: Base, source: Bundle, certificate: Certificate) -> dict[str, str]:
    """{key: path} of the variables whose place in `source` is known."""
    keys: dict[str, str] = {}
    lost: list[str] = []
    for record in certificate.variables:
        key = _key(base, source, record.path)
        if key is not None:
            keys[key] = record.path
        elif record.changed and not record.state:
            lost.append(record.path)
    if lost:
        raise ValueError(
            f"`selections` let these variables change, but the base's files {source.prefix} have "
            f"no key for them, so their tuned values would be lost: {', '.join(lost)}. Freeze "
            "them, or start from files that hold them."
        )
    return keys


def _key(base: Base, source: Bundle, path: str) -> str | None:
    if base.bundle is None:
        # Of a model with an optimizer, the first path to a weight may lead through that.
        names = (path, *base.variables[path].aliases)
        return next(filter(None, map(source.key_of, names)), None)
    try:
        return base.key_of(path)
    except ValueError:
        # Not every state is saved: a Keras seed generator's, say, is not.
        return None


class _Values(Mapping[str, np.ndarray]):
    """The tuned values by key, each fetched when asked for: never all of them in memory."""

    def __init__(self, keys: Mapping[str, str], current: Callable[[str], np.ndarray]):
        self._keys = keys
        self._current = current

    def __getitem__(self, key: str) -> np.ndarray:
        return self._current(self._keys[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _compare(written: Bundle, source: Bundle, tuned: Mapping[str, str]) -> None:
    """Raises unless `written` has the digests `tuned` and else the very tensors of `source`."""
    wrong = sorted(set(written.keys()) ^ set(source.keys()))
    for key in set(written.keys()) & set(source.keys()):
        value = written.read(key)
        if key in tuned:
            same = digest(value) == tuned[key]
        else:
            same = not differing(source.read(key), value).any()
        if not same or written.dtype(key) != source.dtype(key):
            wrong.append(key)
    if wrong:
        raise RuntimeError(
            "the files just written do not hold what was meant, under the keys "
            f"{', '.join(wrong[:_SHOWN])}; they were removed. Either the disk is at fault, or the "
            "model's or the base's values changed during the export."
        )


def _copy_folder(source: str, target: str, but: AbstractSet[str]) -> None:
    """Copies contents only: a base may be read-only, or full of links into a cache."""
    source = os.path.abspath(source)
    for folder, _, files in os.walk(source, followlinks=True):
        place = os.path.join(target, os.path.relpath(folder, source))
        os.makedirs(place, exist_ok=True)
        for file in files:
            path = os.path.join(folder, file)
            if path not in but and path != os.path.join(source, _LEFT_OUT):
                shutil.copyfile(path, os.path.join(place, file))


def _checkpoint_state(prefix: str) -> str:
    # The relative name: the folder is renamed later, and may be moved by anybody.
    state = tf.compat.v1.train.generate_checkpoint_state_proto("", prefix)
    return str(state)


def _write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _flush(folder: str) -> None:
    """Brings all files and folders below `folder` onto the disk, before it gets its name."""
    for place, _, files in os.walk(folder):
        for file in files:
            _flush_entry(os.path.join(place, file))
        _flush_entry(place)


def _flush_entry(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(new: str, target: str, old: str) -> None:
    """Renames `new` to `target`; what was there goes to `old`, or back if this fails."""
    try:
        if os.path.lexists(target):
            os.rename(target, old)
        os.rename(new, target)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(target):
            os.rename(old, target)
        raise
