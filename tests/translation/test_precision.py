"""The choice of the number format of products: by instructions, and by a measurement."""

import time

import pytest
import torch

from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.translation import precision
from hf_vaswani.translation.loading import load_translator
from hf_vaswani.translation.precision import (
    autocast_to,
    fastest_training,
    fastest_translation,
    has_bfloat16,
    speedup_of_bfloat16,
)

from ..model.test_search import random_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    monkeypatch.setattr(precision, "MEASUREMENT", 0.05)


def set_machine(monkeypatch, has_them: bool, speedup: float = 2.0) -> list:
    """Sets the instructions of the processor, and what is measured on it; returns the measurements."""
    measured = []

    def measure(work, device) -> float:
        with autocast_to(torch.bfloat16, device):
            work()
        measured.append(device)
        return speedup

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_them}, raising=False)
    monkeypatch.setattr(precision, "speedup_of_bfloat16", measure)
    return measured


def test_the_measurement_is_the_ratio_of_medians() -> None:
    def work() -> None:
        time.sleep(0.001 if torch.is_autocast_enabled("cpu") else 0.01)

    assert 3 < speedup_of_bfloat16(work, CPU) < 30


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16"])
def test_instructions_are_those_of_the_processor(monkeypatch, name) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, name: True}, raising=False)
    assert has_bfloat16(CPU) and not has_bfloat16(torch.device("meta"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, name: False}, raising=False)
    assert not has_bfloat16(CPU)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not has_bfloat16(CPU), "an old torch does not know"


@pytest.mark.parametrize(
    ("has_them", "speedup", "expected", "why"),
    [
        (True, 1.8, torch.bfloat16, "bfloat16 is 1.80 times as fast"),
        (True, 1.1, torch.float32, "bfloat16 is 1.10 times as fast, and 1.15 are needed"),
        (False, 9.0, torch.float32, "the processor has no instructions for bfloat16"),
    ],
)
def test_bfloat16_is_chosen_where_it_is_faster(monkeypatch, has_them, speedup, expected, why) -> None:
    model = random_model()
    measured = set_machine(monkeypatch, has_them, speedup)
    assert fastest_translation(model) == fastest_training(CPU, 64, 8, 16) == (expected, why)
    assert measured == [CPU, CPU] * has_them


def test_the_choice_leaves_random_numbers_as_they_are(monkeypatch) -> None:
    model = random_model()
    set_machine(monkeypatch, True)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    fastest_translation(model)
    fastest_training(CPU, 64, 8, 16)
    assert torch.equal(torch.rand(3), expected)


def test_weights_in_half_precision_are_left_as_they_are(monkeypatch) -> None:
    set_machine(monkeypatch, True)
    assert fastest_translation(random_model().bfloat16()) == (torch.bfloat16, "the weights are in bfloat16")


def test_a_pipeline_translates_with_autocast(tiny_run, monkeypatch) -> None:
    model, tokenizer = load_translator(tiny_run / "model")
    generate, enabled = model.generate, []

    def spy(*arguments, **settings):
        enabled.append(torch.is_autocast_enabled("cpu"))
        return generate(*arguments, **settings)

    monkeypatch.setattr(model, "generate", spy)
    for speedup, autocast, expected in (
        (2, None, False),
        (2, "bfloat16", True),
        (2, "auto", True),
        (1, "auto", False),
    ):
        set_machine(monkeypatch, True, speedup)
        pipe = VaswaniTranslationPipeline(model, tokenizer, autocast=autocast)
        enabled.clear()
        assert pipe("one two")[0].keys() == {"translation_text"} and enabled == [expected]
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ValueError, match="autocast must be 'auto', 'bfloat16' or None, but it is 'int8'"):
        VaswaniTranslationPipeline(model, tokenizer, autocast="int8")
