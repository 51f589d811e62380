"""Shards on a real Ray cluster of this machine: the rows of one process, whatever dies meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hf_vaswani.scale.cluster import MAX_ATTEMPTS, Workers, translate_on_ray
from hf_vaswani.scale.worker import ShardWorker, TextTranslator

from ..conftest import ROOT
from .tables import load, manifest, read_output, read_rejected, upper, write_rows

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.process

ROWS = [{"id": i, "en": f"row {i}" if i % 17 else None} for i in range(100)]


@pytest.fixture(scope="module")
def cluster():
    """Starts Ray with two cores; the tests' own modules are found by its processes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("table") / "table.parquet", ROWS)


@pytest.fixture(scope="module")
def right(table, tmp_path_factory) -> Path:
    """Translates the table by one process."""
    folder, work = tmp_path_factory.mktemp("right"), manifest(table)
    translate = ShardWorker(work, str(folder), load)
    for number in range(len(work.shards)):
        translate(number)
    return folder


def load_slowly(folder: Path, what: str = "") -> TextTranslator:
    """Writes the id of its process, and takes a moment for each block of rows; or dies at a row."""
    (folder / f"{os.getpid()}.pid").touch()

    def translate(lines):
        time.sleep(0.1)
        if what and any(what in line.split() for line in lines):
            os.kill(os.getpid(), signal.SIGKILL)
        return upper(lines)

    return TextTranslator(translate)


def check(folder: Path, right: Path) -> None:
    assert read_output(folder) == read_output(right) and len(read_output(folder)) == 94
    assert read_rejected(folder) == read_rejected(right)


def test_two_processes_write_what_one_writes(cluster, table, right, tmp_path) -> None:
    work, missing = manifest(table, shard_rows=8), [number for number in range(13) if number != 3]
    records = list(translate_on_ray(work, str(tmp_path / "out"), missing, partial(load_slowly, tmp_path), Workers()))
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert sum(record.rows for record in records) == 92 and len(records) == 12
    assert not (tmp_path / "out" / "data" / "part-00003.jsonl").exists()
    list(translate_on_ray(work, str(tmp_path / "out"), [3], load, Workers(1)))
    check(tmp_path / "out", right)


def test_a_killed_process_loses_nothing(cluster, table, right, tmp_path) -> None:
    work, output = manifest(table, shard_rows=8), str(tmp_path / "out")
    records = translate_on_ray(work, output, list(range(13)), partial(load_slowly, tmp_path), Workers())
    found = [next(records) for _ in range(3)]
    (victim, *_) = tmp_path.glob("*.pid")
    os.kill(int(victim.stem), signal.SIGKILL)
    found += list(records)
    assert len(found) == 13 and len(list(tmp_path.glob("*.pid"))) >= 3
    check(tmp_path / "out", right)


def test_a_shard_that_kills_its_process_is_an_error(cluster, table, tmp_path) -> None:
    load_killer: Callable[[], TextTranslator] = partial(load_slowly, tmp_path, "50")
    with pytest.raises(ValueError, match=r"shard 12, which begins at row 49 of .*table\.parquet, has died 4 times"):
        list(translate_on_ray(manifest(table), str(tmp_path / "out"), [11, 12], load_killer, Workers()))
    assert len(list(tmp_path.glob("*.pid"))) <= MAX_ATTEMPTS + 2


def broken() -> TextTranslator:
    raise ValueError("The model 'x' is damaged.")


def test_an_error_of_a_process_is_its_own_sentence(cluster, table, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"^The model 'x' is damaged\.$"):
        list(translate_on_ray(manifest(table), str(tmp_path / "out"), [1, 2], broken, Workers()))
    with pytest.raises(ValueError, match=r"^Shard [12]: RuntimeError: The GPU is gone\.$"):
        list(translate_on_ray(manifest(table), str(tmp_path / "out"), [1, 2], broken_later, Workers()))


def broken_later() -> TextTranslator:
    def translate(lines):
        raise RuntimeError("The GPU is gone.")

    return TextTranslator(translate)


def test_the_cluster_of_another_program_is_left_alone(cluster) -> None:
    """It would end with that program."""
    program = (
        "import ray; from hf_vaswani.scale.cluster import connect; connect(); "
        "print(ray.get_runtime_context().get_node_id())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] != ray.get_runtime_context().get_node_id()


def test_a_cluster_without_room_is_an_error(cluster, table, tmp_path) -> None:
    for workers, message in (
        (Workers(cpus=3), r"has 2 CPUs and 0 GPUs, but a process needs 3 and 0"),
        (Workers(gpus=0.5), r"has 2 CPUs and 0 GPUs, but a process needs 1 and 0\.5"),
        (Workers(count=3), r"has room for 2 processes, but --workers is 3"),
    ):
        with pytest.raises(ValueError, match=message):
            list(translate_on_ray(manifest(table), str(tmp_path / "out"), [1, 2, 3], load, workers))
