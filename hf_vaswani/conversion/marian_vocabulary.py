"""Marian's vocabularies: SentencePiece cuts the text, a list of tokens gives the ids. Here, one fast tokenizer.

Pieces and ids are two things in Marian: the pieces of the source are in a `.spm` file, and the id of each is in a list
that has the target's pieces as well. A fast tokenizer has one list for both, so that four things are done to it:

- A token that the source's text must never be cut into has two spaces behind its name. No text has such any more when
  it is cut, and they are left out when ids become text.
- Letters that are in none of the source's pieces stay together in SentencePiece, as far as they follow each other, and
  have an id if there is a token of just these letters. So they get a space on both sides, and so does that token.
- A piece that has no id gets one behind the others. It is read as `<unk>`, and never written.
- Where the target has a list of its own, its ids go on behind the source's. The special tokens stay one.

What remains different: a language code (`>>fr<<`) is one wherever it stands, and not at the beginning alone; one that
has no id is text, and not one `<unk>`; and a zero-width joiner beside a space may be cut otherwise.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf

# The types of pieces in a .spm file that text can be cut into.
NORMAL, USER_DEFINED, BYTE = 1, 4, 6
UNIGRAM = 1
LANGUAGE_CODE = re.compile(r">>.+<<")
MISSING = "Reading Marian's .spm files needs two packages more: pip install 'hf_vaswani[convert]'"
# The logit of what cannot be written. It has to be so low that another logit added to it changes nothing.
NEVER = -1e9


@dataclass
class Vocabulary:
    """
    One list of tokens for both sides.

    Args:
        tokens (`list[str]`): the token of each id, two spaces behind those that the source's text is never cut into.
        source_rows (`torch.LongTensor` of shape `(tokens,)`): which of Marian's source ids each one is; -1 for none.
        target_rows (`torch.LongTensor` of shape `(tokens,)`): which of Marian's target ids each one is read as; -1 for
            none.
        is_target (`torch.BoolTensor` of shape `(tokens,)`): which are written.
    """

    tokens: list[str]
    source_rows: torch.Tensor
    target_rows: torch.Tensor
    is_target: torch.Tensor

    def target_id(self, id_: int) -> int:
        """
        Our id of one of Marian's target ids.

        Raises:
            ValueError: there is no such id.
        """
        found = ((self.target_rows == id_) & self.is_target).nonzero()
        if len(found) != 1:
            raise ValueError(
                f"The id {id_} is set, but the target's vocabulary has {int(self.is_target.sum())} entries."
            )
        return int(found[0, 0])

    def rows(self, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of one of Marian's matrices, of shape `(ids, d_model)`, for our ids; zeros where there is none."""
        return matrix[rows.clamp(min=0)].masked_fill(rows[:, None] < 0, 0.0)

    def output_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Marian's bias of the output, of shape `(ids,)`, for our ids."""
        return bias[self.target_rows.clamp(min=0)].masked_fill(~self.is_target, NEVER)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Marian's logits, of shape `(..., ids)`, for our ids."""
        return logits[..., self.target_rows.clamp(min=0)].masked_fill(~self.is_target, NEVER)


def join(
    source: Mapping[str, int], target: Mapping[str, int] | None, spm: Any, special: Sequence[str], unk: str
) -> Vocabulary:
    """
    Both sides' ids as one list.

    Args:
        source (`Mapping[str, int]`): ids of the source; of the target as well where that has none of its own.
        target (`Mapping[str, int]`, *optional*): ids of the target.
        spm (`ModelProto`): what the source's text is cut into.
        special (`Sequence[str]`): tokens that are one for both sides.
        unk (`str`): the one that stands for every other.
    """
    pieces = {piece.piece for piece in spm.pieces if piece.type in (NORMAL, USER_DEFINED, BYTE)}
    names = sorted(source, key=source.__getitem__)
    without_id = sorted(pieces - source.keys())
    source_rows = [*range(len(names)), *[source[unk]] * len(without_id)]
    target_rows, is_target = list(source_rows), [True] * len(names) + [False] * len(without_id)
    names += without_id
    of_source = len(names)
    if target is not None:
        target_rows = [target[name] if name in special and name in target else -1 for name in names]
        is_target = [row >= 0 for row in target_rows]
        own = sorted((id_, name) for name, id_ in target.items() if name not in special or name not in source)
        names += [name for _, name in own]
        source_rows += [-1] * len(own)
        target_rows += [id_ for id_, _ in own]
        is_target += [True] * len(own)
    as_they_are = {*pieces, *special, *(name for name in source if LANGUAGE_CODE.fullmatch(name))}
    known = _letters(spm)
    tokens, taken = [], set[str]()
    for i, name in enumerate(names):
        if i >= of_source or name not in as_they_are:
            name = f" {name} " if i < of_source and known.isdisjoint(name) else f"{name}  "
        # A token of the target may have the name of another of the source.
        while name in taken:
            name += " "
        taken.add(name)
        tokens.append(name)
    return Vocabulary(tokens, torch.tensor(source_rows), torch.tensor(target_rows), torch.tensor(is_target))


def fast_tokenizer(
    vocabulary: Vocabulary, spm: Any, pad: str, eos: str, unk: str, **settings: Any
) -> PreTrainedTokenizerFast:
    """
    The tokenizer of a vocabulary: cuts source text as SentencePiece does, puts the end behind it, and turns ids of
    both sides into text.

    Args:
        vocabulary ([`Vocabulary`]): the ids.
        spm (`ModelProto`): what the source's text is cut into.
        pad (`str`), eos (`str`), unk (`str`): special tokens of the vocabulary.
        settings: of [`PreTrainedTokenizerFast`].
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
            decoders.Replace(Regex(r"\A +| +\z"), ""),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, eos_id)]
    )
    codes = [token for token in vocabulary.tokens if LANGUAGE_CODE.fullmatch(token)]
    tokenizer.add_tokens([AddedToken(code, normalized=False) for code in codes])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        **settings,
    )


def _scores(spm: Any) -> dict[str, float]:
    """The log-probability of each piece that text can be cut into."""
    normal = [piece.score for piece in spm.pieces if piece.type == NORMAL]
    scores = {piece.piece: piece.score for piece in spm.pieces if piece.type == NORMAL}
    for piece in spm.pieces:
        # What a user has defined is better than all that it could be cut into.
        if piece.type == USER_DEFINED:
            scores[piece.piece] = len(piece.piece) * max(normal) - 0.1
    return scores


def _letters(spm: Any) -> set[str]:
    """The letters that pieces are made of."""
    return {letter for piece in spm.pieces if piece.type in (NORMAL, USER_DEFINED) for letter in piece.piece}


def letters_of_symbols(spm: Any) -> list[str]:
    """The letters that only user-defined pieces are made of, sorted; those that are pieces by themselves are not."""
    of_pieces = {letter for piece in spm.pieces if piece.type == NORMAL for letter in piece.piece}
    alone = {piece.piece for piece in spm.pieces if piece.type == USER_DEFINED}
    return sorted(_letters(spm) - of_pieces - alone)


def _normalizer(spm: Any) -> normalizers.Normalizer:
    """SentencePiece's: letters by a table, one space between words, none at the ends, `▁` for a space."""
    spec = spm.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        # tokenizers' way with the table is not quite SentencePiece's: an accent behind a letter that is itself in the
        # table, as a ligature or a wide letter, gets lost.
        steps += [normalizers.Precompiled(spec.precompiled_charsmap)]
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), " ")]
    if spec.add_dummy_prefix:
        steps += [normalizers.Prepend(" ")]
    steps += [normalizers.Replace(" ", "▁")]
    if spec.remove_extra_whitespaces:
        # Also those that were written as such.
        steps += [normalizers.Replace(Regex(r"▁+\z"), "")]
    if not spm.trainer_spec.byte_fallback:
        known = "".join(re.sub(r"[\\\]\[^&-]", r"\\\g<0>", letter) for letter in sorted(_letters(spm)))
        borders = rf"(?<=[^{known}])(?=[{known}]|\z)|(?<=[{known}]|\A)(?=[^{known}])"
        steps += [normalizers.Replace(Regex(borders), " ")]
    return normalizers.Sequence(steps)


def read_spm(path: Path) -> Any:
    """
    A `.spm` file: a list of pieces, and how text is made ready for them.

    Raises:
        ValueError: it is not there, is not whole, or cuts text in another way.
        ImportError: the packages that read it are not there.
    """
    try:
        spm = import_protobuf().ModelProto()
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ImportError(MISSING) from error
    try:
        spm.ParseFromString(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing, which has the pieces that text is cut into.") from error
    except DecodeError as error:
        raise ValueError(f"{path} is not a whole SentencePiece file: {error}.") from error
    if not spm.pieces:
        raise ValueError(f"{path} is not a SentencePiece file, because there is no piece in it.")
    trainer, normalizer = spm.trainer_spec, spm.normalizer_spec
    if trainer.model_type != UNIGRAM:
        kind = trainer.ModelType.Name(trainer.model_type).lower()
        raise ValueError(f"{path} is of the model_type {kind}, but only unigram can be converted.")
    for name, value, expected in (
        ("treat_whitespace_as_suffix", trainer.treat_whitespace_as_suffix, False),
        ("escape_whitespaces", normalizer.escape_whitespaces, True),
        ("denormalizer_spec", bool(spm.denormalizer_spec.precompiled_charsmap), False),
    ):
        if value != expected:
            raise ValueError(f"{path} has {name} {value}, but only {expected} can be converted.")
    return spm


def check_ids(path: Path, ids: Mapping[str, Any], size: int, of_what: str) -> None:
    """
    Refuses a list of tokens that does not fit the matrix of its embeddings.

    Args:
        path (`Path`): the list's file.
        ids (`Mapping[str, Any]`): its ids.
        size (`int`): rows of the matrix.
        of_what (`str`): the matrix, in words.

    Raises:
        ValueError: with both numbers.
    """
    if len(ids) != size:
        raise ValueError(f"{path} has {len(ids)} entries, but {of_what} has {size} rows.")
    if any(type(id_) is not int for id_ in ids.values()) or sorted(ids.values()) != list(range(size)):
        raise ValueError(f"{path} must give each of its {size} entries an id of its own, from 0 to {size - 1}.")


def map_ids(value: Any, to_ours: Callable[[int], int]) -> Any:
    """A setting that is an id, or a list of such, to any depth, or `None`, with other ids."""
    if isinstance(value, list):
        return [map_ids(item, to_ours) for item in value]
    return to_ours(value) if isinstance(value, int) else value
