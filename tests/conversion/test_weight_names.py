"""Names of weights in fairseq and Marian are translated to ours, one to one."""

import pytest
from transformers import FSMTConfig, FSMTForConditionalGeneration, MarianConfig, MarianMTModel

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.conversion.weight_names import our_name

SIZES = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
SIDES = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}


@pytest.fixture
def ours() -> set[str]:
    config = VaswaniConfig(vocab_size=9, num_heads=2, d_ff=2, attention_bias=True, **SIZES)
    return set(VaswaniForConditionalGeneration(config).state_dict())


def test_marians_names_are_ours(ours) -> None:
    config = MarianConfig(vocab_size=9, pad_token_id=8, decoder_start_token_id=8, **SIZES, **SIDES)
    names = set(MarianMTModel(config).state_dict())
    left = {name for name in names if "embed_positions" in name} | {"model.shared.weight", "final_logits_bias"}
    assert {our_name(name) for name in names - left} == ours


def test_fairseqs_names_are_ours(ours) -> None:
    """FSMT has fairseq's names, with `model.` in front."""
    config = FSMTConfig(src_vocab_size=9, tgt_vocab_size=9, langs=["en", "de"], **SIZES, **SIDES)
    names = {name.removeprefix("model.") for name in FSMTForConditionalGeneration(config).state_dict()}
    found = [our_name(name) for name in names if "embed_positions" not in name]
    assert len(found) == len(set(found)) and set(found) == ours


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("encoder.embed_positions.weight", "model.encoder.positions.table.weight"),
        ("decoder.layer_norm.bias", "model.decoder.norm.bias"),
        ("decoder.output_projection.weight", "lm_head.weight"),
        (
            "decoder.layers.11.encoder_attn_layer_norm.weight",
            "model.decoder.layers.11.cross_attn_norm.layer_norm.weight",
        ),
        ("model.encoder.layers.0.final_layer_norm.bias", "model.encoder.layers.0.feed_forward_norm.layer_norm.bias"),
        ("model.encoder.layers.0.fc2.weight", "model.encoder.layers.0.feed_forward.fc2.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_by_example(theirs, ours) -> None:
    assert our_name(theirs) == ours
