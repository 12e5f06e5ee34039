"""Prints a diagnosis as a checklist."""

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hetero.doctor.findings import SEVERITIES, Diagnosis, Finding, MeasuredLink, Severity
from hetero.units import GB, MIB, US_PER_S

STYLES: dict[Severity, tuple[str, str]] = {
    "ok": ("OK", "green"),
    "warning": ("warning", "yellow"),
    "problem": ("PROBLEM", "bold red"),
}


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the checklist, what links were measured at, and how many problems there are."""
    several = len({facts.host for facts in diagnosis.hosts}) > 1
    if not diagnosis.hosts:
        # Of a launch, whose hosts have been told before.
        console.print(Text("\nWhat came of it when the ranks met", style="bold"))
    console.print(_table(diagnosis.findings, with_hosts=several))
    if diagnosis.links:
        console.print(_links(diagnosis.links))
    counted = Counter(finding.severity for finding in diagnosis.findings)
    said = ", ".join(f"{counted[severity]} {severity}" for severity in reversed(SEVERITIES) if counted[severity])
    console.print(Text(f"{said}; docs/install.md says more" if diagnosis.severity != "ok" else said))


def _table(findings: Sequence[Finding], *, with_hosts: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("what", min_width=12, overflow="fold")
    if with_hosts:
        table.add_column("hosts", overflow="fold")
    table.add_column("found; and what to do", ratio=1, overflow="fold")
    for finding in findings:
        word, style = STYLES[finding.severity]
        found = Text(finding.found)
        if finding.todo:
            found.append(f"\n-> {finding.todo}", style=style)
        hosts = [Text(", ".join(finding.hosts) or "all")] if with_hosts else []
        table.add_row(Text(word, style=style), Text(finding.subject), *hosts, found)
    return table


def _links(links: Sequence[MeasuredLink]) -> Table:
    title = "Links, one pair of ranks at a time: bandwidth_gb_per_s and latency_us of a cluster file"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("ranks", overflow="fold")
    table.add_column("hosts", overflow="fold")
    for column in ("GB/s", "with messages of", "latency"):
        table.add_column(column, justify="right")
    for link in links:
        size = f"{link.message_bytes / MIB:g} MiB" if link.message_bytes >= MIB else f"{link.message_bytes} bytes"
        table.add_row(
            "-".join(map(str, link.ranks)),
            link.hosts[0] if link.is_inside_a_host else " - ".join(link.hosts),
            f"{link.bytes_per_s / GB:.3g}",
            size,
            f"{link.latency_s * US_PER_S:.0f} us",
        )
    return table
