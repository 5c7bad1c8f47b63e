"""Every line of the README that can be run is run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
README = (CHECKOUT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    command.replace("\\\n", " ")
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for command in re.findall(r"^(?:[^\n\\]|\\\n)+$", block, re.MULTILINE)
]
LAUNCHES = [command for command in COMMANDS if command.startswith("python -m launch.")]


def run(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def expected_lines(block):
    """What the comments behind print calls claim that they print."""
    return re.findall(r"^print\(.*?\)\s+# (\[.*\])$", block, re.MULTILINE)


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: block.split("\n", 1)[0][:40])
def test_a_python_example_runs_and_prints_what_it_says(block, tmp_path):
    done = run([sys.executable, "-c", block], tmp_path)

    assert done.returncode == 0, done.stderr
    for line in expected_lines(block):
        assert line in done.stdout.splitlines()


def test_the_two_by_two_example_keeps_two_elements_to_the_last_bit(tmp_path):
    (block,) = [block for block in PYTHON_BLOCKS if "[[0, 0], [1, 1]]" in block]
    code = block + "\nassert x[0, 1] == 2.0 and x[1, 0] == 3.0 and x[0, 0] < 1.0 and x[1, 1] < 4.0"

    done = run([sys.executable, "-c", code], tmp_path)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", LAUNCHES)
def test_a_launch_command_succeeds(command, tmp_path):
    (tmp_path / "gin_configs").symlink_to(CHECKOUT / "gin_configs")
    arguments = shlex.split(command, comments=True)

    done = run([sys.executable, *arguments[1:]], tmp_path)

    assert done.returncode == 0, done.stderr


def test_the_two_commands_are_scripts_of_this_checkout():
    scripts = [shlex.split(c, comments=True)[1] for c in COMMANDS if c.startswith("sh ")]

    assert {"launch/quickstart.sh", "launch/test.sh"} <= set(scripts)
    assert all((CHECKOUT / script).is_file() for script in scripts)
