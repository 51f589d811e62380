"""No pair is lost or repeated, no batch exceeds its budget, and seeds fix the order; resumes are in test_windows."""

import itertools
import json
from typing import Any, cast

import numpy as np
import pytest
import torch

from hf_vaswani.data.batching import (
    BatchOrder,
    PairCollator,
    TokenBudgetBatchSampler,
    length_batches,
    lengths_fingerprint,
    rounded_up,
    to_device,
)
from hf_vaswani.data.tokenizer import train_tokenizer

LENGTHS = np.random.default_rng(0).integers(2, 40, size=(997, 2))


def flat(updates) -> list[int]:
    return [pair for update in updates for batch in update for pair in batch]


def test_length_batches_are_as_full_as_the_budget_allows() -> None:
    random = np.random.default_rng(2)
    for budget in (1, 7, 40, 300):
        lengths = np.sort(random.integers(1, 60, 200))
        batches, expected = length_batches(lengths, budget), [[0]]
        for i in range(1, len(lengths)):
            if (len(expected[-1]) + 1) * max(lengths[i], *lengths[expected[-1]]) <= budget:
                expected[-1].append(i)
            else:
                expected.append([i])
        assert [list(range(200))[batch] for batch in batches] == expected
    assert length_batches(np.array([]), 10) == []


def test_the_budget_holds_for_source_and_target_separately() -> None:
    """The paper's "25000 source tokens and 25000 target tokens": not their sum; padding is included."""
    batches = TokenBudgetBatchSampler(LENGTHS, BatchOrder(400)).batches()
    assert np.median([len(batch) * LENGTHS[batch].max() for batch in batches]) > 0.9 * 400
    padded = np.array([len(batch) * LENGTHS[batch].max(axis=0) for batch in batches])
    assert padded.max(axis=0).tolist() == pytest.approx([400, 400], rel=0.02)
    assert padded.max() <= 400
    assert padded.sum(axis=1).max() > 1.8 * 400


@pytest.mark.parametrize(
    ("key", "order"),
    [("model.max_position_embeddings", {"max_length": 30}), ("training.tokens_per_batch", {"tokens_per_batch": 30})],
)
def test_pairs_that_are_too_long_are_skipped_and_counted(key, order) -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, BatchOrder(**{"tokens_per_batch": 400} | order))
    short = np.flatnonzero(LENGTHS.max(axis=1) <= 30)
    assert sorted(flat(sampler.updates())) == short.tolist()
    assert sampler.skipped == len(LENGTHS) - len(short)
    with pytest.raises(ValueError, match=f"{key} 1: the shortest has {LENGTHS.max(axis=1).min()} tokens"):
        TokenBudgetBatchSampler(LENGTHS, BatchOrder(**{"tokens_per_batch": 400} | dict.fromkeys(order, 1)))
    with pytest.raises(ValueError, match="empty"):
        TokenBudgetBatchSampler(np.zeros((0, 2), dtype=int), BatchOrder(20))


def test_pairs_of_similar_length_share_a_batch() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, BatchOrder(400))
    longest = LENGTHS.max(axis=1)
    spans = [np.ptp(longest[batch]) for batch in sampler.batches()]
    assert np.mean(spans) < 1


def test_pairs_of_equal_longest_side_are_sorted_by_the_target_and_then_the_source() -> None:
    lengths = np.random.default_rng(2).integers(1, 9, (300, 2)).astype(np.int32)
    for batch in TokenBudgetBatchSampler(lengths, BatchOrder(40, 1)).batches():
        keys = [(max(source, target), target, source) for source, target in lengths[batch].tolist()]
        assert keys == sorted(keys)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed, epoch):
        sampler = TokenBudgetBatchSampler(LENGTHS, BatchOrder(200, seed=seed))
        sampler.set_position(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    # Epochs differ not only in the order of the batches, but also in their pairs.
    assert {tuple(sorted(batch)) for batch in order(1, 0)} != {tuple(sorted(batch)) for batch in order(1, 1)}


def test_batches_are_not_sorted_by_length() -> None:
    widths = [LENGTHS[batch].max() for batch in TokenBudgetBatchSampler(LENGTHS, BatchOrder(200)).batches()]
    steps_up = sum(a <= b for a, b in itertools.pairwise(widths)) / (len(widths) - 1)
    assert 0.3 < steps_up < 0.7


def test_collator_equals_a_slow_one() -> None:
    """Compares every cell, for lists and arrays of any length."""
    random = np.random.default_rng(1)
    for _ in range(20):
        pairs = [
            {"source_ids": random.integers(4, 99, s, np.int32), "target_ids": random.integers(4, 99, t).tolist()}
            | {"number": number}
            for number, (s, t) in enumerate(random.integers(1, 9, (5, 2)), start=1)
        ]
        batch = PairCollator(7)(pairs)
        for name, side, filling in (("input_ids", "source_ids", 7), ("labels", "target_ids", -100)):
            assert batch[name].shape == (5, max(len(pair[side]) for pair in pairs))
            for row, pair in zip(batch[name].tolist(), pairs, strict=True):
                assert row == [*pair[side], *[filling] * (len(row) - len(pair[side]))]
        for row, pair in zip(batch["attention_mask"].tolist(), pairs, strict=True):
            assert row == [int(place < len(pair["source_ids"])) for place in range(len(row))]
        assert batch["numbers"].tolist() == [1, 2, 3, 4, 5]
        assert all(tensor.dtype == torch.long for tensor in batch.values())


def test_batches_go_to_a_gpu_from_pinned_memory_without_waiting() -> None:
    """And to other devices as they are: only CUDA reads pinned memory by itself."""
    calls: list[Any] = []

    class Part:
        def pin_memory(self) -> "Part":
            calls.append("pinned")
            return self

        def to(self, device: torch.device, non_blocking: bool = False) -> str:
            calls.append((device.type, non_blocking))
            return "there"

    for name in ("cuda", "cpu", "xpu"):
        assert to_device([{"labels": cast(Any, Part())}], torch.device(name)) == [{"labels": "there"}]
    assert calls == ["pinned", ("cuda", True), ("cpu", False), ("xpu", False)]


# ---- Few shapes --------------------------------------------------------------------------------------------------


def test_numbers_are_rounded_up_to_eight_in_each_octave() -> None:
    numbers = range(1, 4097)
    found = [rounded_up(number) for number in numbers]
    assert all(number <= up <= max(number, 9 / 8 * number) for number, up in zip(numbers, found, strict=True))
    assert len(set(found)) == 16 + 8 * 8
    widths = [rounded_up(number, 8) for number in numbers]
    assert all(
        up % 8 == 0 and number <= up <= max(number + 7, 9 / 8 * number)
        for number, up in zip(numbers, widths, strict=True)
    )
    assert [rounded_up(number, 8) for number in (1, 8, 9, 64, 65, 128, 129, 512, 513)] == [
        *(8, 8, 16, 64, 72, 128, 144, 512, 576)
    ]


def test_few_shapes_change_the_padding_and_no_batch() -> None:
    """A run may go on with the same pairs on another device. The shapes that are reported are those that are made."""
    plain, few = (TokenBudgetBatchSampler(LENGTHS, BatchOrder(300, few_shapes=few)) for few in (False, True))
    shapes: list[set[tuple[int, ...]]] = []
    for sampler in (plain, few):
        collator, tokens, cells = PairCollator(0, order=sampler.order), 0, 0
        shapes.append(set())
        sampler.set_position(1)
        for batch in sampler:
            made = collator([{"source_ids": [5] * s, "target_ids": [5] * t, "number": 1} for s, t in LENGTHS[batch]])
            tokens += int(LENGTHS[batch].sum())
            cells += made["input_ids"].numel() + made["labels"].numel()
            shapes[-1].add((*made["input_ids"].shape, made["labels"].shape[1]))
        share, count = sampler.report_padding()
        assert share == pytest.approx(1 - tokens / cells) and count == len(shapes[-1])
    assert list(plain) == list(few)
    assert len(shapes[1]) < len(shapes[0]) / 2
    assert all(source % 8 == target % 8 == 0 for _, source, target in shapes[1])


def test_rows_and_columns_of_padding_have_no_labels_and_something_to_attend_to() -> None:
    random = np.random.default_rng(3)
    lengths = np.arange(17) % 9 + 2
    pairs = [
        {"source_ids": random.integers(4, 99, length), "target_ids": random.integers(4, 99, length), "number": i}
        | {"segments": [1] * length, "positions": range(length), "next_sentence": i % 2}
        for i, length in enumerate(lengths)
    ]
    columns = ("segments", "next_sentence")
    plain, few = PairCollator(7, columns), PairCollator(7, columns, BatchOrder(99, few_shapes=True))
    ours, theirs = few(pairs), plain(pairs)
    assert ours["input_ids"].shape == ours["labels"].shape == ours["token_type_ids"].shape == (18, 16)
    assert ours.keys() == theirs.keys() and torch.equal(ours["numbers"], theirs["numbers"])
    fillings = {"input_ids": 7, "attention_mask": 0, "labels": -100, "token_type_ids": 0, "next_sentence_label": -100}
    for name, filling in fillings.items():
        rest = ours[name].clone()
        rest[: len(pairs), *([slice(10)] if rest.dim() == 2 else [])] -= theirs[name] - filling
        if name == "attention_mask":
            assert rest[17].tolist() == [1] + [0] * 15
            rest[17] = 0
        assert (rest == filling).all()
    packed = PairCollator(7, ["positions"], few.order)(pairs)
    assert packed["position_ids"].shape == (18, 16) and not packed["position_ids"][17].any()
    assert PairCollator(7, ["label"], few.order)(pairs)["labels"].tolist()[17:] == [-100]
    # A process without a batch.
    assert {name: tuple(part.shape) for name, part in few([]).items()} == dict.fromkeys(fillings, (1, 8)) | {
        "numbers": (0,),
        "next_sentence_label": (1,),
    }


def test_learned_positions_are_not_exceeded_by_padding() -> None:
    pairs = [{"source_ids": [5] * 9, "target_ids": [5] * 9, "number": 1}]
    widths = {
        limit: PairCollator(0, order=BatchOrder(99, max_length=limit, few_shapes=True))(pairs)["labels"].shape[1]
        for limit in (None, 9, 12, 16, 20)
    }
    assert widths == {None: 16, 9: 9, 12: 12, 16: 16, 20: 16}


def test_the_fingerprint_is_that_of_the_text() -> None:
    def of(lengths: np.ndarray) -> dict[str, object]:
        return lengths_fingerprint(lengths)

    assert json.loads(json.dumps(of(LENGTHS))) == of(LENGTHS.copy())
    assert of(LENGTHS)["pairs"] == 997
    # The same number of tokens in another order.
    assert of(LENGTHS) != of(LENGTHS[::-1].copy())


def test_weights_repeat_or_sample_pairs() -> None:
    taken = []
    for epoch in (0, 1):
        sampler = TokenBudgetBatchSampler(LENGTHS, BatchOrder(400, max_length=30), [(400, 2), (597, 0.25)])
        sampler.set_position(epoch)
        taken.append(np.bincount(flat(sampler.updates()), minlength=997))
        fitting = LENGTHS.max(axis=1) <= 30
        assert (taken[-1][:400] == 2 * fitting[:400]).all()
        assert taken[-1][400:].sum() == round(0.25 * fitting[400:].sum())
        assert (taken[-1][400:] <= fitting[400:]).all()
    assert (taken[0] != taken[1]).any()


@pytest.mark.real_data
@pytest.mark.slow
def test_little_padding_on_multi30k(multi30k) -> None:
    """At most 5 % of all positions of both sides are padding, with a joint vocabulary of 10,000."""
    sides = [(multi30k / f"train.{side}").read_text("utf-8").splitlines() for side in ("en", "de")]
    tokenizer = train_tokenizer(itertools.chain(*sides), 10_000)
    lengths = np.array([[len(ids) for ids in tokenizer(side)["input_ids"]] for side in sides]).T
    sampler = TokenBudgetBatchSampler(lengths, BatchOrder(4096))
    for epoch in (0, 1):
        sampler.set_position(epoch)
        cells = sum(len(batch) * lengths[batch].max(axis=0).sum() for batch in sampler.batches())
        assert 1 - lengths.sum() / cells <= 0.05


def test_the_last_update_of_an_epoch_may_have_fewer_batches() -> None:
    count = len(TokenBudgetBatchSampler(LENGTHS, BatchOrder(200)).batches())
    for per_update in (2, 3, 4, 5):
        sampler = TokenBudgetBatchSampler(LENGTHS, BatchOrder(200, batches_per_update=per_update))
        assert [len(share) for share in sampler.updates()] == [
            min(per_update, count - n) for n in range(0, count, per_update)
        ]
        assert sorted(flat(sampler.updates())) == list(range(997))
