"""Faults of folders on shared hosts, and of sizes that another node or a file claims."""

from tests.planted_faults.fault import Fault

FOLDER_FAULTS = (
    Fault(
        name="a folder of another user counts as one's own",
        kind="missing check",
        file="hetero/private_files.py",
        find="return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()",
        replace="return True",
        hints=("tests/unit/test_private_files.py", "tests/unit/elastic/test_folder_claim.py"),
    ),
    Fault(
        name="a link in place of a file is written through",
        kind="missing check",
        file="hetero/private_files.py",
        find="_ONLY_A_FILE = os.O_NOFOLLOW | os.O_NONBLOCK",
        replace="_ONLY_A_FILE = os.O_NONBLOCK",
        hints=("tests/unit/test_private_files.py",),
    ),
    Fault(
        name="a folder of copies that has a random ending is not found again",
        kind="lost state",
        file="hetero/elastic/folder_claim.py",
        find='.rpartition(" ")[0] == job), None)',
        replace='.rpartition(" ")[2] == job), None)',
        hints=("tests/unit/elastic/test_folder_claim.py",),
    ),
    Fault(
        name="files that no agent has made are deleted with a folder of copies",
        kind="deletes too much",
        file="hetero/elastic/folder_claim.py",
        find="own = [path for path in folder.iterdir() if _kind_of(path.name) is not None]",
        replace="own = list(folder.iterdir())",
        hints=("tests/unit/elastic/test_folder_claim.py",),
    ),
    Fault(
        name="the checkpoint that a link leads to is deleted with the link",
        kind="deletes too much",
        file="hetero/checkpoint/folder.py",
        find="    if deleted.is_symlink():\n        deleted.unlink()\n        return\n",
        replace="",
        hints=("tests/unit/checkpoint/test_folder.py",),
    ),
    Fault(
        name="memory is taken for whatever size another node claims",
        kind="missing check",
        file="hetero/elastic/placement.py",
        find="if not unit.num_bytes <= copy.shard.size_bytes <= most:",
        replace="if not unit.num_bytes <= copy.shard.size_bytes:",
        hints=("tests/unit/elastic/test_placement.py",),
    ),
    Fault(
        name="a block is read in whatever size its file claims",
        kind="missing check",
        file="hetero/checkpoint/shards.py",
        find="if (shape := places[key].shape) != block.shape:",
        replace="if len(shape := places[key].shape) != len(block.shape):",
        hints=("tests/unit/checkpoint/test_declared_sizes.py",),
    ),
    Fault(
        name="an answer that is longer than the range is read to its end",
        kind="missing check",
        file="hetero/elastic/copy_client.py",
        find=" and response.length == len(buffer)",
        replace="",
        hints=("tests/unit/elastic/test_copy_server.py",),
    ),
)
