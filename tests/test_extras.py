"""Each extra alone, in a fresh environment with what pip installs for it, does its job: `make test-extras`."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from .conftest import ROOT
from .test_earlier_versions import ARCHIVE

pytestmark = pytest.mark.extras

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


class Environment:
    """An environment of its own, and a folder with a run and its text."""

    def __init__(self, wheel: Path, extra: str, folder: Path) -> None:
        self.bin, self.folder = folder / "environment" / "bin", folder / "work"
        subprocess.run([sys.executable, "-m", "venv", str(self.bin.parent)], check=True)
        requirement = f"hf_vaswani[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        self.run("pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), requirement, cwd=folder)
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(self.folder, filter="data")

    def run(self, program: str, *arguments: str, code: int = 0, cwd: Path | None = None) -> str:
        """Runs one of the environment's programs; returns what it said on both streams."""
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd or self.folder,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text("utf-8").splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True
    )
    return next(folder.glob("*.whl"))


@pytest.fixture
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path):
    yield Environment(wheel, request.param, tmp_path)
    # Each has a torch of its own.
    shutil.rmtree(tmp_path / "environment")


def alone(extra: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("environment", [extra], indirect=True, ids=[extra or "none"])


def test_every_extra_is_tried() -> None:
    tried = re.findall(r'^@alone\("(\w+)"\)$', Path(__file__).read_text("utf-8"), flags=re.MULTILINE)
    assert sorted(tried) == sorted(EXTRAS)


@alone("")
def test_without_any_it_translates(environment) -> None:
    environment.run("hf-vaswani", "translate", "--model", "run/model", "test.en", "--output", "out.de")
    assert environment.lines("out.de") == environment.lines("test.de")
    assert "tokens" in environment.run("hf-vaswani", "score", "--help")
    program = (
        "import hf_vaswani; from transformers import pipeline; print(pipeline('translation', 'run/model')('one'))"
    )
    assert "eins" in environment.run("python", "-c", program)
    assert "has new code" in environment.run("hf-vaswani", "renew", "run/model")
    environment.run("hf-vaswani", "average", "run", "--last", "2", "--output", "mean")
    # What it cannot do it says, with the line that mends it.
    for verb, extra in (
        (["train", "recipe.yaml"], "train"),
        (["push", "run", "--repo-id", "alice/m"], "train"),
        (["evaluate", "--model", "run/model", "--data", "test.en", "test.de"], "train"),
        (["check", "test.en", "test.de"], "clean"),
        (["convert", "run/model", "out", "--to", "ctranslate2"], "convert"),
        (["convert", "run/model", "out", "--to", "onnx"], "convert"),
        (["demo", "--model", "run/model", "--static", "page"], "convert"),
    ):
        said = environment.run("hf-vaswani", *verb, code=2)
        assert f"pip install 'hf_vaswani[{extra}]'" in said and said.count("\n") == 1, said


@alone("train")
def test_train_alone_trains_and_scores(environment) -> None:
    said = environment.run("hf-vaswani", "train", "recipe.yaml", "--training.max_steps", "1610")
    assert "Test BLEU" in said and "pip install 'hf_vaswani[viz]'" in said
    assert "BLEU" in environment.run("hf-vaswani", "evaluate", "--model", "run/model", "--data", "test.en", "test.de")
    environment.run("hf-vaswani", "average", "run", "--last", "2", "--output", "mean")


@alone("clean")
def test_clean_alone_checks(environment) -> None:
    said = environment.run(
        "hf-vaswani", "check", "test.en", "test.de", "--output", "clean.tsv", "--rejected", "rejected.tsv"
    )
    assert "languages" in said and "pairs of test.en, test.de" in said
    assert environment.lines("clean.tsv")[0] == "en\tde"


@alone("viz")
def test_viz_alone_draws(environment) -> None:
    program = (
        "import json, sys; from hf_vaswani.hub.evaluation import curve_picture\n"
        "lines = [json.loads(line) for line in open('run/training.jsonl')]\n"
        "print(curve_picture([(line['step'], line['loss']) for line in lines], [], None, 'nats')[:4])"
    )
    assert "PNG" in environment.run("python", "-c", program)


@alone("convert")
def test_convert_alone_converts(environment) -> None:
    # The graphs of ONNX have no search. Weights in 8 bits may say something else.
    for name, translations in (("ctranslate2", 2), ("onnx", 1), ("transformers.js", 2)):
        said = environment.run("hf-vaswani", "convert", "run/model", name, "--to", name, "--sentence", "four nine")
        assert said.count("vier neun") >= translations, said


@alone("adapt")
def test_adapt_and_train_train_adapters(environment) -> None:
    environment.run("pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *EXTRAS["train"])
    start = ["--initialize.from", "run/model", "--tokenizer.vocab_size", "24", "--training.adapter.rank", "2"]
    steps = [
        *("--run_dir", "adapted", "--training.max_steps", "2"),
        *("--training.validate_every", "2", "--training.save_every", "2"),
    ]
    assert "Test BLEU" in environment.run("hf-vaswani", "train", "recipe.yaml", *start, *steps)
    assert (environment.folder / "adapted" / "checkpoint-2" / "adapter_model.safetensors").is_file()


@alone("demo")
def test_demo_makes_a_page(environment) -> None:
    program = (
        "import hf_vaswani\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "from hf_vaswani.serving.demo import DemoTranslator, build_demo\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained('run/model')\n"
        "tokenizer = AutoTokenizer.from_pretrained('run/model')\n"
        "print(type(build_demo(model, tokenizer, 'run')).__name__)\n"
        "print(DemoTranslator(model, tokenizer).answer('one two', None, 2, 0.6, 1).translations)"
    )
    said = environment.run("python", "-c", program)
    assert "Blocks" in said
    assert "eins zwei" in said
    assert "There is no file" in environment.run(
        "hf-vaswani", "demo", "--model", "run/model", "--examples", "x", code=2
    )


@alone("serve")
def test_serve_answers(environment) -> None:
    program = (
        "import asyncio, json\n"
        "from transformers import pipeline\n"
        "from hf_vaswani.serving.server import build_server\n"
        "app = build_server({'run': pipeline('translation', model='run/model')})\n"
        "body = b'q=one+two&source=en&target=de'\n"
        "form = (b'content-type', b'application/x-www-form-urlencoded')\n"
        "scope = {'type': 'http', 'method': 'POST', 'path': '/translate', 'headers': [form], 'query_string': b''}\n"
        "messages = [{'type': 'http.request', 'body': body}]\n"
        "async def receive():\n"
        "    return messages.pop() if messages else await asyncio.Future()\n"
        "async def send(message):\n"
        "    print(message.get('body', b'').decode())\n"
        "asyncio.run(app(scope, receive, send))\n"
    )
    assert "eins zwei" in environment.run("python", "-c", program)
    assert "There is no file" in environment.run(
        "hf-vaswani", "serve", "--model", "run/model", "--api-keys", "x", code=2
    )


@alone("scale")
def test_scale_translates_a_table(environment) -> None:
    program = (
        "import pyarrow as pa, pyarrow.parquet as pq; pq.write_table(pa.table({'en': ['one two'] * 9}), 'in.parquet')"
    )
    environment.run("python", "-c", program)
    command = ["hf-vaswani", "translate", "--model", "run/model", "--table", "in.parquet", "--column", "en"]
    for cluster in ("local", "ray"):
        said = environment.run(*command, "--output", cluster, "--shard-rows", "4", "--engine-cluster", cluster)
        assert "9 of 9 rows are translated" in said
    program = "import pyarrow.parquet as pq; print(pq.read_table('ray/data').column('translation').to_pylist())"
    assert environment.run("python", "-c", program).count("eins zwei") == 9


@alone("docs")
def test_docs_alone_builds_the_manual(environment) -> None:
    environment.run("mkdocs", "build", "--strict", "--site-dir", str(environment.folder / "site"), cwd=ROOT)
    assert (environment.folder / "site" / "index.html").is_file()


@alone("dev")
def test_dev_alone_checks(environment) -> None:
    environment.run("ruff", "check", ".", cwd=ROOT)
    environment.run("pytest", "tests/test_house.py", "-k", "imports or wings or travelling", cwd=ROOT)
