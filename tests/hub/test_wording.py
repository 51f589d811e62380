"""The words and examples of a card for each task; the text of a run is named without its folders."""

import json
from typing import get_args

import pytest
import transformers

from hf_vaswani import recipe
from hf_vaswani.hub.wording import (
    TASKS,
    datasets_on_the_hub,
    describe_texts,
    example_of,
    languages_of,
    named_sources,
    names_only,
    options_of,
    papers_of,
    pipeline_of,
    purpose_of,
)
from hf_vaswani.recipe import DataRecipe, EvaluationSetRecipe, ObjectiveRecipe, Recipe, SourceRecipe
from hf_vaswani.records import Environment, Text


def test_every_task_has_words() -> None:
    assert set(get_args(recipe.Task)) <= set(TASKS)
    assert all(word for kind in TASKS.values() for word in (kind.model, kind.name, kind.hub_task, kind.per))


def test_a_task_has_a_pipeline_if_transformers_loads_its_model() -> None:
    """transformers has none for sequence-to-sequence models other than translation."""
    assert {task for task in TASKS if pipeline_of(task) is None} == {"span_corruption", "denoise"}
    assert all(hasattr(transformers, kind.auto_class) for kind in TASKS.values())


@pytest.mark.parametrize(
    ("settings", "example"),
    [
        (Recipe(), "The cat sleeps."),
        (Recipe(task="classification"), "The cat sleeps."),
        (Recipe(task="masked_lm"), "The cat [MASK]."),
        (Recipe(task="denoise"), "The cat [MASK]."),
        (Recipe(task="denoise", objective=ObjectiveRecipe(noise=["permutation"])), "The cat sleeps."),
        (Recipe(task="span_corruption"), "The cat <extra_0>."),
        (Recipe(task="causal_lm", data=DataRecipe(source_language="de", target_tag=True)), "<2de> Die Katze"),
        (Recipe(task="causal_lm", data=DataRecipe(source_language="xx")), "..."),
        (Recipe(data=DataRecipe(prefix='to "German":')), 'to "German": The cat sleeps.'),
    ],
)
def test_the_example_has_what_the_model_predicts(tmp_path, settings, example) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "[MASK]"}}))
    assert json.loads(example_of(settings, tmp_path)) == example
    (tmp_path / "tokenizer_config.json").unlink()
    assert json.loads(example_of(settings, tmp_path)) == example.replace("[MASK]", "<mask>")


def test_an_example_has_what_the_call_needs(tmp_path) -> None:
    pair = Recipe(task="classification", data=DataRecipe(pair_column="b"))
    assert set(json.loads(example_of(pair, tmp_path))) == {"text", "text_pair"}
    assert options_of(Recipe(data=DataRecipe(target_tag=True))) == ', tgt_lang="de"'
    assert options_of(Recipe()) == options_of(pair) == ""


def test_the_papers_are_those_of_the_objective() -> None:
    both = ("encoder", "decoder")
    assert papers_of(Recipe(), both) == set()
    assert papers_of(Recipe(task="masked_lm"), ("encoder",)) == {"BERT"}
    assert papers_of(Recipe(task="causal_lm"), ("decoder",)) == {"GPT"}
    assert papers_of(Recipe(task="span_corruption"), both) == {"T5"}
    noise = ObjectiveRecipe(noise=["permutation", "fragment"])
    assert papers_of(Recipe(task="denoise"), both) == {"BART"}
    assert papers_of(Recipe(task="denoise", objective=noise), both) == {"BART", "MASS"}
    assert papers_of(Recipe(task="classification"), ("encoder",)) == {"BERT"}
    assert papers_of(Recipe(task="classification"), ("decoder",)) == {"GPT"}


def test_next_sentences_are_part_of_the_purpose() -> None:
    settings = Recipe(task="masked_lm", objective=ObjectiveRecipe(next_sentence=True))
    assert purpose_of(settings) == "to predict masked tokens and whether one segment continues the other"
    assert purpose_of(Recipe()) == ""


# ---- The text ----------------------------------------------------------------------------------------------------


def environment(*texts: Text) -> Environment:
    return Environment(
        python="3", packages={}, processes=1, cpu_threads=1, mixed_precision="no", seed=1, command=[], data=list(texts)
    )


def test_running_text_has_languages_and_lines() -> None:
    recipe = Recipe(
        task="causal_lm",
        data=DataRecipe(train_files="/home/me/a.txt", license="mit"),
        more_data=[SourceRecipe(source_language="fr", dataset="acme/web", dataset_config="x")],
        validation_sets={"law": EvaluationSetRecipe(test_files="/home/me/law.txt")},
    )
    noted = environment(
        Text(pairs={"train": 9000}), Text(pairs={"train": 7}, dataset_is_local=False), Text(pairs={"test": 3})
    )
    assert languages_of(recipe) == ["en", "fr"], "and no target language"
    assert [name for name, _ in named_sources(recipe)] == ["en", "fr", "law"]
    on_hub = datasets_on_the_hub(recipe, noted)
    assert list(describe_texts(recipe, noted, on_hub)) == [
        "en: trained on a.txt (9,000 lines); licence of the text: mit.",
        "fr: trained on acme/web, x (train) (7 lines); validated on acme/web, x (validation); tested on acme/web, x "
        "(test).",
        "law: tested on law.txt (3 lines).",
    ]


def test_pairs_have_directions() -> None:
    recipe = Recipe(data=DataRecipe(dataset="pocket"), more_data=[SourceRecipe(target_language="fr")])
    assert languages_of(recipe) == ["en", "de", "fr"]
    assert [name for name, _ in named_sources(recipe)] == ["en-de", "en-fr"]
    assert "(train) (5 pairs)" in next(describe_texts(recipe, environment(Text(pairs={"train": 5})), set()))
    assert datasets_on_the_hub(recipe, environment(Text(pairs={}, dataset_is_local=False))) == set()


def test_paths_are_reduced_to_names() -> None:
    value = {"train_files": {"en": "/a/b.en"}, "dataset": "/c/d", "weight": 2.0, "license": "a/b"}
    assert names_only("", value, set()) == value | {"train_files": {"en": "b.en"}, "dataset": "d"}
    assert names_only("dataset", "acme/web", {"acme/web"}) == "acme/web"
    assert names_only("train_files", "https://me:SECRET@host/a.tsv?sig=SECRET/b", set()) == "a.tsv"
    assert names_only("prefix", "https://host/a?sig=SECRET", set()) == "https://host/a"


def test_a_url_is_no_dataset_on_the_hub() -> None:
    recipe = Recipe(data=DataRecipe(dataset="https://me:SECRET@host/a?b"))
    assert datasets_on_the_hub(recipe, environment(Text(pairs={}, dataset_is_local=False))) == set()
