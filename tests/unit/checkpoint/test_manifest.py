"""What a manifest may claim."""

import pytest

from hetero.checkpoint.manifest import Manifest, SavedBlock, Shard, TensorInfo, check_manifest, overlap
from hetero.errors import CheckpointError


def block(offsets: tuple[int, ...], shape: tuple[int, ...], name: str = "weights/a") -> SavedBlock:
    return SavedBlock(name=name, offsets=offsets, shape=shape, crc32=0)


def manifest(
    *blocks: SavedBlock, files: tuple[str, ...] = ("one.safetensors",), shape: tuple[int, ...] = (4, 6)
) -> Manifest:
    return Manifest(
        tensors={"weights/a": TensorInfo(shape=shape, dtype="float32")},
        shards=tuple(
            Shard(file=file, size_bytes=200, header_crc32=0, boxes=blocks if i == 0 else ())
            for i, file in enumerate(files)
        ),
    )


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (((0, 0), (4, 6)), ((1, 2), (2, 3)), ((1, 3), (2, 5))),
        (((0, 0), (2, 2)), ((1, 1), (2, 2)), ((1, 2), (1, 2))),
        (((0, 0), (2, 6)), ((2, 0), (2, 6)), None),
        (((3,), (2,)), ((0,), (4,)), ((3, 4),)),
    ],
)
def test_overlap(first: tuple, second: tuple, shared: tuple | None) -> None:
    assert overlap(block(*first), block(*second)) == shared
    assert overlap(block(*second), block(*first)) == shared


def test_blocks_that_tile_are_accepted() -> None:
    check_manifest(manifest(block((0, 0), (1, 6)), block((1, 0), (3, 2)), block((1, 2), (3, 4))), source="m")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([block((0, 0), (3, 6))], "weights/a has 18 of its 24 elements"),
        ([block((0, 0), (4, 6)), block((3, 5), (1, 1))], r"\[3:4,5:6\] overlaps weights/a\[0:4,0:6\]"),
        # The right number of elements: one row twice, one missing.
        ([block((0, 0), (3, 6)), block((2, 0), (1, 6))], "overlaps"),
        ([block((0, 0), (4, 7))], r"not inside the tensor's shape \[4, 6\]"),
        ([block((-1, 0), (5, 6))], "not inside"),
        ([block((0, 0), (4, 0)), block((0, 0), (4, 6))], "not inside"),
        ([block((0,), (24,))], "not inside"),
        ([block((0, 0), (4, 6), name="weights/b")], "weights/b, which is no tensor of the manifest"),
    ],
)
def test_blocks_that_do_not_tile_are_refused(blocks: list[SavedBlock], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_manifest(manifest(*blocks), source="m")


@pytest.mark.parametrize(
    "file",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "../other.safetensors",
        "a/b.safetensors",
        ".hidden.safetensors",
        "model.pt",
        "a.safetensors\n",
        "",
    ],
)
def test_only_plain_files_of_the_folder_are_named(file: str) -> None:
    with pytest.raises(CheckpointError, match="not a plain file name"):
        check_manifest(manifest(block((0, 0), (4, 6)), files=(file,)), source="m")


def test_boxes_larger_than_their_file_are_refused() -> None:
    claimed = manifest(block((0, 0), (10**6, 3 * 10**6)), shape=(10**6, 3 * 10**6))
    with pytest.raises(
        CheckpointError, match=r"^m: the blocks of one\.safetensors are 12,000,000,000,000 bytes.* has 200"
    ):
        check_manifest(claimed, source="m")


def test_a_shard_is_named_once() -> None:
    with pytest.raises(CheckpointError, match="a shard twice"):
        check_manifest(manifest(block((0, 0), (4, 6)), files=("a.safetensors", "a.safetensors")), source="m")
