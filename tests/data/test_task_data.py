"""Several sources in one run: their weights in an epoch, numbers, settings and evaluation sets."""

import logging
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from hf_vaswani.data import pairs
from hf_vaswani.data.batching import BatchOrder
from hf_vaswani.data.pairs import evaluation_texts
from hf_vaswani.data.tokenizer import load_tokenizer
from hf_vaswani.model.sentences_vaswani import LanguageTags, longest_source
from hf_vaswani.recipe import AugmentRecipe, DataRecipe, Recipe, TokenizerRecipe, TrainingRecipe
from hf_vaswani.training.preparation import batch_order, task_data
from hf_vaswani.translation.lines import cut_lines

from .texts import FRENCH, GERMAN, build_updates, epochs, named, own_text, prepared, two_directions, write


@pytest.mark.parametrize(("weight", "often"), [(1, 28), (2, 56), (0.5, 14), (1.25, 35), (0.001, 1)])
def test_a_weight_repeats_or_samples_pairs_in_an_epoch(tmp_path, weight, often) -> None:
    recipe = two_directions(tmp_path, weight)
    sources = task_data(recipe).read()
    first, second = epochs(build_updates(recipe, sources, task_data(recipe).make_tokenizer(sources)), 2)
    for numbers in (first, second):
        assert {number: numbers[number] for number in numbers if number <= 50} == dict.fromkeys(GERMAN, 1)
        french = {number: numbers[number] for number in FRENCH}
        assert set(numbers) <= GERMAN | FRENCH
        assert sum(french.values()) == often
        assert set(french.values()) <= {int(weight), -int(-weight // 1)}
    # Each epoch draws another half.
    assert (first == second) == (weight in (1, 2))
    assert epochs(build_updates(recipe, sources, task_data(recipe).make_tokenizer(sources)), 2) == [first, second]


def test_each_source_has_its_sets(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    recipe.more_data.append(recipe.more_data[0])
    sources, tokenizer = prepared(recipe)
    sets = task_data(recipe).encode_sets(sources, tokenizer)
    assert {split: [part.name for part in parts] for split, parts in sets.items()} == {
        "validation": ["en-de", "en-fr", "en-fr.2"],
        "test": ["en-fr", "en-fr.2"],
    }
    french = sets["validation"][1]
    assert french.source[0] == "<2fr> 7 9 1 9"
    assert french.target[0] == "fr: 7 9 1 9"
    # Translated text has the same ids as in training.
    assert tokenizer(french.source)["input_ids"] == french.encoded["source_ids"][:]


def test_a_source_without_text_is_named(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    for path in recipe.more_data[0].train_files.values():
        Path(path).write_text("\n\n")
    with pytest.raises(
        ValueError, match=r"The train set of en-fr is empty: there is no pair .* in .*fr\.30\.en and .*fr\.30\.fr"
    ):
        task_data(recipe).read()
    recipe.more_data[0].train_files = None
    with pytest.raises(ValueError, match=r"no training text for en-fr: set more_data\.train_files"):
        task_data(recipe).read()


def test_an_update_is_shared_by_the_processes_of_a_launch() -> None:
    recipe = Recipe(training=TrainingRecipe(tokens_per_update=4096, tokens_per_batch=1024))
    order = batch_order(recipe, 2, 1)
    assert (order.tokens_per_batch, order.batches_per_update, order.num_processes) == (1024, 2, 2)


def test_the_settings_of_the_recipe_reach_the_updates(tmp_path, monkeypatch) -> None:
    recipe = two_directions(tmp_path, stream_window=7, num_proc=3)
    recipe.seed, recipe.training.accumulation_steps, recipe.training.data_workers = 9, 4, 2
    sources, tokenizer = prepared(recipe)
    processes, encode = [], pairs.encode_pairs

    def spy(*arguments):
        processes.append(arguments[4])
        return encode(*arguments[:4])

    monkeypatch.setattr(pairs, "encode_pairs", spy)
    updates = build_updates(recipe, sources, tokenizer, (), 2, 1)
    sampler = updates.sampler
    assert sampler.order == BatchOrder(200, seed=9, batches_per_update=4, num_processes=2, process_index=1)
    assert (updates.loader.num_workers, processes) == (2, [3, 3])
    recipe.data.streaming, recipe.data.augment, recipe.tokenizer.bpe_dropout = True, AugmentRecipe(upper=0.5), 0.2
    stream = build_updates(recipe, task_data(recipe).read(), tokenizer, (), 2, 1)
    augmenter = stream.encoder.augmenter
    assert (augmenter.seed, augmenter.probabilities["upper"], augmenter.dropout.p) == (9, 0.5, 0.2)
    assert (stream.size, stream.num_workers) == (7, 2)
    assert stream.order == sampler.order
    files = [[Path(path).name, Path(path).stat().st_size] for path in recipe.data.train_files.values()]
    assert len(files) == 2 and stream.fingerprint["streams"][0] == {"files": files}


def test_a_truncated_stream_names_its_file(tmp_path) -> None:
    """The errors of `datasets` do not name the file."""
    path = tmp_path / "text.parquet"
    Dataset.from_dict({"en": [f"text {i}" for i in range(500)], "de": ["b"] * 500}).to_parquet(path)
    content = bytearray(path.read_bytes())
    content[100:200] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"text\.parquet cannot be read: OSError"):
        task_data(Recipe(data=DataRecipe(train_files=str(path), streaming=True))).read()


@pytest.mark.parametrize("trained", [True, False])
def test_a_tokenizer_truncates_to_the_models_length_on_request(tmp_path, trained, caplog, monkeypatch) -> None:
    files, line = write(tmp_path, "de", 50), " ".join("7919" * 30)
    (tmp_path / "long.en").write_text(Path(files["en"]).read_text() + line + "\n")
    (tmp_path / "long.de").write_text(Path(files["de"]).read_text() + line + "\n")
    files = {language: str(tmp_path / f"long.{language}") for language in files}
    recipe = Recipe(data=DataRecipe(train_files=files, test_files=files), tokenizer=TokenizerRecipe(vocab_size=280))
    recipe.model.max_position_embeddings = 100
    sources = task_data(recipe).read()
    if not trained:
        task_data(recipe).make_tokenizer(sources).save_pretrained(tmp_path / "other")
        recipe.tokenizer.path, recipe.model.max_position_embeddings = str(tmp_path / "other"), 90
    task_data(recipe).make_tokenizer(sources).save_pretrained(tmp_path / "tokenizer")
    tokenizer, limit = load_tokenizer(str(tmp_path / "tokenizer")), recipe.model.max_position_embeddings
    assert tokenizer.model_max_length == limit
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    ids = tokenizer(line, truncation=True)["input_ids"]
    assert len(ids) == limit and ids[-1] == tokenizer.eos_token_id
    # Training text is never truncated, even after a call with truncation, and there is no warning.
    (evaluation,) = task_data(recipe).encode_sets(sources, tokenizer)["test"]
    assert len(evaluation.encoded[50]["source_ids"]) == 121
    lengths = build_updates(recipe, sources, tokenizer).sampler.lengths
    assert lengths.max(axis=0).tolist() == [121, 121]
    # Text without words would be kept.
    (parts,) = cut_lines([f"de: {line}"], LanguageTags(tokenizer), longest_source([], tokenizer))
    assert len(parts.spans) > 1
    assert "longer than the specified maximum" not in caplog.text


def test_sets_by_name_come_after_those_of_the_sources(tmp_path) -> None:
    recipe = named(tmp_path, web={"validation_files": own_text(tmp_path)}, law={"test_files": own_text(tmp_path)})
    sources, more = task_data(recipe).read(), task_data(recipe).read_sets()
    tokenizer = task_data(recipe).make_tokenizer(sources)
    sets = task_data(recipe).encode_sets([*sources, *more], tokenizer)
    names = {split: [part.name for part in parts] for split, parts in sets.items()}
    assert names == {"validation": ["en-de", "en-fr", "web"], "test": ["en-fr", "law"]}
    web = sets["validation"][2]
    assert web.source == ["<2de> en: one", "<2de> en: two"] and web.plain == ["en: one", "en: two"]
    assert web.target == ["de: one", "de: two"] and web.target_language == "de"
    assert tokenizer(web.source)["input_ids"] == web.encoded["source_ids"][:]
    # Neither vocabulary nor updates have their text.
    assert build_updates(recipe, sources, tokenizer).fingerprint["pairs"] == len(GERMAN) + len(FRENCH)
    texts = evaluation_texts(task_data(recipe).read_evaluation(), "test")
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
        task_data(recipe).read_sets()


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
        sources, tokenizer = prepared(recipe)
        updates = build_updates(recipe, sources, tokenizer)
        some = islice(updates.after(updates.start), 4)
        (validation,) = task_data(recipe).encode_sets(sources, tokenizer)["validation"]
        found.append(([batch["labels"].tolist() for batches, _ in some for batch in batches], validation.target))
    assert found[0] == found[1] == found[2] and len(found[0][0]) >= 4
