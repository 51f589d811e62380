"""Spaces on the loopback Hub: they have all that they need, and show nothing of a closed model; the app runs."""

import html
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hf_vaswani.cli import runs
from hf_vaswani.hub import space
from hf_vaswani.hub.publishing import PublishingError
from hf_vaswani.hub.space import OURS, push_space, space_files
from hf_vaswani.recipe import HubRecipe
from hf_vaswani.serving.static_page import StaticPage

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


# ---- Static Spaces -----------------------------------------------------------------------------------------------

PAGE = {
    "index.html": b"<!doctype html>",
    "service_worker.js": b"worker",
    "NOTICES.txt": b"Apache-2.0",
    # The Hub takes files of this size by LFS alone.
    "files/model.onnx.0123456789ab.bin": bytes(11_000_000),
    "files/library.js.abcdef012345.bin": b"library",
}


@pytest.fixture
def push_page(hub, push, run) -> Callable[..., str]:
    """Publishes the model, and returns what publishes a page of it as the Space alice/page."""
    assert push()[0] == 0
    sha = hub.commits("alice/m")[0].sha

    def call(page: dict[str, bytes] = PAGE, private: bool | None = None) -> str:
        return push_space(run, run / "model", HubRecipe(repo_id="alice/m", private=private), "alice/page", sha, page)

    return call


def test_a_page_is_published_as_a_static_space(hub, push_page) -> None:
    assert push_page() == f"{hub.url}/spaces/alice/page"
    files = hub.files("spaces/alice/page")
    assert {name: content for name, content in files.items() if name in PAGE} == PAGE
    assert set(files) == {*PAGE, "README.md", ".gitattributes"}
    header = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert header == {"title": "m", "sdk": "static", "app_file": "index.html", "models": ["alice/m"], "pinned": False}
    assert hub.repositories["spaces/alice/page"].sdk == "static"
    assert not hub.is_private("spaces/alice/page")
    # Again: nothing has changed, and nothing is committed.
    before = hub.commits("spaces/alice/page")
    push_page()
    assert hub.commits("spaces/alice/page") == before


def test_the_command_publishes_a_page_of_the_model(hub, push, run, monkeypatch, tmp_path) -> None:
    made = []

    def make(name: str, javascript: Path | None) -> StaticPage:
        # Nothing has been published yet, if it fails.
        made.append((name, javascript, hub.log[:]))
        return StaticPage("the run", {}, {"model.onnx": b"weights", "library.js": b"library"}, "Apache-2.0")

    monkeypatch.setattr(runs, "static_page", make)
    code, said = push("--space", "alice/page", "--static", "--javascript", str(tmp_path))
    assert code == 0 and said.splitlines()[-1] == f"Published {hub.url}/spaces/alice/page"
    assert made == [(str(run / "model"), tmp_path, [])]
    files = hub.files("spaces/alice/page")
    page = files["index.html"].decode()
    assert "<title>alice/m</title>" in page
    # Beside itself, the page may only ask those to which the Hub redirects.
    policy = html.unescape(page)
    assert "connect-src 'self' https://huggingface.co https://*.hf.co;" in policy
    # Names of the page are those that a later push removes.
    assert {name for name in files if not OURS.fullmatch(name)} == {"README.md", ".gitattributes"}
    assert len(files) == 7


@pytest.mark.process
def test_the_same_model_is_the_same_page(hub, push, monkeypatch) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `convert` is not installed")
    library = {"transformers.min.js": b"", "NOTICES.txt": b"Apache-2.0"}
    monkeypatch.setattr("hf_vaswani.serving.javascript.javascript_files", lambda folder: library)
    assert push("--space", "alice/page", "--static")[0] == 0
    assert any(name.startswith("files/encoder_model_quantized") for name in hub.files("spaces/alice/page"))
    before = hub.commits("spaces/alice/page")
    assert push("--space", "alice/page", "--static")[0] == 0
    assert hub.commits("spaces/alice/page") == before


def test_one_commit_replaces_a_page_and_either_kind_of_demo(hub, push_page, push) -> None:
    assert push("--space", "alice/page")[0] == 0
    hub.commit("spaces/alice/page", {"files/notes.txt": b"mine", "hf_vaswani.txt": b"mine"})
    count = len(hub.commits("spaces/alice/page"))
    push_page()
    kept = {"README.md", ".gitattributes", "files/notes.txt", "hf_vaswani.txt"}
    assert set(hub.files("spaces/alice/page")) == {*PAGE, *kept}
    changed = {name: content for name, content in PAGE.items() if "model" not in name}
    changed["files/model.onnx.ba9876543210.bin"] = b"another model"
    push_page(changed)
    assert set(hub.files("spaces/alice/page")) == {*changed, *kept}
    assert len(hub.commits("spaces/alice/page")) == count + 2
    assert push("--space", "alice/page")[0] == 0
    files = hub.files("spaces/alice/page")
    assert "app.py" in files and not set(files) & set(changed)
    assert yaml.safe_load(files["README.md"].decode().split("---")[1])["sdk"] == "gradio"


@pytest.mark.parametrize("how", ["by the recipe", "by the account", "gated"])
def test_no_weights_of_a_closed_model_become_public(hub, push_page, how) -> None:
    """A static page contains the model."""
    repository = hub.repositories["alice/m"]
    repository.private, repository.gated = how == "by the account", "manual" if how == "gated" else False
    private = True if how == "by the recipe" else None
    push_page(private=private)
    assert hub.is_private("spaces/alice/page")
    hub.repositories["spaces/alice/page"].private = False
    before = hub.commits("spaces/alice/page")
    with pytest.raises(PublishingError, match="alice/m is (private|gated), and the Space alice/page public"):
        push_page(PAGE | {"index.html": b"new"}, private)
    assert hub.commits("spaces/alice/page") == before
