"""Does data loading scale? Pairs per second and private memory from text to batches, for growing numbers of pairs.

Multi30k, or the built-in corpus if no folder is given, is repeated until there are enough pairs. Each row of the table
that `python benchmarks/data_scale.py [MULTI30K_FOLDER]` prints is measured in fresh processes. Private memory is
anonymous memory: it excludes memory-mapped files, which the system may drop at any time, and counts pages shared by
forked processes once.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from itertools import cycle, islice
from pathlib import Path

import psutil

TRAIN_FILES = ("train.en", "train.de")
PAIRS = (250_000, 1_000_000)
TOKENS_PER_BATCH = 4096
VOCABULARY = 10_000
ARGUMENT = "--measure"


def write_corpus(multi30k: Path | None, folder: Path, count: int) -> dict[str, str]:
    """Writes two line-aligned files of `count` pairs."""
    from hf_vaswani.data.pocket_corpus import read_pocket_corpus

    if multi30k is None:
        sides = list(zip(*read_pocket_corpus()["train"], strict=True))[:2]
    else:
        sides = [tuple((multi30k / name).read_text("utf-8").split("\n")[:-1]) for name in TRAIN_FILES]
    files = {language: folder / f"{count}.{language}" for language in ("en", "de")}
    for path, lines in zip(files.values(), sides, strict=True):
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in islice(cycle(lines), count))
    return {language: str(path) for language, path in files.items()}


def measure(files: dict[str, str], streaming: bool, processes: int, run_dir: str) -> None:
    """Goes from text to batches in this process, and prints a line of JSON with the cost of each phase."""
    import datasets

    from hf_vaswani.recipe import DataRecipe, Recipe, TokenizerRecipe, TrainingRecipe
    from hf_vaswani.training.preparation import batch_order, task_data

    datasets.disable_progress_bars()
    recipe = Recipe(
        run_dir=run_dir,
        data=DataRecipe(train_files=files, streaming=streaming, num_proc=processes if processes > 1 else None),
        tokenizer=TokenizerRecipe(vocab_size=VOCABULARY),
        training=TrainingRecipe(tokens_per_batch=TOKENS_PER_BATCH, data_workers=processes - 1 if streaming else 0),
    )
    started = time.perf_counter()

    def report(phase: str, **more: float) -> None:
        nonlocal started
        sys.stdout.write(json.dumps({"phase": phase, "seconds": time.perf_counter() - started, **more}) + "\n")
        sys.stdout.flush()
        started = time.perf_counter()

    report("start")
    sources = task_data(recipe).read()
    report("read")
    tokenizer = task_data(recipe).make_tokenizer(sources)
    report("vocabulary")
    updates = task_data(recipe).build_updates(sources, tokenizer, batch_order(recipe))
    report("encode")
    target, real, cells, asked = 0, 0, 0, 0.0
    before = time.perf_counter()
    for batches, position in updates.after(updates.start):
        asked += time.perf_counter() - before
        for batch in batches:
            tokens = int((batch["labels"] != -100).sum())
            target += tokens
            real += tokens + int(batch["attention_mask"].sum())
            cells += batch["labels"].numel() + batch["attention_mask"].numel()
        if position.get("epoch") == 0 and position["update"] == len(updates.sampler.updates()):
            break
        if "places" in position and position["places"][0]["passes"] and not position["update"]:
            break
        before = time.perf_counter()
    report("epoch", rate=target / asked, padding=1 - real / cells)


def private_memory(process: psutil.Process) -> int:
    """Bytes of anonymous memory of a process and its children; a page shared by n of them counts 1/n in each."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))
        except OSError:
            # The process has ended.
            continue
    return total


def watch(files: dict[str, str], streaming: bool, processes: int, folder: Path) -> dict[str, dict[str, float]]:
    """Runs [`measure`] in a new process, and returns the cost and the peak memory of each phase."""
    arguments = json.dumps([files, streaming, processes, str(folder / "run")])
    environment = os.environ | {"HF_DATASETS_CACHE": tempfile.mkdtemp(dir=folder), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, ARGUMENT, arguments]
    phases: dict[str, dict[str, float]] = {}
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        done = threading.Event()

        def sample() -> None:
            nonlocal peak
            process = psutil.Process(child.pid)
            while not done.wait(0.2):
                try:
                    peak = max(peak, private_memory(process))
                except psutil.NoSuchProcess:
                    return

        thread = threading.Thread(target=sample)
        thread.start()
        for line in child.stdout:
            phase = json.loads(line)
            phases[phase.pop("phase")] = phase | {"peak": peak}
            peak = 0
        done.set()
        thread.join()
    if child.returncode:
        raise RuntimeError(f"{command} ended with {child.returncode}.")
    return phases


def main() -> None:
    """Prints a row for each way of reading, number of processes and number of pairs."""
    if sys.argv[1:2] == [ARGUMENT]:
        measure(*json.loads(sys.argv[2]))
        return
    multi30k = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    print(
        "| source | pairs | processes | reading, pairs/s | tokenizing, pairs/s | private memory: reading, vocabulary, "
        "tokenizing (MB) | an epoch of batches (MB) | batches, target tokens/s | padding |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for streaming in (False, True):
        for processes in (1, 2):
            for pairs in PAIRS:
                with tempfile.TemporaryDirectory() as name:
                    files = write_corpus(multi30k, Path(name), pairs)
                    phases = watch(files, streaming, processes, Path(name))
                speeds = [f"{pairs / phases[phase]['seconds']:,.0f}" for phase in ("read", "encode")]
                peaks = [phases[phase]["peak"] / 1e6 for phase in ("read", "vocabulary", "encode", "epoch")]
                cells = [
                    "stream" if streaming else "files",
                    f"{pairs:,}",
                    str(processes),
                    *(["", ""] if streaming else speeds),
                    ", ".join(f"{peak:,.0f}" for peak in peaks[:3]),
                    f"{peaks[3]:,.0f}",
                    f"{phases['epoch']['rate']:,.0f}",
                    f"{100 * phases['epoch']['padding']:.1f} %",
                ]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
