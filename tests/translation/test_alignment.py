"""Word alignments, against the attention weights of transformers' own outputs and links made by hand."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch.utils._python_dispatch import TorchDispatchMode

from hf_vaswani import VaswaniForConditionalGeneration, alignments
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.model.sentences_vaswani import Parts
from hf_vaswani.translation import alignment as module
from hf_vaswani.translation import quantization
from hf_vaswani.translation.alignment import (
    Alignment,
    Text,
    align_parts,
    choose_alignment,
    end_if_over,
    ended_by,
    identity,
    read,
)

from ..conftest import SEED
from ..networks import tiny_config, tiny_model

WORDS = "ab abc bca cab".split()
SOURCES = ["abc cab", "ab", "bca  ab abc"]
TARGETS = ["cab abc", "ab ab ab", "abc"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([" ".join(WORDS)], 20, kind="characters")


@pytest.fixture
def model() -> VaswaniForConditionalGeneration:
    return tiny_model(vocab_size=40, decoder_layers=3)


@torch.no_grad()
def eager_attention(model: Any, tokenizer: Any, source: str, target: str, layer: int) -> torch.Tensor:
    """Returns what transformers says of a layer, averaged over its heads, with a row and a column for `</s>`."""
    model.set_attn_implementation("eager")
    inputs = tokenizer([source], text_target=[target], return_tensors="pt")
    return model(**inputs, output_attentions=True).cross_attentions[layer].mean(dim=1)[0]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
def test_pieces_have_the_attention_weights_of_their_layer(model, tokenizer, layer, shift) -> None:
    found = alignments(model, tokenizer, SOURCES, TARGETS, unit="pieces", layer=layer, shift=shift)
    for source, target, alignment in zip(SOURCES, TARGETS, found, strict=True):
        weights = eager_attention(model, tokenizer, source, target, layer)
        tokens = len(alignment.target)
        assert (tokens + 1, len(alignment.source) + 1) == weights.shape
        expected = weights[shift : tokens + shift, :-1]
        torch.testing.assert_close(alignment.probabilities, expected, atol=1e-6, rtol=0)


def with_lora(model: Any) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "fc1"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def with_int8(model: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "MIN_INT8_ENTRIES", 1)
        model.model.decoder = quantization.to_int8(model).model.decoder


def with_hooks(model: Any) -> None:
    for layer in model.model.decoder.layers:
        add_hook_to_module(layer, ModelHook())
        add_hook_to_module(layer.cross_attn, ModelHook())
        layer.register_forward_hook(lambda module, _, states: states + 0.1)


def with_another_network(model: Any) -> None:
    for layer in model.model.decoder.layers:
        layer.feed_forward = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())


def with_compiled_layers(model: Any) -> None:
    layers = model.model.decoder.layers
    layers[1] = torch.compile(layers[1], backend="eager")
    layers[2].compile(backend="eager")


@pytest.mark.parametrize("change", [with_lora, with_int8, with_hooks, with_another_network, with_compiled_layers])
def test_the_modules_of_the_model_compute(model, tokenizer, change) -> None:
    change(model)
    found = alignments(model, tokenizer, SOURCES[:1], TARGETS[:1], unit="pieces", layer=2)[0].probabilities
    weights = eager_attention(model, tokenizer, SOURCES[0], TARGETS[0], layer=2)
    torch.testing.assert_close(found, weights[: len(found), :-1], atol=1e-6, rtol=0)


def test_other_threads_see_no_change_of_the_model(model, tokenizer) -> None:
    attention, seen = model.model.decoder.layers[1].cross_attn, []
    before = dict(vars(attention))

    def watched(*_: Any) -> None:
        seen.append((dict(vars(attention)) == before, model.config._attn_implementation))

    handle = model.model.decoder.layers[1].feed_forward.register_forward_hook(watched)
    alignments(model, tokenizer, SOURCES, TARGETS)
    handle.remove()
    assert set(seen) == {(True, "sdpa")}


def test_what_has_no_such_attention_is_refused(model, tokenizer) -> None:
    model.model.decoder.layers[1].cross_attn.forward = lambda states, *_, **__: (states, None)
    with pytest.raises(ValueError, match="Alignments need the attention of layer 1, but another module is in its"):
        alignments(model, tokenizer, SOURCES, TARGETS, layer=1)


def test_words_join_the_attention_of_their_pieces(model, tokenizer) -> None:
    (words,), (pieces,) = (
        alignments(model, tokenizer, ["abc cab"], ["cab ab"], unit=unit) for unit in ("words", "pieces")
    )
    assert (words.source, words.target) == (["abc", "cab"], ["cab", "ab"])
    # The space is a piece of the word behind it.
    lengths = [3, 4, 3, 3]
    columns = torch.stack([part.sum(dim=1) for part in pieces.probabilities.split(lengths[:2], dim=1)], dim=1)
    rows = torch.stack([part.mean(dim=0) for part in columns.split(lengths[2:])])
    torch.testing.assert_close(words.probabilities, rows)


def test_the_config_names_the_layer(model, tokenizer) -> None:
    def aligned(**settings: Any) -> torch.Tensor:
        return alignments(model, tokenizer, ["abc"], ["cab"], **settings)[0].probabilities

    assert torch.equal(aligned(), aligned(layer=2, shift=False))
    model.config.alignment_layer, model.config.alignment_shift = 1, True
    assert torch.equal(aligned(), aligned(layer=1, shift=True))
    assert not torch.equal(aligned(), aligned(layer=1, shift=False))


def test_nothing_to_align(model, tokenizer) -> None:
    assert alignments(model, tokenizer, [], []) == []
    shapes = [found.probabilities.shape for found in alignments(model, tokenizer, ["", "ab", ""], ["ab", " ", ""])]
    assert shapes == [(1, 0), (0, 1), (0, 0)]
    with pytest.raises(ValueError, match="no pair of sentences with words on both sides"):
        choose_alignment(model, tokenizer, ["", "ab"], ["ab", ""])


def test_links() -> None:
    alignment = Alignment(
        ["a", "b", "c"], ["x", "y", "z"], torch.tensor([[0.1, 0.6, 0.2], [0.0, 0.7, 0.3], [0.0, 0.0, 0.0]])
    )
    # The word z attends to nothing.
    assert alignment.links() == [(1, 0), (1, 1)]
    assert alignment.links("intersection") == [(1, 1)]
    with pytest.raises(ValueError, match="method must be 'argmax' or 'intersection', but it is 'union'"):
        alignment.links("union")


def test_words_are_what_stands_between_spaces() -> None:
    text = Text("<2de>  a bc", [9, 4, 5, 6, 7, 2], [(0, 5), (5, 7), (7, 8), (8, 10), (10, 11), (0, 0)], begin=5)
    assert text.names(text.words()) == ["a", "bc"]
    # A space alone is the beginning of the word behind it.
    assert [word.tokens for word in text.words()] == [[1, 2], [3, 4]]
    assert [piece.tokens for piece in text.pieces()] == [[1], [2], [3], [4]]


def test_language_tags_are_no_words(tokenizer) -> None:
    tagged = train_tokenizer(["ab"], 20, kind="characters")
    tagged.add_tokens("<2de>")
    (text,) = read(tagged, ["<2de> ab"])
    assert text.names(text.words()) == ["ab"]
    # Here it is a word like any other.
    assert len(read(tokenizer, ["<2de> ab"])[0].words()) == 2


@pytest.mark.portable
@pytest.mark.slow
def test_a_model_that_reverses_is_aligned_backwards() -> None:
    """The reading that is chosen without known alignments is right."""
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer([" ".join("abcdefghij")], 14, kind="words")
    sizes = {"d_model": 32, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    model = VaswaniForConditionalGeneration(tiny_config(vocab_size=14, **sizes)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(600):
        words = torch.randint(4, 14, (64, 6))
        end = torch.full((64, 1), 2)
        optimizer.zero_grad()
        model(input_ids=torch.cat([words, end], dim=1), labels=torch.cat([words.flip(1), end], dim=1)).loss.backward()
        optimizer.step()
    ids = torch.randint(4, 14, (40, 6))
    sources, targets = tokenizer.batch_decode(ids), tokenizer.batch_decode(ids.flip(1))
    layer, shift = choose_alignment(model, tokenizer, sources, targets)
    links = [each.links() for each in alignments(model, tokenizer, sources, targets, layer=layer, shift=shift)]
    backwards = [(i, 5 - i) for i in range(6)]
    assert sum(len(set(each) & set(backwards)) for each in links) >= 0.9 * 6 * len(links)
    assert model.training


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer": 3}, r"layer must be at least 0 and below decoder_layers \(3\), but it is 3"),
        ({"layer": -1}, "but it is -1"),
        ({"unit": "letters"}, "unit must be 'words' or 'pieces', but it is 'letters'"),
        ({"targets": ["ab"]}, "1 translations for 3 sentences"),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence(model, tokenizer, settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        alignments(model, tokenizer, SOURCES, **({"targets": TARGETS} | settings))


def test_a_batch_that_does_not_fit_into_the_memory_is_aligned_in_halves(model, tokenizer, monkeypatch) -> None:
    sources, targets = ["ab", *["abc cab abc"] * 9, "bca"], ["cab", *["ab abc"] * 9, "ab"]
    expected = alignments(model, tokenizer, sources, targets)
    compute, rows = module.attention_to_source, []

    def small(model, inputs, *more):
        rows.append(len(inputs["input_ids"]))
        if rows[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(model, inputs, *more)

    monkeypatch.setattr(module, "attention_to_source", small)
    found = alignments(model, tokenizer, sources, targets)
    assert max(rows) > 3 and sum(count for count in rows if count <= 3) == len(sources)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.probabilities, other.probabilities, atol=1e-6, rtol=0)


def test_the_memory_of_a_batch_follows_its_pairs(model, tokenizer, monkeypatch) -> None:
    """However different their lengths are, and without a change of what they attend to."""
    monkeypatch.setattr(module, "MAX_SCORES", 2**8)
    monkeypatch.setattr(module, "MAX_POSITIONS", 2**5)
    sources = ["ab", *["abc cab abc"] * 9, "abc " * 20, "", "bca", *["ab"] * 20]
    targets = ["cab", *["ab abc"] * 9, "ab " * 9, "", "ab " * 30, *["abc"] * 20]
    batches: list[tuple[int, int, int]] = []
    compute = module.attention_to_source

    def watched(model, inputs, labels, layers):
        batches.append((*inputs["input_ids"].shape, labels.shape[1]))
        return compute(model, inputs, labels, layers)

    monkeypatch.setattr(module, "attention_to_source", watched)
    together = alignments(model, tokenizer, sources, targets, unit="pieces")
    assert sum(rows for rows, _, _ in batches) == len(sources)
    longest = [(rows, max(source, target)) for rows, source, target in batches if rows > 1]
    assert all(rows * length <= 2**5 and rows * length**2 <= 2**8 for rows, length in longest)
    monkeypatch.undo()
    for source, target, found in zip(sources, targets, together, strict=True):
        (alone,) = alignments(model, tokenizer, [source], [target], unit="pieces")
        torch.testing.assert_close(found.probabilities, alone.probabilities, atol=1e-6, rtol=0)


def test_no_matrix_is_larger_than_the_attention_of_a_head(model, tokenizer, monkeypatch) -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and function is torch.ops.aten._softmax.default:
                largest = max(largest, found.numel())
            return found

    query, key = torch.rand(2, 4, 300, 8), torch.rand(2, 4, 200, 8)
    hidden = torch.zeros(2, 1, 200, dtype=torch.bool)
    hidden[1, :, 150:] = True
    expected = (query @ key.transpose(2, 3)).masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1).mean(dim=1)
    monkeypatch.setattr(module, "MAX_SCORES", 10_000)
    with Watch():
        found = module._mean_attention(query, key, hidden, 1.0)
    torch.testing.assert_close(found, expected)
    assert largest <= 10_000


def test_the_parts_of_a_text_are_aligned_where_they_are(model, tokenizer) -> None:
    parts = Parts("", "abc cab.\nab 42 \nbca", [(0, 8), (9, 14), (15, 18)])
    ranks = [["cab abc.", "ab 42", "ca"], ["b", "", "ca ab"]]
    found = align_parts(model, tokenizer, [(parts, ranks), (Parts("", "42", [(0, 2)]), [["42"]])], "words")
    assert [[text for text, _ in each] for each in found] == [list(map(parts.join, ranks)), ["42"]]
    for (text, pieces), translations in zip(found[0], ranks, strict=True):
        for piece, source, translation in zip(pieces, parts.sources, translations, strict=True):
            (alone,) = alignments(model, tokenizer, [source], [translation])
            torch.testing.assert_close(piece.probabilities, alone.probabilities, atol=1e-6, rtol=0)
            assert [parts.text[slice(*span)] for span in piece.source_spans] == source.split()
            assert [text[slice(*span)] for span in piece.target_spans] == translation.split()
    # The model has not read it.
    assert found[1][0][1][0].links() == [(0, 0)]


def test_signs_that_the_model_does_not_read_have_their_place(model, tokenizer) -> None:
    text = "\ufeffab\u00adc \u200b cab.\u200f\nca\u2060b"
    parts = Parts("<2de> ", text, [(0, 13), (14, 18)])
    assert parts.sources == ["<2de> abc  cab.", "<2de> cab"]
    for unit, pieces in (("words", ["ab\u00adc", "cab."]), ("pieces", [*"abccab"])):
        (found,) = align_parts(model, tokenizer, [(parts, [["cab", "ab"]])], unit)
        first, second = found[0][1]
        names = [text[slice(*span)] for span in first.source_spans if span[0] >= 0]
        assert [name for name in names if name[0].isalpha()] == pieces
        (alone,) = alignments(model, tokenizer, [parts.sources[0]], ["cab"], unit=unit)
        torch.testing.assert_close(first.probabilities, alone.probabilities, atol=1e-6, rtol=0)
        assert text[second.source_spans[-1][0] : second.source_spans[-1][1]] in ("ca\u2060b", "b")


def test_a_kept_text_is_aligned_with_itself() -> None:
    for text in ("42", "★" * 5000, ""):
        found = identity(text, 7)
        assert [text[slice(*span)] for span in found.target_spans] == found.target == found.source
        assert [(start - 7, end - 7) for start, end in found.source_spans] == found.target_spans
        assert torch.equal(found.probabilities, torch.eye(len(found.target))) and len(found.target) <= 256


def test_each_thread_is_ended_by_its_own_check() -> None:
    def end() -> None:
        raise TimeoutError

    with ended_by(end), ThreadPoolExecutor(1) as threads:
        with pytest.raises(TimeoutError):
            end_if_over()
        threads.submit(end_if_over).result()
        with ended_by(lambda: None):
            end_if_over()
        with pytest.raises(TimeoutError):
            end_if_over()
    end_if_over()
