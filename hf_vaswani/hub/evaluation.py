"""The scores of a model as its card, its commits and the metadata on the Hub have them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult

from ..metrics import METRICS
from ..recipe import PAIR_TASKS, RANKED_BY, Recipe, measure_name
from ..records import Comparison, Result, Scored
from .tasks import TASKS
from .text_names import named_sources, text_name

ALTERED = {
    "upper": "in capital letters on both sides",
    "title": "with a capital letter at the beginning of each word on both sides",
    "typos": "with typing errors in the source",
    "no_final_mark": "without final marks on both sides",
}
# Measures of tasks other than translation in the order of a table, and which values are better.
ARROWS = {
    "loss": "↓",
    "perplexity": "↓",
    "word_perplexity": "↓",
    "byte_perplexity": "↓",
    "accuracy": "↑",
    "f1": "↑",
    "next_sentence_accuracy": "↑",
}
# The measure of `text_to_text` besides the metrics.
EXACT = "exact_match"
# The measures that are metrics of `evaluate`, by which the Hub knows them.
KNOWN = ("perplexity", "accuracy", "f1")


@dataclass(frozen=True)
class SetScores:
    """
    The scores of one evaluation set, and how the card refers to its text.

    Attributes:
        name (`str`): name of the set.
        languages (`str`): its direction, or its language.
        text (`str`): name of its text.
        dataset (`str`), config (`str`, *optional*), split (`str`, *optional*): its text in the metadata.
        scores (`dict[str, float]`): by measure; `None` for one that is not finite.
        signatures (`dict[str, str]`): sacreBLEU's, by metric.
    """

    name: str
    languages: str
    text: str
    dataset: str
    config: str | None
    split: str | None
    scores: dict[str, float | None]
    signatures: dict[str, str]


# ---- The score of a model ----------------------------------------------------------------------------------------


def measures_of(scored: Scored) -> dict[str, float | None]:
    """Returns the measures of a task other than translation, the loss among them; none if it was not measured."""
    if scored.measures is None:
        return {}
    loss = {} if isinstance(scored, Result) else {"loss": scored.loss}
    return _ordered(loss | scored.measures)


def main_score(recipe: Recipe, scored: Scored) -> tuple[str, float | None]:
    """
    Returns the score that a model is published with.

    Args:
        recipe ([`Recipe`]): the recipe of its run.
        scored ([`Result`] or [`Validation`]): its scores.

    Returns:
        `str` and `float`: for pairs of texts, BLEU or the exact match by which they are ranked; otherwise the measure
        of `training.best_by`, or in the place of the loss another one of the task, for example the perplexity. `None`
        if it is missing or not finite.
    """
    if recipe.task in PAIR_TASKS and recipe.training.best_by != EXACT:
        return "bleu", scored.bleu
    found, best_by = measures_of(scored), recipe.training.best_by
    candidates = [best_by, *RANKED_BY[recipe.task], "perplexity"] if best_by == "loss" else [best_by]
    name = next((name for name in candidates if name != "loss" and name in found), best_by)
    value = found.get(name)
    return name, value if value is not None and math.isfinite(value) else None


def headline(recipe: Recipe, scored: Scored, split: str) -> str:
    """Returns the end of a card's first sentence: the score of the model, if it has one."""
    name, value = main_score(recipe, scored)
    if value is None:
        return ""
    where = f"on the {split} set"
    if scored.sets:
        average = "on average over" if recipe.task in PAIR_TASKS else "on"
        where = f"{average} {len(scored.sets)} {split} sets"
    return f", {measure_name(name)} {value:.2f} {where}"


# ---- Sets --------------------------------------------------------------------------------------------------------


def set_scores(recipe: Recipe, scored: Scored, split: str, on_hub: set[str]) -> Iterator[SetScores]:
    """
    Yields the scores of each evaluation set.

    Args:
        recipe ([`Recipe`]): names the text.
        scored ([`Result`] or [`Validation`]): scores of a task; without any, nothing is yielded.
        split (`str`): `"test"` or `"validation"`.
        on_hub (`set[str]`): datasets on the Hub.
    """
    has_pairs = recipe.task in PAIR_TASKS
    only = measures_of(scored)
    if has_pairs:
        only = {metric: getattr(scored, metric) for metric in METRICS} | (scored.measures or {})
    if (scored.bleu if has_pairs else scored.measures) is None:
        return
    parts = [(name, part) for name, part in named_sources(recipe) if text_name(part, split, on_hub)]
    sets: dict[str, Any] = scored.sets or {parts[0][0]: only}
    for (_, part), (name, scores) in zip(parts, sets.items(), strict=True):
        from_dataset = getattr(part, f"{split}_files") is None
        yield SetScores(
            name=name,
            languages=f"{part.source_language}-{part.target_language}" if has_pairs else part.source_language,
            text=text_name(part, split, on_hub),
            dataset=part.dataset.partition("@")[0] if from_dataset and part.dataset in on_hub else "text",
            # The Hub merges the results of sets that have dataset, config and split in common.
            config=(part.dataset_config if from_dataset else None) or (name if len(sets) > 1 else None),
            split=getattr(part, f"{split}_split") if from_dataset else None,
            scores={name: scores[name] for name in (*METRICS, EXACT) if scores.get(name) is not None}
            if has_pairs
            else _ordered(scores),
            signatures=scored.signatures or {},
        )


def with_altered(row: SetScores, scored: Scored) -> Iterator[tuple[str, Mapping[str, float | None]]]:
    """Yields the scores of a set, and those of its alterations with a note."""
    yield "", row.scores
    altered = (scored.altered if isinstance(scored, Result) else None) or {}
    for name, scores in altered.get(row.name, {}).items():
        yield f", {ALTERED.get(name, name)}", scores


def before_rows(before: dict[str, Comparison]) -> Iterator[dict[str, str]]:
    """Yields the BLEU of each test set before and after the training, as the card shows them."""
    for name, each in before.items():
        earlier, later = each.before["bleu"], each.after["bleu"]
        yield {
            "set": name,
            "before": f"{earlier:.2f}",
            "after": f"{later:.2f}",
            "difference": f"{later - earlier:+.2f}",
            "p": f"{each.p:.3f}",
        }


def measures_table(rows: list[SetScores], scored: Scored) -> list[list[str]]:
    """Returns the table of the measures of a task other than translation: its head, and a row for each text."""
    measures = list(rows[0].scores)
    texts = [(f"{row.name}: {row.text}", row.scores) for row in rows]
    if len(rows) > 1:
        texts.insert(0, ("all sets together", measures_of(scored)))
    head = ["text", *(f"{measure_name(name)} {ARROWS.get(name, '')}".strip() for name in measures)]
    return [head, *([text, *(_shown(name, scores.get(name)) for name in measures)] for text, scores in texts)]


def _shown(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:,.2f}" if name.endswith("perplexity") else f"{value:.4f}"


def _ordered(measures: Mapping[str, float | None]) -> dict[str, float | None]:
    """Sorts measures as a table has them, unknown ones last."""
    names = [*ARROWS, *measures]
    return {name: measures[name] for name in sorted(measures, key=names.index)}


# ---- Metadata ----------------------------------------------------------------------------------------------------


def eval_results(recipe: Recipe, rows: list[SetScores]) -> list[EvalResult]:
    """Returns the results of a model in the form of `huggingface_hub`, without values that are not finite."""
    kind = TASKS[recipe.task]
    return [
        EvalResult(
            task_type=kind.hub_task,
            task_name=f"{kind.name} {row.languages}",
            dataset_type=row.dataset,
            dataset_name=row.text,
            dataset_config=row.config,
            dataset_split=row.split,
            metric_type=metric,
            metric_name=METRICS.get(metric) or measure_name(metric),
            metric_value=round(score, 2 if metric in METRICS else 4),
            metric_args={"signature": row.signatures[metric]} if metric in METRICS else None,
        )
        for row in rows
        for metric, score in row.scores.items()
        if score is not None and math.isfinite(score)
    ]


def metrics_of(recipe: Recipe, rows: list[SetScores]) -> list[str] | None:
    """Returns the metrics of a model by the Hub's names; `None` without any."""
    known = (*METRICS, EXACT) if recipe.task in PAIR_TASKS else KNOWN
    return [name for name in known if any(name in row.scores for row in rows)] or None
