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
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..data.batching import Updates
from ..data.labels import LabelledData
from ..data.sources import EvaluationSet, PairData, Source, TaskData, set_names
from ..data.text_sources import RunningTextData
from ..data.tokenizer import load_tokenizer
from ..extras import extra
from ..files import atomic_folder, atomic_write_text
from ..model_names import commit_of
from ..processes import local_main_process_first, on_main_process
from ..recipe import LABEL_TASKS, PAIR_TASKS, TEXT_TASKS, Recipe
from ..records import Environment, Progress, Text
from ..run_folder import RECIPE, START, Resume, digests, read_environment, write_environment
from .start import check_start, fill_from_model, labels_of, load_start, write_start
from .transfer import keep_layers, prepare_network, target_modules

with extra("train"):
    from accelerate import Accelerator
    from datasets import Dataset

logger = logging.getLogger(__name__)

# Rows of a text whose content is compared when a run is resumed.
SAMPLED = 100_000
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "sacrebleu", "safetensors")
TOKENIZER = "tokenizer"

# A new family of tasks is an implementation, and an entry here.
TASK_DATA: dict[str, TaskData] = {
    **dict.fromkeys(PAIR_TASKS, PairData()),
    **dict.fromkeys(TEXT_TASKS, RunningTextData()),
    **dict.fromkeys(LABEL_TASKS, LabelledData()),
}


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
    """

    recipe: Recipe
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    updates: Updates
    sets: dict[str, list[EvaluationSet]]
    start: dict[str, str] | None = None
    labels: list[str] = field(default_factory=list)
    sampled: int = 0

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


def prepare(recipe: Recipe, accelerator: Accelerator, resume: Resume | None) -> Run:
    """
    Reads the text of a recipe and the model it starts from, learns or loads its vocabulary, and encodes the text.

    The run folder is created only after the text has been read. All processes call this together.

    Args:
        recipe ([`Recipe`]): the experiment.
        accelerator (`accelerate.Accelerator`): the processes.
        resume ([`Resume`], *optional*): checkpoint to resume from; without one, the run starts anew.

    Returns:
        [`Run`], whose recipe is complete: its model and search are those of the model it starts from.

    Raises:
        ValueError: the data cannot be trained on, the recipe needs a set that it does not have, or the model to start
            from cannot be used.
        OSError: a file cannot be read or written.
    """
    data = TASK_DATA[recipe.task]
    # One process of a machine fills the cache; the others read it.
    with local_main_process_first(accelerator):
        sources = data.read(recipe)
        evaluated = [*sources, *data.read_sets(recipe)]
    labels = data.label_names(sources)
    if recipe.initialize.from_ is None:
        data.check(recipe, evaluated, labels)
    _check_sets(recipe, evaluated)
    folder = Path(recipe.run_dir) / TOKENIZER
    if resume is None and recipe.initialize.from_ is not None:
        recipe = on_main_process(accelerator, _write_start, recipe, accelerator, sources, evaluated, labels)
        tokenizer = load_tokenizer(str(folder))
    elif resume is None:
        on_main_process(accelerator, _write_run_files, recipe, accelerator, evaluated)
        on_main_process(accelerator, _write_tokenizer, recipe, sources, folder)
        tokenizer = load_tokenizer(str(folder))
    else:
        on_main_process(accelerator, check_start, Path(recipe.run_dir), resume)
        # The checkpoint's own tokenizer was compared with its digests; the copy in the run folder is for users.
        tokenizer = load_tokenizer(str(resume.checkpoint))
        _check_vocabulary(recipe, tokenizer, resume.checkpoint)
    if labels and recipe.initialize.from_ is not None:
        # A classifier goes on with its own labels.
        labels = labels_of(Path(recipe.run_dir) / START)
    with local_main_process_first(accelerator):
        processes = accelerator.num_processes, accelerator.process_index
        updates = data.build_updates(recipe, sources, tokenizer, labels, *processes)
        sets = data.encode_sets(recipe, evaluated, tokenizer, labels)
    # On a resume, `check_start` has compared these.
    start = resume.progress.data.get("start") if resume is not None else None
    if start is None and recipe.initialize.from_ is not None:
        start = on_main_process(accelerator, digests, Path(recipe.run_dir) / START)
    sampled = on_main_process(accelerator, _checksum, sources)
    run = Run(recipe, accelerator, tokenizer, updates, sets, start, labels, sampled)
    if resume is not None:
        _check_progress(run, resume.checkpoint, resume.progress)
        # A resume that is refused leaves the run's own record.
        on_main_process(accelerator, _write_run_files, recipe, accelerator, evaluated, True)
        on_main_process(accelerator, _save_tokenizer, tokenizer, folder)
    return run


def _checksum(sources: list[Source]) -> int:
    """
    Returns the CRC-32 of `SAMPLED` rows of each source, evenly spread. Of a stream, names and sizes of files are
    compared instead.
    """
    found = 0
    for source in sources:
        rows = source.pairs["train"]
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
    return {
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "fsdp": accelerator.is_fsdp2,
    }


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


def _write_start(
    recipe: Recipe,
    accelerator: Accelerator,
    sources: list[Source],
    evaluated: list[Source],
    labels: list[str],
) -> Recipe:
    """Writes the files of a run that starts from a model; returns the recipe with the keys that the model decides."""
    model, tokenizer = load_start(recipe, labels)
    model = keep_layers(recipe, model)
    recipe = fill_from_model(recipe, model, tokenizer)
    model, tokenizer = prepare_network(recipe, sources, model, tokenizer)
    if recipe.training.adapter is not None:
        target_modules(model, recipe.training.adapter.target)
    # Nothing is written if the text does not fit the model.
    if labels:
        labels = list(model.config.id2label.values())
    TASK_DATA[recipe.task].check(recipe, evaluated, labels, tokenizer)
    _write_run_files(recipe, accelerator, evaluated)
    write_start(Path(recipe.run_dir), model, tokenizer)
    _save_tokenizer(tokenizer, Path(recipe.run_dir) / TOKENIZER)
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
    sets = set_names(sources, "validation")
    for key, is_on in needs_validation:
        if is_on and not sets:
            raise ValueError(f"{key} needs a validation set, but the recipe has none: add one to its data section.")
    if training.best_set is not None and training.best_set not in sets:
        raise ValueError(
            f"training.best_set is {training.best_set!r}, but the validation sets of the recipe are {', '.join(sets)}."
        )
    if not any("test" in part.pairs for part in sources):
        for key, is_on, why in (
            ("hub.repo_id", recipe.hub.repo_id is not None, "a model is only published with its score"),
            ("evaluation.altered", bool(recipe.evaluation.altered), "it is the one that is altered"),
            ("hub.not_worse_than", recipe.hub.not_worse_than is not None, "models are compared on test sets"),
        ):
            if is_on:
                raise ValueError(
                    f"{key} needs a test set, because {why}, but the recipe has none: add one to its data section."
                )


def _write_tokenizer(recipe: Recipe, sources: list[Source], folder: Path) -> None:
    _save_tokenizer(TASK_DATA[recipe.task].make_tokenizer(recipe, sources), folder)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)


def _write_run_files(
    recipe: Recipe, accelerator: Accelerator, sources: list[Source], is_resumed: bool = False
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


def _has_environment(run_dir: Path) -> bool:
    try:
        read_environment(run_dir)
    except ValueError as error:
        logger.warning(f"{error} It is written again, and describes the present machine")
        return False
    return True


def describe_environment(recipe: Recipe, accelerator: Accelerator, sources: Sequence[Source] = ()) -> Environment:
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
    counts = TASK_DATA[recipe.task].count_held_out(list(sources), recipe.data.num_proc)
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
                dataset_is_local=source.recipe.dataset is not None and os.path.exists(source.recipe.dataset),
                # The length of a stream is not known.
                pairs={split: len(pairs) for split, pairs in source.pairs.items() if isinstance(pairs, Sized)},
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
