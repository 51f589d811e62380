"""fairseq's dictionaries and byte-pair codes as one vocabulary, and as one tokenizer that makes its ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .marian_vocabulary import fast_tokenizer, join, read_spm

CODES = ("bpecodes", "code")
SENTENCEPIECE = "sentencepiece.bpe.model"
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(4)
CONTINUES, ENDS = "@@", "</w>"
# Logits of what fairseq never writes: exp(-64) of the probability of <unk>, which float32 does not see in a sum.
NEVER_WRITTEN = -64.0


@dataclass
class Vocabulary:
    """
    Our ids, and what they are in fairseq.

    Args:
        source (`torch.LongTensor` of shape `(vocab_size,)`): the source dictionary's id.
        target (`torch.LongTensor` of shape `(vocab_size,)`): the target dictionary's id.
        written (`torch.BoolTensor` of shape `(vocab_size,)`): which are symbols of the target, each once.
        notes (`list[str]`): what text there is to be.
    """

    source: torch.Tensor
    target: torch.Tensor
    written: torch.Tensor
    notes: list[str]

    def bias(self) -> torch.Tensor:
        """`(vocab_size,)`: what is added to the logits."""
        return torch.where(self.written, 0.0, NEVER_WRITTEN)

    def from_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids of the target dictionary -> ours, of the same shape."""
        ours = torch.empty(int(self.target.max()) + 1, dtype=torch.long)
        ours[self.target[self.written]] = self.written.nonzero()[:, 0]
        return ours[ids]


def dictionaries(file: Path, settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """
    The symbols of source and target, each in the order of their ids.

    Args:
        file (`Path`): the checkpoint; the dictionaries are beside it.
        settings (`dict`): say which language is which.

    Raises:
        ValueError: there is none, or several that differ, of which nobody says what they are.
    """
    there = {found.name: read_dictionary(found) for found in sorted(file.parent.glob("dict.*.txt"))}
    if not there:
        raise ValueError(f"There is no dict.*.txt in {file.parent}.")
    languages = [settings.get(f"{side}_lang") for side in ("source", "target")]
    wanted = [f"dict.{language}.txt" for language in languages]
    if all(name in there for name in wanted):
        return there[wanted[0]], there[wanted[1]]
    first, *others = there.values()
    if any(other != first for other in others):
        raise ValueError(
            f"{file.parent} has {', '.join(there)}, which differ, but source_lang is {languages[0]!r} and "
            f"target_lang {languages[1]!r} in {file.name}."
        )
    if all(languages) and len(there) == 1 and set(there) & set(wanted):
        missing = next(name for name in wanted if name not in there)
        raise ValueError(f"There is no {missing} in {file.parent}; if the dictionary is a joint one, copy it there.")
    return first, first


def read_dictionary(file: Path) -> list[str]:
    """
    The symbols of a `dict.*.txt`, in the order of their ids, behind the four that fairseq puts first.

    Raises:
        ValueError: a line is not a symbol and its count, or a symbol comes twice.
    """
    symbols = dict.fromkeys(SPECIAL_SYMBOLS)
    for number, line in enumerate(lines_of(file), start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        if not symbol or not count.isdecimal():
            raise ValueError(f"{file}, line {number}: expected a symbol and its count, but found {line!r}.")
        if symbol in symbols:
            raise ValueError(f"{file}, line {number}: {symbol!r} is there twice.")
        symbols[symbol] = None
    return list(symbols)


def lines_of(file: Path) -> list[str]:
    """The lines of a text file; a symbol may have any other of Unicode's line ends in it."""
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 at byte {error.start}.") from error


def vocabulary_and_tokenizer(
    folder: Path, source: Sequence[str], target: Sequence[str]
) -> tuple[Vocabulary, PreTrainedTokenizerFast]:
    """
    One vocabulary for two dictionaries, and what makes its ids of a text: one that Moses has tokenised, or as it is
    where SentencePiece cuts it.

    Args:
        folder (`Path`): where the codes are, if there are any; without, an entry is what stands between spaces.
        source (`Sequence[str]`), target (`Sequence[str]`): symbols, in the order of their ids.

    Raises:
        ValueError: the codes are of a kind that is not supported.
        ImportError: they are SentencePiece's, and the packages that read them are not installed.
    """
    symbols = list(dict.fromkeys([*source, *target]))
    codes = next((folder / name for name in CODES if (folder / name).is_file()), None)
    notes = []
    if codes is not None:
        pieces, tokenizer = bpe(symbols, read_codes(codes))
        more = [spelled(piece) for piece in pieces[len(symbols) :]]
    elif (folder / SENTENCEPIECE).is_file():
        return sentencepiece(folder / SENTENCEPIECE, source, target)
    else:
        more, tokenizer = [], words(symbols)
        if any(symbol.endswith(CONTINUES) for symbol in symbols):
            notes.append(
                f"There are no codes ({', '.join(CODES)}) beside the model: text is to be cut by them already."
            )
    notes.append("The tokenizer reads and writes what fairseq does: text as Moses tokenises it.")
    ids_of_source, ids_of_target = ids_of(source), ids_of(target)
    vocabulary = Vocabulary(
        torch.tensor([ids_of_source.get(symbol, UNK) for symbol in symbols + more]),
        torch.tensor([ids_of_target.get(symbol, UNK) for symbol in symbols + more]),
        torch.tensor([symbol in ids_of_target for symbol in symbols] + [False] * len(more)),
        notes,
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return vocabulary, PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        # The name of a special token in a text is text.
        split_special_tokens=True,
    )


def ids_of(symbols: Iterable[str]) -> dict[str, int]:
    """The id of each symbol: its place."""
    return {symbol: i for i, symbol in enumerate(symbols)}


def sentencepiece(
    file: Path, source: Sequence[str], target: Sequence[str]
) -> tuple[Vocabulary, PreTrainedTokenizerFast]:
    """
    As [`vocabulary_and_tokenizer`], for text as it is; the ids of a target dictionary of its own are all behind those
    of the source.

    Raises:
        ValueError: the file is not whole, or not a unigram model.
        ImportError: the packages that read it are not installed.
    """
    pieces = read_spm(file)
    joint = join(ids_of(source), None if target == source else ids_of(target), pieces, SPECIAL_SYMBOLS, "<unk>")
    in_source, in_target = (rows.masked_fill(rows < 0, UNK) for rows in (joint.source_rows, joint.target_rows))
    settings = {"bos_token": "<s>", "split_special_tokens": True}
    tokenizer = fast_tokenizer(joint, pieces, "<pad>", "</s>", "<unk>", **settings)
    return Vocabulary(in_source, in_target, joint.is_target, []), tokenizer


def words(symbols: Iterable[str]) -> Tokenizer:
    """What stands between spaces is an entry; `@@` at its end says that a word goes on."""
    tokenizer = Tokenizer(models.WordLevel(ids_of(symbols), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence(
        [
            # Puts a space before each entry, because none begins with one.
            decoders.WordPiece(prefix=" ", cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(f"{CONTINUES} |{CONTINUES}$"), ""),
        ]
    )
    return tokenizer


def bpe(symbols: Sequence[str], merges: Sequence[tuple[str, str]]) -> tuple[list[str], Tokenizer]:
    """
    Byte-pair encoding by codes that mark the end of a word (`w</w>`), with the ids of a dictionary that marks where a
    word goes on (`lo@@`).

    Args:
        symbols (`Sequence[str]`): of the dictionary, in the order of their ids.
        merges (`Sequence[tuple[str, str]]`): pairs of pieces, the first to be merged first.

    Returns:
        All pieces in the codes' spelling, those of `symbols` first, and the tokenizer.
    """
    pieces = [*SPECIAL_SYMBOLS, *map(piece_of, symbols[len(SPECIAL_SYMBOLS) :])]
    pieces = list(dict.fromkeys([*pieces, *(piece for a, b in merges for piece in (a, b, a + b))]))
    tokenizer = Tokenizer(models.BPE(ids_of(pieces), list(merges), unk_token="<unk>", end_of_word_suffix=ENDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=ENDS)
    return pieces, tokenizer


def piece_of(symbol: str) -> str:
    """A symbol of a dictionary in the codes' spelling: `lo@@` -> `lo`, `low` -> `low</w>`."""
    stem = symbol.removesuffix(CONTINUES)
    return stem if stem and stem != symbol else symbol + ENDS


def spelled(piece: str) -> str:
    """A piece of the codes in the dictionary's spelling: `lo` -> `lo@@`, `low</w>` -> `low`."""
    return piece.removesuffix(ENDS) if piece.endswith(ENDS) else piece + CONTINUES


def read_codes(file: Path) -> list[tuple[str, str]]:
    """
    The merges of subword-nmt (`lo w</w>`) or of fastBPE, which has counts behind them; of equal ones the first counts.

    Raises:
        ValueError: a line is neither, or they are subword-nmt's of version 0.1.
    """
    lines = lines_of(file)
    first = 0
    if lines[0].startswith("#version:"):
        first = 1
        version = lines[0].removeprefix("#version:").strip()
        if version != "0.2":
            raise ValueError(f"{file}: the codes are of version {version}, but only 0.2 is supported.")
    merges: dict[tuple[str, str], None] = {}
    for number, line in enumerate(lines[first:], start=first + 1):
        match line.strip("\r ").split(" "):
            case [""]:
                continue
            case [_, end] | [_, end, _] if end == ENDS:
                raise ValueError(f"{file}, line {number}: {line!r} is of version 0.1, but only 0.2 is supported.")
            case [a, b]:
                merges[a, b] = None
            case [a, b, count] if count.isdecimal():
                merges[a, b] = None
            case _:
                raise ValueError(f"{file}, line {number}: expected two pieces to merge, but found {line!r}.")
    if not merges:
        raise ValueError(f"{file} has no pieces to merge.")
    return list(merges)
