"""Conversion between formats: recognizes a model, writes it in another format, and compares both sides."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..files import atomic_folder
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..translation.batches import translate_corpus
from ..translation.loading import check_finite, load_translator, quiet
from . import TARGETS, fairseq, marian, marian_npz
from .formats import (
    Converted,
    Foreign,
    Loaded,
    Logits,
    Source,
    Target,
    model_type,
)
from .settings import start_token_id

logger = logging.getLogger(__name__)

# Formats that can be read, with the files by which they are recognized.
SOURCES: dict[str, tuple[Source, str]] = {
    "marian": (marian, "a config.json with the model_type marian"),
    "marian-npz": (marian_npz, "an .npz file"),
    "fairseq": (fairseq, "a fairseq .pt file beside dict.*.txt"),
}
# Files of the formats that can be written but not read.
WRITE_ONLY = {
    "encoder.onnx": "an ONNX graph",
    "onnx/encoder_model.onnx": "a graph for transformers.js",
    "model.bin": "a CTranslate2 model",
}
SENTENCE = "The cat sleeps."
# Rounding explains smaller differences between logits; larger ones mean that the models differ.
TOLERANCE = 1e-3


def recognize(source: Path) -> str:
    """
    Recognizes the format of a model.

    Args:
        source (`Path`): model folder or file.

    Returns:
        `str`: `"vaswani"`, or a key of `SOURCES`.

    Raises:
        ValueError: The format is unknown (the message lists what was looked for), or `config.json` is damaged.
    """
    if model_type(source) == "vaswani" and any(source.glob("*.safetensors")):
        return "vaswani"
    for name, (module, _) in SOURCES.items():
        if module.recognize(source):
            return name
    for file, content in WRITE_ONLY.items():
        if (source / file).is_file():
            raise ValueError(f"{source} contains {file}, {content}: this format can be written but not read.")
    signs = ["a config.json with the model_type vaswani beside *.safetensors", *(sign for _, sign in SOURCES.values())]
    found = "" if model_type(source) is None else f"; the model_type in its config.json is {model_type(source)!r}"
    raise ValueError(f"The format of {source} is unknown; looked for: {', '.join(signs)}{found}.")


def convert(
    source: Path,
    destination: Path,
    to: str,
    quantization: str | None = None,
    force: bool = False,
    sentence: str = SENTENCE,
) -> list[str]:
    """
    Writes a model in another format, and compares the result with the original.

    Args:
        source (`Path`): model folder or file in a format that can be read.
        destination (`Path`): folder to write; nothing of it remains after a failure.
        to (`str`): one of `TARGETS`.
        quantization (`str`, *optional*): number format of the weights; only for CTranslate2.
        force (`bool`): True to replace an existing folder.
        sentence (`str`): sentence that both sides translate for comparison.

    Returns:
        `list[str]`: lines of a report: the comparison, and the known differences.

    Raises:
        ValueError: The source cannot be read or expressed in the other format, both sides compute different logits
            or translations, or the destination exists.
        ImportError: The library of the other format is not installed.
    """
    if to not in TARGETS:
        raise ValueError(f"Unknown format {to!r}: use one of {', '.join(TARGETS)}.")
    _check_destination(destination, source, force)
    kind = recognize(source)
    if kind == to:
        raise ValueError(f"{source} is already in the format {to}.")
    # A missing library or an unsupported number format is reported before the model is read.
    target = import_target(to)
    if quantization is not None:
        supported = () if target is None else target.QUANTIZATIONS
        if not supported:
            raise ValueError(f"--quantization {quantization} is only supported with --to ctranslate2.")
        if quantization not in supported:
            raise ValueError(f"--quantization must be one of {', '.join(supported)}, but it is {quantization!r}.")
    with quiet(), _as_value_error(source), TemporaryDirectory() as temporary:
        # The source is read before anything is written, because errors of `atomic_folder` name the destination.
        if kind == "vaswani":
            converted, loaded = None, _load(source)
        else:
            converted = SOURCES[kind][0].load(source)
            check_finite(converted.model, source)
        with atomic_folder(destination) as folder:
            lines = []
            if converted is not None:
                loaded = _save(converted, folder if target is None else Path(temporary))
                lines += _compare(loaded, converted.foreign, sentence)
            if target is not None:
                lines += _compare(loaded, target.save(loaded, folder, quantization), sentence)
    return lines


def import_target(to: str) -> Target | None:
    """Imports the module that writes a format, whose library may be missing; `None` for `"vaswani"`."""
    match to:
        case "marian":
            return marian
        case "ctranslate2":
            from . import ctranslate2

            return ctranslate2
        case "onnx":
            from . import onnx

            return onnx
        case "transformers.js":
            from . import transformersjs

            return transformersjs
    return None


def _load(folder: Path) -> Loaded:
    """Loads a Vaswani model in float32."""
    return Loaded(*load_translator(folder, torch.float32), folder)


def _save(converted: Converted, folder: Path) -> Loaded:
    """Saves a model and loads it again: the files are compared with the original, not the model in memory."""
    converted.model.save_pretrained(folder)
    converted.tokenizer.save_pretrained(folder)
    return _load(folder)


def _check_destination(destination: Path, source: Path, force: bool) -> None:
    """Rejects a destination that must not or cannot be replaced."""
    if destination.name in ("", ".."):
        raise ValueError(f"{str(destination)!r} does not name a new folder: give the path of a folder inside it.")
    if destination.exists() and not force:
        raise ValueError(f"{destination} already exists: use --force to replace it.")
    if source.resolve().is_relative_to(destination.resolve()):
        raise ValueError(f"{destination} would replace the source, {source}.")
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ValueError(f"{destination} exists and is not a folder, so it cannot be replaced.")


@contextmanager
def _as_value_error(source: Path) -> Iterator[None]:
    """Turns unexpected errors into a `ValueError`: bad values in a foreign file can cause any of them."""
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        logger.debug("Traceback:", exc_info=True)
        raise ValueError(f"{source} cannot be converted: {type(error).__name__}: {error}") from error


def _compare(loaded: Loaded, foreign: Foreign, sentence: str) -> list[str]:
    """Compares the logits of a random batch and the translations of one sentence; returns lines of the report."""
    lines = []
    if foreign.logits is not None:
        difference = largest_difference(loaded.model, foreign.logits)
        if not foreign.is_rounded and not difference < TOLERANCE:
            raise ValueError(
                f"{foreign.name} and the Vaswani model compute different logits: they differ by {difference:.2g}, "
                f"but rounding explains at most {TOLERANCE:g}. Nothing was written."
            )
        lines.append(f"Largest difference of the logits, {foreign.name}: {difference:.1e}")
    else:
        lines.append(foreign.compared or f"The logits are not compared, because {foreign.name} cannot run here.")
    lines.append(sentence)
    try:
        translation = translate_corpus(loaded.model, loaded.tokenizer, [sentence], num_beams=1, do_sample=False)[0]
        ways = {foreign.name: foreign.translate, f"{foreign.name}, in 8 bits": foreign.in_8_bits}
        others = {name: translate([sentence])[0] for name, translate in ways.items() if translate is not None}
    except (IndexError, RuntimeError, ValueError) as error:
        tokens = len(loaded.tokenizer(sentence)["input_ids"])
        raise ValueError(f"The sentence of {tokens} tokens cannot be translated: {error}") from error
    for name, other in others.items():
        lines.append(f"  {name}: {other}" + ("" if other == translation else "   (differs)"))
    lines.append(f"  Vaswani: {translation}")
    return lines + [f"Note: {note}" for note in foreign.notes]


def largest_difference(model: VaswaniForConditionalGeneration, logits: Logits) -> float:
    """
    Compares the logits of a random batch.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model on the CPU, in evaluation mode.
        logits (`Logits`): computes the logits of the same model in another format.

    Returns:
        `float`: their largest difference; NaN if there is one in either.
    """
    batch = random_batch(model)
    with torch.no_grad():
        ours = model(input_ids=batch[0], attention_mask=batch[1], decoder_input_ids=batch[2]).logits
        theirs = logits(*batch)
    width = min(ours.shape[-1], theirs.shape[-1])
    return (ours[..., :width] - theirs[..., :width]).abs().max().item()


def random_batch(model: VaswaniForConditionalGeneration) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns random source ids of two lengths, their mask, and decoder ids, each of shape `(2, length)`."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    learned = config.position_encoding == "learned"
    pad, length = config.pad_token_id or 0, (2, min(12, config.max_position_embeddings) if learned else 12)
    # No padding inside a sentence: some engines would mask it, others would read it as a token.
    ids = torch.randint(config.vocab_size - 1, length, generator=generator)
    decoder_ids = torch.randint(config.vocab_size - 1, length, generator=generator)
    ids, decoder_ids = ids + (ids >= pad), decoder_ids + (decoder_ids >= pad)
    mask = torch.ones_like(ids)
    ids[1, length[1] // 2 + 1 :], mask[1, length[1] // 2 + 1 :] = pad, 0
    decoder_ids[:, 0] = start_token_id(model.generation_config, config)
    return ids, mask, decoder_ids
