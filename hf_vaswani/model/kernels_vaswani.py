"""Computations that are faster than torch's own functions, on a CPU: dropout, the loss over the vocabulary, products.

Dropout and the loss are hot in training, and products of float32 matrices in a search: torch takes MKL for them, and
oneDNN, which it has for its compiler, takes half the time on some processors. `docs/benchmarks.md` says how much each
saves, and `tests/model/test_kernels.py` compares each with torch's own.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

# ---- Dropout -----------------------------------------------------------------------------------------------------


def cpu_dropout(input: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout by 16 random bits an element, four of which are drawn at once; torch draws one after the other."""
    threshold = round(p * 2**16)
    if threshold in (0, 2**16):
        return nn.functional.dropout(input, p)
    return _CpuDropout.apply(input, threshold)


class _CpuDropout(torch.autograd.Function):
    """Zeroes elements with probability `threshold` / 65536. Saves one byte an element for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, threshold: int) -> torch.Tensor:
        words = torch.empty((input.numel() + 3) // 4, dtype=torch.int64, device=input.device).random_(-(2**63), None)
        draws = words.view(torch.int16)[: input.numel()].view(input.shape)  # from -2^15 to 2^15 - 1
        kept = draws >= threshold - 2**15
        ctx.save_for_backward(kept)
        ctx.scale = 2**16 / (2**16 - threshold)
        # Several times faster here than `torch.where`, and than a product of two types.
        return kept.to(input.dtype).mul_(input).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return kept.to(gradient.dtype).mul_(gradient).mul_(ctx.scale), None


# ---- Output projection and loss ----------------------------------------------------------------------------------


def is_plain_linear(layer: Any, states: torch.Tensor) -> bool:
    """Returns whether [`smoothed_linear_cross_entropy`] may replace a call of a layer: it is nothing but a matrix."""
    return (
        is_plain(layer)
        and layer.bias is None
        and layer.weight.device == states.device
        # float16 gradients must be scaled before they are computed, but the scale comes with `backward`.
        and type_of_products(layer.weight) in (torch.float32, torch.bfloat16)
        # A compiler fuses the logits and the loss itself.
        and not torch.compiler.is_compiling()
    )


def type_of_products(weight: torch.Tensor) -> torch.dtype:
    """Returns the type in which a linear layer with this matrix computes: autocast's, or else its own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def positions_at_once(weight: torch.Tensor) -> int:
    """Returns the number of positions whose logits exist at a time, for a matrix `(vocab_size, d_model)`."""
    vocab_size, d_model = weight.shape
    if weight.device.type == "cpu":
        # Few enough for the caches; enough to outweigh the cost of adding to the matrix's gradient once a chunk.
        return max(1, min(2 * d_model, 2**24 // vocab_size))
    # Enough to keep a GPU busy, and a small part of its memory.
    memory = torch.cuda.get_device_properties(weight.device).total_memory if weight.device.type == "cuda" else 2**35
    return max(1, min(2**27, memory // 2**8) // vocab_size)


def share_of_others(epsilon_ls: float, vocab_size: int) -> float:
    """Returns epsilon / (V - 1), the share of each token but the true one in label smoothing (Section 5.4)."""
    # The loss would be 0 whatever the model says.
    if vocab_size < 2:
        raise ValueError("A loss needs at least 2 labels to choose from, but num_labels (or vocab_size) is 1.")
    return epsilon_ls / (vocab_size - 1)


def smoothed_linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.LongTensor,
    epsilon_ls: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    frozen_row: int | None = None,
) -> torch.Tensor:
    """
    Returns [`smoothed_cross_entropy`] of the logits `hidden_states @ weight.T`, a few positions at a time, and none
    without a label. The `frozen_row` of the matrix gets no gradient. `backward` can run once only.
    """
    targets = labels.to(hidden_states.device).flatten()
    # Found once: a GPU waits until their number is known.
    labelled = (targets != -100).nonzero()[:, 0]
    states, targets = hidden_states.flatten(0, 1)[labelled], targets[labelled]
    total = SmoothedLinearCrossEntropy.apply(states, weight, targets, epsilon_ls, frozen_row, torch.is_grad_enabled())
    return total / (len(targets) if num_items_in_batch is None else num_items_in_batch)


class LinearCrossEntropy(torch.autograd.Function):
    """A loss whose `forward` saves its gradients by the states and the matrix, the first two of its arguments."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scales the gradients by that of the loss; the other arguments have none."""
        # In place: another tensor of the size of the matrix would be the largest of all.
        scaled = [None if part is None else part.mul_(gradient) for part in ctx.saved_tensors]
        return *scaled, *[None] * (len(ctx.needs_input_grad) - len(scaled))


class SmoothedLinearCrossEntropy(LinearCrossEntropy):
    """
    The sum over positions, and its gradients in the same pass: the logits z of a chunk of positions become
    probabilities p in place, and these become the gradient. Label smoothing gives each of the V tokens the probability
    s, and the true token y has r on top of it:

        loss = log(sum(exp(z))) - r * z[y] - s * sum(z)    and    d loss / dz = p - r * (1 at y, else 0) - s.

    The terms in s are the same for every token, so they are computed from sums, without work of the size of z.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        epsilon_ls: float,
        frozen_row: int | None,
        with_gradients: bool,
    ) -> torch.Tensor:
        """Returns the sum, in float32, for states `(positions, d_model)` and their labels, one each."""
        vocab_size, dtype = weight.shape[0], type_of_products(weight)
        share = share_of_others(epsilon_ls, vocab_size)
        rest = 1 - share * vocab_size
        matrix, inputs = weight.to(dtype), states.to(dtype)
        sum_of_rows = weight.sum(dim=0, dtype=torch.float32)  # [d_model]
        sum_of_states = states.sum(dim=0, dtype=torch.float32)  # [d_model]
        total = -share * sum_of_states.dot(sum_of_rows)
        needs_grad = ctx.needs_input_grad if with_gradients else (False, False)
        state_grad = torch.empty_like(inputs) if needs_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_grad[1] else None
        size = positions_at_once(weight)
        buffer = inputs.new_empty(min(size, len(inputs)), vocab_size)
        exact = dtype == torch.float32
        float_logits = buffer if exact else buffer.float()
        for start in range(0, len(inputs), size):
            part, true = inputs[start : start + size], labels[start : start + size, None]
            logits = torch.mm(part, matrix.T, out=buffer[: len(part)])
            probabilities = logits if exact else float_logits[: len(part)].copy_(logits)
            true_logits, largest = probabilities.gather(1, true), probabilities.amax(dim=1)
            torch.softmax(probabilities, dim=1, out=probabilities)
            # log(sum(exp(z))): the largest probability is exp(largest z) over that sum.
            total += (largest - probabilities.amax(dim=1).log()).sum() - rest * true_logits.sum()
            probabilities.scatter_add_(1, true, probabilities.new_full(true.shape, -rest))
            gradient = probabilities if exact else logits.copy_(probabilities)
            if state_grad is not None:
                torch.mm(gradient, matrix, out=state_grad[start : start + size])
            if weight_grad is not None and exact:
                weight_grad.addmm_(gradient.T, part)
            elif weight_grad is not None:
                weight_grad += gradient.T @ part
        if state_grad is not None:
            state_grad = state_grad.to(states.dtype).sub_(share * sum_of_rows)
        if weight_grad is not None:
            weight_grad = weight_grad.sub_(share * sum_of_states).to(weight.dtype)
            if frozen_row is not None:
                weight_grad[frozen_row] = 0
        ctx.save_for_backward(state_grad, weight_grad)
        return total


# ---- Products -----------------------------------------------------------------------------------------------------

# Multiplications of a product from which on calling oneDNN pays, which takes 20 microseconds longer. MKL does not use
# the full width of AVX-512 everywhere.
MIN_ONEDNN = 2**20 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 2**22

# Functions that replace calls in this thread: that of a linear layer, or of the attention function of an attention.
INSTEAD: ContextVar[Mapping[nn.Module, Callable[..., Any]]] = ContextVar("instead", default=MappingProxyType({}))
# How the modules of this package compute, as their files say, and those of torch that compute each position by itself
# or only hold others. By it the search of `generate()` sees which modules of a model somebody changed.
BY_POSITION = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Identity, nn.Dropout)
HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterDict)
FORWARD: dict[type, Callable[..., Any]] = {kind: kind.forward for kind in (*BY_POSITION, *HOLDERS)}
# Names of the layers that are called by [`linear`].
LINEAR = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}


def linear(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Calls a linear layer, or the product that [`Substitutes`] puts in its place."""
    # A compiler cannot trace a context variable.
    return layer(states) if torch.compiler.is_compiling() else INSTEAD.get().get(layer, layer)(states)


def attention_of(module: nn.Module) -> Any:
    """Returns the attention function that [`Substitutes`] lets a module call, or `None`."""
    return None if torch.compiler.is_compiling() else INSTEAD.get().get(module)


class Substitutes:
    """Puts functions in the place of modules within a block, in this thread: see [`linear`] and [`attention_of`]."""

    def __init__(self, functions: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self.functions = functions

    def __enter__(self) -> None:
        self.token = INSTEAD.set(self.functions)

    def __exit__(self, *_: object) -> None:
        INSTEAD.reset(self.token)


def fast_products(stack: nn.Module, inputs: torch.Tensor | None) -> AbstractContextManager[None]:
    """Returns the context in which an encoder computes fast products on a CPU, for inputs `(batch, source, ...)`."""
    config: Any = stack.config
    if inputs is None or inputs.device.type != "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return nullcontext()
    is_large = inputs.shape[:2].numel() * config.d_model * config.d_ff >= MIN_ONEDNN
    return Substitutes(products_of(stack)) if is_large else nullcontext()


def products_of(stack: nn.Module, rows: int = 0) -> dict[nn.Module, Callable[..., Any]]:
    """Returns products for the plain layers of a stack that are called by [`linear`], packed if `rows` are enough."""
    called = (layer for module in stack.modules() for name, layer in module._modules.items() if name in LINEAR)
    layers: Iterator[Any] = filter(is_plain, called)
    return {layer: product(layer.weight, layer.bias, type_of_products(layer.weight), rows) for layer in layers}


def is_plain(layer: Any) -> bool:
    """Returns whether a linear layer is just a matrix and a bias: no adapter, not quantized, nobody looks on."""
    return (
        type(layer) is nn.Linear
        and nn.Linear.forward is FORWARD[nn.Linear]
        and type(layer.weight) is nn.Parameter
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
    )


def product(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, rows: int) -> Callable[..., Any]:
    """Returns the linear transformation by a matrix `(d_out, d_in)`, in `dtype`, without the overhead of a module."""
    packed = packed_for_onednn(weight, dtype, rows) if rows else None
    matrix, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    onednn, smallest = torch.ops.mkldnn._linear_pointwise, MIN_ONEDNN / len(weight)
    can_be_large = dtype == torch.float32 and matrix.is_contiguous() and has_onednn(weight.device, dtype)

    def multiply(states: torch.Tensor) -> torch.Tensor:
        if packed is not None:
            return onednn(states, packed, bias, "none", [], "")
        if can_be_large and states.numel() >= smallest and states.is_contiguous():
            return onednn(states, matrix, bias, "none", [], "")
        return nn.functional.linear(states, matrix, bias)

    return multiply if dtype == weight.dtype else lambda states: multiply(states.to(dtype)).to(states.dtype)


# ---- Packed matrices ---------------------------------------------------------------------------------------------
# oneDNN is fastest with a *packed* matrix, whose entries are in the order in which oneDNN reads them. Packed matrices
# are kept for the next search as long as their weights exist. Weights can change without a trace (`.data`), so each
# search multiplies them by a fixed random vector and compares the products, which takes about as long as one step with
# one hypothesis. A change that these products do not show is smaller than their rounding errors.

# By weight: its product with the [`probe`], and its packed matrices by number format.
KEPT: Any = WeakTensorKeyDictionary()


@functools.cache
def probe(width: int) -> torch.Tensor:
    """Returns the fixed random vector of shape `(width,)`."""
    with torch.inference_mode(False):
        return torch.randn(width, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")


def has_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether oneDNN can multiply matrices in a number format."""
    return (
        device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        # A torch without oneDNN lacks these operators, and a processor may lack instructions for bfloat16.
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )


def packed_for_onednn(weight: torch.Tensor, dtype: torch.dtype, rows: int) -> torch.Tensor | None:
    """Packs a matrix `(d_out, d_in)`, or finds it packed by an earlier search; `None` if `rows` are too few for it."""
    if not has_onednn(weight.device, dtype):
        # After a move of the model, no search asks for them again.
        KEPT.pop(weight, None)
        return None
    if rows * weight.numel() < MIN_ONEDNN:
        return None
    matrices: dict[torch.dtype, torch.Tensor] = {}
    with torch.no_grad():
        # Any other matrix is one of this search alone.
        if type(weight) is nn.Parameter:
            fingerprint = torch.mv(weight.detach().float(), probe(weight.shape[1]))
            known, matrices = KEPT.get(weight, (None, matrices))
            if known is None or not fingerprint.equal(known):
                matrices = {}
                KEPT[weight] = fingerprint, matrices
        if dtype not in matrices:
            # The layout is the same for any number of rows from some on.
            matrices[dtype] = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).detach(), 32)
    return matrices[dtype]
