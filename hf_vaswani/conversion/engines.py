"""Engines that translate in place of `generate()`: CTranslate2 and ONNX Runtime, behind `translate` and `evaluate`.

A model is converted once. The result lies in its folder, under `.engines`, or in the cache of Hugging Face if the
model is from the Hub or its folder cannot be written. It is found again by the digests of the model's files.
"""

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE
from transformers import GenerationConfig

from ..files import atomic_folder, digest, find_damage, read_sealed, sealed
from ..model.generation_vaswani import EARLY_STOPPING
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..translation.batches import to_translate
from ..translation.lines import Candidates
from .protocol import Loaded, Translate
from .settings import active_settings, unsupported_settings

logger = logging.getLogger("hf_vaswani")

LIBRARIES = {"ctranslate2": "CTranslate2", "onnx": "ONNX Runtime"}
# Names of the engines in `SETTINGS`.
IN_SETTINGS = {"ctranslate2": "CTranslate2", "onnx": "OnnxTranslator"}
RECORD = "engine.json"
# A folder in the folder of a model, which nothing else reads.
BESIDE = ".engines"


@dataclass(frozen=True)
class EngineOptions:
    """
    Choice of an engine.

    Attributes:
        name (`str`): `"torch"`, `"ctranslate2"`, `"onnx"`, or `"auto"`: CTranslate2 where it searches by exactly the
            model's settings.
        compute_type (`str`, *optional*): number format in which CTranslate2 computes: `"float32"` (default), `"int8"`,
            `"int8_float32"`, `"bfloat16"`, or `"auto"` for the fastest of the machine.
        approximate (`bool`): whether an engine may use the closest settings that it has.
        n_best (`int`, *optional*): size of the n-best lists.
    """

    name: str = "torch"
    compute_type: str | None = None
    approximate: bool = False
    n_best: int | None = None

    def check(self) -> None:
        """Raises a `ValueError` if options contradict each other."""
        for given, option in ((self.compute_type, "--compute-type"), (self.approximate, "--approximate")):
            if given and self.name in ("torch", "onnx"):
                raise ValueError(f"{option} needs --engine ctranslate2, but --engine is {self.name}.")


Engine = Callable[[Sequence[str]], list[Candidates]]


def choose_engine(options: EngineOptions, models: Sequence[Any], tokenizer: Any, folder: Path) -> Engine | None:
    """
    Prepares the engine that translates in place of `generate()`.

    Args:
        options ([`EngineOptions`]): the choice.
        models (`Sequence` of [`PreTrainedModel`]): one model, or an ensemble, with the settings of the search.
        tokenizer ([`PreTrainedTokenizerBase`]): their tokenizer.
        folder (`Path`): folder that the first model was loaded from.

    Returns:
        `Callable`: translates sentences into n-best lists, as [`LineTranslator`] does; `None` for torch.

    Raises:
        ValueError: the engine cannot translate with this model, its settings or the compute type.
        ImportError: its library is not installed.
    """
    options.check()
    if options.name == "torch":
        return None
    is_auto = options.name == "auto"
    name = "ctranslate2" if is_auto else options.name
    reasons, advice = obstacles(name, models, options.n_best), "Use --engine torch"
    if not reasons and name == "ctranslate2" and not options.approximate:
        reasons = inexact_rules(models[0].generation_config)
        advice = "--approximate takes its closest settings, --engine torch the exact ones"
    why = f"{LIBRARIES[name]} cannot translate with {'; '.join(reasons)}"
    if not reasons:
        try:
            return _prepared(name, options, Loaded(models[0], tokenizer, folder))
        except (ImportError, ValueError) as error:
            if not is_auto:
                raise
            why = str(error).rstrip(".")
    if not is_auto:
        raise ValueError(f"{why}. {advice}.")
    logger.info(f"Engine: torch. {why}.")
    return None


def obstacles(name: str, models: Sequence[Any], n_best: int | None) -> list[str]:
    """Returns what an engine lacks for models, their settings and n-best lists, in words that follow "with"."""
    if len(models) > 1:
        return [f"an ensemble of {len(models)} models"]
    model = models[0]
    if type(model) is not VaswaniForConditionalGeneration:
        return [f"a {type(model).__name__}, which hf-vaswani convert turns into a Vaswani model"]
    if name == "ctranslate2" and not _has_device(model.device.type):
        return [f"the {model.device.type} of this machine"]
    settings = model.generation_config
    found = [f"{key}={value!r}" for key, value in unsupported_settings(settings, IN_SETTINGS[name]).items()]
    if name == "onnx":
        found += [f"num_beams={settings.num_beams}"] * ((settings.num_beams or 1) > 1) + ["--n-best"] * bool(n_best)
    return found


def inexact_rules(settings: GenerationConfig) -> list[str]:
    """Returns the rules of beam search that CTranslate2 does not have, as `name=value`."""
    if (settings.num_beams or 1) == 1:
        return []
    rules = active_settings(settings, ("length_penalty_type", "finish_candidates"))
    if settings.length_penalty == 0:
        # Both types then compare log-probabilities.
        rules.pop("length_penalty_type", None)
    early_stopping = settings.early_stopping
    if early_stopping is None:
        early_stopping = EARLY_STOPPING[settings.length_penalty_type]
    if early_stopping is not True:
        rules["early_stopping"] = early_stopping
    return [f"{name}={value!r}" for name, value in rules.items()]


def _has_device(device: str) -> bool:
    """Returns whether CTranslate2 computes on a device; true if it is not installed."""
    if device == "cuda" and find_spec("ctranslate2") is not None:
        import ctranslate2

        return ctranslate2.get_cuda_device_count() > 0
    return device in ("cpu", "cuda")


def _prepared(name: str, options: EngineOptions, loaded: Loaded) -> Engine:
    """Loads an engine with the converted model."""
    if name == "onnx":
        from . import onnx

        def write(to: Path) -> None:
            # The exporter's inputs are on the CPU, and ONNX Runtime computes there.
            model = copy.deepcopy(loaded.model).to("cpu", torch.float32)
            onnx.save(replace(loaded, model=model), to)

        place = kept_conversion(loaded.folder, "onnx", version("onnxruntime"), write)
        translator = onnx.OnnxTranslator(place)
        logger.info(f"Engine: ONNX Runtime {version('onnxruntime')}")
        return lambda sentences: _not_blank(translator.translate, loaded.tokenizer, sentences)
    from . import ctranslate2

    compute_type, device = options.compute_type or "float32", loaded.model.device.type
    ctranslate2.check_compute_type(compute_type, device)
    place = kept_conversion(
        loaded.folder, "ctranslate2", version("ctranslate2"), lambda to: ctranslate2.write(loaded, to)
    )
    threads = torch.get_num_threads() if device == "cpu" else 1
    settings, config = loaded.model.generation_config, loaded.model.config
    engine = ctranslate2.Ctranslate2Translator(
        place, loaded.tokenizer, settings, config, compute_type, threads, device
    )
    kind = engine.translator.compute_type
    logger.info(f"Engine: CTranslate2 {version('ctranslate2')}, {kind}, {device}, {threads} threads")
    return lambda sentences: engine.candidates(sentences, options.n_best)


def _not_blank(translate: Translate, tokenizer: Any, sentences: Sequence[str]) -> list[Candidates]:
    """Translates the sentences that have text; the others have empty translations."""
    chosen, _ = to_translate(tokenizer, sentences)
    found = dict(zip(chosen, translate([sentences[i] for i in chosen]), strict=True))
    return [[(0.0, found.get(i, ""))] for i in range(len(sentences))]


# ---- Converted models --------------------------------------------------------------------------------------------


def kept_conversion(folder: Path, name: str, library: str, write: Callable[[Path], object]) -> Path:
    """
    Returns the folder of a converted model. It is written if it is missing or damaged, or if the model or the library
    have changed since; several processes may ask for it at once.

    Args:
        folder (`Path`): folder of the model.
        name (`str`): name of the engine.
        library (`str`): version of its library.
        write (`Callable`): writes the converted model into an empty folder.

    Raises:
        OSError: it cannot be written.
    """
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".json", ".bin"))
    record = {"model": {file: digest(folder / file) for file in names}, "library": library}
    place = _place(folder, name)
    with FileLock(place.with_name(f".{name}.lock")):
        reason = _reason_to_write(place, record)
        if reason is None:
            return place
        if place.exists():
            logger.warning(f"{place} is converted anew, because {reason}.")
        with atomic_folder(place) as temporary:
            write(temporary)
            files = {path.name: digest(path) for path in sorted(temporary.iterdir())}
            (temporary / RECORD).write_text(json.dumps(sealed(record | {"files": files})), encoding="utf-8")
    return place


def _reason_to_write(place: Path, record: dict[str, Any]) -> str | None:
    """Returns why a converted model cannot be used, as the end of a sentence, or `None`."""
    if not place.exists():
        return "it does not exist"
    try:
        noted = read_sealed(place / RECORD)
    except ValueError as error:
        return str(error).rstrip(".")
    if noted.get("library") != record["library"]:
        return f"it was written for version {noted.get('library')} of the library, not {record['library']}"
    if noted.get("model") != record["model"]:
        return "the model has changed"
    return find_damage(place, noted.get("files", {}))


def _place(folder: Path, name: str) -> Path:
    """Returns where the converted model of a folder lies: beside it if possible."""
    whole = folder.resolve()
    if not whole.is_relative_to(Path(HF_HUB_CACHE).resolve()):
        with suppress(OSError):
            (whole / BESIDE).mkdir(exist_ok=True)
            if os.access(whole / BESIDE, os.W_OK):
                return whole / BESIDE / name
    key = hashlib.sha256(str(whole).encode()).hexdigest()[:16]
    place = Path(HF_HOME) / "hf_vaswani" / "engines" / key / name
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
