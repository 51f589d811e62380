"""Builds folders of fairseq models with random weights, from transformers' FSMT, and learns byte-pair codes."""

import math
import random
import re
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from transformers import FSMTConfig, FSMTForConditionalGeneration

from ..networks import random_batch

PAD, EOS, UNK = 1, 2, 3
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SIZES = {"d_model": 12, "d_ff": 20, "heads": 3, "encoder_layers": 2, "decoder_layers": 1}
# Odd widths and unequal depths, tied matrices ("all", "decoder" or "none"), activation, scaled embeddings.
SHAPES = [
    (SIZES, "all", "relu", True),
    ({"d_model": 18, "d_ff": 11, "heads": 2, "encoder_layers": 1, "decoder_layers": 3}, "decoder", "gelu", False),
    ({"d_model": 8, "d_ff": 30, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}, "none", "relu", True),
]
RULES = {"max_new_tokens": 30, "min_new_tokens": 1, "suppress_tokens": [PAD], "forced_eos_token_id": EOS}


def randomize(module: nn.Module, seed: int) -> None:
    """Fills every weight with random numbers, including biases and norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "embed_positions" not in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(
                    noise / math.sqrt(weight.shape[-1]) if weight.dim() > 1 else 0.3 * noise + ("norm" in name)
                )


def random_fsmt(source: int, target: int, shape: dict, tied: str, activation: str, scale: bool, seed: int = 0):
    """Builds transformers' copy of fairseq's network."""
    config = FSMTConfig(
        src_vocab_size=source,
        tgt_vocab_size=target,
        d_model=shape["d_model"],
        encoder_ffn_dim=shape["d_ff"],
        decoder_ffn_dim=shape["d_ff"],
        encoder_attention_heads=shape["heads"],
        decoder_attention_heads=shape["heads"],
        encoder_layers=shape["encoder_layers"],
        decoder_layers=shape["decoder_layers"],
        activation_function=activation,
        scale_embedding=scale,
    )
    model = FSMTForConditionalGeneration(config).eval()
    model.generation_config.max_length = None
    randomize(model, seed)
    encoder, decoder = model.model.encoder, model.model.decoder
    with torch.no_grad():
        for table in (encoder.embed_tokens, decoder.embed_tokens):
            table.weight[PAD] = 0
        # Larger weights make </s> frequent enough for translations of many lengths.
        for table in (decoder.embed_tokens, decoder.output_projection):
            table.weight[EOS] *= 2
        if tied != "none":
            decoder.output_projection.weight.copy_(decoder.embed_tokens.weight)
        if tied == "all":
            encoder.embed_tokens.weight.copy_(decoder.embed_tokens.weight)
    return model


def fairseq_state(model: nn.Module, output: str = "output_projection.weight") -> dict[str, torch.Tensor]:
    """Returns weights and buffers by fairseq's names; `output` is the name of the output matrix."""
    state = {}
    for name, weight in model.state_dict().items():
        name = name.removeprefix("model.")
        if "embed_positions" not in name:
            state[name.replace("output_projection.weight", output)] = weight.clone()
    for side in ("encoder", "decoder"):
        state |= {f"{side}.version": torch.tensor([3.0]), f"{side}.embed_positions._float_tensor": torch.zeros(1)}
    return state


def merged(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts weights to the layout of older versions: fused projections and numbered norms."""
    norms = {"encoder": ["self_attn", "final"], "decoder": ["self_attn", "encoder_attn", "final"]}
    found = {}
    for name, weight in state.items():
        if match := re.match(r"(.*)([qkv])_proj\.(weight|bias)$", name):
            parts = [state[f"{match[1]}{letter}_proj.{match[3]}"] for letter in "qkv"]
            found[f"{match[1]}in_proj_{match[3]}"] = torch.cat(parts)
        elif match := re.match(r"((en|de)coder\.layers\.\d\.)(\w+)_layer_norm(.*)", name):
            found[f"{match[1]}layer_norms.{norms[match[2] + 'coder'].index(match[3])}{match[4]}"] = weight
        else:
            found[name] = weight
    return found


def args_of(shape: dict = SIZES, **more) -> dict:
    """Returns settings as fairseq stores them, with some that do not matter."""
    settings = {"arch": "transformer", "source_lang": "en", "target_lang": "de", "lr": [0.0005], "task": "translation"}
    for side in ("encoder", "decoder"):
        settings |= {f"{side}_embed_dim": shape["d_model"], f"{side}_ffn_embed_dim": shape["d_ff"]}
        settings |= {f"{side}_attention_heads": shape["heads"], f"{side}_layers": shape[f"{side}_layers"]}
        settings |= {f"{side}_normalize_before": False, f"{side}_learned_pos": False, f"{side}_layerdrop": 0}
    settings |= {"share_all_embeddings": True, "dropout": 0.2, "relu_dropout": 0.1, "adaptive_softmax_cutoff": None}
    return settings | {"layernorm_embedding": False, "decoder_output_dim": shape["d_model"]} | more


def word_list(count: int, seed: int = 0) -> list[str]:
    letters = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(letters.choices("abcdefgäß", k=letters.randint(1, 4)))] = None
    return list(found)


def write_folder(
    folder: Path, state: dict, args: dict | Namespace, source: list[str], target: list[str], cfg: bool = False
) -> Path:
    """Writes a folder as fairseq does; `source` and `target` are dictionaries without special symbols."""
    for language, symbols in (("en", source), ("de", target)):
        lines = [f"{symbol} {1000 - i}\n" for i, symbol in enumerate(symbols)]
        (folder / f"dict.{language}.txt").write_text("".join(lines), encoding="utf-8")
    checkpoint = {"args": args, "cfg": None, "model": state, "extra_state": {"epoch": 3}}
    if cfg:
        checkpoint |= {"args": None, "cfg": args}
    torch.save(checkpoint, folder / "checkpoint_best.pt")
    return folder


def simple_folder(folder: Path, words: int = 29, shape: dict = SIZES, **more) -> tuple[Path, nn.Module]:
    """Writes a small model with a joint dictionary and no codes."""
    model = random_fsmt(words + 4, words + 4, shape, "all", "relu", True)
    symbols = word_list(words)
    return write_folder(folder, fairseq_state(model), Namespace(**args_of(shape, **more)), symbols, symbols), model


def sentences(words: list[str], count: int = 20, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(count)]


def fairseq_batch(vocab_size: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = range(4, vocab_size)
    return random_batch(ids, ids, (rows, 11, 7), start=EOS, pad=PAD, left=False)


@torch.no_grad()
def logits_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return model(**dict(zip(names, batch, strict=True)), use_cache=False).logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


# ---- Codes -------------------------------------------------------------------------------------------------------


def learn_codes(text: list[str], merges: int) -> list[tuple[str, str]]:
    """Learns byte-pair codes as subword-nmt does: repeatedly merges the most frequent pair."""
    words = [(*word[:-1], word[-1] + "</w>") for line in text for word in line.split()]
    codes: list[tuple[str, str]] = []
    while len(codes) < merges:
        pairs: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        codes.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        words = [merge(word, codes[-1]) for word in words]
    return codes


def merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    found: list[str] = []
    i = 0
    while i < len(word):
        both = word[i : i + 2] == pair
        found.append("".join(pair) if both else word[i])
        i += 2 if both else 1
    return tuple(found)


def apply_codes(line: str, codes: list[tuple[str, str]]) -> list[str]:
    """Splits a line as subword-nmt's apply-bpe does."""
    found = []
    for text in line.split():
        word = (*text[:-1], text[-1] + "</w>")
        while pairs := set(pairwise(word)) & set(codes):
            word = merge(word, min(pairs, key=codes.index))
        found += [f"{piece}@@" for piece in word[:-1]] + [word[-1].removesuffix("</w>")]
    return found


LONG_WORDS = [
    a + b + c for a in ("aba", "cab", "ddd", "fabe") for b in ("ba", "äß", "ed") for c in ("ab", "gg", "c", "d")
]


def codes_folder(folder: Path, known: list[str], form: str = "subword-nmt") -> tuple[Path, list, list[str], nn.Module]:
    """Writes a model with codes, whose dictionary has only the pieces of some text."""
    codes = learn_codes(known, 40)
    end = {"subword-nmt": "", "fastBPE": " 77"}[form]
    lines = ["#version: 0.2"] * (form == "subword-nmt") + [f"{a} {b}{end}" for a, b in codes]
    (folder / ("code" if form == "fastBPE" else "bpecodes")).write_text("\n".join(lines) + "\n", encoding="utf-8")
    symbols = list(dict.fromkeys(piece for line in known for piece in apply_codes(line, codes)))
    symbols.append("madeupword0000")
    model = random_fsmt(len(symbols) + 4, len(symbols) + 4, SIZES, "all", "relu", True)
    write_folder(folder, fairseq_state(model), Namespace(**args_of()), symbols, symbols)
    return folder, codes, SPECIAL + symbols, model
