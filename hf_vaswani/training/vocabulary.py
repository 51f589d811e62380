"""Vocabularies extended or exchanged: which old rows of the embeddings each new entry begins as the mean of."""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from ..model.modeling_vaswani import VaswaniForConditionalGeneration

ROLES = ("pad", "bos", "eos", "unk")
# All uses of the vocabulary, tied or not.
MATRICES = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
    "lm_head.bias",
)
# Settings of a generation config that have ids.
ID_SETTINGS = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
)


def add_entries(
    model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]
) -> VaswaniForConditionalGeneration:
    """
    Adds entries to the vocabulary of a model. Each begins as the mean of the pieces that spelled it.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model; its old logits stay what they were.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer, changed in place.
        tokens (`Sequence[str]`): new entries. They absorb the spaces around them, as language tags do.

    Returns:
        [`VaswaniForConditionalGeneration`]: a model with a row for each entry.

    Raises:
        ValueError: an entry is in the vocabulary already.
    """
    rows = [[id_] for id_ in range(model.config.vocab_size)]
    known = tokenizer.get_vocab()
    for token in tokens:
        if token in known:
            raise ValueError(
                f"initialize.add_tokens has {token!r}, which is in the vocabulary of the model already: leave it out."
            )
    spellings = [_pieces(tokenizer, token) for token in tokens]
    tokenizer.add_tokens(
        [AddedToken(token, lstrip=True, rstrip=True, normalized=False, special=False) for token in tokens]
    )
    everything = _everything(tokenizer, known.values())
    for token, pieces in zip(tokens, spellings, strict=True):
        id_ = tokenizer.convert_tokens_to_ids(token)
        # A matrix may have more rows than its tokenizer has entries.
        rows += [[] for _ in range(id_ + 1 - len(rows))]
        rows[id_] = pieces or everything
    return exchange_rows(model, [row or everything for row in rows])


def transfer_vocabulary(
    model: VaswaniForConditionalGeneration, old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase
) -> VaswaniForConditionalGeneration:
    """
    Exchanges the vocabulary of a model. Entries that spell the same text keep their rows, and special tokens those of
    their role; the others begin as the mean of the old entries that spell them.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model.
        old ([`PreTrainedTokenizerBase`]), new ([`PreTrainedTokenizerBase`]): its tokenizer, and the one in its place.

    Returns:
        [`VaswaniForConditionalGeneration`]: a model for the new tokenizer.
    """
    roles = {
        getattr(new, f"{role}_token_id"): getattr(old, f"{role}_token_id")
        for role in ROLES
        if getattr(new, f"{role}_token_id") is not None and getattr(old, f"{role}_token_id") is not None
    }
    by_text: dict[bytes, int] = {}
    for token, id_ in sorted(old.get_vocab().items(), key=lambda entry: entry[1]):
        if id_ not in roles.values():
            by_text.setdefault(spelled(old, token), id_)
    everything = _everything(old, old.get_vocab().values())
    rows: list[list[int]] = [[] for _ in range(len(new))]
    for token, id_ in new.get_vocab().items():
        text = spelled(new, token)
        if id_ in roles:
            rows[id_] = [roles[id_]]
        elif text in by_text:
            rows[id_] = [by_text[text]]
        else:
            rows[id_] = _pieces(old, text.decode(errors="ignore"))
    # A decoder that starts with </s> still does.
    ids = {before: after for after, before in roles.items()}
    return exchange_rows(model, [row or everything for row in rows], ids)


def exchange_rows(
    model: VaswaniForConditionalGeneration, rows: Sequence[Sequence[int]], ids: Mapping[int, int] | None = None
) -> VaswaniForConditionalGeneration:
    """
    Makes a model whose vocabulary has other rows: those of source and target embedding, and of the output and its
    bias, tied or not.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, which stays as it is.
        rows (`Sequence[Sequence[int]]`): for each new row, the old ones whose mean it is.
        ids (`Mapping[int, int]`, *optional*): new ids of the special tokens, by their old ones; by default they keep
            their ids.

    Returns:
        [`VaswaniForConditionalGeneration`] in evaluation mode.
    """
    config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    config.vocab_size = len(rows)
    if ids is not None:
        for settings in (config, generation):
            for name in ID_SETTINGS:
                if getattr(settings, name, None) is not None:
                    setattr(settings, name, _renumbered(getattr(settings, name), ids))
    changed = VaswaniForConditionalGeneration(config)
    changed.generation_config = generation
    weights = model.state_dict()
    for name in MATRICES:
        if name in weights:
            weights[name] = torch.stack([weights[name][list(row)].mean(dim=0) for row in rows])
    changed.load_state_dict(weights)
    return changed.eval()


def spelled(tokenizer: PreTrainedTokenizerBase, token: str) -> bytes:
    """
    Returns the text of an entry, in which vocabularies of different kinds can be compared: the space before a word is
    `Ġ` in byte-level BPE, `▁` in SentencePiece, and a space in the other kinds of this package.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): a fast tokenizer.
        token (`str`): one of its entries.

    Returns:
        `bytes`: UTF-8, of which an entry may be a part.
    """
    settings = tokenizer.backend_tokenizer.to_str()
    if token in tokenizer.get_added_vocab():
        return token.encode()
    if '"type":"ByteLevel"' in settings:
        return bytes(_BYTES[letter] for letter in token) if all(letter in _BYTES for letter in token) else b""
    if '"type":"ByteFallback"' in settings and (match := re.fullmatch(r"<0x([0-9A-F]{2})>", token)):
        return bytes.fromhex(match[1])
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns the letters of byte-level BPE with their bytes: printable ones are themselves, others start at 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the entries that spell a text, without the unknown one."""
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text.strip() else []
    return [id_ for id_ in found if id_ != tokenizer.unk_token_id]


def _everything(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> list[int]:
    """Returns all ids but that of padding, whose row is zero."""
    return sorted(id_ for id_ in ids if id_ != tokenizer.pad_token_id)


def _renumbered(value: int | list, ids: Mapping[int, int]) -> int | list | None:  # type: ignore[type-arg]
    """Returns an id, or lists of them, by their new numbers; without those that have none."""
    if not isinstance(value, list):
        return ids.get(value)
    if all(isinstance(each, int) for each in value):
        return [ids[each] for each in value if each in ids] or None
    return [[ids[id_] for id_ in each] for each in value if all(id_ in ids for id_ in each)] or None
