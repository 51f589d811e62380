"""The words and examples of a card for each task; the text of a run is named without its folders."""

import json
from typing import get_args

import pytest

from hf_vaswani import recipe
from hf_vaswani.hub.wording import (
    TASKS,
    datasets_on_the_hub,
    describe_texts,
    example_of,
    languages_of,
    named_sources,
    names_only,
    papers_of,
    pipeline_of,
    purpose_of,
    usage,
)
from hf_vaswani.recipe import DataRecipe, EvaluationSetRecipe, ObjectiveRecipe, Recipe, SourceRecipe
from hf_vaswani.records import Environment, Text


def test_every_task_has_words() -> None:
    assert set(get_args(recipe.Task)) <= set(TASKS)
    assert all(word for kind in TASKS.values() for word in (kind.model, kind.name, kind.hub_task, kind.per))


@pytest.mark.parametrize(
    ("task", "pipeline"),
    [
        ("translation", "translation"),
        ("masked_lm", "fill-mask"),
        ("causal_lm", "text-generation"),
        ("span_corruption", None),
        ("denoise", None),
        ("classification", "text-classification"),
        ("tagging", "token-classification"),
    ],
)
def test_the_example_calls_the_pipeline_of_the_task(tmp_path, task, pipeline) -> None:
    """transformers has none for sequence-to-sequence models other than translation."""
    settings = Recipe(task=task)
    assert pipeline_of(task) == pipeline
    for is_trusted in (False, True):
        lines = usage(settings, tmp_path, "me/model", ', revision="v2"', is_trusted)
        compile(lines, "usage", "exec")
        trust = ", trust_remote_code=True" if is_trusted else ""
        if pipeline is None:
            for name in (TASKS[task].auto_class, "AutoTokenizer"):
                assert f'{name}.from_pretrained("me/model", revision="v2"{trust})' in lines
            assert "model.generate(" in lines
        else:
            first = ', aggregation_strategy="first"' if task == "tagging" else ""
            assert f'pipeline("{pipeline}", model="me/model", revision="v2"{trust}{first})' in lines


def test_the_example_has_what_the_model_predicts(tmp_path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "[MASK]"}}))
    examples = {task: example_of(Recipe(task=task), tmp_path) for task in TASKS}
    assert examples["masked_lm"] == examples["denoise"] == "The cat [MASK]."
    assert examples["span_corruption"] == "The cat <extra_0>."
    assert examples["causal_lm"] == "The cat"
    assert examples["classification"] == examples["tagging"] == examples["translation"] == "The cat sleeps."
    assert example_of(Recipe(task="masked_lm"), tmp_path / "empty") == "The cat <mask>."
    reordered = Recipe(task="denoise", objective=ObjectiveRecipe(noise=["permutation"]))
    assert example_of(reordered, tmp_path) == "The cat sleeps."
    german = Recipe(task="causal_lm", data=DataRecipe(source_language="de", target_tag=True))
    assert example_of(german, tmp_path) == "<2de> Die Katze"
    assert example_of(Recipe(task="causal_lm", data=DataRecipe(source_language="xx")), tmp_path) == "..."


def test_a_translation_has_its_prefix_and_its_target_language(tmp_path) -> None:
    settings = Recipe(data=DataRecipe(prefix="<bt>", target_tag=True))
    assert usage(settings, tmp_path, "m", "").endswith('translator("<bt> The cat sleeps.", tgt_lang="de")')


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
