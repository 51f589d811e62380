"""A run folder that version 0.1.0 wrote: it loads, translates, resumes, averages and converts as it did then.

`saved/run_0.1.0.tar.xz` has the recipe, its text (numbers in words), and the run, which knows its test text by heart.
"""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.cli import main

ARCHIVE = Path(__file__).with_name("saved") / "run_0.1.0.tar.xz"


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("0.1.0")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def folder(extracted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of its own, in which commands run as they did when it was written."""
    shutil.copytree(extracted, tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


@pytest.mark.parametrize("num_beams", ["1", "4"])
def test_it_translates_as_it_did(folder, num_beams) -> None:
    command = ["translate", "test.en", "--model", "run/model", "--output", "out.de", "--num-beams", num_beams]
    assert main(command) == 0
    assert lines(folder / "out.de") == lines(folder / "test.de") == lines(folder / "run" / "test_translations.txt")


def test_a_checkpoint_of_it_is_a_model(folder) -> None:
    translator = pipeline("translation", model="run/checkpoint-1600")
    assert type(translator.model) is VaswaniForConditionalGeneration
    found = [output["translation_text"] for output in translator(lines(folder / "test.en"))]
    assert found == lines(folder / "test.de")


@pytest.mark.process
def test_its_own_code_renewed_or_saved_anew_and_the_packages_say_the_same(folder) -> None:
    """
    Without the package the model's code is that of its folder, as a checkpoint on the Hub has it. Saved anew over the
    old files, it is a whole folder of this version.
    """
    shutil.copytree("run/model", "anew")
    VaswaniForConditionalGeneration.from_pretrained("anew").save_pretrained("anew")
    weights = (folder / "run" / "model" / "model.safetensors").read_bytes()
    assert main(["renew", "run/model"]) == 0
    assert (folder / "run" / "model" / "model.safetensors").read_bytes() == weights
    program = (
        "import json, sys, torch; sys.modules['hf_vaswani'] = None\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained('run/model', trust_remote_code=True)\n"
        "assert type(model).__module__.startswith('transformers_modules'), type(model)\n"
        "texts = open('test.en', encoding='utf-8').read().splitlines()\n"
        "inputs = AutoTokenizer.from_pretrained('run/model', trust_remote_code=True)(texts[:1], return_tensors='pt')\n"
        "logits = model(**inputs, decoder_input_ids=inputs['input_ids']).logits\n"
        "translator = pipeline('translation', model='run/model', trust_remote_code=True)\n"
        "found = [output['translation_text'] for output in translator(texts)]\n"
        "anew = pipeline('translation', model='anew', trust_remote_code=True)('one two')[0]['translation_text']\n"
        "print(json.dumps({'logits': logits.tolist(), 'texts': found, 'anew': anew}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert theirs["texts"] == lines(folder / "test.de") and theirs["anew"] == "eins zwei"
    model = AutoModelForSeq2SeqLM.from_pretrained("run/model")
    inputs = AutoTokenizer.from_pretrained("run/model")(lines(folder / "test.en")[:1], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    torch.testing.assert_close(logits, torch.tensor(theirs["logits"]), atol=1e-5, rtol=0)


def test_the_finished_run_is_shown_and_not_trained_again(folder, capsys) -> None:
    before = (folder / "run" / "model" / "model.safetensors").read_bytes()
    assert main(["train", "recipe.yaml"]) == 0
    assert "Test BLEU 100.00" in capsys.readouterr().out
    assert (folder / "run" / "model" / "model.safetensors").read_bytes() == before


def test_its_training_resumes(folder, capsys) -> None:
    before = lines(folder / "run" / "training.jsonl")
    shutil.rmtree(folder / "run" / "model")
    assert main(["train", "recipe.yaml", "--training.max_steps", "1610", "--training.average_last", "1"]) == 0
    # It went on behind update 1600; those before it are the lines of then.
    assert lines(folder / "run" / "training.jsonl")[: len(before)] == before
    assert json.loads((folder / "run" / "test.json").read_text("utf-8"))["averaged"] == ["checkpoint-1610"]
    assert float(capsys.readouterr().out.split("Test BLEU ")[1].split()[0]) > 90


def test_a_damaged_checkpoint_of_it_is_noticed(folder, capsys) -> None:
    path = folder / "run" / "checkpoint-1600" / "optimizer.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["train", "recipe.yaml", "--training.max_steps", "1610"]) == 2
    assert "run/checkpoint-1600/optimizer.bin" in capsys.readouterr().err


def test_its_checkpoints_are_averaged(folder) -> None:
    assert main(["average", "run", "--last", "2", "--output", "mean"]) == 0
    mean = AutoModelForSeq2SeqLM.from_pretrained("mean").state_dict()
    for name, weight in AutoModelForSeq2SeqLM.from_pretrained("run/model").state_dict().items():
        torch.testing.assert_close(mean[name], weight, atol=1e-6, rtol=0)


def test_it_converts(folder, capsys) -> None:
    assert main(["convert", "run/model", "converted", "--to", "ctranslate2", "--sentence", "four nine"]) == 0
    assert capsys.readouterr().out.count("vier neun") == 2
