"""The score that a model is published with, the table of its card, and the metadata of the Hub."""

import math

import pytest

from hf_vaswani.hub.evaluation import (
    eval_results,
    headline,
    main_score,
    measures_of,
    measures_table,
    metrics_of,
    set_scores,
)
from hf_vaswani.recipe import DataRecipe, EvaluationSetRecipe, Recipe, SourceRecipe, TrainingRecipe
from hf_vaswani.records import Result, Validation

MEASURES = {"perplexity": 20.0, "accuracy": 0.4125}


def text(task: str = "masked_lm", best_by: str = "loss") -> Recipe:
    return Recipe(
        task=task,
        data=DataRecipe(test_files="/home/me/test.txt", validation_files="dev.txt"),
        training=TrainingRecipe(best_by=best_by),
    )


def test_a_model_and_a_checkpoint_have_the_same_measures() -> None:
    """The loss of a validation has a place of its own in the record."""
    model = Result(6, [], measures={"word_perplexity": 9.0, "accuracy": 0.5, "loss": 2.0, "perplexity": 7.0, "x": 1.0})
    checkpoint = Validation(6, 2.0, measures={"x": 1.0, "perplexity": 7.0, "accuracy": 0.5, "word_perplexity": 9.0})
    names = ["loss", "perplexity", "word_perplexity", "accuracy", "x"]
    assert list(measures_of(model)) == list(measures_of(checkpoint)) == names
    assert measures_of(model) == measures_of(checkpoint)
    assert measures_of(Validation(6, 2.0, 30.0, 1.0, 1.0)) == measures_of(Result(6, [])) == {}


@pytest.mark.parametrize(
    ("recipe", "measures", "expected"),
    [
        (text(best_by="accuracy"), MEASURES, ("accuracy", 0.4125)),
        (text(best_by="loss"), MEASURES, ("accuracy", 0.4125)),
        (text("causal_lm"), {"perplexity": 20.0, "word_perplexity": 99.0}, ("perplexity", 20.0)),
        (text("causal_lm"), {}, ("loss", 3.0)),
        (text(best_by="accuracy"), {"perplexity": 20.0}, ("accuracy", None)),
        (text(best_by="accuracy"), MEASURES | {"accuracy": math.nan}, ("accuracy", None)),
        (text("causal_lm"), {"perplexity": math.inf}, ("perplexity", None)),
        (text("causal_lm"), {"perplexity": None}, ("perplexity", None)),
    ],
)
def test_the_score_is_the_measure_that_ranks_or_one_that_is_better_known(recipe, measures, expected) -> None:
    assert main_score(recipe, Validation(6, 3.0, measures=measures)) == expected


def test_the_score_of_a_translation_is_its_bleu() -> None:
    recipe = Recipe(training=TrainingRecipe(best_by="loss"))
    assert main_score(recipe, Validation(6, 3.0, 31.4, 1.0, 1.0)) == ("bleu", 31.4)


def test_the_first_sentence_ends_with_the_score() -> None:
    model = Result(6, [], measures={"loss": 3.0, **MEASURES})
    assert headline(text(), model, "test") == ", accuracy 0.41 on the test set"
    several = Result(6, [], measures={"loss": 3.0, **MEASURES}, sets={"en": MEASURES, "law": MEASURES})
    assert headline(text(), several, "test") == ", accuracy 0.41 on 2 test sets"
    assert headline(text("causal_lm"), model, "test") == ", perplexity 20.00 on the test set"
    assert headline(text(), Result(6, []), "test") == ""
    assert headline(text("causal_lm"), Result(6, [], measures={"perplexity": None}), "test") == ""


def test_each_set_is_a_row_below_that_of_all_text() -> None:
    recipe = text()
    recipe.more_data = [SourceRecipe(source_language="de", test_files="de.txt")]
    recipe.validation_sets = {"law": EvaluationSetRecipe(dataset="acme/law", test_split="held_out")}
    parts = [{"accuracy": 0.5, "loss": 2.0}, {"accuracy": 0.25, "loss": None}, {"accuracy": 0.125, "loss": 4.0}]
    scored = Result(
        6, [], measures={"loss": 3.0, "accuracy": 0.3}, sets=dict(zip(("en", "de", "law"), parts, strict=True))
    )
    rows = list(set_scores(recipe, scored, "test", {"acme/law"}))
    assert measures_table(rows, scored) == [
        ["text", "loss ↓", "accuracy ↑"],
        ["all sets together", "3.0000", "0.3000"],
        ["en: test.txt", "2.0000", "0.5000"],
        ["de: de.txt", "not finite", "0.2500"],
        ["law: acme/law (held_out)", "4.0000", "0.1250"],
    ]
    found = [(each.task_name, each.dataset_type, each.dataset_config, each.metric_type, each.metric_value)
             for each in eval_results(recipe, rows)]  # fmt: skip
    assert found == [
        ("Masked language modelling en", "text", "en", "loss", 2.0),
        ("Masked language modelling en", "text", "en", "accuracy", 0.5),
        ("Masked language modelling de", "text", "de", "accuracy", 0.25),
        ("Masked language modelling en", "acme/law", "law", "loss", 4.0),
        ("Masked language modelling en", "acme/law", "law", "accuracy", 0.125),
    ]
    assert {each.task_type for each in eval_results(recipe, rows)} == {"fill-mask"}
    assert metrics_of(recipe, rows) == ["accuracy"]


def test_a_single_set_has_the_measures_of_the_run() -> None:
    recipe, scored = text("causal_lm"), Validation(6, 3.0, measures={"perplexity": 1234.567})
    rows = list(set_scores(recipe, scored, "validation", set()))
    assert measures_table(rows, scored) == [["text", "loss ↓", "perplexity ↓"], ["en: dev.txt", "3.0000", "1,234.57"]]
    assert metrics_of(recipe, rows) == ["perplexity"]


def test_without_scores_there_are_no_rows() -> None:
    assert list(set_scores(text(), Result(6, []), "test", set())) == []
    assert list(set_scores(Recipe(), Result(6, []), "test", set())) == []
