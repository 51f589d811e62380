"""Vocabularies extended and exchanged: which logits stay what they were, and where new rows begin."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.training.transfer import add_entries, exchange_rows, speller, transfer_vocabulary

from ..networks import tiny_model

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
