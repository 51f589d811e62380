"""Saved models with damaged files: what `from_pretrained` and pipelines reject, and how they say it."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_vaswani.data.tokenizer import train_tokenizer

from ..networks import tiny_model


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Saves a model and its tokenizer, and changes the saved weights by a function."""
    model = tiny_model(3, eos=1.0, vocab_size=260)
    model.generation_config.num_beams = 3
    model.save_pretrained(folder)
    train_tokenizer([], 260, kind="bytes").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


FC1, HEAD = "model.decoder.layers.0.feed_forward.fc1.weight", "lm_head.bias"
DAMAGES = {
    f"1 missing .first: {FC1}": lambda weights: weights.pop(FC1),
    f"2 missing .first: {HEAD}": lambda weights: (weights.pop(FC1), weights.pop(HEAD)),
    "1 unexpected .first: extra": lambda weights: weights.update(extra=torch.ones(1)),
    f"{FC1} has non-finite values": lambda weights: weights[FC1][0, 0].fill_(math.nan),
    f"{HEAD} has non-finite values": lambda weights: weights[HEAD][0].fill_(math.inf),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_pipeline_built_by_name_rejects_weights_that_do_not_match(tmp_path, message) -> None:
    folder = damaged(tmp_path, DAMAGES[message])
    for trust in (None, True):
        with pytest.raises(ValueError, match=f"^The weights of {folder} do not match its config.json: {message}"):
            pipeline("translation", model=str(folder), trust_remote_code=trust)
    # Training accepts the weights as they are.
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        pipeline("translation", model=model, tokenizer=tokenizer)
    model.train()
    pipeline("translation", model=model, tokenizer=tokenizer)


def test_a_pipeline_built_by_name_rejects_weights_of_another_shape(tmp_path) -> None:
    folder = damaged(tmp_path, lambda weights: weights.update({FC1: torch.ones(3, 8)}))
    with pytest.raises(ValueError, match=r"1 of another shape .*fc1.weight, \(3, 8\) in the file and \(24, 16\)"):
        pipeline("translation", model=str(folder))


@pytest.mark.parametrize(
    "fields",
    [{}, {"share_embeddings": False}, {"share_embeddings": False, "tie_word_embeddings": False}, {"vocab_size": 300}],
    ids=str,
)
def test_a_pipeline_built_by_name_takes_every_whole_model(tmp_path, fields) -> None:
    model = tiny_model(3, **{"vocab_size": 260} | fields)
    model.half().save_pretrained(tmp_path)
    train_tokenizer([], 260, kind="bytes").save_pretrained(tmp_path)
    found = pipeline("translation", model=str(tmp_path))
    assert found.model.dtype == torch.float16 and found.model.loading_error is None


SETTINGS_FILES = [
    ("{", "Expecting property name"),
    ("", "Expecting value"),
    ('{"num_beams": 3', "delimiter"),
    ("[]", ""),
    ('{"num_beams": 0}', "num_beams"),
    ('{"num_beams": "x"}', ""),
    ('{"num_beams": 2.5}', ""),
    ('{"length_penalty": NaN}', "length_penalty"),
    ('{"length_penalty": 1e999}', "length_penalty"),
    ('{"length_penalty": "1"}', ""),
    ('{"max_length": -1}', "max_length"),
    ("\\xff", ""),
]


@pytest.mark.variants(3)
@pytest.mark.parametrize(("content", "word"), SETTINGS_FILES)
def test_a_damaged_generation_config_is_rejected(tmp_path, content, word) -> None:
    folder = damaged(tmp_path, lambda weights: None)
    assert pipeline("translation", model=str(folder)).model.generation_config.num_beams == 3
    (folder / "generation_config.json").write_bytes(content.encode("latin-1"))
    message = f"generation_config.json of {folder} cannot be used: .*{word}"
    with pytest.raises(ValueError, match=message):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        pipeline("translation", model=str(folder))
    (folder / "generation_config.json").unlink()
    assert AutoModelForSeq2SeqLM.from_pretrained(folder).generation_config.num_beams in (None, 1)


@pytest.mark.parametrize(
    ("name", "value"), [("d_model", "abc"), ("num_heads", 0), ("num_heads", 3), ("dropout", None)]
)
def test_a_config_that_makes_no_model_is_a_value_error(tmp_path, name, value) -> None:
    folder = damaged(tmp_path, lambda weights: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    for load in (AutoConfig.from_pretrained, AutoModelForSeq2SeqLM.from_pretrained, partial(pipeline, "translation")):
        with pytest.raises(ValueError, match=name):
            load(str(folder))
