"""The state of a training: built from a run, saved as a checkpoint, and loaded again."""

import copy
import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import GenerationConfig

from ..averaging import load_stored, load_weights
from ..data.batching import EpochUpdates
from ..data.windows import RenewedUpdates
from ..extras import extra
from ..files import atomic_folder, digest
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel
from ..processes import on_main_process
from ..recipe import TrainingRecipe
from ..records import Progress
from ..run_folder import (
    EMA_WEIGHTS,
    START,
    WEIGHTS,
    Resume,
    checkpoint_folder,
    digests,
    forget_after,
    read_validations,
    remove_old_checkpoints,
    unchangeable,
    write_progress,
)
from ..translation.quantization import has_bfloat16
from .consistency import check_padding
from .optimization import OPTIMIZERS, build_optimizer, build_schedule
from .preparation import Run, launch_of
from .start import FREE
from .tasks import config_of_task, model_class, search_of
from .transfer import attach_adapters, load_adapters, part_of, save_adapters

with extra("train"):
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel, load, set_seed

logger = logging.getLogger(__name__)

# Accelerate's folder for the weights of FSDP, a file of each process.
SHARDS = "pytorch_model_fsdp_"


@dataclass
class TrainState:
    """
    Everything that changes while a run is trained.

    Attributes:
        model ([`VaswaniPreTrainedModel`]): the model.
        wrapped (`torch.nn.Module`): the model as Accelerate wraps it.
        unsharded ([`VaswaniPreTrainedModel`], *optional*): a copy of the model with full weights, if FSDP
            shards those of the model.
        ema (`AveragedModel`, *optional*): moving average of the weights.
        optimizer (`torch.optim.Optimizer`), schedule (`LRScheduler`): as Accelerate wraps them.
        step (`int`): updates so far.
        position (`dict[str, Any]`): position in the data.
        nonfinite (`int`): skipped updates in a row, up to this one.
        seconds_before (`float`): duration of the training in earlier processes.
        began (`float`): monotonic time at which this process began.
        adapters (`peft.PeftModel`, *optional*): the model with the adapters that are trained in place of its weights.
    """

    model: VaswaniPreTrainedModel
    wrapped: torch.nn.Module
    unsharded: VaswaniPreTrainedModel | None
    ema: AveragedModel | None
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    step: int
    position: dict[str, Any]
    nonfinite: int = 0
    seconds_before: float = 0.0
    began: float = field(default_factory=time.monotonic)
    adapters: Any = None

    @property
    def seconds(self) -> float:
        """Duration of the training so far, validations included, without updates that were lost in a crash."""
        return self.seconds_before + time.monotonic() - self.began

    def eval_model(self) -> VaswaniPreTrainedModel:
        """Returns the model to validate: the moving average, if there is one. All processes call it together."""
        if self.ema is not None:
            return cast(VaswaniPreTrainedModel, self.ema.module)
        if self.unsharded is not None:
            load_stored(self.unsharded, full_weights(self.wrapped))
        return self.unsharded or self.model

    def plain_model(self) -> VaswaniPreTrainedModel:
        """Returns the model to load an average into, after the last update: without adapters, and not sharded."""
        if self.adapters is not None:
            return cast(VaswaniPreTrainedModel, self.adapters.unload())
        return self.unsharded or self.model


# ---- Building ----------------------------------------------------------------------------------------------------


def build_model(run: Run) -> VaswaniPreTrainedModel:
    """
    Builds the network of a recipe before its first update, with the search settings of its evaluation section, and
    freezes parts of it.
    """
    model: VaswaniPreTrainedModel = model_class(run.recipe)(_config(run))
    if run.start is not None:
        load_stored(model, load_weights(run.folder / START))
        if model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(run.folder / START)
    # As `save_pretrained` does: a checkpoint must tell its class, too.
    model.config.architectures = [type(model).__name__]
    freeze = run.recipe.training.freeze
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in freeze)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"training.freeze ({', '.join(freeze)}) leaves nothing to train in this model: name less.")
    if run.accelerator.device.type == "cpu" and run.accelerator.mixed_precision == "bf16":
        # On a CPU, the backward pass of torch's fused attention takes ten times as long in bfloat16 as in float32.
        model.set_attn_implementation("eager")
        if not has_bfloat16(run.accelerator.device):
            logger.warning(
                "training.mixed_precision is bf16, but this CPU has no instructions for bfloat16 and is many times "
                "slower with it than with float32: use training.mixed_precision no."
            )
    if not isinstance(model, VaswaniForConditionalGeneration):
        return model
    model.generation_config.update(**search_of(run.recipe.evaluation))
    return model


def _config(run: Run) -> VaswaniConfig:
    """Returns the config of the model: that of the start, if there is one, with the recipe's dropout."""
    tokenizer, settings = run.tokenizer, asdict(run.recipe.model)
    if run.start is not None:
        config: VaswaniConfig = VaswaniConfig.from_pretrained(run.folder / START)
        config.update({name: settings[name] for name in FREE})
        config.language_pairs = config_of_task(run.recipe).get("language_pairs")
        # A model without a record may have seen longer sentences before.
        known, longest = config.longest_sentence, _longest_sentence(run)
        config.longest_sentence = None if known is None or longest is None else max(known, longest)
        return config
    start = getattr(tokenizer, f"{run.recipe.tokenizer.decoder_start}_token_id")
    return VaswaniConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id if start is None else start,
        longest_sentence=_longest_sentence(run),
        **config_of_task(run.recipe, run.labels),
        **settings,
    )


def _longest_sentence(run: Run) -> int | None:
    """Returns the tokens of the longest training source of a translation; `None` if a stream has them."""
    if run.recipe.task != "translation" or not isinstance(run.updates, EpochUpdates | RenewedUpdates):
        return None
    return run.updates.sampler.longest_source


def build_state(run: Run, resume: Resume | None) -> TrainState:
    """
    Builds model, optimizer and schedule, as at the start of a run or as in a checkpoint. All processes call it
    together.

    Args:
        run ([`Run`]): recipe, processes, tokenizer and text.
        resume ([`Resume`], *optional*): checkpoint to resume from.

    Returns:
        [`TrainState`].

    Raises:
        ValueError: the checkpoint is damaged, or was written with other text or another launch.
    """
    recipe, training, accelerator = run.recipe, run.recipe.training, run.accelerator
    model, adapters = build_network(run)
    _log_size(model, accelerator)
    if accelerator.process_index > 0:
        set_seed(recipe.seed, device_specific=True)
    # A process that has only its shard of the weights cannot translate on its own.
    unsharded = copy.deepcopy(model).to(accelerator.device) if accelerator.is_fsdp2 else None
    shard_tied_weights(accelerator, model)
    optimizer = optimizer_of(training, model)
    schedule = build_schedule(
        optimizer,
        training.schedule,
        recipe.model.d_model,
        training.warmup_steps,
        training.max_steps,
        training.learning_rate_factor,
    )
    wrapped, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    ema = None
    if training.ema_decay is not None:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(training.ema_decay))
    state = TrainState(model, wrapped, unsharded, ema, optimizer, schedule, 0, run.updates.start, adapters=adapters)
    if adapters is not None:
        # Accelerate saves and loads everything but the weights.
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
        accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    if resume is not None:
        _load_checkpoint(run, state, resume)
    recorded = None if resume is None else resume.progress.validations
    on_main_process(accelerator, forget_after, run.folder, state.step, training, recorded)
    if resume is not None:
        on_main_process(accelerator, remove_old_checkpoints, run.folder, training)
    return state


def optimizer_of(training: TrainingRecipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer of a recipe for the weights of a model that are trained."""
    return build_optimizer(
        training.optimizer,
        model.named_parameters(),
        training.peak_learning_rate or 1.0,
        **{key: getattr(training, key) for key in OPTIMIZERS[training.optimizer][1]},
    )


def build_network(run: Run) -> tuple[VaswaniPreTrainedModel, Any]:
    """Returns the model, checked and set up for training, and the model of PEFT around it if it has adapters."""
    training = run.recipe.training
    model = build_model(run)
    adapters = None
    if training.adapter is not None:
        adapters = attach_adapters(model, training.adapter, run.folder / START)
    if training.simcut is not None and isinstance(model, VaswaniForConditionalGeneration):
        check_padding(model)
    if training.gradient_checkpointing:
        # Renamed in transformers 5.23.
        enable = "activation_checkpointing_enable"
        getattr(model, enable if hasattr(model, enable) else "gradient_checkpointing_enable")()
    return model, adapters


def _log_size(model: VaswaniPreTrainedModel, accelerator: Accelerator) -> None:
    count = accelerator.num_processes
    trained, total = model.num_parameters(only_trainable=True), model.num_parameters()
    logger.info(
        f"{total:,} parameters{f' ({trained:,} of them trained)' if trained < total else ''}, "
        f"{count} process{'es' if count > 1 else ''} on {accelerator.device}"
    )


# ---- Sharding ----------------------------------------------------------------------------------------------------


def shard_tied_weights(accelerator: Accelerator, model: VaswaniPreTrainedModel) -> None:
    """
    Shards the embeddings and the output projection, those that share a matrix (Section 3.4) as one group.

    Accelerate, which shards the other modules later, would separate them. Does nothing without FSDP2.

    Args:
        accelerator (`accelerate.Accelerator`): the processes, with the settings of FSDP.
        model ([`VaswaniPreTrainedModel`]): the model, before Accelerate prepares it and before it has an
            optimizer.
    """
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    if accelerator.mixed_precision == "bf16":
        # Accelerate's own policy would also round the loss, and the sums of gradients, to bfloat16.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    modules = vocabulary_modules(model)
    for weight in {id(module.weight): module.weight for module in modules}.values():
        fully_shard(
            [module for module in modules if module.weight is weight],
            reshard_after_forward=False,
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            offload_policy=plugin.cpu_offload,
        )


def vocabulary_modules(model: VaswaniPreTrainedModel) -> list[torch.nn.Module]:
    """Returns the embeddings of the stacks that a model has, and its output unless it is a classifier."""
    stacks = (model.model.encoder, model.model.decoder)
    embeddings = [stack.embed_tokens for stack in stacks if stack is not None]
    return [*embeddings, *([model.lm_head] if hasattr(model, "lm_head") else [])]


def full_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """
    Returns the full weights of a model in each process, however it is wrapped or sharded. All processes call it
    together.

    Args:
        model (`torch.nn.Module`): the model, plain or as Accelerate prepared it.

    Returns:
        `dict[str, torch.Tensor]`: weights by name; a tied matrix once, under the first of its names.
    """
    named = extract_model_from_parallel(model, keep_torch_compile=False).named_parameters()
    return {name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach() for name, weight in named}


# ---- Saving and loading ------------------------------------------------------------------------------------------


def save_checkpoint(run: Run, state: TrainState) -> None:
    """
    Writes a checkpoint: model, optimizer, schedule, random numbers and position in the data, in a folder that
    `from_pretrained` loads as well. All processes call it together.

    Args:
        run ([`Run`]), state ([`TrainState`]): what to save.

    Raises:
        OSError: the checkpoint cannot be written; nothing of it is left then.
    """
    accelerator, folder = run.accelerator, checkpoint_folder(run.folder, state.step)
    with atomic_folder(folder, accelerator.is_main_process) as temporary:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
        # Shards are only for resuming; averaging and loading need full weights.
        weights = full_weights(state.wrapped) if accelerator.is_fsdp2 else None
        if accelerator.is_main_process:
            if state.adapters is not None:
                save_adapters(state.adapters, temporary)
            if weights is not None:
                save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
            if state.ema is not None:
                save_file(full_weights(state.ema.module), temporary / EMA_WEIGHTS, metadata={"format": "pt"})
            state.model.config.save_pretrained(temporary)
            if state.model.can_generate():
                state.model.generation_config.save_pretrained(temporary)
            run.tokenizer.save_pretrained(temporary)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            write_progress(temporary, _progress(run, state, temporary))
    on_main_process(accelerator, remove_old_checkpoints, run.folder, run.recipe.training)
    # No process may read the folder before the main process has renamed it.
    accelerator.wait_for_everyone()


def _progress(run: Run, state: TrainState, folder: Path) -> Progress:
    """Makes the record of a checkpoint, after all its other files have been written."""
    return Progress(
        step=state.step,
        position=state.position,
        data=run.fingerprint,
        launch=launch_of(run),
        nonfinite=state.nonfinite,
        seconds=round(state.seconds, 1),
        files=digests(folder),
        state=_digests_of_training(folder, state.ema is not None) or None,
        recipe=unchangeable(run.recipe),
        validations=read_validations(run.folder),
        start=None if state.adapters is None else run.start,
    )


def _digests_of_training(folder: Path, has_average: bool) -> dict[str, str]:
    """Returns the SHA-256 of the weights that a training goes on with, where they are not those of its model."""
    paths = [*([folder / WEIGHTS] if has_average else []), *sorted(folder.glob(f"{SHARDS}*/*"))]
    return {str(path.relative_to(folder)): digest(path) for path in paths}


def _load_checkpoint(run: Run, state: TrainState, resume: Resume) -> None:
    """Restores the state of a training from a checkpoint."""
    checkpoint, progress = resume.checkpoint, resume.progress
    try:
        # Accelerate silently continues if it cannot read the random numbers, so they are read here first.
        load(checkpoint / f"random_states_{run.accelerator.process_index}.pkl")
        run.accelerator.load_state(str(checkpoint))
        if state.adapters is not None:
            load_adapters(state.adapters, checkpoint)
    # A damaged pickle may raise anything, and a damaged shard an error that is no `Exception`.
    except (Exception, CheckpointException) as error:
        raise ValueError(
            f"{checkpoint} could not be loaded: {error}. If it is damaged, delete it to resume from the one before."
        ) from error
    if state.ema is not None:
        load_stored(state.ema.module, load_weights(checkpoint))
        state.ema.n_averaged.fill_(progress.step)
    state.step, state.position, state.nonfinite = progress.step, progress.position, progress.nonfinite
    state.seconds_before = progress.seconds
