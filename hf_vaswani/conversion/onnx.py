"""Out to ONNX: two graphs, which ONNX Runtime and others run without torch.

What reads the source is `encoder.onnx`, and what writes the target, some tokens at a time, is `decoder.onnx`. Numbers
of sentences and tokens are free. [`OnnxTranslator`] runs them; it is also the recipe for doing so elsewhere.
"""

import copy
import io
import logging
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..data.tokenizer import TOKENIZER_FILES, load_tokenizer
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from .protocol import Foreign
from .settings import longest, never, start_token_id

try:
    import onnxruntime
    import onnxscript  # noqa: F401 - the exporter asks for it when it is at work already
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
except ImportError as error:
    raise ImportError(f"Conversion to ONNX needs {error.name}: pip install 'hf_vaswani[convert]'") from error

if not hasattr(OnnxExporter, "save_program"):
    raise ImportError(f"Conversion to ONNX needs transformers 5.23 or newer, but it is {transformers.__version__}.")

# Which axes of which input are free, by the graph's arguments.
ENCODER_AXES = {"input_ids": {0: "batch", 1: "source"}, "attention_mask": {0: "batch", 1: "source"}}
DECODER_AXES = {
    "decoder_input_ids": {0: "batch", 1: "target"},
    "attention_mask": {0: "batch", 1: "source"},
    "self_keys": {1: "batch", 3: "past"},
    "self_values": {1: "batch", 3: "past"},
    "cross_keys": {1: "batch", 3: "source"},
    "cross_values": {1: "batch", 3: "source"},
}
# Of transformers' rules, those that [`OnnxTranslator`] keeps.
KNOWN_RULES = ("min_new_tokens",)
# Sentences that the check translates at a time.
BATCH = 32


class SourceGraph(nn.Module):
    """All that happens once for each source: the encoder, and the keys and values that the decoder makes of it."""

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
    """The decoder: some tokens of the target, behind as many others as there are keys and values of."""

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
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target)`): tokens of the target.
            attention_mask (`torch.LongTensor` of shape `(batch, source)`): the source's padding.
            self_keys, self_values (`torch.Tensor` of shape `(decoder_layers, batch, heads, past, d_k or d_v)`): of the
                tokens before; at the beginning `past` is 0.
            cross_keys, cross_values (`torch.Tensor`): what [`SourceGraph`] returns.

        Returns:
            `logits` of shape `(batch, target, vocab_size)`, and `next_self_keys` and `next_self_values`, which have
            the new tokens too.
        """
        cache = EncoderDecoderCache(
            DynamicCache(list(zip(self_keys, self_values, strict=True))),
            DynamicCache(list(zip(cross_keys, cross_values, strict=True))),
        )
        # The decoder has the source's keys and values; of the encoder's states it asks the shape alone.
        states = cross_keys.new_zeros(1).expand(*attention_mask.shape, self.model.config.d_model)
        hidden_states = self.model.model.decoder(
            input_ids=decoder_input_ids,
            encoder_hidden_states=states,
            encoder_attention_mask=attention_mask,
            past_key_values=cache,
        ).last_hidden_state
        layers: list[Any] = cache.self_attention_cache.layers
        return {
            "logits": self.model.lm_head(hidden_states),
            "next_self_keys": torch.stack([layer.keys for layer in layers]),
            "next_self_values": torch.stack([layer.values for layer in layers]),
        }


class OnnxTranslator:
    """
    The two graphs in ONNX Runtime, on the CPU.

    Args:
        folder (`Path`): what [`save`] wrote.
    """

    def __init__(self, folder: Path) -> None:
        providers = ["CPUExecutionProvider"]
        self.encoder = onnxruntime.InferenceSession(str(folder / "encoder.onnx"), providers=providers)
        self.decoder = onnxruntime.InferenceSession(str(folder / "decoder.onnx"), providers=providers)
        self.config = VaswaniConfig.from_pretrained(folder)
        self.generation_config = GenerationConfig.from_pretrained(folder)
        self.tokenizer = load_tokenizer(str(folder))

    def translate(self, sentences: Sequence[str]) -> list[str]:
        """Sentences -> their greedy translations."""
        found: list[str] = []
        for start in range(0, len(sentences), BATCH):
            batch = self.tokenizer(list(sentences[start : start + BATCH]), padding=True, return_tensors="np")
            rows = self.greedy(batch["input_ids"].astype(np.int64), batch["attention_mask"].astype(np.int64))
            found += self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return found

    def greedy(self, input_ids: Any, attention_mask: Any) -> list[list[int]]:
        """
        The most probable token, time and again. Of the generation config's rules, it keeps the limits of length, what
        ends a translation, and tokens that are in none.

        Args:
            input_ids (`np.ndarray` of shape `(batch, source)`, int64): source tokens.
            attention_mask (`np.ndarray` of shape `(batch, source)`, int64): 1 for tokens, 0 for padding.

        Returns:
            `list[list[int]]`: ids of the translations, with what ends them, unless they are at their longest.
        """
        rules = self.generation_config
        source = self.read(input_ids, attention_mask)
        past = self.nothing_before(source)
        limits, least = self.limits(attention_mask), rules.min_new_tokens or 0
        forbidden = [ids[0] for ids in never(rules) if len(ids) == 1]
        tokens = np.full((len(input_ids), 1), start_token_id(rules, self.config), dtype=np.int64)
        found: list[list[int]] = [[] for _ in input_ids]
        is_open = np.ones(len(input_ids), dtype=bool)
        while is_open.any():
            logits, past = self.write(tokens, attention_mask, past, source)
            logits[..., forbidden] = -np.inf
            if past["self_keys"].shape[3] <= least:
                logits[..., rules.eos_token_id] = -np.inf
            tokens = logits[:, -1:].argmax(axis=-1)  # [batch, 1]
            # Sentences that have ended are carried along until all have.
            for row in is_open.nonzero()[0]:
                found[row].append(int(tokens[row, 0]))
                is_open[row] = len(found[row]) < limits[row]
            is_open &= ~np.isin(tokens[:, 0], rules.eos_token_id)
        return found

    def limits(self, attention_mask: Any) -> list[int]:
        """How many tokens each translation may get, by the mask of `(batch, source)`."""
        positions = self.config.max_position_embeddings if self.config.position_encoding == "learned" else None
        return [longest(self.generation_config, tokens, positions) for tokens in attention_mask.sum(axis=1).tolist()]

    def read(self, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        """Arguments and results of [`SourceGraph`]."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return dict(zip(("cross_keys", "cross_values"), self.encoder.run(None, inputs), strict=True))

    def nothing_before(self, source: dict[str, Any]) -> dict[str, Any]:
        """Keys and values of no token, to begin with."""
        return {
            "self_keys": source["cross_keys"][:, :, :, :0],
            "self_values": source["cross_values"][:, :, :, :0],
        }

    def write(
        self, decoder_input_ids: Any, attention_mask: Any, past: dict[str, Any], source: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Arguments and results of [`TargetGraph`]."""
        inputs = {"decoder_input_ids": decoder_input_ids, "attention_mask": attention_mask}
        logits, keys, values = self.decoder.run(None, inputs | past | source)
        return logits, {"self_keys": keys, "self_values": values}

    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Ids, their mask and decoder ids, all `(batch, length)` -> logits `(batch, target, vocab_size)`."""
        mask = attention_mask.long().numpy()
        source = self.read(input_ids.numpy(), mask)
        logits, _ = self.write(decoder_input_ids.numpy(), mask, self.nothing_before(source), source)
        return torch.from_numpy(logits)


def save(model_folder: Path, folder: Path) -> Foreign:
    """
    Writes a model as ONNX graphs, in float32, with its config, generation config and tokenizer.

    Args:
        model_folder (`Path`): a Vaswani model with its tokenizer.
        folder (`Path`): where to; is made if it is not there.

    Returns:
        [`Foreign`]: what was written, as it runs here.

    Raises:
        ValueError: as in [`load_tokenizer`].
    """
    load_tokenizer(str(model_folder))
    model = VaswaniForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32).requires_grad_(False)
    folder.mkdir(parents=True, exist_ok=True)
    # Sizes that differ from each other, and from 0 and 1, are free ones for the exporter.
    batch, source, past, target = 2, 7, 3, 4
    mask = torch.ones(batch, source, dtype=torch.long)
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": mask}
    reader = SourceGraph(model).eval()
    _export(reader, inputs, ENCODER_AXES, folder / "encoder.onnx")
    cross = reader(**inputs)
    before = {f"self_{name}": cross[f"cross_{name}"][:, :, :, :past].contiguous() for name in ("keys", "values")}
    tokens = torch.ones(batch, target, dtype=torch.long)
    _export(
        TargetGraph(model).eval(),
        {"decoder_input_ids": tokens, "attention_mask": mask, **before, **cross},
        DECODER_AXES,
        folder / "decoder.onnx",
    )
    config = copy.copy(model.config)
    # The code of a model that is not here would only be asked about.
    config.__dict__.pop("auto_map", None)
    config.to_json_file(folder / "config.json")
    model.generation_config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (model_folder / name).is_file():
            shutil.copyfile(model_folder / name, folder / name)
    written = OnnxTranslator(folder)
    notes = ["The graphs compute logits; the search is the caller's, and here it is greedy, without beams."]
    phrases = [ids for ids in never(model.generation_config) if len(ids) > 1]
    if phrases:
        notes.append(f"The search here does not keep translations from having the sequences of ids {phrases}.")
    if model.config.position_encoding == "learned":
        notes.append(
            f"ONNX Runtime refuses positions past {model.config.max_position_embeddings:,} in words of its own."
        )
    return Foreign(f"ONNX Runtime {onnxruntime.__version__}", written.logits, written.translate, notes)


def _export(graph: nn.Module, inputs: dict[str, torch.Tensor], axes: dict[str, dict[int, str]], path: Path) -> None:
    """Writes one graph, and its weights beside it, as `path` + `.data`."""
    sizes = {
        name: torch.export.Dim(name) for name in sorted({size for free in axes.values() for size in free.values()})
    }
    dynamic_shapes = {name: {axis: sizes[size] for axis, size in free.items()} for name, free in axes.items()}
    with _quiet():
        program = OnnxExporter().export(graph, inputs, config=OnnxConfig(dynamic_shapes=dynamic_shapes)).program
    # Each node says where in whose files it comes from, which is nobody's business and most of the file.
    for node in program.graph.all_nodes():
        node.metadata_props.clear()
    _name_axes(program.graph, axes)
    OnnxExporter.save_program(program, path)


def _name_axes(graph: Any, axes: dict[str, dict[int, str]]) -> None:
    """Gives the free axes of a graph, which the exporter numbers, their names."""
    names = {str(value.shape[axis]): axes[value.name][axis] for value in graph.inputs for axis in axes[value.name]}
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                # It may be a sum of two.
                value.shape[axis] = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), size.value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what the exporters say of their versions and progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
