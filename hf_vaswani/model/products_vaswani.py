"""Matrix products with the weights of a model on a CPU, by oneDNN from some size on.

torch multiplies float32 matrices by MKL, which is made for some processors. oneDNN, which torch has for its compiler,
takes half the time on others (`docs/benchmarks.md` has two). It is fastest with a *packed* matrix, whose entries are
in the order in which oneDNN reads them. Small products are left to MKL, because calling oneDNN takes longer.

Packed matrices are kept for the next call as long as their weights exist. Weights can change without a trace
(`.data`), so each search multiplies them by a fixed random vector and compares the products, which takes about as long
as one step with one hypothesis. A change that these products do not show is smaller than their rounding errors.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .kernels_vaswani import type_of_products

# Multiplications of a product from which on calling oneDNN pays, which takes 20 microseconds longer.
MIN_ONEDNN = 2**22

# A linear layer as a function of states of shape `(..., d_in)`.
Product = Callable[[torch.Tensor], torch.Tensor]
# What this thread computes in place of modules.
INSTEAD: ContextVar[Mapping[nn.Module, Callable[..., Any]]] = ContextVar("instead", default=MappingProxyType({}))


def linear(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Calls a linear layer, or the product that [`using`] puts in its place."""
    # A compiler cannot trace a context variable.
    if torch.compiler.is_compiling():
        return layer(states)
    found: torch.Tensor = INSTEAD.get().get(layer, layer)(states)
    return found


def attention_of(module: nn.Module) -> Any:
    """Returns the attention function that [`using`] lets a module call, or `None`."""
    return None if torch.compiler.is_compiling() else INSTEAD.get().get(module)


@contextmanager
def using(functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Puts functions in the place of modules, in this thread: see [`linear`] and [`attention_of`]."""
    token = INSTEAD.set(functions)
    try:
        yield
    finally:
        INSTEAD.reset(token)


def fast_products(stack: nn.Module, inputs: torch.Tensor | None) -> AbstractContextManager[None]:
    """
    Returns the context in which the layers of an encoder compute fast products on a CPU.

    Args:
        stack ([`VaswaniEncoder`]): the encoder.
        inputs (`torch.Tensor` of shape `(batch, source, ...)`, *optional*): what it computes on.
    """
    config: Any = stack.config
    if inputs is None or inputs.device.type != "cpu" or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return nullcontext()
    if inputs.shape[:2].numel() * config.d_model * config.d_ff < MIN_ONEDNN:
        return nullcontext()
    return using(products_of(stack))


def products_of(module: nn.Module, rows: int = 0) -> dict[nn.Module, Product]:
    """
    Chooses the products of the linear layers of a module.

    Args:
        module (`nn.Module`): the module.
        rows (`int`): number of rows of most states, by which matrices are packed or not; with 0, none is.

    Returns:
        `dict[nn.Module, Callable]`: the products, by layer. Those of layers that are not plain are missing.
    """
    layers: Iterator[Any] = filter(is_plain, module.modules())
    return {layer: product(layer.weight, layer.bias, type_of_products(layer.weight), rows) for layer in layers}


def is_plain(layer: Any) -> bool:
    """Returns whether a linear layer is just a matrix and a bias: no adapter, not quantized, nobody looks on."""
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
    )


def product(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, rows: int) -> Product:
    """
    Returns a linear transformation as a function of states, without the overhead of calling a module.

    Args:
        weight (`torch.Tensor` of shape `(d_out, d_in)`): the matrix.
        bias (`torch.Tensor` of shape `(d_out,)`, *optional*): added to the product.
        dtype (`torch.dtype`): number format in which it is computed; the result is in that of the states.
        rows (`int`): as in [`products_of`].
    """
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

    if dtype == weight.dtype:
        return multiply
    return lambda states: multiply(states.to(dtype)).to(states.dtype)


# ---- Packed matrices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix for `torch.ops.mkldnn._linear_pointwise`, and what it was packed from."""

    matrix: torch.Tensor
    fingerprint: torch.Tensor  # products of the weight's rows with `probe`


# By the weight that a matrix was packed from: matrices by number format.
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
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        # A torch without oneDNN lacks these operators, and a processor may lack instructions for bfloat16.
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    )


def packed_for_onednn(weight: torch.Tensor, dtype: torch.dtype, rows: int) -> torch.Tensor | None:
    """
    Packs a matrix, or finds it packed by an earlier search.

    Args:
        weight (`torch.Tensor` of shape `(d_out, d_in)`): the matrix.
        dtype (`torch.dtype`): number format of the product.
        rows (`int`): number of rows of the other factor.

    Returns:
        `torch.Tensor`: the matrix for `torch.ops.mkldnn._linear_pointwise`, or `None` if it is better as it is.
    """
    if not has_onednn(weight.device, dtype):
        # After a move of the model, no search asks for them again.
        KEPT.pop(weight, None)
        return None
    if rows * weight.numel() < MIN_ONEDNN:
        return None
    with torch.no_grad():
        if type(weight) is not nn.Parameter:
            # A matrix of this search alone.
            return _packed(weight, dtype)
        fingerprint = torch.mv(weight.detach().float(), probe(weight.shape[1]))
        matrices = KEPT.setdefault(weight, {})
        kept = matrices.get(dtype)
        if kept is None or not fingerprint.equal(kept.fingerprint):
            # Those of a changed weight go, in whatever format they are.
            for key in [key for key, each in matrices.items() if not fingerprint.equal(each.fingerprint)]:
                del matrices[key]
            kept = matrices[dtype] = PackedMatrix(_packed(weight, dtype), fingerprint)
    return kept.matrix


def _packed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The layout is the same for any number of rows from some on.
    matrix: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).detach(), 32)
    return matrix
