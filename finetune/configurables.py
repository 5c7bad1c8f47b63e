"""Everything that a gin file may name, and the checks that make a gin file safe to run from.

    parse(["korean_ascii.gin"], ["Adam.learning_rate = 3e-4"])
    trainer = make_trainer("runs/ascii")    # refuses bindings that nothing consumes
    trainer.train()

Short names work wherever they are unique: `Trainer`, `rows`, `Adam`, `CosineDecay`. Where Keras has
one name twice, a part of its module tells them apart: `losses.Hinge`, `metrics.Hinge`. Classes of
other libraries are registered as they are and stay untouched: only what a gin file refers to gets
its arguments from there.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import keras
import tensorflow as tf

from finetune import selectors
from finetune.examples import quickspacer
from finetune.loading import load
from finetune.paths import nearest
from finetune.pruning import prune
from finetune.task import Task
from finetune.trainer import Trainer

_Call = tuple[str, str]  # Scope and complete selector of something that gin calls.
_Binding = tuple[str, str, str]  # The same, and a parameter.

# gin keeps these to itself, and has no other way to ask what was bound and what was consumed.
_bound: dict[_Call, dict[str, Any]] = gin.config._CONFIG
_consumed_by_calls: dict[_Call, dict[str, Any]] = gin.config._OPERATIVE_CONFIG
_registry = gin.config._REGISTRY

_MACRO = "gin.macro"
_INCLUDE = re.compile(r"""^include\s+(['"])(?P<name>[^'"]+)\1\s*(?:#.*)?$""")


class ConfigError(ValueError):
    """A gin file, a gin parameter, or the two together, do not describe a run."""


def parse(gin_files: Sequence[str] = (), gin_params: Sequence[str] = ()) -> None:
    """Makes the bindings of these files and parameters, and no others, the present ones.

    A later binding replaces an earlier one of the same parameter. A file name is looked up from
    the working directory and then among the `gin_configs` of this package, with or without
    `gin_configs/` in front; an `include` is looked up beside the file it stands in first.

    Args:
      gin_files: names of gin files.
      gin_params: single bindings, such as "Adam.learning_rate = 3e-4", read after the files.

    Raises:
      ConfigError: for a file that does not exist (says where was searched), text that is no gin,
        an unknown or ambiguous name (with the nearest ones), a macro that is not defined, or a
        parameter that a file marks `%REQUIRED` and nothing sets.

    Example:
      >>> parse(gin_params=["rows.indices = [0, 2]"])
      >>> print(bindings().splitlines()[-1])
      rows.indices = [0, 2]
    """
    gin.clear_config()
    for name in gin_files:
        _parse_file(_find(name, os.curdir), ())
    for text in gin_params:
        with _parse_errors(f"`gin_params` ({text})"):
            gin.parse_config(text)
    problems = [*_undefined_macros(), *_missing_values()]
    if problems:
        raise ConfigError("The gin configuration is not complete:\n  - " + "\n  - ".join(problems))


def make_trainer(model_dir: str) -> Trainer:
    """Returns the Trainer that the present bindings describe, every one of them consumed.

    Args:
      model_dir: the run's folder, see `Trainer`; never bound in gin, so that one gin file serves
        many runs.

    Raises:
      ConfigError: when an argument of something that is called is missing, or a binding is not
        consumed.
      ValueError: whatever making the Trainer raises.
    """
    try:
        trainer = _configurable_trainer(model_dir=model_dir)
    except TypeError as error:
        if "No values supplied by Gin or caller" not in str(error):
            raise
        # A mistyped scope shows as a missing argument first; the binding it left unused tells why.
        raise ConfigError("\n".join([str(error), *_unused()])) from error
    check_used()
    return trainer


def check_used() -> None:
    """Returns if something consumed each of the present bindings; to be called before training.

    A binding is consumed when a call took its value, or when something that a consumed binding
    refers to without calling it (`@my_loss`, say) may still take it.

    Raises:
      ConfigError: lists every other binding: of what nothing calls, or nothing calls in that
        scope, macros that nothing reads, values that the caller or another binding overrides.
    """
    unused = _unused()
    if unused:
        raise ConfigError("Nothing consumes these gin bindings:\n  - " + "\n  - ".join(unused))


def operative_config() -> str:
    """Returns gin text that alone reproduces the run: all that was consumed, defaults included.

    Call it when the Trainer is made: what was called until then is in it with the values that it
    took, what may be called later with all its bindings.

    Raises:
      ConfigError: when a consumed value cannot be written as gin text: infinity, or an object that
        `gin.bind_parameter` bound.
    """
    taken = _taken()
    awaited = _awaited(taken)
    # gin leaves such values out without a word.
    lost = [
        f"{_name(*binding)} ({_value(binding)!r})"
        for binding in sorted(taken | awaited)
        if not _is_gin(_value(binding))
    ]
    if lost:
        raise ConfigError(f"These values cannot be written as gin text: {', '.join(lost)}.")
    merged = {call: dict(values) for call, values in _consumed_by_calls.items()}
    for scope, selector, parameter in sorted(awaited):
        value = _value((scope, selector, parameter))
        merged.setdefault((scope, selector), {}).setdefault(parameter, value)
    return _as_gin(merged)


def bindings() -> str:
    """Returns the present bindings as gin text, includes and overrides resolved, no defaults."""
    return _as_gin(_bound)


def korean_spacing_task(data_dir: str | None = None, held_out: int = 3) -> Task:
    """Returns the task of that name, see `finetune.examples.korean_spacing`."""
    # Its import of tensorflow_datasets takes seconds, which other users need not wait for.
    from finetune.examples import korean_spacing

    return korean_spacing.korean_spacing_task(data_dir, held_out)


def _register_all() -> None:
    ours: dict[str, list[Any]] = {
        "finetune": [
            load, prune, selectors.everything, selectors.nothing, selectors.elements,
            selectors.slices, selectors.rows, selectors.columns, selectors.boolean,
            selectors.zeros, selectors.nonzeros, selectors.largest, selectors.smallest,
            selectors.random, selectors.model_state, selectors.union, selectors.intersection,
            selectors.difference, selectors.complement,
        ],
        "finetune.examples": [korean_spacing_task],
        "finetune.examples.quickspacer": [quickspacer.saved_model_dir, quickspacer.ascii_rows],
        "tf.distribute": [tf.distribute.OneDeviceStrategy, tf.distribute.MirroredStrategy],
    }  # fmt: skip
    for module, members in ours.items():
        for member in members:
            gin.external_configurable(member, module=module)
    for module, library in {
        "keras.optimizers": keras.optimizers,
        "keras.optimizers.schedules": keras.optimizers.schedules,
        "keras.losses": keras.losses,
        "keras.metrics": keras.metrics,
    }.items():
        for name, member in sorted(vars(library).items()):
            if _is_public(name, member):
                gin.external_configurable(member, name=name, module=module)


def _is_public(name: str, member: Any) -> bool:
    """Whether a member of a Keras module is something one would name in a gin file."""
    if name.startswith("_") or name in ("get", "serialize", "deserialize"):
        return False
    # The functions of losses are in metrics as well; gin knows each object by one name.
    return callable(member) and member not in gin.config._INVERSE_REGISTRY


# The folder of a run is never a part of its configuration.
_configurable_trainer = gin.external_configurable(
    Trainer, module="finetune", denylist=["model_dir"]
)
_register_all()


def _search_path() -> list[str]:
    """Returns where gin files are looked for, the working directory first."""
    package = Path(__file__).parent
    # In a wheel the folder lies in the package, in a checkout beside it.
    installed, checkout = package / "gin_configs", package.parent / "gin_configs"
    configs = installed if installed.is_dir() else checkout
    return [os.curdir, str(configs), str(configs.parent)]


def _find(name: str, beside: str) -> str:
    """Returns the path of a gin file, looked for in the folder `beside` first."""
    folders = [""] if os.path.isabs(name) else list(dict.fromkeys([beside, *_search_path()]))
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return os.path.abspath(path)
    existing = [
        file
        for folder in folders
        if os.path.isdir(folder)
        for file in sorted(os.listdir(folder))
        if file.endswith(".gin")
    ]
    close = ", ".join(nearest(name, existing)) or "none"
    searched = ", ".join({os.path.abspath(os.path.join(folder, name)): None for folder in folders})
    raise ConfigError(
        f"`gin_files` ({name}) does not exist. Looked for: {searched}. Nearest there: {close}."
    )


def _parse_file(path: str, including: tuple[str, ...]) -> None:
    """Parses a file, and its includes where they stand."""
    if path in including:
        raise ConfigError(f"`gin_files` ({path}) includes itself: {' -> '.join(including)}.")
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    begin = 0
    for number, line in enumerate(lines):
        # gin's own include looks beside the working directory, not beside the file.
        found = _INCLUDE.match(line)
        if found:
            _parse_lines(path, lines, begin, number)
            _parse_file(_find(found["name"], os.path.dirname(path)), (*including, path))
            begin = number + 1
    _parse_lines(path, lines, begin, len(lines))


def _parse_lines(path: str, lines: Sequence[str], begin: int, end: int) -> None:
    # The empty lines keep the line numbers of error messages right.
    text = io.StringIO("\n" * begin + "".join(lines[begin:end]))
    text.name = path
    with _parse_errors(f"`gin_files` ({path})"):
        gin.parse_config(text)


@contextlib.contextmanager
def _parse_errors(what: str) -> Iterator[None]:
    """Turns what gin raises inside the `with` into a ConfigError that says what exists."""
    try:
        yield
    except SyntaxError as error:
        place = f"\n  In {error.filename}, line {error.lineno}" if error.filename else ""
        line = f"\n    {error.text.strip()}" if error.text else ""
        hint = "\nText must be in quotes: 'f1', not f1." if "parse token" in error.msg else ""
        raise ConfigError(f"{what}: {error.msg}{place}{line}{hint}") from error
    except tokenize.TokenError as error:
        raise ConfigError(f"{what}: {error.args[0]}, reached in line {error.args[1][0]}") from error
    except (ValueError, KeyError, ImportError) as error:
        # A KeyError puts its text in quotes.
        message = str(error).removeprefix('"').replace('."', ".")
        raise ConfigError(f"{what}: {message}{_what_exists(message)}") from error


def _what_exists(message: str) -> str:
    """Returns what a gin message about an unknown or ambiguous name may have meant."""
    if found := re.search(r"No configurable matching (?:reference )?'@?([\w./]+)", message):
        names = [selector.rsplit(".", 1)[-1] for selector, _ in _registry.items()]
        return f"\nNearest: {', '.join(nearest(found[1].rsplit('/', 1)[-1], names))}."
    if found := re.search(r"'([\w.]+)' doesn't have a parameter named '(\w+)'", message):
        parameters = inspect.signature(_registry.get_match(found[1]).wrapped).parameters
        close = nearest(found[2], [p for p in parameters if p != "model_dir"], len(parameters))
        return f"\nIts parameters: {', '.join(close)}."
    if found := re.search(r"Ambiguous selector '([\w.]+)'", message):
        matching = _registry.matching_selectors(found[1])
        return f"\nWrite one of: {', '.join(sorted(map(_registry.minimal_selector, matching)))}."
    if "'model_dir'" in message:
        return "\nA run's folder is no part of its configuration: it is the flag --model_dir."
    return ""


def _undefined_macros() -> list[str]:
    """Names the macros that are referred to and not defined."""
    defined = [scope for scope, selector in _bound if selector == _MACRO]
    used = {
        reference.config_key[0]: None
        for reference in gin.config.iterate_references(_bound)
        if reference.configurable.selector == _MACRO
    }
    return [
        f"%{name} is not defined; defined are: {', '.join(nearest(name, defined)) or 'none'}."
        for name in used
        if name not in defined
    ]


def _missing_values() -> list[str]:
    """Names the parameters that a file marks as required and nothing sets."""
    return [
        f"{_name(scope, selector, parameter)} must be given."
        for (scope, selector), values in _bound.items()
        for parameter, value in values.items()
        if repr(value) == "%gin.REQUIRED"
    ]


def _taken() -> set[_Binding]:
    """Returns the bindings that calls took their arguments from."""
    return {
        binding
        for call, values in _consumed_by_calls.items()
        for binding in _supplying(call)
        if binding[2] in values
    }


def _awaited(taken: set[_Binding]) -> set[_Binding]:
    """Returns the bindings of what was handed over uncalled, and so may be called later on."""
    waiting = [
        ("/".join(reference.scopes), reference.configurable.selector)
        for binding in taken
        for reference in _references(_value(binding))
        if not reference.evaluate
    ]
    seen = set(_consumed_by_calls)
    awaited = set()
    while waiting:
        call = waiting.pop()
        if call in seen:
            continue
        seen.add(call)
        for binding in _supplying(call):
            awaited.add(binding)
            waiting += [
                ("/".join(reference.scopes) or call[0], reference.configurable.selector)
                for reference in _references(_value(binding))
            ]
    return awaited


def _supplying(call: _Call) -> Iterator[_Binding]:
    """Yields the bindings that a call takes its arguments from: the innermost scope wins."""
    scope, selector = call
    parts = scope.split("/") if scope else []
    supplied: dict[str, _Binding] = {}
    for length in range(len(parts) + 1):
        outer = "/".join(parts[:length])
        for parameter in _bound.get((outer, selector), {}):
            supplied[parameter] = (outer, selector, parameter)
    return iter(supplied.values())


def _unused() -> list[str]:
    """Says of each binding that nothing consumes why it is so, and what it may have meant."""
    taken = _taken()
    consumed = taken | _awaited(taken)
    return [
        f"{_name(scope, selector, parameter)}: {_why_unused(scope, selector, parameter)}"
        for (scope, selector), values in _bound.items()
        for parameter in values
        if (scope, selector, parameter) not in consumed
    ]


def _why_unused(scope: str, selector: str, parameter: str) -> str:
    calls = list(_consumed_by_calls)
    if selector == _MACRO:
        read = [name for name, called in calls if called == _MACRO]
        return f"nothing reads %{scope}; macros that are read: {_nearest(scope, read)}."
    name = _registry.minimal_selector(selector)
    scopes = [called_in for called_in, called in calls if called == selector]
    if not scopes:
        called = [_registry.minimal_selector(called) for _, called in calls if called != _MACRO]
        return f"nothing calls {name}; what is called, nearest first: {_nearest(name, called)}."
    if not any(_is_within(called_in, scope) for called_in in scopes):
        written = [f"{called_in}/{name}".lstrip("/") for called_in in scopes]
        return (
            f"nothing calls {name} in the scope {scope}; it is called as: "
            f"{_nearest(f'{scope}/{name}', written)}."
        )
    for called_in in scopes:
        for binding in _supplying((called_in, selector)):
            if binding[2] == parameter and binding[0] != scope:
                return f"{_name(*binding)} overrides it in every call."
    return "every caller gives this argument itself."


def _is_within(scope: str, outer: str) -> bool:
    return not outer or scope == outer or scope.startswith(f"{outer}/")


def _nearest(name: str, names: Iterable[str]) -> str:
    return ", ".join(nearest(name, names, n=10)) or "none"


def _name(scope: str, selector: str, parameter: str) -> str:
    """Returns how one writes the left side of a binding."""
    if selector == _MACRO:
        return scope
    prefix = f"{scope}/" if scope else ""
    return f"{prefix}{_registry.minimal_selector(selector)}.{parameter}"


def _value(binding: _Binding) -> Any:
    scope, selector, parameter = binding
    return _bound[scope, selector][parameter]


def _references(value: Any) -> Iterator[Any]:
    return iter(gin.config.iterate_references({"": value}))


def _is_gin(value: Any) -> bool:
    """Whether gin can write a value; how references are written depends on the file's imports."""
    if isinstance(value, dict):
        return all(map(_is_gin, [*value, *value.values()]))
    if isinstance(value, (list, tuple)):
        return all(map(_is_gin, value))
    is_reference = isinstance(value, gin.config.ConfigurableReference)
    return is_reference or gin.config._format_value(value) is not None


def _as_gin(values: Mapping[_Call, Mapping[str, Any]]) -> str:
    ordered = {
        call: {parameter: _keeping_order(value) for parameter, value in parameters.items()}
        for call, parameters in values.items()
    }
    text: str = gin.config._config_str(ordered, max_line_length=100)
    return text


class _OrderedDict(dict):
    """A dict that pprint, which gin formats with, does not sort: their order may have a meaning."""

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{key!r}: {value!r}" for key, value in self.items()) + "}"


def _keeping_order(value: Any) -> Any:
    if isinstance(value, dict):
        return _OrderedDict({key: _keeping_order(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(map(_keeping_order, value))
    return value
