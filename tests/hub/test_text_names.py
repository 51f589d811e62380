"""The card names the text of a run, and shows no path."""

from hf_vaswani.hub.text_names import datasets_on_the_hub, describe_texts, languages_of, named_sources, names_only
from hf_vaswani.recipe import DataRecipe, EvaluationSetRecipe, Recipe, SourceRecipe
from hf_vaswani.records import Environment, Text


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
