"""BPE-dropout: without it the tokenizer's ids, with all of it characters, in between the paper's distribution."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_vaswani.data.bpe_dropout import BpeDropout
from hf_vaswani.data.tokenizer import train_tokenizer

TEXT = [
    "the lowest newest widest lower newer wider low new wide",
    "niedrigste neueste breiteste niedriger neuer breiter",
    "das Niedrige, das Neue; das Breite: „niedrig“ (neu) breit!",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT * 10, 330, languages=["de"])


def encodings(tokenizer, sentences) -> list:
    tokenizer("")
    return tokenizer.backend_tokenizer.encode_batch(sentences)


def split(tokenizer, sentences, p: float, seed: int = 1) -> list[list[int]]:
    dropout, draws = BpeDropout(tokenizer, p), random.Random(seed)
    return [dropout(encoding, draws) for encoding in encodings(tokenizer, sentences)]


# Text with the tag and special tokens, letters that the vocabulary does not have, and no words.
ODD = ["<2de> das Neue </s> low<s>er", "低い山 Ωmega naïve", "", " ", "\u00a0…", "a" * 500, "<pad>"]


def test_without_dropout_the_ids_are_the_tokenizers(tokenizer) -> None:
    for p in (0, 1e-15):
        assert split(tokenizer, TEXT + ODD, p) == [tokenizer(text)["input_ids"] for text in TEXT + ODD]


def test_with_all_of_it_a_sentence_is_its_bytes(tokenizer) -> None:
    for text, ids in zip(TEXT, split(tokenizer, TEXT, 1 - 1e-15), strict=True):
        # A space in front of the first word; </s>.
        assert len(ids) == 1 + len(text.encode()) + 1
        assert all(len(piece) == 1 for piece in tokenizer.convert_ids_to_tokens(ids[:-1]))


def test_dropout_changes_the_pieces_and_not_the_text(tokenizer) -> None:
    plain = [tokenizer(text)["input_ids"] for text in TEXT + ODD]
    made = split(tokenizer, TEXT + ODD, 0.3)
    assert made != plain
    assert made != split(tokenizer, TEXT + ODD, 0.3, seed=2)
    assert made == split(tokenizer, TEXT + ODD, 0.3)
    assert tokenizer.batch_decode(made) == tokenizer.batch_decode(plain)
    # A tag, special tokens and </s> are not words.
    assert [ids[0] for ids in made[3:4]] == [tokenizer.convert_tokens_to_ids("<2de>")]
    assert all(ids[-1] == tokenizer.eos_token_id for ids in made)


def outcomes(word: tuple[str, ...], ranks: dict[tuple[str, str], int], p: float) -> Counter[tuple[str, ...]]:
    """The exact distribution of Algorithm 1: each possible merge is removed with p, the best of the rest is made."""
    found: Counter[tuple[str, ...]] = Counter()
    candidates = sorted((ranks[pair], i) for i, pair in enumerate(pairwise(word)) if pair in ranks)
    found[word] += p ** len(candidates)
    for order, (_, i) in enumerate(candidates):
        merged = (*word[:i], word[i] + word[i + 1], *word[i + 2 :])
        for result, probability in outcomes(merged, ranks, p).items():
            found[result] += p**order * (1 - p) * probability
    return found


@pytest.mark.variants(2)
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("word", ["lowest", "niedriger", "wide"])
def test_pieces_have_the_distribution_of_the_paper(tokenizer, word, p) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    expected = outcomes(tuple(f"Ġ{word}"), ranks, p)
    assert sum(expected.values()) == pytest.approx(1)
    count = 8000
    made = Counter(tuple(tokenizer.convert_ids_to_tokens(ids[:-1])) for ids in split(tokenizer, [word] * count, p))
    assert set(made) <= set(expected)
    for pieces, probability in expected.items():
        # Five standard deviations.
        bound = 5 * (probability * (1 - probability) / count) ** 0.5 + 1e-3
        assert made[pieces] / count == pytest.approx(probability, abs=bound), pieces


def chain(dropout: float | None = None) -> Tokenizer:
    """A vocabulary in which each merge needs the one before, with which `tokenizers` follows the paper exactly."""
    word = "abcdefg"
    entries = [*word, *(word[:length] for length in range(2, len(word) + 1))]
    ids = {entry: i for i, entry in enumerate(entries)}
    merges = [(word[:length], word[length]) for length in range(1, len(word))]
    tokenizer = Tokenizer(models.BPE(ids, merges, dropout=dropout))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_the_number_of_pieces_is_distributed_as_that_of_tokenizers(p) -> None:
    count, text = 20_000, ["abcdefg abc ab"]
    dropout, draws = BpeDropout(PreTrainedTokenizerFast(tokenizer_object=chain()), p), random.Random(1)
    ours = Counter(len(dropout(encoding, draws)) for encoding in chain().encode_batch(text * count))
    theirs = Counter(len(encoding.ids) for encoding in chain(p).encode_batch(text * count))
    for pieces in range(3, 13):
        assert ours[pieces] / count == pytest.approx(theirs[pieces] / count, abs=0.02)


@pytest.mark.slow
@pytest.mark.real_data
def test_ids_of_real_text_without_dropout_are_the_tokenizers(multi30k) -> None:
    lines = [line for side in ("en", "de", "fr") for line in read(multi30k / f"train.{side}", 1000)]
    tokenizer = train_tokenizer(lines, 3000)
    plain = [tokenizer(line)["input_ids"] for line in lines]
    assert split(tokenizer, lines, 1e-15) == plain
    made = split(tokenizer, lines, 0.1)
    assert tokenizer.batch_decode(made) == tokenizer.batch_decode(plain)
    # The paper's text grows by about a quarter.
    assert 1.1 < sum(map(len, made)) / sum(map(len, plain)) < 1.5


def read(path, count: int) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line, _ in zip(file, range(count), strict=False):
            yield line.rstrip("\n")


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "words", "characters", "bytes"])
def test_a_vocabulary_without_merges_is_refused(kind) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.bpe_dropout is 0.1, but the vocabulary has no merges"):
        BpeDropout(train_tokenizer(TEXT, 280, kind), 0.1)
