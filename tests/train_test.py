import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf

from finetune import configurables
from finetune.bundle import Bundle
from finetune.certificate import Certificate
from finetune.examples import korean_strings
from launch import training

CHECKOUT = Path(__file__).parent.parent
STEPS = 100
PARAMS = [
    f"Trainer.num_steps = {STEPS}",
    "Trainer.steps_per_loop = 5",
    "Trainer.checkpoint_every = 5",
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a child process: as a user's, but tfds keeps its files in a folder of the tests."""
    data_dir = str(tmp_path_factory.mktemp("data"))
    korean_strings.prepared(data_dir)
    of_user = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return of_user | {"TFDS_DATA_DIR": data_dir}


@pytest.fixture(scope="module")
def params(environment):
    """The same run inside this process, whose tfds may have been imported already."""
    return [*PARAMS, f"korean_spacing_task.data_dir = '{environment['TFDS_DATA_DIR']}'"]


@pytest.fixture(scope="module")
def finished(environment, tmp_path_factory):
    """The folder of a run that went through uninterrupted, and what it wrote."""
    model_dir = tmp_path_factory.mktemp("finished") / "run"
    done = run(*flags(model_dir), environment=environment)
    assert done.returncode == 0, done.stderr
    return model_dir, done


@pytest.fixture(autouse=True)
def empty_configuration():
    yield
    configurables.parse()


def flags(model_dir):
    """Of a short run of ours."""
    return [
        "--gin_file=korean_ascii.gin",
        f"--model_dir={model_dir}",
        *[f"--gin_param={param}" for param in PARAMS],
    ]


def start(*arguments, environment=None, **streams):
    return subprocess.Popen(
        [sys.executable, "-m", "launch.train", *arguments], cwd=CHECKOUT, env=environment, **streams
    )


def run(*arguments, environment=None):
    """The exit status, and what it wrote to stdout and stderr."""
    process = start(
        *arguments, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def bits(exported: Path) -> dict:
    bundle = Bundle(str(exported / "variables/variables"))
    return {
        key: bundle.read(key).tobytes() for key in sorted(bundle.keys()) if not key.startswith("_")
    }


def kill_at(step, number, model_dir, environment):
    """Starts a run and sends it a signal as soon as it saved that step; status and stderr."""
    process = start(
        *flags(model_dir), environment=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not (model_dir / f"checkpoints/ckpt-{step}.index").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, stderr


# What a run shows and leaves


def test_a_run_shows_what_happens_in_the_order_in_which_it_does(finished):
    model_dir, done = finished
    titles = [
        "variables\n",
        "held out, step 0\n",
        f"held out, step {STEPS}\n",
        "certificate\n",
        f"tuned model: {model_dir}/export\n",
        f"model = tf.saved_model.load('{model_dir}/export')\n",
    ]

    places = [done.stdout.find(title) for title in titles]

    assert places == sorted(places)
    assert places[0] > -1
    assert "embedding/embeddings  4250x64       6,144" in done.stdout
    assert "frozen elements moved: 0 of 340,097" in done.stdout


def test_the_log_shows_progress_and_no_chatter_of_libraries(finished):
    _, done = finished

    assert f"step {STEPS}/{STEPS}  loss" in done.stderr
    assert "steps/s" in done.stderr
    assert len(done.stderr.splitlines()) <= 3, done.stderr


def test_the_lines_that_load_the_tuned_model_can_be_pasted_elsewhere(finished, tmp_path):
    _, done = finished
    lines = done.stdout[done.stdout.index("import tensorflow") :]
    call = (
        "print(model(tf.zeros([2, 7], tf.int32), training=False).shape, 'finetune' in sys.modules)"
    )

    said = subprocess.run(
        [sys.executable, "-c", f"import sys\n{lines}\n{call}"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert said.stdout == "(2, 7) False\n"
    assert "# model(inputs=int32[None, None], training=False)" in lines
    assert "# model.signatures['serving_default'](texts=string[None])" in lines


def test_the_export_changes_the_ascii_rows_alone(finished, quickspacer_dir):
    model_dir, _ = finished
    base, tuned = bits(Path(quickspacer_dir)), bits(model_dir / "export")
    certificate = Certificate.from_json((model_dir / "export/certificate.json").read_text())

    changed = [key for key in base if base[key] != tuned[key]]

    assert base.keys() == tuned.keys()
    assert changed == ["embedding/embeddings/.ATTRIBUTES/VARIABLE_VALUE"]
    assert certificate.ok
    assert certificate.trainable == 96 * 64


def test_the_operative_config_alone_reproduces_the_run_bit_for_bit(finished, params, tmp_path):
    config = finished[0] / "operative_config.gin"
    (data_dir,) = (param for param in params if "data_dir" in param)

    training.run([str(config)], [data_dir], str(tmp_path), "train_and_evaluate")

    assert bits(tmp_path / "export") == bits(finished[0] / "export")


# Started again


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 42), (signal.SIGKILL, -9)], ids=["SIGTERM", "SIGKILL"]
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    number, status, finished, environment, params, tmp_path, capsys
):
    model_dir = tmp_path / "run"

    returned, stderr = kill_at(10, number, model_dir, environment)
    assert returned == status, stderr
    assert not (model_dir / "export").exists()
    if number == signal.SIGTERM:
        assert "start again to go on" in stderr
    training.run(["korean_ascii.gin"], params, str(model_dir), "train_and_evaluate")

    assert bits(model_dir / "export") == bits(finished[0] / "export")
    # The baseline is that of the first start: by now the model is another.
    assert "held out, step 0\n" in capsys.readouterr().out


def test_a_finished_run_says_so_evaluates_and_exports_again(params, tmp_path, capsys):
    few = [*params, "Trainer.num_steps = 5"]
    training.run(["korean_ascii.gin"], few, str(tmp_path), "train_and_evaluate")
    first = bits(tmp_path / "export")
    capsys.readouterr()

    training.run(["korean_ascii.gin"], few, str(tmp_path), "train_and_evaluate")

    shown = capsys.readouterr().out
    assert f"{tmp_path} is finished: nothing is left to train." in shown
    assert "held out, step 5\n" in shown
    assert bits(tmp_path / "export") == first


def test_a_folder_of_somebody_else_is_not_replaced_by_the_export(params, tmp_path):
    few = [*params, "Trainer.num_steps = 1"]
    training.run(["korean_ascii.gin"], few, str(tmp_path), "train")
    (tmp_path / "export").mkdir()
    (tmp_path / "export/thesis.txt").write_text("")

    with pytest.raises(ValueError, match="exists"):
        training.run(["korean_ascii.gin"], few, str(tmp_path), "export")

    assert [file.name for file in (tmp_path / "export").iterdir()] == ["thesis.txt"]


def test_a_folder_without_a_run_is_not_exported(params, tmp_path):
    (tmp_path / "ascii").mkdir()
    (tmp_path / "ascii/run.json").write_text("{}")

    with pytest.raises(ValueError, match=r"asci\) holds no run to export. Runs beside it: ascii"):
        training.run(["korean_ascii.gin"], params, str(tmp_path / "asci"), "export")

    assert not (tmp_path / "asci").exists()


# Modes


def test_train_trains_and_shows_the_certificate_and_exports_nothing(params, tmp_path, capsys):
    few = [*params, "Trainer.num_steps = 5"]
    training.run(["korean_ascii.gin"], few, str(tmp_path), "train")

    shown = capsys.readouterr().out
    assert "frozen elements moved: 0 of 340,097" in shown
    assert "held out" not in shown
    assert not (tmp_path / "export").exists()

    training.run(["korean_ascii.gin"], few, str(tmp_path), "evaluate")
    assert capsys.readouterr().out.startswith("\nheld out, step 5\n")

    training.run(["korean_ascii.gin"], few, str(tmp_path), "export")
    assert "tuned model" in capsys.readouterr().out
    assert tf.saved_model.contains_saved_model(str(tmp_path / "export"))


def test_evaluate_without_a_checkpoint_evaluates_the_base(params, tmp_path, capsys):
    training.run(["korean_ascii.gin"], params, str(tmp_path), "evaluate")

    assert capsys.readouterr().out.startswith("\nheld out, step 0\n")


def test_the_best_state_is_shown_where_it_is_what_is_exported(params, tmp_path, capsys):
    # A rate at which the second half makes the model worse than the first did.
    best = [
        *params,
        "Trainer.num_steps = 10",
        "Trainer.eval_every = 5",
        "Trainer.best_metric = 'loss'",
        "Trainer.best_mode = 'min'",
        "Adam.learning_rate = @PiecewiseConstantDecay()",
        "PiecewiseConstantDecay.boundaries = [5]",
        "PiecewiseConstantDecay.values = [0.01, 10.0]",
    ]

    training.run(["korean_ascii.gin"], best, str(tmp_path), "train_and_evaluate")

    assert "held out, step 5, the best by loss: exported\n" in capsys.readouterr().out


def test_a_dry_run_shows_coverage_bindings_and_data_and_keeps_nothing(environment, tmp_path):
    (tmp_path / "temporary").mkdir()

    done = run(
        "--gin_file=korean_ascii.gin", "--dry_run", f"--model_dir={tmp_path / 'run'}",
        environment=environment | {"TMPDIR": str(tmp_path / "temporary")},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    titles = ("variables\n", "gin bindings\n", "first batch\n", "nothing was trained")
    places = [done.stdout.find(title) for title in titles]
    assert places == sorted(places)
    assert places[0] > -1
    assert "embedding/embeddings  4250x64       6,144" in done.stdout
    assert "ascii/rows.indices = @quickspacer.ascii_rows()" in done.stdout
    assert "ids [32, " in done.stdout
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["temporary"]


# Flags and exit statuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gin_fil=x"], "Unknown command line flag 'gin_fil'. Did you mean: gin_file"),
        (["--mode=test"], "<train|evaluate|train_and_evaluate|export>"),
        (["--model_dir=x"], "--gin_file must be given"),
        (["--gin_file=korean_ascii.gin"], "--model_dir must be given"),
        (["--gin_file=korean_ascii.gin", "--dry_run", "runs/a"], "got: runs/a"),
    ],
)
def test_bad_flags_exit_with_2_at_once(arguments, message):
    done = run(*arguments)

    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_faulty_configuration_exits_with_1_and_its_message_alone(environment, tmp_path):
    done = run(
        "--gin_file=korean_ascii.gin", "--gin_param=asci/rows.indices = [1]",
        f"--model_dir={tmp_path}", environment=environment,
    )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith("Nothing consumes these gin bindings:\n  - asci/rows.indices")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "operative_config.gin").exists()


AS_CONSOLE_COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = '/bin/finetune-train'; import launch.train; launch.train.main()",
]


@pytest.mark.parametrize(
    "program",
    [[sys.executable, "-m", "launch.train"], AS_CONSOLE_COMMAND],
    ids=["module", "console command"],
)
def test_help_lists_our_flags_alone_on_one_screen(program):
    shown = subprocess.run(
        [*program, "--help"], cwd=CHECKOUT, capture_output=True, text=True
    ).stdout

    lines = shown.splitlines()
    listed = [line.split(":")[0].strip() for line in lines if line.startswith("  --")]
    assert listed == ["--[no]dry_run", "--gin_file", "--gin_param", "--mode", "--model_dir"]
    assert "Exit status: 0 done" in shown
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_a_terminal_shows_a_bar_with_loss_speed_and_time_left(environment, tmp_path):
    ours, theirs = pty.openpty()
    process = start(
        *flags(tmp_path / "run"), "--mode=train", environment=environment,
        stdout=subprocess.DEVNULL, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk

    assert process.wait() == 0
    last = shown.decode().strip().split("\r")[-1]
    # Such as: train: 100%|####| 100/100 [00:03<00:00, 31.2step/s, loss=0.17]
    assert re.search(rf"{STEPS}/{STEPS} \[\S+<00:00, .*step/s, loss=0\.\d+\]", last)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # What Linux says when the other side is closed.
        return b""
