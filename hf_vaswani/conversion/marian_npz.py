"""Marian's own files: an `.npz` with weights and options, beside decoder.yml, vocabularies and `.spm` files.

They are converted directly, without MarianMTModel, because a Vaswani model can have Marian's LayerNorm epsilon (1e-6)
and its sinusoids (tensor2tensor's), where MarianMTModel has 1e-5 and the sinusoids of the paper. Statements about
Marian refer to the sources of Marian 1.12, and were compared with pymarian 1.12.31 and 1.12.42.
"""

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..extras import extra
from ..files import read_lines
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..model.rules_vaswani import TRANSFORMERS_RULES
from .formats import Converted, Foreign, check_supported, fill
from .marian import MAX_LENGTH
from .vocabulary import EOS, NEVER, PAD, UNK, Vocabulary, check_ids, read_spm, sentencepiece

OPTIONS = "special:model.yml"
DECODER = "decoder.yml"
# Activations by Marian's names; that of gelu depends on the version.
ACTIVATIONS = {"swish": "silu", "relu": "relu", "gelu": "gelu"}
# The gelu of releases up to the first of these is x * sigmoid(1.702 x), and that from the second on is x * Phi(x). The
# developers' versions between them have either.
SIGMOID_GELU, EXACT_GELU = (1, 12, 0), (1, 12, 31)
# Norm position by the operations (before a sub-layer, after it, after the stack).
NORM_POSITIONS = {("", "dan", ""): "post", ("n", "da", "n"): "pre"}
# Options that change the network, with the supported values; the first is the default.
SWITCHES: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-no-projection": (False,),
    "transformer-no-bias": (False,),
    "transformer-no-affine": (False,),
    "transformer-pool": (False,),
    "transformer-rnn-projection": (False,),
    "transformer-tied-layers": ([], None),
    "transformer-train-position-embeddings": (False,),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-ffn-activation": tuple(ACTIVATIONS),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "lemma-dim-emb": (0,),
    "right-left": (False,),
    "ulr": (False,),
    "input-types": ([], None, ["sequence"], ["sequence", "sequence"]),
}
# Marian's names of weights, translated to ours by [`our_name`]. Layers are counted from 1.
NAMES: dict[str, Any] = {
    r"^(encoder|decoder)_l(\d+)_": lambda found: f"model.{found[1]}.layers.{int(found[2]) - 1}.",
    r"^(encoder|decoder)_top_ln_": r"model.\1.norm.",
    r"(self|context)_Wo_ln_": r"\1_attn_norm.layer_norm.",
    r"(self|context)_([Wb])([qkv])$": r"\1_attn.\3_proj.\2",
    r"(self|context)_([Wb])o$": r"\1_attn.out_proj.\2",
    r"context_attn": "cross_attn",
    r"ffn_ffn_ln_": "feed_forward_norm.layer_norm.",
    r"ffn_([Wb])([12])$": r"feed_forward.fc\2.\1",
    r"\.(W|scale(_pre)?)$": ".weight",
    r"\.(b|bias(_pre)?)$": ".bias",
}
# Matrices that Marian multiplies from the right.
TRANSPOSED = re.compile(r"(_W[qkvo12]|^decoder_ff_logit_out_W)$")


def recognize(path: Path) -> bool:
    """Returns whether a path is an `.npz` file or a folder with one; its content is checked by [`load`]."""
    return any(path.glob("*.npz")) if path.is_dir() else path.suffix == ".npz"


def load(path: Path) -> Converted:
    """
    Reads a Marian model as a Vaswani model that computes the same.

    Args:
        path (`Path`): `.npz` file, or a folder with one. Beside it are decoder.yml, which names the vocabularies
            (without it, the folder must contain a single one), and source.spm and target.spm, unless the vocabularies
            are `.spm` files themselves.

    Returns:
        [`Converted`], without logits or translations of the original: Marian does not run here.

    Raises:
        ValueError: A file is missing or damaged, or the model has a feature that a Vaswani model does not have.
        ImportError: The packages that read these files are not installed.
    """
    file = _find_npz(path)
    options, weights = _read_npz(file)
    norm_position = _check_options(file, options)
    settings, decoding = _decoding(file)
    embeddings = _embeddings(file, weights)
    vocabulary, tokenizer, notes = _read_vocabulary(file, settings, decoding, embeddings)
    config = _config(options, _activation(file, options), norm_position, vocabulary, tokenizer)
    weights = _with_our_rows(weights, embeddings, config, vocabulary)
    model = VaswaniForConditionalGeneration(config).eval()
    fill(model, weights, file, NAMES)
    model.generation_config = _generation_config(settings, decoding, config, tokenizer)
    return Converted(model, tokenizer, Foreign("Marian", notes=notes))


# ---- Files -------------------------------------------------------------------------------------------------------


def _find_npz(path: Path) -> Path:
    """Returns the `.npz` file of a path."""
    if not path.is_dir():
        if path.suffix != ".npz" or not path.is_file():
            raise ValueError(f"{path} is not an .npz file.")
        return path
    if (path / DECODER).is_file():
        named = _list(_read_yaml(path / DECODER).get("models"))
        if len(named) > 1:
            raise ValueError(
                f"{path / DECODER} names {len(named)} models, but only 1 can be converted: give its .npz file."
            )
        if named and (path / Path(named[0]).name).is_file():
            return path / Path(named[0]).name
    found = sorted(path.glob("*.npz"))
    # Marian saves m.npz, and beside it m.npz.optimizer.npz, m.npz.best-bleu.npz, m.iter1000.npz and so on.
    others = {file: (f"{file.name}.", f"{file.stem}.iter") for file in found}
    found = [file for file in found if not any(file.name.startswith(names) for names in others.values())]
    if len(found) != 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} contains {len(found)} .npz files: give the one to convert ({names}).")
    return found[0]


def _read_yaml(path: Path, strings: bool = False) -> dict[Any, Any]:
    """Reads a YAML file that contains a mapping; with `strings`, scalars are not interpreted."""
    return _parse_yaml(path, "".join(read_lines(path)), strings)


def _parse_yaml(path: Path, text: str, strings: bool = False) -> dict[Any, Any]:
    """Parses YAML as [`_read_yaml`] does; `path` is for messages."""
    with extra("convert", "Reading Marian's files"):
        import yaml
    try:
        # In a vocabulary, `yes`, `1.0` and `null` are tokens. Both loaders create only plain values.
        content = yaml.load(text, Loader=yaml.BaseLoader if strings else yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a mapping, but it contains a {type(content).__name__}.")
    return content


def _list(value: Any) -> list[Any]:
    """Returns a setting that may be a list, a single value or missing, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _read_npz(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Reads the options of a model, and its weights in float32 by Marian's names; vectors lose their first axis."""
    try:
        # numpy does not close damaged files that it has opened itself.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or not an .npz file of numbers.") from error
    if OPTIONS not in arrays:
        raise ValueError(f"{path} has no {OPTIONS}, the options of the model.")
    text = arrays[OPTIONS].tobytes().rstrip(b"\0").decode("utf-8", "replace")
    weights = {}
    for name, array in arrays.items():
        if name.startswith("special:"):
            continue
        if array.dtype not in (np.float32, np.float16, np.float64):
            raise ValueError(f"{path} has {name} in {array.dtype}, but only floats are supported.")
        weight = torch.from_numpy(array.astype(np.float32))
        weight = weight.flatten() if len(weight) == 1 else weight
        weights[name] = weight.T if TRANSPOSED.search(name) else weight
    return _parse_yaml(Path(f"{path}, {OPTIONS}"), text), weights


def _check_options(path: Path, options: dict[str, Any]) -> str:
    """Rejects the first option that a Vaswani model does not support; returns the norm position."""
    check_supported(options, SWITCHES, path)
    names = ("transformer-preprocess", "transformer-postprocess", "transformer-postprocess-top")
    norms = tuple(options.get(name, default) or "" for name, default in zip(names, ("", "dan", ""), strict=True))
    if norms not in NORM_POSITIONS:
        found = ", ".join(f"{name} {value!r}" for name, value in zip(names, norms, strict=True))
        raise ValueError(
            f"{path} has {found}, but only '', 'dan', '' (post-norm) and 'n', 'da', 'n' (pre-norm) are supported."
        )
    return NORM_POSITIONS[norms]


def _activation(path: Path, options: dict[str, Any]) -> str:
    """Returns the activation of the feed-forward networks; that of gelu depends on the version of Marian."""
    activation = options.get("transformer-ffn-activation", "swish")
    if activation != "gelu":
        return ACTIVATIONS[activation]
    beside = path.with_name(f"{path.name}.yml")
    versions = [options.get("version"), _read_yaml(beside).get("version") if beside.is_file() else None]
    for version in versions:
        found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", str(version))
        number = tuple(map(int, found.groups())) if found else None
        if number is not None and number <= SIGMOID_GELU:
            return "quick_gelu"
        if number is not None and number >= EXACT_GELU:
            return "gelu"
    most, least = (".".join(map(str, each)) for each in (SIGMOID_GELU, EXACT_GELU))
    said = " and ".join(repr(version) for version in versions if version is not None) or "not given"
    raise ValueError(
        f"{path} has transformer-ffn-activation 'gelu', which is x * sigmoid(1.702 x) up to Marian {most}, and "
        f"x * Phi(x) from {least} on, but its version is {said}: write one that computes as yours did into {beside}, "
        f"as 'version: v{most}'."
    )


def _decoding(file: Path) -> tuple[Path, dict[str, Any]]:
    """Reads the settings for translating, if there are any: decoder.yml, or what Marian leaves beside each model."""
    path, own = file.with_name(DECODER), file.with_name(f"{file.name}.{DECODER}")
    settings = _read_yaml(path) if path.is_file() else {}
    names = [Path(name).name for name in _list(settings.get("models"))]
    if own.is_file() and (not path.is_file() or (names and file.name not in names)):
        return own, _read_yaml(own)
    return path, settings


# ---- Vocabulary --------------------------------------------------------------------------------------------------


def _read_vocabulary(
    file: Path, settings: Path, decoding: dict[str, Any], embeddings: list[tuple[str, torch.Tensor]]
) -> tuple[Vocabulary, PreTrainedTokenizerBase, list[str]]:
    """Reads the joint vocabulary, its tokenizer, and notes about it."""
    folder = file.parent
    named = [folder / Path(name).name for name in _list(decoding.get("vocabs"))]
    found = named or sorted([*folder.glob("*.yml"), *folder.glob("*.yaml"), *folder.glob("*.spm")])
    if not named:
        # Marian's own files about a model begin with the name of the model.
        others = (DECODER, "source.spm", "target.spm")
        found = [path for path in found if path.name not in others and ".npz." not in path.name]
        if len(found) != 1:
            raise ValueError(
                f"{folder} contains {len(found)} vocabularies, but without {settings.name} there must be 1."
            )
    if len(found) > 2:
        raise ValueError(f"{settings} names {len(found)} vocabularies, but there must be 1 or 2.")
    ids, files = [], []
    for path, side, (name, matrix) in zip([found[0], found[-1]], ("source", "target"), embeddings, strict=True):
        is_spm = path.suffix == ".spm"
        files.append(path if is_spm else folder / f"{side}.spm")
        of_side = {piece.piece: id_ for id_, piece in enumerate(read_spm(path).pieces)} if is_spm else _read_ids(path)
        check_ids(path, of_side, len(matrix), name)
        for token in (EOS, UNK):
            if token not in of_side:
                raise ValueError(f"{path} does not contain the token {token}.")
        if PAD in of_side:
            raise ValueError(f"{path} contains {PAD}, which the conversion adds as the decoder's start token.")
        # Marian's decoder starts with a vector of zeros, and its padding is masked: a new token serves as both.
        ids.append(of_side | {PAD: len(of_side)})
    special = {"eos_token": EOS, "unk_token": UNK, "pad_token": PAD}
    return sentencepiece(ids[0], ids[1], files, special, PAD, model_max_length=MAX_LENGTH)


def _read_ids(path: Path) -> dict[str, int]:
    """Reads a vocabulary in YAML."""
    if not path.is_file():
        raise ValueError(f"{path}, the vocabulary, is missing: copy it to the folder of the model.")
    entries = _read_yaml(path, strings=True)
    for token, id_ in entries.items():
        if not re.fullmatch(r"\d+", str(id_)):
            raise ValueError(f"{path} has {id_!r} as the id of {token!r}, but it must be a whole number.")
    return {token: int(id_) for token, id_ in entries.items()}


# ---- Weights -----------------------------------------------------------------------------------------------------


def _config(
    options: dict[str, Any],
    activation: str,
    norm_position: str,
    vocabulary: Vocabulary,
    tokenizer: PreTrainedTokenizerBase,
) -> VaswaniConfig:
    """Builds the config; [`_put_embeddings`] sets which matrices are shared."""
    try:
        sizes = {
            "d_model": options["dim-emb"],
            "d_ff": options["transformer-dim-ffn"],
            "num_heads": options["transformer-heads"],
            "encoder_layers": options["enc-depth"],
            "decoder_layers": options["dec-depth"],
        }
    except KeyError as error:
        raise ValueError(f"The options of the model, {OPTIONS}, lack {error.args[0]}.") from error
    return VaswaniConfig(
        vocab_size=len(vocabulary.tokens),
        **sizes,
        dropout=options.get("transformer-dropout", 0.0),
        attention_dropout=options.get("transformer-dropout-attention", 0.0),
        activation_dropout=options.get("transformer-dropout-ffn", 0.0),
        activation_function=activation,
        norm_position=norm_position,
        sinusoid_layout="tensor2tensor",
        layer_norm_eps=1e-6,
        attention_bias=True,
        lm_head_bias=True,
        share_embeddings=False,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )


def _embeddings(file: Path, weights: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Returns the embeddings of source and target with their names, which may be the same."""
    names = [f"{side}_Wemb" if f"{side}_Wemb" in weights else "Wemb" for side in ("encoder", "decoder")]
    for name in names:
        if name not in weights:
            raise ValueError(f"{file} has no {name}.")
    return [(name, weights[name]) for name in names]


def _with_our_rows(
    weights: dict[str, torch.Tensor],
    embeddings: list[tuple[str, torch.Tensor]],
    config: VaswaniConfig,
    vocabulary: Vocabulary,
) -> dict[str, torch.Tensor]:
    """Returns all weights, those with a row for each token by our names, and sets in the config which are shared."""
    (source_name, source), (target_name, target) = embeddings
    outputs = [name for name in ("decoder_ff_logit_out_W", "decoder_ff_logit_out_Wt") if name in weights]
    output = weights[outputs[0]] if outputs else target
    bias = weights.get("decoder_ff_logit_out_b", output.new_zeros(len(output)))
    known = {source_name, target_name, "decoder_ff_logit_out_b", *outputs}
    found = {name: weight for name, weight in weights.items() if name not in known}

    def with_pad(matrix: torch.Tensor) -> torch.Tensor:
        return pad(matrix, (0, 0, 0, 1))

    found["model.encoder.embed_tokens.weight"] = with_pad(source)[vocabulary.source_rows]
    found["model.decoder.embed_tokens.weight"] = with_pad(target)[vocabulary.target_rows]
    found["lm_head.weight"] = with_pad(output)[vocabulary.target_rows]
    # Marian's softmax does not include padding.
    found["lm_head.bias"] = vocabulary.output_bias(pad(bias, (0, 1), value=NEVER))
    config.tie_word_embeddings = not outputs
    same_rows = torch.equal(vocabulary.source_rows, vocabulary.target_rows)
    config.share_embeddings = not outputs and source_name == target_name and same_rows
    return found


def _generation_config(
    path: Path, decoding: dict[str, Any], config: VaswaniConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """Builds the generation config from decoder.yml, with Marian's defaults."""
    beams, alpha = decoding.get("beam-size", 12), decoding.get("normalize", 0.0)
    if type(beams) is not int or beams < 1:
        raise ValueError(f"{path} has beam-size {beams!r}, but it must be a whole number of at least 1.")
    if not isinstance(alpha, int | float):
        raise ValueError(f"{path} has normalize {alpha!r}, but it must be a number.")
    generation = GenerationConfig(
        num_beams=beams,
        max_length=MAX_LENGTH,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        forced_eos_token_id=config.eos_token_id,
        suppress_tokens=None if decoding.get("allow-unk", False) else [tokenizer.unk_token_id],
    )
    if generation.num_beams > 1:
        # Marian divides the log-probability by the length to the power of `normalize`.
        generation.length_penalty = float(alpha)
    for name, value in TRANSFORMERS_RULES.items():
        setattr(generation, name, value)
    generation._from_model_config = None
    return generation
