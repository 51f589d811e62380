"""How many requests does the server answer, and how fast? Compared with one-by-one calls of the pipeline.

    python benchmarks/serving.py MODEL_FOLDER SOURCE.txt [--clients 64] [--seconds 60] [--ways torch int8 ...]

Each client asks for one sentence after the other, and waits for its translation. The sentences are those of the file,
again and again; which client asks for which is drawn. Before and after, the pipeline translates the sentences one by
one, by as many threads as the server: what a service without a queue could do. `torch` searches by the model's own
settings, `bfloat16` with products in bfloat16, and `float32` and `int8` are CTranslate2's, which searches by those
that come closest.

Prints requests per second, the median and the 99th percentile of the time of a request, how many texts were in a batch
on average, how many answers are missing, how many equal those of the pipeline for the same sentence, and the memory of
the server after a sixth of the time and at the end.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

SETTINGS: dict[str, list[str]] = {
    "torch": [],
    "bfloat16": ["--dtype", "bfloat16"],
    "float32": ["--engine", "ctranslate2", "--approximate"],
    "int8": ["--engine", "ctranslate2", "--approximate", "--compute-type", "int8"],
}
WARM_UP = 5.0


class Server:
    """A server in a process of its own."""

    def __init__(self, model: str, settings: list[str]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.log = Path(self.folder.name) / "log"
        command = [sys.executable, "-m", "hf_vaswani.cli", "serve", "--model", model, "--port", "0", *settings]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        while not (found := re.search(r"http://\S+", self.log.read_text())):
            if self.process.poll() is not None:
                raise SystemExit(self.log.read_text())
            time.sleep(0.1)
        self.address = found[0]

    def megabytes(self) -> float:
        """Returns the resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def stop(self) -> None:
        """Ends the server; an error if anything failed."""
        self.process.terminate()
        code, text = self.process.wait(), self.log.read_text()
        self.folder.cleanup()
        if code != 0 or "Traceback" in text:
            raise SystemExit(text[-2000:])


async def client(
    session: aiohttp.ClientSession,
    address: str,
    body: dict[str, Any],
    sentences: list[str],
    number: int,
    end: float,
    answers: list[tuple[str, str | None, float]],
) -> None:
    """Asks for one sentence after the other, and keeps sentence, answer and seconds."""
    draw = random.Random(number)
    while time.perf_counter() < end:
        sentence, start, text = draw.choice(sentences), time.perf_counter(), None
        async with session.post(f"{address}/translate", json=body | {"q": sentence}) as response:
            if response.status == 200:
                text = (await response.json())["translatedText"]
        answers.append((sentence, text, time.perf_counter() - start))


async def load(server: Server, sentences: list[str], languages: list[str], arguments: Any) -> dict[str, Any]:
    """Lets all clients ask, and returns the figures."""
    body = {"source": languages[0], "target": languages[1]}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def phase(seconds: float) -> list[tuple[str, str | None, float]]:
            answers: list[tuple[str, str | None, float]] = []
            end = time.perf_counter() + seconds
            clients = (
                client(session, server.address, body, sentences, number, end, answers)
                for number in range(arguments.clients)
            )
            await asyncio.gather(*clients)
            return answers

        async def batches() -> tuple[float, float]:
            async with session.get(f"{server.address}/metrics") as response:
                text = await response.text()
            count, total = (
                float(re.search(rf"hf_vaswani_batch_texts_{name} (\S+)", text)[1])  # type: ignore[index]
                for name in ("count", "sum")
            )
            return count, total

        await phase(WARM_UP)
        before, start = await batches(), time.perf_counter()
        first = await phase(arguments.seconds / 6)
        early = server.megabytes()
        answers = first + await phase(arguments.seconds * 5 / 6)
        seconds, after = time.perf_counter() - start, await batches()
    return {
        "answers": answers,
        "rate": len(answers) / seconds,
        "batch": (after[1] - before[1]) / (after[0] - before[0]),
        "memory": (early, server.megabytes()),
    }


def one_by_one(model: str, sentences: list[str]) -> tuple[dict[str, str], list[float]]:
    """Translates the sentences by single calls of the pipeline; returns translations, and seconds of each call."""
    from transformers import pipeline

    import hf_vaswani  # noqa: F401 (registers the classes and the task)

    translate, found, seconds = pipeline("translation", model=model), {}, []
    for sentence in sentences:
        start = time.perf_counter()
        (answer,) = translate(sentence)
        seconds.append(time.perf_counter() - start)
        found[sentence] = answer["translation_text"]
    return found, seconds


def row(name: str, seconds: list[float], rate: float, *more: str) -> str:
    """Returns a row of the table."""
    times = sorted(seconds)
    cells = [name, f"{rate:,.0f}", *(f"{1000 * times[int(share * len(times))]:,.0f}" for share in (0.5, 0.99)), *more]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a trained model")
    parser.add_argument("source", type=Path, help="text to translate, one sentence per line")
    parser.add_argument("--clients", type=int, default=64, help="clients at a time; default: 64")
    parser.add_argument("--seconds", type=float, default=60, help="duration of each way; default: 60")
    parser.add_argument("--ways", nargs="+", default=list(SETTINGS), choices=SETTINGS, help="default: all")
    arguments = parser.parse_args()
    sentences = list(dict.fromkeys(filter(str.strip, arguments.source.read_text(encoding="utf-8").splitlines())))
    languages = json.loads((Path(arguments.model) / "config.json").read_text())["language_pairs"][0]
    packages = ("torch", "transformers", "ctranslate2", "fastapi", "uvicorn")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))
    titles = [
        "",
        "requests/s",
        "median ms",
        "99 % ms",
        "texts of a batch",
        "lost",
        "equal",
        "MB, early and at the end",
    ]
    print(f"\n| {' | '.join(titles)} |\n|---|{'---:|' * (len(titles) - 1)}")
    expected, times = one_by_one(arguments.model, sentences)
    print(row("pipeline, one by one", times, len(times) / sum(times), "1", "", "", ""), flush=True)
    for way in arguments.ways:
        server = Server(arguments.model, SETTINGS[way])
        found = asyncio.run(load(server, sentences, languages, arguments))
        server.stop()
        answers = found["answers"]
        lost = sum(text is None for _, text, _ in answers)
        equal = statistics.fmean(text == expected[sentence] for sentence, text, _ in answers)
        memory = " to ".join(f"{each:,.0f}" for each in found["memory"])
        more = (f"{found['batch']:.1f}", str(lost), f"{equal:.1%}", memory)
        print(row(f"server, {way}", [each for _, _, each in answers], found["rate"], *more), flush=True)
    _, times = one_by_one(arguments.model, sentences)
    print(row("pipeline again", times, len(times) / sum(times), "1", "", "", ""), flush=True)


if __name__ == "__main__":
    main()
