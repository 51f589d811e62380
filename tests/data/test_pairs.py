"""Sentence pairs: tags, prefixes and alterations reach their ids, and held-out text is found in them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from hf_vaswani.data.pairs import evaluation_texts
from hf_vaswani.data.reading import Source
from hf_vaswani.recipe import AugmentRecipe, Recipe, TokenizerRecipe
from hf_vaswani.training.preparation import task_data

from .texts import FRENCH, GERMAN, build_updates, epochs, named, own_text, prepared, two_directions


def test_a_vocabulary_that_does_not_end_its_sentences_is_refused(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    sources = task_data(recipe).read()
    endless = task_data(recipe).make_tokenizer(sources)
    endless.backend_tokenizer.post_processor = processors.ByteLevel()
    endless.save_pretrained(tmp_path / "endless")
    recipe.tokenizer.path = str(tmp_path / "endless")
    with pytest.raises(ValueError, match=r"endless \(tokenizer.path\) does not put </s> after a sentence"):
        task_data(recipe).make_tokenizer(sources)


def test_two_target_languages_without_tags_are_warned_about(tmp_path, caplog) -> None:
    recipe = two_directions(tmp_path)
    task_data(recipe).read()
    assert not caplog.records
    recipe.data.target_tag = False
    task_data(recipe).read()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "languages are de, fr, but the source sentences have no tag" in warning and "data.target_tag" in warning


def test_text_with_chance_in_it_is_encoded_anew_in_each_epoch(tmp_path) -> None:
    recipe = two_directions(tmp_path, weight=2, stream_window=30, augment=AugmentRecipe(upper=0.5))
    sources, tokenizer = prepared(recipe)
    updates = build_updates(recipe, sources, tokenizer)
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
    assert epochs(build_updates(recipe, sources, tokenizer))[0] == counts[0]


@pytest.mark.parametrize(("kind", "called"), [("unigram", "Unigram"), ("wordpiece", "WordPiece"), ("bytes", "bytes")])
def test_a_given_vocabulary_without_merges_cannot_skip_them(tmp_path, kind, called) -> None:
    recipe = two_directions(tmp_path)
    sources = task_data(recipe).read()
    recipe.tokenizer = TokenizerRecipe(kind=kind, vocab_size=300)
    task_data(recipe).make_tokenizer(sources).save_pretrained(tmp_path / "given")
    recipe.tokenizer = TokenizerRecipe(path=str(tmp_path / "given"), bpe_dropout=0.1)
    with pytest.raises(ValueError, match=f"bpe_dropout is 0.1, but the vocabulary has no merges.*kind is {called}"):
        build_updates(recipe, sources, task_data(recipe).make_tokenizer(sources))


def test_an_altered_test_set_must_fit_the_model(tmp_path) -> None:
    recipe = two_directions(tmp_path)
    recipe.tokenizer.vocab_size = 320
    recipe.model.position_encoding, recipe.evaluation.altered = "learned", ["no_final_mark", "upper"]
    sources, tokenizer = prepared(recipe)
    longest = max(len(tokenizer(text)["input_ids"]) for text in sources[1].splits["test"]["target"])
    task_data(recipe).encode_sets(sources, tokenizer)
    # FR: has more pieces than fr:, which is in the vocabulary.
    recipe.model.max_position_embeddings = longest
    with pytest.raises(ValueError, match=r"altered test \(upper\) set has a side of \d+ tokens"):
        task_data(recipe).encode_sets(sources, tokenizer)


def test_a_tag_that_the_vocabulary_lacks_is_named(tmp_path) -> None:
    (tmp_path / "table.tsv").write_text("en\tes\none\tuno\n")
    recipe = named(tmp_path, web={"test_files": str(tmp_path / "table.tsv"), "target_language": "es"})
    # Another vocabulary may have more tags than the recipe has languages.
    tokenizer = task_data(recipe).make_tokenizer(task_data(recipe).read())
    recipe.tokenizer.path = "given"
    with pytest.raises(ValueError, match="The vocabulary has no tag for the target language 'es', only for de, fr"):
        task_data(recipe).encode_sets(task_data(recipe).read_sets(), tokenizer)


def prefixed(folder: Path, first: str | None, second: str | None, tags: bool = True, **keys: object) -> Recipe:
    recipe = two_directions(folder, **keys)
    recipe.data.prefix, recipe.more_data[0].prefix, recipe.data.target_tag = first, second, tags
    # The tags of the second direction are then all that tells the sources apart.
    recipe.tokenizer.vocab_size = 300
    return recipe


def first_tokens(recipe: Recipe, sources: list[Source], tokenizer: Any, count: int) -> dict[bool, set[str]]:
    """Returns the decoded beginnings of the sources in the first updates, by whether they are of the first source."""
    updates, found = build_updates(recipe, sources, tokenizer), {True: set(), False: set()}
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
    sources, tokenizer = prepared(recipe)
    entries = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert entries[-(3 if tags else 1) :] == (["<2de>", "<2fr>", "<bt>"] if tags else ["<bt>"])
    assert len(tokenizer) <= 300
    found = first_tokens(recipe, sources, tokenizer, 2 if tags else 1)
    assert {text.replace(" ", "") for text in found[False]} == {"<2fr><bt>" if tags else "<bt>"}
    assert all(text.startswith("<2de>") == tags and "<bt>" not in text for text in found[True])
    (_, french), (test,) = task_data(recipe).encode_sets(sources, tokenizer).values()
    front = "<2fr> <bt>" if tags else "<bt>"
    assert french.source[0] == test.source[0] == f"{front} 7 9 1 9" and french.plain[0] == "7 9 1 9"
    assert tokenizer(french.source)["input_ids"] == french.encoded["source_ids"][:]
    assert french.with_prefix(["A b.", " "]) == [f"{front} A b.", ""]
    # The sentence itself has the ids that it has without anything in front.
    assert french.encoded["source_ids"][0][2 if tags else 1 :] == tokenizer("7 9 1 9")["input_ids"]


def test_another_prefix_is_text_in_front_of_the_sentence(tmp_path) -> None:
    recipe = prefixed(tmp_path, "translate to German:", None, tags=False)
    sources, tokenizer = prepared(recipe)
    assert not tokenizer.get_added_vocab().keys() - {"<pad>", "<s>", "</s>", "<unk>"}
    german = task_data(recipe).encode_sets(sources, tokenizer)["validation"][0]
    assert german.source[0] == "translate to German: 7 9 1 9"
    assert tokenizer(german.source)["input_ids"] == german.encoded["source_ids"][:]
    # The vocabulary is trained on what is encoded, so it can spell the prefix.
    recipe.tokenizer = TokenizerRecipe(kind="words", vocab_size=60)
    words = task_data(recipe).make_tokenizer(sources)
    assert words.unk_token_id not in words("translate to German:")["input_ids"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_fingerprint_has_the_prefixes(tmp_path, streaming) -> None:
    found = []
    for prefix in (None, "<bt>", "<tb>"):
        recipe = prefixed(tmp_path, None, prefix, streaming=streaming)
        sources = task_data(recipe).read()
        found.append(build_updates(recipe, sources, task_data(recipe).make_tokenizer(sources)).fingerprint)
    assert found[0] != found[1] != found[2] and "prefixes" not in found[0]
    # Their lengths are the same.
    assert found[1] | {"prefixes": None} == found[2] | {"prefixes": None}


def test_a_given_vocabulary_gets_missing_tags_and_prefixes_unless_they_are_special_tokens(tmp_path) -> None:
    recipe = prefixed(tmp_path, None, None, tags=False)
    plain = prepared(recipe)[1]
    assert "<2de>" not in plain.get_vocab()
    plain.save_pretrained(tmp_path / "given")
    recipe.tokenizer.path, recipe.more_data[0].prefix = str(tmp_path / "given"), "<bt>"
    recipe.data.target_tag = True
    tokenizer = prepared(recipe)[1]
    new = range(len(plain), len(plain) + 3)
    assert tokenizer.convert_ids_to_tokens(new) == ["<2de>", "<2fr>", "<bt>"] and len(tokenizer) == new.stop
    assert tokenizer("<2fr> 7 9")["input_ids"] == [new[1], *plain("7 9")["input_ids"]]
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(tmp_path / "given")
    recipe.more_data[0].prefix = "<mask>"
    with pytest.raises(ValueError, match=r"The prefix '<mask>' is a special token of the tokenizer .*given"):
        task_data(recipe).make_tokenizer(task_data(recipe).read())


def test_a_named_set_has_its_own_prefix_which_the_vocabulary_must_have(tmp_path) -> None:
    keys = {"test_files": own_text(tmp_path)}
    recipe = named(tmp_path, web=keys, law=keys | {"prefix": "<bt>"})
    with pytest.raises(ValueError, match="validation_sets.law.prefix is '<bt>', for which the model has no entry"):
        task_data(recipe).read_sets()
    recipe.more_data[0].prefix = "<bt>"
    texts = evaluation_texts(task_data(recipe).read_sets(), "test")
    assert [text.source[0] for text in texts] == ["<2de> en: one", "<2de> <bt> en: one"]
    # Another vocabulary is known only when it is loaded.
    recipe.more_data[0].prefix, recipe.tokenizer.path = None, "given"
    tokenizer = task_data(two_directions(tmp_path)).make_tokenizer(task_data(recipe).read())
    with pytest.raises(ValueError, match="The vocabulary has no entry for the prefix '<bt>'.*initialize.add_tokens"):
        task_data(recipe).encode_sets(task_data(recipe).read_sets(), tokenizer)


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.process)])
def test_held_out_text_is_counted_in_the_training_text(tmp_path, processes) -> None:
    recipe = two_directions(tmp_path, num_proc=processes)
    ours, other = tmp_path / "ours", tmp_path / "other"
    # The first source is in the training text, the second target, and the third pair on the other side.
    lines = {"en": ["7 9 1 9", "none", "de: 2 3 7 5 7"], "de": ["none", "DE:  1 5 8 3 8", "2 3 7 5 7"]}
    for folder, some in ((ours, 3), (other, 1)):
        folder.mkdir()
        for side, text in lines.items():
            (folder / side).write_text("".join(f"{line}\n" for line in text[:some]), encoding="utf-8")
    recipe.data.test_files, recipe.data.validation_files = ({s: str(f / s) for s in lines} for f in (ours, other))
    sources = task_data(recipe).read()
    expected = [{"validation": 1, "test": 2}, {"validation": 5, "test": 5}]
    assert task_data(recipe).count_held_out(sources) == expected
    # The result is cached, and is that of this text alone.
    assert task_data(recipe).count_held_out(sources) == expected
    (ours / "en").write_text("none\nnone\nnone\n")
    assert task_data(recipe).count_held_out(task_data(recipe).read())[0] == {"validation": 1, "test": 1}
