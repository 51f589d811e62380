"""Epochs with new ids have the pairs of epochs without, in the same batches for any processes, workers and resumes."""

import json
from itertools import islice
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_vaswani.data.batching import BatchOrder, EpochUpdates, PairCollator, TokenBudgetBatchSampler
from hf_vaswani.data.encoding import EncodedRows, encode_pairs, pair_lengths
from hf_vaswani.data.renewal import Renewal
from hf_vaswani.data.renewed_epochs import RenewedUpdates, RowEncoder
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.recipe import AugmentRecipe

WORDS = "lower newer wider lowest newest widest slower".split()
AUGMENT = AugmentRecipe(upper=0.1, typos=0.3, no_final_mark=0.3)


def lines(count: int) -> list[str]:
    return [" ".join(WORDS[digit % 7] for digit in range(1 + i * 7 % 11)) + "." for i in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(lines(20), 300, languages=["de"])


def build(
    tokenizer,
    count: int = 90,
    size: int = 40,
    workers: int = 0,
    weight: float = 1.0,
    empty: tuple[int, ...] = (),
    **order: Any,
) -> RenewedUpdates:
    sources = ["" if number in empty else line for number, line in enumerate(lines(count), start=1)]
    pairs = Dataset.from_dict({"source": sources, "target": lines(count)[::-1]})
    encoded = encode_pairs(pairs, tokenizer, "<2de>")
    settings = BatchOrder(**{"tokens_per_batch": 200} | order)
    sampler = TokenBudgetBatchSampler(pair_lengths(encoded), settings, [(len(encoded), weight)])
    renewal = Renewal(tokenizer, settings.seed, AUGMENT, bpe_dropout=0.2)
    encoder = RowEncoder(tokenizer, renewal, [(pairs, "<2de>")])
    numbers = encoded.with_format("numpy")["number"][:]
    return RenewedUpdates(encoder, numbers, sampler, size, PairCollator(0), workers)


def epoch(updates: RenewedUpdates, position: dict[str, Any] | None = None) -> list[tuple[list, dict]]:
    """Returns the updates until the next epoch starts."""
    made = []
    for batches, reached in updates.after(position or updates.start):
        made.append((batches, reached))
        if reached["update"] == reached["window"] == 0:
            return made
    raise AssertionError("The epoch does not end.")


def pairs_of(made: list[tuple[list, dict]]) -> dict[int, list[tuple[list[int], list[int]]]]:
    """Returns the ids of both sides by the number of a pair."""
    found: dict[int, list[tuple[list[int], list[int]]]] = {}
    for batches, _ in made:
        for batch in batches:
            sides = (batch["input_ids"], batch["attention_mask"]), (batch["labels"], batch["labels"] != -100)
            for row, number in enumerate(batch["numbers"].tolist()):
                found.setdefault(number, []).append(tuple(ids[row][mask[row] > 0].tolist() for ids, mask in sides))
    return found


def equal(first: list, second: list) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("size", [40, 45, 89, 1000])
def test_an_epoch_has_every_pair_once_with_new_ids(tokenizer, size) -> None:
    updates = build(tokenizer, size=size, empty=(5, 60))
    first = epoch(updates)
    second = epoch(updates, first[-1][1])
    assert first[-1][1] == {"epoch": 1, "window": 0, "update": 0} and second[-1][1]["epoch"] == 2
    ids, again = pairs_of(first), pairs_of(second)
    assert sorted(ids) == sorted(again) == sorted(set(range(1, 91)) - {5, 60})
    assert {len(each) for each in (*ids.values(), *again.values())} == {1}
    assert sum(ids[number] != again[number] for number in ids) > 60
    assert list(ids) != list(again) != sorted(again)
    # The tag is in front of each source.
    tag = tokenizer.convert_tokens_to_ids("<2de>")
    assert all(source[0] == tag for ((source, _),) in ids.values())


def test_what_happens_to_a_pair_does_not_depend_on_windows_or_budget(tokenizer) -> None:
    one = pairs_of(epoch(build(tokenizer)))
    assert one == pairs_of(epoch(build(tokenizer, size=17, tokens_per_batch=300)))
    assert one != pairs_of(epoch(build(tokenizer, seed=2)))


def test_batches_keep_to_the_budget_by_their_new_lengths(tokenizer) -> None:
    for batches, _ in epoch(build(tokenizer)):
        for batch in batches:
            assert max(batch["input_ids"].numel(), batch["labels"].numel()) <= 200


def test_a_pair_that_becomes_too_long_is_skipped_in_that_epoch(tokenizer, caplog) -> None:
    plain = build(tokenizer)
    limit = int(plain.sampler.longest.max())
    updates = build(tokenizer, max_length=limit)
    made = [set(pairs_of(epoch(updates, {"epoch": i, "window": 0, "update": 0}))) for i in range(3)]
    assert all(len(numbers) < 90 for numbers in made) and made[0] != made[1]
    assert set.union(*made) > made[0]
    (warning, *_) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"with a side above {limit} tokens (model.max_position_embeddings)" in warning


@pytest.mark.parametrize(("weight", "often"), [(2, 180), (0.5, 45), (1.5, 135)])
def test_a_repeated_pair_is_altered_anew_each_time(tokenizer, weight, often) -> None:
    updates = build(tokenizer, weight=weight)
    first = epoch(updates)
    ids = pairs_of(first)
    assert sum(map(len, ids.values())) == often
    assert set(map(len, ids.values())) == {2: {2}, 0.5: {1}, 1.5: {1, 2}}[weight]
    if weight > 1:
        repeated = [each for each in ids.values() if len(each) > 1]
        assert sum(each[0] != each[1] for each in repeated) > 0.5 * len(repeated)
        following = pairs_of(epoch(updates, first[-1][1]))
        assert sum(each in following[number] for number in following for each in ids[number]) < 0.6 * often


@pytest.mark.parametrize("workers", [0, 2])
def test_every_position_resumes_exactly(tokenizer, workers) -> None:
    updates = build(tokenizer, batches_per_update=2)
    length = len(epoch(updates))
    made = list(islice(updates.after(updates.start), length + 4))
    # Only a few positions with workers, which are slow to start.
    for number in range(length + 2) if not workers else (1, length - 1, length):
        # A fresh process reads the position from a file.
        position = json.loads(json.dumps(made[number][1]))
        again = build(tokenizer, workers=workers, batches_per_update=2)
        for (batches, reached), (ours, where) in zip(again.after(position), made[number + 1 :], strict=False):
            assert equal(batches, ours)
            assert reached == where


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_updates_of_one(tokenizer, processes) -> None:
    alone = epoch(build(tokenizer, batches_per_update=processes))
    shares = [epoch(build(tokenizer, num_processes=processes, process_index=process)) for process in range(processes)]
    for (batches, reached), *parts in zip(alone, *shares, strict=True):
        assert all(where == reached for _, where in parts)
        theirs = [own[0] for own, _ in parts]
        assert equal(theirs[: len(batches)], batches)
        assert all((batch["labels"] == -100).all() for batch in theirs[len(batches) :])


def test_the_fingerprint_is_that_of_the_unaltered_text(tokenizer) -> None:
    updates = build(tokenizer)
    plain = EpochUpdates(EncodedRows(Dataset.from_dict({})), updates.sampler, PairCollator(0))
    assert updates.fingerprint == plain.fingerprint != build(tokenizer, count=89).fingerprint
