"""hf-vaswani backtranslate, distill and shortlist: what they write, and the same bytes after any interruption."""

import gzip
import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from hf_vaswani.cli import main, recipes
from hf_vaswani.cli.inputs import load_recorded
from hf_vaswani.data.reading import load_pairs
from hf_vaswani.data.tokenizer import load_tokenizer, train_tokenizer
from hf_vaswani.files import digest, read_json
from hf_vaswani.interruption import exclusive
from hf_vaswani.model.sentences_vaswani import TIMES, length_groups
from hf_vaswani.run_folder import read_recipe
from hf_vaswani.translation import batches, growing_file, lines
from hf_vaswani.translation.shortlist import FILE

from ..children import run_launched, run_python
from ..conftest import dear, tiny_recipe, write_recipe
from ..conversion.test_ctranslate2 import WORDS as MODEL_WORDS
from ..conversion.test_ctranslate2 import random_sentences, save_random
from .conftest import size_limit

# The model of the tests translates from English into German: text in English becomes pairs from German into English.
WORDS = ["one", "two three", "four five six", "nine", "seven eight"]
FILES = ("data.translations.jsonl", "data.chosen.tsv", "data.scored.tsv", "pairs/data.en", "pairs/data.de")


def stop_at_block(monkeypatch, after: int) -> list[list[str]]:
    """Lets Ctrl-C be pressed while a block is translated; returns the blocks as they are translated."""
    translate, blocks = lines.LineTranslator.__call__, []

    def stopping(self, sentences):
        blocks.append(sentences)
        if len(blocks) == after:
            raise KeyboardInterrupt
        return translate(self, sentences)

    monkeypatch.setattr(lines.LineTranslator, "__call__", stopping)
    return blocks


@pytest.fixture
def backtranslate(tiny_run, tmp_path: Path, monkeypatch) -> list[str]:
    """A command that translates 40 sentences in blocks of 8."""
    monkeypatch.setattr(growing_file, "BLOCK", 8)
    text = [f"{WORDS[i % 5]} {WORDS[i % 3]}" for i in range(40)]
    (tmp_path / "a.en").write_text("\n".join(text[:20]) + '\n\n  \n"ten"\ttwo\r\n', encoding="utf-8")
    (tmp_path / "b.en.gz").write_bytes(gzip.compress("\n".join(text[20:]).encode()))
    recipe = (
        "data: {source_language: de, target_language: en}\n"
        f"backtranslation: {{model: {tiny_run}, text: [{tmp_path / 'a.en'}, {tmp_path / 'b.en.gz'}],\n"
        f"                  output: {tmp_path / 'pairs.tsv'}}}\n"
    )
    return ["backtranslate", write_recipe(tmp_path, recipe)]


def test_the_pairs_are_read_by_more_data(backtranslate, tmp_path, capsys) -> None:
    assert main(backtranslate) == 0
    assert capsys.readouterr().out.startswith(f"Pairs  {tmp_path / 'pairs.tsv'} (41")
    pairs = load_pairs("de", "en", train_files=str(tmp_path / "pairs.tsv"))["train"]
    # Of 43 lines, two are blank.
    assert len(pairs) == 41 and pairs["target"][:2] == ["one one", "two three two three"]
    assert pairs["target"][20] == '"ten" two' and len(set(pairs["source"])) > 20
    assert main(backtranslate) == 0 and capsys.readouterr().out.startswith("Complete  ")


def budgets_of(monkeypatch, command: list[str]) -> set[int]:
    """Returns the token budgets of the batches that a command makes."""
    asked: set[int] = set()

    def spy(lengths: list[int], most: int, *limits: int) -> list[list[int]]:
        asked.add(most)
        return length_groups(lengths, most, *limits)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "length_groups", spy)
        assert main(command) == 0
    return asked


def test_batches_and_blocks_of_the_pairs_are_those_of_the_device(backtranslate, tmp_path, monkeypatch) -> None:
    assert budgets_of(monkeypatch, [*backtranslate, "--tokens-per-batch", "99"]) == {99}
    record = tmp_path / "pairs.tsv.json"
    assert growing_file.ITEMS not in read_json(record)
    (tmp_path / "pairs.tsv").unlink()
    record.unlink()
    monkeypatch.setitem(TIMES, "cpu", 3)
    assert budgets_of(monkeypatch, backtranslate) == {3 * 4096}
    assert read_json(record)[growing_file.ITEMS] == 3 * growing_file.BLOCK


def test_another_budget_draws_other_pairs_and_is_refused(backtranslate, tmp_path, capsys) -> None:
    """The file would be a mixture of two draws. Beam search finds the same with any budget."""
    budget = ["--tokens-per-batch", "99"]
    assert main([*backtranslate, *budget]) == 0
    for changed, words in (([], "was 99 and is None"), (["--tokens-per-batch", "98"], "was 99 and is 98")):
        assert main([*backtranslate, *changed]) == 2
        assert f"was made with other settings: --tokens-per-batch {words}." in capsys.readouterr().err
    assert main([*backtranslate, *budget]) == 0
    beam = [*backtranslate, "--backtranslation.method=beam", f"--backtranslation.output={tmp_path / 'beam.tsv'}"]
    assert main([*beam, *budget]) == main(beam) == 0


def test_beams_and_seeds_and_the_text_make_other_pairs_and_are_refused(backtranslate, tmp_path, capsys) -> None:
    assert main(backtranslate) == 0
    sampled = (tmp_path / "pairs.tsv").read_bytes()
    beam = ["--backtranslation.method", "beam", "--backtranslation.num_beams", "2"]
    for more, words in (
        (beam, "backtranslation.method was 'sampling' and is 'beam', backtranslation.num_beams was 4 and is 2"),
        (["--seed", "7"], "seed was 1 and is 7"),
        ([f"--backtranslation.text={tmp_path / 'a.en'}"], "backtranslation.text was ["),
    ):
        assert main([*backtranslate, *more]) == 2 and words in capsys.readouterr().err
        other = tmp_path / "other.tsv"
        assert main([*backtranslate, *more, "--backtranslation.output", str(other)]) == 0
        assert sampled != other.read_bytes() and other.with_name("other.tsv.json").is_file()
        other.unlink()
    assert (tmp_path / "pairs.tsv").read_bytes() == sampled


@pytest.mark.parametrize("after", [1, 3, 6])
def test_work_that_was_stopped_goes_on_to_the_same_bytes(backtranslate, tmp_path, monkeypatch, after) -> None:
    output, partial = tmp_path / "pairs.tsv", tmp_path / ".pairs.tsv.writing"
    assert main(backtranslate) == 0
    whole = output.read_bytes()
    output.unlink()
    blocks = stop_at_block(monkeypatch, after)
    assert main(backtranslate) == 130 and not output.exists()
    assert partial.read_bytes().count(b"\n") == 1 + 8 * (after - 1)
    # As if it had been killed while it wrote: a block and its last line are not whole.
    partial.write_bytes(partial.read_bytes() + b"eins\tone\nzw")
    assert main(backtranslate) == 0 and output.read_bytes() == whole and not partial.exists()
    # Each block once, and the interrupted one again.
    assert len(blocks) == 7


def test_a_full_disk_loses_nothing(backtranslate, tmp_path, capsys) -> None:
    output = tmp_path / "pairs.tsv"
    assert main(backtranslate) == 0
    whole = output.read_bytes()
    output.unlink()
    # The record fits.
    with size_limit(len(whole) - 20):
        assert main(backtranslate) == 2
    said = capsys.readouterr().err
    assert "cannot be written: File too large. Its lines are complete, and the same command continues" in said
    assert main(backtranslate) == 0 and output.read_bytes() == whole


def test_two_processes_do_not_write_one_file(backtranslate, tmp_path, capsys) -> None:
    with exclusive(tmp_path / "pairs.tsv"):
        assert main(backtranslate) == 2 and "pairs.tsv is being written by another process" in capsys.readouterr().err
    assert main(backtranslate) == 0 and not list(tmp_path.glob(".*.lock"))


@pytest.fixture
def distill(teacher, tmp_path: Path, monkeypatch) -> list[str]:
    """A command that distills this model, which translates from English into German."""
    monkeypatch.setattr(growing_file, "BLOCK", 32)
    (tmp_path / "more.en").write_text("one nine two\n\nsix six\n", encoding="utf-8")
    arguments = tiny_recipe(tmp_path, scored=True, max_steps=4)
    keys = {"model": teacher, "text": tmp_path / "more.en", "num_beams": 3, "folder": tmp_path / "teacher"}
    arguments += [f"--teacher.{key}={value}" for key, value in keys.items()]
    return ["distill", *arguments, "--run_dir", str(tmp_path / "student"), "--model.d_model=8"]


@pytest.fixture
def backward(teacher, tmp_path: Path) -> list[str]:
    """The same model, as if it were one of the other direction."""
    folder = shutil.copytree(teacher, tmp_path / "backward")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"language_pairs": [["de", "en"]]}))
    return [f"--teacher.backward_model={folder}", "--teacher.drop_worst=0.1"]


def test_the_teacher_is_gone_when_the_student_is_trained(distill, backward, monkeypatch) -> None:
    teachers: list[Any] = []
    alive: list[list[bool]] = []

    def remember(*given):
        translators, digests = load_recorded(*given)
        teachers.extend(weakref.ref(model) for model in translators.models)
        return translators, digests

    def look(*_):
        alive.append([bool(model()) for model in teachers])

    monkeypatch.setattr(recipes, "load_recorded", remember)
    # What torch keeps of them is given back, and then the training begins.
    monkeypatch.setattr("hf_vaswani.translation.budgets.return_unused_memory", look)
    monkeypatch.setattr(recipes, "train_recipe", look)
    assert main([*distill, *backward]) == 0
    assert alive == [[False, False]] * 2


def test_batches_and_blocks_of_the_teacher_are_those_of_its_device(distill, backward, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recipes, "train_recipe", lambda _: None)
    monkeypatch.setitem(TIMES, "cpu", 3)
    assert budgets_of(monkeypatch, [*distill, *backward, "--tokens-per-batch", "99"]) == {99}
    for name in ("data.translations.jsonl.json", "data.chosen.tsv.json", "data.scored.tsv.json"):
        assert read_json(tmp_path / "teacher" / name)[growing_file.ITEMS] == 3 * growing_file.BLOCK
    shutil.rmtree(tmp_path / "teacher")
    assert budgets_of(monkeypatch, [*distill, *backward]) == {3 * 4096}


@pytest.mark.parametrize("with_checkpoints", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_distilled_run_may_be_moved_with_the_folder_of_its_teacher(distill, tmp_path, with_checkpoints) -> None:
    distill = [word for word in distill if not word.startswith("--teacher.folder")]
    assert main(distill) == 0
    if not with_checkpoints:
        for folder in (tmp_path / "student").glob("checkpoint-*"):
            shutil.rmtree(folder)
    (tmp_path / "student").rename(tmp_path / "moved")
    (tmp_path / "student.teacher").rename(tmp_path / "moved.teacher")
    arguments = [*distill[1:], "--run_dir", str(tmp_path / "moved")]
    assert main(["train", *arguments]) == 0 == main(["distill", *arguments])
    if with_checkpoints:
        assert main(["train", *arguments, "--training.max_steps=6"]) == 0
        assert (tmp_path / "moved" / "checkpoint-6").is_dir()


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def test_a_student_learns_the_translations_of_its_teacher(distill, backward, tmp_path, capsys) -> None:
    assert main([*distill, *backward]) == 0
    said = capsys.readouterr().out
    assert re.search(r"data\.translations\.jsonl +122 .*\npairs +110\n", said, re.DOTALL)
    assert "en-de       teacher" in said and "en-de       student" in said
    found = content(tmp_path / "teacher")
    assert len(found) == 5 and found["pairs/data.en"].count(b"\n") == 110
    pairs = {tuple(line.split("\t")[:2]) for line in found["data.scored.tsv"].decode().splitlines()}
    sides = [found[f"pairs/data.{language}"].decode().splitlines() for language in ("en", "de")]
    assert set(zip(*sides, strict=True)) < pairs and len(set(sides[1])) > 50
    # The run says what it was trained on, and goes on with train as well.
    recorded = read_recipe(tmp_path / "student")
    assert recorded.data.train_files == {side: str(tmp_path / f"teacher/pairs/data.{side}") for side in ("en", "de")}
    assert main(["train", *distill[1:], *backward]) == 0
    capsys.readouterr()
    assert main([*distill, *backward]) == 0
    assert capsys.readouterr().out.count("done before") == 3 and content(tmp_path / "teacher") == found


@pytest.mark.slow
@pytest.mark.parametrize("after", [dear(1), 3, dear(5)])
def test_a_distillation_that_was_stopped_goes_on_to_the_same_bytes(
    distill, backward, tmp_path, monkeypatch, after
) -> None:
    distill += backward
    assert main(distill) == 0
    whole = content(tmp_path / "teacher")
    shutil.rmtree(tmp_path / "teacher")
    blocks = stop_at_block(monkeypatch, after)
    assert main(distill) == 130
    assert main(distill) == 0 and content(tmp_path / "teacher") == whole
    # 122 sentences in four blocks, the test set, and the one that was interrupted.
    assert len(blocks) == 6


@pytest.mark.process
def test_two_processes_write_what_one_does(distill, backward, tmp_path) -> None:
    distill += backward
    program = (
        "import sys; from hf_vaswani.cli import main; from hf_vaswani.translation import growing_file\n"
        "growing_file.BLOCK = 32\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    assert main([*distill, "--run_dir", str(tmp_path / "one")]) == 0
    expected = content(tmp_path / "teacher")
    shutil.rmtree(tmp_path / "teacher")
    arguments = ["-c", program, *distill, "--run_dir", str(tmp_path / "two")]
    ends = run_launched(tmp_path / "outputs", run_python, arguments)
    assert [end.code for end in ends] == [0, 0], [end.err[-3000:] for end in ends]
    assert content(tmp_path / "teacher") == expected and len(expected) == 5
    assert "".join(end.out for end in ends).count("en-de       student") == 1
    assert (tmp_path / "two" / "test.json").is_file()


@pytest.mark.slow
def test_quick_steps_are_done_again_and_translations_are_kept(distill, backward, tmp_path, capsys) -> None:
    assert main([*distill, *backward]) == 0
    before = content(tmp_path / "teacher")
    shutil.rmtree(tmp_path / "student")
    capsys.readouterr()
    assert main([*distill, *backward, "--teacher.choose=chrf", "--teacher.drop_worst=0"]) == 0
    assert capsys.readouterr().out.count("done before") == 1
    after = content(tmp_path / "teacher")
    assert before[FILES[0]] == after[FILES[0]]
    assert before["data.chosen.tsv"] != after["data.chosen.tsv"] and after["pairs/data.en"].count(b"\n") == 122
    # A student of other text is not taken for one of this text, and its text stays.
    assert main([*distill, *backward, "--teacher.choose=bleu"]) == 2
    said = capsys.readouterr().err
    assert "student belongs to another recipe: teacher.choose is 'chrf' there and 'bleu' here" in said
    assert content(tmp_path / "teacher") == after
    shutil.rmtree(tmp_path / "student")
    # Translations are not: they may have taken days.
    assert main([*distill, "--teacher.num_beams=2"]) == 2
    said = capsys.readouterr().err
    assert "teacher.num_beams was 3 and is 2" in said and "Name another teacher.folder, or delete" in said
    assert content(tmp_path / "teacher") == after


def test_a_student_without_the_teachers_text_is_not_trained(distill, tmp_path, capsys) -> None:
    assert main(["train", *distill[1:]]) == 2
    said = capsys.readouterr().err
    assert "has no translations of the teacher yet. Run hf-vaswani distill" in said and said.count("\n") == 1
    assert not (tmp_path / "student").exists() and not (tmp_path / "teacher").exists()


def test_folders_of_something_else_are_left_alone(distill, tmp_path, capsys) -> None:
    mine = tmp_path / "teacher" / "pairs" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    assert main(distill) == 2
    said = capsys.readouterr().err
    assert "it has something else already, 'mine.txt': name another teacher.folder" in said and said.count("\n") == 1
    assert mine.read_text() == "precious" and not (tmp_path / "teacher" / FILES[0]).exists()


@pytest.mark.slow
def test_a_teacher_that_searches_otherwise_is_noticed(distill, teacher, tmp_path, capsys) -> None:
    folder = shutil.copytree(teacher, tmp_path / "copy")
    distill.append(f"--teacher.model={folder}")
    assert main(distill) == 0
    shutil.rmtree(tmp_path / "student")
    # The same model by another name is the same.
    assert main([*distill, f"--teacher.model=[{folder}/]"]) == 0
    assert "done before" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "student")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_new_tokens": 3}))
    assert main(distill) == 2
    said = capsys.readouterr().err
    assert "was made with other settings: search.max_new_tokens was" in said and "is 3" in said


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    "name", ["data.translations.jsonl", dear("data.chosen.tsv"), "pairs/data.de", dear("pairs/record.json")]
)
def test_changed_files_are_not_learned(distill, tmp_path, capsys, name) -> None:
    assert main(distill) == 0
    shutil.rmtree(tmp_path / "student")
    file = tmp_path / "teacher" / name
    whole = file.read_bytes()
    changed = {"pairs/data.de": whole + b"more\n", "pairs/record.json": whole[:-20]}
    file.write_bytes(changed.get(name, whole.replace(b"1", b"2", 1)))
    capsys.readouterr()
    if name.startswith("pairs"):
        assert main(["train", *distill[1:]]) == 2
        said = capsys.readouterr().err
        problem = "is not JSON" if name.endswith(".json") else "was changed or damaged"
        assert f"{file} {problem}" in said and "Run hf-vaswani distill with this recipe first" in said
    if "translations" in name:
        # They took hours: nobody but their owner removes them.
        assert main(distill) == 2
        said = capsys.readouterr().err
        assert f"{file} was changed or damaged" in said and "to make it again" in said and said.count("\n") == 1
    else:
        assert main(distill) == 0 and file.read_bytes() == whole


def test_a_refused_resume_leaves_the_record_of_the_run(distill, tmp_path, capsys) -> None:
    assert main(distill) == 0
    before = (tmp_path / "student" / "recipe.yaml").read_bytes()
    pairs = tmp_path / "teacher" / "pairs"
    # Another text under the same name, as if it had been translated anew.
    text = (pairs / "data.de").read_text().splitlines()
    (pairs / "data.de").write_text("\n".join(["one more", *text[1:]]) + "\n")
    record = read_json(pairs / "record.json")
    record["files"]["data.de"] = digest(pairs / "data.de")
    (pairs / "record.json").write_text(json.dumps(record))
    (tmp_path / "student" / "test.json").unlink()
    assert main(["train", *distill[1:], "--training.max_steps=6"]) == 2
    assert "The training or validation text has changed since" in capsys.readouterr().err
    assert (tmp_path / "student" / "recipe.yaml").read_bytes() == before


def test_models_of_another_direction_are_refused(distill, tiny_run, backward, tmp_path, capsys) -> None:
    assert main([*distill, f"--teacher.model={tmp_path / 'backward'}"]) == 2
    assert "teacher.model " in (said := capsys.readouterr().err) and "translates de-en, but" in said
    assert main([*distill, f"--teacher.backward_model={tiny_run}"]) == 2
    said = capsys.readouterr().err
    assert "teacher.backward_model" in said and "it must translate de-en: give a model of this direction" in said


@pytest.fixture
def shortlist_run(tmp_path):
    """A shortlist_run folder with a random model, and a recipe whose targets are the sources backwards."""
    model = save_random(tmp_path / "run" / "model", vocab_size=400)
    model.generation_config.min_new_tokens = 4
    model.save_pretrained(tmp_path / "run" / "model")
    # CTranslate2's format has no entries with spaces.
    train_tokenizer([" ".join(MODEL_WORDS)] * 9, 390).save_pretrained(tmp_path / "run" / "model")
    lines = [line for line in random_sentences() if line.strip()]
    pairs = [f"{line}\t{' '.join(reversed(line.split()))}" for line in lines]
    (tmp_path / "pairs.tsv").write_text("\n".join(["en\tde", *pairs, "\tleer"]) + "\n", encoding="utf-8")
    recipe = {"run_dir": str(tmp_path / "run"), "data": {"source_language": "en", "target_language": "de"}}
    recipe["data"]["train_files"] = str(tmp_path / "pairs.tsv")
    (tmp_path / "my.yaml").write_text(json.dumps(recipe))
    return tmp_path, lines


def test_the_shortlist_of_a_run_is_kept_with_its_model(shortlist_run, capsys) -> None:
    folder, lines = shortlist_run
    model = folder / "run" / "model"
    settings = ["--shortlist.frequent=4", "--shortlist.candidates=5"]
    assert main(["shortlist", str(folder / "my.yaml"), *settings]) == 0
    said = capsys.readouterr().out
    assert f"{len(lines):,}" in said and str(model / FILE) in said
    content = json.loads((model / FILE).read_text(encoding="utf-8"))
    assert len(content["frequent"]) == 4 and "</s>" in content["frequent"]
    assert content["translations"] and max(map(len, content["translations"].values())) <= 5
    assert not {word for row in content["translations"].values() for word in row} & set(content["frequent"])
    # Fewer pairs are spread over the text.
    assert main(["shortlist", str(folder / "my.yaml"), *settings, "--shortlist.max_pairs=3"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("3 ")
    assert json.loads((model / FILE).read_text(encoding="utf-8")) != content
    assert main(["shortlist", str(folder / "my.yaml"), *settings, "--data.streaming=true"]) == 0
    assert json.loads((model / FILE).read_text(encoding="utf-8")) == content


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_translations_have_the_entries_of_the_shortlist(shortlist_run, capsys, engine) -> None:
    if engine == "ctranslate2":
        pytest.importorskip("ctranslate2")
    folder, lines = shortlist_run
    model = folder / "run" / "model"
    (folder / "in.txt").write_text(f"{lines[0]}\n", encoding="utf-8")
    greedy = ["translate", "--model", str(model), "--num-beams=1", f"--engine={engine}", str(folder / "in.txt")]

    def translated(*options: str) -> str:
        assert main([*greedy, *options]) == 0
        return capsys.readouterr().out

    whole = translated().split()
    # Whatever the file says is searched; a converted model follows it.
    words, tokenizer = lines[0].split(), load_tokenizer(str(model))
    other, another = [word for line in lines for word in line.split() if word not in (*words, *whole)][:2]
    for word in (other, another):
        (token,), (first,) = map(tokenizer.tokenize, (word, words[0]))
        (model / FILE).write_text(json.dumps({"frequent": ["</s>"], "translations": {first: [token]}}))
        found = translated("--shortlist").split()
        assert found and set(found) <= {word, *words}
    assert translated().split() == whole


def test_text_without_pairs_is_said(shortlist_run, capsys) -> None:
    folder, _ = shortlist_run
    for text in ("en\tde\n", "en\tde\n\tleer\n", f"en\tde\n{'a ' * 600}\tb\n"):
        (folder / "pairs.tsv").write_text(text)
        assert main(["shortlist", str(folder / "my.yaml")]) == 2
        assert "no pairs" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def greedy(shortlist_run) -> list[str]:
    """A command that translates a line greedily with the model of the shortlist_run."""
    folder, _ = shortlist_run
    (folder / "in.txt").write_text("a\n")
    return ["translate", "--model", str(folder / "run" / "model"), "--num-beams=1", str(folder / "in.txt")]


def test_models_without_a_shortlist_are_refused(greedy, capsys) -> None:
    assert main([*greedy, "--shortlist"]) == 2
    assert "has no shortlist.json: hf-vaswani shortlist writes it" in capsys.readouterr().err


def test_a_damaged_shortlist_stops_nobody_who_does_without(shortlist_run, greedy, capsys) -> None:
    pytest.importorskip("ctranslate2")
    (shortlist_run[0] / "run" / "model" / FILE).write_text("{")
    assert main([*greedy, "--engine=ctranslate2"]) == 0
    assert main([*greedy, "--engine=ctranslate2", "--shortlist"]) == 2
    assert "is no shortlist, or it is damaged" in capsys.readouterr().err


def test_entries_with_spaces_are_no_shortlist_of_ctranslate2(shortlist_run, greedy, capsys) -> None:
    pytest.importorskip("ctranslate2")
    # Its words begin with spaces.
    save_random(shortlist_run[0] / "run" / "model")
    assert main(["shortlist", str(shortlist_run[0] / "my.yaml")]) == 0
    assert main([*greedy, "--engine=ctranslate2", "--shortlist"]) == 2
    assert "CTranslate2 cannot translate with the shortlist, because an entry has a space" in capsys.readouterr().err
    assert main([*greedy, "--engine=auto", "--shortlist"]) == 0


def test_a_pipeline_s_call_without_the_shortlist(shortlist_run) -> None:
    pytest.importorskip("ctranslate2")
    folder, lines = shortlist_run
    model = str(folder / "run" / "model")
    assert main(["shortlist", str(folder / "my.yaml"), "--shortlist.frequent=2", "--shortlist.candidates=1"]) == 0
    options = {"model": model, "engine": "ctranslate2", "num_beams": 1}
    whole, pipe = pipeline("translation", **options), pipeline("translation", shortlist=True, **options)
    assert pipe(lines) != whole(lines)
    assert pipe(lines, shortlist=None) == whole(lines)
