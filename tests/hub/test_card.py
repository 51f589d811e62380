"""The card shows what the run recorded, and nothing else; `huggingface_hub` reads its metadata."""

import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from hf_vaswani.cli import main
from hf_vaswani.hub.card import card_files, render_card
from hf_vaswani.hub.evaluation import curve_picture, read_curve
from hf_vaswani.records import Validation
from hf_vaswani.run_folder import read_result

from ..conftest import ROOT, tiny_recipe

SAVED = ROOT / "tests" / "saved"


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, whose records can be changed."""
    folder = tmp_path / "my-run"
    shutil.copytree(tiny_run, folder)
    return folder


def change(path: Path, **values: Any) -> None:
    # Without its digest, as earlier versions wrote it, a record can be edited.
    content = json.loads(path.read_text()) | values | {"digest": None}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def change_recipe(run: Path, section: str, **values: Any) -> None:
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe[section] |= values
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def card(run: Path, **options: Any) -> ModelCard:
    return render_card(run, run / "model", read_result(run), **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A finished run that is the same everywhere."""
    with tarfile.open(SAVED / "run_0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_the_card_of_a_translation_is_the_saved_one(saved) -> None:
    assert str(card(saved)) == (SAVED / "card.md").read_text("utf-8")


def test_the_card_of_several_directions_is_the_saved_one(saved) -> None:
    """With every part that a card can have."""
    recipe = yaml.safe_load((saved / "recipe.yaml").read_text())
    files = {f"{split}_files": {"en": f"{split}.en", "fr": f"{split}.fr"} for split in ("train", "validation", "test")}
    recipe["more_data"] = [{"target_language": "fr", "license": "mit", **files}]
    recipe["data"] |= {"target_tag": True, "prefix": "<bt>", "license": "cc-by-4.0"}
    recipe["validation_sets"] = {"law": {"dataset": "acme/law", "test_split": "held_out"}}
    recipe |= {"initialize": {"from": "acme/base"}, "hub": {"license": "apache-2.0"}}
    (saved / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    noted = {"dataset_is_local": False, "pairs": {"train": 1900, "test": 50}, "held_out": {"test": 3}}
    change(saved / "environment.json", data=[noted] * 3, start_is_local=False, gpu="A GPU")
    scores = {"bleu": 30.125, "chrf": 50.0, "ter": 40.5}
    compared = {"before": scores, "after": scores | {"bleu": 31.5}, "p": 0.02, "signature": "nrefs:1|bs:1000"}
    sets = {"en-de": scores, "en-fr": scores | {"bleu": 28.0}, "law": scores | {"bleu": 9.5}}
    altered = {"en-de": {"upper": scores, "typos": scores | {"ter": 77.0}}}
    change(saved / "test.json", bleu=22.54, sets=sets, altered=altered, before=dict.fromkeys(sets, compared))
    rendered = card(saved, repo_id="me/model", revision="v2", has_curve=True)
    assert str(rendered) == (SAVED / "card_of_several_directions.md").read_text("utf-8")


def test_the_card_of_a_checkpoint_has_no_ter(run) -> None:
    signatures = {"bleu": "nrefs:1|eff:no", "chrf": "nrefs:1|nc:6"}
    validation = Validation(6, {"loss": 2.0, "bleu": 12.5, "chrf": 34.5}, signatures)
    found = render_card(run, run / "model", validation)
    assert "| 12.50 | 34.50 |\n" in str(found) and "- TER" not in str(found)
    assert [each.metric_type for each in found.data.eval_results] == ["bleu", "chrf"]


def test_facts_that_were_not_recorded_are_omitted(run) -> None:
    change(run / "environment.json", git_revision="0123abc", cpu_threads=3, processes=2, cpu="A processor")
    change(run / "test.json", seconds=7200.0)
    complete = card(run).text
    facts = (
        "| hardware | 6 threads on A processor |",
        "| training time | 2.0 hours, validations included |",
        "120 pairs",
        "| hf_vaswani revision | 0123abc |",
    )
    assert all(words in complete for words in facts)
    change(run / "environment.json", gpu="A GPU")
    assert "| hardware | 2 x A GPU |" in card(run).text
    change(run / "environment.json", cpu=None, gpu=None, data=None, git_revision=None)
    change(run / "test.json", seconds=None)
    shorter = card(run)
    for words in ("| hardware", "training time", "120 pairs", "revision", "None", "licence"):
        assert words not in shorter.text, words
    assert "license" not in str(shorter).split("---")[1]
    # Without a test set there are neither scores nor their metadata.
    change(run / "test.json", bleu=None, chrf=None, ter=None)
    unscored = card(run)
    assert "## Evaluation" not in unscored.text and "BLEU" not in unscored.text
    assert unscored.data.eval_results is None and "model-index" not in str(unscored)


def test_paths_are_not_shown(run) -> None:
    folder = "/home/alice smith/o'brien/client=acme"
    files = {"en": f"{folder}/t.en", "de": "acme/t.de"}
    change_recipe(run, "tokenizer", path=f"{folder}/tok")
    change_recipe(run, "data", train_files=files, validation_files="../acme/dev.tsv", test_files="acme/x y/test.jsonl")
    for repo_id in (None, "me/tiny"):
        text = str(card(run, repo_id=repo_id))
        assert not any(word in text for word in ("alice", "brien", "smith", "acme", str(run.parent))), text
    known = "120 pairs, 120 of them with a sentence of the training text"
    assert f"trained on t.en, t.de (120 pairs); validated on dev.tsv ({known}); tested on test.jsonl" in text


@pytest.mark.parametrize("is_local", [True, False])
def test_a_dataset_is_on_the_hub_unless_it_was_a_local_folder(run, is_local) -> None:
    change_recipe(run, "data", dataset="acme/merger", train_files=None, validation_files=None, test_files=None)
    change(run / "environment.json", data=[{"dataset_is_local": is_local, "pairs": {"train": 9}}])
    rendered = card(run)
    assert rendered.data.datasets == (None if is_local else ["acme/merger"])
    assert rendered.data.eval_results[0].dataset_type == ("text" if is_local else "acme/merger")
    assert ("acme" in str(rendered)) is not is_local
    assert "merger (train) (9 pairs)" in rendered.text
    change(run / "environment.json", data=None)
    assert "acme" not in str(card(run)), "a run that did not record it"


@pytest.mark.parametrize("is_local", [True, False, None])
def test_a_start_is_on_the_hub_unless_it_was_a_local_folder(run, is_local) -> None:
    change_recipe(run, "initialize", **{"from": "acme/base"}, parts=["encoder"])
    change(run / "environment.json", start_is_local=is_local)
    rendered = card(run)
    assert rendered.data.base_model == ("acme/base" if is_local is False else None)
    name = "[acme/base](https://huggingface.co/acme/base)" if is_local is False else "`base`"
    assert f"trained further from {name} with `hf_vaswani`." in " ".join(rendered.text.split())
    settings = yaml.safe_load(rendered.text.split("```yaml\n")[1].split("```")[0])
    assert settings["initialize"] == {"from": "acme/base" if is_local is False else "base", "parts": ["encoder"]}


def test_the_teachers_of_a_student_are_named_without_their_folders(run) -> None:
    change_recipe(
        run, "teacher", model=["/secret/runs/big/model", "acme/base"], text="/secret/more.en", folder="/secret/t"
    )
    rendered = card(run)
    assert "trained from scratch on the translations of `big` and `base` with `hf_vaswani`." in " ".join(
        rendered.text.split()
    )
    settings = yaml.safe_load(rendered.text.split("```yaml\n")[1].split("```")[0])
    assert settings["teacher"] == {"model": ["model", "base"], "text": "more.en", "folder": "t"}
    assert "secret" not in str(rendered)


def test_special_characters_do_not_break_the_page(run) -> None:
    odd = "odd|na`me # heading <script>x"
    change_recipe(run, "data", license=odd, test_files=f"{odd}.tsv")
    change(run / "environment.json", cpu="A | B")
    text = card(run).text
    assert "odd\\|na`me # heading &lt;script&gt;x.tsv" in text
    assert "| A \\| B |" in text.replace("2 threads on ", "").replace("1 thread on ", "")
    assert "<script>" not in text.split("```yaml")[0] and text.count("```") == 8


def test_the_examples_of_the_card_run(run, monkeypatch) -> None:
    from transformers import pipelines

    asked = []
    monkeypatch.setattr(pipelines, "pipeline", lambda *names, **options: asked.append(options) or str)
    monkeypatch.setattr("transformers.pipeline", pipelines.pipeline)
    blocks = card(run, repo_id="me/tiny", revision="v2").text.split("```python\n")[1:]
    for block in blocks:
        exec(block.split("```")[0], {})
    assert asked == [
        {"model": "me/tiny", "revision": "v2"},
        {"model": "me/tiny", "revision": "v2", "trust_remote_code": True},
    ]


def test_a_run_leaves_its_card_beside_the_weights(tiny_run) -> None:
    model = tiny_run / "model"
    text = (model / "README.md").read_text("utf-8")
    assert text.startswith("---\nlanguage:\n") and "![Training curve: loss and BLEU by update](curve.png)" in text
    assert (model / "curve.png").read_bytes().startswith(b"\x89PNG")
    files = card_files(tiny_run, model, read_result(tiny_run), None, "main")
    assert files == {name: (model / name).read_bytes() for name in ("README.md", "curve.png")}


def test_a_card_needs_no_checkpoint_and_no_whole_log(tiny_run, run) -> None:
    """The training may be writing, and checkpoints may be damaged."""
    (run / "checkpoint-12" / "progress.json").write_text("{")
    for name in ("training.jsonl", "validations.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 1}\n{"st' if name.startswith("valid") else '{"st')
    assert read_curve(run, 12) == read_curve(tiny_run, 12) and read_curve(run, 12)[1]
    assert card_files(run, run / "model", read_result(run), None, "main").keys() == {"README.md", "curve.png"}


def test_without_matplotlib_there_is_a_warning_and_no_curve(run, monkeypatch, caplog) -> None:
    monkeypatch.setattr("hf_vaswani.hub.evaluation.curve_picture", curve_picture)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    files = card_files(run, run / "model", read_result(run), None, "main")
    assert files.keys() == {"README.md"} and b"curve.png" not in files["README.md"]
    assert "The model card has no training curve" in caplog.text


def test_a_run_without_a_test_set_has_a_card_without_scores(tmp_path) -> None:
    run = tmp_path / "run"
    options = [
        argument for argument in tiny_recipe(tmp_path, scored=True) if not argument.startswith("--data.test_files")
    ]
    assert main(["train", *options, "--run_dir", str(run), "--training.max_steps", "4"]) == 0
    assert "## Evaluation" not in (run / "model" / "README.md").read_text("utf-8")
    assert main(["train", *options, "--run_dir", str(tmp_path / "other"), "--hub.repo_id", "me/tiny"]) == 2


# ---- Running text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["masked_lm", "causal_lm", "span_corruption", "denoise"])
def test_the_card_of_running_text_is_the_saved_one(text_run, task) -> None:
    rendered = str(card(text_run(task)))
    assert rendered == (SAVED / f"card_of_{task}.md").read_text("utf-8")


def test_measures_that_are_not_finite_are_said_to_be(text_run) -> None:
    run = text_run("causal_lm", {"scores": {"loss": None, "perplexity": None, "byte_perplexity": 3.0}})
    rendered = card(run)
    assert "parameters. It is" in " ".join(rendered.text.split())
    assert "| en: test.txt | not finite | not finite | 3.00 |" in rendered.text
    assert [each.metric_type for each in ModelCard(str(rendered)).data.eval_results] == ["byte_perplexity"]
    unscored = card(text_run("causal_lm", {"scores": {}}))
    assert "## Evaluation" not in unscored.text and "model-index" not in str(unscored)


def test_the_curve_of_running_text_is_that_of_what_ranks(text_run, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(
        "hf_vaswani.hub.evaluation.curve_picture", lambda *arguments: drawn.append(arguments) or b"PNG"
    )
    for best_by in ("loss", "accuracy"):
        options = {"best_by": best_by, "label_smoothing": 0.1}
        run = text_run("masked_lm", training=options, objective={"next_sentence": True})
        text = card_files(run, run / "model", read_result(run), None, "main")["README.md"].decode()
        assert (
            f"![Training curve: loss{' and accuracy' if best_by == 'accuracy' else ''} by update](curve.png)" in text
        )
        assert "loss includes dropout, label smoothing and the loss of next-sentence prediction; the" in text
        shutil.rmtree(run)
    (training, lines, *loss), (_, _, *accuracy) = drawn
    assert training == [(3, 4.0), (6, 3.0)]
    assert (lines[0].scores["accuracy"], lines[0].scores["loss"]) == (0.4125, 3.5)
    assert loss == [None, "nats per masked token"] and accuracy == ["accuracy", "nats per masked token"]
