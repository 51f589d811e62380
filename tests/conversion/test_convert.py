"""hf-vaswani convert: every pair of formats, and what is refused."""

import importlib
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, MarianMTModel

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.cli import main
from hf_vaswani.conversion import convert as conversion
from hf_vaswani.conversion import ctranslate2 as to_ctranslate2
from hf_vaswani.conversion import onnx as to_onnx
from hf_vaswani.conversion.formats import Foreign
from hf_vaswani.files import read_json

from ..conftest import dear
from .fairseq_folders import simple_folder
from .marian_folders import marian_folder, npz_folder


def convert(capsys, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["convert", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def differences(said: str) -> list[float]:
    lines = [line for line in said.splitlines() if line.startswith("Largest difference of the logits")]
    return [float(line.rsplit(" ", 1)[1]) for line in lines]


# ---- One verb ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("to", ["ctranslate2", dear("onnx")])
def test_a_model_converts_to_each_engine(tiny_run, tmp_path, capsys, monkeypatch, to, half) -> None:
    """In float32, whatever its own weights are, which are loaded once."""
    source, loaded = tmp_path / "ours", []
    shutil.copytree(tiny_run / "model", source)
    if half:
        VaswaniForConditionalGeneration.from_pretrained(source).half().save_pretrained(source)
    from_pretrained = VaswaniForConditionalGeneration.from_pretrained
    monkeypatch.setattr(
        VaswaniForConditionalGeneration,
        "from_pretrained",
        lambda folder, *given, **options: loaded.append(folder) or from_pretrained(folder, *given, **options),
    )
    code, said, err = convert(capsys, source, tmp_path / to, "--to", to, "--sentence", "one two three")
    assert code == 0 and not err and loaded == [source]
    assert max(differences(said)) < 1e-5
    *theirs, ours = [line.split(": ")[1] for line in said.splitlines() if line.startswith("  ")]
    # The graphs of ONNX have no search.
    assert "one two three" in said and theirs == ([ours] if to == "ctranslate2" else [])
    assert "Note: " in said and said.splitlines()[-1] == f"Model     {tmp_path / to}"


def test_int8_is_smaller_and_rounded(tiny_run, tmp_path, capsys) -> None:
    sizes = {}
    for name in ("float32", "float16", "int8"):
        arguments = ["--to", "ctranslate2", "--quantization", name]
        code, said, _ = convert(capsys, tiny_run / "model", tmp_path / name, *arguments)
        assert code == 0 and (f"rounded to {name}" in said) == (name != "float32")
        sizes[name] = (tmp_path / name / "model.bin").stat().st_size
        assert max(differences(said)) < (1e-5 if name == "float32" else 1)
    assert sizes["float32"] > max(sizes["float16"], sizes["int8"])


@pytest.mark.parametrize("kind", ["fairseq", dear("marian"), dear("marian-npz")])
def test_other_formats_convert_to_ours_and_through_it(spms, tmp_path, capsys, kind) -> None:
    source = tmp_path / "source"
    source.mkdir()
    if kind == "fairseq":
        simple_folder(source)
    else:
        (marian_folder if kind == "marian" else npz_folder)(source, spms)
    # Marian does not run here.
    compared = kind != "marian-npz"
    for to in ("vaswani", "ctranslate2"):
        code, said, err = convert(capsys, source, tmp_path / to, "--to", to, "--sentence", "the red dog")
        assert code == 0 and len(differences(said)) == compared + (to != "vaswani"), err
        assert all(found < 1e-4 for found in differences(said)) and "differs" not in said
        assert compared or "The logits are not compared, because Marian cannot run here." in said


@pytest.mark.slow
def test_a_marian_model_is_written_and_read_again(spms, tmp_path, capsys) -> None:
    (tmp_path / "opus").mkdir()
    marian_folder(tmp_path / "opus", spms)
    ways = (("opus", "ours", "vaswani"), ("ours", "back", "marian"), ("back", "again", "vaswani"))
    for source, destination, to in ways:
        code, said, err = convert(capsys, tmp_path / source, tmp_path / destination, "--to", to)
        assert code == 0 and max(differences(said)) < 1e-5 and "differs" not in said, err
    assert isinstance(MarianMTModel.from_pretrained(tmp_path / "back"), MarianMTModel)
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / name) for name in ("ours", "again")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def test_an_existing_folder_is_replaced_with_force(tiny_run, tmp_path, capsys) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    arguments = [tiny_run / "model", tmp_path / "there", "--to", "ctranslate2"]
    assert convert(capsys, *arguments)[0] == 2 and (tmp_path / "there" / "mine").is_file()
    assert convert(capsys, *arguments, "--force")[0] == 0
    assert (tmp_path / "there" / "model.bin").is_file() and not (tmp_path / "there" / "mine").exists()


# ---- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "destination", "to", "options", "words"),
    [
        ("run/model", "out", "marian", [], "layer_norm_eps 1e-06, but Marian supports only 1e-05"),
        ("run/model", "out", "vaswani", [], "is already in the format vaswani"),
        *(
            ("run/model", "out", to, ["--quantization", "int8"], "--quantization int8 is only supported with --to ctr")
            for to in ("onnx", "marian", "transformers.js")
        ),
        ("run/model", "out", "ctranslate2", ["--quantization", "int3"], "--quantization must be one of int8, "),
        ("bert", "out", "vaswani", [], "is unknown; looked for: a config.json with the model_type vaswani"),
        ("bert/config.json", "out", "vaswani", [], "is unknown"),
        ("ct2", "out", "marian", [], "model.bin, a CTranslate2 model: this format can be written but not read"),
        ("graphs", "out", "marian", [], "encoder.onnx, an ONNX graph: this format can be written but not read"),
        (
            "js",
            "out",
            "onnx",
            [],
            "onnx/encoder_model.onnx, a graph for transformers.js: this format can be written but",
        ),
        ("run/model", "ct2", "onnx", [], "ct2 already exists: use --force to replace it"),
        *(
            ("run/model", name, "onnx", ["--force"], f"{str(Path(name))!r} does not name a new folder")
            for name in (".", "..", "/", "../in/..")
        ),
        ("run/model", "run", "onnx", ["--force"], "run would replace the source, run/model"),
        *(
            ("run/model", name, "onnx", ["--force"], f"{name} exists and is not a folder, so it cannot be replaced")
            for name in ("bert/config.json", "link")
        ),
        # Errors of the source do not name the destination.
        ("opus", "out", "vaswani", [], "opus/source.spm"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(
    tiny_run, spms, tmp_path, capsys, monkeypatch, source, destination, to, options, words
) -> None:
    for file in ("bert/config.json", "ct2/model.bin", "graphs/encoder.onnx", "js/onnx/encoder_model.onnx"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text('{"model_type": "bert"}')
    if source == "opus":
        (tmp_path / "opus").mkdir()
        marian_folder(tmp_path / "opus", spms)
        (tmp_path / "opus" / "source.spm").unlink()
        (tmp_path / "opus" / "source.spm").mkdir()
    (tmp_path / "js" / "config.json").write_text('{"model_type": "marian"}')
    (tmp_path / "run").symlink_to(tiny_run)
    (tmp_path / "link").symlink_to(tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, said, err = convert(capsys, source, destination, "--to", to, *options)
    assert code == 2 and words in err and err.count("\n") == 1 and not said, err
    assert sorted(tmp_path.rglob("*")) == before and "could not be written" not in err


def test_a_sentence_that_is_too_long_is_named_as_the_cause(tmp_path, tiny_run, capsys) -> None:
    shutil.copytree(tiny_run / "model", tmp_path / "model")
    fields = {"max_position_embeddings": 10, "position_encoding": "learned"}
    config = AutoConfig.from_pretrained(tmp_path / "model", **fields)
    VaswaniForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    arguments = ["--to", "ctranslate2", "--sentence", "one two three four five six seven"]
    code, _, err = convert(capsys, tmp_path / "model", tmp_path / "new" / "out", *arguments)
    assert code == 2 and "The sentence of " in err and " tokens cannot be translated: " in err, err
    # The parent folder is removed too.
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_different_logits_are_an_error(tiny_run, tmp_path, capsys, monkeypatch) -> None:
    save = to_ctranslate2.save

    def wrong(*arguments: object) -> Foreign:
        foreign = save(*arguments)
        return Foreign(foreign.name, lambda *batch: foreign.logits(*batch) + 0.01, foreign.translate, [])

    monkeypatch.setattr(to_ctranslate2, "save", wrong)
    code, _, err = convert(capsys, tiny_run / "model", tmp_path / "out", "--to", "ctranslate2")
    assert code == 2 and "compute different logits: they differ by 0.01" in err
    assert not (tmp_path / "out").exists()


def test_a_signal_leaves_nothing(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    """It arrives while the temporary folder is being written."""

    def save(loaded, folder, quantization):
        assert folder.is_dir()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(to_onnx, "save", save)
    code, _, err = convert(capsys, tiny_run / "model", tmp_path / "out", "--to", "onnx")
    assert code == 143 and err == "hf-vaswani: stopped.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "library"), [("ctranslate2", "ctranslate2"), ("onnx", "onnxruntime"), ("transformersjs", "onnx_ir")]
)
def test_a_missing_library_is_named_with_what_to_install(monkeypatch, module, library) -> None:
    monkeypatch.delitem(sys.modules, f"hf_vaswani.conversion.{module}")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=re.escape(f"needs {library}: pip install 'hf_vaswani[convert]'")):
        importlib.import_module(f"hf_vaswani.conversion.{module}")


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
    settings = GenerationConfig.from_pretrained(tmp_path / "model")
    settings.decoder_start_token_id = AutoTokenizer.from_pretrained(tmp_path / "model").unk_token_id
    settings.save_pretrained(tmp_path / "model")
    code, said, err = convert(capsys, tmp_path / "model", tmp_path / "out", "--to", "ctranslate2")
    assert code == 0 and max(differences(said)) < 1e-5 and "differs" not in said, err
    assert read_json(tmp_path / "out" / "config.json")["decoder_start_token"] == "<unk>"


def test_the_mask_of_the_comparison_covers_all_padding(tiny_run) -> None:
    model = VaswaniForConditionalGeneration.from_pretrained(tiny_run / "model")
    ids, mask, decoder_ids = conversion.random_batch(model)
    assert ((ids == model.config.pad_token_id) == (mask == 0)).all() and not mask.all()
    assert (decoder_ids[:, 0] == model.config.decoder_start_token_id).all()
    assert (decoder_ids[:, 1:] != model.config.pad_token_id).all()
