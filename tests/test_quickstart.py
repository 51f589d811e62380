"""The quickstart's model as users have it, with the libraries that are installed: every way to translate with it.

`make test-quickstart`, `make test-oldest` and `make test-newest` run it, and `make test-smoke` most of it.
HF_VASWANI_QUICKSTART names the folder of a run that is there already; without it the quickstart is trained first, for
minutes. Programs run outside of the repository, so that they import the package that is installed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_vaswani.data.reading import load_pairs
from hf_vaswani.metrics import score

from .conftest import ROOT

pytestmark = pytest.mark.quickstart

# Those of README, and how they are translated there.
README = {
    "The old teacher gives the little girl a red book.": "Der alte Lehrer gibt dem kleinen Mädchen ein rotes Buch.",
    "We call my brother.": "Wir rufen meinen Bruder an.",
    "The cat has disappeared.": "Die Katze ist verschwunden.",
}
# Far below what any processor makes of the quickstart (about 97), far above what a broken search does (about 9).
MIN_BLEU = 80

# Says the translations of each way of `generate()` and of the pipeline, as JSON. Without the package the code that
# travels with the model does the same.
WAYS = """
import json, sys, warnings
folder, sentences, remote = sys.argv[1], json.load(open(sys.argv[2])), sys.argv[3] == "remote"
if remote:
    sys.modules["hf_vaswani"] = None
else:
    import hf_vaswani
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
trust = {"trust_remote_code": True} if remote else {}
model = AutoModelForSeq2SeqLM.from_pretrained(folder, **trust)
assert type(model).__module__.startswith("transformers_modules.") == remote, type(model)
tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
inputs = tokenizer(sentences, padding=True, return_tensors="pt")
steps = {"return_dict_in_generate": True, "output_logits": True}
ways = {
    "greedy": {"num_beams": 1},
    "greedy with logits": {"num_beams": 1, **steps},
    "beam 4": {"num_beams": 4},
    "beam 4 with logits": {"num_beams": 4, **steps},
    "sampling": {"num_beams": 1, "do_sample": True, "temperature": 0.3},
    "sampling with logits": {"num_beams": 1, "do_sample": True, "temperature": 0.3, **steps},
    "static cache": {"num_beams": 1, "cache_implementation": "static"},
    "static cache, beam 4": {"num_beams": 4, "cache_implementation": "static"},
    "no cache": {"num_beams": 1, "use_cache": False},
}
found = {}
for way, settings in ways.items():
    torch.manual_seed(0)
    output = model.generate(**inputs, **settings)
    found[way] = tokenizer.batch_decode(getattr(output, "sequences", output), skip_special_tokens=True)
translator = pipeline("translation", model=folder, **trust)
found["pipeline"] = [each["translation_text"] for each in translator(sentences)]
found["pipeline with logits"] = [each["translation_text"] for each in translator(sentences, batch_size=8, **steps)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the quickstart."""
    if given := os.environ.get("HF_VASWANI_QUICKSTART"):
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("quickstart")
    program("hf-vaswani", "train", str(ROOT / "configs" / "quickstart.yaml"), cwd=folder)
    return folder / "runs" / "quickstart"


@pytest.fixture(scope="module")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its model, saved again with the code of this version."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    shutil.copytree(run / "model", folder)
    program("hf-vaswani", "renew", str(folder), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def pairs() -> dict[str, str]:
    """README's sentences, and some of the test set."""
    test = load_pairs("en", "de", dataset="pocket")["test"].select(range(17))
    return README | dict(zip(test["source"], test["target"], strict=True))


def program(name: str, *arguments: str, cwd: Path, text: str | None = None) -> str:
    """Runs a program of this environment, offline, and returns what it says on standard output."""
    executable = sys.executable if name == "python" else shutil.which(name, path=str(Path(sys.executable).parent))
    assert executable is not None
    done = subprocess.run(
        [executable, *arguments],
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env=environment(cwd),
    )
    assert done.returncode == 0, done.stderr
    # None of our own warnings, and none about what we call.
    assert "hf_vaswani" not in "".join(line for line in done.stderr.splitlines() if "Warning" in line), done.stderr
    return done.stdout


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"HF_HOME": str(home / "hf_home"), "HF_HUB_OFFLINE": "1"}


def assert_right(way: str, found: list[str], pairs: dict[str, str]) -> None:
    assert len(found) == len(pairs), way
    bleu = score(found, list(pairs.values()))["bleu"]
    assert bleu > MIN_BLEU, (way, bleu, dict(zip(pairs, found, strict=True)))


@pytest.mark.parametrize("code", ["of the package", "remote"])
def test_every_way_to_translate_is_right(model, pairs, tmp_path, code) -> None:
    (tmp_path / "sentences.json").write_text(json.dumps(list(pairs)), encoding="utf-8")
    said = program("python", "-c", WAYS, str(model), str(tmp_path / "sentences.json"), code, cwd=tmp_path)
    found: dict[str, list[str]] = json.loads(said.splitlines()[-1])
    for way, translations in found.items():
        assert_right(way, translations, pairs)
    # Ways that search alike; a rounding may make one of two equally good translations the other.
    alike = [("greedy", "greedy with logits", "static cache", "no cache")]
    alike.append(("beam 4", "beam 4 with logits", "static cache, beam 4", "pipeline", "pipeline with logits"))
    for first, *others in alike:
        for other in others:
            same = sum(map(str.__eq__, found[first], found[other]))
            assert same >= len(pairs) - 1, (first, other, same)


def translate(model: Path, sentences: list[str], *options: str, cwd: Path) -> list[str]:
    text = "".join(sentence + "\n" for sentence in sentences)
    return program("hf-vaswani", "translate", "--model", str(model), *options, cwd=cwd, text=text).splitlines()


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_the_command_line_and_its_engines_are_right(model, pairs, tmp_path, engine) -> None:
    assert_right(engine, translate(model, list(pairs), "--engine", engine, cwd=tmp_path), pairs)


def test_a_training_resumes_and_scores(run, pairs, tmp_path) -> None:
    """From the last checkpoint, on the data of the quickstart: one more update changes next to nothing."""
    recipe = ["--run_dir", "resumed", "--training.max_steps", "701"]
    shutil.copytree(run, tmp_path / "resumed")
    program("hf-vaswani", "train", str(ROOT / "configs" / "quickstart.yaml"), *recipe, cwd=tmp_path)
    result: dict[str, Any] = json.loads((tmp_path / "resumed" / "test.json").read_text("utf-8"))
    assert result["step"] == 701 and result["bleu"] > MIN_BLEU
    assert_right("resumed", translate(tmp_path / "resumed" / "model", list(pairs), cwd=tmp_path), pairs)
    sides = [tmp_path / "test.en", tmp_path / "test.de"]
    for side, sentences in zip(sides, (pairs.keys(), pairs.values()), strict=True):
        side.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
    said = program(*("hf-vaswani", "evaluate", "--model", "resumed/model", "--data", *map(str, sides)), cwd=tmp_path)
    assert "BLEU" in said
