"""The model card: rendered from the records of a run. Facts that were not recorded are omitted."""

import html
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open

from ..files import read_json
from ..metrics import MEASURES, measure_of
from ..recipe import LABEL_TASKS, PAIR_TASKS, EvaluationSetRecipe, Recipe, SourceRecipe
from ..recipe_file import load_recipe
from ..records import Environment, Result, Scored, public
from ..run_folder import MODEL, RECIPE, WEIGHTS, read_environment
from . import evaluation, wording

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("model_card.md")
PICTURE = "curve.png"

NETWORKS = {
    ("encoder", "decoder"): "encoder-decoder Transformer",
    ("encoder",): "encoder of the Transformer",
    ("decoder",): "decoder of the Transformer",
}
# Sections of a recipe that say how a model was made.
SECTIONS = ("data", "tokenizer", "initialize", "model", "objective", "training", "evaluation", "teacher")
# Keys of them that do not.
OF_THE_MACHINE = {"num_proc", "data_workers", "cpu_threads"}


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
    measure = evaluation.plotted_measure(recipe)
    training, validations = evaluation.read_curve(run_dir, scored.step)
    if training or validations:
        try:
            files[PICTURE] = evaluation.curve_picture(
                training, validations, measure, f"nats per {wording.TASKS[recipe.task].per}"
            )
        except ImportError as error:
            logger.warning(f"The model card has no training curve. {error}")
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
    start = _published_start(recipe, environment)
    on_hub = wording.datasets_on_the_hub(recipe, environment) | ({start} if start else set())
    rows = list(evaluation.set_scores(recipe, scored, on_hub))
    name = (repo_id or run_dir.name).rsplit("/", 1)[-1]
    parameters = _count_parameters(folder / WEIGHTS)
    facts = _facts(recipe, environment, scored, parameters, config)
    return ModelCard.from_template(
        _metadata(recipe, on_hub, start, name, rows, scored),
        template_path=str(TEMPLATE),
        title=_cell(name),
        parameters=f"{parameters / 1e6:.1f} million" if parameters >= 1e5 else f"{parameters:,}",
        model_id=repo_id or f"path/to/{run_dir.name}/{folder.name}",
        pin="" if revision == "main" or repo_id is None else f', revision="{revision}"',
        example=wording.example_of(recipe, folder),
        curve=PICTURE if has_curve else None,
        texts=[_cell(text) for text in wording.describe_texts(recipe, environment, on_hub)],
        facts=[(name, _cell(value)) for name, value in facts.items() if value],
        settings=_settings(recipe, on_hub).replace("```", "'''"),
        **_words(recipe, _stacks(config), start),
        **_evaluation(recipe, rows, scored),
    )


def _words(recipe: Recipe, stacks: tuple[str, ...], start: str | None) -> dict[str, Any]:
    """Returns what the template says of the task and of earlier models; `start` is one on the Hub."""
    kind, pipeline = wording.TASKS[recipe.task], wording.pipeline_of(recipe.task)
    # The directions of a translation, or else the languages.
    languages = dict.fromkeys(name for name, _ in wording.named_sources(recipe)[: 1 + len(recipe.more_data)])
    base = start and start.partition("@")[0]
    local = recipe.initialize.from_ and f"`{Path(recipe.initialize.from_).name}`"
    teachers = recipe.teacher.model or []
    paths = [Path(name) for name in (teachers if isinstance(teachers, list) else [teachers])]
    return {
        "task": recipe.task,
        "model": kind.model,
        "languages": " and ".join(languages),
        "network": NETWORKS[stacks],
        "start": f"[{base}](https://huggingface.co/{base})" if base else local,
        # The model of a run is in its folder `model`.
        "teachers": [f"`{path.parent.name if path.name == MODEL else path.name}`" for path in paths],
        "purpose": wording.purpose_of(recipe),
        "auto_class": kind.auto_class,
        "pipeline": pipeline,
        "call": wording.PIPELINES.get(str(pipeline)),
        "options": wording.options_of(recipe),
        "per": kind.per,
        "training_loss": _training_loss(recipe),
        "papers": wording.papers_of(recipe, stacks),
    }


def _evaluation(recipe: Recipe, rows: list[evaluation.SetScores], scored: Scored) -> dict[str, Any]:
    """Returns what the template says of the scores."""
    before, plotted = (scored.before or {}) if isinstance(scored, Result) else {}, evaluation.plotted_measure(recipe)
    table = evaluation.score_table(recipe, rows, scored)
    return {
        "headline": evaluation.headline(recipe, scored),
        "has_pairs": recipe.task in PAIR_TASKS,
        "has_labels": recipe.task in LABEL_TASKS,
        "scores": [[_cell(text) for text in row] for row in table],
        "search": _search(recipe, evaluation.split_of(scored)),
        "signatures": evaluation.signature_rows(scored),
        "before": evaluation.before_rows(before),
        "test_signature": "` and `".join(dict.fromkeys(each.signature for each in before.values())),
        "plotted": "loss" + (f" and {measure_of(plotted).title}" if plotted else ""),
    }


def _stacks(config: dict[str, Any]) -> tuple[str, ...]:
    """Returns the stacks of a model by its `config.json`: encoder, decoder or both."""
    if config.get("is_encoder_decoder", True):
        return ("encoder", "decoder")
    return ("decoder",) if config.get("is_decoder") else ("encoder",)


def _published_start(recipe: Recipe, environment: Environment) -> str | None:
    """Returns the model that the training started from if it is on the Hub, with its revision."""
    start = recipe.initialize.from_
    # Runs that did not record it may have started from a folder.
    return str(start) if start and environment.start_is_local is False and wording.is_hub_id(start) else None


def _training_loss(recipe: Recipe) -> str:
    """Returns what the training loss includes, and the validation loss does not."""
    parts = ["dropout"]
    if recipe.task in PAIR_TASKS or recipe.training.label_smoothing > 0:
        parts.append("label smoothing")
    if recipe.objective.next_sentence:
        parts.append("the loss of next-sentence prediction")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def _metadata(
    recipe: Recipe, on_hub: set[str], start: str | None, name: str, rows: list[evaluation.SetScores], scored: Scored
) -> ModelCardData:
    """Returns the metadata by which the Hub finds the model and shows its scores."""
    sources = [recipe.data, *recipe.more_data]
    results = evaluation.eval_results(recipe, rows, scored)
    shown = {name for row in rows for name in row.scores}
    return ModelCardData(
        language=wording.languages_of(recipe),
        license=recipe.hub.license,
        library_name="transformers",
        # A tag without a pipeline that loads the model would be wrong on its page.
        pipeline_tag=wording.pipeline_of(recipe.task),
        tags=["vaswani", "attention-is-all-you-need"],
        base_model=start and start.partition("@")[0],
        # The Hub finds them by their ids, without a revision.
        datasets=sorted({name.partition("@")[0] for name in on_hub & {str(part.dataset) for part in sources}}) or None,
        metrics=[name for name, measure in MEASURES.items() if measure.is_known_to_hub and name in shown] or None,
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
) -> dict[str, str]:
    """Returns names and values for the table of the training procedure; a value that is not known is empty."""
    training, stacks, processes = recipe.training, _stacks(config), environment.processes
    numbers = [config[f"{stack}_layers"] for stack in stacks]
    layers = " + ".join(map(str, numbers)) + (" layer" if numbers == [1] else " layers")
    sizes = f"d_model {config['d_model']}, d_ff {config['d_ff']}, {config['num_heads']} heads"
    labels = config.get("id2label", {}) if recipe.task in LABEL_TASKS else {}
    averaged = scored.averaged if isinstance(scored, Result) else []
    mean = f", average of {len(averaged)} checkpoints" if len(averaged) > 1 else ""
    tokens = math.prod(training.batches(processes)) * processes
    rate = f", peak {training.peak_learning_rate}" if training.peak_learning_rate else ""
    warm_up = f"{training.warmup_steps:,} warm-up updates"
    precision, threads = environment.mixed_precision, environment.cpu_threads * processes
    hardware = environment.cpu and f"{threads} {'thread' if threads == 1 else 'threads'} on {environment.cpu}"
    versions = {"Python": environment.python} | environment.packages
    commits = {name.partition("@")[0]: commit for name, commit in (environment.commits or {}).items()}
    return {
        "parameters": f"{parameters:,}",
        "architecture": f"{f'{stacks[0]} of ' if len(stacks) == 1 else ''}{layers}, {sizes}",
        "labels": ", ".join(map(str, labels.values())),
        "vocabulary": f"{config['vocab_size']:,} entries, {recipe.tokenizer.kind}",
        "updates": f"{scored.step:,}{mean}",
        "tokens per update": f"up to {tokens:,}{' on each side' if len(stacks) == 2 else ''}, padding included",
        "optimizer": f"{training.optimizer}, {training.schedule} schedule{rate}, {warm_up}",
        "precision": "float32" if precision == "no" else f"{precision} mixed precision",
        "seed": str(environment.seed),
        "hardware": f"{processes} x {environment.gpu}" if environment.gpu else hardware or "",
        "training time": f"{_duration(scored.seconds)}, validations included" if scored.seconds else "",
        "software": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "hf_vaswani revision": environment.git_revision or "",
        "from the Hub": ", ".join(f"{name} at {commit}" for name, commit in commits.items()),
    }


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} second{'' if round(seconds) == 1 else 's'}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _settings(recipe: Recipe, on_hub: set[str]) -> str:
    """Returns the keys of a recipe that differ from their defaults, as YAML, with paths reduced to names."""
    found: dict[str, Any] = {}
    here, plain = asdict(recipe), asdict(Recipe())
    if recipe.task != plain["task"]:
        found["task"] = recipe.task
    for section in SECTIONS:
        found[section] = _changed(here[section], plain[section])
    found["more_data"] = [_changed(source, asdict(SourceRecipe())) for source in here["more_data"]]
    empty = asdict(EvaluationSetRecipe())
    found["validation_sets"] = {name: _changed(part, empty) for name, part in here["validation_sets"].items()}
    found = wording.names_only("", {name: value for name, value in found.items() if value}, on_hub)
    return str(yaml.safe_dump(found, sort_keys=False, allow_unicode=True)).strip() if found else ""


def _changed(section: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in section.items() if value != plain[name]}
    return {name.removesuffix("_"): value for name, value in changed.items() if name not in OF_THE_MACHINE}


def _count_parameters(path: Path) -> int:
    """Counts the elements of the weights. A tied matrix is stored once, and counted once."""
    if not path.is_file():
        raise ValueError(f"{path} is missing.")
    with safe_open(path, framework="pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def _cell(text: str) -> str:
    """Escapes text for one line of Markdown, or one cell of a table."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
