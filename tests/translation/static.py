"""Models, sentences and comparisons for the tests of searches in fixed places."""

import torch

from hf_vaswani import VaswaniForCausalLM
from hf_vaswani.model.generation_vaswani import FastSearchMixin
from hf_vaswani.translation import static_search

from ..networks import tiny_model

PAD, EOS = 0, 2
SEARCHES = {
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 4},
    "sampling": {"num_beams": 1, "do_sample": True, "top_k": 0},
}


def random_model(seed: int = 0, **fields):
    """Returns a model whose translations vary, also in length."""
    model = tiny_model(seed, eos=2.0, **({"vocab_size": 90, "encoder_layers": 1} | fields))
    model.generation_config.max_length_offset = 25
    return model


def random_gpt(seed: int = 0, **fields):
    """Returns a language model whose texts vary, also in length."""
    model = tiny_model(seed, eos=1.0, kind=VaswaniForCausalLM, **({"vocab_size": 90} | fields))
    model.generation_config.max_new_tokens = 30
    return model


def sentences(count: int, width: int = 12, left: bool = False) -> dict[str, torch.Tensor]:
    """Returns sources of very different lengths."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(3, 90, (count, width), generator=generator)
    lengths = torch.randint(2, width + 1, (count,), generator=generator)
    ids[torch.arange(width) >= lengths[:, None]] = PAD
    ids = ids.flip(1) if left else ids
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def use_buckets(monkeypatch, capacity: int, steps: int) -> None:
    monkeypatch.setattr(static_search, "MIN_CAPACITY", capacity)
    monkeypatch.setattr(static_search, "MIN_STEPS", steps)


def without(monkeypatch, model, inputs, **settings):
    """Returns what the model's own search finds."""
    with monkeypatch.context() as patch:
        patch.setattr(FastSearchMixin, "at_home", staticmethod(lambda *_: None))
        torch.manual_seed(0)
        return model.generate(**inputs, **settings, return_dict_in_generate=True)


def assert_same(monkeypatch, at_home, model, inputs, **settings) -> None:
    """Asserts that both searches find the same, and that the static one ran."""
    expected = without(monkeypatch, model, inputs, **settings)
    at_home.clear()
    torch.manual_seed(0)
    found = model.generate(**inputs, **settings, return_dict_in_generate=True)
    assert [each is found for each in at_home] == [True]
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    if settings.get("num_beams", 1) > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.beam_indices, expected.beam_indices)
