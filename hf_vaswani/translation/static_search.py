"""Greedy search, sampling and beam search on a GPU, where each step is one CUDA graph.

The search of `model/search_vaswani.py` gives its steps the size of what is left of them: right for a processor. A GPU
waits for the hundreds of kernels that a step starts, unless they are captured, and a graph is of one size. So here
**everything has fixed places**, in buffers of few sizes:

- Rows are a power of two. Those behind the sentences are finished from the start.
- Keys and values have room for 64, 128, 256, ... positions. A step writes at an index that is on the GPU, and a mask
  over the whole width says which positions a hypothesis sees. Sources have a multiple of 32 tokens.
- When the room is used up, finished sentences leave, positions that no hypothesis sees are dropped, and what remains
  goes on in buffers of the size that it needs.
- The first step reads the last token of the prompt with all hypotheses, of which one counts, so that all steps are the
  same.

Which candidates finish and run on is decided by the code of `search_vaswani` and `rules_vaswani`.
"""

import copy
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig

from ..captured import CapturedStep, GraphPool, are_graphs_wanted
from ..model.cache_vaswani import EnsembleDecoder, is_as_written, submodules
from ..model.kernels_vaswani import LINEAR, Substitutes
from ..model.rules_vaswani import BeamSearchRules, search_call, special_ids
from ..model.search_vaswani import (
    Alive,
    FastSearchInputs,
    Step,
    as_output,
    beam_search,
    is_of_transformers,
    read_back,
    single_search,
    split,
)
from .budgets import OUT_OF_MEMORY
from .static_steps import STATIC, BeamStep, Shape, SingleStep, StaticStep, alive_from

logger = logging.getLogger(__name__)

# Positions for which the buffers of keys and values have room: this many, or twice as many, and so on.
MIN_CAPACITY = 64
# Steps for which there must be room when a search moves into buffers, unless it has fewer left.
MIN_STEPS = 32
# Sources are padded to a multiple of this number of tokens.
SOURCE_MULTIPLE = 32
# The number of unfinished sentences is sent to the CPU after every so many steps, and read one step later.
STEPS_PER_READ = 2
# Buffers and graphs that are kept: at most so many for a model, and for all at most this part of the GPU's memory.
MAX_KEPT = 48
MAX_MEMORY = 1 / 4
# Least share of equal translations when the first search of a kind is compared with that without graphs.
MIN_EQUAL = 0.9
# Their attributes that a graph does not depend on: such lengths, and what one makes in its first call.
NOT_CAPTURED = {"max_length", "begin_index", "min_length", "prompt_length_to_skip", "min_new_tokens"}
NOT_CAPTURED |= {"length_1_bias", "multi_token_biases", "prepared_bias_variables"}
# Lists of tokens, which torch sorts if they are long. For that it reads from the device.
SUPPRESSED, MAX_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens"), 30
# Settings that a captured step has read.
SETTINGS = (
    *("num_beams", "do_sample", "num_return_sequences"),
    *("length_penalty", "length_penalty_type", "early_stopping", "finish_candidates"),
)


# ---- Steps that are kept for later searches ----------------------------------------------------------------------


class KeptSteps:
    """
    Steps of a model with their graphs, the last one that was used at the end. They belong to the weights and modules
    that they were made with.
    """

    def __init__(self, identity: object) -> None:
        self.identity = identity
        self.steps: OrderedDict[object, tuple[StaticStep, CapturedStep]] = OrderedDict()
        self.failed: set[object] = set()  # keys whose capture failed
        # Rounded weights and biases of linear layers, by number format.
        self.rounded: dict[torch.dtype, dict[Any, tuple[torch.Tensor, torch.Tensor | None]]] = {}

    def take(self, key: object, build: Any, device: torch.device) -> tuple[StaticStep, CapturedStep]:
        """Returns the step of a key, building it if necessary, and drops the oldest ones if there are too many."""
        for each, (_, captured) in self.steps.items():
            if captured.graph is None and captured.is_eager:
                self.failed.add(each)
        if key not in self.steps:
            step = build()
            captured = CapturedStep(step.run, device, "A step of the search", pool_of(device))
            captured.is_eager |= key in self.failed
            self.steps[key] = step, captured
        self.steps.move_to_end(key)
        # Not the last two: a search moves from one to the other.
        while len(self.steps) > 2 and (
            len(self.steps) > MAX_KEPT or sum(each.memory() for each in KEPT.values()) > memory_limit(device)
        ):
            self.steps.popitem(last=False)
        return self.steps[key]

    def products(self, stack: Any, dtype: torch.dtype) -> dict[Any, Callable[[torch.Tensor], torch.Tensor]]:
        """
        Returns products for the linear layers of a stack by weights that are rounded now, to the type of autocast: a
        graph would round them in each step.
        """
        if dtype not in self.rounded:
            named = (each for module in stack.modules() for each in module._modules.items())
            layers: list[Any] = [layer for name, layer in named if name in LINEAR]
            self.rounded[dtype] = {
                layer: (torch.empty_like(layer.weight, dtype=dtype), as_empty(layer.bias, dtype)) for layer in layers
            }
        rounded = self.rounded[dtype]
        copies = [each for pair in rounded.values() for each in pair if each is not None]
        weights = [each for layer in rounded for each in (layer.weight, layer.bias) if each is not None]
        torch._foreach_copy_(copies, weights)
        return {layer: partial(multiply, weight=weight, bias=bias) for layer, (weight, bias) in rounded.items()}

    def memory(self) -> int:
        """Returns the number of bytes of the buffers of all steps."""
        return sum(step.memory for step, _ in self.steps.values())


def as_empty(weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns memory for a weight in another type."""
    return None if weight is None else torch.empty_like(weight, dtype=dtype)


def multiply(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes a linear layer; autocast rounds the states."""
    return torch.nn.functional.linear(states, weight, bias)


# By model, and as long as it exists.
KEPT: WeakKeyDictionary[Any, KeptSteps] = WeakKeyDictionary()
# The rows of the smallest batch of a model for whose buffers the memory was too small.
TOO_LARGE: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# One search at a time uses the steps, and the memory that their graphs share.
LOCK = threading.Lock()
# Kinds of search, in float32 alone or not, whose first one that replayed graphs found what others find; and those that
# run without graphs from now on.
PROVED: set[tuple[str, bool]] = set()
TURNED_OFF: set[str] = set()


def release(model: Any) -> None:
    """Frees the memory of the graphs of a model, which later searches make again."""
    with LOCK:
        KEPT.pop(model, None)


@cache
def pool_of(device: torch.device) -> GraphPool | None:
    """Returns the memory that the graphs of a device share."""
    return GraphPool(device) if device.type == "cuda" else None


def memory_limit(device: torch.device) -> float:
    """Returns the number of bytes that the buffers of all steps may have."""
    if device.type != "cuda":
        return float("inf")
    return MAX_MEMORY * torch.cuda.get_device_properties(device).total_memory


def identity_of(model: Any) -> object:
    """Returns what a graph depends on: the modules that it was captured from, and where their weights are."""
    modules = [*submodules(model.model.decoder), *submodules(model.lm_head)]
    weights = (each for module in modules for each in (*module._parameters.values(), *module._buffers.values()))
    places = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in weights if each is not None]
    attentions = [module.config._attn_implementation for module in modules if "layer_idx" in vars(module)]
    return [(id(module), type(module)) for module in modules], places, attentions


def settings_of(inputs: FastSearchInputs, generation_config: GenerationConfig, device: torch.device) -> object:
    """Returns what else a graph depends on, beside its shape."""
    processors = [
        (
            type(processor).__name__,
            [(name, as_key(vars(processor)[name])) for name in sorted({*vars(processor)} - NOT_CAPTURED)],
        )
        for processor in inputs.logits_processor
    ]
    ends, pad = special_ids(generation_config)
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    of_torch = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), autocast
    settings = [getattr(generation_config, name) for name in SETTINGS]
    return str((settings, inputs.num_candidates, ends, pad, processors, of_torch, device))


def as_key(value: Any) -> Any:
    """Returns a value of which equal ones have the same text."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


# ---- The search --------------------------------------------------------------------------------------------------


class LateNumber:
    """A number on a GPU, of which the CPU gets a copy while the GPU works on."""

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.copy = torch.ones((), dtype=torch.long, device="cpu", pin_memory=is_gpu)
        self.event = torch.cuda.Event() if is_gpu else None

    def send(self, number: torch.Tensor) -> None:
        """Orders a copy."""
        self.copy.copy_(number, non_blocking=True)
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(number.device))

    def read(self) -> int:
        """Returns the number that was sent last, once it is there."""
        if self.event is not None:
            self.event.synchronize()
        return int(self.copy)


class StaticSearch:
    """One search after prompts of shape `(rows, prompt)`, in steps that are captured, replayed, or run as they are."""

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        inputs: FastSearchInputs,
        captures: bool = True,
    ) -> None:
        self.inputs, self.settings, self.captures = inputs, generation_config, captures
        self.device, self.beams = input_ids.device, generation_config.num_beams
        self.prompt = input_ids.view(-1, self.beams, input_ids.shape[1])  # [batch, beams, prompt]
        batch, _, length = self.prompt.shape
        max_lengths = search_call().max_lengths.to(self.device) - length
        self.max_lengths = max_lengths.repeat_interleave(batch // len(max_lengths))
        self.steps_left = max(1, int(self.max_lengths.max()))
        # Sampling keeps its rows, neither padded nor reduced: one random draw serves all of them.
        self.keeps_rows = bool(generation_config.do_sample)
        self.sentences = batch  # in the first rows of a step
        self.has_replayed = False
        self.error: Exception | None = None  # of the caller's, by which a clock has ended the search
        # For some steps, the indices of their sentences in the batch, and what they recorded.
        self.history: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        self.done: list[dict[str, torch.Tensor]] = []
        identity = identity_of(model)
        kept = KEPT.get(model)
        if kept is None or kept.identity != identity:
            kept = KEPT[model] = KeptSteps(identity)
        self.kept, self.key = kept, settings_of(inputs, generation_config, self.device)
        decoder = inputs.decoder.decoders[0]
        self.functions: Mapping[Any, Any] = decoder.functions
        # On a CPU, a search without graphs has such products, too.
        if torch.is_autocast_enabled(self.device.type) and not decoder.are_all_plain:
            products = kept.products(decoder.decoder.layers, torch.get_autocast_dtype(self.device.type))
            self.functions = {**products, **decoder.functions}

    def step_for(self, decoder: EnsembleDecoder, used: int) -> tuple[StaticStep, CapturedStep]:
        """Returns a step for the sentences of a decoder, with room behind positions that are used."""
        needed = used + self.beams * min(MIN_STEPS, self.steps_left)
        capacity = MIN_CAPACITY
        while capacity < needed:
            capacity *= 2
        like = decoder.decoders[0]
        width = 0
        if sources := like.cache.cross_attention_cache.layers:
            width = -(-sources[0].keys.shape[2] // SOURCE_MULTIPLE) * SOURCE_MULTIPLE
        rows = self.sentences if self.keeps_rows else 1 << (self.sentences - 1).bit_length()
        shape = Shape(rows, capacity, width)
        kind = SingleStep if self.beams == 1 else BeamStep
        # Number formats of keys and values, and of everything else.
        of_keys = like.cache.layers[0][0] if like.cache.layers else sources[0].keys
        formats = of_keys.dtype, like.cache.mask.dtype
        key = self.key, shape, formats
        step, captured = self.kept.take(key, lambda: kind(self.inputs, self.settings, decoder, shape), self.device)
        step.one.functions = dict(self.functions)
        return step, captured

    def start(self) -> tuple[StaticStep, CapturedStep]:
        """Moves the prompts into the buffers of a step, but for their last tokens, which the first step reads."""
        decoder, unread = self.inputs.decoder.decoders[0], self.inputs.decoder.unread
        while len(unread) > 1:
            self.inputs.decoder.read(unread.pop(0))
        if unread:
            self.read_source(decoder)
        used = decoder.cache.used - (not unread)
        step, captured = self.step_for(self.inputs.decoder, used)
        every = torch.arange(self.sentences, device=self.device)
        places = torch.arange(used, device=self.device).expand(self.sentences, -1)
        mine = step.one
        mine.load(decoder, every, places)
        if not unread:
            mine.lengths.sub_(1).clamp_(min=0)
        state = {"numbers": every, "unfinished": torch.ones_like(every, dtype=torch.bool)}
        state |= {"tokens": self.prompt[:, :, -1], "max_lengths": self.max_lengths}
        if self.beams > 1:
            alive = Alive.at_the_start(self.prompt)
            names = ("can_improve", "running_scores", "scores", "is_finished", "end_positions")
            state |= {name: getattr(alive, name) for name in names} | {"max_lengths": self.max_lengths[:, None]}
        length, zero = self.prompt.shape[2], torch.zeros_like(step.length)
        ranges = [
            (0, 0) if (acts_at := STATIC[type(each).__name__]) is None else acts_at(each)
            for each in self.inputs.logits_processor
        ]
        lengths = torch.tensor(ranges, dtype=torch.long, device=self.device).view_as(step.lengths) - length
        step.load(state, zero, zero, lengths)
        self.room = (step.shape.capacity - used) // self.beams
        return step, captured

    def read_source(self, decoder: Any) -> None:
        """Computes keys and values of the source, if no token of the prompt has been read."""
        with Substitutes(self.functions):
            for layer in decoder.decoder.layers:
                if not decoder.cache.is_updated.get(layer.cross_attn.layer_idx):
                    layer.cross_attn.keys_and_values(None, decoder.source, decoder.cache, {})

    def move(self, step: StaticStep) -> tuple[StaticStep, CapturedStep] | None:
        """Moves what is unfinished into the buffers of another step, or within these; returns `None` at the end."""
        cache = step.one.cache
        every, unfinished = torch.arange(step.shape.rows, device=self.device), step.rows["unfinished"]
        seen = cache.seen(every)
        counts = seen.sum(dim=1)
        counts = counts if self.keeps_rows else counts.where(unfinished, 0)
        remaining, used = torch.stack((step.remaining, counts.max())).tolist()
        if remaining == 0:
            return None
        kept = every[: self.sentences]
        if not self.keeps_rows:
            kept, left = split(unfinished, remaining)
            # Behind the finished sentences are the rows without one.
            self.done.append(step.state(left[: self.sentences - remaining]))
            self.sentences = remaining
        places = seen.index_select(0, kept).to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :used]
        state, shared = step.state(kept), (step.length, step.needed, step.lengths)
        next_step, captured = self.step_for(step.decoder, used)
        next_step.one.load(step.one, kept, places)
        next_step.load(state, *shared)
        self.room = (next_step.shape.capacity - used) // self.beams
        return next_step, captured

    def take_steps(self, step: StaticStep, captured: CapturedStep) -> bool:
        """Takes steps until there is no more room, and notes what they record; returns whether the search is over."""
        late, over, count = LateNumber(self.device), False, 0
        take = captured if self.captures else step.run
        while not over and count < min(self.room, self.steps_left):
            try:
                over = self.inputs.is_over()
            except Exception as error:
                self.error = error
                raise
            if over:
                step.is_over.fill_(True)
            take()
            count += 1
            if count % STEPS_PER_READ == 0:
                late.send(step.remaining)
            elif count > STEPS_PER_READ and count % STEPS_PER_READ == 1:
                over |= late.read() == 0
        self.has_replayed |= captured.graph is not None
        self.steps_left -= count
        numbers = step.rows["numbers"][: self.sentences].clone()
        self.history.append((numbers, {name: each[:count].clone() for name, each in step.recorded.items()}))
        return over or self.steps_left == 0

    def run(self) -> Any:
        """Searches, and returns what [`beam_search`] and [`single_search`] return."""
        step, captured = self.start()
        while not self.take_steps(step, captured):
            moved = self.move(step)
            if moved is None:
                break
            step, captured = moved
        every = torch.arange(self.sentences, device=self.device)
        return self.best_sequences(step.state(every)) if self.beams > 1 else self.sequences(int(step.needed))

    def best_sequences(self, state: dict[str, torch.Tensor]) -> Any:
        """Returns the results of beam search, which are found on the CPU: its many small operations start faster."""
        batch, steps = torch.arange(len(self.prompt), device="cpu"), list[Step]()
        for numbers, recorded in self.history:
            rows = torch.zeros_like(batch).index_copy(0, numbers.cpu(), batch[: len(numbers)])
            # In one tensor, which is copied once.
            tokens, parents, chosen = (
                torch.cat([*recorded.values()], dim=2)
                .cpu()
                .split([each.shape[2] for each in recorded.values()], dim=2)
            )
            steps += [Step(rows, *each) for each in zip(tokens, parents, chosen, strict=True)]
        whole = {name: torch.cat([part[name] for part in (*self.done, state)]) for name in state}
        whole |= {name: whole[name].cpu() for name in ("numbers", "end_positions", "scores", "is_finished")}
        found = read_back([alive_from(whole)], steps, self.prompt.cpu(), self.settings)
        return as_output(self.inputs, self.settings, **{name: each.to(self.device) for name, each in found.items()})

    def sequences(self, needed: int) -> Any:
        """Returns the results of greedy search and sampling, of as many steps as were needed."""
        start = self.prompt.shape[2]
        pad, steps = special_ids(self.settings)[1] or 0, sum(len(each["tokens"]) for _, each in self.history)
        sequences = torch.nn.functional.pad(self.prompt[:, 0], (0, steps), value=pad)
        for numbers, recorded in self.history:
            tokens = recorded["tokens"][:, : len(numbers)].T  # [sentences, steps]
            sequences[numbers, start : start + tokens.shape[1]] = tokens
            start += tokens.shape[1]
        return as_output(self.inputs, self.settings, sequences=sequences[:, : self.prompt.shape[2] + needed])


def is_static(model: Any, inputs: FastSearchInputs) -> bool:
    """Returns whether a call of `generate()` can be searched in steps that are all the same."""
    call = search_call()
    modules = (*submodules(model.model.decoder), *submodules(model.lm_head))
    return (
        are_graphs_wanted()
        and not call.ensemble
        and inputs.entries is None
        and all(
            is_of_transformers(processor, {*STATIC})
            # A bias of several tokens looks at those before the last.
            and all(len(tokens) == 1 for tokens in getattr(processor, "sequence_bias", ()))
            and all(len(getattr(processor, name, ())) <= MAX_SUPPRESSED for name in SUPPRESSED)
            for processor in inputs.logits_processor
        )
        # Anything else may decide in Python.
        and all(is_as_written(module) and module._compiled_call_impl is None for module in modules)
    )


@contextmanager
def in_fixed_places(device: torch.device) -> Iterator[None]:
    """The context of a search whose tensors are written again by later searches, in whatever mode these are."""
    with ExitStack() as contexts:
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.no_grad())
        if device.type == "cuda":
            contexts.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            # A graph would keep the places of rounded weights, which are freed with the context of the caller.
            dtype = torch.get_autocast_dtype(device.type)
            contexts.enter_context(torch.autocast(device.type, dtype, cache_enabled=False))
        yield


def static_search(
    model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, inputs: FastSearchInputs
) -> Any:
    """
    Searches in captured steps, and returns what [`beam_search`] and [`single_search`] return; `None` if the call is
    left to them. The first search of a kind that replays graphs is made again: its graphs must compute to the last bit
    what was captured, and in float32 find what is found without graphs, except where rounding chooses another token,
    in one sentence of ten. Otherwise a warning says so, and the process makes no more searches of this kind.
    """
    kind = "beam search" if generation_config.num_beams > 1 else "greedy search"
    kind = "sampling" if generation_config.do_sample else kind
    if kind in TURNED_OFF or len(input_ids) >= TOO_LARGE.get(model, math.inf) or not is_static(model, inputs):
        return None
    with LOCK:
        state = random_state(input_ids.device)
        found = try_search(kind, model, input_ids, generation_config, inputs)
        if found is None:
            # The search without graphs then draws the same numbers as if this one had not run.
            set_random_state(input_ids.device, state)
        return found


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of the random numbers of a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets it."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def try_search(
    kind: str, model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, inputs: FastSearchInputs
) -> Any:
    """Searches and compares, see [`static_search`]; returns `None` if the decoder of the inputs is still to search."""
    search = None
    try:
        with in_fixed_places(input_ids.device):
            search = StaticSearch(model, input_ids, generation_config, inputs)
            found = search.run()
            if (kind, is_exact(inputs)) in PROVED or not search.has_replayed:
                return found
            again = compare_graphs(model, input_ids, generation_config, inputs)
    # On a GPU, and with its libraries, errors of many kinds are possible.
    except Exception as error:
        if search is not None and search.error is error:
            raise
        if OUT_OF_MEMORY.search(str(error)):
            KEPT.clear()
            TOO_LARGE[model] = len(input_ids)
        else:
            turn_off(kind, f"it failed: {type(error).__name__}: {error}")
        return None
    if again is None:
        turn_off(kind, "its graphs did not compute what was captured.")
        return None
    if kind != "sampling" and is_exact(inputs):
        expected = search_without_graphs(input_ids, generation_config, inputs)
        if share_of_equal(again, expected) < MIN_EQUAL:
            turn_off(kind, "it found other tokens than without.")
            return expected if generation_config.return_dict_in_generate else expected.sequences
    PROVED.add((kind, is_exact(inputs)))
    return found


def turn_off(kind: str, reason: str) -> None:
    """Leaves all further searches of a kind to [`beam_search`] and [`single_search`], and says why."""
    TURNED_OFF.add(kind)
    logger.warning(f"{kind.capitalize()} runs without CUDA graphs from now on, because {reason}")


def with_scores(generation_config: GenerationConfig) -> GenerationConfig:
    """Returns settings of the same search, which also has scores."""
    settings = copy.copy(generation_config)
    settings.return_dict_in_generate = True
    return settings


def compare_graphs(
    model: Any, input_ids: torch.Tensor, generation_config: GenerationConfig, inputs: FastSearchInputs
) -> Any:
    """Searches by graphs, and without; returns the results if they are equal to the last bit, or else `None`."""
    device, settings, results = input_ids.device, with_scores(generation_config), list[Any]()
    # A limit on time might end each of them elsewhere.
    inputs, state = replace(inputs, clocks=()), random_state(device)
    for captures in (True, False):
        set_random_state(device, state)
        results.append(StaticSearch(model, input_ids, settings, inputs, captures).run())
    captured, eager = results
    is_equal = captured.sequences.equal(eager.sequences)
    if settings.num_beams > 1:
        is_equal &= captured.sequences_scores.equal(eager.sequences_scores)
    return captured if is_equal else None


def is_exact(inputs: FastSearchInputs) -> bool:
    """Returns whether a search computes in float32 alone."""
    mask = inputs.decoder.decoders[0].cache.mask
    return mask.dtype == torch.float32 and not torch.is_autocast_enabled(mask.device.type)


def search_without_graphs(
    input_ids: torch.Tensor, generation_config: GenerationConfig, inputs: FastSearchInputs
) -> Any:
    """Searches as without this module, in the mode of the caller; nothing else can use the decoder afterwards."""
    inputs, settings = replace(inputs, clocks=()), with_scores(generation_config)
    if settings.num_beams == 1:
        return single_search(input_ids, settings, inputs)
    return beam_search(input_ids, settings, inputs, BeamSearchRules.from_config(settings, input_ids))


def share_of_equal(found: Any, expected: Any) -> float:
    """Returns the share of rows with equal tokens, or with scores that differ by rounding alone."""
    width = max(found.sequences.shape[1], expected.sequences.shape[1])
    one, other = (
        torch.nn.functional.pad(each.sequences, (0, width - each.sequences.shape[1]), value=-1)
        for each in (found, expected)
    )
    equal = (one == other).all(dim=1)
    if getattr(found, "sequences_scores", None) is not None:
        equal |= torch.isclose(found.sequences_scores, expected.sequences_scores, rtol=1e-3, atol=1e-3)
    return float(equal.float().mean())
