"""The scores of a model as its card, its commits and the metadata on the Hub have them, and the training curve."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult

from ..extras import extra
from ..files import read_json_lines
from ..metrics import COMPARED_BY, METRICS, Comparison, in_order, measure_of
from ..recipe import PAIR_TASKS, RANKED_BY, Recipe
from ..records import Result, Scored, Validation, from_json
from ..run_folder import CURVE, VALIDATIONS
from .wording import TASKS, named_sources, text_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALTERED = {
    "upper": "in capital letters on both sides",
    "title": "with a capital letter at the beginning of each word on both sides",
    "typos": "with typing errors in the source",
    "no_final_mark": "without final marks on both sides",
}
TRAINING = "#9aa5b1"
# The curves of validation sets take these colours in turn.
SETS = ("#1f5fa8", "#d1742b", "#3b8f5a", "#8a55a5", "#b3404a", "#5b7083")


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
    """

    name: str
    languages: str
    text: str
    dataset: str
    config: str | None
    split: str | None
    scores: dict[str, float | None]


def split_of(scored: Scored) -> str:
    """Returns the split that scores are of: models are tested, checkpoints are validated."""
    return "test" if isinstance(scored, Result) else "validation"


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
    best_by, candidates = recipe.training.best_by, [str(recipe.training.best_by)]
    if best_by == "loss":
        candidates = [*(name for name in RANKED_BY[recipe.task] if name != "loss"), "perplexity"]
    name = next((name for name in candidates if name in scored.scores), best_by)
    value = scored.scores.get(name)
    return name, value if value is not None and math.isfinite(value) else None


def headline(recipe: Recipe, scored: Scored) -> str:
    """Returns the end of a card's first sentence: the score of the model, if it has one."""
    name, value = main_score(recipe, scored)
    if value is None:
        return ""
    where = f"on the {split_of(scored)} set"
    if scored.sets:
        average = "on average over" if recipe.task in PAIR_TASKS else "on"
        where = f"{average} {len(scored.sets)} {split_of(scored)} sets"
    return f", {measure_of(name).title} {value:.2f} {where}"


# ---- Sets --------------------------------------------------------------------------------------------------------


def set_scores(recipe: Recipe, scored: Scored, on_hub: set[str]) -> Iterator[SetScores]:
    """
    Yields the scores of each evaluation set.

    Args:
        recipe ([`Recipe`]): names the text.
        scored ([`Result`] or [`Validation`]): scores of a task; without any, nothing is yielded.
        on_hub (`set[str]`): datasets on the Hub.
    """
    if not scored.scores:
        return
    split, has_pairs = split_of(scored), recipe.task in PAIR_TASKS
    parts = [(name, part) for name, part in named_sources(recipe) if text_name(part, split, on_hub)]
    sets: dict[str, Any] = scored.sets or {parts[0][0]: scored.scores}
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
            # The loss of pairs depends on the vocabulary.
            scores=in_order({each: value for each, value in scores.items() if each != "loss" or not has_pairs}),
        )


def score_table(recipe: Recipe, rows: Sequence[SetScores], scored: Scored) -> list[list[str]]:
    """Returns the table of the scores: its head, and a row for each text and each of its alterations."""
    if not rows:
        return []
    measures = [measure_of(name) for name in rows[0].scores]
    texts: list[tuple[str, Mapping[str, float | None]]] = []
    if len(rows) > 1 and recipe.task not in PAIR_TASKS:
        texts.append(("all sets together", scored.scores))
    altered = (scored.altered if isinstance(scored, Result) else None) or {}
    for row in rows:
        name = f"{row.name}: {row.text}"
        texts.append((name, row.scores))
        texts += [(f"{name}, {ALTERED.get(how, how)}", each) for how, each in altered.get(row.name, {}).items()]
    head = [f"{each.title} {'↑' if each.is_higher_better else '↓'}" for each in measures]
    return [["text", *head], *([text, *(each.shown(of.get(each.name)) for each in measures)] for text, of in texts)]


def signature_rows(scored: Scored) -> list[tuple[str, str]]:
    """Returns each measure that has a signature with it, and with each of its sets where their signatures differ."""
    rows = []
    for metric, signature in (scored.signatures or {}).items():
        by_set = {name: each[metric] for name, each in (scored.set_signatures or {}).items()}
        is_one = len(set(by_set.values())) < 2
        title = measure_of(metric).title
        rows += [(title, signature)] if is_one else [(f"{title} ({name})", each) for name, each in by_set.items()]
    return rows


def before_rows(before: Mapping[str, Comparison]) -> list[list[str]]:
    """Returns a row for each test set: the score before and after the training, their difference, and its p-value."""
    rows = []
    for name, each in before.items():
        earlier, later = each.before[COMPARED_BY], each.after[COMPARED_BY]
        rows.append([name, f"{earlier:.2f}", f"{later:.2f}", f"{later - earlier:+.2f}", f"{each.p:.3f}"])
    return rows


def eval_results(recipe: Recipe, rows: Sequence[SetScores], scored: Scored) -> list[EvalResult]:
    """Returns the results of a model in the form of `huggingface_hub`, without values that are not finite."""
    kind, of_set = TASKS[recipe.task], scored.set_signatures or {}
    return [
        EvalResult(
            task_type=kind.hub_task,
            task_name=f"{kind.name} {row.languages}",
            dataset_type=row.dataset,
            dataset_name=row.text,
            dataset_config=row.config,
            dataset_split=row.split,
            metric_type=name,
            metric_name=measure_of(name).title,
            metric_value=round(value, measure_of(name).decimals),
            metric_args={"signature": (of_set.get(row.name) or scored.signatures or {})[name]}
            if name in METRICS
            else None,
        )
        for row in rows
        for name, value in row.scores.items()
        if value is not None and math.isfinite(value)
    ]


# ---- Curve -------------------------------------------------------------------------------------------------------


def plotted_measure(recipe: Recipe) -> str | None:
    """Returns the measure whose curve is beside that of the loss, if there is one."""
    if recipe.task in PAIR_TASKS:
        return RANKED_BY[recipe.task][0]
    return None if recipe.training.best_by == "loss" else recipe.training.best_by


def read_curve(run_dir: Path, last: int) -> tuple[list[tuple[int, float | None]], list[Validation]]:
    """
    Reads updates with their losses, and validations, of a run up to an update. Damaged lines are left out: the
    training may be writing one, and a card needs none.
    """
    validations = []
    for line in read_json_lines(run_dir / VALIDATIONS)[0]:
        with suppress(ValueError):
            validations.append(from_json(Validation, line))
    # A loss that is not finite is written as null.
    losses = [(line["step"], line.get("loss")) for line in read_json_lines(run_dir / CURVE)[0]]
    return [point for point in losses if point[0] <= last], [line for line in validations if line.step <= last]


def plot_curve(
    training: Sequence[tuple[int, float | None]], validations: Sequence[Validation], measure: str | None, unit: str
) -> "Figure":
    """
    Plots the loss, and a measure of the validations, over the updates of a run. Each of several validation sets has a
    curve of its own; values that are not finite have no point.

    Args:
        training (`Sequence[tuple[int, float]]`): updates and losses, `None` for one that is not finite.
        validations (`Sequence[Validation]`): validations.
        measure (`str`, *optional*): measure that has a panel beside that of the loss, if there are validations.
        unit (`str`): unit of the loss.
    """
    with extra("viz"):
        from matplotlib.figure import Figure

    names = ["loss", measure] if measure and validations else ["loss"]
    figure = Figure(figsize=(9 if names[1:] else 5, 3.2), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False, sharex=True)[0]
    _plot(panels[0], training, TRAINING, "", "training")
    sets = list(dict.fromkeys(name for line in validations for name in line.sets or ()))
    for panel, name in zip(panels, names, strict=True):
        panel.set_title("Loss" if name == "loss" else f"Validation {measure_of(name).title}")
        for part, color in zip(sets or [""], cycle(SETS), strict=False):
            scores = [(line.sets or {}).get(part, {}) if part else line.scores for line in validations]
            points = [(line.step, each.get(name)) for line, each in zip(validations, scores, strict=True)]
            _plot(panel, points, color, ".", part or ("validation" if name == "loss" else None))
    panels[0].set_ylabel(unit)
    panel = panels[-1]
    for line in validations:
        value = line.scores.get(names[-1])
        if line.best and sets:
            panel.axvline(line.step, color=TRAINING, linestyle=":", label=f"best: update {line.step:,}")
        elif line.best and value is not None:
            panel.plot(line.step, value, "o", color=SETS[0], label=f"best: {value:.2f}")
    for panel in panels:
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False)
    return figure


def _plot(
    panel: "Axes", points: Sequence[tuple[int, float | None]], color: str, marker: str, label: str | None
) -> None:
    known = [point for point in points if point[1] is not None]
    if known:
        panel.plot(*zip(*known, strict=True), label=label, color=color, marker=marker)


def curve_picture(*arguments: Any) -> bytes:
    """Renders [`plot_curve`], whose arguments it takes, as a PNG file; the same curve always gives the same bytes."""
    file = io.BytesIO()
    plot_curve(*arguments).savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
