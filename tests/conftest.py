"""What every test stands on: a quiet TensorFlow, Keras on TensorFlow, the real model."""

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Set before any test module imports TensorFlow or Keras, which read them once.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

# The first example of a test traces a graph and is slow; the same examples every time.
settings.register_profile("finetune", deadline=None, derandomize=True)
settings.load_profile("finetune")


@pytest.fixture(scope="session")
def quickspacer_dir() -> str:
    """The SavedModel of Korean word spacing inside the package quickspacer; for reading only."""
    # Looked up, not imported: importing the package loads its model.
    spec = importlib.util.find_spec("quickspacer")
    if spec is None or spec.origin is None:
        pytest.fail(
            "The package quickspacer is missing: pip install -c constraints.txt '.[examples]'"
        )
    return str(Path(spec.origin).parent / "resources" / "default_saved_model" / "1")
