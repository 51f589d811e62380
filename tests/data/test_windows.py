"""Windows of epochs and of streams: each pair once, with new ids, for any processes, workers, sizes and resumes."""

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from hf_vaswani.data import windows
from hf_vaswani.data.augmentation import TextAugmenter
from hf_vaswani.data.batching import BatchOrder, EpochUpdates, PairCollator, TokenBudgetBatchSampler
from hf_vaswani.data.encoding import EncodedRows, encode_pairs, encode_rows, pair_lengths
from hf_vaswani.data.reading import Source
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.data.windows import (
    ENCODE_BATCH,
    NUMBERS,
    RenewedUpdates,
    StreamUpdates,
    Window,
    WindowEncoder,
    WindowText,
    WindowUpdates,
)

from ..conftest import dear

WORDS = "lower newer wider lowest newest widest slower".split()
SIDES = ("source", "target")
AUGMENT = {"upper": 0.1, "typos": 0.3, "no_final_mark": 0.3}
Made = list[tuple[list[dict[str, torch.Tensor]], dict[str, Any]]]


def lines(count: int) -> list[str]:
    return [" ".join(WORDS[digit % 7] for digit in range(1 + i * 7 % 11)) + "." for i in range(count)]


def text(count: int, empty: tuple[int, ...] = ()) -> Dataset:
    """Makes pairs of different lengths; those numbered in `empty` have no source."""
    sources = ["" if number in empty else line for number, line in enumerate(lines(count), start=1)]
    return Dataset.from_dict({"source": sources, "target": lines(count)[::-1]})


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(lines(20), 300, languages=["de", "fr"])


def stream(count: int, weight: float = 1.0, tag: str | None = None, empty: tuple[int, ...] = ()) -> Source:
    rows = text(count, empty).to_iterable_dataset()
    return Source("en", "de", dataset=f"text of {count}", weight=weight, tag=tag, splits={"train": rows})


def streamed(tokenizer, streams: list[Source], size: int = 40, workers: int = 0, augmenter=None, **order: Any):
    encoder, settings = WindowEncoder(tokenizer, augmenter), BatchOrder(**{"tokens_per_batch": 200} | order)
    shared = {"size": size, "order": settings, "collator": PairCollator(0, order=settings), "num_workers": workers}
    return StreamUpdates(sources=streams, columns=SIDES, encoder=encoder, **shared)


def renewed(
    tokenizer,
    count: int = 90,
    size: int = 40,
    workers: int = 0,
    weight: float = 1.0,
    empty: tuple[int, ...] = (),
    **order: Any,
) -> RenewedUpdates:
    source = Source("en", "de", tag="<2de>", splits={"train": text(count, empty)})
    encoded = encode_pairs(source.splits["train"], tokenizer, "<2de>")
    settings = BatchOrder(**{"tokens_per_batch": 200} | order)
    sampler = TokenBudgetBatchSampler(pair_lengths(encoded), settings, [(len(encoded), weight)])
    encoder = WindowEncoder(tokenizer, TextAugmenter(tokenizer, settings.seed, AUGMENT, bpe_dropout=0.2), [source])
    numbers = encoded.with_format("numpy")["number"][:]
    shared = {"size": size, "order": settings, "collator": PairCollator(0, order=settings), "num_workers": workers}
    return RenewedUpdates(numbers=numbers, sampler=sampler, encoder=encoder, **shared)


def two_streams(tokenizer, **settings: Any) -> StreamUpdates:
    """The other stream ends elsewhere."""
    return streamed(tokenizer, [stream(90, tag="<2de>"), stream(25, weight=0.7, tag="<2fr>")], **settings)


def cached(tokenizer, workers: int = 0, **order: Any) -> EpochUpdates:
    """Text that is encoded once."""
    encoded = encode_pairs(text(90), tokenizer)
    sampler = TokenBudgetBatchSampler(pair_lengths(encoded), BatchOrder(**{"tokens_per_batch": 200} | order))
    return EpochUpdates(EncodedRows(encoded), sampler, PairCollator(0, order=sampler.order), workers)


KINDS = pytest.mark.parametrize("build", [cached, renewed, two_streams])


def one_pass(updates: EpochUpdates | WindowUpdates, position: dict[str, Any] | None = None) -> Made:
    """Returns the updates until the epoch is over, or until the first stream starts over."""
    made = []
    for batches, reached in updates.after(position or updates.start):
        made.append((batches, reached))
        if "places" in reached:
            is_over = reached["update"] == reached["places"][0]["pairs"] == 0
        elif "window" in reached:
            is_over = reached["update"] == reached["window"] == 0
        else:
            is_over = reached["update"] == len(updates.sampler.updates())
        if is_over:
            return made
    raise AssertionError("The pass does not end.")


def numbers(made: Made) -> list[int]:
    return [number for batches, _ in made for batch in batches for number in batch["numbers"].tolist()]


def pairs_of(made: Made) -> dict[int, list[tuple[list[int], list[int]]]]:
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


# ---- All kinds ---------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("workers", [0, 2])
def test_every_position_resumes_exactly(tokenizer, build: Callable[..., Any], workers) -> None:
    """In the middle and at the end of a window, and at the end of a pass."""
    updates = build(tokenizer, batches_per_update=2)
    length = len(one_pass(updates))
    made = list(islice(updates.after(updates.start), length + 4))
    # Only a few positions with workers, which are slow to start.
    for number in range(length + 2) if not workers else (1, length - 1, length):
        # A fresh process reads the position from a file.
        position = json.loads(json.dumps(made[number][1]))
        again = build(tokenizer, workers=workers, batches_per_update=2)
        for (batches, reached), (ours, where) in zip(again.after(position), made[number + 1 :], strict=False):
            assert equal(batches, ours)
            assert reached == where


@KINDS
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_the_updates_of_one(tokenizer, build: Callable[..., Any], processes, accumulation) -> None:
    alone = one_pass(build(tokenizer, batches_per_update=accumulation * processes))
    shares = [
        one_pass(build(tokenizer, batches_per_update=accumulation, num_processes=processes, process_index=process))
        for process in range(processes)
    ]
    for (batches, reached), *parts in zip(alone, *shares, strict=True):
        assert all(where == reached for _, where in parts)
        # Each process takes every n-th batch; one without a batch gets padding.
        theirs = [batch for some in zip(*(own for own, _ in parts), strict=True) for batch in some]
        assert equal(theirs[: len(batches)], batches)
        assert all((batch["labels"] == -100).all() for batch in theirs[len(batches) :])


@pytest.mark.parametrize("build", [renewed, two_streams])
@pytest.mark.parametrize("workers", [0, dear(1)])
def test_each_process_encodes_its_share_and_has_the_batches_of_all(tokenizer, monkeypatch, build, workers) -> None:
    """Windows of an odd number of pairs, and some that are too small for each to have a part of every source."""
    encoded: list[int] = []

    def counted(sources: list[str], *arguments: Any) -> Any:
        encoded.append(len(sources))
        return encode_rows(sources, *arguments)

    def rank(index: int, exchange: Any = None) -> Any:
        updates = build(tokenizer, size=size, num_processes=2, process_index=index, workers=workers)
        updates.exchange = exchange
        return updates

    for size in (39, 3):
        for index in range(2):
            alone = one_pass(rank(index))
            other = rank(1 - index, exchange=list)
            others = map(other.encoder.__getitem__, other._shares(other.windows(other.start)))

            def exchange(encode: Callable[[], Any], index: int = index, others: Any = others) -> list[Any]:
                with monkeypatch.context() as patch:
                    patch.setattr(windows, "encode_rows", counted)
                    mine = encode()
                return [mine, next(others)][:: 1 - 2 * index]

            encoded.clear()
            together = one_pass(rank(index, exchange))
            assert [reached for _, reached in together] == [reached for _, reached in alone]
            assert all(equal(ours, theirs) for (ours, _), (theirs, _) in zip(together, alone, strict=True))
            # Of an odd number, the second process has one more. A worker counts elsewhere.
            pairs = sum(len(each) for each in pairs_of(one_pass(build(tokenizer, size=size))).values())
            assert workers or size < 39 or abs(sum(encoded) - pairs / 2) <= pairs / size


@KINDS
def test_few_shapes_leave_pairs_and_positions_as_they_are(tokenizer, build: Callable[..., Any], caplog) -> None:
    """The padding of windows is known when the first is encoded, and said once, also if it is encoded again."""
    caplog.set_level("INFO")
    plain, updates = one_pass(build(tokenizer)), build(tokenizer, few_shapes=True)
    few = one_pass(updates)
    assert [reached for _, reached in few] == [reached for _, reached in plain]
    assert list(pairs_of(few).items()) == list(pairs_of(plain).items())
    shapes = {tuple(batch[name].shape) for batches, _ in few for batch in batches for name in ("input_ids", "labels")}
    assert all(width % 8 == 0 for _, width in shapes) and len({rows for rows, _ in shapes}) < 20
    one_pass(updates, few[1][1])
    assert caplog.text.count("of their positions are padding") == (0 if build is cached else 1)


def test_a_window_is_encoded_in_parts_like_one() -> None:
    sentences = [f"lower newer wider {i}." for i in range(ENCODE_BATCH + 5)]
    tokenizer = train_tokenizer(sentences, 300)
    # Many pairs of one source, a few of another, and none of a third.
    texts = [
        WindowText(sentences, sentences, range(1, len(sentences) + 1), [0] * len(sentences), None),
        WindowText(sentences[:3], sentences[:3], [7, 8, 9], [0, 0, 1], None),
        WindowText([], [], [], [], None),
    ]
    window = Window(0, {}, {}, len(sentences) + 3, (0, 0), texts)
    returned, table = WindowEncoder(tokenizer)[window]
    assert not returned.texts and returned.pairs == window.pairs
    rows = table.to_pylist()
    assert [row["number"] for row in rows] == [*range(1, len(sentences) + 1), 7, 8, 9]
    assert [row["source_ids"] for row in rows] == tokenizer(sentences + sentences[:3])["input_ids"]
    augmenter = TextAugmenter(tokenizer, 1, {"no_final_mark": 0.5}, bpe_dropout=0.2)
    _, other = WindowEncoder(tokenizer, augmenter)[window]
    for row, plain in zip(other.to_pylist(), rows, strict=True):
        # Both sides are the same text, with different pieces.
        source, target = (tokenizer.decode(row[side]).removesuffix("</s>") for side in ("source_ids", "target_ids"))
        assert source == target and tokenizer.decode(plain["source_ids"][:-1]).removesuffix(".").startswith(
            source.removesuffix(".")
        )
    assert other != table


# ---- Epochs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 45, 89, 1000])
def test_an_epoch_has_every_pair_once_with_new_ids(tokenizer, size) -> None:
    updates = renewed(tokenizer, size=size, empty=(5, 60))
    first = one_pass(updates)
    second = one_pass(updates, first[-1][1])
    assert first[-1][1] == {"epoch": 1, "window": 0, "update": 0} and second[-1][1]["epoch"] == 2
    ids, again = pairs_of(first), pairs_of(second)
    assert sorted(ids) == sorted(again) == sorted(set(range(1, 91)) - {5, 60})
    assert {len(each) for each in (*ids.values(), *again.values())} == {1}
    assert sum(ids[number] != again[number] for number in ids) > 60
    assert list(ids) != list(again) != sorted(again)
    # The budget is that of the new lengths.
    batches = [batch for some, _ in first for batch in some]
    assert all(max(batch["input_ids"].numel(), batch["labels"].numel()) <= 200 for batch in batches)
    # The tag is in front of each source.
    tag = tokenizer.convert_tokens_to_ids("<2de>")
    assert all(source[0] == tag for ((source, _),) in ids.values())


def test_what_happens_to_a_pair_does_not_depend_on_windows_or_budget(tokenizer) -> None:
    one = pairs_of(one_pass(renewed(tokenizer)))
    assert one == pairs_of(one_pass(renewed(tokenizer, size=17, tokens_per_batch=300)))
    assert one != pairs_of(one_pass(renewed(tokenizer, seed=2)))


def test_a_pair_that_becomes_too_long_is_skipped_in_that_epoch(tokenizer, caplog) -> None:
    limit = int(renewed(tokenizer).sampler.longest.max())
    updates = renewed(tokenizer, max_length=limit)
    made = [set(pairs_of(one_pass(updates, {"epoch": i, "window": 0, "update": 0}))) for i in range(3)]
    assert all(len(numbers) < 90 for numbers in made) and made[0] != made[1]
    assert set.union(*made) > made[0]
    (warning, *_) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"with a side above {limit} tokens (model.max_position_embeddings)" in warning


@pytest.mark.parametrize(("weight", "often"), [(2, 180), (0.5, 45), (1.5, 135)])
def test_a_repeated_pair_is_altered_anew_each_time(tokenizer, weight, often) -> None:
    updates = renewed(tokenizer, weight=weight)
    first = one_pass(updates)
    ids = pairs_of(first)
    assert sum(map(len, ids.values())) == often
    assert set(map(len, ids.values())) == {2: {2}, 0.5: {1}, 1.5: {1, 2}}[weight]
    if weight > 1:
        repeated = [each for each in ids.values() if len(each) > 1]
        assert sum(each[0] != each[1] for each in repeated) > 0.5 * len(repeated)
        following = pairs_of(one_pass(updates, first[-1][1]))
        assert sum(each in following[number] for number in following for each in ids[number]) < 0.6 * often


def test_the_fingerprint_is_that_of_the_unaltered_text(tokenizer) -> None:
    updates = renewed(tokenizer)
    plain = EpochUpdates(EncodedRows(Dataset.from_dict({})), updates.sampler, PairCollator(0))
    assert updates.fingerprint == plain.fingerprint != renewed(tokenizer, count=89).fingerprint


# ---- Streams -----------------------------------------------------------------------------------------------------


# The last window is full, nearly full, the only one, or has several parts to encode.
@pytest.mark.parametrize(("count", "size"), [(120, 40), (119, 40), (121, 40), (30, 40), (1005, 2000)])
def test_a_pass_has_every_pair_once_and_passes_differ(tokenizer, count, size) -> None:
    updates = streamed(tokenizer, [stream(count)], size)
    first = one_pass(updates)
    second = one_pass(updates, first[-1][1])
    assert sorted(numbers(first)) == sorted(numbers(second)) == list(range(1, count + 1))
    assert numbers(first) != numbers(second)
    # Shuffled within each window, but not across windows.
    for start in range(0, count, size):
        window = numbers(first)[start : start + size]
        assert sorted(window) == list(range(start + 1, min(start + size, count) + 1))
        assert len(window) == 1 or window != sorted(window)


def test_pairs_of_a_stream_keep_their_ids_and_numbers(tokenizer) -> None:
    source = stream(50, tag="<2de>", empty=(3, 41))
    rows = list(source.splits["train"])
    found = pairs_of(one_pass(streamed(tokenizer, [source])))
    assert sorted(found) == sorted(set(range(1, 51)) - {3, 41})
    for number, pairs in found.items():
        row = rows[number - 1]
        texts = (f"<2de> {row['source']}", row["target"])
        assert pairs == [tuple(tokenizer(sentence)["input_ids"] for sentence in texts)]


def test_a_stream_is_altered_anew_in_each_pass(tokenizer) -> None:
    """Each pair by its stream, its number and the pass alone; the window does not matter."""
    augmenter = TextAugmenter(tokenizer, 1, {"upper": 0.3}, bpe_dropout=0.3)
    streams = [stream(90, tag="<2de>"), stream(25, tag="<2de>")]

    def ids(made: Made) -> set[tuple[int, tuple[int, ...]]]:
        return {(number, tuple(source)) for number, pairs in pairs_of(made).items() for source, _ in pairs}

    first = one_pass(streamed(tokenizer, streams, augmenter=augmenter))
    second = one_pass(streamed(tokenizer, streams, augmenter=augmenter), first[-1][1])
    assert numbers(first) != numbers(second)
    assert set(numbers(first)) == set(numbers(second)) == {*range(1, 91), *range(NUMBERS + 1, NUMBERS + 26)}
    plain = one_pass(streamed(tokenizer, streams))
    # The second stream has more than one version of each pair, because it repeats.
    for some, others in ((first, plain), (first, second)):
        assert len({row for row in ids(some) if row[0] < NUMBERS} - ids(others)) > 20
    other_windows = one_pass(streamed(tokenizer, streams, 17, augmenter=augmenter))
    of_the_first = [{row for row in ids(made) if row[0] < NUMBERS} for made in (first, other_windows)]
    assert of_the_first[0] == of_the_first[1] and len(of_the_first[0]) == 90
    assert 25 < len({row for row in ids(first) if row[0] > NUMBERS}) <= 90


def test_weights_are_mixing_ratios(tokenizer) -> None:
    streams = [stream(300), stream(70, weight=0.25), stream(50, weight=2)]
    made = numbers(one_pass(streamed(tokenizer, streams)))
    counts = [sum(number // NUMBERS == i for number in made) for i in range(3)]
    assert counts == [300, 75, 600]
    # Each repeats when it ends, so that all its pairs are equally frequent up to one repetition.
    of_the_second = [number % NUMBERS for number in made if number // NUMBERS == 1]
    assert sorted(of_the_second) == sorted([*range(1, 71), *range(1, 6)])
    assert all(made.count(2 * NUMBERS + number) == 12 for number in range(1, 51))


def test_a_window_without_a_fitting_pair_is_skipped_unless_all_are(tokenizer) -> None:
    made = one_pass(streamed(tokenizer, [stream(100, empty=tuple(range(1, 61)))]))
    assert sorted(numbers(made)) == list(range(61, 101))
    for updates, words in (
        (streamed(tokenizer, [stream(100, empty=tuple(range(1, 101)))]), "no pair with text"),
        (streamed(tokenizer, [stream(100)], tokens_per_batch=1), "training.tokens_per_batch 1: the shortest has"),
    ):
        with pytest.raises(ValueError, match=words):
            next(updates.after(updates.start))


def test_skipped_pairs_are_reported_once(tokenizer, caplog) -> None:
    """For the first window with such a pair."""
    updates = streamed(tokenizer, [stream(100, empty=(41, 43, 90))], tokens_per_batch=12, max_length=11)
    rows = list(updates.sources[0].splits["train"])
    one_pass(updates)
    longest = [max(len(tokenizer(row[side])["input_ids"]) for side in SIDES) for row in rows]
    too_long = sum(length > 11 for length in longest[:40])
    assert too_long > 0
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        f"Skipped in window 1 (40 pairs): 0 pairs with an empty side, {too_long} with a side above 11 tokens "
        "(model.max_position_embeddings); later windows skip such pairs without a warning"
    )
    caplog.clear()
    one_pass(streamed(tokenizer, [stream(100, empty=(41, 43, 90))]))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "window 2 (40 pairs)" in warning and "2 pairs with an empty side, 0 with a side above 200" in warning


def test_a_stream_of_nothing_is_refused(tokenizer) -> None:
    rows = IterableDataset.from_generator(lambda: iter(()))
    updates = streamed(tokenizer, [Source("en", "de", splits={"train": rows})])
    with pytest.raises(ValueError, match="training text of en-de is empty"):
        next(updates.after(updates.start))


def test_the_fingerprint_of_streams_identifies_the_text_and_is_json(tokenizer) -> None:
    updates = streamed(tokenizer, [stream(3), stream(4)])
    assert json.loads(json.dumps(updates.fingerprint)) == updates.fingerprint
    assert updates.fingerprint != streamed(tokenizer, [stream(3), stream(5)]).fingerprint
