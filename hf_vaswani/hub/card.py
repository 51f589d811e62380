"""The model card: rendered from the records of a run. Facts that were not recorded are omitted."""

import html
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open

from ..files import read_json, read_json_lines
from ..metrics import METRICS
from ..recipe import PAIR_TASKS, EvaluationSetRecipe, Recipe, SourceRecipe, measure_name
from ..recipe_file import load_recipe
from ..records import Environment, Result, Scored, public
from ..run_folder import CURVE, MODEL, RECIPE, VALIDATIONS, WEIGHTS, read_environment
from .evaluation import (
    EXACT,
    SetScores,
    before_rows,
    eval_results,
    headline,
    measures_table,
    metrics_of,
    set_scores,
    with_altered,
)
from .tasks import TASKS, papers_of, pipeline_of, purpose_of, usage
from .text_names import datasets_on_the_hub, describe_texts, is_hub_id, languages_of, named_sources, names_only

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("model_card.md")
PICTURE = "curve.png"

NETWORKS = {
    ("encoder", "decoder"): "encoder-decoder Transformer",
    ("encoder",): "encoder of the Transformer",
    ("decoder",): "decoder of the Transformer",
}


def card_files(
    run_dir: Path, folder: Path, scored: Scored, repo_id: str | None, revision: str, recipe: Recipe | None = None
) -> dict[str, bytes]:
    """
    Renders the card and its training curve. Takes the arguments of [`render_card`], and raises its errors.

    Returns:
        `dict[str, bytes]`: content by file name. Without matplotlib, there is no curve.
    """
    files = {}
    recipe = recipe or load_recipe([str(run_dir / RECIPE)])
    try:
        from .curve import curve_picture
    except ImportError as error:
        logger.warning(f"The model card has no training curve. {error}")
    else:
        measure = _plotted(recipe)
        training = _curve(run_dir / CURVE, scored.step, "loss")
        validations = _curve(run_dir / VALIDATIONS, scored.step, "loss", *([measure] if measure else []))
        if training or validations:
            per = TASKS[recipe.task].per
            files[PICTURE] = curve_picture(training, validations, measure, f"nats per {per}")
    card = render_card(run_dir, folder, scored, repo_id, revision, PICTURE in files, recipe)
    return files | {"README.md": str(card).encode()}


def render_card(
    run_dir: Path,
    folder: Path,
    scored: Scored,
    repo_id: str | None = None,
    revision: str = "main",
    has_curve: bool = False,
    recipe: Recipe | None = None,
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
        recipe ([`Recipe`], *optional*): that of the run, if it has been read.

    Returns:
        [`ModelCard`]: with metadata in the form of `huggingface_hub`, including the scores as `model-index`.

    Raises:
        ValueError: a record of the run is missing or damaged.
    """
    # A card shows only these four, whose URLs may have secrets.
    recipe = public(recipe or load_recipe([str(run_dir / RECIPE)]))
    environment, scored = public(read_environment(run_dir)), public(scored)
    config = public(read_json(folder / "config.json"))
    split = "test" if isinstance(scored, Result) else "validation"
    # Runs that did not record it may have started from a folder.
    start = recipe.initialize.from_
    is_published = start is not None and environment.start_is_local is False and is_hub_id(start)
    on_hub = datasets_on_the_hub(recipe, environment) | ({str(start)} if is_published else set())
    base = str(start).partition("@")[0] if is_published else None
    kind, has_pairs, measure = TASKS[recipe.task], recipe.task in PAIR_TASKS, _plotted(recipe)
    rows = list(set_scores(recipe, scored, split, on_hub))
    before = (scored.before or {}) if isinstance(scored, Result) else {}
    name = (repo_id or run_dir.name).rsplit("/", 1)[-1]
    parameters = _count_parameters(folder / WEIGHTS)
    # The directions of a translation, or else the languages.
    languages = " and ".join(dict.fromkeys(name for name, _ in named_sources(recipe)[: 1 + len(recipe.more_data)]))
    model_id = repo_id or f"path/to/{run_dir.name}/{folder.name}"
    pin = "" if revision == "main" or repo_id is None else f', revision="{revision}"'
    return ModelCard.from_template(
        _metadata(recipe, on_hub, base, name, rows),
        template_path=str(TEMPLATE),
        task=recipe.task,
        title=_cell(name),
        summary=f"A {kind.model} for {languages} with {_many(parameters)} parameters"
        f"{headline(recipe, scored, split)}.",
        network=NETWORKS[_stacks(config)],
        origin=_origin(recipe, base),
        purpose=purpose_of(recipe),
        usage=usage(recipe, folder, model_id, pin),
        trusting_usage=usage(recipe, folder, model_id, pin, is_trusted=True),
        auto_class=kind.auto_class,
        has_pipeline=pipeline_of(recipe.task) is not None,
        scores=[
            {"text": f"{row.name}: {_cell(row.text)}{how}"}
            | {metric: f"{score:.4f}" if metric == EXACT else f"{score:.2f}" for metric, score in scores.items()}
            for row in rows
            for how, scores in with_altered(row, scored)
        ]
        if has_pairs
        else [],
        measured=[[_cell(text) for text in row] for row in measures_table(rows, scored)]
        if rows and not has_pairs
        else [],
        per=kind.per,
        search=_search(recipe, split),
        before=list(before_rows(before)),
        test_signature=next((each.signature for each in before.values()), ""),
        signatures=[(METRICS[metric], text) for metric, text in rows[0].signatures.items()]
        if rows and has_pairs
        else [],
        curve=PICTURE if has_curve else None,
        plotted="loss" + (f" and {measure_name(measure)}" if measure else ""),
        training_loss=_training_loss(recipe),
        texts=[_cell(text) for text in describe_texts(recipe, environment, on_hub)],
        facts=[(name, _cell(value)) for name, value in _facts(recipe, environment, scored, parameters, config)],
        settings=_settings(recipe, on_hub).replace("```", "'''"),
        languages=languages,
        papers=papers_of(recipe, _stacks(config)),
    )


def _stacks(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the stacks of a model by its `config.json`: encoder, decoder or both."""
    if config.get("is_encoder_decoder", True):
        return ("encoder", "decoder")
    return ("decoder",) if config.get("is_decoder") else ("encoder",)


def _plotted(recipe: Recipe) -> str | None:
    """Returns the measure whose curve is beside that of the loss, if there is one."""
    if recipe.task in PAIR_TASKS:
        return "bleu"
    return None if recipe.training.best_by == "loss" else recipe.training.best_by


def _training_loss(recipe: Recipe) -> str:
    """Returns what the training loss includes, and the validation loss does not."""
    parts = ["dropout"]
    if recipe.task in PAIR_TASKS or recipe.training.label_smoothing > 0:
        parts.append("label smoothing")
    if recipe.objective.next_sentence:
        parts.append("the loss of next-sentence prediction")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def _origin(recipe: Recipe, base: str | None) -> str:
    """Returns what the training started from, in words that follow "trained"."""
    start, teachers, text = recipe.initialize.from_, recipe.teacher.model, ""
    if teachers is not None:
        # The model of a run is in its folder `model`.
        paths = [Path(name) for name in (teachers if isinstance(teachers, list) else [teachers])]
        names = [f"`{path.parent.name if path.name == MODEL else path.name}`" for path in paths]
        text = f" on the translations of {' and '.join(names)}"
    if start is None:
        return f"from scratch{text}"
    named = f"[{base}](https://huggingface.co/{base})" if base else f"`{Path(start).name}`"
    return f"further from {named}{text}"


def _metadata(recipe: Recipe, on_hub: set[str], base: str | None, name: str, rows: list[SetScores]) -> ModelCardData:
    """Returns the metadata by which the Hub finds the model and shows its scores."""
    sources = [recipe.data, *recipe.more_data]
    results = eval_results(recipe, rows)
    return ModelCardData(
        language=languages_of(recipe),
        license=recipe.hub.license,
        library_name="transformers",
        # A tag without a pipeline that loads the model would be wrong on its page.
        pipeline_tag=pipeline_of(recipe.task),
        tags=["vaswani", "attention-is-all-you-need"],
        base_model=base,
        # The Hub finds them by their ids, without a revision.
        datasets=sorted({name.partition("@")[0] for name in on_hub & {str(part.dataset) for part in sources}}) or None,
        metrics=metrics_of(recipe, rows),
        model_name=name if results else None,
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


# ---- Model and training ------------------------------------------------------------------------------------------


def _facts(
    recipe: Recipe, environment: Environment, scored: Scored, parameters: int, config: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yields names and values for the table of the training procedure."""
    training, stacks = recipe.training, _stacks(config)
    yield "parameters", f"{parameters:,}"
    numbers = [config[f"{stack}_layers"] for stack in stacks]
    layers = " + ".join(map(str, numbers)) + (" layer" if numbers == [1] else " layers")
    if len(stacks) == 1:
        layers = f"{stacks[0]} of {layers}"
    yield (
        "architecture",
        f"{layers}, d_model {config['d_model']}, d_ff {config['d_ff']}, {config['num_heads']} heads",
    )
    if recipe.task in ("classification", "tagging"):
        yield "labels", ", ".join(map(str, config.get("id2label", {}).values()))
    yield "vocabulary", f"{config['vocab_size']:,} entries, {recipe.tokenizer.kind}"
    averaged = scored.averaged if isinstance(scored, Result) else []
    yield (
        "updates",
        f"{scored.step:,}" + (f", average of {len(averaged)} checkpoints" if len(averaged) > 1 else ""),
    )
    processes = environment.processes
    tokens = math.prod(training.batches(processes)) * processes
    sides = " on each side" if len(stacks) == 2 else ""
    yield "tokens per update", f"up to {tokens:,}{sides}, padding included"
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
    versions = {"Python": environment.python} | environment.packages
    yield "software", ", ".join(f"{name} {version}" for name, version in versions.items())
    if environment.git_revision:
        yield "hf_vaswani revision", environment.git_revision
    if environment.commits:
        names = {name.partition("@")[0]: commit for name, commit in environment.commits.items()}
        yield "from the Hub", ", ".join(f"{name} at {commit}" for name, commit in names.items())


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} second{'' if round(seconds) == 1 else 's'}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _settings(recipe: Recipe, on_hub: set[str]) -> str:
    """Returns the keys of a recipe that differ from their defaults, as YAML, with paths reduced to names."""
    found: dict[str, Any] = {}
    here, defaults = asdict(recipe), asdict(Recipe())
    if recipe.task != defaults["task"]:
        found["task"] = recipe.task
    for section in ("data", "tokenizer", "initialize", "model", "objective", "training", "evaluation", "teacher"):
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
    found = names_only("", found, on_hub)
    return str(yaml.safe_dump(found, sort_keys=False, allow_unicode=True)).strip() if found else ""


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
    lines = [line | measures if isinstance(measures := line.get("measures"), dict) else line for line in lines]
    numbers = [(line, [line.get(name, "") for name in names]) for line in lines if line["step"] <= last]
    # A value that is not finite is written as null, but a BLEU is always finite.
    optional = [float if name == "bleu" else type(None) for name in names]
    return [
        line
        for line, values in numbers
        if all(type(value) in (int, float, kind) for value, kind in zip(values, optional, strict=True))
    ]
