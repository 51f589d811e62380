"""transformers' MarianMTModel (OPUS-MT), in both directions.

Both compute the same if the Vaswani model is post-norm and has `layer_norm_eps=1e-5`, which Marian fixes. Marian's
sinusoids have another order of columns; converting to Marian permutes the columns of every weight on the residual
connections accordingly.
"""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from ..data.tokenizer import load_tokenizer
from ..files import read_json
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, sinusoids
from ..model.rules_vaswani import TRANSFORMERS_RULES
from ..translation.loading import IDS, load_model
from .formats import (
    MARIAN_EPS,
    Converted,
    Foreign,
    Loaded,
    check_expressible,
    check_sides,
    check_supported,
    model_type,
    our_name,
    run_by_transformers,
)
from .settings import ignored_settings
from .vocabulary import EOS, NEVER, PAD, UNK, Vocabulary, check_ids, sentencepiece

QUANTIZATIONS: tuple[str, ...] = ()
NAME = "transformers' MarianMTModel"
# Maximum length that is saved for models without one, as in OPUS-MT.
MAX_LENGTH = 512
# Weights with d_model rows: outputs of sub-layers and norms.
D_MODEL_FIRST = re.compile(r"(out_proj|fc2|layer_norm)\.(weight|bias)$")
# Weights with d_model columns: inputs of sub-layers, and embeddings.
D_MODEL_LAST = re.compile(r"(embed_tokens|shared|lm_head|[qkv]_proj|fc1)\.weight$")
# Fields with the same name and meaning in both configs.
SAME = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "activation_function",
    "scale_embedding",
    "max_position_embeddings",
)
# Switches in older configs for architectures that MarianMTModel does not have, with the only supported values.
SWITCHES = {
    **dict.fromkeys(("normalize_before", "normalize_embedding", "add_final_layer_norm"), (False, None)),
    "static_position_embeddings": (True, None),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), (0, None)),
}
# Fields of a generation config that contain ids, as numbers or lists.
GENERATION_IDS = (
    *IDS,
    "forced_bos_token_id",
    "forced_eos_token_id",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
)
# Fields that contain ids in other forms, which are not converted.
UNSUPPORTED_IDS = ("sequence_bias", "force_words_ids")


def recognize(path: Path) -> bool:
    """Returns whether a folder contains a MarianMTModel, and not only its graphs for transformers.js."""
    has_weights = any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin"))
    return model_type(path) == "marian" and (has_weights or not (path / "onnx").is_dir())


# ---- In ----------------------------------------------------------------------------------------------------------


def load(path: Path) -> Converted:
    """
    Reads a MarianMTModel as a Vaswani model that produces the same translations.

    Args:
        path (`Path`): folder with config.json, weights, vocab.json, source.spm and target.spm.

    Returns:
        [`Converted`] in float32. If the target has a vocabulary of its own, both are joined, see [`Vocabulary`].

    Raises:
        ValueError: A file is missing or damaged, or the model has a feature that a Vaswani model does not have.
        ImportError: The packages that read .spm files are not installed.
    """
    file = path / "config.json"
    fields = MarianConfig().to_dict() | read_json(file)
    check_supported(fields, SWITCHES, file)
    check_sides(fields, ("attention_heads", "ffn_dim"), file)
    if fields["activation_function"] not in ACT2FN:
        raise ValueError(
            f"{file} has activation_function {fields['activation_function']!r}, which transformers does not know."
        )
    marian = _read_model(path)
    vocabulary, tokenizer, notes = _read_tokenizer(path, marian.config)
    model = from_marian(marian, vocabulary)
    foreign = run_by_transformers(NAME, marian, tokenizer, vocabulary)
    if (path / "vocab.json").is_file():
        # Its own tokenizer is compared as well.
        foreign.translate = run_by_transformers(NAME, marian, _their_tokenizer(path)).translate
    foreign.notes += notes
    return Converted(model, tokenizer, foreign)


def _their_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Loads transformers' own tokenizer of a MarianMTModel."""
    with warnings.catch_warnings():
        # It recommends a package that it does not use.
        warnings.filterwarnings("ignore", message=".*sacremoses")
        return MarianTokenizer.from_pretrained(path, local_files_only=True)


def _read_model(path: Path) -> MarianMTModel:
    """Loads the model of a folder, and checks its table of positions."""
    # In float16, the two models would round differently.
    model = load_model(path, torch.float32)
    for stack in (model.model.encoder, model.model.decoder):
        table = stack.embed_positions.weight.float()
        expected = sinusoids(torch.arange(len(table)), table.shape[1], "concatenated")
        difference = (table - expected).abs().max().item()
        if not difference < 1e-2:
            raise ValueError(
                f"The table of positions in {path} does not contain Marian's sinusoids: it differs by up to "
                f"{difference:.2g}."
            )
    return model


def _read_tokenizer(path: Path, config: MarianConfig) -> tuple[Vocabulary, PreTrainedTokenizerBase, list[str]]:
    """Reads the vocabulary and the tokenizer of a folder, and notes about them."""
    file = path / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    source_file = path / "vocab.json"
    if not source_file.exists() and (path / "tokenizer.json").is_file():
        return *_read_fast_tokenizer(path, config), []
    source = target = read_json(source_file)
    check_ids(source_file, source, config.vocab_size, "the embedding (vocab_size in config.json)")
    if settings.get("separate_vocabs"):
        target_file = path / "target_vocab.json"
        target = read_json(target_file)
        rows = "the target embedding (decoder_vocab_size in config.json)"
        check_ids(target_file, target, config.decoder_vocab_size, rows)
    elif config.decoder_vocab_size != config.vocab_size:
        raise ValueError(
            f"{path / 'config.json'} has vocab_size {config.vocab_size} and decoder_vocab_size "
            f"{config.decoder_vocab_size}, but {file} does not set separate_vocabs."
        )
    special = {}
    for name, default in (("pad_token", PAD), ("eos_token", EOS), ("unk_token", UNK)):
        token = settings.get(name, default)
        # A token is a string, or an object with its content.
        special[name] = token["content"] if isinstance(token, dict) else str(token)
        if special[name] not in source:
            raise ValueError(f"{source_file} does not contain the token {special[name]}.")
    files = [path / f"{side}.spm" for side in ("source", "target")]
    model_max_length = settings.get("model_max_length") or config.max_position_embeddings
    return sentencepiece(source, target, files, special, special["pad_token"], model_max_length=model_max_length)


def _read_fast_tokenizer(path: Path, config: MarianConfig) -> tuple[Vocabulary, PreTrainedTokenizerBase]:
    """Reads the joint tokenizer that [`save`] has written."""
    tokenizer = load_tokenizer(str(path))
    if config.decoder_vocab_size != config.vocab_size or len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"{path / 'tokenizer.json'} has {len(tokenizer)} joint entries, but config.json has vocab_size "
            f"{config.vocab_size} and decoder_vocab_size {config.decoder_vocab_size}."
        )
    rows = torch.arange(config.vocab_size)
    tokens = [tokenizer.convert_ids_to_tokens(id_) if id_ < len(tokenizer) else "" for id_ in rows.tolist()]
    return Vocabulary(tokens, rows, rows, torch.ones_like(rows, dtype=torch.bool), NEVER), tokenizer


@torch.no_grad()
def from_marian(marian: MarianMTModel, vocabulary: Vocabulary) -> VaswaniForConditionalGeneration:
    """
    Builds a Vaswani model with the weights of a MarianMTModel.

    Args:
        marian (`MarianMTModel`): model of any size.
        vocabulary ([`Vocabulary`]): our ids with their rows in Marian's embeddings.

    Raises:
        ValueError: The generation config contains an id that is not in the vocabulary, or an unsupported setting.
    """
    theirs, encoder, decoder = marian.config, marian.model.encoder, marian.model.decoder
    separate = bool((vocabulary.source_rows != vocabulary.target_rows).any())
    tied = marian.lm_head.weight is decoder.embed_tokens.weight
    bias = vocabulary.output_bias(marian.final_logits_bias[0])
    ids = {name: getattr(theirs, name) for name in IDS}
    config = VaswaniConfig(
        vocab_size=len(vocabulary.tokens),
        d_ff=theirs.encoder_ffn_dim,
        num_heads=theirs.encoder_attention_heads,
        sinusoid_layout="concatenated",
        layer_norm_eps=MARIAN_EPS,
        attention_bias=True,
        # A bias of zeros would only prevent the faster loss.
        lm_head_bias=bool(bias.any()),
        share_embeddings=encoder.embed_tokens.weight is decoder.embed_tokens.weight and not separate,
        tie_word_embeddings=tied,
        **{name: getattr(theirs, name) for name in SAME},
        **{name: _map_ids(id_, vocabulary) for name, id_ in ids.items()},
    )
    weights = {our_name(name): weight for name, weight in marian.state_dict().items() if ".layers." in name}
    weights["model.encoder.embed_tokens.weight"] = encoder.embed_tokens.weight[vocabulary.source_rows]
    weights["model.decoder.embed_tokens.weight"] = decoder.embed_tokens.weight[vocabulary.target_rows]
    weights["lm_head.weight"] = marian.lm_head.weight[vocabulary.target_rows]
    if config.lm_head_bias:
        weights["lm_head.bias"] = bias
    model = VaswaniForConditionalGeneration(config).eval()
    model.load_state_dict(weights)
    model.generation_config = _generation_config(marian.generation_config, vocabulary)
    return model


def _map_ids(value: Any, vocabulary: Vocabulary) -> Any:
    """Maps the ids in a setting to ours: one id, nested lists of ids, or `None`."""
    if isinstance(value, list):
        return [_map_ids(item, vocabulary) for item in value]
    return int(vocabulary.target_ids(torch.tensor([value]))) if isinstance(value, int) else value


def _generation_config(theirs: GenerationConfig, vocabulary: Vocabulary) -> GenerationConfig:
    """Converts the settings of a search, with our ids."""
    ours = copy.deepcopy(theirs)
    for name in UNSUPPORTED_IDS:
        if getattr(theirs, name, None) is not None:
            raise ValueError(f"The generation config has {name}, which is not supported: remove it.")
    for name in GENERATION_IDS:
        setattr(ours, name, _map_ids(getattr(theirs, name, None), vocabulary))
    for name, value in TRANSFORMERS_RULES.items():
        setattr(ours, name, value)
    ours._from_model_config = None
    return ours


# ---- Out ---------------------------------------------------------------------------------------------------------


def save(loaded: Loaded, folder: Path, quantization: str | None = None) -> Foreign:
    """
    Writes a model as a MarianMTModel that computes the same logits.

    Args:
        loaded ([`Loaded`]): post-norm model with sinusoids and `layer_norm_eps=1e-5`.
        folder (`Path`): folder to write.
        quantization (`str`, *optional*): must be `None`.

    Returns:
        [`Foreign`]: the model as read back from the folder.

    Raises:
        ValueError: The model has a feature that Marian does not have.
        OSError: The folder cannot be written.
    """
    check_expressible(loaded.model.config, "Marian")
    marian = to_marian(loaded.model)
    notes = _set_search(loaded.model.generation_config, marian)
    notes.append(
        "The tokenizer is written as tokenizer.json, which AutoTokenizer loads, instead of the SentencePiece files of "
        "a MarianTokenizer."
    )
    notes.append(
        f"Sources and translations are limited to {marian.config.max_position_embeddings} tokens, the size of "
        "Marian's table of positions."
    )
    marian.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    saved = MarianMTModel.from_pretrained(folder, local_files_only=True).eval()
    foreign = run_by_transformers(NAME, saved, loaded.tokenizer)
    foreign.notes += notes
    return foreign


@torch.no_grad()
def to_marian(model: VaswaniForConditionalGeneration) -> MarianMTModel:
    """
    Builds a MarianMTModel with the weights of a Vaswani model. Both compute the same if the Vaswani model has Marian's
    epsilon in LayerNorm.

    Args:
        model ([`VaswaniForConditionalGeneration`]): post-norm model with sinusoids and
            `num_heads * d_k = num_heads * d_v = d_model`.
    """
    config = model.config
    sizes = {name: getattr(config, name) for name in SAME} | {name: getattr(config, name) for name in IDS}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_ffn_dim": config.d_ff, f"{side}_attention_heads": config.num_heads}
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            share_encoder_decoder_embeddings=config.share_embeddings and config.tie_word_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
            forced_eos_token_id=None,
            **sizes,
        )
    )
    marian.to(model.dtype).eval()
    ours = model.state_dict()
    if config.sinusoid_layout == "interleaved":
        ours = {name: _with_sines_first(name, weight) for name, weight in ours.items()}
    ours["model.shared.weight"] = ours["model.encoder.embed_tokens.weight"]
    weights = {}
    for name, weight in marian.state_dict().items():
        if "embed_positions" in name:
            weights[name] = weight
        elif name == "final_logits_bias":
            weights[name] = ours["lm_head.bias"][None] if config.lm_head_bias else torch.zeros_like(weight)
        else:
            # Marian has biases that the paper does not have.
            weights[name] = ours.get(our_name(name), torch.zeros_like(weight))
    marian.load_state_dict(weights)
    return marian


def _with_sines_first(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Moves the columns with sines in front of those with cosines."""
    if D_MODEL_FIRST.search(name):
        return torch.cat((weight[0::2], weight[1::2]))
    if D_MODEL_LAST.search(name):
        return torch.cat((weight[:, 0::2], weight[:, 1::2]), dim=1)
    return weight


def _set_search(generation_config: GenerationConfig, marian: MarianMTModel) -> list[str]:
    """Gives a Marian model the settings of a search, and returns notes about those that it ignores."""
    theirs, notes = copy.deepcopy(generation_config), ignored_settings(generation_config, "Marian")
    for name in TRANSFORMERS_RULES:
        delattr(theirs, name)
    if generation_config.length_penalty_type != TRANSFORMERS_RULES["length_penalty_type"]:
        theirs.length_penalty = None
        theirs.early_stopping = None
        notes.append("Marian's beam search divides log-probabilities by the length.")
    if generation_config.max_length is None and generation_config.max_new_tokens is None:
        theirs.max_length = min(MAX_LENGTH, marian.config.max_position_embeddings)
        if generation_config.max_length_offset is not None:
            notes.append(
                f"Marian limits translations to {theirs.max_length} tokens, whatever the length of the source."
            )
    marian.generation_config = theirs
    return notes
