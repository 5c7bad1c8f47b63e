import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy so that no build litter lands in the checkout."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(CHECKOUT / name, tree)
    for name in ["finetune", "launch", "gin_configs"]:
        shutil.copytree(CHECKOUT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    dist = tmp_path_factory.mktemp("dist")
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run([*pip_wheel, "--wheel-dir", dist, tree])
    (built,) = dist.glob("*.whl")
    return built


def test_no_top_level_name_but_finetune_lands_in_site_packages(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}

    assert {top for top in tops if not top.startswith("finetune_elements-")} == {"finetune"}
    assert {top.rsplit(".", 1)[-1] for top in tops - {"finetune"}} == {"dist-info"}


def test_every_module_config_and_script_is_in_the_wheel(wheel):
    sources = [
        *CHECKOUT.glob("finetune/**/*.py"),
        *CHECKOUT.glob("launch/*.py"),
        *CHECKOUT.glob("launch/*.sh"),
        *CHECKOUT.glob("gin_configs/*.gin"),
        CHECKOUT / "finetune/py.typed",
    ]
    expected = {source.relative_to(CHECKOUT) for source in sources}
    expected = {path if path.parts[0] == "finetune" else "finetune" / path for path in expected}

    shipped = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}

    assert Path("finetune/launch/train.py") in expected
    assert Path("finetune/gin_configs/korean_ascii.gin") in expected
    assert expected - shipped == set()


def test_no_test_and_no_cache_is_in_the_wheel(wheel):
    names = zipfile.ZipFile(wheel).namelist()

    assert [name for name in names if name.endswith(("_test.py", ".pyc"))] == []


def test_the_version_of_the_wheel_is_the_one_in_the_package(wheel):
    versions: dict[str, str] = {}
    exec((CHECKOUT / "finetune/version.py").read_text(), versions)

    assert wheel.name == f"finetune_elements-{versions['__version__']}-py3-none-any.whl"


def test_the_console_command_works_outside_the_checkout(wheel, tmp_path):
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    python = tmp_path / "venv/bin/python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel])
    # Only what it depends on is lent from here: an editable install of this checkout is not, for
    # a .pth file is read in the environment's own folder alone.
    lent = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site_packages / "lent.pth").write_text("\n".join(lent))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    found = run(
        [python, "-c", "import finetune, finetune.launch.train as t; print(finetune, t)"], elsewhere
    )
    # absl's --help exits with 1.
    shown = run([tmp_path / "venv/bin/finetune-train", "--help"], elsewhere, exits_with=1)

    assert found.count(str(site_packages)) == 2
    assert "--gin_file" in shown
    assert "--model_dir" in shown


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_the_scripts_refuse_a_python_without_tensorflow(script, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1;; *) echo 3.9.1;; esac\n')
    python.chmod(0o755)

    # A copy: should the script go on after all, it spoils no environment that is in use.
    shutil.copytree(CHECKOUT / "launch", tmp_path / "checkout/launch")

    said = run(["sh", tmp_path / "checkout/launch" / script], exits_with=1, PYTHON=str(python))

    assert "is Python 3.9.1, for which there is no Keras 3.15 on TensorFlow" in said


def run(command, cwd=None, exits_with=0, **environment) -> str:
    """Runs a command in an environment without this one's PYTHONPATH; returns all it printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == exits_with, done.stdout
    return done.stdout
