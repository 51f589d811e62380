"""Diversification: the recipes of its models, and the text that they translate."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hf_vaswani.data.reading import load_pairs
from hf_vaswani.recipe import Recipe
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.training.diversification import (
    backtranslation_recipe,
    check_diversification,
    final_recipe,
    members_of,
    recipe_of,
    reversed_recipe,
    write_texts,
)

from ..conftest import write_recipe

TEXT = """
run_dir: {folder}/run
seed: 5
data: {{train_files: {folder}/a.tsv, source_column: english, target_column: german, prefix: <a>}}
more_data: [{{train_files: {{en: {folder}/b.en, de: {folder}/b.de}}, weight: 2}}]
validation_sets:
  one: {{test_files: {folder}/a.tsv, source_column: english, target_column: german}}
  two: {{source_language: en, target_language: fr, test_files: {folder}/c.tsv}}
hub: {{repo_id: me/mine}}
diversification: {{models: 2}}
"""


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    (tmp_path / "a.tsv").write_text("english\tgerman\none\teins\ntwo\tzwei\none\tein\n", encoding="utf-8")
    (tmp_path / "b.en").write_text("three\none\n", encoding="utf-8")
    (tmp_path / "b.de").write_text("drei\neins\n", encoding="utf-8")
    return load_recipe([write_recipe(tmp_path, TEXT.format(folder=tmp_path))])


def test_each_model_has_a_seed_and_a_folder_and_publishes_nothing(recipe, tmp_path) -> None:
    members = members_of(recipe)
    assert [member.name for member in members] == ["forward.1", "forward.2", "backward.1", "backward.2"]
    assert [member.recipe.seed for member in members] == [5, 6, 5, 6]
    assert [member.recipe.language_pairs for member in members] == [[["en", "de"]]] * 2 + [[["de", "en"]]] * 2
    folder = Path(f"{recipe.run_dir}.diversified")
    assert [member.recipe.run_dir for member in members] == [str(folder / member.name) for member in members]
    assert all(member.recipe.hub.repo_id is None for member in members)
    assert [member.text.name for member in members] == ["text.en"] * 2 + ["text.de"] * 2
    forward = replace(recipe, diversification=replace(recipe.diversification, directions="forward", folder="f"))
    assert [str(member.output) for member in members_of(forward)] == ["f/forward.1.tsv", "f/forward.2.tsv"]


def test_the_other_direction_reads_the_same_text(recipe) -> None:
    other = reversed_recipe(recipe)
    assert (other.data.source_column, other.data.target_column) == ("german", "english")
    assert other.data.train_files == recipe.data.train_files and other.more_data[0].weight == 2
    sets = other.named_sets
    assert (sets["one"].source_language, sets["one"].target_language) == ("de", "en")
    assert sets["one"].source_column == "german"
    assert (sets["two"].source_language, sets["two"].target_language) == ("fr", "en")
    assert reversed_recipe(other) == recipe and recipe.data.source_language == "en", "the recipe itself is unchanged"


def test_the_text_is_each_sentence_once(recipe) -> None:
    write_texts(recipe)
    folder = members_of(recipe)[0].text.parent
    assert (folder / "text.en").read_text() == "one\ntwo\nthree\n"
    assert (folder / "text.de").read_text() == "eins\nzwei\nein\ndrei\n"
    # Text that has changed is written again.
    Path(str(recipe.data.train_files)).write_text("english\tgerman\nfour\tvier\n", encoding="utf-8")
    write_texts(recipe)
    assert (folder / "text.en").read_text() == "four\nthree\none\n"
    # Models have learned the text as soon as the first one has its recipe.
    recipe_of(members_of(recipe)[0]).touch()
    write_texts(recipe)
    Path(str(recipe.data.train_files)).write_text("english\tgerman\nfour\tfünf\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"By .*text\.de, the models in its folder learned another text"):
        write_texts(recipe)
    assert (folder / "text.de").read_text() == "vier\ndrei\neins\n"


def test_translations_of_both_directions_are_sources_of_the_recipe_s_own(recipe) -> None:
    forward, _, backward, _ = members_of(recipe)
    # A forward model writes targets: seen from them, its text is the source.
    assert backtranslation_recipe(forward, 3).language_pairs == [["de", "en"]]
    assert backtranslation_recipe(backward, 3).language_pairs == [["en", "de"]]
    settings = asdict(backtranslation_recipe(backward, 3).backtranslation)
    assert settings == {"model": backward.recipe.run_dir, "text": str(backward.text), "output": str(backward.output),
                        "method": "beam", "num_beams": 3, "top_k": None, "temperature": 1.0}  # fmt: skip
    final = final_recipe(recipe)
    assert final.run_dir == recipe.run_dir and final.hub.repo_id == "me/mine"
    added = final.more_data[1:]
    assert [part.train_files for part in added] == [str(member.output) for member in members_of(recipe)]
    assert {part.prefix for part in added} == {"<a>"} and final.language_pairs == [["en", "de"]]
    # Whichever side is the synthetic one, its column has the name of its language.
    (forward.output.parent).mkdir(exist_ok=True)
    forward.output.write_text("de\ten\neins\tone\n", encoding="utf-8")
    pairs = load_pairs("en", "de", train_files=str(forward.output))["train"]
    assert pairs[0] == {"source": "one", "target": "eins"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "text_to_text"}, "needs task 'translation', but the task is 'text_to_text'"),
        ({"more_data": "fr"}, "sources of one direction, but those of the recipe are en-de, en-fr"),
        ({"initialize": "m"}, "initialize.from is m, from which models of the other direction cannot start"),
        ({"teacher": "m"}, "either a teacher .teacher.model. or a diversification"),
    ],
)
def test_what_cannot_be_diversified_is_refused(recipe, change, words) -> None:
    check_diversification(recipe)
    ((key, value),) = change.items()
    if key == "more_data":
        recipe.more_data[0].target_language = value
    elif key == "task":
        recipe.task = value
    else:
        setattr(getattr(recipe, key), {"initialize": "from_", "teacher": "model"}[key], value)
    with pytest.raises(ValueError, match=words):
        check_diversification(recipe)
