"""Validation during a training and the test at its end: loss, translations shared by all processes, and scores."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ..data.augmentation import altered_set
from ..data.batching import BatchOrder, PairCollator, TokenBudgetBatchSampler, to_device
from ..data.encoding import pair_lengths
from ..data.task_data import EvaluationSet
from ..extras import extra
from ..metrics import COMPARED_BY, METRICS, measure_of, score, scored_by, tokenizer_of
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel
from ..model.sentences_vaswani import LanguageTags, longest_source
from ..processes import on_main_process
from ..recipe import MEASURED_TASKS, PAIR_TASKS, TOKENS_PER_BATCH
from ..records import Validation
from ..run_folder import read_validations, write_validations
from ..translation.alignment import choose_alignment
from ..translation.batches import translate_corpus
from ..translation.lines import cut_lines
from ..translation.quantization import float32_products
from ..translation.static_search import release
from .preparation import Run, is_accelerator, task_data
from .tasks import Totals, batch_measures, mean_of_labels, perplexities

with extra("train"):
    from accelerate.utils import gather_object

logger = logging.getLogger(__name__)

# Validation pairs by which a layer is chosen.
ALIGNED_PAIRS = 200


def translate(run: Run, model: VaswaniForConditionalGeneration, sentences: list[str], num_beams: int) -> list[str]:
    """
    Translates a corpus, each process a share of it. All processes call it together.

    Args:
        run ([`Run`]): accelerator, tokenizer and recipe.
        model ([`VaswaniForConditionalGeneration`]): the model, on this process's device and with the same weights in
            all processes.
        sentences (`list[str]`): source sentences.
        num_beams (`int`): beam size.

    Returns:
        `list[str]`: all translations, in the order of `sentences` and in every process.
    """
    evaluation = run.recipe.evaluation
    search: dict[str, Any] = {"num_beams": num_beams}
    if num_beams > 1:
        # The generation config of a greedy model has no settings for a beam.
        search |= {"length_penalty": evaluation.length_penalty, "early_stopping": evaluation.early_stopping}

    def translate_part(part: list[str]) -> list[str]:
        # Long sentences are cut as by the commands, whose scores are to be the same.
        cut = cut_lines(part, LanguageTags(run.tokenizer), longest_source([model], run.tokenizer))
        translations = iter(
            translate_corpus(
                model,
                run.tokenizer,
                [source for parts in cut for source in parts.sources],
                tokens_per_batch=evaluation.tokens_per_batch,
                progress=run.accelerator.is_main_process,
                **search,
            )
        )
        return [parts.join([next(translations) for _ in parts.spans]) for parts in cut]

    try:
        with _without_mixed_precision(model):
            return share(run, sentences, translate_part)
    finally:
        # The training needs the memory.
        release(model)


@contextmanager
def _without_mixed_precision(model: VaswaniForConditionalGeneration) -> Iterator[None]:
    """
    Takes Accelerate's wrapper off `forward` while a model translates. The saved model has none, so its translations
    would differ from those that are scored, and only a model without one is searched by the fast search.
    """
    wrapper = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if wrapper is not None:
            model.__dict__["forward"] = wrapper


def share(run: Run, sentences: list[str], translate_part: Callable[[list[str]], list[str]]) -> list[str]:
    """
    Shares the translation of a corpus among the processes: each calls `translate_part` with its sentences, and all
    return all translations, in the order of `sentences`. All processes call it together.
    """
    mine = slice(run.accelerator.process_index, None, run.accelerator.num_processes)
    part = translate_part(sentences[mine])
    translations = dict(gather_object(list(zip(range(len(sentences))[mine], part, strict=True))))
    return [translations[i] for i in range(len(sentences))]


def translate_and_score(
    run: Run, model: VaswaniForConditionalGeneration, split: str, num_beams: int
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """
    Translates and scores every set of a split. All processes call it together.

    Args:
        run ([`Run`]), model ([`VaswaniForConditionalGeneration`]), num_beams (`int`): as in [`translate`].
        split (`str`): `"validation"` or `"test"`.

    Returns:
        `dict[str, list[str]]` and `dict[str, Any]`: translations by the name of their set, and `scores`, `signatures`,
        `sets` and `set_signatures` as [`Scored`] has them, in a validation without slow metrics.
    """
    translations = {pairs.name: translate(run, model, pairs.source, num_beams) for pairs in run.sets[split]}
    return translations, on_main_process(run.accelerator, _scores, run, split, translations)


def _scores(run: Run, split: str, translations: dict[str, list[str]]) -> dict[str, Any]:
    """Scores the translations of the sets of a split."""
    evaluation, sets = run.recipe.evaluation, {}
    # A young model's translations are long, and their TER takes longer than the rest of the validation.
    metrics = scored_by(run.recipe.task, with_slow=split == "test")
    for pairs in run.sets[split]:
        tokenize = tokenizer_of(evaluation.tokenize, pairs.target_language)
        how = tokenize, evaluation.lowercase, metrics, pairs.plain
        sets[pairs.name] = score(translations[pairs.name], pairs.target, *how)
    by_set = {name: scored.pop("signatures") for name, scored in sets.items()}
    signed = {metric: dict.fromkeys(each[metric] for each in by_set.values()) for metric in by_set[pairs.name]}
    means = {metric: sum(each[metric] for each in sets.values()) / len(sets) for metric in metrics}
    return {
        "scores": means,
        "signatures": {metric: " and ".join(each) for metric, each in signed.items()},
        "sets": sets if len(sets) > 1 else None,
        "set_signatures": by_set if any(len(each) > 1 for each in signed.values()) else None,
    }


def score_altered(
    run: Run, model: VaswaniForConditionalGeneration, num_beams: int
) -> dict[str, dict[str, dict[str, float]]] | None:
    """
    Translates and scores every test set once for each alteration of `evaluation.altered`. All processes call it
    together.

    Args:
        run ([`Run`]), model ([`VaswaniForConditionalGeneration`]), num_beams (`int`): as in [`translate`].

    Returns:
        `dict[str, dict[str, dict[str, float]]]`: `bleu`, `chrf` and `ter` by set and alteration; `None` if the recipe
        asks for none.
    """
    evaluation = run.recipe.evaluation
    found: dict[str, dict[str, dict[str, float]]] = {}
    for pairs in run.sets["test"]:
        for name in dict.fromkeys(evaluation.altered):
            sources, references = altered_set(pairs.plain, [[line] for line in pairs.target], name)
            translations = translate(run, model, pairs.with_prefix(sources), num_beams)
            tokenize = tokenizer_of(evaluation.tokenize, pairs.target_language)
            how = tokenize, evaluation.lowercase, None, sources
            scored = on_main_process(run.accelerator, score, translations, references, *how)
            del scored["signatures"]
            found.setdefault(pairs.name, {})[name] = scored
    return found or None


@torch.no_grad()
def totals(run: Run, model: VaswaniPreTrainedModel, split: str) -> dict[str, Totals]:
    """
    Measures the predictions for the sets of a split, with the true text before each token. All processes call it
    together.

    Args:
        run ([`Run`]): as in [`translate`].
        model ([`VaswaniPreTrainedModel`]): the model.
        split (`str`): `"validation"` or `"test"`.

    Returns:
        `dict[str, dict[str, tuple[float, float]]]`: by the name of the set, sum and divisor of the `loss`, which is in
        nats per label and without label smoothing, and of the measures of the task, the same in every process.
    """
    accelerator, found = run.accelerator, {}
    tokens, limit = run.recipe.training.tokens_per_batch, task_data(run.recipe).max_length
    budget = run.tokens_at_once or TOKENS_PER_BATCH if tokens == "auto" else tokens
    model.eval()
    for pairs in run.sets[split]:
        lengths = pair_lengths(pairs.encoded)
        order = BatchOrder(
            # No pair is skipped here: the budget grows to the longest one.
            max(budget, int(lengths.max())),
            num_processes=accelerator.num_processes,
            process_index=accelerator.process_index,
            few_shapes=is_accelerator(accelerator.device),
        )
        rows = DataLoader(
            pairs.encoded,
            batch_sampler=TokenBudgetBatchSampler(lengths, order),
            collate_fn=PairCollator(run.tokenizer.pad_token_id, pairs.columns, replace(order, max_length=limit)),
            generator=torch.Generator(),
        )
        sums: dict[str, torch.Tensor] = {}
        for batch in rows:
            del batch["numbers"]
            (batch,) = to_device([batch], accelerator.device)
            measures: dict[str, Any] = batch_measures(model, batch)
            batch.pop("next_sentence_label", None)
            loss = model(**batch, num_items_in_batch=1, loss_only=True).loss
            measures["loss"] = loss, (batch["labels"] != -100).sum()
            for name, pair in measures.items():
                sums[name] = sums.get(name, 0) + torch.stack([torch.as_tensor(each).to(loss) for each in pair])
        reduced = accelerator.reduce(sums, "sum")
        found[pairs.name] = {name: tuple(each.tolist()) for name, each in sorted(reduced.items())}
    model.train()
    return found


def _mean(sums: Iterable[tuple[float, float]]) -> float:
    """Returns the mean over several sets, each with a sum and a divisor."""
    total, count = map(sum, zip(*sums, strict=True))
    return total / count if count else math.nan


def measure(
    run: Run, model: VaswaniPreTrainedModel, split: str
) -> tuple[dict[str, float], dict[str, dict[str, float]] | None]:
    """
    Measures a model of running or labelled text. All processes call it together.

    Args:
        run ([`Run`]), model ([`VaswaniPreTrainedModel`]), split (`str`): as in [`totals`].

    Returns:
        `dict[str, float]`: loss, perplexities and other measures, over the text of all sets; and, if there are several
        sets, those of each by its name.
    """
    found, sets = totals(run, model, split), run.sets[split]

    def measures(parts: list[Totals], texts: list[EvaluationSet]) -> dict[str, float]:
        means = mean_of_labels({name: _mean(part[name] for part in parts) for name in parts[0]})
        nats, labels = (sum(part["loss"][i] for part in parts) for i in (0, 1))
        return means | perplexities(run.recipe.task, nats, labels, texts)

    each = {text.name: measures([found[text.name]], [text]) for text in sets}
    return measures(list(found.values()), sets), each if len(sets) > 1 else None


def validate(run: Run, model: VaswaniPreTrainedModel, step: int) -> None:
    """
    Validates a model: logs loss and scores, and adds them to `validations.jsonl`. All processes call it together.

    Args:
        run ([`Run`]), model ([`VaswaniPreTrainedModel`]): as in [`totals`].
        step (`int`): updates so far.
    """
    with float32_products("high", run.accelerator.device):
        if run.recipe.task in MEASURED_TASKS:
            scores, sets = measure(run, model, "validation")
            scored: dict[str, Any] = {"scores": scores, "sets": sets}
        else:
            mixed = run.recipe.evaluation.validate_in_mixed_precision
            with run.accelerator.autocast() if mixed else nullcontext():
                scored = _translation_scores(run, cast(VaswaniForConditionalGeneration, model))
    scores, sets = scored["scores"], scored["sets"] or {}
    logger.info(f"update {step}: validation {_summary(scored)}")
    values = scores | {f"{name}/{part}": value for part, each in sets.items() for name, value in each.items()}
    run.accelerator.log({f"validation_{name}": value for name, value in values.items()}, step=step)
    scored |= {"scores": finite(scores), "sets": {name: finite(part) for name, part in sets.items()} or None}
    validation = Validation(step, **scored)

    def write() -> None:
        validations = [*read_validations(run.folder), validation]
        write_validations(run.folder, validations, run.recipe.training)

    on_main_process(run.accelerator, write)


def _translation_scores(run: Run, model: VaswaniForConditionalGeneration) -> dict[str, Any]:
    """Returns the loss and the scores of the translations of the validation sets, as [`Scored`] has them."""
    found = {name: part["loss"] for name, part in totals(run, model, "validation").items()}
    _, scored = translate_and_score(run, model, "validation", run.recipe.evaluation.validation_num_beams)
    for name, part in (scored["sets"] or {}).items():
        part["loss"] = _mean([found[name]])
    return scored | {"scores": {"loss": _mean(found.values())} | scored["scores"]}


def _summary(scored: dict[str, Any]) -> str:
    """Returns the scores of a validation as its message has them, with the BLEU of each set."""
    shown = [f"{measure_of(name).title} {measure_of(name).shown(value)}" for name, value in scored["scores"].items()]
    shown += [
        f"{part} {METRICS[COMPARED_BY].title} {METRICS[COMPARED_BY].shown(each[COMPARED_BY])}"
        for part, each in (scored["sets"] or {}).items()
        if COMPARED_BY in each
    ]
    signature = scored.get("signatures", {}).get(COMPARED_BY)
    return ", ".join(shown) + (f" ({signature})" if signature else "")


def finite(scores: dict[str, float]) -> dict[str, float | None]:
    """Returns scores as JSON can hold them: `None` stands for one that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def choose_alignment_layer(run: Run, model: VaswaniPreTrainedModel) -> None:
    """Sets `alignment_layer` and `alignment_shift` of the config by the first validation pairs, if there are any."""
    if run.recipe.task not in PAIR_TASKS or not run.tokenizer.is_fast:
        return
    sets = run.sets.get("validation", [])
    share = max(1, ALIGNED_PAIRS // max(1, len(sets)))
    pairs = [
        pair
        for pairs_of_set in sets
        for pair in islice(zip(pairs_of_set.source, pairs_of_set.target, strict=True), share)
        if all(len(run.tokenizer(text).input_ids) <= model.config.max_position_embeddings for text in pair)
    ]
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    # Without words on both sides, nothing can be aligned.
    with suppress(ValueError):
        layer, shift = choose_alignment(model, run.tokenizer, sources, targets)
        model.config.alignment_layer, model.config.alignment_shift = layer, shift
