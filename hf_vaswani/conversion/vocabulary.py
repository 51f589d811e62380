"""Vocabularies of other formats as one list of tokens, with the tokenizer for it.

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

fairseq has symbols in the order of their ids, which are pieces of SentencePiece, pieces of byte-pair codes, or words.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf

from ..data.tokenizer import BROKEN, TARGET_FILE, two_sided
from ..extras import extra
from ..files import read_lines

EOS, UNK, PAD, BOS = "</s>", "<unk>", "<pad>", "<s>"
# Types of pieces in a .spm file that text can be split into.
NORMAL, USER_DEFINED, BYTE = 1, 4, 6
UNIGRAM = 1
LANGUAGE_CODE = re.compile(r">>.+<<")
# Output bias of ids that are never generated: in float32, adding a logit does not change it.
NEVER = -1e9
TWO_SIDED = (
    "AutoTokenizer splits every text as source text. To train the model further with other software, split targets by "
    f"{TARGET_FILE}."
)


@dataclass
class Vocabulary:
    """
    Our ids, and the row of each in the embeddings of the foreign model.

    Args:
        tokens (`list[str]`): token of each id.
        source_rows (`torch.LongTensor` of shape `(vocab_size,)`): row in the source embeddings. An id that the source
            does not have has the row of another one.
        target_rows (`torch.LongTensor` of shape `(vocab_size,)`): row in the target embeddings, in the same way.
        is_target (`torch.BoolTensor` of shape `(vocab_size,)`): True for the ids that a translation may contain; each
            target row has one.
        never (`float`): output bias of all other ids, low enough that they are never generated.
    """

    tokens: list[str]
    source_rows: torch.Tensor
    target_rows: torch.Tensor
    is_target: torch.Tensor
    never: float

    def target_ids(self, rows: torch.Tensor) -> torch.Tensor:
        """
        Returns our ids of target rows, in the same shape.

        Raises:
            ValueError: There is no such row.
        """
        of_row = self.is_target.nonzero()[self.target_rows[self.is_target].argsort(), 0]
        outside = rows[(rows < 0) | (rows >= len(of_row))]
        if len(outside):
            raise ValueError(
                f"The settings contain the id {int(outside[0])}, but the target vocabulary has only {len(of_row)} "
                "entries."
            )
        return of_row[rows]

    def output_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Rearranges the output bias, `(rows,)` -> `(vocab_size,)`."""
        return bias[self.target_rows].masked_fill(~self.is_target, self.never)

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Rearranges logits, `(..., rows)` -> `(..., vocab_size)`."""
        return logits[..., self.target_rows] + torch.where(self.is_target, 0.0, self.never)


# ---- SentencePiece -----------------------------------------------------------------------------------------------


def sentencepiece(
    source: Mapping[str, int],
    target: Mapping[str, int],
    files: Sequence[Path],
    special: Mapping[str, str],
    missing: str,
    **settings: Any,
) -> tuple[Vocabulary, PreTrainedTokenizerBase, list[str]]:
    """
    Joins the vocabularies of source and target, and builds the tokenizer of raw text. Target text, for training, is
    split into pieces of the target that have an id.

    Args:
        source (`Mapping[str, int]`), target (`Mapping[str, int]`): ids of each side; they may be the same.
        files (`Sequence[Path]`): `.spm` files with the pieces of source and target.
        special (`Mapping[str, str]`): special tokens, which both sides share, by their names in transformers.
        missing (`str`): token whose row has an id on the side that does not have it.
        settings: further arguments of [`PreTrainedTokenizerFast`].

    Returns:
        `tuple` of the [`Vocabulary`], its tokenizer, and notes about it.

    Raises:
        ValueError: A file is missing, damaged or not supported.
        ImportError: The packages that read it are not installed.
    """
    spm, target_spm = map(read_spm, files)
    tokens, eos, unk = list(special.values()), special["eos_token"], special["unk_token"]
    vocabulary = join(source, target, spm, tokens, unk, missing)
    tokenizer = as_fast(sentencepiece_tokenizer(vocabulary, spm, eos, unk), special, **settings)
    notes = []
    if source != target or spm != target_spm:
        names = [token.strip(" ") for token in vocabulary.tokens]
        of_target = replace(vocabulary, tokens=_marked(names, vocabulary.is_target.tolist(), target_spm, tokens))
        tokenizer = two_sided(tokenizer, sentencepiece_tokenizer(of_target, target_spm, eos, unk))
        notes.append(TWO_SIDED)
    if letters := _letters_of_symbols(spm):
        notes.append(
            f"Letters that occur only in user-defined pieces ({' '.join(letters)}) become {unk}, even if they are in "
            "the target vocabulary."
        )
    return vocabulary, tokenizer, notes


def as_fast(tokenizer: Tokenizer, special: Mapping[str, str], **settings: Any) -> PreTrainedTokenizerFast:
    """Wraps a tokenizer for transformers, with special tokens and further arguments as of [`sentencepiece`]."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        **special,
        **settings,
    )


def join(
    source: Mapping[str, int], target: Mapping[str, int], spm: Any, special: Sequence[str], unk: str, missing: str
) -> Vocabulary:
    """
    Joins the vocabularies of source and target.

    Args:
        source (`Mapping[str, int]`), target (`Mapping[str, int]`): ids of each side.
        spm (`ModelProto`): pieces of the source.
        special (`Sequence[str]`): special tokens, which both sides share.
        unk (`str`), missing (`str`): tokens whose rows have pieces without an id, and ids of the other side.

    Returns:
        [`Vocabulary`]: ids of the source, then pieces without an id, then ids of the target, if they are others.
    """
    names = sorted(source, key=source.__getitem__)
    without_id = sorted(_pieces(spm) - source.keys())
    source_rows = [*range(len(names)), *[source[unk]] * len(without_id)]
    target_rows, is_target = list(source_rows), [True] * len(names) + [False] * len(without_id)
    names += without_id
    source_size = len(names)
    if target != source:
        is_target = [name in special and name in target for name in names]
        target_rows = [target.get(name if own else missing, 0) for name, own in zip(names, is_target, strict=True)]
        own = sorted((id_, name) for name, id_ in target.items() if name not in special or name not in source)
        names += [name for _, name in own]
        source_rows += [source[missing]] * len(own)
        target_rows += [id_ for id_, _ in own]
        is_target += [True] * len(own)
    tokens = _marked(names, [i < source_size for i in range(len(names))], spm, special)
    return Vocabulary(tokens, torch.tensor(source_rows), torch.tensor(target_rows), torch.tensor(is_target), NEVER)


def _pieces(spm: Any) -> set[str]:
    """Returns the pieces that text can be split into."""
    return {piece.piece for piece in spm.pieces if piece.type in (NORMAL, USER_DEFINED, BYTE)}


def _marked(names: Sequence[str], is_own: Sequence[bool], spm: Any, special: Sequence[str]) -> list[str]:
    """Marks the tokens that the text of a side must never be split into, or only in runs of unknown letters."""
    pieces, known = _pieces(spm), _letters(spm)
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


def sentencepiece_tokenizer(vocabulary: Vocabulary, spm: Any, eos: str, unk: str) -> Tokenizer:
    """
    Builds a tokenizer that splits source text as SentencePiece does, appends the end token, and decodes the ids of
    both sides. Arguments as of [`sentencepiece`].
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


def _letters_of_symbols(spm: Any) -> list[str]:
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
    with extra("convert", "Reading Marian's files"):
        # transformers' own tokenizer of Marian, which is compared with ours, needs it.
        import sentencepiece  # noqa: F401
        from google.protobuf.message import DecodeError
    spm = import_protobuf().ModelProto()
    try:
        spm.ParseFromString(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}, the SentencePiece model, is missing: copy it to the folder of the model."
        ) from error
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


# ---- fairseq -----------------------------------------------------------------------------------------------------

CODES = ("bpecodes", "code")
PIECES = "sentencepiece.bpe.model"
# In the order of their ids.
FAIRSEQ_SPECIAL = {"bos_token": BOS, "pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
CONTINUES, ENDS = "@@", "</w>"
# Output bias of ids that are never generated. Their embeddings are those of <unk>, so each has exp(-64) times the
# probability of <unk>, which disappears in a float32 sum.
NEVER_IN_FAIRSEQ = -64.0


def join_dictionaries(
    folder: Path, source: Sequence[str], target: Sequence[str]
) -> tuple[Vocabulary, PreTrainedTokenizerBase, list[str]]:
    """
    Joins two dictionaries, and builds the tokenizer. It takes raw text if the folder contains a SentencePiece model,
    and otherwise text that Moses has tokenized.

    Args:
        folder (`Path`): folder that may contain byte-pair codes or a SentencePiece model. Without them, text is split
            at spaces.
        source (`Sequence[str]`), target (`Sequence[str]`): symbols in the order of their ids.

    Returns:
        `tuple` of the [`Vocabulary`], its tokenizer, and notes about the text.

    Raises:
        ValueError: The codes or the SentencePiece model are damaged or not supported.
        ImportError: The packages that read SentencePiece models are not installed.
    """
    # The name of a special token inside a text is plain text.
    settings = {"split_special_tokens": True}
    source_ids, target_ids = ids_of(source), ids_of(target)
    unk = source_ids[UNK]
    notes: list[str] = []
    codes = next((folder / name for name in CODES if (folder / name).is_file()), None)
    if codes is None and (folder / PIECES).is_file():
        joint, wrapped, notes = sentencepiece(
            source_ids, target_ids, [folder / PIECES] * 2, FAIRSEQ_SPECIAL, missing=UNK, **settings
        )
        return replace(joint, never=NEVER_IN_FAIRSEQ), wrapped, notes
    symbols = list(dict.fromkeys([*source, *target]))
    tokens = symbols
    if codes is not None:
        pieces, tokenizer = bpe(symbols, read_codes(codes))
        tokens = symbols + [symbol_of(piece) for piece in pieces[len(symbols) :]]
    else:
        tokenizer = words(symbols)
        if any(symbol.endswith(CONTINUES) for symbol in symbols):
            notes.append(
                f"There are no codes ({' or '.join(CODES)}) beside the model: the tokenizer needs text that is "
                "already split by them."
            )
    notes.append("As in fairseq, the tokenizer reads and writes text as tokenized by Moses.")
    vocabulary = Vocabulary(
        tokens,
        source_rows=torch.tensor([source_ids.get(token, unk) for token in tokens]),
        target_rows=torch.tensor([target_ids.get(token, unk) for token in tokens]),
        is_target=torch.tensor([i < len(symbols) and token in target_ids for i, token in enumerate(tokens)]),
        never=NEVER_IN_FAIRSEQ,
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, source_ids[EOS])]
    )
    return vocabulary, as_fast(tokenizer, FAIRSEQ_SPECIAL, **settings), notes


def ids_of(symbols: Iterable[str]) -> dict[str, int]:
    """Returns the id of each symbol, its position."""
    return {symbol: i for i, symbol in enumerate(symbols)}


def words(symbols: Iterable[str]) -> Tokenizer:
    """Builds a tokenizer that splits text at spaces; `@@` at the end of an entry joins it to the next one."""
    tokenizer = Tokenizer(models.WordLevel(ids_of(symbols), unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence(
        [
            # The prefix never occurs, which puts a space before each entry.
            decoders.WordPiece(prefix=" ", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(f"{CONTINUES} |{CONTINUES}$"), ""),
        ]
    )
    return tokenizer


def bpe(symbols: Sequence[str], merges: Sequence[tuple[str, str]]) -> tuple[list[str], Tokenizer]:
    """
    Builds a tokenizer for byte-pair encoding. The codes mark the end of a word (`w</w>`), but the dictionary marks
    that a word continues (`lo@@`).

    Args:
        symbols (`Sequence[str]`): symbols of the dictionary in the order of their ids.
        merges (`Sequence[tuple[str, str]]`): pairs of pieces to merge, by priority.

    Returns:
        `tuple` of all pieces in the spelling of the codes, those of `symbols` first, and the `Tokenizer`.
    """
    pieces = [*symbols[: len(FAIRSEQ_SPECIAL)], *map(piece_of, symbols[len(FAIRSEQ_SPECIAL) :])]
    pieces = list(dict.fromkeys([*pieces, *(piece for a, b in merges for piece in (a, b, a + b))]))
    tokenizer = Tokenizer(models.BPE(ids_of(pieces), list(merges), unk_token=UNK, end_of_word_suffix=ENDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=ENDS)
    return pieces, tokenizer


def piece_of(symbol: str) -> str:
    """Spells a symbol of the dictionary as in the codes: `lo@@` -> `lo`, `low` -> `low</w>`."""
    stem = symbol.removesuffix(CONTINUES)
    return stem if stem and stem != symbol else symbol + ENDS


def symbol_of(piece: str) -> str:
    """Spells a piece of the codes as in the dictionary: `lo` -> `lo@@`, `low</w>` -> `low`."""
    return piece.removesuffix(ENDS) if piece.endswith(ENDS) else piece + CONTINUES


def read_codes(file: Path) -> list[tuple[str, str]]:
    """
    Reads the merges of subword-nmt (`lo w</w>`) or of fastBPE, which adds counts. The first of equal merges counts.

    Raises:
        ValueError: A line is in neither format, or in that of subword-nmt 0.1.
    """
    merges: dict[tuple[str, str], None] = {}
    for number, line in enumerate(read_lines(file), start=1):
        line = line.strip("\r\n ")
        if number == 1 and line.startswith("#version:"):
            version = line.removeprefix("#version:").strip()
            if version != "0.2":
                raise ValueError(f"{file} has codes of version {version}, but only 0.2 is supported.")
            continue
        match line.split(" "):
            case [""]:
                continue
            case [_, end] | [_, end, _] if end == ENDS:
                raise ValueError(
                    f"{file}, line {number}: {line!r} is a code of version 0.1, but only 0.2 is supported."
                )
            case [a, b]:
                merges[a, b] = None
            case [a, b, count] if count.isdecimal():
                merges[a, b] = None
            case _:
                raise ValueError(f"{file}, line {number}: expected two pieces to merge, but found {line!r}.")
    if not merges:
        raise ValueError(f"{file} contains no pieces to merge.")
    return list(merges)
