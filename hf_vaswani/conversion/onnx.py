"""Conversion to ONNX: two graphs that ONNX Runtime and other engines run without torch.

`encoder.onnx` reads the source, and `decoder.onnx` writes the target, one or more tokens at a time. Both accept any
number of sentences and tokens; the search is up to whoever runs them.
"""

import copy
import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..extras import extra
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..translation.loading import quiet
from .formats import Foreign, Loaded, Logits, check_expressible, copy_tokenizer

with extra("convert"):
    import onnxruntime
    import onnxscript  # noqa: F401 - the exporter needs it, but would only say so halfway
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

if not hasattr(OnnxExporter, "save_program"):
    raise ImportError(f"Conversion to ONNX needs transformers 5.23 or newer, but this is {transformers.__version__}.")

QUANTIZATIONS: tuple[str, ...] = ()
# Dynamic axes of the graphs' inputs.
ENCODER_AXES = {"input_ids": {0: "batch", 1: "source"}, "attention_mask": {0: "batch", 1: "source"}}
DECODER_AXES = {
    "decoder_input_ids": {0: "batch", 1: "target"},
    "attention_mask": {0: "batch", 1: "source"},
    "self_keys": {1: "batch", 3: "past"},
    "self_values": {1: "batch", 3: "past"},
    "cross_keys": {1: "batch", 3: "source"},
    "cross_values": {1: "batch", 3: "source"},
}


class SourceGraph(nn.Module):
    """Encoder, with the keys and values of the decoder's attention to the source."""

    def __init__(self, model: VaswaniForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`): source tokens.
            attention_mask (`torch.LongTensor` of shape `(batch, source)`): 1 for tokens, 0 for padding.

        Returns:
            `cross_keys` of shape `(decoder_layers, batch, heads, source, d_k)` and `cross_values` of shape
            `(decoder_layers, batch, heads, source, d_v)`.
        """
        states = self.model.model.encoder(input_ids, attention_mask).last_hidden_state
        attentions: list[Any] = [layer.cross_attn for layer in self.model.model.decoder.layers]
        return {
            "cross_keys": torch.stack([each.split_heads(each.k_proj(states)) for each in attentions]),
            "cross_values": torch.stack([each.split_heads(each.v_proj(states)) for each in attentions]),
        }


class TargetGraph(nn.Module):
    """Decoder: reads tokens of the target, with the keys and values of earlier ones as its cache."""

    def __init__(self, model: VaswaniForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        decoder_input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        self_keys: torch.Tensor,
        self_values: torch.Tensor,
        cross_keys: torch.Tensor,
        cross_values: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """
        Args:
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target)`): next tokens of the target.
            attention_mask (`torch.LongTensor` of shape `(batch, source)`): 1 for source tokens, 0 for padding.
            self_keys, self_values (`torch.Tensor` of shape `(decoder_layers, batch, heads, past, d_k or d_v)`): keys
                and values of earlier tokens; `past` is 0 at the beginning.
            cross_keys, cross_values (`torch.Tensor`): result of [`SourceGraph`].

        Returns:
            `logits` of shape `(batch, target, vocab_size)`, and `next_self_keys` and `next_self_values`, which include
            the new tokens.
        """
        cache = EncoderDecoderCache(
            DynamicCache(list(zip(self_keys, self_values, strict=True))),
            DynamicCache(list(zip(cross_keys, cross_values, strict=True))),
        )
        # The cache has the source's keys and values: only the shape of the encoder's states is used.
        states = cross_keys.new_zeros(1).expand(*attention_mask.shape, self.model.config.d_model)
        hidden_states = self.model.model.decoder(
            input_ids=decoder_input_ids,
            encoder_hidden_states=states,
            encoder_attention_mask=attention_mask,
            cache=cache,
        ).last_hidden_state
        layers: list[Any] = cache.self_attention_cache.layers
        return {
            "logits": self.model.lm_head(hidden_states),
            "next_self_keys": torch.stack([layer.keys for layer in layers]),
            "next_self_values": torch.stack([layer.values for layer in layers]),
        }


def open_graph(path: Path) -> Any:
    """Loads a graph in ONNX Runtime, on the CPU."""
    settings = onnxruntime.SessionOptions()
    # By itself, it would take all cores, whatever the share of this process.
    settings.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def read_graphs(folder: Path) -> Logits:
    """
    Loads both graphs in ONNX Runtime, on the CPU.

    Args:
        folder (`Path`): folder that [`save`] has written.

    Returns:
        `Logits`: computes logits of given targets, without a cache.
    """
    encoder, decoder = (open_graph(folder / f"{name}.onnx") for name in ("encoder", "decoder"))

    def logits(input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.long().numpy()
        keys, values = encoder.run(None, {"input_ids": input_ids.numpy(), "attention_mask": mask})
        past = {"self_keys": keys[:, :, :, :0], "self_values": values[:, :, :, :0]}
        source = {"attention_mask": mask, "cross_keys": keys, "cross_values": values}
        return torch.from_numpy(decoder.run(None, {"decoder_input_ids": decoder_input_ids.numpy()} | past | source)[0])

    return logits


@torch.no_grad()
def save(loaded: Loaded, folder: Path, quantization: str | None = None) -> Foreign:
    """
    Writes a model as ONNX graphs in float32, with its config, generation config and tokenizer.

    Args:
        loaded ([`Loaded`]): the model.
        folder (`Path`): folder to write.
        quantization (`str`, *optional*): must be `None`.

    Returns:
        [`Foreign`]: the model as read back from the folder.
    """
    model = loaded.model
    check_expressible(model.config, "ONNX")
    batch, source, past, target = 2, 7, 3, 4
    mask = torch.ones(batch, source, dtype=torch.long)
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": mask}
    encoder = SourceGraph(model).eval()
    OnnxExporter.save_program(exported(encoder, inputs, ENCODER_AXES), folder / "encoder.onnx")
    cross = encoder(**inputs)
    cache = {f"self_{name}": cross[f"cross_{name}"][:, :, :, :past].contiguous() for name in ("keys", "values")}
    tokens = torch.ones(batch, target, dtype=torch.long)
    inputs = {"decoder_input_ids": tokens, "attention_mask": mask, **cache, **cross}
    OnnxExporter.save_program(exported(TargetGraph(model).eval(), inputs, DECODER_AXES), folder / "decoder.onnx")
    config = copy.copy(model.config)
    # It refers to code that is not in this folder.
    config.__dict__.pop("auto_map", None)
    config.to_json_file(folder / "config.json")
    model.generation_config.save_pretrained(folder)
    copy_tokenizer(loaded, folder)
    notes = ["The graphs compute logits alone: search with them as the manual shows, under Converting."]
    if model.config.position_encoding == "learned":
        notes.append(
            f"For more than {model.config.max_position_embeddings:,} positions, ONNX Runtime raises an error of its "
            "own."
        )
    return Foreign(f"ONNX Runtime {onnxruntime.__version__}", read_graphs(folder), notes=notes)


def exported(graph: nn.Module, inputs: dict[str, torch.Tensor], axes: dict[str, dict[int, str]]) -> Any:
    """
    Returns a module as an ONNX graph, an `onnx_ir.Model`.

    Args:
        graph (`nn.Module`): the module, in evaluation mode.
        inputs (`dict[str, torch.Tensor]`): its arguments, with example values. For the exporter, sizes are dynamic
            only if they differ from each other, and from 0 and 1.
        axes (`dict[str, dict[int, str]]`): dynamic axes of each input, with their names.
    """
    sizes = {
        name: torch.export.Dim(name) for name in sorted({size for free in axes.values() for size in free.values()})
    }
    dynamic_shapes = {name: {axis: sizes[size] for axis, size in free.items()} for name, free in axes.items()}
    with silent():
        program = OnnxExporter().export(graph, inputs, config=OnnxConfig(dynamic_shapes=dynamic_shapes)).program
    # Each node names the source files that it comes from, with paths of this machine: most of the graph's size.
    for node in program.graph.all_nodes():
        node.metadata_props.clear()
    _name_axes(program.graph, axes)
    return program


def _name_axes(graph: Any, axes: dict[str, dict[int, str]]) -> None:
    """Names the dynamic axes of a graph, which the exporter numbers."""
    names = {str(value.shape[axis]): axes[value.name][axis] for value in graph.inputs for axis in axes[value.name]}
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                # A size may be a sum, as in "past + target".
                value.shape[axis] = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), size.value)


@contextmanager
def silent() -> Iterator[None]:
    """Silences exporters, which print, warn and log versions and progress."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with quiet(), redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
