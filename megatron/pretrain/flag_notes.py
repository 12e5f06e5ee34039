"""Says what of a command line is not as it stands there: flags without effect, and samples that fill no step."""

from collections import defaultdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetero.plan.batch_sizes import BatchSizes
from megatron.pretrain.cli.config import PretrainConfig


def flag_notes(config: PretrainConfig) -> RenderableType | None:
    """Make one warning of all flags without effect, with a table of the reasons, and a line about left-out samples."""
    parts: list[RenderableType] = []
    if config.notes:
        several = len(config.notes) > 1
        parts.append(Text(f"warning: {len(config.notes)} {'flags have' if several else 'flag has'} no effect here"))
        parts.append(_table(config))
    samples, sizes = (
        config.run.train_samples,
        BatchSizes(config.parallel.global_batch_size, config.parallel.varying_batch),
    )
    if rest := samples - sizes.first_sample(config.run.train_iters):
        shown = f"{min(sizes.smaller)} to {sizes.full}" if sizes.smaller else sizes.full
        end = f"the last {rest} fill no step and are left out" if rest > 0 else f"the last step takes {-rest} more"
        parts.append(
            Text(f"--train-samples {samples} are {config.run.train_iters} steps of {shown}; {end}, as Megatron-LM does")
        )
    return Group(*parts) if parts else None


def _table(config: PretrainConfig) -> Table:
    flags = defaultdict(list)
    for name, reason in config.notes:
        flags[reason].append(name)
    table = Table("flags", "reason", box=None, pad_edge=False)
    for reason, names in flags.items():
        table.add_row(Text("\n".join(names)), Text(reason))
    return table
