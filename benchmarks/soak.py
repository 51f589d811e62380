"""Do memory, open files and threads stay what they are, while models translate for half an hour?

    python benchmarks/soak.py MODEL TEXT [--minutes 30] [--clients 4]

Two processes work at the same time, one thread each: the server, which several clients ask for the lines of TEXT one
after the other, and a pipeline that translates these lines in batches again and again, by torch and by CTranslate2 in
turns. Twice a minute their resident memory, file handles and threads are counted. Prints their means over the second
fifth of the time and over the last, and how many sentences were translated; a request that fails ends the work.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import psutil
from tabulate import tabulate

PIPELINE = """
import itertools, sys
import torch
from transformers import AutoTokenizer, pipeline
import hf_vaswani
torch.set_num_threads(1)
folder, text = sys.argv[1:]
lines = open(text, encoding="utf-8").read().splitlines()
ways = [pipeline("translation", model=folder, tokenizer=AutoTokenizer.from_pretrained(folder), **more)
        for more in ({}, {"engine": "ctranslate2", "approximate": True})]
for translate in itertools.cycle(ways):
    assert len(translate(lines, batch_size=32)) == len(lines)
    print(len(lines), flush=True)
"""


def ask(address: str, lines: list[str], languages: tuple[str, str], until: float, answers: list[int]) -> None:
    """Asks for one line after the other; appends the number of characters of each answer."""
    draw = random.Random(threading.get_ident())
    while time.monotonic() < until:
        body = {"q": draw.choice(lines), "source": languages[0], "target": languages[1]}
        request = urllib.request.Request(
            f"{address}/translate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answers.append(len(json.load(answer)["translatedText"]))


def start_server(model: str, folder: Path) -> tuple[subprocess.Popen, str]:
    """Starts the server, and returns it with its address."""
    log = folder / "log"
    command = [sys.executable, "-m", "hf_vaswani.cli", "serve", "--model", model, "--port", "0"]
    with log.open("w") as file:
        server = subprocess.Popen(command, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not (found := re.search(r"http://\S+", log.read_text())):
        if server.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.1)
    return server, found[0]


def counts(process: psutil.Process) -> tuple[float, int, int]:
    """Returns resident memory in MB, file handles and threads."""
    return process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("text", type=Path, help="file of sentences, one per line")
    parser.add_argument("--minutes", type=float, default=30, help="duration; default: 30")
    parser.add_argument("--clients", type=int, default=4, help="clients of the server; default: 4")
    arguments = parser.parse_args()
    lines = [line for line in arguments.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    (pair,) = json.loads((Path(arguments.model) / "config.json").read_text(encoding="utf-8"))["language_pairs"]
    with tempfile.TemporaryDirectory() as temporary:
        server, address = start_server(arguments.model, Path(temporary))
        bulk = subprocess.Popen(
            [sys.executable, "-c", PIPELINE, arguments.model, str(arguments.text)], stdout=subprocess.PIPE, text=True
        )
        until, answers, translated = time.monotonic() + 60 * arguments.minutes, list[int](), list[int]()
        work: list[Callable[[], None]] = [lambda: translated.extend(map(int, bulk.stdout or []))]
        work += [lambda: ask(address, lines, tuple(pair), until, answers)] * arguments.clients
        for each in work:
            threading.Thread(target=each, daemon=True).start()
        samples: dict[str, list[tuple[float, int, int]]] = {"server": [], "pipeline": []}
        while time.monotonic() < until:
            time.sleep(min(30, 6 * arguments.minutes))
            for name, process in (("server", server), ("pipeline", bulk)):
                if process.poll() is not None:
                    raise SystemExit(f"The {name} has ended.")
                samples[name].append(counts(psutil.Process(process.pid)))
        for process in (server, bulk):
            process.terminate()
            process.wait()
    rows = []
    for name, found in samples.items():
        fifth = max(1, len(found) // 5)
        for i, unit in enumerate(("memory, MB", "file handles", "threads")):
            early = mean(each[i] for each in found[fifth : 2 * fifth] or found)
            rows.append([name, unit, f"{early:,.1f}", f"{mean(each[i] for each in found[-fifth:]):,.1f}"])
    print(tabulate(rows, ["process", "", "second fifth", "last fifth"], tablefmt="github"))
    print(f"\n{len(answers):,} requests were answered, and the pipeline translated {sum(translated):,} sentences.")


if __name__ == "__main__":
    main()
