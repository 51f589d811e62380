"""fairseq's dictionaries and byte-pair codes as one vocabulary, with the tokenizer for it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..data.tokenizer import two_sided
from ..files import read_lines
from .marian_vocabulary import join, read_spm, sentencepiece_tokenizer, target_tokenizer
from .vocabulary import Vocabulary

CODES = ("bpecodes", "code")
SENTENCEPIECE = "sentencepiece.bpe.model"
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(4)
CONTINUES, ENDS = "@@", "</w>"
# Output bias of ids that are never generated. Their embeddings are those of <unk>, so each has exp(-64) times the
# probability of <unk>, which disappears in a float32 sum.
NEVER = -64.0


def dictionaries(file: Path, settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """
    Reads the symbols of source and target, each in the order of their ids.

    Args:
        file (`Path`): checkpoint, with the dictionaries beside it.
        settings (`dict`): settings of the model, with `source_lang` and `target_lang`.

    Raises:
        ValueError: There are no dictionaries, or the settings do not say which of several is which.
    """
    there = {found.name: read_dictionary(found) for found in sorted(file.parent.glob("dict.*.txt"))}
    if not there:
        raise ValueError(f"{file.parent} contains no dict.*.txt.")
    languages = [settings.get(f"{side}_lang") for side in ("source", "target")]
    wanted = [f"dict.{language}.txt" for language in languages]
    if all(name in there for name in wanted):
        return there[wanted[0]], there[wanted[1]]
    first, *others = there.values()
    if any(other != first for other in others):
        raise ValueError(
            f"{file.parent} contains {', '.join(there)}, which differ, but {file.name} has source_lang "
            f"{languages[0]!r} and target_lang {languages[1]!r}."
        )
    if all(languages) and len(there) == 1 and set(there) & set(wanted):
        missing = next(name for name in wanted if name not in there)
        raise ValueError(f"{file.parent} contains no {missing}: if {next(iter(there))} is for both sides, copy it.")
    return first, first


def read_dictionary(file: Path) -> list[str]:
    """
    Reads the symbols of a `dict.*.txt` in the order of their ids, after fairseq's four special symbols.

    Raises:
        ValueError: A line is not a symbol and its count, or a symbol is repeated.
    """
    symbols = dict.fromkeys(SPECIAL_SYMBOLS)
    for number, line in enumerate(read_lines(file), start=1):
        symbol, _, count = line.rstrip().rpartition(" ")
        if not symbol or not count.isdecimal():
            raise ValueError(f"{file}, line {number}: expected a symbol and its count, but found {line.rstrip()!r}.")
        if symbol in symbols:
            raise ValueError(f"{file}, line {number}: the symbol {symbol!r} is repeated.")
        symbols[symbol] = None
    return list(symbols)


def vocabulary_and_tokenizer(
    folder: Path, source: Sequence[str], target: Sequence[str]
) -> tuple[Vocabulary, PreTrainedTokenizerFast, list[str]]:
    """
    Joins two dictionaries, and builds the tokenizer. It takes raw text if the folder contains a SentencePiece model,
    and otherwise text that Moses has tokenized.

    Args:
        folder (`Path`): folder that may contain byte-pair codes or a SentencePiece model. Without them, text is split
            at spaces.
        source (`Sequence[str]`), target (`Sequence[str]`): symbols in the order of their ids.

    Returns:
        `tuple` of the [`Vocabulary`], its [`PreTrainedTokenizerFast`], and notes about the text.

    Raises:
        ValueError: The codes or the SentencePiece model are damaged or not supported.
        ImportError: The packages that read SentencePiece models are not installed.
    """
    symbols = list(dict.fromkeys([*source, *target]))
    codes = next((folder / name for name in CODES if (folder / name).is_file()), None)
    notes = []
    if codes is not None:
        pieces, tokenizer = bpe(symbols, read_codes(codes))
        more = [symbol_of(piece) for piece in pieces[len(symbols) :]]
    elif (folder / SENTENCEPIECE).is_file():
        return *sentencepiece(folder / SENTENCEPIECE, source, target), []
    else:
        more, tokenizer = [], words(symbols)
        if any(symbol.endswith(CONTINUES) for symbol in symbols):
            notes.append(
                f"There are no codes ({' or '.join(CODES)}) beside the model: the tokenizer needs text that is "
                "already split by them."
            )
    notes.append("As in fairseq, the tokenizer reads and writes text as tokenized by Moses.")
    ids_of_source, ids_of_target = ids_of(source), ids_of(target)
    vocabulary = Vocabulary(
        tokens=symbols + more,
        source_rows=torch.tensor([ids_of_source.get(symbol, UNK) for symbol in symbols + more]),
        target_rows=torch.tensor([ids_of_target.get(symbol, UNK) for symbol in symbols + more]),
        is_target=torch.tensor([symbol in ids_of_target for symbol in symbols] + [False] * len(more)),
        never=NEVER,
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        # The name of a special token inside a text is plain text.
        split_special_tokens=True,
    )
    return vocabulary, wrapped, notes


def ids_of(symbols: Iterable[str]) -> dict[str, int]:
    """Returns the id of each symbol, its position."""
    return {symbol: i for i, symbol in enumerate(symbols)}


def sentencepiece(
    file: Path, source: Sequence[str], target: Sequence[str]
) -> tuple[Vocabulary, PreTrainedTokenizerFast]:
    """
    Joins two dictionaries of SentencePiece pieces, and builds a tokenizer for raw text. The ids of a separate target
    dictionary follow those of the source.

    Raises:
        ValueError: The file is damaged or not a unigram model.
        ImportError: The packages that read it are not installed.
    """
    spm = read_spm(file)
    joint = join(ids_of(source), None if target == source else ids_of(target), spm, SPECIAL_SYMBOLS, "<unk>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece_tokenizer(joint, spm, "</s>", "<unk>"),
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        clean_up_tokenization_spaces=False,
        # The name of a special token inside a text is plain text.
        split_special_tokens=True,
    )
    if target != source:
        of_target = target_tokenizer(joint, spm, SPECIAL_SYMBOLS, "</s>", "<unk>")
        tokenizer = two_sided(tokenizer, of_target)
    source_rows, target_rows = (rows.masked_fill(rows < 0, UNK) for rows in (joint.source_rows, joint.target_rows))
    return replace(joint, source_rows=source_rows, target_rows=target_rows, never=NEVER), tokenizer


def words(symbols: Iterable[str]) -> Tokenizer:
    """Builds a tokenizer that splits text at spaces; `@@` at the end of an entry joins it to the next one."""
    tokenizer = Tokenizer(models.WordLevel(ids_of(symbols), unk_token="<unk>"))
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
    pieces = [*SPECIAL_SYMBOLS, *map(piece_of, symbols[len(SPECIAL_SYMBOLS) :])]
    pieces = list(dict.fromkeys([*pieces, *(piece for a, b in merges for piece in (a, b, a + b))]))
    tokenizer = Tokenizer(models.BPE(ids_of(pieces), list(merges), unk_token="<unk>", end_of_word_suffix=ENDS))
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
