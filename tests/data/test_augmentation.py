"""Alterations of sentences: in every script, beside every kind of punctuation, and always the same for one seed."""

import json
import random
from collections import Counter
from itertools import islice, pairwise

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_vaswani.data.augmentation import (
    ALTERATIONS,
    BpeDropout,
    TextAugmenter,
    altered_set,
    no_final_mark,
    title,
    typos,
    upper,
)
from hf_vaswani.data.tokenizer import train_tokenizer

SENTENCES = [
    "Two young, White males are outside near many bushes.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "Девушка поднимается в деревянный домик.",
    "Ένα κορίτσι σκαρφαλώνει σε ένα ξύλινο σπιτάκι.",
    "एक छोटी लड़की लकड़ी के घर में चढ़ रही है।",
]


@pytest.mark.parametrize(
    ("alter", "text", "expected"),
    [
        (upper, "Die Straße, 3 km.", "DIE STRASSE, 3 KM."),
        (upper, "ein café, ǆ", "EIN CAFÉ, Ǆ"),
        (upper, "走吧。नमस्ते", "走吧。नमस्ते"),
        # A language tag and entities are not words.
        (upper, "<2de> don &apos;t &quot; go", "<2de> DON &apos;T &quot; GO"),
        (upper, "", ""),
        (title, "don't touch my 3rd well-known iPhone", "Don't Touch My 3rd Well-Known IPhone"),
        (title, "‘hello’ said l’homme", "‘Hello’ Said L’homme"),
        (title, "it 's n't what &apos;s &quot; said", "It 's N't What &apos;s &quot; Said"),
        # A combining accent does not end a word; the title-case form of ǆ is neither small nor capital.
        (title, "cafe\u0301s ǆ", "Cafe\u0301s ǅ"),
        (title, "<2de> die 走吧 ÖBB", "<2de> Die 走吧 ÖBB"),
        (title, "", ""),
        (no_final_mark, "A dog.", "A dog"),
        (no_final_mark, "A dog .", "A dog"),
        (no_final_mark, "A dog ?! ", "A dog "),
        (no_final_mark, "Wait…", "Wait"),
        (no_final_mark, "Wait...", "Wait"),
        (no_final_mark, "走吧。", "走吧"),
        (no_final_mark, "他说：“走吧。”", "他说：“走吧”"),
        (no_final_mark, "「行く。」", "「行く」"),
        (no_final_mark, "ماذا؟", "ماذا"),
        (no_final_mark, "एक घर।", "एक घर"),
        (no_final_mark, "« Bonjour ! »", "« Bonjour »"),
        (no_final_mark, 'He said "Go."', 'He said "Go"'),
        (no_final_mark, "(Yes!).", "(Yes)"),
        (no_final_mark, "go . &quot;", "go &quot;"),
        (no_final_mark, "No. 5 has none", "No. 5 has none"),
        (no_final_mark, "...", "..."),
        (no_final_mark, '"?"', '"?"'),
        (no_final_mark, "", ""),
    ],
)
def test_what_alterations_make_of_a_text(alter, text, expected) -> None:
    """Capitals as Unicode has them, at the beginning of words in titles, and no mark in front of what closes."""
    assert alter(text) == expected


@pytest.mark.parametrize(
    "kept",
    ["%s", "%(name)s", "%2$d", "{name}", "${home}", "<b>", '<a href="x">', "www.abc.de/x", ":func:`len`", "``a b``"],
)
def test_what_a_program_reads_is_kept(kept) -> None:
    text = f"see {kept} there"
    assert (upper(text), title(text)) == (f"SEE {kept} THERE", f"See {kept} There")
    assert kept in typos(text, random.Random(1))


def test_a_line_of_marks_takes_no_time() -> None:
    line = "." * 200_000
    assert no_final_mark(line + "a") == line + "a"
    assert no_final_mark("a" + line) == "a"


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_sentence_gets_a_few_typing_errors(sentence) -> None:
    changes = []
    for seed in range(200):
        made = typos(sentence, random.Random(seed))
        assert made == typos(sentence, random.Random(seed)) != sentence
        words = list(zip(sentence.split(), made.split(), strict=True))
        wrong = [(right, word) for right, word in words if right != word]
        assert all(right[0] == word[0] and abs(len(right) - len(word)) <= 3 for right, word in wrong)
        changes.append(len(wrong))
    assert min(changes) == 1 and max(changes) <= 4
    assert 1 <= sum(changes) / 200 < 1.8


def test_typing_errors_are_of_four_kinds() -> None:
    made = Counter(typos("Wort", random.Random(seed)) for seed in range(4000))
    left_out, swapped, doubled = {"Wrt", "Wot", "Wor"}, {"Wrot", "Wotr"}, {"Woort", "Worrt", "Wortt"}
    # Neighbours of o, r and t on the keyboard.
    replaced = {f"W{key}rt" for key in "ipkl"} | {f"Wo{key}t" for key in "etdf"} | {f"Wor{key}" for key in "ryfg"}
    assert set(made) == left_out | swapped | doubled | replaced
    for kind in (left_out, swapped, doubled, replaced):
        assert sum(made[word] for word in kind) > 500
    assert "WÖRT" not in made and typos("WM", random.Random(3)).isupper()


@pytest.mark.parametrize("text", ["www.example.com 3.5 x_y me@example.com </b>", "<2de> I a", "", "123 .", "&quot;"])
def test_what_is_no_word_has_no_typing_errors(text) -> None:
    assert all(typos(text, random.Random(seed)) == text for seed in range(50))


def test_a_letter_keeps_its_combining_marks() -> None:
    for seed in range(100):
        made = typos("pe\u0301re\u0300", random.Random(seed))
        assert not made.startswith(("p\u0301", "p\u0300")) and "\u0301\u0300" not in made


def test_an_altered_set_is_always_the_same() -> None:
    references = [[text, text.lower()] for text in SENTENCES]
    for name in ALTERATIONS:
        sources, answers = altered_set(SENTENCES, references, name)
        assert (sources, answers) == altered_set(SENTENCES, references, name)
        # Each line by itself, whatever the others are.
        assert altered_set(["?", *SENTENCES[1:]], references, name)[0][1:] == sources[1:]
        assert sum(new != old for new, old in zip(sources, SENTENCES, strict=True)) >= 4
        assert (answers == references) == (name == "typos")
    assert altered_set(SENTENCES, references, "upper")[1][0][1] == SENTENCES[0].upper()


# ---- Drawn for each pair -----------------------------------------------------------------------------------------

TEXT = [
    "the lowest newest widest lower newer wider low new wide",
    "niedrigste neueste breiteste niedriger neuer breiter",
    "das Niedrige, das Neue; das Breite: „niedrig“ (neu) breit!",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT * 10, 330, languages=["de"])


def test_alterations_are_drawn_by_their_probabilities(tokenizer) -> None:
    source, target = SENTENCES[:2]
    made, of_target = TextAugmenter(tokenizer, 1, dict.fromkeys(ALTERATIONS, 1.0)).altered(
        source, target, random.Random(1)
    )
    assert of_target == target[:-1].upper()
    assert made.isupper() and made not in (source.upper(), source[:-1].upper()) and not made.endswith(".")
    assert TextAugmenter(tokenizer, 1, {}).altered(source, target, random.Random(1)) == (source, target)
    rng, found = random.Random(1), Counter()
    augmenter = TextAugmenter(tokenizer, 1, {"upper": 0.1, "title": 0.2, "typos": 0.3, "no_final_mark": 0.5})
    for _ in range(2000):
        made, of_target = augmenter.altered(source, target, rng)
        found["upper"] += made.isupper()
        found["title"] += of_target.istitle()
        found["no_final_mark"] += not made.endswith(".")
        assert made.endswith(".") == of_target.endswith(".") and made.isupper() == of_target.isupper()
        found["typos"] += made.rstrip(".").lower() != source.rstrip(".").lower()
    shares = {name: count / 2000 for name, count in found.items()}
    # A pair in capitals is no title.
    assert shares == pytest.approx({"upper": 0.1, "title": 0.18, "typos": 0.3, "no_final_mark": 0.5}, abs=0.04)


def test_a_pair_is_altered_alike_whatever_is_altered_before_it(tokenizer) -> None:
    sentences = [f"Several men in hard hats operate giant pulley number {i}." for i in range(50)]

    def altered(seed: int, repetition: int, numbers: range = range(50)) -> dict[int, tuple[str, str]]:
        augmenter = TextAugmenter(tokenizer, seed, {"upper": 0.2, "title": 0.2, "typos": 0.5, "no_final_mark": 0.5})
        return {i: augmenter.altered(sentences[i], sentences[i], augmenter.rng(i, repetition)) for i in numbers}

    first, second = altered(1, 0), altered(1, 1)
    assert first != second != altered(2, 1)
    assert altered(1, 0, range(30, 40)).items() <= first.items()
    assert altered(1, 1) == second


# ---- BPE-dropout -------------------------------------------------------------------------------------------------


def encodings(tokenizer, sentences) -> list:
    tokenizer("")
    return tokenizer.backend_tokenizer.encode_batch(sentences)


def split(tokenizer, sentences, p: float, seed: int = 1) -> list[list[int]]:
    dropout, rng = BpeDropout(tokenizer, p), random.Random(seed)
    return [dropout(encoding, rng) for encoding in encodings(tokenizer, sentences)]


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
    dropout, rng = BpeDropout(PreTrainedTokenizerFast(tokenizer_object=chain()), p), random.Random(1)
    ours = Counter(len(dropout(encoding, rng)) for encoding in chain().encode_batch(text * count))
    theirs = Counter(len(encoding.ids) for encoding in chain(p).encode_batch(text * count))
    for pieces in range(3, 13):
        assert ours[pieces] / count == pytest.approx(theirs[pieces] / count, abs=0.02)


@pytest.mark.slow
@pytest.mark.real_data
def test_ids_of_real_text_without_dropout_are_the_tokenizers(multi30k) -> None:
    paths = [multi30k / f"train.{side}" for side in ("en", "de", "fr")]
    lines = [line for path in paths for line in islice(path.read_text("utf-8").splitlines(), 1000)]
    tokenizer = train_tokenizer(lines, 3000)
    plain = [tokenizer(line)["input_ids"] for line in lines]
    assert split(tokenizer, lines, 1e-15) == plain
    made = split(tokenizer, lines, 0.1)
    assert tokenizer.batch_decode(made) == tokenizer.batch_decode(plain)
    # The paper's text grows by about a quarter.
    assert 1.1 < sum(map(len, made)) / sum(map(len, plain)) < 1.5
