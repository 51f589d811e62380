"""CTranslate2 computes the same logits and translations, for every model that it supports."""

import copy
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.conversion.formats import CTRANSLATE2_ACTIVATIONS, Foreign, Loaded
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.translation.loading import load_translator

from ..networks import random_batch, random_model

ctranslate2 = pytest.importorskip("ctranslate2")

from hf_vaswani.conversion.ctranslate2 import (  # noqa: E402 - it needs CTranslate2
    Ctranslate2Translator,
    save,
)

PAD, START, EOS = 0, 1, 2
WORDS = [f"{first}{second}" for first in "bdfgklm" for second in ("a", "e", "i", "o", "u", "ai")]
# LayerNorm's epsilon is large enough to notice a wrong one.
MODELS = {
    "post": {"layer_norm_eps": 0.05},
    "pre": {"norm_position": "pre", "sinusoid_layout": "concatenated", "activation_function": "silu"}
    | {"attention_bias": True, "lm_head_bias": True, "d_k": 5, "d_v": 7, "layer_norm_eps": 0.05},
    "untied": {"sinusoid_layout": "tensor2tensor", "position_offset": 2, "activation_function": "gelu"}
    | {"tie_word_embeddings": False, "share_embeddings": False, "scale_embedding": False, "d_k": 9, "d_v": 4},
    "learned": {"position_encoding": "learned", "max_position_embeddings": 64, "norm_position": "pre"}
    | {"share_embeddings": False, "encoder_layers": 1, "decoder_layers": 3, "attention_bias": True},
    "from pad": {"seed": 3, "decoder_start_token_id": PAD, "d_model": 20, "num_heads": 3, "d_k": 6, "d_v": 6},
}


def save_random(folder: Path, seed: int = 0, **fields) -> VaswaniForConditionalGeneration:
    """Writes a random model with a tokenizer of words, which has fewer tokens than the embeddings have rows."""
    model = random_model(seed, **fields)
    model.save_pretrained(folder)
    train_tokenizer([" ".join(WORDS)], len(WORDS) + 4, kind="words").save_pretrained(folder)
    return model


def convert(ours: Path, folder: Path, quantization: str | None = None) -> Foreign:
    """Converts the model of a folder."""
    folder.mkdir()
    return save(Loaded(*load_translator(ours, torch.float32), ours), folder, quantization)


def random_sentences(count: int = 60) -> list[str]:
    draw = random.Random(5)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]


def ids_for(config: VaswaniConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a batch whose targets contain all ids, including special tokens and rows without a token."""
    return random_batch(range(3, 46), range(config.vocab_size), start=config.decoder_start_token_id)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def converted(request, tmp_path_factory):
    """A random model, its folder, CTranslate2's folder, and the model in CTranslate2."""
    folder = tmp_path_factory.mktemp("model")
    model = save_random(folder / "ours", **MODELS[request.param])
    return model, folder / "ours", folder / "theirs", convert(folder / "ours", folder / "theirs", None)


SMALL = {"encoder_layers": 1, "decoder_layers": 1}


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    "fields", [*MODELS.values(), *(SMALL | {"activation_function": name} for name in CTRANSLATE2_ACTIVATIONS)], ids=str
)
def test_logits_are_ours(fields, tmp_path) -> None:
    model = save_random(tmp_path / "ours", **fields)
    ids, mask, targets = ids_for(model.config)
    expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    foreign = convert(tmp_path / "ours", tmp_path / "theirs")
    torch.testing.assert_close(foreign.logits(ids, mask, targets), expected, atol=1e-4, rtol=0)
    targets[3, 0] = 9
    start = model.config.decoder_start_token_id
    with pytest.raises(ValueError, match=f"start with token 9, but CTranslate2 starts with {start}"):
        foreign.logits(ids, mask, targets)


def translated(model, tokenizer, sentences: list[str], **rules) -> list[str]:
    batch = tokenizer(sentences, return_tensors="pt", padding=True)
    ids = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **rules)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.variants(2)
@pytest.mark.parametrize("length_penalty", [1.0, 0.4])
def test_the_folder_alone_translates_as_our_beam_search(converted, length_penalty) -> None:
    """As in the docstring of the module."""
    model, folder, theirs, _ = converted
    sentences = random_sentences()
    rules = {"length_penalty_type": "power", "early_stopping": True, "finish_candidates": "top", "max_new_tokens": 25}
    expected = translated(
        model, AutoTokenizer.from_pretrained(folder), sentences, num_beams=4, length_penalty=length_penalty, **rules
    )
    translator, tokenizer = ctranslate2.Translator(str(theirs), intra_threads=1), AutoTokenizer.from_pretrained(theirs)
    source = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(sentences)["input_ids"]]
    results = translator.translate_batch(
        source, beam_size=4, length_penalty=length_penalty, max_decoding_length=25, min_decoding_length=0
    )
    found = [
        tokenizer.decode(tokenizer.convert_tokens_to_ids(result.hypotheses[0]), skip_special_tokens=True)
        for result in results
    ]
    assert len(set(expected)) > 10
    assert sum(a == b for a, b in zip(expected, found, strict=True)) >= 57


@pytest.mark.parametrize(
    ("quantization", "least"),
    [("float16", 0.9999), ("bfloat16", 0.999), ("int16", 0.9), ("int8", 0.9), ("int8_float32", 0.9)],
)
def test_quantized_weights_are_nearly_the_same(quantization, least, tmp_path) -> None:
    save_random(tmp_path / "ours", d_model=64, d_ff=128)
    model, tokenizer = load_translator(tmp_path / "ours", torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    (tmp_path / "theirs").mkdir()
    loaded = Loaded(model, tokenizer, tmp_path / "ours")
    foreign = save(loaded, tmp_path / "theirs", quantization)
    # The model in memory stays as it is.
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    ids, mask, targets = ids_for(model.config)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    found = Ctranslate2Translator(tmp_path / "theirs", loaded).logits(ids, mask, targets)
    # In float64: float32 may round what is almost 1 to 1.
    assert least < torch.cosine_similarity(found.double().flatten(), expected.double().flatten(), dim=0) < 1
    assert not torch.equal(found, expected)
    assert len(foreign.translate(random_sentences(3))) == 3
    # The comparison must not expect equal logits.
    assert foreign.is_rounded and quantization in foreign.notes[-1]


@pytest.mark.parametrize(
    ("rules", "notes"),
    [
        (
            lambda often: {"suppress_tokens": [often], "bad_words_ids": [[PAD]], "max_length": 9},
            lambda pad, end, often: ["max_decoding_length=8", f"suppress_sequences={[[pad], [often]]}"],
        ),
        (
            lambda often: {"min_new_tokens": 6, "max_new_tokens": 7},
            lambda *_: ["min_decoding_length=6", "max_decoding_length=7"],
        ),
        (
            lambda often: {"eos_token_id": [EOS, often]},
            lambda pad, end, often: ["<source tokens + 10>", f"end_token={[end, often]}"],
        ),
    ],
    ids=["suppressed", "at least", "two ends"],
)
def test_settings_of_the_generation_config_are_followed(rules, notes, tmp_path) -> None:
    """Settings that models converted from Marian and fairseq have."""
    sentences = random_sentences()
    model = save_random(tmp_path / "ours", **MODELS["pre"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    free = translated(model, tokenizer, sentences)
    often, _ = Counter(id_ for ids in tokenizer(free)["input_ids"] for id_ in ids[:-1]).most_common(1)[0]
    model.generation_config.update(**rules(often))
    model.save_pretrained(tmp_path / "ours")
    expected = translated(model, tokenizer, sentences)
    foreign = convert(tmp_path / "ours", tmp_path / "theirs")
    assert expected != free
    assert sum(a == b for a, b in zip(expected, foreign.translate(sentences), strict=True)) >= 59
    for note in notes(*tokenizer.convert_ids_to_tokens([PAD, EOS, often])):
        assert note in " ".join(foreign.notes)


def test_a_note_has_the_arguments_that_search_alike(tmp_path) -> None:
    model = save_random(tmp_path / "ours")
    greedy, *_ = convert(tmp_path / "ours", tmp_path / "greedy").notes
    told = "beam_size=1, min_decoding_length=0, max_input_length=0, max_decoding_length=<source tokens + 10>"
    assert greedy == f"CTranslate2 has defaults of its own: pass {told} to translate_batch."
    model.generation_config.num_beams = 4
    model.save_pretrained(tmp_path / "ours")
    # alpha = 0.6: at 20 tokens, ((5 + length) / 6)^0.6 and length^0.48 have the same logarithmic derivative.
    assert "length_penalty=0.48, patience=2" in convert(tmp_path / "ours", tmp_path / "gnmt").notes[0]
    model.generation_config.update(length_penalty_type="power", length_penalty=1.5, early_stopping=True)
    model.save_pretrained(tmp_path / "ours")
    power = convert(tmp_path / "ours", tmp_path / "power").notes[0]
    assert "beam_size=4" in power and "length_penalty=1.5" in power and "patience" not in power


def test_the_log_level_of_the_library_is_restored_after_an_error(tmp_path) -> None:
    before = ctranslate2.get_log_level()
    with pytest.raises(RuntimeError):
        Ctranslate2Translator(tmp_path, None)
    assert ctranslate2.get_log_level() == before


@pytest.mark.parametrize("threads", [(2, 1), (1, 3)])
def test_torch_keeps_its_threads(converted, threads) -> None:
    model, ours, theirs, _ = converted
    loaded, before = Loaded(model, AutoTokenizer.from_pretrained(ours), ours), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        translator = Ctranslate2Translator(theirs, loaded, threads=threads[0], threads_per_batch=threads[1])
        assert torch.get_num_threads() == 2
        translator.translate(random_sentences(3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_batches_are_those_of_the_device_within_its_memory(converted, monkeypatch) -> None:
    model, ours, theirs, _ = converted
    translator = Ctranslate2Translator(theirs, Loaded(model, AutoTokenizer.from_pretrained(ours), ours))
    sizes = []

    def translate_batch(sources, max_batch_size, **_):
        sizes.append(max_batch_size)
        return [SimpleNamespace(result=lambda: SimpleNamespace(hypotheses=[[]], scores=[0.0]))] * len(sources)

    translator.translator = SimpleNamespace(translate_batch=translate_batch)
    sources, settings = [[4] * 10] * 5000, copy.deepcopy(model.generation_config)
    settings.num_beams = 2
    memory = 128 * 2 * len(translator.tokens) * 300
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory, memory))
    for device, given, expected in (
        ("cpu", None, 4096),
        ("cpu", 900, 900),
        # 300 rows of 10 tokens.
        ("cuda", None, 3000),
        ("cuda", 900, 900),
        ("mps", None, 16_384),
    ):
        translator.device, translator.tokens_per_batch = torch.device(device), given
        sizes.clear()
        translator.search(sources, settings)
        assert sizes == [expected]
    translator.search([], settings)
