"""One verb for all formats: recognises a model, writes it in another format, and compares both sides."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..files import atomic_folder
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..translation.batches import translate_corpus
from ..translation.loading import check_finite, check_settings, load_translator, quiet
from .protocol import Foreign, model_type
from .settings import rules_left_behind, start_token_id

logger = logging.getLogger(__name__)

# What comes in: the format, where its `recognize` and `load` are, and what is looked for.
SOURCES = {
    "marian": ("marian", "a config.json with the model_type marian"),
    "marian-npz": ("marian_npz", "an .npz file"),
    "fairseq": ("fairseq", "a .pt file of fairseq beside dict.*.txt"),
}
TARGETS = ("vaswani", "marian", "ctranslate2", "onnx")
# What is in the folders of the formats that are not read.
WRITTEN_ONLY = {"encoder.onnx": "an ONNX graph", "model.bin": "a model of CTranslate2"}
SENTENCE = "A dog runs through the garden."
# Logits that differ by more are not those of the same model.
TOLERANCE = 1e-3


def recognize(source: Path) -> str:
    """
    The format of a model.

    Args:
        source (`Path`): a folder or a file.

    Returns:
        `str`: `"vaswani"`, or a key of `SOURCES`.

    Raises:
        ValueError: it is none of them; says what was looked for. Or its config.json is damaged.
    """
    if not source.exists():
        raise ValueError(f"There is no {source}.")
    if model_type(source) == "vaswani" and any(source.glob("*.safetensors")):
        return "vaswani"
    for name, (module, _) in SOURCES.items():
        if import_module(f".{module}", __package__).recognize(source):
            return name
    if (source / "model" / "config.json").is_file():
        raise ValueError(f"{source} is the folder of a run: give its model, {source / 'model'}.")
    for file, what in WRITTEN_ONLY.items():
        if (source / file).is_file():
            raise ValueError(f"{source} has {file}, which is {what}: that is only written, and not read.")
    signs = ["a config.json with the model_type vaswani beside *.safetensors", *(sign for _, sign in SOURCES.values())]
    found = "" if model_type(source) is None else f"; the model_type of its config.json is {model_type(source)!r}"
    raise ValueError(f"The format of {source} is not known; looked for: {', '.join(signs)}{found}.")


def convert(
    source: Path,
    destination: Path,
    to: str,
    quantization: str | None = None,
    force: bool = False,
    sentence: str = SENTENCE,
) -> list[str]:
    """
    Writes a model in another format, and compares it with what it was.

    Args:
        source (`Path`): a folder or file of a known format.
        destination (`Path`): the folder to write; nothing is left of it if anything fails.
        to (`str`): one of `TARGETS`.
        quantization (`str`, *optional*): number format of the weights, for CTranslate2.
        force (`bool`): whether a folder that exists is replaced.
        sentence (`str`): what both sides translate in the end.

    Returns:
        `list[str]`: lines that say what was compared, and what is not the same on the other side.

    Raises:
        ValueError: the source cannot be read or expressed in the other format, or the two do not compute the same; or
            the destination exists.
        ImportError: the other format's library is not installed.
    """
    if to not in TARGETS:
        raise ValueError(f"There is no format {to!r}; there are {', '.join(TARGETS)}.")
    if quantization is not None and to != "ctranslate2":
        raise ValueError(f"A quantization ({quantization}) is of ctranslate2, and not of {to}.")
    _check_destination(destination, source, force)
    kind = recognize(source)
    if kind == to:
        raise ValueError(f"{source} is of the format {to} already.")
    # Without its library, or the kind of numbers, nothing is read first.
    module: Any = import_module(f".{to}", __package__) if to != "vaswani" else None
    if quantization is not None:
        module.check_quantization(quantization)
    if kind in ("vaswani", "marian"):
        check_settings(source)
    with quiet(), _said_in_one_sentence(source), TemporaryDirectory() as between:
        # Read before anything is written, so that what is wrong with the source is not laid to the destination.
        if kind == "vaswani":
            came, ours = None, source
            model, tokenizer = load_translator(source, torch.float32)
        else:
            came, ours = import_module(f".{SOURCES[kind][0]}", __package__).load(source), Path(between)
            check_finite(came.model, source)
        with atomic_folder(destination) as folder:
            if came is not None:
                ours = folder if to == "vaswani" else ours
                came.model.save_pretrained(ours)
                came.tokenizer.save_pretrained(ours)
                # The files are compared, and not the model in memory.
                model, tokenizer = load_translator(ours, torch.float32)
            lines = _check(model, tokenizer, came.foreign, sentence) if came is not None else []
            if module is not None:
                foreign = {
                    "marian": lambda: module.save(model, tokenizer, folder),
                    "ctranslate2": lambda: module.save(ours, folder, quantization),
                    "onnx": lambda: module.save(ours, folder),
                }[to]()
                lines += _check(model, tokenizer, foreign, sentence)
                if to != "marian":
                    left = rules_left_behind(model.generation_config, module.KNOWN_RULES)
                    lines += [f"Note: {note}" for note in left]
    return lines


def _check_destination(destination: Path, source: Path, force: bool) -> None:
    """Refuses what is there and is not to be replaced, or cannot be."""
    if destination.name in ("", ".."):
        raise ValueError(
            f"{str(destination)!r} has no name of its own, which the new folder needs: name a folder in it."
        )
    if destination.exists() and not force:
        raise ValueError(f"{destination} exists already; --force replaces it.")
    if source.resolve().is_relative_to(destination.resolve()):
        raise ValueError(f"{destination} would replace {source}, which is to be read.")
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ValueError(f"{destination} is there, and is not a folder that could be replaced.")


@contextmanager
def _said_in_one_sentence(source: Path) -> Iterator[None]:
    """What is wrong with values of somebody else's files can show as any error."""
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        logger.debug("Where it happened:", exc_info=True)
        raise ValueError(f"{source} cannot be converted: {type(error).__name__}: {error}") from error


def _check(model: VaswaniForConditionalGeneration, tokenizer: Any, foreign: Foreign, sentence: str) -> list[str]:
    """Both sides compute the logits of a random batch, and translate one sentence."""
    lines = []
    if foreign.logits is not None:
        batch = random_batch(model)
        with torch.no_grad():
            ours = model(input_ids=batch[0], attention_mask=batch[1], decoder_input_ids=batch[2]).logits
            theirs = foreign.logits(*batch)
        width = min(ours.shape[-1], theirs.shape[-1])
        difference = (ours[..., :width] - theirs[..., :width]).abs().max().item()
        if not foreign.is_rounded and not difference < TOLERANCE:
            raise ValueError(
                f"{foreign.name} and the Vaswani model do not compute the same: their logits differ by "
                f"{difference:.2g}, and {TOLERANCE:g} is the most that rounding explains. Nothing was written."
            )
        lines.append(f"Largest difference of the logits, {foreign.name}: {difference:.1e}")
    else:
        lines.append(f"The logits are not compared: {foreign.name} does not tell them here.")
    lines.append(sentence)
    try:
        translation = translate_corpus(model, tokenizer, [sentence], num_beams=1, do_sample=False)[0]
        other = None if foreign.translate is None else foreign.translate([sentence])[0]
    except (IndexError, RuntimeError, ValueError) as error:
        tokens = len(tokenizer(sentence)["input_ids"])
        raise ValueError(f"The sentence of {tokens} tokens cannot be translated: {error}") from error
    if other is not None:
        lines.append(f"  {foreign.name}: {other}" + ("" if other == translation else "   (another one)"))
    lines.append(f"  Vaswani: {translation}")
    return lines + [f"Note: {note}" for note in foreign.notes]


def random_batch(model: VaswaniForConditionalGeneration) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source ids of two lengths, their mask, and decoder ids, each of shape `(2, length)`."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    learned = config.position_encoding == "learned"
    pad, length = config.pad_token_id or 0, (2, min(12, config.max_position_embeddings) if learned else 12)
    # Padding inside of a sentence would be a mask to some, and a token to others.
    ids = torch.randint(config.vocab_size - 1, length, generator=generator)
    decoder_ids = torch.randint(config.vocab_size - 1, length, generator=generator)
    ids, decoder_ids = ids + (ids >= pad), decoder_ids + (decoder_ids >= pad)
    mask = torch.ones_like(ids)
    ids[1, length[1] // 2 + 1 :], mask[1, length[1] // 2 + 1 :] = pad, 0
    decoder_ids[:, 0] = start_token_id(model.generation_config, config)
    return ids, mask, decoder_ids
