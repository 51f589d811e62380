"""Vocabularies extended or exchanged: which old rows of the embeddings each new entry begins as the mean of."""

import copy
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from ..data.tokenizer import backend, byte_letters
from ..model.modeling_vaswani import VaswaniForConditionalGeneration

ROLES = ("pad", "bos", "eos", "unk")
SOURCE_MATRIX = "model.encoder.embed_tokens.weight"
# All uses of the vocabulary, tied or not.
MATRICES = (
    SOURCE_MATRIX,
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
    "lm_head.bias",
)
LANGUAGE_TAG = re.compile(r"<2\S+>")
# Settings of a generation config that have ids.
ID_SETTINGS = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
)


def add_entries(
    model: VaswaniForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[str],
    prefixes: Collection[str] = (),
) -> VaswaniForConditionalGeneration:
    """
    Adds entries to the vocabulary of a model. Each begins as the mean of the pieces that spelled it.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model; its old logits stay what they were.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer, changed in place.
        tokens (`Sequence[str]`): new entries: language tags and prefixes, which absorb the spaces around them, or
            whole words.
        prefixes (`Collection[str]`): those of the text, of which an entry may be one.

    Returns:
        [`VaswaniForConditionalGeneration`]: a model with a row for each entry.

    Raises:
        ValueError: an entry is in the vocabulary already, or text with it would not be decoded as it was.
    """
    known = tokenizer.get_vocab()
    for token in tokens:
        if token in known:
            raise ValueError(
                f"initialize.add_tokens has {token!r}, which is in the vocabulary of the model already: leave it out."
            )
    sides = [_Side(tokenizer, is_target) for is_target in (False, True)]
    spellings = [[side.pieces(token) for token in tokens] for side in sides]
    are_tags = [token in prefixes or LANGUAGE_TAG.fullmatch(token) is not None for token in tokens]
    words = [token for token, is_tag in zip(tokens, are_tags, strict=True) if not is_tag]
    decoded = {word: _decoded_between_words(tokenizer, word) for word in words}
    tokenizer.add_tokens(
        [
            AddedToken(token, lstrip=is_tag, rstrip=is_tag, single_word=not is_tag, normalized=False, special=False)
            for token, is_tag in zip(tokens, are_tags, strict=True)
        ]
    )
    for word in words:
        for before, after in zip(decoded[word], _decoded_between_words(tokenizer, word), strict=True):
            if after not in (before, f"a {word} b"):
                raise ValueError(
                    f"initialize.add_tokens has {word!r}, but with it, the tokenizer of the model would read "
                    f"{before!r} as {after!r}: leave it out. Language tags such as <2de> can be added to every "
                    "vocabulary."
                )
    rows = []
    for spelling in spellings:
        found = [[id_] for id_ in range(model.config.vocab_size)]
        for token, pieces in zip(tokens, spelling, strict=True):
            id_ = tokenizer.convert_tokens_to_ids(token)
            # A matrix may have more rows than its tokenizer has entries.
            found += [[] for _ in range(id_ + 1 - len(found))]
            found[id_] = pieces
        rows.append(found)
    return exchange_rows(model, *_filled(rows, sides[0].everything))


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
    sides, spelled = [_Side(old, is_target) for is_target in (False, True)], speller(backend(new, False))
    rows: list[list[list[int]]] = [[[] for _ in range(len(new))] for _ in sides]
    for token, id_ in new.get_vocab().items():
        text = spelled(token)
        for side, found in zip(sides, rows, strict=True):
            found[id_] = [roles[id_]] if id_ in roles else side.spell(text)
    # A decoder that starts with </s> still does.
    ids = {before: after for after, before in roles.items()}
    return exchange_rows(model, *_filled(rows, sides[0].everything), ids)


def _decoded_between_words(tokenizer: PreTrainedTokenizerBase, word: str) -> list[str]:
    """Returns what remains of a word between two others when source and target text are encoded and decoded."""
    sides = [backend(tokenizer, is_target) for is_target in (False, True)]
    return [side.decode(side.encode(f"a {word} b").ids) for side in sides]


class _Side:
    """The entries of a vocabulary that text of one side is split into, by their text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, is_target: bool) -> None:
        self.tokenizer = backend(tokenizer, is_target)
        self.unknown = tokenizer.unk_token_id
        special = {getattr(tokenizer, f"{role}_token_id") for role in ROLES}
        spelled, entries = speller(self.tokenizer), self.tokenizer.get_vocab().items()
        self.by_text: dict[bytes, int] = {}
        for token, id_ in sorted(entries, key=lambda entry: entry[1]):
            if id_ not in special:
                self.by_text.setdefault(spelled(token), id_)
        # The row of padding is zero.
        self.everything = sorted(id_ for _, id_ in entries if id_ != tokenizer.pad_token_id)

    def spell(self, text: bytes) -> list[int]:
        """Returns the entry that is a text, or those that spell it."""
        return [self.by_text[text]] if text in self.by_text else self.pieces(text.decode(errors="ignore"))

    def pieces(self, text: str) -> list[int]:
        """Returns the entries that spell a text, without the unknown one."""
        found = self.tokenizer.encode(text, add_special_tokens=False).ids if text.strip() else []
        return [id_ for id_ in found if id_ != self.unknown]


def _filled(rows: Sequence[list[list[int]]], everything: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Gives the rows of entries that a side cannot spell those of the other, or the mean of all."""
    source, target = rows
    return (
        [one or other or everything for one, other in zip(source, target, strict=True)],
        [other or one or everything for one, other in zip(source, target, strict=True)],
    )


def exchange_rows(
    model: VaswaniForConditionalGeneration,
    source_rows: Sequence[Sequence[int]],
    target_rows: Sequence[Sequence[int]],
    ids: Mapping[int, int] | None = None,
) -> VaswaniForConditionalGeneration:
    """
    Makes a model whose vocabulary has other rows: those of source and target embedding, and of the output and its
    bias, tied or not.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model, which stays as it is.
        source_rows (`Sequence[Sequence[int]]`), target_rows (`Sequence[Sequence[int]]`): for each new row, the old
            ones whose mean it is, in the source embedding and in the matrices of the target. If they share one matrix,
            the shorter list of both counts.
        ids (`Mapping[int, int]`, *optional*): new ids of the special tokens, by their old ones; by default they keep
            their ids.

    Returns:
        [`VaswaniForConditionalGeneration`] in evaluation mode.
    """
    config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    config.vocab_size = len(source_rows)
    if ids is not None:
        for settings in (config, generation):
            for name in ID_SETTINGS:
                if getattr(settings, name, None) is not None:
                    setattr(settings, name, _renumbered(getattr(settings, name), ids))
    if config.share_embeddings:
        source_rows = target_rows = [min(pair, key=len) for pair in zip(source_rows, target_rows, strict=True)]
    changed = VaswaniForConditionalGeneration(config)
    changed.generation_config = generation
    weights = model.state_dict()
    for name in MATRICES:
        if name in weights:
            rows = source_rows if name == SOURCE_MATRIX else target_rows
            weights[name] = torch.stack([weights[name][list(row)].mean(dim=0) for row in rows])
    changed.load_state_dict(weights)
    return changed.eval()


def speller(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """
    Returns a function from an entry to its text, in which vocabularies of different kinds can be compared: the space
    before a word is `Ġ` in byte-level BPE, `▁` in SentencePiece, and a space in the other kinds of this package.

    Args:
        tokenizer (`tokenizers.Tokenizer`): tokenizer of one side.

    Returns:
        `Callable[[str], bytes]`: returns UTF-8, of which an entry may be a part.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    settings = json.loads(tokenizer.to_str())
    types = set(re.findall(r"'type': '(\w+)'", str([settings["pre_tokenizer"], settings["decoder"]])))

    def spelled(token: str) -> bytes:
        if token in added:
            return token.encode()
        if "ByteLevel" in types:
            return bytes(_BYTES[letter] for letter in token) if all(letter in _BYTES for letter in token) else b""
        if "ByteFallback" in types and (match := re.fullmatch(r"<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode()

    return spelled


_BYTES = byte_letters()


def _renumbered(value: int | list, ids: Mapping[int, int]) -> int | list | None:  # type: ignore[type-arg]
    """Returns an id, or lists of them, by their new numbers; without those that have none."""
    if not isinstance(value, list):
        return ids.get(value)
    if all(isinstance(each, int) for each in value):
        return [ids[each] for each in value if each in ids] or None
    return [[ids[id_] for id_ in each] for each in value if all(id_ in ids for id_ in each)] or None
