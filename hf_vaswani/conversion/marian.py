"""transformers' MarianMTModel (OPUS-MT), in both directions.

Both compute the same where a Vaswani is post-norm and has `layer_norm_eps=1e-5`, the only one that Marian has there.
Their sinusoids are in another order of columns, which is no difference: the columns of all that flows along the
residual connections are named anew.
"""

import copy
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from ..data.tokenizer import load_tokenizer
from ..files import read_json
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, sinusoids
from ..translation.loading import IDS, load_model
from .marian_vocabulary import Vocabulary, check_ids, fast_tokenizer, join, letters_of_symbols, map_ids, read_spm
from .protocol import Converted, Foreign, model_type

LAYER_NORM_EPS = 1e-5
# Longest translation of what is saved without a limit of its own, as OPUS-MT's.
MAX_LENGTH = 512
# transformers' names to ours, applied in this order.
NAMES = {
    r"encoder_attn": "cross_attn",
    r"attn_layer_norm": "attn_norm.layer_norm",
    r"final_layer_norm": "feed_forward_norm.layer_norm",
    r"\b(fc\d)": r"feed_forward.\1",
}
# What comes out of a sub-layer or a norm, and what goes into a sub-layer or out of an embedding.
COLUMNS_FIRST = re.compile(r"(out_proj|fc2|layer_norm)\.(weight|bias)$")
COLUMNS_LAST = re.compile(r"(embed_tokens|shared|lm_head|[qkv]_proj|fc1)\.weight$")
# The settings of both configs that are the same in both.
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
# What older configs say of architectures that MarianMTModel does not have, and what they must say.
SWITCHES = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
    "encoder_layerdrop": 0,
    "decoder_layerdrop": 0,
}
# The ids of a generation config, and what has ids in a form of its own there.
GENERATION_IDS = (
    *IDS,
    "forced_bos_token_id",
    "forced_eos_token_id",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
)
OTHER_IDS = ("sequence_bias", "force_words_ids")
# The search that both know.
SEARCH = {"length_penalty_type": "power", "max_length_offset": None, "finish_candidates": "top"}
TARGETS_ARE_CUT_AS_SOURCES = (
    "The tokenizer cuts every text as the source's .spm file says: targets for further training would have other "
    "pieces than Marian's."
)


def recognize(path: Path) -> bool:
    """Whether a folder has one of transformers' Marian models."""
    return model_type(path) == "marian"


# ---- In ----------------------------------------------------------------------------------------------------------


def load(path: Path) -> Converted:
    """
    One of transformers' Marian models as ours, which translates the same.

    Args:
        path (`Path`): a folder with config.json, weights, vocab.json, source.spm and target.spm.

    Returns:
        [`Converted`], in float32. Where the target has a vocabulary of its own, ids differ, see [`Vocabulary`].

    Raises:
        ValueError: a file is missing or broken, or the model has something that ours has not; the message names it.
        ImportError: the packages that read .spm files are not there.
    """
    path = Path(path)
    fields = read_json(path / "config.json")
    _check_switches(path / "config.json", fields)
    marian = _read_model(path)
    vocabulary, tokenizer = _read_tokenizer(path, marian.config)
    model = from_marian(marian, vocabulary)
    notes = [] if _same_pieces(path) else [TARGETS_ARE_CUT_AS_SOURCES]
    letters = letters_of_symbols(read_spm(path / "source.spm")) if (path / "source.spm").is_file() else []
    if letters:
        notes.append(
            f"Letters that only user-defined pieces have ({' '.join(letters)}) are read as {tokenizer.unk_token}, "
            "also where the target's vocabulary has them."
        )
    return Converted(model, tokenizer, _foreign(path, marian, vocabulary, tokenizer, notes))


def _check_switches(path: Path, fields: dict[str, Any]) -> None:
    """Refuses what a config says and ours cannot be, by name."""
    for name, expected in SWITCHES.items():
        if fields.get(name, expected) not in (expected, None):
            raise ValueError(f"{path} has {name} {fields[name]}, but only {expected} can be converted.")
    activation = fields.get("activation_function", MarianConfig.activation_function)
    if activation not in ACT2FN:
        raise ValueError(f"{path} has activation_function {activation!r}, which transformers does not have.")
    for name in ("attention_heads", "ffn_dim"):
        sides = [
            fields.get(f"{side}_{name}", getattr(MarianConfig, f"{side}_{name}")) for side in ("encoder", "decoder")
        ]
        if sides[0] != sides[1]:
            raise ValueError(
                f"{path} has encoder_{name} {sides[0]} and decoder_{name} {sides[1]}, but a Vaswani has one for both."
            )


def _read_model(path: Path) -> MarianMTModel:
    """Loads the model of a folder, every weight of which was in the folder."""
    # In float32 both sides compute the same; in float16 each rounds in its own way.
    model = load_model(path, torch.float32)
    for stack in (model.model.encoder, model.model.decoder):
        table = stack.embed_positions.weight.float()
        expected = sinusoids(torch.arange(len(table)), table.shape[1], "concatenated")
        difference = (table - expected).abs().max().item()
        if not difference < 1e-2:
            raise ValueError(
                f"The positions in {path} are not Marian's sinusoids: they differ by up to {difference:.2g}."
            )
    return model


def _read_tokenizer(path: Path, config: MarianConfig) -> tuple[Vocabulary, PreTrainedTokenizerBase]:
    """The vocabulary of a folder, and its tokenizer."""
    file = path / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    # A token may be written as an object with a name.
    given = {
        name: settings.get(f"{name}_token", f"<{name}>" if name != "eos" else "</s>") for name in ("pad", "eos", "unk")
    }
    special = {name: token["content"] if isinstance(token, dict) else str(token) for name, token in given.items()}
    source_file = path / "vocab.json"
    if not source_file.exists() and (path / "tokenizer.json").is_file():
        return _read_fast_tokenizer(path, config)
    source, target = read_json(source_file), None
    check_ids(source_file, source, config.vocab_size, "the embedding of config.json (vocab_size)")
    if settings.get("separate_vocabs"):
        target_file = path / "target_vocab.json"
        target = read_json(target_file)
        check_ids(target_file, target, config.decoder_vocab_size, "the target embedding (decoder_vocab_size)")
    elif config.decoder_vocab_size != config.vocab_size:
        raise ValueError(
            f"{path / 'config.json'} has vocab_size {config.vocab_size} and decoder_vocab_size "
            f"{config.decoder_vocab_size}, but {file} does not say separate_vocabs."
        )
    for token in special.values():
        if token not in source:
            raise ValueError(f"{source_file} has no {token}.")
    spm = read_spm(path / "source.spm")
    read_spm(path / "target.spm")
    vocabulary = join(source, target, spm, list(special.values()), special["unk"])
    model_max_length = settings.get("model_max_length") or config.max_position_embeddings
    return vocabulary, fast_tokenizer(vocabulary, spm, **special, model_max_length=model_max_length)


def _read_fast_tokenizer(path: Path, config: MarianConfig) -> tuple[Vocabulary, PreTrainedTokenizerBase]:
    """The tokenizer of a folder that [`save`] wrote, which has both sides' ids."""
    tokenizer = load_tokenizer(str(path))
    if config.decoder_vocab_size != config.vocab_size or len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"{path / 'tokenizer.json'} has {len(tokenizer)} entries for both sides, but config.json has vocab_size "
            f"{config.vocab_size} and decoder_vocab_size {config.decoder_vocab_size}."
        )
    rows = torch.arange(config.vocab_size)
    tokens = [tokenizer.convert_ids_to_tokens(id_) if id_ < len(tokenizer) else "" for id_ in rows.tolist()]
    return Vocabulary(tokens, rows, rows, torch.ones_like(rows, dtype=torch.bool)), tokenizer


def _same_pieces(path: Path) -> bool:
    files = [path / f"{side}.spm" for side in ("source", "target")]
    return not any(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes()


@torch.no_grad()
def from_marian(marian: MarianMTModel, vocabulary: Vocabulary) -> VaswaniForConditionalGeneration:
    """
    Ours with the weights of a Marian.

    Args:
        marian (`MarianMTModel`): of any size.
        vocabulary ([`Vocabulary`]): our ids, and what they are in Marian.

    Raises:
        ValueError: a setting of the search has an id that is not in the vocabulary, or cannot be converted.
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
        layer_norm_eps=LAYER_NORM_EPS,
        attention_bias=True,
        # Without one, the faster loss can be used.
        lm_head_bias=bool(bias.any()),
        share_embeddings=encoder.embed_tokens.weight is decoder.embed_tokens.weight and not separate,
        tie_word_embeddings=tied,
        **{name: getattr(theirs, name) for name in SAME},
        **{name: map_ids(id_, vocabulary.target_id) for name, id_ in ids.items()},
    )
    weights = {our_name(name): weight for name, weight in marian.state_dict().items() if ".layers." in name}
    for name, matrix, rows in (
        ("model.encoder.embed_tokens", encoder.embed_tokens, vocabulary.source_rows),
        ("model.decoder.embed_tokens", decoder.embed_tokens, vocabulary.target_rows),
        ("lm_head", marian.lm_head, vocabulary.target_rows),
    ):
        weights[f"{name}.weight"] = vocabulary.rows(matrix.weight, rows)
    if config.lm_head_bias:
        weights["lm_head.bias"] = bias
    model = VaswaniForConditionalGeneration(config).eval()
    model.load_state_dict(weights)
    model.generation_config = _generation_config(marian.generation_config, vocabulary)
    return model


def our_name(name: str) -> str:
    """Our name of one of transformers' weights."""
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def _generation_config(theirs: GenerationConfig, vocabulary: Vocabulary) -> GenerationConfig:
    """The settings of a search that finds what Marian's finds."""
    ours = copy.deepcopy(theirs)
    for name in OTHER_IDS:
        if getattr(theirs, name, None) is not None:
            raise ValueError(f"The generation config has {name}, which cannot be converted.")
    for name in GENERATION_IDS:
        setattr(ours, name, map_ids(getattr(theirs, name, None), vocabulary.target_id))
    for name, value in SEARCH.items():
        setattr(ours, name, value)
    ours._from_model_config = None
    return ours


def _foreign(
    path: Path,
    marian: MarianMTModel,
    vocabulary: Vocabulary,
    tokenizer: PreTrainedTokenizerBase,
    notes: list[str],
) -> Foreign:
    """The model that came in, which takes and gives our ids."""
    pad = marian.config.pad_token_id
    source_rows, target_rows = (
        rows.where(rows >= 0, pad) for rows in (vocabulary.source_rows, vocabulary.target_rows)
    )

    @torch.no_grad()
    def logits(input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        found = marian(
            input_ids=source_rows[input_ids],
            attention_mask=attention_mask,
            decoder_input_ids=target_rows[decoder_input_ids],
        ).logits
        return vocabulary.logits(found)

    def translate(sentences: Sequence[str]) -> list[str]:
        if not (path / "vocab.json").is_file():
            return _greedy(marian, tokenizer, sentences)
        from transformers import MarianTokenizer

        with warnings.catch_warnings():
            # It recommends a package that it does not use.
            warnings.filterwarnings("ignore", message=".*sacremoses")
            theirs = MarianTokenizer.from_pretrained(path, local_files_only=True)
        return _greedy(marian, theirs, sentences)

    try:
        import sentencepiece  # noqa: F401
    except ImportError:
        return Foreign("transformers' MarianMTModel", logits, notes=notes)
    return Foreign("transformers' MarianMTModel", logits, translate, notes)


def _greedy(marian: MarianMTModel, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> list[str]:
    encoding = tokenizer(list(sentences), return_tensors="pt", padding=True, padding_side="right")
    found = marian.generate(
        encoding["input_ids"], attention_mask=encoding["attention_mask"], num_beams=1, early_stopping=None
    )
    return tokenizer.batch_decode(found, skip_special_tokens=True)


# ---- Out ---------------------------------------------------------------------------------------------------------


def save(model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Foreign:
    """
    Writes a model as transformers' MarianMTModel, which computes the same.

    Args:
        model ([`VaswaniForConditionalGeneration`]): post-norm, with sinusoids and `layer_norm_eps=1e-5`.
        tokenizer ([`PreTrainedTokenizerBase`]): is written beside it as it is.
        folder (`Path`): where to.

    Returns:
        [`Foreign`]: the model as it was read again from the folder.

    Raises:
        ValueError: Marian has not what the model has; the message names it.
        OSError: the folder cannot be written.
    """
    _check_expressible(model)
    marian = to_marian(model)
    notes = _set_search(model, marian)
    notes.append(
        "The tokenizer is written as tokenizer.json, which AutoTokenizer loads, and not as the SentencePiece files of "
        "a MarianTokenizer."
    )
    notes.append(
        f"Sources and translations have at most {marian.config.max_position_embeddings} tokens, the rows of Marian's "
        "table of positions."
    )
    folder.mkdir(parents=True, exist_ok=True)
    marian.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = MarianMTModel.from_pretrained(folder, local_files_only=True).eval()

    @torch.no_grad()
    def logits(input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        return saved(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids).logits

    def translate(sentences: Sequence[str]) -> list[str]:
        return _greedy(saved, tokenizer, sentences)

    return Foreign("transformers' MarianMTModel", logits, translate, notes)


def _check_expressible(model: VaswaniForConditionalGeneration) -> None:
    """Refuses what Marian has not, by name."""
    config = model.config
    for name, expected in (
        ("norm_position", ("post",)),
        ("position_encoding", ("sinusoidal",)),
        ("sinusoid_layout", ("interleaved", "concatenated")),
    ):
        value = getattr(config, name)
        if value not in expected:
            words = " or ".join(f'"{choice}"' for choice in expected)
            raise ValueError(f'The model has {name} "{value}", but Marian has only {words}.')
    if config.position_offset:
        raise ValueError(f"The model has position_offset {config.position_offset}, but Marian counts from 0.")
    for name in ("d_k", "d_v"):
        width = getattr(config, name)
        if width is not None and width * config.num_heads != config.d_model:
            raise ValueError(
                f"The model has {name} {width}, but a head of Marian's has d_model / num_heads = "
                f"{config.d_model} / {config.num_heads}."
            )
    if abs(config.layer_norm_eps - LAYER_NORM_EPS) > 1e-3 * LAYER_NORM_EPS:
        raise ValueError(
            f"The model has layer_norm_eps {config.layer_norm_eps}, but Marian's is always {LAYER_NORM_EPS}, which "
            f"would change its logits by up to {_effect_of_eps(model):.1g}: train it with "
            f"model.layer_norm_eps {LAYER_NORM_EPS}."
        )


@torch.no_grad()
def _effect_of_eps(model: VaswaniForConditionalGeneration) -> float:
    """By how much the logits of random sentences change with Marian's epsilon."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (4, 12), generator=generator).to(model.device)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    training = model.training
    before = model.eval()(input_ids=ids, decoder_input_ids=ids).logits
    for norm in norms:
        norm.eps = LAYER_NORM_EPS
    after = model(input_ids=ids, decoder_input_ids=ids).logits
    for norm in norms:
        norm.eps = model.config.layer_norm_eps
    model.train(training)
    return (after - before).abs().max().item()


@torch.no_grad()
def to_marian(model: VaswaniForConditionalGeneration) -> MarianMTModel:
    """
    A Marian with the weights of ours, which computes the same where ours has Marian's LayerNorm epsilon.

    Args:
        model ([`VaswaniForConditionalGeneration`]): post-norm, with sinusoids, and as wide as its heads together.
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
            # Marian has biases where the paper has none.
            weights[name] = ours.get(our_name(name), torch.zeros_like(weight))
    marian.load_state_dict(weights)
    return marian


def _with_sines_first(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight for columns in another order: those with a sine first, then those with a cosine."""
    if COLUMNS_FIRST.search(name):
        return torch.cat((weight[0::2], weight[1::2]))
    if COLUMNS_LAST.search(name):
        return torch.cat((weight[:, 0::2], weight[:, 1::2]), dim=1)
    return weight


def _set_search(model: VaswaniForConditionalGeneration, marian: MarianMTModel) -> list[str]:
    """Gives a Marian the generation config of ours, as far as it has that. Returns what it has not."""
    ours = model.generation_config
    theirs, notes = copy.deepcopy(ours), []
    for name in SEARCH:
        delattr(theirs, name)
    if ours.length_penalty_type != SEARCH["length_penalty_type"]:
        theirs.length_penalty = None
        theirs.early_stopping = None
        notes.append(
            f"Marian has no length penalty of type {ours.length_penalty_type!r}: its beam search divides by the "
            "length, and may find other translations."
        )
    if ours.finish_candidates != SEARCH["finish_candidates"]:
        notes.append(
            f"Marian lets only the best candidates of a step finish, not {ours.finish_candidates!r}: its beam search "
            "may find other translations."
        )
    if ours.max_length is None and ours.max_new_tokens is None:
        theirs.max_length = min(MAX_LENGTH, marian.config.max_position_embeddings)
        if ours.max_length_offset is not None:
            notes.append(
                f"Marian has no limit of {ours.max_length_offset} tokens more than the source has: a translation has "
                f"at most {theirs.max_length}."
            )
    marian.generation_config = theirs
    return notes
