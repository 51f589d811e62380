"""Vocabularies and the order of the training text, for inputs by hypothesis: nothing is lost or repeated."""

import json
import unicodedata
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import strategies as st

from hf_vaswani.data.batching import BatchOrder, PairCollator, TokenBudgetBatchSampler
from hf_vaswani.data.reading import Source
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.data.windows import StreamUpdates, WindowEncoder

from .test_inputs import attack

TRAINED_ON = ["the cat sat on the mat", "die Katze saß auf der Matte", "zwölf Boxkämpfer jagen Viktor", "1 2 3 4, 5!"]
KINDS = ["bpe", "unigram", "wordpiece", "words", "characters", "bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_back_from_its_ids(campaign, kind) -> None:
    tokenizer = train_tokenizer(TRAINED_ON * 3, 300, kind, languages=["de"] if kind == "bpe" else [])

    def clean(text: str) -> str:
        return " ".join(unicodedata.normalize("NFC", text).split())

    def check(text: str) -> None:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id and all(0 <= i < len(tokenizer) for i in ids)
        again = tokenizer.decode(ids, skip_special_tokens=True)
        if tokenizer.unk_token_id not in ids:
            assert clean(again) == clean(text), (text, again)
        assert tokenizer([text, "a"])["input_ids"][0] == ids

    known = st.text(st.sampled_from(sorted(set("".join(TRAINED_ON)))), max_size=30)
    words = st.lists(st.sampled_from([*" ".join(TRAINED_ON).split(), "</s>", "<pad>", "<unk>", "<2fr>"]), max_size=8)
    texts = st.one_of(known, words.map(" ".join), st.text(st.characters(codec="utf-8"), max_size=20))
    attack(campaign, 60, 6, check, texts)


LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60)


def test_an_epoch_has_every_pair_once_and_processes_share_it(campaign) -> None:
    def check(example: Any) -> None:
        lengths, budget, per_update, processes, random_seed, epoch, limit = example
        array = np.array(lengths, dtype=np.int32)
        longest = array.max(axis=1)
        fitting = [i for i in range(len(lengths)) if longest[i] <= min(budget, limit or budget)]
        try:
            samplers = [
                TokenBudgetBatchSampler(array, BatchOrder(budget, random_seed, per_update, processes, i, limit))
                for i in range(processes)
            ]
        except ValueError as error:
            assert not fitting and "fits" in str(error)
            return
        for sampler in samplers:
            sampler.set_position(epoch)
        batches = samplers[0].batches()
        assert sorted(i for batch in batches for i in batch.tolist()) == fitting
        assert all(len(batch) * longest[batch].max() <= budget for batch in batches)
        shares = [sampler.updates() for sampler in samplers]
        assert len({tuple(map(len, share)) for share in shares}) == 1, "processes that wait for each other for ever"
        # In turns, the processes have the batches of a single one.
        dealt = [batch for parts in zip(*shares, strict=True) for turn in zip(*parts, strict=True) for batch in turn]
        assert [batch.tolist() for batch in dealt if len(batch)] == [batch.tolist() for batch in batches]
        # A position in the middle continues with the rest.
        done = len(shares[0]) // 2
        samplers[0].set_position(epoch, done)
        rest = [batch.tolist() for update in shares[0][done:] for batch in update]
        assert list(samplers[0]) == rest

    numbers = st.integers(0, 2**32 - 1)
    example = st.tuples(
        LENGTHS, st.integers(1, 200), st.integers(1, 4), st.integers(1, 5), numbers, st.integers(0, 9),
        st.one_of(st.none(), st.integers(1, 40)),
    )  # fmt: skip
    attack(campaign, 150, 15, check, example)


def test_a_stream_has_every_pair_once_and_goes_on_from_anywhere(campaign) -> None:
    tokenizer = train_tokenizer(["a b c d e f"], 270, languages=["de"])

    def stream(lengths: list[tuple[int, int]]) -> Source:
        sides = [
            [" ".join("abcdef"[i % 6] for i in range(length)) for length in side]
            for side in zip(*lengths, strict=True)
        ]
        rows = Dataset.from_dict({"source": sides[0], "target": sides[1]}).to_iterable_dataset()
        return Source("en", "de", splits={"train": rows})

    def check(example: Any) -> None:
        lengths, others, window, per_update, stop = example
        order = BatchOrder(40, batches_per_update=per_update)

        def build() -> StreamUpdates:
            streams = [stream(lengths), *([stream(others)] if others else [])]
            return StreamUpdates(
                sources=streams,
                columns=("source", "target"),
                encoder=WindowEncoder(tokenizer),
                size=window,
                order=order,
                collator=PairCollator(0),
            )

        updates, made = build(), []
        for each in islice(updates.after(updates.start), 2000):
            made.append(each)
            if each[1]["update"] == 0 and each[1]["places"][0]["pairs"] == 0:
                break
        else:
            raise AssertionError("a pass without an end")
        seen = Counter(
            int(i) for batches, _ in made for batch in batches for i in batch["numbers"] if i <= len(lengths)
        )
        assert seen == Counter(range(1, len(lengths) + 1))
        stop %= len(made)
        again = build().after(json.loads(json.dumps(made[stop][1])))
        for (batches, reached), (ours, where) in zip(
            islice(again, len(made) - stop - 1), made[stop + 1 :], strict=True
        ):
            assert reached == where
            for one, two in zip(batches, ours, strict=True):
                assert all(torch.equal(one[name], two[name]) for name in one | two)

    pairs = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=30)
    example = st.tuples(
        pairs, st.one_of(st.just([]), pairs), st.integers(1, 40), st.integers(1, 3), st.integers(0, 99)
    )
    attack(campaign, 15, 20, check, example)
