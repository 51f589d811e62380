"""The noise of pre-training: shares, lengths, what is asked for, and that nothing is lost."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from hf_vaswani.data.noise import corrupted_spans, infilled, masked_fragment, masked_tokens, reordered

MASK, SENTINELS = 3, list(range(900, 1000))
TEXT = list(range(10, 110))


def test_bert_masks_replaces_and_keeps() -> None:
    replacements = list(range(500, 600))
    counts, total = Counter(), 0
    for seed in range(300):
        inputs, labels = masked_tokens(TEXT, 0.15, MASK, replacements, random.Random(seed))
        predicted = [i for i, label in enumerate(labels) if label != -100]
        assert len(predicted) == 15 and len(inputs) == len(labels) == len(TEXT)
        assert all(labels[i] == TEXT[i] for i in predicted)
        assert all(inputs[i] == TEXT[i] for i in range(len(TEXT)) if labels[i] == -100)
        total += len(predicted)
        for i in predicted:
            counts["mask" if inputs[i] == MASK else "kept" if inputs[i] == TEXT[i] else "replaced"] += 1
            assert inputs[i] in (MASK, TEXT[i]) or inputs[i] in replacements
    shares = {name: count / total for name, count in counts.items()}
    assert shares == pytest.approx({"mask": 0.8, "replaced": 0.1, "kept": 0.1}, abs=0.02)


def test_every_token_is_predicted_as_often() -> None:
    counts = Counter()
    for seed in range(2000):
        _, labels = masked_tokens(range(20), 0.15, MASK, [7], random.Random(seed))
        counts.update(i for i, label in enumerate(labels) if label != -100)
    assert min(counts.values()) > 200 and max(counts.values()) < 400


def test_whole_words_are_predicted_whole() -> None:
    begins = [i % 3 == 0 or i == 50 for i in range(100)]
    for seed in range(50):
        _, labels = masked_tokens(TEXT, 0.15, MASK, [7], random.Random(seed), begins)
        predicted = {i for i, label in enumerate(labels) if label != -100}
        assert 0 < len(predicted) <= 15
        for i in predicted:
            start = max(j for j in range(i + 1) if begins[j])
            end = next((j for j in range(i + 1, 100) if begins[j]), 100)
            assert set(range(start, end)) <= predicted


def test_a_text_of_one_token_has_one_label() -> None:
    for words in (None, [False], [True]):
        assert masked_tokens([42], 0.15, MASK, [7], random.Random(0), words)[1] == [42]


def restored(source: list[int], target: list[int]) -> list[int]:
    """Puts the spans of a target back where their sentinels are in the source."""
    spans, current = {}, None
    for token in target:
        if token in SENTINELS:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [piece for token in source for piece in (spans[token] if token in SENTINELS else [token])]


@pytest.mark.parametrize("length", [2, 3, 7, 100])
def test_t5_asks_for_what_is_missing(length) -> None:
    for seed in range(50):
        source, target = corrupted_spans(TEXT[:length], 0.15, 3.0, SENTINELS, random.Random(seed))
        assert restored(source, target) == TEXT[:length]
        noise = max(1, round(0.15 * length))
        spans = max(1, round(noise / 3))
        # The sentinels in order, and one more at the end.
        assert [token for token in source if token in SENTINELS] == SENTINELS[:spans]
        assert [token for token in target if token in SENTINELS] == SENTINELS[: spans + 1]
        assert target[0] == SENTINELS[0] and target[-1] == SENTINELS[spans]
        assert len(target) == noise + spans + 1 and len(source) == length - noise + spans
        assert source[0] not in SENTINELS


def test_t5_never_has_more_spans_than_sentinels() -> None:
    source, target = corrupted_spans(TEXT, 0.5, 1.0, SENTINELS[:4], random.Random(0))
    assert [token for token in source if token in SENTINELS] == SENTINELS[:3]
    assert restored(source, target) == TEXT
    assert corrupted_spans([42], 0.15, 3.0, SENTINELS, random.Random(0)) == ([42], [SENTINELS[0]])


def test_every_cut_is_as_likely() -> None:
    counts = Counter()
    for seed in range(3000):
        source, _ = corrupted_spans(range(10, 16), 0.5, 1.5, SENTINELS, random.Random(seed))
        counts[tuple(source)] += 1
    # Two spans of 1 and 2 tokens, behind 1 and 2 tokens: two ways each.
    assert len(counts) == 4 and min(counts.values()) > 600


def test_bart_replaces_spans_by_single_masks() -> None:
    lengths, zeros = [], 0
    for seed in range(300):
        noisy = infilled(TEXT, 0.3, 3.0, MASK, random.Random(seed))
        kept = [token for token in noisy if token != MASK]
        assert len(kept) == 70 and kept == sorted(kept)
        # No two masks are neighbours, so each mask is one span.
        assert all(MASK not in pair or pair[0] != pair[1] for pair in pairwise(noisy))
        bounded = [9, *noisy, 110]
        for i, token in enumerate(bounded):
            if token == MASK:
                lengths.append(bounded[i + 1] - bounded[i - 1] - 1)
        zeros += sum(length == 0 for length in lengths[-noisy.count(MASK) :])
    assert zeros > 0
    assert sum(lengths) / len(lengths) == pytest.approx(3, abs=0.3)


def test_bart_makes_no_text_longer_than_a_block_has_room_for() -> None:
    for seed in range(50):
        for mean in (1.0, 1.1):
            noisy = infilled(range(10, 210), 0.3, mean, MASK, random.Random(seed))
            assert len(noisy) <= 201 and len([token for token in noisy if token != MASK]) == 140


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_bart_copes_with_short_texts(length, rate) -> None:
    for seed in range(50):
        noisy = infilled(TEXT[:length], rate, 3.0, MASK, random.Random(seed))
        kept = [token for token in noisy if token != MASK]
        assert len(kept) == length - round(rate * length)
        assert noisy or not length


def test_mass_masks_one_fragment() -> None:
    starts = set()
    for seed in range(300):
        noisy = masked_fragment(TEXT[:10], 0.5, MASK, random.Random(seed))
        places = [i for i, token in enumerate(noisy) if token == MASK]
        assert places == list(range(places[0], places[0] + 5)) and len(noisy) == 10
        starts.add(places[0])
    assert starts == set(range(6))
    assert masked_fragment([42], 0.5, MASK, random.Random(0)) == [MASK]


def test_sentences_change_places() -> None:
    ends, orders = [2, 3, 6], set()
    for seed in range(100):
        shuffled = reordered(TEXT[:6], ends, random.Random(seed))
        assert sorted(shuffled) == TEXT[:6]
        orders.add(tuple(shuffled))
    assert len(orders) == 6 and (12, 10, 11, 13, 14, 15) in orders


def test_the_same_chance_makes_the_same_noise() -> None:
    for noise in (
        lambda chance: masked_tokens(TEXT, 0.15, MASK, [7, 8], chance),
        lambda chance: corrupted_spans(TEXT, 0.15, 3.0, SENTINELS, chance),
        lambda chance: infilled(TEXT, 0.3, 3.0, MASK, chance),
        lambda chance: masked_fragment(TEXT, 0.5, MASK, chance),
        lambda chance: reordered(TEXT, range(10, 101, 10), chance),
    ):
        assert noise(random.Random(1)) == noise(random.Random(1)) != noise(random.Random(2))
