"""Attention as figures for papers: one head, or all heads of a layer."""

from collections.abc import Sequence
from typing import Any

from ..extras import extra
from .attention import Attention, piece, pieces

with extra("viz"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Heads of a layer beside each other.
COLUMNS = 4
COLOURS = "Blues"


def plot_attention(
    attention: Attention, tokenizer: Any, kind: str = "cross", *, layer: int, head: int | None = None
) -> Figure:
    """
    Plots the attention of one head, or of all heads of a layer: a row for each position that attends, a column for
    each token that is attended to, white for 0 and dark blue for 1 (Section 3.2.1).

    Args:
        attention ([`Attention`]): the weights, from [`collect_attention`].
        tokenizer ([`PreTrainedTokenizerBase`]): the tokenizer, for the names of the tokens.
        kind (`str`): `"encoder"`, `"decoder"` or `"cross"`.
        layer (`int`): layer, counted from 0.
        head (`int`, *optional*): head, counted from 0; by default all.

    Returns:
        `Figure`: `figure.savefig("head.svg")` or `"head.png"` writes it.

    Raises:
        ValueError: there is no such attention, layer or head.
    """
    if kind not in attention.weights:
        raise ValueError(f"kind must be {' or '.join(map(repr, attention.weights))}, but it is {kind!r}.")
    weights = attention.weights[kind]
    for name, number, count in (("layer", layer, weights.shape[0]), ("head", head, weights.shape[1])):
        if number is not None and not 0 <= number < count:
            raise ValueError(f"{name} must be at least 0 and below {count}, but it is {number}.")
    read = [piece(tokenizer, token) for token in attention.inputs]
    source = [] if attention.source is None else pieces(tokenizer, attention.source)
    rows, columns = {"encoder": (source, source), "decoder": (read, read), "cross": (read, source)}[kind]
    heads = range(weights.shape[1]) if head is None else [head]
    across = min(COLUMNS, len(heads))
    down = -(-len(heads) // across)
    size = (across * (1.2 + 0.2 * len(columns)), down * (1.2 + 0.2 * len(rows)))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for panel, number in zip(panels, heads, strict=False):
        _plot(panel, weights[layer, number], rows, columns)
        panel.set_xlabel(f"layer {layer + 1}, head {number + 1}", fontsize=9)
    for panel in panels[len(heads) :]:
        panel.set_visible(False)
    return figure


def _plot(panel: Axes, weights: Any, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Plots one head."""
    panel.imshow(weights.numpy(), cmap=COLOURS, vmin=0, vmax=1, aspect="equal")
    panel.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7)
    panel.set_yticks(range(len(rows)), rows, fontsize=7)
    # A "$" is no formula.
    for label in (*panel.get_xticklabels(), *panel.get_yticklabels()):
        label.set_parse_math(False)
    panel.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    panel.spines[:].set_visible(False)
