"""Saved models with damaged files: what `from_pretrained` and pipelines reject by themselves."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_vaswani import (
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
    VaswaniForPreTraining,
    VaswaniForSequenceClassification,
    VaswaniForTokenClassification,
    VaswaniModel,
)
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.model.pipeline_vaswani import VaswaniTranslationPipeline, find_non_finite

from ..networks import batch, tiny_config, tiny_model
from ..test_stops import Stops


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the weights of a folder by a function."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Saves a model and its tokenizer, and changes the saved weights by a function."""
    model = tiny_model(3, eos=1.0, vocab_size=260)
    model.generation_config.num_beams = 3
    model.save_pretrained(folder)
    train_tokenizer([], 260, kind="bytes").save_pretrained(folder)
    change_weights(folder, change)
    return folder


FC1, HEAD = "model.decoder.layers.0.feed_forward.fc1.weight", "lm_head.bias"
DAMAGES = {
    f"do not match its config.json: 1 missing .first: {FC1}": lambda weights: weights.pop(FC1),
    f"do not match its config.json: 2 missing .first: {HEAD}": lambda weights: (weights.pop(FC1), weights.pop(HEAD)),
    "do not match its config.json: 1 unexpected .first: extra": lambda weights: weights.update(extra=torch.ones(1)),
    f"have non-finite values in {FC1}": lambda weights: weights[FC1][0].fill_(math.nan),
    f"have non-finite values in {HEAD}": lambda weights: weights[HEAD][0].fill_(math.inf),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_pipeline_built_by_name_rejects_damaged_weights(tmp_path, message) -> None:
    folder = damaged(tmp_path, DAMAGES[message])
    for trust in (None, True):
        with pytest.raises(ValueError, match=f"^The weights of {folder} {message}"):
            pipeline("translation", model=str(folder), trust_remote_code=trust)
    # Training accepts the weights as they are, if they are numbers.
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        pipeline("translation", model=model, tokenizer=tokenizer)
    if "non-finite" not in message:
        model.train()
        pipeline("translation", model=model, tokenizer=tokenizer)


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


@pytest.mark.parametrize("content", [b"{", b"", b'{"num_beams": 3', b"[]", b"\xff"])
def test_a_generation_config_that_cannot_be_read_is_not_passed_over(tmp_path, content) -> None:
    """A model would translate with another beam size."""
    folder = damaged(tmp_path, lambda weights: None)
    assert AutoModelForSeq2SeqLM.from_pretrained(folder).generation_config.num_beams == 3
    (folder / "generation_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"generation_config.json of {folder} cannot be used: "):
        AutoModelForSeq2SeqLM.from_pretrained(folder)
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


# ---- Matrices with several names ---------------------------------------------------------------------------------

SOURCE, TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"


def replace(model: nn.Module, *names: str) -> None:
    """Gives matrices of their own to modules that shared one."""
    for name in names:
        module = model.get_submodule(name)
        module.weight = nn.Parameter(module.weight.detach().roll(1, dims=0) * 1.1)


@pytest.mark.variants(3)
@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize(
    "own",
    [
        ["lm_head"],
        ["model.decoder.embed_tokens"],
        ["model.encoder.embed_tokens"],
        ["lm_head", "model.decoder.embed_tokens"],
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [True, False])
def test_a_matrix_that_was_replaced_is_saved(tmp_path, share, own, tied) -> None:
    """Whether the config says so or not, and if it ties the matrices that were not."""
    model = tiny_model(share_embeddings=share)
    replace(model, *own)
    if tied is None:
        # One matrix for the output and the embedding of a side that the config does not tie to it.
        model.lm_head.weight = model.model.encoder.embed_tokens.weight
    model.config.tie_word_embeddings = bool(tied)
    given = {name: weight.clone() for name, weight in model.state_dict().items()}
    for number, state in enumerate((None, model.state_dict())):
        # In the order of transformers' arguments.
        model.save_pretrained(tmp_path / str(number), True, state)
        again, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / str(number), output_loading_info=True)
        assert not any(report.values()) and again.loading_error is None
        for name, weight in again.state_dict().items():
            assert torch.equal(weight, given[name]), name


def test_a_folder_that_lacks_an_embedding_loads_whole_with_tied_weights(tmp_path) -> None:
    """As folders were saved whose output was untied from the one matrix."""
    model = tiny_model()
    replace(model, "lm_head")
    model.save_pretrained(tmp_path)
    change_weights(tmp_path, lambda weights: weights.pop(TARGET, None))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=f"1 missing .first: {TARGET}"):
        VaswaniTranslationPipeline(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), Mock())
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, tie_word_embeddings=True)
    again.save_pretrained(tmp_path / "again")
    for folder in (tmp_path / "again", None):
        again = again if folder is None else AutoModelForSeq2SeqLM.from_pretrained(folder)
        torch.testing.assert_close(again(**batch()).logits, model(**batch()).logits, atol=0, rtol=0)


# ---- Weights under other names -----------------------------------------------------------------------------------

CLASSES = {
    VaswaniForConditionalGeneration: "lm_head.bias",
    VaswaniModel: "encoder.embed_segments.weight",
    VaswaniForMaskedLM: "lm_transform.dense.weight",
    VaswaniForPreTraining: "next_sentence.weight",
    VaswaniForCausalLM: "lm_head.bias",
    VaswaniForSequenceClassification: "pooler.dense.bias",
    VaswaniForTokenClassification: "classifier.weight",
}


def renamed(folder: Path, old: str) -> str:
    """Renames a weight in a folder, and returns its new name."""
    new = old.replace(old.split(".")[-2], "renamed")
    change_weights(folder, lambda weights: weights.update({new: weights.pop(old)}))
    return new


@pytest.mark.parametrize("kind", CLASSES)
def test_a_weight_under_another_name_is_an_error(tmp_path, kind) -> None:
    model = kind(tiny_config(lm_head_bias=True, lm_head_transform=True, type_vocab_size=2))
    stack = model.config.stacks[0]
    prefix = "" if kind is VaswaniModel else "model."
    for number, old in enumerate((CLASSES[kind], f"{prefix}{stack}.layers.1.feed_forward.fc1.weight")):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        assert kind.from_pretrained(folder).num_parameters() == model.num_parameters()
        new = renamed(folder, old)
        message = f"1 missing .first: {old}., 1 unexpected .first: {new}"
        with pytest.raises(ValueError, match=f"^The weights of {folder} do not match its config.json: {message}"):
            kind.from_pretrained(folder)


@pytest.mark.parametrize("kind", [VaswaniForMaskedLM, VaswaniForSequenceClassification, VaswaniForCausalLM])
def test_another_class_reports_a_weight_under_another_name(tmp_path, kind) -> None:
    tiny_model().save_pretrained(tmp_path)
    stack = kind.from_pretrained(tmp_path).config.stacks[0]
    old = f"model.{stack}.layers.0.feed_forward.fc1.bias"
    new = renamed(tmp_path, old)
    _, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert old in report["missing_keys"] and new in report["unexpected_keys"]


# ---- Numbers that are not finite ---------------------------------------------------------------------------------

FLOATS = [
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and each.is_floating_point and each != torch.float4_e2m1fn_x2
]


@pytest.mark.parametrize("dtype", sorted(set(FLOATS), key=str), ids=str)
def test_weights_of_every_format_are_looked_at(dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    numbers = torch.full((4, 4), min(torch.finfo(dtype).max, torch.finfo(torch.float32).max))
    model[1].weight = nn.Parameter(numbers.to(dtype), requires_grad=False)
    assert find_non_finite(model) is None
    numbers[2, 3] = math.nan
    model[1].weight = nn.Parameter(numbers.to(dtype), requires_grad=False)
    # Each of these formats has a NaN.
    assert find_non_finite(model) == "1.weight"


def test_looking_at_the_weights_stops_a_device_once() -> None:
    model = tiny_model()
    with Stops() as stops:
        assert find_non_finite(model) is None
    assert stops.total == 1
