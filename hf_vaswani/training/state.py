"""All that changes while a run is trained: built, saved as a checkpoint, and loaded again."""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..averaging import load_weights
from ..files import atomic_folder
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..processes import on_main_process
from ..run_folder import (
    EMA_WEIGHTS,
    WEIGHTS,
    Progress,
    checkpoint_digests,
    checkpoint_folder,
    forget_after,
    read_progress,
    read_validations,
    remove_old_checkpoints,
    unchangeable,
    write_progress,
)
from .optimization import build_optimizer, build_schedule
from .preparation import Run, build_model
from .sharding import shard_what_is_tied, whole_weights

try:
    from accelerate.utils import load, set_seed
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error


@dataclass
class Trainee:
    """All that changes while a run is trained."""

    bare: VaswaniForConditionalGeneration
    # The bare model as Accelerate wraps it; a plain copy of it, where its weights are sharded; its moving average.
    model: torch.nn.Module
    whole: VaswaniForConditionalGeneration | None
    ema: AveragedModel | None
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    step: int
    position: dict[str, Any]
    # Updates in a row that were left out last.
    nonfinite: int = 0
    # What earlier processes took, and when this one began.
    seconds_before: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long the run was trained so far, validations included, less what was lost when it was killed."""
        return self.seconds_before + time.monotonic() - self.began

    def to_validate(self) -> VaswaniForConditionalGeneration:
        """What stands for the run: the moving average, where there is one. All processes call it together."""
        if self.ema is not None:
            return cast(VaswaniForConditionalGeneration, self.ema.module)
        if self.whole is not None:
            self.whole.load_state_dict(whole_weights(self.model), strict=False)
        return self.whole or self.bare


def build_trainee(run: Run, checkpoint: Path | None) -> Trainee:
    """
    Model, optimizer and schedule, as they are at the start or as a checkpoint has them.

    Args:
        run ([`Run`]): recipe, processes, tokenizer and text.
        checkpoint (`Path`, *optional*): to go on from.

    Returns:
        [`Trainee`].

    Raises:
        ValueError: the checkpoint is damaged, or of another text.
    """
    recipe, training, accelerator = run.recipe, run.recipe.training, run.accelerator
    bare = build_model(run)
    if training.gradient_checkpointing:
        # Its name before and since transformers 5.23.
        enable = "activation_checkpointing_enable"
        getattr(bare, enable if hasattr(bare, enable) else "gradient_checkpointing_enable")()
    if accelerator.process_index > 0:
        set_seed(recipe.seed, device_specific=True)
    # A process that has a share of the weights cannot translate by itself.
    whole = copy.deepcopy(bare).to(accelerator.device) if accelerator.is_fsdp2 else None
    shard_what_is_tied(accelerator, bare)
    optimizer = build_optimizer(
        bare.parameters(),
        training.adam_beta1,
        training.adam_beta2,
        training.adam_epsilon,
        training.weight_decay,
        training.peak_learning_rate or 1.0,
        _matrices_of_layers(bare) if training.optimizer == "muon" else (),
    )
    schedule = build_schedule(
        optimizer,
        training.schedule,
        recipe.model.d_model,
        training.warmup_steps,
        training.max_steps,
        training.learning_rate_factor,
    )
    model, optimizer, schedule = accelerator.prepare(bare, optimizer, schedule)
    ema = None
    if training.ema_decay is not None:
        ema = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(training.ema_decay))
    trainee = Trainee(bare, model, whole, ema, optimizer, schedule, 0, run.updates.start)
    noted = None
    if checkpoint is not None:
        progress = on_main_process(accelerator, read_progress, checkpoint)
        _load_checkpoint(run, trainee, checkpoint, progress)
        noted = progress.validations
    on_main_process(accelerator, forget_after, run.folder, trainee.step, training, noted)
    if checkpoint is not None:
        on_main_process(accelerator, _tidy, run)
    return trainee


def _matrices_of_layers(model: VaswaniForConditionalGeneration) -> Iterator[torch.nn.Parameter]:
    for stack in (model.model.encoder.layers, model.model.decoder.layers):
        yield from (parameter for parameter in stack.parameters() if parameter.dim() == 2)


def save_checkpoint(run: Run, trainee: Trainee) -> None:
    """
    Writes one folder with the state of model, optimizer, schedule and random numbers, and the position in the data. It
    is also a folder that `from_pretrained` loads. All processes call it together.

    Args:
        run ([`Run`]), trainee ([`Trainee`]): what is saved.

    Raises:
        OSError: the disk is full, or cannot be written; nothing of the folder is left then.
    """
    accelerator, folder = run.accelerator, checkpoint_folder(run.folder, trainee.step)
    with atomic_folder(folder, accelerator.is_main_process) as temporary:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
        # Shards are there to go on from; what is averaged and loaded are whole weights.
        weights = whole_weights(trainee.model) if accelerator.is_fsdp2 else None
        if accelerator.is_main_process:
            if weights is not None:
                save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
            if trainee.ema is not None:
                save_file(whole_weights(trainee.ema.module), temporary / EMA_WEIGHTS, metadata={"format": "pt"})
            trainee.bare.config.save_pretrained(temporary)
            trainee.bare.generation_config.save_pretrained(temporary)
            run.tokenizer.save_pretrained(temporary)
        # The digests are of what all processes have written.
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            write_progress(temporary, _progress(run, trainee, temporary))
    on_main_process(accelerator, _tidy, run)
    # Nobody goes on to read a folder that the first process has not renamed yet.
    accelerator.wait_for_everyone()


def _progress(run: Run, trainee: Trainee, folder: Path) -> Progress:
    """Makes the record of a checkpoint, after all its other files have been written."""
    files, state = checkpoint_digests(folder)
    return Progress(
        step=trainee.step,
        position=trainee.position,
        data=run.fingerprint,
        launch=_launch(run),
        nonfinite=trainee.nonfinite,
        seconds=round(trainee.seconds, 1),
        files=files,
        state=state,
        recipe=unchangeable(run.recipe),
        validations=read_validations(run.folder),
    )


def _tidy(run: Run) -> None:
    training = run.recipe.training
    best = max(training.keep_best, training.average_best or 0)
    remove_old_checkpoints(run.folder, training.save_every, training.keep_last, best, training.best_by)


def _launch(run: Run) -> dict[str, Any]:
    """What a checkpoint cannot be loaded without, and the recipe does not say."""
    accelerator = run.accelerator
    return {
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "fsdp": accelerator.is_fsdp2,
    }


def _load_checkpoint(run: Run, trainee: Trainee, checkpoint: Path, progress: Progress) -> None:
    """Everything as it was, and the position in the data, which must be the data of then."""
    data, launch = run.fingerprint, _launch(run)
    if progress.data != data:
        different = [key for key in data if progress.data.get(key) != data[key]] or list(progress.data)
        then, now = ({key: text.get(key) for key in different} for text in (progress.data, data))
        raise ValueError(
            f"The training text, or that of the validation, is not that of {checkpoint}: then it had {then}, and now "
            f"{now}. Give it the text of then, or name another --run_dir."
        )
    if progress.launch != launch:
        different = [key for key in launch if progress.launch.get(key) != launch[key]]
        old, new = (", ".join(f"{key} {how.get(key)}" for key in different) for how in (progress.launch, launch))
        raise ValueError(
            f"{checkpoint} was written with {old}, and now it is {new}: its files, random numbers and position in "
            "the data are of no use here. Start it as it was started then, or name another --run_dir."
        )
    try:
        # Accelerate goes on without a word where the random numbers cannot be read, so they are looked at here.
        load(checkpoint / f"random_states_{run.accelerator.process_index}.pkl")
        run.accelerator.load_state(str(checkpoint))
    # Without digests, as an earlier version wrote it, a damaged pickle may raise anything.
    except Exception as error:
        raise ValueError(
            f"{checkpoint} could not be loaded: {error}. If it was damaged, delete it to go on from the one before."
        ) from error
    if trainee.ema is not None:
        trainee.ema.module.load_state_dict(load_weights(checkpoint), strict=False)
        trainee.ema.n_averaged.fill_(progress.step)
    trainee.step, trainee.position, trainee.nonfinite = progress.step, progress.position, progress.nonfinite
    trainee.seconds_before = progress.seconds
