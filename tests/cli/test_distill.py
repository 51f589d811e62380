"""hf-vaswani distill: a student of a teacher, the same text after any interruption, and what is refused."""

import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from hf_vaswani.cli import distill, main
from hf_vaswani.cli.inputs import load_recorded
from hf_vaswani.files import digest, read_json
from hf_vaswani.run_folder import read_recipe
from hf_vaswani.translation import growing_file, lines

from ..children import run_launched, run_python
from ..conftest import dear, tiny_recipe

FILES = ("data.translations.jsonl", "data.chosen.tsv", "data.scored.tsv", "pairs/data.en", "pairs/data.de")


@pytest.fixture
def command(teacher, tmp_path: Path, monkeypatch) -> list[str]:
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


def test_the_teacher_is_gone_when_the_student_is_trained(command, backward, monkeypatch) -> None:
    teachers: list[Any] = []
    alive: list[bool] = []

    def remember(*given):
        translators, digests = load_recorded(*given)
        teachers.extend(weakref.ref(model) for model in translators.models)
        return translators, digests

    monkeypatch.setattr(distill, "load_recorded", remember)
    monkeypatch.setattr(distill, "train_recipe", lambda _: alive.extend(bool(model()) for model in teachers))
    assert main([*command, *backward]) == 0
    assert alive == [False, False]


@pytest.mark.parametrize("with_checkpoints", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_distilled_run_may_be_moved_with_the_folder_of_its_teacher(command, tmp_path, with_checkpoints) -> None:
    command = [word for word in command if not word.startswith("--teacher.folder")]
    assert main(command) == 0
    if not with_checkpoints:
        for folder in (tmp_path / "student").glob("checkpoint-*"):
            shutil.rmtree(folder)
    (tmp_path / "student").rename(tmp_path / "moved")
    (tmp_path / "student.teacher").rename(tmp_path / "moved.teacher")
    arguments = [*command[1:], "--run_dir", str(tmp_path / "moved")]
    assert main(["train", *arguments]) == 0 == main(["distill", *arguments])
    if with_checkpoints:
        assert main(["train", *arguments, "--training.max_steps=6"]) == 0
        assert (tmp_path / "moved" / "checkpoint-6").is_dir()


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def test_a_student_learns_the_translations_of_its_teacher(command, backward, tmp_path, capsys) -> None:
    assert main([*command, *backward]) == 0
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
    assert main(["train", *command[1:], *backward]) == 0
    capsys.readouterr()
    assert main([*command, *backward]) == 0
    assert capsys.readouterr().out.count("done before") == 3 and content(tmp_path / "teacher") == found


@pytest.mark.slow
@pytest.mark.parametrize("after", [dear(1), 3, dear(5)])
def test_work_that_was_stopped_goes_on_to_the_same_bytes(command, backward, tmp_path, monkeypatch, after) -> None:
    command += backward
    assert main(command) == 0
    whole = content(tmp_path / "teacher")
    shutil.rmtree(tmp_path / "teacher")
    translate, blocks = lines.LineTranslator.__call__, []

    def stopping(self, sentences):
        blocks.append(sentences)
        if len(blocks) == after:
            raise KeyboardInterrupt
        return translate(self, sentences)

    monkeypatch.setattr(lines.LineTranslator, "__call__", stopping)
    assert main(command) == 130
    assert main(command) == 0 and content(tmp_path / "teacher") == whole
    # 122 sentences in four blocks, the test set, and the one that was interrupted.
    assert len(blocks) == 6


@pytest.mark.process
def test_two_processes_write_what_one_does(command, backward, tmp_path) -> None:
    command += backward
    program = (
        "import sys; from hf_vaswani.cli import main; from hf_vaswani.translation import growing_file\n"
        "growing_file.BLOCK = 32\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    assert main([*command, "--run_dir", str(tmp_path / "one")]) == 0
    expected = content(tmp_path / "teacher")
    shutil.rmtree(tmp_path / "teacher")
    arguments = ["-c", program, *command, "--run_dir", str(tmp_path / "two")]
    ends = run_launched(tmp_path / "outputs", run_python, arguments)
    assert [end.code for end in ends] == [0, 0], [end.err[-3000:] for end in ends]
    assert content(tmp_path / "teacher") == expected and len(expected) == 5
    assert "".join(end.out for end in ends).count("en-de       student") == 1
    assert (tmp_path / "two" / "test.json").is_file()


@pytest.mark.slow
def test_quick_steps_are_done_again_and_translations_are_kept(command, backward, tmp_path, capsys) -> None:
    assert main([*command, *backward]) == 0
    before = content(tmp_path / "teacher")
    shutil.rmtree(tmp_path / "student")
    capsys.readouterr()
    assert main([*command, *backward, "--teacher.choose=chrf", "--teacher.drop_worst=0"]) == 0
    assert capsys.readouterr().out.count("done before") == 1
    after = content(tmp_path / "teacher")
    assert before[FILES[0]] == after[FILES[0]]
    assert before["data.chosen.tsv"] != after["data.chosen.tsv"] and after["pairs/data.en"].count(b"\n") == 122
    # A student of other text is not taken for one of this text, and its text stays.
    assert main([*command, *backward, "--teacher.choose=bleu"]) == 2
    said = capsys.readouterr().err
    assert "student belongs to another recipe: teacher.choose is 'chrf' there and 'bleu' here" in said
    assert content(tmp_path / "teacher") == after
    shutil.rmtree(tmp_path / "student")
    # Translations are not: they may have taken days.
    assert main([*command, "--teacher.num_beams=2"]) == 2
    said = capsys.readouterr().err
    assert "teacher.num_beams was 3 and is 2" in said and "Name another teacher.folder, or delete" in said
    assert content(tmp_path / "teacher") == after


def test_a_student_without_the_teachers_text_is_not_trained(command, tmp_path, capsys) -> None:
    assert main(["train", *command[1:]]) == 2
    said = capsys.readouterr().err
    assert "has no translations of the teacher yet. Run hf-vaswani distill" in said and said.count("\n") == 1
    assert not (tmp_path / "student").exists() and not (tmp_path / "teacher").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--teacher.model=null", "--teacher.text=null", "--teacher.folder=null", "--teacher.num_beams=8"],
         "teacher.model has no value: name the model that teaches"),
        (["--teacher.model=null"], "has no effect without teacher.model: set it"),
        (["--teacher.model=nowhere"], "is 'nowhere', which does not exist"),
        (["--teacher.model=[]"], "teacher.model must name at least one, but it is []"),
        (["--teacher.text=nowhere.en"], "There is no file 'nowhere.en'"),
        (["--teacher.n_best=4"], "teacher.n_best (4) must not be above teacher.num_beams (3)"),
        (["--teacher.choose=bleu", "--teacher.n_best=1"], "to choose from, but teacher.n_best is 1"),
        (["--teacher.choose=bleu", "--teacher.num_beams=1"], "to choose from, but teacher.num_beams is 1"),
        (["--teacher.drop_worst=0.2"], "has no effect without teacher.backward_model"),
        (["--task=text_to_text"], "teacher.model needs task 'translation', but the task is 'text_to_text'"),
        (["--teacher.folder=more.en"], "is a file: name a folder"),
        (["--teacher.folder=more.en/below"], "teacher.folder more.en/below cannot be made: Not a directory"),
        (["--teacher.folder=student", "--run_dir=student"], "teacher.folder student is the folder of the run"),
        # What is wrong with the student alone.
        (["--data.validation_files=nowhere.tsv"], "nowhere.tsv"),
        (["--tokenizer.path=nowhere"], "The tokenizer nowhere cannot be loaded: "),
        (["--initialize.from=nowhere"], "initialize.from is 'nowhere'"),
        (["--model.d_model=9"], "d_model"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(
    command, tmp_path, monkeypatch, capsys, more, words
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main([*command, *more]) == 2
    # Reading the held-out sets may show a bar.
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1] and said.count("hf-vaswani: ") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_folders_of_something_else_are_left_alone(command, tmp_path, capsys) -> None:
    mine = tmp_path / "teacher" / "pairs" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "it has something else already, 'mine.txt': name another teacher.folder" in said and said.count("\n") == 1
    assert mine.read_text() == "precious" and not (tmp_path / "teacher" / FILES[0]).exists()


@pytest.mark.slow
def test_a_teacher_that_searches_otherwise_is_noticed(command, teacher, tmp_path, capsys) -> None:
    folder = shutil.copytree(teacher, tmp_path / "copy")
    command.append(f"--teacher.model={folder}")
    assert main(command) == 0
    shutil.rmtree(tmp_path / "student")
    # The same model by another name is the same.
    assert main([*command, f"--teacher.model=[{folder}/]"]) == 0
    assert "done before" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "student")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_new_tokens": 3}))
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "was made with other settings: search was" in said and "'max_new_tokens': 3" in said


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    "name", ["data.translations.jsonl", dear("data.chosen.tsv"), "pairs/data.de", dear("pairs/record.json")]
)
def test_changed_files_are_not_learned(command, tmp_path, capsys, name) -> None:
    assert main(command) == 0
    shutil.rmtree(tmp_path / "student")
    file = tmp_path / "teacher" / name
    whole = file.read_bytes()
    file.write_bytes(whole + b"more\n" if name.endswith(".de") else whole.replace(b"1", b"2", 1))
    capsys.readouterr()
    if name.startswith("pairs"):
        assert main(["train", *command[1:]]) == 2
        said = capsys.readouterr().err
        assert f"{file} was changed or damaged" in said and "Run hf-vaswani distill with this recipe first" in said
    if "translations" in name:
        # They took hours: nobody but their owner removes them.
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"{file} was changed or damaged" in said and "to make it again" in said and said.count("\n") == 1
    else:
        assert main(command) == 0 and file.read_bytes() == whole


def test_a_refused_resume_leaves_the_record_of_the_run(command, tmp_path, capsys) -> None:
    assert main(command) == 0
    before = (tmp_path / "student" / "recipe.yaml").read_bytes()
    pairs = tmp_path / "teacher" / "pairs"
    # Another text under the same name, as if it had been translated anew.
    text = (pairs / "data.de").read_text().splitlines()
    (pairs / "data.de").write_text("\n".join(["one more", *text[1:]]) + "\n")
    record = read_json(pairs / "record.json")
    record["files"]["data.de"] = digest(pairs / "data.de")
    (pairs / "record.json").write_text(json.dumps(record))
    (tmp_path / "student" / "test.json").unlink()
    assert main(["train", *command[1:], "--training.max_steps=6"]) == 2
    assert "The training or validation text has changed since" in capsys.readouterr().err
    assert (tmp_path / "student" / "recipe.yaml").read_bytes() == before


def test_models_of_another_direction_are_refused(command, tiny_run, backward, tmp_path, capsys) -> None:
    assert main([*command, f"--teacher.model={tmp_path / 'backward'}"]) == 2
    assert "teacher.model " in (said := capsys.readouterr().err) and "translates de-en, but" in said
    assert main([*command, f"--teacher.backward_model={tiny_run}"]) == 2
    said = capsys.readouterr().err
    assert "teacher.backward_model" in said and "it must translate de-en: give a model of this direction" in said
