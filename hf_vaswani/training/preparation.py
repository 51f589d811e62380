"""Prepares a run: text, vocabulary and ids of a recipe, and the files that describe the run in its folder."""

import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..data.batching import BatchOrder, EpochUpdates, Updates
from ..data.labels import LabelledData
from ..data.objectives import ObjectiveSettings
from ..data.pairs import PairData
from ..data.reading import Source
from ..data.running_text import RunningTextData
from ..data.tables import Columns
from ..data.task_data import EvaluationSet, TaskData, VocabularySettings, named_sets
from ..data.tokenizer import load_tokenizer
from ..extras import extra
from ..files import atomic_folder, atomic_write_text
from ..model.sentences_vaswani import language_tag
from ..model_names import commit_of
from ..processes import local_main_process_first, on_every_process, on_main_process
from ..recipe import PAIR_TASKS, TEXT_TASKS, TOKENS_PER_BATCH, Recipe, SourceRecipe
from ..records import Environment, Progress, Text
from ..run_folder import RECIPE, START, Resume, digests, read_environment, write_environment
from .start import check_start, fill_from_model, labels_of, load_start, write_start
from .tasks import MODELS, has_segments
from .transfer import keep_layers, prepare_network, target_modules

with extra("train"):
    from datasets import Dataset

if TYPE_CHECKING:
    # Text is also read to be checked, without the training's packages.
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

# Rows of a text whose content is compared when a run is resumed.
SAMPLED = 100_000
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "sacrebleu", "safetensors")
TOKENIZER = "tokenizer"


@dataclass
class Run:
    """
    A prepared recipe, which the training only reads.

    Attributes:
        recipe ([`Recipe`]): the experiment.
        accelerator (`accelerate.Accelerator`): the processes.
        tokenizer ([`PreTrainedTokenizerBase`]): the vocabulary.
        updates ([`Updates`]): batches of this process.
        sets (`dict[str, list[EvaluationSet]]`): validation and test sets, by split.
        start (`dict[str, str]`, *optional*): SHA-256 of the files of the model that the run starts from, by name.
        labels (`list[str]`): names of the labels, for a classifier.
        sampled (`int`): checksum of a sample of the training text, see [`_checksum`].
        tokens_at_once (`int`, *optional*): tokens of a batch that `tokens_per_batch: auto` stands for.
    """

    recipe: Recipe
    accelerator: "Accelerator"
    tokenizer: PreTrainedTokenizerBase
    updates: Updates
    sets: dict[str, list[EvaluationSet]]
    start: dict[str, str] | None = None
    labels: list[str] = field(default_factory=list)
    sampled: int = 0
    tokens_at_once: int | None = None

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.recipe.run_dir)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of text and start as JSON; a run can only be resumed with the same text and start."""
        found = self.updates.fingerprint | {"crc32_of_sampled_text": self.sampled}
        for split in ("validation", "test"):
            lines = [line for pairs in self.sets.get(split, []) for line in (*pairs.source, *pairs.target)]
            found[f"crc32_of_{split}"] = zlib.crc32("\n".join(lines).encode())
        return found | ({} if self.start is None else {"start": self.start})


# ---- The text of a recipe ----------------------------------------------------------------------------------------


def task_data(recipe: Recipe) -> TaskData:
    """Returns the text of a recipe, not read yet, for the family of its task."""
    return TASK_DATA[recipe.task](recipe)


def _pair_data(recipe: Recipe) -> TaskData:
    def columns(part: SourceRecipe) -> Columns:
        source = _first(part.source_column, part.source_language)
        return {"source": source, "target": _first(part.target_column, part.target_language)}

    return PairData(
        **_common(recipe, columns, has_target=True),
        alterations=asdict(recipe.data.augment) if recipe.data.augment else {},
        bpe_dropout=recipe.tokenizer.bpe_dropout,
        altered=recipe.evaluation.altered,
        has_own_vocabulary=recipe.tokenizer.path is None and recipe.initialize.from_ is None,
    )


def _running_text_data(recipe: Recipe) -> TaskData:
    def columns(part: SourceRecipe) -> Columns:
        document = {} if part.document_column is None else {"document": part.document_column}
        return {"text": _first(part.source_column, part.source_language), **document}

    objective = asdict(recipe.objective)
    settings = {part.name: objective[part.name] for part in fields(ObjectiveSettings) if part.name != "task"}
    return RunningTextData(
        **_common(recipe, columns),
        objective=ObjectiveSettings(recipe.task, **settings),
        frame=MODELS[recipe.task].frame,
        by_line=recipe.objective.unit == "lines",
    )


def _labelled_data(recipe: Recipe, text: str = "text", label: str = "label") -> TaskData:
    def columns(part: SourceRecipe) -> Columns:
        pair = {} if part.pair_column is None else {"pair": part.pair_column}
        found = {text: _first(part.source_column, part.source_language), **pair}
        return {**found, label: _first(part.label_column, "label")}

    return LabelledData(
        **_common(recipe, columns),
        task=recipe.task,
        frame=MODELS[recipe.task].frame,
        block_length=recipe.objective.block_length,
        has_segments=has_segments(recipe),
    )


# A new family of tasks is a subclass of `TaskData`, and an entry here.
TASK_DATA: dict[str, Callable[[Recipe], TaskData]] = {
    **dict.fromkeys(PAIR_TASKS, _pair_data),
    **dict.fromkeys(TEXT_TASKS, _running_text_data),
    "classification": _labelled_data,
    "tagging": partial(_labelled_data, text="words", label="tags"),
}


def _common(recipe: Recipe, columns: Callable[[SourceRecipe], Columns], has_target: bool = False) -> dict[str, Any]:
    """Returns the arguments that all families have; `columns` are those of a source by what they hold."""

    def source(part: SourceRecipe, set_name: str | None = None) -> Source:
        language = part.target_language if has_target else part.source_language
        return Source(
            source_language=part.source_language,
            target_language=part.target_language if has_target else None,
            columns=columns(part),
            dataset=part.dataset,
            dataset_config=part.dataset_config,
            dataset_splits={"train": part.train_split, "validation": part.validation_split, "test": part.test_split},
            files={"train": part.train_files, "validation": part.validation_files, "test": part.test_files},
            tag=language_tag(language) if recipe.data.target_tag else None,
            prefix=part.prefix,
            weight=part.weight,
            set_name=set_name,
        )

    model, tokenizer = recipe.model, recipe.tokenizer
    longest = model.max_position_embeddings
    return {
        "sources": [source(part) for part in (recipe.data, *recipe.more_data)],
        "sets": [source(part, name) for name, part in recipe.named_sets.items()],
        "vocabulary": VocabularySettings(
            tokenizer.kind, tokenizer.vocab_size, tokenizer.split_digits, tokenizer.path, longest
        ),
        "streaming": recipe.data.streaming,
        "stream_window": recipe.data.stream_window,
        "num_proc": recipe.data.num_proc,
        "data_workers": recipe.training.data_workers,
        "max_length": longest if model.position_encoding == "learned" else None,
    }


def _first(given: int | str | None, default: str) -> int | str:
    return default if given is None else given


def batch_order(
    recipe: Recipe,
    num_processes: int = 1,
    process_index: int = 0,
    few_shapes: bool = False,
    at_once: int | None = None,
) -> BatchOrder:
    """
    Returns what makes the batches of a recipe, for one of several processes; see [`BatchOrder`], and
    [`TrainingRecipe.batches`] for `at_once`.
    """
    tokens, count = recipe.training.batches(num_processes, at_once)
    limit = task_data(recipe).max_length
    return BatchOrder(tokens, recipe.seed, count, num_processes, process_index, limit, few_shapes)


def is_accelerator(device: torch.device) -> bool:
    """Returns whether a device other than the CPU computes: each new shape costs time there, and the CPU is free."""
    return device.type != "cpu"


# ---- From a recipe to a run --------------------------------------------------------------------------------------


def prepare(
    recipe: Recipe, accelerator: "Accelerator", resume: Resume | None, measure: Callable[[Run], int] | None = None
) -> Run:
    """
    Reads the text of a recipe and the model it starts from, learns or loads its vocabulary, and encodes the text.

    The run folder is created only after the text has been read. All processes call this together.

    Args:
        recipe ([`Recipe`]): the experiment.
        accelerator (`accelerate.Accelerator`): the processes.
        resume ([`Resume`], *optional*): checkpoint to resume from; without one, the run starts anew.
        measure (`Callable`, *optional*): measures the tokens of a batch that fit the accelerator, for
            `tokens_per_batch: auto`, from a run whose text is not encoded yet.

    Returns:
        [`Run`], whose recipe is complete: its model and search are those of the model it starts from.

    Raises:
        ValueError: the data cannot be trained on, the recipe needs a set that it does not have, or the model to start
            from cannot be used.
        OSError: a file cannot be read or written.
    """
    data = task_data(recipe)
    # One process of a machine fills the cache; the others read it.
    with local_main_process_first(accelerator):
        sources = data.read()
        evaluated = [*sources, *data.read_sets()]
    labels = data.label_names(sources)
    if recipe.initialize.from_ is None:
        data.check(evaluated, labels)
    _check_sets(recipe, evaluated)
    folder = Path(recipe.run_dir) / TOKENIZER
    if resume is None:
        recipe = on_main_process(accelerator, _write_new_run, recipe, accelerator, sources, evaluated, labels)
        tokenizer = load_tokenizer(str(folder))
    else:
        on_main_process(accelerator, check_start, Path(recipe.run_dir), resume)
        # The checkpoint's own tokenizer was compared with its digests; the copy in the run folder is for users.
        tokenizer = load_tokenizer(str(resume.checkpoint))
        _check_vocabulary(recipe, tokenizer, resume.checkpoint)
    if labels and recipe.initialize.from_ is not None:
        # A classifier goes on with its own labels.
        labels = labels_of(Path(recipe.run_dir) / START)
    start = _digests_of_start(recipe, accelerator, resume)
    run = Run(recipe, accelerator, tokenizer, cast(Updates, None), {}, start, labels)
    run.tokens_at_once = _tokens_at_once(run, resume, measure)
    with local_main_process_first(accelerator):
        run.updates = _build_updates(run, sources)
        run.sets = task_data(recipe).encode_sets(evaluated, tokenizer, labels)
    run.sampled = on_main_process(accelerator, _checksum, sources)
    if resume is None:
        on_main_process(accelerator, _record_batches, run)
    else:
        _check_progress(run, resume.checkpoint, resume.progress)
        # A resume that is refused leaves the run's own record.
        on_main_process(accelerator, _write_run_files, recipe, accelerator, evaluated, True)
        on_main_process(accelerator, _save_tokenizer, tokenizer, folder)
    return run


def _digests_of_start(recipe: Recipe, accelerator: "Accelerator", resume: Resume | None) -> dict[str, str] | None:
    # On a resume, `check_start` has compared these.
    start = resume.progress.data.get("start") if resume is not None else None
    if start is None and recipe.initialize.from_ is not None:
        start = on_main_process(accelerator, digests, Path(recipe.run_dir) / START)
    return start


def _tokens_at_once(run: Run, resume: Resume | None, measure: Callable[[Run], int] | None) -> int | None:
    """Returns the tokens of a batch that `tokens_per_batch: auto` stands for, as all processes have room for them."""
    if run.recipe.training.tokens_per_batch != "auto":
        return None
    if resume is not None:
        return int(resume.progress.launch["tokens_at_once"])
    found = TOKENS_PER_BATCH
    if measure is not None and is_accelerator(run.accelerator.device):
        found = min(on_every_process(run.accelerator, partial(measure, run)))
    tokens, count = run.recipe.training.batches(run.accelerator.num_processes, found)
    of_how_many = f"{count:,} batches" if count > 1 else "one batch"
    logger.info(f"training.tokens_per_batch auto: an update has {of_how_many} of {tokens:,} tokens in each process")
    return found


def _build_updates(run: Run, sources: list[Source]) -> Updates:
    """Groups the text into updates as the device of this process, and the number of processes, ask for it."""
    recipe, accelerator, on_accelerator = run.recipe, run.accelerator, is_accelerator(run.accelerator.device)
    place = accelerator.num_processes, accelerator.process_index
    order = batch_order(recipe, *place, on_accelerator, run.tokens_at_once)
    together = partial(on_every_process, accelerator) if accelerator.num_processes > 1 else None
    return task_data(recipe).build_updates(sources, run.tokenizer, order, run.labels, int(on_accelerator), together)


def _checksum(sources: list[Source]) -> int:
    """
    Returns the CRC-32 of `SAMPLED` rows of each source, evenly spread. Of a stream, names and sizes of files are
    compared instead.
    """
    found = 0
    for source in sources:
        rows = source.splits["train"]
        if isinstance(rows, Dataset):
            for batch in rows.select(range(0, len(rows), len(rows) // SAMPLED + 1)).iter(1000):
                found = zlib.crc32(json.dumps(batch, default=str).encode(), found)
    return found


def _check_vocabulary(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, checkpoint: Path) -> None:
    """Raises a `ValueError` if a recipe now names another vocabulary than that of a checkpoint."""
    path = recipe.tokenizer.path
    if path is None or recipe.initialize.from_ is not None or not os.path.exists(path):
        return
    if not load_tokenizer(path).get_vocab().items() <= tokenizer.get_vocab().items():
        raise ValueError(
            f"tokenizer.path is {path}, whose vocabulary is not that of {checkpoint}: name the former one, or another "
            "--run_dir."
        )


def launch_of(run: Run) -> dict[str, Any]:
    """Returns what a checkpoint depends on that is not in the recipe."""
    accelerator = run.accelerator
    launch = {
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "fsdp": accelerator.is_fsdp2,
    }
    return launch if run.tokens_at_once is None else launch | {"tokens_at_once": run.tokens_at_once}


def _check_progress(run: Run, checkpoint: Path, progress: Progress) -> None:
    """Raises a `ValueError` if a checkpoint was written with other text or with another launch."""
    data, launch = run.fingerprint, launch_of(run)
    # Checkpoints of earlier versions lack some.
    then = {key: data[key] for key in ("crc32_of_sampled_text", "crc32_of_test")} | progress.data
    different = [key for key in data | then if then.get(key) != data.get(key)]
    if different:
        what = "test" if different == ["crc32_of_test"] else "training or validation"
        counts = [key for key in different if "crc32" not in key]
        changes = ", ".join(f"{key} {_shown(then.get(key))} -> {_shown(data.get(key))}" for key in counts)
        raise ValueError(
            f"The {what} text has changed since {checkpoint} was written ({changes or 'with as many tokens'}). "
            "Restore the former text, or name another --run_dir."
        )
    if progress.launch != launch:
        different = [key for key in launch if progress.launch.get(key) != launch[key]]
        written, here = (", ".join(f"{key} {how.get(key)}" for key in different) for how in (progress.launch, launch))
        raise ValueError(
            f"{checkpoint} was written with {written}, but this launch has {here}. A checkpoint can only be "
            "resumed with the same number of processes, precision and sharding: launch it as before, or name another "
            "--run_dir."
        )


def _shown(value: Any) -> str:
    """Writes a count with its thousands separated, and anything else as it is."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def _write_new_run(
    recipe: Recipe, accelerator: "Accelerator", sources: list[Source], evaluated: list[Source], labels: list[str]
) -> Recipe:
    """Writes the first files of a run; returns the recipe with the keys that the model it starts from decides."""
    folder = Path(recipe.run_dir)
    if recipe.initialize.from_ is None:
        _write_run_files(recipe, accelerator, evaluated)
        _save_tokenizer(task_data(recipe).make_tokenizer(sources), folder / TOKENIZER)
        return recipe
    model, tokenizer = load_start(recipe, labels)
    model = keep_layers(recipe, model)
    recipe = fill_from_model(recipe, model, tokenizer)
    model, tokenizer = prepare_network(recipe, task_data(recipe), sources, model, tokenizer)
    if recipe.training.adapter is not None:
        target_modules(model, recipe.training.adapter.target)
    # Nothing is written if the text does not fit the model.
    if labels:
        labels = list(model.config.id2label.values())
    task_data(recipe).check(evaluated, labels, tokenizer)
    _write_run_files(recipe, accelerator, evaluated)
    write_start(folder, model, tokenizer)
    _save_tokenizer(tokenizer, folder / TOKENIZER)
    return recipe


def _check_sets(recipe: Recipe, sources: list[Source]) -> None:
    """Raises a `ValueError` if the recipe needs a validation or test set that it does not have."""
    training = recipe.training
    needs_validation = [
        ("training.average_best", training.average_best is not None),
        ("training.keep_best", training.keep_best > 0),
        ("training.patience", training.patience is not None),
        ("training.best_set", training.best_set is not None),
        ("hub.every_n_checkpoints", recipe.hub.every_n_checkpoints is not None),
    ]
    sets = [name for _, name in named_sets(sources, "validation")]
    for key, is_on in needs_validation:
        if is_on and not sets:
            raise ValueError(f"{key} needs a validation set, but the recipe has none: add one to its data section.")
    if training.best_set is not None and training.best_set not in sets:
        raise ValueError(
            f"training.best_set is {training.best_set!r}, but the validation sets of the recipe are {', '.join(sets)}."
        )
    if not any("test" in part.splits for part in sources):
        for key, is_on, why in (
            ("hub.repo_id", recipe.hub.repo_id is not None, "a model is only published with its score"),
            ("evaluation.altered", bool(recipe.evaluation.altered), "it is the one that is altered"),
            ("hub.not_worse_than", recipe.hub.not_worse_than is not None, "models are compared on test sets"),
        ):
            if is_on:
                raise ValueError(
                    f"{key} needs a test set, because {why}, but the recipe has none: add one to its data section."
                )


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)


def _write_run_files(
    recipe: Recipe, accelerator: "Accelerator", sources: list[Source], is_resumed: bool = False
) -> None:
    """Writes the resolved recipe, and the environment unless an earlier start of the run wrote it."""
    run_dir = Path(recipe.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"The folder {run_dir} cannot be created: {error}") from error
    atomic_write_text(run_dir / RECIPE, recipe.as_yaml())
    if not (is_resumed and _has_environment(run_dir)):
        write_environment(run_dir, describe_environment(recipe, accelerator, sources))


def _record_batches(run: Run) -> None:
    """Adds to the record of the environment what follows from the device."""
    found: dict[str, Any] = {}
    if run.tokens_at_once is not None:
        found["tokens_at_once"] = run.tokens_at_once
    if is_accelerator(run.accelerator.device) and isinstance(run.updates, EpochUpdates):
        share, shapes = run.updates.sampler.report_padding()
        found |= {"padding": round(share, 4), "shapes": shapes}
    if found:
        write_environment(run.folder, replace(read_environment(run.folder), **found))


def _has_environment(run_dir: Path) -> bool:
    try:
        read_environment(run_dir)
    except ValueError as error:
        logger.warning(f"{error} It is written again, and describes the present machine")
        return False
    return True


def describe_environment(recipe: Recipe, accelerator: "Accelerator", sources: Sequence[Source] = ()) -> Environment:
    """
    Describes versions, machine and command of this training.

    Args:
        recipe ([`Recipe`]): the experiment.
        accelerator (`accelerate.Accelerator`): the processes.
        sources (`Sequence[Source]`, *optional*): the text, if it was read.

    Returns:
        [`Environment`].
    """
    # An installed package may lie inside somebody else's repository.
    root, revision = Path(__file__).parents[2], ""
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        revision = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    counts = task_data(recipe).count_held_out(sources)
    start = recipe.initialize.from_
    return Environment(
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        git_revision=revision or None,
        machine=platform.platform(),
        cpu=_cpu(),
        gpu=torch.cuda.get_device_name(accelerator.device) if accelerator.device.type == "cuda" else None,
        device=str(accelerator.device),
        processes=accelerator.num_processes,
        cpu_threads=torch.get_num_threads(),
        mixed_precision=accelerator.mixed_precision,
        seed=recipe.seed,
        command=sys.argv,
        commits=_commits(recipe) or None,
        start_is_local=None if start is None else os.path.exists(start),
        data=[
            Text(
                direction=source.name,
                dataset_is_local=source.dataset is not None and os.path.exists(source.dataset),
                # The length of a stream is not known.
                pairs={split: len(pairs) for split, pairs in source.splits.items() if isinstance(pairs, Sized)},
                held_out=held_out,
            )
            for source, held_out in zip(sources, counts, strict=True)
        ],
    )


def _commits(recipe: Recipe) -> dict[str, str]:
    """Returns the commits of models, tokenizers and datasets that came from the Hub, by their ids."""
    initialize, teacher = recipe.initialize, recipe.teacher
    teachers = teacher.model if isinstance(teacher.model, list) else [teacher.model]
    baseline = recipe.hub.not_worse_than
    models = [recipe.tokenizer.path, *teachers, teacher.backward_model]
    models += [] if baseline in ("start", "last_push") else [baseline]
    parts = [recipe.data, *recipe.more_data, *recipe.named_sets.values()]
    found = {name: commit_of(name) for name in models if name is not None}
    for name in (part.dataset for part in parts):
        if name not in (None, "pocket"):
            found[str(name)] = commit_of(str(name), "dataset")
    if initialize.from_ is not None:
        found[initialize.from_] = commit_of(initialize.from_, "model", initialize.revision)
    return {name: commit for name, commit in found.items() if commit is not None}


def _cpu() -> str | None:
    """Returns the name of the processor, if it is known."""
    cpu_info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", cpu_info.read_text() if cpu_info.is_file() else "", re.MULTILINE)
    return (names[0] if names else platform.processor()) or None
