"""A damaged model folder is refused with an error that names the file, or it translates as before."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from hf_vaswani import files
from hf_vaswani.cli import main
from hf_vaswani.translation import loading
from hf_vaswani.translation.batches import translate_corpus
from hf_vaswani.translation.loading import load_model, load_translator, quiet

from ..conversion.marian_folders import marian_folder, spms  # noqa: F401

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, WEIGHTS = "tokenizer.json", "tokenizer_config.json", "model.safetensors"
FILES = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS)
SENTENCES = ["one two", "nine"]


@pytest.fixture
def folder(tiny_run, tmp_path) -> Path:
    """A copy of the model folder."""
    for file in FILES:
        (tmp_path / "model").mkdir(exist_ok=True)
        shutil.copyfile(tiny_run / "model" / file, tmp_path / "model" / file)
    return tmp_path / "model"


def with_values(**values: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), encoding="utf-8")

    return damage


def with_bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        weights = load_file(path)
        change(weights)
        save_file(weights, path, {"format": "pt"})

    return damage


def without_special_token(path: Path) -> None:
    """The tokenizers library panics on it."""
    content = json.loads(path.read_text("utf-8"))
    del content["post_processor"]["special_tokens"]["</s>"]
    path.write_text(json.dumps(content), encoding="utf-8")


FC1 = "model.encoder.layers.0.feed_forward.fc1.weight"
DAMAGES = [
    *(
        (file, damage, file)
        for file in FILES
        for damage in (half, as_folder, with_bytes(b""), with_bytes(b"\xff\x00"))
    ),
    *((file, with_bytes(b"[]"), file) for file in FILES),
    *((file, with_bytes(b"[" * 100_000), file) for file in FILES),
    *((file, Path.unlink, file) for file in (CONFIG, TOKENIZER, WEIGHTS)),
    (CONFIG, with_bytes(b"{}"), "has the model_type None, which"),
    (CONFIG, with_values(model_type="abc"), "has the model_type 'abc', which"),
    (CONFIG, with_values(d_model="abc"), "config.json cannot be used: .*d_model.*'abc'"),
    (CONFIG, with_values(num_heads=0), "config.json cannot be used: num_heads must be at least 1"),
    (CONFIG, with_values(num_heads=3), "config.json cannot be used: d_model .16. is not divisible"),
    (CONFIG, with_values(activation_function="abc"), "config.json cannot be used: activation_function must be one of"),
    (CONFIG, with_values(layer_norm_eps=float("nan")), "has layer_norm_eps nan, but it must be"),
    (CONFIG, with_values(layer_norm_eps=10**400), "has layer_norm_eps 1000.*\\.\\.\\., but it must"),
    (CONFIG, with_values(d_model=10**9), "has d_model 1000000000, but its weights have only"),
    (CONFIG, with_values(encoder_layers=10**9), "has encoder_layers 1000000000, but its weights"),
    (CONFIG, with_values(encoder_layers=2), r"config.json: 12 missing \(first: model.encoder"),
    (CONFIG, with_values(vocab_size=305), r"1 of another shape \(first: .*, \(300, 16\) in the file"),
    (CONFIG, with_values(dtype="abc"), "cannot be used|cannot be loaded"),
    (CONFIG, with_values(eos_token_id=300), "has the id 300 as eos_token_id"),
    (GENERATION, with_values(num_beams=0), "has num_beams 0, but it must be"),
    (GENERATION, with_values(num_beams="x"), "has num_beams 'x'"),
    (GENERATION, with_values(num_beams=10**12), "has num_beams 1000000000000"),
    (GENERATION, with_values(length_penalty=float("nan")), "has length_penalty n"),
    (GENERATION, with_values(length_penalty=1e30), "has length_penalty 1e.30"),
    (GENERATION, with_values(early_stopping="x"), "has early_stopping 'x'"),
    (GENERATION, with_values(do_sample="x"), "has do_sample 'x'"),
    (GENERATION, with_values(length_penalty="x"), "has length_penalty 'x'"),
    (GENERATION, with_values(length_penalty_type="x"), r"has length_penalty_type 'x', .* be .gnmt. or .power."),
    (GENERATION, with_values(suppress_tokens=[999]), "has the id 999 as suppress_tokens"),
    (GENERATION, with_values(bad_words_ids=[5]), "has bad_words_ids .5., but it must be a list of lists of ids"),
    (GENERATION, with_values(eos_token_id=[[2]]), "has eos_token_id ..2.."),
    (GENERATION, with_values(forced_eos_token_id=300), "has the id 300 as forced_eos_token_id"),
    (GENERATION, with_values(watermarking_config="x"), "cannot (translate|be loaded|be used)"),
    (GENERATION, with_values(sequence_bias="x"), "cannot (translate|be loaded|be used)"),
    (TOKENIZER, with_bytes(b"{}"), "tokenizer.json is not a tokenizer"),
    (TOKENIZER, with_values(model={"type": "abc"}), "tokenizer.json is not a tokenizer"),
    (TOKENIZER, without_special_token, "tokenizer.json has '</s>' in a template, but not among its special_tokens"),
    (TOKENIZER_CONFIG, Path.unlink, ".* has no pad_token"),
    (TOKENIZER_CONFIG, with_values(model_max_length="x"), "The tokenizer in .* cannot be loaded"),
    (TOKENIZER_CONFIG, with_values(model_max_length=0), "tokenizer_config.json has model_max_length 0"),
    (TOKENIZER_CONFIG, with_values(eos_token="<x>"), ".* has the id 300 .'<x>'., but the embedding .* only 300 rows"),
    (WEIGHTS, with_weights(lambda weights: weights.pop(FC1)), rf"1 missing \(first: {FC1}\)"),
    (WEIGHTS, with_weights(lambda weights: weights.update(x=torch.ones(1))), r"1 unexpected \(first: x\)"),
    (WEIGHTS, with_weights(lambda weights: weights.update({FC1: weights[FC1].int()})), f"{FC1} as I32"),
    (
        WEIGHTS,
        with_weights(lambda weights: weights.update({FC1: torch.ones(2, 2)})),
        rf"1 of another shape \(first: {FC1}, \(2, 2\) in the file",
    ),
    *(
        (
            WEIGHTS,
            with_weights(lambda weights, value=value: weights[FC1][0].fill_(value)),
            f"have non-finite values in {FC1}",
        )
        for value in (torch.nan, torch.inf)
    ),
]


@pytest.mark.parametrize(("file", "damage", "words"), DAMAGES, ids=lambda value: value if type(value) is str else "")
def test_damage_is_refused_by_name(folder, file, damage, words) -> None:
    damage(folder / file)
    with pytest.raises(ValueError, match=f"{file} {words}" if words.startswith("has ") else words) as refused:
        load_translator(folder)
    assert str(folder) in str(refused.value) and len(str(refused.value)) < 1000


HARMLESS = [
    (CONFIG, with_values(architectures="abc", transformers_version=[])),
    (CONFIG, with_values(custom_pipelines=7)),
    (GENERATION, with_values(transformers_version={}, no_such_setting="x")),
    (GENERATION, with_values(num_return_sequences=2, return_dict_in_generate=True)),
    (GENERATION, with_values(output_scores=True, return_dict_in_generate=True)),
    (TOKENIZER_CONFIG, with_values(tokenizer_class="abc")),
    (WEIGHTS, with_weights(lambda weights: None)),
]


@pytest.mark.parametrize(("file", "change"), HARMLESS)
def test_changes_without_influence_are_accepted(folder, file, change) -> None:
    expected = translate_corpus(*load_translator(folder), SENTENCES)
    change(folder / file)
    assert translate_corpus(*load_translator(folder), SENTENCES) == expected


def test_every_verb_refuses_with_exit_code_2(folder, tmp_path, capsys) -> None:
    text = tmp_path / "text"
    text.write_text("one\n")
    half(folder / "generation_config.json")
    model = ["--model", str(folder)]
    for verb in (
        ["translate", str(text), *model],
        ["score", str(text), str(text), *model],
        ["evaluate", "--data", str(text), str(text), *model],
        ["convert", str(folder), str(tmp_path / "out"), "--to", "onnx"],
    ):
        assert main(verb) == 2
        said = capsys.readouterr()
        assert "generation_config.json is not JSON" in said.err and said.err.count("\n") == 1 and not said.out


def test_weights_are_read_once_to_check_them(folder, tiny_run, monkeypatch) -> None:
    """They are compared with the digest that their training recorded, or else their numbers are looked at."""
    compare, look = Mock(wraps=files.digest), Mock(wraps=loading.find_non_finite)
    monkeypatch.setattr(files, "digest", compare)
    monkeypatch.setattr(loading, "find_non_finite", look)
    load_translator(folder)
    assert (compare.call_count, look.call_count) == (0, 1)
    load_translator(tiny_run / "model")
    assert (compare.call_count, look.call_count) == (1, 1)
    shutil.copyfile(tiny_run / "test.json", folder.parent / "test.json")
    load_translator(folder)
    with_weights(lambda weights: weights[FC1][0].mul_(2))(folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"{folder / WEIGHTS} was changed or damaged"):
        load_translator(folder)


def test_the_last_of_several_threads_restores_what_the_first_one_found() -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    first, second = quiet(), quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
    with pytest.raises(ZeroDivisionError), quiet():
        raise ZeroDivisionError
    second.__exit__(None, None, None)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_there_is_no_prompt_about_code_of_a_folder(folder, monkeypatch) -> None:
    with_values(model_type="abc")(folder / "config.json")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks"))
    with pytest.raises(ValueError, match="'abc'"):
        load_translator(folder)


def test_other_models_are_checked_as_strictly(spms, tmp_path, capsys) -> None:  # noqa: F811
    folder = tmp_path / "marian"
    folder.mkdir()
    marian_folder(folder, spms)
    assert load_model(folder).config.model_type == "marian"
    (tmp_path / "text").write_text("the red dog\n\nthe dog\n")
    assert main(["translate", str(tmp_path / "text"), "--model", str(folder)]) == 2
    assert "marian is not a fast one (with a tokenizer.json)" in capsys.readouterr().err
    layers = json.loads((folder / "config.json").read_text())["decoder_layers"]
    with_values(decoder_layers=layers + 1)(folder / "config.json")
    with pytest.raises(ValueError, match=rf"missing \(first: model.decoder.layers.{layers}"):
        load_model(folder)


def test_a_repository_in_the_cache_is_read_offline(folder, tmp_path, monkeypatch) -> None:
    """In the layout that `from_pretrained` leaves there."""
    expected = translate_corpus(*load_translator(folder), SENTENCES)
    repository = tmp_path / "hub" / "models--user--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    for module in ("huggingface_hub.constants", "transformers.utils.hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert translate_corpus(*load_translator("user/name"), SENTENCES) == expected
    half(repository / "snapshots" / ("0" * 40) / "generation_config.json")
    with pytest.raises(ValueError, match="generation_config.json is not JSON"):
        load_translator("user/name")
    with pytest.raises(ValueError, match="'user/other', which is neither a local folder nor a model on the Hub"):
        load_translator("user/other")


def test_the_model_equals_that_of_from_pretrained(folder) -> None:
    model, tokenizer = load_translator(folder)
    plain = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert not model.training and model.dtype == plain.dtype
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in plain.state_dict().items())
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
