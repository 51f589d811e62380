"""What each objective gives a model to read and to predict."""

import random

import pytest
import torch

from hf_vaswani.data.batching import PairCollator
from hf_vaswani.data.objectives import (
    BlockText,
    CausalLM,
    Denoise,
    MaskedLM,
    NextSentence,
    ObjectiveSettings,
    SpanCorruption,
    word_beginnings,
)
from hf_vaswani.data.tokenizer import train_tokenizer

BOS, EOS, MASK = 1, 2, 3
SENTINELS = list(range(900, 950))


def block(start: int, *lines: int, document: int = 0, **more) -> BlockText:
    """A block of lines with these lengths, whose tokens count up."""
    ends = [sum(lines[: i + 1]) for i in range(len(lines))]
    ids = list(range(start, start + ends[-1]))
    return BlockText(ids, ends, more.pop("documents", [len(ids)]), document=(0, document), **more)


def chances(texts: list[BlockText], seed: int = 0) -> list[random.Random]:
    return [random.Random(f"{seed} {i}") for i in range(len(texts))]


def rows(objective, texts: list[BlockText], seed: int = 0) -> list[dict]:
    return objective.rows(texts, chances(texts, seed))


def masked(kind: type[MaskedLM], longest: int, rate: float = 0.15) -> MaskedLM:
    return kind(rate, MASK, [500, 501], None, BOS, EOS, longest)


def test_causal_lm_predicts_each_token_of_each_document() -> None:
    text = block(10, 3, 2, 2, documents=[5, 7], is_complete=False)
    (row,) = rows(CausalLM(BOS, EOS), [text])
    # The second document goes on in another block.
    assert row["source_ids"] == [BOS, 10, 11, 12, 13, 14, EOS, BOS, 15, 16]
    assert row["target_ids"] == [-100, 10, 11, 12, 13, 14, EOS, -100, 15, 16]
    assert row["positions"] == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    text.is_complete = True
    assert rows(CausalLM(BOS, EOS), [text])[0]["source_ids"][-1] == EOS


def test_masked_lm_predicts_the_masked() -> None:
    text = block(10, 60, 40)
    (row,) = rows(masked(MaskedLM, 200), [text])
    source, target = row["source_ids"], row["target_ids"]
    assert (source[0], source[-1], target[0], target[-1]) == (BOS, EOS, -100, -100)
    predicted = [i for i, label in enumerate(target) if label != -100]
    assert len(predicted) == 15 and len(source) == len(target) == 102
    assert all(target[i] == text.ids[i - 1] for i in predicted)
    assert rows(masked(MaskedLM, 200, 0.4), [text])[0]["target_ids"].count(-100) == 62


def test_next_sentence_takes_half_from_other_documents() -> None:
    objective = masked(NextSentence, 33)
    texts = [block(1000 * i, 10, 10, 10, document=i // 2) for i in range(40)]
    found = [row for seed in range(10) for row in rows(objective, texts, seed)]
    assert sum(row["next_sentence"] for row in found) == pytest.approx(200, abs=40)
    for i, row in enumerate(found):
        text = texts[i % 40]
        true = [
            label if label != -100 else token
            for token, label in zip(row["source_ids"], row["target_ids"], strict=True)
        ]
        cut = row["segments"].index(1)
        first, second = true[1 : cut - 1], true[cut:-1]
        assert (true[0], true[cut - 1], true[-1]) == (BOS, EOS, EOS)
        assert row["segments"] == [0] * cut + [1] * (len(true) - cut)
        assert first in (text.ids[:10], text.ids[:20]) and len(second) > 0 and len(true) <= 33
        other = {token // 1000 // 2 for token in second}
        assert len(other) == 1 and (other == {i % 40 // 2}) == (row["next_sentence"] == 0)
        if not row["next_sentence"]:
            assert first + second == text.ids
        # `</s>` and `<s>` are never predicted.
        assert row["target_ids"][0] == row["target_ids"][cut - 1] == row["target_ids"][-1] == -100


@pytest.mark.slow
def test_another_document_is_found_in_one_pass() -> None:
    """A long document among the blocks of a window is not searched anew for each of its blocks."""
    texts = [block(10, 2, 2, document=0) for _ in range(20_000)] + [block(5000, 2, 2, document=1)]
    found = rows(masked(NextSentence, 30), texts)
    assert sum(row["next_sentence"] for row in found) > 9000


def test_the_only_document_continues_itself() -> None:
    texts = [block(100 * i, 10, 10) for i in range(5)]
    assert {row["next_sentence"] for row in rows(masked(NextSentence, 30), texts)} == {0}
    # A single line is cut in its middle.
    (row,) = rows(masked(NextSentence, 30), [block(10, 7)])
    assert row["segments"] == [0] * 6 + [1] * 4


def test_span_corruption_is_t5_s() -> None:
    text = block(10, 60, 40, tag=7)
    (row,) = rows(SpanCorruption(0.15, 3.0, SENTINELS, EOS), [text])
    source, target = row["source_ids"], row["target_ids"]
    assert source[0] == 7 and source[-1] == target[-1] == EOS
    assert len(target) == 15 + 5 + 1 + 1 and len(source) == 1 + 85 + 5 + 1
    assert sorted(token for token in source + target if token not in (*SENTINELS, 7, EOS)) == text.ids


@pytest.mark.parametrize("noise", [["infilling"], ["permutation"], ["fragment"], ["permutation", "infilling"]])
def test_denoise_restores_the_text(noise) -> None:
    text = block(10, 20, 30, 50, tag=7)
    (row,) = rows(Denoise(ObjectiveSettings("denoise", 512, noise=noise), MASK, EOS), [text])
    assert row["target_ids"] == [*text.ids, EOS]
    source = row["source_ids"]
    assert source[0] == 7 and source[-1] == EOS
    kept = [token for token in source[1:-1] if token != MASK]
    masked = {"infilling": 30, "fragment": 50}
    assert len(kept) == 100 - sum(masked.get(name, 0) for name in noise)
    assert (kept == sorted(kept)) == ("permutation" not in noise)


def test_the_collator_pads_all_columns() -> None:
    causal = rows(CausalLM(BOS, EOS), [block(10, 3, 2, documents=[3, 5]), block(20, 2)])
    batch = PairCollator(0, CausalLM.columns)([row | {"number": i} for i, row in enumerate(causal)])
    assert "attention_mask" not in batch
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 0, 0, 0, 0, 0]]
    assert batch["labels"][1].tolist() == [-100, 20, 21, EOS, -100, -100, -100, -100, -100]
    pairs = rows(masked(NextSentence, 30), [block(10, 7), block(30, 3)])
    batch = PairCollator(0, NextSentence.columns)([row | {"number": i} for i, row in enumerate(pairs)])
    assert batch["token_type_ids"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["token_type_ids"][1].tolist()[-4:] == [0, 0, 0, 0]
    assert torch.equal(batch["next_sentence_label"], torch.zeros(2, dtype=torch.long))
    # A process without a batch gets a row of padding, which asks for nothing.
    empty = PairCollator(0, NextSentence.columns)([])
    assert all(tensor.dtype == torch.long for tensor in empty.values())
    assert {name: values.tolist() for name, values in empty.items()} == {
        "input_ids": [[0]],
        "attention_mask": [[1]],
        "labels": [[-100]],
        "numbers": [],
        "token_type_ids": [[0]],
        "next_sentence_label": [-100],
    }


# ---- The vocabulary


def settings(task: str) -> ObjectiveSettings:
    return ObjectiveSettings(task, 512)


def test_each_task_names_its_entries() -> None:
    assert settings("causal_lm").extra_tokens() == []
    assert settings("masked_lm").extra_tokens() == settings("denoise").extra_tokens() == ["<mask>"]
    # 512 tokens have at most round(512 x 0.15 / 3) = 26 spans.
    sentinels = settings("span_corruption").extra_tokens()
    assert (sentinels[0], sentinels[-1], len(sentinels)) == ("<extra_0>", "<extra_27>", 28)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "words", "characters", "bytes"])
def test_words_begin_at_a_space(kind) -> None:
    tokenizer = train_tokenizer(["one two three four five"] * 5, vocab_size=280 if kind == "bpe" else 60, kind=kind)
    begins = word_beginnings(tokenizer)
    ids = tokenizer("two three one")["input_ids"][:-1]
    text = "two three one" if kind in ("characters", "bytes") else " two three one"
    words = [i for i in range(len(ids)) if begins[ids[i]]]
    starts = [i for i, character in enumerate(text) if character == " "]
    assert len(words) == len(starts)
    assert len("".join(tokenizer.convert_ids_to_tokens(ids[: words[1]]))) >= starts[1] - starts[0]


@pytest.mark.parametrize("task", ["masked_lm", "denoise", "span_corruption"])
def test_a_vocabulary_without_the_entries_is_refused(task) -> None:
    tokenizer = train_tokenizer(["one two"], vocab_size=280)
    with pytest.raises(ValueError, match=f"task '{task}' needs <(mask|extra_0)> in the vocabulary"):
        settings(task).build(tokenizer)
    tokenizer.add_tokens(settings(task).extra_tokens())
    assert settings(task).build(tokenizer).rows([block(10, 20)], [random.Random(0)])


def test_special_tokens_are_no_replacements() -> None:
    tokenizer = train_tokenizer(["one two"], vocab_size=280, languages=["es"])
    tokenizer.add_tokens(["<mask>"])
    objective = settings("masked_lm").build(tokenizer)
    assert not {0, 1, 2, 3, len(tokenizer) - 1, len(tokenizer) - 2} & set(objective.replacements)
    assert len(objective.replacements) == len(tokenizer) - 6
