import math
from pathlib import Path

import pytest
import tensorflow as tf

from finetune.summaries import write_scalars


def scalars_in(folder: Path) -> list[tuple[int, str, float]]:
    (file,) = folder.iterdir()
    return [
        (event.step, value.tag, float(tf.make_ndarray(value.tensor)))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]


def test_scalars_are_read_back_by_name_and_step(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    write_scalars(writer, 20, {"loss": 0.5, "eval/f1": 0.25})
    write_scalars(writer, 40, {"loss": 0.125})
    assert scalars_in(tmp_path) == [(20, "loss", 0.5), (20, "eval/f1", 0.25), (40, "loss", 0.125)]


def test_tensorboard_is_told_that_they_are_scalars(tmp_path):
    write_scalars(tf.summary.create_file_writer(str(tmp_path)), 1, {"loss": 0.5})
    (file,) = tmp_path.iterdir()
    values = [v for e in tf.compat.v1.train.summary_iterator(str(file)) for v in e.summary.value]
    assert values[0].metadata.plugin_data.plugin_name == "scalars"
    assert values[0].metadata.data_class == 1  # DATA_CLASS_SCALAR


def test_what_was_written_can_be_read_while_the_writer_is_open(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    write_scalars(writer, 1, {"loss": 1.0})
    assert len(scalars_in(tmp_path)) == 1
    write_scalars(writer, 2, {"loss": 2.0})
    assert len(scalars_in(tmp_path)) == 2


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_are_written_as_they_are(tmp_path, value):
    write_scalars(tf.summary.create_file_writer(str(tmp_path)), 1, {"loss": value})
    assert repr(scalars_in(tmp_path)[0][2]) == repr(value)
