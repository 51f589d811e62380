"""Counts the attacks of every test, and prints the table of docs/reliability.md."""

import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_vaswani.processes import processors
from hf_vaswani.training.preparation import _cpu

from .judge import SEED, Campaign

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.process)


@pytest.fixture
def campaign(request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]) -> Iterator[Campaign]:
    """Counts the attacks of a test, which fails at the end with all that broke the rule."""
    made = Campaign()
    yield made
    counts = {"attacks": made.attacks, "broken": len(made.broken), "seconds": round(made.seconds)}
    record_property("campaign", counts)
    if made.broken:
        attacks = "\n\n".join(made.broken)
        pytest.fail(f"{len(made.broken)} attacks of seed {SEED} broke the rule:\n\n{attacks}", pytrace=False)
    assert made.attacks, "Nothing was attacked."


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the table of docs/reliability.md."""
    reports = [report for some in terminalreporter.stats.values() for report in some if hasattr(report, "when")]
    rows = {
        report.nodeid: value
        for report in reports
        if report.when == "teardown"
        for name, value in report.user_properties
        if name == "campaign"
    }
    if not rows:
        return
    terminalreporter.section("campaign")
    lines = [f"Seed {SEED}, on {_cpu() or platform.machine()} ({processors()} cores):", ""]
    lines += ["| Part | Attacks | Broke the rule | Seconds |", "|---|---:|---:|---:|"]
    totals = {"attacks": 0, "broken": 0, "seconds": 0}
    for name, row in sorted(rows.items()):
        lines.append(f"| {_title(name)} | {row['attacks']} | {row['broken']} | {row['seconds']} |")
        totals = {key: total + row[key] for key, total in totals.items()}
    lines.append(f"| together | {totals['attacks']} | {totals['broken']} | {totals['seconds']} |")
    for line in lines:
        terminalreporter.write_line(line)


def _title(nodeid: str) -> str:
    """`.../test_kills.py::test_killed_it_ends_alike[ema]` -> `kills: killed it ends alike, ema`."""
    file, _, test = nodeid.rpartition("::")
    name, _, case = test.removeprefix("test_").partition("[")
    part = Path(file).stem.removeprefix("test_").replace("_", " ")
    return f"{part}: {name.replace('_', ' ')}" + (f", {case.removesuffix(']')}" if case else "")
