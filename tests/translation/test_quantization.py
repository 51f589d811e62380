"""An int8 model has the same class, nearly the same scores, and uses the same search."""

import pytest
import torch
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.translation.quantization import to_int8

from ..model.test_search import fast_and_stock, sentences


@pytest.fixture(scope="module")
def models():
    """A model with matrices large enough to be quantized, and its int8 version."""
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ff": 1024, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    model = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=1024, **sizes)).eval()
    return model, to_int8(model)


def test_large_matrices_are_quantized_and_the_model_is_unchanged(models) -> None:
    model, small = models
    assert type(small) is type(model) and small is not model
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.decoder.embed_tokens.weight
    layers = {name for name, module in small.named_modules() if "quantized.dynamic" in type(module).__module__}
    large = {
        name for name, module in model.named_modules() if type(module) is nn.Linear and module.weight.numel() >= 2**16
    }
    assert "lm_head" in large and {name for name in layers if "_packed" not in name} == large
    assert type(small.model.decoder.layers[0].self_attn.q_proj) is nn.Linear


def test_scores_differ_by_rounding_only(models) -> None:
    model, small = models
    inputs = sentences(16)
    inputs["decoder_input_ids"] = torch.ones(16, 1, dtype=torch.long)
    with torch.no_grad():
        found, expected = (each(**inputs).logits for each in (small, model))
    error = (found - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("beams", [1, 4])
def test_the_search_is_the_fast_one(models, monkeypatch, beams) -> None:
    _, small = models
    fast, stock = fast_and_stock(monkeypatch, small, sentences(7), num_beams=beams, max_new_tokens=6)
    # Rounding depends on the inputs of each call.
    assert (fast.sequences == stock.sequences).float().mean() > 0.5


def test_other_data_types_are_refused(models) -> None:
    with pytest.raises(ValueError, match="needs a float32 model on the CPU, but this one is torch.bfloat16 on cpu"):
        to_int8(VaswaniForConditionalGeneration(models[0].config).to(torch.bfloat16))


def test_a_model_elsewhere_is_quantized_on_the_cpu(models, monkeypatch) -> None:
    """As on a GPU, to which the command line moves models."""
    model, moved = models[0], []
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "device", torch.device("cuda:0"))
        patch.setattr(type(model), "cpu", lambda self: moved.append(self) or self)
        small = to_int8(model)
    assert len(moved) == 1 and moved[0] is not model
    assert "quantized.dynamic" in type(small.lm_head).__module__


def test_saving_is_refused(models, tmp_path) -> None:
    with pytest.raises(ValueError, match="An int8 model cannot be saved: save the original model"):
        models[1].save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small").exists()
    models[0].save_pretrained(tmp_path / "whole")
