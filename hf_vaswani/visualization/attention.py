"""Attention weights of all layers and heads for one text (Section 3.2), and what their heads attend to."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..model.sentences_vaswani import evaluation_mode
from ..translation.alignment import Alignment, Text, align, aligning_layers, read

# A visible space, and how vocabularies write one in front of a word.
SPACE, SPACES = "␣", ("Ġ", "▁", " ")


@dataclass(frozen=True)
class Attention:
    """
    Attention weights of a model for one text.

    Attributes:
        source (`Text`, *optional*): what the encoder reads; `None` for a decoder on its own.
        target (`Text`, *optional*): what the decoder writes; `None` for an encoder on its own.
        inputs (`list[int]`): the decoder's inputs, which are `target.ids` shifted right by one. A decoder on its own
            reads the text itself: `target.ids`, without the last.
        weights (`dict[str, torch.FloatTensor]`): for each of `"encoder"`, `"decoder"` and `"cross"` that the model
            has, of shape `(layers, heads, target, source)`: row t is what position t attends to.
        log_probs (`torch.FloatTensor` of shape `(target,)`): log-probability of each token of the target, given those
            before it. A decoder on its own does not predict its first token.
    """

    source: Text | None
    target: Text | None
    inputs: list[int]
    weights: dict[str, torch.Tensor]
    log_probs: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def texts(self) -> dict[str, Text]:
        """Returns the texts of the sides that the model has, by `"source"` and `"target"`."""
        found = {"source": self.source, "target": self.target}
        return {side: text for side, text in found.items() if text is not None}


def collect_attention(model: Any, tokenizer: Any, source: str, target: str | Sequence[int] | None = None) -> Attention:
    """
    Computes the attention weights of all layers and heads, in one pass over a text.

    Args:
        model ([`PreTrainedModel`]): a Vaswani model, used in evaluation mode.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        source (`str`): the text, with the language tag that the model may need.
        target (`str` or `Sequence[int]`, *optional*): its translation, or the ids of it. Models that translate need
            it. For a decoder on its own it is the whole text, and `source` is not read.

    Returns:
        [`Attention`]: on the CPU, in float32.

    Raises:
        ValueError: the model is of another kind, or a translation is missing.

    Example:

    ```python
    >>> attention = collect_attention(model, tokenizer, "A dog runs.", "Ein Hund rennt.")
    >>> attention.weights["cross"].shape  # layers, heads, target, source
    torch.Size([2, 4, 4, 4])
    ```
    """
    kind = model_kind(model)
    model = with_eager_attention(model)
    text = None if kind == "decoder" else read(tokenizer, [source])[0]
    with torch.inference_mode():
        if text is not None and kind == "encoder":
            found = model.get_encoder()(input_ids=_row(model, text.ids), output_attentions=True)
            return Attention(text, None, [], {"encoder": _stacked(found.attentions)})
        if target is None:
            raise ValueError("A decoder's attention needs what it writes: pass target.")
        if isinstance(target, str):
            return _decoder_attention(model, text, read(tokenizer, [target], "text_target")[0])
        return _decoder_attention(model, text, text_from_ids(tokenizer, target))


def _row(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([ids], device=model.device)


def _stacked(layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights of each layer, of shape `(1, heads, target, source)` -> `(layers, heads, target, source)`."""
    return torch.cat(list(layers)).float().cpu()


def _decoder_attention(model: Any, source: Text | None, target: Text) -> Attention:
    """Computes what the stacks of a model attend to that writes a target, and the log-probabilities of its tokens."""
    if source is None:
        # The last token is predicted, but not read. The first one is given.
        inputs, predicted = target.ids[:-1] or target.ids, target.ids[1:]
        found = model(input_ids=_row(model, inputs), use_cache=False, output_attentions=True)
        weights = {"decoder": found.attentions}
    else:
        predicted = target.ids
        shifted = model.prepare_decoder_input_ids_from_labels(_row(model, predicted))
        inputs, ids = shifted[0].tolist(), _row(model, source.ids)
        found = model(input_ids=ids, decoder_input_ids=shifted, use_cache=False, output_attentions=True)
        weights = {"encoder": found.encoder_attentions, "decoder": found.decoder_attentions}
        weights["cross"] = found.cross_attentions
    log_probs = found.logits[0, : len(predicted)].float().log_softmax(dim=-1).cpu()
    log_probs = log_probs.gather(1, torch.tensor(predicted, dtype=torch.long)[:, None])[:, 0]
    if source is None:
        log_probs = torch.cat([torch.zeros(1), log_probs])
    return Attention(source, target, inputs, {kind: _stacked(layers) for kind, layers in weights.items()}, log_probs)


def model_kind(model: Any) -> str:
    """
    Returns `"translation"`, `"encoder"` or `"decoder"`: the stacks that a model has.

    Raises:
        ValueError: it is not a Vaswani model, or one without the head that `"translation"` and `"decoder"` need.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "vaswani":
        raise ValueError(f"This needs a Vaswani model, but it is a {type(model).__name__}.")
    if config.is_encoder_decoder or "decoder" in config.stacks:
        if not hasattr(model, "generate") or not model.can_generate():
            raise ValueError(
                f"This needs a model that generates text or an encoder, but it is a {type(model).__name__}."
            )
        return "translation" if config.is_encoder_decoder else "decoder"
    return "encoder"


def with_eager_attention(model: Any) -> Any:
    """
    Returns a copy of a model that shares its weights and returns its attention weights. Switching the model itself, or
    the hooks that `output_attentions` leaves on it, would disturb others who translate with it.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    with evaluation_mode(model):
        found = copy.deepcopy(model, shared)
    found.set_attn_implementation("eager")
    return found


def text_from_ids(tokenizer: Any, ids: Sequence[int]) -> Text:
    """
    Returns tokens as a text, with the characters of each; special tokens have none.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): their tokenizer.
        ids (`Sequence[int]`): tokens.
    """
    ids = [int(token) for token in ids]
    special = set(tokenizer.all_special_ids)
    spans: list[tuple[int, int]] = []
    end = 0
    for i, token in enumerate(ids):
        start = end
        if token not in special:
            so_far = tokenizer.decode(ids[: i + 1], skip_special_tokens=True)
            # The last token of several that make a letter has all of it.
            end = max(start, len(so_far.rstrip("\ufffd")))
        spans.append((start, end))
    return Text(tokenizer.decode(ids, skip_special_tokens=True), ids, spans)


def pieces(tokenizer: Any, text: Text) -> list[str]:
    """Returns what each token stands for, see [`piece`]; the last of the tokens that make a letter has all of it."""
    found = []
    for token, (start, end) in zip(text.ids, text.spans, strict=True):
        characters = text.text[start:end]
        is_part = characters and characters.strip() != tokenizer.decode([token]).strip()
        found.append(characters.replace(" ", SPACE) if is_part else piece(tokenizer, token))
    return found


def piece(tokenizer: Any, token: int) -> str:
    """Returns what a token stands for: its characters, with a visible space, or its name in the vocabulary."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    if name and not name.strip("".join(SPACES)):
        return SPACE * len(name)
    characters = "" if token in tokenizer.all_special_ids else str(tokenizer.decode([token]))
    # A part of a letter has none.
    if not characters.strip() or "\ufffd" in characters:
        return name.replace(" ", SPACE)
    # Alone, a token is decoded without the space in front of it.
    space = " " if name.startswith(SPACES) and not characters.startswith(" ") else ""
    return f"{space}{characters}".replace(" ", SPACE)


# ---- What heads do -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """
    What a head attends to.

    Attributes:
        name (`str`): the role.
        share (`float`): the share of its attention that goes there, averaged over the positions that have it.
    """

    name: str
    share: float


def head_roles(attention: Attention, links: Sequence[tuple[int, int]] = ()) -> dict[str, list[list[list[Role]]]]:
    """
    Measures how much of each head's attention goes to places that have a name, on average over the text's positions.

    Args:
        attention ([`Attention`]): the weights.
        links (`Sequence[tuple[int, int]]`): source tokens and rows of the weights that belong together.

    Returns:
        `dict[str, list[list[list[Role]]]]`: for each kind of attention, layer and head, the roles in descending order
        of their shares. A role that no position of the text can have is missing.
    """
    found: dict[str, list[list[list[Role]]]] = {}
    for kind, weights in attention.weights.items():
        shares = _shares(kind, weights, attention, links)
        layers, heads = weights.shape[:2]
        found[kind] = [
            [
                sorted(
                    (Role(name, float(share[layer, head])) for name, share in shares.items()),
                    key=lambda role: -role.share,
                )
                for head in range(heads)
            ]
            for layer in range(layers)
        ]
    return found


def _shares(
    kind: str, weights: torch.Tensor, attention: Attention, links: Sequence[tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Returns the mean share of each role, of shape `(layers, heads)`."""
    rows, columns = weights.shape[2:]
    found: dict[str, torch.Tensor] = {}

    def mean(offset: int) -> torch.Tensor:
        return weights.diagonal(offset, dim1=2, dim2=3).mean(dim=-1)

    if kind != "cross":
        found["same token"] = mean(0)
        if rows > 1:
            found["previous token"] = mean(-1)
            if kind == "encoder":
                found["next token"] = mean(1)
    elif links:
        # A target token may have several source tokens: their sum is what it attends to.
        mask = torch.zeros(rows, columns)
        mask[[j for _, j in links], [i for i, _ in links]] = 1
        has_links = mask.sum(dim=1) > 0
        found["alignment"] = (weights * mask).sum(dim=-1)[..., has_links].mean(dim=-1)
    if kind == "decoder":
        # The first row has no other choice.
        if rows > 1:
            found["first token"] = weights[:, :, 1:, 0].mean(dim=-1)
    elif attention.source is not None and attention.source.spans[-1][0] >= attention.source.spans[-1][1]:
        found["end of sentence"] = weights[..., -1].mean(dim=-1)
    return found


def alignment_of(model: Any, attention: Attention) -> tuple[Alignment, list[tuple[int, int]]]:
    """
    Aligns the words of a translation with its source, by the layer and step of the model's config.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model.
        attention ([`Attention`]): its weights for both.

    Returns:
        [`Alignment`], and for [`head_roles`] the pairs of a source token and the row of the weights that its links
        join.
    """
    layers, layer, shift = aligning_layers(model), model.config.alignment_layer, model.config.alignment_shift
    weights = attention.weights["cross"][layers - 1 if layer is None else layer].mean(dim=0)
    source: Any = attention.source
    target: Any = attention.target
    found = align(source, target, weights, "words", shift)
    sources, targets = source.words(), target.words()
    pairs = [(i, j + shift) for a, b in found.links() for i in sources[a].tokens for j in targets[b].tokens]
    return found, [(i, row) for i, row in pairs if row < len(weights)]
