"""
Fixtures for all tests. Set before any other import: no Hub, temporary caches, waiting threads that sleep, and none of
the progress bars of datasets, which some verbs turn off for the whole process.
"""

import gc
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# A command that a shell starts in the background ignores Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
CACHES = tempfile.TemporaryDirectory(prefix="hf_vaswani_tests_", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = CACHES.name
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a test asserts about training must hold for any seed: `make test-portable` tries others.
SEED = int(os.environ.get("HF_VASWANI_TEST_SEED", "1"))

# By default a training uses all cores, whatever OMP_NUM_THREADS is.
THREADS = os.environ.get("OMP_NUM_THREADS", "null")

ROOT = Path(__file__).resolve().parent.parent
# configs/accelerate has settings of `accelerate launch`, and configs/jobs has jobs: these are no recipes.
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in {"accelerate", "jobs"})
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Pictures of pages are made here; `make pictures` makes those of the manual.
PICTURES = Path(os.environ.get("HF_VASWANI_PICTURES", ROOT / "build" / "pictures"))
MULTI30K = ROOT.parent / "shared" / "data" / "multi30k"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Saves the imports of what attacks the package, and of Ray, where only they are left out."""
    is_process = collection_path.name in ("campaign", "test_cluster.py")
    return True if is_process and "not process" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("variants") is not None:
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        n = next(family[0].iter_markers("variants")).args[0]
        # Drawn by the name: always the same ones, and no parameter has the same value in all of them.
        family.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in family[-(-len(family) // n) :]:
            item.add_marker(pytest.mark.slow)
    if not MULTI30K.is_dir():
        skip = pytest.mark.skip(reason=f"needs Multi30k in {MULTI30K}")
        for item in items:
            if "real_data" in item.keywords:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Spares Python most searches for garbage, and all of them in what is imported and collected, which stays."""
    gc.freeze()
    gc.set_threshold(700, 10, 100)


@pytest.fixture(autouse=True)
def verbosity() -> Iterator[None]:
    """Restores the verbosity of transformers, which a server turns down for its whole process."""
    logger = logging.getLogger("transformers")
    level = logger.level
    yield
    # It has none before the first import.
    logger.setLevel(level or logging.WARNING)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Lets files be written without waiting for the disk: no power fails here that a test would notice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_picture() -> Iterator[None]:
    """Draws one curve for the cards of all trainings, each of which takes longer than its updates."""
    if importlib.util.find_spec("matplotlib") is None:
        yield
        return
    from hf_vaswani.hub import evaluation

    draw, drawn = evaluation.curve_picture, []

    def once(*_: object) -> bytes:
        drawn[:] = drawn or [draw([(step, 1 / step) for step in (1, 2)], [], None, "nats")]
        return drawn[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "curve_picture", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_identifier() -> Iterator[None]:
    """Reads the model of py3langid once, which takes half a second, for all servers and checks."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("py3langid") is not None:
            from py3langid.langid import LanguageIdentifier

            patch.setattr(LanguageIdentifier, "from_model_file", cache(LanguageIdentifier.from_model_file))
        yield


@pytest.fixture
def cuda_graphs() -> Iterator[Any]:
    """Lets the CPU capture and replay; see `cuda_graphs.py`."""
    from .cuda_graphs import graphs_on_the_cpu

    with graphs_on_the_cpu() as graphs:
        yield graphs


@pytest.fixture(params=["host", "device"])
def steps_by(request: pytest.FixtureRequest) -> str:
    """Runs a test twice: the host decides about each update of a training, or the device as on a GPU."""
    if request.param == "device":
        from .cuda_graphs import updates_of_a_gpu

        updates_of_a_gpu(request.getfixturevalue("monkeypatch"), passes=False)
        request.getfixturevalue("cuda_graphs")
    return request.param


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine one with accelerators, as torch sees it; of which kind and how many, it is told."""

    def make(kind: str | None, count: int = 1) -> None:
        import torch

        # Torch knows `npu` once its package is there.
        found = None if kind is None else SimpleNamespace(type=kind) if kind == "npu" else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        if importlib.util.find_spec("ctranslate2") is not None:
            monkeypatch.setattr("ctranslate2.get_cuda_device_count", lambda: count if kind == "cuda" else 0)

    return make


@pytest.fixture
def without_mecab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the packages that segment Japanese and Korean text, whether they are installed or not."""
    for code in ("ja", "ko"):
        monkeypatch.delitem(sys.modules, f"sacrebleu.tokenizers.tokenizer_{code}_mecab", raising=False)
    for name in ("MeCab", "mecab_ko"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """Returns the folder of Multi30k's plain text; tests that use it are marked `real_data`."""
    return MULTI30K / "raw"


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a very small recipe once, with the real command, and returns its run folder."""
    from hf_vaswani.cli import main

    folder = tmp_path_factory.mktemp("tiny")
    assert main(["train", *tiny_recipe(folder, scored=True), "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def teacher(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model that writes something else for each sentence, as one that was trained for longer does."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("teacher")
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_run / "model")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.7)
    # Its embeddings would make it repeat itself.
    model.generation_config.no_repeat_ngram_size = 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_run / "model").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser; tests that use it are marked `browser`."""
    if BROWSER is None:
        pytest.skip("needs Chromium or Chrome, and there is none")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as driver:
        # Without the sandbox, so that it also runs as root, as in a container.
        found = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


def dear(*values: object) -> Any:
    """Returns parameters of a test that is left to `make test-all`, because others cover the same more cheaply."""
    return pytest.param(*values, marks=pytest.mark.slow)


def write_pairs(folder: Path, count: int = 120) -> tuple[Path, Path]:
    """Writes two line-aligned files: numbers spelled out digit by digit in English and in German."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    wörter = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    source, target = folder / "text.en", folder / "text.de"
    numbers = [str(7919 * i % 100_003)[: 1 + i % 5] for i in range(1, count + 1)]
    source.write_text("".join(" ".join(words[int(d)] for d in n) + "\n" for n in numbers), encoding="utf-8")
    target.write_text("".join(" ".join(wörter[int(d)] for d in n) + "\n" for n in numbers), encoding="utf-8")
    return source, target


def tiny_recipe(folder: Path, *, scored: bool = False, **training: object) -> list[str]:
    """Returns the arguments of a recipe that trains on `write_pairs` in a second; `scored`, it validates and tests."""
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
    splits = [f"--data.{split}_files={files}" for split in ("train", *(("validation", "test") if scored else ()))]
    return [str(recipe), *splits, *overrides]


def write_recipe(folder: Path, text: str) -> str:
    """Writes a recipe, and returns its path."""
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def assert_refused(arguments: list[str], *words: str) -> None:
    """Asserts that a recipe is refused in one line of a reasonable length, which has all these words."""
    from hf_vaswani.recipe_file import load_recipe

    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_recipe(arguments)
    said = str(error.value)
    assert all(word in said for word in words), said
    assert "\n" not in said and len(said) < 500
