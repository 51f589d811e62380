"""fairseq checkpoints, built from transformers' FSMT and torch's stacks, convert to the same logits and text."""

import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.conversion.fairseq import CHECKPOINTS, load, recognize

from .fairseq_folders import (
    RULES,
    SHAPES,
    SIZES,
    args_of,
    assert_close,
    fairseq_batch,
    fairseq_state,
    logits_of,
    merged,
    random_fsmt,
    randomize,
    sentences,
    simple_folder,
    word_list,
    write_folder,
)
from .unsafe_pickle import MakesFolder

# ---- The network


@pytest.mark.parametrize(("shape", "tied", "activation", "scale"), SHAPES)
@pytest.mark.parametrize("old", [False, True], ids=["args", "cfg"])
def test_logits_equal_those_of_fsmt(tmp_path, shape, tied, activation, scale, old) -> None:
    """With old and new names of weights, and with settings in "args" and "cfg"."""
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
        batch = fairseq_batch(41, rows)
        expected = logits_of(fsmt, batch)
        assert_close(logits_of(came.model, batch), expected)
        assert_close(came.foreign.logits(*batch), expected)
    # Equality means something only if the position offset matters.
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
    # An untrained network repeats itself.
    varied = {"no_repeat_ngram_size": 2}
    for settings in ({"num_beams": 1, "early_stopping": False}, {"num_beams": 5, "early_stopping": True}):
        own = settings if settings["num_beams"] == 1 else {}
        found = came.model.generate(**batch, **own, **varied)
        expected = fsmt.generate(**batch, **RULES, **settings, **varied, length_penalty=1.0)
        translations = came.tokenizer.batch_decode(found, skip_special_tokens=True)
        assert translations == came.tokenizer.batch_decode(expected, skip_special_tokens=True)
        assert len({len(line.split()) for line in translations}) > 2
    greedy = came.model.generate(**batch, num_beams=1, early_stopping=False, max_new_tokens=201)
    assert came.foreign.translate(text) == came.tokenizer.batch_decode(greedy, skip_special_tokens=True)


class TorchStacks(nn.Module):
    """torch's pre-norm stacks with fairseq's embeddings and sinusoidal or learned positions, written out."""

    def __init__(self, words: int, positions: int = 0) -> None:
        super().__init__()
        sizes = {"d_model": 12, "nhead": 3, "dim_feedforward": 20, "dropout": 0.0, "batch_first": True}
        layers = [kind(**sizes, norm_first=True) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)]
        self.encoder = nn.TransformerEncoder(layers[0], 2, nn.LayerNorm(12), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(layers[1], 3, nn.LayerNorm(12))
        self.tokens = nn.Embedding(words, 12)
        # fairseq's table has rows before the first position.
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


@pytest.mark.parametrize("positions", ["sinusoids", "learned", "more of the source"])
def test_pre_norm_and_learned_positions_equal_torchs_stacks(tmp_path, positions) -> None:
    learned = positions != "sinusoids"
    stacks = TorchStacks(33, 19 if learned else 0).eval()
    randomize(stacks, 3)
    state, table = stacks.fairseq_state(), "encoder.embed_positions.weight"
    if positions == "more of the source":
        state[table] = torch.cat((state[table], torch.ones(5, 12)))
    names = [f"{side}_{name}" for side in ("encoder", "decoder") for name in ("normalize_before", "learned_pos")]
    settings = args_of(SIZES | {"decoder_layers": 3}, **{name: learned or "norm" in name for name in names})
    symbols = word_list(29)
    came = load(write_folder(tmp_path, state, Namespace(**settings), symbols, symbols))
    batch = fairseq_batch(33)
    with torch.no_grad():
        assert_close(logits_of(came.model, batch), stacks(*batch))
    assert came.foreign.logits is None and came.foreign.translate is None
    notes = " ".join(came.foreign.notes)
    # Tables of unequal lengths are cut to the shorter one.
    assert "No library here runs" in notes and ("24 learned positions" in notes) == (positions == "more of the source")
    if learned:
        config = came.model.config
        assert (config.max_position_embeddings, config.position_offset) == (19, 0)
        assert came.model.generation_config.max_new_tokens == 19


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
    batch = fairseq_batch(33)
    assert_close(logits_of(came.model, batch), logits_of(fsmt, batch))
    nested["quant_noise"]["scalar"] = 0.1
    write_folder(tmp_path, state, cfg, word_list(29), word_list(29), cfg=True)
    with pytest.raises(ValueError, match=r"quant_noise_scalar 0\.1"):
        load(tmp_path)


def test_architectures_have_defaults(tmp_path) -> None:
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


# ---- What is refused


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_fairseq_paths_are_recognized(tmp_path, name) -> None:
    folder, _ = simple_folder(tmp_path)
    (folder / "checkpoint_best.pt").rename(folder / name)
    assert recognize(folder) and recognize(folder / name)
    assert not recognize(folder / "dict.en.txt") and not recognize(folder / "nothing.pt")
    (folder / name).rename(folder / "pytorch_model.pt")
    assert not recognize(folder)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inside", [False, True])
def test_a_file_that_would_run_code_is_rejected_without_running_it(tmp_path, zipped, inside) -> None:
    folder, _ = simple_folder(tmp_path)
    file, trace = folder / "checkpoint_best.pt", tmp_path / "trace"
    args = Namespace(**args_of(), criterion=MakesFolder(trace)) if inside else MakesFolder(trace)
    torch.save({"args": args, "model": {}}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError) as error:
        load(folder)
    assert not trace.exists()
    message = str(error.value)
    assert all(words in message for words in (str(file), "mkdir", "torch.save({'model': ", "without running code"))
    torch.load(file, weights_only=False)
    assert trace.exists()


def test_the_printed_line_writes_a_file_that_loads(tmp_path, monkeypatch) -> None:
    folder, model = simple_folder(tmp_path)
    args = Namespace(**args_of(), ddp_backend=Path("something/that/is/no/plain/value"))
    write_folder(folder, fairseq_state(model), args, word_list(29), word_list(29))
    with pytest.raises(ValueError, match="pathlib") as error:
        load(folder)
    monkeypatch.chdir(folder)
    exec(str(error.value).split("this line of Python: ")[1], {})
    came = load(folder / "plain_checkpoint_best.pt")
    batch = fairseq_batch(33)
    assert_close(logits_of(came.model, batch), logits_of(model, batch))


@pytest.mark.parametrize("kept", [0, 1, 150, 5000, -1])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_file_is_rejected(tmp_path, kept, zipped) -> None:
    folder, _ = simple_folder(tmp_path)
    file = folder / "checkpoint_best.pt"
    if not zipped:
        torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"checkpoint_best\.pt is damaged"):
        load(folder)
