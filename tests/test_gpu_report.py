"""The report about a GPU: a part that hangs, crashes or is interrupted costs only itself."""

import argparse
import fcntl
import json
import sys
import time

import pytest

from benchmarks import gpu_report

pytestmark = pytest.mark.process

SCRIPTS = {
    "machine": """print('{"GPU": null, "torch": "2"}')""",
    "tests": "print('| passed | failed |\\n|---|---|\\n| 3 | 0 |')",
    "decoding": "print('| batch |\\n|---|\\n| 32 |', flush=True); import time; time.sleep(60)",
    "training": "raise ValueError('no such size')",
    "stop": "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)",
}


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(gpu_report, "command_of", lambda name, _: script(SCRIPTS[name]))
    monkeypatch.setitem(gpu_report.LIMITS, "decoding", 2)


def options(folder, *parts, device="cpu"):
    return argparse.Namespace(device=device, quick=True, output=folder, parts=list(parts))


def test_the_limits_of_the_parts_are_within_that_of_the_report() -> None:
    assert sum(gpu_report.LIMITS.values()) <= gpu_report.LIMIT
    assert {"machine", *gpu_report.TITLES} == set(gpu_report.LIMITS) == set(gpu_report.PARTS)


def test_other_parts_are_reported_when_one_hangs_or_crashes(parts, tmp_path) -> None:
    folder = tmp_path / "report"
    assert gpu_report.report(options(folder, "tests", "decoding", "training")) == 1
    found = json.loads((folder / "report.json").read_text("utf-8"))
    assert [part["status"] for part in found["parts"]] == [
        "ran",
        "ran past 2 s",
        "failed: ValueError: no such size",
    ]
    # What the part that hangs had printed is there.
    assert [part["tables"] for part in found["parts"]] == [[[{"passed": "3", "failed": "0"}]], [[{"batch": "32"}]], []]
    text = (folder / "report.md").read_text("utf-8")
    assert "| torch | 2 |" in text and "**ran past 2 s**" in text and "Traceback" in text
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "report.md"]
    assert gpu_report.report(options(folder, "tests")) == 0


def test_an_interruption_leaves_a_report(parts, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(SCRIPTS, "decoding", SCRIPTS["stop"])
    monkeypatch.setitem(gpu_report.LIMITS, "decoding", 30)
    assert gpu_report.report(options(tmp_path, "tests", "decoding", "training")) == 1
    statuses = [part["status"] for part in json.loads((tmp_path / "report.json").read_text("utf-8"))["parts"]]
    assert statuses == ["ran", "interrupted", "not run: interrupted before it"]


def test_nothing_is_started_after_the_total_limit(parts, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu_report, "LIMIT", 0)
    assert gpu_report.report(options(tmp_path, "tests")) == 1
    assert "**not run: the 0 s were over**" in (tmp_path / "report.md").read_text("utf-8")


def test_without_a_gpu_there_is_one_sentence(parts, tmp_path, capsys) -> None:
    folder = tmp_path / "report"
    assert gpu_report.report(options(folder, "tests", device="cuda")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not folder.exists()


def test_all_processes_of_a_part_end_with_its_time(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu_report, "GRACE", 0.2)
    path = tmp_path / "lock"
    # It ignores SIGTERM, and so does the process that it starts; both hold the lock.
    text = (
        "import fcntl, os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"file = open({str(path)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); os.fork(); time.sleep(60)"
    )
    assert gpu_report.run_part("tests", script(text), 2).status == "ran past 2 s"
    with path.open() as file:
        deadline = time.monotonic() + 20
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tests/test_gpu.py::test_a[{'num_beams': 1}] PASSED   [ 10%]", ("test_a[{'num_beams': 1}]", "passed", "")),
        ("[gw0] [ 10%] SKIPPED tests/test_gpu.py::test_a[False-{}] ", ("test_a[False-{}]", "skipped", "")),
        ("FAILED tests/test_gpu.py::test_a - ValueError: not - so", ("test_a", "failed", "ValueError: not - so")),
        ("ERROR tests/test_gpu.py::test_a - OSError", ("test_a", "error", "OSError")),
        ("tests/test_gpu.py::test_a ", None),
        ("SKIPPED [38] tests/test_gpu.py:30: needs a GPU", None),
        ("E   assert 'FAILED'", None),
    ],
)
def test_lines_of_pytest(line, expected) -> None:
    assert gpu_report.read_outcome(line) == expected


def test_tables_are_read_as_they_are_written() -> None:
    text = gpu_report.table(["work", ""], [["a search", "1.00"], ["an update", ""]])
    assert (
        gpu_report.tables(f"above\n{text}\n\n{text}")
        == [[{"work": "a search", "": "1.00"}, {"work": "an update", "": ""}]] * 2
    )
