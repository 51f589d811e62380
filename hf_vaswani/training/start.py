"""Starts a run from a trained model: loads it from any format, and fits recipe and model to each other."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..averaging import load_stored
from ..data.sources import PairData, Source, prefix_tags
from ..data.tokenizer import has_tag, is_tag, language_tag
from ..files import atomic_folder, find_damage, read_json
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel
from ..model.sentences_vaswani import LanguageTags
from ..model_names import resolve_model, with_revision
from ..recipe import MEASURED_TASKS, EvaluationRecipe, ModelRecipe, Recipe, shown
from ..recipe_checks import check_ranges
from ..recipe_file import load_recipe
from ..run_folder import (
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
from ..translation.loading import load_translator
from .task_transfer import load_other
from .tasks import model_class
from .vocabulary_transfer import add_entries, transfer_vocabulary

# Settings of the model that training may change.
FREE = ("dropout", "attention_dropout", "activation_dropout")
SEARCH = (
    *("num_beams", "length_penalty", "length_penalty_type", "finish_candidates", "early_stopping"),
    *("max_length_offset", "max_length"),
)
# Those whose defaults have changed since 0.1.
RULES = ("length_penalty_type", "finish_candidates", "early_stopping")
# The size of an update, which recipes of 0.1 did not have.
UPDATE_SIZE = "training.tokens_per_update"
# Kinds of vocabulary by the model of `tokenizers`; of several, the first is what a recipe is filled in with.
KINDS = {
    "BPE": ("bpe", "bytes"),
    "Unigram": ("unigram",),
    "WordPiece": ("wordpiece",),
    "WordLevel": ("words", "characters"),
}


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
    best = [
        f"checkpoint-{line.step}" for line in ranked(known_validations(run_dir), training.best_by, training.best_set)
    ]
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
        with _seeded(recipe.seed):
            return load_other(folder, recipe, labels)
    model, tokenizer = load_translator(folder, torch.float32)
    last = tokenizer("a")["input_ids"][-1:]
    if last != [tokenizer.eos_token_id]:
        raise ValueError(
            f"The tokenizer of {folder} does not put {tokenizer.eos_token} after a sentence, so a model would never "
            "learn where to end."
        )
    if recipe.task != "translation":
        model.config.language_pairs = None
    return model, tokenizer


def keep_layers(recipe: Recipe, model: VaswaniPreTrainedModel) -> VaswaniPreTrainedModel:
    """
    Drops layers of a translation model if the recipe asks for fewer than it has (shrink and fine-tune: Shleifer and
    Rush, 2020). Those that stay are spread evenly from the first to the last; a single one is the first.

    Args:
        recipe ([`Recipe`]): the recipe as it was given.
        model ([`VaswaniPreTrainedModel`]): from [`load_start`].

    Returns:
        [`VaswaniPreTrainedModel`]: a smaller model with weights of `model`, or `model` itself.

    Raises:
        ValueError: layers are dropped, and another key needs the whole model.
    """
    kept = {}
    for stack in ("encoder", "decoder"):
        key, there = f"{stack}_layers", getattr(model.config, f"{stack}_layers")
        count = getattr(recipe.model, key) if f"model.{key}" in recipe.given else there
        if count < there:
            kept[stack] = [round(i * (there - 1) / max(count - 1, 1)) for i in range(count)]
    if not kept or not isinstance(model, VaswaniForConditionalGeneration):
        return model
    for key, given in (
        ("hub.not_worse_than 'start'", recipe.hub.not_worse_than == "start"),
        ("training.adapter", recipe.training.adapter is not None),
    ):
        if given:
            raise ValueError(
                f"model.{min(kept)}_layers drops layers of {recipe.initialize.from_}, but {key} needs the whole model."
            )
    changes = {f"{stack}_layers": len(numbers) for stack, numbers in kept.items()}
    config = type(model.config)(**model.config.to_dict() | changes | {"alignment_layer": None})
    with _seeded(recipe.seed):
        smaller = VaswaniForConditionalGeneration(config)
    weights, there = {}, model.state_dict()
    for name in smaller.state_dict():
        match = re.fullmatch(r"(model\.(encoder|decoder)\.layers\.)(\d+)(\..+)", name)
        if match and match[2] in kept:
            weights[name] = there[f"{match[1]}{kept[match[2]][int(match[3])]}{match[4]}"]
        else:
            weights[name] = there[name]
    smaller.load_state_dict(weights)
    smaller.generation_config = model.generation_config
    return smaller.eval()


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
    return values | {"tokenizer.kind": kinds[0], "tokenizer.vocab_size": len(tokenizer), "tokenizer.path": None}


def _of_search(recipe: Recipe, generation: Any) -> dict[str, Any]:
    """Returns the search settings of a model that the recipe leaves to it."""
    found = {name: getattr(generation, name, None) for name in SEARCH}
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
    Fills keys that are not given as the run's own record has them: the rules of the search, and what a recipe leaves
    to the model it starts from. A resumed run asks neither the Hub nor the original.

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
    names += [f"evaluation.{name}" for name in SEARCH] + ["tokenizer.decoder_start"]
    if recipe.initialize.vocabulary == "keep":
        names += ["tokenizer.kind", "tokenizer.vocab_size", "tokenizer.path"]
    return _filled(recipe, {name: recorded[name] for name in names if name in recorded})


# ---- The folder of the start -------------------------------------------------------------------------------------


def prepare_network(
    recipe: Recipe,
    sources: list[Source],
    model: VaswaniPreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[VaswaniPreTrainedModel, PreTrainedTokenizerBase]:
    """
    Makes the network before the first update: with the vocabulary that the recipe asks for, and with random weights in
    the parts that it does not take.

    Args:
        recipe ([`Recipe`]): complete, from [`fill_from_model`].
        sources (`list[Source]`): the text.
        model ([`VaswaniPreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): from [`load_start`].

    Returns:
        Model and tokenizer of the run.

    Raises:
        ValueError: the vocabulary lacks a language tag or a prefix, or has an entry of `initialize.add_tokens`
            already.
    """
    start = recipe.initialize
    if recipe.task not in MEASURED_TASKS:
        translator = cast(VaswaniForConditionalGeneration, model)
        with _seeded(recipe.seed):
            if start.vocabulary == "transfer":
                new = PairData().make_tokenizer(recipe, sources)
                model, tokenizer = transfer_vocabulary(translator, tokenizer, new), new
            elif start.add_tokens:
                parts = (recipe.data, *recipe.more_data, *recipe.named_sets.values())
                prefixes = [part.prefix for part in parts if part.prefix is not None and is_tag(part.prefix)]
                model = add_entries(translator, tokenizer, start.add_tokens, prefixes)
            _check_tags(recipe, sources, tokenizer)
    if start.parts is not None:
        model = _with_random_parts(model, start.parts, recipe.seed)
    return model, tokenizer


def _check_tags(recipe: Recipe, sources: list[Source], tokenizer: PreTrainedTokenizerBase) -> None:
    targets = dict.fromkeys(source.recipe.target_language for source in sources if source.tag is not None)
    known = LanguageTags(tokenizer).by_language
    tags = [language_tag(language) for language in targets if language not in known]
    prefixes = [prefix for prefix in prefix_tags(sources) if not has_tag(tokenizer, prefix)]
    reasons = ["data.target_tag is true"] if tags else []
    for prefix in prefixes:
        i = [source.recipe.prefix for source in sources].index(prefix)
        reasons.append(f"{f'more_data[{i - 1}]' if i else 'data'}.prefix is {prefix!r}")
    if missing := [*tags, *prefixes]:
        tokens = json.dumps([*recipe.initialize.add_tokens, *missing], ensure_ascii=False)
        raise ValueError(
            f"{' and '.join(reasons)}, but the vocabulary of {recipe.initialize.from_} lacks {', '.join(missing)}: "
            f"set initialize.add_tokens: {tokens}"
        )


def _with_random_parts(model: VaswaniPreTrainedModel, parts: Collection[str], seed: int) -> VaswaniPreTrainedModel:
    if foreign := set(parts) - {"embeddings", *model.config.stacks}:
        raise ValueError(f"initialize.parts has {min(foreign)!r}, which this task's model does not have: remove it.")
    with _seeded(seed):
        network = type(model)(model.config)
    taken = {*parts, *(["head"] if set(model.config.stacks) <= set(parts) else [])}
    weights = {name: weight for name, weight in model.state_dict().items() if part_of(name) in taken}
    load_stored(network, weights, is_new=lambda name: part_of(name) not in taken)
    network.generation_config = model.generation_config
    return network.eval()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draws from the recipe's seed, and leaves the generator of the run as it was: only one process is here."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def part_of(name: str) -> str:
    """
    Returns the part of the network that a weight belongs to, in the words of `initialize.parts` and `training.freeze`.

    Args:
        name (`str`): name of the parameter in a model of this package.

    Returns:
        `str`: `"encoder"` or `"decoder"`, their layers and the norm on top of them; `"embeddings"`: tokens, learned
        positions and the output; or `"head"`, what stands on top of a stack alone.
    """
    match = re.fullmatch(r"model\.(encoder|decoder)\.(layers|norm)\..+", name)
    if match:
        return match[1]
    return "embeddings" if name.startswith(("model.", "lm_head.")) else "head"


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
