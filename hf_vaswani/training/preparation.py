"""From a recipe to a run that can be trained: processes, text, vocabulary, ids, model, and the run's own folder."""

import logging
import platform
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Sequence, Sized
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..data.batching import Updates
from ..data.sources import EvaluationSet, Source, build_updates, encode_evaluation_sets, make_tokenizer, read_sources
from ..data.tokenizer import load_tokenizer
from ..files import atomic_folder, atomic_write_text
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..processes import on_main_process
from ..recipe import Recipe
from ..run_folder import RECIPE, Environment, Text, read_environment, write_environment

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = logging.getLogger(__name__)

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
    on_main_process(accelerator, _write_run_files, recipe, accelerator, sources, checkpoint)
    folder = Path(recipe.run_dir) / TOKENIZER
    if checkpoint is None:
        on_main_process(accelerator, _write_tokenizer, recipe, sources, folder)
        tokenizer = load_tokenizer(str(folder))
    else:
        # The checkpoint's own has digests, which were compared; the one beside it is there for people to use.
        tokenizer = load_tokenizer(str(checkpoint))
        on_main_process(accelerator, _save_tokenizer, tokenizer, folder)
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
        write_environment(run_dir, describe_environment(recipe, accelerator, sources))


def _has_environment(run_dir: Path) -> bool:
    try:
        read_environment(run_dir)
    except ValueError as error:
        logger.warning(f"{error} It is written anew, and describes the machine of this process")
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
            )
            for source in sources
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
