"""Models, target languages and lines of text, as several verbs read them."""

import gzip
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

from hf_vaswani import processes
from hf_vaswani.cli import inputs, main, serve
from hf_vaswani.cli.main import _parser
from hf_vaswani.data.tokenizer import add_tags, train_tokenizer
from hf_vaswani.model.sentences_vaswani import TIMES, LanguageTags, length_groups
from hf_vaswani.translation import alignment, batches, quantization
from hf_vaswani.translation import lines as translation

from .conftest import translate


def test_a_target_language_prepends_its_tag(tiny_run, monkeypatch, capsys) -> None:
    seen = []
    monkeypatch.setattr(
        translation, "translate_corpus", lambda model, tokenizer, lines, _: seen.extend(lines) or lines
    )
    arguments = ["--model", str(tiny_run / "model"), "--target-language", "de"]
    # A bilingual model needs no tag.
    code, _, error = translate(monkeypatch, capsys, b"one\n", *arguments[:3], "fr")
    assert (code, seen) == (2, []) and "The model translates into de, but --target-language is 'fr'" in error
    assert translate(monkeypatch, capsys, b"one\n", *arguments)[0] == 0
    assert seen.pop() == "one"
    from hf_vaswani.data import tokenizer
    from hf_vaswani.translation import loading

    load = loading.load_translator

    def tagged(name):
        model, loaded = load(name)
        tokenizer.add_tags(loaded, ["<2de>"])
        return model, loaded

    monkeypatch.setattr(loading, "load_translator", tagged)
    assert translate(monkeypatch, capsys, b"one\n\ntwo\n", *arguments)[0] == 0
    assert seen == ["<2de> one", "", "<2de> two"]
    # Its only language.
    assert translate(monkeypatch, capsys, b"one\n\ntwo\n", *arguments[:2])[0] == 0
    assert seen[3:] == ["<2de> one", "", "<2de> two"]
    seen.clear()
    seen += [""] * 3
    assert translate(monkeypatch, capsys, b"<2de> one\n", *arguments[:2])[0] == 0
    assert seen[3:] == ["<2de> one"]
    assert translate(monkeypatch, capsys, b"<2de> one\n", *arguments)[0] == 0
    assert seen[4:] == ["<2de> one"]


def test_models_with_different_vocabularies_are_refused(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    model, other = str(tiny_run / "model"), tmp_path / "other"
    text = b"one two three\nnine\n"
    _, expected, _ = translate(monkeypatch, capsys, text, "--model", model)
    code, out, _ = translate(monkeypatch, capsys, text, "--model", model, "--model", model)
    assert (code, out) == (0, expected)
    AutoModelForSeq2SeqLM.from_pretrained(model).save_pretrained(other)
    train_tokenizer(["other words"], 280).save_pretrained(other)  # fewer entries than the embedding has rows
    code, out, error = translate(monkeypatch, capsys, text, "--model", model, "--model", str(other))
    assert (code, out) == (2, "") and f"{model} and {other} have different vocabularies" in error


def test_int8_quantizes_the_model(tiny_run, monkeypatch, capsys) -> None:
    seen = []
    monkeypatch.setattr(quantization, "to_int8", lambda model: seen.append(model) or model)
    arguments = ("--model", str(tiny_run / "model"))
    code, out, _ = translate(monkeypatch, capsys, b"one two\n", *arguments, "--int8")
    assert code == 0 and len(seen) == 1
    assert out == translate(monkeypatch, capsys, b"one two\n", *arguments)[1]


def test_greedy_search_warns_about_nothing(tiny_run, monkeypatch, capsys, caplog) -> None:
    transformers_logging.enable_propagation()
    try:
        code, _, err = translate(monkeypatch, capsys, b"one\n", "--model", str(tiny_run / "model"), "--num-beams", "1")
    finally:
        transformers_logging.disable_propagation()
    assert code == 0 and "length_penalty" not in err + caplog.text


def test_compressed_text_is_read(tiny_run, texts, capsys) -> None:
    folder, _ = texts
    (folder / "a.txt.gz").write_bytes(gzip.compress((folder / "a.txt").read_bytes()))
    model, seen = ["--model", str(tiny_run / "model")], []
    for name in ("a.txt", "a.txt.gz"):
        text = str(folder / name)
        assert main(["translate", *model, text]) == 0
        assert main(["score", *model, text, text]) == 0
        seen.append(capsys.readouterr().out.replace(".gz", "").split())
    assert seen[0] == seen[1]
    (folder / "a.txt.gz").write_bytes((folder / "a.txt.gz").read_bytes()[:-9])
    assert main(["translate", *model, str(folder / "a.txt.gz")]) == 2
    assert "a.txt.gz cannot be read as gz" in capsys.readouterr().err


def test_a_line_without_end_is_refused(tiny_run, monkeypatch, capsys) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE", 2**20)
    assert main(["translate", "/dev/zero", "--model", str(tiny_run / "model")]) == 2
    assert "/dev/zero, line 1, is longer than 1,048,576 bytes" in capsys.readouterr().err


def test_tags_are_prepended_or_expected() -> None:
    tokenizer = train_tokenizer(["one two"], 20, kind="characters")
    lines = ["one", "", " \t", "<2de> two"]
    tags = LanguageTags(tokenizer, option="--target-language", is_required=True)
    assert list(inputs.LoadedModels([], None, tags).tagged(lines, "file")) == lines
    add_tags(tokenizer, ["<2de>", "<2fr>"])
    found = list(inputs.LoadedModels([], None, tags, "de").tagged(lines, "file"))
    assert found == ["<2de> one", "", " \t", "<2de> two"]
    tagged = inputs.LoadedModels([], None, tags).tagged([" <2fr> one", "", "two"], "file")
    assert [next(tagged), next(tagged)] == [" <2fr> one", ""]
    with pytest.raises(ValueError, match="file, line 3: .* choose one by --target-language, or put one of <2de>, <2f"):
        next(tagged)
    with pytest.raises(ValueError, match="file, line 1: The target language is 'de', but the text begins with <2fr>"):
        list(inputs.LoadedModels([], None, tags, "de").tagged(["<2fr> one"], "file"))


def test_the_language_of_translations_is_known_if_it_is_one() -> None:
    tokenizer = train_tokenizer(["one two"], 20, kind="characters")
    add_tags(tokenizer, ["<2de>", "<2zh>"])
    pairs = SimpleNamespace(language_pairs=[["en", "de"], ["en", "zh"]])
    for config, language, lines, expected in (
        (pairs, None, ["<2zh> one", "", " <2zh> two"], "zh"),
        (pairs, None, ["<2zh> one", "<2de> two"], None),
        (pairs, "de", ["<2de> one"], "de"),
        (pairs, None, [""], None),
        (SimpleNamespace(language_pairs=[["en", "zh"], ["de", "zh"]]), None, ["one"], "zh"),
        (None, None, ["one"], None),
    ):
        models = inputs.LoadedModels([], None, LanguageTags(tokenizer, config), language)
        assert models.target_of(lines) == expected


def test_a_model_computes_with_the_processors_of_the_process(tiny_run, monkeypatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for processors, expected in ((4, 3), (2, 2)):
            monkeypatch.setattr("hf_vaswani.processes.processors", lambda found=processors: found)
            inputs.load_models([str(tiny_run / "model")], None)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


# ---- Devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "asked", "engine", "int8", "expected"),
    [
        (None, "auto", "torch", False, "cpu"),
        (None, "cpu", "ctranslate2", False, "cpu"),
        ("cuda", "auto", "torch", False, "cuda"),
        ("cuda", "auto", "torch", True, "cpu"),
        ("cuda", "auto", "ctranslate2", False, "cuda"),
        ("cuda", "cuda:1", "ctranslate2", False, "cuda:1"),
        ("cuda", "cuda", "auto", False, "cuda"),
        ("cuda", "cpu", "torch", True, "cpu"),
        ("mps", "auto", "ctranslate2", False, "cpu"),
        ("mps", "mps", "torch", False, "mps"),
        ("xpu", "xpu:1", "auto", False, "xpu:1"),
    ],
)
def test_auto_is_the_accelerator_or_the_cpu_for_what_computes_there_alone(
    accelerators, caplog, kind, asked, engine, int8, expected
) -> None:
    pytest.importorskip("ctranslate2", reason="the extra `convert` is not installed")
    accelerators(kind, 2)
    caplog.set_level(logging.INFO)
    assert str(inputs.choose_device(asked, engine, int8)) == expected
    # What leaves an accelerator idle is said.
    is_said = f"computes on the CPU alone here: the {kind} of this machine is not used" in caplog.text
    assert is_said == (asked == "auto" and kind is not None and expected == "cpu")


@pytest.mark.parametrize(
    ("asked", "options", "expected"),
    [
        ("auto", {}, "cuda:1"),
        ("cuda", {}, "cuda:1"),
        ("auto", {"int8": True}, "cpu"),
        ("cpu", {}, "cpu"),
        ("cuda:0", {}, None),
    ],
)
def test_each_process_of_a_launch_has_its_device(accelerators, monkeypatch, asked, options, expected) -> None:
    accelerators("cuda", 2)
    monkeypatch.setattr(processes, "_devices", [torch.device("cuda:1")])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if expected is not None:
        assert str(inputs.choose_device(asked, **options)) == expected
        return
    with pytest.raises(ValueError, match=r"--device is cuda:0, but 2 processes were launched, .*: give cuda\."):
        inputs.choose_device(asked)


def test_launches_on_the_cpu_leave_the_accelerator_alone(accelerators, monkeypatch) -> None:
    accelerators("cuda", 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert str(inputs.choose_device("auto")) == "cpu" and str(inputs.choose_device("cuda:1")) == "cuda:1"


@pytest.mark.parametrize(
    ("kind", "asked", "more", "words"),
    [
        (None, "cuda", {}, "--device is 'cuda', but torch finds cpu on this machine"),
        (None, "gpu", {}, "--device is 'gpu', but torch finds cpu"),
        (None, "", {}, "--device is '', but"),
        (None, "meta", {}, "--device is 'meta', but"),
        ("cuda", "cuda:2", {}, "--device is 'cuda:2', but torch finds cpu, cuda, cuda:0, cuda:1 on"),
        ("mps", "cuda", {}, "torch finds cpu, mps, mps:0, mps:1 on"),
        ("cuda", "cuda:1", {"int8": True}, "--device is cuda:1, but --int8 computes on the CPU alone here"),
        ("mps", "mps", {"engine": "ctranslate2"}, "--device is mps, but --engine ctranslate2 computes on the CPU"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(accelerators, kind, asked, more, words) -> None:
    pytest.importorskip("ctranslate2", reason="the extra `convert` is not installed")
    accelerators(kind, 2)
    with pytest.raises(ValueError, match=re.escape(words)):
        inputs.choose_device(asked, **more)


def test_models_are_where_the_device_says(tiny_run, accelerators) -> None:
    # A device without memory stands for an accelerator.
    accelerators("meta")
    name = str(tiny_run / "model")
    for asked, expected in (("auto", "meta"), ("meta", "meta"), ("cpu", "cpu")):
        (model,) = inputs.load_models([name], None, inputs.choose_device(asked)).models
        assert model.device.type == expected
    assert inputs.load_models([name], None).models[0].device.type == "meta"


@pytest.mark.parametrize(
    ("more", "found", "expected"),
    [
        (["--engine", "ctranslate2"], "engine", "cpu"),
        (["--engine", "auto"], "engine", "cpu"),
        (["--engine", "auto"], None, "meta"),
        (["--engine", "ctranslate2", "--alignment"], "engine", "meta"),
        (["--engine", "ctranslate2", "--markup", "html"], "engine", "meta"),
    ],
    ids=str,
)
def test_where_an_engine_translates_torch_takes_no_memory(
    tiny_run, accelerators, monkeypatch, more, found, expected
) -> None:
    """Unless torch reads alignments there, or translates nevertheless."""
    from hf_vaswani.conversion import engines

    accelerators("meta")
    asked = []
    monkeypatch.setattr(engines, "is_on_cpu", lambda _: False)

    def choose(options, models, *_):
        asked.append((options.device.type, options.tokens_per_batch, models[0].device.type))
        return found

    monkeypatch.setattr(engines, "choose_engine", choose)
    command = ["translate", "--model", str(tiny_run / "model"), "--tokens-per-batch", "9", *more]
    translators = inputs.load_translators(_parser().parse_args(command))
    assert asked == [("meta", 9, "cpu")] and translators.engine == found
    assert translators.models[0].device.type == expected and translators.device.type == "meta"


def test_every_verb_that_loads_a_model_to_compute_has_a_device() -> None:
    verbs = _parser()._subparsers._group_actions[0].choices.items()
    options = {name: set(verb._option_string_actions) for name, verb in verbs}
    assert all("--device" in known for known in options.values() if "--model" in known)
    assert "--device" in options["serve"] & options["demo"] & options["translate"]


def test_a_server_leaves_the_model_where_its_engine_computes(accelerators, monkeypatch) -> None:
    pytest.importorskip("ctranslate2", reason="the extra `convert` is not installed")
    accelerators("mps")
    asked: list[Any] = []
    monkeypatch.setattr(serve, "load_models", lambda names, tag, device: asked.append(str(device)) or {}[device])
    for engine, device in (("torch", "auto"), ("ctranslate2", "auto"), ("torch", "cpu")):
        options = _parser().parse_args(["serve", "--model", "a/b", "--engine", engine, "--device", device])
        with pytest.raises(KeyError):
            serve.make_app(options)
    assert asked == ["mps", "cpu", "cpu"]


def test_device_and_budget_stand_anywhere_among_the_keys_of_a_recipe() -> None:
    keys = ["a.yaml", "--seed", "2", "--data.train_files={en: a b, de: c}", "--training.trackers+", "x"]

    def take(*words: str) -> tuple[Any, ...]:
        options, others = inputs.take_device(words, "hf-vaswani distill")
        return options.device, options.tokens_per_batch, others

    for place in range(len(keys) + 1):
        if place not in (2, 5):
            assert take(*keys[:place], "--device", "cuda:1", *keys[place:]) == ("cuda:1", None, keys)
            assert take(*keys[:place], "--tokens-per-batch", "9", *keys[place:]) == ("auto", 9, keys)
    assert take(*keys) == ("auto", None, keys)
    assert take("--device=cpu", "--tokens-per-batch=5", *keys) == ("cpu", 5, keys)
    with pytest.raises(ValueError, match="--tokens-per-batch must be at least 1, but it is 0"):
        take("--tokens-per-batch", "0")


# ---- Budgets -----------------------------------------------------------------------------------------------------


def test_every_verb_that_makes_batches_takes_their_size() -> None:
    verbs = _parser()._subparsers._group_actions[0].choices.items()
    options = {name: set(verb._option_string_actions) for name, verb in verbs}
    found = {name for name, known in options.items() if "--tokens-per-batch" in known}
    assert found == {"translate", "evaluate", "score", "align", "serve"}
    # A page for one text at a time has no batches; other verbs read theirs among the keys of a recipe.
    assert {name for name, known in options.items() if "--model" in known} - found == {"demo", "explore"}


@pytest.mark.parametrize(
    ("verb", "module", "expected"),
    [
        (["translate"], batches, 77),
        (["translate", "--n-best", "2"], batches, 77),
        (["translate", "--alignment"], alignment, 77 * 1024),
        (["evaluate", "--data"], batches, 77),
        (["score"], batches, 77),
        (["align"], alignment, 77 * 1024),
        (["align", "--layer", "0"], alignment, 77 * 1024),
    ],
    ids=str,
)
def test_the_size_of_batches_is_the_one_that_is_given(
    tiny_run, files, monkeypatch, capsys, verb, module, expected
) -> None:
    asked = []

    def spy(lengths: list[int], most: int, *limits: int) -> list[list[int]]:
        asked.append(most)
        return length_groups(lengths, most, *limits)

    monkeypatch.setattr(module, "length_groups", spy)
    texts = files[:1] if verb[0] == "translate" else files
    command = [*verb, *texts, "--model", str(tiny_run / "model")]
    assert main([*command, "--tokens-per-batch", "77"]) == 0
    assert set(asked) == {expected}
    asked.clear()
    assert main(command) == 0
    assert set(asked) == {4096 * expected // 77}
    assert main([*command, "--tokens-per-batch", "0"]) == 2
    assert "--tokens-per-batch must be at least 1, but it is 0" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["translate", "evaluate", "score", "align"])
def test_a_device_for_larger_batches_takes_more_lines_at_a_time(tiny_run, files, monkeypatch, capsys, verb) -> None:
    monkeypatch.setattr(translation, "LINES_AT_A_TIME", 1)
    monkeypatch.setattr(inputs, "PAIRS_AT_A_TIME", 1)
    of_text = verb in ("translate", "evaluate")
    module, name = (translation, "translate_corpus") if of_text else (batches, "log_probabilities")
    if verb == "align":
        module, name = alignment, "alignments"
    compute, counts = getattr(module, name), []

    def spy(model, tokenizer, sources, *more, **settings):
        counts.append(len(sources))
        return compute(model, tokenizer, sources, *more, **settings)

    monkeypatch.setattr(module, name, spy)
    command = [verb, *(["--data"] if verb == "evaluate" else []), *files[: 1 if verb == "translate" else 2]]
    for times, expected in ((1, [1, 1, 1]), (2, [2, 1])):
        monkeypatch.setitem(TIMES, "cpu", times)
        counts.clear()
        assert main([*command, "--model", str(tiny_run / "model")]) == 0
        assert counts == expected
