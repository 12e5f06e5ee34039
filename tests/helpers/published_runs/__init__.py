"""Training runs that were measured, as plans on clusters: what the cost model is held against.

A *family* is the runs of one source on one kind of cluster under one runtime. Whose measurements they are, and what we
had to choose, is in ``tests/data/published_runs/README.md``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.helpers.published_runs import gpt, h200, llama, opt350m
from tests.helpers.published_runs.published_run import PublishedRun

FOLDER = Path(__file__).parents[2] / "data" / "published_runs"

FAMILIES: Mapping[str, tuple[str, Callable[[Path], list[PublishedRun]]]] = {
    opt350m.DEEPSPEED_GH200: ("opt350m_gh200.csv", opt350m.read_deepspeed_gh200),
    opt350m.MEGATRON_GH200: ("opt350m_megatron_gh200.csv", opt350m.read_megatron_gh200),
    opt350m.DEEPSPEED_TURING: ("opt350m_titan_rtx_2080ti.csv", opt350m.read_deepspeed_turing),
    gpt.V100: ("gpt_megatron_v100.csv", gpt.read_v100),
    gpt.A100: ("gpt_megatron_a100.csv", gpt.read_a100),
    llama.A100: ("llama3_8b_megatron_core_a100.csv", llama.read_a100),
    h200.H200: ("llama_h200.csv", h200.read_h200),
}
"""By name, the table of a family and who reads it."""


def read_family(family: str, folder: Path = FOLDER) -> list[PublishedRun]:
    """The runs of a family in the order of its table."""
    table, read = FAMILIES[family]
    return read(folder / table)


def read_all(folder: Path = FOLDER) -> list[PublishedRun]:
    """The runs of all families that have a table in ``folder``."""
    return [
        run
        for family, (table, _) in FAMILIES.items()
        if (folder / table).exists()
        for run in read_family(family, folder)
    ]
