"""Ranks that chose alike stand in one row."""

import io

from rich.console import Console

from hetero.report.tables.layers import RankLayers, layers_table


def rows(ranks: list[list[RankLayers]]) -> list[list[str]]:
    console = Console(width=200, file=io.StringIO(), color_system=None)
    console.print(layers_table(ranks))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.strip("\u2502").split("\u2502")] for line in lines if "\u2502" in line]


def test_ranks_that_chose_alike_share_a_row() -> None:
    ampere = RankLayers(
        device="A100-40", layers="TransformerEngine 2.11.0", attention="TransformerEngine auto", fused=("rope", "norm")
    )
    volta = RankLayers(device="V100-16", layers="local (why)", attention="torch efficient_attention", fused=())
    header, *found = rows([[ampere, ampere], [ampere], [volta], [], [ampere, volta]])
    assert header == ["device", "ranks", "layers", "attention", "in one kernel"]
    assert found == [
        ["A100-40", "0-1,4", "TransformerEngine 2.11.0", "TransformerEngine auto", "rope, norm"],
        ["V100-16", "2,4", "local (why)", "torch efficient_attention", "-"],
    ]
