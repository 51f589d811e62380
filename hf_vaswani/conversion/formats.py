"""The interface of all formats: functions, records, the config fields that each can express, names of weights."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenizer import TOKENIZER_FILES
from ..files import read_json
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from .vocabulary import Vocabulary

# Our names of activations, with CTranslate2's.
CTRANSLATE2_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_python": "GELU",
    "gelu_new": "GELUTanh",
    "gelu_fast": "GELUTanh",
    "gelu_pytorch_tanh": "GELUTanh",
    "quick_gelu": "GELUSigmoid",
    "silu": "SWISH",
    "swish": "SWISH",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}


class Field(NamedTuple):
    """
    A field of [`VaswaniConfig`], with the values of it that each target can express: by default any.

    Attributes:
        marian, ctranslate2, onnx (`Sequence`, *optional*): the values; in `d_k` and `d_v`, `None` stands for d_model /
            num_heads.
    """

    marian: Sequence[Any] | None = None
    ctranslate2: Sequence[Any] | None = None
    onnx: Sequence[Any] | None = None


# transformers' MarianMTModel has an epsilon of its own in LayerNorm.
MARIAN_EPS = 1e-5
FIELDS: dict[str, Field] = {
    "d_k": Field(marian=(None,)),
    "d_v": Field(marian=(None,)),
    "activation_function": Field(ctranslate2=tuple(CTRANSLATE2_ACTIVATIONS)),
    "norm_position": Field(marian=("post",)),
    "position_encoding": Field(marian=("sinusoidal",)),
    "sinusoid_layout": Field(marian=("interleaved", "concatenated")),
    "position_offset": Field(marian=(0,)),
    "layer_norm_eps": Field(marian=(MARIAN_EPS,)),
    "type_vocab_size": Field(marian=(0,)),
    "embedding_norm": Field(marian=(False,)),
    **dict.fromkeys(("vocab_size", "d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers"), Field()),
    **dict.fromkeys(("attention_bias", "lm_head_bias", "scale_embedding", "max_position_embeddings"), Field()),
    **dict.fromkeys(("share_embeddings", "tie_word_embeddings"), Field()),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), Field()),
    # Without effect on what a translation model computes: targets need not know them.
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "classifier_dropout"), Field()),
    **dict.fromkeys(("initializer_range", "lm_head_transform", "use_cache", "longest_sentence"), Field()),
    **dict.fromkeys(("language_pairs", "alignment_layer", "alignment_shift"), Field()),
    # A model with one stack does not translate.
    **dict.fromkeys(("is_encoder_decoder", "is_decoder"), Field()),
}


def check_expressible(config: VaswaniConfig, target: str) -> None:
    """
    Checks a model against [`FIELDS`].

    Args:
        config ([`VaswaniConfig`]): its config.
        target (`str`): `"Marian"`, `"CTranslate2"` or `"ONNX"`.

    Raises:
        ValueError: The target cannot express the value of a field.
    """
    for key, supported in FIELDS.items():
        value, values = getattr(config, key), getattr(supported, target.lower())
        if values is None or value in values:
            continue
        if key in ("d_k", "d_v"):
            if value * config.num_heads == config.d_model:
                continue
            words = f"d_model / num_heads = {config.d_model} / {config.num_heads}"
        elif isinstance(value, float) and any(math.isclose(value, each, rel_tol=1e-3) for each in values):
            continue
        else:
            words = " or ".join(map(json.dumps, values))
        advice = f": train the model with model.{key} {values[0]}" if isinstance(value, float) else ""
        raise ValueError(f"The model has {key} {json.dumps(value)}, but {target} supports only {words}{advice}.")


# ---- What is read of another format ------------------------------------------------------------------------------


def check_supported(settings: Mapping[str, Any], supported: Mapping[str, Sequence[Any]], file: Path) -> None:
    """
    Checks settings of another format that change the network.

    Args:
        settings (`Mapping[str, Any]`): the settings.
        supported (`Mapping[str, Sequence]`): values that a Vaswani model has, the default of the format first.
        file (`Path`): where the settings are from.

    Raises:
        ValueError: A setting has another value.
    """
    for name, values in supported.items():
        value = settings.get(name, values[0])
        if value not in values:
            # Choices, or a switch that must be as it is by default.
            choices = list(map(str, values)) if all(values) else [repr(values[0])]
            are = "are" if len(choices) > 1 else "is"
            raise ValueError(f"{file} has {name} {value!r}, but only {', '.join(choices)} {are} supported.")


def check_sides(settings: Mapping[str, Any], names: Iterable[str], file: Path) -> None:
    """Raises a `ValueError` if a setting of the encoder, by its name without the side, is not that of the decoder."""
    for name in names:
        encoder, decoder = (settings.get(f"{side}_{name}") for side in ("encoder", "decoder"))
        if None not in (encoder, decoder) and encoder != decoder:
            raise ValueError(
                f"{file} has encoder_{name} {encoder!r} and decoder_{name} {decoder!r}, but they must be equal."
            )


# Names of weights in fairseq, which transformers' Marian model shares, translated to ours: regular expressions with
# their replacements, applied in this order.
FAIRSEQ_NAMES = {
    r"^(encoder|decoder)\.": r"model.\1.",
    r"^model\.decoder\.output_projection": "lm_head",
    r"^(model\.\w+)\.layer_norm": r"\1.norm",
    r"embed_positions": "positions.table",
    r"encoder_attn": "cross_attn",
    r"attn_layer_norm": "attn_norm.layer_norm",
    r"final_layer_norm": "feed_forward_norm.layer_norm",
    r"\.(fc\d)": r".feed_forward.\1",
}


def our_name(name: str, names: Mapping[str, Any] = FAIRSEQ_NAMES) -> str:
    """Returns our name of a weight; a name that both share stays as it is."""
    for pattern, replacement in names.items():
        name = re.sub(pattern, replacement, name)
    return name


def fill(
    model: VaswaniForConditionalGeneration,
    weights: Mapping[str, torch.Tensor],
    file: Path,
    names: Mapping[str, Any] = FAIRSEQ_NAMES,
) -> None:
    """
    Loads all weights of a model.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model.
        weights (`Mapping[str, torch.Tensor]`): weights by the names of another format, or by ours.
        file (`Path`): where they are from.
        names (`Mapping[str, Any]`): names of the other format, as of [`our_name`].

    Raises:
        ValueError: A weight is missing or unexpected, or has another shape.
    """
    expected, ours = model.state_dict(), {}
    for theirs, weight in weights.items():
        name = our_name(theirs, names)
        if name not in expected:
            raise ValueError(f"{file}: {theirs} has no place in a Vaswani model with these settings.")
        if weight.shape != expected[name].shape:
            raise ValueError(
                f"{file}: {theirs} has the shape {tuple(weight.shape)}, but the model requires "
                f"{tuple(expected[name].shape)}."
            )
        ours[name] = weight
    missing = [name for name in expected if name not in ours]
    if missing:
        raise ValueError(f"{file} has no weight for {missing[0]}.")
    model.load_state_dict(ours)


# ---- Models of formats -------------------------------------------------------------------------------------------

# (source ids, attention mask, decoder ids), each of shape (batch, length) -> logits of shape
# (batch, target, vocab_size).
Logits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Translate = Callable[[Sequence[str]], list[str]]


@dataclass
class Foreign:
    """
    A model of another format, as far as it can run here.

    Args:
        name (`str`): library that runs it, for example `transformers' MarianMTModel`.
        logits (`Logits`, *optional*): computes its logits for Vaswani ids.
        translate (`Translate`, *optional*): translates greedily.
        in_8_bits (`Translate`, *optional*): translates greedily with the weights in 8 bits, if both are written.
        compared (`str`, *optional*): line of the report on what was compared in place of the logits.
        notes (`list[str]`): known differences from the Vaswani model, one sentence each.
        is_rounded (`bool`): True if its weights have a lower precision: its logits are only close.
    """

    name: str
    logits: Logits | None = None
    translate: Translate | None = None
    in_8_bits: Translate | None = None
    compared: str | None = None
    notes: list[str] = field(default_factory=list)
    is_rounded: bool = False


def run_by_transformers(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary | None = None,
    **settings: Any,
) -> Foreign:
    """
    Wraps a model of transformers to be compared with ours.

    Args:
        name (`str`): library that runs it.
        model ([`PreTrainedModel`]): encoder-decoder model in evaluation mode.
        tokenizer ([`PreTrainedTokenizerBase`]): tokenizer with its ids, or with ours if there is a vocabulary.
        vocabulary ([`Vocabulary`], *optional*): our ids with their rows in its embeddings; by default its ids.
        settings: arguments of `generate()` for its greedy search.
    """

    @torch.no_grad()
    def logits(input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        if vocabulary is not None:
            input_ids, decoder_input_ids = vocabulary.source_rows[input_ids], vocabulary.target_rows[decoder_input_ids]
        found = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            # With a cache, FSMT does not mask future tokens.
            use_cache=False,
        ).logits
        return found if vocabulary is None else vocabulary.logits(found)

    def translate(sentences: Sequence[str]) -> list[str]:
        batch = tokenizer(list(sentences), return_tensors="pt", padding=True, padding_side="right")
        ids = batch["input_ids"] if vocabulary is None else vocabulary.source_rows[batch["input_ids"]]
        found = model.generate(
            ids, attention_mask=batch["attention_mask"], num_beams=1, early_stopping=None, **settings
        )
        return tokenizer.batch_decode(
            found if vocabulary is None else vocabulary.target_ids(found), skip_special_tokens=True
        )

    return Foreign(name, logits, translate)


@dataclass
class Converted:
    """A foreign model as a Vaswani model with its tokenizer, together with the original."""

    model: VaswaniForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    foreign: Foreign


@dataclass
class Loaded:
    """
    A Vaswani model that was loaded from a folder.

    Args:
        model ([`VaswaniForConditionalGeneration`]): model in float32 and evaluation mode.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        folder (`Path`): folder with the files of both.
    """

    model: VaswaniForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    folder: Path


def copy_tokenizer(loaded: Loaded, folder: Path) -> None:
    """Copies the files of a model's tokenizer to a folder."""
    for name in TOKENIZER_FILES:
        if (loaded.folder / name).is_file():
            shutil.copyfile(loaded.folder / name, folder / name)


class Source(Protocol):
    """Module of a format that can be read."""

    def recognize(self, path: Path) -> bool:
        """Returns whether a file or folder looks like this format."""

    def load(self, path: Path) -> Converted:
        """Reads a model that [`recognize`] has accepted."""


class Target(Protocol):
    """Module of a format that can be written."""

    # Number formats of the weights that `save` accepts, besides `None` for float32.
    QUANTIZATIONS: tuple[str, ...]

    def save(self, loaded: Loaded, folder: Path, quantization: str | None = None) -> Foreign:
        """
        Writes a model to a folder that exists, if [`check_expressible`] accepts it, without changing the model.
        Returns it as read back from there.
        """


def model_type(folder: Path) -> str | None:
    """
    Returns the `model_type` in the `config.json` of a folder, or `None` without such a file.

    Raises:
        ValueError: The file is damaged.
    """
    path = folder / "config.json"
    return read_json(path).get("model_type") if path.is_file() else None
