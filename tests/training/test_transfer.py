"""
The network before its first update: which logits an extended or exchanged vocabulary leaves as they were, where new
rows begin; low-rank adapters, trained, saved in PEFT's format, resumed, merged and published.
"""

import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from hf_vaswani.averaging import average_checkpoints, load_weights
from hf_vaswani.cli import main
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.hub.publishing import read_candidate
from hf_vaswani.recipe import AdapterRecipe, HubRecipe
from hf_vaswani.training.transfer import (
    add_entries,
    attach_adapters,
    exchange_rows,
    speller,
    target_modules,
    transfer_vocabulary,
)
from hf_vaswani.translation.loading import load_model

from ..conftest import tiny_recipe
from ..networks import tiny_model, with_labels
from .runs import same_weights

TEXT = ["one two three four", "two three ändern", "four one ändern two"] * 5
TIES = [(True, True), (False, True), (False, False)]


def of(tokenizer, share_embeddings: bool = True, tie_word_embeddings: bool = True, **fields):
    ties = {"share_embeddings": share_embeddings, "tie_word_embeddings": tie_word_embeddings}
    return tiny_model(eos=0.5, vocab_size=len(tokenizer), **ties, **fields)


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, decoder_input_ids=ids).logits


@pytest.mark.parametrize("ties", TIES)
def test_added_entries_leave_the_old_logits_and_begin_as_the_mean_of_their_pieces(ties) -> None:
    tokenizer = train_tokenizer(TEXT, 290)
    model, before = of(tokenizer, *ties), len(tokenizer)
    ids = tokenizer(TEXT[0], return_tensors="pt")["input_ids"]
    pieces = tokenizer("<2fr>", add_special_tokens=False)["input_ids"]
    assert len(pieces) > 1
    changed = add_entries(model, tokenizer, ["<2fr>", "<2xx>"])
    assert (len(tokenizer), changed.config.vocab_size) == (before + 2, before + 2)
    assert tokenizer("<2fr> one")["input_ids"] == [before, *tokenizer("one")["input_ids"]]
    torch.testing.assert_close(logits(changed, ids)[..., :before], logits(model, ids), rtol=0, atol=1e-6)
    # The output is linear in its rows and biases.
    new, old = logits(changed, ids)[..., before], logits(model, ids)[..., pieces].mean(dim=-1)
    torch.testing.assert_close(new, old, rtol=0, atol=1e-5)
    for side in (changed.model.encoder, changed.model.decoder):
        rows = side.embed_tokens.weight
        torch.testing.assert_close(rows[before], rows[pieces].mean(dim=0))
        assert not rows[tokenizer.pad_token_id].any()
    matrices = {changed.lm_head.weight, changed.model.encoder.embed_tokens.weight}
    assert len(matrices | {changed.model.decoder.embed_tokens.weight}) == 3 - sum(ties)


def test_an_entry_that_exists_is_refused() -> None:
    tokenizer = train_tokenizer(TEXT, 290, languages=["fr"])
    with pytest.raises(ValueError, match="'<2fr>', which is in the vocabulary"):
        add_entries(of(tokenizer), tokenizer, ["<2fr>"])


def test_an_entry_that_would_cost_the_spaces_around_it_is_refused() -> None:
    tokenizer = train_tokenizer(TEXT, 290)
    with pytest.raises(ValueError, match="'seven', but with it, the tokenizer of the model would read 'a seven b' as"):
        add_entries(of(tokenizer), tokenizer, ["seven"])


def test_an_entry_is_a_whole_word() -> None:
    # A tokenizer that marks the beginnings of words keeps the spaces.
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -2.0) for piece in "▁abcdef")], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
    model = of(tokenizer, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    added = len(tokenizer)
    add_entries(model, tokenizer, ["fed"])
    for text, count in (("a fed b", 1), ("fed", 1), ("fedb afed", 0)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (ids.count(added), tokenizer.decode(ids)) == (count, text)


def test_kinds_spell_the_same_text() -> None:
    for kind, size in (("bpe", 300), ("unigram", 40), ("words", 20)):
        tokenizer = train_tokenizer(TEXT, size, kind)
        tokens = tokenizer.tokenize("one ändern")
        assert b"".join(map(speller(tokenizer.backend_tokenizer), tokens)) == " one ändern".encode(), kind
    tokenizer = train_tokenizer(TEXT, 260, "bytes")
    assert b"".join(map(speller(tokenizer.backend_tokenizer), tokenizer.tokenize("ändern"))) == "ändern".encode()
    fallback = Tokenizer(models.BPE({"<0x41>": 0, "<0xC3>": 1}, [], byte_fallback=True))
    fallback.decoder = decoders.ByteFallback()
    assert [speller(fallback)(f"<0x{byte}>") for byte in ("41", "C3")] == [b"A", b"\xc3"]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
@pytest.mark.parametrize("ties", TIES)
def test_entries_of_both_vocabularies_keep_their_logits(ties, kind) -> None:
    old = train_tokenizer(TEXT, 300 if kind == "bpe" else 60, kind)
    new = train_tokenizer([*TEXT, "onetwo onetwo"], 30, "words")
    model = of(old, *ties, decoder_start_token_id=2)
    changed = transfer_vocabulary(model, old, new)
    assert (changed.config.vocab_size, changed.config.decoder_start_token_id) == (len(new), 2)
    of_old, of_new = speller(old.backend_tokenizer), speller(new.backend_tokenizer)
    texts = {of_old(token): id_ for token, id_ in old.get_vocab().items()}
    entries = {id_: of_new(token) for token, id_ in new.get_vocab().items()}
    kept = {id_: texts[text] for id_, text in entries.items() if text in texts}
    assert len(kept) > 5
    ids = torch.tensor([list(kept)])
    there, here = (logits(m, i) for m, i in ((model, torch.tensor([list(kept.values())])), (changed, ids)))
    torch.testing.assert_close(here[..., list(kept)], there[..., list(kept.values())], rtol=0, atol=1e-5)
    # A word that the old vocabulary spells with several pieces.
    word = new.get_vocab()[" onetwo"]
    pieces = [id_ for id_ in old("onetwo", add_special_tokens=False)["input_ids"] if id_ != old.unk_token_id]
    assert len(pieces) > 1
    rows = model.model.decoder.embed_tokens.weight[pieces]
    torch.testing.assert_close(changed.model.decoder.embed_tokens.weight[word], rows.mean(dim=0))


def test_special_tokens_go_by_their_role() -> None:
    model = tiny_model(vocab_size=10, decoder_start_token_id=0)
    model.generation_config.bad_words_ids = [[0], [7, 8]]
    rows = [[9], [0], [2], [3], [4]]
    changed = exchange_rows(model, rows, rows, {0: 1, 1: 2, 2: 3})
    config, generation = changed.config, changed.generation_config
    assert (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (1, 3, 1)
    assert generation.bad_words_ids == [[1]]
    assert changed.model.encoder.embed_tokens.padding_idx == 1
    assert not changed.model.encoder.embed_tokens.weight[1].any()


# ---- Adapters -----------------------------------------------------------------------------------------------------

ADAPTER = "{rank: 2, alpha: 8, dropout: 0.1}"


def adapt(tiny_run: Path, folder: Path, run: Path, *arguments: str, **training: object) -> int:
    """Trains adapters on the model of a finished run."""
    training = {"adapter": ADAPTER, "schedule": "constant", "peak_learning_rate": 0.01} | training
    recipe = tiny_recipe(folder, scored=True, **training)
    return main(["train", *recipe, f"--initialize.from={tiny_run / 'model'}", *arguments, "--run_dir", str(run)])


@pytest.fixture(scope="module")
def adapted(tiny_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    assert adapt(tiny_run, folder, folder / "run") == 0
    return folder / "run"


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**with_labels()).logits


def test_a_checkpoint_is_an_adapter_of_peft(adapted) -> None:
    checkpoint = adapted / "checkpoint-12"
    assert not (checkpoint / "model.safetensors").exists()
    base = AutoModelForSeq2SeqLM.from_pretrained(adapted / "start")
    before = logits_of(base)
    oracle = logits_of(peft.PeftModel.from_pretrained(base, checkpoint))
    assert (oracle - before).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(load_model(checkpoint)), oracle, atol=1e-5, rtol=1e-5)


def test_only_the_adapters_are_trained(adapted) -> None:
    start, end = load_file(adapted / "start" / "model.safetensors"), load_weights(adapted / "checkpoint-12")
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed == {name for name in start if ".layers." in name and name.endswith("weight") and "norm" not in name}


def test_the_published_model_is_plain_and_the_mean_of_merged_weights(adapted) -> None:
    checkpoints = [adapted / "checkpoint-8", adapted / "checkpoint-12"]
    published = load_file(adapted / "model" / "model.safetensors")
    for name, weight in average_checkpoints(checkpoints).items():
        assert torch.equal(published[name], weight)
    merged = []
    for checkpoint in checkpoints:
        base = AutoModelForSeq2SeqLM.from_pretrained(adapted / "start")
        merged.append(peft.PeftModel.from_pretrained(base, checkpoint).merge_and_unload().state_dict())
    for name, weight in published.items():
        torch.testing.assert_close(weight, (merged[0][name] + merged[1][name]) / 2, atol=1e-6, rtol=1e-5)


def test_a_resumed_training_is_the_same_bit_for_bit(adapted, tiny_run, tmp_path) -> None:
    run = tmp_path / "run"
    assert adapt(tiny_run, tmp_path, run, max_steps=5, save_every=1, keep_last=20) == 0
    # The recipe of the whole run saves every 4 updates; what is saved is no part of what is trained.
    assert adapt(tiny_run, tmp_path, run, max_steps=12, save_every=1, keep_last=20) == 0
    for step in (8, 12):
        assert same_weights(adapted, run, f"checkpoint-{step}/adapter_model.safetensors")
    assert same_weights(adapted / "start", run / "start")


@pytest.mark.parametrize("way", ["missing", "changed"])
def test_adapters_without_their_model_are_refused(adapted, tiny_run, tmp_path, way) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    assert load_model(run / "checkpoint-12") is not None
    if way == "missing":
        shutil.rmtree(run / "start")
    else:
        tiny_model(seed=3).save_pretrained(run / "start")
    for load in (load_model, load_weights):
        with pytest.raises(ValueError, match=str(run / "start")):
            load(run / "checkpoint-12")
    assert adapt(tiny_run, tmp_path, run, max_steps=16) == 2


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_adapters_take_part_in_loss_gradient_and_search(tmp_path, implementation) -> None:
    model = tiny_model()
    model.set_attn_implementation(implementation)
    inputs = with_labels()
    before = model.eval()(**inputs, loss_only=True).loss.item()
    adapters = attach_adapters(model, AdapterRecipe(rank=2), tmp_path / "start")
    assert model.eval()(**inputs, loss_only=True).loss.item() == pytest.approx(before)
    torch.manual_seed(1)
    factors = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert factors and all("lora_" in name for name in factors)
    for each in factors.values():
        torch.nn.init.normal_(each, std=0.3)
    loss = model(**inputs, loss_only=True).loss
    assert abs(loss.item() - before) > 1e-3
    loss.backward()
    assert all(each.grad is not None and each.grad.abs().max() > 0 for each in factors.values())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**inputs, loss_only=True).loss.item() == pytest.approx(loss.item(), abs=0.05)
    search = {"num_beams": 2, "max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
    source = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    found = model.generate(**source, **search)
    plain = adapters.merge_and_unload()
    assert plain is model
    torch.testing.assert_close(plain(**inputs, loss_only=True).loss, loss, atol=1e-5, rtol=1e-5)
    again = plain.generate(**source, **search)
    assert torch.equal(found.sequences, again.sequences)
    torch.testing.assert_close(found.sequences_scores, again.sequences_scores, atol=1e-5, rtol=1e-5)


def test_targets_are_sublayers_or_single_modules() -> None:
    model = tiny_model()
    assert target_modules(model, ["feed_forward"]) == ["fc1", "fc2"]
    assert target_modules(model, ["cross_attn.q_proj", "fc1"]) == ["cross_attn.q_proj", "fc1"]
    for word in ("fc3", "proj", "lm_head"):
        with pytest.raises(ValueError, match=f"'{word}', but the model has only attention, feed_forward, q_proj"):
            target_modules(model, [word])
    with pytest.raises(ValueError, match="is empty"):
        target_modules(model, [])


@pytest.mark.variants(2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_learns(tiny_run, tmp_path, checkpointing, capsys) -> None:
    assert adapt(tiny_run, tmp_path, tmp_path / "run", max_steps=4, gradient_checkpointing=checkpointing) == 0
    factors = load_file(tmp_path / "run" / "checkpoint-4" / "adapter_model.safetensors")
    # B begins as zero.
    assert all(weight.abs().max() > 0 for weight in factors.values())
    assert sum("lora_B" in name for name in factors) == 4 + 2 + 4 + 4 + 2
    trained = sum(weight.numel() for weight in factors.values())
    assert f"parameters ({trained:,} of them trained), 1 process on" in capsys.readouterr().err


def test_a_checkpoint_of_adapters_is_not_published(adapted) -> None:
    with pytest.raises(ValueError, match="it has only adapters"):
        read_candidate(adapted, adapted / "checkpoint-12", HubRecipe(repo_id="me/model", min_bleu=0.0))


def test_without_a_place_or_without_peft_nothing_is_trained(tiny_run, tmp_path, capsys, monkeypatch) -> None:
    assert adapt(tiny_run, tmp_path, tmp_path / "run", "--training.adapter={rank: 2, target: [fc3]}") == 2
    assert "training.adapter.target has 'fc3'" in capsys.readouterr().err and not (tmp_path / "run").exists()
    monkeypatch.setitem(sys.modules, "peft", None)
    assert adapt(tiny_run, tmp_path, tmp_path / "run") != 0
    assert "pip install 'hf_vaswani[adapt]'" in capsys.readouterr().err
