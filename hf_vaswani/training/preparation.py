"""From a recipe to a run that can be trained: processes, text, vocabulary, ids, model, and the run's own folder."""

import ctypes
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Sized
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedTokenizerBase

from ..data.batching import Updates
from ..data.sources import EvaluationSet, Source, build_updates, encode_evaluation_sets, make_tokenizer, read_sources
from ..data.tokenizer import load_tokenizer
from ..files import atomic_folder, atomic_write_text
from ..hub.card import read_environment
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..processes import meet
from ..recipe import Recipe, TrainingRecipe
from ..run_folder import ENVIRONMENT, RECIPE

try:
    from accelerate import Accelerator
    from accelerate.utils import (
        DistributedType,
        InitProcessGroupKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
        broadcast_object_list,
    )
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long processes wait for each other while one of them reads a large text, learns its vocabulary and makes the ids.
WORK = timedelta(hours=12)

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "sacrebleu", "safetensors")
TOKENIZER = "tokenizer"


@dataclass
class Run:
    """What every part of a run looks at, and none changes."""

    recipe: Recipe
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    updates: Updates
    sets: dict[str, list[EvaluationSet]]

    @property
    def folder(self) -> Path:
        """Where all that the run writes is."""
        return Path(self.recipe.run_dir)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the text is, in what JSON can hold: a run is resumed with the same, or its validations mean nothing."""
        lines = [line for pairs in self.sets.get("validation", []) for line in (*pairs.source, *pairs.target)]
        return self.updates.fingerprint | {"crc32_of_validation": zlib.crc32("\n".join(lines).encode())}


def build_accelerator(recipe: Recipe) -> Accelerator:
    """
    The processes of the launch, with the recipe's number format and trackers.

    Args:
        recipe ([`Recipe`]): the experiment.

    Returns:
        [`Accelerator`].

    Raises:
        ValueError: what was launched does not fit together, or the machine does not have what the recipe asks for.
    """
    launched = int(os.environ.get("WORLD_SIZE", 1))
    on_cpu = launched > 1 and not torch.cuda.is_available()
    precision = recipe.training.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision not in (None, "no", "bf16", "fp16"):
        raise ValueError(
            f"The precision of accelerate launch (--mixed_precision) must be no, bf16 or fp16, but it is {precision}."
        )
    if precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("training.mixed_precision fp16 needs a GPU; on a CPU choose no or bf16.")
    trackers = recipe.training.trackers
    accelerator = meet(
        launched,
        lambda timeout: Accelerator(
            cpu=on_cpu,
            mixed_precision=recipe.training.mixed_precision,
            log_with=trackers or None,
            # One graph for all lengths: compiled for each of them, it would never stop compiling.
            dynamo_plugin=TorchDynamoPlugin(backend="inductor", dynamic=True) if recipe.training.compile else None,
            project_config=ProjectConfiguration(project_dir=recipe.run_dir),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
            step_scheduler_with_optimizer=False,
        ),
        WORK,
    )
    if accelerator.num_processes != launched:
        raise ValueError(
            f"{launched} processes were launched, but Accelerate sees {accelerator.num_processes}: "
            "each would train a model of its own."
        )
    if accelerator.distributed_type == DistributedType.FSDP:
        _check_fsdp(accelerator, recipe.training)
    # Every process has the same to say, so one of them says it.
    logging.getLogger(__package__).setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    available = [str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with]
    if set(trackers) - set(available):
        raise ValueError(f"training.trackers asks for {trackers}, but of these only {available} are installed.")
    if accelerator.device.type == "cpu":
        # `accelerate launch` gives a process a single thread unless it is told otherwise.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        torch.set_num_threads(recipe.training.cpu_threads or share)
        keep_freed_memory()
    return accelerator


def _check_fsdp(accelerator: Accelerator, training: TrainingRecipe) -> None:
    if not accelerator.is_fsdp2:
        raise ValueError("This is FSDP of version 1, which does not train this model; launch it with fsdp_version: 2.")
    if training.ema_decay is not None:
        raise ValueError("training.ema_decay does not go together with FSDP, which shards the weights; choose one.")
    if training.optimizer == "muon":
        raise ValueError("training.optimizer 'muon' does not go together with FSDP, which cuts matrices; take 'adam'.")


def keep_freed_memory() -> None:
    """
    Asks glibc to keep blocks that are freed for the next one, instead of handing them back to the kernel, which then
    has to zero the pages of every step's activations anew. Blocks of 4 MiB and more still go back: kept, they lie in
    holes that the next ones do not fit into. Elsewhere than on glibc this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # noqa: N806 (the C library's names)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 22)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def by_the_first(accelerator: Accelerator, function: Callable[..., T], *arguments: Any) -> T:
    """
    Lets process 0 do something on the disk, while the others wait; all have its result, or its error. What the others
    would find there themselves may lag behind, on another machine.

    Args:
        accelerator ([`Accelerator`]): the processes, which call this together.
        function (`Callable`): what is done with the `arguments`.

    Returns:
        What the function returned.

    Raises:
        ValueError, OSError: as the function did.
    """
    told: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            told[0] = function(*arguments)
        except (ValueError, OSError) as error:
            told[1] = error
    result, failure = broadcast_object_list(told)
    if failure is not None:
        raise failure
    return cast(T, result)


def prepare(recipe: Recipe, accelerator: Accelerator, checkpoint: Path | None) -> Run:
    """
    Text, vocabulary and ids of a recipe. The run folder is made once the text is known to be readable.

    Args:
        recipe ([`Recipe`]): the experiment.
        accelerator ([`Accelerator`]): the processes that share it.
        checkpoint (`Path`, *optional*): to resume from; without one, the run starts anew.

    Returns:
        [`Run`].

    Raises:
        ValueError: the data cannot be trained on: with the file, line or key.
        OSError: a file cannot be read or written.
    """
    sources = read_sources(recipe)
    needing = {"training.average_best": None, "training.keep_best": 0, "training.patience": None}
    needing["hub.every_n_checkpoints"] = None
    for key in needing:
        if recipe.flat()[key] != needing[key] and not any("validation" in part.pairs for part in sources):
            raise ValueError(f"{key} needs a validation set, which the recipe's data section does not give.")
    if recipe.hub.repo_id is not None and not any("test" in part.pairs for part in sources):
        raise ValueError(
            "hub.repo_id needs a test set, which the recipe's data section does not give: a model is only published "
            "with its score."
        )
    by_the_first(accelerator, _write_run_files, recipe, accelerator, sources, checkpoint)
    folder = Path(recipe.run_dir) / TOKENIZER
    if checkpoint is None:
        by_the_first(accelerator, _write_tokenizer, recipe, sources, folder)
        tokenizer = load_tokenizer(str(folder))
    else:
        # The checkpoint's own has digests, which were compared; the one beside it is there for people to use.
        tokenizer = load_tokenizer(str(checkpoint))
        by_the_first(accelerator, _save_tokenizer, tokenizer, folder)
    # Ids come from the cache once one process has made them.
    with accelerator.local_main_process_first():
        updates = build_updates(recipe, sources, tokenizer, accelerator.num_processes, accelerator.process_index)
        sets = encode_evaluation_sets(recipe, sources, tokenizer)
    return Run(recipe, accelerator, tokenizer, updates, sets)


def build_model(run: Run) -> VaswaniForConditionalGeneration:
    """The network of a recipe with its first weights, and the search that the recipe's evaluation section asks for."""
    tokenizer, evaluation = run.tokenizer, run.recipe.evaluation
    start = getattr(tokenizer, f"{run.recipe.tokenizer.decoder_start}_token_id")
    config = VaswaniConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id if start is None else start,
        language_pairs=run.recipe.language_pairs,
        **asdict(run.recipe.model),
    )
    model = VaswaniForConditionalGeneration(config)
    if run.accelerator.device.type == "cpu" and run.accelerator.mixed_precision == "bf16":
        # There the backward pass of torch's fused attention takes ten times as long in bfloat16 as in float32.
        model.set_attn_implementation("eager")
        capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        if not capabilities.get("avx512_bf16", True):
            logger.warning(
                "This CPU has no instructions for bfloat16, and takes many times as long for it as for float32: "
                "training.mixed_precision no is the faster choice here."
            )
    model.generation_config.update(
        num_beams=evaluation.num_beams,
        # transformers saves no setting for which a single beam has no use.
        length_penalty=evaluation.length_penalty if evaluation.num_beams > 1 else None,
        early_stopping=evaluation.early_stopping if evaluation.num_beams > 1 else None,
        finish_candidates=evaluation.finish_candidates,
        length_penalty_type=evaluation.length_penalty_type,
        max_length_offset=evaluation.max_length_offset,
        max_length=evaluation.max_length,
    )
    logger.info(
        f"{model.num_parameters():,} parameters, on {run.accelerator.device} x {run.accelerator.num_processes}"
    )
    return model


def _write_tokenizer(recipe: Recipe, sources: list[Source], folder: Path) -> None:
    _save_tokenizer(make_tokenizer(recipe, sources), folder)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)


def _write_run_files(recipe: Recipe, accelerator: Accelerator, sources: list[Source], checkpoint: Path | None) -> None:
    """The whole recipe; versions, machine, command and revision of the code, unless an earlier start noted them."""
    run_dir = Path(recipe.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"The folder {run_dir} cannot be made: {error}") from error
    atomic_write_text(run_dir / RECIPE, recipe.as_yaml())
    if checkpoint is None or not _has_environment(run_dir):
        write_environment(recipe, accelerator, sources)


def _has_environment(run_dir: Path) -> bool:
    try:
        read_environment(run_dir)
    except ValueError as error:
        logger.warning(f"{error} It is written anew, and describes the machine of this process")
        return False
    return True


def write_environment(recipe: Recipe, accelerator: Accelerator, sources: list[Source]) -> None:
    """
    Writes `environment.json`.

    Args:
        recipe ([`Recipe`]): names the run's folder.
        accelerator ([`Accelerator`]): the processes.
        sources (`list[Source]`): the text; empty where it was not read.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    # Of this package's own repository: an installed one may lie inside somebody else's.
    root, revision = Path(__file__).parents[2], ""
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        revision = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    environment = {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "git_revision": revision or None,
        "machine": platform.platform(),
        **_hardware(accelerator),
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "cpu_threads": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "seed": recipe.seed,
        "command": sys.argv,
        "data": [
            {
                "direction": source.name,
                "dataset_is_local": source.recipe.dataset is not None and Path(source.recipe.dataset).exists(),
                # Of a stream nobody knows the pairs.
                "pairs": {split: len(pairs) for split, pairs in source.pairs.items() if isinstance(pairs, Sized)},
            }
            for source in sources
        ],
    }
    atomic_write_text(Path(recipe.run_dir) / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")


def _hardware(accelerator: Accelerator) -> dict[str, Any]:
    """Names of processor and GPU, and the GPU's power limit in watts, as far as the machine tells them."""
    cpu_info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", cpu_info.read_text() if cpu_info.is_file() else "", re.MULTILINE)
    found: dict[str, Any] = {"cpu": names[0] if names else platform.processor() or None}
    if accelerator.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(accelerator.device)
        command = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits"]
        if shutil.which(command[0]):
            answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
            found["gpu_watts"] = float(answer[0]) if answer and re.fullmatch(r"[\d.]+", answer[0]) else None
    return found
