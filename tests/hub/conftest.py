"""The verbs with a Hub on loopback; and runs on running text that were never trained, but have all records."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml

from hf_vaswani import (
    VaswaniConfig,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
)
from hf_vaswani.cli import main
from hf_vaswani.hub.code import installed_code
from hf_vaswani.recipe import TrainingRecipe
from hf_vaswani.records import Environment, Progress, Result, Text, Validation
from hf_vaswani.run_folder import digests, write_environment, write_progress, write_result, write_validations

from ..children import End
from ..hub_server import Access, HubServer

WRITE, READ, WRONG = "hf_the_writing_token", "hf_the_reading_token", "hf_a_token_of_nobody"
INSTALLED = installed_code({})
CLASSES = {"masked_lm": VaswaniForMaskedLM, "causal_lm": VaswaniForCausalLM}
MEASURES = {
    "masked_lm": {"accuracy": 0.4125, "loss": 3.25, "perplexity": 25.79},
    "causal_lm": {"loss": 3.25, "perplexity": 25.79, "word_perplexity": 1234.5, "byte_perplexity": 2.5},
    "span_corruption": {"loss": 3.25, "perplexity": 25.79},
    "denoise": {"loss": 3.25, "perplexity": 25.79},
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(tokens={WRITE: Access("alice", "write"), READ: Access("alice", "read")}) as server:
        yield server
        assert server.unknown == []


@pytest.fixture
def on_loopback(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes this process a client of the Hub on loopback, with a cache of its own."""
    files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    constants = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_CACHE": str(tmp_path / "cache")}
    for name, value in (constants | {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}).items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    # transformers keeps its client, which has the address of the first Hub.
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)


@pytest.fixture
def run_command(on_loopback: None, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any) -> Callable[..., End]:
    """Runs `hf-vaswani` with the Hub on loopback, and asserts that its output contains no token."""

    def call(*arguments: str, token: str = WRITE) -> End:
        monkeypatch.setenv("HF_TOKEN", token)
        code = main(list(arguments))
        said = capsys.readouterr()
        assert not any(secret in said.out + said.err + caplog.text for secret in (WRITE, READ, WRONG))
        return End(code, said.out, said.err)

    return call


@pytest.fixture
def command(run_command: Callable[..., End]) -> Callable[..., tuple[int, str]]:
    """Does the same, and returns the exit code and what it says, or why it fails."""

    def call(*arguments: str, token: str = WRITE) -> tuple[int, str]:
        end = run_command(*arguments, token=token)
        return end.code or 0, end.out if end.code == 0 else end.err

    return call


@pytest.fixture
def push(command: Callable[..., tuple[int, str]], request: pytest.FixtureRequest) -> Callable[..., tuple[int, str]]:
    """Runs `hf-vaswani push`, by default with the run of the fixture `run`."""

    def call(*options: str, run: Path | None = None, **settings: Any) -> tuple[int, str]:
        folder = run or request.getfixturevalue("run")
        return command("push", str(folder), "--repo-id", "alice/m", *options, **settings)

    return call


def assert_fails(done: tuple[int, str], *words: str) -> None:
    """Asserts that a command fails with one line, which contains all words."""
    code, said = done
    assert code == 2 and all(each in said for each in words) and said.count("\n") == 1, said


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def text_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder of a run on running text."""

    def make(task: str, result: dict[str, Any] | None = None, **sections: Any) -> Path:
        run = tmp_path / "my-run"
        data = {"train_files": "train.txt", "validation_files": "/home/me/dev.txt", "test_files": "/home/me/test.txt"}
        recipe = {"task": task} | {name: keys for name, keys in sections.items() if name != "data"}
        recipe["data"] = data | sections.get("data", {})
        config = VaswaniConfig(vocab_size=40, d_model=16, d_ff=24, num_heads=2, encoder_layers=2, decoder_layers=3)
        model = CLASSES.get(task, VaswaniForConditionalGeneration)(config)
        for folder in (run / "model", run / "checkpoint-6"):
            model.save_pretrained(folder)
            (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        counts = {"train": 9000, "validation": 50, "test": 77}
        write_environment(
            run,
            Environment(
                python="3.11",
                packages={},
                processes=1,
                cpu_threads=1,
                mixed_precision="no",
                seed=1,
                command=["train.py", "my.yaml"],
                data=[Text(direction="en", pairs=counts)],
            ),
        )
        values = {"scores": MEASURES[task], "averaged": ["checkpoint-6"]} | (result or {})
        write_result(run, Result(6, files=digests(run / "model"), **values))
        write_validations(run, [Validation(6, MEASURES[task] | {"loss": 3.5})], TrainingRecipe(best_by="loss"))
        write_progress(run / "checkpoint-6", Progress(6, {}, {}, {}, 0, 1.0, digests(run / "checkpoint-6")))
        (run / "training.jsonl").write_text('{"step": 3, "loss": 4.0}\n{"step": 6, "loss": 3.0}\n')
        return run

    return make
