"""Out to CTranslate2: a folder that its `Translator` loads.

    python -m hf_vaswani.conversion.ctranslate2 --model FOLDER --output_dir OUT [--quantization int8]
        [--copy_files tokenizer.json tokenizer_config.json]

is CTranslate2's own `ct2-transformers-converter`, which does not know of this package by itself: importing this module
tells it. [`save`] is the same for a program, and puts the tokenizer into the folder as well. Then:

    translator, tokenizer = ctranslate2.Translator("OUT"), AutoTokenizer.from_pretrained("OUT")
    source = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(["A small house."])["input_ids"]]
    found = translator.translate_batch(source, beam_size=4)[0].hypotheses[0]
    tokenizer.decode(tokenizer.convert_tokens_to_ids(found))

The tokenizer puts `</s>` at the end of a source, so CTranslate2 is told to add none.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..data.tokenizer import TOKENIZER_FILES, load_tokenizer
from ..model.generation_vaswani import ALPHAS
from ..model.modeling_vaswani import VaswaniAttention, VaswaniDecoder, VaswaniEncoder, VaswaniForConditionalGeneration
from .protocol import Foreign
from .settings import RULES, fixed_limit, longest, must_end, never, start_token_id

try:
    import ctranslate2
    from ctranslate2.converters.transformers import ModelLoader, main, register_loader
    from ctranslate2.specs import transformer_spec
    from ctranslate2.specs.common_spec import Activation
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES
except ImportError as error:
    raise ImportError(f"Conversion to CTranslate2 needs {error.name}: pip install 'hf_vaswani[convert]'") from error

# Sinusoids are stored as a table: computed by the engine itself, they would be tensor2tensor's, counted from 1.
LEAST_POSITIONS = 2048
# By transformers' names.
ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELUTanh,
    "gelu_fast": Activation.GELUTanh,
    "gelu_pytorch_tanh": Activation.GELUTanh,
    "quick_gelu": Activation.GELUSigmoid,
    "silu": Activation.SWISH,
    "swish": Activation.SWISH,
    "sigmoid": Activation.Sigmoid,
    "tanh": Activation.Tanh,
}
# Of transformers' rules, those that the notes say how to give.
KNOWN_RULES = ("min_new_tokens", "no_repeat_ngram_size", "repetition_penalty")
# Tokens of a translation at which GNMT's length penalty and the engine's are to change as fast.
USUAL_LENGTH = 20


@register_loader("VaswaniConfig")
class VaswaniLoader(ModelLoader):
    """How `ctranslate2.converters.TransformersConverter` reads a Vaswani model."""

    architecture_name = "AutoModelForSeq2SeqLM"

    def get_model_spec(self, model: VaswaniForConditionalGeneration) -> transformer_spec.TransformerSpec:
        """
        The network in CTranslate2's terms.

        Args:
            model ([`VaswaniForConditionalGeneration`]): any.

        Returns:
            `TransformerSpec`, with the weights of the model, and without its vocabulary.

        Raises:
            ValueError: CTranslate2 does not have the activation.
        """
        config = model.config
        if config.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"CTranslate2 has no activation_function {config.activation_function!r}, but only these: "
                f"{', '.join(ACTIVATIONS)}."
            )
        first: Any = model.model.encoder.layers[0]
        sizes = {
            "num_heads": config.num_heads,
            "pre_norm": config.norm_position == "pre",
            "activation": ACTIVATIONS[config.activation_function],
            "head_dim": max(head_dims(first.self_attn)),
        }
        spec = transformer_spec.TransformerSpec(
            transformer_spec.TransformerEncoderSpec(config.encoder_layers, **sizes),
            transformer_spec.TransformerDecoderSpec(config.decoder_layers, **sizes),
        )
        spec.config.layer_norm_epsilon = config.layer_norm_eps
        self.set_embeddings(spec.encoder.embeddings[0], model.model.encoder.embed_tokens)
        self.set_embeddings(spec.decoder.embeddings, model.model.decoder.embed_tokens)
        self.set_stack(spec.encoder, model.model.encoder)
        self.set_stack(spec.decoder, model.model.decoder)
        self.set_linear(spec.decoder.projection, model.lm_head)
        return spec

    def set_stack(self, spec: Any, stack: VaswaniEncoder | VaswaniDecoder) -> None:
        """Fills in all of an encoder or decoder but its embeddings."""
        spec.scale_embeddings = float(stack.positions.scale)
        spec.position_encodings.encodings = stack.positions.encode(torch.arange(number_of_positions(stack.config)))
        if stack.config.norm_position == "pre":
            self.set_layer_norm(spec.layer_norm, stack.norm)
        layers: list[Any] = list(stack.layers)
        for layer_spec, layer in zip(spec.layer, layers, strict=True):
            set_attention(layer_spec.self_attention, layer.self_attn)
            self.set_layer_norm(layer_spec.self_attention.layer_norm, layer.self_attn_norm.layer_norm)
            if hasattr(layer, "cross_attn"):
                set_attention(layer_spec.attention, layer.cross_attn)
                self.set_layer_norm(layer_spec.attention.layer_norm, layer.cross_attn_norm.layer_norm)
            self.set_linear(layer_spec.ffn.linear_0, layer.feed_forward.fc1)
            self.set_linear(layer_spec.ffn.linear_1, layer.feed_forward.fc2)
            self.set_layer_norm(layer_spec.ffn.layer_norm, layer.feed_forward_norm.layer_norm)

    def get_vocabulary(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """See [`vocabulary`]."""
        return vocabulary(tokenizer, model.config.vocab_size)

    def set_vocabulary(self, spec: transformer_spec.TransformerSpec, tokens: list[str]) -> None:
        """One vocabulary for both sides, also where they have embeddings of their own."""
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)

    def set_config(self, config: Any, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """What the engine is to know of the special tokens."""
        tokens = self.get_vocabulary(model, tokenizer)
        config.eos_token = tokens[eos_token_ids(model.generation_config)[0]]
        config.decoder_start_token = tokens[start_token_id(model.generation_config, model.config)]
        for name in ("bos_token", "unk_token"):
            # The engine's own names for these need not be in the vocabulary.
            setattr(config, name, getattr(tokenizer, name) or config.eos_token)


def vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[str]:
    """The token of each row of the embeddings; rows that the tokenizer has no token for get a name."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))
    tokens += [None] * (vocab_size - len(tokens))
    return [f"<row {id_}>" if token is None else token for id_, token in enumerate(tokens)]


def head_dims(attention: VaswaniAttention) -> tuple[int, int]:
    """d_k and d_v of an attention."""
    heads = attention.num_heads
    return attention.k_proj.out_features // heads, attention.v_proj.out_features // heads


def set_attention(spec: Any, attention: VaswaniAttention) -> None:
    """
    Fills in an attention. Its heads have one width in CTranslate2; where d_k and d_v differ, the smaller ones are
    filled up with zeros, which change neither the scores nor the values.
    """
    d_k, d_v = head_dims(attention)
    width, heads = max(d_k, d_v), attention.num_heads
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    # The projections of the same states are one matrix.
    together = [(query, key, value)] if len(spec.linear) == 2 else [(query,), (key, value)]
    for linear, projections in zip(spec.linear, together, strict=False):
        linear.weight = torch.cat([fill_up(projection.weight, heads, width) for projection in projections])
        if query.bias is not None:
            linear.bias = torch.cat([fill_up(projection.bias, heads, width) for projection in projections])
    spec.linear[-1].weight = fill_up(attention.out_proj.weight.T, heads, width).T
    if attention.out_proj.bias is not None:
        spec.linear[-1].bias = attention.out_proj.bias
    if d_k != width:
        spec.queries_scale = float(attention.scaling)


def fill_up(rows: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """Rows of all heads, `(heads * head_dim, ...)` -> `(heads * width, ...)`: zeros behind those of each head."""
    by_head = rows.unflatten(0, (heads, -1))  # [heads, head_dim, ...]
    filled = by_head.new_zeros(heads, width, *by_head.shape[2:])
    filled[:, : by_head.shape[1]] = by_head
    return filled.flatten(0, 1)


def number_of_positions(config: Any) -> int:
    """Rows of the table that is stored: those of a learned one, and of sinusoids enough."""
    learned = config.position_encoding == "learned"
    return config.max_position_embeddings if learned else max(config.max_position_embeddings, LEAST_POSITIONS)


def eos_token_ids(generation_config: GenerationConfig) -> list[int]:
    """
    The ids that end a translation.

    Raises:
        ValueError: there is none.
    """
    ids = generation_config.eos_token_id
    if ids is None or ids == []:
        raise ValueError("The generation config has no eos_token_id, but CTranslate2 needs one to end a translation.")
    return [ids] if isinstance(ids, int) else list(ids)


def check_quantization(quantization: str | None) -> None:
    """
    Refuses numbers that CTranslate2 has not.

    Args:
        quantization (`str`, *optional*): as in [`save`].

    Raises:
        ValueError: there is no such quantization.
    """
    if quantization is not None and quantization not in ACCEPTED_MODEL_TYPES:
        raise ValueError(f"quantization must be one of {', '.join(ACCEPTED_MODEL_TYPES)}, but it is {quantization!r}.")


def save(model_folder: Path, folder: Path, quantization: str | None = None) -> Foreign:
    """
    Writes a model and its tokenizer for CTranslate2.

    Args:
        model_folder (`Path`): a Vaswani model with its tokenizer.
        folder (`Path`): where to; is made if it is not there.
        quantization (`str`, *optional*): of the weights: `float32` (as also `None`), `float16`, `bfloat16`, `int16`,
            `int8`, or `int8_float32`, `int8_float16`, `int8_bfloat16`, which name the type of what is not rounded.

    Returns:
        [`Foreign`]: what was written, as it runs here. It tells logits of decoder ids that begin with
        `decoder_start_token_id`.

    Raises:
        ValueError: there is no such quantization, or as in [`VaswaniLoader`] and [`load_tokenizer`].
    """
    check_quantization(quantization)
    tokenizer = load_tokenizer(str(model_folder))
    model = VaswaniForConditionalGeneration.from_pretrained(model_folder, dtype=torch.float32)
    spec = VaswaniLoader()(model.requires_grad_(False), tokenizer)
    spec.validate()
    spec.optimize(quantization=quantization or "float32")
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    for name in TOKENIZER_FILES:
        if (model_folder / name).is_file():
            shutil.copyfile(model_folder / name, folder / name)
    written = Ctranslate2Translator(folder, tokenizer, model.generation_config, model.config)
    notes = notes_on(model.generation_config, model.config, written.tokens_of)
    is_rounded = quantization not in (None, "float32")
    if is_rounded:
        computed = written.translator.compute_type
        notes.append(
            f"The weights are rounded to {quantization}, with which this machine computes in {computed}: the logits "
            "differ, and so do some translations."
        )
    return Foreign(f"CTranslate2 {ctranslate2.__version__}", written.logits, written.translate, notes, is_rounded)


class Ctranslate2Translator:
    """
    A folder of CTranslate2's, as it runs here on one thread of the CPU.

    Args:
        folder (`Path`): what [`save`] wrote.
        tokenizer ([`PreTrainedTokenizerBase`]): the model's.
        generation_config ([`GenerationConfig`]): the model's.
        config ([`VaswaniConfig`]): the model's.
    """

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig, config: Any
    ) -> None:
        level = ctranslate2.get_log_level()
        # It warns of number formats that the processor has not; `compute_type` tells.
        ctranslate2.set_log_level(logging.ERROR)
        # torch has threads of its own here, and those of both would wait for each other.
        self.translator = ctranslate2.Translator(str(folder), intra_threads=1)
        ctranslate2.set_log_level(level)
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self.config = config
        self.tokens = vocabulary(tokenizer, config.vocab_size)
        self.ids = {token: id_ for id_, token in enumerate(self.tokens)}

    def tokens_of(self, ids: Iterable[int]) -> list[str]:
        """Ids as the engine takes them."""
        return [self.tokens[id_] for id_ in ids]

    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """
        Ids and mask of shape `(batch, source)` and decoder ids of shape `(batch, target)` -> logits of shape
        `(batch, target, vocab_size)`.

        Raises:
            ValueError: the decoder ids begin with another token than the model's.
        """
        start = start_token_id(self.generation_config, self.config)
        logits = []
        for source, mask, target in zip(input_ids, attention_mask, decoder_input_ids.tolist(), strict=True):
            if target[0] != start:
                raise ValueError(f"CTranslate2 starts with token {start}, but the decoder ids start with {target[0]}.")
            result = self.translator.translate_batch(
                [self.tokens_of(source[mask.bool()].tolist())],
                [self.tokens_of(target[1:])],
                beam_size=1,
                # None of the target's own tokens may end it.
                end_token=next(token for token, id_ in self.ids.items() if id_ not in target),
                min_decoding_length=0,
                max_decoding_length=len(target),
                max_input_length=0,
                return_logits_vocab=True,
            )[0]
            logits.append(torch.tensor(np.stack([np.array(of_token) for of_token in result.logits[0]])))
        return torch.stack(logits)

    def translate(self, sentences: Sequence[str]) -> list[str]:
        """Greedily, by those rules of the generation config that the engine has."""
        rules = self.generation_config
        sources = [self.tokens_of(ids) for ids in self.tokenizer(list(sentences))["input_ids"]]
        # As in `generate()`, where the decoder's first token has the table's first position.
        positions = number_of_positions(self.config)
        limits = [longest(rules, len(source), positions) for source in sources]
        results = self.translator.translate_batch(
            sources,
            max_batch_size=32,
            beam_size=1,
            end_token=self.tokens_of(eos_token_ids(rules)),
            # It may be one that is part of the text.
            return_end_token=True,
            suppress_sequences=[self.tokens_of(ids) for ids in never(rules)],
            min_decoding_length=rules.min_new_tokens or 0,
            no_repeat_ngram_size=rules.no_repeat_ngram_size or 0,
            repetition_penalty=1.0 if rules.repetition_penalty is None else rules.repetition_penalty,
            max_decoding_length=max(limits, default=1),
            max_input_length=0,
        )
        found = [result.hypotheses[0][:limit] for result, limit in zip(results, limits, strict=True)]
        ids = [[self.ids[token] for token in tokens] for tokens in found]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in ids]


def notes_on(
    generation_config: GenerationConfig,
    config: Any,
    tokens_of: Callable[[Iterable[int]], list[str]],
) -> list[str]:
    """What CTranslate2 does otherwise than `generate()`, and what to give `translate_batch`, one sentence each."""
    found = []
    fixed, last = fixed_limit(generation_config), must_end(generation_config)
    if fixed is not None:
        limit = fixed - last
        found.append(f"CTranslate2 stops at 256 tokens unless told otherwise: give max_decoding_length={limit}.")
    else:
        offset = generation_config.max_length_offset - last
        found.append(
            "CTranslate2 has one longest length for a batch, 256 unless told otherwise: give max_decoding_length, "
            f"the tokens of the batch's longest source + {offset}."
        )
    least = generation_config.min_new_tokens or 0
    if least != 1:
        found.append(f"CTranslate2 writes 1 token at least unless told otherwise: give min_decoding_length={least}.")
    found += _notes_on_the_search(generation_config)
    also = {name: getattr(generation_config, name) for name in ("no_repeat_ngram_size", "repetition_penalty")}
    settings = [f"{name}={value}" for name, value in also.items() if value not in RULES[name]]
    if settings:
        found.append(f"CTranslate2 has these rules by the same names: give {', '.join(settings)}.")
    if never(generation_config):
        tokens = [tokens_of(ids) for ids in never(generation_config)]
        found.append(f"CTranslate2 forbids no token unless told to: give suppress_sequences={tokens}.")
    ends = tokens_of(eos_token_ids(generation_config))
    if len(ends) > 1:
        found.append(f"CTranslate2 ends at one token unless told otherwise: give end_token={ends}.")
    positions = number_of_positions(config)
    found.append(
        "CTranslate2 cuts a source at 1,024 tokens unless told otherwise (max_input_length), and is here given "
        f"{positions:,} positions."
    )
    return found


def _notes_on_the_search(generation_config: GenerationConfig) -> list[str]:
    beams = generation_config.num_beams or 1
    if beams == 1:
        return ["CTranslate2 searches with 2 beams unless told otherwise: give beam_size=1."]
    found = []
    kind, alpha = generation_config.length_penalty_type, generation_config.length_penalty
    power = alpha = ALPHAS[kind] if alpha is None else alpha
    if kind == "gnmt":
        power = round(alpha * USUAL_LENGTH / (5 + USUAL_LENGTH), 2)
        found.append(
            f"CTranslate2 divides by a power of the length, and not by GNMT's ((5 + length) / 6)^{alpha:g}, which at "
            f"{USUAL_LENGTH} tokens grows like length^{power:g}."
        )
    # With as many finished hypotheses again, it finds in nearly all cases what a search finds that looks further.
    patience = 1 if generation_config.early_stopping is True else 2
    found.append(
        "CTranslate2 has 2 beams unless told otherwise, and ends with beam_size x patience finished hypotheses: give "
        f"beam_size={beams}, length_penalty={power:g}, patience={patience}, which comes nearest."
    )
    return found


if __name__ == "__main__":
    main()
