"""The shared vocabulary of both languages (Section 5.1), as a plain fast tokenizer.

The default is byte-level byte-pair encoding (BPE): any text, even with letters that are not in the training text, can
be encoded and decoded without loss. All kinds have the same four special tokens and the same normalisation, and put
`</s>` at the end of a sentence.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..files import split_revision
from ..model.sentences_vaswani import language_tag

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Beside them in the folders of converted models whose sides are split differently.
TARGET_FILE = "target_tokenizer.json"
# One entry of the vocabulary in front of a sentence.
TAG = re.compile(r"<[^<>\s]+>")
# Settings of a tokenizer beside its file.
SETTINGS = (
    *("pad_token", "bos_token", "eos_token", "unk_token", "padding_side", "model_max_length"),
    *("clean_up_tokenization_spaces", "split_special_tokens"),
)

# The character that decoders write for bytes that are no letter, and such a byte as both kinds of vocabulary name it.
BROKEN, BYTES = "\ufffd", ("Ã", "<0xC3>")

# A word or a run of punctuation, each with the space before it: "red book." -> " red", " book", "."
WORD = r" ?[\p{L}\p{M}\p{N}]+| ?[^\s\p{L}\p{M}\p{N}]+| "


@dataclass(frozen=True)
class Frame:
    """
    The special tokens around a text.

    Attributes:
        bos (`bool`): whether `<s>` is in front of it.
        eos (`bool`): whether `</s>` is behind it; without it, the text is to be continued.
        reads_mask (`bool`): whether a mask that is written in the text is one.
    """

    bos: bool = False
    eos: bool = True
    reads_mask: bool = False


# A tokenizer without entries, and the trainer that learns them, if there is anything to learn.
Untrained = tuple[Tokenizer, trainers.Trainer | None]


def train_tokenizer(
    sentences: Iterable[str],
    vocab_size: int,
    kind: Literal["bpe", "unigram", "wordpiece", "words", "characters", "bytes"] = "bpe",
    languages: Sequence[str] = (),
    prefixes: Sequence[str] = (),
    split_digits: bool = False,
) -> PreTrainedTokenizerFast:
    """
    Learns a joint vocabulary and wraps it as a fast tokenizer.

    Args:
        sentences (`Iterable[str]`): the training text of both sides.
        vocab_size (`int`): maximum number of entries, special tokens included. `"bytes"` always has 260.
        kind (`str`): kind of the entries:

            - `"bpe"`: byte-pair encoding, the paper's choice for English-German. Encodes any text.
            - `"unigram"`: the pieces of a unigram language model, as in SentencePiece.
            - `"wordpiece"`: word-pieces, the paper's choice for English-French; here learned by merging, as in
              byte-pair encoding, and applied by longest match.
            - `"words"`: the most frequent words and runs of punctuation.
            - `"characters"`: the most frequent characters (Unicode code points).
            - `"bytes"`: the bytes of UTF-8; byte b has the id b + 4. Encodes any text.

            The kinds that cannot encode every text use `<unk>`. To retrain a `"wordpiece"` tokenizer with
            `train_new_from_iterator` of transformers, pass `continuing_subword_prefix=""`; the default is `##`.
        languages (`Sequence[str]`): target languages that get a tag. The tags are the last entries; with `"bytes"`
            they follow the 260.
        prefixes (`Sequence[str]`): prefixes of source sentences that get an entry each, such as `"<bt>"`, after the
            tags.
        split_digits (`bool`): make each digit an entry of its own, so that numbers are spelled digit by digit. The
            space in front of a number is an entry, too.

    Returns:
        [`PreTrainedTokenizerFast`] with `<pad> <s> </s> <unk>` as ids 0 to 3. It puts `</s>` at the end of each
        sentence. Decoding restores the sentence up to `<unk>`, Unicode normalisation (NFC) and runs of white space.
        Bytes that are no letter, which a model may write that has learned little, are decoded as nothing.

    Raises:
        ValueError: `vocab_size` is too small for the special tokens and the bytes or characters of the text, or a
            sentence has an unpaired UTF-16 surrogate.
    """
    tags = [*map(language_tag, languages), *prefixes]
    tokenizer, trainer = KINDS[kind](max(1, vocab_size - len(tags)))
    if split_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    if trainer is not None:
        too_small = f"tokenizer.vocab_size {vocab_size} is too small for {kind!r} on this text"
        _learn(tokenizer, trainer, sentences, too_small)
        least = max(tokenizer.get_vocab_size(), len(SPECIAL_TOKENS) + 1) + len(tags)
        if vocab_size < least:
            raise ValueError(f"{too_small}, which needs at least {least} entries.")
    if kind == "unigram":
        _make_deterministic(tokenizer)
    return _wrapped(tokenizer, tags)


def _learn(tokenizer: Tokenizer, trainer: trainers.Trainer, sentences: Iterable[str], too_small: str) -> None:
    """Learns the entries of a tokenizer; `too_small` begins the error of a vocabulary without room for characters."""
    try:
        tokenizer.train_from_iterator(sentences, trainer)
    except UnicodeEncodeError as error:
        context = error.object[max(0, error.start - 20) : error.start + 20]
        raise ValueError(f"A sentence has an unpaired UTF-16 surrogate: {context!r}.") from error
    except Exception as error:
        # The unigram trainer has no error class of its own.
        if "not large enough" in str(error):
            raise ValueError(f"{too_small}, which has more characters.") from error
        raise


def _wrapped(tokenizer: Tokenizer, tags: Sequence[str]) -> PreTrainedTokenizerFast:
    """Wraps a tokenizer for transformers, makes it put `</s>` after each sentence, and adds tags."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        # A "</s>" in the text of a sentence does not end it.
        split_special_tokens=True,
    )
    add_tags(wrapped, tags)
    return wrapped


def is_tag(prefix: str) -> bool:
    """Returns whether a prefix is a word in angle brackets, such as `"<bt>"`, which is one entry of a vocabulary."""
    return TAG.fullmatch(prefix) is not None


def add_tags(tokenizer: PreTrainedTokenizerBase, tags: Sequence[str]) -> None:
    """
    Adds language tags, and prefixes of the same form, to a vocabulary, unless they are there.

    A tag absorbs the spaces around it, so a sentence has the same ids with and without a tag in front.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): changed in place.
        tags (`Sequence[str]`): words in angle brackets, such as `"<2de>"` and `"<bt>"`.
    """
    # Not special: special tokens are not recognized in text, where the tags are written.
    tokenizer.add_tokens([AddedToken(tag, lstrip=True, rstrip=True, normalized=False, special=False) for tag in tags])


def has_tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> bool:
    """Returns whether a vocabulary has an entry for a tag, and finds it in text."""
    id_ = tokenizer.get_vocab().get(tag)
    return id_ is not None and id_ in tokenizer(tag)["input_ids"]


def splits_digits(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether each digit is an entry of its own because a tokenizer was trained with `split_digits`."""
    steps = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    return any(step.get("individual_digits", False) for step in steps.get("pretokenizers", [steps]))


def put_special_tokens(tokenizer: PreTrainedTokenizerBase, frame: Frame, has_segments: bool = False) -> None:
    """
    Puts special tokens around a text: `text </s>` for an encoder and a decoder, `<s> text` for a language model to
    continue, and `<s> text </s>` or `<s> text </s> text </s>` for one stack that reads a text.

    The tokenizer of a language model that continues texts pads them on the left, and keeps the space in front of what
    it decodes, with which a continuation begins a new word.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): changed in place.
        frame ([`Frame`]): the special tokens of the task.
        has_segments (`bool`): whether the model tells the two texts of a pair apart by `token_type_ids`.

    Raises:
        ValueError: the vocabulary has no `<s>`, and the task needs one.
    """
    bos, eos, continues = tokenizer.bos_token, tokenizer.eos_token, not frame.eos
    if bos is None and frame.bos:
        raise ValueError(
            "The task needs <s> in the vocabulary, which this tokenizer does not have: name another "
            "tokenizer.path or initialize.from, or let the recipe train a tokenizer."
        )
    single, pair = f"$A {eos}", f"$A {eos} $B {eos}"
    if continues:
        single, pair = f"{bos} $A", f"{bos} $A {bos} $B"
    elif frame.bos:
        single, pair = f"{bos} $A {eos}", f"{bos} $A {eos} $B:1 {eos}:1"
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (bos, eos) if token is not None]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single, pair, special)
    tokenizer.padding_side = "left" if continues else "right"
    decoder = _decoder(tokenizer.backend_tokenizer, keeps_space=continues)
    if decoder is not None:
        tokenizer.backend_tokenizer.decoder = decoder
    tokenizer.split_special_tokens = not frame.reads_mask
    segments = ["token_type_ids"] if has_segments else []
    tokenizer.model_input_names = ["input_ids", *segments, "attention_mask"]
    # transformers saves this dictionary, and not the attributes.
    tokenizer.init_kwargs |= {
        "model_input_names": tokenizer.model_input_names,
        "padding_side": tokenizer.padding_side,
        "split_special_tokens": tokenizer.split_special_tokens,
    }


def _decoder(tokenizer: Tokenizer, keeps_space: bool) -> decoders.Decoder | None:
    """
    Returns the decoder of one of our tokenizers, with or without the space that the normalizer put in front of a text;
    `None` for a tokenizer that does neither.
    """
    state = json.loads(tokenizer.to_str())
    strip, front = decoders.Strip(" ", 1, 0), {"type": "Prepend", "prepend": " "}
    parts = (state["decoder"] or {}).get("decoders", [])
    if parts and parts[0]["type"] == "Sequence":
        # [`drop_broken_letters`] has wrapped the decoder of a loaded tokenizer.
        parts = parts[0]["decoders"]
    kinds: dict[str, list[decoders.Decoder]] = {
        "ByteLevel": [decoders.ByteLevel(), decoders.Replace(BROKEN, "")],
        "Fuse": [decoders.Fuse()],
    }
    if not parts or parts[0]["type"] not in kinds or front not in (state["normalizer"] or {}).get("normalizers", []):
        return None
    return decoders.Sequence([*kinds[parts[0]["type"]], *([] if keeps_space else [strip])])


# ---- One function for each kind -----------------------------------------------------------------------------------


def _bpe(vocab_size: int) -> Untrained:
    tokenizer = _cut_into_words(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(BROKEN, ""), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def _unigram(vocab_size: int) -> Untrained:
    return _cut_into_words(models.Unigram()), trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
    )


def _wordpiece(vocab_size: int) -> Untrained:
    # The first piece of a word includes its space, so other pieces need no prefix. Words above the limit would be
    # <unk>, and in a language without spaces a word is as long as a sentence.
    model = models.WordPiece(unk_token="<unk>", continuing_subword_prefix="", max_input_chars_per_word=10_000)
    return _cut_into_words(model), trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, continuing_subword_prefix="", show_progress=False
    )


def _words(vocab_size: int) -> Untrained:
    return _cut_into_words(models.WordLevel(unk_token="<unk>")), trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False
    )


def _characters(vocab_size: int) -> Untrained:
    tokenizer, trainer = _words(vocab_size)
    tokenizer.normalizer = _clean()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return tokenizer, trainer


def _bytes(_: int) -> Untrained:
    letters = {byte: letter for letter, byte in byte_letters().items()}
    entries = [*SPECIAL_TOKENS, *(letters[byte] for byte in range(256))]
    # Without merges. Of byte fallback (`<0x41>`), the decoder loses all letters beside one that is broken.
    tokenizer = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.normalizer = _clean()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(BROKEN, "")])
    return tokenizer, None


KINDS: dict[str, Callable[[int], Untrained]] = {
    "bpe": _bpe,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "words": _words,
    "characters": _characters,
    "bytes": _bytes,
}


def byte_letters() -> dict[str, int]:
    """Returns the letters of byte-level BPE with their bytes: printable ones are themselves, others start at 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _cut_into_words(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    # With a space in front, a word is the same piece at the start of a sentence as inside it.
    tokenizer.normalizer = _clean(normalizers.Prepend(" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def _clean(*more: normalizers.Normalizer) -> normalizers.Normalizer:
    return normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), *more]
    )


def _make_deterministic(tokenizer: Tokenizer) -> None:
    """
    Makes a trained unigram model deterministic. Its trainer iterates over hash maps in random order, which shows in
    the last digits of the scores, in the ids of equal scores, and in the characters that it drops and adds again at
    the end, each with 0.0001 more than the one before. These get one score, and ids follow score and piece.
    """
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"][len(SPECIAL_TOKENS) :]
    lowest = min(score for _, score in pieces)
    added = lowest + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    settled = [(piece, round(lowest if len(piece) == 1 and score <= added else score, 6)) for piece, score in pieces]
    settled.sort(key=lambda entry: (-entry[1], entry[0]))
    tokenizer.model = models.Unigram([*((token, 0.0) for token in SPECIAL_TOKENS), *settled], unk_id=3)


class TwoSidedTokenizer(PreTrainedTokenizerFast):
    """
    A tokenizer that splits target text in another way than source text, into ids of one vocabulary:
    `tokenizer(text_target=...)`.

    It is saved as a plain tokenizer for source text, which `AutoTokenizer` loads, and `target_tokenizer.json` beside
    it, which [`load_tokenizer`] reads. Both decode the same.

    Args:
        source (`tokenizers.Tokenizer`), target (`tokenizers.Tokenizer`): split the two sides.
        settings: as in [`PreTrainedTokenizerFast`].
    """

    def __init__(self, *, source: Tokenizer, target: Tokenizer, **settings: Any) -> None:
        self.target = target
        super().__init__(tokenizer_object=source, **settings)
        # transformers has added the special tokens to a copy.
        self.source = self._tokenizer
        special = [AddedToken(token, normalized=False, special=True) for token in self.all_special_tokens]
        target.add_special_tokens(special)

    def _switch_to_target_mode(self) -> None:
        self._tokenizer = self.target

    def _switch_to_input_mode(self) -> None:
        self._tokenizer = self.source

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        (self.target.add_special_tokens if special_tokens else self.target.add_tokens)(new_tokens)
        return int(super()._add_tokens(new_tokens, special_tokens))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Saves the tokenizer, see [`PreTrainedTokenizerFast`]; returns the files."""
        files: tuple[str, ...] = super().save_pretrained(save_directory, *args, **kwargs)
        config, target = Path(save_directory) / "tokenizer_config.json", Path(save_directory) / TARGET_FILE
        settings = json.loads(config.read_text("utf-8")) | {"tokenizer_class": PreTrainedTokenizerFast.__name__}
        config.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
        target.write_text(self.target.to_str(pretty=True), "utf-8")
        return (*files, str(target))


def two_sided(tokenizer: PreTrainedTokenizerBase, target: Tokenizer) -> TwoSidedTokenizer:
    """
    Gives a tokenizer another way to split target text.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): tokenizer of source text.
        target (`tokenizers.Tokenizer`): splits target text into the same ids.
    """
    return TwoSidedTokenizer(
        source=tokenizer.backend_tokenizer,
        target=target,
        **{name: tokenizer.init_kwargs[name] for name in SETTINGS if name in tokenizer.init_kwargs},
    )


def backend(tokenizer: PreTrainedTokenizerBase, is_target: bool) -> Tokenizer:
    """Returns the tokenizer of the library `tokenizers` for one side of the text, with all settings applied."""
    # A call applies the settings.
    tokenizer(text_target="") if is_target else tokenizer("")
    own = tokenizer.target if is_target and isinstance(tokenizer, TwoSidedTokenizer) else None
    return own or tokenizer.backend_tokenizer


def drop_broken_letters(tokenizer: Tokenizer) -> None:
    """
    Makes a tokenizer decode bytes that are no letter as nothing, and not as U+FFFD.

    Args:
        tokenizer (`tokenizers.Tokenizer`): changed in place, unless it never writes U+FFFD for them.
    """
    decoder = tokenizer.decoder
    if decoder is not None and any(BROKEN in decoder.decode([byte]) for byte in BYTES):
        tokenizer.decoder = decoders.Sequence([decoder, decoders.Replace(BROKEN, "")])


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer that a translation model can use. It drops broken letters, see [`drop_broken_letters`].

    Args:
        name (`str`): folder, or id of a repository on the Hub, which may end in `@revision`.

    Returns:
        [`PreTrainedTokenizerBase`].

    Raises:
        ValueError: the tokenizer is missing, is not fast, or has no pad or end-of-sentence token.
    """
    if os.path.isdir(name) and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        raise ValueError(f"The folder {name} has no tokenizer: it contains neither {' nor '.join(TOKENIZER_FILES)}.")
    repository, revision = split_revision(name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            repository, revision=revision or "main", trust_remote_code=False
        )
    except OSError as error:
        raise ValueError(f"The tokenizer {name} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer {name} is not a fast one (with a tokenizer.json): convert it, or choose another."
        )
    drop_broken_letters(tokenizer.backend_tokenizer)
    if (target := Path(name) / TARGET_FILE).is_file():
        other = Tokenizer.from_file(str(target))
        drop_broken_letters(other)
        tokenizer = two_sided(tokenizer, other)
    for token in ("pad_token", "eos_token"):
        if getattr(tokenizer, token) is None:
            raise ValueError(f"The tokenizer {name} has no {token}, which a translation model needs.")
    return tokenizer
