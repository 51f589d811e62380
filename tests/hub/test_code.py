"""The code beside the weights of a model: which files it is, and what renewal makes of a folder."""

import json
from pathlib import Path

import pytest

from hf_vaswani import VaswaniConfig
from hf_vaswani.files import INSTALLED, digest, find_damage
from hf_vaswani.hub.code import SAVED, installed_code, renew_code


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_code_of_a_model_is_renewed_and_nothing_else(tmp_path) -> None:
    config = '{"model_type": "vaswani", "auto_map": {}}'
    files = {"config.json": config, "model.safetensors": "weights", "notes.py": "mine", "my_vaswani.py": "mine"}
    for name, text in (files | {"modeling_vaswani.py": "old"}).items():
        (tmp_path / name).write_text(text)
    code = installed_code(json.loads(config))
    assert renew_code(tmp_path) == [*code]
    # Other files stay, also those that look like code of a model.
    assert contents(tmp_path) == {name: text.encode() for name, text in files.items()} | code
    assert renew_code(tmp_path) == []


@pytest.mark.parametrize("is_encoder_decoder", [True, False])
def test_the_heads_are_renewed_where_the_config_names_them_and_go_elsewhere(tmp_path, is_encoder_decoder) -> None:
    """What is saved, renewed and published is the same code."""
    VaswaniConfig(is_encoder_decoder=is_encoder_decoder).save_pretrained(tmp_path)
    saved = contents(tmp_path)
    code = installed_code(json.loads(saved["config.json"]))
    assert {"config.json": saved["config.json"]} | code == saved
    assert INSTALLED.joinpath("heads_vaswani.py").is_file() and ("heads_vaswani.py" in code) != is_encoder_decoder
    (tmp_path / "heads_vaswani.py").write_text("old")
    assert renew_code(tmp_path) == ["heads_vaswani.py"]
    assert contents(tmp_path) == saved


def test_code_of_earlier_versions_goes_and_is_no_damage(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hf_vaswani.hub.code.SAVED", "modeling older")
    for name in ("config.json", "modeling_vaswani.py", "older_vaswani.py"):
        (tmp_path / name).write_text('{"model_type": "vaswani", "auto_map": {}}')
    recorded = {path.name: digest(path) for path in tmp_path.iterdir()}
    assert renew_code(tmp_path)[-1] == "older_vaswani.py"
    assert not (tmp_path / "older_vaswani.py").exists() and find_damage(tmp_path, recorded) is None


def test_every_file_that_travels_is_known_to_later_versions() -> None:
    assert {path.stem.removesuffix("_vaswani") for path in INSTALLED.glob("*_vaswani.py")} <= {*SAVED.split()}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "config.json is missing"),
        ('{"model_type": "marian"}', "no Vaswani model, but one of the type 'marian'"),
        ('{"model_type": "vaswani"}', r"names no code \(auto_map\): load the model, and save it again"),
    ],
)
def test_the_folder_of_another_model_is_left_alone(tmp_path, config, words) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=words):
        renew_code(tmp_path)
    assert not list(tmp_path.glob("*.py"))


def test_a_file_is_no_model_folder(tmp_path) -> None:
    (tmp_path / "model.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.npz is a file, not a model folder"):
        renew_code(tmp_path / "model.npz")
