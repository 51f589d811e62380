"""Models with other values or tensors in their files translate, or are refused with a one-line error."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.children import End, run

from .judge import broken_by
from .verbs import verb

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), -0.5, "", "x", "3",
    [], [1], [[]], {}, {"a": 1}, "x" * 5000, "\ud800",
]  # fmt: skip
JSON_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
HEADERS = ["missing tensor", "extra tensor", "renamed tensor", "other shape", "other type", "nan", "inf", "header"]


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Lists the places of the values in JSON; only the first ones of long lists."""
    found = [path]
    if isinstance(content, dict):
        found += [place for key in list(content)[:40] for place in places(content[key], (*path, key))]
    elif isinstance(content, list):
        found += [place for i in range(min(len(content), 4)) for place in places(content[i], (*path, i))]
    return found


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Copies JSON with another value at a place, or without that place if no value is given."""
    if not place:
        return value
    copy = content.copy()
    if value is ... and len(place) == 1:
        del copy[place[0]]
    else:
        copy[place[0]] = changed(content[place[0]], place[1:], value) if place[1:] else value
    return copy


def translated(model: Path, folder: Path, name: str, content: bytes) -> End:
    """Translates by a copy of a model that has another content in one of its files."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    shutil.copytree(model, folder / "model")
    (folder / "model" / name).write_bytes(content)
    (folder / "text").write_text("one two\n\nthree\n")
    return run(folder / "out", verb, ["translate", "--model", str(folder / "model"), str(folder / "text")])


@pytest.mark.parametrize("name", JSON_FILES)
def test_other_values_are_translated_with_or_refused(campaign, tmp_path, tiny_run, name) -> None:
    model = tiny_run / "model"
    content = json.loads((model / name).read_text("utf-8"))
    attacks = [(place, value) for place in places(content) for value in [*VALUES, ...] if place or value is not ...]
    if name == "config.json":
        keys = "num_hidden_layers attention_bias torch_dtype quantization_config auto_map _name_or_path".split()
        attacks += [((key,), value) for key in keys for value in VALUES]
    for place, value in campaign.drawn(attacks, 3, 20, by=lambda attack: attack[0]):
        attack = f"{name}, {'.'.join(map(str, place)) or 'all of it'} = {str(value)[:40]!r} ({type(value).__name__})"
        end = translated(model, tmp_path, name, json.dumps(changed(content, place, value)).encode())
        lines = end.out.count("\n")
        campaign.note(attack, broken_by(end, result=None if lines == 3 else f"{lines} lines of three"))


def with_other_tensors(content: bytes, what: str, number: int) -> bytes:
    """Changes the `number`-th tensor of a safetensors file."""
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    name = sorted(set(header) - {"__metadata__"})[number % (len(header) - 1)]
    entry = header[name]
    if what == "missing tensor":
        # The data stays, under an unknown name.
        header["model.unknown"] = header.pop(name)
    elif what == "extra tensor":
        end = len(data)
        header["model.extra.weight"] = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}
        data += bytes(8)
    elif what == "renamed tensor":
        header[name[:-1]] = header.pop(name)
    elif what == "other shape":
        entry["shape"] = [*entry["shape"][1:], entry["shape"][0], 1]
    elif what == "other type":
        entry["dtype"] = "I32"
    elif what == "header":
        entry["data_offsets"] = [entry["data_offsets"][0], entry["data_offsets"][1] + 4]
    else:
        data[slice(entry["data_offsets"][0], entry["data_offsets"][0] + 4)] = struct.pack("<f", float(what))
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + bytes(data)


def test_other_tensors_are_refused(campaign, tmp_path, tiny_run) -> None:
    model = tiny_run / "model"
    weights = (model / "model.safetensors").read_bytes()
    attacks = [(what, number) for what in HEADERS for number in range(20)]
    for what, number in campaign.drawn(attacks, 8, 15, by=lambda attack: attack[0]):
        end = translated(model, tmp_path, "model.safetensors", with_other_tensors(weights, what, number))
        campaign.note(f"model.safetensors, {what} {number}", broken_by(end, result="translated, and no word"))
