"""The training curve of a model card."""

import io
from collections.abc import Sequence
from typing import Any

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(f"The training curve needs {error.name}: pip install 'hf_vaswani[viz]'") from error

TRAINING, VALIDATION = "#9aa5b1", "#1f5fa8"


def plot_curve(training: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]]) -> Figure:
    """
    Plots loss and BLEU over the updates of a run.

    Args:
        training (`Sequence[dict[str, Any]]`): lines of `training.jsonl`: `step` and `loss`, in nats per target token.
        validations (`Sequence[dict[str, Any]]`): lines of `validations.jsonl`: `step`, `loss`, `bleu` and `best`. A
            loss of `None`, which was not finite, is not plotted.

    Returns:
        `Figure`: one panel for the loss, and a second one for BLEU if there are validations.
    """
    figure = Figure(figsize=(9 if validations else 5, 3.2), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2 if validations else 1, squeeze=False, sharex=True)[0]
    for lines, label, color in ((training, "training", TRAINING), (validations, "validation", VALIDATION)):
        points = [(line["step"], line["loss"]) for line in lines if line["loss"] is not None]
        if points:
            marker = "." if label == "validation" else ""
            panels[0].plot(*zip(*points, strict=True), label=label, color=color, marker=marker)
    panels[0].set(title="Loss", ylabel="nats per target token")
    if validations:
        panels[1].plot(
            *zip(*((line["step"], line["bleu"]) for line in validations), strict=True), ".-", color=VALIDATION
        )
        best = [line for line in validations if line.get("best")]
        for line in best:
            panels[1].plot(line["step"], line["bleu"], "o", color=VALIDATION, label=f"best: {line['bleu']:.2f}")
        panels[1].set(title="Validation BLEU")
    for panel in panels:
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False)
    return figure


def curve_picture(training: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]]) -> bytes:
    """Renders [`plot_curve`] as a PNG file; the same curve always gives the same bytes."""
    file = io.BytesIO()
    plot_curve(training, validations).savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
