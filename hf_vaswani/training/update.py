"""One update: the passes over its batches, and the optimizer's step, for which a GPU need not wait for the host."""

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from ..captured import CapturedStep, GraphPool
from ..data.batching import to_device
from ..extras import extra
from ..interruption import Interruption
from ..model.heads_vaswani import VaswaniClassifier
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..recipe import TrainingRecipe

with extra("train"):
    from accelerate import Accelerator


logger = logging.getLogger(__name__)

# Shapes of batches whose graphs are kept, the last ones that occurred. Small batches of documentation have 100.
MAX_SHAPES = 128


class Outcome(NamedTuple):
    """
    The outcome of one update, the same in every process.

    Attributes:
        loss (`float`): smoothed loss in nats per target token.
        tokens (`int`): target tokens.
        gradient_norm (`float`): norm of the gradient before clipping.
        finite (`bool`): True if loss and gradient are finite; otherwise the update was skipped.
        stop (`bool`): True if some process was asked to stop.
        save (`bool`): True if the main process asked for a checkpoint.
    """

    loss: float
    tokens: int
    gradient_norm: float
    finite: bool
    stop: bool
    save: bool = False


class Launched:
    """
    An update whose outcome may still be computed.

    Args:
        values (`torch.Tensor` of shape `(6,)`): the fields of its [`Outcome`].
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.event = values, None
        if values.device.type == "cuda":
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def outcome(self) -> Outcome:
        """Waits for the outcome."""
        if self.event is not None:
            self.event.synchronize()
        loss, tokens, norm, finite, stop, save = self.values.tolist()
        return Outcome(loss, int(tokens), norm, finite > 0, stop > 0, save > 0)


class Updater:
    """
    Makes the updates of a training.

    On a GPU, the device decides whether an update is skipped, and what follows the backward pass is a CUDA graph: the
    host never waits, and may read the outcome while the next update is computed. With float16, whose scaler reads from
    the device, and with FSDP, the host decides, as it does on other devices. In a single process, the passes of a
    model of both stacks over batches of one shape are a graph, too.

    Args:
        accelerator (`accelerate.Accelerator`), model (`torch.nn.Module`), optimizer (`torch.optim.Optimizer`): as
            Accelerate prepared them.
        training ([`TrainingRecipe`]): the section `training` of the recipe.
        average (`AveragedModel`, *optional*): moving average of the model's weights.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        training: TrainingRecipe,
        average: AveragedModel | None = None,
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.training, self.average = training, average
        device = accelerator.device
        self.runs_ahead = device.type == "cuda" and accelerator.scaler is None and not accelerator.is_fsdp2
        self.epsilon = training.label_smoothing
        plain = self.plain = accelerator.unwrap_model(model, keep_torch_compile=False)
        if training.label_smoothing_over == "all":
            size = plain.config.num_labels if isinstance(plain, VaswaniClassifier) else plain.config.vocab_size
            self.epsilon = _epsilon_without_target(self.epsilon, size)
        # Others read from the device whether there is padding.
        self.reads_no_mask = (
            isinstance(plain, VaswaniForConditionalGeneration) and plain.config._attn_implementation == "sdpa"
        )
        # A compiler makes graphs itself, and checkpointing looks at the state of the random numbers.
        is_alone = not (training.compile or training.gradient_checkpointing) and accelerator.num_processes == 1
        self.captures_passes = self.runs_ahead and self.reads_no_mask and is_alone
        # The tensors in fixed places that captured steps read and write.
        self.loss, self.norm, self.skipped = (torch.zeros((), device=device) for _ in range(3))
        self.tokens, self.texts = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))
        self.rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self.places: list[int] = []  # of the gradients, when steps were captured
        self.pool = GraphPool(device) if self.runs_ahead else None
        self.graphs = OrderedDict[Any, tuple[dict[str, torch.Tensor], CapturedStep]]()  # by the shapes of a batch

    def __call__(
        self, batches: list[dict[str, Any]], interruption: Interruption, save: bool = False, is_first: bool = False
    ) -> Launched:
        """
        Makes one step of the optimizer from this process's batches of an update. All processes call it together.

        Args:
            batches (`list[dict[str, torch.Tensor]]`): arguments of the model.
            interruption ([`Interruption`]): the signal that asks all processes to stop.
            save (`bool`): whether this process asks all processes for a checkpoint.
            is_first (`bool`): whether it is the first update of the run: the average starts as a copy of its weights.
        """
        if self.runs_ahead and self._places() != self.places:
            self.graphs.clear()
        loss, tokens = self._gradients(batches)
        asked = [loss.new_full((1,), float(each)) for each in (interruption.signal is not None, save)]
        loss, *asked = self.accelerator.reduce(torch.cat([loss[None], *asked]), "sum")
        if self.runs_ahead:
            self._step_on_device(loss, is_first)
            return Launched(torch.stack([loss, tokens.to(loss), self.norm, 1 - self.skipped, *asked]))
        norm = self._clip()
        values = torch.stack([loss, tokens.to(loss), norm.to(loss), torch.zeros_like(loss), *asked]).cpu()
        values[3] = self._step(values[0].item(), values[2].item(), is_first)
        return Launched(values)

    def _gradients(self, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds up the gradients of this process; returns its share of the loss, and the tokens of all processes."""
        accelerator, device = self.accelerator, self.accelerator.device
        if self.runs_ahead:
            batches = [self._ready(batch) for batch in batches]
        batches = to_device(batches, device)
        # The loss is per target token of the whole update: in a mean of batch means, a token of a small batch would
        # weigh more than one of a large batch. The same holds for the texts of a second objective.
        names = ("labels", "next_sentence_label")
        counts = [_count_labels([batch[name] for batch in batches if name in batch], device) for name in names]
        tokens, texts = accelerator.reduce(torch.stack(counts), "sum")
        self.loss.zero_()
        self.tokens.copy_(tokens)
        self.texts.copy_(texts)
        if not (self.captures_passes and self._replay_all(batches)):
            for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
                with accelerator.no_sync(self.model) if left else nullcontext():
                    self._pass(batch)
        return self.loss.clone(), tokens

    def _pass(self, batch: dict[str, torch.Tensor]) -> None:
        """Adds the gradients and the loss of a batch to those of the update."""
        more: dict[str, Any] = {"num_texts_in_batch": self.texts} if "next_sentence_label" in batch else {}
        more |= {"epsilon_ls": self.epsilon, "num_items_in_batch": self.tokens, "loss_only": True}
        share = self.model(**batch, **more).loss
        # Gradients are averaged over the processes, but each process has its share of one sum.
        self.accelerator.backward(share * self.accelerator.num_processes)
        self.loss += share.detach()

    def _replay_all(self, batches: list[dict[str, torch.Tensor]]) -> bool:
        """Makes the passes of all batches by graphs; returns False, with nothing done, if memory has run out."""
        try:
            for batch in batches:
                self._replay(batch) if self.captures_passes else self._pass(batch)
            if not self.captures_passes:
                self.graphs.clear()
            return True
        except torch.OutOfMemoryError:
            self.captures_passes = False
        # Here, without the error, nothing holds the tensors of the passes any more.
        logger.warning("Passes run without CUDA graphs from now on, because memory has run out")
        self.graphs.clear()
        torch.cuda.empty_cache()
        self.loss.zero_()
        for each in self.plain.parameters():
            if each.grad is not None:
                each.grad.zero_()
        return False

    def _replay(self, batch: dict[str, torch.Tensor]) -> None:
        """Makes the passes of a batch by the graph of its shape."""
        key = tuple((name, part.shape) for name, part in batch.items())
        if key not in self.graphs:
            inputs = {name: torch.empty_like(part) for name, part in batch.items()}
            step = CapturedStep(partial(self._pass, inputs), self.accelerator.device, "A pass", self.pool)
            self.graphs[key] = inputs, step
            if len(self.graphs) > MAX_SHAPES:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        inputs, step = self.graphs[key]
        for name, part in batch.items():
            inputs[name].copy_(part)
        step()
        # If one shape cannot be captured, none can.
        self.captures_passes = not step.is_eager

    def _ready(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        Makes the mask of a batch such that transformers need not read from the GPU whether there is padding.
        """
        if self.reads_no_mask:
            mask = batch.pop("attention_mask") != 0
            if not mask.all():
                batch["attention_mask"] = mask[:, None, None]
        return batch

    def _clip(self) -> torch.Tensor:
        """Clips the gradients, and returns their norm."""
        # An infinite bound clips nothing, but still yields the norm.
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.training.clip_norm or math.inf)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _step(self, loss: float, norm: float, is_first: bool) -> bool:
        """Makes the step, or skips it; returns whether the update is finite."""
        scaler = self.accelerator.scaler
        # In fp16, an infinite gradient is at first left to the scaler, which skips the step itself and scales less.
        scaled = scaler is not None and not math.isfinite(norm) and scaler.get_scale() > 1
        finite = math.isfinite(loss) and (math.isfinite(norm) or scaled)
        if finite:
            self.optimizer.step()
        elif scaler is not None:
            # Without a step, the scaler must be told that this update is over.
            scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None and (finite or is_first):
            self.average.update_parameters(self.plain)
        return finite

    def _step_on_device(self, loss: torch.Tensor, is_first: bool) -> None:
        """Makes the step, captured for as long as the gradients stay where they are."""
        if (places := self._places()) != self.places:
            self.places = places
            device, name = self.accelerator.device, "The optimizer's step"
            self.captured = CapturedStep(self._finish, device, name, self.pool)
        self.loss.copy_(loss)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self.captured()
        if self.average is not None and is_first:
            copies = zip(self.average.parameters(), self.plain.parameters(), strict=True)
            for averaged, weight in copies:
                averaged.data.copy_(weight.data)

    def _places(self) -> list[int]:
        """Returns the addresses of the gradients."""
        return [0 if each.grad is None else each.grad.data_ptr() for each in self.plain.parameters()]

    @torch.no_grad()
    def _finish(self) -> None:
        """Clips the gradients, makes the step unless loss or gradients are not finite, and sets the gradients to 0."""
        self.norm.copy_(self._clip())
        self.skipped.copy_(~(self.loss.isfinite() & self.norm.isfinite()))
        with _rates_on_device(self.optimizer, self.rates, self.skipped):
            self.optimizer.step()
        if self.average is not None:
            averaged = [each.data for each in self.average.parameters()]
            moves = torch._foreach_sub([each.data for each in self.plain.parameters()], averaged)
            # A skipped update does not move the average.
            torch._foreach_mul_(moves, (1 - (self.training.ema_decay or 0.0)) * (1 - self.skipped))
            torch._foreach_add_(averaged, moves)
        torch._foreach_zero_([each.grad for each in self.plain.parameters() if each.grad is not None])


@contextmanager
def _rates_on_device(optimizer: Any, rates: list[torch.Tensor], skipped: torch.Tensor) -> Iterator[None]:
    """
    Gives an optimizer its learning rates, and what it skips, as tensors for the length of a block: a captured step
    would repeat numbers. Otherwise its groups have numbers, which schedules set and checkpoints contain.
    """
    plain = optimizer.optimizer
    parts, groups = getattr(plain, "parts", (plain,)), plain.param_groups
    before = [dict(group) for group in groups]
    for part in parts:
        part.found_inf = skipped
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = torch.cuda.is_current_stream_capturing()
    try:
        yield
    finally:
        for part in parts:
            del part.found_inf
        for group, values in zip(groups, before, strict=True):
            group.update(values)


def _count_labels(labels: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Counts the labels of several batches on a device."""
    counts = [(each != -100).sum() for each in labels]
    return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.long, device=device)


def _epsilon_without_target(epsilon: float, vocab_size: int) -> float:
    """Returns what is left of an epsilon spread over all V tokens (or labels) without the target's, epsilon / V."""
    return epsilon * (vocab_size - 1) / vocab_size
