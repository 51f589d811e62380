"""Tables whose translation is disturbed: by the death of processes of a Ray cluster, and by storage that fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import psutil
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from hf_vaswani.cli import main
from tests.children import LIMIT
from tests.scale.tables import read_output, write_rows

from .judge import FULL, Campaign

WORDS = ["one", "two three", "four five six", "nine"]
ROWS = [{"id": i, "en": f"{WORDS[i % 4]} {WORDS[i % 3]}"} for i in range(600)]


def command(model: Path, table: Path, output: object) -> list[str]:
    columns = ["--column", "en", "--to-column", "de", "--shard-rows", "20"]
    return ["translate", "--model", str(model), "--table", str(table), "--output", str(output), *columns]


@pytest.fixture(scope="module")
def translated(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Translates a table without a disturbance; returns the table, and the rows with their translations."""
    folder = tmp_path_factory.mktemp("tables")
    table = write_rows(folder / "table.jsonl", ROWS)
    assert main(command(teacher, table, folder / "right")) == 0
    return table, read_output(folder / "right")


def records(output: Path) -> dict[str, int]:
    """Returns when the record of each shard was written."""
    return {path.name: path.stat().st_mtime_ns for path in (output / "shards").glob("*.json")}


def workers_of(driver: int) -> list[int]:
    """Returns the ids of the processes of Ray that translate."""
    children = psutil.Process(driver).children(recursive=True)
    return sorted(each.pid for each in children if "MapWorker" in " ".join(each.cmdline()))


@pytest.mark.skipif(not FULL, reason="only in `make campaign`: starting Ray takes ten seconds")
def test_a_table_is_whole_whoever_dies(campaign: Campaign, teacher, translated, tmp_path) -> None:
    table, right = translated
    attacks = [(who, at) for who in ("worker", "driver") for at in range(1, 29)]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    for who, at in campaign.drawn(attacks, 2, 150, by=lambda attack: attack[0]):
        output, attack = tmp_path / f"{who}-{at}", f"{who} killed after {at} shards"
        on_ray = [sys.executable, "-m", "hf_vaswani.cli", *command(teacher, table, output)]
        on_ray += ["--engine-cluster", "ray", "--workers", "2"]
        driver = subprocess.Popen(on_ray, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        until = time.monotonic() + LIMIT
        while len(records(output)) < at and driver.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        done = {}
        if who == "worker" and (workers := workers_of(driver.pid)):
            os.kill(campaign.random.choice(workers), signal.SIGKILL)
        elif who == "driver":
            driver.kill()
            driver.communicate()
            done = records(output)
            driver = subprocess.Popen(on_ray, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            _, said = driver.communicate(timeout=2 * LIMIT)
        except subprocess.TimeoutExpired:
            driver.kill()
            campaign.note(attack, "hung")
            continue
        if driver.returncode:
            campaign.note(attack, f"exit code {driver.returncode}: {said[-2000:]}")
            continue
        again = [name for name, when in done.items() if records(output)[name] != when]
        wrong = "other rows" if read_output(output) != right else f"{again} were translated again" if again else None
        campaign.note(attack, wrong)


class Faulty(DirFileSystem):
    """The storage `faulty://`: a folder, the n-th access to which fails, or all from the n-th on."""

    protocol = "faulty"
    cachable = False
    folder, at, for_good, accesses = "", 0, False, 0

    def __init__(self, **_) -> None:
        super().__init__(self.folder, LocalFileSystem())

    @classmethod
    def access(cls) -> None:
        cls.accesses += 1
        if cls.at and (cls.accesses == cls.at or (cls.for_good and cls.accesses > cls.at)):
            raise OSError("503 Slow Down")


def failing(name: str):
    def method(self, *arguments, **keywords):
        self.access()
        return getattr(super(Faulty, self), name)(*arguments, **keywords)

    return method


for name in ("isdir", "ls", "cat", "cat_file", "exists", "makedirs", "put_file", "mv", "rm_file", "size", "open"):
    setattr(Faulty, name, failing(name))


def test_storage_that_fails_leaves_whole_files(campaign: Campaign, teacher, translated, tmp_path, capsys) -> None:
    _, right = translated
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    source = write_rows(tmp_path / "table.jsonl", ROWS[:100])
    Faulty.folder, Faulty.at, Faulty.accesses = str(tmp_path / "count"), 0, 0
    (tmp_path / "count").mkdir()
    assert main(command(teacher, source, "faulty://out")) == 0
    accesses = Faulty.accesses
    assert accesses > 30
    attacks = [(at, for_good) for at in range(1, accesses + 1) for for_good in (False, True)]
    for at, for_good in campaign.drawn(attacks, 3, 60):
        folder = tmp_path / f"{at}-{for_good}"
        folder.mkdir()
        Faulty.folder, Faulty.at, Faulty.accesses, Faulty.for_good = str(folder), at, 0, for_good
        capsys.readouterr()
        code, said = main(command(teacher, source, "faulty://out")), capsys.readouterr().err
        attack = f"access {at} of {accesses} fails" + (", and all later ones" if for_good else "")
        if code not in (0, 2) or "Traceback" in said or (code == 2 and "hf-vaswani: " not in said):
            campaign.note(attack, f"exit code {code}: {said[-2000:]}")
            continue
        Faulty.at = 0
        code = main(command(teacher, source, "faulty://out"))
        found = read_output(folder / "out") if code == 0 else None
        left = [str(path) for path in folder.rglob("*.writing")]
        campaign.note(
            attack, f"exit code {code}" if code else "other rows" if found != right[:100] else str(left or "") or None
        )
