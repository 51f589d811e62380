"""Before anything is imported: no hub, caches of the tests' own, threads that sleep while they wait."""

import os
import tempfile
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
CACHES = tempfile.TemporaryDirectory(prefix="hf_vaswani_tests_", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = CACHES.name
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A verdict about a training must hold for any seed: `make test-portable` tries others.
SEED = int(os.environ.get("HF_VASWANI_TEST_SEED", "1"))

# A training takes all cores otherwise, whatever the tests were given.
THREADS = os.environ.get("OMP_NUM_THREADS", "null")

ROOT = Path(__file__).resolve().parent.parent
MULTI30K = ROOT.parent / "shared" / "data" / "multi30k"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not MULTI30K.is_dir():
        skip = pytest.mark.skip(reason=f"real text is not there: {MULTI30K}")
        for item in items:
            if "real_data" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """The folder of Multi30k's plain text; tests that ask for it are marked `real_data`."""
    return MULTI30K / "raw"


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a very small recipe, made once by the real command."""
    from hf_vaswani.cli import main

    folder = tmp_path_factory.mktemp("tiny")
    assert main(["train", *tiny_recipe(folder, max_steps=12), "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def write_pairs(folder: Path, count: int = 120) -> tuple[Path, Path]:
    """Two line-aligned files: numbers in words, there and back."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    wörter = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    source, target = folder / "text.en", folder / "text.de"
    numbers = [str(7919 * i % 100_003)[: 1 + i % 5] for i in range(1, count + 1)]
    source.write_text("".join(" ".join(words[int(d)] for d in n) + "\n" for n in numbers), encoding="utf-8")
    target.write_text("".join(" ".join(wörter[int(d)] for d in n) + "\n" for n in numbers), encoding="utf-8")
    return source, target


def tiny_recipe(folder: Path, **training: object) -> list[str]:
    """Command line of a recipe that trains in seconds on `write_pairs`."""
    source, target = write_pairs(folder)
    files = f"{{en: {source}, de: {target}}}"
    recipe = folder / "tiny.yaml"
    recipe.write_text(
        f"seed: {SEED}\n"
        "tokenizer: {vocab_size: 300}\n"
        "model: {d_model: 16, d_ff: 32, num_heads: 2, encoder_layers: 1, decoder_layers: 1}\n"
        "training: {max_steps: 12, tokens_per_batch: 256, warmup_steps: 10, validate_every: 100, save_every: 4,\n"
        f"           keep_last: 3, average_last: 2, cpu_threads: {THREADS}}}\n"
        "evaluation: {max_length: 12, num_beams: 2, length_penalty: 0.8}\n",
        encoding="utf-8",
    )
    overrides = [f"--training.{key}={value}" for key, value in training.items()]
    splits = [f"--data.{split}_files={files}" for split in ("train", "validation", "test")]
    return [str(recipe), *splits, *overrides]
