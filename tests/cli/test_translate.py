"""hf-vaswani translate: one line in, one line out, with links and markup."""

import json
import os
import subprocess

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from hf_vaswani import alignments
from hf_vaswani.cli import main
from hf_vaswani.cli.translate import Output
from hf_vaswani.translation import lines as translation
from hf_vaswani.translation.lines import LineTranslator
from hf_vaswani.translation.loading import load_translator

from ..conversion.test_ctranslate2 import random_sentences, save_random
from .conftest import SOURCES, as_pharaoh, size_limit, translate


def test_translations_are_those_of_the_pipeline(tiny_run, monkeypatch, capsys) -> None:
    sentences = ["one two three", "nine", "four five six"]
    model = str(tiny_run / "model")
    expected = [item["translation_text"] for item in pipeline("translation", model=model)(sentences)]
    assert expected == [pipeline("translation_en_to_de", model=model)(s)[0]["translation_text"] for s in sentences]
    _, out, _ = translate(monkeypatch, capsys, "\n".join(sentences).encode(), "--model", model)
    assert out.splitlines() == expected
    _, greedy, _ = translate(monkeypatch, capsys, "\n".join(sentences).encode(), "--model", model, "--num-beams", "1")
    one_beam = [item["translation_text"] for item in pipeline("translation", model=model)(sentences, num_beams=1)]
    assert greedy.splitlines() == one_beam


@pytest.mark.parametrize("more", [[], ["--markup", "html"], ["--num-beams", "2", "--n-best", "2"]])
def test_lines_without_words_are_kept(teacher, monkeypatch, capsys, more) -> None:
    lines = ["42", "one two", "★★★", "10:30", "\u200b", "three"]
    code, out, _ = translate(monkeypatch, capsys, "\n".join(lines).encode(), "--model", str(teacher), *more)
    found = [line.split("\t")[-1].split(" ||| ")[-1] for line in out.splitlines()]
    copies = len(found) // len(lines)
    assert code == 0 and copies == (2 if "--n-best" in more else 1)
    for number, line in enumerate(lines):
        given = {each.split("|||")[0].strip() for each in found[copies * number : copies * (number + 1)]}
        assert (given == {line.strip()}) == (number not in (1, 5)), given


def test_a_byte_order_mark_is_skipped_and_num_beams_is_used(tiny_run, monkeypatch, capsys) -> None:
    seen = []

    def spy(model, tokenizer, sentences, _):
        seen.append((list(sentences), model.generation_config.num_beams))
        return ["two\nlines" for _ in sentences]

    monkeypatch.setattr(translation, "translate_corpus", spy)
    text = b"\xef\xbb\xbfone\ntwo\n"
    _, out, _ = translate(monkeypatch, capsys, text, "--model", str(tiny_run / "model"), "--num-beams", "3")
    assert seen == [(["one", "two"], 3)]
    assert out == "two lines\ntwo lines\n"


def test_files_are_read_in_their_order(tiny_run, texts, monkeypatch, capsys) -> None:
    folder, text = texts
    model = ["--model", str(tiny_run / "model")]
    _, expected, _ = translate(monkeypatch, capsys, text, *model)
    files = [str(folder / "a.txt"), str(folder / "b.txt")]
    assert main(["translate", *model, *files]) == 0
    assert capsys.readouterr().out == expected and expected.count("\n") == 60
    assert main(["translate", *model, *files, "--output", str(folder / "out.txt")]) == 0
    assert capsys.readouterr().out == "" and (folder / "out.txt").read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    "more",
    [[], ["--n-best", "2"], ["--n-best", "2", "--format", "jsonl"], ["--alignment", "--format", "jsonl"]],
    ids=str,
)
def test_an_interrupted_output_is_resumed(tiny_run, texts, monkeypatch, capsys, more) -> None:
    monkeypatch.setattr(translation, "LINES_AT_A_TIME", 7)
    folder, _ = texts
    arguments = ["translate", "--model", str(tiny_run / "model"), str(folder / "a.txt"), *more]
    output = folder / "out.txt"
    arguments += ["--output", str(output)]
    assert main(arguments) == 0
    whole = output.read_bytes()
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err and output.read_bytes() == whole
    end_of_a_line = len(b"".join(whole.splitlines(keepends=True)[:20]))
    # Empty, within a line, after a line, complete.
    for cut in (0, end_of_a_line - 2, end_of_a_line, len(whole)):
        output.write_bytes(whole[:cut])
        assert main([*arguments, "--resume"]) == 0
        assert output.read_bytes() == whole


@pytest.mark.parametrize(
    ("n_best", "format", "entry"),
    [
        (None, None, "eins zwei\n"),
        (2, None, "7\t-0.5000\teins zwei\n7\t-1.2346\tdrei\n"),
        (
            2,
            "jsonl",
            '{"line": 7, "translations": [{"score": -0.5, "text": "eins\\nzwei"}, '
            '{"score": -1.2346, "text": "drei"}]}\n',
        ),
    ],
)
def test_entries_are_counted_as_they_are_formatted(tmp_path, n_best, format, entry) -> None:
    path = tmp_path / "out"
    output = Output(path, n_best, format, resume=True)
    candidates = [(-0.5, "eins\nzwei"), (-1.23456, "drei")]
    assert output.entry(7, candidates) == entry
    assert output.entries_done() == 0 and not path.exists()
    whole = "".join(output.entry(number, candidates) for number in range(1, 13))
    # Entries that were cut short by a line or by some characters are dropped.
    for rest, done in (("", 12), (output.entry(13, candidates)[:-3], 12), (output.entry(13, candidates), 13)):
        path.write_text(whole + rest)
        assert output.entries_done() == done
        assert path.read_text() == whole + (rest if done == 13 else "")
    with pytest.raises(ValueError, match="out exists already: complete it with --resume"):
        Output(path, n_best, format).entries_done()
    other = Output(path, None if n_best else 2, None, resume=True)
    if n_best is None:
        with pytest.raises(ValueError, match=r"out, line 1, does not start with '1\\t': it was written with another"):
            other.entries_done()


def test_n_best_translations_and_scores_are_those_of_generate(tiny_run, texts, monkeypatch, capsys) -> None:
    folder = str(tiny_run / "model")
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    sentences = ["one two three", "", "four five"]
    text, arguments = "\n".join(sentences).encode(), ("--model", folder, "--n-best", "3", "--num-beams", "4")
    _, out, _ = translate(monkeypatch, capsys, text, *arguments)
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    assert rows[3:6] == [["2", "0.0000", ""]] * 3
    settings = {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    for place in (0, 2):
        found = model.generate(**tokenizer([sentences[place]], return_tensors="pt"), **settings)
        expected = tokenizer.batch_decode(found.sequences, skip_special_tokens=True)
        mine = rows[3 * place : 3 * place + 3]
        assert [row[2] for row in mine] == [" ".join(text.split()) for text in expected]
        assert [float(row[1]) for row in mine] == pytest.approx(found.sequences_scores.tolist(), abs=1e-3)
    _, out, _ = translate(monkeypatch, capsys, text, *arguments, "--format", "jsonl")
    objects = [json.loads(line) for line in out.splitlines()]
    assert [item["line"] for item in objects] == [1, 2, 3]
    assert [found["score"] for found in objects[2]["translations"]] == [float(row[1]) for row in rows[6:]]


def test_an_input_file_is_refused_as_output(tiny_run, texts, capsys) -> None:
    file = texts[0] / "b.txt"
    before = file.read_bytes()
    arguments = ["--model", str(tiny_run / "model"), str(file), "--output", str(file), "--resume"]
    assert main(["translate", *arguments]) == 2 and "is one of the files to translate" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize("verb", ["translate", "evaluate"])
def test_a_device_is_written_to(tiny_run, texts, capsys, verb) -> None:
    text = str(texts[0] / "a.txt")
    arguments = ["--data", text, text] if verb == "evaluate" else [text]
    arguments = [verb, *arguments, "--model", str(tiny_run / "model"), "--output"]
    assert main([*arguments, "/dev/null"]) == 0
    capsys.readouterr()
    assert main([*arguments, "/dev/full"]) == 2
    said = capsys.readouterr().err
    assert "hf-vaswani: /dev/full cannot be written: No space left on device." in said and "Traceback" not in said


def test_a_pipe_is_written_to_and_not_resumed(tiny_run, texts, capsys) -> None:
    folder, _ = texts
    arguments = ["translate", str(folder / "a.txt"), "--model", str(tiny_run / "model"), "--output"]
    assert main([*arguments, str(folder / "file")]) == 0
    os.mkfifo(folder / "pipe")
    with subprocess.Popen(["cat", str(folder / "pipe")], stdout=subprocess.PIPE) as reader:
        assert main([*arguments, str(folder / "pipe")]) == 0
        assert reader.communicate(timeout=60)[0] == (folder / "file").read_bytes()
    assert main([*arguments, str(folder / "pipe"), "--resume"]) == 2
    assert "pipe is not a regular file, and cannot be completed" in capsys.readouterr().err


def test_a_full_disk_keeps_whole_lines_and_is_named(tiny_run, texts, capsys) -> None:
    folder, _ = texts
    output = folder / "out"
    arguments = [str(folder / "a.txt"), "--model", str(tiny_run / "model"), "--n-best", "2", "--output", str(output)]
    assert main(["translate", *arguments]) == 0
    whole = output.read_bytes()
    output.unlink()
    with size_limit(len(whole) - 20):
        assert main(["translate", *arguments]) == 2
    assert f"{output} cannot be written: File too large. Its lines are complete" in capsys.readouterr().err
    kept = output.read_bytes()
    assert 0 < len(kept) <= len(whole) - 20 and kept.endswith(b"\n") and whole.startswith(kept)
    assert main(["translate", *arguments, "--resume"]) == 0 and output.read_bytes() == whole


@pytest.mark.parametrize(
    ("text", "lines"), [(b"", 0), (b"one", 1), (b"one\r\ntwo\r\n", 2), (b"\xef\xbb\xbfone\n", 1), (b"o\0ne\n\0\n", 2)]
)
def test_the_number_of_lines_is_kept(tiny_run, monkeypatch, capsys, text, lines) -> None:
    code, out, err = translate(monkeypatch, capsys, text, "--model", str(tiny_run / "model"))
    assert code == 0 and out.count("\n") == lines, err


def test_the_number_format_of_products(tiny_run, monkeypatch, capsys, caplog) -> None:
    model = ("--model", str(tiny_run / "model"))
    seen = []
    translate_corpus = translation.translate_corpus

    def spy(model, *arguments, **settings):
        seen.append((torch.is_autocast_enabled("cpu"), model.dtype))
        return translate_corpus(model, *arguments, **settings)

    monkeypatch.setattr(translation, "translate_corpus", spy)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    for options, least, expected in (
        ((), 0, False),
        (("--dtype", "float32"), 0, False),
        (("--dtype", "bfloat16"), 0, True),
        (("--dtype", "auto"), 16, True),
        (("--dtype", "auto"), 17, False),
    ):
        seen.clear()
        monkeypatch.setattr("hf_vaswani.translation.quantization.TRANSLATION", least)
        code, out, _ = translate(monkeypatch, capsys, b"one two\n", *model, *options)
        assert code == 0 and out.count("\n") == 1 and seen == [(expected, torch.float32)]
    assert "Products in float32, because d_model is 16, and bfloat16 is faster from 17 on" in caplog.text
    for options, words in (
        (("--dtype", "auto", "--int8"), "--dtype is for torch with unquantized weights, but --int8 is given"),
        (("--dtype", "auto", "--engine", "auto"), "but --engine is auto: with ctranslate2, use --compute-type"),
    ):
        code, _, err = translate(monkeypatch, capsys, b"one two\n", *model, *options)
        assert code == 2 and words in err


def test_half_precision_is_computed_in_the_format_that_is_asked_for(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    half, tokenizer = load_translator(tiny_run / "model", torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    types = []
    monkeypatch.setattr(
        translation, "translate_corpus", lambda model, *_, **__: types.append(model.dtype) or ["found"]
    )
    for options in ((), ("--dtype", "float32"), ("--dtype", "bfloat16"), ("--dtype", "auto")):
        assert translate(monkeypatch, capsys, b"one\n", "--model", str(tmp_path / "half"), *options)[0] == 0
    # With bfloat16 asked for, only the products are in it.
    assert types == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]


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
