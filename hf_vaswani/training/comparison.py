"""Comparison of a run's model with the one that it started from, or that it must not be worse than on the Hub."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from ..data.pairs import evaluation_texts
from ..data.task_data import EvaluationText
from ..data.tokenizer import has_tag, is_tag
from ..extras import extra
from ..hub.publishing import Candidate, Publisher, last_push
from ..metrics import COMPARED_BY, compare_sets, score, tokenizer_of
from ..model.sentences_vaswani import LanguageTags
from ..processes import limit_threads, on_main_process, own_device
from ..recipe import HubRecipe
from ..records import Result, Verdict
from ..run_folder import (
    START,
    START_TRANSLATIONS,
    TRANSLATIONS,
    checkpoint_folder,
    find_resume,
    read_translations,
)
from ..translation.lines import LineTranslator
from ..translation.loading import load_translator
from .preparation import Run, task_data
from .start import check_start
from .state import TrainState
from .validation import share, translate_and_score

with extra("train"):
    from accelerate.utils import gather_object

logger = logging.getLogger(__name__)

# Scores of the same text differ by less.
ROUNDING = 0.005


class Baseline:
    """
    A model to compare with: any encoder-decoder model, with its own tokenizer, tags and search settings.

    Args:
        name (`str` or `Path`): a model, see [`resolve_model`].
        device (`torch.device`): where it translates.

    Raises:
        ValueError: the model cannot be loaded, or cannot translate.
    """

    def __init__(self, name: str | Path, device: torch.device | str) -> None:
        model, tokenizer = load_translator(name)
        settings = model.generation_config
        if (settings.num_beams or 1) == 1:
            # They have no effect on greedy search, and transformers would warn about each.
            settings.length_penalty = settings.early_stopping = None
        self.translator = LineTranslator([model.to(device)], tokenizer)

    def tagged(self, text: EvaluationText) -> list[str]:
        """
        Returns the sources of a set, with what the model has learned to read in front of them: its tag of the target
        language if it has one, unless they have a tag; and their prefix, unless it is a tag that its vocabulary lacks.
        """
        tags, prefix = LanguageTags(self.translator.tokenizer), text.prefix
        tag = tags.by_language.get(text.target_language)
        if prefix is not None and is_tag(prefix) and not has_tag(self.translator.tokenizer, prefix):
            prefix = None

        def fronted(line: str) -> str:
            fronts = (None if tags.split(line)[0] else tag, prefix)
            return " ".join(part for part in (*fronts, line) if part is not None)

        return [fronted(line) if line.strip() else line for line in text.plain]

    def __call__(self, sentences: list[str]) -> list[str]:
        """Translates sentences; those that are longer than the model accepts are translated in pieces."""
        return [" ".join(best[0][1].splitlines()) for best in self.translator(sentences)]


def baseline_name(run_dir: Path, folder: Path, hub: HubRecipe) -> str | None:
    """
    Finds the model of `hub.not_worse_than`, and downloads it if it is the one that was published last. Returns its
    folder or its id on the Hub, or `None` if nothing was published before.

    Raises:
        ValueError: the run has not kept the model that it started from, or that was changed.
        PublishingError: the Hub refused, or could not be reached.
    """
    if hub.not_worse_than == "start":
        if (resume := find_resume(run_dir)) is not None:
            check_start(run_dir, resume)
        if not (run_dir / START).is_dir():
            raise ValueError(
                f"hub.not_worse_than is 'start', but {run_dir} has not kept the model that it started from, "
                f"{run_dir / START}."
            )
        return str(run_dir / START)
    if hub.not_worse_than == "last_push":
        found = last_push(folder, hub)
        return None if found is None else str(found)
    return str(hub.not_worse_than)


# ---- During a training -------------------------------------------------------------------------------------------


def translate_tests(run: Run, name: str | Path) -> dict[str, list[str]]:
    """
    Translates the test sets of a run, by their names, with another model. All processes call it together.

    Raises:
        ValueError: the model cannot be loaded, or cannot translate.
    """
    baseline, failure = None, None
    # One process of each machine downloads the model, and the others read it.
    with run.accelerator.local_main_process_first():
        try:
            baseline = Baseline(name, run.accelerator.device)
        except (ValueError, OSError) as error:
            failure = str(error)
    failures = [text for text in gather_object([failure]) if text is not None]
    # In every process: the others would wait for one that fails alone.
    if baseline is None or failures:
        raise ValueError(failures[0])
    return {text.name: share(run, baseline.tagged(text), baseline) for text in run.sets["test"]}


def check_loading(name: str, where: str) -> None:
    """Raises a `ValueError` that begins with `where` if a model cannot be loaded, or cannot translate."""
    try:
        Baseline(name, "cpu")
    except (ValueError, OSError) as error:
        raise ValueError(f"{where}: {error}") from error


def offer_checkpoint(run: Run, state: TrainState, publisher: Publisher | None) -> None:
    """
    Offers the checkpoint that was just saved to the publisher of the main process, after comparing it on the test sets
    with `hub.not_worse_than`. All processes call it together.
    """
    hub, verdict = run.recipe.hub, None
    checkpoint = checkpoint_folder(run.folder, state.step)
    if hub.not_worse_than is not None:
        try:
            name = on_main_process(run.accelerator, baseline_name, run.folder, checkpoint, hub)
            verdict = Verdict(hub.not_worse_than, {})
            if name is not None:
                before = translate_tests(run, name)
                after, _ = translate_and_score(run, state.eval_model(), "test", run.recipe.evaluation.num_beams)
                how = run.recipe.evaluation.tokenize, run.recipe.evaluation.lowercase
                texts = run.sets["test"], before, after
                verdict = replace(verdict, sets=on_main_process(run.accelerator, compare_sets, *texts, *how))
        # As with all of publishing, no error ends the training.
        except (ValueError, OSError) as error:
            logger.warning(f"{checkpoint} is not published: {error}")
            return
    if publisher is not None:
        publisher.offer(checkpoint, verdict)


# ---- Afterwards --------------------------------------------------------------------------------------------------


def judge(candidate: Candidate, device: torch.device | None = None) -> Verdict | None:
    """
    Compares a model or a checkpoint of a run with the one of `hub.not_worse_than`, on the test sets of the run's
    recipe; without `hub.not_worse_than`, with none. Translations that the run has kept are used again.

    Args:
        candidate ([`Candidate`]): the model or checkpoint.
        device (`torch.device`, *optional*): where models translate; by default that of this process.

    Raises:
        ValueError: a model cannot be loaded; or the test text cannot be read, or is no longer the one that the model
            was scored on.
        PublishingError: the Hub refused, or could not be reached.
    """
    run_dir, folder, hub = candidate.run_dir, candidate.folder, candidate.hub
    recipe, scored = candidate.recipe, candidate.scored
    if hub.not_worse_than is None:
        return None
    name, verdict = baseline_name(run_dir, folder, hub), Verdict(hub.not_worse_than, {})
    if name is None:
        return verdict
    texts = evaluation_texts(task_data(recipe).read_evaluation(), "test")
    if not texts:
        raise ValueError(f"{folder} is not published: models are compared on test sets, but its recipe has none.")
    after = before = None
    # A checkpoint has no translations from the end of the training.
    if isinstance(scored, Result):
        names = [text.name for text in texts]
        after = read_translations(run_dir, scored, TRANSLATIONS, names)
        if hub.not_worse_than == "start":
            before = read_translations(run_dir, scored, START_TRANSLATIONS, names)
    if after is not None:
        _check_text(candidate, texts, after)
    device = device or own_device()
    limit_threads()
    before = before or _translate(name, texts, device)
    after = after or _translate(folder, texts, device, is_own=True)
    how = recipe.evaluation.tokenize, recipe.evaluation.lowercase
    return replace(verdict, sets=compare_sets(texts, before, after, *how))


def _check_text(candidate: Candidate, texts: list[EvaluationText], translations: dict[str, list[str]]) -> None:
    """Raises a `ValueError` if translations no longer have the recorded score: the references are others."""
    scored, evaluation = candidate.scored, candidate.recipe.evaluation
    for text in texts:
        how = tokenizer_of(evaluation.tokenize, text.target_language), evaluation.lowercase, [COMPARED_BY]
        recorded = (scored.sets or {text.name: scored.scores}).get(text.name, {}).get(COMPARED_BY)
        lines, found = translations[text.name], None
        if len(lines) == len(text.target):
            found = score(lines, text.target, *how)[COMPARED_BY]
        if found is None or recorded is None or abs(found - recorded) > ROUNDING:
            raise ValueError(
                f"{candidate.folder} is not published: the text of the test set {text.name} is no longer the one that "
                "the model was scored on, so it cannot be compared. Restore the text."
            )


def _translate(
    name: str | Path, texts: list[EvaluationText], device: torch.device, is_own: bool = False
) -> dict[str, list[str]]:
    """Translates test sets; a model of the run itself takes its tags from the recipe."""
    model = Baseline(name, device)
    return {text.name: model(text.source if is_own else model.tagged(text)) for text in texts}
