"""The choice of the number format of products: by instructions, and by the width of the model."""

import pytest
import torch

from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.translation import precision
from hf_vaswani.translation.loading import load_translator
from hf_vaswani.translation.precision import fastest_training, fastest_translation, has_bfloat16

from ..model.test_search import random_model

CPU = torch.device("cpu")


def set_instructions(monkeypatch, has_them: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_them}, raising=False)


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16"])
def test_instructions_are_those_of_the_processor(monkeypatch, name) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, name: True}, raising=False)
    assert has_bfloat16(CPU) and not has_bfloat16(torch.device("meta"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, name: False}, raising=False)
    assert not has_bfloat16(CPU)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not has_bfloat16(CPU), "an old torch does not know"


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
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert fastest_training(torch.device("cuda"), 8)[0] == torch.bfloat16
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
        monkeypatch.setattr(precision, "TRANSLATION", least)
        pipe = VaswaniTranslationPipeline(model, tokenizer, autocast=autocast)
        enabled.clear()
        assert pipe("one two")[0].keys() == {"translation_text"} and enabled == [expected]
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ValueError, match="autocast must be 'auto', 'bfloat16' or None, but it is 'int8'"):
        VaswaniTranslationPipeline(model, tokenizer, autocast="int8")
