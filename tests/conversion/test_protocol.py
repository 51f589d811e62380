"""The records and checks that all formats share."""

import re

import pytest

from hf_vaswani.conversion import ctranslate2, fairseq, marian, marian_npz, onnx
from hf_vaswani.conversion.protocol import check_quantization, model_type


def test_the_model_type_is_that_of_config_json(tmp_path) -> None:
    assert model_type(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    assert model_type(tmp_path) == "marian"
    (tmp_path / "config.json").write_text("{}")
    assert model_type(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        model_type(tmp_path)


def test_a_number_format_must_be_one_of_the_targets() -> None:
    check_quantization(None)
    check_quantization(None, ("int8",))
    check_quantization("int8", ("int8", "float16"))
    with pytest.raises(ValueError, match="must be one of int8, float16, but it is 'int3'"):
        check_quantization("int3", ("int8", "float16"))
    with pytest.raises(ValueError, match=re.escape("--quantization int8 is only supported with --to ctranslate2.")):
        check_quantization("int8")


@pytest.mark.parametrize("target", [marian, onnx])
def test_targets_without_number_formats_write_nothing_if_given_one(target, tmp_path) -> None:
    assert "int8" in ctranslate2.QUANTIZATIONS and not target.QUANTIZATIONS
    with pytest.raises(ValueError, match="only supported with --to ctranslate2"):
        target.save(None, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", [marian, marian_npz, fairseq])
def test_no_source_recognizes_other_paths(source, tmp_path) -> None:
    (tmp_path / "text").write_text("text")
    assert not any(map(source.recognize, (tmp_path, tmp_path / "text", tmp_path / "none")))
