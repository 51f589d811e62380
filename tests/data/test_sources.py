"""Several sources in one corpus: their weights in an epoch, numbers, tags and evaluation sets."""

import logging
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from tokenizers import processors

from hf_vaswani.data import sources as corpus
from hf_vaswani.data.batching import BatchOrder
from hf_vaswani.data.sources import PairData, evaluation_texts
from hf_vaswani.data.tokenizer import load_tokenizer
from hf_vaswani.model.sentences_vaswani import LanguageTags, longest_source
from hf_vaswani.recipe import (
    AugmentRecipe,
    DataRecipe,
    EvaluationSetRecipe,
    Recipe,
    SourceRecipe,
    TokenizerRecipe,
    TrainingRecipe,
)
from hf_vaswani.translation.lines import cut_lines

DATA = PairData()
WORDS = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]


def write(folder: Path, language: str, count: int, empty: tuple[int, ...] = ()) -> dict[str, str]:
    """Writes two files of `count` lines, digits and digits in words; the lines in `empty` have no words."""
    lines = [" ".join(str(number * 7919)) for number in range(1, count + 1)]
    other = ["" if n in empty else f"{language}: {line}" for n, line in enumerate(lines, start=1)]
    files = {"en": folder / f"{language}.{count}.en", language: folder / f"{language}.{count}.{language}"}
    for path, text in zip(files.values(), (lines, other), strict=True):
        path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return {name: str(path) for name, path in files.items()}


def two_directions(folder: Path, weight: float = 1.0, **keys: object) -> Recipe:
    german, french = write(folder, "de", 50, empty=(4,)), write(folder, "fr", 30, empty=(1, 30))
    small = {language: write(folder, language, 5) for language in ("de", "fr")}
    return Recipe(
        data=DataRecipe(train_files=german, validation_files=small["de"], target_tag=True, **keys),
        more_data=[
            SourceRecipe(
                target_language="fr",
                train_files=french,
                validation_files=small["fr"],
                test_files=small["fr"],
                weight=weight,
            )
        ],
        tokenizer=TokenizerRecipe(vocab_size=280),
        training=TrainingRecipe(tokens_per_batch=200),
    )


def epochs(updates, count: int = 1) -> list[Counter[int]]:
    """Counts each pair in each of the first epochs."""
    found: list[Counter[int]] = [Counter() for _ in range(count)]
    for batches, position in updates.after(updates.start):
        for batch in batches:
            found[position["epoch"]].update(batch["numbers"].tolist())
        if position == {"epoch": count - 1, "update": len(updates.sampler.updates())}:
            return found
    raise AssertionError("Updates have no end.")


# 50 lines of the first source and then 30 of the second, of which these have text on both sides.
GERMAN = set(range(1, 51)) - {4}
FRENCH = set(range(51, 81)) - {51, 80}


def test_an_epoch_has_every_pair_of_every_source_once(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    sources = DATA.read(recipe)
    updates = DATA.build_updates(recipe, sources, DATA.make_tokenizer(recipe, sources))
    assert epochs(updates, 2) == [Counter(GERMAN | FRENCH)] * 2


@pytest.mark.parametrize(("weight", "often"), [(2, 56), (0.5, 14), (1.25, 35), (0.001, 1)])
def test_a_weight_repeats_or_samples_pairs_in_an_epoch(tmp_path, weight, often) -> None:
    recipe = two_directions(tmp_path, weight)
    sources = DATA.read(recipe)
    first, second = epochs(DATA.build_updates(recipe, sources, DATA.make_tokenizer(recipe, sources)), 2)
    for numbers in (first, second):
        assert {number: numbers[number] for number in numbers if number <= 50} == dict.fromkeys(GERMAN, 1)
        french = {number: numbers[number] for number in FRENCH}
        assert set(numbers) <= GERMAN | FRENCH
        assert sum(french.values()) == often
        assert set(french.values()) <= {int(weight), -int(-weight // 1)}
    # Each epoch draws another half.
    assert (first == second) == (weight == 2)
    assert epochs(DATA.build_updates(recipe, sources, DATA.make_tokenizer(recipe, sources)), 2) == [first, second]


def test_a_tag_is_in_front_of_every_source_sentence(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    tags = tokenizer.convert_tokens_to_ids(["<2de>", "<2fr>"])
    assert tags == [len(tokenizer) - 2, len(tokenizer) - 1]
    assert len(tokenizer) <= 280
    updates = DATA.build_updates(recipe, sources, tokenizer)
    for batches, position in updates.after(updates.start):
        for batch in batches:
            german = batch["numbers"] <= 50
            assert (batch["input_ids"][:, 0] == german * tags[0] + ~german * tags[1]).all()
            assert not sum((batch["input_ids"][:, 1:] == tag).sum() + (batch["labels"] == tag).sum() for tag in tags)
        if position["update"] == len(updates.sampler.updates()):
            break


def test_each_direction_has_its_sets(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    sets = DATA.encode_sets(recipe, sources, tokenizer)
    assert {split: [part.name for part in parts] for split, parts in sets.items()} == {
        "validation": ["en-de", "en-fr"],
        "test": ["en-fr"],
    }
    french = sets["validation"][1]
    assert french.source[0] == "<2fr> 7 9 1 9"
    assert french.target[0] == "fr: 7 9 1 9"
    # Translated text has the same ids as in training.
    assert tokenizer(french.source)["input_ids"] == french.encoded["source_ids"][:]


def test_a_given_vocabulary_gets_the_missing_tags(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    sources = DATA.read(recipe)
    recipe.data.target_tag = False
    untagged = DATA.read(recipe)
    plain = DATA.make_tokenizer(recipe, untagged)
    assert "<2de>" not in plain.get_vocab()
    plain.save_pretrained(tmp_path / "given")
    recipe.tokenizer.path = str(tmp_path / "given")
    tagged = DATA.make_tokenizer(recipe, sources)
    assert len(tagged) == len(plain) + 2
    assert tagged("<2fr> 7 9")["input_ids"] == [len(plain) + 1, *plain("7 9")["input_ids"]]


def test_a_vocabulary_that_does_not_end_its_sentences_is_refused(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    sources = DATA.read(recipe)
    endless = DATA.make_tokenizer(recipe, sources)
    endless.backend_tokenizer.post_processor = processors.ByteLevel()
    endless.save_pretrained(tmp_path / "endless")
    recipe.tokenizer.path = str(tmp_path / "endless")
    with pytest.raises(ValueError, match=r"endless \(tokenizer.path\) does not put </s> after a sentence"):
        DATA.make_tokenizer(recipe, sources)


def test_two_target_languages_without_tags_are_warned_about(tmp_path, caplog) -> None:
    recipe = two_directions(tmp_path)
    DATA.read(recipe)
    assert not caplog.records
    recipe.data.target_tag = False
    DATA.read(recipe)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "languages are de, fr, but the source sentences have no tag" in warning and "data.target_tag" in warning


def test_a_stream_of_two_sources_has_tags_and_numbers_of_each(tmp_path) -> None:
    recipe = two_directions(tmp_path, streaming=True, stream_window=20)
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    updates = DATA.build_updates(recipe, sources, tokenizer)
    files = [[Path(path).name, Path(path).stat().st_size] for path in recipe.data.train_files.values()]
    assert len(files) == 2 and updates.fingerprint["streams"][0] == {"files": files}
    numbers: list[int] = []
    for batches, position in updates.after(updates.start):
        for batch in batches:
            numbers += batch["numbers"].tolist()
            second = batch["numbers"] > 10**12
            tags = tokenizer.convert_tokens_to_ids(["<2de>", "<2fr>"])
            assert (batch["input_ids"][:, 0] == ~second * tags[0] + second * tags[1]).all()
        if position["update"] == 0 and position["places"][0]["passes"] == 1:
            break
    assert sorted(number for number in numbers if number < 10**12) == sorted(GERMAN)
    french = Counter(number - 10**12 for number in numbers if number > 10**12)
    # Mixed 50 to 50, so each occurs once or twice; two of the lines are empty.
    assert french == Counter([*range(1, 31), *range(1, 21)]) - Counter({1: 2, 30: 2})


def test_a_source_without_text_is_named(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    for path in recipe.more_data[0].train_files.values():
        Path(path).write_text("\n\n")
    with pytest.raises(
        ValueError, match=r"The train set of en-fr is empty: there is no pair .* in .*fr\.30\.en and .*fr\.30\.fr"
    ):
        DATA.read(recipe)
    recipe.more_data[0].train_files = None
    with pytest.raises(ValueError, match=r"no training text for en-fr: set more_data\.train_files"):
        DATA.read(recipe)


def test_an_update_is_shared_by_the_processes_of_a_launch() -> None:
    recipe = Recipe(training=TrainingRecipe(tokens_per_update=4096, tokens_per_batch=1024))
    order = corpus.batch_order(recipe, 2, 1)
    assert (order.tokens_per_batch, order.batches_per_update, order.num_processes) == (1024, 2, 2)
    recipe.task = "masked_lm"
    with pytest.raises(ValueError, match=r"leaves batches of 256 tokens to 16 processes, fewer than objective.block"):
        corpus.batch_order(recipe, 16, 0)


def test_the_settings_of_the_recipe_reach_the_updates(tmp_path, monkeypatch) -> None:
    recipe = two_directions(tmp_path, stream_window=7, num_proc=3)
    recipe.seed, recipe.training.accumulation_steps, recipe.training.data_workers = 9, 4, 2
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    processes, encode = [], corpus.encode_pairs

    def spy(*arguments):
        processes.append(arguments[4])
        return encode(*arguments[:4])

    monkeypatch.setattr(corpus, "encode_pairs", spy)
    updates = DATA.build_updates(recipe, sources, tokenizer, (), 2, 1)
    sampler = updates.sampler
    assert sampler.order == BatchOrder(200, seed=9, batches_per_update=4, num_processes=2, process_index=1)
    assert (updates.loader.num_workers, processes) == (2, [3, 3])
    recipe.data.streaming = True
    stream = DATA.build_updates(recipe, DATA.read(recipe), tokenizer, (), 2, 1)
    assert (stream.size, stream.num_workers) == (7, 2)
    assert stream.order == sampler.order


def test_text_with_chance_in_it_is_encoded_anew_in_each_epoch(tmp_path) -> None:
    recipe = two_directions(tmp_path, weight=2, stream_window=30, augment=AugmentRecipe(upper=0.5))
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    updates = DATA.build_updates(recipe, sources, tokenizer)
    tags = tokenizer.convert_tokens_to_ids(["<2de>", "<2fr>"])
    counts: list[Counter[int]] = [Counter(), Counter()]
    targets: list[set[tuple[int, str]]] = [set(), set()]
    for batches, position in updates.after(updates.start):
        done = position["window"] == position["update"] == 0
        epoch = position["epoch"] - done
        for batch in batches:
            german = batch["numbers"] <= 50
            assert (batch["input_ids"][:, 0] == german * tags[0] + ~german * tags[1]).all()
            labels = tokenizer.batch_decode(batch["labels"].clamp(min=0), skip_special_tokens=True)
            targets[epoch] |= set(zip(batch["numbers"].tolist(), labels, strict=True))
            counts[epoch].update(batch["numbers"].tolist())
        if done and epoch == 1:
            break
    assert counts == [Counter(GERMAN) + Counter([*FRENCH, *FRENCH])] * 2
    # The lines are "de: 7 9 1 9" or, in capitals, "DE: 7 9 1 9".
    assert all({text[:3] for _, text in found} == {"de:", "DE:", "fr:", "FR:"} for found in targets)
    assert targets[0] != targets[1]
    recipe.data.augment = AugmentRecipe()
    assert epochs(DATA.build_updates(recipe, sources, tokenizer))[0] == counts[0]


def test_a_given_vocabulary_without_merges_cannot_skip_them(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    sources = DATA.read(recipe)
    recipe.tokenizer = TokenizerRecipe(kind="unigram", vocab_size=60)
    DATA.make_tokenizer(recipe, sources).save_pretrained(tmp_path / "unigram")
    recipe.tokenizer = TokenizerRecipe(path=str(tmp_path / "unigram"), bpe_dropout=0.1)
    with pytest.raises(ValueError, match="bpe_dropout is 0.1, but the vocabulary has no merges.*kind is Unigram"):
        DATA.build_updates(recipe, sources, DATA.make_tokenizer(recipe, sources))


def test_an_altered_test_set_must_fit_the_model(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    recipe.tokenizer.vocab_size = 320
    recipe.model.position_encoding, recipe.evaluation.altered = "learned", ["no_final_mark", "upper"]
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    longest = max(len(tokenizer(text)["input_ids"]) for text in sources[1].pairs["test"]["target"])
    DATA.encode_sets(recipe, sources, tokenizer)
    # FR: has more pieces than fr:, which is in the vocabulary.
    recipe.model.max_position_embeddings = longest
    with pytest.raises(ValueError, match=r"altered test \(upper\) set has a side of \d+ tokens"):
        DATA.encode_sets(recipe, sources, tokenizer)


def test_two_sources_of_one_direction_have_their_own_sets(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    recipe.more_data.append(recipe.more_data[0])
    sources = DATA.read(recipe)
    sets = DATA.encode_sets(recipe, sources, DATA.make_tokenizer(recipe, sources))
    assert [part.name for part in sets["validation"]] == ["en-de", "en-fr", "en-fr.2"]
    assert [part.name for part in sets["test"]] == ["en-fr", "en-fr.2"]


def test_a_truncated_stream_names_its_file(tmp_path) -> None:
    """The errors of `datasets` do not name the file."""
    path = tmp_path / "text.parquet"
    Dataset.from_dict({"en": [f"text {i}" for i in range(500)], "de": ["b"] * 500}).to_parquet(path)
    content = bytearray(path.read_bytes())
    content[100:200] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"text\.parquet cannot be read: OSError"):
        DATA.read(Recipe(data=DataRecipe(train_files=str(path), streaming=True)))


@pytest.mark.parametrize("trained", [True, False])
def test_a_tokenizer_truncates_to_the_models_length_on_request(tmp_path, trained, caplog, monkeypatch) -> None:
    files, line = write(tmp_path, "de", 50), " ".join("7919" * 30)
    (tmp_path / "long.en").write_text(Path(files["en"]).read_text() + line + "\n")
    (tmp_path / "long.de").write_text(Path(files["de"]).read_text() + line + "\n")
    files = {language: str(tmp_path / f"long.{language}") for language in files}
    recipe = Recipe(data=DataRecipe(train_files=files, test_files=files), tokenizer=TokenizerRecipe(vocab_size=280))
    recipe.model.max_position_embeddings = 100
    sources = DATA.read(recipe)
    if not trained:
        DATA.make_tokenizer(recipe, sources).save_pretrained(tmp_path / "other")
        recipe.tokenizer.path, recipe.model.max_position_embeddings = str(tmp_path / "other"), 90
    DATA.make_tokenizer(recipe, sources).save_pretrained(tmp_path / "tokenizer")
    tokenizer, limit = load_tokenizer(str(tmp_path / "tokenizer")), recipe.model.max_position_embeddings
    assert tokenizer.model_max_length == limit
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    ids = tokenizer(line, truncation=True)["input_ids"]
    assert len(ids) == limit and ids[-1] == tokenizer.eos_token_id
    # Training text is never truncated, even after a call with truncation, and there is no warning.
    (evaluation,) = DATA.encode_sets(recipe, sources, tokenizer)["test"]
    assert len(evaluation.encoded[50]["source_ids"]) == 121
    lengths = DATA.build_updates(recipe, sources, tokenizer).sampler.lengths
    assert lengths.max(axis=0).tolist() == [121, 121]
    # Text without words would be kept.
    (parts,) = cut_lines([f"de: {line}"], LanguageTags(tokenizer), longest_source([], tokenizer))
    assert len(parts.spans) > 1
    assert "longer than the specified maximum" not in caplog.text


# ---- Validation sets by name -------------------------------------------------------------------------------------


def named(folder: Path, **sets: Any) -> Recipe:
    """A recipe of two directions with tags, and sets by name."""
    recipe = two_directions(folder)
    recipe.validation_sets = {name: EvaluationSetRecipe(**keys) for name, keys in sets.items()}
    return recipe


def own_text(folder: Path) -> dict[str, str]:
    files = {}
    for language in ("en", "de"):
        files[language] = str(folder / f"own.{language}")
        Path(files[language]).write_text(f"{language}: one\n{language}: two\n")
    return files


def test_sets_by_name_come_after_those_of_the_sources(tmp_path) -> None:
    recipe = named(tmp_path, web={"validation_files": own_text(tmp_path)}, law={"test_files": own_text(tmp_path)})
    sources, more = DATA.read(recipe), DATA.read_sets(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    sets = DATA.encode_sets(recipe, [*sources, *more], tokenizer)
    names = {split: [part.name for part in parts] for split, parts in sets.items()}
    assert names == {"validation": ["en-de", "en-fr", "web"], "test": ["en-fr", "law"]}
    web = sets["validation"][2]
    assert web.source == ["<2de> en: one", "<2de> en: two"] and web.plain == ["en: one", "en: two"]
    assert web.target == ["de: one", "de: two"] and web.target_language == "de"
    assert tokenizer(web.source)["input_ids"] == web.encoded["source_ids"][:]
    # Neither vocabulary nor updates have their text.
    assert DATA.build_updates(recipe, sources, tokenizer).fingerprint["pairs"] == len(GERMAN) + len(FRENCH)
    texts = evaluation_texts(DATA.read_evaluation(recipe), "test")
    assert [(text.name, text.source) for text in texts] == [(part.name, part.source) for part in sets["test"]]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "validation_sets.web has no text: set its validation_files, its test_files or its dataset"),
        ({"validation_files": "EMPTY"}, "The validation set of web is empty"),
        ({"test_files": "nowhere.tsv"}, "nowhere.tsv"),
        ({"test_files": "OWN", "target_language": "es"}, "languages are en and es"),
        (
            {"test_files": "TABLE", "target_language": "es"},
            "validation_sets.web has the target language 'es', for which the model has no tag",
        ),
    ],
)
def test_a_set_that_cannot_be_used_is_named(tmp_path, keys, words) -> None:
    (tmp_path / "empty.tsv").write_text("en\tde\n")
    (tmp_path / "table.tsv").write_text("en\tes\none\tuno\n")
    there = {"EMPTY": str(tmp_path / "empty.tsv"), "TABLE": str(tmp_path / "table.tsv"), "OWN": own_text(tmp_path)}
    recipe = named(tmp_path, web={key: there.get(value, value) for key, value in keys.items()})
    with pytest.raises((ValueError, OSError), match=words):
        DATA.read_sets(recipe)


def test_a_tag_that_the_vocabulary_lacks_is_named(tmp_path) -> None:
    (tmp_path / "table.tsv").write_text("en\tes\none\tuno\n")
    recipe = named(tmp_path, web={"test_files": str(tmp_path / "table.tsv"), "target_language": "es"})
    # Another vocabulary may have more tags than the recipe has languages.
    tokenizer = DATA.make_tokenizer(recipe, DATA.read(recipe))
    recipe.tokenizer.path = "given"
    with pytest.raises(ValueError, match="The vocabulary has no tag for the target language 'es', only for de, fr"):
        DATA.encode_sets(recipe, DATA.read_sets(recipe), tokenizer)


# ---- Prefixes ----------------------------------------------------------------------------------------------------


def prefixed(folder: Path, first: str | None, second: str | None, tags: bool = True, **keys: object) -> Recipe:
    recipe = two_directions(folder, **keys)
    recipe.data.prefix, recipe.more_data[0].prefix, recipe.data.target_tag = first, second, tags
    # The tags of the second direction are then all that tells the sources apart.
    recipe.tokenizer.vocab_size = 300
    return recipe


def first_tokens(recipe: Recipe, sources: list[corpus.Source], tokenizer: Any, count: int) -> dict[bool, set[str]]:
    """Returns the decoded beginnings of the sources in the first updates, by whether they are of the first source."""
    updates, found = DATA.build_updates(recipe, sources, tokenizer), {True: set(), False: set()}
    for done, (batches, _) in enumerate(updates.after(updates.start)):
        for batch in batches:
            for number, ids in zip(batch["numbers"].tolist(), batch["input_ids"].tolist(), strict=True):
                found[number <= 50].add(tokenizer.decode(ids[:count]))
        if done == 15:
            return found
    raise AssertionError("Updates have no end.")


@pytest.mark.parametrize("more", [{}, {"streaming": True, "stream_window": 20}, {"augment": AugmentRecipe(1, 1, 1)}])
@pytest.mark.parametrize("tags", [True, False])
def test_a_prefix_in_angle_brackets_is_one_entry_after_the_tag(tmp_path, tags, more) -> None:
    recipe = prefixed(tmp_path, None, "<bt>", tags, **more)
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    entries = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert entries[-(3 if tags else 1) :] == (["<2de>", "<2fr>", "<bt>"] if tags else ["<bt>"])
    assert len(tokenizer) <= 300
    found = first_tokens(recipe, sources, tokenizer, 2 if tags else 1)
    assert {text.replace(" ", "") for text in found[False]} == {"<2fr><bt>" if tags else "<bt>"}
    assert not any("<bt>" in text for text in found[True])
    (_, french), (test,) = DATA.encode_sets(recipe, sources, tokenizer).values()
    front = "<2fr> <bt>" if tags else "<bt>"
    assert french.source[0] == test.source[0] == f"{front} 7 9 1 9" and french.plain[0] == "7 9 1 9"
    assert tokenizer(french.source)["input_ids"] == french.encoded["source_ids"][:]
    assert french.with_front(["A b.", " "]) == [f"{front} A b.", ""]
    # The sentence itself has the ids that it has without anything in front.
    assert french.encoded["source_ids"][0][2 if tags else 1 :] == tokenizer("7 9 1 9")["input_ids"]


def test_another_prefix_is_text_in_front_of_the_sentence(tmp_path) -> None:
    recipe = prefixed(tmp_path, "translate to German:", None, tags=False)
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    assert not tokenizer.get_added_vocab().keys() - {"<pad>", "<s>", "</s>", "<unk>"}
    german = DATA.encode_sets(recipe, sources, tokenizer)["validation"][0]
    assert german.source[0] == "translate to German: 7 9 1 9"
    assert tokenizer(german.source)["input_ids"] == german.encoded["source_ids"][:]
    # The vocabulary is trained on what is encoded, so it can spell the prefix.
    recipe.tokenizer = TokenizerRecipe(kind="words", vocab_size=60)
    words = DATA.make_tokenizer(recipe, sources)
    assert words.unk_token_id not in words("translate to German:")["input_ids"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_fingerprint_has_the_prefixes(tmp_path, streaming) -> None:
    found = []
    for prefix in (None, "<bt>", "<tb>"):
        recipe = prefixed(tmp_path, None, prefix, streaming=streaming)
        sources = DATA.read(recipe)
        found.append(DATA.build_updates(recipe, sources, DATA.make_tokenizer(recipe, sources)).fingerprint)
    assert found[0] != found[1] != found[2] and "prefixes" not in found[0]
    # Their lengths are the same.
    assert found[1] | {"prefixes": None} == found[2] | {"prefixes": None}


def test_a_given_vocabulary_gets_the_prefix_unless_it_is_a_special_token(tmp_path) -> None:
    recipe = prefixed(tmp_path, None, None)
    DATA.make_tokenizer(recipe, DATA.read(recipe)).save_pretrained(tmp_path / "given")
    recipe.tokenizer.path, recipe.more_data[0].prefix = str(tmp_path / "given"), "<bt>"
    sources = DATA.read(recipe)
    tokenizer = DATA.make_tokenizer(recipe, sources)
    assert tokenizer.convert_ids_to_tokens(len(tokenizer) - 1) == "<bt>"
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(tmp_path / "given")
    recipe.more_data[0].prefix = "<mask>"
    with pytest.raises(ValueError, match=r"The prefix '<mask>' is a special token of the tokenizer .*given"):
        DATA.make_tokenizer(recipe, DATA.read(recipe))


def test_a_named_set_has_its_own_prefix_which_the_vocabulary_must_have(tmp_path) -> None:
    keys = {"test_files": own_text(tmp_path)}
    recipe = named(tmp_path, web=keys, law=keys | {"prefix": "<bt>"})
    with pytest.raises(ValueError, match="validation_sets.law.prefix is '<bt>', for which the model has no entry"):
        DATA.read_sets(recipe)
    recipe.more_data[0].prefix = "<bt>"
    texts = evaluation_texts(DATA.read_sets(recipe), "test")
    assert [text.source[0] for text in texts] == ["<2de> en: one", "<2de> <bt> en: one"]
    # Another vocabulary is known only when it is loaded.
    recipe.more_data[0].prefix, recipe.tokenizer.path = None, "given"
    tokenizer = DATA.make_tokenizer(two_directions(tmp_path), DATA.read(recipe))
    with pytest.raises(ValueError, match="The vocabulary has no entry for the prefix '<bt>'.*initialize.add_tokens"):
        DATA.encode_sets(recipe, DATA.read_sets(recipe), tokenizer)


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
@pytest.mark.parametrize("streaming", [False, True])
def test_each_type_of_text_in_arrow_is_trained_on(tmp_path, kind, streaming) -> None:
    files = write(tmp_path, "de", 60)
    sides = {name: Path(file).read_text("utf-8").splitlines() for name, file in files.items()}
    for name, of in (("plain", pa.string()), ("other", kind)):
        columns = {side: pa.array(lines).cast(of) for side, lines in sides.items()}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    found = []
    for file in (files, *(str(tmp_path / f"{name}.parquet") for name in ("plain", "other"))):
        recipe = Recipe(
            data=DataRecipe(train_files=file, validation_files=file, streaming=streaming, stream_window=25),
            tokenizer=TokenizerRecipe(vocab_size=300),
            training=TrainingRecipe(tokens_per_batch=200),
        )
        sources = DATA.read(recipe)
        tokenizer = DATA.make_tokenizer(recipe, sources)
        updates = DATA.build_updates(recipe, sources, tokenizer)
        some = islice(updates.after(updates.start), 4)
        (validation,) = DATA.encode_sets(recipe, sources, tokenizer)["validation"]
        found.append(([batch["labels"].tolist() for batches, _ in some for batch in batches], validation.target))
    assert found[0] == found[1] == found[2] and len(found[0][0]) >= 4


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.process)])
def test_held_out_text_is_counted_in_the_training_text(tmp_path, processes) -> None:
    recipe = two_directions(tmp_path)
    ours, other = tmp_path / "ours", tmp_path / "other"
    # The first source is in the training text, the second target, and the third pair on the other side.
    lines = {"en": ["7 9 1 9", "none", "de: 2 3 7 5 7"], "de": ["none", "DE:  1 5 8 3 8", "2 3 7 5 7"]}
    for folder, some in ((ours, 3), (other, 1)):
        folder.mkdir()
        for side, text in lines.items():
            (folder / side).write_text("".join(f"{line}\n" for line in text[:some]), encoding="utf-8")
    recipe.data.test_files, recipe.data.validation_files = ({s: str(f / s) for s in lines} for f in (ours, other))
    sources = DATA.read(recipe)
    expected = [{"validation": 1, "test": 2}, {"validation": 5, "test": 5}]
    assert DATA.count_held_out(sources, processes) == expected
    # The result is cached, and is that of this text alone.
    assert DATA.count_held_out(sources) == expected
    (ours / "en").write_text("none\nnone\nnone\n")
    assert DATA.count_held_out(DATA.read(recipe), processes)[0] == {"validation": 1, "test": 1}
