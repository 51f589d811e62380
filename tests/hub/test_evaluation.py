"""The score that a model is published with, the table of its card, the metadata of the Hub, and the curve."""

import math

import pytest

from hf_vaswani.hub.evaluation import (
    eval_results,
    headline,
    main_score,
    plot_curve,
    score_table,
    set_scores,
    signature_rows,
)
from hf_vaswani.recipe import DataRecipe, EvaluationSetRecipe, Recipe, SourceRecipe, TrainingRecipe
from hf_vaswani.records import Result, Validation, from_json, to_json

MEASURES = {"loss": 3.0, "perplexity": 20.0, "accuracy": 0.4125}


def text(task: str = "masked_lm", best_by: str = "loss") -> Recipe:
    return Recipe(
        task=task,
        data=DataRecipe(test_files="/home/me/test.txt", validation_files="dev.txt"),
        training=TrainingRecipe(best_by=best_by),
    )


def pairs(best_by: str, task: str = "translation") -> Recipe:
    return Recipe(task=task, training=TrainingRecipe(best_by=best_by))


@pytest.mark.parametrize(
    ("recipe", "scores", "expected"),
    [
        (text(best_by="accuracy"), MEASURES, ("accuracy", 0.4125)),
        (text(best_by="loss"), MEASURES, ("accuracy", 0.4125)),
        (text("causal_lm"), {"perplexity": 20.0, "word_perplexity": 99.0}, ("perplexity", 20.0)),
        (text("causal_lm"), {"loss": 3.0}, ("loss", 3.0)),
        (text(best_by="accuracy"), {"perplexity": 20.0}, ("accuracy", None)),
        (text(best_by="accuracy"), MEASURES | {"accuracy": math.nan}, ("accuracy", None)),
        (text("causal_lm"), {"perplexity": math.inf}, ("perplexity", None)),
        (text("causal_lm"), {"perplexity": None}, ("perplexity", None)),
        (pairs("loss"), {"loss": 3.0, "bleu": 31.4, "chrf": 1.0}, ("bleu", 31.4)),
        (pairs("exact_match", "text_to_text"), {"bleu": 31.4, "exact_match": 0.5}, ("exact_match", 0.5)),
    ],
)
def test_the_score_is_the_measure_that_ranks_or_one_that_is_better_known(recipe, scores, expected) -> None:
    assert main_score(recipe, Result(6, scores, averaged=[])) == expected


def test_the_first_sentence_ends_with_the_score() -> None:
    model = Result(6, MEASURES, averaged=[])
    assert headline(text(), model) == ", accuracy 0.41 on the test set"
    several = Result(6, MEASURES, averaged=[], sets={"en": MEASURES, "law": MEASURES})
    assert headline(text(), several) == ", accuracy 0.41 on 2 test sets"
    assert headline(text("causal_lm"), Validation(6, MEASURES)) == ", perplexity 20.00 on the validation set"
    assert headline(text(), Result(6, averaged=[])) == ""
    assert headline(text("causal_lm"), Result(6, {"perplexity": None}, averaged=[])) == ""


def test_each_set_is_a_row_below_that_of_all_text() -> None:
    recipe = text()
    recipe.more_data = [SourceRecipe(source_language="de", test_files="de.txt")]
    recipe.validation_sets = {"law": EvaluationSetRecipe(dataset="acme/law", test_split="held_out")}
    parts = [{"accuracy": 0.5, "loss": 2.0}, {"accuracy": 0.25, "loss": None}, {"accuracy": 0.125, "loss": 4.0}]
    sets = dict(zip(("en", "de", "law"), parts, strict=True))
    scored = Result(6, {"loss": 3.0, "accuracy": 0.3}, averaged=[], sets=sets)
    rows = list(set_scores(recipe, scored, {"acme/law"}))
    assert score_table(recipe, rows, scored) == [
        ["text", "loss ↓", "accuracy ↑"],
        ["all sets together", "3.0000", "0.3000"],
        ["en: test.txt", "2.0000", "0.5000"],
        ["de: de.txt", "not finite", "0.2500"],
        ["law: acme/law (held_out)", "4.0000", "0.1250"],
    ]
    found = [(each.task_name, each.dataset_type, each.dataset_config, each.metric_type, each.metric_value)
             for each in eval_results(recipe, rows, scored)]  # fmt: skip
    assert found == [
        ("Masked language modelling en", "text", "en", "loss", 2.0),
        ("Masked language modelling en", "text", "en", "accuracy", 0.5),
        ("Masked language modelling de", "text", "de", "accuracy", 0.25),
        ("Masked language modelling en", "acme/law", "law", "loss", 4.0),
        ("Masked language modelling en", "acme/law", "law", "accuracy", 0.125),
    ]
    assert {each.task_type for each in eval_results(recipe, rows, scored)} == {"fill-mask"}


def test_each_set_has_its_own_signature_where_they_differ() -> None:
    recipe = pairs("bleu")
    recipe.data.test_files = "test.de"
    recipe.more_data = [SourceRecipe(target_language="zh", test_files="test.zh")]
    both, shared = {"en-de": {"bleu": 20.0, "chrf": 40.0}, "en-zh": {"bleu": 30.0, "chrf": 50.0}}, {"chrf": "c"}
    signed = {"en-de": {"bleu": "tok:13a"} | shared, "en-zh": {"bleu": "tok:zh"} | shared}
    means, of_means = {"bleu": 25.0, "chrf": 45.0}, {"bleu": "tok:13a and tok:zh"} | shared
    result = Result(6, means, of_means, both, averaged=[], set_signatures=signed)
    assert from_json(Result, to_json(result)) == result
    found = [(each.metric_type, each.metric_value, each.metric_args["signature"])
             for each in eval_results(recipe, list(set_scores(recipe, result, set())), result)]  # fmt: skip
    assert found == [("bleu", 20.0, "tok:13a"), ("chrf", 40.0, "c"), ("bleu", 30.0, "tok:zh"), ("chrf", 50.0, "c")]
    assert signature_rows(result) == [("BLEU (en-de)", "tok:13a"), ("BLEU (en-zh)", "tok:zh"), ("chrF2", "c")]
    # Earlier versions recorded one for all sets.
    result = Result(6, means, {"bleu": "tok:13a"} | shared, both, averaged=[])
    rows = list(set_scores(recipe, result, set()))
    assert {each.metric_args["signature"] for each in eval_results(recipe, rows, result)} == {"tok:13a", "c"}
    assert signature_rows(result) == [("BLEU", "tok:13a"), ("chrF2", "c")]


def test_a_table_has_the_measures_in_one_order_and_none_without_scores() -> None:
    recipe, scored = text("causal_lm"), Validation(6, {"x": 1.0, "perplexity": 1234.567, "loss": 3.0})
    rows = list(set_scores(recipe, scored, set()))
    assert score_table(recipe, rows, scored) == [
        ["text", "loss ↓", "perplexity ↓", "x ↑"],
        ["en: dev.txt", "3.0000", "1,234.57", "1.0000"],
    ]
    for unscored in (text(), Recipe()):
        assert list(set_scores(unscored, Result(6, averaged=[]), set())) == []
    assert score_table(text(), [], Result(6, averaged=[])) == []


# ---- Curve -------------------------------------------------------------------------------------------------------

TRAINING = [(10, 3.0), (20, None), (30, 2.0)]
UNIT = "nats per text"


@pytest.mark.parametrize(("measure", "title"), [("bleu", "BLEU"), ("f1", "F1")])
def test_the_curve_has_every_finite_point(measure, title) -> None:
    validations = [
        Validation(15, {"loss": 2.5, measure: 0.25}),
        Validation(30, {"loss": 2.1, measure: 0.5}, best=True),
    ]
    loss, score = plot_curve(TRAINING, validations, measure, UNIT).axes
    assert (loss.get_ylabel(), score.get_title()) == (UNIT, f"Validation {title}")
    assert [line.get_xydata().tolist() for line in loss.lines] == [[[10, 3], [30, 2]], [[15, 2.5], [30, 2.1]]]
    assert score.lines[0].get_xydata().tolist() == [[15, 0.25], [30, 0.5]]
    assert score.get_legend_handles_labels()[1] == ["best: 0.50"]


def test_without_a_measure_or_validations_there_is_one_panel() -> None:
    assert len(plot_curve(TRAINING, [], "bleu", UNIT).axes) == 1
    # A loss that is not finite has no place in the picture.
    (loss,) = plot_curve(TRAINING, [Validation(15, {"loss": None, "f1": 1.0}, best=True)], None, UNIT).axes
    assert loss.get_legend_handles_labels()[1] == ["training"]


def test_each_of_several_sets_has_its_curve() -> None:
    # Earlier versions wrote no loss of each set.
    sets = [
        {"law": {"bleu": 1.0, "loss": 4.0}, "web": {"bleu": 9.0}},
        {"law": {"bleu": 6.0, "loss": None}, "web": {"bleu": 8.0, "loss": 1.0}},
    ]
    lines = [Validation(10 * i, {"loss": 3.0, "bleu": 5.0}, sets=sets[i], best=i == 1) for i in (0, 1)]
    loss, bleu = plot_curve(TRAINING, lines, "bleu", UNIT).axes
    found = {line.get_label(): line.get_xydata().tolist() for line in bleu.lines}
    assert found == {"law": [[0, 1], [10, 6]], "web": [[0, 9], [10, 8]], "best: update 10": [[10, 0], [10, 1]]}
    found = {line.get_label(): line.get_xydata().tolist() for line in loss.lines}
    assert found == {"training": [[10, 3], [30, 2]], "law": [[0, 4]], "web": [[10, 1]]}
