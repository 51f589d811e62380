"""No pair lost or doubled, no batch above its budget, the same order for the same seed, and each process its share."""

import itertools

import numpy as np
import pytest
import torch

from hf_vaswani.batching import PairCollator, TokenBudgetBatchSampler

LENGTHS = np.random.default_rng(0).integers(2, 40, size=(997, 2))


def flat(updates) -> list[int]:
    return [pair for update in updates for batch in update for pair in batch]


def test_every_pair_exactly_once_an_epoch() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 200)
    assert sorted(flat(sampler.updates())) == list(range(997))


def test_no_batch_is_above_the_budget_and_most_are_nearly_full() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 400)
    cells = [len(batch) * LENGTHS[batch].max() for batch in sampler.batches()]
    assert max(cells) <= 400
    assert np.median(cells) > 0.9 * 400


def test_pairs_above_the_longest_side_are_left_out() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 400, max_length=30)
    short = np.flatnonzero(LENGTHS.max(axis=1) <= 30)
    assert sorted(flat(sampler.updates())) == short.tolist()
    assert sampler.skipped == len(LENGTHS) - len(short)
    with pytest.raises(ValueError, match="model.max_position_embeddings 1: the shortest has"):
        TokenBudgetBatchSampler(LENGTHS, 400, max_length=1)


def test_source_and_target_are_counted_each_for_itself() -> None:
    """The paper's "25000 source tokens and 25000 target tokens": not their sum, and padding counts on both sides."""
    batches = TokenBudgetBatchSampler(LENGTHS, 400).batches()
    padded = np.array([len(batch) * LENGTHS[batch].max(axis=0) for batch in batches])
    assert padded.max(axis=0).tolist() == pytest.approx([400, 400], rel=0.02)
    assert padded.max() <= 400
    assert padded.sum(axis=1).max() > 1.8 * 400


def test_pairs_of_like_length_are_together() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 400)
    longest = LENGTHS.max(axis=1)
    spans = [np.ptp(longest[batch]) for batch in sampler.batches()]
    assert np.mean(spans) < 1


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed, epoch):
        sampler = TokenBudgetBatchSampler(LENGTHS, 200, seed=seed)
        sampler.set_position(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    # Not only the batches' order differs between epochs, but also who is in them.
    assert {tuple(sorted(batch)) for batch in order(1, 0)} != {tuple(sorted(batch)) for batch in order(1, 1)}


def test_batches_do_not_come_in_the_order_of_their_lengths() -> None:
    widths = [LENGTHS[batch].max() for batch in TokenBudgetBatchSampler(LENGTHS, 200).batches()]
    steps_up = sum(a <= b for a, b in itertools.pairwise(widths)) / (len(widths) - 1)
    assert 0.3 < steps_up < 0.7


def test_a_position_continues_where_the_epoch_was_left() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 200, batches_per_update=3)
    whole, counts = list(sampler), sampler.batches_of_updates()
    sampler.set_position(0, 5)
    assert list(sampler) == whole[sum(counts[:5]) :]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_an_update_among_them(processes, accumulation) -> None:
    alone = TokenBudgetBatchSampler(LENGTHS, 200, batches_per_update=accumulation * processes).updates()
    shares = [
        TokenBudgetBatchSampler(LENGTHS, 200, 1, accumulation, processes, process).updates()
        for process in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1
    for update, parts in zip(alone, zip(*shares, strict=True), strict=True):
        assert len({len(part) for part in parts}) == 1
        assert sorted(flat([update])) == sorted(flat(parts))


def test_pairs_above_the_budget_are_left_out_and_counted() -> None:
    lengths = np.array([[3, 4], [50, 2], [5, 5], [2, 51]])
    sampler = TokenBudgetBatchSampler(lengths, 20)
    assert sampler.skipped == 2
    assert sorted(flat(sampler.updates())) == [0, 2]


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TokenBudgetBatchSampler(np.zeros((0, 2), dtype=int), 20)
    with pytest.raises(ValueError, match="20.*50"):
        TokenBudgetBatchSampler(np.array([[50, 60], [50, 3]]), 20)


def test_collator_pads_each_side_to_its_own_width() -> None:
    batch = PairCollator(0)(
        [{"source_ids": [5, 2], "target_ids": [7, 8, 2]}, {"source_ids": [5, 6, 9, 2], "target_ids": [2]}]
    )
    assert batch["input_ids"].tolist() == [[5, 2, 0, 0], [5, 6, 9, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[7, 8, 2], [2, -100, -100]]


def test_collator_of_nothing_has_nothing_to_learn() -> None:
    batch = PairCollator(0)([])
    assert (batch["labels"] == -100).all()
    assert all(tensor.shape == (1, 1) and tensor.dtype == torch.long for tensor in batch.values())


@pytest.mark.real_data
def test_little_padding_on_multi30k(multi30k) -> None:
    sides = [
        [len(line.split()) + 1 for line in (multi30k / f"train.{side}").read_text("utf-8").splitlines()]
        for side in ("en", "de")
    ]
    lengths = np.array(sides).T
    batches = TokenBudgetBatchSampler(lengths, 4096).batches()
    cells = sum(len(batch) * lengths[batch].max(axis=0).sum() for batch in batches)
    assert lengths.sum() / cells > 0.95
