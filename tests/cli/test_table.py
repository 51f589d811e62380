"""hf-vaswani translate --table: each row once, the same command again completes, what does not fit is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hf_vaswani.cli import main
from hf_vaswani.scale import shards

from ..campaign.verbs import verb
from ..children import Child, run_launched
from ..hub_server import HubServer
from ..scale.tables import read_output, read_rejected, write_rows

WORDS = ["one", "two three", "four five six", "nine", "seven eight nine ten"]
TEXTS = [f"{WORDS[i % 5]} {WORDS[i % 3]}" for i in range(60)]


@pytest.fixture
def table(tmp_path):
    return write_rows(tmp_path / "table.parquet", [{"id": i, "en": text} for i, text in enumerate(TEXTS)])


def command(model, table, output, *more) -> list[str]:
    return [
        *("translate", "--model", str(model), "--table", str(table), "--output", str(output)),
        *("--column", "en", "--to-column", "de", *more),
    ]


def test_translations_are_those_of_lines(teacher, table, tmp_path, capsys, caplog) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS) + "\n")
    assert main(["translate", "--model", str(teacher), str(tmp_path / "text.txt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(set(lines)) > 5
    assert main(command(teacher, table, tmp_path / "out", "--shard-rows", "1000")) == 0
    assert read_output(tmp_path / "out") == [
        {"id": i, "en": text, "de": line} for i, (text, line) in enumerate(zip(TEXTS, lines, strict=True))
    ]
    assert f"60 of 60 rows are translated, in {tmp_path / 'out' / 'data'}." in caplog.text


def test_scores_and_n_best_lists_are_those_of_lines(teacher, table, tmp_path, capsys) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS) + "\n")
    options = ["--num-beams", "4", "--n-best", "2"]
    assert main(["translate", "--model", str(teacher), str(tmp_path / "text.txt"), *options, "--format", "jsonl"]) == 0
    lines = [json.loads(line)["translations"] for line in capsys.readouterr().out.splitlines()]
    assert main(command(teacher, table, tmp_path / "out", *options, "--score", "--format", "jsonl")) == 0
    for row, best in zip(read_output(tmp_path / "out"), lines, strict=True):
        texts = [" ".join(each["text"].splitlines()) for each in best]
        assert row["de_n_best"] == texts and row["de"] == texts[0]
        assert row["de_score"] == best[0]["score"] and row["de_n_best_scores"] == [each["score"] for each in best]
    assert main(command(teacher, table, tmp_path / "score", "--num-beams", "4", "--score")) == 0
    assert set(read_output(tmp_path / "score")[0]) == {"id", "en", "de", "de_score"}


def test_the_same_command_again_does_what_is_missing(teacher, table, tmp_path, capsys, monkeypatch) -> None:
    arguments = command(teacher, table, tmp_path / "out", "--shard-rows", "25")
    assert main(arguments) == 0
    whole, times = read_output(tmp_path / "out"), {}
    for path in (tmp_path / "out" / "data").iterdir():
        times[path.name] = path.stat().st_mtime_ns
    (tmp_path / "out" / "data" / "part-00001.parquet").unlink()
    assert main(arguments) == 0
    assert read_output(tmp_path / "out") == whole
    for path in (tmp_path / "out" / "data").iterdir():
        assert (path.stat().st_mtime_ns == times[path.name]) == (path.name != "part-00001.parquet")

    def unread(*_):
        raise AssertionError("Nothing is missing.")

    monkeypatch.setattr(shards, "_blocks", unread)
    assert main(arguments) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["translated"] == 60


def test_another_model_or_setting_or_table_is_refused(teacher, tiny_run, table, tmp_path, capsys) -> None:
    assert main(command(teacher, table, tmp_path / "out")) == 0
    before = read_output(tmp_path / "out")
    capsys.readouterr()
    other = write_rows(tmp_path / "other.parquet", [{"en": "one"}])
    for arguments, message in (
        (command(tiny_run / "model", table, tmp_path / "out"), "was begun with other settings: "),
        (command(teacher, table, tmp_path / "out", "--num-beams", "1"), "search.num_beams was 2 and is 1"),
        (command(teacher, table, tmp_path / "out", "--shard-rows", "7"), "shard_rows was 20000 and is 7"),
        (command(teacher, other, tmp_path / "out"), f"digest of {other} was "),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert read_output(tmp_path / "out") == before


def test_rejected_rows_are_counted_and_said(teacher, tmp_path, caplog) -> None:
    rows = [{"en": "one"}, {"en": None}, {"en": "two " * 10}]
    table = write_rows(tmp_path / "table.jsonl", rows)
    assert main(command(teacher, table, tmp_path / "out", "--max-characters", "20")) == 0
    assert "1 of 3 rows are translated" in caplog.text
    assert f"2 rows are not (no text: 1, too long: 1); see {tmp_path / 'out' / 'rejected'}." in caplog.text
    assert [row["row"] for row in read_rejected(tmp_path / "out")] == [2, 3]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["rows"], summary["translated"], summary["shards"]) == (3, 1, 1)


@pytest.mark.process
def test_a_dataset_on_the_hub_is_read_at_one_commit(teacher, tmp_path) -> None:
    """In new processes, because datasets reads the address of the Hub when it is imported."""
    with HubServer() as hub:

        def translate(*rows: str) -> "subprocess.CompletedProcess[str]":
            files: dict[str, bytes | None] = {
                "data/train.jsonl": "".join(f'{{"en": "{row}"}}\n' for row in rows).encode()
            }
            hub.commit("datasets/alice/rows", files)
            arguments = [sys.executable, "-m", "hf_vaswani.cli", *command(teacher, "alice/rows", tmp_path / "out")]
            environment = os.environ | hub.environment(tmp_path / "home") | {"HF_DATASETS_OFFLINE": "0"}
            return subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=tmp_path)

        found = translate("one", "two three")
        assert found.returncode == 0 and "2 of 2 rows are translated" in found.stderr, found.stderr
        assert [row["en"] for row in read_output(tmp_path / "out")] == ["one", "two three"]
        found = translate("one", "two three", "four")
        assert found.returncode == 2 and found.stderr.count("\n") == 1, found.stderr
        assert "was begun with other settings: digest" in found.stderr
        assert not hub.unknown


def test_a_table_on_another_file_system(teacher, tmp_path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put_file(str(write_rows(tmp_path / "t.jsonl", [{"en": text} for text in TEXTS])), "/in/t.jsonl")
    try:
        assert main(command(teacher, "memory://in/*.jsonl", "memory://out", "--shard-rows", "20")) == 0
        assert main(command(teacher, tmp_path / "t.jsonl", tmp_path / "out", "--shard-rows", "20")) == 0
        memory.get("/out", str(tmp_path / "copy"), recursive=True)
        assert read_output(tmp_path / "copy") == read_output(tmp_path / "out")
    finally:
        memory.rm("/in", recursive=True)
        memory.rm("/out", recursive=True)


def test_a_second_process_is_kept_out(teacher, table, tmp_path, capsys) -> None:
    from hf_vaswani.interruption import exclusive

    with exclusive(tmp_path / "out"):
        assert main(command(teacher, table, tmp_path / "out")) == 2
    assert "is being written by another process" in capsys.readouterr().err


def test_lost_rejected_rows_are_written_again(teacher, tmp_path) -> None:
    table = write_rows(tmp_path / "table.jsonl", [{"en": "one"}, {"en": None}])
    for _ in range(2):
        assert main(command(teacher, table, tmp_path / "out")) == 0
        assert len(read_rejected(tmp_path / "out")) == 1
        (tmp_path / "out" / "rejected" / "part-00000.jsonl").unlink()


@pytest.mark.slow
def test_machines_of_a_cluster_get_absolute_paths(teacher, table, tmp_path, monkeypatch) -> None:
    """Their working folders are others."""
    seen = []

    def translate(manifest, output, missing, load, workers):
        options = load.args[0]
        seen.extend([output, *options.model, *(source.url for source in manifest.sources)])
        yield from ()

    monkeypatch.setattr("hf_vaswani.scale.cluster.translate_on_ray", translate)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(teacher)
    assert main(command("model", table.name, "out", "--engine-cluster", "ray")) == 2
    assert seen == [str(tmp_path / name) for name in ("out", "model", table.name)]


def test_machines_of_a_cluster_keep_few_compiled_products(teacher, table, tmp_path, monkeypatch) -> None:
    """Their environment is not that of the command."""

    kept = []

    def translate(manifest, output, missing, load, workers):
        monkeypatch.delenv("LRU_CACHE_CAPACITY")
        load()
        kept.append(os.environ["LRU_CACHE_CAPACITY"])
        yield from ()

    monkeypatch.setattr("hf_vaswani.scale.cluster.translate_on_ray", translate)
    assert main(command(teacher, table, tmp_path / "out", "--engine-cluster", "ray")) == 2
    assert kept == ["256"]


@pytest.mark.process
def test_two_processes_write_what_one_writes(teacher, table, tmp_path) -> None:
    assert main(command(teacher, table, tmp_path / "one", "--shard-rows", "9")) == 0
    arguments = command(teacher, table, tmp_path / "two", "--shard-rows", "9")
    ends = run_launched(tmp_path / "outputs", verb, arguments)
    assert [end.code for end in ends] == [0, 0], [end.err for end in ends]
    assert read_output(tmp_path / "two") == read_output(tmp_path / "one")
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["shards"] == 7


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_process_leaves_whole_shards(number, teacher, tmp_path) -> None:
    table = write_rows(tmp_path / "table.jsonl", [{"en": text} for text in TEXTS * 20])
    arguments = command(teacher, table, tmp_path / "out", "--shard-rows", "30")
    child = Child(tmp_path / "outputs", verb, arguments)
    until = time.monotonic() + 90
    while len(list((tmp_path / "out").glob("shards/*.json"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(child.process.pid or 0, number)
    assert "Traceback" not in child.end(30).err
    done = len(list((tmp_path / "out").glob("shards/*.json")))
    assert 2 <= done < 40
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "shards").glob("*.json")}
    assert main(arguments) == 0
    assert main(command(teacher, table, tmp_path / "whole", "--shard-rows", "30")) == 0
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")
    for name, before in times.items():
        assert (tmp_path / "out" / "shards" / name).stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "out" / "data").glob(".*")] == []
