"""The model card: rendered from the records of a run. Facts that were not recorded are omitted."""

import html
import json
import logging
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open

from ..files import read_json, read_json_lines
from ..metrics import METRICS
from ..recipe import EvaluationSetRecipe, Files, Recipe, SourceRecipe
from ..recipe_file import load_recipe
from ..records import Comparison, Environment, Result, Scored, Text
from ..run_folder import CURVE, RECIPE, VALIDATIONS, WEIGHTS, read_environment

logger = logging.getLogger(__name__)

# A wheel has the template beside this module; a checkout has it at its top.
_BESIDE = Path(__file__).with_name("model_card.md")
TEMPLATE = _BESIDE if _BESIDE.is_file() else Path(__file__).parents[2] / "model_card.md"
PICTURE = "curve.png"

# The examples are not from the run's text, which may be private.
EXAMPLES = {
    "de": "Die Katze schläft.",
    "en": "The cat sleeps.",
    "fr": "Le chat dort.",
}
ALTERED = {
    "upper": "in capital letters on both sides",
    "title": "with a capital letter at the beginning of each word on both sides",
    "typos": "with typing errors in the source",
    "no_final_mark": "without final marks on both sides",
}
# Power of a core of an unknown processor by Green Algorithms (Lannelongue, Grealey and Inouye, 2021).
WATTS_OF_A_CORE = 12


def card_files(run_dir: Path, folder: Path, scored: Scored, repo_id: str | None, revision: str) -> dict[str, bytes]:
    """
    Renders the card and its training curve. Takes the arguments of [`render_card`], and raises its errors.

    Returns:
        `dict[str, bytes]`: content by file name. Without matplotlib, there is no curve.
    """
    files = {}
    try:
        from .curve import curve_picture
    except ImportError as error:
        logger.warning(f"The model card has no training curve. {error}")
    else:
        training = _curve(run_dir / CURVE, scored.step, "loss")
        validations = _curve(run_dir / VALIDATIONS, scored.step, "loss", "bleu")
        if training or validations:
            files[PICTURE] = curve_picture(training, validations)
    card = render_card(run_dir, folder, scored, repo_id, revision, PICTURE in files)
    return files | {"README.md": str(card).encode()}


def render_card(
    run_dir: Path,
    folder: Path,
    scored: Scored,
    repo_id: str | None = None,
    revision: str = "main",
    has_curve: bool = False,
) -> ModelCard:
    """
    Renders the card of a model or a checkpoint.

    Args:
        run_dir (`Path`): the run folder.
        folder (`Path`): folder of the model or checkpoint.
        scored ([`Result`] or [`Validation`]): test of the model, or validation of the checkpoint.
        repo_id (`str`, *optional*): repository on the Hub that the examples load; defaults to a local folder.
        revision (`str`): branch of the repository.
        has_curve (`bool`): whether the training curve is beside the card.

    Returns:
        [`ModelCard`]: with metadata in the form of `huggingface_hub`, including the scores as `model-index`.

    Raises:
        ValueError: a record of the run is missing or damaged.
    """
    recipe = load_recipe([str(run_dir / RECIPE)])
    environment = read_environment(run_dir)
    split = "test" if isinstance(scored, Result) else "validation"
    # Runs that did not record it may have started from a folder.
    base = recipe.initialize.from_ if environment.start_is_local is False else None
    on_hub = _datasets_on_the_hub(recipe, environment) | ({base} if base else set())
    sources = _named_sources(recipe)
    rows = list(_score_rows(sources, scored, split, on_hub)) if scored.bleu is not None else []
    before = (scored.before or {}) if isinstance(scored, Result) else {}
    name = (repo_id or run_dir.name).rsplit("/", 1)[-1]
    parameters = _count_parameters(folder / WEIGHTS)
    trained = sources[: 1 + len(recipe.more_data)]
    directions = " and ".join(dict.fromkeys(f"{part.source_language}-{part.target_language}" for _, part in trained))
    return ModelCard.from_template(
        _metadata(recipe, on_hub, base, name, rows),
        template_path=str(TEMPLATE),
        title=_cell(name),
        summary=f"A translation model for {directions} with {_many(parameters)} parameters{_headline(scored, split)}.",
        origin=_origin(recipe, base),
        model_id=repo_id or f"path/to/{run_dir.name}/{folder.name}",
        pin="" if revision == "main" or repo_id is None else f', revision="{revision}"',
        example=_example(recipe),
        tag_argument=f', tgt_lang="{recipe.data.target_language}"' if recipe.data.target_tag else "",
        scores=[
            {"text": f"{row.name}: {_cell(row.text)}{how}"}
            | {metric: f"{score:.2f}" for metric, score in scores.items()}
            for row in rows
            for how, scores in _with_altered(row, scored)
        ],
        search=_search(recipe, split),
        before=list(_before_rows(before)),
        test_signature=next((each.signature for each in before.values()), ""),
        signatures=[(METRICS[metric], rows[0].signatures[metric]) for metric in METRICS] if rows else [],
        curve=PICTURE if has_curve else None,
        texts=[_cell(text) for text in _texts(recipe, environment, on_hub)],
        facts=[(name, _cell(value)) for name, value in _facts(recipe, environment, scored, parameters, folder)],
        command=_command(environment, on_hub).replace("```", "'''"),
        settings=_settings(recipe, on_hub).replace("```", "'''"),
        languages=directions,
    )


def _example(recipe: Recipe) -> str:
    """Returns a sentence to translate, with the prefix that the model was trained with, for a Python string."""
    sentence = EXAMPLES.get(recipe.data.source_language, "...")
    text = sentence if recipe.data.prefix is None else f"{recipe.data.prefix} {sentence}"
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _headline(scored: Scored, split: str) -> str:
    if scored.bleu is None:
        return ""
    where = f"on average over {len(scored.sets)} {split} sets" if scored.sets else f"on the {split} set"
    return f", BLEU {scored.bleu:.2f} {where}"


# ---- Scores ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scores:
    """The scores of one evaluation set, and how the card refers to its text."""

    name: str
    direction: str
    text: str
    dataset: str
    config: str | None
    split: str | None
    scores: dict[str, float]
    signatures: dict[str, str]


def _named_sources(recipe: Recipe) -> list[tuple[str, SourceRecipe]]:
    """Returns the sources of training text by their direction, and then the validation sets by their names."""
    trained = [(f"{part.source_language}-{part.target_language}", part) for part in (recipe.data, *recipe.more_data)]
    return [*trained, *recipe.named_sets.items()]


def _score_rows(
    sources: list[tuple[str, SourceRecipe]], scored: Scored, split: str, on_hub: set[str]
) -> Iterator[_Scores]:
    parts = [(name, part) for name, part in sources if _text(part, split, on_hub)]
    only = {metric: getattr(scored, metric) for metric in METRICS}
    sets: dict[str, Any] = scored.sets or {parts[0][0]: only}
    for (_, part), (name, scores) in zip(parts, sets.items(), strict=True):
        from_dataset = getattr(part, f"{split}_files") is None
        yield _Scores(
            name=name,
            direction=f"{part.source_language}-{part.target_language}",
            text=_text(part, split, on_hub),
            dataset=part.dataset if from_dataset and part.dataset in on_hub else "text",
            # The Hub merges the results of sets that have dataset, config and split in common.
            config=(part.dataset_config if from_dataset else None) or (name if len(sets) > 1 else None),
            split=getattr(part, f"{split}_split") if from_dataset else None,
            scores={metric: scores[metric] for metric in METRICS},
            signatures=scored.signatures or {},
        )


def _before_rows(before: dict[str, Comparison]) -> Iterator[dict[str, str]]:
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


def _with_altered(row: _Scores, scored: Scored) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the scores of a set, and those of its alterations with a note."""
    yield "", row.scores
    altered = (scored.altered if isinstance(scored, Result) else None) or {}
    for name, scores in altered.get(row.name, {}).items():
        yield f", {ALTERED.get(name, name)}", scores


def _origin(recipe: Recipe, base: str | None) -> str:
    """Returns what the training started from, in words that follow "trained"."""
    start = recipe.initialize.from_
    if start is None:
        return "from scratch"
    named = f"[{base}](https://huggingface.co/{base})" if base else f"`{Path(start).name}`"
    return f"further from {named}"


def _metadata(recipe: Recipe, on_hub: set[str], base: str | None, name: str, rows: list[_Scores]) -> ModelCardData:
    """Returns the metadata by which the Hub finds the model and shows its scores."""
    sources = [recipe.data, *recipe.more_data]
    languages = dict.fromkeys(code for part in sources for code in (part.source_language, part.target_language))
    results = [
        EvalResult(
            task_type="translation",
            task_name=f"Translation {row.direction}",
            dataset_type=row.dataset,
            dataset_name=row.text,
            dataset_config=row.config,
            dataset_split=row.split,
            metric_type=metric,
            metric_name=METRICS[metric],
            metric_value=round(score, 2),
            metric_args={"signature": row.signatures[metric]},
        )
        for row in rows
        for metric, score in row.scores.items()
    ]
    return ModelCardData(
        language=list(languages),
        license=recipe.hub.license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vaswani", "attention-is-all-you-need"],
        base_model=base,
        datasets=sorted(on_hub & {str(part.dataset) for part in sources}) or None,
        metrics=list(METRICS) if rows else None,
        model_name=name if rows else None,
        eval_results=results or None,
    )


def _search(recipe: Recipe, split: str) -> str:
    evaluation = recipe.evaluation
    beams = evaluation.num_beams if split == "test" else evaluation.validation_num_beams
    penalty = f"{evaluation.length_penalty_type} length penalty {evaluation.length_penalty}"
    settings = [f"{beams} beams", penalty] if beams > 1 else []
    if evaluation.max_length is not None:
        settings.append(f"at most {evaluation.max_length} tokens")
    return ("beam search" if beams > 1 else "greedy search") + (f" ({', '.join(settings)})" if settings else "")


# ---- Text --------------------------------------------------------------------------------------------------------


def _datasets_on_the_hub(recipe: Recipe, environment: Environment) -> set[str]:
    """Returns the datasets that were not local folders when the run began; none if the run did not record it."""
    found = zip(_named_sources(recipe), environment.data or [], strict=False)
    names = {part.dataset for (_, part), noted in found if not noted.dataset_is_local}
    return {name for name in names if name not in (None, "pocket")}


def _text(part: SourceRecipe, split: str, on_hub: set[str]) -> str:
    """Returns the name of a split's text, or "" without one. Paths are reduced to names: they may be private."""
    files: Files = getattr(part, f"{split}_files")
    if files is not None:
        sides = (part.source_language, part.target_language)
        names = [files[language] for language in sides] if isinstance(files, dict) else [files]
        return ", ".join(Path(name).name for name in names)
    name = getattr(part, f"{split}_split")
    if part.dataset is None or name is None:
        return ""
    if part.dataset == "pocket":
        return f"the synthetic corpus built into hf_vaswani ({name})"
    config = f", {part.dataset_config}" if part.dataset_config else ""
    return f"{_names_only('dataset', part.dataset, on_hub)}{config} ({name})"


def _texts(recipe: Recipe, environment: Environment, on_hub: set[str]) -> Iterator[str]:
    """Describes each source and each named set in one line: texts, numbers of pairs, licence."""
    sources = _named_sources(recipe)
    notes = [*(environment.data or []), *[Text(pairs={})] * len(sources)]
    for (name, part), noted in zip(sources, notes, strict=False):
        texts, pairs, held_out = [], noted.pairs, noted.held_out or {}
        # Only the splits of the sources count as training text.
        is_source = name not in recipe.validation_sets
        for split, title in (("train", "trained on"), ("validation", "validated on"), ("test", "tested on")):
            if (text := _text(part, split, on_hub)) and (is_source or split != "train"):
                count = f"{pairs[split]:,} pairs" if split in pairs else ""
                if split in held_out:
                    count += f", {held_out[split]:,} of them with a sentence of the training text"
                texts.append(f"{title} {text}" + (f" ({count})" if count else ""))
        licence = f"; licence of the text: {part.license}" if part.license else ""
        yield f"{name}: {'; '.join(texts)}{licence}."


# ---- Model and training ------------------------------------------------------------------------------------------


def _facts(
    recipe: Recipe, environment: Environment, scored: Scored, parameters: int, folder: Path
) -> Iterator[tuple[str, str]]:
    """Yields names and values for the table of the training procedure."""
    training, config = recipe.training, read_json(folder / "config.json")
    yield "parameters", f"{parameters:,}"
    yield (
        "architecture",
        f"{config['encoder_layers']} + {config['decoder_layers']} layers, d_model {config['d_model']}, "
        f"d_ff {config['d_ff']}, {config['num_heads']} heads",
    )
    yield "vocabulary", f"{config['vocab_size']:,} entries, {recipe.tokenizer.kind}"
    averaged = scored.averaged if isinstance(scored, Result) else []
    yield (
        "updates",
        f"{scored.step:,}" + (f", average of {len(averaged)} checkpoints" if len(averaged) > 1 else ""),
    )
    processes = environment.processes
    tokens = training.tokens_per_batch * training.accumulation_steps * processes
    yield "tokens per update", f"up to {tokens:,} on each side, padding included"
    rate = f", peak {training.peak_learning_rate}" if training.peak_learning_rate else ""
    yield (
        "optimizer",
        f"{training.optimizer}, {training.schedule} schedule{rate}, {training.warmup_steps:,} warm-up updates",
    )
    yield (
        "precision",
        "float32" if environment.mixed_precision == "no" else f"{environment.mixed_precision} mixed precision",
    )
    yield "seed", str(environment.seed)
    threads = environment.cpu_threads * processes
    if hardware := environment.gpu or environment.cpu:
        yield (
            "hardware",
            f"{processes} x {hardware}"
            if environment.gpu
            else f"{threads} {'thread' if threads == 1 else 'threads'} on {hardware}",
        )
    if seconds := scored.seconds:
        yield "training time", f"{_duration(seconds)}, validations included"
        if energy := _energy(environment, seconds):
            yield "energy (estimate)", energy
    versions = {"Python": environment.python} | environment.packages
    yield "software", ", ".join(f"{name} {version}" for name, version in versions.items())
    if environment.git_revision:
        yield "hf_vaswani revision", environment.git_revision


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} second{'' if round(seconds) == 1 else 's'}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _energy(environment: Environment, seconds: float) -> str | None:
    """Estimates the energy as time times power: the power limit of a GPU, or a typical value of a processor core."""
    if environment.gpu:
        watts, count, source = environment.gpu_watts, environment.processes, "power limit of each GPU"
    else:
        watts, count = WATTS_OF_A_CORE, environment.cpu_threads * environment.processes
        source = "typical power of a core, Lannelongue et al., 2021"
    if not watts:
        return None
    energy = watts * count * seconds / 3_600_000
    return f"{energy:.2g} kWh: {count} x {watts:g} W ({source}), without the rest of the machine"


def _command(environment: Environment, on_hub: set[str]) -> str:
    """Returns the command of the training, with one option per line."""
    program, *arguments = map(str, environment.command or ["hf-vaswani"])
    name = Path(program).name
    words = [
        {"cli.py": "hf-vaswani", "__main__.py": "hf-vaswani"}.get(
            name, f"python {name}" if name.endswith(".py") else name
        )
    ]
    # An argument without an option is the recipe file.
    key = "recipe"
    for argument in arguments:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if option and not equals:
            words.append(f"\\\n    {option}")
        elif option:
            words.append(f"\\\n    {option}={shlex.quote(_value(option, value, on_hub))}")
        else:
            words.append(shlex.quote(_value(key, value, on_hub)))
        key = option if option and not equals else "recipe"
    return " ".join(words)


def _value(option: str, text: str, on_hub: set[str]) -> str:
    """Returns the value of an option, with paths reduced to names."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    named = _names_only(option.lstrip("-").rstrip("+").split(".")[-1], value, on_hub)
    if named == value:
        return text
    return (
        named if isinstance(named, str) else str(yaml.safe_dump(named, default_flow_style=True, width=10**6)).strip()
    )


def _settings(recipe: Recipe, on_hub: set[str]) -> str:
    """Returns the keys of a recipe that differ from their defaults, as YAML, with paths reduced to names."""
    found: dict[str, Any] = {}
    here, defaults = asdict(recipe), asdict(Recipe())
    for section in ("data", "tokenizer", "initialize", "model", "training", "evaluation"):
        changed = {
            key.removesuffix("_"): value for key, value in here[section].items() if value != defaults[section][key]
        }
        if changed:
            found[section] = changed
    if recipe.more_data:
        plain = asdict(SourceRecipe())
        found["more_data"] = [
            {key: value for key, value in source.items() if value != plain[key]} for source in here["more_data"]
        ]
    if recipe.validation_sets:
        empty = asdict(EvaluationSetRecipe())
        found["validation_sets"] = {
            name: {key: value for key, value in part.items() if value != empty[key]}
            for name, part in here["validation_sets"].items()
        }
    found = _names_only("", found, on_hub)
    return str(yaml.safe_dump(found, sort_keys=False, allow_unicode=True)).strip() if found else ""


def _names_only(key: str, value: Any, on_hub: set[str]) -> Any:
    """Reduces the paths in the value of a recipe's key to the names of files and folders: they may be private."""
    if isinstance(value, dict):
        inner = key.endswith("_files")
        return {name: _names_only(key if inner else name, each, on_hub) for name, each in value.items()}
    if isinstance(value, list):
        return [_names_only(key, each, on_hub) for each in value]
    is_path = key.endswith("_files") or key in ("dataset", "path", "run_dir", "recipe", "from", "not_worse_than")
    return Path(value).name if is_path and isinstance(value, str) and value not in on_hub else value


def _count_parameters(path: Path) -> int:
    """Counts the elements of the weights. A tied matrix is stored once, and counted once."""
    if not path.is_file():
        raise ValueError(f"{path} is missing.")
    with safe_open(path, framework="pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def _many(count: int) -> str:
    return f"{count / 1e6:.1f} million" if count >= 1e5 else f"{count:,}"


def _cell(text: str) -> str:
    """Escapes text for one line of Markdown, or one cell of a table."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def _curve(path: Path, last: int, *names: str) -> list[dict[str, Any]]:
    """Reads the points of a log up to an update, and skips incomplete lines: the training may be writing one."""
    lines, _ = read_json_lines(path)
    numbers = [(line, [line.get(name, "") for name in names]) for line in lines if line["step"] <= last]
    # A non-finite loss is written as null, a BLEU is always finite.
    optional = [type(None) if name == "loss" else float for name in names]
    return [
        line
        for line, values in numbers
        if all(type(value) in (int, float, kind) for value, kind in zip(values, optional, strict=True))
    ]
