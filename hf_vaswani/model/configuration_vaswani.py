"""Configuration of a Vaswani model: sizes, switches and token ids, with checks.

Fields are named after the letters of "Attention Is All You Need" (Vaswani et al., 2017). The defaults are its base
model (Table 3), and those of the authors' code (tensor2tensor) where the paper is silent.
"""

import copy
import functools
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, modeling_outputs
from transformers.activations import ACT2FN

# Written to config.json, which is saved with the files that it names: with trust_remote_code=True the folder loads
# without this package.
AUTO_MAP = {
    "AutoConfig": "configuration_vaswani.VaswaniConfig",
    "AutoModel": "modeling_vaswani.VaswaniModel",
    "AutoModelForSeq2SeqLM": "modeling_vaswani.VaswaniForConditionalGeneration",
    "AutoModelForTextEncoding": "modeling_vaswani.VaswaniEncoderModel",
}
# Named for models of one stack alone, and saved with them.
HEADS = "heads_vaswani."
AUTO_MAP_OF_HEADS = {
    f"AutoModelFor{task}": f"{HEADS}VaswaniFor{task}"
    for task in ("CausalLM", "MaskedLM", "PreTraining", "SequenceClassification", "TokenClassification")
}
# The cache of keys and values: transformers 5.24 renamed `past_key_values` to `cache`, in arguments and in outputs.
# Arguments have the new name here, and are understood by both with every release; outputs are those of transformers.
NAMES_OF_THE_CACHE = ("cache", "past_key_values")
# The one that this release of transformers uses.
CACHE = "cache" if "cache" in modeling_outputs.Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
CHOICES = {
    "norm_position": ("post", "pre"),
    "position_encoding": ("sinusoidal", "learned"),
    "sinusoid_layout": ("interleaved", "concatenated", "tensor2tensor"),
}
SIZES = ("vocab_size", "d_model", "d_ff", "num_heads", "d_k", "d_v", "encoder_layers", "decoder_layers")
PIPELINE = {"impl": "pipeline_vaswani.VaswaniTranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
CUSTOM_PIPELINES = {"translation": PIPELINE}


def travelling_files(auto_map: Mapping[str, Any]) -> list[Path]:
    """
    Returns the code that is saved beside the weights of a model whose config has this `auto_map`: all files of this
    folder, but the heads only where they are named. Code that came with a model may lack them.
    """
    has_heads = any(HEADS in str(name) for name in auto_map.values())
    files = sorted(Path(__file__).parent.glob("*_vaswani.py"))
    return [path for path in files if has_heads or path.name != f"{HEADS}py"]


class PipelineTasks(dict[str, Any]):
    """
    Entries by the name of a pipeline task, in which `translation_xx_to_yy` has the entry of `translation`, and is an
    alias of it if there is no such entry. Used for the `custom_pipelines` of a config and transformers' task aliases.
    """

    def __contains__(self, task: object) -> bool:
        return super().__contains__(task) or re.fullmatch(r"translation_[^_]+_to_[^_]+", str(task)) is not None

    def __getitem__(self, task: str) -> Any:
        # A copy, because transformers replaces the class names in custom pipelines by the classes.
        return copy.deepcopy(super().__getitem__(task))

    def __missing__(self, task: str) -> Any:
        if task not in self:
            raise KeyError(task)
        return self.get("translation", "translation")


@strict
class VaswaniConfig(PreTrainedConfig):
    r"""
    Configuration of a [`VaswaniModel`] and of the models with a head, such as [`VaswaniForConditionalGeneration`].
    Raises a ValueError if a size or name is invalid, or sizes do not fit together.

    Args:
        vocab_size (`int`, defaults to 37000): entries of the vocabulary that source and target share (Section 5.1).
        d_model (`int`, defaults to 512): width of embeddings and sub-layer outputs (Section 3.1), even for sinusoids.
        d_ff (`int`, defaults to 2048): width of the hidden layer of the feed-forward networks (Section 3.3).
        num_heads (`int`, defaults to 8): heads *h* of every attention, in both stacks (Section 3.2.2).
        d_k, d_v (`int`, *optional*): widths of a head's queries and keys, and of its values; `None`: `d_model /
            num_heads` (Section 3.2.2; Table 3 row B varies d_k alone).
        encoder_layers, decoder_layers (`int`, defaults to 6): layers *N* of each stack (Section 3.1).
        dropout (`float`, defaults to 0.1): dropout *P_drop* of the sum of embedding and position, and of each
            sub-layer's output before it is added (Section 5.4).
        attention_dropout, activation_dropout (`float`, defaults to 0.0): dropout of the attention weights, and of the
            activations in feed-forward networks; not in the paper.
        activation_function (`str`, defaults to `"relu"`): activation in feed-forward networks, by name (Section 3.3).
        norm_position (`str`, defaults to `"post"`): `"post"`: LayerNorm(x + Sublayer(x)), as in Section 3.1; `"pre"`:
            x + Sublayer(LayerNorm(x)) and one LayerNorm on top of each stack, as in later versions of tensor2tensor.
        position_encoding (`str`, defaults to `"sinusoidal"`): `"sinusoidal"`: computed, for any length (Section 3.5);
            `"learned"`: a table of `max_position_embeddings` rows for each stack (Table 3 row E).
        sinusoid_layout (`str`, defaults to `"interleaved"`): `"interleaved"`: alternating sines and cosines, as in
            Section 3.5; `"concatenated"`: the same sines, then the same cosines (Marian); `"tensor2tensor"`:
            concatenated, with exponents from 0 to 1 inclusive (also fairseq, with another `position_offset`).
        position_offset (`int`, defaults to 0): first position of a sentence for sinusoids; 2 in fairseq, which starts
            after the id of `<pad>`. The rows of a learned table are always counted from 0.
        max_position_embeddings (`int`, defaults to 1024): rows of a learned table; sinusoids have no limit. Longer
            sentences are cut, or truncated with `truncation=True`, unless `longest_sentence` says otherwise for
            sinusoids.
        layer_norm_eps (`float`, defaults to 1e-6): epsilon added to the variance in LayerNorm (tensor2tensor's value).
        attention_bias, lm_head_bias (`bool`, defaults to `False`): whether the projections of an attention, and the
            pre-softmax linear transformation, have biases; not in the paper (Sections 3.2.2 and 3.4).
        scale_embedding (`bool`, defaults to `True`): whether embeddings are multiplied by sqrt(d_model) (Section 3.4).
        share_embeddings (`bool`, defaults to `True`): whether source and target share one embedding matrix (Section
            3.4). Without effect if `tie_word_embeddings` is false, because transformers then ties no weights.
        tie_word_embeddings (`bool`, defaults to `True`): whether the target embedding is also the pre-softmax linear
            transformation (Section 3.4).
        type_vocab_size (`int`, defaults to 0): segments that the encoder tells apart, each with an embedding that is
            added to those of its tokens (Devlin et al., 2018); not in the paper.
        embedding_norm (`bool`, defaults to `False`): whether a LayerNorm follows the sum of embedding and position
            (Devlin et al., 2018); not in the paper.
        lm_head_transform (`bool`, defaults to `False`): whether [`VaswaniForMaskedLM`] has a linear layer, the
            activation and a LayerNorm in front of the pre-softmax linear transformation (Devlin et al., 2018).
        initializer_range (`float`, *optional*): standard deviation of all initial weights, for embeddings that are not
            scaled (Devlin et al., 2018: 0.02). `None`: Xavier uniform for matrices, and d_model^-0.5 for embeddings
            (tensor2tensor).
        classifier_dropout (`float`, *optional*): dropout before a classifier's linear layer; `None`: `dropout`.
        language_pairs (`list[list[str]]`, *optional*): directions that the model was trained for, as `[["en", "de"],
            ["en", "fr"]]`; pipelines refuse others. `None` if they are not known.
        alignment_layer (`int`, *optional*): decoder layer, from 0, whose attention aligns words; by default the last.
        alignment_shift (`bool`, defaults to `False`): read it one step after a token is predicted (Chen et al., 2020).
        longest_sentence (`int`, *optional*): tokens of the longest source that the model was trained on, `</s>`
            included: with sinusoids, longer sentences are cut before they are translated. `None` if it is not known.
        use_cache (`bool`, defaults to `True`): whether keys and values are kept, to be computed only once.
        is_encoder_decoder (`bool`, defaults to `True`): whether the model has both stacks; others set it to `False`.
        is_decoder (`bool`, defaults to `False`): whether the only stack is a decoder, without attention to a source.
        pad_token_id (`int`, defaults to 0): id of `<pad>`; its embedding stays zero, unless it ends sentences.
        bos_token_id, eos_token_id (`int`, default to 1 and 2): ids of `<s>` and `</s>`, the end of every sentence.
        decoder_start_token_id (`int`, defaults to 1): first symbol of the target shifted right (Section 3.1).
    """

    model_type = "vaswani"
    keys_to_ignore_at_inference = [*NAMES_OF_THE_CACHE]
    attribute_map = {"hidden_size": "d_model", "intermediate_size": "d_ff", "num_attention_heads": "num_heads"}

    vocab_size: int = 37000
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int | None = None
    d_v: int | None = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    activation_function: str = "relu"
    norm_position: str = "post"
    position_encoding: str = "sinusoidal"
    sinusoid_layout: str = "interleaved"
    position_offset: int = 0
    max_position_embeddings: int = 1024
    layer_norm_eps: float = 1e-6
    attention_bias: bool = False
    lm_head_bias: bool = False
    scale_embedding: bool = True
    share_embeddings: bool = True
    tie_word_embeddings: bool = True
    type_vocab_size: int = 0
    embedding_norm: bool = False
    lm_head_transform: bool = False
    initializer_range: float | int | None = None
    classifier_dropout: float | int | None = None
    language_pairs: list[list[str]] | None = None
    alignment_layer: int | None = None
    alignment_shift: bool = False
    longest_sentence: int | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    is_decoder: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        custom_pipelines = kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)
        # If a config has custom pipelines, transformers prefers them to its registry and demands trust_remote_code. So
        # the attribute is set only if this file itself came with the weights; otherwise the task is registered.
        if custom_pipelines and __name__.startswith("transformers_modules."):
            self.custom_pipelines = PipelineTasks(custom_pipelines)
        # `@strict` calls it as well, also when a config is saved, but wraps the ValueError in another one.
        self.validate_architecture()

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacks that the model has: `encoder`, `decoder` or both."""
        if self.is_encoder_decoder:
            return "encoder", "decoder"
        return ("decoder",) if self.is_decoder else ("encoder",)

    @property
    def zero_row(self) -> int | None:
        """Row of the embeddings that is zero and is not trained: that of `<pad>`, unless it also ends a sentence."""
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        # Tied to the output matrix, a zero row would give `</s>` the same logit for ever.
        return None if self.pad_token_id in ends else self.pad_token_id

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the first stack that the model has; transformers sizes the cache of a decoder by them."""
        return getattr(self, f"{self.stacks[0]}_layers")

    @num_hidden_layers.setter
    def num_hidden_layers(self, layers: int) -> None:
        setattr(self, f"{self.stacks[0]}_layers", layers)

    def validate_architecture(self) -> None:
        """Raises a `ValueError` for sizes and names that do not describe a model."""

        def require(name: str, expected: str, is_right: Callable[[Any], bool]) -> None:
            value = getattr(self, name)
            if value is not None and not is_right(value):
                raise ValueError(f"{name} must be {expected}, but it is {value!r}.")

        for name in (*SIZES, "max_position_embeddings", "longest_sentence"):
            require(name, "at least 1", lambda size: size >= 1)
        for name in ("type_vocab_size", "position_offset"):
            require(name, "at least 0", lambda size: size >= 0)
        for name in ("dropout", "attention_dropout", "activation_dropout", "classifier_dropout"):
            require(name, "at least 0 and below 1", lambda rate: 0 <= rate < 1)
        for name in ("initializer_range", "layer_norm_eps"):
            require(name, "above 0 and finite", lambda number: 0 < number < math.inf)
        for name, choices in CHOICES.items():
            require(name, " or ".join(f'"{choice}"' for choice in choices), choices.__contains__)
        for name, size_name in (("pad_token_id", "vocab_size"), ("alignment_layer", "decoder_layers")):
            size = getattr(self, size_name)
            require(name, f"at least 0 and below {size_name} ({size})", range(size).__contains__)
        if self.position_encoding == "learned":
            require("position_offset", "0, because a learned table is counted from 0", lambda first: first == 0)
        else:
            require("d_model", "even, because sinusoids come in pairs of sine and cosine", lambda size: size % 2 == 0)
        require("activation_function", f"one of {', '.join(sorted(ACT2FN))}", ACT2FN.__contains__)
        require(
            "language_pairs", "pairs of a source and a target", lambda pairs: all(len(pair) == 2 for pair in pairs)
        )
        if (self.d_k is None or self.d_v is None) and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model ({self.d_model}) is not divisible by num_heads ({self.num_heads}): "
                "change one of them, or give both d_k and d_v."
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Makes a config from the contents of a config.json; raises a ValueError if a field has an invalid value."""
        try:
            return super().from_dict(config_dict, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"The model's config is invalid: {' '.join(str(error).split())}") from error

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of config.json."""
        fields = super().to_dict()
        if self.is_encoder_decoder:
            fields["custom_pipelines"] = copy.deepcopy(CUSTOM_PIPELINES)
        return fields

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """
        Writes config.json and the model's code beside it. Models call it when they are saved. transformers alone would
        name only the class that is saved, and copy no code for a subclass.
        """
        os.makedirs(save_directory, exist_ok=True)
        # Loaded with trust_remote_code=True, the encoder of a model of both stacks came without the heads.
        has_heads = not self.is_encoder_decoder and (Path(__file__).parent / f"{HEADS}py").is_file()
        named = AUTO_MAP | AUTO_MAP_OF_HEADS | (getattr(self, "auto_map", None) or {})
        self.auto_map = {auto: name for auto, name in named.items() if has_heads or HEADS not in str(name)}
        for path in travelling_files(self.auto_map):
            # Contents without permissions: copies of a read-only package must be writable, for the next save.
            shutil.copyfile(path, Path(save_directory) / path.name)
        super().save_pretrained(save_directory, *args, **kwargs)


# ---- Two names of the cache --------------------------------------------------------------------------------------


def rename_cache(keywords: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns keyword arguments with the cache, if there is one, by this name; raises a TypeError if there are two."""
    caches = [keywords[each] for each in NAMES_OF_THE_CACHE if keywords.get(each) is not None]
    if len(caches) == 2 and caches[0] is not caches[1]:
        raise TypeError("Both cache and past_key_values were given, which are two names of one argument: pass one.")
    others = {each: value for each, value in keywords.items() if each not in NAMES_OF_THE_CACHE}
    return others | {name: caches[0]} if caches else others


def takes_both_cache_names(forward: Callable[..., Any]) -> Callable[..., Any]:
    """
    Decorates a `forward` with an argument `cache`, which can then be passed as `past_key_values`, too. Where
    transformers has the new name, the old one is answered by a `FutureWarning`, as by the models of transformers.
    """

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" not in kwargs:
            return forward(*args, **kwargs)
        if kwargs["past_key_values"] is not None and CACHE == "cache" and not torch.compiler.is_compiling():
            message = f"`past_key_values` is deprecated for `{forward.__qualname__}`. Use `cache` instead."
            warnings.warn(message, FutureWarning, stacklevel=2)
        return forward(*args, **rename_cache(kwargs, "cache"))

    return renamed
