"""The explorer: one page that shows what a model does with a text, without any other file or host."""

import base64
import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files import atomic_write_text
from ..model.heads_vaswani import VaswaniClassifier, VaswaniForMaskedLM, VaswaniForPreTraining
from ..model.sentences_vaswani import evaluation_mode
from ..translation.alignment import Text, read
from .attention import (
    Attention,
    Role,
    alignment_of,
    collect_attention,
    head_roles,
    model_kind,
    piece,
    pieces,
)
from .search_record import SearchRecord, record_search

# The page grows with the square of it. Longer text has more tokens, and is not tokenized.
MAX_TOKENS, MAX_CHARACTERS = 200, 10_000
# Tokens that a decoder on its own adds to a text.
NEW_TOKENS = 20
# Neighbours of a token: the entries of the vocabulary whose embeddings have the greatest cosine with its own.
NEIGHBOURS = 5
# Weights are stored as whole numbers up to this one, in 16 bits.
FULL = 2**16 - 1


@dataclass(frozen=True)
class Page:
    """
    The page of one text. In a notebook, it shows itself.

    Attributes:
        html (`str`): the page.
        title (`str`): its title.
    """

    html: str
    title: str

    def save(self, path: str | Path) -> None:
        """Writes the page into a file, which opens in any browser."""
        atomic_write_text(Path(path), self.html)

    def _repr_html_(self) -> str:
        # In a frame, notebook and page do not see each other's styles.
        source, title = html.escape(self.html), html.escape(self.title)
        return (
            f'<iframe srcdoc="{source}" title="{title}" sandbox="allow-scripts" loading="lazy" '
            'style="width: 100%; height: 46rem; border: 1px solid #8888"></iframe>'
        )


def explore(
    model: Any, tokenizer: Any, text: str, *, name: str | None = None, settings: Mapping[str, Any] | None = None
) -> Page:
    """
    Makes a page that shows what a model does with a text: translation and alignment, n-best list, the search step by
    step, attention of all heads, positions and embeddings. Encoders and decoders on their own show what they have.

    Args:
        model ([`PreTrainedModel`]): a Vaswani model, used in evaluation mode.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        text (`str`): a sentence, with the language tag that the model may need.
        name (`str`, *optional*): name of the model for the page; by default where it was loaded from.
        settings (`Mapping[str, Any]`, *optional*): settings of `generate()`, such as `{"num_beams": 4}`. A decoder on
            its own adds 20 tokens to the text, unless `max_new_tokens` or `max_length` says otherwise.

    Returns:
        [`Page`]: `page.save("page.html")` writes it.

    Raises:
        ValueError: the model is of another kind; the text is empty, or has more than 200 tokens.

    Example:

    ```python
    >>> explore(model, tokenizer, "A dog runs.").save("page.html")
    ```
    """
    kind = model_kind(model)
    settings = dict(settings or {})
    source = _read(tokenizer, text, is_prompt=kind == "decoder")
    data: dict[str, Any] = {"kind": kind, "name": name or model.config.name_or_path or type(model).__name__}
    if kind == "encoder":
        attention = collect_attention(model, tokenizer, text)
        links: list[tuple[int, int]] = []
        data["words"] = {"source": _words(source), "target": None}
        data["predictions"] = _predictions(model, tokenizer, source)
    else:
        if kind == "decoder" and not {"max_new_tokens", "max_length"} & settings.keys():
            settings["max_new_tokens"] = NEW_TOKENS
        prompt = source.ids if kind == "decoder" else []
        search = record_search(model, torch.tensor([source.ids], device=model.device), **settings)
        written = prompt + search.hypotheses[0].ids
        attention = collect_attention(model, tokenizer, text, written)
        links = _add_words(data, model, attention, len(prompt))
        data["search"] = _search(tokenizer, search, prompt)
    data["attention"] = _attention(tokenizer, attention, head_roles(attention, links))
    data["positions"] = _positions(model, attention)
    data["embeddings"] = _embeddings(model, tokenizer, attention)
    data["paper"] = _paper(model, kind, data.get("search"), len(source.ids) if kind == "translation" else 0)
    title = f"{text} – {data['name']}"
    return Page(_page(title, data), title)


def _read(tokenizer: Any, text: str, is_prompt: bool) -> Text:
    """Encodes the text of a page, without `</s>` if it is a prompt, which goes on; refuses one without or too long."""
    if not isinstance(text, str):
        raise ValueError(f"The text must be a str, but it is a {type(text).__name__}.")
    if not text.strip():
        raise ValueError("There is no text to explore.")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"The text has {len(text):,} characters, but a page shows at most {MAX_TOKENS} tokens: shorten it."
        )
    source = read(tokenizer, [text])[0]
    if is_prompt and source.ids[-1:] == [tokenizer.eos_token_id]:
        source = Text(source.text, source.ids[:-1], source.spans[:-1], source.begin)
    if not 0 < len(source.ids) <= MAX_TOKENS:
        raise ValueError(
            f"The text has {len(source.ids)} tokens, but a page shows from 1 to {MAX_TOKENS}: shorten it."
        )
    return source


# ---- The page ----------------------------------------------------------------------------------------------------


def _page(title: str, data: dict[str, Any]) -> str:
    """Puts title and data into the page."""
    template, style, script = (
        resources.files(__package__).joinpath(f"explorer.{ending}").read_text("utf-8")
        for ending in ("html", "css", "js")
    )
    # Within a script, "<" could end it.
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"TITLE": html.escape(title), "STYLE": style, "SCRIPT": script, "DATA": content}
    before, *rest = template.split("{{")
    return before + "".join(parts[part.split("}}", 1)[0]] + part.split("}}", 1)[1] for part in rest)


def _base64(numbers: torch.Tensor) -> str:
    return base64.b64encode(numbers.contiguous().numpy().tobytes()).decode()


def _rounded(value: float | None, digits: int = 6) -> float | None:
    """Rounds to significant digits; JSON has no infinity."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


# ---- Words -------------------------------------------------------------------------------------------------------


def marked_parts(text: str, marks: Iterable[tuple[int, int, int]]) -> Iterator[tuple[str, int | None]]:
    """Yields the parts of a text, given start, end and number of those that are marked, in their order."""
    place = 0
    for start, end, number in marks:
        if place < start:
            yield text[place:start], None
        yield text[start:end], number
        place = end
    if place < len(text):
        yield text[place:], None


def _words(text: Text) -> list[list[Any]]:
    """Returns the parts of a text: words with their numbers, and what is between them."""
    marks = ((word.start, word.end, number) for number, word in enumerate(text.words()))
    return [[part] if number is None else [part, number] for part, number in marked_parts(text.text, marks)]


def _add_words(data: dict[str, Any], model: Any, attention: Attention, given: int) -> list[tuple[int, int]]:
    """Adds the words of both sides, their probabilities and links; returns the links for [`head_roles`]."""
    links: list[tuple[int, int]] = []
    words: dict[str, Any] = {"source": None if attention.source is None else _words(attention.source)}
    target: Any = attention.target
    words["target"] = _words(target)
    log_probs = attention.log_probs.tolist()
    # Words of a prompt, and words without tokens, have no probability.
    words["probabilities"] = [
        _rounded(math.exp(sum(log_probs[i] for i in word.tokens))) if word.tokens and word.tokens[0] >= given else None
        for word in target.words()
    ]
    if "cross" in attention.weights:
        alignment, links = alignment_of(model, attention)
        words["links"] = [[i, j, _rounded(float(alignment.probabilities[j, i]))] for i, j in alignment.links()]
    data["words"] = words
    return links


# ---- Search ------------------------------------------------------------------------------------------------------


def _search(tokenizer: Any, search: SearchRecord, prompt: Sequence[int]) -> dict[str, Any]:
    """Returns the record of a search, with texts in place of ids."""
    names: dict[int, str] = {}

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode([*prompt, *ids], skip_special_tokens=True))

    steps = []
    running: list[list[int]] = [[]]
    for step in search.steps:
        rows = []
        for each in step.candidates:
            names.setdefault(each.token, piece(tokenizer, each.token))
            numbers = _rounded(each.log_prob), _rounded(each.total)
            rows.append([each.parent, each.token, *numbers, int(each.ends), each.rank, int(each.finished)])
        steps.append(
            {
                "running": [text(ids) for ids in running],
                "candidates": rows,
                "finished": step.finished,
                "upper_bound": _rounded(step.upper_bound),
                "threshold": _rounded(step.threshold),
            }
        )
        kept = sorted((each for each in step.candidates if each.rank is not None), key=lambda each: each.rank or 0)
        running = [[*running[each.parent], each.token] for each in kept]
    hypotheses = [
        {
            "text": text(each.ids),
            "length": len(each.ids),
            "total": _rounded(each.total),
            "penalty": _rounded(each.penalty),
            "score": _rounded(each.score),
            "cut": each.is_cut,
            "path": [each.step, each.candidate],
        }
        for each in search.hypotheses
    ]
    return {
        "settings": search.settings,
        "maxLength": search.max_length,
        "steps": steps,
        "tokens": names,
        "hypotheses": hypotheses,
        "stop": search.stop,
    }


# ---- Attention, positions, embeddings ----------------------------------------------------------------------------


def _attention(
    tokenizer: Any, attention: Attention, roles: dict[str, list[list[list[Role]]]]
) -> dict[str, dict[str, Any]]:
    """Returns the weights as whole numbers, with what rows and columns stand for."""
    source = [] if attention.source is None else pieces(tokenizer, attention.source)
    target = [] if attention.target is None else pieces(tokenizer, attention.target)
    inputs = [piece(tokenizer, token) for token in attention.inputs]
    outputs = target[1:] if attention.source is None else target
    axes = {
        "encoder": (source, source, None),
        "decoder": (inputs, inputs, outputs),
        "cross": (inputs, source, outputs),
    }
    found = {}
    for kind, weights in attention.weights.items():
        rows, columns, predicted = axes[kind]
        whole = (weights * FULL).round().clamp(0, FULL).to(torch.int32)
        found[kind] = {
            "shape": list(weights.shape),
            "rows": rows,
            "columns": columns,
            "predicted": predicted,
            "roles": [
                [[[role.name, _rounded(role.share, 4)] for role in head] for head in layer] for layer in roles[kind]
            ],
            # Lower and upper byte.
            "weights": _base64(torch.stack([whole % 256, whole // 256], dim=-1).to(torch.uint8)),
        }
    return found


@torch.inference_mode()
def position_encodings(stack: Any, length: int) -> torch.Tensor:
    """
    Returns the encodings of the first positions of a stack (Section 3.5).

    Args:
        stack ([`VaswaniStack`]): encoder or decoder.
        length (`int`): number of positions.

    Returns:
        `torch.FloatTensor` of shape `(length, d_model)`.

    Raises:
        ValueError: learned positions are fewer than that.
    """
    device = next(stack.parameters()).device
    stack.positions.check(length - 1)
    return stack.positions.encode(torch.arange(length, device=device)).float().cpu()


def _positions(model: Any, attention: Attention) -> list[dict[str, Any]]:
    """Returns the encodings of the text's positions, in 8 bits: of both sides, if they are learned."""
    lengths = {side: len(text.ids) for side, text in attention.texts().items()}
    stacks = {"source": model.get_encoder, "target": model.get_decoder}
    sides = {side: (stacks[side](), length) for side, length in lengths.items()}
    if model.config.position_encoding == "sinusoidal":
        # The same for both.
        sides = {"text": (next(iter(sides.values()))[0], max(lengths.values()))}
    found = []
    for side, (stack, length) in sides.items():
        is_learned = stack.positions.table is not None
        # The last token of a target is not read, so there may be no position for it.
        most = stack.positions.max_position_embeddings if is_learned else length
        encodings = position_encodings(stack, min(length, most))
        scale = float(encodings.abs().max()) or 1.0
        found.append(
            {
                "side": side,
                "shape": list(encodings.shape),
                "first": 0 if is_learned else stack.positions.offset,
                "scale": _rounded(scale),
                "layout": None if is_learned else model.config.sinusoid_layout,
                "values": _base64((encodings / scale * 127).round().to(torch.int8)),
            }
        )
    return found


class Projection(NamedTuple):
    """
    Tokens in the plane of the first two principal components of their embeddings.

    Attributes:
        points (`torch.FloatTensor` of shape `(tokens, 2)`): their places.
        neighbours (`torch.LongTensor` of shape `(tokens, neighbours)`): the nearest entries of the vocabulary to each
            of them, nearest first.
        cosines (`torch.FloatTensor` of shape `(tokens, neighbours)`): cosines of the angles between both.
        neighbour_points (`torch.FloatTensor` of shape `(tokens, neighbours, 2)`): places of the neighbours.
        explained (`torch.FloatTensor` of shape `(2,)`): share of the variance of the tokens' embeddings in each
            component.
    """

    points: torch.Tensor
    neighbours: torch.Tensor
    cosines: torch.Tensor
    neighbour_points: torch.Tensor
    explained: torch.Tensor


@torch.inference_mode()
def project_embeddings(matrix: torch.Tensor, tokens: Sequence[int], excluded: Sequence[int] = ()) -> Projection:
    """
    Projects the embeddings of tokens to two dimensions by principal component analysis.

    Args:
        matrix (`torch.Tensor` of shape `(vocab_size, d_model)`): the embedding matrix (Section 3.4).
        tokens (`Sequence[int]`): tokens, each once.
        excluded (`Sequence[int]`): tokens that are nobody's neighbours, such as padding.
    """
    matrix = matrix.detach().float().cpu()
    chosen = matrix[list(tokens)]
    mean = chosen.mean(dim=0)
    _, values, directions = torch.linalg.svd(chosen - mean, full_matrices=False)
    variances = torch.nn.functional.pad(values.square(), (0, 2))
    axes = torch.zeros(matrix.shape[1], 2)
    axes[:, : min(2, len(directions))] = directions[:2].T
    lengths = matrix.norm(dim=1).clamp(min=1e-9)
    cosines = chosen @ matrix.T / lengths / lengths[list(tokens), None]
    cosines[:, list(excluded)] = -torch.inf
    cosines[range(len(tokens)), list(tokens)] = -torch.inf
    best = cosines.topk(min(NEIGHBOURS, max(matrix.shape[0] - 1 - len(set(excluded)), 0)))
    explained = variances[:2] / variances.sum().clamp(min=1e-9)
    places = (matrix[best.indices] - mean) @ axes
    return Projection((chosen - mean) @ axes, best.indices, best.values, places, explained)


def _embeddings(model: Any, tokenizer: Any, attention: Attention) -> dict[str, Any]:
    """Returns the places of the text's tokens and of their neighbours."""
    excluded = [token for token in (tokenizer.pad_token_id,) if token is not None]
    texts = attention.texts()
    matrices = {
        side: model.get_input_embeddings().weight if side == "source" else model.get_decoder().embed_tokens.weight
        for side in texts
    }
    shared = len({weight.data_ptr() for weight in matrices.values()}) == 1
    plots = []
    for sides in [tuple(texts)] if shared else [(side,) for side in texts]:
        owners: dict[int, str] = {}
        for side in sides:
            for token in texts[side].ids:
                owners[token] = "both" if owners.get(token, side) != side else side
        found = project_embeddings(matrices[sides[0]], list(owners), excluded)
        points = []
        for token, place, *near in zip(owners, *(part.tolist() for part in found[:4]), strict=True):
            neighbours = [
                [piece(tokenizer, other), *(_rounded(x, 4) for x in (cosine, *there))]
                for other, cosine, there in zip(*near, strict=True)
            ]
            points.append([piece(tokenizer, token), owners[token], *(_rounded(x, 4) for x in place), neighbours])
        plots.append({"points": points, "explained": [_rounded(x, 3) for x in found.explained.tolist()]})
    return {"shared": shared and len(texts) > 1, "plots": plots}


# ---- Encoders on their own ---------------------------------------------------------------------------------------


def _predictions(model: Any, tokenizer: Any, source: Text) -> list[dict[str, Any]]:
    """Returns what the head of an encoder says of the text: tables of a title, and labels with probabilities."""
    if not isinstance(model, (VaswaniForMaskedLM, VaswaniForPreTraining, VaswaniClassifier)):
        return []
    with evaluation_mode(model), torch.inference_mode():
        output = model(input_ids=torch.tensor([source.ids], device=model.device))
    names = pieces(tokenizer, source)
    if not isinstance(model, VaswaniClassifier):
        is_pair = isinstance(model, VaswaniForPreTraining)
        logits = (output.prediction_logits if is_pair else output.logits)[0].float().cpu()
        places = [i for i, token in enumerate(source.ids) if token == tokenizer.mask_token_id]
        return [
            {"title": f"{names[i]} (token {i + 1})", "rows": _best(logits[i], lambda token: piece(tokenizer, token))}
            for i in places
        ]
    logits = output.logits[0].float().cpu()
    if logits.dim() == 1:
        return [{"title": "Text", "rows": _best(logits, model.config.id2label.get)}]
    return [{"title": names[i], "rows": _best(logits[i], model.config.id2label.get)[:1]} for i in range(len(names))]


def _best(logits: torch.Tensor, label: Any) -> list[list[Any]]:
    probabilities = logits.softmax(dim=-1)
    best = probabilities.topk(min(5, len(probabilities)))
    return [[label(i), _rounded(p)] for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


# ---- The paper ---------------------------------------------------------------------------------------------------


def _paper(model: Any, kind: str, search: dict[str, Any] | None, source: int) -> list[list[Any]]:
    """
    Returns rows of a section of the paper, what it says, the base model's value there, and this model's. `source` is
    the number of source tokens.
    """
    config = model.config
    heads = config.num_heads
    d_k, d_v = (each or config.d_model // heads for each in (config.d_k, config.d_v))
    stacks = {"translation": "encoder and decoder", "encoder": "encoder", "decoder": "decoder"}[kind]
    layers = {
        "translation": f"{config.encoder_layers} and {config.decoder_layers}",
        "encoder": config.encoder_layers,
        "decoder": config.decoder_layers,
    }[kind]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows: list[list[Any]] = [
        ["3.1, Figure 1", "layers N", "6 and 6", layers],
        ["3.1", "stacks", "encoder and decoder", stacks],
        [
            "3.1",
            "LayerNorm around each sublayer",
            "after it",
            "after it" if config.norm_position == "post" else "before it",
        ],
        ["3.2.2", "heads h", "8", heads],
        ["3.2.1", "width of queries and keys d_k", "64", d_k],
        ["3.2.2", "width of values d_v", "64", d_v],
        ["3.3", "inner width d_ff", "2048", config.d_ff],
        ["3.1", "width d_model", "512", config.d_model],
        ["5.1", "vocabulary", "37000", config.vocab_size],
        ["3.5", "positions", "sinusoidal", config.position_encoding],
        ["5.4", "dropout P_drop", "0.1", config.dropout],
        ["Table 3", "parameters", "65,000,000", f"{parameters:,}"],
    ]
    if model.get_output_embeddings() is not None:
        rows.insert(
            -2, ["3.4", "one matrix for embeddings and output", "yes", "yes" if config.tie_word_embeddings else "no"]
        )
    if search is not None:
        settings = search["settings"]
        beams = "sampling" if settings.get("do_sample") else settings["num_beams"]
        rows.append(["6.1", "beam size", "4", beams])
        if settings["num_beams"] > 1:
            penalty = {"gnmt": "((5 + L) / 6)^α", "power": "L^α"}[settings["length_penalty_type"]]
            rows += [
                ["6.1", "length penalty", "((5 + L) / 6)^α", penalty],
                ["6.1", "α", "0.6", settings["length_penalty"]],
            ]
        limit = search["maxLength"]
        rows.append(["6.1", "maximum length", "source + 50", f"source + {limit - source}" if source else limit])
    return rows
