"""Marian's vocabularies: SentencePiece splits the text, and a vocabulary gives the ids. Here, one fast tokenizer.

In Marian, the pieces of the source are in a `.spm` file, and their ids in a vocabulary that usually also contains the
pieces of the target. A fast tokenizer has one list for both purposes, which takes four adaptations:

- A token that source text must never be split into has two spaces after its name. Text that is ready to be split
  contains no spaces, and decoding removes them.
- SentencePiece keeps a run of letters together if no source piece contains them, and the run has an id if it is a
  token. The normalizer therefore puts spaces around such runs, and around such tokens.
- A piece without an id gets one after all others. It is read as `<unk>`, and never generated.
- If the target has a vocabulary of its own, its ids follow those of the source. Special tokens are shared.

Remaining differences: a language code (`>>fr<<`) is recognized anywhere, not only at the beginning; a code without an
id is split as text instead of becoming one `<unk>`; and a zero-width joiner beside a space may be split differently.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf

from ..data.tokenizer import BROKEN
from .vocabulary import Vocabulary

# Types of pieces in a .spm file that text can be split into.
NORMAL, USER_DEFINED, BYTE = 1, 4, 6
UNIGRAM = 1
LANGUAGE_CODE = re.compile(r">>.+<<")
MISSING = "Reading Marian's files needs protobuf, sentencepiece and PyYAML: pip install 'hf_vaswani[convert]'"
# Output bias of ids that are never generated: in float32, adding a logit does not change it.
NEVER = -1e9


def join(
    source: Mapping[str, int], target: Mapping[str, int] | None, spm: Any, special: Sequence[str], unk: str
) -> Vocabulary:
    """
    Joins the vocabularies of source and target.

    Args:
        source (`Mapping[str, int]`): ids of the source, or of both sides.
        target (`Mapping[str, int]`, *optional*): ids of the target, if it has a vocabulary of its own.
        spm (`ModelProto`): pieces of the source.
        special (`Sequence[str]`): special tokens, which both sides share.
        unk (`str`): special token for unknown pieces.

    Returns:
        [`Vocabulary`]: ids of the source, then pieces without an id, then ids of the target.
    """
    pieces = {piece.piece for piece in spm.pieces if piece.type in (NORMAL, USER_DEFINED, BYTE)}
    names = sorted(source, key=source.__getitem__)
    without_id = sorted(pieces - source.keys())
    source_rows = [*range(len(names)), *[source[unk]] * len(without_id)]
    target_rows, is_target = list(source_rows), [True] * len(names) + [False] * len(without_id)
    names += without_id
    source_size = len(names)
    if target is not None:
        target_rows = [target[name] if name in special and name in target else -1 for name in names]
        is_target = [row >= 0 for row in target_rows]
        own = sorted((id_, name) for name, id_ in target.items() if name not in special or name not in source)
        names += [name for _, name in own]
        source_rows += [-1] * len(own)
        target_rows += [id_ for id_, _ in own]
        is_target += [True] * len(own)
    tokens = _marked(names, [i < source_size for i in range(len(names))], spm, special)
    return Vocabulary(tokens, torch.tensor(source_rows), torch.tensor(target_rows), torch.tensor(is_target), NEVER)


def _marked(names: Sequence[str], is_own: Sequence[bool], spm: Any, special: Sequence[str]) -> list[str]:
    """Marks the tokens that the text of a side must never be split into, or only in runs of unknown letters."""
    pieces = {piece.piece for piece in spm.pieces if piece.type in (NORMAL, USER_DEFINED, BYTE)}
    known = _letters(spm)
    tokens, taken = [], set[str]()
    for name, own in zip(names, is_own, strict=True):
        if not own or not (name in pieces or name in special or LANGUAGE_CODE.fullmatch(name)):
            name = f" {name} " if own and known.isdisjoint(name) else f"{name}  "
        # Source and target may use the same name for different tokens.
        while name in taken:
            name += " "
        taken.add(name)
        tokens.append(name)
    return tokens


def target_tokenizer(vocabulary: Vocabulary, spm: Any, special: Sequence[str], eos: str, unk: str) -> Tokenizer:
    """
    Builds the tokenizer of target text, for training. Pieces without an id are not used: text is split into others.

    Args:
        vocabulary ([`Vocabulary`]): from [`join`].
        spm (`ModelProto`): pieces of the target.
        special (`Sequence[str]`), eos (`str`), unk (`str`): special tokens, as in [`join`].
    """
    names = [token.strip(" ") for token in vocabulary.tokens]
    tokens = _marked(names, vocabulary.is_target.tolist(), spm, special)
    return sentencepiece_tokenizer(replace(vocabulary, tokens=tokens), spm, eos, unk)


def fast_tokenizer(
    vocabulary: Vocabulary, spm: Any, pad: str, eos: str, unk: str, model_max_length: int
) -> PreTrainedTokenizerFast:
    """
    Builds the tokenizer of a Marian model.

    Args:
        vocabulary ([`Vocabulary`]): the ids.
        spm (`ModelProto`): pieces of the source.
        pad (`str`), eos (`str`), unk (`str`): special tokens of the vocabulary.
        model_max_length (`int`): maximum number of tokens in a source.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece_tokenizer(vocabulary, spm, eos, unk),
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )


def sentencepiece_tokenizer(vocabulary: Vocabulary, spm: Any, eos: str, unk: str) -> Tokenizer:
    """
    Builds a tokenizer that splits source text as SentencePiece does, appends the end token, and decodes the ids of
    both sides.

    Args:
        vocabulary ([`Vocabulary`]): the ids.
        spm (`ModelProto`): pieces of the source.
        eos (`str`), unk (`str`): special tokens of the vocabulary.
    """
    scores = _scores(spm)
    entries = [(token, scores.get(token, 0.0)) for token in vocabulary.tokens]
    unk_id, eos_id = vocabulary.tokens.index(unk), vocabulary.tokens.index(eos)
    tokenizer = Tokenizer(models.Unigram(entries, unk_id, byte_fallback=spm.trainer_spec.byte_fallback))
    tokenizer.normalizer = _normalizer(spm)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(" ", ""),
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace(BROKEN, ""),
            decoders.Replace(Regex(r"\A +| +\z"), ""),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, eos_id)]
    )
    codes = [token for token in vocabulary.tokens if LANGUAGE_CODE.fullmatch(token)]
    tokenizer.add_tokens([AddedToken(code, normalized=False) for code in codes])
    return tokenizer


def _scores(spm: Any) -> dict[str, float]:
    """Returns the log-probability of each piece that text can be split into."""
    normal = [piece.score for piece in spm.pieces if piece.type == NORMAL]
    scores = {piece.piece: piece.score for piece in spm.pieces if piece.type == NORMAL}
    for piece in spm.pieces:
        # A user-defined piece scores higher than any split of it.
        if piece.type == USER_DEFINED:
            scores[piece.piece] = len(piece.piece) * max(normal) - 0.1
    return scores


def _letters(spm: Any) -> set[str]:
    """Returns the letters that occur in pieces."""
    return {letter for piece in spm.pieces if piece.type in (NORMAL, USER_DEFINED) for letter in piece.piece}


def letters_of_symbols(spm: Any) -> list[str]:
    """Returns the letters that occur only in longer user-defined pieces, sorted."""
    of_pieces = {letter for piece in spm.pieces if piece.type == NORMAL for letter in piece.piece}
    alone = {piece.piece for piece in spm.pieces if piece.type == USER_DEFINED}
    return sorted(_letters(spm) - of_pieces - alone)


def _normalizer(spm: Any) -> normalizers.Normalizer:
    """Builds SentencePiece's normalizer: maps letters by a table, strips and merges spaces, and writes them as `▁`."""
    spec = spm.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        # tokenizers applies the table slightly differently: an accent is lost after a letter that is itself in the
        # table, such as a ligature or a full-width letter.
        steps += [normalizers.Precompiled(spec.precompiled_charsmap)]
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
    if spec.add_dummy_prefix:
        steps += [normalizers.Prepend(" ")]
    steps += [normalizers.Replace(" ", "▁")]
    if spec.remove_extra_whitespaces:
        # Including those that the text contains literally.
        steps += [normalizers.Replace(Regex(r"▁+\z"), "")]
    if not spm.trainer_spec.byte_fallback:
        known = "".join(re.sub(r"[\\\]\[^&-]", r"\\\g<0>", letter) for letter in sorted(_letters(spm)))
        borders = rf"(?<=[^{known}])(?=[{known}]|\z)|(?<=[{known}]|\A)(?=[^{known}])"
        steps += [normalizers.Replace(Regex(borders), " ")]
    return normalizers.Sequence(steps)


def read_spm(path: Path) -> Any:
    """
    Reads a `.spm` file, which contains pieces and the normalization of text.

    Returns:
        `ModelProto` of SentencePiece.

    Raises:
        ValueError: The file is missing or damaged, or its model is not supported.
        ImportError: The packages that read it are not installed.
    """
    try:
        spm = import_protobuf().ModelProto()
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ImportError(MISSING) from error
    try:
        spm.ParseFromString(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path}, the SentencePiece model, is missing.") from error
    except DecodeError as error:
        raise ValueError(f"{path} is damaged or not a SentencePiece model: {error}.") from error
    if not spm.pieces:
        raise ValueError(f"{path} is not a SentencePiece model: it contains no pieces.")
    trainer, normalizer = spm.trainer_spec, spm.normalizer_spec
    if trainer.model_type != UNIGRAM:
        kind = trainer.ModelType.Name(trainer.model_type).lower()
        raise ValueError(f"{path} has the model_type {kind}, but only unigram is supported.")
    for name, value, expected in (
        ("treat_whitespace_as_suffix", trainer.treat_whitespace_as_suffix, False),
        ("escape_whitespaces", normalizer.escape_whitespaces, True),
        ("denormalizer_spec", bool(spm.denormalizer_spec.precompiled_charsmap), False),
    ):
        if value != expected:
            raise ValueError(f"{path} has {name} {value}, but only {expected} is supported.")
    return spm


def check_ids(path: Path, ids: Mapping[str, Any], size: int, matrix: str) -> None:
    """
    Checks that a vocabulary fits a matrix of embeddings.

    Args:
        path (`Path`): file of the vocabulary.
        ids (`Mapping[str, Any]`): its ids.
        size (`int`): number of rows of the matrix.
        matrix (`str`): name of the matrix, for the message.

    Raises:
        ValueError: The vocabulary has another size, or its ids are not those from 0 to `size - 1`.
    """
    if len(ids) != size:
        raise ValueError(f"{path} has {len(ids)} entries, but {matrix} has {size} rows.")
    if any(type(id_) is not int for id_ in ids.values()) or sorted(ids.values()) != list(range(size)):
        raise ValueError(f"{path} must give each of its {size} entries an id of its own, from 0 to {size - 1}.")


def map_ids(value: Any, to_ours: Callable[[int], int]) -> Any:
    """Maps the ids in a setting: one id, nested lists of ids, or `None`."""
    if isinstance(value, list):
        return [map_ids(item, to_ours) for item in value]
    return to_ours(value) if isinstance(value, int) else value
