"""Every task by the real command: trained, resumed, measured, saved, and loaded by its Auto class and its pipeline."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, pipeline

from hf_vaswani.cli.main import main
from hf_vaswani.data.task_data import EvaluationSet
from hf_vaswani.hub.card import card_files, render_card
from hf_vaswani.run_folder import read_result
from hf_vaswani.training.tasks import perplexities

from .. import children
from ..campaign.runs import train
from ..campaign.verbs import Fault, on_the_hub
from ..conftest import dear
from ..hub_server import Access, HubServer
from ..networks import gradients
from .runs import assert_resumes_exactly, same_weights
from .task_recipes import CLASSES, LABELLED, TASKS, recipe, trained

TOKEN = "hf_the_writing_token"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    return trained(tmp_path_factory, TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_run_is_complete(name, runs) -> None:
    run = runs[name]
    result = json.loads((run / "test.json").read_text("utf-8"))
    lines = [json.loads(line) for line in (run / "validations.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == [3, 6] and result["averaged"] == ["checkpoint-3", "checkpoint-6"]
    assert "bleu" not in result and "bleu" not in lines[0]
    assert [line["best"] for line in lines].count(True) == 1
    by = {"classification": "accuracy", "tagging": "f1"}.get(TASKS[name][0])
    badness = [line["loss"] if by is None else -line["measures"][by] for line in lines]
    # Of equals, the later one is the best.
    assert lines[0 if badness[0] < badness[1] else 1]["best"]
    expected = {"accuracy", "f1"} if name in LABELLED else {"perplexity"}
    if TASKS[name][0] == "masked_lm":
        expected |= {"accuracy"}
    if name == "next_sentence":
        expected |= {"next_sentence_accuracy"}
    if name == "causal_lm":
        expected |= {"word_perplexity", "byte_perplexity"}
    for measures in (lines[0]["measures"], result["measures"]):
        assert measures.keys() - {"loss"} == expected
        assert all(0 <= measures[each] <= 1 for each in expected if each.endswith(("accuracy", "f1")))
    if name not in LABELLED:
        assert lines[0]["measures"]["perplexity"] == pytest.approx(math.exp(lines[0]["loss"]))
    ids = AutoTokenizer.from_pretrained(run / "model")("dog", "cat")["input_ids"]
    # <s> as <, </s> as >, and the tokens of a text as t.
    frame = re.sub("t+", "t", "".join({1: "<", 2: ">"}.get(token, "t") for token in ids))
    assert frame == {"causal_lm": "<t<t", "span_corruption": "t>t>", "denoise": "t>t>"}.get(name, "<t>t>")
    kind, auto = CLASSES[name]
    assert type(auto.from_pretrained(run / "model")) is kind
    checkpoint, report = auto.from_pretrained(run / "checkpoint-6", output_loading_info=True)
    assert type(checkpoint) is kind and not any(report.values())


@pytest.mark.variants(2)
@pytest.mark.parametrize("name", TASKS)
def test_the_measured_loss_is_that_of_the_saved_model(name, runs, tmp_path) -> None:
    """Recomputed with transformers alone, from the rows that the objective makes."""
    from hf_vaswani.data.batching import PairCollator
    from hf_vaswani.recipe_file import load_recipe
    from hf_vaswani.training.preparation import task_data

    run = runs[name]
    settings = load_recipe([str(run / "recipe.yaml")])
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    data = task_data(settings)
    sources = data.read()
    (test,) = data.encode_sets(sources, tokenizer, data.label_names(sources))["test"]
    model = CLASSES[name][1].from_pretrained(run / "model")
    total = labels = 0.0
    collator = PairCollator(tokenizer.pad_token_id, test.columns)
    for row in test.encoded:
        batch = collator([row])
        for extra in ("numbers", "next_sentence_label"):
            batch.pop(extra, None)
        with torch.no_grad():
            total += model(**batch, num_items_in_batch=1).loss.item()
        labels += int((batch["labels"] != -100).sum())
    measures = json.loads((run / "test.json").read_text("utf-8"))["measures"]
    assert total / labels == pytest.approx(measures["loss"], rel=1e-4)


@pytest.mark.variants(3)
@pytest.mark.parametrize("name", TASKS)
def test_padding_to_few_shapes_changes_neither_loss_nor_gradients(name, runs) -> None:
    """As updates of the task compute them, from the rows that its objective makes; without dropout."""
    from hf_vaswani.data.batching import BatchOrder, PairCollator
    from hf_vaswani.recipe_file import load_recipe
    from hf_vaswani.training.preparation import task_data

    settings = load_recipe([str(runs[name] / "recipe.yaml")])
    tokenizer = AutoTokenizer.from_pretrained(runs[name] / "model")
    data = task_data(settings)
    sources = data.read()
    (test,) = data.encode_sets(sources, tokenizer, data.label_names(sources))["test"]
    rows, found = [test.encoded[i % len(test.encoded)] for i in range(17)], []
    for few in (False, True):
        model = CLASSES[name][1].from_pretrained(runs[name] / "model").eval()
        batch = PairCollator(tokenizer.pad_token_id, test.columns, BatchOrder(0, few_shapes=few))(rows)
        del batch["numbers"]
        counts = {each: (batch[each] != -100).sum() for each in ("labels", "next_sentence_label") if each in batch}
        more = {"num_texts_in_batch": counts["next_sentence_label"]} if len(counts) > 1 else {}
        loss = model(**batch, **more, epsilon_ls=0.1, num_items_in_batch=counts["labels"], loss_only=True).loss
        loss.backward()
        found.append((loss, counts, gradients(model)))
    assert batch["input_ids"].shape[0] == 18 and batch["input_ids"].shape[1] % 8 == 0
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.process
@pytest.mark.parametrize("name", ["next_sentence", "tagging"])
def test_a_killed_run_ends_with_the_same_bits(name, runs, tmp_path) -> None:
    """At another one of its accesses to the run folder each time; there are 268 or more."""
    arguments, run = ["train", *recipe(runs[name].parent, name)], tmp_path / "run"
    at = 1 + int.from_bytes(os.urandom(4)) % 260
    assert train(arguments, run, Fault("kill", run, at)).code == -signal.SIGKILL, at
    assert train(arguments, run).code == 0, at
    assert same_weights(runs[name] / "checkpoint-6", run / "checkpoint-6"), at
    both = [json.loads((path / "test.json").read_text("utf-8"))["measures"] for path in (run, runs[name])]
    assert both[0] == both[1], at


@pytest.mark.parametrize("name", ["next_sentence", "causal_lm"])
def test_a_streamed_run_ends_the_same_after_a_stop(name, tmp_path) -> None:
    options = ["--data.streaming=true", "--data.stream_window=40", "--run_dir", str(tmp_path / "run")]
    arguments = [*recipe(tmp_path, name), *options]
    assert main(["train", *arguments]) == 0
    assert_resumes_exactly(arguments, tmp_path / "run", last=6)


def test_workers_change_nothing(runs, tmp_path) -> None:
    run = tmp_path / "run"
    arguments = [*recipe(tmp_path, "next_sentence", data_workers=2), "--run_dir", str(run)]
    assert main(["train", *arguments]) == 0
    assert same_weights(run / "checkpoint-6", runs["next_sentence"] / "checkpoint-6")


def test_the_models_work_in_their_pipelines(runs) -> None:
    fill = pipeline("fill-mask", model=str(runs["masked_lm"] / "model"))
    assert len(fill("the cat sees the <mask>")) == 5
    write = pipeline("text-generation", model=str(runs["causal_lm"] / "model"))
    text = write("the small cat", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert text.startswith("the small cat")
    tokenizer = AutoTokenizer.from_pretrained(runs["causal_lm"] / "model")
    # With the space in front of a new word, and from a batch with padding on the left.
    ids = tokenizer("the small cat", return_tensors="pt")
    assert f" {text}" == tokenizer.decode(write.model.generate(**ids, max_new_tokens=5)[0], skip_special_tokens=True)
    assert " " in text.removeprefix("the small cat")
    prompts = ["the", "the small cat"]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    together = tokenizer.batch_decode(write.model.generate(**batch, max_new_tokens=5), skip_special_tokens=True)
    alone = [write(each, max_new_tokens=5, do_sample=False)[0]["generated_text"] for each in prompts]
    assert together == [f" {each}" for each in alone]
    assert tokenizer("the cat")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer("the cat")["input_ids"][-1] != tokenizer.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(runs["next_sentence"] / "model")
    pair = tokenizer("the cat", "the dog")
    cut = pair["input_ids"].index(tokenizer.eos_token_id) + 1
    assert pair["token_type_ids"] == [0] * cut + [1] * (len(pair["input_ids"]) - cut)
    assert pair["input_ids"][0] == tokenizer.bos_token_id and pair["input_ids"][-1] == tokenizer.eos_token_id
    for name in ("classification", "decoder"):
        classify = pipeline("text-classification", model=str(runs[name] / "model"))
        assert classify("the small cat")[0]["label"] in ("cat", "dog", "tree")
    classify = pipeline("text-classification", model=str(runs["pairs"] / "model"))
    assert classify({"text": "the cat", "text_pair": "cat the"})["label"] in ("same", "turned")
    tag = pipeline(
        "token-classification",
        model=str(runs["tagging"] / "model"),
        ignore_labels=[],
        aggregation_strategy="first",
    )
    assert {each["entity_group"] for each in tag("the small cat sees")} <= {"O", "ANIMAL", "THING"}


@pytest.mark.parametrize("name", [dear("classification"), dear("pairs"), dear("decoder"), "tagging"])
def test_a_classifier_learns(name, tmp_path) -> None:
    """The rules that the labels follow are obvious."""
    arguments = recipe(tmp_path, name, max_steps=150, validate_every=150, save_every=150, average_last=1)
    faster = ["--training.schedule=constant", "--training.peak_learning_rate=0.01", "--model.dropout=0"]
    assert main(["train", *arguments, *faster, "--run_dir", str(tmp_path / "run")]) == 0
    measures = json.loads((tmp_path / "run" / "test.json").read_text("utf-8"))["measures"]
    assert measures["accuracy"] > 0.9 and measures["f1"] > 0.9


@pytest.mark.parametrize("name", [name if name in ("next_sentence", "tagging") else dear(name) for name in TASKS])
def test_a_run_leaves_its_card(name, runs, tmp_path) -> None:
    model = runs[name] / "model"
    result = read_result(runs[name])
    files = card_files(runs[name], model, result, None, "main")
    assert files == {file: (model / file).read_bytes() for file in ("README.md", "curve.png")}
    data = ModelCard(files["README.md"].decode()).data
    assert {each.metric_type for each in data.eval_results} == set(result.scores)
    # A finished run writes a card that was deleted again.
    run = tmp_path / "run"
    shutil.copytree(runs[name], run)
    (run / "model" / "README.md").unlink()
    assert main(["train", *recipe(runs[name].parent, name), "--run_dir", str(run)]) == 0
    assert (run / "model" / "README.md").is_file()


@pytest.mark.variants(2)
@pytest.mark.parametrize("name", TASKS)
def test_the_examples_of_a_card_run(name, runs) -> None:
    """With the package, and by the code beside the weights; the last line is what the model makes of the example."""
    folder = runs[name] / "model"
    card = render_card(runs[name], folder, read_result(runs[name]), repo_id=str(folder))
    examples = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        *lines, last = example.strip().splitlines()
        names: dict[str, object] = {}
        exec("\n".join(lines), names)
        found = eval(last, names)
        if "inputs" in names:
            assert isinstance(found, str)
            mask = {"denoise": "<mask>", "span_corruption": "<extra_0>"}[name]
            assert names["tokenizer"].convert_tokens_to_ids(mask) in names["inputs"]["input_ids"][0].tolist()
        else:
            keys = {"causal_lm": "generated_text", "tagging": "entity"} | dict.fromkeys(LABELLED[:3], "label")
            found = [found] if isinstance(found, dict) else found
            assert all(keys.get(name, "token_str") in each for each in found)


@pytest.mark.process
def test_a_training_publishes_a_language_model(tmp_path) -> None:
    """A checkpoint with the accuracy of its validation, and then the model with that of its test."""
    with HubServer(tokens={TOKEN: Access("alice", "write")}) as hub:
        options = ["--run_dir", str(tmp_path / "run"), "--hub.repo_id=alice/m", "--hub.min_score=0"]
        arguments = [*recipe(tmp_path, "next_sentence", best_by="accuracy"), *options, "--hub.every_n_checkpoints=2"]
        arguments, settings = ["train", *arguments], hub.environment(tmp_path / "home", TOKEN)
        done = children.run(tmp_path / "outputs", on_the_hub, arguments, settings)
        assert done.code == 0, done.err[-2000:]
        titles = [commit.title for commit in reversed(hub.commits("alice/m"))]
        lines = [json.loads(line) for line in (tmp_path / "run" / "validations.jsonl").read_text().splitlines()]
        accuracies = [line["measures"]["accuracy"] for line in lines]
        tested = json.loads((tmp_path / "run" / "test.json").read_text())["measures"]["accuracy"]
        assert titles == [
            "initial commit",
            f"checkpoint-6: accuracy {accuracies[1]:.2f} after 6 updates",
            f"model: accuracy {tested:.2f} after 6 updates",
        ]
        files, model = hub.files("alice/m"), tmp_path / "run" / "model"
        assert files.keys() - {".gitattributes"} == {path.name for path in model.iterdir()}
        assert all(files[path.name] == path.read_bytes() for path in model.iterdir())
        assert "Training curve: loss and accuracy by update" in files["README.md"].decode()
        assert [line["best"] for line in lines] == [accuracies[0] > accuracies[1], accuracies[1] >= accuracies[0]]
        # The same command with a minimum that no model reaches publishes nothing, and says so.
        done = children.run(tmp_path / "outputs", on_the_hub, [*arguments, "--hub.min_score=1"], settings)
        assert done.code == 2 and "and hub.min_score is 1.0000" in done.sentence
        assert len(hub.commits("alice/m")) == 3
        assert hub.unknown == []


def test_a_model_without_a_test_set_is_not_published(tmp_path, capsys) -> None:
    options = ["--run_dir", str(tmp_path / "run"), "--data.test_files=null", "--hub.repo_id=alice/m"]
    assert main(["train", *recipe(tmp_path, "masked_lm"), *options]) == 2
    assert "hub.repo_id needs a test set" in capsys.readouterr().err


def test_perplexities_count_words_and_bytes() -> None:
    text = EvaluationSet("en", ["one two", "drei ü"], [], None, None, "en", None)
    found = perplexities("causal_lm", 12.0, 6.0, [text])
    assert found == {
        "perplexity": math.exp(2),
        "word_perplexity": math.exp(3),
        "byte_perplexity": math.exp(12 / 16),
    }
    assert perplexities("masked_lm", 12.0, 6.0, [text]) == {"perplexity": math.exp(2)}
    assert perplexities("causal_lm", 1e9, 6.0, [text])["perplexity"] == math.inf


def test_a_label_that_the_training_text_lacks_is_found_before_anything_is_written(tmp_path, capsys) -> None:
    arguments = recipe(tmp_path, "classification")
    with open(tmp_path / "test.tsv", "a", encoding="utf-8") as file:
        file.write("the cow\tcow\n")
    assert main(["train", *arguments, "--run_dir", str(tmp_path / "run")]) == 2
    assert "has the label 'cow', but the model has only 'cat', 'dog', 'tree'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
