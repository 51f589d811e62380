"""Matrix products with the weights of a model on a CPU, by oneDNN from some size on.

torch multiplies float32 matrices by MKL, which is made for some processors. oneDNN, which torch has for its compiler,
takes half the time on others (`docs/benchmarks.md` has two). It is fastest with a *packed* matrix, whose entries are
in the order in which oneDNN reads them. Small products are left to MKL, because calling oneDNN takes longer.

Packed matrices are kept for the next call as long as their weights exist. Weights can change without a trace
(`.data`), so each call multiplies them by a fixed random vector and compares the products, which takes about as long
as one step with one hypothesis. A change that these products do not show is smaller than their rounding errors.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .kernels_vaswani import type_of_products

# Multiplications of a product from which on oneDNN takes less time than MKL: with a packed matrix, with a packed
# matrix and one row, and with any other matrix.
WORTH_PACKING = 2**19
WORTH_PACKING_FOR_ONE = 2**21
WORTH_ONEDNN = 2**20
# Multiplications of the largest product of a module from which on looking at each product pays.
WORTH_LOOKING = 2**23


# ---- Packed matrices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix for `torch.ops.mkldnn._linear_pointwise`, and what it was packed from."""

    matrix: torch.Tensor
    fingerprint: torch.Tensor  # products of the weights' rows with `probe`


# By the first of the weights that a matrix was packed from: matrices by number format and groups.
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


def packed_for_onednn(weights: Sequence[torch.Tensor], dtype: torch.dtype, groups: int, rows: int) -> Any:
    """
    Packs the matrix that weights make up, or finds it packed by an earlier call.

    Args:
        weights (`Sequence` of `torch.Tensor` of shape `(d_out, d_in)`): the weights.
        dtype (`torch.dtype`): number format of the product.
        groups (`int`): how the weights make up one matrix, see [`interleave_heads`].
        rows (`int`): number of rows of the other factor.

    Returns:
        `torch.Tensor`: the matrix for `torch.ops.mkldnn._linear_pointwise`, or `None` if it is better as it is.
    """
    first, multiplications = weights[0], rows * sum(weight.numel() for weight in weights)
    if not has_onednn(first.device, dtype):
        # After a move of the model, no call asks for them again.
        KEPT.pop(first, None)
        return None
    if multiplications < (WORTH_PACKING if rows > 1 else WORTH_PACKING_FOR_ONE):
        return None
    with torch.no_grad():
        if type(first) is not nn.Parameter:
            # A matrix of this call alone.
            return _packed(weights, dtype, groups)
        vector = probe(first.shape[1])
        fingerprint = torch.cat([torch.mv(weight.detach().float(), vector) for weight in weights])
        matrices = KEPT.setdefault(first, {})
        kept = matrices.get((dtype, groups))
        if kept is None or not fingerprint.equal(kept.fingerprint):
            # Those of changed weights go, in whatever format they are.
            for key in [key for key, each in matrices.items() if not fingerprint.equal(each.fingerprint)]:
                del matrices[key]
            kept = matrices[dtype, groups] = PackedMatrix(_packed(weights, dtype, groups), fingerprint)
    return kept.matrix


def _packed(weights: Sequence[torch.Tensor], dtype: torch.dtype, groups: int) -> torch.Tensor:
    # The layout is the same for any number of rows from some on.
    matrix: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        interleave_heads(weights, groups).to(dtype).detach(), 32
    )
    return matrix


# ---- Linear layers as functions ----------------------------------------------------------------------------------


def is_matrix(layer: Any) -> bool:
    """Returns whether a linear layer is just a matrix and a bias: no adapter, not quantized."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


def interleave_heads(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """Concatenates tensors along their first dimension, group by group (groups are heads)."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def fused_linear(*layers: Any, rows: int, groups: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Fuses linear layers with the same input into one matrix product, if all of them are plain matrices.

    Args:
        layers ([`nn.Linear`] or a replacement): the layers.
        rows (`int`): number of rows of most states.
        groups (`int`): number of groups that each layer's output is split into; the fused output has the first groups
            of all layers, then their second groups, and so on.

    Returns:
        A function of states of shape `(rows, d_in)`.
    """
    if len(layers) == 1 and not is_matrix(layers[0]):
        return layers[0]
    if not all(is_matrix(layer) for layer in layers):
        return lambda states: interleave_heads([layer(states).t() for layer in layers], groups).t()
    has_bias = layers[0].bias is not None
    bias = interleave_heads([layer.bias for layer in layers], groups) if has_bias else None
    weights = [layer.weight for layer in layers]
    return product(weights, bias, type_of_products(weights[0]), rows, groups)


def product(
    weights: Sequence[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype, rows: int, groups: int = 1
) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Returns the linear transformation by a matrix that weights make up, as a function of states.

    Args:
        weights (`Sequence` of `torch.Tensor` of shape `(d_out, d_in)`): the weights.
        bias (`torch.Tensor` of shape `(sum of d_out,)`, *optional*): added to the product.
        dtype (`torch.dtype`): number format of the product.
        rows (`int`), groups (`int`): as in [`fused_linear`].
    """
    bias = None if bias is None else bias.to(dtype)
    packed = packed_for_onednn(weights, dtype, groups, rows)
    if packed is not None:
        multiply = torch.ops.mkldnn._linear_pointwise
        return lambda states: multiply(states.to(dtype), packed, bias, "none", [], "")
    matrix = interleave_heads(weights, groups).to(dtype).t()
    if bias is None:
        return lambda states: torch.mm(states.to(dtype), matrix)
    return lambda states: torch.addmm(bias, states.to(dtype), matrix)


def linear_add(layer: Any, rows: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Fuses a linear layer and the residual connection behind it: a function of states and residual."""
    if is_matrix(layer) and layer.bias is None and type_of_products(layer.weight) == layer.weight.dtype:
        packed = packed_for_onednn([layer.weight], layer.weight.dtype, 1, rows)
        if packed is not None:
            multiply_add = torch.ops.mkldnn._linear_pointwise.binary
            return lambda states, residual: multiply_add(states, residual, packed, None, "add")
        matrix = layer.weight.t()
        return lambda states, residual: torch.addmm(residual, states, matrix)
    project = fused_linear(layer, rows=rows)
    # With autocast, the product is in bfloat16, and the sum in the type of the residual connection.
    return lambda states, residual: torch.add(residual, project(states))


# ---- Modules -----------------------------------------------------------------------------------------------------


def fast_products(config: Any, inputs: torch.Tensor | None) -> AbstractContextManager[Any]:
    """
    Returns the context in which the modules of a model compute fast products on a CPU.

    Args:
        config ([`VaswaniConfig`]): widths of the model.
        inputs (`torch.Tensor` of shape `(batch, source, ...)`, *optional*): what they compute on.
    """
    if inputs is None or not has_onednn(inputs.device, torch.float32):
        return nullcontext()
    largest = inputs.shape[:2].numel() * config.d_model * config.d_ff
    return LinearByOneDNN() if largest >= WORTH_LOOKING and not torch.is_autocast_enabled("cpu") else nullcontext()


class LinearByOneDNN(TorchFunctionMode):
    """Context in which linear layers multiply float32 matrices by oneDNN, if no gradient is needed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch."""
        # A compiler traces this, and would stop at the conditions.
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func is nn.functional.linear and not kwargs and is_for_onednn(*args):
            states, weight, *bias = args
            return torch.ops.mkldnn._linear_pointwise(states, weight, bias[0] if bias else None, "none", [], "")
        return func(*args, **(kwargs or {}))


def is_for_onednn(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Returns whether a product of `nn.functional.linear` takes less time by oneDNN."""
    return (
        states.numel() * len(weight) >= WORTH_ONEDNN
        and states.dtype == weight.dtype == torch.float32
        and type(states) is torch.Tensor
        and type(weight) in (torch.Tensor, nn.Parameter)
        and states.is_contiguous()
        and weight.is_contiguous()
        and has_onednn(weight.device, weight.dtype)
        and not torch.is_grad_enabled()
    )
