import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from finetune import runs


@pytest.fixture(scope="module")
def real_task(tmp_path_factory):
    from finetune.examples.korean_spacing import korean_spacing_task

    return korean_spacing_task(data_dir=tmp_path_factory.getbasetemp() / "tfds")


PROGRAMS = Path(__file__).parent / "programs"


class Runs:
    """Training runs in processes of their own; see tests/programs/resumable.py."""

    def __init__(self, data_dir: Path):
        self._data_dir = data_dir
        self._program = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "resumable.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PROGRAMS.parents[1])},
        )

    def start(self, variant: str, model_dir: Path) -> int:
        """Starts or resumes a run; returns its process."""
        request = {
            "variant": variant,
            "model_dir": str(model_dir),
            "data_dir": str(self._data_dir),
        }
        assert self._program.stdin is not None
        print(json.dumps(request), file=self._program.stdin, flush=True)
        return self._answer()

    def status(self) -> int:
        """Waits for the process; returns its exit status, or minus the signal that killed it."""
        return self._answer()

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._program.wait()

    def _answer(self) -> int:
        assert self._program.stdout is not None
        line = self._program.stdout.readline()
        assert line, "the program died"
        return int(line)


@pytest.fixture(scope="module")
def program(tmp_path_factory, real_task):
    del real_task  # Its data is prepared.
    made = Runs(tmp_path_factory.getbasetemp() / "tfds")
    yield made
    made.close()


@pytest.fixture(scope="module")
def uninterrupted(program, tmp_path_factory):
    """For each variant the folder of a run that nothing interrupted."""
    folders = {}
    for variant in ("saved_model", "keras"):
        folders[variant] = tmp_path_factory.mktemp("whole") / variant
        program.start(variant, folders[variant])
        assert program.status() == 0, Path(f"{folders[variant]}.log").read_text()
    return folders


def outcome(model_dir: Path):
    """What a finished run leaves, bit by bit: the exported model, the last checkpoint, metrics."""
    newest = max((model_dir / "checkpoints").glob("*.index"), key=lambda f: int(f.stem[5:]))
    (exported,) = (model_dir / "export").rglob("*.index")
    bits = {}
    for index in (newest, exported):
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        for key in reader.get_variable_to_shape_map():
            # How far the data was read ahead is a matter of luck.
            if "iterator" not in key and key != "_CHECKPOINTABLE_OBJECT_GRAPH":
                value = np.asarray(reader.get_tensor(key))
                bits[index.parent.name, key] = (value.dtype.str, value.tobytes())
    certificate = json.loads((model_dir / "export" / "certificate.json").read_text())
    return newest.stem, bits, certificate["ok"], runs.evaluations(str(model_dir))


def sealed(model_dir: Path) -> set[str]:
    folder = model_dir / "checkpoints"
    return {f.stem for f in folder.glob("ckpt-*.json")} if folder.exists() else set()


def wait_for(condition, seconds=60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)  # The runs need the processor more.
    return True


def is_saving(model_dir: Path) -> bool:
    """Whether a checkpoint lies there without its seal."""
    for folder in (model_dir / "checkpoints", model_dir / "best"):
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(folder)
            if any(n.endswith("_temp") or n.replace(".index", ".json") not in names for n in names):
                return True
    return False


def kill(program, variant, model_dir, how, generator) -> int:
    """Starts the run, and kills it after it has made progress, without a generator at once."""
    before = sealed(model_dir)
    process = program.start(variant, model_dir)
    wait_for(lambda: sealed(model_dir) - before or (model_dir / "export").exists())
    if how == "while saving":
        wait_for(lambda: is_saving(model_dir), seconds=2)
    else:
        time.sleep(generator.uniform(0, 0.4) if generator else 0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    return program.status()


def run_with_kills(program, variant, model_dir, kills, generator):
    """Kills the run again and again, then lets it end; returns the exit statuses."""
    statuses = [kill(program, variant, model_dir, how, generator) for how in kills]
    program.start(variant, model_dir)
    statuses.append(program.status())
    assert statuses[-1] == 0, Path(f"{model_dir}.log").read_text()
    return statuses


@pytest.mark.parametrize("variant", ["saved_model", "keras"])
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    variant, program, uninterrupted, tmp_path
):
    generator = np.random.default_rng(1)
    kills = ["while saving", "at random", "SIGTERM"]
    statuses = run_with_kills(program, variant, tmp_path / "run", kills, generator)
    assert statuses[0] == -signal.SIGKILL
    # The later ones may come after the end of the training, or of the run.
    assert set(statuses[1:]) <= {-signal.SIGKILL, -signal.SIGTERM, 42, 0}
    assert outcome(tmp_path / "run") == outcome(uninterrupted[variant])


def test_sigterm_ends_the_process_with_42_and_a_checkpoint(program, uninterrupted, tmp_path):
    status = kill(program, "saved_model", tmp_path / "run", "SIGTERM", None)
    assert status == 42, Path(f"{tmp_path / 'run'}.log").read_text()
    run_with_kills(program, "saved_model", tmp_path / "run", [], None)
    assert outcome(tmp_path / "run") == outcome(uninterrupted["saved_model"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("variant", ["saved_model", "keras"])
def test_a_run_that_is_killed_all_the_time_ends_with_the_same_bits(
    variant, seed, program, uninterrupted, tmp_path
):
    generator = np.random.default_rng(seed)
    kills = list(generator.choice(["while saving", "at random", "SIGTERM"], size=8))
    run_with_kills(program, variant, tmp_path / "run", kills, generator)
    assert outcome(tmp_path / "run") == outcome(uninterrupted[variant])
