"""How good are fast translations? BLEU and sentences per second of a teacher, its students, and all engines.

    python benchmarks/pareto.py MULTI30K_FOLDER RUNS_FOLDER [--picture pareto.png] [--section.key value ...]

The text is that of docs/reproducing.md, in MULTI30K_FOLDER/tok: lower-cased and tokenised English and German. The
teacher is configs/multi30k_en_de.yaml with R-Drop. Students of several sizes by configs/students/multi30k.yaml learn
its translations, and the same networks learn the text itself. Others, by configs/students/multi30k_shrunk.yaml, keep
layers of the teacher, and learn its translations with R-Drop. An interrupted training is resumed, and a complete one
is not repeated. All options after the folders override keys of every training.

Then each model translates the test set in several ways: text to text by the pipeline, by one thread, sorted by
length, in a process of its own. The ways take turns, for several rounds. Marian is the teacher in transformers' class.
Prints the table (BLEU, chrF, parameters, size of the weights, sentences per second with batches of 64 and of 1, and
the speedup over the teacher's beam search in float32: median, minimum and maximum over the rounds), and draws it.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from adaptation import ROOT, train

TEACHER, STUDENTS_OF_IT = ROOT / "configs" / "multi30k_en_de.yaml", ROOT / "configs" / "students"
STUDENT, SHRUNK_STUDENT = STUDENTS_OF_IT / "multi30k.yaml", STUDENTS_OF_IT / "multi30k_shrunk.yaml"
SPLITS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
# Of one process in place of two.
R_DROP = {
    "model.dropout": 0.1,
    "training.r_drop": {"alpha": 5.0},
    "training.tokens_per_batch": 1024,
    "training.accumulation_steps": 4,
}
# Layers of encoder and decoder, d_model, d_ff.
STUDENTS = {"6+1": (6, 1, 128, 256), "4+1": (4, 1, 128, 256), "2+1": (2, 1, 128, 256), "6+1 narrow": (6, 1, 64, 128)}
# Layers of the teacher that are kept.
SHRUNK = {"4+2 shrunk": (4, 2), "3+2 shrunk": (3, 2), "4+1 shrunk": (4, 1)}
# Sentences of a round, by batch size.
SENTENCES = {64: 1000, 1: 100}


@dataclass(frozen=True)
class Way:
    """One way to translate."""

    model: str  # name of a run
    engine: str  # "torch", "Marian" or "CTranslate2"
    format: str  # of numbers
    beams: int


# ---- Training ----------------------------------------------------------------------------------------------------


def train_all(text: Path, runs: Path, more: list[str]) -> list[str]:
    """Trains the teacher and all students, and returns the names of their runs."""
    options: dict[str, Any] = {"data.dataset": None, "evaluation.tokenize": "none", "evaluation.lowercase": True}
    for split, name in SPLITS.items():
        options[f"data.{split}_files"] = {side: str(text / f"{name}.lc.norm.tok.{side}") for side in ("en", "de")}
    train(runs / "teacher", options | R_DROP, more, TEACHER)
    taught = {"teacher.model": str(runs / "teacher"), "teacher.folder": str(runs / "translations")}
    names = ["teacher"]
    for name, (encoder_layers, decoder_layers, d_model, d_ff) in STUDENTS.items():
        sizes = {
            "model.encoder_layers": encoder_layers,
            "model.decoder_layers": decoder_layers,
            "model.d_model": d_model,
            "model.d_ff": d_ff,
            "training.accumulation_steps": 2,
        }
        train(runs / name, options | sizes | taught, more, STUDENT, "distill")
        # The text itself needs the dropout of its recipe.
        alone = {"teacher.model": None, "teacher.choose": "model", "model.dropout": 0.25}
        train(runs / f"{name} alone", options | sizes | alone, more, STUDENT)
        names += [name, f"{name} alone"]
    for name, (encoder_layers, decoder_layers) in SHRUNK.items():
        layers = {"model.encoder_layers": encoder_layers, "model.decoder_layers": decoder_layers}
        shrunk = {"initialize.from": str(runs / "teacher")} | layers
        train(runs / name, options | shrunk | taught, more, SHRUNK_STUDENT, "distill")
        names.append(name)
    return names


# ---- One way in its own process ----------------------------------------------------------------------------------


def load(way: Way, folder: Path) -> Any:
    """Returns the pipeline of a way."""
    import torch
    from transformers import AutoTokenizer, pipeline

    import hf_vaswani

    torch.set_num_threads(1)
    # In float32 and greedily, CTranslate2's rules are the model's; all others are the nearest.
    options: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(folder)}
    model: Any = str(folder)
    if way.engine == "CTranslate2":
        options |= {"engine": "ctranslate2", "compute_type": way.format, "approximate": True}
    elif way.engine == "Marian":
        from hf_vaswani.conversion.marian import to_marian

        model = to_marian(hf_vaswani.VaswaniForConditionalGeneration.from_pretrained(folder)).eval()
    elif way.format == "bfloat16":
        options["autocast"] = "bfloat16"
    return pipeline("translation", model=model, **options)


def serve(way: Way, folder: Path) -> None:
    """Reads one batch size and sentences per line, and answers each with seconds and translations."""
    answers = os.fdopen(os.dup(1), "w")
    translate = load(way, folder)
    rules: dict[str, Any] = {"num_beams": way.beams}
    if way.engine == "Marian":
        rules |= {"max_new_tokens": 60}
        if way.beams > 1:
            rules |= {"length_penalty": 1.0, "early_stopping": True}
    for line in sys.stdin:
        task = json.loads(line)
        start = time.perf_counter()
        found = translate(task["sentences"], batch_size=task["batch"], **rules)
        seconds = time.perf_counter() - start
        texts = [each["translation_text"] for each in found]
        answers.write(json.dumps({"seconds": seconds, "translations": texts}) + "\n")
        answers.flush()


class Server:
    """A process that translates in one way."""

    def __init__(self, way: Way, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(asdict(way)), str(folder), "."],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def ask(self, sentences: Sequence[str], batch: int) -> dict[str, Any]:
        """Translates sentences, and returns seconds and translations."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"sentences": sentences, "batch": batch}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("A process ended early; its error is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Ends the process."""
        self.process.communicate()


# ---- Table and picture -------------------------------------------------------------------------------------------


def ways_of(names: Sequence[str]) -> list[Way]:
    """Returns all ways to translate with these models; the first is what the others are compared with."""
    ways = [
        Way("teacher", "torch", "float32", 5),
        Way("teacher", "Marian", "float32", 5),
        Way("teacher", "torch", "bfloat16", 5),
        Way("teacher", "CTranslate2", "float32", 5),
        Way("teacher", "CTranslate2", "int8", 5),
    ]
    for name in names:
        if name != "teacher":
            ways += [Way(name, "torch", "float32", 5), Way(name, "CTranslate2", "int8", 5)]
        ways += [Way(name, "torch", "float32", 1), Way(name, "CTranslate2", "int8", 1)]
    return ways


def measure(ways: list[Way], runs: Path, source: list[str], rounds: int) -> list[dict[str, Any]]:
    """Translates in turns, and returns for each way its seconds by batch size and its translations."""
    order = sorted(range(len(source)), key=lambda number: len(source[number].split()), reverse=True)
    results: list[dict[str, Any]] = [{size: [] for size in SENTENCES} for _ in ways]
    servers = [Server(way, runs / way.model / "model") for way in ways]
    for server in servers:
        for batch in SENTENCES:
            server.ask([source[number] for number in order[: 2 * batch]], batch)
    for batch, count in SENTENCES.items():
        chosen = order[:: len(order) // min(count, len(order))]
        for _ in range(rounds):
            for server, result in zip(servers, results, strict=True):
                answer = server.ask([source[number] for number in chosen], batch)
                result[batch].append(answer["seconds"] / len(chosen))
                if len(chosen) == len(source):
                    result["translations"] = [
                        text for _, text in sorted(zip(chosen, answer["translations"], strict=True))
                    ]
    for server in servers:
        server.stop()
    return results


def row_of(way: Way, result: dict[str, Any], first: dict[str, Any], folder: Path, target: list[str]) -> dict[str, Any]:
    """Returns the figures of a way."""
    from safetensors import safe_open

    from hf_vaswani.metrics import score

    scores = score(result["translations"], target, tokenize="none", lowercase=True)
    with safe_open(folder / "model.safetensors", "pt") as file:
        parameters = sum(_count(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (it is no dict)
    size = {"int8": 1, "bfloat16": 4, "float32": 4}[way.format] * parameters / 1e6
    row = asdict(way) | {"bleu": scores["bleu"], "chrf": scores["chrf"], "parameters": parameters, "size": size}
    for batch in SENTENCES:
        ratios = [slow / fast for slow, fast in zip(first[batch], result[batch], strict=True)]
        row[f"speed {batch}"] = 1 / median(result[batch])
        row[f"speedup {batch}"] = (median(ratios), min(ratios), max(ratios))
    return row


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the figures as Markdown."""
    titles = ["model", "engine", "numbers", "beam", "BLEU", "chrF", "parameters", "MB"]
    titles += [f"sentences/s, batch {batch} | times the first row" for batch in SENTENCES]
    print(f"| {' | '.join(titles)} |\n|---|---|---|{'---:|' * (5 + 2 * len(SENTENCES))}")
    for row in rows:
        cells = [row["model"], row["engine"], row["format"], str(row["beams"])]
        cells += [f"{row['bleu']:.2f}", f"{row['chrf']:.2f}", f"{row['parameters'] / 1e6:.1f} M", f"{row['size']:.1f}"]
        for batch in SENTENCES:
            middle, least, most = row[f"speedup {batch}"]
            cells += [f"{row[f'speed {batch}']:,.0f}", f"{middle:.1f} ({least:.1f} to {most:.1f})"]
        print(f"| {' | '.join(cells)} |")


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draws BLEU over sentences per second."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    markers = {("torch", "float32"): "o", ("torch", "bfloat16"): "h", ("Marian", "float32"): "X"}
    markers |= {("CTranslate2", "float32"): "s", ("CTranslate2", "int8"): "D"}
    models = list(dict.fromkeys(row["model"].removesuffix(" alone") for row in rows))
    colors = {model: f"C{number}" for number, model in enumerate(models)}
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    batch = max(SENTENCES)
    for row in rows:
        color = colors[row["model"].removesuffix(" alone")]
        face = "none" if row["model"].endswith(" alone") else color
        marker = markers[row["engine"], row["format"]]
        size = 60 if row["beams"] > 1 else 30
        axes.scatter(row[f"speed {batch}"], row["bleu"], size, facecolors=face, edgecolors=color, marker=marker)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"sentences per second, one thread, batches of {batch}")
    axes.set_ylabel("BLEU")
    axes.grid(alpha=0.3, which="both")
    entries = [Line2D([], [], color=color, marker="o", linestyle="", label=name) for name, color in colors.items()]
    entries.append(
        Line2D([], [], color="gray", marker="o", markerfacecolor="none", linestyle="", label="not distilled")
    )
    entries += [
        Line2D([], [], color="gray", marker=marker, linestyle="", label=f"{engine} {number_format}")
        for (engine, number_format), marker in markers.items()
    ]
    entries.append(Line2D([], [], color="gray", marker="o", markersize=8, linestyle="", label="beam 5"))
    entries.append(Line2D([], [], color="gray", marker="o", markersize=5, linestyle="", label="greedy"))
    axes.legend(handles=entries, fontsize=8, loc="lower left", ncols=2)
    figure.savefig(file, dpi=150, metadata={"Software": None})


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of Multi30k, with the folder tok")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; default: 3")
    parser.add_argument("--picture", type=Path, default=Path("pareto.png"), help="file of the picture")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments, more = parser.parse_known_args()
    if arguments.serve:
        serve(Way(**json.loads(arguments.serve)), arguments.folder)
        return
    text = arguments.folder / "tok"
    names = train_all(text, arguments.runs, more)
    source, target = (
        (text / f"{SPLITS['test']}.lc.norm.tok.{side}").read_text(encoding="utf-8").splitlines()
        for side in ("en", "de")
    )
    ways = ways_of(names)
    results = measure(ways, arguments.runs, source, arguments.rounds)
    rows = [
        row_of(way, result, results[0], arguments.runs / way.model / "model", target)
        for way, result in zip(ways, results, strict=True)
    ]
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "ctranslate2"))
    print(f"{', '.join(versions)}, one thread\n")
    print_table(rows)
    draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
