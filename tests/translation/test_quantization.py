"""Number formats: where bfloat16 is chosen; int8 models have the same class and search, and nearly the same scores."""

import pytest
import torch
from torch import nn

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTranslationPipeline
from hf_vaswani.translation import quantization
from hf_vaswani.translation.loading import load_translator
from hf_vaswani.translation.quantization import fastest_training, fastest_translation, has_bfloat16, to_int8

from ..model.test_search import fast_and_stock, random_model, sentences

CPU = torch.device("cpu")


# Variables that limit oneDNN to older instructions.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def set_instructions(monkeypatch, has_them: bool) -> None:
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_them}, raising=False)


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16"])
def test_instructions_are_those_of_the_processor(monkeypatch, name) -> None:
    set_instructions(monkeypatch, False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, name: True}, raising=False)
    assert has_bfloat16(CPU) and not has_bfloat16(torch.device("meta"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, name: False}, raising=False)
    assert not has_bfloat16(CPU)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not has_bfloat16(CPU), "an old torch does not know"


@pytest.mark.parametrize("name", LIMITS)
def test_instructions_that_onednn_may_not_use_do_not_count(monkeypatch, name) -> None:
    set_instructions(monkeypatch, True)
    for limit in ("", "ALL", "DEFAULT", "AVX512_CORE_BF16", "avx512_core_amx", "AVX512_CORE_FP16", "AVX10_1_512"):
        monkeypatch.setenv(name, limit)
        assert has_bfloat16(CPU), limit
    for limit in ("SSE41", "AVX2", "avx2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"):
        monkeypatch.setenv(name, limit)
        assert not has_bfloat16(CPU), limit


@pytest.mark.parametrize(
    ("has_them", "d_model", "translation", "training"),
    [(True, 256, "bfloat16", "bfloat16"), (True, 128, "256 on", "bfloat16"), (True, 64, "256 on", "128 on"),
     (False, 512, "no instructions", "no instructions")],
)  # fmt: skip
def test_bfloat16_is_chosen_where_it_is_faster(monkeypatch, has_them, d_model, translation, training) -> None:
    set_instructions(monkeypatch, has_them)
    model = random_model(d_model=d_model)
    for found, expected in ((fastest_translation(model), translation), (fastest_training(CPU, d_model), training)):
        dtype, why = found
        assert expected in why and (dtype == torch.bfloat16) == (expected == "bfloat16")


def test_every_width_is_wide_enough_for_a_gpu(monkeypatch) -> None:
    for kind, module in (("cuda", torch.cuda), ("xpu", torch.xpu)):
        monkeypatch.setattr(module, "is_bf16_supported", lambda including_emulation: not including_emulation)
        assert fastest_training(torch.device(kind), 8)[0] == torch.bfloat16
    assert fastest_training(torch.device("mps"), 512)[0] == torch.float32


def test_weights_in_half_precision_are_left_as_they_are(monkeypatch) -> None:
    set_instructions(monkeypatch, True)
    assert fastest_translation(random_model().bfloat16()) == (torch.bfloat16, "the weights are in bfloat16")


def test_a_pipeline_translates_with_autocast(tiny_run, monkeypatch) -> None:
    model, tokenizer = load_translator(tiny_run / "model")
    generate, enabled = model.generate, []

    def spy(*arguments, **settings):
        enabled.append(torch.is_autocast_enabled("cpu"))
        return generate(*arguments, **settings)

    monkeypatch.setattr(model, "generate", spy)
    set_instructions(monkeypatch, True)
    for least, autocast, expected in (
        (16, None, False),
        (16, "bfloat16", True),
        (16, "auto", True),
        (17, "auto", False),
    ):
        monkeypatch.setattr(quantization, "TRANSLATION", least)
        pipe = VaswaniTranslationPipeline(model, tokenizer, autocast=autocast)
        enabled.clear()
        assert pipe("one two")[0].keys() == {"translation_text"} and enabled == [expected]
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ValueError, match="autocast must be 'auto', 'bfloat16' or None, but it is 'int8'"):
        VaswaniTranslationPipeline(model, tokenizer, autocast="int8")


# ---- int8 ----------------------------------------------------------------------------------------------------------


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
