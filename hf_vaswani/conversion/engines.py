"""
CTranslate2 in place of `generate()`, behind `translate`, `evaluate`, tables, the server and the pipeline.

A model is converted once, and compared once with what was written. The result lies in the cache of Hugging Face, and
is found again by the path of the model's folder and the digests of its files. A later process reads neither these nor
the conversion as a whole, as long as the file system says that they are the same.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from safetensors import safe_open
from transformers import GenerationConfig

from ..files import atomic_folder, atomic_write_text, digest, read_json
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..model.rules_vaswani import SearchCall
from ..model.sentences_vaswani import evaluation_mode
from ..model_names import resolve_model
from ..translation.lines import Candidates
from ..translation.loading import load_model
from ..translation.placement import PipelineMarkup
from ..translation.quantization import fastest_translation
from ..translation.shortlist import Shortlist
from .formats import Loaded
from .settings import approximated_settings, eos_token_ids, fixed_limit, start_token_id, unsupported_settings

logger = logging.getLogger("hf_vaswani")

ENGINES = ("auto", "torch", "ctranslate2")
# Name of the library, in messages and in `SETTINGS`.
NAME = "CTranslate2"
RECORD = "engine.json"


@dataclass(frozen=True)
class EngineOptions:
    """
    Choice of an engine.

    Attributes:
        name (`str`): `"torch"`, `"ctranslate2"`, or `"auto"`: CTranslate2 where it searches by exactly the model's
            settings.
        compute_type (`str`, *optional*): number format in which CTranslate2 computes: `"float32"` (default), `"int8"`,
            `"int8_float32"`, `"bfloat16"`, or `"auto"` for the fastest of the machine.
        approximate (`bool`): whether an engine may use the closest settings that it has.
        n_best (`int`, *optional*): size of the n-best lists.
        shortlist (`bool`): whether to search among the entries of the model's shortlist alone.
        device (`torch.device`, *optional*): where the engine computes, if it can; by default where the model is.
        tokens_per_batch (`int`, *optional*): token budget of a batch; by default that of the device.
    """

    name: str = "torch"
    compute_type: str | None = None
    approximate: bool = False
    n_best: int | None = None
    shortlist: bool = False
    device: torch.device | None = None
    tokens_per_batch: int | None = None

    def check(self) -> None:
        """Raises a `ValueError` if the engine is unknown, or options contradict each other."""
        if self.name == "onnx":
            raise ValueError(
                "engine=onnx is no longer there: use engine=ctranslate2, which is faster and has beams; hf-vaswani "
                "convert --to onnx still writes the graphs."
            )
        if self.name not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, but it is {self.name!r}.")
        for given, name in ((self.compute_type, "compute_type"), (self.approximate, "approximate")):
            if given and self.name == "torch":
                raise ValueError(f"{name} needs engine=ctranslate2 or engine=auto, but engine is torch.")


class UnsupportedError(ValueError):
    """An engine cannot translate as it should: why, and what to do."""

    def __init__(self, why: str, advice: str = "Use engine=torch") -> None:
        super().__init__(f"{why}. {advice}.")
        self.why = why


Engine = Callable[[Sequence[str]], list[Candidates]]

# The least speedup of a sentence for which threads share a batch: batches are slower then.
WORTHWHILE = 1.3


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

    def prepare() -> Any:
        check_search(options, models, models[0].generation_config)
        return _prepared(options, Loaded(models[0], tokenizer, folder))

    found = _or_torch(options, prepare)
    return None if found is None else lambda sentences: found.candidates(sentences, options.n_best)


def _or_torch(options: EngineOptions, prepare: Callable[[], Any]) -> Any:
    """Returns what `prepare` returns; `None` where torch translates, which may be the way out of an error."""
    options.check()
    if options.name == "torch":
        return None
    try:
        return prepare()
    except (ImportError, ValueError, OSError) as error:
        fall_back_or_raise(options, error)
        return None


def fall_back_or_raise(options: EngineOptions, error: Exception) -> None:
    """Says why torch translates, if that is left open; otherwise raises the error."""
    if options.name != "auto":
        raise error
    logger.info(f"Engine: torch. {getattr(error, 'why', str(error)).rstrip('.')}.")


def check_search(options: EngineOptions, models: Sequence[Any], settings: GenerationConfig) -> None:
    """
    Checks that an engine can translate with a model by exactly its settings, or, if the options allow it, by settings
    that are close to them.

    Args:
        options ([`EngineOptions`]): the engine.
        models (`Sequence` of [`PreTrainedModel`]): one model, or an ensemble.
        settings ([`GenerationConfig`]): settings of the search.

    Raises:
        UnsupportedError: it cannot.
        ValueError: no translation could have a token.
    """
    if fixed_limit(settings) == 0:
        raise ValueError("max_length must be at least 2, for the decoder's start token and another one, but it is 1.")
    check_models(options, models)
    advice, model = "Use engine=torch", models[0]
    found = unsupported_settings(settings, NAME)
    if settings.eos_token_id in (None, []):
        found["eos_token_id"] = None
    start = start_token_id(settings, model.config)
    # The converted model has its own.
    if start != start_token_id(model.generation_config, model.config):
        found["decoder_start_token_id"] = start
    if not found and not options.approximate:
        found = approximated_settings(settings)
        advice += ", or its closest settings with approximate"
    if found:
        reasons = "; ".join(f"{name}={value!r}" for name, value in found.items())
        raise UnsupportedError(f"{NAME} cannot translate with {reasons}", advice)


def check_models(options: EngineOptions, models: Sequence[Any]) -> None:
    """Raises an [`UnsupportedError`] if an engine lacks something for models, whatever the settings."""
    model = models[0]
    device = options.device or model.device
    reason = None
    if len(models) > 1:
        reason = f"an ensemble of {len(models)} models"
    elif type(model) is not VaswaniForConditionalGeneration:
        reason = f"a {type(model).__name__}, which hf-vaswani convert turns into a Vaswani model"
    # An engine that is named computes on the processor instead; where the choice is open, torch has the device.
    elif options.name == "auto" and is_on_cpu(device):
        reason = f"the {device.type} of this machine"
    if reason is not None:
        raise UnsupportedError(f"{NAME} cannot translate with {reason}")


def is_on_cpu(device: torch.device) -> bool:
    """Returns whether CTranslate2 computes on the CPU, because it does not compute on the device of a model."""
    if device.type == "cuda" and find_spec("ctranslate2") is not None:
        import ctranslate2

        return ctranslate2.get_cuda_device_count() <= (device.index or 0)
    return device.type not in ("cpu", "cuda")


def _prepared(options: EngineOptions, loaded: Loaded, single_sentences: bool = False) -> Any:
    """
    Returns the translator of CTranslate2, with the converted model. By default, each thread translates a batch of its
    own; for single sentences, they share one where that is much faster. The device is that of the options or of the
    model, unless the engine computes on the CPU alone.
    """
    from . import ctranslate2

    asked = options.device or loaded.model.device
    is_on_gpu = asked.type == "cuda" and not is_on_cpu(asked)
    device, index = ("cuda", asked.index or 0) if is_on_gpu else ("cpu", 0)
    compute_type = options.compute_type or "float32"
    ctranslate2.check_compute_type(compute_type, device)
    library = f"CTranslate2 {version('ctranslate2')}"
    place = cached_conversion(loaded, "ctranslate2", library, lambda to: _write_compared(loaded, to))
    if options.shortlist and not (place / ctranslate2.VOCABULARY_MAP).is_file():
        raise UnsupportedError(f"{NAME} cannot translate with the shortlist, because an entry has a space")
    threads = torch.get_num_threads() if device == "cpu" else 1
    open_translator = partial(
        ctranslate2.Ctranslate2Translator,
        place,
        loaded,
        compute_type,
        device=device,
        shortlist=options.shortlist,
        device_index=index,
        tokens_per_batch=options.tokens_per_batch,
    )
    speedup = 1.0
    if single_sentences and threads > 1:
        findings = Findings(place.parent)
        key = f"{library}, {compute_type}: speedup of {threads} threads that share a batch"
        if key not in findings.content:
            alone = open_translator(threads=threads).seconds_of_a_sentence()
            shared = open_translator(threads_per_batch=threads).seconds_of_a_sentence()
            findings.content[key] = alone / shared
            findings.save()
        speedup = findings.content[key]
    share = speedup >= WORTHWHILE
    found = open_translator(threads_per_batch=threads) if share else open_translator(threads=threads)
    how = f" that share each batch, which is {speedup:.1f} times as fast for a sentence" if share else ""
    kind, where = found.translator.compute_type, device if device == "cpu" else f"{device}:{index}"
    logger.info(f"Engine: {library}, {kind}, {where}, {threads} threads{how}")
    return found


def _write_compared(loaded: Loaded, folder: Path) -> None:
    """
    Writes the model of the files in float32; the one that is loaded may be on another device or have rounded weights.
    Raises an [`UnsupportedError`] if CTranslate2 computes other logits than this model.
    """
    from . import ctranslate2
    from .convert import TOLERANCE, largest_difference

    model = loaded.model
    if model.dtype != torch.float32 or model.device.type != "cpu":
        model = load_model(loaded.folder, torch.float32)
        model.generation_config = loaded.model.generation_config
    in_float32 = replace(loaded, model=model)
    ctranslate2.write(in_float32, folder)
    written = ctranslate2.Ctranslate2Translator(folder, in_float32, "float32")
    with evaluation_mode(model):
        difference = largest_difference(model, written.logits)
    if not difference < TOLERANCE:
        raise UnsupportedError(
            f"{NAME} computes other logits than this model: they differ by {difference:.2g}, but rounding explains "
            f"at most {TOLERANCE:g}"
        )


# ---- The pipeline ------------------------------------------------------------------------------------------------

# Arguments of `generate()` that are no settings. An engine does without the tokenizer.
ARGUMENTS = (
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "assistant_tokenizer"),
    *("streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate", "ensemble", "shortlist"),
)


def prepare_pipeline(
    pipeline: Any,
    shortlist: bool,
    engine: str,
    compute_type: str | None,
    approximate: bool,
    autocast: str | None,
    markup: str | None,
) -> None:
    """
    Gives a pipeline what the options of its constructor ask for.

    Args:
        pipeline ([`VaswaniText2TextGenerationPipeline`]): the pipeline.
        shortlist, engine, compute_type, approximate, autocast, markup: its options.

    Raises:
        ValueError: an option does not fit the model or another one, or an engine cannot translate with the model.
        ImportError: the library of the engine is not installed.
    """
    model, tokenizer = pipeline.model, pipeline.tokenizer
    if shortlist:
        if model.config.model_type != "vaswani":
            raise ValueError(f"shortlist=True needs a Vaswani model, but it is a {type(model).__name__}.")
        revision = getattr(model.config, "_commit_hash", None)
        entries = Shortlist.load(model.name_or_path, tokenizer, model.config.vocab_size, revision=revision)
        pipeline.torch_settings["shortlist"] = entries
    options = EngineOptions(engine, compute_type, approximate, shortlist=shortlist)
    pipeline.engine = pipeline_engine(model, tokenizer, options)
    if autocast not in (None, "auto", "bfloat16"):
        raise ValueError(f"autocast must be 'auto', 'bfloat16' or None, but it is {autocast!r}.")
    if autocast is not None and engine not in ("torch", "auto"):
        raise ValueError(f"autocast is for torch, but engine is {engine!r}: use compute_type, or leave it out.")
    if autocast == "auto":
        found, _ = fastest_translation(model)
        pipeline.product_dtype = torch.bfloat16 if found == torch.bfloat16 else None
    if markup is not None:
        # Checks the kind; each call makes its own.
        PipelineMarkup(pipeline, markup)


def pipeline_engine(model: Any, tokenizer: Any, options: EngineOptions) -> "PipelineEngine | None":
    """
    Prepares the engine of a pipeline.

    Args:
        model ([`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): the model, with the weights that it was
            loaded with.
        options ([`EngineOptions`]): the choice.

    Returns:
        [`PipelineEngine`], or `None` for torch.

    Raises:
        ValueError: the engine cannot translate with this model or the compute type, or the weights have changed.
        ImportError: its library is not installed.
    """

    def prepare() -> PipelineEngine:
        # The settings of each call are checked then.
        check_models(options, [model])
        folder = resolve_model(model.name_or_path)
        check_unchanged(model, folder)
        return PipelineEngine(options, model, _prepared(options, Loaded(model, tokenizer, folder), True))

    return _or_torch(options, prepare)


def check_unchanged(model: Any, folder: Path) -> None:
    """Raises a `ValueError` if a model has other weights than the files that it was loaded from."""
    weights = model.state_dict()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                there = file.get_tensor(name)
                here = weights.get(name)
                if here is None or not torch.equal(there.to(here.dtype), here.cpu()):
                    raise ValueError(
                        f"The model is no longer what {folder} has: its {name} has changed, and an engine translates "
                        "with the files. Save the model, and load it again."
                    )


class PipelineEngine:
    """
    Generates in place of `model.generate` in a pipeline.

    Args:
        options ([`EngineOptions`]): the engine.
        model ([`VaswaniForConditionalGeneration`]): the model.
        translator ([`Ctranslate2Translator`]): the engine with the converted model.
    """

    def __init__(self, options: EngineOptions, model: Any, translator: Any) -> None:
        self.options, self.model, self.translator = options, model, translator
        self.said: set[str] = set()

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **settings: Any) -> torch.Tensor | None:
        """
        Generates translations.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, source)`), attention_mask (`torch.LongTensor` of shape
                `(batch, source)`): source tokens, and 1 for each that is not padding.
            settings: the other arguments of `generate()`.

        Returns:
            `torch.LongTensor` of shape `(batch * candidates, target)`, as `generate()` returns it, or `None` if the
            engine is left open and cannot search as the settings say.

        Raises:
            ValueError: it cannot, and is not left open.
        """
        # A call with `shortlist=None` does without the pipeline's.
        all_entries = "shortlist" in settings
        given = [name for name in ARGUMENTS if settings.pop(name, None) is not None]
        plain = {name: value for name, value in settings.items() if name not in ("tokenizer", "generation_config")}
        call = settings.get("generation_config")
        with SearchCall():
            config, more = self.model._prepare_generation_config(call, attention_mask=attention_mask, **plain)
        if all(getattr(each, "max_length", None) is None for each in (call, self.model.generation_config)):
            # transformers has filled in a default, over the limits of the sentences.
            config.max_length = plain.get("max_length")
        given += [name for name in more if name != "attention_mask"]
        n_best = config.num_return_sequences if (config.num_return_sequences or 1) > 1 else None
        try:
            if given:
                raise UnsupportedError(f"{NAME} cannot translate with {'; '.join(given)}")
            check_search(self.options, [self.model], config)
            positions, longest = self.translator.positions, int(attention_mask.sum(dim=1).max())
            if longest > positions:
                raise UnsupportedError(
                    f"{NAME} has {positions:,} positions, too few for a source of {longest:,} tokens"
                )
        except UnsupportedError as error:
            if self.options.name != "auto" or error.why not in self.said:
                fall_back_or_raise(self.options, error)
            self.said.add(error.why)
            return None
        rows_of = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
        sources = [[id_ for id_, seen in zip(ids, mask, strict=True) if seen] for ids, mask in rows_of]
        found = self.translator.search(sources, config, n_best, all_entries)
        rows = [row for candidates in found for _, row in candidates]
        ends = eos_token_ids(config)
        if (forced := config.forced_eos_token_id) is not None:
            last = forced if isinstance(forced, int) else forced[0]
            # Engines leave room for it.
            rows = [row if row and row[-1] in ends else [*row, last] for row in rows]
        start = start_token_id(config, self.model.config)
        # Without an id for padding, as `generate()` pads.
        longest, pad = max(map(len, rows)), ends[0] if config.pad_token_id is None else config.pad_token_id
        padded = [[start, *row, *[pad] * (longest - len(row))] for row in rows]
        return torch.tensor(padded, device=input_ids.device)


# ---- Converted models --------------------------------------------------------------------------------------------


def cached_conversion(loaded: Loaded, name: str, library: str, write: Callable[[Path], object]) -> Path:
    """
    Returns the folder of a converted model, which lies in the cache of Hugging Face. It is written if it is missing or
    damaged, or if the model or the library have changed since; several processes may ask for it at once.

    Args:
        loaded ([`Loaded`]): the model.
        name (`str`): name of the engine.
        library (`str`): its library and version.
        write (`Callable`): writes the converted model into an empty folder, and raises an error if it computes
            something else than the model. What it has written is not compared again.

    Raises:
        UnsupportedError: it cannot be written.
    """
    folder = loaded.folder.resolve()
    place = _place(folder, name)
    findings, settings = Findings(place.parent), loaded.model.generation_config
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json", ".bin"))
    # The tokenizer and the first token may be others than those in the folder.
    tokens = [start_token_id(settings, loaded.model.config), settings.eos_token_id]
    parts = [library, [findings.digest(path) for path in files], tokens, sorted(loaded.tokenizer.get_vocab().items())]
    key = hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogatepass")).hexdigest()
    try:
        # It can be used where nothing can be written.
        if reason_to_write(place, key, findings) is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(place.with_name(f".{name}.lock")):
                # Another process may have written it meanwhile.
                if (reason := reason_to_write(place, key, findings)) is not None:
                    if place.exists():
                        logger.warning(f"{place} is converted anew, because {reason}.")
                    _convert(place, key, findings, write)
    except OSError as error:
        why = f"The model converted for {NAME} cannot be kept: {error}"
        raise UnsupportedError(why, "Set HF_HOME to a folder that can be written, or use torch") from error
    findings.save()
    return place


def _convert(place: Path, key: str, findings: "Findings", write: Callable[[Path], object]) -> None:
    """Writes a converted model with its record."""
    start = time.perf_counter()
    with atomic_folder(place) as temporary:
        write(temporary)
        files = {path.name: digest(path) for path in sorted(temporary.iterdir())}
        (temporary / RECORD).write_text(json.dumps({"key": key, "files": files}), encoding="utf-8")
    for file, found in files.items():
        findings.remember(place / file, found)
    logger.info(f"Converted for {NAME} in {time.perf_counter() - start:.1f} s, once: {place}")


def reason_to_write(place: Path, key: str, findings: "Findings") -> str | None:
    """Returns why a converted model cannot be used, as the end of a sentence, or `None`."""
    if not place.exists():
        return "it does not exist"
    try:
        record = read_json(place / RECORD)
    except (ValueError, OSError) as error:
        return str(error).rstrip(".")
    if record.get("key") != key:
        return "the model, its tokenizer or the library has changed"
    for file, sha256 in record["files"].items():
        if not (place / file).is_file() or findings.digest(place / file) != sha256:
            return f"{place / file} is missing or damaged"
    return None


class Findings:
    """
    What earlier processes found out about a model: digests of files, each with what the file system said of the file,
    and how fast threads are.

    Args:
        folder (`Path`): folder of `findings.json`, which keeps them; a missing or damaged file counts as empty.
    """

    # In seconds: a file that is younger may change again within the same tick of a file system's clock.
    TICK = 2

    def __init__(self, folder: Path) -> None:
        self.path = folder / "findings.json"
        self.content: dict[str, Any] = {}
        with suppress(ValueError, OSError):
            self.content = read_json(self.path)
        self.before = dict(self.content)

    def digest(self, path: Path) -> str:
        """Returns the SHA-256 of a file, which is read only if it may have changed."""
        size, *times, inode = _signature(path)
        noted = self.content.get(str(path))
        if noted is not None and noted[:-1] == [size, *times, inode]:
            return noted[-1]
        found = digest(path)
        if time.time_ns() - max(times) > self.TICK * 1e9:
            self.content[str(path)] = [size, *times, inode, found]
        return found

    def remember(self, path: Path, sha256: str) -> None:
        """Notes the SHA-256 of a file that this process has just written."""
        self.content[str(path)] = [*_signature(path), sha256]

    def save(self) -> None:
        """Writes what is new, if that is possible."""
        if self.content != self.before:
            with suppress(OSError):
                atomic_write_text(self.path, json.dumps(self.content))


def _signature(path: Path) -> list[int]:
    """Returns the size of a file, the times when it was changed, and its number: others after each change."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _place(folder: Path, name: str) -> Path:
    """Returns where the converted model of a folder lies: never in the folder, which people copy and upload."""
    key = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return Path(HF_HOME) / "hf_vaswani" / "engines" / key / name
