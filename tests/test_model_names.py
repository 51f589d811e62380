"""Each verb and each key finds its model by the same names: a run, a model, a checkpoint, an id on the Hub."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_vaswani.cli import main
from hf_vaswani.hub import code
from hf_vaswani.model_names import commit_of, resolve_model
from hf_vaswani.translation import loading

from .conftest import tiny_recipe

COMMIT = "0" * 40
# Words of a command line, in which NAME is the model, by the option or key that names it.
COMMANDS = {
    "translate --model": ["translate", "--model", "NAME", "TEXT"],
    "translate --table --model": [
        *("translate", "--model", "NAME", "--table", "TABLE", "--column", "en", "--output", "out"),
    ],
    "evaluate --model": ["evaluate", "--model", "NAME", "--data", "TEXT", "TEXT"],
    "score --model": ["score", "--model", "NAME", "TEXT", "TEXT"],
    "align --model": ["align", "--model", "NAME", "TEXT", "TEXT"],
    "explore --model": ["explore", "--model", "NAME", "one"],
    "demo --model": ["demo", "--model", "NAME"],
    "serve --model": ["serve", "--model", "NAME", "--port", "0"],
    "convert SOURCE": ["convert", "NAME", "out", "--to", "onnx"],
    "backtranslation.model": [
        *("backtranslate", "RECIPE", "--backtranslation.model=NAME"),
        *("--backtranslation.text=TEXT", "--backtranslation.output=out.tsv"),
    ],
    "teacher.model": ["distill", "RECIPE", "--teacher.model=NAME"],
    "initialize.from": ["train", "RECIPE", "--initialize.from=NAME"],
    "hub.not_worse_than": ["train", "RECIPE", "--hub.not_worse_than=NAME", "--hub.repo_id=a/b"],
}


@pytest.fixture
def names(tiny_run, tmp_path, monkeypatch) -> dict[str, tuple[str, Path]]:
    """Names of models by their kind, each with the folder that it stands for; the Hub has its place in the cache."""
    repository = tmp_path / "hub" / "models--user--name"
    (repository / "refs").mkdir(parents=True)
    for reference in ("main", "v2"):
        (repository / "refs" / reference).write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(tiny_run / "model", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    checkpoint = sorted(tiny_run.glob("checkpoint-*"))[-1]
    return {
        "run": (str(tiny_run), tiny_run / "model"),
        "model": (str(tiny_run / "model"), tiny_run / "model"),
        "checkpoint": (str(checkpoint), checkpoint),
        "Hub": ("user/name", snapshot),
        "revision": ("user/name@v2", snapshot),
    }


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command of `COMMANDS` up to the loading of its model; returns its error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("one\n")
    (tmp_path / "table.tsv").write_text("en\none\n")
    words = dict(zip(("TEXT", "TABLE"), ("text", "table.tsv"), strict=True))
    recipe = tiny_recipe(tmp_path, max_steps=2)

    def load(folder: Path, *_: object) -> None:
        raise ValueError(f"loads {folder}.")

    monkeypatch.setattr(loading, "load_model", load)

    def run(key: str, name: str) -> str:
        arguments = [words.get(word, word).replace("NAME", name).replace("TEXT", "text") for word in COMMANDS[key]]
        place = arguments.index("RECIPE") if "RECIPE" in arguments else len(arguments)
        arguments[place : place + 1] = recipe if place < len(arguments) else []
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        return said

    return run


@pytest.mark.parametrize("kind", ["run", "model", "checkpoint", "Hub", "revision"])
@pytest.mark.parametrize("key", COMMANDS)
def test_every_verb_and_key_takes_every_kind_of_name(names, command, key, kind) -> None:
    name, folder = names[kind]
    assert f"loads {folder}." in command(key, name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "'nowhere', which does not exist; a Hub id has the form user/name or user/name@v2."),
        ("no/where", "'no/where', which is neither a local folder nor a model on the Hub: "),
        ("unfinished", "unfinished', a run that has no model yet: name one of its checkpoints."),
        ("user/name@", "There is no 'user/name@': a revision follows a Hub id, as in user/name@v2."),
    ],
)
@pytest.mark.parametrize("key", COMMANDS)
def test_a_name_that_is_nothing_is_one_sentence(command, tmp_path, key, name, words) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "recipe.yaml").touch()
    said = command(key, name)
    # Keys of `hub` are checked before a training.
    assert words in said or (key == "hub.not_worse_than" and "must be start, last_push, the folder of a model" in said)
    assert key.split()[-1] in said or "@" in name


def test_what_needs_no_model_to_compute_takes_the_same_names(names, tmp_path, monkeypatch, capsys) -> None:
    renewed: list[Path] = []
    monkeypatch.setattr(code, "renew_code", renewed.append)
    for kind in ("run", "model"):
        assert main(["renew", names[kind][0]]) == 0
    assert renewed == [names["run"][1]] * 2
    assert main(["average", names["run"][0], names["Hub"][0], "--output", str(tmp_path / "mean")]) == 0
    mean, model = (load_file(folder / "model.safetensors") for folder in (tmp_path / "mean", names["model"][1]))
    assert all(mean[name].equal(weight) for name, weight in model.items())
    assert main(["renew", "nowhere"]) == 2
    assert "MODEL is 'nowhere', which does not exist" in capsys.readouterr().err


def test_a_checkpoint_is_its_moving_average_if_it_has_one(names, tmp_path) -> None:
    folder = tmp_path / "checkpoint-12"
    shutil.copytree(names["checkpoint"][1], folder)
    average = {name: weight * 2 for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(average, folder / "ema.safetensors", {"format": "pt"})
    found = loading.load_model(folder).state_dict()
    assert all(found[name].equal(weight) for name, weight in average.items())


def test_the_commit_is_that_of_the_cache(names) -> None:
    for name in ("Hub", "revision"):
        assert commit_of(names[name][0]) == COMMIT
    assert commit_of("user/name", revision="nowhere") is commit_of(names["run"][0]) is None
    assert resolve_model(Path(names["run"][0])) == names["model"][1]
