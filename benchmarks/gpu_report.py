"""How does it run on this GPU? Tests, decoding, training, updates, memory and stops, in at most ten minutes.

    python benchmarks/gpu_report.py [--parts NAME ...] [--output build/gpu_report]
    python benchmarks/gpu_report.py --device cpu --quick

Each part runs in a process of its own with a time limit, so that one that fails or hangs costs only itself. After each
part, `report.md` and `report.json` are written anew, so they are there after an interruption too.

- `tests`: `tests/test_gpu.py`, which compares the GPU with the CPU.
- `decoding`: `decode_speed.py`, ours and Marian; CTranslate2 too if its build can use the GPU.
- `budgets`: text as the verbs translate it, in batches of a CPU and of the device.
- `training`: `train_throughput.py` with random ids, the base model and a small one.
- `updates`: `update_speed.py`, updates as `hf-vaswani train` makes them, with and without CUDA graphs, the optimizer's
  step alone, and the share of the matrix rate.
- `memory`: peak memory of an update and of a beam search, as torch's allocator counts it.
- `stops`: how often a step of a search or an update waits for the GPU, and where. On a CPU, as `tests/test_stops.py`
  counts it.
- `first-stop`: the line at which a step or an update fails if it must not wait at all.

The exit code is 0 if all parts ran, 1 if one did not, and 2 without a GPU. This process needs the standard library
alone, and the parts need torch, transformers and numpy; a part that needs another package says so if it is missing.
`--quick` is there to try the script without a GPU: its sizes are too small to compare anything.
"""

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
# Seconds of the whole report, and of each part; their sum is at most that.
LIMIT = 575
LIMITS = {
    "machine": 20,
    "tests": 165,
    "decoding": 105,
    "budgets": 40,
    "training": 60,
    "updates": 95,
    "memory": 35,
    "stops": 30,
    "first-stop": 25,
}
TITLES = {
    "tests": "Tests",
    "decoding": "Decoding",
    "budgets": "Larger batches",
    "training": "Training",
    "updates": "Updates",
    "memory": "Peak memory",
    "stops": "Stops",
    "first-stop": "The first stop",
}
# Seconds in which a part can print what it has when its time is over.
GRACE = 3
# Lines of a part's stderr in report.json, and in report.md if it failed.
ERROR_LINES, SHOWN_LINES = 200, 12
# Hypotheses of the searches whose stops are counted.
SEARCHES = {"greedy search": 1, "beam search, 4 beams": 4}
# Steps of the two searches whose difference is counted, and the step that must not stop.
STEPS = (10, 50)
WATCHED_STEP = 8
NOT_ON_CPU = "not measured on cpu"


# ---- A part in its own process -----------------------------------------------------------------------------------


@dataclass
class Result:
    """
    The outcome of a part.

    Attributes:
        name (`str`): name of the part.
        status (`str`): "ran", or a sentence that says why not.
        seconds (`float`): duration.
        output (`str`): Markdown that it printed, even if it did not come to its end.
        errors (`str`): the last lines of its stderr.
    """

    name: str
    status: str
    seconds: float = 0.0
    output: str = ""
    errors: str = ""


def run_part(name: str, command: list[str], limit: float, environment: dict[str, str] | None = None) -> Result:
    """
    Runs a command in a process group of its own, which is ended at the limit.

    Args:
        name (`str`): name of the part.
        command (`list[str]`): the command.
        limit (`float`): seconds it may take.
        environment (`dict[str, str]`, *optional*): variables to set for it.

    Returns:
        [`Result`]: with status "interrupted" if this process was interrupted meanwhile.
    """
    start = time.monotonic()
    # What a part leaves in its temporary folder when it is killed is removed with it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        output, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        with output.open("wb") as stdout, errors.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                # An older torch is to use graphs, too.
                env=os.environ | {"TMPDIR": folder, "HF_VASWANI_CUDA_GRAPHS": "1"} | (environment or {}),
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = f"ran past {limit:.0f} s"
            except KeyboardInterrupt:
                status = "interrupted"
            else:
                status = "ran" if code == 0 else "failed"
            end_group(process)
        lines = errors.read_text("utf-8", "replace").splitlines()
        if status == "failed":
            status = f"failed: {last_line(lines) or f'exit code {code}'}"
        seconds = time.monotonic() - start
        return Result(
            name, status, round(seconds, 1), output.read_text("utf-8", "replace"), "\n".join(lines[-ERROR_LINES:])
        )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a group whose leader is `process`, which may have ended."""
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_)
        except ProcessLookupError:
            break
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    process.wait()


def last_line(lines: list[str]) -> str:
    """Returns the last line that is not empty."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def command_of(name: str, arguments: argparse.Namespace) -> list[str]:
    """Returns the command that runs a part."""
    quick = ["--quick"] if arguments.quick else []
    return [sys.executable, __file__, "--part", name, "--device", arguments.device, *quick]


def environment_of(device: str) -> dict[str, str]:
    """Returns the variables of all parts: this tree's package, no network, and no GPU if the CPU is asked for."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # Without a buffer, what a part has printed is there even if it is killed.
    found = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


# ---- The report --------------------------------------------------------------------------------------------------


def tables(text: str) -> list[list[dict[str, str]]]:
    """Reads the Markdown tables of a text: the rows of each, with cells by the title of their column."""
    found: list[list[dict[str, str]]] = []
    titles: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            titles = []
            continue
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        if not titles:
            titles = cells
            found.append([])
        elif set(line) - set("|-: "):
            found[-1].append(dict(zip(titles, cells, strict=False)))
    return found


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Formats a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


def as_markdown(header: dict[str, Any], results: list[Result]) -> str:
    """Formats the report as Markdown."""
    parts = ["# GPU report", table(["", ""], [[key, str(value or "none")] for key, value in header.items()])]
    for result in results:
        parts.append(f"## {TITLES[result.name]} ({result.seconds:.0f} s)")
        if result.status != "ran":
            parts.append(f"**{result.status}**")
        if result.output.strip():
            parts.append(result.output.strip())
        # A single line is in the status already.
        if result.status != "ran" and "\n" in result.errors:
            shown = "\n".join(result.errors.splitlines()[-SHOWN_LINES:])
            parts.append(f"```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def write_report(folder: Path, header: dict[str, Any], results: list[Result]) -> None:
    """Writes `report.md` and `report.json`, each through a temporary name."""
    parts = [{**vars(result), "tables": tables(result.output)} for result in results]
    texts = {
        "report.md": as_markdown(header, results),
        "report.json": json.dumps({"header": header, "parts": parts}, indent=2, ensure_ascii=False) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)


def report(arguments: argparse.Namespace) -> int:
    """Runs the parts, writes the report after each, and returns the exit code."""
    start, began = time.monotonic(), datetime.now(UTC)
    environment = environment_of(arguments.device)
    machine = run_part("machine", command_of("machine", arguments), LIMITS["machine"], environment)
    if machine.status != "ran":
        print(f"torch cannot say what this machine is: {machine.status}", file=sys.stderr)
        return 1 if machine.status == "interrupted" else 2
    header = {"date": f"{began:%Y-%m-%d %H:%M} UTC", **json.loads(machine.output)}
    if arguments.device == "cuda" and header["GPU"] is None:
        print("torch sees no GPU on this machine: --device cpu --quick tries the report without.", file=sys.stderr)
        return 2
    header["options"] = f"--device {arguments.device}{' --quick' if arguments.quick else ''}"
    results: list[Result] = []
    for name in arguments.parts:
        left = LIMIT - GRACE - (time.monotonic() - start)
        if results and results[-1].status == "interrupted":
            results.append(Result(name, "not run: interrupted before it"))
        elif left <= 0:
            results.append(Result(name, f"not run: the {LIMIT} s were over"))
        else:
            results.append(run_part(name, command_of(name, arguments), min(LIMITS[name], left), environment))
        header["seconds"] = round(time.monotonic() - start, 1)
        write_report(arguments.output, header, results)
        print(f"{name}: {results[-1].status}, {results[-1].seconds:.0f} s", flush=True)
    print(arguments.output / "report.md")
    return int(any(result.status != "ran" for result in results))


# ---- The machine, the tests and the other benchmarks --------------------------------------------------------------


def version_of(package: str) -> str:
    """Returns the version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def answer(*command: str) -> str | None:
    """Returns what a command prints, or None if there is no such command, or it fails or hangs."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def commit() -> str | None:
    """Returns the git commit of the tree, if there is one, and whether the tree differs from it."""
    found = answer("git", "rev-parse", "--short", "HEAD")
    changes = answer("git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    return f"{found}, with changes" if found and changes else found


def describe_machine(device: str, quick: bool) -> None:
    """Prints the header of the report as JSON."""
    import torch

    cpu_info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", cpu_info.read_text() if cpu_info.is_file() else "", re.MULTILINE)
    gpu = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None
    driver = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None
    header = {
        "GPU": gpu,
        "driver": driver and driver.splitlines()[0],
        "CUDA of torch": torch.version.cuda,
        "processor": f"{names[0] if names else platform.processor() or 'unknown'}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "hf_vaswani": runpy.run_path(str(ROOT / "hf_vaswani" / "version.py"))["__version__"],
        "commit": commit(),
    }
    print(json.dumps(header))


def need(*packages: str) -> None:
    """Ends this process if a package is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        sys.exit(f"needs {' and '.join(missing)}, which is not installed")


# "NAME OUTCOME [ 10%]" of one process, "[gw0] [ 10%] OUTCOME NAME" of several, "OUTCOME NAME - REASON" in the summary.
OUTCOME = re.compile(r"(?:(tests/\S+::.+?) )?(PASSED|FAILED|SKIPPED|ERROR)\b(?: (tests/\S+::.+))?")


def read_outcome(line: str) -> tuple[str, str, str] | None:
    """Reads the test, outcome and reason from a line of pytest's verbose output; returns None for any other line."""
    found = OUTCOME.search(line)
    if found is None or not (found[1] or found[3]):
        return None
    name, _, reason = (found[1] or found[3]).strip().partition(" - ")
    return name.partition("::")[2], found[2].lower(), reason


def run_tests(device: str, quick: bool) -> None:
    """Runs `tests/test_gpu.py`; prints the number of tests by outcome, and what failed, even if time runs out."""
    need("pytest")
    from hf_vaswani.processes import processors

    workers = min(4, processors() // 2)
    several = ["-n", str(workers)] if workers > 1 and importlib.util.find_spec("xdist") else []
    options = ["-vv", "-rfE", "--tb=short", "--color=no", "-p", "no:cacheprovider", *several]
    outcomes, reasons = {}, {}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "tests/test_gpu.py", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout
        for line in process.stdout:
            sys.stderr.write(line)
            if found := read_outcome(line):
                name, outcomes[name], reasons[name] = found[0], found[1], found[2]
    finally:
        counts = Counter(outcomes.values())
        titles = ["passed", "failed", "error", "skipped"]
        print(table(titles, [[str(counts[title]) for title in titles]]))
        failed = [name for name, outcome in outcomes.items() if outcome in ("failed", "error")]
        print("".join(f"\n- `{name}`: {reasons[name] or 'no reason given'}" for name in failed))
    # 1 is that of failed tests, which are reported.
    if process.wait() > 1:
        sys.exit(f"pytest ended with exit code {process.returncode}")


def run_scripts(*commands: list[str]) -> None:
    """Runs other benchmarks, whose tables go to stdout; after all of them, fails if one of them failed."""
    failures = []
    for command in commands:
        print(f"\n`python benchmarks/{shlex.join(command)}`\n")
        path = str(ROOT / "benchmarks" / command[0])
        done = subprocess.run([sys.executable, path, *command[1:]], stderr=subprocess.PIPE, text=True, cwd=ROOT)
        sys.stderr.write(done.stderr)
        if done.returncode:
            failures.append(f"{command[0]} {command[1]}: {last_line(done.stderr.splitlines()) or done.returncode}")
    if failures:
        sys.exit("; ".join(failures))


def gpus_of_ctranslate2() -> int:
    """Returns how many GPUs CTranslate2 can use, 0 if it is not installed."""
    try:
        import ctranslate2
    except ImportError:
        return 0
    return int(ctranslate2.get_cuda_device_count())


def compare_decoding(device: str, quick: bool) -> None:
    """Runs `decode_speed.py`; CTranslate2 by a command of its own, since it may lack its libraries."""
    size, way = ("tiny", ["--batches", "1", "--beams", "1", "--rounds", "1"]) if quick else ("base", ["--rounds", "2"])
    command = ["decode_speed.py", size, "--device", device, "--no-memory", *way, "--engines"]
    # On a CPU, Marian in bfloat16 takes too long to try anything.
    commands = [[*command, "ours", "ours bfloat16", "Marian"]]
    if device == "cuda":
        few = [] if quick else ["--batches", "32", "--beams", "4"]
        commands = [
            [*command, "ours bfloat16", "ours bfloat16, no graphs", "Marian bfloat16"],
            [*command, "ours", "ours, no graphs", "Marian", *few],
        ]
    if device == "cuda" and gpus_of_ctranslate2() > 0:
        commands.insert(1, [*command, "ours bfloat16", "CTranslate2 bfloat16"])
    else:
        print(f"CTranslate2: {NOT_ON_CPU if device == 'cpu' else 'no build of it that can use the GPU'}.")
    run_scripts(*commands)


def compare_budgets(device: str, quick: bool) -> None:
    """Prints how fast sentences are translated as the verbs do it, in batches of a CPU and of the device."""
    import torch

    from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
    from hf_vaswani.data.tokenizer import train_tokenizer
    from hf_vaswani.model.sentences_vaswani import MAX_POSITIONS
    from hf_vaswani.translation.batches import translate_corpus
    from hf_vaswani.translation.budgets import tokens_on
    from hf_vaswani.translation.quantization import autocast_to

    torch.manual_seed(1)
    words = [first + second for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
    tokenizer = train_tokenizer([" ".join(words)], len(words) + 4, kind="words")
    model = VaswaniForConditionalGeneration(VaswaniConfig(**sizes_of("tiny" if quick else "base"))).eval().to(device)
    # Of 10 to 29 words; each translation has 24 tokens.
    lines = [
        " ".join(words[(i + 7 * k) % len(words)] for k in range(10 + i % 20)) for i in range(8 if quick else 4096)
    ]
    print(table(["number format", "beams", "tokens of a batch", "sentences/s"], []))
    for products in ("float32", "bfloat16"):
        for beams in (1, 4):
            for budget in (MAX_POSITIONS, tokens_on(model.device)):
                settings = {"num_beams": beams, "min_new_tokens": 24, "max_new_tokens": 24}
                with autocast_to(getattr(torch, products), model.device):
                    translate_corpus(
                        model, tokenizer, lines[:: 1 if budget > MAX_POSITIONS else 8], budget, **settings
                    )
                    start = time.perf_counter()
                    translate_corpus(model, tokenizer, lines, budget, **settings)
                    seconds = time.perf_counter() - start
                print(f"| {products} | {beams} | {budget:,} | {len(lines) / seconds:,.0f} |", flush=True)


def compare_training(device: str, quick: bool) -> None:
    """Runs `train_throughput.py` with random ids, for which it needs no corpus and no `datasets`."""
    need("accelerate")
    command = ["train_throughput.py", "--synthetic", "--no-memory", "--model"]
    if quick:
        run_scripts([*command, "tiny", "--tokens", "500", "--updates", "1", "--rounds", "1"])
    else:
        more = ["--updates", "5", "--rounds", "3"]
        run_scripts([*command, "base", *more], [*command, "tiny", *more])


def compare_updates(device: str, quick: bool) -> None:
    """Runs `update_speed.py` for a small model in each number format, and for the base model."""
    need("accelerate")
    command = ["update_speed.py", "tiny", "--device", device, "--rounds", "3", "--r-drop", "--tokens"]
    if quick:
        run_scripts([*command, "100", "--updates", "1"])
        return
    graphs = ["Muon", "Muon, no graphs"]
    base = ["update_speed.py", "base", "--device", device, "--rounds", "3", "--products", "bfloat16", "--ways"]
    run_scripts(
        [*command, "4096", "--ways", *graphs, "Adam", "Adam, no graphs", "Muon of torch"],
        [*command, "4096", "--products", "tf32", "--ways", *graphs],
        [*command, "4096", "--products", "bfloat16", "--ways", *graphs],
        [*command, "16384", "--ways", *graphs],
        [*base, "Adam", "Adam, no graphs", *graphs],
    )


# ---- Work of ours -------------------------------------------------------------------------------------------------


def sizes_of(name: str) -> dict[str, Any]:
    """Returns the fields of a config that `decode_speed.py` knows by a name."""
    from decode_speed import SIZES

    return SIZES[name]


def make_search(size: str, sentences: int, beams: int, products: str, device: str) -> Callable[[int], None]:
    """
    Makes a search with random weights.

    Args:
        size (`str`): name of a size in `decode_speed.py`.
        sentences (`int`): number of sentences, of 20 tokens; every second has padding.
        beams (`int`): number of hypotheses of each; 1 is greedy search.
        products (`str`): "float32" or "bfloat16".
        device (`str`): where it computes.

    Returns:
        A function that translates the sentences to as many tokens as it is given.
    """
    import torch
    from decode_speed import OUR_RULES, RULES

    from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
    from hf_vaswani.translation.quantization import autocast_to

    torch.manual_seed(1)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**sizes_of(size))).eval().to(device)
    ids = torch.randint(4, model.config.vocab_size, (sentences, 20))
    ids[1::2, 12:] = model.config.pad_token_id
    ids = ids.to(device)
    mask = (ids != model.config.pad_token_id).long()
    rules = RULES | OUR_RULES if beams > 1 else {}
    dtype = torch.bfloat16 if products == "bfloat16" else None

    def search(length: int) -> None:
        with torch.inference_mode(), autocast_to(dtype, model.device):
            model.generate(
                ids, attention_mask=mask, num_beams=beams, max_new_tokens=length, min_new_tokens=length, **rules
            )

    return search


def make_batch(vocab_size: int, tokens: int, device: str) -> dict[str, Any]:
    """Makes a batch with this many tokens per side in sentences of 25, of which one has padding on both sides."""
    import torch

    ids = torch.randint(4, vocab_size, (2, max(2, tokens // 25), 25), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids[0])
    mask[0, 20:] = ids[0, 0, 20:] = 0
    ids[1, 0, 20:] = -100
    return {"input_ids": ids[0].to(device), "attention_mask": mask.to(device), "labels": ids[1].to(device)}


def make_update(size: str, tokens: int, products: str, device: str) -> Callable[[], None]:
    """Makes an update of a plain loop, as `train_throughput.py` has it: loss, gradients, Adam."""
    import torch
    from train_throughput import Loop, Setting, loss_of, our_config

    config = our_config(Setting(sizes_of(size), tokens, updates=1))
    precision = torch.bfloat16 if products == "bfloat16" else torch.float32
    loop, batch = Loop("ours", config, precision), make_batch(config.vocab_size, tokens, device)

    def update() -> None:
        loss_of("ours", loop.model, batch, precision).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    return update


def make_training_update(size: str, tokens: int, device: str) -> Callable[[], None]:
    """Makes an update as `hf-vaswani train` makes it, which also reads what is logged of the one before."""
    import torch
    from accelerate import Accelerator

    from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
    from hf_vaswani.interruption import Interruption
    from hf_vaswani.recipe import TrainingRecipe
    from hf_vaswani.training.consistency import TwoPasses
    from hf_vaswani.training.optimization import build_optimizer
    from hf_vaswani.training.update import Updater

    torch.manual_seed(1)
    model = VaswaniForConditionalGeneration(VaswaniConfig(**sizes_of(size))).train()
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if device == "cuda" else "no")
    optimizer = build_optimizer("adam", model.named_parameters(), learning_rate=1e-4)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    batch = make_batch(model.config.vocab_size, tokens, "cpu")
    recipe, interruption, launched = TrainingRecipe(), Interruption(), []
    updater, passes = Updater(accelerator, wrapped, optimizer, recipe), TwoPasses(recipe, 1, model)

    def update() -> None:
        with passes.loss():
            launched.append(updater([dict(batch)], interruption))
        if len(launched) > updater.runs_ahead:
            launched.pop(0).outcome()

    return update


# ---- Memory -------------------------------------------------------------------------------------------------------


def measure_memory(device: str, quick: bool) -> None:
    """Prints the memory before, and at the peak of, a second update and a second search."""
    size, tokens, sentences = ("tiny", 500, 8) if quick else ("base", 25_000, 128)
    print(f"Model `{size}` of `decode_speed.py`; in GiB, as torch's allocator counts it.\n")
    print(table(["work", "products", "before", "peak"], []))
    for products in ("float32", "bfloat16"):
        update = partial(peak_of_an_update, size, tokens, products, device)
        print_row(f"update, {tokens:,} tokens per side | {products}", update)
    for products in ("float32", "bfloat16"):
        search = partial(peak_of_a_search, size, sentences, products, device)
        print_row(f"beam search, {sentences} sentences, 4 beams, 20 tokens | {products}", search)


def peak_of_an_update(size: str, tokens: int, products: str, device: str) -> list[str]:
    """Returns the memory before an update, and at its peak."""
    return peak_of(make_update(size, tokens, products, device), device)


def peak_of_a_search(size: str, sentences: int, products: str, device: str) -> list[str]:
    """Returns the memory before a search, and at its peak."""
    return peak_of(partial(make_search(size, sentences, 4, products, device), 20), device)


def peak_of(work: Callable[[], None], device: str) -> list[str]:
    """Does the work twice, and returns the memory in GiB before, and at the peak of, the second time."""
    import torch

    # The models before this one.
    gc.collect()
    work()
    if device == "cpu":
        return [NOT_ON_CPU, NOT_ON_CPU]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return [f"{each / 2**30:.2f}" for each in (before, torch.cuda.max_memory_allocated())]


# ---- Stops --------------------------------------------------------------------------------------------------------


def place(frames: list[traceback.FrameSummary]) -> str:
    """Returns file and line of the innermost frame that is in the package, or else of the innermost one."""
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT / "hf_vaswani")]
    frame = (ours or frames)[-1]
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"


@contextmanager
def on_gpu_stops(note: Callable[[list[traceback.FrameSummary]], None]) -> Iterator[None]:
    """Calls `note` with the stack whenever torch warns that it waits for the GPU."""
    import torch

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            # Without this function and the one of `warnings` that calls it.
            note(traceback.extract_stack()[:-2])

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def on_cpu_stops(note: Callable[[list[traceback.FrameSummary]], None]) -> AbstractContextManager[Any]:
    """Calls `note` with the stack whenever a function reads from a tensor, as `tests/test_stops.py` recognises it."""
    from tests.test_stops import Stops

    class Noted(Stops):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            before = self.total
            found = super().__torch_function__(function, types, arguments, keywords)
            if self.total > before:
                note(traceback.extract_stack()[:-1])
            return found

    return Noted()


def count_stops(work: Callable[[], None], device: str) -> Counter[str]:
    """Counts the stops of some work, by the lines of the package at which it stops."""
    lines = Counter[str]()
    on_stops = on_gpu_stops if device == "cuda" else on_cpu_stops
    with on_stops(lambda frames: lines.update([place(frames)])):
        work()
    return lines


def without_checks(device: str) -> AbstractContextManager[Any]:
    """Leaves out the check of ids on a CPU, which is not made on a GPU, for updates."""
    from hf_vaswani.model import modeling_vaswani

    return patch.object(modeling_vaswani, "check_ids", lambda *_, **__: None) if device == "cpu" else nullcontext()


def updates_of(device: str, size: str, tokens: int) -> dict[str, Callable[[], Callable[[], None]]]:
    """Returns what makes each kind of update, by its name."""
    products = "bfloat16" if device == "cuda" else "float32"
    return {
        f"an update of a plain loop, {products}": partial(make_update, size, tokens, products, device),
        f"an update of `hf-vaswani train`, {products}": partial(make_training_update, size, tokens, device),
    }


def print_row(title: str, cells: Callable[[], list[str]]) -> None:
    """Prints a row of a table, or why it cannot be measured here: a package or memory is missing."""
    import torch

    try:
        found = cells()
    except (ImportError, torch.OutOfMemoryError) as error:
        found = [f"not measured: {str(error).splitlines()[0]}"]
    print(f"| {' | '.join([title, *found])} |")


def measure_stops(device: str, quick: bool) -> None:
    """Prints how many stops a step of a search and an update have, and at which lines."""
    print("As torch warns of them on a GPU, or on a CPU as `tests/test_stops.py` counts reads from tensors.\n")
    print(table(["work", "stops", "at"], []))
    for name, beams in SEARCHES.items():
        print_row(f"a step of {name}", partial(stops_of_a_step, beams, device))
    with without_checks(device):
        for name, make in updates_of(device, "tiny", 500).items():
            print_row(name, partial(stops_of_an_update, make, device))


def stops_of_a_step(beams: int, device: str) -> list[str]:
    """Returns the stops of a step of a search, from the difference between a short and a long one, and their lines."""
    search = make_search("tiny", 8, beams, "float32", device)
    search(STEPS[0])
    short, long = (count_stops(partial(search, length), device) for length in STEPS)
    long.subtract(short)
    return per(long, STEPS[1] - STEPS[0])


def stops_of_an_update(make: Callable[[], Callable[[], None]], device: str) -> list[str]:
    """Returns the stops of an update, after those that a CUDA graph needs, and their lines."""
    update = make()
    for _ in range(4):
        update()
    return per(count_stops(update, device), 1)


def per(lines: Counter[str], times: int) -> list[str]:
    """Formats the stops of one time, and how many are at each line."""
    found = [f"{line} ({count / times:.2f})" for line, count in lines.most_common() if count]
    return [f"{sum(lines.values()) / times:.2f}", "<br>".join(found)]


# ---- The first stop -----------------------------------------------------------------------------------------------


@contextmanager
def no_stops(device: str) -> Iterator[None]:
    """Raises a `RuntimeError` at the first stop."""
    import torch

    def refuse(_: Any) -> None:
        raise RuntimeError("reads from a tensor")

    if device == "cpu":
        with on_cpu_stops(refuse):
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def search_with_one_step_watched(beams: int, device: str) -> None:
    """Searches, and raises a `RuntimeError` if a step stops, from reading its tokens to reading those of the next."""
    from hf_vaswani.captured import CapturedStep
    from hf_vaswani.model.search_vaswani import EnsembleDecoder

    # On a GPU, a graph reads the tokens.
    owner, name = (CapturedStep, "__call__") if device == "cuda" else (EnsembleDecoder, "read")
    search, step, calls = make_search("tiny", 8, beams, "float32", device), getattr(owner, name), 0
    search(STEPS[0])

    def watched_step(self: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == WATCHED_STEP:
            watched.enter_context(no_stops(device))
        elif calls == WATCHED_STEP + 1:
            watched.close()
        return step(self, *arguments, **keywords)

    with patch.object(owner, name, watched_step), ExitStack() as watched:
        search(STEPS[1])
    if calls <= WATCHED_STEP:
        raise ValueError(f"the search has {calls} steps; step {WATCHED_STEP + 1} was to end the watch")


def watched_update(make: Callable[[], Callable[[], None]], device: str) -> None:
    """Makes five updates, and raises a `RuntimeError` if the last one stops."""
    update = make()
    for _ in range(4):
        update()
    with no_stops(device):
        update()


def first_stop(work: Callable[..., None], *arguments: Any) -> list[str]:
    """Returns "passes", or where the work stops first and what torch says there."""
    try:
        work(*arguments)
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        if not re.search("synchroniz|reads from a tensor", message):
            raise
        return [f"{place(traceback.extract_tb(error.__traceback__))}: {message}"]
    return ["passes"]


def find_first_stops(device: str, quick: bool) -> None:
    """Prints whether a step of a search and an update pass without a stop, or the line at which they stop first."""
    print('By `torch.cuda.set_sync_debug_mode("error")`; on a CPU, the first read from a tensor is made an error.\n')
    print(table(["work", "first stop"], []))
    for name, beams in SEARCHES.items():
        print_row(f"a step of {name}", partial(first_stop, search_with_one_step_watched, beams, device))
    with without_checks(device):
        for name, make in updates_of(device, "tiny", 500).items():
            print_row(name, partial(first_stop, watched_update, make, device))


# ---- The command line ---------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[str, bool], None]] = {
    "machine": describe_machine,
    "tests": run_tests,
    "decoding": compare_decoding,
    "budgets": compare_budgets,
    "training": compare_training,
    "updates": compare_updates,
    "memory": measure_memory,
    "stops": measure_stops,
    "first-stop": find_first_stops,
}


def raise_interrupt(*_: Any) -> None:
    """Handles SIGTERM as Ctrl-C."""
    raise KeyboardInterrupt


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where it computes; default: cuda")
    parser.add_argument("--quick", action="store_true", help="smallest sizes and one round, to try the script")
    parser.add_argument("--parts", nargs="+", choices=list(TITLES), default=list(TITLES), help="default: all")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "gpu_report", help="folder; default: build/gpu_report"
    )
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        # A part whose time is over prints what it has.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        PARTS[arguments.part](arguments.device, arguments.quick)
        return 0
    signal.signal(signal.SIGTERM, raise_interrupt)
    return report(arguments)


if __name__ == "__main__":
    sys.exit(main())
