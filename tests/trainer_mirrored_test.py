import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "mirrored.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What training on two devices gave; see the program, whose cases have the names of tests."""
    from finetune.examples.korean_spacing import korean_spacing_task

    data_dir = tmp_path_factory.getbasetemp() / "tfds"
    korean_spacing_task(data_dir)
    finished = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("runs")), str(data_dir)],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


# The trainable elements of these rules.
PARTLY, MIXED, WHOLLY = 9 + 2 + 1, 18 + 4, 18 + 6 + 1


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("partly_trainable", PARTLY),
        ("partly_trainable_dense", PARTLY),
        ("wholly_trainable_with_sparse_gradients", WHOLLY),
        ("mixed", MIXED),
        ("averages_and_accumulation", PARTLY),
        ("loss_scale", PARTLY),
    ],
)
def test_two_replicas_train_as_one_does(results, case, changed):
    """With a partial batch, weights, a regularizer and clipping; only the order of sums differs."""
    found = results[f"case_{case}"]
    assert found["losses"] <= 16  # Units in the last place, in each of twelve steps.
    assert found["values"] <= 256  # The largest was 48, at a value near zero.
    assert found["changed"] == [changed, changed]


@pytest.mark.parametrize(
    "case",
    [
        "partly_trainable",
        "partly_trainable_dense",
        "wholly_trainable_with_sparse_gradients",
        "mixed",
        "averages_and_accumulation",
        "loss_scale",
    ],
)
def test_frozen_bits_stay_on_both_replicas_and_their_copies_are_equal(results, case):
    assert results[f"case_{case}"]["ok"]
    assert results[f"case_{case}"]["copies_equal"]


def test_a_batch_smaller_than_the_number_of_replicas_trains_too(results):
    """Of six examples in batches of five the last is alone: one replica has none."""
    found = results["case_a_batch_smaller_than_the_replicas"]
    assert found["values"] <= 16
    assert found["copies_equal"]


def test_an_evaluation_is_the_same_under_two_replicas(results):
    one, two = results["case_evaluation"]
    assert one == two
    assert one["loss"] == pytest.approx(one["mse"])


def test_an_export_has_the_bits_of_the_replicas(results):
    assert results["case_export"] is True


def test_a_resume_under_two_replicas_ends_with_the_bits_of_the_whole(results):
    assert results["case_resume"] == [True, 12, True]


def test_a_run_of_two_replicas_goes_on_with_one(results):
    assert results["case_resume_on_one_replica"] == [12, True]


def test_a_nan_on_one_replica_stops_the_run_and_poisons_none(results):
    message, finite, equal = results["case_nan_on_one_replica"]
    assert message == "The loss or a gradient is not finite at step 2."
    assert finite
    assert equal


def test_state_is_put_back_on_both_replicas_and_moves_alike_where_it_may(results):
    assert results["case_state"] == {
        "moved": ["model/second/moving_mean"],
        "ok": True,
        "copies_equal": True,
        "resumes": True,
    }


def test_the_real_model_trains_under_two_replicas(results):
    found = results["case_real_model"]
    assert found.pop("changed") > 50 * 64
    assert found == {"ok": True, "copies_equal": True, "better": True, "traces": 1}


def test_strategies_of_one_device_give_the_bits_of_none(results):
    assert results["case_strategies_of_one_device"] == [True, True]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "base_outside_of_the_scope",
            "`base` was not loaded under `strategy` (MirroredStrategy, replicas: 2): the number of "
            "copies of `table` is 1. Pass a path or a function that returns the Base, or load it "
            "inside `with strategy.scope():`.",
        ),
        ("strategy_forgotten", "replicas: 1): the number of copies of `table` is 2."),
        ("made_in_the_scope", "A Trainer is made and used outside of `strategy.scope()`: give it"),
        ("used_in_the_scope", "A Trainer is made and used outside of `strategy.scope()`: give it"),
        ("reduced_loss", "`task.loss` gives one number for a batch: it must not reduce"),
        ("multi_worker", "`strategy` (MultiWorkerMirroredStrategy) is not supported yet: use"),
        ("central_storage", "`strategy` (CentralStorageStrategy) is not supported yet: use"),
    ],
)
def test_what_cannot_be_is_refused(results, case, text):
    error = results[f"case_error_{case}"]["error"]
    assert error.startswith("ValueError: ")
    assert text in error
