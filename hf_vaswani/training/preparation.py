"""Prepares a run: text, vocabulary and ids of a recipe, and the files that describe the run in its folder."""

import logging
import platform
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..data.batching import Updates
from ..data.sources import (
    EvaluationSet,
    Source,
    build_updates,
    count_held_out,
    encode_evaluation_sets,
    make_tokenizer,
    read_sources,
)
from ..data.tokenizer import load_tokenizer
from ..files import atomic_folder, atomic_write_text
from ..processes import on_main_process
from ..recipe import Recipe
from ..records import Environment, Text
from ..run_folder import RECIPE, read_environment, write_environment

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = logging.getLogger(__name__)

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
    """

    recipe: Recipe
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    updates: Updates
    sets: dict[str, list[EvaluationSet]]

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.recipe.run_dir)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint of training and validation text as JSON; a run can only be resumed with the same text."""
        lines = [line for pairs in self.sets.get("validation", []) for line in (*pairs.source, *pairs.target)]
        return self.updates.fingerprint | {"crc32_of_validation": zlib.crc32("\n".join(lines).encode())}


def prepare(recipe: Recipe, accelerator: Accelerator, checkpoint: Path | None) -> Run:
    """
    Reads the text of a recipe, learns or loads its vocabulary, and encodes the text.

    The run folder is created only after the text has been read. All processes call this together.

    Args:
        recipe ([`Recipe`]): the experiment.
        accelerator (`accelerate.Accelerator`): the processes.
        checkpoint (`Path`, *optional*): checkpoint to resume from; without one, the run starts anew.

    Returns:
        [`Run`].

    Raises:
        ValueError: the data cannot be trained on, or the recipe needs a set that it does not have.
        OSError: a file cannot be read or written.
    """
    sources = read_sources(recipe)
    training = recipe.training
    needs_validation = [
        ("training.average_best", training.average_best is not None),
        ("training.keep_best", training.keep_best > 0),
        ("training.patience", training.patience is not None),
        ("hub.every_n_checkpoints", recipe.hub.every_n_checkpoints is not None),
    ]
    for key, is_on in needs_validation:
        if is_on and not any("validation" in part.pairs for part in sources):
            raise ValueError(f"{key} needs a validation set, but the recipe has none: add one to its data section.")
    if recipe.hub.repo_id is not None and not any("test" in part.pairs for part in sources):
        raise ValueError(
            "hub.repo_id needs a test set, because a model is only published with its score, but the recipe has none: "
            "add one to its data section."
        )
    on_main_process(accelerator, _write_run_files, recipe, accelerator, sources, checkpoint)
    folder = Path(recipe.run_dir) / TOKENIZER
    if checkpoint is None:
        on_main_process(accelerator, _write_tokenizer, recipe, sources, folder)
        tokenizer = load_tokenizer(str(folder))
    else:
        # The checkpoint's own tokenizer was compared with its digests; the copy in the run folder is for users.
        tokenizer = load_tokenizer(str(checkpoint))
        on_main_process(accelerator, _save_tokenizer, tokenizer, folder)
    # One process fills the cache; the others read it.
    with accelerator.local_main_process_first():
        updates = build_updates(recipe, sources, tokenizer, accelerator.num_processes, accelerator.process_index)
        sets = encode_evaluation_sets(recipe, sources, tokenizer)
    return Run(recipe, accelerator, tokenizer, updates, sets)


def _write_tokenizer(recipe: Recipe, sources: list[Source], folder: Path) -> None:
    _save_tokenizer(make_tokenizer(recipe, sources), folder)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)


def _write_run_files(recipe: Recipe, accelerator: Accelerator, sources: list[Source], checkpoint: Path | None) -> None:
    """Writes the resolved recipe, and the environment unless an earlier start of the run wrote it."""
    run_dir = Path(recipe.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"The folder {run_dir} cannot be created: {error}") from error
    atomic_write_text(run_dir / RECIPE, recipe.as_yaml())
    if checkpoint is None or not _has_environment(run_dir):
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
    gpu, watts = _gpu(accelerator)
    return Environment(
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        git_revision=revision or None,
        machine=platform.platform(),
        cpu=_cpu(),
        gpu=gpu,
        gpu_watts=watts,
        device=str(accelerator.device),
        processes=accelerator.num_processes,
        cpu_threads=torch.get_num_threads(),
        mixed_precision=accelerator.mixed_precision,
        seed=recipe.seed,
        command=sys.argv,
        data=[
            Text(
                direction=source.name,
                dataset_is_local=source.recipe.dataset is not None and Path(source.recipe.dataset).exists(),
                # The length of a stream is not known.
                pairs={split: len(pairs) for split, pairs in source.pairs.items() if isinstance(pairs, Sized)},
                held_out=held_out,
            )
            for source, held_out in zip(sources, count_held_out(list(sources)), strict=True)
        ],
    )


def _cpu() -> str | None:
    """Returns the name of the processor, if it is known."""
    cpu_info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", cpu_info.read_text() if cpu_info.is_file() else "", re.MULTILINE)
    return (names[0] if names else platform.processor()) or None


def _gpu(accelerator: Accelerator) -> tuple[str | None, float | None]:
    """Returns the name of the GPU and its power limit in watts, if they are known."""
    if accelerator.device.type != "cuda":
        return None, None
    name, answer = torch.cuda.get_device_name(accelerator.device), []
    command = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]):
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return name, float(answer[0]) if answer and re.fullmatch(r"[\d.]+", answer[0]) else None
