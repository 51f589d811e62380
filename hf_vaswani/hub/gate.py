"""The gate before the Hub: a model must not be significantly worse than another one on any test set."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..metrics import METRICS, paired_bootstrap, score
from ..recipe import Recipe
from ..records import Comparison, Verdict

logger = logging.getLogger(__name__)

# The level of the test.
SIGNIFICANT = 0.05


class EvaluatedSet(Protocol):
    """The name and the references of a test set."""

    name: str
    target: list[str]


def compare_sets(
    sets: Sequence[EvaluatedSet],
    before: Mapping[str, Sequence[str]],
    after: Mapping[str, Sequence[str]],
    recipe: Recipe,
) -> dict[str, Comparison]:
    """
    Scores two models on test sets, and tests whether they differ in BLEU by more than chance.

    Args:
        sets (`Sequence`): test sets, with `name` and references, `target`.
        before (`Mapping[str, Sequence[str]]`): translations of each set by the model to compare with.
        after (`Mapping[str, Sequence[str]]`): translations of each set by the model in question.
        recipe ([`Recipe`]): its evaluation section says how to score.

    Returns:
        `dict[str, Comparison]`: by the name of the set.

    Raises:
        ValueError: a set has another number of translations than of references.
    """
    tokenize, lowercase = recipe.evaluation.tokenize, recipe.evaluation.lowercase
    found = {}
    for each in sets:
        scores = [score(side[each.name], each.target, tokenize, lowercase) for side in (before, after)]
        p, signature = paired_bootstrap(before[each.name], after[each.name], each.target, tokenize, lowercase)
        sides = [{metric: scored[metric] for metric in METRICS} for scored in scores]
        found[each.name] = Comparison(sides[0], sides[1], p, signature)
    return found


def is_worse(comparison: Comparison) -> bool:
    """Returns whether the BLEU of a model is significantly below that of the one it is compared with."""
    return comparison.after["bleu"] < comparison.before["bleu"] and comparison.p < SIGNIFICANT


def check_not_worse(folder: Path, than: str | None, verdict: Verdict | None) -> None:
    """
    Checks that a model is not significantly worse than another one.

    Args:
        folder (`Path`): folder of the model or checkpoint, for messages.
        than (`str`, *optional*): the other model, as `hub.not_worse_than` names it; `None` allows everything.
        verdict ([`Verdict`], *optional*): the comparison with it.

    Raises:
        ValueError: the model is worse on a test set, or was not compared with this other one.
    """
    if than is None:
        return
    if verdict is None or verdict.than != than:
        raise ValueError(f"{folder} is not published: it was not compared with {than} (hub.not_worse_than).")
    if not verdict.sets:
        logger.info(f"hub.not_worse_than: nothing was published before {folder}, so it is compared with nothing")
    worse = {name: each for name, each in verdict.sets.items() if is_worse(each)}
    if worse:
        scores = " and ".join(
            f"on {name}, its BLEU is {each.after['bleu']:.2f}, and that of {than} is {each.before['bleu']:.2f} "
            f"(p = {each.p:.3f})"
            for name, each in worse.items()
        )
        raise ValueError(
            f"{folder} is not published, because it is significantly worse than hub.not_worse_than: {scores}."
        )
