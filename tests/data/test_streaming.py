"""A pass over a stream has every pair once, for any number of processes, and resumes exactly where it stopped."""

import itertools
import json
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from hf_vaswani.data.batching import BatchOrder, PairCollator
from hf_vaswani.data.renewal import Renewal
from hf_vaswani.data.streaming import NUMBERS, Stream, StreamUpdates
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.data.windows import WindowEncoder
from hf_vaswani.recipe import AugmentRecipe

WORDS = "a b c d e f".split()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS)], 270, languages=["de", "fr"])


def stream(count: int, weight: float = 1.0, tag: str | None = None, empty: tuple[int, ...] = ()) -> Stream:
    """Makes pairs of different lengths; those numbered in `empty` have no source."""
    sides = [" ".join(WORDS[digit % 6] for digit in range(1 + number * 7 % 11)) for number in range(1, count + 1)]
    sources = ["" if number in empty else side for number, side in enumerate(sides, start=1)]
    rows = Dataset.from_dict({"source": sources, "target": sides[::-1]}).to_iterable_dataset()
    return Stream(rows, f"text of {count}", weight, tag, {"pairs": count})


def build(tokenizer, streams: list[Stream], size: int = 40, workers: int = 0, **order: Any) -> StreamUpdates:
    settings = BatchOrder(**{"tokens_per_batch": 60} | order)
    return StreamUpdates(streams, WindowEncoder(tokenizer), size, settings, PairCollator(0), workers)


def one_pass(updates: StreamUpdates, position: dict[str, Any] | None = None) -> list[tuple[list, dict]]:
    """Returns the updates until the first stream starts over."""
    made = []
    for batches, reached in updates.after(position or updates.start):
        made.append((batches, reached))
        if reached["update"] == 0 and reached["places"][0]["pairs"] == 0:
            return made
    raise AssertionError("The pass does not end.")


def numbers(made: list[tuple[list, dict]]) -> list[int]:
    return [number for batches, _ in made for batch in batches for number in batch["numbers"].tolist()]


def equal(first: list, second: list) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


# The last window is full, nearly full, or the only one.
@pytest.mark.parametrize(("count", "size"), [(120, 40), (119, 40), (121, 40), (30, 40)])
def test_a_pass_has_every_pair_once_and_passes_differ(tokenizer, count, size) -> None:
    updates = build(tokenizer, [stream(count)], size)
    first = one_pass(updates)
    second = one_pass(updates, first[-1][1])
    assert sorted(numbers(first)) == sorted(numbers(second)) == list(range(1, count + 1))
    assert numbers(first) != numbers(second)
    # Shuffled within each window, but not across windows.
    for start in range(0, count, size):
        window = numbers(first)[start : start + size]
        assert sorted(window) == list(range(start + 1, min(start + size, count) + 1))
        assert len(window) == 1 or window != sorted(window)


def test_pairs_keep_their_ids_and_numbers(tokenizer) -> None:
    text = stream(50, tag="<2de>", empty=(3, 41))
    lines = list(text.rows)
    for batches, _ in one_pass(build(tokenizer, [text])):
        for batch in batches:
            for row, number in enumerate(batch["numbers"].tolist()):
                line = lines[number - 1]
                source = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
                assert source == tokenizer(f"<2de> {line['source']}")["input_ids"]
                assert (
                    batch["labels"][row][batch["labels"][row] != -100].tolist()
                    == (tokenizer(line["target"])["input_ids"])
                )
    found = numbers(one_pass(build(tokenizer, [text])))
    assert sorted(found) == sorted(set(range(1, 51)) - {3, 41})


@pytest.mark.parametrize("workers", [0, 2])
def test_every_position_resumes_exactly(tokenizer, workers) -> None:
    """In the middle and at the end of a window, and at the end of a pass; the other stream ends elsewhere."""
    streams = [stream(90, tag="<2de>"), stream(25, weight=0.7, tag="<2fr>")]
    updates = build(tokenizer, streams, batches_per_update=2)
    length = len(one_pass(updates))
    made = list(itertools.islice(updates.after(updates.start), length + 4))
    assert {reached["update"] == 0 for _, reached in made} == {True, False}
    # Only a few positions with workers, which are slow to start.
    for number in range(length + 2) if not workers else (1, length - 1, length):
        # A fresh process reads the position from a file.
        position = json.loads(json.dumps(made[number][1]))
        again = build(tokenizer, streams, workers=workers, batches_per_update=2)
        for (batches, reached), (ours, where) in zip(again.after(position), made[number + 1 :], strict=False):
            assert equal(batches, ours)
            assert reached == where


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_updates_of_one(tokenizer, processes) -> None:
    streams = [stream(90), stream(60, weight=2.5)]
    alone = one_pass(build(tokenizer, streams, batches_per_update=processes))
    shares = [
        one_pass(build(tokenizer, streams, num_processes=processes, process_index=process))
        for process in range(processes)
    ]
    for (batches, reached), *parts in zip(alone, *shares, strict=True):
        assert all(where == reached for _, where in parts)
        assert all(len(own) == 1 for own, _ in parts)
        # Each process takes every n-th batch; one without a batch gets padding.
        theirs = [own[0] for own, _ in parts]
        assert equal(theirs[: len(batches)], batches)
        assert all((batch["labels"] == -100).all() for batch in theirs[len(batches) :])


def test_a_stream_is_renewed_in_each_pass(tokenizer) -> None:
    """Each pair by its stream, its number and the pass alone; the window does not matter."""
    renewal = Renewal(tokenizer, 1, AugmentRecipe(upper=0.3), bpe_dropout=0.3)
    streams = [stream(90, tag="<2de>"), stream(25, tag="<2de>")]

    def build_renewed(size: int = 40) -> StreamUpdates:
        encoder = WindowEncoder(tokenizer, renewal)
        return StreamUpdates(streams, encoder, size, BatchOrder(60), PairCollator(0))

    def ids(made: list[tuple[list, dict]]) -> set[tuple[int, tuple[int, ...]]]:
        rows = [(batch["numbers"], batch["input_ids"]) for batches, _ in made for batch in batches]
        return {
            (number, tuple(row[row > 0].tolist()))
            for numbers, sources in rows
            for number, row in zip(numbers.tolist(), sources, strict=True)
        }

    first = one_pass(build_renewed())
    second = one_pass(build_renewed(), first[-1][1])
    assert numbers(first) != numbers(second)
    assert (
        {n for n, _ in ids(first)} == {n for n, _ in ids(second)} == {*range(1, 91), *range(NUMBERS + 1, NUMBERS + 26)}
    )
    plain = one_pass(build(tokenizer, streams))
    # The second stream has more than one version of each pair, because it repeats.
    for some, others in ((first, plain), (first, second)):
        assert len({row for row in ids(some) if row[0] < NUMBERS} - ids(others)) > 20
    of_the_first = [{row for row in ids(made) if row[0] < NUMBERS} for made in (first, one_pass(build_renewed(17)))]
    assert of_the_first[0] == of_the_first[1] and len(of_the_first[0]) == 90
    versions = {row for row in ids(first) if row[0] > NUMBERS}
    assert 25 < len(versions) <= 90


def test_weights_are_mixing_ratios(tokenizer) -> None:
    streams = [stream(300), stream(70, weight=0.25), stream(50, weight=2)]
    made = numbers(one_pass(build(tokenizer, streams)))
    counts = [sum(number // NUMBERS == i for number in made) for i in range(3)]
    assert counts == [300, 75, 600]
    # Each repeats when it ends, so that all its pairs are equally frequent up to one repetition.
    of_the_second = [number % NUMBERS for number in made if number // NUMBERS == 1]
    assert sorted(of_the_second) == sorted([*range(1, 71), *range(1, 6)])
    assert all(made.count(2 * NUMBERS + number) == 12 for number in range(1, 51))


def test_a_window_without_a_fitting_pair_is_skipped_unless_all_are(tokenizer) -> None:
    made = one_pass(build(tokenizer, [stream(100, empty=tuple(range(1, 61)))]))
    assert sorted(numbers(made)) == list(range(61, 101))
    with pytest.raises(ValueError, match="no pair with text"):
        next(build(tokenizer, [stream(100, empty=tuple(range(1, 101)))]).after(build(tokenizer, [stream(100)]).start))
    with pytest.raises(ValueError, match="training.tokens_per_batch 1: the shortest has"):
        next(build(tokenizer, [stream(100)], tokens_per_batch=1).after(build(tokenizer, [stream(100)]).start))


def test_skipped_pairs_are_reported_once(tokenizer, caplog) -> None:
    """For the first window with such a pair."""
    updates = build(tokenizer, [stream(100, empty=(41, 43, 90))], tokens_per_batch=12, max_length=11)
    lines = list(updates.streams[0].rows)
    one_pass(updates)
    longest = [max(len(tokenizer(line[side])["input_ids"]) for side in ("source", "target")) for line in lines]
    too_long = sum(length > 11 for number, length in enumerate(longest[:40], start=1))
    assert too_long > 0
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        f"Skipped in window 1 (40 pairs): 0 pairs with an empty side, {too_long} with a side above 11 tokens "
        "(model.max_position_embeddings); later windows skip such pairs without a warning"
    )
    caplog.clear()
    one_pass(build(tokenizer, [stream(100, empty=(41, 43, 90))]))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "window 2 (40 pairs)" in warning and "2 pairs with an empty side, 0 with a side above 60" in warning


def test_a_stream_of_nothing_is_refused(tokenizer) -> None:
    rows = IterableDataset.from_generator(lambda: iter(()))
    updates = build(tokenizer, [Stream(rows, "nothing", 1.0, None, {})])
    with pytest.raises(ValueError, match="training text of nothing is empty"):
        next(updates.after(updates.start))


def test_the_fingerprint_identifies_the_text_and_is_json(tokenizer) -> None:
    updates = build(tokenizer, [stream(3), stream(4)])
    assert json.loads(json.dumps(updates.fingerprint)) == updates.fingerprint
    assert updates.fingerprint != build(tokenizer, [stream(3), stream(5)]).fingerprint


def test_a_window_of_many_parts_has_every_pair_once() -> None:
    tokenizer = train_tokenizer(["a b c d e f"], 270, languages=["de", "fr"])
    assert sorted(numbers(one_pass(build(tokenizer, [stream(1005)], size=2000)))) == list(range(1, 1006))
