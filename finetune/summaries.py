"""Scalars for TensorBoard, written by TensorFlow alone: only looking at them needs TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import summary_pb2

# What tf.summary.scalar writes too; that function refuses to work without TensorBoard installed.
_SCALAR = summary_pb2.SummaryMetadata(
    plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class=summary_pb2.DATA_CLASS_SCALAR,
)


def write_scalars(
    writer: tf.summary.SummaryWriter, global_step: int, scalars: Mapping[str, float]
) -> None:
    """Writes each scalar under its name at `global_step`, and flushes. Eager only.

    Args:
      writer: of `tf.summary.create_file_writer`.
      global_step: the step on TensorBoard's axis.
      scalars: {name: value}; a name with a slash is shown in the group before the slash.
    """
    with writer.as_default(step=global_step):
        for name, value in scalars.items():
            tf.summary.write(name, tf.constant(value, tf.float32), metadata=_SCALAR)
    writer.flush()
