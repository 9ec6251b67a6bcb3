"""Draws docs/img/idea.png: where the bytes live, and one step in time.

The upper half is the map: planes in host memory with heights to scale, two link lanes, slots, tape, accumulator and slabs
on the device. The lower half is no drawing by hand but a small simulation of the schedule (three slots, the victim whose
next use is furthest away, updates in next-use order), so that it cannot show an overlap that the rules forbid.

    python tools/draw_idea.py [TARGET.png]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "docs" / "img" / "idea.png"

INK, PALE, GRID = "#22303c", "#f4f6f8", "#c9d2da"
UP, COMPUTE, DOWN, STEP = "#2f7ebc", "#4d9a51", "#d9822b", "#8a63b0"
KEPT = "#b9d8bb"
SPAN_ARROW = {"arrowstyle": "<->", "color": GRID, "lw": 1.2, "shrinkA": 1, "shrinkB": 1}

LAYERS = 6
END_FORWARD, FORWARD, HEAD, BACKWARD, END_BACKWARD = 0.35, 1.0, 1.3, 1.9, 0.5
UPLOAD, DOWNLOAD, UPDATE = 0.5, 0.5, 0.62
ENDS_LINK = 0.35
NUM_SLOTS = 3


# ---------------------------------------------------------------- the schedule


@dataclass(frozen=True)
class Bar:
    """One piece of work on a lane."""

    lane: str
    label: str
    begin: float
    end: float
    step: int


@dataclass
class Timeline:
    """The four lanes: each runs its work in order."""

    bars: list[Bar] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)

    def run(self, lane: str, label: str, seconds: float, *, after: float, step: int) -> float:
        begin = max(after, self.free.get(lane, 0.0))
        self.free[lane] = begin + seconds
        self.bars.append(Bar(lane, label, begin, begin + seconds, step))
        return begin + seconds


def uses() -> Iterator[tuple[str, float, bool]]:
    """(unit, seconds of compute, whether its gradient leaves) in the order of a step."""
    yield "E", END_FORWARD, False
    for layer in range(LAYERS):
        yield str(layer), FORWARD, False
    yield "H", HEAD, True
    for layer in reversed(range(LAYERS)):
        yield str(layer), BACKWARD, True
    yield "e", END_BACKWARD, True


def simulate(num_steps: int) -> list[Bar]:
    """Steps one after the other; the updates of a step run in the forward of the next."""
    line = Timeline()
    updated = dict.fromkeys(["E", *map(str, range(LAYERS)), "H"], 0.0)
    for step in range(num_steps):
        drained = _one_step(line, updated, step)
        clip_known = max(line.free["compute"], drained["E"])
        for unit in updated:
            updated[unit] = line.run("step", unit, UPDATE, after=max(drained[unit], clip_known), step=step)
    return line.bars


def next_use(held: str | None, later: list[str]) -> int:
    """How far away the next use of a slot's content is."""
    return later.index(held) if held in later else len(later)


def _one_step(line: Timeline, updated: dict[str, float], step: int) -> dict[str, float]:
    order = [unit for unit, _, _ in uses() if unit.isdigit()]
    slots: list[str | None] = [None] * NUM_SLOTS
    released = [line.free.get("compute", 0.0)] * NUM_SLOTS
    landed: dict[str, float] = {}
    drained: dict[str, float] = {}
    position, fetched = 0, 0

    def upload_ahead() -> None:
        """Uploads run as far ahead as slots are free: content that a later expected use will need is claimed."""
        nonlocal fetched
        while fetched < len(order) and fetched - position < NUM_SLOTS:
            unit = order[fetched]
            if unit not in slots:
                claimed = set(order[position:fetched])
                open_slots = [i for i, held in enumerate(slots) if held not in claimed]
                if not open_slots:
                    return
                later = order[fetched:]
                victim = max(open_slots, key=lambda i: next_use(slots[i], later))
                slots[victim] = unit
                landed[unit] = line.run("upload", unit, UPLOAD, after=max(released[victim], updated[unit]), step=step)
            fetched += 1

    for name, seconds, leaves in uses():
        unit = name.upper()
        if name in ("E", "H"):
            landed[unit] = line.run("upload", unit, ENDS_LINK, after=max(updated[unit], line.free.get("ends", 0.0)), step=step)
        upload_ahead()
        done = line.run("compute", name, seconds, after=landed.get(unit, 0.0), step=step)
        if unit.isdigit():
            released[slots.index(unit)] = done
            position += 1
        else:
            line.free["ends"] = done
        if leaves:
            drained[unit] = line.run("download", unit, DOWNLOAD if unit.isdigit() else ENDS_LINK, after=done, step=step)
    return drained


# ---------------------------------------------------------------- the map


def box(axes: Any, x: float, y: float, width: float, height: float, colour: str, **options: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    style: dict[str, Any] = {"linewidth": 1.0, "edgecolor": INK} | options
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06", facecolor=colour, **style))


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], colour: str, width: float = 2.2) -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0})


def text(axes: Any, x: float, y: float, words: str, **options: Any) -> None:
    style = {"ha": "center", "va": "center", "fontsize": 9, "color": INK} | options
    axes.text(x, y, words, **style)


PLANES = (
    ("weight", "bf16", 2, UP, "pinned"),
    ("residue", "int16", 2, "#9fb8cc", ""),
    ("grad", "bf16", 2, DOWN, "pinned"),
    ("exp_avg", "fp32", 4, "#b79fd0", ""),
    ("exp_avg_sq", "fp32", 4, "#b79fd0", ""),
)
COLUMNS = ("embed", "layer 0", "layer 1", "…", "layer L−1", "head")
LEFT, COLUMN, BYTE = 1.95, 0.80, 0.215


def draw_map(axes: Any) -> None:
    axes.set_xlim(0, 16)
    axes.set_ylim(0, 6.2)
    axes.axis("off")
    box(axes, 0.1, 0.15, 7.0, 5.9, PALE)
    text(axes, 3.6, 5.72, "host memory: everything that outlives a step", fontsize=11.5, weight="bold")
    rows = _draw_planes(axes)
    text(axes, 3.6, 0.47, "14 bytes a parameter; weight and residue together are the fp32 master", fontsize=9)
    box(axes, 9.35, 0.15, 6.55, 5.9, PALE)
    text(axes, 12.62, 5.72, "device: a few layers at a time", fontsize=11.5, weight="bold")
    _draw_device(axes)
    _draw_links(axes, rows)


def _draw_planes(axes: Any) -> dict[str, float]:
    """Rows of the store; the middle height of each plane by name."""
    for column, name in enumerate(COLUMNS):
        text(axes, LEFT + COLUMN * (column + 0.5), 5.28, name, fontsize=8.5)
    middle, y = {}, 5.08
    for name, kind, num_bytes, colour, note in PLANES:
        height = BYTE * num_bytes
        y -= height + 0.14
        middle[name] = y + height / 2
        text(axes, 0.28, y + height / 2, name, ha="left", weight="bold", fontsize=9)
        text(axes, LEFT - 0.08, y + height / 2, f"{kind}{' ' + note if note else ''}", ha="right", fontsize=6.8)
        for column, title in enumerate(COLUMNS):
            if title == "…":
                text(axes, LEFT + COLUMN * (column + 0.5), y + height / 2, "…", fontsize=12)
                continue
            box(axes, LEFT + COLUMN * column + 0.04, y, COLUMN - 0.08, height, colour, linewidth=0.6)
    words = "step: AdamW on the CPU, unit by unit, inside the next forward"
    text(axes, 3.6, y - 0.3, words, color=STEP, weight="bold", fontsize=9.2)
    return middle


def _draw_device(axes: Any) -> None:
    text(axes, 9.6, 5.2, "slots", ha="left", weight="bold", fontsize=9.5)
    for number, (label, colour) in enumerate((("layer 7", UP), ("layer 8", UP), ("arriving: layer 9", "#bcd7eb"))):
        box(axes, 9.6 + 2.05 * number, 4.35, 1.9, 0.62, colour)
        text(axes, 10.55 + 2.05 * number, 4.66, label, color="white" if colour == UP else INK)
    text(axes, 12.62, 4.13, "a layer's parameters are views into its slot; a released slot is overwritten", fontsize=8)
    box(axes, 9.6, 2.95, 6.0, 0.85, COMPUTE)
    text(axes, 12.6, 3.5, "compute: the family's own layer, compiled", color="white", weight="bold", fontsize=10)
    text(axes, 12.6, 3.17, "all micro-batches of the wave, one after the other", color="white", fontsize=8.5)
    box(axes, 9.6, 1.72, 3.55, 0.98, KEPT)
    text(axes, 11.37, 2.42, "tape of small graphs", weight="bold")
    text(axes, 11.37, 2.13, "one a (unit, micro-batch); saved weights", fontsize=7.8)
    text(axes, 11.37, 1.91, "are handles: unit, offset, shape, stride", fontsize=7.8)
    box(axes, 13.4, 1.72, 2.2, 0.98, "#f3d3ae")
    text(axes, 14.5, 2.42, "accumulator", weight="bold")
    text(axes, 14.5, 2.13, "fp32 sum over", fontsize=7.8)
    text(axes, 14.5, 1.91, "the micro-batches", fontsize=7.8)
    text(axes, 15.6, 1.255, "slabs", ha="right", weight="bold", fontsize=9.5)
    for number in range(2):
        box(axes, 9.6 + 2.05 * number, 0.98, 1.9, 0.55, DOWN)
        text(axes, 10.55 + 2.05 * number, 1.255, ("leaving: layer 9", "filling: layer 8")[number], color="white")
    text(axes, 12.62, 0.47, "rounded once; the norm for exact clipping is taken here", fontsize=8.5)
    arrow(axes, (11.4, 4.0), (11.4, 3.82), INK, 1.4)
    arrow(axes, (11.4, 2.93), (11.4, 2.72), INK, 1.4)
    arrow(axes, (14.5, 2.93), (14.5, 2.72), INK, 1.4)
    axes.plot([14.2, 14.2], [1.70, 1.255], color=INK, lw=1.4)
    arrow(axes, (14.2, 1.255), (13.57, 1.255), INK, 1.4)


def _draw_links(axes: Any, rows: dict[str, float]) -> None:
    right = LEFT + COLUMN * len(COLUMNS)
    arrow(axes, (right + 0.06, rows["weight"]), (9.55, 4.66), UP, 5)
    text(axes, 8.22, 5.08, "feed", color=UP, weight="bold", fontsize=12)
    text(axes, 8.22, 4.4, "up twice a step", color=UP, fontsize=8.2)
    axes.plot([9.56, 8.22, 8.22], [1.255, 1.255, rows["grad"]], color=DOWN, lw=5, solid_joinstyle="round", solid_capstyle="butt")
    arrow(axes, (8.21, rows["grad"]), (right + 0.06, rows["grad"]), DOWN, 5)
    text(axes, 8.75, 2.5, "drain", color=DOWN, weight="bold", fontsize=12)
    text(axes, 8.74, 2.2, "down once", color=DOWN, fontsize=8.2)
    text(axes, 8.74, 2.0, "a step", color=DOWN, fontsize=8.2)


# ---------------------------------------------------------------- the timeline

ROWS = {"upload": (3, UP), "compute": (2, COMPUTE), "download": (1, DOWN), "step": (0, STEP)}
TITLES = {"upload": "upload (feed)", "compute": "compute", "download": "download (drain)", "step": "CPU: AdamW (step)"}


def draw_timeline(axes: Any) -> None:
    bars = simulate(3)
    start = min(bar.begin for bar in bars if bar.lane == "step" and bar.step == 0)
    ends = {step: max(bar.end for bar in bars if bar.lane == "compute" and bar.step == step) for step in range(3)}
    stop = start + (ends[1] - start) * 1.36
    for lane, (row, colour) in ROWS.items():
        axes.axhspan(row - 0.42, row + 0.42, color=PALE, zorder=0)
        text(axes, start - 0.25, row, TITLES[lane], ha="right", fontsize=9.5, color=colour, weight="bold")
        for bar in bars:
            if bar.lane == lane and bar.end > start and bar.begin < stop:
                _draw_bar(axes, bar, row, colour, start, stop)
    _draw_marks(axes, bars, start, ends, stop)
    axes.set_xlim(start - 4.4, stop + 0.1)
    axes.set_ylim(-1.7, 4.35)
    axes.axis("off")


def _draw_bar(axes: Any, bar: Bar, row: float, colour: str, start: float, stop: float) -> None:
    begin, end = max(bar.begin, start), min(bar.end, stop)
    backward = bar.lane == "compute" and round(bar.end - bar.begin, 6) in (BACKWARD, END_BACKWARD)
    box(axes, begin, row - 0.34, end - begin, 0.68, colour, linewidth=0.7, alpha=0.72 if backward else 1.0, edgecolor="white")
    if end - begin > 0.24:
        text(axes, (begin + end) / 2, row, bar.label.upper(), color="white", fontsize=8, weight="bold")


def _draw_marks(axes: Any, bars: list[Bar], start: float, ends: dict[int, float], stop: float) -> None:
    head = next(bar for bar in bars if bar.lane == "compute" and bar.label == "H" and bar.step == 1)
    for where in (start, ends[1]):
        axes.plot([where, where], [-0.6, 3.75], color=INK, lw=1.1, ls=(0, (4, 3)))
    for begin, end, words in (
        (start, head.begin, "forward of step n"),
        (head.begin, head.end, "loss"),
        (head.end, ends[1], "backward of step n"),
        (ends[1], stop, "forward of step n+1"),
    ):
        axes.annotate("", (end, 3.62), (begin, 3.62), arrowprops=SPAN_ARROW)
        text(axes, (begin + end) / 2, 3.92, words, fontsize=9.2)
    done = max(bar.end for bar in bars if bar.lane == "step" and bar.step == 0)
    text(axes, (start + done) / 2, -0.78, "updates of step n−1, in next-use order", color=STEP, fontsize=8.5)
    text(axes, min((ends[1] + stop) / 2, stop), -0.78, "updates of step n", color=STEP, fontsize=8.5)
    text(
        axes,
        (done + ends[1]) / 2,
        -0.12,
        "loss and global norm are read once, at the end: then the clip coefficient is exact",
        fontsize=8.5,
        style="italic",
    )
    text(
        axes,
        (start + stop) / 2 - 2.0,
        -1.3,
        "E embedding, 0–5 layers, H head. Three slots: at the turn layers 5, 4, 3 are still there and need no second upload.\n"
        "Nothing hides the embedding's update and upload, with which a forward begins. Times are schematic, their order is not.",
        fontsize=8.5,
    )


def draw(target: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["font.family"] = "DejaVu Sans"
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(13, 9.2), height_ratios=(1.55, 1.0))
    draw_map(upper)
    draw_timeline(lower)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01, hspace=0.03)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120, facecolor="white")
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
