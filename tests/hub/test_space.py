"""A Space on the loopback Hub: everything that it needs, and its app runs."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hf_vaswani.hub import space
from hf_vaswani.hub.space import space_files

from .conftest import WRITE, assert_fails


@pytest.fixture
def run(tiny_run: Path) -> Path:
    return tiny_run


def test_the_demo_is_published_beside_the_model(hub, push) -> None:
    code, said = push("--space", "alice/demo")
    assert code == 0
    assert said.splitlines()[-1] == f"Published {hub.url}/spaces/alice/demo"
    files = hub.files("spaces/alice/demo")
    header = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert (header["sdk"], header["app_file"], header["models"]) == ("gradio", "app.py", ["alice/m"])
    needed = dict(line.split("==") for line in files["requirements.txt"].decode().split())
    assert needed["transformers"] == importlib.metadata.version("transformers")
    assert needed["torch"] == importlib.metadata.version("torch").split("+")[0]
    # The model is that of the same command.
    assert hub.commits("alice/m")[0].sha in files["app.py"].decode()
    assert {"hf_vaswani/serving/demo.py", "hf_vaswani/visualization/explorer.js"} <= set(files)
    assert not any("__pycache__" in name for name in files)
    # Again: files that are no longer needed go.
    hub.commit("spaces/alice/demo", {"hf_vaswani/old.py": b"", "notes.txt": b"mine"})
    assert push("--space", "alice/demo")[0] == 0
    assert set(hub.files("spaces/alice/demo")) == set(files) | {"notes.txt"}


@pytest.mark.process
def test_its_app_translates_with_what_is_in_the_space(hub, push, tmp_path) -> None:
    """In a fresh folder, from which this package is imported, and not from where it is installed."""
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    assert push("--space", "alice/demo")[0] == 0
    for name, content in hub.files("spaces/alice/demo").items():
        path = tmp_path / "space" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    program = (
        "import app, hf_vaswani, json, pathlib\n"
        "assert pathlib.Path(hf_vaswani.__file__).is_relative_to(pathlib.Path.cwd())\n"
        "from hf_vaswani.serving.demo import DemoTranslator\n"
        "answer = DemoTranslator(app.model, app.tokenizer).answer('one two', None, 2, 0.6, 2)\n"
        "print(json.dumps([type(app.demo).__name__, app.EXAMPLES, len(answer.translations)]))"
    )
    environment = os.environ | hub.environment(tmp_path / "home", WRITE) | {"PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "space", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kind, examples, count = json.loads(done.stdout.splitlines()[-1])
    assert (kind, count) == ("Blocks", 2) and examples


@pytest.mark.parametrize("options", [["--private"], []], ids=["by the recipe", "by the account"])
def test_nothing_of_a_private_model_becomes_public(hub, push, options) -> None:
    assert push(*options)[0] == 0
    # As an account may make it by default, without a word of it in recipe or options.
    hub.repositories["alice/m"].private = True
    assert push("--space", "alice/demo", *options)[0] == 0
    assert hub.is_private("spaces/alice/demo")
    hub.repositories["spaces/alice/demo"].private = False
    before = hub.commits("spaces/alice/demo")[0].sha
    assert_fails(push("--space", "alice/demo", *options), "alice/m is private, and the Space alice/demo public")
    assert hub.commits("spaces/alice/demo")[0].sha == before


def test_the_space_of_somebody_else_is_refused(hub, push) -> None:
    assert_fails(push("--space", "bob/demo"), "the token may not write to bob/demo")


def test_models_that_do_not_translate_have_no_demo(hub, push, monkeypatch) -> None:
    monkeypatch.setattr(space, "read_json", lambda path: {"is_encoder_decoder": False})
    assert_fails(push("--space", "alice/demo"), "--space is the demo of a model that translates")
    assert hub.log == []


def test_examples_are_without_language_tags(tiny_run, monkeypatch) -> None:
    samples = [{"source": "<2de> one two"}, {"source": "three"}]
    monkeypatch.setattr(space, "read_result", lambda run: SimpleNamespace(samples=samples))
    app = space_files(tiny_run, "alice/m", "abc")["app.py"].decode()
    assert '"one two"' in app and "<2de>" not in app
