"""FSDP2 for a model with tied weights, which Accelerate does not cover, and the full weights of any wrapped model."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..extras import extra
from ..model.modeling_vaswani import VaswaniPreTrainedModel

with extra("train"):
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel


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
