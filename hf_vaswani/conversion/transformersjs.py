"""Conversion to the folder that transformers.js reads, `@huggingface/transformers` of npm: in float32 and in 8 bits.

`onnx/encoder_model.onnx` reads the source, and `onnx/decoder_model_merged.onnx` writes the target, one token at a
time, with a cache that JavaScript keeps for it. transformers.js searches greedily. Its `generate()` knows neither the
limits of a model nor which sentences of a batch have ended, so the decoder's graph ends them.
"""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..extras import extra
from ..files import atomic_write_text, read_json
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..model.rules_vaswani import is_one_of
from ..model.sentences_vaswani import LONGEST, longest_source
from .formats import Foreign, Loaded, check_expressible
from .onnx import SourceGraph, exported, open_graph, silent
from .settings import (
    eos_token_ids,
    fixed_limit,
    forces_eos,
    greedy_within_limits,
    ignored_settings,
    max_new_tokens_for,
    settings_of_javascript,
    start_token_id,
)

with extra("convert"):
    import onnx_ir
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

QUANTIZATIONS: tuple[str, ...] = ()
ENCODER, DECODER = "encoder_model", "decoder_model_merged"
# The ending of their names in 8 bits, by which transformers.js finds them: the default in browsers.
IN_8_BITS = "_quantized"
# Lengths of random sources that are translated for comparison, as far as the model has positions.
LENGTHS = (1, 2, 5, 12, 30)
# Rounding explains a smaller difference between the logits of two tokens.
TOLERANCE = 1e-3


class EncoderGraph(SourceGraph):
    """Encoder, with the keys and values of the decoder's attention to the source in place of its states."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Returns `last_hidden_state` of shape `(batch, decoder_layers * heads, source, d_k + d_v)`, which JavaScript
        hands to the decoder as it is. Arguments are those of [`SourceGraph`].
        """
        cross = torch.cat(tuple(super().forward(input_ids, attention_mask).values()), dim=-1)
        return {"last_hidden_state": cross.transpose(0, 1).flatten(1, 2)}


class DecoderGraph(nn.Module):
    """Decoder: reads tokens of the target, with the keys and values of earlier ones as its cache."""

    def __init__(self, model: VaswaniForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        # Where the last layer multiplies by a transposed matrix, the exporter writes a transposition of the rows of
        # the embeddings, and the product is not computed in 8 bits.
        self.columns = model.lm_head.weight.detach().T.contiguous()

    def forward(
        self,
        input_ids: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        **past: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, target)`): next tokens of the target.
            encoder_attention_mask (`torch.LongTensor` of shape `(batch, source)`): 1 for source tokens.
            encoder_hidden_states (`torch.Tensor`): result of [`EncoderGraph`].
            past (`torch.Tensor` of shape `(batch, heads, past, d_k or d_v)`): keys and values of earlier tokens by
                their [`cache_names`]; `past` is 0 at the beginning.

        Returns:
            `logits` of shape `(batch, target, vocab_size)`, and the cache with the new tokens.
        """
        config = self.model.config
        read = [past[name] for name in cache_names("past_key_values", config.decoder_layers)]
        d_k, past_length = read[0].shape[-1], read[0].shape[2]
        cross = [(each[..., :d_k], each[..., d_k:]) for each in encoder_hidden_states.split(config.num_heads, dim=1)]
        cache = EncoderDecoderCache(DynamicCache(list(zip(read[::2], read[1::2], strict=True))), DynamicCache(cross))
        # The cache has the source's keys and values: only the shape of the encoder's states is used.
        states = encoder_hidden_states.new_zeros(1).expand(*encoder_attention_mask.shape, config.d_model)
        hidden_states = self.model.model.decoder(
            inputs_embeds=self.embed(input_ids),
            encoder_hidden_states=states,
            encoder_attention_mask=encoder_attention_mask,
            cache=cache,
        ).last_hidden_state
        logits = hidden_states @ self.columns  # [batch, target, vocab_size]
        if self.model.lm_head.bias is not None:
            logits = logits + self.model.lm_head.bias
        positions = torch.arange(input_ids.shape[1]) + past_length
        ended = self.ended(input_ids, positions, encoder_attention_mask)
        end = eos_token_ids(self.model.generation_config)[0]
        forced = torch.where(torch.arange(config.vocab_size) == end, 0.0, -torch.inf)
        layers: list[Any] = cache.self_attention_cache.layers
        written = [each for layer in layers for each in (layer.keys, layer.values)]
        return {
            "logits": torch.where(ended[..., None], forced, logits),
            **dict(zip(cache_names("present", config.decoder_layers), written, strict=True)),
        }

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of tokens, of shape `(batch, target, d_model)`."""
        table = self.model.model.decoder.embed_tokens
        if table.weight is not self.model.lm_head.weight:
            return table(input_ids)
        return self.columns.index_select(1, input_ids.flatten()).T.reshape(*input_ids.shape, -1)

    def ended(self, input_ids: torch.Tensor, positions: torch.Tensor, source_mask: torch.Tensor) -> torch.Tensor:
        """
        Returns behind which tokens, `(batch, target)`, a translation has ended: `</s>` was written, or the limit of
        the model's `generate()` is reached. `positions` are those of the tokens, from 0 for the first.
        """
        settings, config = self.model.generation_config, self.model.config
        limit = fixed_limit(settings)
        # In tokens, of shape `(batch,)`.
        limits = source_mask.sum(dim=1)
        limits = limits + settings.max_length_offset if limit is None else torch.full_like(limits, limit)
        if config.position_encoding == "learned":
            limits = limits.clamp(max=config.max_position_embeddings - 1)
        # The decoder may begin with one of them.
        is_end = is_one_of(input_ids, torch.tensor(eos_token_ids(settings))) & (positions > 0)
        return is_end | (positions >= limits[:, None] - forces_eos(settings))


def cache_names(front: str, layers: int) -> list[str]:
    """Returns the names of a cache's tensors. In the files, they have a period in place of two underscores."""
    return [f"{front}__{layer}__decoder__{part}" for layer in range(layers) for part in ("key", "value")]


# ---- Writing -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def save(loaded: Loaded, folder: Path, quantization: str | None = None) -> Foreign:
    """
    Writes a model for transformers.js: four graphs, with a config, a generation config and a tokenizer that it reads.

    Args:
        loaded ([`Loaded`]): the model.
        folder (`Path`): folder to write.
        quantization (`str`, *optional*): must be `None`; 8 bits are always among the files.

    Returns:
        [`Foreign`]: the model as read back from the folder.

    Raises:
        ValueError: The model has no `</s>`, or a tokenizer that transformers.js does not have; or ONNX Runtime finds
            other translations with the graphs in float32 than the model.
    """
    model = loaded.model
    check_expressible(model.config, "ONNX")
    config = _config(loaded)
    tokenizer, tokenizer_config = _tokenizer_files(loaded.tokenizer)
    (folder / "onnx").mkdir()
    _write_graphs(model, folder / "onnx")
    for name in (ENCODER, DECODER):
        _quantize(folder / "onnx" / f"{name}.onnx", folder / "onnx" / f"{name}{IN_8_BITS}.onnx")
    _write_json(folder / "config.json", config)
    settings = settings_of_javascript(model.generation_config)
    _write_json(folder / "generation_config.json", settings | {"num_beams": 1, "max_length": _longest(loaded)})
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    return _compared(loaded, folder)


def _write_graphs(model: VaswaniForConditionalGeneration, folder: Path) -> None:
    """Writes both graphs in float32, each with its weights in one file."""
    config, heads = model.config, model.config.num_heads
    widths = [width or config.d_model // heads for width in (config.d_k, config.d_v)]
    batch, source, past, target = 2, 7, 3, 4
    mask = torch.ones(batch, source, dtype=torch.long)
    of_source = {0: "batch_size", 1: "source"}
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": mask}
    encoder = EncoderGraph(model).eval()
    _write(exported(encoder, inputs, dict.fromkeys(inputs, of_source)), folder / f"{ENCODER}.onnx")
    states = encoder(**inputs)["last_hidden_state"]
    names = cache_names("past_key_values", config.decoder_layers)
    cache = {name: torch.zeros(batch, heads, past, widths[number % 2]) for number, name in enumerate(names)}
    tokens = torch.ones(batch, target, dtype=torch.long)
    inputs = {"input_ids": tokens, "encoder_attention_mask": mask, "encoder_hidden_states": states, **cache}
    axes = {
        "input_ids": {0: "batch_size", 1: "target"},
        "encoder_attention_mask": of_source,
        "encoder_hidden_states": {0: "batch_size", 2: "source"},
        # In its first cache, JavaScript takes 1 for the axis of this name, and 0 for all other names.
        **{name: {0: "batch_size", 2: "past"} for name in names},
    }
    _write(exported(DecoderGraph(model).eval(), inputs, axes), folder / f"{DECODER}.onnx")


def _write(program: Any, path: Path) -> None:
    """Writes a graph without float64, which engines of browsers lack, into one file."""
    graph = program.graph
    for value in (*graph.inputs, *graph.outputs):
        value.name = value.name.replace("__", ".")
    float32, float64 = onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE
    for value in graph.initializers.values():
        if value.dtype == float64:
            value.const_value = onnx_ir.tensor(value.const_value.numpy().astype("float32"), name=value.name)
            value.dtype = float32
    for node in graph.all_nodes():
        if node.op_type == "Cast" and node.attributes["to"].as_int() == float64:
            node.attributes["to"] = onnx_ir.AttrInt64("to", float32)
        for value in node.outputs:
            if value.dtype == float64:
                value.dtype = float32
    onnx_ir.save(program, path)


def _quantize(path: Path, quantized: Path) -> None:
    """Writes the weights of a graph in 8 bits, with one scale for each matrix."""
    # Products of signed weights overflow on processors without VNNI.
    with silent():
        quantize_dynamic(path, quantized, op_types_to_quantize=["MatMul", "Gather"], weight_type=QuantType.QUInt8)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    atomic_write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _config(loaded: Loaded) -> dict[str, Any]:
    """Returns a config with a type that transformers.js knows, and what it and web pages need to know of the model."""
    config, ends = loaded.model.config, eos_token_ids(loaded.model.generation_config)
    names = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "pad_token_id", "bos_token_id")
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "decoder_start_token_id": start_token_id(loaded.model.generation_config, config),
        **{name: value for name in names if (value := getattr(config, name)) is not None},
        "longest_sentence": longest_source([loaded.model], loaded.tokenizer),
        "language_pairs": config.language_pairs,
    }


def _longest(loaded: Loaded) -> int:
    """Returns a `max_length` at which the graphs have ended every translation of a source that the model takes."""
    settings = loaded.model.generation_config
    limit = fixed_limit(settings)
    if limit is None:
        limit = max(LONGEST, longest_source([loaded.model], loaded.tokenizer)) + settings.max_length_offset
    # And the decoder's start token, and `</s>`.
    return limit + 2


def _tokenizer_files(tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Returns the contents of tokenizer.json and tokenizer_config.json. transformers.js reads all added tokens that are
    written in a text: where special tokens are text, they are only named.

    Raises:
        ValueError: transformers.js finds other tokens.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    if state["model"]["type"] == "Unigram" and state["model"].get("byte_fallback"):
        raise ValueError(
            "The tokenizer has a Unigram model with byte_fallback, for which transformers.js finds other tokens."
        )
    state |= {name: _as_patterns(state[name]) for name in ("normalizer", "pre_tokenizer")}
    entries = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    special = [token for token in state["added_tokens"] if token["special"]]
    if tokenizer.split_special_tokens:
        named = [token for token in special if token["content"] in entries]
        state["added_tokens"] = [token for token in state["added_tokens"] if token not in named]
    names = ("pad_token", "bos_token", "eos_token", "unk_token")
    # No model_max_length: transformers.js would cut longer texts without a word, and `</s>` with them.
    return state, {
        "tokenizer_class": "TokenizersBackend",
        "additional_special_tokens": [token["content"] for token in special],
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        **{name: value for name in names if (value := getattr(tokenizer, name)) is not None},
    }


def _as_patterns(step: Any) -> Any:
    """
    Returns a step of a tokenizer with regular expressions in place of what transformers.js does otherwise: it takes
    U+FEFF for white space, but not U+0085, puts a space in front of nothing, and has no digits but 0 to 9.
    """
    match step:
        case {"type": "Strip", "strip_left": True, "strip_right": True}:
            return {"type": "Replace", "pattern": {"Regex": r"\A\s+|\s+\z"}, "content": ""}
        case {"type": "Prepend", "prepend": text}:
            return {"type": "Replace", "pattern": {"Regex": r"\A(?=[\s\S])"}, "content": text}
        case {"type": "Digits", "individual_digits": True}:
            return {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
        case {"type": "WhitespaceSplit"}:
            return {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Removed", "invert": False}
        case {"type": "Sequence"}:
            return {name: _as_patterns(part) for name, part in step.items()}
        case list():
            return list(map(_as_patterns, step))
    return step


# ---- Reading back ------------------------------------------------------------------------------------------------


class Graphs:
    """
    The graphs of a folder in ONNX Runtime, searched as transformers.js does it.

    Args:
        folder (`Path`): folder that [`save`] has written.
        kind (`str`): `""` for float32, or `IN_8_BITS`.
    """

    def __init__(self, folder: Path, kind: str = "") -> None:
        self.encoder, self.decoder = (
            open_graph(folder / "onnx" / f"{name}{kind}.onnx") for name in (ENCODER, DECODER)
        )
        config, settings = (read_json(folder / name) for name in ("config.json", "generation_config.json"))
        self.start, self.max_length = config["decoder_start_token_id"], settings["max_length"]
        self.ends = torch.tensor(config["eos_token_id"]).reshape(-1)

    def search(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
        """
        Translates a batch.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`): source tokens.
            attention_mask (`torch.LongTensor` of shape `(batch, source)`): 1 for tokens, 0 for padding.

        Returns:
            `list[list[int]]`: the tokens of each translation, up to `</s>`.
        """
        mask = attention_mask.numpy()
        (states,) = self.encoder.run(None, {"input_ids": input_ids.numpy(), "attention_mask": mask})
        source = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
        shapes = {each.name: each.shape for each in self.decoder.get_inputs() if each.name.startswith("past")}
        cache = {
            name: torch.zeros(len(mask), heads, 0, width).numpy() for name, (_, heads, _, width) in shapes.items()
        }
        tokens = torch.full((len(mask), 1), self.start)
        while tokens.shape[1] < self.max_length:
            logits, *written = self.decoder.run(None, {"input_ids": tokens[:, -1:].numpy(), **source, **cache})
            cache = dict(zip(cache, written, strict=True))
            tokens = torch.cat((tokens, torch.from_numpy(logits[:, -1]).argmax(dim=-1, keepdim=True)), dim=1)
            # Not before the last one, because none remembers that it has ended.
            if is_one_of(tokens[:, -1], self.ends).all():
                break
        return [until_end(row[1:], self.ends) for row in tokens]

    def translator(self, tokenizer: Any) -> Callable[[Sequence[str]], list[str]]:
        """Returns a function that translates sentences, for [`Foreign`]."""

        def translate(sentences: Sequence[str]) -> list[str]:
            batch = tokenizer(list(sentences), return_tensors="pt", padding=True, padding_side="right")
            found = self.search(batch["input_ids"], batch["attention_mask"])
            texts: list[str] = tokenizer.batch_decode(found, skip_special_tokens=True)
            return texts

        return translate


def until_end(row: torch.Tensor, ends: torch.Tensor) -> list[int]:
    """Returns the tokens of a translation, `(target,)`, up to the first that ends it."""
    found = is_one_of(row, ends).nonzero()
    return row[: int(found[0]) if len(found) else None].tolist()


def _compared(loaded: Loaded, folder: Path) -> Foreign:
    """Compares translations of random sources in one batch, and returns the model of the folder."""
    # Not of the model itself, which stays as it is.
    model, name = copy.copy(loaded.model), f"ONNX Runtime {onnxruntime.__version__}"
    model.generation_config = settings = greedy_within_limits(loaded.model.generation_config)
    graphs, in_8_bits = Graphs(folder), Graphs(folder, IN_8_BITS)
    ids, mask = random_sources(model)
    positions = model.config.max_position_embeddings if model.config.position_encoding == "learned" else None
    limits = [max_new_tokens_for(settings, source, positions) for source in mask.sum(dim=1).tolist()]
    expected = model.generate(ids, attention_mask=mask)[:, 1:]
    ours = [until_end(row[:limit], graphs.ends) for row, limit in zip(expected, limits, strict=True)]
    for row, pair in enumerate(zip(ours, graphs.search(ids, mask), strict=True)):
        if pair[0] != pair[1] and not _is_tie(model, ids[row : row + 1], mask[row : row + 1], *pair):
            raise ValueError(
                f"{name} and the Vaswani model find different translations of a source of {int(mask[row].sum())} "
                f"random tokens: they begin with {pair[1][:10]} and {pair[0][:10]}. Nothing was written."
            )
    return Foreign(
        name,
        translate=graphs.translator(loaded.tokenizer),
        in_8_bits=in_8_bits.translator(loaded.tokenizer),
        compared=f"Greedy translations of {len(ours)} random sources, {name}: the same {sum(map(len, ours)):,} tokens",
        notes=_notes(loaded),
    )


def _notes(loaded: Loaded) -> list[str]:
    """Returns the differences between translations of transformers.js and ours, one sentence each."""
    model = loaded.model
    notes = ["transformers.js searches greedily, whatever num_beams says: the manual shows its use, under Converting."]
    notes += ignored_settings(model.generation_config, "transformers.js")
    if model.generation_config.no_repeat_ngram_size:
        notes.append(
            "With no_repeat_ngram_size, give transformers.js one sentence at a time: in a batch, it also forbids the "
            "repeated </s> behind sentences that have ended."
        )
    if model.config.position_encoding == "learned":
        notes.append(
            f"For more than {model.config.max_position_embeddings:,} positions, transformers.js raises an error."
        )
    if json.loads(loaded.tokenizer.backend_tokenizer.to_str())["model"]["type"] == "Unigram":
        notes.append(
            "With the Unigram vocabulary, transformers.js reads an unknown word and unknown marks beside it as one "
            "<unk>, and the Vaswani model reads them as several."
        )
    return notes


def random_sources(model: VaswaniForConditionalGeneration) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random source ids of several lengths and their mask, each of shape `(batch, source)`."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    most = config.max_position_embeddings if config.position_encoding == "learned" else max(LENGTHS)
    lengths = sorted({min(length, most) for length in LENGTHS})
    mask = torch.tensor([[int(column < length) for column in range(lengths[-1])] for length in lengths])
    pad = config.pad_token_id or 0
    ids = torch.randint(config.vocab_size - 1, mask.shape, generator=generator)
    return torch.where(mask == 1, ids + (ids >= pad), pad), mask


def _is_tie(
    model: VaswaniForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor, ours: list[int], theirs: list[int]
) -> bool:
    """Returns whether two translations of a source, `(1, source)`, go apart where two tokens are equally likely."""
    end = eos_token_ids(model.generation_config)[0]
    ours, theirs = [*ours, end], [*theirs, end]
    place = next(place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    start = start_token_id(model.generation_config, model.config)
    prefix = torch.tensor([[start, *ours[:place]]])
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=prefix).logits[0, -1]
    return bool((logits[ours[place]] - logits[theirs[place]]).abs() < TOLERANCE)
