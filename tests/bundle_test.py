import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from finetune.bundle import Bundle, digest, fingerprint, rewrite

BFLOAT16 = tf.bfloat16.as_numpy_dtype
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def save(prefix: Path, tensors: dict, slices: dict | None = None) -> Bundle:
    """Writes named tensors as they are, as TensorFlow's own savers do."""
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=[name.split("#")[0] for name in tensors],
        shape_and_slices=[(slices or {}).get(name, "") for name in tensors],
        tensors=list(tensors.values()),
    )
    return Bundle(str(prefix))


@pytest.fixture
def every_dtype(tmp_path) -> Bundle:
    nan_with_payload = np.array([0x7FC00001, 0x80000000], np.uint32).view(np.float32)
    return save(
        tmp_path / "base",
        {
            "float": nan_with_payload,
            "bfloat16": tf.constant([1.5, -0.0], tf.bfloat16),
            "float8": tf.constant(
                np.array([1, 2]).astype(tf.as_dtype("float8_e4m3fn").as_numpy_dtype)
            ),
            "half": np.float16([1, 2]),
            "int": np.int64(7),
            "bool": np.array([[True, False]]),
            "complex": np.complex64([1 + 2j]),
            "quantized": tf.bitcast(tf.constant([1, -2], tf.int8), tf.qint8),
            "text": tf.constant([["a", ""], ["\xff\x00", "가"]]),
            "one_text": tf.constant("alone"),
            "nothing": tf.zeros([0, 3]),
        },
    )


@pytest.fixture
def partitioned(tmp_path) -> Bundle:
    """`table` is [[0, 1], [2, 3], [4, 5]], saved as its first row and the other two."""
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    return save(
        tmp_path / "partitioned",
        {"table#0": table[:1], "table#1": table[1:], "bias": np.float32([9])},
        {"table#0": "3 2 0,1:0,2", "table#1": "3 2 1,2:0,2"},
    )


@pytest.fixture
def sharded(tmp_path) -> Bundle:
    parts = [str(tmp_path / "part0"), str(tmp_path / "part1")]
    save(parts[0], {"a": np.float32([1, 2])})
    save(parts[1], {"b": np.float32([3, 4, 5])})
    prefix = str(tmp_path / "sharded")
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix)
    return Bundle(prefix)


def same_tensors(one: Bundle, other: Bundle, but: tuple[str, ...] = ()) -> bool:
    keys = one.keys()
    assert other.keys() == keys
    assert [other.dtype(k) for k in keys] == [one.dtype(k) for k in keys]
    assert [other.shape(k) for k in keys] == [one.shape(k) for k in keys]
    return all(digest(one.read(k)) == digest(other.read(k)) for k in set(keys) - set(but))


def test_a_bundle_reads_every_dtype_with_its_bits(every_dtype):
    assert every_dtype.read("float").view(np.uint32).tolist() == [0x7FC00001, 0x80000000]
    assert every_dtype.read("bfloat16").dtype == BFLOAT16
    assert every_dtype.read("bfloat16").view(np.uint16).tolist() == [0x3FC0, 0x8000]
    assert every_dtype.read("float8").dtype == every_dtype.dtype("float8").as_numpy_dtype
    assert every_dtype.read("int").shape == ()
    assert every_dtype.read("int") == 7
    assert every_dtype.read("text").tolist() == [[b"a", b""], ["\xff\x00".encode(), "가".encode()]]
    assert every_dtype.read("one_text").shape == ()
    assert every_dtype.read("one_text") == b"alone"
    assert every_dtype.read("quantized").tolist() == [1, -2]
    assert every_dtype.read("nothing").shape == every_dtype.shape("nothing") == (0, 3)


def test_keys_are_found_by_path_in_object_based_and_name_based_checkpoints(every_dtype, tmp_path):
    prefix = tf.train.Checkpoint(a=tf.train.Checkpoint(b=tf.Variable(1.0))).write(tmp_path / "c")
    assert Bundle(prefix).key_of("a/b") == "a/b/.ATTRIBUTES/VARIABLE_VALUE"
    assert Bundle(prefix).key_of("a") is None
    assert every_dtype.key_of("float") == "float"


def test_a_real_saved_model_is_read_through_its_variables_folder(quickspacer_dir):
    bundle = Bundle(os.path.join(quickspacer_dir, "variables", "variables"))
    assert bundle.shape(bundle.key_of("embedding/embeddings")) == (4250, 64)
    assert len(bundle.keys()) == 6
    assert bundle.dtype(GRAPH) == tf.string


def test_rewriting_nothing_keeps_every_tensor(every_dtype, tmp_path):
    rewrite(every_dtype, {}, tmp_path / "new" / "copy")
    assert same_tensors(every_dtype, Bundle(tmp_path / "new" / "copy"))
    assert sorted(os.listdir(tmp_path / "new")) == ["copy.data-00000-of-00001", "copy.index"]


def test_changes_are_made_and_everything_else_keeps_its_bits(every_dtype, tmp_path):
    changes = {
        "float": np.float32([1, 2]),
        "bfloat16": np.array([3, 4], BFLOAT16),
        "bool": tf.constant([[False, False]]),
        "quantized": np.int8([5, 6]),
        "text": np.array([["b", b"c"], ["d", "e"]], object),
        "int": tf.Variable(8, dtype=tf.int64),
    }
    rewrite(every_dtype, changes, tmp_path / "new")
    new = Bundle(tmp_path / "new")
    assert same_tensors(every_dtype, new, but=tuple(changes))
    assert all(digest(new.read(k)) == digest(changes[k]) for k in changes)


def test_the_object_graph_is_kept_so_that_the_module_restores(tmp_path):
    module = tf.train.Checkpoint(x=tf.Variable([1.0, 2.0]), step=tf.Variable(3))
    base = Bundle(module.write(tmp_path / "base"))
    rewrite(base, {base.key_of("x"): np.float32([5, 6])}, tmp_path / "tuned")
    module.read(str(tmp_path / "tuned")).assert_consumed()
    assert module.x.numpy().tolist() == [5, 6]
    assert module.step.numpy() == 3
    assert digest(Bundle(tmp_path / "tuned").read(GRAPH)) == digest(base.read(GRAPH))


def test_groups_bound_the_memory_and_give_one_data_file_each(every_dtype, tmp_path):
    rewrite(every_dtype, {"int": np.int64(8)}, tmp_path / "new" / "x", group_bytes=8)
    new = Bundle(tmp_path / "new" / "x")
    assert same_tensors(every_dtype, new, but=("int",))
    assert new.read("int") == 8
    files = sorted(os.listdir(tmp_path / "new"))
    assert len(files) > 4
    assert files[-1] == "x.index"
    assert files[0] == f"x.data-00000-of-{len(files) - 1:05d}"


def test_partitions_are_read_whole_and_can_be_restored_in_partitions(partitioned, tmp_path):
    assert partitioned.keys() == ["bias", "table"]
    assert partitioned.shape("table") == (3, 2)
    table = partitioned.read("table")
    table[2] = [7, 8]
    rewrite(partitioned, {"table": table}, tmp_path / "new")
    assert Bundle(tmp_path / "new").read("table").tolist() == [[0, 1], [2, 3], [7, 8]]
    (rows,) = tf.raw_ops.RestoreV2(
        prefix=str(tmp_path / "new"),
        tensor_names=["table"],
        shape_and_slices=["3 2 1,2:0,2"],
        dtypes=[tf.float32],
    )
    assert rows.numpy().tolist() == [[2, 3], [7, 8]]


def test_several_data_files_become_one(sharded, tmp_path):
    rewrite(sharded, {"b": np.float32([6, 7, 8])}, tmp_path / "new")
    assert Bundle(tmp_path / "new").read("a").tolist() == [1, 2]
    assert Bundle(tmp_path / "new").read("b").tolist() == [6, 7, 8]
    assert (tmp_path / "new.data-00000-of-00001").exists()


def test_all_wrong_changes_are_listed_at_once_and_nothing_is_written(every_dtype, tmp_path):
    changes = {
        "floot": np.float32(0),
        "bfloat16": np.float32([1, 2]),
        "half": np.float16([[1, 2]]),
        "int": np.array(7, "datetime64[s]"),
        "one_text": np.array(3, object),
        "bool": np.array([[True, True]]),
    }
    with pytest.raises(ValueError, match="`changes` does not fit") as caught:
        rewrite(every_dtype, changes, tmp_path / "new" / "x")
    assert str(caught.value).splitlines()[1:] == [
        "  floot: no such key, nearest: float, float8, bfloat16",
        "  bfloat16: dtype float32, must be bfloat16",
        "  half: shape (1, 2), must be (2,)",
        "  int: dtype datetime64[s], must be int64",
        "  one_text: dtype object, must be string",
    ]
    assert not (tmp_path / "new").exists()


def test_a_prefix_that_is_taken_is_refused(every_dtype):
    with pytest.raises(ValueError, match=r"`prefix` \(.*base\) is taken by .*base.data-00000-of"):
        rewrite(every_dtype, {}, every_dtype.prefix)


def test_rewriting_inside_a_tf_function_is_refused(every_dtype, tmp_path):
    with pytest.raises(RuntimeError, match="call it outside graphs"):
        tf.function(lambda: rewrite(every_dtype, {}, tmp_path / "new"))()
    with pytest.raises(ValueError, match=r"`group_bytes` \(0\)"):
        rewrite(every_dtype, {}, tmp_path / "new", group_bytes=0)


def test_reading_works_while_a_function_is_traced(every_dtype):
    assert tf.function(lambda: tf.constant(every_dtype.read("half")))().numpy().tolist() == [1, 2]


def test_a_missing_checkpoint_is_an_error_that_names_what_exists(every_dtype, tmp_path):
    for wrong, message in {
        "bass": rf"`prefix` \({tmp_path}/bass\).*does not exist. Nearest: {tmp_path}/base\.",
        "base.index": f"A prefix has no ending: use {tmp_path}/base.",
        "base.data-00000-of-00001": f"A prefix has no ending: use {tmp_path}/base.",
        "": f"Nearest: {tmp_path}/base.",
        "nowhere/base": f"The folder {tmp_path}/nowhere does not exist either.",
    }.items():
        with pytest.raises(ValueError, match=message):
            Bundle(os.path.join(tmp_path, wrong))


def test_the_folder_of_a_saved_model_is_answered_with_its_prefix(quickspacer_dir):
    with pytest.raises(ValueError, match=r"Nearest: .*/1/variables/variables"):
        Bundle(quickspacer_dir)


def test_a_missing_key_is_an_error_that_names_the_nearest(every_dtype):
    for ask in (every_dtype.read, every_dtype.shape, every_dtype.dtype):
        with pytest.raises(ValueError, match=r"`key` \(boolean\) is not in .* Nearest: bool, "):
            ask("boolean")


def test_a_data_file_cut_short_is_found_on_opening(sharded, every_dtype):
    os.truncate(f"{sharded.prefix}.data-00001-of-00002", 11)
    message = r"need at least 20 bytes, and only 19 are there, in .*data-00001-of-00002"
    with pytest.raises(ValueError, match=message):
        Bundle(sharded.prefix)
    with pytest.raises(
        ValueError, match=r"`key` \(b\) cannot be read from one of .*00001-of-00002"
    ):
        sharded.read("b")


def test_a_missing_data_file_is_named(sharded):
    os.remove(f"{sharded.prefix}.data-00001-of-00002")
    with pytest.raises(ValueError, match=r"missing: .*sharded.data-00001-of-00002\. Copy"):
        Bundle(sharded.prefix)
    os.remove(f"{sharded.prefix}.data-00000-of-00002")
    with pytest.raises(ValueError, match=r"sharded.index is there, but no data file"):
        Bundle(sharded.prefix)


def test_a_flipped_bit_is_found_on_reading_with_its_file_and_key(sharded, tmp_path):
    file = Path(f"{sharded.prefix}.data-00001-of-00002")
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    bundle = Bundle(sharded.prefix)
    assert bundle.read("a").tolist() == [1, 2]
    with pytest.raises(ValueError, match=rf"`key` \(b\) cannot be read from {file}: .*Checksum"):
        bundle.read("b")
    with pytest.raises(ValueError, match=rf"`key` \(b\) cannot be read from {file}"):
        rewrite(bundle, {}, tmp_path / "new" / "x", group_bytes=8)
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("length", [0, 100])
def test_an_index_cut_short_is_named(every_dtype, length):
    os.truncate(every_dtype.prefix + ".index", length)
    with pytest.raises(ValueError, match=r"index file .*base.index is damaged or cut short"):
        Bundle(every_dtype.prefix)


def test_a_digest_can_be_computed_from_its_documented_layout():
    numbers = b"float32|1,2|" + struct.pack("<ff", 1.5, -0.0)
    assert digest(np.float32([[1.5, -0.0]])) == hashlib.sha256(numbers).hexdigest()
    assert digest(tf.constant([[1.5, -0.0]])) == hashlib.sha256(numbers).hexdigest()
    assert digest(np.array([[1.5, -0.0]], ">f4")) == hashlib.sha256(numbers).hexdigest()
    assert digest(np.array(True)) == hashlib.sha256(b"bool||\x01").hexdigest()
    half = b"bfloat16|1|" + struct.pack("<H", 0x3FC0)
    assert digest(np.array([1.5], BFLOAT16)) == hashlib.sha256(half).hexdigest()
    text = b"string|2|" + struct.pack("<Q", 3) + "가".encode() + struct.pack("<Q", 0)
    for same in (np.array(["가", b""], object), np.array(["가", ""]), tf.constant(["가", ""])):
        assert digest(same) == hashlib.sha256(text).hexdigest()


def test_digests_differ_where_bits_shapes_or_dtypes_do():
    values = [
        np.float32([0, 1]),
        np.float32([-0.0, 1]),
        np.float32([[0, 1]]),
        np.int32([0, 0x3F800000]),
        np.array(["ab", "c"]),
        np.array(["a", "bc"]),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(np.arange(6)[::2]) == digest(np.array([0, 2, 4]))


def test_what_has_no_dtype_in_tensorflow_has_no_digest():
    with pytest.raises(ValueError, match=r"`array` has dtype \(datetime64\[s\]\)"):
        digest(np.array(0, "datetime64[s]"))
    with pytest.raises(ValueError, match=r"holds an object \(None\) that is neither bytes nor"):
        digest(np.array([None], object))


def test_a_fingerprint_can_be_computed_from_its_documented_layout():
    layout = b"".join(struct.pack("<Q", len(part)) + part for part in (b"a", b"1", b"b", b"22"))
    assert fingerprint({"b": "22", "a": "1"}) == hashlib.sha256(layout).hexdigest()
    assert fingerprint({"a": "1", "b": "22"}) != fingerprint({"a": "22", "b": "1"})
