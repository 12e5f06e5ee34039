"""Looks at the files that a run's flags name before torch is loaded, which takes seconds.

What is wrong with one is told beside what is wrong with the flags, in the words of who reads it later. Who reads it
looks closer: here a tokenizer's vocabulary, the tokens of a corpus and the tensors of a checkpoint are not touched.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from hetero.checkpoint.folder import find_checkpoint, latest_step
from hetero.distributed.environment import is_on_one_host
from hetero.elastic.records import ASSIGNMENT_VARIABLE, DESCRIBE_VARIABLE
from hetero.errors import ConfigError, HeteroError
from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.profile import Profile
from megatron.pretrain.cli.derived import cluster_file, plan_file, tokenizer_type
from megatron.pretrain.cli.fields import FlagValues, UnreadableFlagError
from megatron.pretrain.corpus_index import parse_blend, read_index_header
from megatron.pretrain.tokenizer import check_tokenizer_files

_DATA_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")


def sees_what_all_see(environment: Mapping[str, str]) -> bool:
    """Whether all ranks of a launch are on this host, so that they see the same files and end together.

    Ranks of several hosts have to meet first: else those whose files are right would wait for one that has ended. What
    an elastic agent starts has been looked at by the agent, and restarts in little time.
    """
    if environment.keys() & {ASSIGNMENT_VARIABLE, DESCRIBE_VARIABLE}:
        return False
    return is_on_one_host(environment)


def file_problems(flags: FlagValues) -> list[str]:
    """What is wrong with the files that these flags name, in the words of an error; a flag without value names none."""
    looks: list[Callable[[], object]] = [
        partial(_load_if_given, flags, Plan, plan_file),
        partial(_load_if_given, flags, ClusterSpec, cluster_file),
        partial(_check_profiles, flags),
        partial(_check_tokenizer, flags),
        *(partial(_check_corpora, flags, name) for name in _DATA_FLAGS),
        partial(_check_checkpoint, flags),
    ]
    return [problem for look in looks if (problem := _problem_of(look))]


def _problem_of(look: Callable[[], object]) -> str:
    try:
        look()
    except UnreadableFlagError:
        return ""
    except HeteroError as error:
        return str(error)
    return ""


def _load_if_given(flags: FlagValues, kind: type, path_of: Callable[[FlagValues], Path | None]) -> None:
    if (path := path_of(flags)) is not None:
        load(kind, path)


def _check_profiles(flags: FlagValues) -> None:
    for path in flags["--hetero-profile"]:
        load(Profile, path)


def _check_tokenizer(flags: FlagValues) -> None:
    check_tokenizer_files(
        tokenizer_type=tokenizer_type(flags),
        tokenizer_model=flags["--tokenizer-model"],
        vocab_file=flags["--vocab-file"],
        merge_file=flags["--merge-file"],
    )


def _check_corpora(flags: FlagValues, name: str) -> None:
    if flags[name] and not flags["--mock-data"]:
        for prefix in parse_blend(flags[name], flag=name)[0]:
            read_index_header(prefix)


def _check_checkpoint(flags: FlagValues) -> None:
    if (folder := flags["--load"]) is not None:
        starts_anew = folder == flags["--save"] and not flags["--finetune"]
        if (step := step_to_load(folder, flags["--ckpt-step"], starts_anew=starts_anew)) is not None:
            find_checkpoint(folder, step)


def step_to_load(folder: Path, wanted: int | None, *, starts_anew: bool) -> int | None:
    """The step whose checkpoint a run goes on from; ``None`` for none, where the run may then start from nothing.

    Args:
        wanted: ``--ckpt-step``; without it the newest.
        starts_anew: the run also saves there, so that a folder without checkpoints is one before its first.

    Raises:
        ConfigError: ``folder`` holds no checkpoint.
    """
    newest = latest_step(folder)
    if newest is None and (wanted is not None or not starts_anew):
        raise ConfigError(f"--load {folder}: holds no checkpoint{_instead(folder)}, or leave it out to start anew")
    return newest if wanted is None else wanted


def _instead(folder: Path) -> str:
    """What ``folder`` is, if that is known, and what to do about it."""
    if step := re.fullmatch(r"step_0*(\d+)", folder.name):
        return f", it is one: give {folder.parent} with --ckpt-step {step[1]}"
    for file, program, name in (
        ("latest_checkpointed_iteration.txt", "Megatron-LM", "megatron"),
        ("config.json", "Hugging Face's libraries", "hf"),
    ):
        if (folder / file).is_file():
            return f" but one of {program}; convert it with tools/convert_checkpoint.py --from {name} --to hetero"
    return "; correct the path"
