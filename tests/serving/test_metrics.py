"""The metrics of several workers: of those that are dead, and of damaged files."""

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from prometheus_client import CollectorRegistry, generate_latest

from hf_vaswani.serving import metrics


def test_dead_workers_do_not_wait(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    process = subprocess.Popen(["true"])
    process.wait()
    others = "gauge_livesum_x.db", f"gauge_livesum_{10**30}.db"
    files = [tmp_path / f"gauge_livesum_{number}.db" for number in (process.pid, os.getpid())]
    files += [tmp_path / name for name in others]
    for file in files:
        file.touch()
    metrics.forget_dead_workers()
    assert [file.exists() for file in files] == [False, True, True, True]

    def of_another_user(process: int, number: int) -> None:
        raise PermissionError

    files[3].unlink()
    monkeypatch.setattr(os, "kill", of_another_user)
    metrics.forget_dead_workers()
    assert [file.exists() for file in files] == [False, False, True, False]
    files[0].touch()

    def taken(process: int) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(metrics.multiprocess, "mark_process_dead", taken)
    metrics.forget_dead_workers()


def test_a_damaged_file_of_a_worker_is_left_out_of_the_metrics(tmp_path, monkeypatch, caplog) -> None:
    program = (
        "from prometheus_client import Counter, Gauge, Histogram; Counter('one', 'One', ['x']).labels('y').inc(); "
        "Gauge('two', 'Two', multiprocess_mode='livesum').set(2); Histogram('three', 'Three').observe(1)"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    registry = CollectorRegistry()
    metrics.WorkersCollector(registry, path=str(tmp_path))

    def lines() -> list[str]:
        return generate_latest(registry).decode().splitlines()

    expected = lines()
    assert 'one_total{x="y"} 1.0' in expected and "two 2.0" in expected and not caplog.records
    whole = next(tmp_path.glob("counter_*.db")).read_bytes()[:4096]
    damaged = [whole[:3], whole[:20], b"\xff" * 100, whole.replace(b"[", b"(")]
    # It can be read, and yet not be added up.
    damaged += [whole.replace(b'"y"', b"[1]"), whole.replace(b'"x"', b" 1 ")]
    for number, content in enumerate(damaged):
        (tmp_path / f"counter_{number}.db").write_bytes(content)
    (tmp_path / "gauge_7.db").write_bytes(whole)
    (tmp_path / "histogram_7.db").mkdir()
    # It can be read and added up, and yet not be written.
    alone = whole.replace(b'"one"', b'"six"').replace(b'"One"', b"[1,1]")
    (tmp_path / "counter_8.db").write_bytes(alone)
    assert lines() == expected
    assert "counter_3.db has no metrics" in caplog.text

    # A worker that ends takes its file with it at any moment.
    merge = metrics.WorkersCollector.merge

    def vanish(files: list[str]) -> Any:
        for file in tmp_path.glob("counter_?.db"):
            file.unlink()
        return merge(files)

    monkeypatch.setattr(metrics.WorkersCollector, "merge", staticmethod(vanish))
    assert lines() == expected
    shutil.rmtree(tmp_path)
    assert lines() == []
