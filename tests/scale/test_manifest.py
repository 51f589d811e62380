"""The folder of a translated table, whose files appear whole on any file system, and its record."""

import json
from dataclasses import replace

import fsspec
import pytest

from hf_vaswani.scale.manifest import MANIFEST, Folder, check_same, read_manifest, write_manifest
from hf_vaswani.scale.shards import describe, open_url
from hf_vaswani.scale.worker import ShardWorker

from .tables import load, manifest, write_rows

ROWS = [{"en": f"sentence {i}"} for i in range(10)] + [{"en": None}]


@pytest.fixture
def table(tmp_path):
    return write_rows(tmp_path / "a.jsonl", ROWS)


def test_a_manifest_is_read_as_it_was_written(table, tmp_path) -> None:
    folder = Folder(str(tmp_path / "out"))
    assert read_manifest(folder) is None
    written = manifest(table, n_best=2, translation={"search": {"num_beams": 4}})
    write_manifest(folder, written)
    assert read_manifest(folder) == written
    (tmp_path / "out" / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: sources is missing"):
        read_manifest(folder)


def test_a_folder_with_other_files_is_refused(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("text")
    with pytest.raises(ValueError, match=r"has files, but no manifest\.json of a translated table"):
        read_manifest(Folder(str(tmp_path)))


def test_shards_without_their_record_or_their_file_are_missing(table, tmp_path) -> None:
    work, folder = manifest(table), Folder(str(tmp_path / "out"))
    assert work.records(folder) == {}
    translate = ShardWorker(work, folder.url, load)
    records = {number: translate(number) for number in range(3)}
    assert work.records(folder) == records
    summary = work.summary(records.values())
    assert summary == {
        "rows": 11,
        "translated": 10,
        "rejected": {"no text": 1},
        "split": 0,
        "shards": 3,
        "seconds": summary["seconds"],
    }
    (tmp_path / "out" / "shards" / "00000.json").unlink()
    (tmp_path / "out" / "data" / "part-00001.jsonl").unlink()
    with (tmp_path / "out" / "data" / "part-00002.jsonl").open("a") as file:
        file.write("more")
    assert work.records(folder) == {}


def test_a_damaged_record_is_named(table, tmp_path) -> None:
    work, folder = manifest(table), Folder(str(tmp_path / "out"))
    ShardWorker(work, folder.url, load)(1)
    path = tmp_path / "out" / "shards" / "00001.json"
    record = json.loads(path.read_text())
    for rows, why in (("four", "rows is 'four'"), (3, "rows is 3, but the shard has 4")):
        path.write_text(json.dumps(record | {"rows": rows}))
        with pytest.raises(ValueError, match=rf"00001\.json is damaged \({why}\): delete it, and its shard is done"):
            work.records(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"column": "id"}, "other settings: column was 'en' and is 'id'"),
        ({"n_best": 3}, "n_best was None and is 3"),
        ({"translation": {}}, "num_beams was 4 and is None"),
    ],
)
def test_other_settings_are_refused_by_name(change, message, table, tmp_path) -> None:
    begun = manifest(table, translation={"search": {"num_beams": 4}})
    check_same(Folder(str(tmp_path)), begun, begun.sources, begun.settings)
    with pytest.raises(ValueError, match=message):
        check_same(Folder(str(tmp_path)), begun, begun.sources, replace(begun.settings, **change))


def test_another_table_is_refused_and_a_moved_one_is_not(table, tmp_path) -> None:
    begun, folder = manifest(table), Folder(str(tmp_path))
    moved = describe(str(table.rename(tmp_path / "b.jsonl")))
    check_same(folder, begun, [moved], begun.settings)
    with pytest.raises(ValueError, match="number of files was 1 and is 2"):
        check_same(folder, begun, [moved, moved], begun.settings)
    with pytest.raises(ValueError, match=r"size of .*b\.jsonl was"):
        check_same(folder, begun, [replace(moved, size=1)], begun.settings)
    other = replace(moved, digest="SHA-256 0")
    with pytest.raises(ValueError, match=r"digest of .*b\.jsonl was 'SHA-256 [0-9a-f]{64}' and is 'SHA-256 0'"):
        check_same(folder, begun, [other], begun.settings)


def test_the_manifest_is_for_people_too(table, tmp_path) -> None:
    folder = Folder(str(tmp_path / "out"))
    write_manifest(folder, manifest(table))
    content = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert content["shards"][1] == {"source": 0, "start": 84, "first": 5, "rows": 4}
    assert content["settings"]["column"] == "en"


# ---- The folder --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["local", "memory"])
def results(request, tmp_path):
    if request.param == "local":
        yield Folder(str(tmp_path / "results"))
    else:
        yield Folder("memory://results")
        fsspec.filesystem("memory").rm("/results", recursive=True)


def test_a_file_appears_when_it_is_complete(results) -> None:
    with results.writing("data/a.txt") as file:
        file.write_text("half")
        assert results.sizes("data") == {}
        file.write_text("whole text")
    assert results.sizes("data") == {"a.txt": 10} and results.size("data/a.txt") == 10
    assert set(results.sizes()) == {"data"}


def test_a_failure_leaves_the_earlier_file(results) -> None:
    results.write_json("a.json", {"text": "ü"})
    with pytest.raises(OSError, match="full"), results.writing("a.json") as file:
        file.write_text("{")
        raise OSError("the disk is full")
    assert results.read_json("a.json") == {"text": "ü"}
    assert set(results.sizes()) == {"a.json"}
    results.write_json("a.json", {"text": "new"})
    assert results.read_json("a.json") == {"text": "new"}


def test_a_file_is_removed_once(results) -> None:
    results.write_json("a.json", {})
    results.remove("a.json")
    results.remove("a.json")
    assert results.sizes() == {}


def test_a_damaged_file_is_named(results) -> None:
    with results.writing("a.json") as file:
        file.write_text(json.dumps({"a": 1})[:-1])
    with pytest.raises(ValueError, match=r"a\.json is damaged: .*delimiter"):
        results.read_json("a.json")


def test_another_file_system_gets_a_file_under_a_name_of_its_own_first(monkeypatch) -> None:
    results = Folder("memory://results")
    calls = []
    monkeypatch.setattr(results.fs, "put_file", lambda local, remote: calls.append(("put", remote)))
    monkeypatch.setattr(results.fs, "mv", lambda before, after: calls.append(("mv", before, after)))
    with results.writing("data/a.txt") as file:
        file.write_text("text")
    assert calls == [
        ("put", "/results/data/a.txt.writing"),
        ("mv", "/results/data/a.txt.writing", "/results/data/a.txt"),
    ]


@pytest.mark.parametrize("url", ["nowhere://bucket/folder", "adl://bucket/folder"])
def test_a_protocol_that_cannot_be_used_is_one_sentence(url) -> None:
    with pytest.raises(ValueError, match=f"{url} cannot be reached: "):
        open_url(url)
