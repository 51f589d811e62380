"""CTranslate2 in place of `generate()`: the same translations, and one conversion of each model."""

import copy
import importlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MarianConfig, MarianMTModel, pipeline

from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.cli import main
from hf_vaswani.conversion import convert as conversion
from hf_vaswani.conversion import engines
from hf_vaswani.conversion.engines import EngineOptions, cached_conversion, choose_engine
from hf_vaswani.conversion.formats import Loaded
from hf_vaswani.files import read_json
from hf_vaswani.model.sentences_vaswani import without_repetition
from hf_vaswani.translation.batches import translate_corpus
from hf_vaswani.translation.lines import LineTranslator
from hf_vaswani.translation.loading import load_translator

pytest.importorskip("ctranslate2")

from hf_vaswani.conversion import ctranslate2
from hf_vaswani.conversion.ctranslate2 import Ctranslate2Translator

from ..conftest import dear
from .test_ctranslate2 import MODELS, random_sentences, save_random

# The rules that CTranslate2 has, too.
SAME_RULES = {"length_penalty_type": "power", "finish_candidates": "top", "early_stopping": True}


def saved(folder: Path, settings: dict | None = None, **fields) -> Path:
    """Writes a random model whose generation config has these settings."""
    model = save_random(folder, **fields)
    model.generation_config.update(**(settings or {}))
    model.save_pretrained(folder)
    return folder


def kept(folder: Path, engine: str = "ctranslate2") -> Path:
    """Returns where the converted model of a folder lies."""
    return engines._place(folder, engine)


def translated(folder: Path, sentences: list[str], engine: str, **options) -> list[list[tuple[float, str]]]:
    """Translates as `hf-vaswani translate` does."""
    model, tokenizer = load_translator(folder)
    choice = EngineOptions(engine, **options)
    chosen = choose_engine(choice, [model], tokenizer, folder)
    assert (chosen is None) == (engine == "torch")
    return LineTranslator([model], tokenizer, choice.n_best, chosen)(sentences)


def equal_texts(ours: list, theirs: list) -> int:
    return sum([text for _, text in one] == [text for _, text in two] for one, two in zip(ours, theirs, strict=True))


GREEDY = {"num_beams": 1}
BEAMS = SAME_RULES | {"num_beams": 4}


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("fields", "settings", "n_best"),
    [
        (MODELS["pre"], {}, None),
        (MODELS["untied"], {}, None),
        *(({}, GREEDY | rule, None) for rule in ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2})),
        ({}, GREEDY | {"min_new_tokens": 6}, None),
        *(({}, GREEDY | rule, None) for rule in ({"bad_words_ids": [[7], [9, 12]]}, {"suppress_tokens": [7, 9, 12]})),
        *(({}, BEAMS | {"length_penalty": alpha}, n_best) for alpha in (0.0, 1.0) for n_best in (None, 3)),
    ],
)
def test_translations_are_torch_s(tmp_path, fields, settings, n_best) -> None:
    folder = saved(tmp_path / "model", settings, **fields)
    sentences = ["", *random_sentences(), "42", "★", "\u200b", "   "]
    ours, theirs = (translated(folder, sentences, engine, n_best=n_best) for engine in ("torch", "ctranslate2"))
    assert [len(candidates) for candidates in theirs] == [n_best or 1] * len(sentences)
    assert [best[0][1] for best in (theirs[0], *theirs[-4:])] == ["", "42", "★", "\u200b", "   "]
    assert equal_texts(ours, theirs) >= len(sentences) - (3 if settings.get("num_beams") == 4 else 1)
    assert len({text for (_, text), *_ in ours}) > 15
    for one, two in zip(ours, theirs, strict=True):
        if equal_texts([one], [two]):
            assert [score for score, _ in two] == pytest.approx([score for score, _ in one], abs=1e-3)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_each_sentence_has_its_own_maximum_length(tmp_path, num_beams) -> None:
    """A model that never ends: the translation of each sentence has the length of its source + 10, without `</s>`."""
    model = save_random(tmp_path / "model", lm_head_bias=True)
    model.lm_head.bias[2] = -1000
    model.generation_config.update(**SAME_RULES, num_beams=num_beams)
    if num_beams == 1:
        model.generation_config.length_penalty = model.generation_config.early_stopping = None
    model.save_pretrained(tmp_path / "model")
    sentences = random_sentences(30)
    ours, theirs = (translated(tmp_path / "model", sentences, engine) for engine in ("torch", "ctranslate2"))
    assert equal_texts(ours, theirs) >= 29
    assert len({len(text.split()) for [(_, text)] in theirs}) > 5


@pytest.mark.parametrize(
    ("settings", "fields", "words"),
    [
        ({"num_beams": 4}, {}, "length_penalty_type='gnmt'; finish_candidates='all'; early_stopping='never'"),
        (
            BEAMS | {"early_stopping": None},
            {},
            "early_stopping=False. Use engine=torch, or its closest settings with ",
        ),
        ({"encoder_no_repeat_ngram_size": 2}, {}, "encoder_no_repeat_ngram_size=2. Use engine=torch"),
        # CTranslate2 changes logits, where transformers changes log-probabilities.
        (BEAMS | {"repetition_penalty": 1.5}, {}, "repetition_penalty=1.5. Use engine=torch, or its closest"),
        (
            {},
            {"activation_function": "mish"},
            'The model has activation_function "mish", but CTranslate2 supports only',
        ),
    ],
)
def test_what_an_engine_cannot_do_is_an_error_or_torch(tmp_path, caplog, settings, fields, words) -> None:
    folder = saved(tmp_path / "model", settings, **fields)
    with pytest.raises(ValueError, match=words):
        translated(folder, [], "ctranslate2")
    assert is_left_to_torch(folder, caplog) and words.split(". Use")[0] in caplog.text
    assert not kept(folder).exists()


def is_left_to_torch(folder: Path, caplog, count: int = 1) -> bool:
    """Returns whether `auto` takes torch, and says so."""
    model, tokenizer = load_translator(folder)
    with caplog.at_level(logging.INFO, "hf_vaswani"):
        chosen = choose_engine(EngineOptions("auto"), [model] * count, tokenizer, folder)
    return chosen is None and "Engine: torch. " in caplog.text


def test_auto_takes_ctranslate2_where_it_is_exact(tmp_path, caplog, monkeypatch) -> None:
    folder, sentences = saved(tmp_path / "model"), random_sentences(10)
    with caplog.at_level(logging.INFO, "hf_vaswani"):
        found = translated(folder, sentences, "auto")
    assert "Engine: CTranslate2 " in caplog.text and ", float32, cpu, " in caplog.text
    assert equal_texts(found, translated(folder, sentences, "torch")) >= 9
    assert is_left_to_torch(folder, caplog, 2)
    monkeypatch.setitem(sys.modules, "hf_vaswani.conversion.ctranslate2", None)
    monkeypatch.delattr("hf_vaswani.conversion.ctranslate2")
    assert is_left_to_torch(folder, caplog)
    with pytest.raises(ImportError, match="ctranslate2"):
        translated(folder, [], "ctranslate2")


def test_approximate_takes_the_closest_rules(tmp_path) -> None:
    folder, sentences = saved(tmp_path / "model", {"num_beams": 4}), random_sentences()
    ours = translated(folder, sentences, "torch")
    theirs = translated(folder, sentences, "ctranslate2", approximate=True)
    assert equal_texts(ours, theirs) >= len(sentences) // 2
    with pytest.raises(ValueError, match="Use engine=torch, or its closest settings with approximate"):
        translator(folder, engine="ctranslate2")("one")
    pipe = translator(folder, engine="ctranslate2", approximate=True)
    expected = ([text for _, text in candidates] for candidates in theirs)
    assert texts_of(pipe(sentences)) == list(map(without_repetition, sentences, expected))
    with pytest.raises(ValueError, match="encoder_no_repeat_ngram_size=2"):
        translated(saved(tmp_path / "other", {"encoder_no_repeat_ngram_size": 2}), [], "ctranslate2", approximate=True)


def test_a_model_in_half_precision_is_computed_in_float32(tmp_path) -> None:
    """Whether its files are in half precision, or only the model of a pipeline, whose conversion others read."""
    model = save_random(tmp_path / "half")
    model.bfloat16().save_pretrained(tmp_path / "half")
    folder, sentences = saved(tmp_path / "model"), random_sentences()
    rounded, tokenizer = load_translator(folder)
    expected = [translated(folder, sentences, "torch")]
    pipe = pipeline("translation", model=rounded.bfloat16(), tokenizer=tokenizer, engine="ctranslate2")
    assert pipe("one", num_beams=1)
    expected.append([[(0.0, text)] for text in translate_corpus(model.float(), tokenizer, sentences)])
    for path, theirs in zip((folder, tmp_path / "half"), expected, strict=True):
        assert equal_texts(translated(path, sentences, "ctranslate2"), theirs) >= len(sentences) - 1


# ---- The converted model -----------------------------------------------------------------------------------------


def test_a_model_is_converted_once_for_all_number_formats(tmp_path, monkeypatch, caplog) -> None:
    folder, sentences, compared = saved(tmp_path / "model", d_model=64, d_ff=128), random_sentences(), []
    largest_difference = conversion.largest_difference
    monkeypatch.setattr(
        conversion, "largest_difference", lambda *each: compared.append(each) or largest_difference(*each)
    )
    with caplog.at_level(logging.INFO, "hf_vaswani"):
        kinds = ("float32", "float32", "int8_float32")
        first, again, rounded = (translated(folder, sentences, "ctranslate2", compute_type=kind) for kind in kinds)
    said = [record.message for record in caplog.records if record.message.startswith("Engine:")]
    assert [message.split(", ")[1] for message in said] == list(kinds)
    assert first == again and len(sentences) // 3 < equal_texts(first, rounded)
    assert "converted anew" not in caplog.text and caplog.text.count("Converted for CTranslate2 in ") == 1
    assert len(compared) == 1


@pytest.mark.parametrize("part", ["the model", "the tokenizer", "the start", "the library", "a record of 0.1"])
def test_what_has_changed_is_converted_anew(tmp_path, caplog, part) -> None:
    folder = saved(tmp_path / "model")
    model, tokenizer = load_translator(folder)

    def converted(version: str = "1") -> str:
        loaded = Loaded(model, tokenizer, folder)
        place = cached_conversion(loaded, "some", version, lambda to: (to / "file").write_text(version))
        return (place / "file").read_text()

    assert converted() == converted() == "1" and "converted anew" not in caplog.text
    match part:
        case "the model":
            saved(folder, seed=1)
        case "the tokenizer":
            tokenizer.add_tokens(["more"])
        case "the start":
            model.generation_config.decoder_start_token_id = 9
        case "a record of 0.1":
            (kept(folder, "some") / "engine.json").write_text('{"library": "1", "compared": true, "files": {}}')
    assert converted("2" if part == "the library" else "1") == ("2" if part == "the library" else "1")
    said = f"{kept(folder, 'some')} is converted anew, because the model, its tokenizer or the library has changed."
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [said]


@pytest.mark.parametrize("file", ["model.bin", "engine.json", "config.json", "."])
def test_a_damaged_conversion_is_written_anew(tmp_path, caplog, file) -> None:
    folder, sentences = saved(tmp_path / "model"), random_sentences(5)
    first = translated(folder, sentences, "ctranslate2")
    path = kept(folder) / file
    if file == ".":
        shutil.rmtree(path)
        path.touch()
    else:
        path.write_bytes(path.read_bytes()[:-7] + b"damaged")
    assert translated(folder, sentences, "ctranslate2") == first
    assert caplog.text.count("is converted anew, because") == 1 and str(path) in caplog.text


def test_the_folder_of_a_model_stays_as_it_is(tmp_path, monkeypatch, caplog) -> None:
    """People copy and upload it. What earlier versions left there is not read."""
    folder, sentences = saved(tmp_path / "model"), random_sentences(5)
    expected = translated(folder, sentences, "torch")
    (folder / ".engines" / "ctranslate2").mkdir(parents=True)
    (folder / ".engines" / "ctranslate2" / "engine.json").write_text("{}")
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(engines, "HF_HOME", str(tmp_path / "cache"))
    assert translated(folder, sentences, "ctranslate2") == expected
    assert sorted(folder.rglob("*")) == before
    assert kept(folder).is_relative_to(tmp_path / "cache") and (kept(folder) / "engine.json").is_file()
    # A prepared model is used where nothing can be written, as in an image of a container.
    monkeypatch.setattr(engines, "FileLock", None)
    assert translated(folder, sentences, "ctranslate2") == expected
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setattr(engines, "HF_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(ValueError, match="converted for CTranslate2 cannot be kept: .* Set HF_HOME to a folder"):
        translated(folder, sentences, "ctranslate2")
    assert is_left_to_torch(folder, caplog)


def test_a_later_process_reads_what_has_changed_alone(tmp_path, monkeypatch, caplog) -> None:
    folder, sentences, read = saved(tmp_path / "model"), random_sentences(), []
    digest, findings = engines.digest, kept(folder).parent / "findings.json"
    monkeypatch.setattr(engines, "digest", lambda path: read.append(path.name) or digest(path))
    first = translated(folder, sentences, "ctranslate2")
    # A file that may still change is read again: only what the process has written itself is known.
    assert {Path(name).parent for name in read_json(findings)} == {kept(folder)}
    monkeypatch.setattr(engines.Findings, "TICK", 0)
    translated(folder, [], "ctranslate2")
    read.clear()
    assert translated(folder, sentences, "ctranslate2") == first and read == []
    findings.write_text("{")
    assert translated(folder, sentences, "ctranslate2") == first and "model.safetensors" in read
    # Other weights, of which only the file system knows that they are new.
    weights, before = folder / "model.safetensors", (folder / "model.safetensors").stat()
    weights.write_bytes((saved(tmp_path / "other", seed=1) / "model.safetensors").read_bytes())
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    expected = translated(folder, sentences, "torch")
    assert equal_texts(translated(folder, sentences, "ctranslate2"), expected) >= len(sentences) - 1
    assert "because the model, its tokenizer or the library has changed" in caplog.text


def test_an_engine_that_computes_something_else_is_refused(tmp_path, monkeypatch, caplog) -> None:
    folder, write = saved(tmp_path / "model", GREEDY), ctranslate2.write

    def write_other(loaded, to):
        other = copy.deepcopy(loaded.model)
        with torch.no_grad():
            other.model.decoder.layers[0].feed_forward.fc2.bias[0] += 0.5
        write(replace(loaded, model=other), to)

    monkeypatch.setattr(ctranslate2, "write", write_other)
    words = "computes other logits than this model: they differ by"
    for translate in (partial(translated, folder, []), partial(translator, folder)):
        with pytest.raises(ValueError, match=f"{words} .* rounding explains at most 0.001. Use engine=torch"):
            translate(engine="ctranslate2")
    assert not kept(folder).exists()
    assert is_left_to_torch(folder, caplog) and f"Engine: torch. CTranslate2 {words}" in caplog.text


# ---- Devices


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("cuda:1", 2, ("cuda", 1)), ("cuda", 1, ("cuda", 0)), ("cuda:1", 1, ("cpu", 0)), ("mps", 0, ("cpu", 0))],
)
def test_ctranslate2_computes_on_the_device_of_the_model(tmp_path, monkeypatch, device, gpus, expected) -> None:
    """Or on the processor, if it does not have the device."""
    library, found = importlib.import_module("ctranslate2"), []
    model, tokenizer = load_translator(saved(tmp_path / "model"))
    monkeypatch.setattr(type(model), "device", torch.device(device))
    monkeypatch.setattr(engines, "cached_conversion", lambda *_: tmp_path)
    monkeypatch.setattr(library, "get_cuda_device_count", lambda: gpus)
    monkeypatch.setattr(library, "get_supported_compute_types", lambda _: {"float32"})

    def opened(_, device, device_index, **__):
        found.append((device, device_index))
        return SimpleNamespace(compute_type="float32")

    monkeypatch.setattr(library, "Translator", opened)
    assert choose_engine(EngineOptions("ctranslate2"), [model], tokenizer, tmp_path)
    assert found == [expected]
    # Torch has the device, and is as fast there.
    is_on_gpu = choose_engine(EngineOptions("auto"), [model], tokenizer, tmp_path) is not None
    assert is_on_gpu == (expected[0] == "cuda")
    # Where torch has its model is another matter.
    found.clear()
    monkeypatch.setattr(type(model), "device", torch.device("cpu"))
    place = torch.device(device)
    assert choose_engine(EngineOptions("ctranslate2", device=place), [model], tokenizer, tmp_path)
    is_on_gpu = choose_engine(EngineOptions("auto", device=place), [model], tokenizer, tmp_path) is not None
    assert found[0] == expected and is_on_gpu == (expected[0] == "cuda")


@pytest.mark.parametrize("given", [None, 7])
def test_batches_of_an_engine_have_the_size_that_is_given(tmp_path, monkeypatch, given) -> None:
    library, sizes = importlib.import_module("ctranslate2"), []
    model, tokenizer = load_translator(saved(tmp_path / "model"))

    def translate_batch(_, sources, max_batch_size, **__):
        sizes.append(max_batch_size)
        return [SimpleNamespace(result=lambda: SimpleNamespace(hypotheses=[[]], scores=[0.0]))] * len(sources)

    translator = SimpleNamespace(compute_type="float32", translate_batch=partial(translate_batch, None))
    monkeypatch.setattr(engines, "cached_conversion", lambda *_: tmp_path)
    monkeypatch.setattr(library, "Translator", lambda *_, **__: translator)
    options = EngineOptions("ctranslate2", approximate=True, tokens_per_batch=given)
    translate = choose_engine(options, [model], tokenizer, tmp_path)
    assert translate is not None and len(translate(["ba be bi"] * 5000)) == 5000
    assert set(sizes) == {4096 if given is None else 7}


def convert_slowly(folder: Path, log: Path) -> None:
    def write(to: Path) -> None:
        with open(log, "a", encoding="utf-8") as file:
            file.write("written\n")
        (to / "file").write_text("content")

    loaded = Loaded(*load_translator(folder), folder)
    assert (cached_conversion(loaded, "some", "1", write) / "file").read_text() == "content"


@pytest.mark.process
def test_several_processes_convert_once(tmp_path) -> None:
    folder = saved(tmp_path / "model")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=convert_slowly, args=(folder, tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 3
    assert (tmp_path / "log").read_text() == "written\n"


# ---- The pipeline


def translator(folder: Path, **options) -> Any:
    return pipeline("translation", model=str(folder), **options)


def texts_of(found: list) -> list[list[str]]:
    return [[each["translation_text"] for each in (row if isinstance(row, list) else [row])] for row in found]


@pytest.mark.parametrize("engine", ["ctranslate2", dear("auto")])
def test_a_pipeline_generates_what_torch_generates(tmp_path, engine) -> None:
    folder, sentences = saved(tmp_path / "model", {"num_beams": 1, "max_length_offset": 5}), random_sentences()
    sentences[3] = " "
    ours, theirs = translator(folder), translator(folder, engine=engine)
    assert ours.engine is None and theirs.engine is not None
    for settings in ({}, {"max_new_tokens": 4}, BEAMS | {"num_return_sequences": 3}):
        expected, found = ours(sentences, batch_size=8, **settings), theirs(sentences, batch_size=8, **settings)
        assert found[3] == expected[3] and " " in texts_of(found)[3]
        assert [len(row) for row in texts_of(found)] == [settings.get("num_return_sequences", 1)] * len(sentences)
        assert sum(one == two for one, two in zip(expected, found, strict=True)) >= len(sentences) - 3
    ids = [pipe("one two", return_tensors=True)[0]["translation_token_ids"].tolist() for pipe in (ours, theirs)]
    assert ids[0] == ids[1]
    assert ours("one two. nine", split_sentences=True) == theirs("one two. nine", split_sentences=True)


def test_a_translation_that_is_cut_ends_as_torch_s_does(tmp_path) -> None:
    folder, sentences = saved(tmp_path / "model", {"num_beams": 1, "forced_eos_token_id": 2}), random_sentences()
    settings = {"max_new_tokens": 4, "batch_size": 8, "return_tensors": True}
    pipe = translator(folder, engine="ctranslate2")
    ours, theirs = translator(folder)(sentences, **settings), pipe(sentences, **settings)
    expected, found = ([row["translation_token_ids"].tolist() for row in rows] for rows in (ours, theirs))
    assert all(2 in row for row in found) and any(row[-1] == 2 and len(row) == 5 for row in found)
    assert sum(one == two for one, two in zip(expected, found, strict=True)) >= len(sentences) - 2
    # There is room for the end alone, or for nothing.
    assert pipe("one", max_new_tokens=1, return_tensors=True)[0]["translation_token_ids"].tolist()[1:] == [2]
    with pytest.raises(ValueError, match="max_length must be at least 2"):
        pipe("one", max_length=1)


@pytest.fixture(scope="module")
def translators(tmp_path_factory) -> list[VaswaniTranslationPipeline]:
    settings = {"length_penalty_type": "power", "finish_candidates": "top", "num_beams": 1}
    folder = saved(tmp_path_factory.mktemp("translators") / "model", settings)
    return [translator(folder, engine=name) for name in ("ctranslate2", "auto", "torch")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"do_sample": True}, "do_sample=True"),
        ({"streamer": "streamer"}, "streamer"),
        ({"sequence_bias": {(5,): 2.0}}, "sequence_bias="),
        (SAME_RULES | {"num_beams": 2, "repetition_penalty": 1.5}, "repetition_penalty=1.5"),
    ],
)
def test_a_call_that_an_engine_cannot_take_is_an_error_or_torch(translators, caplog, settings, words) -> None:
    named, left_open, torch_alone = translators
    settings = settings | ({"streamer": Ends()} if "streamer" in settings else {})
    with pytest.raises(ValueError, match=f"CTranslate2 cannot translate with .*{re.escape(words)}") as error:
        named("one two three", **settings)
    assert "engine=torch" in str(error.value)
    with caplog.at_level(logging.INFO, "hf_vaswani"):
        torch.manual_seed(1)
        found = [left_open("one two three", **settings) for _ in range(2)]
        torch.manual_seed(1)
        assert found == [torch_alone("one two three", **settings) for _ in range(2)]
    assert caplog.text.count("Engine: torch. CTranslate2 cannot translate with") == 1, "said once"


def test_a_source_beyond_the_positions_is_an_error_or_torch(tmp_path) -> None:
    folder = saved(tmp_path / "model", {"num_beams": 1, "max_new_tokens": 3})
    model, tokenizer = load_translator(folder)
    tokenizer.model_max_length = 4096
    text = " ".join(random_sentences(1)[0].split()[:1] * 2100)
    named, left_open, torch_alone = (
        VaswaniTranslationPipeline(model, tokenizer, engine=name, longest_sentence=4096)
        for name in ("ctranslate2", "auto", "torch")
    )
    with pytest.raises(ValueError, match="CTranslate2 has 2,048 positions, too few for a source of 2,10"):
        named(text)
    assert left_open(text) == torch_alone(text)


class Ends:
    """A streamer that does nothing."""

    def put(self, value) -> None: ...

    def end(self) -> None: ...


def test_a_model_that_has_changed_is_refused(tmp_path, caplog) -> None:
    folder = saved(tmp_path / "model")
    model, tokenizer = load_translator(folder)
    with torch.no_grad():
        model.model.decoder.layers[0].self_attn.q_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"q_proj\.weight has changed, and an engine .* Save"):
        pipeline("translation", model=model, tokenizer=tokenizer, engine="ctranslate2")
    with caplog.at_level(logging.INFO, "hf_vaswani"):
        assert pipeline("translation", model=model, tokenizer=tokenizer, engine="auto").engine is None
    assert "Engine: torch. The model is no longer what" in caplog.text
    # In another number format it is the same model.
    model, tokenizer = load_translator(folder)
    assert pipeline("translation", model=model.bfloat16(), tokenizer=tokenizer, engine="ctranslate2").engine


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "fast"}, "engine must be one of auto, torch, ctranslate2, but it is 'fast'"),
        ({"engine": "onnx"}, "engine=onnx is no longer there: use engine=ctranslate2, which is faster"),
        ({"compute_type": "int8"}, "compute_type needs engine=ctranslate2 or engine=auto, but engine is torch"),
        ({"engine": "ctranslate2", "compute_type": "int3"}, "compute_type int3 is not supported by the CPU"),
        ({"engine": "ctranslate2", "autocast": "bfloat16"}, "autocast is for torch, but engine is 'ctranslate2'"),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence(tmp_path, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        translator(saved(tmp_path / "model"), **options)


@pytest.mark.parametrize(
    "option", [("engine", "ctranslate2"), ("shortlist", True), ("markup", "html"), ("autocast", "auto")]
)
def test_a_copy_of_the_pipeline_needs_the_package(tmp_path, monkeypatch, option) -> None:
    monkeypatch.setattr(VaswaniTranslationPipeline, "at_home", None)
    words = f"^{option[0]}={option[1]!r} needs the package hf_vaswani: install it, and import"
    with pytest.raises(ValueError, match=words):
        translator(saved(tmp_path / "model"), **dict([option]))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"engine": "ctranslate2"}, "a MarianMTModel, which hf-vaswani convert turns into a Vaswani model"),
        ({"markup": "html"}, "Alignments need a Vaswani model that translates, but this is a MarianMTModel"),
    ],
)
def test_models_of_other_classes_are_refused(tmp_path, option, words) -> None:
    tokenizer = load_translator(saved(tmp_path / "model"))[1]
    sides = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    marian = MarianMTModel(
        MarianConfig(vocab_size=len(tokenizer), d_model=8, pad_token_id=0, decoder_start_token_id=0, **sides)
    )
    with pytest.raises(ValueError, match=words):
        pipeline("translation", model=marian, tokenizer=tokenizer, **option)("one")


# ---- The command line


def test_translate_and_evaluate_take_the_engine(tmp_path, capsys) -> None:
    folder, text, sentences = saved(tmp_path / "model"), tmp_path / "in.txt", random_sentences(20)
    text.write_text("\n".join(sentences) + "\n")
    arguments = ["--model", str(folder), "--engine", "ctranslate2"]
    assert main(["translate", *arguments, str(text)]) == 0
    expected = [[(0.0, line)] for line in capsys.readouterr().out.splitlines()]
    assert equal_texts(translated(folder, sentences, "torch"), expected) >= 19
    assert main(["evaluate", *arguments, "--data", str(text), str(text), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == 20
    for options, words in (
        (["--int8"], "--int8 is for torch, but --engine is ctranslate2"),
        (["--num-beams", "4"], "CTranslate2 cannot translate with length_penalty_type='gnmt'"),
    ):
        assert main(["translate", *arguments, str(text), *options]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(("shared", "batches"), [(0.6, 1), (0.9, 4), dear(20.0, 4)])
def test_threads_share_a_batch_where_a_sentence_is_faster(tmp_path, monkeypatch, caplog, shared, batches) -> None:
    """On some machines they wait for each other for longer than they work: a sentence takes 30 times as long."""
    folder = saved(tmp_path / "model", SAME_RULES | {"num_beams": 3})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(
        Ctranslate2Translator, "seconds_of_a_sentence", lambda self: 1.0 if self.threads == 4 else shared
    )
    caplog.set_level(logging.INFO)
    found = translator(folder, engine="ctranslate2")
    assert found.engine.translator.threads == found.engine.translator.translator.num_translators == batches
    assert ("that share each batch" in caplog.text) == (batches == 1)
    # It is measured once.
    monkeypatch.setattr(Ctranslate2Translator, "seconds_of_a_sentence", None)
    found = translator(folder, engine="ctranslate2")
    assert found.engine.translator.threads == batches
    sentences = random_sentences()
    assert found(sentences, batch_size=16) == translator(folder)(sentences, batch_size=16)


@pytest.mark.parametrize("options", [["--int8"], ["--engine", "ctranslate2"]])
def test_what_computes_on_the_cpu_alone_leaves_the_model_there(tmp_path, monkeypatch, capsys, options) -> None:
    """On a machine whose accelerator, here one that has no weights, neither of them knows."""
    folder = saved(tmp_path / "model", {"num_beams": 1}, d_model=64, d_ff=2048)
    (tmp_path / "in.txt").write_text("ba be\n")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert main(["translate", "--model", str(folder), str(tmp_path / "in.txt"), *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
