"""Starts the model of one task from that of another: with the stacks and heads that both have."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..adapters import has_adapter
from ..averaging import load_stored, load_weights
from ..data.tokenizer import put_special_tokens
from ..files import check_weights
from ..model.configuration_vaswani import VaswaniConfig
from ..model.heads_vaswani import VaswaniClassifier, VaswaniForMaskedLM
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel, stored_embedding
from ..recipe import Recipe
from ..run_folder import EMA_WEIGHTS
from ..translation.loading import check_finite, check_report, check_vocabulary, load_whole_tokenizer, quiet
from .tasks import config_of_labels, model_class, search_of

logger = logging.getLogger(__name__)

# The layer of a classifier with a row for each label.
LABELS = "classifier."


def load_other(
    folder: Path, recipe: Recipe, labels: Sequence[str]
) -> tuple[VaswaniPreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads a model of any class of this package as the class that a recipe trains. What the folder does not have gets
    random weights: a head, or the other stack, whose number of layers is the recipe's.

    Args:
        folder (`Path`): folder of the model.
        recipe ([`Recipe`]): its task, and the settings of what is new.
        labels (`Sequence[str]`): labels of the training text. A classifier in the folder keeps its own.

    Returns:
        [`VaswaniPreTrainedModel`] in float32 and in evaluation mode, and its [`PreTrainedTokenizerBase`], which puts
        the special tokens of the task around a text.

    Raises:
        ValueError: the folder has none of the stacks, or lacks a weight that it should have.
    """
    if has_adapter(folder):
        raise ValueError(f"{folder} has only adapters: name the model of the finished run.")
    is_recorded = check_weights(folder)
    kind, tokenizer = model_class(recipe), load_whole_tokenizer(folder)
    config = VaswaniConfig.from_pretrained(folder)
    saved = config.stacks
    is_same = config.architectures == [kind.__name__]
    _fit_config(config, recipe, [] if is_same else labels)
    with quiet():
        model, report = kind.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    if isinstance(model, VaswaniClassifier) and not is_same:
        # The rows of another classifier are of other labels.
        model.classifier = torch.nn.Linear(model.config.d_model, model.config.num_labels)
        model._init_weights(model.classifier)
        report["mismatched_keys"] = {each for each in report["mismatched_keys"] if not each[0].startswith(LABELS)}
        report["missing_keys"] = {*report["missing_keys"], f"{LABELS}weight"}
    lost = {name for name in report["missing_keys"] if is_same or not _may_be_new(name, saved)}
    check_report(report | {"missing_keys": lost, "unexpected_keys": ()}, folder)
    if not is_recorded:
        check_finite(model, folder)
    if (folder / EMA_WEIGHTS).is_file():
        _load_average(model, folder, None if is_same else saved)
    if isinstance(model, VaswaniForConditionalGeneration):
        model.generation_config.update(**search_of(recipe.evaluation))
    check_vocabulary(model, tokenizer, folder)
    # Segments tell the texts of a pair apart, which an encoder reads.
    put_special_tokens(tokenizer, recipe.task, model.config.stacks == ("encoder",) and config.type_vocab_size > 0)
    new = ", ".join(sorted({_described(name, saved) for name in report["missing_keys"]}))
    logger.info(f"initialize.from: took the weights of {folder}" + (f"; random weights for {new}" if new else ""))
    return model.eval(), tokenizer


def _fit_config(config: VaswaniConfig, recipe: Recipe, labels: Sequence[str]) -> None:
    """Changes the config of a folder to that of the recipe's model."""
    kind = model_class(recipe)
    for stack in ("encoder", "decoder"):
        if stack not in config.stacks:
            setattr(config, f"{stack}_layers", getattr(recipe.model, f"{stack}_layers"))
    config.lm_head_transform = config.lm_head_transform and issubclass(kind, VaswaniForMaskedLM)
    if recipe.objective.next_sentence:
        config.type_vocab_size = max(config.type_vocab_size, 2)
    if issubclass(kind, VaswaniClassifier):
        (stack,) = kind.stacks_from(config.stacks)
        if recipe.objective.stack not in (None, stack):
            raise ValueError(
                f"objective.stack is {recipe.objective.stack!r}, but a classifier reads the {stack} of this model: "
                "leave the key out."
            )
        config.update(config_of_labels(labels))


def _may_be_new(name: str, saved: tuple[str, ...]) -> bool:
    """Returns whether a model with these stacks cannot have a weight: that of a head, or of the other stack."""
    match = re.match(r"model\.(encoder|decoder)\.", name)
    return match is None or match[1] not in saved or ".cross_attn" in name or ".embed_segments." in name


def _described(name: str, saved: tuple[str, ...]) -> str:
    """
    Returns the part of a model that a weight belongs to: `"decoder"` or `"classifier"`, and of a stack that the folder
    has, `"the decoder's cross_attn"`.
    """
    parts = name.removeprefix("model.").split(".")
    if parts[0] not in saved:
        return parts[0]
    return f"the {parts[0]}'s {parts[3] if parts[1] == 'layers' else parts[1]}"


def _load_average(model: VaswaniPreTrainedModel, folder: Path, saved: tuple[str, ...] | None) -> None:
    """
    Loads the moving average of a checkpoint in place of its weights, but for those that a model with other stacks than
    the `saved` ones, or another head, has anew; `None` for a model of the same class.
    """
    weights = load_weights(folder)
    for before, after in stored_embedding(type(model), folder, {}).items():
        weights |= {name.replace(before, after): weight for name, weight in weights.items() if before in name}
    names = {
        name for name in model.state_dict().keys() & weights.keys() if saved is None or not name.startswith(LABELS)
    }
    load_stored(
        model,
        {name: weights[name] for name in names},
        is_new=lambda name: saved is not None and _may_be_new(name, saved),
    )
