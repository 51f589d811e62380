"""
Word alignments from the attention of the decoder to the source.

The attention of one layer, averaged over its heads, says which source words a target word was made from. It is read at
the step that predicts the word or at the next one, whose input the word is: "Shift-Att" (Chen et al., 2020, arXiv
2004.14837).
"""

import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import Pipeline, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.modeling_vaswani import eager_attention_forward
from ..model.sentences_vaswani import (
    INVISIBLE,
    LOCK,
    MAX_POSITIONS,
    LanguageTags,
    Parts,
    evaluation_mode,
    kept,
    length_groups,
    visible,
)
from .budgets import in_memory, times_on

_ENDS = threading.local()


@contextmanager
def ended_by(check: Callable[[], object]) -> Iterator[None]:
    """
    Lets this thread end long work beside the search, such as alignments, within the block.

    Args:
        check (`Callable[[], object]`): called every few milliseconds; it raises the error that ends the work.
    """
    before, _ENDS.check = getattr(_ENDS, "check", None), check
    try:
        yield
    finally:
        _ENDS.check = before


def end_if_over() -> None:
    """Raises the error of [`ended_by`] if the work of this thread is to end."""
    if (check := getattr(_ENDS, "check", None)) is not None:
        check()


UNITS = ("words", "pieces")
METHODS = ("argmax", "intersection")
# On a CPU, numbers in the attention of one head that are computed at once, 16 MB, and pairs.
MAX_SCORES, MAX_PAIRS = 2**22, 64
# Most parts into which a text that is its own translation is divided.
MAX_PARTS = 256


@dataclass(frozen=True)
class Text:
    """
    A text as a model reads it.

    Attributes:
        text (`str`): the text.
        ids (`list[int]`): its tokens.
        spans (`list[tuple[int, int]]`): the characters of each token, from start to end; `</s>` has none.
        begin (`int`): where the text begins, after a language tag.
    """

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]
    begin: int = 0

    def pieces(self) -> list["TokenSpan"]:
        """Returns the tokens that are part of the text."""
        return [TokenSpan(start, end, [i]) for i, (start, end) in enumerate(self.spans) if self.begin <= start < end]

    def words(self) -> list["TokenSpan"]:
        """Returns the words, which are separated by white space, with their tokens."""
        words = [TokenSpan(*match.span(), []) for match in re.compile(r"\S+").finditer(self.text, self.begin)]
        left = iter(words)
        word = next(left, None)
        for i, (start, end) in enumerate(self.spans):
            # A token may have the space before a word, or nothing else: it belongs to that word.
            while word is not None and word.end <= start:
                word = next(left, None)
            if word is not None and self.begin <= start < end:
                word.tokens.append(i)
        return words

    def names(self, units: Sequence["TokenSpan"]) -> list[str]:
        """Returns words or pieces without the white space around them."""
        return [self.text[unit.start : unit.end].strip() for unit in units]


@dataclass(frozen=True)
class TokenSpan:
    """A word or a piece: its characters, from start to end, and the positions of its tokens."""

    start: int
    end: int
    tokens: list[int]


@dataclass(frozen=True)
class Alignment:
    """
    Which source words a translation's words were made from.

    Attributes:
        source (`list[str]`), target (`list[str]`): the words or pieces of both.
        probabilities (`torch.FloatTensor` of shape `(target, source)`): attention of each target word to each source
            word. A row sums to 1, less what the tokens get that are in no word, such as `</s>`.
        source_spans (`list[tuple[int, int]]`), target_spans (`list[tuple[int, int]]`): the characters of the words or
            pieces, from start to end; a piece may begin with the space in front of it.
    """

    source: list[str]
    target: list[str]
    probabilities: torch.Tensor
    source_spans: list[tuple[int, int]] = field(default_factory=list)
    target_spans: list[tuple[int, int]] = field(default_factory=list)

    def moved(self, source: int, target: int) -> "Alignment":
        """Returns the alignment of a part of a text, whose characters are counted from the beginning of the text."""
        both = ((self.source_spans, source), (self.target_spans, target))
        source_spans, target_spans = ([(start + by, end + by) for start, end in spans] for spans, by in both)
        return replace(self, source_spans=source_spans, target_spans=target_spans)

    def links(self, method: str = "argmax") -> list[tuple[int, int]]:
        """
        Returns the pairs of a source word and a target word that belong together.

        Args:
            method (`str`): `"argmax"`: each target word with the source word that it attends to most.
                `"intersection"`: of these, the pairs whose target word attends to the source word more than any other.

        Returns:
            `list[tuple[int, int]]`: numbers of a source and a target word, counted from 0, in ascending order.

        Raises:
            ValueError: there is no such method.
        """
        if method not in METHODS:
            raise ValueError(f"method must be {' or '.join(map(repr, METHODS))}, but it is {method!r}.")
        if not self.probabilities.numel():
            return []
        best, back = self.probabilities.max(dim=1), self.probabilities.argmax(dim=0).tolist()
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        # A word without tokens attends to nothing.
        links = [(i, j) for j, (i, attention) in enumerate(pairs) if attention > 0]
        return sorted(link for link in links if method == "argmax" or back[link[0]] == link[1])


def alignments(
    model: Any,
    tokenizer: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    unit: str = "words",
    layer: int | None = None,
    shift: bool | None = None,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
) -> list[Alignment]:
    """
    Aligns sentences and their translations, by one pass of the model over each pair.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, used in evaluation mode.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        sources (`Sequence[str]`): sentences, with the language tag that the model may need.
        targets (`Sequence[str]`): their translations.
        unit (`str`): `"words"`, which are separated by white space, or `"pieces"`, the tokens of the texts. A word
            gets the sum of the attention to its pieces, and attends to the source as its pieces do on average.
        layer (`int`, *optional*): layer of the decoder, counted from 0; by default `alignment_layer` of the config, or
            the last one.
        shift (`bool`, *optional*): read the attention at the step after the one that predicts a token; by default
            `alignment_shift` of the config.
        batch_size (`int`, *optional*): most pairs that are aligned at once; by default 64 on a CPU and more on a GPU,
            and fewer if they are long.
        tokens_per_batch (`int`, *optional*): maximum of pairs times longest source or target; by default that of the
            device.

    Returns:
        `list[Alignment]`: one for each pair.

    Raises:
        ValueError: the model is of another kind, or has no such layer; the tokenizer does not say which characters its
            tokens are; `sources` and `targets` have different lengths.

    Example:

    ```python
    >>> (alignment,) = alignments(model, tokenizer, ["A dog runs."], ["Ein Hund rennt."])
    >>> alignment.links()
    [(0, 0), (1, 1), (2, 2)]
    ```
    """
    if unit not in UNITS:
        raise ValueError(f"unit must be {' or '.join(map(repr, UNITS))}, but it is {unit!r}.")
    layers = aligning_layers(model, layer)
    if layer is None:
        layer = layers - 1 if model.config.alignment_layer is None else model.config.alignment_layer
    shift = model.config.alignment_shift if shift is None else shift
    found: list[Alignment] = [Alignment([], [], torch.zeros(0, 0))] * len(sources)
    how = [layer], batch_size, tokens_per_batch
    for i, source, target, attention in _attention(model, tokenizer, sources, targets, *how):
        found[i] = align(source, target, attention[0], unit, shift)
    return found


def identity(text: str, start: int, unit: str = "pieces") -> Alignment:
    """
    Returns the alignment of a text that was kept as it is, in equal parts, or word by word unless it is very long.

    Args:
        text (`str`): the text, which is its own translation.
        start (`int`): where it begins in the source.
        unit (`str`): as in [`alignments`].
    """
    units = [match.span() for match in re.finditer(r"\S+" if unit == "words" else r"(?s).", text)]
    size = max(1, -(-len(units) // MAX_PARTS))
    chunks = [units[place : place + size] for place in range(0, len(units), size)]
    spans = [(part[0][0], part[-1][1]) for part in chunks]
    parts = [text[slice(*span)] for span in spans]
    return Alignment(parts, parts, torch.eye(len(parts)), [(start + a, start + b) for a, b in spans], spans)


def align_parts(
    model: Any,
    tokenizer: Any,
    found: Sequence[tuple[Parts, Sequence[Sequence[str]]]],
    unit: str = "pieces",
    kept: Callable[[str], str | None] = kept,
    tokens_per_batch: int | None = None,
) -> list[list[tuple[str, list[Alignment]]]]:
    """
    Joins translations of the parts of texts, and aligns them.

    Args:
        model, tokenizer, unit, tokens_per_batch: as in [`alignments`].
        found (`Sequence`): each text in parts, and for each rank the translations of its parts.
        kept (`Callable`): returns `None` for a part that the model has read. Others are their own translations.

    Returns:
        `list`: for each text its translations, best first, each with the alignments of its parts, whose spans are
            characters of the whole text and its translation.
    """
    pairs = [
        (source, translation, kept(source.removeprefix(parts.front)) is None)
        for parts, ranks in found
        for rank in ranks
        for source, translation in zip(parts.sources, rank, strict=True)
    ]
    sources, targets = [pair[0] for pair in pairs if pair[2]], [pair[1] for pair in pairs if pair[2]]
    read = iter(alignments(model, tokenizer, sources, targets, unit=unit, tokens_per_batch=tokens_per_batch))
    aligned = (
        next(read) if is_read else identity(target, len(source) - len(target), unit)
        for source, target, is_read in pairs
    )
    texts = []
    for parts, ranks in found:
        candidates = []
        for rank in ranks:
            text, place, pieces = parts.join(rank), 0, []
            for (start, end), translation in zip(parts.spans, rank, strict=True):
                place = text.index(translation, place)
                piece = _as_written(next(aligned), parts.front, parts.text[start:end])
                pieces.append(piece.moved(start - len(parts.front), place))
                place += len(translation)
            candidates.append((text, pieces))
        texts.append(candidates)
    return texts


def _as_written(alignment: Alignment, front: str, text: str) -> Alignment:
    """Returns an alignment of what a model reads of a text, behind its front, by the characters of the text itself."""
    if visible(text) == text:
        return alignment
    hidden = {place for match in INVISIBLE.finditer(text) for place in range(*match.span())}
    places = [*range(len(front)), *(len(front) + place for place in range(len(text)) if place not in hidden)]
    spans = [(places[start], places[end - 1] + 1) if start < end else (0, 0) for start, end in alignment.source_spans]
    return replace(alignment, source_spans=spans)


def translate_and_align(
    pipeline: Any, texts: list[str], unit: str = "pieces", **kwargs: Any
) -> list[list[tuple[str, list[Alignment]]]]:
    """
    Translates texts by a pipeline, without their markup, and aligns their parts.

    Args:
        pipeline ([`VaswaniText2TextGenerationPipeline`]): the pipeline.
        texts (`list[str]`): the texts.
        unit (`str`): as in [`alignments`].
        kwargs: keywords of a call.

    Returns:
        `list`: as in [`align_parts`].
    """
    found = Pipeline.__call__(pipeline, texts, in_parts=True, **kwargs)
    return align_parts(pipeline.model, pipeline.tokenizer, found, unit, pipeline.kept)


def choose_alignment(
    model: Any,
    tokenizer: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
) -> tuple[int, bool]:
    """
    Chooses the layer that aligns best, and whether to read it a step later. It needs no known alignments, but takes
    those that agree most: linking each target word to the source word that it attends to most, and each source word to
    the target word that attends to it most, gives the most links in common. Chen et al. (2020) let the models of both
    directions agree in this way.

    Args:
        model, tokenizer, sources, targets, batch_size, tokens_per_batch: as in [`alignments`].

    Returns:
        `int` and `bool`: the layer, counted from 0, and `shift`.

    Raises:
        ValueError: as [`alignments`], or no pair has words on both sides.
    """
    layers = aligning_layers(model)
    counts = {(layer, shift): [0, 0] for layer in range(layers) for shift in (False, True)}
    how = range(layers), batch_size, tokens_per_batch
    for _, source, target, attention in _attention(model, tokenizer, sources, targets, *how):
        for (layer, shift), count in counts.items():
            alignment = align(source, target, attention[layer], "words", shift)
            count[0] += 2 * len(alignment.links("intersection"))
            count[1] += sum(alignment.probabilities.shape) if alignment.probabilities.numel() else 0
    if not any(total for _, total in counts.values()):
        raise ValueError("There is no pair of sentences with words on both sides to choose a layer by.")
    return max(counts, key=lambda key: counts[key][0] / counts[key][1])


def aligning_layers(model: Any, layer: int | None = None) -> int:
    """
    Returns the number of layers that attend to the source; raises a `ValueError` for a model without such layers, or
    without this one.
    """
    config: Any = model.config
    if config.model_type != "vaswani" or not config.is_encoder_decoder:
        raise ValueError(f"Alignments need a Vaswani model that translates, but this is a {type(model).__name__}.")
    layers: int = config.decoder_layers
    if layer is not None and not 0 <= layer < layers:
        raise ValueError(f"layer must be at least 0 and below decoder_layers ({layers}), but it is {layer}.")
    return layers


def read(tokenizer: Any, texts: Sequence[str], side: str = "text") -> list[Text]:
    """
    Encodes texts.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): the tokenizer.
        texts (`Sequence[str]`): the texts.
        side (`str`): `"text"` for sources, `"text_target"` for targets.

    Raises:
        ValueError: the tokenizer does not say which characters its tokens are.
    """
    if not getattr(tokenizer, "is_fast", False):
        name = type(tokenizer).__name__
        raise ValueError(f"Alignments need a tokenizer of the tokenizers library, but this is a {name}.")
    if not texts:
        return []
    with LOCK:
        encoded = tokenizer(**{side: list(texts)}, return_offsets_mapping=True, verbose=False)
    tags = LanguageTags(tokenizer)
    fronts = [tags.split(text)[0].strip() for text in texts]
    begins = [text.index(front) + len(front) for text, front in zip(texts, fronts, strict=True)]
    return list(map(Text, texts, encoded["input_ids"], encoded["offset_mapping"], begins))


def _attention(
    model: Any,
    tokenizer: Any,
    sources: Sequence[str],
    targets: Sequence[str],
    layers: Sequence[int],
    batch_size: int | None,
    tokens_per_batch: int | None,
) -> Iterator[tuple[int, Text, Text, torch.Tensor]]:
    """Yields the number of each pair, its texts, and the attention, of shape `(layers, target, source)`."""
    if isinstance(sources, str) or isinstance(targets, str):
        raise ValueError("Sources and targets must be lists of sentences, but one is a str.")
    if len(sources) != len(targets):
        raise ValueError(f"There are {len(targets)} translations for {len(sources)} sentences.")
    pairs = list(zip(read(tokenizer, sources), read(tokenizer, targets, "text_target"), strict=True))
    lengths = [max(len(side.ids) for side in pair) for pair in pairs]
    # Padded to its longer side, a pair is a square; but where it is short, its layers need more than its attention.
    of_position = MAX_SCORES // MAX_POSITIONS
    sizes = [length * max(length, of_position) for length in lengths]
    times = times_on(model.device)
    most = MAX_SCORES * times if tokens_per_batch is None else of_position * tokens_per_batch

    def attend(batch: list[int]) -> torch.Tensor:
        inputs, outputs = (
            tokenizer.pad(
                {"input_ids": [pairs[i][side].ids for i in batch]}, padding_side="right", return_tensors="pt"
            ).to(model.device)
            for side in (0, 1)
        )
        labels = outputs["input_ids"].masked_fill(outputs["attention_mask"] == 0, -100)
        return attention_to_source(model, inputs, labels, layers).cpu()

    groups = length_groups(sizes, most, most // 4, batch_size or MAX_PAIRS * times)
    with evaluation_mode(model):
        for batch, attention in in_memory(model, groups, lengths, attend):
            for row, i in enumerate(batch):
                end_if_over()
                source, target = pairs[i]
                yield i, source, target, attention[:, row, : len(target.ids), : len(source.ids)]


def align(source: Text, target: Text, attention: torch.Tensor, unit: str, shift: bool) -> Alignment:
    """Makes an alignment of the attention of all tokens, of shape `(target, source)`."""
    columns, rows = (text.words() if unit == "words" else text.pieces() for text in (source, target))
    # Behind the last token, which is `</s>` and in no word, no step is missing.
    attention = attention.roll(-1, dims=0) if shift else attention
    by_word = attention.new_zeros(len(attention), len(columns))
    for i, column in enumerate(columns):
        by_word[:, i] = attention[:, column.tokens].sum(dim=1)
    probabilities = torch.stack([by_word[row.tokens].mean(dim=0) for row in rows]) if rows else by_word[:0]
    # A word without tokens attends to nothing.
    probabilities = probabilities.nan_to_num(0.0)
    spans = [[(unit.start, unit.end) for unit in units] for units in (columns, rows)]
    return Alignment(source.names(columns), target.names(rows), probabilities, *spans)


@torch.inference_mode()
def attention_to_source(
    model: Any, inputs: Mapping[str, torch.Tensor], labels: torch.Tensor, layers: Sequence[int]
) -> torch.Tensor:
    """
    Computes the attention to the source in one pass over given translations.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, in evaluation mode.
        inputs (`Mapping`): `input_ids` and `attention_mask` of shape `(batch, source)`.
        labels (`torch.LongTensor` of shape `(batch, target)`): the translations, padded with -100.
        layers (`Sequence[int]`): layers of the decoder, counted from 0.

    Returns:
        `torch.FloatTensor` of shape `(layers, batch, target, source)`: attention weights, averaged over the heads. Row
        0 of the target predicts its first token, and row 1 has this token as its input.

    Raises:
        ValueError: a module in place of such an attention does not compute by queries and keys.
    """
    found: dict[int, torch.Tensor] = {}
    hidden = inputs["attention_mask"][:, None] == 0  # [batch, 1, source]
    _readable(model.model.decoder, layers, hidden, found)(
        input_ids=model.prepare_decoder_input_ids_from_labels(labels),
        encoder_hidden_states=model.model.encoder(**inputs).last_hidden_state,
        encoder_attention_mask=inputs["attention_mask"],
        use_cache=False,
        output_attentions=False,
        output_hidden_states=False,
    )
    for layer in layers:
        if layer not in found:
            raise ValueError(f"Alignments need the attention of layer {layer}, but another module is in its place.")
    return torch.stack([found[layer] for layer in layers])


# Name of [`_read_weights`] among the attention functions of transformers.
READING = "vaswani_alignment"


def _readable(decoder: Any, layers: Sequence[int], hidden: torch.Tensor, found: dict[int, torch.Tensor]) -> Any:
    """
    Returns a decoder of the same modules, up to the last of these layers, whose attention to the source is written to
    `found`. Only what leads to this attention is copied, without its weights: hooks or another config of the shared
    modules would be seen by threads that translate with the model.
    """

    def reading(attention: Any, number: int) -> Any:
        copied = _copied(attention)
        config = copy.copy(attention.config)
        vars(copied)["alignment"] = (number, hidden, found, config._attn_implementation)
        config._attn_implementation = READING
        copied.config = config
        return copied

    copies = nn.ModuleList()
    for number, layer in enumerate(decoder.layers[: max(layers) + 1]):
        if number in layers and isinstance(getattr(layer.cross_attn, "config", None), PretrainedConfig):
            layer = _copied(layer, cross_attn=reading(layer.cross_attn, number))
        copies.append(layer)
    return _copied(decoder, layers=copies)


def _copied(module: nn.Module, **parts: nn.Module) -> nn.Module:
    """Returns a module that shares all with another one, except for these parts; it is not compiled."""
    module = getattr(module, "_orig_mod", module)
    copied = copy.copy(module)
    copied._modules = {**module._modules, **parts}
    for name, value in vars(module).items():
        # The hooks of accelerate are such attributes.
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(copied)[name] = MethodType(value.__func__, copied)
        elif isinstance(value, partial) and value.args[:1] == (module,):
            vars(copied)[name] = partial(value.func, copied, *value.args[1:], **value.keywords)
    return copied


def _read_weights(
    module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, scaling: float, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention as the model does, and averages its weights over the heads on the way."""
    number, hidden, found, implementation = module.alignment
    found[number] = _mean_attention(query, key, hidden, scaling)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    return attention(module, query, key, *args, scaling=scaling, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(READING, _read_weights)


def _mean_attention(query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor, scaling: float) -> torch.Tensor:
    """
    Returns attention weights averaged over the heads, of shape `(batch, target, source)`. Head by head and, in long
    sentences, some rows of the target at a time, because all of them at once are several times as much as the result.
    """
    batch, heads, length, _ = query.shape
    mean = query.new_zeros(batch, length, key.shape[2], dtype=torch.float32)
    rows = max(1, MAX_SCORES * times_on(query.device) // (batch * key.shape[2]))
    for start in range(0, length, rows):
        part = slice(start, start + rows)
        for head in range(heads):
            scores = (query[:, head, part] @ key[:, head].transpose(1, 2)).float() * scaling
            mean[:, part] += scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1) / heads
    return mean
