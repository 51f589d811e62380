"""
Back-translation (Sennrich et al., 2016; Edunov et al., 2018): synthetic sources for text in the target language.

The text is translated in blocks of sentences. What is drawn in a block depends on the seed and the block's number
alone, so a stopped work goes on where it was, and any number of processes writes the same pairs.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenizer import backend, find_language_tag
from ..files import atomic_write_text, read_sealed, sealed, temporary_name, tsv_cell
from ..model.sentences_vaswani import language_tags
from ..processes import Processes
from .lines import LineTranslator, OutputFile, skip_lines, write_whole

# Sentences that are sorted by length and translated together, and lost when the work is killed.
BLOCK = 1024


# ---- The model ---------------------------------------------------------------------------------------------------


def check_direction(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source_language: str, target_language: str
) -> str:
    """
    Checks that a model translates in the direction of back-translation.

    Args:
        name (`str`): name of the model in the error message.
        model ([`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): the model. One without `language_pairs`
            in its config is trusted.
        source_language (`str`), target_language (`str`): languages of the pairs to make. The model reads the second
            one and writes the first one.

    Returns:
        `str`: the language tag that its sentences need in front of them; empty if they need none.

    Raises:
        ValueError: the model translates in other directions, or has tags, but not this one.
    """
    pairs = [tuple(pair) for pair in getattr(model.config, "language_pairs", None) or ()]
    if pairs and (target_language, source_language) not in pairs:
        raise ValueError(
            f"backtranslation.model {name} translates {', '.join('-'.join(pair) for pair in pairs)}, but sources for "
            f"text in the target language of data are translations {target_language}-{source_language}: give a model "
            "of this direction."
        )
    return find_language_tag(tokenizer, source_language) if language_tags(tokenizer) else ""


def set_search(
    model: PreTrainedModel,
    method: Literal["sampling", "beam"],
    top_k: int | None = None,
    temperature: float = 1.0,
    num_beams: int = 4,
) -> None:
    """
    Sets how a model translates, in its generation config; its limits of length stay.

    Args:
        model ([`PreTrainedModel`]): changed in place.
        method (`str`): `"sampling"` or `"beam"`.
        top_k (`int`, *optional*), temperature (`float`): of sampling; by default from the whole distribution.
        num_beams (`int`): of beam search.
    """
    settings = model.generation_config
    settings.do_sample = method == "sampling"
    settings.num_beams = 1 if method == "sampling" else num_beams
    # The defaults of transformers would draw from 50 entries only.
    settings.top_k, settings.top_p, settings.temperature = None, None, None
    if method == "sampling":
        settings.top_k, settings.top_p, settings.temperature = top_k or 0, 1.0, temperature
    if settings.num_beams == 1:
        # They have no effect without a beam, and transformers would warn about each.
        settings.length_penalty = settings.early_stopping = None


def model_digest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the SHA-256 of a model's weights and vocabulary, in hexadecimal."""
    found = hashlib.sha256(backend(tokenizer, is_target=False).to_str().encode())
    for name, weight in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(weight.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


class Backtranslator:
    """
    Translates blocks of sentences.

    Args:
        model ([`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): the model, with its search set.
        tag (`str`): language tag to put in front of each sentence, or nothing.
        seed (`int`): seed of the sampling.

    Attributes:
        translator ([`LineTranslator`]): splits and counts sentences that are too long.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tag: str, seed: int) -> None:
        self.translator = LineTranslator([model], tokenizer)
        self.tag = tag
        self.seed = seed

    def __call__(self, block: int, sentences: list[str]) -> list[str]:
        """Returns the translation of each sentence of the block with this number, on one line and without tabs."""
        torch.manual_seed(random.Random(f"{self.seed} {block}").getrandbits(63))
        found = self.translator([f"{self.tag} {sentence}" if self.tag else sentence for sentence in sentences])
        return [tsv_cell(candidates[0][1]).strip() for candidates in found]


def backtranslate(
    processes: Processes, translate: Backtranslator, sentences: Iterable[str], done: int, output: "PairsFile"
) -> Iterator[int]:
    """
    Translates sentences and writes the pairs. All processes call this together, and each takes whole blocks.

    Args:
        processes ([`Processes`]): those of the launch.
        translate ([`Backtranslator`]): translates the blocks of this process.
        sentences (`Iterable[str]`): all the text; read in process 0 only.
        done (`int`): pairs that are written already, in whole blocks.
        output ([`PairsFile`]): where process 0 writes the others.

    Yields:
        `int`: the number of pairs that were just written.
    """
    for chunk in processes.chunks(skip_lines(iter(sentences), done), BLOCK):
        i = processes.process_index
        part = translate(done // BLOCK + i, chunk[i * BLOCK : (i + 1) * BLOCK])
        sources = [source for part in processes.gather(part) for source in part]
        if processes.is_main_process:
            output.write(zip(sources, chunk, strict=True))
        done += len(chunk)
        yield len(chunk)


def sentences_of(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that are not blank, as they fit in a cell of a TSV file."""
    texts = (tsv_cell(line).strip() for line in lines)
    return (text for text in texts if text)


# ---- The pairs ---------------------------------------------------------------------------------------------------


class PairsFile:
    """
    A TSV file of pairs that grows under a temporary name beside its own, which it gets when it is complete. A record
    of the settings, `NAME.json`, is written first and stays.

    Args:
        path (`Path`): the file.
        languages (`tuple[str, str]`): language codes of source and target, its header.
        settings (`dict[str, Any]`): everything that the pairs depend on; JSON-serializable.
    """

    def __init__(self, path: Path, languages: tuple[str, str], settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.header = "\t".join(languages) + "\n"
        self.partial, self.record = temporary_name(path), path.with_name(f"{path.name}.json")

    def begin(self) -> int | None:
        """
        Begins the file, or cuts off the end of an unfinished one that is not a whole block.

        Returns:
            `int`: pairs that it has already, or `None` if it is complete.

        Raises:
            ValueError: it has pairs of other settings, or what is there cannot be judged.
            OSError: it cannot be written.
        """
        begun = [path for path in (self.path, self.partial) if path.exists()]
        if begun:
            self._check_record(begun[0])
        if self.path in begun:
            return None
        if not begun:
            atomic_write_text(self.record, json.dumps(sealed(self.settings), indent=2, ensure_ascii=False) + "\n")
        done, length = self._whole_blocks() if begun else (0, 0)
        with self.partial.open("rb+" if begun else "xb") as file:
            file.truncate(length)
            if not length:
                file.write(self.header.encode())
        return done

    def _check_record(self, begun: Path) -> None:
        advice = f"Name another backtranslation.output, or delete {begun}."
        if not self.record.is_file():
            raise ValueError(f"{begun} exists already, without the record of its settings, {self.record}. {advice}")
        recorded = read_sealed(self.record)
        different = [key for key in {**recorded, **self.settings} if recorded.get(key) != self.settings.get(key)]
        if different:
            then, now = ({key: of.get(key) for key in different} for of in (recorded, self.settings))
            changes = ", ".join(f"{key} was {then[key]!r} and is {now[key]!r}" for key in different)
            raise ValueError(f"{begun} has pairs of other settings: {changes}. {advice}")

    def _whole_blocks(self) -> tuple[int, int]:
        """Counts the pairs of the whole blocks in the unfinished file, and the bytes up to their end."""
        lines = length = whole = 0
        with self.partial.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                is_right = line.count(b"\t") == 1 if lines else line == self.header.encode()
                if not is_right:
                    raise ValueError(f"{self.partial}, line {lines + 1}, is damaged: delete this file to start over.")
                length += len(line)
                # The first line is the header.
                if lines % BLOCK == 0:
                    whole = length
                lines += 1
        return max(lines - 1, 0) // BLOCK * BLOCK, whole

    def write(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Appends pairs, and leaves whole lines."""
        with OutputFile(self.partial, "the same command continues after them") as file:
            write_whole(file, "".join(f"{source}\t{target}\n" for source, target in pairs))

    def finish(self) -> None:
        """Gives the file its name."""
        with self.partial.open("rb+") as file:
            os.fsync(file.fileno())
        self.partial.replace(self.path)

    def count(self) -> tuple[int, int]:
        """Counts the pairs of the complete file, and those of them whose source is empty."""
        pairs = empty = 0
        with self.path.open("rb") as file:
            next(file)
            for line in file:
                pairs, empty = pairs + 1, empty + line.startswith(b"\t")
        return pairs, empty
