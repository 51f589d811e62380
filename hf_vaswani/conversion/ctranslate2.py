"""Conversion to CTranslate2: a folder that `ctranslate2.Translator` loads. To translate:

    translator, tokenizer = ctranslate2.Translator("OUT"), AutoTokenizer.from_pretrained("OUT")
    source = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(["A small house."])["input_ids"]]
    hypothesis = translator.translate_batch(source, beam_size=4)[0].hypotheses[0]
    tokenizer.decode(tokenizer.convert_tokens_to_ids(hypothesis))

The tokenizer appends `</s>` to a source, so CTranslate2 is configured not to.
"""

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..extras import extra
from ..model.modeling_vaswani import VaswaniAttention, VaswaniDecoder, VaswaniEncoder, VaswaniForConditionalGeneration
from ..model.rules_vaswani import SEARCH_SETTINGS
from ..translation.batches import to_translate
from ..translation.budgets import most_positions, tokens_on
from ..translation.lines import Candidates
from ..translation.shortlist import FILE as SHORTLIST
from ..translation.shortlist import Shortlist
from .formats import CTRANSLATE2_ACTIVATIONS, Foreign, Loaded, check_expressible, copy_tokenizer
from .settings import (
    eos_token_ids,
    fixed_limit,
    forbidden_sequences,
    ignored_settings,
    max_new_tokens_for,
    start_token_id,
)

with extra("convert"):
    import ctranslate2
    from ctranslate2.converters.transformers import ModelLoader
    from ctranslate2.specs import transformer_spec
    from ctranslate2.specs.common_spec import Activation
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES

QUANTIZATIONS: tuple[str, ...] = tuple(ACCEPTED_MODEL_TYPES)
# Rows of the table of sinusoids. CTranslate2 could compute sinusoids itself, but only tensor2tensor's, counted from 1.
MIN_POSITIONS = 2048
# File beside the weights from which it takes a shortlist.
VOCABULARY_MAP = "vmap.txt"
# Arguments of `translate_batch` that a model or a call of an engine brings, or that are CTranslate2's defaults.
LEFT_OUT = {"return_end_token": True, "use_vmap": False, "suppress_sequences": [], "no_repeat_ngram_size": 0}
LEFT_OUT |= dict.fromkeys(("patience", "repetition_penalty", "length_penalty"), 1)
# Length of a translation, in tokens, at which CTranslate2's length penalty is fitted to GNMT's.
TYPICAL_LENGTH = 20


class VaswaniLoader(ModelLoader):
    """Turns Vaswani models into CTranslate2's."""

    def get_model_spec(self, model: VaswaniForConditionalGeneration) -> transformer_spec.TransformerSpec:
        """
        Describes the network in CTranslate2's terms.

        Args:
            model ([`VaswaniForConditionalGeneration`]): model whose weights do not require gradients.

        Returns:
            `TransformerSpec` with the weights of the model, but without its vocabulary.

        Raises:
            ValueError: CTranslate2 does not support the activation.
        """
        config = model.config
        check_expressible(config, "CTranslate2")
        first: Any = model.model.encoder.layers[0]
        sizes = {
            "num_heads": config.num_heads,
            "pre_norm": config.norm_position == "pre",
            "activation": getattr(Activation, CTRANSLATE2_ACTIVATIONS[config.activation_function]),
            "head_dim": max(head_dims(first.self_attn)),
            "layernorm_embedding": config.embedding_norm,
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
        """Fills in an encoder or decoder, except its embeddings."""
        spec.scale_embeddings = float(stack.positions.scale)
        encodings = stack.positions.encode(torch.arange(number_of_positions(stack.config)))
        if (segments := getattr(stack, "embed_segments", None)) is not None:
            # All tokens of a source are in the first segment.
            encodings = encodings + segments.weight[0]
        spec.position_encodings.encodings = encodings
        if stack.config.embedding_norm:
            self.set_layer_norm(spec.layernorm_embedding, stack.positions.norm)
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
        """Returns the tokens of the model, see [`vocabulary`]."""
        return vocabulary(tokenizer, model.config.vocab_size)

    def set_vocabulary(self, spec: transformer_spec.TransformerSpec, tokens: list[str]) -> None:
        """Registers the joint vocabulary for both sides."""
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)

    def set_config(self, config: Any, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the special tokens."""
        tokens = self.get_vocabulary(model, tokenizer)
        config.eos_token = tokens[eos_token_ids(model.generation_config)[0]]
        config.decoder_start_token = tokens[start_token_id(model.generation_config, model.config)]
        for name in ("bos_token", "unk_token"):
            # CTranslate2's defaults for these may be missing from the vocabulary.
            setattr(config, name, getattr(tokenizer, name) or config.eos_token)


def vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[str]:
    """Returns the token of each row of the embeddings, with made-up names for rows without one."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))
    tokens += [None] * (vocab_size - len(tokens))
    return [f"<row {id_}>" if token is None else token for id_, token in enumerate(tokens)]


def head_dims(attention: VaswaniAttention) -> tuple[int, int]:
    """Returns d_k and d_v of an attention."""
    heads = attention.num_heads
    return attention.k_proj.out_features // heads, attention.v_proj.out_features // heads


def set_attention(spec: Any, attention: VaswaniAttention) -> None:
    """
    Fills in an attention. In CTranslate2, all heads have one width: if d_k and d_v differ, the smaller one is padded
    with zeros, which change neither scores nor values.
    """
    d_k, d_v = head_dims(attention)
    width, heads = max(d_k, d_v), attention.num_heads
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    # Projections of the same states are fused.
    fused = [(query, key, value)] if len(spec.linear) == 2 else [(query,), (key, value)]
    for linear, projections in zip(spec.linear, fused, strict=False):
        linear.weight = torch.cat([pad_heads(projection.weight, heads, width) for projection in projections])
        if query.bias is not None:
            linear.bias = torch.cat([pad_heads(projection.bias, heads, width) for projection in projections])
    spec.linear[-1].weight = pad_heads(attention.out_proj.weight.T, heads, width).T
    if attention.out_proj.bias is not None:
        spec.linear[-1].bias = attention.out_proj.bias
    if d_k != width:
        spec.queries_scale = float(attention.scaling)


def pad_heads(rows: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """Pads the rows of each head with zeros, `(heads * head_dim, ...)` -> `(heads * width, ...)`."""
    by_head = rows.unflatten(0, (heads, -1))  # [heads, head_dim, ...]
    padded = by_head.new_zeros(heads, width, *by_head.shape[2:])
    padded[:, : by_head.shape[1]] = by_head
    return padded.flatten(0, 1)


def number_of_positions(config: Any) -> int:
    """Returns the number of rows in the table of positions."""
    learned = config.position_encoding == "learned"
    return config.max_position_embeddings if learned else max(config.max_position_embeddings, MIN_POSITIONS)


def save(loaded: Loaded, folder: Path, quantization: str | None = None) -> Foreign:
    """
    Writes a model and its tokenizer for CTranslate2.

    Args:
        loaded ([`Loaded`]): the model; it is not changed.
        folder (`Path`): folder to write.
        quantization (`str`, *optional*): number format of the weights: `float32` (default), `float16`, `bfloat16`,
            `int16`, `int8`, or `int8_float32`, `int8_float16`, `int8_bfloat16`, which also name the format of weights
            that are not quantized.

    Returns:
        [`Foreign`]: the model as read back from the folder. It computes logits only for decoder ids that begin with
        `decoder_start_token_id`.

    Raises:
        ValueError: CTranslate2 does not support the model.
    """
    write(loaded, folder, quantization)
    copy_tokenizer(loaded, folder)
    written = Ctranslate2Translator(folder, loaded)
    notes = [written.advice()]
    is_rounded = quantization not in (None, "float32")
    if is_rounded:
        notes.append(
            f"The weights are rounded to {quantization}, and this machine computes in "
            f"{written.translator.compute_type}: logits and some translations differ."
        )
    notes += ignored_settings(loaded.model.generation_config, "CTranslate2")
    return Foreign(
        f"CTranslate2 {ctranslate2.__version__}", written.logits, written.translate, notes=notes, is_rounded=is_rounded
    )


def write(loaded: Loaded, folder: Path, quantization: str | None = None) -> None:
    """Writes a model for CTranslate2, without its tokenizer; arguments and errors as of [`save`]."""
    # `optimize` quantizes weights in place.
    model = copy.deepcopy(loaded.model).to("cpu", torch.float32).requires_grad_(False)
    spec = VaswaniLoader()(model, loaded.tokenizer)
    spec.validate()
    spec.optimize(quantization=quantization or "float32")
    spec.save(str(folder))
    if (loaded.folder / SHORTLIST).is_file():
        # A damaged list is an error for those who want it.
        with suppress(ValueError):
            shortlist = Shortlist.load(str(loaded.folder), loaded.tokenizer, model.config.vocab_size)
            ends = eos_token_ids(model.generation_config)
            vocabulary_map = in_lines(shortlist, vocabulary(loaded.tokenizer, shortlist.vocab_size), ends)
            if vocabulary_map is not None:
                (folder / VOCABULARY_MAP).write_text(vocabulary_map, encoding="utf-8")


def in_lines(shortlist: Shortlist, tokens: Sequence[str], ends: Sequence[int]) -> str | None:
    """
    Returns a shortlist as CTranslate2 reads it: a line for each source token, with its translations behind a tab. The
    first line, without a source token, has those that any translation may have.

    Args:
        shortlist ([`Shortlist`]): the shortlist.
        tokens (`Sequence[str]`): the vocabulary.
        ends (`Sequence[int]`): ids that end a translation.

    Returns:
        `str`: the lines, or `None` if a token has a space, which separates tokens in this format.
    """
    lines = [("", list(dict.fromkeys(tokens[entry] for entry in (*shortlist.frequent.tolist(), *ends))))]
    for source, row in zip(tokens, shortlist.translations.tolist(), strict=True):
        targets = list(dict.fromkeys(tokens[entry] for entry in row))
        # A row of the embeddings without a token has a name that no text has.
        if targets != [source] or not source.startswith("<row "):
            lines.append((source, targets))
    used = {token for source, targets in lines[1:] for token in (source, *targets)}.union(lines[0][1])
    if any(not token or not set(token).isdisjoint(" \t\r\n") for token in used):
        return None
    return "".join(f"{source}\t{' '.join(targets)}\n" for source, targets in lines)


def check_compute_type(compute_type: str, device: str) -> None:
    """Raises a `ValueError` if a device, `"cpu"` or `"cuda"`, lacks a number format."""
    supported = sorted(ctranslate2.get_supported_compute_types(device))
    if compute_type not in ("auto", *supported):
        raise ValueError(
            f"compute_type {compute_type} is not supported by the {device.upper().replace('CUDA', 'GPU')} of this "
            f"machine: choose from auto, {', '.join(supported)}."
        )


class Ctranslate2Translator:
    """
    CTranslate2 model.

    Args:
        folder (`Path`): folder that [`save`] has written.
        loaded ([`Loaded`]): the original model with its tokenizer and settings.
        compute_type (`str`): number format of the computation; by default that of the weights.
        threads (`int`): number of batches that are translated at once.
        device (`str`): `"cpu"` or `"cuda"`.
        threads_per_batch (`int`): threads of the CPU that share a batch.
        shortlist (`bool`): whether to search among the entries of the model's shortlist alone.
        device_index (`int`): number of the GPU.
        tokens_per_batch (`int`, *optional*): token budget of a batch; by default that of the device.
    """

    def __init__(
        self,
        folder: Path,
        loaded: Loaded,
        compute_type: str = "default",
        threads: int = 1,
        device: str = "cpu",
        threads_per_batch: int = 1,
        shortlist: bool = False,
        device_index: int = 0,
        tokens_per_batch: int | None = None,
    ) -> None:
        level, torch_threads = ctranslate2.get_log_level(), torch.get_num_threads()
        # It warns of number formats that the processor does not have; the notes give `compute_type`.
        ctranslate2.set_log_level(logging.ERROR)
        try:
            self.translator = ctranslate2.Translator(
                str(folder),
                device,
                device_index=device_index,
                compute_type=compute_type,
                inter_threads=threads,
                intra_threads=threads_per_batch,
            )
        finally:
            ctranslate2.set_log_level(level)
            # They may have one OpenMP, whose number of threads CTranslate2 sets.
            torch.set_num_threads(torch_threads)
        tokenizer, self.config = loaded.tokenizer, loaded.model.config
        self.tokenizer, self.generation_config = tokenizer, loaded.model.generation_config
        self.shortlist = shortlist
        self.threads, self.tokens_per_batch = threads, tokens_per_batch
        self.device = torch.device(device, device_index)
        self.positions = number_of_positions(self.config)
        self.tokens = vocabulary(tokenizer, self.config.vocab_size)
        self.ids = {token: id_ for id_, token in enumerate(self.tokens)}
        self.suppressed: list[list[int]] = []
        if shortlist:
            # CTranslate2 always searches these, too.
            with open(folder / VOCABULARY_MAP, encoding="utf-8") as file:
                frequent = set(file.readline().strip("\t\n").split(" "))
            special = (tokenizer.bos_token, tokenizer.unk_token, tokenizer.pad_token)
            others = {token for token in special if token is not None} - frequent
            self.suppressed = [[self.ids[token]] for token in sorted(others) if token in self.ids]

    def tokens_of(self, ids: Iterable[int]) -> list[str]:
        """Returns the tokens of ids, which CTranslate2 takes as input."""
        return [self.tokens[id_] for id_ in ids]

    def logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """
        Computes logits of given targets.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`): source tokens.
            attention_mask (`torch.LongTensor` of shape `(batch, source)`): 1 for tokens, 0 for padding.
            decoder_input_ids (`torch.LongTensor` of shape `(batch, target)`): target tokens, after the start token.

        Returns:
            `torch.FloatTensor` of shape `(batch, target, vocab_size)`.

        Raises:
            ValueError: The decoder ids do not begin with the model's start token.
        """
        start = start_token_id(self.generation_config, self.config)
        logits = []
        for source, mask, target in zip(input_ids, attention_mask, decoder_input_ids.tolist(), strict=True):
            if target[0] != start:
                raise ValueError(f"The decoder ids start with token {target[0]}, but CTranslate2 starts with {start}.")
            result = self.translator.translate_batch(
                [self.tokens_of(source[mask.bool()].tolist())],
                [self.tokens_of(target[1:])],
                beam_size=1,
                # A token outside the target, which would otherwise end early.
                end_token=next(token for token, id_ in self.ids.items() if id_ not in target),
                min_decoding_length=0,
                max_decoding_length=len(target),
                max_input_length=0,
                return_logits_vocab=True,
            )[0]
            logits.append(torch.tensor(np.stack([np.array(of_token) for of_token in result.logits[0]])))
        return torch.stack(logits)

    def translate(self, sentences: Sequence[str]) -> list[str]:
        """Translates by greedy search, with the settings of the generation config that CTranslate2 supports."""
        return [candidates[0][1] for candidates in self.candidates(sentences, num_beams=1)]

    def candidates(
        self, sentences: Sequence[str], n_best: int | None = None, num_beams: int | None = None
    ) -> list[Candidates]:
        """
        Translates with the settings of the generation config that CTranslate2 supports, and the closest ones to the
        other rules of beam search.

        Args:
            sentences (`Sequence[str]`): sentences. One without words is its own translation.
            n_best (`int`, *optional*): size of the n-best lists; by default only the best translation, with score 0.
            num_beams (`int`, *optional*): beam size; by default that of the generation config.

        Returns:
            `list[list[tuple[float, str]]]`: scores, as in `sequences_scores` of `generate()`, and translations of each
            sentence, best first.
        """
        settings = self.generation_config
        if num_beams is not None:
            settings = copy.deepcopy(settings)
            settings.num_beams = num_beams
        kept, chosen, ids = to_translate(self.tokenizer, sentences)
        found: list[Candidates] = [[(0.0, text)] * (n_best or 1) for text in kept]
        for i, candidates in zip(chosen, self.search([ids[i] for i in chosen], settings, n_best), strict=True):
            texts = self.tokenizer.batch_decode([row for _, row in candidates], skip_special_tokens=True)
            found[i] = [(score, text) for (score, _), text in zip(candidates, texts, strict=True)]
        return found

    def search(
        self,
        sources: Sequence[Sequence[int]],
        settings: GenerationConfig,
        n_best: int | None = None,
        all_entries: bool = False,
    ) -> list[list[tuple[float, list[int]]]]:
        """
        Searches for the translations of token ids, each with its own maximum length.

        Args:
            sources (`Sequence[Sequence[int]]`): ids of each source.
            settings ([`GenerationConfig`]): settings of the search.
            n_best (`int`, *optional*): size of the lists, as in [`candidates`].
            all_entries (`bool`): search among all entries of the vocabulary, with a shortlist or without one.

        Returns:
            `list[list[tuple[float, list[int]]]]`: scores and ids of the translations of each source, best first,
            without the decoder's start token.
        """
        beams = settings.num_beams or 1
        # The decoder's start token takes the first position.
        limits = [max_new_tokens_for(settings, len(ids), self.positions) for ids in sources]
        groups: dict[int, list[int]] = defaultdict(list)
        for i, limit in enumerate(limits):
            # Greedy search can be cut afterwards. A forced </s> may leave no room.
            if limit > 0:
                groups[max(limits) if beams == 1 else limit].append(i)
        most, tokens = self.tokens_per_batch or tokens_on(self.device), sum(map(len, sources))
        if (at_once := most_positions(self.device, beams * len(self.tokens))) is not None:
            most = min(most, at_once * tokens // max(1, len(sources)))
        # No thread shall be without work.
        share = -(-tokens // self.threads)
        pending: list[tuple[int, Any]] = []
        for limit, members in sorted(groups.items(), reverse=True):
            results = self.translator.translate_batch(
                [self.tokens_of(sources[i]) for i in members],
                asynchronous=True,
                max_batch_size=max(1, min(most, share)),
                batch_type="tokens",
                num_hypotheses=n_best or 1,
                return_scores=n_best is not None,
                max_decoding_length=limit,
                **self.search_settings(settings, self.shortlist and not all_entries),
            )
            pending += zip(members, results, strict=True)
        found: list[list[tuple[float, list[int]]]] = [[(0.0, [])] * (n_best or 1) for _ in sources]
        for i, waiting in pending:
            result = waiting.result()
            rows = [[self.ids[token] for token in tokens[: limits[i]]] for tokens in result.hypotheses]
            found[i] = list(zip(result.scores if n_best else [0.0], rows, strict=True))
        return found

    def seconds_of_a_sentence(self) -> float:
        """Measures the translation of a made-up sentence, with some tokens of output."""
        sentence = [self.tokens[id_ % len(self.tokens)] for id_ in range(10, 26)]
        settings = {"beam_size": 4, "min_decoding_length": 8, "max_decoding_length": 8, "use_vmap": self.shortlist}
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            self.translator.translate_batch([sentence], **settings)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def search_settings(self, settings: GenerationConfig, shortlist: bool) -> dict[str, Any]:
        """Returns the arguments of `translate_batch` for a generation config, with or without the shortlist."""
        beams = settings.num_beams or 1
        forbidden = (*forbidden_sequences(settings), *(self.suppressed if shortlist else ()))
        found = {
            "beam_size": beams,
            "end_token": self.tokens_of(eos_token_ids(settings)),
            # If there are several, it may be part of the text.
            "return_end_token": True,
            "suppress_sequences": [self.tokens_of(ids) for ids in forbidden],
            "min_decoding_length": settings.min_new_tokens or 0,
            "no_repeat_ngram_size": settings.no_repeat_ngram_size or 0,
            "repetition_penalty": 1.0 if settings.repetition_penalty is None else settings.repetition_penalty,
            "max_input_length": 0,
            "use_vmap": shortlist,
        }
        return found if beams == 1 else found | closest_beam_search(settings)

    def advice(self) -> str:
        """Returns, as a sentence, the arguments of `translate_batch` with which [`search`] translates."""
        settings = self.generation_config
        found = self.search_settings(settings, shortlist=False)
        if len(found["end_token"]) == 1:
            # It is the model's own.
            del found["end_token"]
        limit = max_new_tokens_for(settings, 0)
        found["max_decoding_length"] = limit if fixed_limit(settings) is not None else f"<source tokens + {limit}>"
        arguments = [f"{key}={value}" for key, value in found.items() if (key, value) not in LEFT_OUT.items()]
        return f"CTranslate2 has defaults of its own: pass {', '.join(arguments)} to translate_batch."


def closest_beam_search(generation_config: GenerationConfig) -> dict[str, Any]:
    """Returns the arguments of CTranslate2's beam search that come closest to ours."""
    penalty_type, alpha = generation_config.length_penalty_type, generation_config.length_penalty
    power = SEARCH_SETTINGS["length_penalty"].by_type[penalty_type] if alpha is None else alpha
    if penalty_type == "gnmt":
        power = round(power * TYPICAL_LENGTH / (5 + TYPICAL_LENGTH), 2)
    # With twice as many finished hypotheses, the result is nearly always that of a search without early stopping.
    return {"length_penalty": power, "patience": 1 if generation_config.early_stopping is True else 2}
