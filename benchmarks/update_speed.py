"""How long does an update of `hf-vaswani train` take, and how much of it is the optimizer's step?

    python benchmarks/update_speed.py {tiny,256,base} [--ways Adam Muon ...] [--tokens 4096] [--r-drop] [--rounds 5]

Updates are made as a training makes them, from random ids in sentences as long as Multi30k's (as WMT's for `base`),
in batches of several shapes, and each outcome is read. Each way has a model of its own, and they take turns. The table
has updates and target tokens per second, the time of the optimizer's step alone, with the norm and the clipping of the
gradients, and the ratio of the times of an update to those of the first way in the same round: median, minimum and
maximum. The ways:

- `Adam`, `Muon`: with these optimizers.
- `Muon of torch`: with `torch.optim.Muon`, which steps matrix after matrix, in bfloat16 on any device.
- `Adam, no graphs`, `Muon, no graphs`: on a GPU, without CUDA graphs.

The share of the matrix rate is that of the matrix products of an update, with their mean time in it, in that of the
same products alone. `--products` says in which format products are: `float32`, `tf32` or `bfloat16`.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from itertools import cycle, islice
from statistics import median
from unittest.mock import patch

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from train_throughput import SETTINGS, Batch, MatrixRate, operations, spread

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.data.batching import BatchOrder, PairCollator, TokenBudgetBatchSampler
from hf_vaswani.interruption import Interruption
from hf_vaswani.memory import keep_freed_memory
from hf_vaswani.recipe import RDropRecipe, TrainingRecipe
from hf_vaswani.training import optimization
from hf_vaswani.training.consistency import TwoPasses
from hf_vaswani.training.optimization import build_optimizer
from hf_vaswani.training.update import Updater

PRECISIONS = {"float32": "no", "tf32": "no", "bfloat16": "bf16"}
WAYS = ("Adam", "Muon", "Muon of torch", "Adam, no graphs", "Muon, no graphs")
# Updates of a way before it is timed: three with each shape of a batch, of which there are fewer than batches.
BATCHES, WARM_UP_ROUNDS = 10, 3
# The mean number of tokens of a sentence, as a logarithm.
LENGTHS = {"base": 3.2}


def make_batches(config: VaswaniConfig, tokens: int, length: float, on_gpu: bool) -> list[Batch]:
    """Makes batches of random ids with at most so many positions a side."""
    random = np.random.default_rng(1)
    count = BATCHES * tokens // round(np.exp(length))
    sides = random.lognormal(length, 0.4, size=(count, 2)).clip(4, 80).astype(np.int64)
    order = BatchOrder(tokens, few_shapes=on_gpu)
    rows = [
        {"number": number, **{f"{side}_ids": random.integers(4, config.vocab_size, n).tolist() for side, n in lengths}}
        for number, lengths in enumerate(zip([["source", "target"]] * count, sides, strict=True))
        for lengths in [list(zip(*lengths, strict=True))]
    ]
    collate = PairCollator(config.pad_token_id or 0, order=order)
    batches = TokenBudgetBatchSampler(sides, order).batches()
    return [collate([rows[number] for number in batch]) for batch in batches[:BATCHES]]


class Way:
    """A model, and the updates that are made with it."""

    def __init__(self, name: str, config: VaswaniConfig, arguments: argparse.Namespace, batches: list[Batch]) -> None:
        torch.manual_seed(1)
        cpu = arguments.device == "cpu"
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=cpu, mixed_precision=PRECISIONS[arguments.products])
        model = VaswaniForConditionalGeneration(config).train()
        if cpu and arguments.products == "bfloat16":
            # As the training does.
            model.set_attn_implementation("eager")
        optimizer = "adam" if name.startswith("Adam") else "muon"
        recipe = TrainingRecipe(
            optimizer=optimizer, clip_norm=25.0, r_drop=RDropRecipe() if arguments.r_drop else None
        )
        of_torch = patch.object(optimization, "Muon", torch.optim.Muon)
        with of_torch if name == "Muon of torch" else patch.dict(os.environ):
            built = build_optimizer(optimizer, model.named_parameters(), learning_rate=1e-4, weight_decay=0.1)
        wrapped, prepared = self.accelerator.prepare(model, built)
        self.updater, self.passes = Updater(self.accelerator, wrapped, prepared, recipe), TwoPasses(recipe, 1, model)
        if name == "Muon of torch":
            # It is not made for a device that decides by itself.
            self.updater.runs_ahead = self.updater.captures_passes = False
        self.graphs = "0" if name.endswith("no graphs") else "1"
        self.batches, self.number, self.pending = cycle(batches), 0, []

    def updates(self, count: int) -> float:
        """Makes updates, and returns the seconds that they take."""
        self.synchronize()
        start, interruption = time.perf_counter(), Interruption()
        with patch.dict(os.environ, {"HF_VASWANI_CUDA_GRAPHS": self.graphs}):
            for batch in islice(self.batches, count):
                numbers, batch = batch["numbers"], {name: part for name, part in batch.items() if name != "numbers"}
                batch, self.number = self.passes(batch, numbers, self.number), self.number + 1
                with self.passes.loss():
                    self.pending.append(self.updater([batch], interruption))
                if len(self.pending) > self.updater.runs_ahead:
                    self.pending.pop(0).outcome()
        self.synchronize()
        return time.perf_counter() - start

    def steps(self, count: int) -> float:
        """Makes steps of the optimizer alone, with gradients of zeros, and returns the seconds of one."""
        updater = self.updater
        for each in updater.plain.parameters():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        step = updater.captured if updater.runs_ahead else lambda: (updater._clip(), updater.optimizer.step())
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        self.synchronize()
        return (time.perf_counter() - start) / count

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()


def matrix_rate(config: VaswaniConfig, batch: Batch, products: str) -> Callable[[], float]:
    """Returns what measures the rate of the products of an update alone."""
    return MatrixRate(config, batch, torch.bfloat16 if products == "bfloat16" else torch.float32).measure


def compare(arguments: argparse.Namespace) -> None:
    """Prints the table."""
    setting = SETTINGS[arguments.model]
    config, tokens = VaswaniConfig(**setting.sizes), arguments.tokens or setting.tokens
    on_gpu = arguments.device == "cuda"
    batches = make_batches(config, tokens, LENGTHS.get(arguments.model, 2.6), on_gpu)
    torch.set_float32_matmul_precision("high" if arguments.products == "tf32" else "highest")
    names = [name for name in arguments.ways if on_gpu or not name.endswith("no graphs")]
    ways = {name: Way(name, config, arguments, batches) for name in names}
    target = sum(int((batch["labels"] != -100).sum()) for batch in batches) / len(batches)
    work = sum(operations(config, batch) for batch in batches) / len(batches) * (2 if arguments.r_drop else 1)
    for way in ways.values():
        way.updates(WARM_UP_ROUNDS * len(batches) if on_gpu else 2)
    measure = matrix_rate(config, batches[0], arguments.products)
    count = arguments.updates or len(batches)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, list[float]] = {name: [] for name in ways}
    rates: list[float] = []
    for _ in range(arguments.rounds):
        rates.append(measure())
        for name, way in ways.items():
            seconds[name].append(way.updates(count) / count)
            steps[name].append(1000 * way.steps(count))
    shapes = {tuple(part.shape for part in batch.values()) for batch in batches}
    options = f"{tokens} tokens a side, products in {arguments.products}{', R-Drop' if arguments.r_drop else ''}"
    print(f"{arguments.model}, {options}, {len(shapes)} shapes, {torch.get_num_threads()} threads.")
    print(f"Matrix products alone: {spread((rate / 1e9 for rate in rates), '{:.0f}')} GFLOP/s")
    print("\n| | updates/s | target tokens/s | step alone, ms | time of an update | share of matrix rate |")
    print("|---|---|---|---|---|---|")
    first = seconds[names[0]]
    for name, found in seconds.items():
        ratios = [one / other for one, other in zip(found, first, strict=True)]
        cells = [spread(1 / each for each in found), f"{target / median(found):,.0f}", spread(steps[name])]
        cells += [spread(ratios), f"{work / median(found) / median(rates):.0%}"]
        print(f"| {' | '.join([name, *cells])} |")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(SETTINGS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["Adam", "Muon", "Muon of torch"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--products", choices=list(PRECISIONS), default="float32")
    parser.add_argument("--tokens", type=int, help="positions a side; default: those of the model")
    parser.add_argument("--r-drop", action="store_true", help="two passes over each pair")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, help="updates of a turn; default: as many as there are batches")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU; default: 1")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch finds no GPU on this machine.")
    counts = (arguments.rounds, arguments.updates, arguments.tokens, arguments.threads)
    if min(count for count in counts if count is not None) < 1:
        parser.error("--rounds, --updates, --tokens and --threads must be at least 1.")
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {where}\n")
    compare(arguments)


if __name__ == "__main__":
    main()
