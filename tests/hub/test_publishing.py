"""Models go to a Hub on loopback, by the real client: with a score and complete, or not at all. They load anywhere."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import huggingface_hub.constants
import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import _http
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from hf_vaswani.cli import main
from hf_vaswani.data.tokenizer import load_tokenizer
from hf_vaswani.files import digest
from hf_vaswani.hub import publishing
from hf_vaswani.hub.publishing import check_not_worse, push_waiting
from hf_vaswani.metrics import Comparison, score
from hf_vaswani.recipe import HubRecipe, Recipe, SourceRecipe
from hf_vaswani.records import Verdict
from hf_vaswani.run_folder import digests
from hf_vaswani.training import comparison
from hf_vaswani.translation.shortlist import FILE

from ..campaign.verbs import on_the_hub
from ..children import End, run_launched, run_python
from ..conftest import dear, tiny_recipe
from ..hub_server import HubServer
from .conftest import INSTALLED, READ, WRITE, WRONG, assert_fails, contents

MODEL_FILES = INSTALLED.keys() | {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "README.md", "curve.png",
}  # fmt: skip


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, with a better score."""
    shutil.copytree(tiny_run, tmp_path / "run")
    change(tmp_path / "run" / "test.json", bleu=31.4)
    return tmp_path / "run"


def change(path: Path, **values: Any) -> None:
    """Changes keys of a JSON file; those with `None` are deleted."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def titles(hub: HubServer, revision: str = "main") -> list[str]:
    return [commit.title.split(":")[0] for commit in reversed(hub.commits("alice/m", revision))]


# ---- What is not published ---------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Path], None]:
    return lambda run: change(run / "test.json", **dict.fromkeys(names))


def removed(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def replaced(folder: str) -> Callable[[Path], object]:
    return lambda run: shutil.copy(run / "checkpoint-8" / "model.safetensors", run / folder)


@pytest.mark.parametrize(
    ("change_run", "options", "words"),
    [
        (None, ["--min-bleu", "31.5"], "its BLEU is 31.40, and hub.min_bleu is 31.50"),
        (lambda run: change(run / "test.json", bleu=math.nan), [], "its BLEU is nan"),
        (without("bleu", "chrf", "ter"), [], "has no score, because the run has no test set"),
        (without("bleu"), [], "its BLEU is missing"),
        (without("files"), [], "was written by an older version"),
        (without("signatures"), [], "has a BLEU without a signature"),
        (removed("environment.json"), [], "environment.json is missing"),
        (removed("test.json"), [], "has no result"),
        (removed("recipe.yaml"), [], "has no recipe.yaml"),
        (removed("model/modeling_vaswani.py"), [], "modeling_vaswani.py was deleted since the model"),
        (replaced("model"), [], "model.safetensors was changed since the model was scored"),
        (replaced("checkpoint-12"), ["--checkpoint", "12"], "model.safetensors was changed since the model was"),
        (lambda run: change(run / "model" / "config.json", d_ff=8), [], "config.json was changed since the model was"),
        (None, ["--repo-id", "alice"], "hub.repo_id must have the form user/name, but it is 'alice'"),
        (None, ["--repo-id", "alice/m m"], "hub.repo_id must have the form user/name"),
        (None, ["--space", "alice/de mo"], "--space must have the form user/name"),
        (None, ["--min-bleu", "101"], "hub.min_bleu must be at least 0 and at most 100"),
        (
            None,
            ["--min-score", "0.5"],
            "hub.min_score is for running text or labelled text or the task 'text_to_text', but ta",
        ),
        (None, ["--min-score", "nan"], "hub.min_score must be at least 0 and at most 1, but it is nan"),
        (None, ["--revision", "no..branch"], "hub.revision must be the name of a branch, such as main or v2, but"),
        (None, ["--checkpoint", "3"], "checkpoint-3 does not exist"),
        (None, ["--checkpoint", "4"], "checkpoint-4 has no score, because it was not validated"),
        (None, ["--not-worse-than", "start"], "the run starts from no model"),
        (None, ["--not-worse-than", "lastpush"], "must be start, last_push, the folder"),
    ],
)
def test_nothing_is_published_without_a_score_of_these_weights(hub, run, push, change_run, options, words) -> None:
    if change_run is not None:
        change_run(run)
    assert_fails(push(*options), words)
    assert hub.log == []


@pytest.mark.parametrize(
    ("best_by", "scores", "options", "words"),
    [
        ("accuracy", None, ["--min-score", "0.42"], "its accuracy is 0.4125, and hub.min_score is 0.4200"),
        ("accuracy", {"accuracy": None, "loss": 1.0}, [], "its accuracy is missing or not finite"),
        ("accuracy", {"accuracy": math.nan, "loss": 1.0}, [], "its accuracy is missing or not finite"),
        ("accuracy", {"loss": 1.0}, [], "its accuracy is missing or not finite"),
        ("accuracy", {"accuracy": 0.5, "loss": None}, [], "its loss is missing or not finite"),
        ("loss", {"accuracy": 0.5, "loss": math.nan}, [], "its loss is missing or not finite"),
        ("loss", {"perplexity": math.inf, "loss": 800.0}, [], "its perplexity is missing or not finite"),
        ("loss", {}, [], "has no score, because the run has no test set"),
        ("loss", None, ["--min-bleu", "30"], "hub.min_bleu is for pairs of texts, but task is 'masked_lm'"),
        ("loss", None, ["--min-score", "0.5"], "hub.min_score (0.5) is a share from 0 to 1, but training.best_by is"),
        ("loss", None, ["--min-score", "1.5"], "hub.min_score must be at least 0 and at most 1, but it is 1.5"),
        ("loss", None, ["--not-worse-than", "last_push"], "hub.not_worse_than is for pairs of texts, but task is"),
    ],
)
def test_no_language_model_is_published_without_its_measure(
    hub, push, text_run, best_by, scores, options, words
) -> None:
    result = {} if scores is None else {"scores": scores}
    assert_fails(push(*options, run=text_run("masked_lm", result, training={"best_by": best_by})), words)
    assert hub.log == []


# ---- Not worse than another model --------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(9, 2), (2, 9)], ids=["worse", "better"])
def test_a_model_that_is_worse_than_its_start_is_not_published(hub, tiny_run, run, push, before, after) -> None:
    """Both have wrong translations of every `n`-th sentence."""
    shutil.copytree(tiny_run / "model", run / "start")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    target = Path(recipe["data"]["test_files"]["de"]).read_text("utf-8").splitlines()
    translations = json.loads((run / "test.json").read_text())["translations"]
    for name, every in (("start_translations.txt", before), ("test_translations.txt", after)):
        texts = ["null null" if i % every == 0 else text for i, text in enumerate(target)]
        (run / name).write_text("".join(text + "\n" for text in texts), "utf-8")
        translations[name] = digest(run / name)
    bleu = score(texts, target)["bleu"]
    change(run / "test.json", translations=translations, bleu=bleu)
    recipe["initialize"]["from"] = str(tiny_run / "model")
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    done = push("--not-worse-than", "start")
    if after > before:
        assert done[0] == 0 and done[1].count("\n") == 1
        assert hub.files("alice/m").keys() >= MODEL_FILES
        return
    worse = f"significantly worse than hub.not_worse_than: on en-de, its BLEU is {bleu:.2f}, and that of start is"
    assert_fails(done, worse, "(p = 0.001)")
    assert hub.log == []
    assert push("--not-worse-than", "start") == done, "the verdict repeats"
    assert push()[0] == 0


def test_the_model_on_the_hub_is_compared(hub, tiny_run, run, push, monkeypatch, caplog) -> None:
    shutil.copy(tiny_run / "test.json", run / "test.json")
    caplog.set_level("INFO")
    assert push("--not-worse-than", "last_push")[0] == 0
    assert "nothing was published before" in caplog.text
    # The same model again is not worse than itself.
    loaded, baseline = [], comparison.Baseline

    def spy(name: str, device: Any) -> Any:
        loaded.append(Path(name))
        return baseline(name, device)

    monkeypatch.setattr(comparison, "Baseline", spy)
    assert push("--not-worse-than", "last_push")[0] == 0
    there = hub.commits("alice/m")[0]
    assert [path.name for path in loaded] == [there.sha]
    # What the Hub has now translates every sentence.
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    target = Path(recipe["data"]["test_files"]["de"]).read_text("utf-8").splitlines()
    monkeypatch.setattr(comparison, "_translate", lambda *_: {"en-de": target})
    assert_fails(push("--not-worse-than", "last_push"), "that of last_push is 100.00")
    # A Hub that fails is not an empty one.
    hub.fault("GET", "/api/models/", status=500, times=None)
    assert_fails(push("--not-worse-than", "last_push"), "could not be published: the Hub failed")
    assert hub.commits("alice/m")[0].sha == there.sha


def test_one_set_that_is_significantly_worse_is_enough(tmp_path) -> None:
    better, worse, slightly = (
        Comparison({"bleu": before}, {"bleu": after}, p, "signature")
        for before, after, p in ((20.0, 40.0, 0.001), (30.0, 25.0, 0.001), (30.0, 29.9, 0.6))
    )
    check_not_worse(tmp_path, "start", Verdict("start", {"a": better, "b": slightly}))
    with pytest.raises(ValueError) as error:
        check_not_worse(tmp_path, "start", Verdict("start", {"a": better, "b": worse, "c": slightly}))
    assert str(error.value) == (
        f"{tmp_path} is not published, because it is significantly worse than hub.not_worse_than: "
        "on b, its BLEU is 25.00, and that of start is 30.00 (p = 0.001)."
    )
    with pytest.raises(ValueError, match="it was not compared with last_push"):
        check_not_worse(tmp_path, "last_push", Verdict("start", {}))


# ---- One commit --------------------------------------------------------------------------------------------------


def test_one_commit_has_everything(hub, run, push) -> None:
    before = contents(run)
    code, said = push()
    assert code == 0
    commits = hub.commits("alice/m")
    assert [commit.title for commit in commits] == ["model: BLEU 31.40 after 12 updates", "initial commit"]
    assert said == f"Published {hub.url}/alice/m/commit/{commits[0].sha}\n"
    files = hub.files("alice/m")
    assert files.keys() == MODEL_FILES | {".gitattributes"}
    for name in MODEL_FILES - {"README.md", "curve.png"}:
        assert files[name] == (run / "model" / name).read_bytes(), name
    card = ModelCard(files["README.md"].decode())
    assert 'model="alice/m"' in card.text
    assert card.data.eval_results[0].metric_value == 31.4
    assert contents(run) == before
    # Other files in the folder are not published.
    (run / "model" / "notes.json").write_text("{}")
    shutil.copy(run / "model" / "model.safetensors", run / "model" / "ema.safetensors")
    # A second push has nothing to commit.
    assert push() == (0, said)
    assert len(hub.commits("alice/m")) == 2


def with_secrets(record: Any, url: str, form: set[str]) -> None:
    """Puts a URL into every field of a recipe's section that has text, except those whose text has a form."""
    for each, hint in get_type_hints(type(record)).items():
        if each in form or "Literal" in str(hint) or not re.search(r"\bstr\b", str(hint)):
            continue
        setattr(record, each, [url] if str(hint).startswith("list") else url)


@pytest.mark.parametrize("has_files", [True, False])
def test_no_string_of_a_push_has_the_secret_of_a_url(hub, tiny_run, tmp_path, push, has_files, caplog) -> None:
    url = "https://me:SECRET@host/some/t.tsv?sig=SECRET%2F&to=a/SECRET::SECRET#SECRET.tsv"
    run = shutil.copytree(tiny_run, tmp_path / "secret", ignore=shutil.ignore_patterns("checkpoint-*"))
    recipe = Recipe(more_data=[SourceRecipe()])
    # Columns of other tasks; and what the run has, or a push compares, checks or needs.
    form = {"pair_column", "label_column", "document_column", "validation_split", "run_dir", "task", "tokenize"}
    for name, section in [*vars(recipe).items(), ("data", recipe.more_data[0])]:
        if is_dataclass(section) and name != "hub":
            with_secrets(
                section, url, form | (set() if has_files else {"train_files", "validation_files", "test_files"})
            )
    # The test has one set.
    recipe.more_data[0].test_files = recipe.more_data[0].test_split = None
    recipe.initialize.revision = None
    (run / "recipe.yaml").write_text(recipe.as_yaml())
    texts = [{"pairs": {"train": 9}, "dataset_is_local": False}] * 2
    command = ["train.py", url, f"--data.train_files={{en: {url}, de: {url}}}", "--data.prefix", f"see {url} there"]
    facts = {"command": command, "start_is_local": False, "data": texts, "commits": {url: url}}
    change(run / "environment.json", **facts)
    change(run / "test.json", samples=[{"source": f"At {url}.", "translation": url, "reference": url}])
    code, said = push("--space", "alice/demo", run=run)
    assert code == 0, said
    published = hub.files("alice/m") | {f"demo/{name}": text for name, text in hub.files("spaces/alice/demo").items()}
    published["commits"] = str([(each.title, each.message) for each in hub.commits("alice/m")]).encode()
    published["messages"] = (said + caplog.text).encode()
    assert [name for name, content in published.items() if b"SECRET" in content] == []
    assert b"t.tsv" in published["README.md"] and b"https://host/some/t.tsv" in published["demo/app.py"]


def test_leftovers_of_an_earlier_push_are_deleted_and_files_of_others_are_kept(hub, run, push) -> None:
    old = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "older_vaswani.py", FILE)
    kept = ("LICENSE", "notes.py", "adapter.safetensors", "onnx/model.safetensors")
    hub.commit("alice/m", dict.fromkeys((*old, *kept), b"old") | {"config.json": b'{"model_type": "vaswani"}'})
    assert push()[0] == 0
    assert hub.files("alice/m").keys() == MODEL_FILES | {".gitattributes", *kept}
    assert len(hub.commits("alice/m")) == 3
    # The shortlist of a model goes with it.
    assert publishing.SHORTLIST == FILE
    (run / "model" / FILE).write_text('{"frequent": [], "translations": {}}')
    assert push()[0] == 0
    assert hub.files("alice/m").keys() == MODEL_FILES | {".gitattributes", FILE, *kept}


def test_a_model_of_another_type_is_not_overwritten_but_may_have_another_branch(hub, push) -> None:
    theirs = {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"theirs"}
    hub.commit("alice/m", theirs)
    assert_fails(push(), "alice/m (main) has a model of another type, 'bert'")
    hub.commit("alice/m", {"config.json": None})
    assert push("--revision", "v2")[0] == 0
    assert hub.files("alice/m")["model.safetensors"] == b"theirs"
    assert hub.files("alice/m", "v2").keys() >= MODEL_FILES
    assert 'revision="v2"' in hub.files("alice/m", "v2")["README.md"].decode()


def test_a_private_model_never_goes_to_a_public_repository(hub, push) -> None:
    assert push("--private")[0] == 0
    assert hub.is_private("alice/m")
    hub.commit("alice/open", {"file": b"public"})
    before = hub.files("alice/open")
    assert_fails(
        push("--private", "--repo-id", "alice/open", "--revision", "v2"),
        "hub.private is true, but alice/open is public",
    )
    assert hub.files("alice/open") == before
    assert not any("/branch/" in path for _, path, _ in hub.log)


@pytest.mark.parametrize("has_average", [False, True])
def test_a_checkpoint_is_published_with_its_validation(hub, run, push, has_average) -> None:
    """If it has a moving average, that is the model."""
    checkpoint, source = run / "checkpoint-12", run / f"checkpoint-{8 if has_average else 12}" / "model.safetensors"
    if has_average:
        shutil.copy(source, checkpoint / "ema.safetensors")
        change(checkpoint / "progress.json", files=digests(checkpoint))
    assert push("--checkpoint", "12")[0] == 0
    (line,) = [json.loads(line) for line in (run / "validations.jsonl").read_text().splitlines()]
    files = hub.files("alice/m")
    assert files.keys() == MODEL_FILES | {".gitattributes"}
    assert files["model.safetensors"] == source.read_bytes()
    assert hub.commits("alice/m")[0].title == f"checkpoint-12: BLEU {line['bleu']:.2f} after 12 updates"
    result = ModelCard(files["README.md"].decode()).data.eval_results[0]
    assert result.metric_value == round(line["bleu"], 2)


def test_a_language_model_and_its_checkpoint_are_published_with_their_measure(hub, push, text_run) -> None:
    run = text_run("masked_lm", training={"best_by": "accuracy"})
    assert push("--min-score", "0.41", run=run)[0] == 0
    assert hub.commits("alice/m")[0].title == "model: accuracy 0.41 after 6 updates"
    files = hub.files("alice/m")
    assert files["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert 'pipeline("fill-mask", model="alice/m")' in card.text and card.data.pipeline_tag == "fill-mask"
    assert push("--checkpoint", "6", run=run)[0] == 0
    # The loss of the validation, not that of the test.
    found = ModelCard(hub.files("alice/m")["README.md"].decode()).data.eval_results
    assert {each.metric_type: each.metric_value for each in found}["loss"] == 3.5


# ---- Code --------------------------------------------------------------------------------------------------------

CONFIG = b'{"model_type": "vaswani", "auto_map": {}}'


@pytest.mark.parametrize("branch", ["main", "v2"])
def test_the_code_of_a_published_model_is_renewed_by_one_commit(hub, run, push, command, monkeypatch, branch) -> None:
    monkeypatch.setattr("hf_vaswani.hub.code.SAVED", "older")
    assert push("--revision", branch)[0] == 0
    before = hub.files("alice/m", branch)
    theirs = {"notes.py": b"mine", "my_vaswani.py": b"mine"}
    hub.commit("alice/m", theirs | dict.fromkeys(("modeling_vaswani.py", "older_vaswani.py"), b"old"), revision=branch)
    count, model = len(hub.commits("alice/m", branch)), str(run / "model")
    # Only what differs is sent, and with nothing to send there is no commit.
    for state in ("has new code", "had the code of this version"):
        done = command("renew", model, "alice/m", "--revision", branch)
        assert done == (0, f"{model} had the code of this version\nalice/m {state}\n")
        assert hub.files("alice/m", branch) == before | theirs
        assert len(hub.commits("alice/m", branch)) == count + 1


@pytest.mark.parametrize(
    ("files", "arguments", "settings", "words"),
    [
        ({}, ["alice/none"], {}, "New code of alice/none could not be published: the Hub refused the request"),
        ({"config.json": b'{"model_type": "bert"}'}, ["alice/m"], {}, "alice/m (main) has no Vaswani model, but one"),
        ({"config.json": b"{"}, ["alice/m"], {}, "config.json is not JSON"),
        ({"README.md": b"data"}, ["alice/m"], {}, "alice/m (main) has no config.json: it is no model"),
        ({"config.json": CONFIG}, ["alice/m"], {"token": READ}, "may not write to alice/m"),
        ({"config.json": CONFIG}, ["alice/m", "--revision", "v9"], {}, "refused the request"),
        ({"config.json": b'{"model_type": "vaswani"}'}, ["alice/m"], {}, "alice/m (main) names no code"),
        ({}, ["no folder"], {}, "MODEL is 'no folder', which does not exist; a Hub id has the form user/name"),
        ({}, ["alice/m m"], {}, "MODEL must have the form user/name"),
    ],
)
def test_what_cannot_be_renewed_is_named(hub, command, files, arguments, settings, words) -> None:
    if files:
        hub.commit("alice/m", files)
    assert_fails(command("renew", *arguments, **settings), words)
    assert not files or hub.files("alice/m").keys() == files.keys() | {".gitattributes"}


def test_a_connection_that_is_lost_before_the_renewal_is_named(hub, push, command, monkeypatch) -> None:
    assert push()[0] == 0

    def lost(*arguments: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(publishing.HfApi, "hf_hub_download", lost)
    assert_fails(
        command("renew", "alice/m"), "failed, or could not be reached (LocalEntryNotFoundError: no connection)"
    )


def test_a_model_with_earlier_code_is_published_with_that_of_this_version(hub, run, push, command) -> None:
    """Its record has the digests of the code that it was scored with, and accepts what has renewed it."""
    path = run / "model" / "modeling_vaswani.py"
    path.write_text("earlier")
    files = digests(run / "model")
    del files["rules_vaswani.py"]
    change(run / "test.json", files=files)
    assert push()[0] == 0
    assert hub.files("alice/m").items() >= INSTALLED.items()
    assert command("renew", str(run / "model"))[0] == 0 and path.read_bytes() == INSTALLED[path.name]
    assert push()[0] == 0 and len(hub.commits("alice/m")) == 2
    path.write_text("by hand")
    assert_fails(push(), "modeling_vaswani.py was changed since the model was scored")


# ---- Failures ----------------------------------------------------------------------------------------------------

COMMIT, UPLOAD, YAML = ("POST", "/commit/"), ("PUT", "/_lfs/"), ("POST", "/api/validate-yaml")
HTML = {"Content-Type": "text/html"}


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    ("where", "fault", "words"),
    [
        (COMMIT, {"status": 500}, "failed, or could not be reached"),
        (COMMIT, {"status": 429, "message": "Retry after 3 seconds."}, "too many requests"),
        dear(COMMIT, {"status": 409, "message": "Conflict"}, "somebody else has changed alice/m"),
        dear(COMMIT, {"status": 400, "message": "Too large"}, "refused the request for alice/m (main)"),
        dear(COMMIT, {"cut": 100}, "failed, or could not be reached"),
        (COMMIT, {"lose_answer": True}, "failed, or could not be reached"),
        (UPLOAD, {"status": 403, "message": "Storage quota"}, "may not write to alice/m"),
        dear(("POST", "/api/repos/create"), {"status": 503}, "failed, or could not be reached"),
        dear(("GET", "/api/models/"), {"cut": 0}, "failed, or could not be reached"),
        (YAML, {"status": 400, "message": "License must be one of"}, "refused the request for"),
        (YAML, {"status": 503, "message": "<html>", "headers": HTML}, "failed, or could not be reached"),
    ],
)
def test_a_failure_is_one_line_and_the_same_command_succeeds_later(hub, run, push, where, fault, words) -> None:
    hub.commit("alice/m", {"model.safetensors": b"old", "config.json": b'{"model_type": "vaswani"}'})
    there, before = hub.files("alice/m"), contents(run)
    hub.fault(*where, **fault)
    assert_fails(push(), words, "could not be published")
    if "lose_answer" not in fault:
        assert hub.files("alice/m") == there
    assert contents(run) == before
    assert push()[0] == 0
    assert hub.files("alice/m").keys() >= MODEL_FILES
    assert hub.files("alice/m")["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("token", "repo_id", "words"),
    [
        (WRONG, "alice/m", "does not know this token. Log in with `hf auth login`"),
        (READ, "alice/m", "the token may not write to alice/m"),
        dear(READ, "alice/new", "the token may not write to alice/new"),
        (WRITE, "bob/m", "the token may not write to bob/m"),
        ("", "alice/m", "requires a token. Log in with `hf auth login`"),
    ],
)
def test_a_refused_token_is_explained(hub, run, push, token, repo_id, words) -> None:
    hub.commit("alice/m", {"model.safetensors": b"old"})
    there, before = hub.files("alice/m"), contents(run)
    assert_fails(push("--repo-id", repo_id, token=token), words)
    assert hub.files("alice/m") == there and contents(run) == before
    assert push()[0] == 0


def test_a_commit_of_somebody_else_is_not_overwritten(hub, push) -> None:
    def meanwhile(repo_id: str) -> None:
        hub.on_commit = None
        hub.commit(repo_id, {"model.safetensors": b"theirs"})

    hub.on_commit = meanwhile
    assert_fails(push(), "somebody else has changed alice/m (main) in the meantime")
    assert hub.files("alice/m")["model.safetensors"] == b"theirs"
    assert push()[0] == 0
    assert hub.files("alice/m").keys() >= MODEL_FILES


def test_a_hub_that_is_gone_or_not_wanted_is_one_sentence(hub, run, push, monkeypatch, capsys) -> None:
    hub.stop()
    assert_fails(push(), "failed, or could not be reached")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["push", str(run), "--repo-id", "alice/m"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err


# ---- During a training -------------------------------------------------------------------------------------------


@pytest.fixture
def train(run_command: Callable[..., End], tmp_path: Path) -> Callable[..., End]:
    """Trains for 12 updates with a checkpoint and a validation every 4, and asserts that no file has the token."""

    def call(*options: str) -> End:
        recipe = tiny_recipe(tmp_path, scored=True, validate_every=4)
        names = ["--run_dir", str(tmp_path / "run"), "--hub.repo_id", "alice/m"]
        end = run_command("train", *recipe, "--evaluation.num_beams=1", *names, *options)
        assert WRITE.encode() not in b"".join(contents(tmp_path / "run").values())
        return end

    return call


def test_a_training_compares_and_publishes_checkpoints_and_then_its_model(hub, train, tmp_path, caplog) -> None:
    options = ["--hub.every_n_checkpoints=2", "--hub.license=mit", "--hub.not_worse_than=last_push"]
    done = train(*options)
    assert done.code == 0, done.err
    assert titles(hub) == ["initial commit", "checkpoint-8", "model"]
    assert caplog.text.count("nothing was published before") >= 1
    assert done.out.splitlines()[-1] == f"Published {hub.url}/alice/m/commit/{hub.commits('alice/m')[0].sha}"
    run, files = tmp_path / "run", hub.files("alice/m")
    assert not (run / "unpublished").exists()
    assert files.keys() == MODEL_FILES | {".gitattributes"}
    assert not any(WRITE.encode() in content for content in files.values())
    # Card and curve in the model folder are the same as on the Hub.
    for name in MODEL_FILES:
        assert files[name] == (run / "model" / name).read_bytes(), name
    assert ModelCard(files["README.md"].decode()).data.license == "mit"
    # The same command again, on a complete run, publishes nothing new.
    assert train(*options).code == 0
    assert len(hub.commits("alice/m")) == 3


@pytest.mark.slow
def test_a_checkpoint_that_is_worse_is_not_offered(tiny_run, tmp_path, monkeypatch, caplog) -> None:
    """The Hub cannot be reached here: what is offered would wait in the run folder."""

    def references(run: Any, name: str) -> dict[str, list[str]]:
        return {pairs.name: pairs.target for pairs in run.sets["test"]}

    monkeypatch.setattr(comparison, "translate_tests", references)
    for than, waits in ((str(tiny_run / "model"), False), ("null", True)):
        run = tmp_path / f"waits-{waits}"
        options = ["--hub.repo_id=alice/m", "--hub.every_n_checkpoints=1", f"--hub.not_worse_than={than}"]
        arguments = tiny_recipe(tiny_run.parent, scored=True, max_steps=4, validate_every=4)
        # The model itself cannot be published either.
        assert main(["train", *arguments, "--run_dir", str(run), *options]) == 2
        assert (run / "unpublished" / "checkpoint-4").is_dir() is waits
    assert caplog.text.count("checkpoint-4 is not published, because it is significantly worse than") == 1


def test_what_waits_keeps_its_comparison(hub, run, push, monkeypatch, caplog) -> None:
    """A checkpoint that waits from before the gate was set is discarded."""
    push("--checkpoint", "12")
    than = HubRecipe(repo_id="alice/m", not_worse_than="last_push")
    for verdict, words in ((None, "was not compared with last_push"), (Verdict("last_push", {}), "Published")):
        publisher = publishing.Publisher(run, HubRecipe(repo_id="alice/m"), 12)
        publisher._keep(run / "checkpoint-12", [path.name for path in (run / "checkpoint-12").glob("*.*")], verdict)
        caplog.clear()
        caplog.set_level("INFO")
        push_waiting(run, than)
        assert words in caplog.text
        assert not (run / "unpublished").exists()
    assert not any("verdict" in name for name in hub.files("alice/m"))


@pytest.mark.slow
def test_a_slow_push_does_not_delay_the_training(hub, train, tmp_path) -> None:
    """The commit of the first checkpoint is only answered after the training has finished."""
    result = tmp_path / "run" / "test.json"
    seen = []

    def wait(repo_id: str) -> None:
        hub.on_commit = None
        for _ in range(600):
            if result.exists():
                break
            time.sleep(0.1)
        seen.append(result.exists())

    hub.on_commit = wait
    done = train("--hub.every_n_checkpoints", "1")
    assert done.code == 0, done.err
    assert seen == [True]
    # Of the checkpoints that waited, only the newest was published.
    assert titles(hub) == ["initial commit", "checkpoint-4", "checkpoint-12", "model"]


def test_a_failed_push_is_reported_kept_and_retried_at_the_end(hub, train, tmp_path, caplog) -> None:
    hub.fault(*COMMIT, status=500, times=1)
    # Only the third of the three checkpoints is due.
    done = train("--hub.every_n_checkpoints", "3")
    assert done.code == 0, done.err
    assert "checkpoint-12 could not be published: the Hub failed" in caplog.text
    assert titles(hub) == ["initial commit", "checkpoint-12", "model"]
    assert not (tmp_path / "run" / "unpublished").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "options", "words"),
    [
        (None, [], "could not be published: the Hub failed"),
        (0, ["--hub.min_bleu", "99"], "and hub.min_bleu is 99.00"),
    ],
)
def test_a_training_that_cannot_publish_is_complete(hub, train, tmp_path, times, options, words) -> None:
    hub.fault("POST", "/api/repos/create", status=503, times=times)
    done = train("--hub.every_n_checkpoints", "3", *options)
    assert done.code == 2 and "Test BLEU" in done.out and words in done.sentence
    run = tmp_path / "run"
    assert (run / "model" / "model.safetensors").is_file() and not hub.repositories
    assert (run / "unpublished" / "checkpoint-12").is_dir() is not bool(options)
    hub.clear_faults()
    again = train("--hub.every_n_checkpoints", "3")
    assert again.code == 0, again.err
    assert titles(hub) == ["initial commit", *([] if options else ["checkpoint-12"]), "model"]
    assert not (run / "unpublished").exists()


def test_waiting_checkpoints_do_not_block_a_push(hub, run, push, capsys, caplog) -> None:
    """One has a BLEU that is no longer high enough, another folder is not a checkpoint."""
    waiting = run / "unpublished"
    shutil.copytree(run / "checkpoint-12", waiting / "checkpoint-12")
    (waiting / "checkpoint-old").mkdir()
    assert push("--min-bleu", "20")[0] == 0
    assert titles(hub) == ["initial commit", "model"] and (waiting / "checkpoint-12").is_dir()
    push_waiting(run, HubRecipe(repo_id="alice/m", min_bleu=20))
    assert "hub.min_bleu is 20.00" in caplog.text and not (waiting / "checkpoint-12").exists()
    assert titles(hub) == ["initial commit", "model"]


@pytest.mark.process
def test_only_one_of_two_processes_talks_to_the_hub(hub, tmp_path) -> None:
    arguments = ["train", *tiny_recipe(tmp_path, scored=True, max_steps=2), "--run_dir", str(tmp_path / "run")]
    arguments += ["--evaluation.num_beams=1", "--hub.repo_id", "alice/m"]
    ends = run_launched(tmp_path / "outputs", on_the_hub, arguments, hub.environment(tmp_path / "home", WRITE))
    assert [end.code for end in ends] == [0, 0], [end.err for end in ends]
    assert titles(hub) == ["initial commit", "model"]
    assert sum(path == "/api/repos/create" for _, path, _ in hub.log) == 1
    assert "".join(end.out for end in ends).count("Published") == 1


# ---- Loading from the Hub ----------------------------------------------------------------------------------------

LOAD = """
import json, sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline
trust, online = {trust}, {online}
model = AutoModelForSeq2SeqLM.from_pretrained("alice/m", **trust)
translator = pipeline("translation", model="alice/m", **trust)
guessed = pipeline(model="alice/m", **trust) if online else translator
pinned = AutoModelForSeq2SeqLM.from_pretrained("alice/m", revision=sys.argv[1], **trust)
print(json.dumps({{
    "module": type(model).__module__.split(".")[0],
    "sums": [float(each.model.encoder.embed_tokens.weight.double().sum()) for each in (model, pinned)],
    "texts": [each("one two three", max_new_tokens=12) for each in (translator, guessed)],
}}))
"""


def load_without_the_package(hub: HubServer, home: Path, revision: str, online: bool) -> dict[str, Any]:
    """Loads the model in a new process, to which the package is unknown."""
    program = "import sys; sys.modules['hf_vaswani'] = None\n"
    program += LOAD.format(trust="{'trust_remote_code': True}", online=online)
    offline = {} if online else {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, revision],
        capture_output=True,
        text=True,
        cwd=home,
        env=os.environ | hub.environment(home / "hf") | offline,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.process
def test_a_published_model_loads_anywhere(hub, tiny_run, push, tmp_path, monkeypatch, capsys) -> None:
    assert push("--checkpoint", "12")[0] == 0
    first = hub.commits("alice/m")[0].sha
    assert push()[0] == 0
    folders = (tiny_run / "model", tiny_run / "checkpoint-12")
    name = "model.encoder.embed_tokens.weight"
    sums = [float(load_file(folder / "model.safetensors")[name].double().sum()) for folder in folders]
    assert sums[0] != sums[1]

    def load_with_the_package(online: bool) -> dict[str, Any]:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", not online)
        monkeypatch.setattr(sys, "argv", sys.argv)
        run_python(["-c", LOAD.format(trust={}, online=online), first])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    found = {}
    for module, load in (
        ("transformers_modules", lambda online: load_without_the_package(hub, tmp_path, first, online)),
        ("hf_vaswani", load_with_the_package),
    ):
        found[module] = load(True)
        assert found[module]["module"] == module and found[module]["sums"] == sums
        hub.log.clear()
        assert load(False) == found[module]
        assert hub.log == []
    assert found["hf_vaswani"]["texts"] == found["transformers_modules"]["texts"]


@pytest.mark.slow
def test_a_hub_that_never_answers_times_out(hub, push, monkeypatch) -> None:
    monkeypatch.setattr(publishing, "HUB_TIMEOUT", 0.5)
    hub.fault(*COMMIT, delay=20, times=None)
    began = time.monotonic()
    assert_fails(push(), "failed, or could not be reached")
    assert time.monotonic() - began < 19
    hub.clear_faults()
    assert push()[0] == 0


@pytest.mark.parametrize("status", [500, 403])
def test_generation_settings_that_cannot_be_downloaded_are_an_error(hub, push, monkeypatch, status) -> None:
    """Without them, the model would load and translate with another beam size."""
    assert push("--checkpoint", "12")[0] == 0
    # Waiting between retries would change nothing.
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    for method in ("HEAD", "GET"):
        hub.fault(method, "generation_config.json", status=status, times=None)
    with pytest.raises(ValueError, match="the Hub did not send it"):
        AutoModelForSeq2SeqLM.from_pretrained("alice/m")
    hub.clear_faults()
    for offline in (False, True):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        assert AutoModelForSeq2SeqLM.from_pretrained("alice/m").generation_config.num_beams == 2


# ---- Revisions ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pinned(hub, tiny_run) -> str:
    """The commit of a model, whose repository has another one by now that cannot be loaded."""
    commit = hub.commit("alice/m", {path.name: path.read_bytes() for path in (tiny_run / "model").iterdir()})
    hub.commit("alice/m", {"config.json": b"{}"})
    return commit


def test_a_verb_loads_the_revision_that_it_is_told(pinned, tiny_run, command, tmp_path) -> None:
    text = tmp_path / "a.en"
    text.write_text("one two\nthree\n")
    expected = command("translate", "--model", str(tiny_run / "model"), str(text))
    assert command("translate", "--model", f"alice/m@{pinned}", str(text)) == expected and expected[0] == 0
    assert command("translate", "--model", "alice/m", "--revision", pinned, str(text)) == expected
    assert command("translate", "--model", "alice/m", str(text))[0] == 2, "the main branch"


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (
            "alice/m",
            ["--revision", "nowhere"],
            "--model is 'alice/m@nowhere', which is neither a local folder nor a model on the Hub: 404",
        ),
        ("alice/m", ["--revision", ""], "--revision is empty"),
        ("alice/m@v1", ["--revision", "v2"], "--revision v2 has no use: alice/m@v1 is local or names a revision"),
        ("LOCAL", ["--revision", "v2"], "--revision v2 has no use"),
    ],
)
def test_a_revision_that_is_not_there_or_has_no_use_is_named(
    pinned, tiny_run, command, tmp_path, model, options, words
) -> None:
    (tmp_path / "a.en").write_text("one two\n")
    name = str(tiny_run / "model") if model == "LOCAL" else model
    assert_fails(command("translate", "--model", name, *options, str(tmp_path / "a.en")), words)


def test_a_download_that_is_cut_is_one_sentence(hub, pinned, command, tmp_path) -> None:
    (tmp_path / "a.en").write_text("one two\n")
    hub.fault("HEAD", "/config.json", cut=0, times=None)
    name = f"alice/m@{pinned}"
    assert_fails(
        command("translate", "--model", name, str(tmp_path / "a.en")),
        f"--model is {name!r}, which cannot be downloaded: Server disconnected",
    )


def test_a_tokenizer_has_a_revision(on_loopback, pinned, tiny_run) -> None:
    vocabulary = load_tokenizer(str(tiny_run / "model")).get_vocab()
    assert load_tokenizer(f"alice/m@{pinned}").get_vocab() == vocabulary
    with pytest.raises(ValueError, match="The tokenizer alice/m@nowhere cannot be loaded"):
        load_tokenizer("alice/m@nowhere")


@pytest.mark.process
def test_a_run_records_the_commits_of_what_it_downloads(hub, pinned, tmp_path) -> None:
    """In a new process, because datasets reads the address of the Hub when it is imported."""
    rows = "".join(json.dumps({"translation": {"en": f"one {i}", "de": f"eins {i}"}}) + "\n" for i in range(40))
    data = hub.commit("datasets/acme/pairs", {"train.jsonl": rows.encode()})
    hub.commit("datasets/acme/pairs", {"train.jsonl": b"damaged"})
    recipe = tiny_recipe(tmp_path, max_steps=2, save_every=2, average_last=1)
    recipe = [each for each in recipe if not each.startswith("--data")]
    recipe += [f"--data.dataset=acme/pairs@{data}", "--data.validation_split=null", "--data.test_split=null"]
    start = f"--initialize.from=alice/m@{pinned}"
    command = [sys.executable, "-m", "hf_vaswani.cli", "train", *recipe, start, "--run_dir", str(tmp_path / "run")]
    environment = os.environ | hub.environment(tmp_path / "home") | {"HF_DATASETS_OFFLINE": "0", "HF_TOKEN": READ}
    end = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert end.returncode == 0, end.stderr
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["commits"] == {f"alice/m@{pinned}": pinned, f"acme/pairs@{data}": data}
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"alice/m at {pinned}" in card and f"acme/pairs at {data}" in card
    found = ModelCard(card).data
    assert found.base_model == "alice/m" and found.datasets == ["acme/pairs"]
