"""Figures of attention."""

import io

import numpy
import pytest

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.visualization.attention import collect_attention
from hf_vaswani.visualization.figures import plot_attention

from ..networks import tiny_model


@pytest.fixture(scope="module")
def model() -> VaswaniForConditionalGeneration:
    return tiny_model(num_heads=8, d_model=16)


def test_a_layer_has_a_panel_for_each_head(model, tokenizer) -> None:
    attention = collect_attention(model, tokenizer, "ab $c$", "ca")
    figure = plot_attention(attention, tokenizer, layer=1)
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_xlabel() for panel in panels] == [f"layer 2, head {head}" for head in range(1, 9)]
    for panel, weights in zip(panels, attention.weights["cross"][1], strict=True):
        assert numpy.array_equal(panel.images[0].get_array(), weights.numpy())
    assert [label.get_text() for label in panels[0].get_xticklabels()] == ["a", "b", "␣", "$", "c", "$", "</s>"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["<s>", "c", "a"]


@pytest.mark.parametrize(("kind", "shape"), [("encoder", (7, 7)), ("decoder", (3, 3)), ("cross", (3, 7))])
def test_one_head_as_png_and_svg(model, tokenizer, kind, shape) -> None:
    attention = collect_attention(model, tokenizer, "ab $c$", "ca")
    figure = plot_attention(attention, tokenizer, kind, layer=0, head=2)
    (panel,) = figure.axes
    assert panel.images[0].get_array().shape == shape
    for format, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        file = io.BytesIO()
        figure.savefig(file, format=format)
        assert file.getvalue().startswith(begin)


def test_what_the_model_does_not_have_is_an_error(model, tokenizer) -> None:
    attention = collect_attention(model, tokenizer, "ab", "ca")
    with pytest.raises(ValueError, match="kind must be 'encoder' or 'decoder' or 'cross', but it is 'both'"):
        plot_attention(attention, tokenizer, "both", layer=0)
    with pytest.raises(ValueError, match="layer must be at least 0 and below 2, but it is 2"):
        plot_attention(attention, tokenizer, layer=2)
    with pytest.raises(ValueError, match="head must be at least 0 and below 8, but it is -1"):
        plot_attention(attention, tokenizer, layer=0, head=-1)
