"""Curves of a run as pictures: ``training_loss.png``, ``training_eval_loss.png`` and so on.

Names and smoothing are LLaMA-Factory's: an exponential moving average whose weight grows with the number of points,
1.8·(sigmoid(0.05·n) - 0.5), drawn over the raw values. matplotlib is imported where it draws, with a canvas of its own, so that
no display is needed and no global state of pyplot changes. Checked by ``tests/trainer/test_plots.py``.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerferry.trainer.history import Entry
from layerferry.trainer.output import OutputFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RAW_COLOUR = "#9db8d9"
SMOOTH_COLOUR = "#14508c"
TEXT_COLOUR = "#333333"
FEW_POINTS = 40
"""Up to so many points each is marked."""


def plot_history(entries: Sequence[Entry], output: OutputFolder, *, title: str) -> list[str]:
    """Draw the training loss and every evaluation loss that the history holds; return the files' names."""
    keys = ["loss", *sorted({key for entry in entries for key in entry if key.startswith("eval_") and key.endswith("loss")})]
    drawn: list[str] = []
    for key in keys:
        steps = [int(entry["step"]) for entry in entries if key in entry and math.isfinite(entry[key])]
        values = [entry[key] for entry in entries if key in entry and math.isfinite(entry[key])]
        if values:
            name = f"training_{key.replace('/', '_')}.png"
            output.write(name, _picture(steps, values, label=key.replace("_", " "), title=title))
            drawn.append(name)
    return drawn


def smooth(values: Sequence[float]) -> list[float]:
    """LLaMA-Factory's moving average; the first value is itself."""
    weight = 1.8 * (1 / (1 + math.exp(-0.05 * len(values))) - 0.5)
    smoothed: list[float] = []
    last = values[0]
    for value in values:
        last = weight * last + (1 - weight) * value
        smoothed.append(last)
    return smoothed


def _picture(steps: Sequence[int], values: Sequence[float], *, label: str, title: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure: Any = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    few = len(values) <= FEW_POINTS
    smoothed = smooth(values)
    style: dict[str, Any] = {"marker": "o", "markersize": 3.5, "linewidth": 1.4} if few else {"linewidth": 0.8}
    axes.plot(steps, values, color=RAW_COLOUR, label=label, **style)
    axes.plot(steps, smoothed, color=SMOOTH_COLOUR, linewidth=2.2, label="smoothed")
    axes.annotate(
        f"{smoothed[-1]:.3g}",
        (steps[-1], smoothed[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=SMOOTH_COLOUR,
    )
    axes.set_title(title, loc="left", fontsize=12, color=TEXT_COLOUR)
    axes.set_xlabel("step", color=TEXT_COLOUR)
    axes.set_ylabel(label, color=TEXT_COLOUR)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return png(figure)


def png(figure: Figure) -> bytes:
    """The picture, as a file holds it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()
