"""The model of each task, and the measures of its validation besides the loss."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..data.batching import Batch
from ..data.task_data import EvaluationSet
from ..data.tokenizer import Frame
from ..model.configuration_vaswani import VaswaniConfig
from ..model.heads_vaswani import (
    VaswaniClassifier,
    VaswaniForCausalLM,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
)
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel
from ..model.rules_vaswani import SEARCH_SETTINGS
from ..recipe import EvaluationRecipe, Recipe

# Sum and divisor of a measure, by its name.
Totals = dict[str, tuple[float, float]]
# Measures of single labels, of which only the mean is reported, begin with it.
F1_OF = "f1 of "


@dataclass(frozen=True)
class TaskModel:
    """
    The model of a task.

    Attributes:
        kind (`type`): its class.
        config (`Callable`): returns the fields of its config that follow from the task, but for names of labels.
        frame ([`Frame`]): the special tokens around its text.
        perplexities (`Sequence[str]`): its perplexities, by [`perplexities`].
    """

    kind: type[VaswaniPreTrainedModel]
    config: Callable[[Recipe], dict[str, Any]] = lambda recipe: {}
    frame: Frame = Frame()
    perplexities: Sequence[str] = ("perplexity",)


def _encoder(recipe: Recipe) -> dict[str, Any]:
    return {"is_encoder_decoder": False, "type_vocab_size": 2 if recipe.objective.next_sentence else 0}


def _classifier(recipe: Recipe) -> dict[str, Any]:
    is_decoder = recipe.objective.stack == "decoder"
    segments = 2 if has_segments(recipe) else 0
    return {"is_encoder_decoder": False, "is_decoder": is_decoder, "type_vocab_size": segments}


MODELS: dict[str, TaskModel] = {
    "translation": TaskModel(
        VaswaniForConditionalGeneration, lambda recipe: {"language_pairs": recipe.language_pairs}
    ),
    "text_to_text": TaskModel(VaswaniForConditionalGeneration),
    "masked_lm": TaskModel(VaswaniForMaskedLM, _encoder, Frame(bos=True, reads_mask=True)),
    "causal_lm": TaskModel(
        VaswaniForCausalLM,
        lambda recipe: {"is_encoder_decoder": False, "is_decoder": True},
        Frame(bos=True, eos=False),
        ("perplexity", "word_perplexity", "byte_perplexity"),
    ),
    "span_corruption": TaskModel(VaswaniForConditionalGeneration),
    "denoise": TaskModel(VaswaniForConditionalGeneration),
    "classification": TaskModel(VaswaniForSequenceClassification, _classifier, Frame(bos=True), ()),
    "tagging": TaskModel(VaswaniForTokenClassification, _classifier, Frame(bos=True), ()),
}


def model_class(recipe: Recipe) -> type[VaswaniPreTrainedModel]:
    """Returns the class of the model that a recipe trains."""
    return VaswaniForPreTraining if recipe.objective.next_sentence else MODELS[recipe.task].kind


def config_of_task(recipe: Recipe, labels: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields of the config that follow from the task of a recipe, and from the labels of its text."""
    return MODELS[recipe.task].config(recipe) | config_of_labels(labels)


def has_segments(recipe: Recipe) -> bool:
    """Returns whether a new model tells the two texts of a pair apart by segments, which a decoder does not have."""
    return recipe.data.pair_column is not None and recipe.objective.stack != "decoder"


def search_of(evaluation: EvaluationRecipe) -> dict[str, Any]:
    """Returns the search settings of a recipe, as a generation config has them."""
    found = {name: getattr(evaluation, name) for name in SEARCH_SETTINGS if hasattr(evaluation, name)}
    # transformers does not save settings of its own that a single beam has no use for.
    return found if evaluation.num_beams > 1 else found | dict.fromkeys(("length_penalty", "early_stopping"))


def config_of_labels(labels: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of the config that name labels."""
    names = dict(enumerate(labels))
    return {"id2label": names, "label2id": {name: i for i, name in names.items()}} if names else {}


def check_model(recipe: Recipe) -> None:
    """Raises a `ValueError` if the settings of the model contradict each other."""
    VaswaniConfig(**vars(recipe.model), **config_of_task(recipe))


# ---- Measures ----------------------------------------------------------------------------------------------------


def batch_measures(model: VaswaniPreTrainedModel, batch: Batch) -> Totals:
    """
    Measures the predictions of a model for a batch.

    Args:
        model ([`VaswaniPreTrainedModel`]): the model, not wrapped.
        batch (`dict[str, torch.Tensor]`): as [`PairCollator`] makes it, without `numbers`.

    Returns:
        `dict[str, tuple[float, float]]`: sum and divisor of each measure.
    """
    labels = batch["labels"]
    inputs = {name: ids for name, ids in batch.items() if name not in ("labels", "next_sentence_label")}
    if isinstance(model, VaswaniClassifier):
        return label_measures(model(**inputs).logits.argmax(dim=-1), labels, model.config.id2label)
    if not isinstance(model, VaswaniForMaskedLM):
        return {}
    states = model.model(**inputs).last_hidden_state
    is_label = labels != -100
    # Logits of the labels alone: those of all tokens would fill the memory.
    found = model.lm_head(model.lm_transform(states[is_label])).argmax(dim=-1)
    measures = {"accuracy": _accuracy(found, labels[is_label])}
    if isinstance(model, VaswaniForPreTraining):
        truth = batch["next_sentence_label"]
        relation = model.next_sentence(model.pooler(states, batch["attention_mask"])).argmax(dim=-1)
        known = truth != -100
        measures["next_sentence_accuracy"] = _accuracy(relation[known], truth[known])
    return measures


def _accuracy(found: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    return float((found == truth).sum()), float(truth.numel())


def label_measures(found: torch.Tensor, truth: torch.Tensor, names: Mapping[int, str]) -> Totals:
    """
    Compares labels with the true ones.

    Args:
        found (`torch.LongTensor` of shape `(batch,)` or `(batch, length)`): predicted labels.
        truth (`torch.LongTensor` of the same shape): true labels; positions with -100 have no label and are ignored.
        names (`dict[int, str]`): names of the labels.

    Returns:
        `dict[str, tuple[float, float]]`: sum and divisor of the `accuracy`, and of F1, twice the correct ones over the
        predicted and the true ones. If the labels are tags such as B-PER, I-PER and O, `f1` counts whole spans
        (Tjong Kim Sang and De Meulder, 2003); otherwise there is one measure for each label, see [`mean_of_labels`].
    """
    known = truth != -100
    measures = {"accuracy": _accuracy(found[known], truth[known])}
    if truth.dim() == 2 and are_spans(names.values()):
        return measures | {"f1": _f1_of_spans(found, truth, names)}
    ours, theirs = found[known], truth[known]
    parts = (ours[ours == theirs], ours, theirs)
    correct, *counts = (torch.bincount(part, minlength=len(names)).tolist() for part in parts)
    for i, (both, *each) in enumerate(zip(correct, *counts, strict=True)):
        measures[f"{F1_OF}{i}"] = 2.0 * both, float(sum(each))
    return measures


def _f1_of_spans(found: torch.Tensor, truth: torch.Tensor, names: Mapping[int, str]) -> tuple[float, float]:
    correct = count = 0
    for predicted, true in zip(found.tolist(), truth.tolist(), strict=True):
        places = [i for i, tag in enumerate(true) if tag != -100]
        ours, theirs = (set(spans([names[tags[i]] for i in places])) for tags in (predicted, true))
        correct += len(ours & theirs)
        count += len(ours) + len(theirs)
    return 2.0 * correct, float(count)


def are_spans(names: Collection[str]) -> bool:
    """Returns whether tags mark spans: O outside, B-KIND at the beginning and I-KIND inside."""
    return all(name == "O" or name[:2] in ("B-", "I-") for name in names)


def spans(tags: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """
    Finds the spans that tags mark. As in the evaluation of CoNLL, an I that continues no span of its kind begins one.

    Args:
        tags (`Sequence[str]`): tag of each word.

    Yields:
        `tuple[int, int, str]`: first word, word behind the last, and kind of a span.
    """
    kinds = ["" if tag == "O" else tag[2:] for tag in tags]
    starts = [i for i, tag in enumerate(tags) if tag[0] == "B" or i == 0 or kinds[i] != kinds[i - 1]]
    for start, end in pairwise([*starts, len(tags)]):
        if kinds[start]:
            yield start, end, kinds[start]


def mean_of_labels(measures: Mapping[str, float]) -> dict[str, float]:
    """Replaces the F1 of single labels by their mean over those that are predicted or true somewhere, if any are."""
    rest = {name: value for name, value in measures.items() if not name.startswith(F1_OF)}
    found = [value for name, value in measures.items() if name.startswith(F1_OF)]
    known = [value for value in found if not math.isnan(value)]
    return rest | ({"f1": sum(known) / len(known) if known else math.nan} if found else {})


def perplexities(task: str, nats: float, tokens: float, sets: list[EvaluationSet]) -> dict[str, float]:
    """
    Returns the perplexity of a model on text, and of a causal language model also that per word and per byte, by which
    models of different vocabularies can be compared. A classifier has none.

    Args:
        task (`str`): task of the model.
        nats (`float`): cross-entropy of all labels together.
        tokens (`float`): number of labels.
        sets (`list[EvaluationSet]`): the text. Its words are what white space separates; an end of line is a byte.

    Returns:
        `dict[str, float]`: measures by name; infinity where a number is too large.
    """
    lines = [line for text in sets for line in text.source]
    units = {
        "perplexity": tokens,
        "word_perplexity": sum(len(line.split()) for line in lines),
        "byte_perplexity": sum(len(line.encode()) + 1 for line in lines),
    }
    return {name: _exp(nats / units[name]) for name in MODELS[task].perplexities}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
