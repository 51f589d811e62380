"""Attention weights and roles, against the layers' own computation and weights made by hand."""

from typing import Any

import pytest
import torch

from hf_vaswani import VaswaniEncoderModel, VaswaniForCausalLM, alignments
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.model.cache_vaswani import find_change
from hf_vaswani.translation.alignment import Text
from hf_vaswani.visualization.attention import (
    Attention,
    alignment_of,
    collect_attention,
    head_roles,
    piece,
    pieces,
    text_from_ids,
    with_eager_attention,
)

from ..networks import tiny_config, tiny_model


def softmax_of_layer(attention: Any, queries: torch.Tensor, keys: torch.Tensor, causal: bool) -> torch.Tensor:
    """Equation 1, written anew."""
    query, key = attention.split_heads(attention.q_proj(queries)), attention.split_heads(attention.k_proj(keys))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(dim=-1)


@torch.no_grad()
def test_weights_are_those_of_each_box_of_figure_1(tokenizer) -> None:
    model = tiny_model()
    found = collect_attention(model, tokenizer, "abc ab", "cab ab")
    source, target = (torch.tensor([tokenizer(text).input_ids]) for text in ("abc ab", "cab ab"))
    inputs = model.prepare_decoder_input_ids_from_labels(target)
    assert found.inputs == inputs[0].tolist()
    outputs = model(
        input_ids=source, decoder_input_ids=inputs, output_hidden_states=True, labels=target, use_cache=False
    )
    encoder, decoder = model.model.encoder, model.model.decoder
    states = encoder.positions(encoder.embed_tokens(source))
    for i, layer in enumerate(encoder.layers):
        expected = softmax_of_layer(layer.self_attn, states, states, causal=False)
        torch.testing.assert_close(found.weights["encoder"][i], expected[0], atol=1e-5, rtol=0)
        states = layer(states)
    below = decoder.positions(decoder.embed_tokens(inputs))
    for i, layer in enumerate(decoder.layers):
        expected = softmax_of_layer(layer.self_attn, below, below, causal=True)
        torch.testing.assert_close(found.weights["decoder"][i], expected[0], atol=1e-5, rtol=0)
        mask = torch.full((len(inputs[0]),) * 2, -torch.inf).triu(1)[None, None]
        middle = layer.self_attn_norm(below, lambda x, layer=layer, mask=mask: layer.self_attn(x, mask)[0])
        expected = softmax_of_layer(layer.cross_attn, middle, states, causal=False)
        torch.testing.assert_close(found.weights["cross"][i], expected[0], atol=1e-5, rtol=0)
        below = layer(below, mask, states)
    # The loss is the mean over the tokens, without smoothing in evaluation.
    torch.testing.assert_close(found.log_probs.mean(), -outputs.loss, atol=1e-5, rtol=0)


def test_a_model_keeps_its_mode_its_attention_and_its_weights(tokenizer) -> None:
    model = tiny_model().train()
    before = model.config._attn_implementation
    assert before != "eager"
    collect_attention(model, tokenizer, "abc", "ab")
    with pytest.raises(ValueError, match="1000000"):
        collect_attention(model, tokenizer, "abc", [10**6, 2])
    assert model.config._attn_implementation == before and model.training
    # Whatever translates with it stays as fast as it was.
    assert find_change(model.eval()) is None
    copied = with_eager_attention(model)
    assert list(map(id, copied.parameters())) == list(map(id, model.parameters()))


def test_stacks_on_their_own(tokenizer) -> None:
    encoder = VaswaniEncoderModel(tiny_config()).eval()
    found = collect_attention(encoder, tokenizer, "abc ab")
    assert {kind: weights.shape for kind, weights in found.weights.items()} == {"encoder": (2, 2, 7, 7)}
    torch.testing.assert_close(found.weights["encoder"].sum(dim=-1), torch.ones(2, 2, 7))
    decoder = tiny_model(kind=VaswaniForCausalLM)
    ids = [5, 6, 7, 8]
    found = collect_attention(decoder, tokenizer, "", ids)
    # The last token is predicted, but not read.
    assert (found.inputs, found.weights["decoder"].shape) == ([5, 6, 7], (2, 2, 3, 3))
    with torch.no_grad():
        log_probs = decoder(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    torch.testing.assert_close(found.log_probs[1:], log_probs[range(3), ids[1:]], atol=1e-5, rtol=0)


def test_a_translation_is_needed(tokenizer) -> None:
    with pytest.raises(ValueError, match="needs what it writes: pass target"):
        collect_attention(tiny_model(), tokenizer, "abc")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "words", "characters", "bytes"])
def test_pieces_have_the_characters_of_the_text(kind) -> None:
    text = "Señor Ñu läuft 🙂 weg."
    tokenizer = train_tokenizer([text, "weg läuft Ñu"], 300, kind=kind)
    found = text_from_ids(tokenizer, tokenizer(text).input_ids)
    assert found.text == tokenizer.decode(found.ids, skip_special_tokens=True)
    assert "".join(found.text[start:end] for start, end in found.spans) == found.text
    assert all(first[1] == second[0] for first, second in zip(found.spans, found.spans[1:], strict=False))
    names = pieces(tokenizer, found)
    assert names[-1] == "</s>"
    assert all(names)
    assert not any(" " in name or "\ufffd" in name for name in names)


def test_a_piece_alone_shows_the_space_in_front_of_a_word() -> None:
    tokenizer = train_tokenizer(["red red book book book"] * 5, 290)
    assert piece(tokenizer, tokenizer.convert_tokens_to_ids("Ġ")) == "␣"
    ids = tokenizer("red book").input_ids
    assert [piece(tokenizer, token) for token in ids][-2:] == ["␣book", "</s>"]


def test_roles_by_hand() -> None:
    source = Text("a b", [5, 6, 2], [(0, 1), (1, 3), (3, 3)])
    target = Text("x y", [7, 8, 2], [(0, 1), (1, 3), (3, 3)])
    previous = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.2, 0.0], [0.0, 0.6, 0.4]])
    cross = torch.tensor([[0.0, 0.9, 0.1], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]])
    weights = {"encoder": previous, "decoder": previous, "cross": cross}
    attention = Attention(source, target, [0, 7, 8], {kind: each[None, None] for kind, each in weights.items()})
    found = head_roles(attention, [(1, 0), (0, 1)])
    shares = {kind: {role.name: round(role.share, 4) for role in layers[0][0]} for kind, layers in found.items()}
    assert shares == {
        "encoder": {"previous token": 0.7, "same token": 0.5333, "end of sentence": 0.1333, "next token": 0.0},
        "decoder": {"previous token": 0.7, "same token": 0.5333, "first token": 0.4},
        "cross": {"alignment": 0.7, "end of sentence": 0.5333},
    }
    for layers in found.values():
        assert layers[0][0] == sorted(layers[0][0], key=lambda role: -role.share)


@pytest.mark.parametrize(("layer", "shift"), [(None, False), (0, False), (1, True)])
def test_words_are_aligned_as_alignments_does(tokenizer, layer, shift) -> None:
    model = tiny_model()
    model.config.alignment_layer, model.config.alignment_shift = layer, shift
    found, links = alignment_of(model, collect_attention(model, tokenizer, "abc ab", "cab ab"))
    (expected,) = alignments(model, tokenizer, ["abc ab"], ["cab ab"])
    assert found.links() == expected.links()
    torch.testing.assert_close(found.probabilities, expected.probabilities, atol=1e-5, rtol=0)
    # Letters 0 to 2 and, with the space in front, 3 to 5 of both.
    assert {(i // 3, (row - shift) // 3) for i, row in links} == set(found.links())
