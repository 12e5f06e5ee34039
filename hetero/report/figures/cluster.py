"""The cluster as boxes: which node holds what, coloured by replica and shaded by stage."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.patches import FancyBboxPatch, Rectangle

from hetero.report.content import Report, named
from hetero.report.figures.canvas import WIDTH_IN, Drawing, axes_in, fitting
from hetero.report.figures.colours import FAINT, INK, PAPER, QUIET, device_colour, hue_of, ink_on, shade, stage_colour
from hetero.report.figures.node_boxes import NodeBox, Run, node_boxes
from hetero.report.plan_wording import in_turns, layers_of
from hetero.text import number_ranges

MOST_BOXES = 48
"""More differing nodes than this are counted and not drawn."""

DEVICES_PER_LINE = 8

CELL_IN, LINE_IN = 0.62, 0.62
"""Width and height of one device."""

PAD_IN, HEADER_IN, GAP_IN, ZONE_IN, LEGEND_IN, NOTE_IN = 0.1, 0.27, 0.16, 0.28, 0.3, 0.26

LEAST_WIDTH_IN = 1.5

IDLE = "#eef0f3"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    """Where a box goes."""

    box: NodeBox
    left: float
    top: float
    width: float
    height: float


def cluster_drawing(report: Report) -> Drawing:
    """All nodes, equal ones folded; idle devices are hatched."""
    boxes = node_boxes(report)
    shown, left_out = boxes[:MOST_BOXES], boxes[MOST_BOXES:]
    legend = _legend_lines(report)
    top = len(legend) * LEGEND_IN + 0.05
    placed, zones, bottom = _place(shown, top)
    height_in = bottom + (NOTE_IN if left_out else 0.0)

    def draw(canvas: FigureBase) -> None:
        axes = axes_in(canvas, height_in, left=0, top=0, width=WIDTH_IN, height=height_in)
        _draw_legend(axes, legend)
        for zone, at in zones:
            axes.text(0.02, at + ZONE_IN / 2, f"zone {zone}", va="center", color=QUIET, fontsize=8.5)
            axes.plot([0, WIDTH_IN], [at + ZONE_IN - 0.03] * 2, color=FAINT, linewidth=0.7)
        for each in placed:
            _draw_box(axes, report, each)
        if left_out:
            nodes = sum(len(box.nodes) for box in left_out)
            axes.text(0.02, bottom + NOTE_IN / 2, f"and {nodes} more nodes in other arrangements", color=QUIET)

    return Drawing(height_in=height_in, draw=draw)


def _place(boxes: Sequence[NodeBox], top: float) -> tuple[list[_Placed], list[tuple[str, float]], float]:
    """The boxes in lines from left to right, a new line for every zone; zones with their tops; the bottom."""
    placed: list[_Placed] = []
    zones = []
    several = len({box.node_type.zone for box in boxes}) > 1
    for zone, members in groupby(boxes, key=lambda box: box.node_type.zone):
        if several:
            zones.append((zone, top))
            top += ZONE_IN + 0.05
        left = line_height = 0.0
        for box in members:
            width, height = _size(box)
            if left > 0 and left + width > WIDTH_IN:
                left, top, line_height = 0.0, top + line_height + GAP_IN, 0.0
            placed.append(_Placed(box=box, left=left, top=top, width=width, height=height))
            left += width + GAP_IN
            line_height = max(line_height, height)
        top += line_height + GAP_IN
    return placed, zones, top - GAP_IN + 0.1


def _size(box: NodeBox) -> tuple[float, float]:
    devices = box.node_type.gpus_per_node
    lines = -(-devices // DEVICES_PER_LINE)
    width = max(LEAST_WIDTH_IN, min(devices, DEVICES_PER_LINE) * CELL_IN + 2 * PAD_IN)
    return width, HEADER_IN + lines * LINE_IN + PAD_IN


def _draw_box(axes: Axes, report: Report, placed: _Placed) -> None:
    box, left, top = placed.box, placed.left, placed.top
    if len(box.nodes) > 1:
        for behind in (0.07, 0.035):
            _frame(axes, left + behind, top + behind, placed.width, placed.height)
    _frame(axes, left, top, placed.width, placed.height)
    room = placed.width - 2 * PAD_IN
    devices = f"{box.node_type.gpus_per_node} × {box.node_type.device}"
    count = f"{len(box.nodes)} × " if len(box.nodes) > 1 else ""
    name, nodes = box.node_type.name, named("node", box.nodes)
    devices = fitting([devices], room_in=0.6 * room, size_pt=7.5)
    left_room = room - len(devices) * 0.065 - 0.1
    title = fitting([f"{count}{name} · {nodes}", f"{count}{name}", nodes], room_in=left_room, size_pt=8)
    middle = top + HEADER_IN / 2 + 0.01
    axes.text(left + PAD_IN, middle, title, va="center", weight="bold", fontsize=8)
    axes.text(left + placed.width - PAD_IN, middle, devices, va="center", ha="right", color=QUIET, fontsize=7.5)
    for run in box.runs:
        for part in _lines_of(run):
            _draw_run(axes, report, placed, part)


def _frame(axes: Axes, left: float, top: float, width: float, height: float) -> None:
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch((left, top), width, height, boxstyle=style, facecolor=PAPER, edgecolor="#b9c1cc", linewidth=0.8)
    )


def _lines_of(run: Run) -> Iterator[Run]:
    """The parts of a run on the lines of its box."""
    first, end = run.first, run.first + run.size
    while first < end:
        size = min(end, (first // DEVICES_PER_LINE + 1) * DEVICES_PER_LINE) - first
        yield Run(first=first, size=size, replica=run.replica, stage=run.stage)
        first += size


def _draw_run(axes: Axes, report: Report, placed: _Placed, run: Run) -> None:
    left = placed.left + PAD_IN + run.first % DEVICES_PER_LINE * CELL_IN + 0.02
    top = placed.top + HEADER_IN + run.first // DEVICES_PER_LINE * LINE_IN + 0.02
    width, height = run.size * CELL_IN - 0.04, LINE_IN - 0.06
    if run.replica is None or run.stage is None:
        colour, ink, texts = IDLE, QUIET, [["idle"]]
        axes.add_patch(Rectangle((left, top), width, height, facecolor=colour, edgecolor="#c3cad3", hatch="////"))
    else:
        groups = report.plan.replicas[run.replica].device_groups
        place = next(g for g, group in enumerate(groups) if group[0] == run.stage)
        device = report.plan.replicas[run.replica].stages[run.stage].device
        colour = stage_colour(report, run.replica, (place, len(groups)), device)
        ink, texts = ink_on(colour), _run_texts(report, run.replica, run.stage)
        axes.add_patch(Rectangle((left, top), width, height, facecolor=colour, edgecolor="none"))
    single = len(placed.box.nodes) == 1
    for i in range(1, run.size):
        at = left - 0.02 + i * CELL_IN
        axes.plot([at, at], [top + height - 0.14, top + height], color=PAPER, linewidth=0.9, solid_capstyle="butt")
    step = (height - 0.13) / (len(texts) + 0.4)
    for i, options in enumerate(texts):
        text = fitting(options, room_in=width - 0.02, size_pt=6.5)
        background = {"facecolor": IDLE, "edgecolor": "none", "pad": 1.0} if run.replica is None else None
        axes.text(
            left + width / 2, top + (i + 0.7) * step, text, ha="center", va="center", color=ink, fontsize=6.5,
            weight="bold" if i == 0 and run.replica is not None else "normal", bbox=background,
        )  # fmt: skip
    for i in range(run.size if single else 0):
        axes.text(
            left - 0.02 + (i + 0.5) * CELL_IN, top + height - 0.07, str(placed.box.first_rank + run.first + i),
            ha="center", va="center", color=ink, fontsize=5.5, alpha=0.85,
        )  # fmt: skip


def _run_texts(report: Report, replica: int, s: int) -> list[list[str]]:
    """What a run says line by line, the longest wording first."""
    pipeline = report.plan.replicas[replica]
    group = next(group for group in pipeline.device_groups if group[0] == s)
    stage, stages = pipeline.stages[s], [pipeline.stages[each] for each in group]
    owner, layers = report.owner(replica), in_turns(map(layers_of, stages))
    word = "layer" if sum(len(each.layer_numbers) for each in stages) == 1 else "layers"
    short = owner[0] + owner.split()[1]
    title = named("stage", group)
    return [
        [f"{owner} · {title}", f"{short} · {title}", f"{short} · s{number_ranges(group)}"],
        [f"{word} {layers}", f"L {layers}", layers],
        [f"tp {stage.tp} · dp {stage.dp}", f"tp{stage.tp} dp{stage.dp}", f"t{stage.tp} d{stage.dp}"],
    ]


def _legend_lines(report: Report) -> list[list[tuple[list[str], str, float]]]:
    """(colours, text, left) of every entry, in lines as wide as the figure."""
    lines: list[list[tuple[list[str], str, float]]] = [[]]
    left = 0.02
    for colours, text in _legend_entries(report):
        width = 0.62 + len(text) * 0.066
        if lines[-1] and left + width > WIDTH_IN:
            lines.append([])
            left = 0.02
        lines[-1].append((colours, text, left))
        left += width
    return lines


def _legend_entries(report: Report) -> list[tuple[list[str], str]]:
    """Colours and what they are for: a replica or a group of them with its stages, or a device type."""
    if report.colours == "device":
        idle = Counter(report.cluster.device_of_rank(rank).name for rank in report.plan.idle_ranks)
        return [
            ([device_colour(report, device)], f"{device}: {count - idle[device]:,} of {count:,} at work")
            for device, count in report.devices.items()
        ]
    if report.names_each_replica:
        entries = [
            (r, f"replica {r}: {replica.num_samples} of {report.plan.global_batch_size} samples")
            for r, replica in enumerate(report.plan.replicas)
        ]
    else:
        entries = [
            (members[0], report.group_title(next(row for row in report.rows if row.group == group)))
            for group, members in enumerate(report.groups)
        ]
    sizes = {r: len(report.plan.replicas[r].device_groups) for r, _ in entries}
    return [([shade(hue_of(report, r), g, sizes[r]) for g in range(sizes[r])], text) for r, text in entries]


def _draw_legend(axes: Axes, lines: Sequence[Sequence[tuple[list[str], str, float]]]) -> None:
    for i, line in enumerate(lines):
        middle = (i + 0.45) * LEGEND_IN
        for colours, text, left in line:
            width = 0.4 / len(colours)
            for g, colour in enumerate(colours):
                axes.add_patch(Rectangle((left + g * width, middle - 0.07), width, 0.14, facecolor=colour))
            axes.text(left + 0.47, middle, text, va="center", color=INK)
