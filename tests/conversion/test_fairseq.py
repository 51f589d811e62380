"""Checkpoints of fairseq, made here of transformers' FSMT and of torch's stacks: the same numbers, ids and words."""

import math
import os
import random
import re
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, FSMTConfig, FSMTForConditionalGeneration

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.conversion.fairseq import load, recognize
from hf_vaswani.conversion.fairseq_vocabulary import read_codes

PAD, EOS, UNK = 1, 2, 3
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
RULES = {"max_new_tokens": 30, "min_new_tokens": 1, "suppress_tokens": [PAD], "forced_eos_token_id": EOS}
SIZES = {"d_model": 12, "d_ff": 20, "heads": 3, "encoder_layers": 2, "decoder_layers": 1}
# Widths that divide nothing, unequal depths; then what is tied: "all", "decoder" or "none".
SHAPES = [
    (SIZES, "all", "relu", True),
    ({"d_model": 18, "d_ff": 11, "heads": 2, "encoder_layers": 1, "decoder_layers": 3}, "decoder", "gelu", False),
    ({"d_model": 8, "d_ff": 30, "heads": 4, "encoder_layers": 2, "decoder_layers": 2}, "none", "relu", True),
]


def randomize(module: nn.Module, seed: int) -> None:
    """Draws every weight anew, biases and norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "embed_positions" not in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(
                    noise / math.sqrt(weight.shape[-1]) if weight.dim() > 1 else 0.3 * noise + ("norm" in name)
                )


def random_fsmt(source: int, target: int, shape: dict, tied: str, activation: str, scale: bool, seed: int = 0):
    """transformers' copy of fairseq's network."""
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
        # The end is one symbol of many: louder, it comes often enough for translations of many lengths.
        for table in (decoder.embed_tokens, decoder.output_projection):
            table.weight[EOS] *= 2
        if tied != "none":
            decoder.output_projection.weight.copy_(decoder.embed_tokens.weight)
        if tied == "all":
            encoder.embed_tokens.weight.copy_(decoder.embed_tokens.weight)
    return model


def fairseq_state(model: nn.Module, output: str = "output_projection.weight") -> dict[str, torch.Tensor]:
    """The weights by fairseq's names, with the buffers that it saves among them; `output` is the last one's."""
    state = {}
    for name, weight in model.state_dict().items():
        name = name.removeprefix("model.")
        if "embed_positions" not in name:
            state[name.replace("output_projection.weight", output)] = weight.clone()
    for side in ("encoder", "decoder"):
        state |= {f"{side}.version": torch.tensor([3.0]), f"{side}.embed_positions._float_tensor": torch.zeros(1)}
    return state


def merged(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As older versions keep them: the projections of an attention as one, and the norms by numbers."""
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
    """The settings that fairseq stores, as far as they matter, and some of those that do not."""
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
    """A folder as fairseq leaves it; `source` and `target` are the dictionaries without the special symbols."""
    for language, symbols in (("en", source), ("de", target)):
        lines = [f"{symbol} {1000 - i}\n" for i, symbol in enumerate(symbols)]
        (folder / f"dict.{language}.txt").write_text("".join(lines), encoding="utf-8")
    checkpoint = {"args": args, "cfg": None, "model": state, "extra_state": {"epoch": 3}}
    if cfg:
        checkpoint |= {"args": None, "cfg": args}
    torch.save(checkpoint, folder / "checkpoint_best.pt")
    return folder


def simple_folder(folder: Path, words: int = 29, shape: dict = SIZES, **more) -> tuple[Path, nn.Module]:
    """A small model with one dictionary and no codes."""
    model = random_fsmt(words + 4, words + 4, shape, "all", "relu", True)
    symbols = word_list(words)
    return write_folder(folder, fairseq_state(model), Namespace(**args_of(shape, **more)), symbols, symbols), model


def sentences(words: list[str], count: int = 20, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(count)]


def random_batch(source: int, target: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source ids with padding behind them, their mask, and decoder ids."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(4, source, (rows, 11), generator=generator)
    mask = (torch.arange(11) < 11 - 2 * torch.arange(rows)[:, None]).long()
    decoder_ids = torch.randint(4, target, (rows, 7), generator=generator)
    decoder_ids[:, 0] = EOS
    return ids.masked_fill(mask == 0, PAD), mask, decoder_ids


@torch.no_grad()
def logits_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return model(**dict(zip(names, batch, strict=True)), use_cache=False).logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


# ---- The network


@pytest.mark.parametrize(("shape", "tied", "activation", "scale"), SHAPES)
@pytest.mark.parametrize("old", [False, True], ids=["args", "cfg"])
def test_it_computes_what_fsmt_computes(tmp_path, shape, tied, activation, scale, old) -> None:
    """With the names of either time, and settings in either place."""
    fsmt = random_fsmt(41, 41, shape, tied, activation, scale)
    shares = {"share_all_embeddings": tied == "all", "share_decoder_input_output_embed": tied == "decoder"}
    settings = Namespace(**args_of(shape, activation_fn=activation, no_scale_embedding=not scale, **shares))
    symbols, state = word_list(37), fairseq_state(fsmt)
    if old:
        state = merged(fairseq_state(fsmt, output="embed_out"))
        if tied != "none":
            del state["decoder.embed_out"]
        write_folder(tmp_path, state, settings, symbols, symbols)
    else:
        languages = {name: vars(settings).pop(name) for name in ("source_lang", "target_lang")}
        write_folder(tmp_path, state, {"model": settings, "task": languages}, symbols, symbols, cfg=True)
    came = load(tmp_path)
    config = came.model.config
    assert (config.share_embeddings, config.tie_word_embeddings) == (tied == "all", tied != "none")
    assert (config.position_offset, config.lm_head_bias, config.dropout, config.activation_dropout) == (
        2,
        False,
        0.2,
        0.1,
    )
    for rows in (1, 5):
        batch = random_batch(41, 41, rows)
        expected = logits_of(fsmt, batch)
        assert_close(logits_of(came.model, batch), expected)
        assert_close(came.foreign.logits(*batch), expected)
    # It matters where positions begin, or the above would say little.
    config.position_offset = 0
    shifted = VaswaniForConditionalGeneration(config).eval()
    shifted.load_state_dict(came.model.state_dict())
    assert (logits_of(shifted, batch) - expected).abs().max() > 0.01


@pytest.mark.parametrize("tied", ["decoder", "none"])
def test_translations_are_the_same_greedily_and_with_beams(tmp_path, tied) -> None:
    fsmt = random_fsmt(61, 61, SHAPES[1][0], tied, "relu", True, seed=2)
    shares = {"share_all_embeddings": False, "share_decoder_input_output_embed": tied == "decoder"}
    symbols = word_list(57)
    write_folder(tmp_path, fairseq_state(fsmt), args_of(SHAPES[1][0], **shares), symbols, symbols)
    came = load(tmp_path)
    text = sentences(symbols)
    batch = came.tokenizer(text, padding=True, return_tensors="pt")
    assert batch["input_ids"].max() < 61
    assert {name: getattr(came.model.generation_config, name) for name in RULES} == RULES | {"max_new_tokens": 201}
    came.model.generation_config.max_new_tokens = 30
    # A network that learned nothing repeats itself for ever.
    varied = {"no_repeat_ngram_size": 2}
    for settings in ({"num_beams": 1, "early_stopping": False}, {"num_beams": 5, "early_stopping": True}):
        own = settings if settings["num_beams"] == 1 else {}
        found = came.model.generate(**batch, **own, **varied)
        expected = fsmt.generate(**batch, **RULES, **settings, **varied, length_penalty=1.0)
        translations = came.tokenizer.batch_decode(found, skip_special_tokens=True)
        assert translations == came.tokenizer.batch_decode(expected, skip_special_tokens=True)
        assert len({len(line.split()) for line in translations}) > 2
    greedy = came.model.generate(**batch, num_beams=1, early_stopping=False)
    assert came.foreign.translate(text) == came.tokenizer.batch_decode(greedy, skip_special_tokens=True)


class TorchStacks(nn.Module):
    """torch's pre-norm stacks between fairseq's embeddings, letter by letter; positions are sinusoids, or learned."""

    def __init__(self, words: int, positions: int = 0) -> None:
        super().__init__()
        sizes = {"d_model": 12, "nhead": 3, "dim_feedforward": 20, "dropout": 0.0, "batch_first": True}
        layers = [kind(**sizes, norm_first=True) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)]
        self.encoder = nn.TransformerEncoder(layers[0], 2, nn.LayerNorm(12), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(layers[1], 3, nn.LayerNorm(12))
        self.tokens = nn.Embedding(words, 12)
        # fairseq's table has rows for what comes before the first position.
        self.tables = nn.ModuleList([nn.Embedding(positions + 2, 12) for _ in range(2 if positions else 0)])

    def embed(self, side: int, ids: torch.Tensor) -> torch.Tensor:
        rows = []
        for position in range(2, 2 + ids.shape[1]):
            angles = [position / 10_000 ** (i / 5) for i in range(6)]
            waves = torch.tensor([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
            rows.append(self.tables[side].weight[position] if self.tables else waves)
        return self.tokens(ids) * math.sqrt(12) + torch.stack(rows)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, decoder_ids: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(self.embed(0, ids), src_key_padding_mask=mask == 0)
        future = torch.ones(decoder_ids.shape[1], decoder_ids.shape[1], dtype=torch.bool).triu(1)
        decoded = self.decoder(self.embed(1, decoder_ids), encoded, tgt_mask=future, memory_key_padding_mask=mask == 0)
        return decoded @ self.tokens.weight.T

    def fairseq_state(self) -> dict[str, torch.Tensor]:
        names = {"norm1": "self_attn_layer_norm", "multihead_attn": "encoder_attn", "linear": "fc"}
        numbered = {"encoder": {"norm2": "final_layer_norm"}}
        numbered["decoder"] = {"norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"}
        state = {}
        for name, weight in self.state_dict().items():
            side = name.split(".")[0]
            for theirs, ours in (names | numbered.get(side, {})).items():
                name = name.replace(theirs, ours)
            state[re.sub(r"^(\w+)\.norm\.", r"\1.layer_norm.", name)] = weight
        tokens = state.pop("tokens.weight")
        state |= {f"{side}.embed_tokens.weight": tokens for side in ("encoder", "decoder")}
        for i, side in enumerate(["encoder", "decoder"] if self.tables else []):
            state[f"{side}.embed_positions.weight"] = state.pop(f"tables.{i}.weight")
        return state


@pytest.mark.parametrize("learned", [False, True])
def test_pre_norm_and_learned_positions_equal_torchs_stacks(tmp_path, learned) -> None:
    stacks = TorchStacks(33, 19 if learned else 0).eval()
    randomize(stacks, 3)
    names = [f"{side}_{name}" for side in ("encoder", "decoder") for name in ("normalize_before", "learned_pos")]
    settings = args_of(SIZES | {"decoder_layers": 3}, **{name: learned or "norm" in name for name in names})
    symbols = word_list(29)
    came = load(write_folder(tmp_path, stacks.fairseq_state(), Namespace(**settings), symbols, symbols))
    batch = random_batch(33, 33)
    with torch.no_grad():
        expected = stacks(*batch)
    assert_close(logits_of(came.model, batch), expected)
    assert came.foreign.logits is None and came.foreign.translate is None
    assert any("Nothing here runs" in note for note in came.foreign.notes)
    if learned:
        config = came.model.config
        assert (config.max_position_embeddings, config.position_offset) == (19, 0)
        assert came.model.generation_config.max_new_tokens == 19


def test_learned_tables_of_unequal_lengths_are_cut_to_the_shorter(tmp_path) -> None:
    stacks = TorchStacks(33, 19).eval()
    randomize(stacks, 3)
    state = stacks.fairseq_state()
    state["encoder.embed_positions.weight"] = torch.cat((state["encoder.embed_positions.weight"], torch.ones(5, 12)))
    names = [f"{side}_{name}" for side in ("encoder", "decoder") for name in ("normalize_before", "learned_pos")]
    settings, symbols = args_of(SIZES | {"decoder_layers": 3}, **dict.fromkeys(names, True)), word_list(29)
    came = load(write_folder(tmp_path, state, settings, symbols, symbols))
    batch = random_batch(33, 33)
    with torch.no_grad():
        assert_close(logits_of(came.model, batch), stacks(*batch))
    assert any("24" in note and "19" in note for note in came.foreign.notes)


def test_the_nested_settings_of_newer_versions_and_half_precision(tmp_path) -> None:
    fsmt = random_fsmt(33, 33, SIZES, "all", "relu", True)
    flat, nested = args_of(), {"_name": "transformer", "quant_noise": {"pq": 0.0, "scalar": 0.0}}
    for side in ("encoder", "decoder"):
        keys = [name for name in flat if name.startswith(f"{side}_")]
        nested[side] = {name.removeprefix(f"{side}_"): flat[name] for name in keys}
    nested |= {"share_all_embeddings": True, "activation_fn": "relu", "activation_dropout": 0.3, "dropout": 0.0}
    state = {name: weight.half() for name, weight in fairseq_state(fsmt).items()}
    del state["decoder.output_projection.weight"]
    cfg = {"model": nested, "task": {"_name": "translation", "source_lang": "en", "target_lang": "de"}}
    came = load(write_folder(tmp_path, state, cfg, word_list(29), word_list(29), cfg=True))
    assert (came.model.config.num_heads, came.model.config.activation_dropout) == (3, 0.3)
    with torch.no_grad():
        for name, weight in fsmt.named_parameters():
            if "embed_positions" not in name:
                weight.copy_(weight.half())
    batch = random_batch(33, 33)
    assert_close(logits_of(came.model, batch), logits_of(fsmt, batch))
    nested["quant_noise"]["scalar"] = 0.1
    write_folder(tmp_path, state, cfg, word_list(29), word_list(29), cfg=True)
    with pytest.raises(ValueError, match=r"quant_noise_scalar is 0\.1"):
        load(tmp_path)


def test_an_architecture_says_what_the_settings_do_not(tmp_path) -> None:
    shape = SIZES | {"d_model": 16, "heads": 16}
    model = random_fsmt(33, 33, shape, "all", "relu", True)
    symbols = word_list(29)
    for arch, heads, dropout in (
        ("transformer_iwslt_de_en", 4, 0.1),
        ("transformer_wmt_en_de", 8, 0.1),
        ("transformer_vaswani_wmt_en_de_big", 16, 0.3),
        ("transformer_vaswani_wmt_en_fr_big", 16, 0.1),
    ):
        settings = {"arch": arch, "share_all_embeddings": True, "source_lang": "en", "target_lang": "de"}
        config = load(write_folder(tmp_path, fairseq_state(model), settings, symbols, symbols)).model.config
        assert (config.num_heads, config.dropout, config.norm_position) == (heads, dropout, "post")
    settings["arch"] = "transformer_wmt_en_de_big_t2t"
    with pytest.raises(ValueError, match=r"no weight for model\.encoder\.norm"):
        load(write_folder(tmp_path, fairseq_state(model), settings, symbols, symbols))


# ---- Dictionaries and text


def test_dictionaries_of_their_own_become_one_vocabulary(tmp_path) -> None:
    source, target = word_list(60, seed=1), word_list(40, seed=2)
    assert 2 < len(set(source) & set(target)) < 40
    fsmt = random_fsmt(64, 44, SHAPES[1][0], "decoder", "relu", True, seed=2)
    shares = {"share_all_embeddings": False, "share_decoder_input_output_embed": True}
    came = load(write_folder(tmp_path, fairseq_state(fsmt), args_of(SHAPES[1][0], **shares), source, target))
    union = list(dict.fromkeys(SPECIAL + source + target))
    assert came.tokenizer.convert_ids_to_tokens(range(len(union))) == union
    assert came.model.config.vocab_size == len(union)
    # Ids of a side in the union; and of the union in a side, where unknown symbols are <unk>.
    theirs = [
        torch.tensor([(SPECIAL + side).index(s) if s in SPECIAL + side else UNK for s in union])
        for side in (source, target)
    ]
    ids, mask, decoder_ids = random_batch(len(union), len(union))
    expected = logits_of(fsmt, (theirs[0][ids], mask, theirs[1][decoder_ids]))
    found = logits_of(came.model, (ids, mask, decoder_ids))
    ours = torch.tensor([union.index(symbol) for symbol in SPECIAL + target])
    assert_close(found[..., ours], expected)
    others = [i for i, symbol in enumerate(union) if symbol not in SPECIAL + target]
    assert (found[..., others] < found.min(dim=-1, keepdim=True).values + 40).all() and found[..., others].max() < -40
    assert_close(found.softmax(-1)[..., ours], expected.softmax(-1))
    assert_close(came.foreign.logits(ids, mask, decoder_ids), found)

    text = sentences(source + target)
    batch = came.tokenizer(text, padding=True, return_tensors="pt")
    came.model.generation_config.max_new_tokens = 30
    for beams in (1, 5):
        settings = {"num_beams": beams, "early_stopping": beams > 1, "no_repeat_ngram_size": 2}
        translations = came.tokenizer.batch_decode(came.model.generate(**batch, **settings), skip_special_tokens=True)
        best = fsmt.generate(
            theirs[0][batch["input_ids"]], attention_mask=batch["attention_mask"], **RULES, **settings
        )
        words = [[(SPECIAL + target)[i] for i in row if i not in (0, PAD, EOS, UNK)] for row in best.tolist()]
        assert translations == [" ".join(row) for row in words]
        assert len(set(translations)) > 10 and set(" ".join(translations).split()) - set(source)
    greedy = came.model.generate(**batch, num_beams=1, early_stopping=False)
    assert came.foreign.translate(text) == came.tokenizer.batch_decode(greedy, skip_special_tokens=True)


def learn_codes(text: list[str], merges: int) -> list[tuple[str, str]]:
    """The most frequent pairs, one after the other, as subword-nmt learns them."""
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
    """What subword-nmt's apply-bpe makes of a line."""
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
    """A model with a dictionary of what its codes make of some text, and less."""
    codes = learn_codes(known, 40)
    end = {"subword-nmt": "", "fastBPE": " 77"}[form]
    lines = ["#version: 0.2"] * (form == "subword-nmt") + [f"{a} {b}{end}" for a, b in codes]
    (folder / ("code" if form == "fastBPE" else "bpecodes")).write_text("\n".join(lines) + "\n", encoding="utf-8")
    symbols = list(dict.fromkeys(piece for line in known for piece in apply_codes(line, codes)))
    symbols.append("madeupword0000")
    model = random_fsmt(len(symbols) + 4, len(symbols) + 4, SIZES, "all", "relu", True)
    write_folder(folder, fairseq_state(model), Namespace(**args_of()), symbols, symbols)
    return folder, codes, SPECIAL + symbols, model


@pytest.mark.parametrize("form", ["subword-nmt", "fastBPE"])
def test_codes_make_the_ids_that_they_make_for_fairseq(tmp_path, form) -> None:
    known = sentences(LONG_WORDS, 30)
    folder, codes, symbols, fsmt = codes_folder(tmp_path, known, form)
    came = load(folder)
    came.tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    unseen = sentences(
        [word[::-1] for word in LONG_WORDS] + ["a", "zebra", "q", "ab@@", "</s>", "<unk>", "@@"], 60, seed=5
    )
    ids_of = {symbol: i for i, symbol in enumerate(symbols)}
    several, unknown, beyond, compared = 0, 0, 0, 0
    for line in known + unseen:
        pieces = apply_codes(line, codes)
        expected = [ids_of.get(piece, UNK) for piece in pieces] + [EOS]
        found = tokenizer(line)["input_ids"]
        # What the dictionary lacks and the codes make has an id of its own here, which is read as <unk>.
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == theirs or (ours >= len(symbols) and theirs == UNK), line
        several += sum(piece.endswith("@@") for piece in pieces)
        unknown += expected.count(UNK)
        beyond += sum(i >= len(symbols) for i in found)
        # And the model makes no difference between them.
        if max(found) >= len(symbols) and compared < 5:
            compared += 1
            batch = (torch.tensor([found]), torch.ones(1, len(found)).long(), torch.tensor([[EOS, 5]]))
            logits, theirs = logits_of(came.model, batch), logits_of(fsmt, (torch.tensor([expected]), *batch[1:]))
            assert_close(logits[..., : len(symbols)], theirs)
            assert_close(logits.softmax(-1)[..., : len(symbols)], theirs.softmax(-1))
            assert_close(came.foreign.logits(*batch), logits)
        if UNK not in expected:
            assert tokenizer.decode(found, skip_special_tokens=True) == line
    assert several > 100 and unknown > 100 and beyond > 20 and compared == 5
    assert all(tokenizer(line)["input_ids"] == [ids_of[p] for p in apply_codes(line, codes)] + [EOS] for line in known)


def test_symbols_that_a_dictionary_spells_in_two_ways_are_one(tmp_path) -> None:
    """`a@@` may be a word that somebody wrote, and the beginning of one."""
    (tmp_path / "code").write_text("#version: 0.2\n@ @</w>\na @@</w>\n", encoding="utf-8")
    symbols = ["a@@", "b", "@@"]
    model = random_fsmt(7, 7, SIZES, "all", "relu", True)
    came = load(write_folder(tmp_path, fairseq_state(model), args_of(), symbols, symbols))
    inside, word = came.tokenizer("ab")["input_ids"], came.tokenizer("a@@")["input_ids"]
    assert inside == [4, 5, EOS] and came.tokenizer("@@")["input_ids"] == [6, EOS] and word[0] >= 7
    decoder_ids = torch.tensor([[EOS, 4]])
    expected = logits_of(model, (torch.tensor([[4, EOS]]), torch.ones(1, 2).long(), decoder_ids))
    found = logits_of(came.model, (torch.tensor([word]), torch.ones(1, 2).long(), decoder_ids))
    assert_close(found[..., :7], expected)


def test_translations_are_words_again(tmp_path) -> None:
    came = load(codes_folder(tmp_path, sentences(LONG_WORDS, 30))[0])
    ids = came.tokenizer("abaäßab dddbac")["input_ids"]
    assert came.tokenizer.decode([EOS, *ids, PAD], skip_special_tokens=True) == "abaäßab dddbac"
    cut = [came.tokenizer.convert_tokens_to_ids(piece) for piece in ("aba", "ab</w>", "ddd")]
    assert UNK not in cut
    assert came.tokenizer.decode([EOS, *cut, EOS], skip_special_tokens=True) == "abaab ddd"
    assert any("Moses" in note for note in came.foreign.notes)


def test_without_codes_words_are_what_spaces_separate(tmp_path) -> None:
    symbols = ["lo@@", "w", "low", "Wör@@", "ter", "."]
    model = random_fsmt(10, 10, SIZES, "all", "relu", True)
    came = load(write_folder(tmp_path, fairseq_state(model), args_of(), symbols, symbols))
    came.tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = tokenizer(" lo@@ w  Wör@@ ter\tnever .")["input_ids"]
    assert ids == [4, 5, 7, 8, UNK, 9, EOS]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "low Wörter ."
    assert tokenizer.decode([6, 4], skip_special_tokens=True) == "low lo"
    assert any("cut by them already" in note for note in came.foreign.notes)


def test_it_is_the_same_after_saving(tmp_path) -> None:
    folder, *_ = codes_folder(tmp_path, sentences(LONG_WORDS, 30))
    came = load(folder / "checkpoint_best.pt")
    came.model.save_pretrained(tmp_path / "saved")
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "saved").eval()
    batch = random_batch(came.model.config.vocab_size, 30)
    assert torch.equal(logits_of(loaded, batch), logits_of(came.model, batch))
    names = "num_beams length_penalty_type length_penalty finish_candidates early_stopping max_new_tokens".split()
    values = [5, "power", 1.0, "top", True, 201]
    assert [getattr(loaded.generation_config, name) for name in names] == values


def train_sentencepiece(file: Path, kind: str) -> None:
    spm = pytest.importorskip("sentencepiece")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(LONG_WORDS, 200)),
        model_prefix=str(file.with_suffix("")),
        vocab_size=40,
        model_type=kind,
        minloglevel=2,
    )


@pytest.mark.parametrize("joint", [True, False])
def test_sentencepiece_makes_the_ids_that_it_makes_for_fairseq(tmp_path, joint) -> None:
    spm = pytest.importorskip("sentencepiece")
    train_sentencepiece(tmp_path / "sentencepiece.bpe.model", "unigram")
    cut = spm.SentencePieceProcessor(model_file=str(tmp_path / "sentencepiece.bpe.model"))
    known = sentences(LONG_WORDS, 30)
    # Not all that it can cut words into, and something that it cannot.
    pieces = dict.fromkeys(piece for line in known for piece in cut.encode(line, out_type=str))
    source = [*list(pieces)[:-5], "zz"]
    target = source if joint else word_list(20)
    fsmt = random_fsmt(len(source) + 4, len(target) + 4, SIZES, "all" if joint else "none", "relu", True)
    args = args_of(share_all_embeddings=joint)
    came = load(write_folder(tmp_path, fairseq_state(fsmt), args, source, target))
    ids, unknown = {symbol: i for i, symbol in enumerate(SPECIAL + source)}, 0
    for line in known + sentences([word[::-1] for word in LONG_WORDS] + ["azzb", "zz", "qab", "  b"], 60, seed=5):
        expected = [ids.get(piece, UNK) for piece in cut.encode(line, out_type=str)] + [EOS]
        found = came.tokenizer(line)["input_ids"]
        assert [i if i < len(ids) else UNK for i in found] == expected, line
        unknown += expected.count(UNK)
        batch = (torch.tensor([found]), torch.ones(1, len(found)).long(), torch.tensor([[EOS, UNK]]))
        theirs = logits_of(fsmt, (torch.tensor([expected]), *batch[1:]))
        ours = logits_of(came.model, batch)
        # The target's ids are others, and those that it never writes are far below them.
        assert_close(ours.sort(descending=True).values[..., : len(target) + 4], theirs.sort(descending=True).values)
        assert_close(came.foreign.logits(*batch), ours)
        if UNK not in expected:
            assert came.tokenizer.decode(found, skip_special_tokens=True) == " ".join(line.split())
    assert unknown > 10 and len(ids) > 15
    assert not any("Moses" in note for note in came.foreign.notes)


def test_sentencepiece_of_another_kind_is_refused(tmp_path) -> None:
    folder, _ = simple_folder(tmp_path)
    train_sentencepiece(folder / "sentencepiece.bpe.model", "bpe")
    with pytest.raises(ValueError, match=r"sentencepiece\.bpe\.model is of the model_type bpe"):
        load(folder)


# ---- What is refused


def test_what_is_fairseqs(tmp_path) -> None:
    folder, _ = simple_folder(tmp_path)
    assert recognize(folder) and recognize(folder / "checkpoint_best.pt")
    assert not recognize(folder / "dict.en.txt") and not recognize(folder / "nothing.pt")
    (folder / "checkpoint_best.pt").rename(folder / "model.pt")
    assert recognize(folder)
    (folder / "model.pt").rename(folder / "pytorch_model.pt")
    assert not recognize(folder)


class Evil:
    """Leaves a file behind, where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inside", [False, True])
def test_a_file_that_would_run_code_is_refused_and_does_not(tmp_path, zipped, inside) -> None:
    folder, _ = simple_folder(tmp_path)
    file, trace = folder / "checkpoint_best.pt", tmp_path / "trace"
    args = Namespace(**args_of(), criterion=Evil(trace)) if inside else Evil(trace)
    torch.save({"args": args, "model": {}}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError) as error:
        load(folder)
    assert not trace.exists()
    message = str(error.value)
    assert all(words in message for words in (str(file), "mkdir", "torch.save({'model': ", "without running code"))
    torch.load(file, weights_only=False)
    assert trace.exists()


def test_the_two_lines_that_it_prints_make_a_file_that_loads(tmp_path, monkeypatch) -> None:
    folder, model = simple_folder(tmp_path)
    args = Namespace(**args_of(), ddp_backend=Path("something/that/is/no/plain/value"))
    write_folder(folder, fairseq_state(model), args, word_list(29), word_list(29))
    with pytest.raises(ValueError, match="pathlib") as error:
        load(folder)
    monkeypatch.chdir(folder)
    exec(str(error.value).split("this line of Python: ")[1], {})
    came = load(folder / "plain_checkpoint_best.pt")
    batch = random_batch(33, 33)
    assert_close(logits_of(came.model, batch), logits_of(model, batch))


@pytest.mark.parametrize("kept", [0, 1, 150, 5000, -1])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_is_cut_is_refused(tmp_path, kept, zipped) -> None:
    folder, _ = simple_folder(tmp_path)
    file = folder / "checkpoint_best.pt"
    if not zipped:
        torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"checkpoint_best\.pt is not a whole file"):
        load(folder)


def test_other_files_are_refused(tmp_path) -> None:
    folder, _ = simple_folder(tmp_path)
    file = folder / "checkpoint_best.pt"
    for content, words in (
        ([1, 2], '"model"'),
        ({"args": Namespace()}, '"model"'),
        ({"model": {"encoder.layers": 3}}, r"encoder\.layers is a int"),
        ({"model": {}, "args": None}, '"args"'),
        ({"model": {}, "args": {"arch": "fconv"}}, "arch is 'fconv'.*transformer_iwslt_de_en"),
        ({"model": {}, "cfg": {"model": {"_name": "lightconv"}}}, "arch is 'lightconv'"),
        ({"model": {}, "args": args_of()}, r"no matrix decoder\.embed_tokens\.weight"),
        ({"model": {}, "args": args_of(share_all_embeddings=False)}, r"no decoder\.output_projection\.weight"),
    ):
        torch.save(content, file)
        with pytest.raises(ValueError, match=words):
            load(folder)
    file.write_text("a text", encoding="utf-8")
    with pytest.raises(ValueError, match="not a whole file"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layernorm_embedding": True}, ["layernorm_embedding", "True"]),
        ({"quant_noise_pq": 0.2}, ["quant_noise_pq", "0.2"]),
        ({"adaptive_softmax_cutoff": "1000,5000"}, ["adaptive_softmax_cutoff", "1000,5000"]),
        ({"cross_self_attention": True}, ["cross_self_attention", "True"]),
        ({"no_cross_attention": True}, ["no_cross_attention", "True"]),
        ({"no_token_positional_embeddings": True}, ["no_token_positional_embeddings", "True"]),
        ({"encoder_layers_to_keep": "0,1"}, ["encoder_layers_to_keep", "0,1"]),
        ({"decoder_attention_heads": 4}, ["encoder_attention_heads is 3", "decoder_attention_heads 4"]),
        ({"decoder_ffn_embed_dim": 40}, ["encoder_ffn_embed_dim is 20", "decoder_ffn_embed_dim 40"]),
        ({"decoder_embed_dim": 24}, ["encoder_embed_dim is 12", "decoder_embed_dim 24"]),
        ({"decoder_normalize_before": True}, ["encoder_normalize_before is False", "decoder_normalize_before True"]),
        ({"decoder_learned_pos": True}, ["encoder_learned_pos is False", "decoder_learned_pos True"]),
        ({"decoder_output_dim": 6}, ["decoder_output_dim is 6", "12"]),
        ({"decoder_input_dim": 6}, ["decoder_input_dim is 6", "12"]),
        ({"activation_fn": "relu_squared"}, ["relu_squared", "gelu_accurate"]),
        ({"decoder_layers": 6}, ["decoder_layers is 6", "1 in the weights"]),
        (
            {"encoder_embed_dim": 16, "decoder_embed_dim": 16, "decoder_output_dim": 16},
            ["encoder_embed_dim is 16", "12"],
        ),
    ],
)
def test_what_ours_cannot_be_is_named(tmp_path, settings, words) -> None:
    with pytest.raises(ValueError) as error:
        load(simple_folder(tmp_path, **settings)[0])
    assert all(word in str(error.value) for word in [*words, "checkpoint_best.pt"]), str(error.value)


def test_weights_without_a_place_or_of_another_shape_are_named(tmp_path) -> None:
    folder, model = simple_folder(tmp_path)
    state, symbols = fairseq_state(model), word_list(29)
    for change, words in (
        ({"encoder.layernorm_embedding.weight": torch.ones(12)}, r"encoder\.layernorm_embedding\.weight has no place"),
        ({"encoder.layers.1.fc2.bias": torch.ones(3)}, r"encoder\.layers\.1\.fc2\.bias is \(3,\), but \(12,\)"),
        ({"encoder.layer_norm.weight": torch.ones(12)}, r"encoder\.layer_norm\.weight has no place"),
        ({"encoder.layers.0.self_attn.q_proj.bias": None}, r"no weight for .*self_attn\.q_proj\.bias"),
    ):
        changed = {name: weight for name, weight in (state | change).items() if weight is not None}
        with pytest.raises(ValueError, match=words):
            load(write_folder(folder, changed, args_of(), symbols, symbols))


def test_dictionaries_that_do_not_fit_are_refused(tmp_path) -> None:
    folder, model = simple_folder(tmp_path)
    english, german = folder / "dict.en.txt", folder / "dict.de.txt"
    text = english.read_text("utf-8")
    english.write_text(text + "more 1\nandmore 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"encoder\.embed_tokens\.weight has 33 rows.* 35 symbols"):
        load(folder)
    for line, words in (
        ("word\n", "line 30: expected a symbol and its count, but found 'word'"),
        ("word x\n", "line 30.*'word x'"),
        ("<unk> 7\n", "line 30: '<unk>' is there twice"),
    ):
        english.write_text(text + line, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            load(folder)
    english.write_bytes(text.encode() + b"\xff 3\n")
    with pytest.raises(ValueError, match=r"dict\.en\.txt is not UTF-8"):
        load(folder)
    english.unlink()
    with pytest.raises(ValueError, match=r"no dict\.en\.txt"):
        load(folder)
    german.unlink()
    with pytest.raises(ValueError, match=r"no dict\.\*\.txt"):
        load(folder)
    write_folder(folder, fairseq_state(model), args_of(target_lang=None), word_list(29), word_list(29, seed=9))
    with pytest.raises(ValueError, match=r"dict\.de\.txt, dict\.en\.txt, which differ.*target_lang None"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#version: 0.1\na b\n", "version 0.1"),
        ("a b\nab </w>\n", "line 2.*version 0.1"),
        ("#version: 0.2\na b\nabc\n", "line 3: expected two pieces to merge, but found 'abc'"),
        ("a b 3\na b c\n", "line 2"),
    ],
)
def test_codes_of_other_kinds_are_refused(tmp_path, text, words) -> None:
    (tmp_path / "code").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read_codes(tmp_path / "code")


def test_of_equal_codes_the_first_counts(tmp_path) -> None:
    (tmp_path / "code").write_text("a b 9\nb c 8\na b 7\n\n", encoding="utf-8")
    assert read_codes(tmp_path / "code") == [("a", "b"), ("b", "c")]
