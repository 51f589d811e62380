"""The model of each task, and the measures of its validation besides the loss."""

import math
from typing import Any

from ..data.batching import Batch
from ..data.sources import EvaluationSet
from ..model.configuration_vaswani import VaswaniConfig
from ..model.heads_vaswani import VaswaniForCausalLM, VaswaniForMaskedLM, VaswaniForPreTraining
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniLanguageModel
from ..recipe import Recipe


def model_class(recipe: Recipe) -> type[VaswaniLanguageModel]:
    """Returns the class of the model that a recipe trains."""
    if recipe.task == "causal_lm":
        return VaswaniForCausalLM
    if recipe.task == "masked_lm":
        return VaswaniForPreTraining if recipe.objective.next_sentence else VaswaniForMaskedLM
    return VaswaniForConditionalGeneration


def config_of_task(recipe: Recipe) -> dict[str, Any]:
    """Returns the fields of the config that follow from the task of a recipe."""
    if recipe.task == "masked_lm":
        segments = 2 if recipe.objective.next_sentence else 0
        return {"is_encoder_decoder": False, "type_vocab_size": segments}
    if recipe.task == "causal_lm":
        return {"is_encoder_decoder": False, "is_decoder": True}
    return {} if recipe.task != "translation" else {"language_pairs": recipe.language_pairs}


def check_model(recipe: Recipe) -> None:
    """Raises a `ValueError` if the settings of the model contradict each other."""
    VaswaniConfig(**vars(recipe.model), **config_of_task(recipe))


def batch_measures(recipe: Recipe, model: VaswaniLanguageModel, batch: Batch) -> dict[str, tuple[float, float]]:
    """
    Measures the predictions of a model for a batch.

    Args:
        recipe ([`Recipe`]): the experiment.
        model ([`VaswaniLanguageModel`]): the model, not wrapped.
        batch (`dict[str, torch.Tensor]`): as [`PairCollator`] makes it, without `numbers`.

    Returns:
        `dict[str, tuple[float, float]]`: sum and divisor of each measure.
    """
    if not isinstance(model, VaswaniForMaskedLM):
        return {}
    labels = batch["labels"]
    inputs = {name: ids for name, ids in batch.items() if name not in ("labels", "next_sentence_label")}
    states = model.model(**inputs).last_hidden_state
    is_label = labels != -100
    # Logits of the labels alone: those of all tokens would fill the memory.
    found = model.lm_head(model.lm_transform(states[is_label])).argmax(dim=-1)
    measures = {"accuracy": (float((found == labels[is_label]).sum()), float(is_label.sum()))}
    if isinstance(model, VaswaniForPreTraining):
        truth = batch["next_sentence_label"]
        relation = model.next_sentence(model.pooler(states, batch["attention_mask"])).argmax(dim=-1)
        known = truth != -100
        measures["next_sentence_accuracy"] = (float((relation == truth)[known].sum()), float(known.sum()))
    return measures


def perplexities(recipe: Recipe, nats: float, tokens: float, sets: list[EvaluationSet]) -> dict[str, float]:
    """
    Returns the perplexity of a model on text, and of a causal language model also that per word and per byte, by which
    models of different vocabularies can be compared.

    Args:
        recipe ([`Recipe`]): the experiment.
        nats (`float`): cross-entropy of all labels together.
        tokens (`float`): number of labels.
        sets (`list[EvaluationSet]`): the text. Its words are what white space separates; an end of line is a byte.

    Returns:
        `dict[str, float]`: measures by name; infinity where a number is too large.
    """
    units = {"perplexity": tokens}
    if recipe.task == "causal_lm":
        lines = [line for text in sets for line in text.source]
        units["word_perplexity"] = float(sum(len(line.split()) for line in lines))
        units["byte_perplexity"] = float(sum(len(line.encode()) + 1 for line in lines))
    return {name: _exp(nats / count) for name, count in units.items()}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
