"""A run that starts from a model of another task: what is taken, what is new, and what does not fit."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.cli.main import main

from ..conftest import dear
from .runs import assert_resumes_exactly, validations, weights
from .task_recipes import CLASSES, recipe, trained

STARTS = ("masked_lm", "next_sentence", "causal_lm", "denoise", "classification", "pairs", "tagging")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    return trained(tmp_path_factory, STARTS)


# Recipes that start from a run of another task, or of the same one: what is taken, and what is new.
CARRIED = {
    ("classification", "next_sentence"): ("model.encoder.", "pooler.", "classifier."),
    ("pairs", "masked_lm"): ("model.encoder.", "pooler.", "classifier."),
    ("tagging", "denoise"): ("model.encoder.", "classifier."),
    ("decoder", "causal_lm"): ("model.decoder.", "classifier."),
    ("classification", "tagging"): ("model.encoder.", "pooler.", "classifier."),
    ("tagging", "classification"): ("model.encoder.", "classifier."),
    ("classification", "classification"): ("",),
    ("masked_lm", "next_sentence"): ("",),
    ("causal_lm", "causal_lm"): ("",),
    ("denoise", "denoise"): ("",),
}

# A whole encoder, a decoder, half of a translation model, and the same class again.
CHEAP = [
    ("classification", "next_sentence"),
    ("decoder", "causal_lm"),
    ("tagging", "denoise"),
    ("masked_lm", "next_sentence"),
]


@pytest.mark.parametrize(("name", "start"), [each if each in CHEAP else dear(*each) for each in CARRIED])
def test_a_task_starts_from_another(name, start, runs, tmp_path) -> None:
    """The stack is taken as it is, a head that the start does not have is new, and the run resumes exactly."""
    taken, *new = CARRIED[name, start]
    run, arguments = tmp_path / "run", [*recipe(tmp_path, name), f"--initialize.from={runs[start]}"]
    assert main(["train", *arguments, "--run_dir", str(run)]) == 0
    first, before = weights(run / "start"), weights(runs[start] / "model")
    both = [key for key in first if key.startswith(taken) and not key.startswith(tuple(new))]
    assert both and all(torch.equal(first[key], before[key]) for key in both)
    assert all(key.startswith(tuple(new)) for key in first.keys() - before.keys())
    settings = [json.loads((run / part / "config.json").read_text("utf-8")) for part in ("checkpoint-3", "model")]
    assert all(each["architectures"] == [CLASSES[name][0].__name__] for each in settings)
    assert [line["step"] for line in validations(run)] == [0, 3, 6]
    assert_resumes_exactly(arguments, run, 6)


def test_a_classifier_keeps_its_labels(runs, tmp_path, capsys) -> None:
    """A text without one of them does not change the others' numbers; a text with another one is refused."""
    arguments = [*recipe(tmp_path, "classification"), f"--initialize.from={runs['classification']}"]
    rows = [line for line in (tmp_path / "train.tsv").read_text("utf-8").splitlines() if not line.endswith("cat")]
    for path in tmp_path.glob("*.tsv"):
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 0
    settings = json.loads((tmp_path / "run" / "model" / "config.json").read_text("utf-8"))
    assert settings["id2label"] == {"0": "cat", "1": "dog", "2": "tree"}
    (tmp_path / "test.tsv").write_text("\n".join([*rows, "the cow\tcow"]) + "\n", encoding="utf-8")
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "other")]) == 2
    assert (
        f"row {len(rows)}, has the label 'cow', but the model has only 'cat', 'dog', 'tree'" in capsys.readouterr().err
    )
    assert not (tmp_path / "other").exists()


def test_a_classifier_with_as_many_labels_of_another_kind_gets_new_rows(runs, tmp_path) -> None:
    """The tags O, B-ANIMAL and B-THING are no cats, dogs and trees."""
    arguments = recipe(tmp_path, "tagging")
    for path in tmp_path.glob("*.tsv"):
        path.write_text(path.read_text("utf-8").replace("I-THING", "B-THING"), encoding="utf-8")
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "tagger")]) == 0
    again = [*recipe(tmp_path, "classification"), f"--initialize.from={tmp_path / 'tagger'}"]
    assert main(["train", *again, "--run_dir", str(tmp_path / "run")]) == 0
    first, before = weights(tmp_path / "run" / "start"), weights(tmp_path / "tagger" / "model")
    assert first["classifier.weight"].shape == before["classifier.weight"].shape
    assert not torch.equal(first["classifier.weight"], before["classifier.weight"])
    settings = json.loads((tmp_path / "run" / "start" / "config.json").read_text("utf-8"))
    assert settings["id2label"] == {"0": "cat", "1": "dog", "2": "tree"}


@pytest.mark.parametrize("name", ["classification", dear("tagging")])
def test_a_checkpoint_with_a_moving_average_is_a_start(name, tmp_path) -> None:
    """A classifier goes on with its average and its labels; another one takes the average of the encoder."""
    arguments = recipe(tmp_path, "classification", ema_decay=0.5)
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "first")]) == 0
    checkpoint = tmp_path / "first" / "checkpoint-6"
    average = load_file(checkpoint / "ema.safetensors")
    again = [*recipe(tmp_path, name), f"--initialize.from={checkpoint}", "--run_dir", str(tmp_path / "run")]
    assert main(["train", *again]) == 0
    first = weights(tmp_path / "run" / "start")
    stack = [key for key in first if key.startswith("model.encoder.")]
    assert stack and all(torch.equal(first[key], average[key]) for key in stack)
    assert torch.equal(first["classifier.weight"], average["classifier.weight"]) == (name == "classification")


def translation(folder: Path, start: Path, layers: tuple[int, int]) -> list[str]:
    """Returns the arguments of a translation recipe that starts from a run, with these layers of its two stacks."""
    pairs, path = folder / "pairs.tsv", folder / "translate.yaml"
    pairs.write_text("en\tde\n" + "the cat\tthe dog\n" * 20, encoding="utf-8")
    path.write_text(
        f"data: {{train_files: {pairs}, validation_files: {pairs}}}\n"
        f"initialize: {{from: {start}}}\n"
        f"model: {{encoder_layers: {layers[0]}, decoder_layers: {layers[1]}}}\n"
        "evaluation: {max_length_offset: 5}\n"
        "training: {max_steps: 2, tokens_per_batch: 256, warmup_steps: 4, validate_every: 2, save_every: 2}\n",
        encoding="utf-8",
    )
    return [str(path), "--run_dir", str(folder / "run")]


@pytest.mark.parametrize(
    ("start", "taken", "layers"),
    [
        dear("denoise", "model.", (1, 1)),
        ("next_sentence", "model.encoder.", (1, 2)),
        ("causal_lm", "model.decoder.", (2, 1)),
        dear("pairs", "model.", (1, 2)),
    ],
)
def test_a_translation_starts_from_another_task(start, taken, layers, runs, tmp_path, caplog) -> None:
    """Both stacks, or the one that there is, become those of the translation, with the vocabulary."""
    with caplog.at_level(logging.INFO, "hf_vaswani"):
        assert main(["train", *translation(tmp_path, runs[start], layers)]) == 0
    if start == "causal_lm":
        assert "random weights for encoder, the decoder's cross_attn, the decoder's cross_attn_norm" in caplog.text
    first, before = weights(tmp_path / "run" / "start"), weights(runs[start] / "model")
    carried = [key for key in first.keys() & before.keys() if key.startswith(taken)]
    assert len(carried) > 8 and all(torch.equal(first[key], before[key]) for key in carried)
    # The shared embedding has the name of the stack that is loaded first.
    embedding = next(weight for key, weight in before.items() if key.endswith("embed_tokens.weight"))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "start")
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert (model.config.encoder_layers, model.config.decoder_layers) == layers
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")
    assert model.generation_config.max_length_offset == 5 and model.generation_config.num_beams == 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ids = tokenizer("the cat")["input_ids"]
    assert ids[0] != tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id
    assert tokenizer("the cat").keys() == {"input_ids", "attention_mask"}
    assert tokenizer.padding_side == "right" and tokenizer.decode(ids, skip_special_tokens=True) == "the cat"


@pytest.mark.parametrize(
    ("name", "start", "options", "expected"),
    [
        ("causal_lm", "masked_lm", [], "has an encoder and no decoder, which VaswaniForCausalLM needs"),
        ("decoder", "masked_lm", [], "objective.stack is 'decoder', but a classifier reads the encoder"),
        ("masked_lm", "causal_lm", [], "has a decoder and no encoder"),
        ("masked_lm", "denoise", ["--model.d_model=8"], "model.d_model is 8, but the model"),
        ("span_corruption", "denoise", [], "task 'span_corruption' needs <extra_0> in the vocabulary"),
        ("classification", "denoise", ["--initialize.parts=[decoder]"], "initialize.parts has 'decoder', which this"),
        ("causal_lm", "causal_lm", ["--training.freeze=[decoder,embeddings]"], "leaves nothing to train in this"),
        ("classification", "denoise", ["--initialize.vocabulary=transfer"], "initialize.vocabulary is for pairs"),
    ],
)
def test_a_start_that_does_not_fit(name, start, options, expected, runs, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    arguments = [*recipe(tmp_path, name), f"--initialize.from={runs[start]}", *options, "--run_dir", str(run)]
    assert main(["train", *arguments]) == 2
    assert expected in capsys.readouterr().err
    # What the model itself must show is found later.
    assert not run.exists() or expected.startswith("leaves")
