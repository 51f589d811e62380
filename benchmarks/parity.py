"""Is it the same network? Compared with torch's stacks and transformers' Marian, with the same random weights.

A reference gets random weights, [`copy_weights`] copies them to our model, both read the same sentences, and the
largest difference between their outputs is a row of the table that `python benchmarks/parity.py` prints. For Marian,
the translations found by beam search are compared too.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel, PreTrainedModel
from transformers.modeling_outputs import Seq2SeqModelOutput

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel

# Unusual widths, stacks of unequal depth, and the paper's base model, each with its (sentences, source, target).
TORCH_NETWORKS: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({"d_model": 20, "d_ff": 37, "num_heads": 5, "encoder_layers": 3, "decoder_layers": 2}, (3, 7, 5)),
    (
        {"d_model": 18, "d_ff": 50, "num_heads": 3, "encoder_layers": 1, "decoder_layers": 4}
        | {"activation_function": "gelu", "attention_bias": True},
        (5, 9, 13),
    ),
    ({}, (3, 31, 27)),
]
MARIAN_NETWORKS: list[dict[str, Any]] = [
    {"activation_function": "relu"},
    {"activation_function": "swish", "scale_embedding": False},
    {"activation_function": "relu", "share_encoder_decoder_embeddings": False},
    {"activation_function": "swish", "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
]
MARIAN_SHAPE = (5, 11, 7)
BEAM_SENTENCES = 50
IMPLEMENTATIONS = ("eager", "sdpa")

# Patterns in a reference's parameter names and our names for them, applied in this order.
TORCH_NAMES = {
    r"^source_embedding": "encoder.embed_tokens",
    r"^target_embedding": "decoder.embed_tokens",
    r"multihead_attn": "cross_attn",
    r"linear(\d)": r"feed_forward.fc\1",
    r"norm1": "self_attn_norm.layer_norm",
    r"^(encoder\..*)norm2": r"\1feed_forward_norm.layer_norm",
    r"^(decoder\..*)norm2": r"\1cross_attn_norm.layer_norm",
    r"norm3": "feed_forward_norm.layer_norm",
}
MARIAN_NAMES = {
    r"^model\.shared": "model.encoder.embed_tokens",
    r"encoder_attn": "cross_attn",
    r"attn_layer_norm": "attn_norm.layer_norm",
    r"final_layer_norm": "feed_forward_norm.layer_norm",
    r"(fc\d)": r"feed_forward.\1",
    r"final_logits_bias": "lm_head.bias",
}


class TorchTransformer(nn.Module):
    """
    `torch.nn.TransformerEncoder` and `TransformerDecoder`, each with its own embeddings.

    Args:
        config ([`VaswaniConfig`]): sizes, activation and norm position. As in the paper, post-norm stacks have no
            final norm; `torch.nn.Transformer` would add one.
    """

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        pre = config.norm_position == "pre"
        sizes = (config.d_model, config.num_heads, config.d_ff, 0.0, config.activation_function, config.layer_norm_eps)
        order = {"batch_first": True, "norm_first": pre}
        norms = [nn.LayerNorm(config.d_model, config.layer_norm_eps) if pre else None for _ in range(2)]
        encoder_layer = nn.TransformerEncoderLayer(*sizes, **order)
        decoder_layer = nn.TransformerDecoderLayer(*sizes, **order)
        self.source_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.target_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = nn.TransformerEncoder(
            encoder_layer, config.encoder_layers, norms[0], enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(decoder_layer, config.decoder_layers, norms[1])

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        decoder_attention_mask: torch.Tensor,
    ) -> Seq2SeqModelOutput:
        """Takes and returns the same as [`VaswaniModel.forward`]."""
        # torch's masks are True for hidden positions, not for visible ones.
        source_padding, target_padding = attention_mask == 0, decoder_attention_mask == 0
        encoded = self.encoder(
            embed(self.source_embedding, input_ids, attention_mask), src_key_padding_mask=source_padding
        )
        target = decoder_input_ids.shape[1]
        future = torch.ones(target, target, dtype=torch.bool).triu(1)
        # Left padding sees nothing, which makes torch return NaN, and NaN spreads: let padding see itself.
        hidden = (future | target_padding[:, None]) & ~torch.eye(target, dtype=torch.bool)  # [batch, target, target]
        decoded = self.decoder(
            embed(self.target_embedding, decoder_input_ids, decoder_attention_mask),
            encoded,
            tgt_mask=hidden.repeat_interleave(self.num_heads, dim=0),
            memory_key_padding_mask=source_padding,
        )
        return Seq2SeqModelOutput(last_hidden_state=decoded, encoder_last_hidden_state=encoded)


def embed(embedding: nn.Embedding, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Computes embedding * sqrt(d_model) + PE (Sections 3.4 and 3.5) as the paper writes it, in float64.

    Args:
        embedding (`nn.Embedding`): the embedding matrix.
        ids (`torch.LongTensor` of shape `(batch, length)`): tokens.
        mask (`torch.LongTensor` of shape `(batch, length)`): 1 for tokens, 0 for padding. Positions count tokens.

    Returns:
        `torch.FloatTensor` of shape `(batch, length, d_model)`.
    """
    d_model = embedding.embedding_dim
    pos = (mask.numpy().cumsum(axis=1) - 1).clip(min=0)[..., None]  # [batch, length, 1]
    dimension = np.arange(d_model)
    angle = pos / 10000.0 ** ((dimension - dimension % 2) / d_model)  # [batch, length, d_model]
    encoding = np.where(dimension % 2 == 0, np.sin(angle), np.cos(angle))
    embeddings = embedding.weight.detach().numpy().astype(np.float64)[ids.numpy()]
    return torch.from_numpy(embeddings * math.sqrt(d_model) + encoding).float()


@torch.no_grad()
def randomize(module: nn.Module, seed: int) -> None:
    """Draws every weight at random: matrices that preserve norms, biases around 0, weights of norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.state_dict(keep_vars=True).items():
        # Marian's sinusoid table is a frozen parameter, and its output bias is a buffer.
        if weight.requires_grad or not isinstance(weight, nn.Parameter):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(0.2 * noise + name.endswith("weight"))


def copy_weights(reference: nn.Module, ours: nn.Module) -> None:
    """
    Loads a reference's weights into one of our models. Every weight of both models must have a partner.

    Args:
        reference ([`TorchTransformer`] or [`MarianMTModel`]): model to copy from.
        ours ([`VaswaniModel`] or [`VaswaniForConditionalGeneration`]): model to copy to, of the same sizes.

    Raises:
        ValueError: two different weights of the reference map to the same name.
        RuntimeError: a weight of either model has no partner, or one of another shape.
    """
    names = MARIAN_NAMES if isinstance(reference, MarianMTModel) else TORCH_NAMES
    expected, weights = ours.state_dict(), {}
    for name, weight in reference.state_dict().items():
        # Ours computes the sinusoids; the outputs show whether they are the same.
        if "embed_positions" in name:
            continue
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        parts = {name: weight[0] if name == "lm_head.bias" else weight}
        # torch keeps the query, key and value projections in one matrix.
        if "in_proj_" in name:
            thirds = zip("qkv", weight.chunk(3), strict=True)
            parts = {name.replace("in_proj_", f"{letter}_proj."): third for letter, third in thirds}
        for name, part in parts.items():
            # torch's attention has biases where the paper has none: they must be zero.
            if name.endswith("_proj.bias") and name not in expected and not part.any():
                continue
            if not torch.equal(weights.setdefault(name, part), part):
                raise ValueError(f"Two different weights of the reference map to {name}.")
    ours.load_state_dict(weights, strict=True)


def torch_pair(seed: int = 0, **fields: Any) -> tuple[TorchTransformer, VaswaniModel]:
    """Makes torch's stacks and our model with the same random weights; `fields` are those of [`VaswaniConfig`]."""
    config = VaswaniConfig(vocab_size=50, share_embeddings=False, **fields)
    reference, ours = TorchTransformer(config).eval(), VaswaniModel(config).eval()
    randomize(reference, seed)
    if not config.attention_bias:
        for name, weight in reference.named_parameters():
            if name.endswith(("in_proj_bias", "out_proj.bias")):
                nn.init.zeros_(weight)
    copy_weights(reference, ours)
    return reference, ours


def marian_pair(seed: int = 2, **fields: Any) -> tuple[MarianMTModel, VaswaniForConditionalGeneration]:
    """
    Makes a Marian and our model with the same random weights; `fields` are those of [`MarianConfig`]. Only some seeds
    give a network whose translations vary and end.
    """
    sizes = {"vocab_size": 61, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "pad_token_id": 60}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": 3, f"{side}_ffn_dim": 50}
    theirs = MarianConfig(**(sizes | {"decoder_start_token_id": 60, "scale_embedding": True} | fields))
    config = VaswaniConfig(
        vocab_size=theirs.vocab_size,
        d_model=theirs.d_model,
        d_ff=theirs.encoder_ffn_dim,
        num_heads=theirs.encoder_attention_heads,
        encoder_layers=theirs.encoder_layers,
        decoder_layers=theirs.decoder_layers,
        activation_function=theirs.activation_function,
        sinusoid_layout="concatenated",
        layer_norm_eps=1e-5,
        attention_bias=True,
        lm_head_bias=True,
        scale_embedding=theirs.scale_embedding,
        share_embeddings=theirs.share_encoder_decoder_embeddings,
        tie_word_embeddings=theirs.tie_word_embeddings,
        pad_token_id=theirs.pad_token_id,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        decoder_start_token_id=theirs.decoder_start_token_id,
    )
    reference, ours = MarianMTModel(theirs).eval(), VaswaniForConditionalGeneration(config).eval()
    randomize(reference, seed)
    with torch.no_grad():
        # A larger weight makes the end token frequent enough for translations of many lengths.
        reference.lm_head.weight[theirs.eos_token_id] *= 1.5
    copy_weights(reference, ours)
    return reference, ours


def random_batch(
    config: VaswaniConfig | MarianConfig, rows: int, source: int, target: int, padding: str = "right"
) -> dict[str, torch.Tensor]:
    """
    Makes random sentences, each one token shorter than the one before it.

    Args:
        config ([`VaswaniConfig`] or [`MarianConfig`]): vocabulary and padding token.
        rows (`int`), source (`int`), target (`int`): number of sentences, longest source, longest target, in tokens.
        padding (`str`): `"right"`, `"left"`, or `"none"` for sentences of equal length.

    Returns:
        `input_ids` and `attention_mask` of shape `(rows, source)`, `decoder_input_ids` and `decoder_attention_mask`
        of shape `(rows, target)`.
    """
    generator = torch.Generator().manual_seed(rows)
    batch = {}
    for side, length in (("", source), ("decoder_", target)):
        ids = torch.randint(config.vocab_size - 1, (rows, length), generator=generator)
        ids += ids >= config.pad_token_id
        mask = torch.ones_like(ids)
        if padding != "none":
            mask = (torch.arange(length) < length - torch.arange(rows)[:, None] % length).long()
            mask = mask.flip(1) if padding == "left" else mask
        batch[f"{side}input_ids"] = ids.masked_fill(mask == 0, config.pad_token_id)
        batch[f"{side}attention_mask"] = mask
    return batch


@torch.no_grad()
def max_difference(
    reference: nn.Module,
    ours: VaswaniModel | VaswaniForConditionalGeneration,
    batch: dict[str, torch.Tensor],
    implementation: str,
) -> float:
    """
    Returns the largest absolute difference between encoder states and between decoder states or logits, outside of
    padding.

    Args:
        reference ([`TorchTransformer`] or [`MarianMTModel`]), ours: models with the same weights.
        batch (`dict[str, torch.Tensor]`): inputs, as from [`random_batch`].
        implementation (`str`): attention implementation of transformers' models, `"eager"` or `"sdpa"`.
    """
    expected, actual = (use(model, implementation)(**batch) for model in (reference, ours))
    source, target = batch["attention_mask"].bool(), batch["decoder_attention_mask"].bool()
    encoders = (actual.encoder_last_hidden_state - expected.encoder_last_hidden_state)[source]
    decoders = (actual[0] - expected[0])[target]
    # One maximum over both: unlike Python's max, torch's propagates NaN.
    return torch.cat([encoders.flatten(), decoders.flatten()]).abs().max().item()


def use(model: nn.Module, implementation: str) -> nn.Module:
    """Sets the attention implementation of a model that has a choice, and returns the model."""
    if isinstance(model, PreTrainedModel):
        model.set_attn_implementation(implementation)
    return model


def beam_search(
    model: MarianMTModel | VaswaniForConditionalGeneration, implementation: str, **settings: Any
) -> list[list[int]]:
    """
    Translates the same [`BEAM_SENTENCES`] sentences with fixed search settings instead of the model's own.

    Args:
        model ([`MarianMTModel`] or [`VaswaniForConditionalGeneration`]): one of a [`marian_pair`].
        implementation (`str`): `"eager"` or `"sdpa"`.
        settings: settings of `generate` that override those below.

    Returns:
        `list[list[int]]`: ids of each translation, without padding.
    """
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    batch = random_batch(model.config, rows=BEAM_SENTENCES, source=12, target=1)
    rules = {"num_beams": 4, "max_new_tokens": 24, "length_penalty": 1.0, "early_stopping": False}
    # As in OPUS-MT: no padding within a translation, and an end token even at the length limit.
    rules |= {"bad_words_ids": [[pad]], "forced_eos_token_id": eos}
    # An untrained network repeats itself forever; without repeated tokens its translations vary.
    rules["no_repeat_ngram_size"] = 1
    # Our default search is the paper's; Marian has only transformers', so both use that one.
    transformers_rules = {"length_penalty_type": "power", "finish_candidates": "top"}
    rules |= {name: rule for name, rule in transformers_rules.items() if hasattr(model.generation_config, name)}
    found = use(model, implementation).generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], **(rules | settings)
    )
    return [[id_ for id_ in row if id_ != pad] for row in found.tolist()]


def describe(config: VaswaniConfig) -> str:
    """Describes a network of the table in a few words."""
    # Source, target and output share one matrix, or only the last two do, or none.
    matrices = 3 if not config.tie_word_embeddings else 1 if config.share_embeddings else 2
    words = [
        f"{config.norm_position}-norm",
        f"{config.encoder_layers}+{config.decoder_layers} layers",
        f"d_model {config.d_model}",
        f"d_ff {config.d_ff}",
        f"{config.num_heads} heads",
        config.activation_function,
        "attention biases" if config.attention_bias else "",
        f"{matrices} embedding {'matrix' if matrices == 1 else 'matrices'}",
        "" if config.scale_embedding else "unscaled",
    ]
    return ", ".join(word for word in words if word)


def pairs() -> Iterator[tuple[nn.Module, VaswaniModel | VaswaniForConditionalGeneration, tuple[int, int, int]]]:
    """Yields each reference of the table, our model with its weights, and the shape of the inputs."""
    for fields, shape in TORCH_NETWORKS:
        for norm_position in ("post", "pre"):
            yield *torch_pair(norm_position=norm_position, **fields), shape
    for fields in MARIAN_NETWORKS:
        yield *marian_pair(**fields), MARIAN_SHAPE


def table() -> Iterator[list[str]]:
    """Yields the rows of the table, the heading first."""
    yield ["reference", "network", "sentences, source -> target", "padding", *IMPLEMENTATIONS]
    for reference, ours, shape in pairs():
        marian = isinstance(reference, MarianMTModel)
        name, network = "Marian" if marian else "torch.nn", describe(ours.config)
        # With left padding, Marian's positions count columns, and ours count tokens.
        for padding in ("none", "right") if marian else ("none", "right", "left"):
            batch = random_batch(ours.config, *shape, padding)
            found = [max_difference(reference, ours, batch, implementation) for implementation in IMPLEMENTATIONS]
            yield [name, network, "{}, {} -> {}".format(*shape), padding, *(f"{number:.1e}" for number in found)]
        if marian:
            both = [(beam_search(reference, i), beam_search(ours, i)) for i in IMPLEMENTATIONS]
            found = [sum(a == b for a, b in zip(*translations, strict=True)) for translations in both]
            cells = (f"{equal} of {BEAM_SENTENCES} equal" for equal in found)
            yield [name, network, f"{BEAM_SENTENCES}, 12 -> 24", "right", *cells]


if __name__ == "__main__":
    for number, row in enumerate(table()):
        print("|", " | ".join(row), "|")
        if number == 0:
            print("|---" * len(row) + "|")
