import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import finetune

SOURCE = Path(finetune.__file__)


def names_for_type_checkers():
    guarded = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    return {
        alias.name: node.module
        for block in guarded
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_public_names_are_all_there():
    assert sorted(finetune.__all__) == dir(finetune)
    for name in finetune.__all__:
        assert getattr(finetune, name) is not None


def test_type_checkers_and_users_see_the_same_names():
    seen = names_for_type_checkers()

    assert {*seen, "__version__"} == set(finetune.__all__)
    for name, module in seen.items():
        assert getattr(finetune, name) is getattr(importlib.import_module(module), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'finetune' has no attribute 'Trainr'"):
        finetune.Trainr  # noqa: B018


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=SOURCE.parent.parent,
        capture_output=True,
        text=True,
    )


def test_importing_finetune_alone_does_not_import_tensorflow():
    done = run("import finetune, sys; print('tensorflow' in sys.modules, finetune.__version__)")

    assert done.stdout.split() == ["False", finetune.__version__]


def test_another_keras_backend_is_refused_with_what_to_do():
    # The other backends are not installed here, so Keras is made to name one.
    other = "import keras; keras.backend.backend = lambda: 'jax'"

    done = run(f"{other}; import finetune; finetune.MaskedOptimizer")

    assert done.returncode == 1
    assert "set KERAS_BACKEND=tensorflow before Keras is imported" in done.stderr
