"""hf-vaswani convert: every pair of formats, and damaged inputs."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, MarianMTModel

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.cli import main
from hf_vaswani.conversion import convert as conversion
from hf_vaswani.conversion import ctranslate2 as to_ctranslate2
from hf_vaswani.conversion.formats import Foreign

from ..conftest import dear
from .fairseq_folders import simple_folder
from .marian_folders import marian_folder


def convert(capsys, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["convert", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def difference(said: str) -> float:
    (line,) = [line for line in said.splitlines() if line.startswith("Largest difference of the logits")]
    return float(line.rsplit(" ", 1)[1])


# ---- One verb ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ctranslate2", dear("onnx")])
def test_a_model_converts_to_each_engine(tiny_run, tmp_path, capsys, kind) -> None:
    model = tiny_run / "model"
    code, said, err = convert(capsys, model, tmp_path / kind, "--to", kind, "--sentence", "one two three")
    assert code == 0, err
    assert difference(said) < 1e-5
    *theirs, ours = [line.split(": ")[1] for line in said.splitlines() if line.startswith("  ")]
    # The graphs of ONNX have no search.
    assert "one two three" in said and theirs == ([ours] if kind == "ctranslate2" else [])
    assert said.splitlines()[-1] == f"Model     {tmp_path / kind}"
    assert not err
    assert kind == "ctranslate2" or "Note: " in said


def test_int8_is_smaller_and_rounded(tiny_run, tmp_path, capsys) -> None:
    sizes = {}
    for name in ("float32", "float16", "int8"):
        arguments = ["--to", "ctranslate2", "--quantization", name]
        code, said, _ = convert(capsys, tiny_run / "model", tmp_path / name, *arguments)
        assert code == 0 and (f"rounded to {name}" in said) == (name != "float32")
        sizes[name] = (tmp_path / name / "model.bin").stat().st_size
        assert difference(said) < (1e-5 if name == "float32" else 1)
    assert sizes["float32"] > max(sizes["float16"], sizes["int8"])


@pytest.mark.slow
def test_marian_converts_in_both_directions_and_to_ctranslate2(spms, tmp_path, capsys) -> None:
    source = tmp_path / "opus"
    source.mkdir()
    marian_folder(source, spms)
    for kind in ("vaswani", "ctranslate2"):
        code, said, err = convert(capsys, source, tmp_path / kind, "--to", kind, "--sentence", "the red dog")
        assert code == 0, err
        assert said.count("Largest difference of the logits") == (1 if kind == "vaswani" else 2)
    code, said, err = convert(capsys, tmp_path / "vaswani", tmp_path / "back", "--to", "marian")
    assert code == 0 and difference(said) < 1e-5, err
    assert isinstance(MarianMTModel.from_pretrained(tmp_path / "back"), MarianMTModel)
    # The written folder can be read again.
    code, said, err = convert(capsys, tmp_path / "back", tmp_path / "again", "--to", "vaswani")
    assert code == 0 and difference(said) < 1e-5 and "differs" not in said, err
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("vaswani", "again"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / name) for name in ("vaswani", "again")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def test_fairseq_converts(tmp_path, capsys) -> None:
    (tmp_path / "fairseq").mkdir()
    simple_folder(tmp_path / "fairseq")
    code, said, err = convert(capsys, tmp_path / "fairseq", tmp_path / "ours", "--to", "vaswani")
    assert code == 0 and difference(said) < 1e-5, err
    assert VaswaniForConditionalGeneration.from_pretrained(tmp_path / "ours").config.position_offset == 2


def test_an_existing_folder_is_only_replaced_with_force(tiny_run, tmp_path, capsys) -> None:
    destination = tmp_path / "there"
    destination.mkdir()
    (destination / "mine").write_text("mine")
    code, _, err = convert(capsys, tiny_run / "model", destination, "--to", "ctranslate2")
    assert code == 2 and "already exists: use --force to replace it" in err and err.count("\n") == 1
    assert [path.name for path in destination.iterdir()] == ["mine"]
    assert convert(capsys, tiny_run / "model", destination, "--to", "ctranslate2", "--force")[0] == 0
    assert (destination / "model.bin").is_file() and not (destination / "mine").exists()


def test_the_destination_must_name_a_new_folder(tiny_run, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    for name in (".", "..", "/", "../in/.."):
        code, _, err = convert(capsys, tiny_run / "model", name, "--to", "onnx", "--force")
        assert code == 2 and f"{str(Path(name))!r} does not name a new folder" in err and err.count("\n") == 1, err
    code, _, err = convert(capsys, tiny_run / "model", tiny_run, "--to", "onnx", "--force")
    assert code == 2 and "would replace" in err
    code, _, err = convert(capsys, tiny_run / "model", "out", "--to", "onnx", "--sentence", "one \udcff")
    assert code == 2 and "--sentence is not UTF-8" in err and not list((tmp_path / "in").iterdir())


@pytest.mark.parametrize(
    ("to", "options", "words"),
    [
        ("marian", [], "layer_norm_eps 1e-06, but Marian supports only 1e-05"),
        ("vaswani", [], "is already in the format vaswani"),
        ("onnx", ["--quantization", "int8"], "--quantization int8 is only supported with --to ctranslate2"),
        ("ctranslate2", ["--quantization", "int3"], "--quantization must be one of"),
    ],
)
def test_a_failure_is_one_sentence_and_leaves_nothing(tiny_run, tmp_path, capsys, to, options, words) -> None:
    code, said, err = convert(capsys, tiny_run / "model", tmp_path / "out", "--to", to, *options)
    assert code == 2 and words in err and err.count("\n") == 1 and not said, err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_lists_what_was_looked_for(tiny_run, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for source, words in (
        (tmp_path, "is unknown; looked for: a config.json with the model_type vaswani"),
        (tmp_path / "none", " does not exist"),
        (tmp_path / "config.json", "is unknown"),
    ):
        code, _, err = convert(capsys, source, tmp_path / "out", "--to", "vaswani")
        assert code == 2 and words in err and err.count("\n") == 1, err
    shutil.copytree(tiny_run / "model", tmp_path / "model")
    code, _, err = convert(capsys, tmp_path / "model", tmp_path, "--to", "onnx", "--force")
    assert code == 2 and "would replace" in err
    (tmp_path / "model" / "model.safetensors").write_bytes(b"short")
    code, _, err = convert(capsys, tmp_path / "model", tmp_path / "out", "--to", "onnx")
    assert code == 2 and "model.safetensors cannot be read: " in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_likely_mistakes_have_messages_of_their_own(tiny_run, tmp_path, capsys, monkeypatch) -> None:
    for kind, name in (("ctranslate2", "model.bin"), ("onnx", "encoder.onnx")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / name).write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    for source, words in (
        ("ctranslate2", "model.bin, a CTranslate2 model: this format can be written but not read"),
        ("onnx", "encoder.onnx, an ONNX graph: this format can be written but not read"),
        ("some/model", "'some/model', which is neither a local folder nor a model on the Hub"),
    ):
        code, _, err = convert(capsys, source, tmp_path / "out", "--to", "marian")
        assert code == 2 and words in err and err.count("\n") == 1, err


def with_value(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), encoding="utf-8")


@pytest.mark.parametrize("to", ["ctranslate2", dear("onnx")])
def test_half_precision_is_written_as_float32(tiny_run, tmp_path, capsys, to) -> None:
    shutil.copytree(tiny_run / "model", tmp_path / "half")
    VaswaniForConditionalGeneration.from_pretrained(tiny_run / "model").half().save_pretrained(tmp_path / "half")
    code, said, err = convert(capsys, tmp_path / "half", tmp_path / "out", "--to", to)
    assert code == 0 and difference(said) < 1e-5, err


def test_a_sentence_that_is_too_long_is_named_as_the_cause(tmp_path, tiny_run, capsys) -> None:
    shutil.copytree(tiny_run / "model", tmp_path / "model")
    with_value(tmp_path / "model" / "config.json", max_position_embeddings=10, position_encoding="learned")
    model = VaswaniForConditionalGeneration(AutoConfig.from_pretrained(tmp_path / "model"))
    model.save_pretrained(tmp_path / "model")
    arguments = ["--to", "ctranslate2", "--sentence", "one two three four five six seven"]
    code, _, err = convert(capsys, tmp_path / "model", tmp_path / "new" / "out", *arguments)
    assert code == 2 and "The sentence of " in err and " tokens cannot be translated: " in err, err
    # The parent folder is removed too.
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_signal_leaves_nothing(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    """It arrives while the temporary folder is being written."""
    from hf_vaswani.conversion import onnx

    def save(loaded, folder, quantization):
        assert folder.is_dir()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(onnx, "save", save)
    code, _, err = convert(capsys, tiny_run / "model", tmp_path / "out", "--to", "onnx")
    assert code == 143 and err == "hf-vaswani: stopped.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_the_convert_extra_is_enough(tiny_run, tmp_path) -> None:
    """Every module can be imported, and a model converted, without the packages of other extras."""
    command = [sys.executable, "-c", WITHOUT_OTHER_EXTRAS, TRAIN, str(tiny_run / "model"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "encoder.onnx").is_file()
    # In a process of their own, the exporters' logs would be on standard error.
    assert done.stderr == ""
    imported = set(done.stdout.split())
    assert {path.stem for path in Path(conversion.__file__).parent.glob("*.py")} - {"__init__"} == imported


TRAIN = "accelerate,datasets,evaluate,jinja2,sacrebleu,tabulate,pandas,pyarrow,matplotlib"
WITHOUT_OTHER_EXTRAS = """
import importlib, pkgutil, sys
from pathlib import Path
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
from hf_vaswani import conversion
for module in pkgutil.iter_modules(conversion.__path__):
    importlib.import_module(f"hf_vaswani.conversion.{module.name}")
    print(module.name)
from hf_vaswani.conversion.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), "onnx")
"""


def test_a_file_or_a_link_is_not_replaced(tiny_run, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("file", "link"):
        code, _, err = convert(capsys, tiny_run / "model", tmp_path / name, "--to", "ctranslate2", "--force")
        assert code == 2 and "is not a folder, so it cannot be replaced" in err
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "link").is_symlink()


def test_errors_of_the_source_do_not_name_the_destination(spms, tmp_path, capsys) -> None:
    source = tmp_path / "opus"
    source.mkdir()
    marian_folder(source, spms)
    (source / "source.spm").unlink()
    (source / "source.spm").mkdir()
    code, _, err = convert(capsys, source, tmp_path / "out", "--to", "vaswani")
    assert code == 2 and "source.spm" in err and "could not be written" not in err


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"max_length_offset": 0}, "max_decoding_length=<source tokens + 0>"),
        ({"max_length_offset": None}, "max_decoding_length=20 "),
        ({"max_length_offset": 2}, "<source tokens + 2>"),
        ({"max_length_offset": 2, "forced_eos_token_id": 2}, "<source tokens + 1>"),
        ({"max_new_tokens": 5}, "max_decoding_length=5 "),
        ({"max_new_tokens": 5, "forced_eos_token_id": 2}, "max_decoding_length=4 "),
        ({"max_length": 5}, "max_decoding_length=4 "),
        ({"max_new_tokens": 5, "min_new_tokens": 3}, "min_decoding_length=3,"),
    ],
    ids=str,
)
def test_both_sides_stop_at_the_same_length(tiny_run, tmp_path, capsys, rules, words) -> None:
    """With a model that repeats one word forever, only the limits decide the length of a translation."""
    model = VaswaniForConditionalGeneration.from_pretrained(tiny_run / "model")
    shutil.copytree(tiny_run / "model", tmp_path / "model")
    word = AutoTokenizer.from_pretrained(tmp_path / "model")("drei")["input_ids"][0]
    norm = model.model.decoder.layers[-1].feed_forward_norm.layer_norm
    with torch.no_grad():
        norm.weight.zero_()
        model.lm_head.weight[word] *= 5
        norm.bias.copy_(model.lm_head.weight[word])
    model.generation_config.update(
        **{"num_beams": 1, "length_penalty": None, "early_stopping": None, "max_length": None} | rules
    )
    model.save_pretrained(tmp_path / "model")
    arguments = ["--to", "ctranslate2", "--sentence", "one two three four"]
    code, said, err = convert(capsys, tmp_path / "model", tmp_path / "out", *arguments)
    assert code == 0 and not err, err
    assert "differs" not in said and words in said and "Vaswani: d" in said, said


def test_the_start_token_of_the_generation_config_counts(tiny_run, tmp_path, capsys) -> None:
    shutil.copytree(tiny_run / "model", tmp_path / "model")
    start = AutoTokenizer.from_pretrained(tmp_path / "model").unk_token_id
    with_value(tmp_path / "model" / "generation_config.json", decoder_start_token_id=start)
    arguments = ["--to", "ctranslate2", "--sentence", "one two"]
    code, said, err = convert(capsys, tmp_path / "model", tmp_path / "out", *arguments)
    assert code == 0 and difference(said) < 1e-5 and "differs" not in said, err
    engine = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert engine["decoder_start_token"] == "<unk>"


@pytest.mark.parametrize("to", ["ctranslate2", dear("onnx")])
def test_a_model_is_loaded_once(tiny_run, tmp_path, monkeypatch, to) -> None:
    loaded, from_pretrained = [], VaswaniForConditionalGeneration.from_pretrained

    def counted(folder: Path, *arguments: object, **options: object) -> VaswaniForConditionalGeneration:
        loaded.append(Path(folder))
        return from_pretrained(folder, *arguments, **options)

    monkeypatch.setattr(VaswaniForConditionalGeneration, "from_pretrained", counted)
    conversion.convert(tiny_run / "model", tmp_path / to, to)
    assert loaded == [tiny_run / "model"]


def test_different_logits_are_an_error(tiny_run, tmp_path, capsys, monkeypatch) -> None:
    save = to_ctranslate2.save

    def wrong(*arguments: object) -> Foreign:
        foreign = save(*arguments)
        logits = foreign.logits
        return Foreign(foreign.name, lambda *batch: logits(*batch) + 0.01, foreign.translate, [])

    monkeypatch.setattr(to_ctranslate2, "save", wrong)
    code, _, err = convert(capsys, tiny_run / "model", tmp_path / "out", "--to", "ctranslate2")
    assert code == 2 and "compute different logits: they differ by 0.01" in err
    assert not (tmp_path / "out").exists()


def test_the_mask_of_the_comparison_covers_all_padding(tiny_run) -> None:
    model = VaswaniForConditionalGeneration.from_pretrained(tiny_run / "model")
    ids, mask, decoder_ids = conversion.random_batch(model)
    assert ((ids == model.config.pad_token_id) == (mask == 0)).all() and not mask.all()
    assert (decoder_ids[:, 0] == model.config.decoder_start_token_id).all()
    assert (decoder_ids[:, 1:] != model.config.pad_token_id).all()
