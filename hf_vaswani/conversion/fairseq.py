"""Conversion from fairseq: a checkpoint with its dictionaries and byte-pair codes.

fairseq's Transformer is the paper's with biases in its attentions, tensor2tensor's sinusoids counted from the id of
`<pad>`, and `</s>` as the decoder's start token. Other options of fairseq are rejected by name.

Source and target may have dictionaries of their own, which are joined to one vocabulary: the ids of the source, then
symbols that only the target has, then pieces of the codes that are in neither dictionary. A symbol that fairseq reads
as `<unk>` gets a copy of that row, and an id that fairseq never generates gets a bias that prevents it here too.
"""

import argparse
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration, PreTrainedTokenizerBase

from ..files import read_lines
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from .formats import Converted, Foreign, check_sides, check_supported, fill, run_by_transformers
from .vocabulary import FAIRSEQ_SPECIAL, Vocabulary, join_dictionaries

CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
BOS, PAD, EOS, UNK = range(4)

BASE = {
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "activation_fn": "relu",
}
SMALL = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
BIG = {"encoder_attention_heads": 16, "decoder_attention_heads": 16, "dropout": 0.3}
T2T = {"encoder_normalize_before": True, "decoder_normalize_before": True, "activation_dropout": 0.1}
# Defaults of each architecture. Sizes that are not listed are read from the weights.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer": {},
    "transformer_iwslt_de_en": SMALL,
    "transformer_wmt_en_de": {},
    "transformer_wmt_en_de_big": BIG | {"attention_dropout": 0.1},
    "transformer_vaswani_wmt_en_de_big": BIG,
    "transformer_vaswani_wmt_en_fr_big": BIG | {"dropout": 0.1},
    "transformer_wmt_en_de_big_t2t": BIG | T2T | {"attention_dropout": 0.1},
}
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "tanh": "tanh",
    "swish": "silu",
    "linear": "linear",
}
# Options that change the network or the layout of its weights, and must be off.
OFF = (
    *("adaptive_input", "adaptive_softmax_cutoff", "base_layers", "char_inputs", "character_embeddings"),
    *("cross_self_attention", "layernorm_embedding", "no_cross_attention", "no_encoder_attn"),
    *("no_decoder_final_norm", "no_token_positional_embeddings", "quant_noise_pq", "quant_noise_scalar"),
    *("scale_attn", "scale_fc", "scale_heads", "scale_resids"),
    *(f"{side}_{name}" for side in ("encoder", "decoder") for name in ("layers_to_keep", "xformers_att_config")),
)
SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(OFF, (False, None, 0, "", [])),
    "activation_fn": tuple(ACTIVATIONS),
}
SAME_ON_BOTH_SIDES = ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")

# Names of the norms that older checkpoints number.
NUMBERED_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
NOT_A_WEIGHT = r"(^|\.)(version|_float_tensor|embed_positions\.weights)$"


def recognize(path: Path) -> bool:
    """
    Returns whether a path is a `.pt` file, or a folder with `model.pt`, `checkpoint_best.pt` or `checkpoint_last.pt`
    beside a `dict.*.txt`.
    """
    if path.is_file():
        return path.suffix == ".pt"
    return any((path / name).is_file() for name in CHECKPOINTS) and any(path.glob("dict.*.txt"))


def load(path: Path) -> Converted:
    """
    Reads a fairseq checkpoint, without running code from it.

    Args:
        path (`Path`): checkpoint, or its folder. Dictionaries and codes must be in the same folder.

    Returns:
        [`Converted`]: the model with fairseq's default search, a tokenizer for the text that fairseq reads, and
        transformers' FSMT with the same weights, unless FSMT does not support the model.

    Raises:
        ValueError: A file is missing, damaged or unsafe, two sizes do not match, or a Vaswani model does not support
            an option. The message names the file and the key.
        ImportError: The packages that read SentencePiece models are not installed, but the model needs them.
    """
    file = path if path.is_file() else next(path / name for name in CHECKPOINTS if (path / name).is_file())
    state = read_checkpoint(file)
    settings = read_settings(state, file)
    weights = current_weights(state["model"], settings, file)
    source, target = dictionaries(file, settings)
    for side, symbols in (("encoder", source), ("decoder", target)):
        rows = len(get_matrix(weights, f"{side}.embed_tokens.weight", file))
        if rows != len(symbols):
            raise ValueError(
                f"{file}: {side}.embed_tokens.weight has {rows} rows, but the dictionary has {len(symbols)} symbols."
            )
    vocabulary, tokenizer, notes = join_dictionaries(file.parent, source, target)
    config = build_config(weights, settings, vocabulary, file)
    model = VaswaniForConditionalGeneration(config).eval()
    fill(model, with_our_rows(weights, config, vocabulary), file)
    set_search(model)
    foreign = build_fsmt(weights, model, vocabulary, tokenizer)
    foreign.notes += notes + make_notes(weights, vocabulary, file)
    return Converted(model, tokenizer, foreign)


# ---- The checkpoint ----------------------------------------------------------------------------------------------


def read_checkpoint(file: Path) -> dict[str, Any]:
    """
    Reads a checkpoint of tensors, plain values and `argparse.Namespace`.

    Raises:
        ValueError: The file is damaged or not a checkpoint, or contains objects of other classes.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            # torch warns of unknown versions if a file is damaged.
            warnings.simplefilter("ignore")
            state = torch.load(file, map_location="cpu", weights_only=True)
    # For a damaged file, torch raises almost any error, including AssertionError, AttributeError, and OSError without
    # a file name.
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise ValueError(f"{file} is damaged or was not written by torch.save.") from error
        raise ValueError(
            f"{file} contains a {found[1]}, which cannot be read without running code from the file. If you trust it, "
            "rewrite it where fairseq is installed, with this line of Python: "
            f"import json, torch; old = torch.load({file.name!r}, weights_only=False); settings = old.get('args') "
            "or old['cfg']['model']; "
            "torch.save({'model': old['model'], 'args': json.loads(json.dumps(vars(settings), default=str))}, "
            f"{'plain_' + file.name!r})"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError(f'{file} has no "model" with a dictionary of weights.')
    for name, weight in state["model"].items():
        if not isinstance(weight, torch.Tensor):
            raise ValueError(f"{file}: {name} is a {type(weight).__name__}, but must be a tensor.")
    return state


def read_settings(state: dict[str, Any], file: Path) -> dict[str, Any]:
    """
    Returns the settings of a model and the languages of its task by their flat names, such as
    `encoder_attention_heads`, including the defaults of its architecture.

    Args:
        state (`dict`): checkpoint with settings in `"args"` or, if it is newer, in `"cfg"`.
        file (`Path`): name of the checkpoint in messages.

    Raises:
        ValueError: There are no settings, or a Vaswani model does not support one.
    """
    given = plain(state.get("args"))
    if not given:
        sections = plain(state.get("cfg"))
        if not plain(sections.get("model")):
            raise ValueError(f'{file} has no settings: neither "args", nor "cfg" with a "model" in it.')
        task = plain(sections.get("task"))
        given = {name: task.get(name) for name in ("source_lang", "target_lang")}
        for name, value in plain(sections["model"]).items():
            nested = {f"{name}_{inner}": setting for inner, setting in plain(value).items()}
            given |= nested or {name: value}
    arch = str(given.get("arch") or given.get("_name"))
    check_supported({"arch": arch}, {"arch": tuple(ARCHITECTURES)}, file)
    settings = BASE | ARCHITECTURES[arch]
    settings |= {name: value for name, value in given.items() if value is not None}
    check_supported(settings, SUPPORTED, file)
    check_sides(settings, SAME_ON_BOTH_SIDES, file)
    return settings


def plain(section: Any) -> dict[str, Any]:
    """Copies settings, a `Namespace`, a dictionary or `None`, to a dictionary."""
    if isinstance(section, argparse.Namespace):
        return dict(vars(section))
    return dict(section) if isinstance(section, dict) else {}


def current_weights(weights: dict[str, Any], settings: dict[str, Any], file: Path) -> dict[str, torch.Tensor]:
    """
    Returns the weights in float32, by the names of current fairseq: fused projections are split, learned positions
    begin with the first one, and the output always has a matrix, even if it is the target embedding.

    Raises:
        ValueError: The output has no matrix.
    """
    found = {}
    for name, weight in weights.items():
        if re.search(NOT_A_WEIGHT, name):
            continue
        weight = weight.detach().float()
        if match := re.match(r"(encoder|decoder)(\.layers\.\d+\.)layer_norms\.([0-2])\.", name):
            norms = dict(enumerate(NUMBERED_NORMS[match[1]]))
            name = name.replace(f"layer_norms.{match[3]}", norms.get(int(match[3]), "layer_norms"))
        if name.endswith("embed_positions.weight"):
            # Earlier rows belong to padding, and are never read.
            weight = weight[PAD + 1 :]
        if "in_proj_" in name:
            for letter, third in zip("qkv", weight.tensor_split(3), strict=True):
                found[name.replace("in_proj_", f"{letter}_proj.")] = third
        else:
            found[name.replace("decoder.embed_out", "decoder.output_projection.weight")] = weight
    if "decoder.output_projection.weight" not in found:
        if not any(settings.get(name) for name in ("share_all_embeddings", "share_decoder_input_output_embed")):
            raise ValueError(f"{file} has no decoder.output_projection.weight, and does not share embeddings.")
        found["decoder.output_projection.weight"] = get_matrix(found, "decoder.embed_tokens.weight", file)
    return found


def get_matrix(weights: dict[str, torch.Tensor], name: str, file: Path) -> torch.Tensor:
    """Returns a weight that must exist and be a matrix."""
    if name not in weights or weights[name].dim() != 2:
        raise ValueError(f"{file} has no matrix {name}.")
    return weights[name]


# ---- The dictionaries --------------------------------------------------------------------------------------------


def dictionaries(file: Path, settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """
    Reads the symbols of source and target, each in the order of their ids.

    Args:
        file (`Path`): checkpoint, with the dictionaries beside it.
        settings (`dict`): settings of the model, with `source_lang` and `target_lang`.

    Raises:
        ValueError: There are no dictionaries, or the settings do not say which of several is which.
    """
    there = {found.name: read_dictionary(found) for found in sorted(file.parent.glob("dict.*.txt"))}
    if not there:
        raise ValueError(f"{file.parent} contains no dict.*.txt.")
    languages = [settings.get(f"{side}_lang") for side in ("source", "target")]
    wanted = [f"dict.{language}.txt" for language in languages]
    if all(name in there for name in wanted):
        return there[wanted[0]], there[wanted[1]]
    first, *others = there.values()
    if any(other != first for other in others):
        raise ValueError(
            f"{file.parent} contains {', '.join(there)}, which differ, but {file.name} has source_lang "
            f"{languages[0]!r} and target_lang {languages[1]!r}."
        )
    if all(languages) and len(there) == 1 and set(there) & set(wanted):
        missing = next(name for name in wanted if name not in there)
        raise ValueError(f"{file.parent} contains no {missing}: if {next(iter(there))} is for both sides, copy it.")
    return first, first


def read_dictionary(file: Path) -> list[str]:
    """
    Reads the symbols of a `dict.*.txt` in the order of their ids, after fairseq's four special symbols.

    Raises:
        ValueError: A line is not a symbol and its count, or a symbol is repeated.
    """
    symbols = dict.fromkeys(FAIRSEQ_SPECIAL.values())
    for number, line in enumerate(read_lines(file), start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        if not symbol or not count.isdecimal():
            raise ValueError(f"{file}, line {number}: expected a symbol and its count, but found {line.rstrip()!r}.")
        if symbol in symbols:
            raise ValueError(f"{file}, line {number}: the symbol {symbol!r} is repeated.")
        symbols[symbol] = None
    return list(symbols)


# ---- The model ---------------------------------------------------------------------------------------------------


def build_config(
    weights: dict[str, torch.Tensor], settings: dict[str, Any], vocabulary: Vocabulary, file: Path
) -> VaswaniConfig:
    """
    Builds our config from fairseq's settings and the sizes of the weights.

    Raises:
        ValueError: The settings have another number of layers than the weights, or a weight is missing.
    """
    source, target, output = (
        get_matrix(weights, f"{name}.weight", file)
        for name in ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    )
    depths = {
        side: len({match[0] for name in weights if (match := re.match(rf"{side}\.layers\.\d+\.", name))})
        for side in ("encoder", "decoder")
    }
    for side, depth in depths.items():
        if settings.get(f"{side}_layers", depth) != depth:
            raise ValueError(
                f"{file} has {side}_layers {settings[f'{side}_layers']} in its settings, but {depth} in its weights."
            )
    learned = bool(settings["encoder_learned_pos"])
    tables = [get_matrix(weights, f"{side}.embed_positions.weight", file) for side in depths] if learned else []
    tied = torch.equal(target, output)
    shared = torch.equal(source, target) and torch.equal(vocabulary.source_rows, vocabulary.target_rows)
    return VaswaniConfig(
        vocab_size=len(vocabulary.tokens),
        d_model=source.shape[1],
        d_ff=len(get_matrix(weights, "encoder.layers.0.fc1.weight", file)),
        num_heads=settings["encoder_attention_heads"],
        **{f"{side}_layers": depth for side, depth in depths.items()},
        dropout=settings["dropout"],
        attention_dropout=settings["attention_dropout"],
        # relu_dropout is an older name of it.
        activation_dropout=settings["activation_dropout"] or settings.get("relu_dropout", 0.0),
        activation_function=ACTIVATIONS[settings["activation_fn"]],
        norm_position="pre" if settings["encoder_normalize_before"] else "post",
        position_encoding="learned" if learned else "sinusoidal",
        sinusoid_layout="tensor2tensor",
        position_offset=0 if learned else PAD + 1,
        max_position_embeddings=min((len(table) for table in tables), default=1024),
        layer_norm_eps=1e-5,
        attention_bias=True,
        lm_head_bias=not bool(vocabulary.is_target.all()),
        scale_embedding=not settings.get("no_scale_embedding"),
        share_embeddings=tied and shared,
        tie_word_embeddings=tied,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
    )


def with_our_rows(
    weights: dict[str, torch.Tensor], config: VaswaniConfig, vocabulary: Vocabulary
) -> dict[str, torch.Tensor]:
    """Returns the weights with the rows of our vocabulary and positions, and with the output bias, if there is one."""
    found = {}
    for name, weight in weights.items():
        if name.endswith(("embed_tokens.weight", "output_projection.weight")):
            weight = weight[vocabulary.source_rows if name.startswith("encoder") else vocabulary.target_rows]
        if name.endswith("embed_positions.weight"):
            weight = weight[: config.max_position_embeddings]
        found[name] = weight
    if config.lm_head_bias:
        found["lm_head.bias"] = vocabulary.output_bias(torch.zeros(len(vocabulary.tokens)))
    return found


def set_search(model: VaswaniForConditionalGeneration) -> None:
    """Sets the defaults of fairseq's command line for searching."""
    config, max_length = model.config, 200
    if config.position_encoding == "learned":
        max_length = min(max_length, config.max_position_embeddings - 1)
    model.generation_config.update(
        num_beams=5,
        length_penalty_type="power",
        length_penalty=1.0,
        finish_candidates="top",
        early_stopping=True,
        # At least one token comes before </s>, which is forced after max_length tokens.
        max_new_tokens=max_length + 1,
        min_new_tokens=1,
        forced_eos_token_id=EOS,
        suppress_tokens=[PAD],
    )


# ---- The other side ----------------------------------------------------------------------------------------------


def build_fsmt(
    weights: dict[str, torch.Tensor],
    model: VaswaniForConditionalGeneration,
    vocabulary: Vocabulary,
    tokenizer: PreTrainedTokenizerBase,
) -> Foreign:
    """
    Builds transformers' FSMT, which is fairseq's network.

    Args:
        weights (`dict[str, torch.Tensor]`): result of [`current_weights`].
        model ([`VaswaniForConditionalGeneration`]): converted model, for its config and generation config.
        vocabulary ([`Vocabulary`]): our ids with their rows in fairseq's embeddings.
        tokenizer ([`PreTrainedTokenizerBase`]): tokenizer of the vocabulary.
    """
    config, settings = model.config, model.generation_config
    if config.norm_position == "pre" or config.position_encoding == "learned":
        return Foreign("fairseq", notes=["No library here runs fairseq's pre-norm or learned positions."])
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": config.num_heads, f"{side}_ffn_dim": config.d_ff}
        sizes |= {f"{side}_layers": getattr(config, f"{side}_layers")}
    fsmt = FSMTForConditionalGeneration(
        FSMTConfig(
            src_vocab_size=len(weights["encoder.embed_tokens.weight"]),
            tgt_vocab_size=len(weights["decoder.embed_tokens.weight"]),
            d_model=config.d_model,
            activation_function=config.activation_function,
            scale_embedding=config.scale_embedding,
            **sizes,
        )
    ).eval()
    # transformers warns if max_new_tokens is given as well.
    fsmt.generation_config.max_length = None
    # FSMT's sinusoids are in its state_dict, but not among fairseq's weights.
    fsmt.load_state_dict(fsmt.state_dict() | {f"model.{name}": weight for name, weight in weights.items()})
    names = ("max_new_tokens", "min_new_tokens", "forced_eos_token_id", "suppress_tokens")
    limits = {name: getattr(settings, name) for name in names}
    return run_by_transformers("transformers' FSMT", fsmt, tokenizer, vocabulary, **limits)


def make_notes(weights: dict[str, torch.Tensor], vocabulary: Vocabulary, file: Path) -> list[str]:
    """Returns notes about weights and ids, one sentence each."""
    notes = []
    lengths = [len(weight) for name, weight in weights.items() if name.endswith("embed_positions.weight")]
    if len(set(lengths)) > 1:
        notes.append(
            f"{file.name} has {max(lengths)} learned positions on one side and {min(lengths)} on the other: both are "
            f"truncated to {min(lengths)}."
        )
    source_only = int((~vocabulary.is_target).sum())
    if source_only:
        notes.append(
            f"{source_only} of the {len(vocabulary.tokens)} ids are not in the target dictionary and never generated."
        )
    return notes
