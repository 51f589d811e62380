"""hf-vaswani align, and alignments and markup of hf-vaswani translate."""

import json

import pytest
from transformers import pipeline

from hf_vaswani import alignments
from hf_vaswani.cli import main
from hf_vaswani.translation.alignment import choose_alignment
from hf_vaswani.translation.lines import LineTranslator
from hf_vaswani.translation.loading import load_translator

from ..conversion.test_ctranslate2 import random_sentences, save_random

SOURCES = ["one two three", "", "nine  four"]
TARGETS = ["eins zwei drei", "", "neun vier vier"]


@pytest.fixture
def files(tmp_path):
    for name, lines in (("a.en", SOURCES), ("a.de", TARGETS)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [str(tmp_path / name) for name in ("a.en", "a.de")]


def as_pharaoh(alignment, method: str = "argmax") -> str:
    return " ".join(f"{i}-{j}" for i, j in alignment.links(method))


@pytest.mark.parametrize("method", ["argmax", "intersection"])
def test_links_are_those_of_the_layer_that_training_chose(tiny_run, files, capsys, method) -> None:
    model, tokenizer = load_translator(tiny_run / "model")
    settings = json.loads((tiny_run / "model" / "config.json").read_text("utf-8"))
    assert settings["alignment_layer"] == 0
    assert main(["align", "--model", str(tiny_run / "model"), "--method", method, *files]) == 0
    expected = alignments(model, tokenizer, SOURCES, TARGETS, layer=0, shift=settings["alignment_shift"])
    assert capsys.readouterr().out.split("\n") == [*(as_pharaoh(each, method) for each in expected), ""]


def test_json_lines_have_words_and_probabilities(tiny_run, files, capsys) -> None:
    model, tokenizer = load_translator(tiny_run / "model")
    for options, unit in (([], "words"), (["--pieces"], "pieces")):
        assert main(["align", "--model", str(tiny_run / "model"), "--format=jsonl", *options, *files]) == 0
        entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for number, (entry, each) in enumerate(
            zip(entries, alignments(model, tokenizer, SOURCES, TARGETS, unit=unit), strict=True), 1
        ):
            assert (entry["line"], entry["source"], entry["target"]) == (number, each.source, each.target)
            assert [tuple(link[:2]) for link in entry["links"]] == each.links()
            for i, j, attention in entry["links"]:
                assert attention == pytest.approx(float(each.probabilities[j, i]), abs=1e-3)


def test_without_a_layer_in_the_config_one_is_chosen_by_the_text(tmp_path, caplog, capsys) -> None:
    save_random(tmp_path / "model", decoder_layers=3)
    lines = random_sentences(30)
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    model, tokenizer = load_translator(tmp_path / "model")
    assert model.config.alignment_layer is None
    command = ["align", "--model", str(tmp_path / "model"), str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(command) == 0
    chosen = capsys.readouterr().out
    layer, shift = choose_alignment(model, tokenizer, lines, lines)
    again = [f"--layer={layer}", *(["--shift"] if shift else [])]
    assert " ".join(again).replace("=", " ") in caplog.text
    assert main([*command, *again]) == 0
    assert capsys.readouterr().out == chosen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shift"], "--shift needs --layer"),
        (["--layer=1"], "layer must be at least 0 and below decoder_layers (1), but it is 1"),
    ],
)
def test_bad_input_is_one_sentence(tiny_run, files, capsys, options, words) -> None:
    assert main(["align", "--model", str(tiny_run / "model"), *options, *files]) == 2
    assert words in capsys.readouterr().err
    assert main(["align", "--model", str(tiny_run / "model"), files[0], str(tiny_run / "recipe.yaml")]) == 2
    assert "continues: each line needs one of its own" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_translations_come_with_their_links(teacher, files, capsys, engine) -> None:
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2")
    model, tokenizer = load_translator(teacher)
    command = ["translate", "--model", str(teacher), "--num-beams=1", f"--engine={engine}", files[0]]
    assert main(command) == 0
    translations = capsys.readouterr().out.split("\n")[:3]
    links = [as_pharaoh(each) for each in alignments(model, tokenizer, SOURCES, translations)]
    assert links[0] and not links[1]
    assert main([*command, "--alignment"]) == 0
    expected = [" ||| ".join(pair) for pair in zip(translations, links, strict=True)]
    assert capsys.readouterr().out.split("\n") == [*expected, ""]
    assert main([*command, "--alignment", "--format=jsonl"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(entry["line"], entry["text"]) for entry in entries] == list(enumerate(translations, 1))
    assert [" ".join(f"{i}-{j}" for i, j, _ in entry["links"]) for entry in entries] == links


def test_n_best_lists_have_links(teacher, files, capsys) -> None:
    model, tokenizer = load_translator(teacher)
    command = ["translate", "--model", str(teacher), "--n-best=2", "--alignment", files[0]]
    assert main(command) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    expected = alignments(model, tokenizer, [SOURCES[int(row[0]) - 1] for row in rows], [row[2] for row in rows])
    assert [row[3] for row in rows] == [as_pharaoh(each) for each in expected]
    assert main([*command, "--format=jsonl"]) == 0
    lists = [json.loads(line)["translations"] for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(f"{i}-{j}" for i, j, _ in each["links"]) for list_ in lists for each in list_] == [
        row[3] for row in rows
    ]


def test_an_interrupted_output_with_links_is_resumed(teacher, files, tmp_path, capsys) -> None:
    command = ["translate", "--model", str(teacher), "--alignment", "--format=jsonl", files[0]]
    assert main(command) == 0
    whole = capsys.readouterr().out
    output = tmp_path / "out.jsonl"
    output.write_text(whole[: whole.index("\n") + 9], encoding="utf-8")
    assert main([*command, f"--output={output}", "--resume"]) == 0
    assert output.read_text("utf-8") == whole
    assert main([*command[:3], files[0], f"--output={output}", "--resume", "--n-best=2", "--format=jsonl"]) == 2
    assert "it was written with another --n-best or --format" in capsys.readouterr().err
    plain = tmp_path / "out.txt"
    plain.write_text("eins\n", encoding="utf-8")
    assert main([*command[:3], files[0], f"--output={plain}", "--resume", "--alignment"]) == 2
    assert "out.txt, line 1, was written without --alignment" in capsys.readouterr().err
    assert plain.read_text("utf-8") == "eins\n"


def test_formats_need_what_they_are_the_format_of(tiny_run, files, capsys) -> None:
    command = ["translate", "--model", str(tiny_run / "model"), files[0]]
    for options, words in (
        (["--format=jsonl"], "--format jsonl needs --n-best or --alignment"),
        (["--format=tsv", "--alignment"], "--format tsv needs --n-best"),
    ):
        assert main([*command, *options]) == 2
        assert words in capsys.readouterr().err


def test_links_of_a_split_line_count_its_words(tmp_path) -> None:
    """A line that is too long for the model has the links of its pieces, with the numbers of its own words."""
    save_random(tmp_path, max_position_embeddings=24)
    model, tokenizer = load_translator(tmp_path)
    line = "  ".join(sentence + "." for sentence in random_sentences(9) if sentence)
    translator = LineTranslator([model], tokenizer)
    ((_, text, links),) = translator.aligned([line])[0]
    assert translator.lines_split == 1
    assert (text,) == tuple(text for _, text in translator([line])[0])
    words, translated = line.split(), text.split()
    assert {j for _, j, _ in links} <= set(range(len(translated))) and max(j for _, j, _ in links) > len(
        translated
    ) // 2
    assert max(i for i, _, _ in links) > len(words) // 2 and max(i for i, _, _ in links) < len(words)


@pytest.mark.parametrize("kind", ["html", "placeholders"])
def test_markup_is_that_of_the_pipeline(teacher, tmp_path, capsys, kind) -> None:
    lines = ["<b>one</b> two {n} &amp; %s", "", "{n}", "three <i>four</i>"]
    (tmp_path / "in.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    expected = pipeline("translation", model=str(teacher))(lines, markup=kind)
    command = ["translate", "--model", str(teacher), f"--markup={kind}", str(tmp_path / "in.txt")]
    assert main(command) == 0
    found = capsys.readouterr().out.split("\n")
    assert found == [*(" ".join(each["translation_text"].splitlines()) for each in expected), ""]
    assert "{n}" in found[0] and found[2] == "{n}"
    assert ("<i>" in found[3]) == (kind == "html")
    for options in (["--n-best=2"], ["--alignment"]):
        assert main([*command, *options]) == 2
        assert f"--markup cannot be combined with {options[0].split('=')[0]}" in capsys.readouterr().err


def test_a_split_line_keeps_its_markup(tmp_path) -> None:
    save_random(tmp_path, max_position_embeddings=24)
    model, tokenizer = load_translator(tmp_path)
    line = " ".join(f"<b>{sentence}</b>. {{n{i}}}" for i, sentence in enumerate(random_sentences(9)))
    translator = LineTranslator([model], tokenizer)
    (((_, text),),) = translator.with_markup([line], "html")
    assert translator.lines_split == 1
    assert text.count("<b>") == text.count("</b>") == 9 and all(text.count(f"{{n{i}}}") == 1 for i in range(9))


def test_white_space_around_a_text_moves_no_tag(teacher) -> None:
    model, tokenizer = load_translator(teacher)
    translator = LineTranslator([model], tokenizer)
    lines = ["one <b>two</b> three", "&nbsp;one <b>two</b> three ", "  one <b>two</b> three"]
    found = [translator.with_markup([line], "html")[0][0][1].strip() for line in lines]
    assert found[0].count("<b>") == 1 and found == found[:1] * 3
