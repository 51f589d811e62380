"""The verb explore."""

import json
import re
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hf_vaswani import VaswaniForCausalLM, VaswaniForMaskedLM
from hf_vaswani.cli import main
from hf_vaswani.data.tokenizer import train_tokenizer

from ..networks import tiny_config


def data_of(path: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)[1])


def test_it_writes_the_page_of_a_translation(teacher, tmp_path, capfd, caplog, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explore", "--model", str(teacher), "one two three"]) == 0
    assert re.fullmatch(r"explorer\.html: \d+ kB; open it in a browser\.", caplog.messages[-1])
    data = data_of(tmp_path / "explorer.html")
    text = tmp_path / "in.txt"
    text.write_text("one two three\n", "utf-8")
    assert main(["translate", "--model", str(teacher), str(text)]) == 0
    # Text is split at white space and joined again.
    assert data["search"]["hypotheses"][0]["text"].split() == capfd.readouterr().out.split()
    assert data["search"]["settings"]["num_beams"] == 2
    assert main(["explore", "--model", str(teacher), "one", "--num-beams", "1", "--output", "greedy.html"]) == 0
    assert data_of(tmp_path / "greedy.html")["search"]["settings"]["num_beams"] == 1
    assert "generation flags" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", [VaswaniForCausalLM, VaswaniForMaskedLM])
def test_stacks_on_their_own(kind, tmp_path) -> None:
    tokenizer = train_tokenizer(["ab abc"], 20, kind="characters")
    kind(tiny_config()).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert main(["explore", "--model", str(tmp_path / "model"), "ab", "--output", str(tmp_path / "page.html")]) == 0
    assert data_of(tmp_path / "page.html")["kind"] == ("decoder" if kind is VaswaniForCausalLM else "encoder")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere", "one"], "is 'nowhere', which does not exist"),
        (["--num-beams", "0", "one"], "--num-beams must be from 1 to 1000, but it is 0."),
        (["--output", ".", "one"], "--output . is a folder, not a file."),
        (["--output", "no/folder/page.html", "one"], "There is no folder 'no/folder' for --output."),
        (["--model", "/no/folder", "one"], "/no/folder"),
        ([" "], "There is no text to explore."),
        (["one " * 300], "tokens, but a page shows from 1 to 200: shorten it."),
        (["--target-language", "fr", "one"], "--target-language is 'fr'"),
    ],
)
def test_bad_input_is_one_sentence(teacher, tmp_path, monkeypatch, capfd, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    model = [] if "--model" in arguments else ["--model", str(teacher)]
    assert main(["explore", *model, *arguments]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.glob("*.html"))


def test_options_and_models_that_do_not_fit_are_named(tmp_path, capfd) -> None:
    VaswaniForMaskedLM(tiny_config()).save_pretrained(tmp_path / "encoder")
    assert main(["explore", "--model", str(tmp_path / "encoder"), "ab", "--num-beams", "2"]) == 2
    assert "--num-beams is for models that write text" in capfd.readouterr().err
    BertModel(BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(
        tmp_path / "bert"
    )
    assert main(["explore", "--model", str(tmp_path / "bert"), "ab"]) == 2
    error = capfd.readouterr().err
    assert "needs a Vaswani model, but" in error
    assert "is of the type 'bert'" in error
    assert len(error.splitlines()) == 1


def test_a_damaged_stack_is_named(tmp_path, capfd) -> None:
    tokenizer = train_tokenizer(["ab abc"], 20, kind="characters")
    VaswaniForCausalLM(tiny_config()).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Other"]}), "utf-8")
    assert main(["explore", "--model", str(tmp_path), "ab"]) == 2
    assert "has the architecture 'Other', but it must be one of VaswaniEncoderModel" in capfd.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert main(["explore", "--model", str(tmp_path), "ab"]) == 2
    assert "model.safetensors" in capfd.readouterr().err
