"""Text is encoded once; the ids are read back without copies, and keep the numbers of their pairs."""

import pickle
import tracemalloc

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

from hf_vaswani.data.encoding import EncodedRows, encode_pairs, encode_rows, pair_lengths
from hf_vaswani.data.tokenizer import train_tokenizer

WORDS = "a b c d e f".split()


def text(pairs: list[tuple[str, str]]) -> Dataset:
    return Dataset.from_dict({"source": [source for source, _ in pairs], "target": [target for _, target in pairs]})


def numbers_in_words(count: int) -> list[tuple[str, str]]:
    sides = [" ".join(WORDS[int(digit)] for digit in np.base_repr(i, 6)) for i in range(count)]
    return list(zip(sides, reversed(sides), strict=True))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS)], 270, languages=["de", "fr"])


@pytest.fixture
def on_disk(tmp_path):
    """A file with many record batches: `datasets` writes a thousand rows at a time."""

    def save(count: int) -> Dataset:
        text(numbers_in_words(count)).save_to_disk(tmp_path / str(count))
        return Dataset.load_from_disk(tmp_path / str(count))

    return save


def test_encoding_ends_sentences_and_drops_empty_pairs_and_its_cache_depends_on_all_settings(tmp_path) -> None:
    pairs = text([("a b", "c"), ("", "x"), ("y", "  "), ("d", "e f")])
    pairs.save_to_disk(tmp_path / "text")
    pairs = Dataset.load_from_disk(tmp_path / "text")
    tokenizer = train_tokenizer(["a b c d e f"], 270)
    encoded = encode_pairs(pairs, tokenizer)
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in encoded["source_ids"]] == ["a b", "d"]
    assert all(ids[-1] == 2 for side in ("source_ids", "target_ids") for ids in encoded[side])
    assert encoded["number"][:] == [1, 4]
    expected = [[len(a), len(b)] for a, b in zip(encoded["source_ids"], encoded["target_ids"], strict=True)]
    np.testing.assert_array_equal(pair_lengths(encoded), expected)
    assert encode_pairs(pairs, tokenizer).cache_files == encoded.cache_files
    others = [
        encode_pairs(pairs, train_tokenizer(["a b"], 264)),
        encode_pairs(pairs, tokenizer, source_prefix="<2de>"),
        encode_pairs(pairs, tokenizer, first_number=4),
    ]
    tokenizer.split_special_tokens = False
    others.append(encode_pairs(pairs, tokenizer))
    assert len({each.cache_files[0]["filename"] for each in (encoded, *others)}) == 5


def test_ids_are_those_of_the_tokenizer_in_any_number_of_processes(tokenizer, on_disk) -> None:
    pairs = on_disk(2500)
    encoded = encode_pairs(pairs, tokenizer)
    assert encoded["source_ids"][:] == tokenizer(list(pairs["source"]))["input_ids"]
    assert encoded["target_ids"][:] == tokenizer(list(pairs["target"]))["input_ids"]
    # Otherwise the second result would be read from the cache of the first.
    shared = encode_pairs(pairs.with_format("numpy"), tokenizer, num_proc=2)
    assert shared.cache_files != encoded.cache_files
    assert shared[:] == encoded[:]


def test_a_tag_is_one_id_in_front_of_the_same_ids(tokenizer) -> None:
    pairs = text([("a b", "c"), ("  d", "e"), ("", "f")])
    plain, tagged = encode_pairs(pairs, tokenizer), encode_pairs(pairs, tokenizer, "<2de>", first_number=4)
    assert (plain["number"][:], tagged["number"][:]) == ([1, 2], [4, 5])
    tag = tokenizer.convert_tokens_to_ids("<2de>")
    assert tagged["source_ids"][:] == [[tag, *ids] for ids in plain["source_ids"]]
    assert tagged["target_ids"][:] == plain["target_ids"][:]


def test_views_are_the_rows(tokenizer, on_disk) -> None:
    encoded = concatenate_datasets(
        [encode_pairs(on_disk(count), tokenizer, first_number=count) for count in (2500, 7)]
    )
    assert len(encoded.data.to_batches()) > 3
    rows = [2506, 0, 999, 1000, 2499, 2500, 1000]
    for pairs in (EncodedRows(encoded), pickle.loads(pickle.dumps(EncodedRows(encoded)))):
        assert len(pairs) == 2507
        for pair, row in zip(pairs.__getitems__(rows), rows, strict=True):
            assert {name: np.asarray(value).tolist() for name, value in pair.items()} == encoded[row]
            assert not pair["source_ids"].flags.owndata
        assert pairs[5]["number"] == 2505
        assert pairs.__getitems__([]) == []
    np.testing.assert_array_equal(
        pair_lengths(encoded), [[len(row["source_ids"]), len(row["target_ids"])] for row in encoded]
    )


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tokenizer, on_disk) -> None:
    """One Python object per sentence or pair would take more: an empty `str` has 49 bytes."""
    peaks = []
    for count in (3000, 23_000):
        pairs = on_disk(count)
        tracemalloc.start()
        encoded = encode_pairs(pairs, tokenizer)
        views = EncodedRows(encoded)
        for start in range(0, count, 100):
            views.__getitems__(list(range(start, start + 100)))
        assert pair_lengths(encoded).shape == (count, 2)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 20_000 < 25


def test_a_cache_that_cannot_be_written_is_named(monkeypatch) -> None:
    from datasets.arrow_writer import ArrowWriter

    def full(*_):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise ValueError("I/O operation on closed file")  # noqa: B904 (as datasets does)

    pairs, tokenizer = Dataset.from_dict({"source": ["a"], "target": ["b"]}), train_tokenizer(["a b"], 300)
    monkeypatch.setattr(ArrowWriter, "finalize", full)
    with pytest.raises(OSError, match="ids cannot be written to the cache .*No space left"):
        encode_pairs(pairs, tokenizer)


def test_an_unpaired_surrogate_is_quoted() -> None:
    tokenizer = train_tokenizer(["one two"], 270)
    with pytest.raises(ValueError, match=r"unpaired UTF-16 surrogate.*'a\\ud800b'"):
        encode_rows(["one", "a\ud800b"], ["one", "two"], [1, 2], tokenizer)
