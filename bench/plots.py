"""Curves as plain data, and their plots as PNG."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

_DOTS_PER_INCH = 120


@dataclass(frozen=True, slots=True)
class Line:
    """A curve. `kind` is how it is drawn; a paper's points are drawn as dots."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Literal["line", "dots", "steps"] = "line"


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over one axis; `name` is a file's name."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False


def png(plot: Plot) -> bytes:
    """The image. Needs matplotlib."""
    # Not pyplot: that keeps every figure, and wants a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, line in enumerate(plot.lines):
        color = f"C{number % 10}"
        if line.kind == "dots":
            axes.plot(line.x, line.y, "o", color=color, label=line.name, markerfacecolor="none")
        else:
            style = "steps-post" if line.kind == "steps" else "default"
            axes.plot(line.x, line.y, color=color, label=line.name, drawstyle=style)
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.log_x:
        axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=_DOTS_PER_INCH)
    return image.getvalue()
