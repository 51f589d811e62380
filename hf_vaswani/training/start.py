"""Starts a run from a trained model: loads it from any format and task, and fits recipe and model to each other."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..adapters import has_adapter
from ..averaging import load_stored, load_weights
from ..data.tokenizer import put_special_tokens, splits_digits
from ..files import atomic_folder, check_weights, find_damage, read_json
from ..model.configuration_vaswani import VaswaniConfig
from ..model.heads_vaswani import VaswaniClassifier, VaswaniForMaskedLM
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel, stored_embedding
from ..model_names import resolve_model, with_revision
from ..recipe import EvaluationRecipe, ModelRecipe, Recipe, shown
from ..recipe_checks import check_ranges
from ..recipe_file import load_recipe
from ..run_folder import (
    EMA_WEIGHTS,
    MODEL,
    RECIPE,
    RESULT,
    START,
    Resume,
    check_checkpoint,
    is_checkpoint,
    known_validations,
    list_checkpoints,
    ranked,
    read_progress,
)
from ..translation.loading import (
    check_finite,
    check_report,
    check_vocabulary,
    load_translator,
    load_whole_tokenizer,
    quiet,
)
from .tasks import MODELS, config_of_labels, config_of_task, model_class, search_of
from .transfer import seeded

logger = logging.getLogger(__name__)

# Settings of the model that training may change.
FREE = ("dropout", "attention_dropout", "activation_dropout")
# Those whose defaults have changed since 0.1.
RULES = ("length_penalty_type", "finish_candidates", "early_stopping", "tokenize")
# The size of an update, which recipes of 0.1 did not have.
UPDATE_SIZE = "training.tokens_per_update"
# Kinds of vocabulary by the model of `tokenizers`; of several, the first is what a recipe is filled in with.
KINDS = {
    "BPE": ("bpe", "bytes"),
    "Unigram": ("unigram",),
    "WordPiece": ("wordpiece",),
    "WordLevel": ("words", "characters"),
}
# The layer of a classifier with a row for each label.
LABELS = "classifier."


# ---- Loading -----------------------------------------------------------------------------------------------------


def load_start(recipe: Recipe, labels: Sequence[str] = ()) -> tuple[VaswaniPreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads the model that a run starts from, after converting it if it is of another format.

    Args:
        recipe ([`Recipe`]): `initialize.from` is a Hub id, or the folder of a model, a checkpoint or a run, or a
            foreign model.
        labels (`Sequence[str]`): labels of the training text, for a classifier.

    Returns:
        [`VaswaniPreTrainedModel`] of the class that the recipe trains, in float32, and its
        [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: the model does not exist, is damaged or of an unknown kind, or cannot be converted.
    """
    name = str(recipe.initialize.from_)
    (revised,) = with_revision([name], recipe.initialize.revision, "initialize.revision")
    path = resolve_model(_best_checkpoint(Path(name)) or revised, "initialize.from")
    try:
        if _is_vaswani(path):
            return _load(path, recipe, labels)
        with TemporaryDirectory() as temporary:
            return _load(_converted(path, Path(temporary) / MODEL), recipe, labels)
    except ValueError as error:
        raise ValueError(f"initialize.from is {name}: {error}") from error


def _best_checkpoint(run_dir: Path) -> Path | None:
    """Returns the best checkpoint of a run that has no model yet, else its last one; `None` for anything else."""
    if not (run_dir / RECIPE).is_file() or (run_dir / MODEL / "config.json").is_file():
        return None
    found = {checkpoint.name: checkpoint for checkpoint in list_checkpoints(run_dir)}
    if not found:
        return None
    training = load_recipe([str(run_dir / RECIPE)]).training
    best = [f"checkpoint-{line.step}" for line in ranked(known_validations(run_dir), training)]
    return next((found[name] for name in best if name in found), list(found.values())[-1])


def _is_vaswani(path: Path) -> bool:
    if not (path / "config.json").is_file():
        return False
    return read_json(path / "config.json").get("model_type") == "vaswani"


def _converted(path: Path, folder: Path) -> Path:
    """Converts a foreign model, and compares the logits of both as `hf-vaswani convert` does."""
    try:
        from ..conversion.convert import convert

        convert(path, folder, "vaswani")
    except ImportError as error:
        # An error that all processes hear of.
        raise ValueError(f"The model must be converted: {error}") from error
    return folder


def _load(
    folder: Path, recipe: Recipe, labels: Sequence[str]
) -> tuple[VaswaniPreTrainedModel, PreTrainedTokenizerBase]:
    if is_checkpoint(folder):
        check_checkpoint(folder, read_progress(folder))
    is_whole = read_json(folder / "config.json").get("is_encoder_decoder", True)
    if not is_whole or model_class(recipe) is not VaswaniForConditionalGeneration:
        with seeded(recipe.seed):
            return _load_other(folder, recipe, labels)
    model, tokenizer = load_translator(folder, torch.float32)
    last = tokenizer("a")["input_ids"][-1:]
    if last != [tokenizer.eos_token_id]:
        raise ValueError(
            f"The tokenizer of {folder} does not put {tokenizer.eos_token} after a sentence, so a model would never "
            "learn where to end."
        )
    if "language_pairs" not in config_of_task(recipe):
        model.config.language_pairs = None
    return model, tokenizer


def _load_other(
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
    has_segments = model.config.stacks == ("encoder",) and config.type_vocab_size > 0
    put_special_tokens(tokenizer, MODELS[recipe.task].frame, has_segments)
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


# ---- The recipe --------------------------------------------------------------------------------------------------


def labels_of(folder: Path) -> list[str]:
    """Returns the names of the labels of a classifier, by its folder."""
    return list(VaswaniConfig.from_pretrained(folder).id2label.values())


def fill_from_model(recipe: Recipe, model: VaswaniPreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Recipe:
    """
    Fills the keys that a recipe leaves to the model it starts from: the architecture, the vocabulary (unless it is
    exchanged) and the search settings.

    Args:
        recipe ([`Recipe`]): the recipe as it was given.
        model ([`VaswaniPreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): the start.

    Returns:
        [`Recipe`]: the recipe, complete.

    Raises:
        ValueError: a key of `model` or `tokenizer` contradicts the model; the message has both values.
    """
    config = model.config
    names = [part.name for part in fields(ModelRecipe) if part.name not in FREE]
    values = {f"model.{name}": getattr(config, name) for name in names} | _of_vocabulary(recipe, config, tokenizer)
    for key, value in values.items():
        if key not in recipe.given:
            continue
        given, expected = recipe.flat()[key], value
        if key in ("model.d_k", "model.d_v"):
            given, expected = (size or config.d_model // config.num_heads for size in (given, expected))
        # The recipe cannot distinguish these either.
        is_kind = key == "tokenizer.kind" and any({given, value} <= set(kinds) for kinds in KINDS.values())
        if given != expected and not is_kind:
            raise ValueError(
                f"{key} is {shown(given)}, but the model {recipe.initialize.from_} has {shown(expected)}: leave the "
                "key out."
            )
    if isinstance(model, VaswaniForConditionalGeneration):
        values |= _of_search(recipe, model.generation_config)
    return _filled(recipe, values)


def _of_vocabulary(recipe: Recipe, config: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    starts = {
        getattr(config, f"{role}_token_id"): role
        for role in ("pad", "eos", "bos")
        if getattr(config, f"{role}_token_id") is not None
    }
    values = {"tokenizer.decoder_start": starts.get(config.decoder_start_token_id, recipe.tokenizer.decoder_start)}
    if recipe.initialize.vocabulary == "transfer":
        return values
    kind = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["type"]
    kinds = KINDS.get(kind, (recipe.tokenizer.kind,))
    return values | {
        "tokenizer.kind": kinds[0],
        "tokenizer.vocab_size": len(tokenizer),
        "tokenizer.split_digits": splits_digits(tokenizer),
        "tokenizer.path": None,
    }


def _of_search(recipe: Recipe, generation: Any) -> dict[str, Any]:
    """Returns the search settings of a model that the recipe leaves to it."""
    found = {name: getattr(generation, name, None) for name in search_of(recipe.evaluation)}
    found["num_beams"] = found["num_beams"] or 1
    # Of the two limits, the recipe's own replaces the model's.
    limits = ("max_length_offset", "max_length")
    is_limited = any(found[name] is not None for name in limits)
    if not is_limited or any(f"evaluation.{name}" in recipe.given for name in limits):
        found = {name: value for name, value in found.items() if name not in limits}
    defaults = asdict(EvaluationRecipe())
    keep = {name: value for name, value in found.items() if value is not None or name in (*limits, "early_stopping")}
    if keep.get("length_penalty") is not None:
        keep["length_penalty"] = float(cast(float, keep["length_penalty"]))
    return {f"evaluation.{name}": value for name, value in keep.items() if name in defaults}


def _filled(recipe: Recipe, found: Mapping[str, Any]) -> Recipe:
    """Returns a recipe with these keys, but for those that were given."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        section, name = key.split(".")
        if key not in recipe.given:
            sections.setdefault(section, {})[name] = value
    changed = {section: replace(getattr(recipe, section), **values) for section, values in sections.items()}
    filled = replace(recipe, **cast(Any, changed))
    filled.given = recipe.given
    check_ranges(filled)
    return filled


def resumed_recipe(recipe: Recipe, resume: Resume | None) -> Recipe:
    """
    Fills keys that are not given as the run's own record has them: the rules of search and scoring, and what a recipe
    leaves to the model it starts from. A resumed run asks neither the Hub nor the original.

    Args:
        recipe ([`Recipe`]): the recipe as it was given.
        resume ([`Resume`], *optional*): the newest checkpoint of its run.

    Returns:
        [`Recipe`]: complete if the run has a checkpoint or a result, also of another start, so that a message names
            nothing else; otherwise as it was.
    """
    run_dir = Path(recipe.run_dir)
    recorded = None if resume is None else resume.progress.recipe
    if recorded is None and (resume or (run_dir / RESULT).is_file()) and (run_dir / RECIPE).is_file():
        try:
            saved = load_recipe([str(run_dir / RECIPE)])
            recorded = {key: value for key, value in saved.flat().items() if key != UPDATE_SIZE or key in saved.given}
        except ValueError:  # Named by the check of the folder.
            return recipe
    if recorded is None:
        return recipe
    if UPDATE_SIZE not in recorded:
        # The presets of this version have the key, and a run of one of 0.1 goes on with updates of its own size.
        given, recipe = recipe.given, replace(recipe, training=replace(recipe.training, tokens_per_update=None))
        recipe.given = given
    if recipe.initialize.from_ is None:
        return _filled(recipe, {name: recorded[name] for rule in RULES if (name := f"evaluation.{rule}") in recorded})
    names = [f"model.{part.name}" for part in fields(ModelRecipe) if part.name not in FREE]
    names += [f"evaluation.{name}" for name in (*search_of(recipe.evaluation), *RULES)] + ["tokenizer.decoder_start"]
    if recipe.initialize.vocabulary == "keep":
        names += ["tokenizer.kind", "tokenizer.vocab_size", "tokenizer.split_digits", "tokenizer.path"]
    return _filled(recipe, {name: recorded[name] for name in names if name in recorded})


# ---- The folder of the start -------------------------------------------------------------------------------------


def write_start(run_dir: Path, model: VaswaniPreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Writes the folder `start` of a run, which `from_pretrained` loads.

    Args:
        run_dir (`Path`): folder of the run.
        model ([`VaswaniPreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): as they are before the
            first update.

    Raises:
        OSError: the folder cannot be written.
    """
    with atomic_folder(run_dir / START) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def check_start(run_dir: Path, resume: Resume) -> None:
    """Raises a `ValueError` if the folder `start` of a run is not what it was when a checkpoint was written."""
    damage = find_damage(run_dir / START, resume.progress.data.get("start") or {})
    if damage is not None:
        raise ValueError(
            f"{damage}. The run started from it: restore the file, or name another --run_dir to start anew."
        )
