"""The training curve of a model card."""

import io
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from ..extras import extra
from ..recipe import measure_name

with extra("viz"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAINING, VALIDATION = "#9aa5b1", "#1f5fa8"
# The lines of several validation sets take these colours in turn.
SETS = ("#1f5fa8", "#d1742b", "#3b8f5a", "#8a55a5", "#b3404a", "#5b7083")


def plot_curve(
    training: Sequence[dict[str, Any]],
    validations: Sequence[dict[str, Any]],
    measure: str | None = "bleu",
    unit: str = "nats per target token",
) -> Figure:
    """
    Plots the loss, and a measure of the validations, over the updates of a run.

    Args:
        training (`Sequence[dict[str, Any]]`): lines of `training.jsonl`: `step` and `loss`.
        validations (`Sequence[dict[str, Any]]`): lines of `validations.jsonl`: `step`, `loss`, the measure and `best`,
            and with several sets `sets`. A value of `None`, which was not finite, is not plotted.
        measure (`str`, *optional*): measure with a panel of its own; `None` for none.
        unit (`str`): unit of the loss.

    Returns:
        `Figure`: one panel for the loss, and a second one for the measure if there are validations. Each of several
        validation sets has a curve of its own.
    """
    name = measure if validations else None
    figure = Figure(figsize=(9 if name else 5, 3.2), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2 if name else 1, squeeze=False, sharex=True)[0]
    _plot(panels[0], training, "loss", "training", TRAINING)
    panels[0].set(title="Loss", ylabel=unit)
    if name:
        panels[1].set(title=f"Validation {measure_name(name)}")
    sets = list(dict.fromkeys(name for line in validations for name in line.get("sets") or ()))
    for each, color in zip(sets, cycle(SETS), strict=False):
        of_set = [{"step": line["step"], **(line.get("sets") or {}).get(each, {})} for line in validations]
        _plot(panels[0], of_set, "loss", each, color, ".")
        if name:
            _plot(panels[1], of_set, name, each, color, ".")
    if validations and not sets:
        _plot(panels[0], validations, "loss", "validation", VALIDATION, ".")
        if name:
            _plot(panels[1], validations, name, None, VALIDATION, ".")
    ranking, panel = name or "loss", panels[-1]
    for line in validations:
        if line.get("best") and sets:
            panel.axvline(line["step"], color=TRAINING, linestyle=":", label=f"best: update {line['step']:,}")
        elif line.get("best") and line.get(ranking) is not None:
            panel.plot(line["step"], line[ranking], "o", color=VALIDATION, label=f"best: {line[ranking]:.2f}")
    for panel in panels:
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False)
    return figure


def _plot(
    panel: Axes, lines: Sequence[dict[str, Any]], value: str, label: str | None, color: str, marker: str = ""
) -> None:
    """Plots one value of the lines that have it."""
    points = [(line["step"], line[value]) for line in lines if line.get(value) is not None]
    if points:
        panel.plot(*zip(*points, strict=True), label=label, color=color, marker=marker)


def curve_picture(
    training: Sequence[dict[str, Any]],
    validations: Sequence[dict[str, Any]],
    measure: str | None = "bleu",
    unit: str = "nats per target token",
) -> bytes:
    """Renders [`plot_curve`] as a PNG file; the same curve always gives the same bytes."""
    file = io.BytesIO()
    plot_curve(training, validations, measure, unit).savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
