"""What does Ray cost where a table is translated, and does the memory stay what it is?

    python benchmarks/tables.py MODEL TEXT [--rows 40000] [--many 1000000] [--rounds 3] [-- OPTIONS]

Makes a Parquet table of the lines of TEXT, which are repeated until there are as many rows as asked for, and
translates it by `hf-vaswani translate --table`: by one process and by two under torchrun, by one worker and by two on
a Ray cluster of this machine, one thread each. The ways take turns. OPTIONS are those of the command, such as
--num-beams 1.

Prints the rows per second between the first shard that is done and the last (median, minimum and maximum over the
rounds), and the seconds until the first one. Then the largest memory of all processes together after a tenth of
`--many` rows and after all of them, by two workers on Ray.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from tabulate import tabulate

CLI = [sys.executable, "-m", "hf_vaswani.cli"]
TWO = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    "--module",
    "hf_vaswani.cli",
]
WAYS: dict[str, tuple[list[str], list[str]]] = {
    "one process": (CLI, []),
    "Ray, one worker": (CLI, ["--engine-cluster", "ray", "--workers", "1"]),
    "two processes": (TWO, []),
    "Ray, two workers": (CLI, ["--engine-cluster", "ray", "--workers", "2"]),
}


def write_table(lines: list[str], rows: int, path: Path) -> None:
    """Writes a table of so many rows."""
    with pq.ParquetWriter(path, pa.schema([("id", pa.int64()), ("text", pa.string())])) as writer:
        for start in range(0, rows, 100_000):
            numbers = range(start, min(rows, start + 100_000))
            texts = [lines[number % len(lines)] for number in numbers]
            writer.write_table(pa.table({"id": numbers, "text": texts}))


def translate(way: str, table: Path, output: Path, model: str, options: list[str]) -> subprocess.Popen:
    """Starts the command in one of the ways."""
    shutil.rmtree(output, ignore_errors=True)
    program, more = WAYS[way]
    command = ["translate", "--model", model, "--table", str(table), "--output", str(output), "--column", "text"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen([*program, *command, *more, *options], env=environment, stderr=subprocess.DEVNULL)


def speed(way: str, table: Path, output: Path, model: str, options: list[str], rows: int) -> tuple[float, float]:
    """Returns the rows per second between the first shard that is done and the last, and the seconds before."""
    begun = time.time()
    if translate(way, table, output, model, options).wait():
        raise SystemExit(f"{way} has failed.")
    times = sorted(path.stat().st_mtime for path in (output / "shards").iterdir())
    return rows * (len(times) - 1) / len(times) / (times[-1] - times[0]), times[0] - begun


def memory(way: str, table: Path, output: Path, model: str, options: list[str]) -> list[tuple[int, float]]:
    """Translates, and returns how many shards were done and the memory of all its processes in MB, twice a second."""
    process, found = translate(way, table, output, model, options), []
    while process.poll() is None:
        tree = [psutil.Process(process.pid)]
        total = 0.0
        try:
            tree += tree[0].children(recursive=True)
        except psutil.NoSuchProcess:
            break
        for each in tree:
            try:
                # Without what processes share, such as Ray's store of objects.
                total += each.memory_full_info().uss / 1e6
            except psutil.Error:
                continue
        done = len(list((output / "shards").iterdir())) if (output / "shards").is_dir() else 0
        found.append((done, total))
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(f"{way} has failed.")
    return found


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("text", type=Path, help="file of sentences, one per line")
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the table; default: 40000")
    parser.add_argument("--many", type=int, default=1_000_000, help="rows for the memory; default: 1000000")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; default: 3")
    arguments, options = parser.parse_known_args()
    options = [option for option in options if option != "--"]
    lines = arguments.text.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        table, output = folder / "table.parquet", folder / "output"
        write_table(lines, arguments.rows, table)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        short = [*options, "--shard-rows", str(max(1, arguments.rows // 20))]
        for _ in range(arguments.rounds):
            for way in WAYS:
                found[way].append(speed(way, table, output, arguments.model, short, arguments.rows))
        print_speeds(found)
        if arguments.many:
            write_table(lines, arguments.many, table)
            long = [*options, "--shard-rows", str(max(1, arguments.many // 100))]
            seen = memory("Ray, two workers", table, output, arguments.model, long)
            for share in (10, 100):
                most = max(size for done, size in seen if done <= share)
                print(f"largest memory until {arguments.many * share // 100:,} rows: {most:,.0f} MB")


def print_speeds(found: dict[str, list[tuple[float, float]]]) -> None:
    """Prints the table of speeds; Ray is compared with as many processes without it, in the same round."""
    rows: list[list[Any]] = []
    for way, results in found.items():
        without = {"Ray, one worker": "one process", "Ray, two workers": "two processes"}.get(way, way)
        ratios = [mine / other for (mine, _), (other, _) in zip(results, found[without], strict=True)]
        rates = [rate for rate, _ in results]
        rows.append(
            [
                way,
                f"{median(rates):,.0f}",
                "" if without == way else f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{median(start for _, start in results):.0f}",
            ]
        )
    headers = ["way", "rows/s", "of the same without Ray", "seconds until the first shard"]
    print(tabulate(rows, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
