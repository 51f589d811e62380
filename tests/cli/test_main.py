"""Entry points, exit codes and standard output, whatever the verb."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hf_vaswani
from hf_vaswani.cli import main

from ..conftest import ROOT


def test_the_version_and_the_usage(capsys) -> None:
    for arguments, program, words in (
        (["--version"], "hf-vaswani", f"hf-vaswani {hf_vaswani.__version__}\n"),
        (["train", "--help"], "hf-vaswani", "usage: hf-vaswani train RECIPE.yaml"),
        (["train", "--help"], "train.py", "usage: accelerate launch train.py RECIPE.yaml"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments, program)
        assert stop.value.code == 0 and capsys.readouterr().out.startswith(words)


def test_standard_output_is_utf_8_wherever_it_goes(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit):
        main(["--version"])
    assert (sys.stdout.encoding, sys.stdout.errors) == ("utf-8", "surrogateescape")


VERBS = ["train", "average", "push", "renew", "translate", "score", "evaluate", "convert"]


def test_every_verb_explains_itself(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n    {verb}" in said
    for verb in VERBS[1:]:
        with pytest.raises(SystemExit) as stop:
            main([verb, "--help"])
        said = capsys.readouterr().out
        assert stop.value.code == 0 and said.startswith(f"usage: hf-vaswani {verb} [-h]")
        # A description before the arguments, and one line at the end that shows them.
        assert said.split("\n\n")[1][0].isupper()
        assert re.fullmatch(rf"example: hf-vaswani {verb} .+", said.splitlines()[-1])


def test_a_verb_that_is_gone_says_what_replaces_it(capsys) -> None:
    assert main(["compare", "a.de", "b.de", "--references", "test.de"]) == 2
    assert "compare is no longer a verb. Use instead: sacrebleu REFERENCES -i" in capsys.readouterr().err


@pytest.mark.process
def test_help_and_the_version_import_nothing_heavy() -> None:
    program = (
        "import contextlib, sys\n"
        "from hf_vaswani_start import main\n"
        "for arguments in ['--version'], ['--help'], *([verb, '--help'] for verb in sys.argv[1:]):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(arguments)\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *VERBS], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith(f"hf-vaswani {hf_vaswani.__version__}\n")
    assert done.stdout.count("usage: ") == len(VERBS) + 1
    heavy = {"torch", "transformers", "huggingface_hub", "numpy", "datasets", "pyarrow", "fastapi"}
    assert not heavy & set(done.stderr.split())


# What a person types, in which MODEL is a model; and what the error says.
WRONG = {
    "translate": [
        ("--num-beams 0", "--num-beams must be from 1 to 1000, but it is 0"),
        ("--num-beams 99999", "--num-beams must be from 1 to 1000, but it is 99999"),
        ("--n-best 0", "--n-best must be from 1 to 1000, but it is 0"),
        ("--n-best 3 --num-beams 2", "--n-best 3 needs a beam size of at least 3, but --num-beams is 2"),
        ("--n-best 1 --num-beams 1", "--n-best 1 needs a beam size of at least 2, but --num-beams is 1"),
        ("--format tsv --alignment", "--format tsv needs --n-best"),
        ("--format jsonl", "--format jsonl needs --n-best or --alignment"),
        ("--format parquet", "--format parquet needs --table."),
        ("--markup html --n-best 2", "--markup cannot be combined with --n-best"),
        ("--markup html --alignment", "--markup cannot be combined with --alignment"),
        ("--resume", "--resume needs --output"),
        ("nowhere.txt", "There is no file 'nowhere.txt'"),
        (".", "'.' is a folder, not a text file"),
        ("latin.en", "latin.en, line 2, is not UTF-8: invalid start byte at byte 4"),
        ("a.en --output .", "--output . is a folder: name a file"),
        ("a.en --output no/x", "--output no/x is in a folder that does not exist"),
        ("a.en --output a.en --resume", "--output a.en is one of the files to translate"),
        ("a.en --output b.en", "b.en exists already: complete it with --resume, or choose another --output"),
        ("a.en --output b.en --resume --n-best 2", "b.en, line 1, does not start with '1\\t': it was written with"),
        ("a.en --output b.en --resume --alignment", "b.en, line 1, was written without --alignment"),
        ("a.en --output long.en --resume", "The output has 9 lines already, but the text has only 2"),
        ("--dtype auto --int8", "--dtype is for torch with unquantized weights, but --int8 is given"),
        ("--dtype auto --engine auto", "but --engine is auto: with ctranslate2, use --compute-type"),
        ("--int8 --engine auto", "--int8 is for torch, but --engine is auto"),
        ("--device cuda:99", "--device is 'cuda:99', but torch finds cpu"),
        ("--shortlist", "has no shortlist.json: hf-vaswani shortlist writes it"),
        ("--target-language fr", "The model translates into de, but --target-language is 'fr'"),
        ("--column en", "--column needs --table."),
        ("--score", "--score needs --table."),
        ("--engine-cluster ray", "--engine-cluster needs --table."),
        ("--table x --column en", "--table needs --output"),
        ("--table x --output y", "--table needs --column"),
    ],
    "translate --table t.jsonl --column en --output out": [
        ("--column fr", "t.jsonl has no column 'fr'; it has 'id', 'en'"),
        ("--to-column en", "has a column 'en' already: choose another --to-column"),
        ("--shard-rows 0", "--shard-rows must be at least 1"),
        ("--format tsv", "--format must be parquet or jsonl with --table"),
        ("--resume", "--resume cannot be combined with --table"),
        ("--alignment", "--alignment cannot be combined with --table"),
        ("--markup html --n-best 2", "--markup cannot be combined with --n-best"),
        ("--num-beams 1 --score", "--score needs a beam size of at least 2, but --num-beams is 1"),
        ("--num-beams 3 --n-best 4", "--n-best 4 needs a beam size of at least 4, but --num-beams is 3"),
        ("--workers 2", "--workers needs --engine-cluster ray"),
        ("--worker-cpus -1 --engine-cluster ray", "--worker-cpus must be from 0 to 10000"),
        ("--table-config x", "--table-config is for datasets on the Hub"),
        ("--table-split test", "--table-split is for datasets on the Hub"),
        ("--output=", "--output is empty"),
        ("--table=", "--table is empty"),
        ("--output nowhere://x", "nowhere://x cannot be reached: "),
        ("--output t.jsonl", "t.jsonl is a file: name a folder"),
        ("--table . --output ./out", "is in the folder of the table"),
        ("--table mixed.jsonl --format parquet", "have no common type for Parquet"),
        ("--device cuda:99", "--device is 'cuda:99', but torch finds cpu"),
    ],
    "score": [
        ("a.en missing.txt", "There is no file 'missing.txt'"),
        ("b.en a.en", "b.en ends after line 1, but a.en continues: each line needs one of its own"),
        ("a.en b.en", "b.en ends after line 1, but a.en continues"),
    ],
    "align a.en a.de": [
        ("--shift", "--shift needs --layer"),
        ("--layer=1", "layer must be at least 0 and below decoder_layers (1), but it is 1"),
    ],
    "evaluate --data": [
        ("a.en", "--data names one text"),
        ("a.en none.de", "There is no file"),
        ("a.en b.en", "must have the same number of lines, but"),
        ("a.en a.de --columns en de", "--columns applies to one file"),
        ("a.en a.de --tokenize 14b", "sacreBLEU has no tokenizer '14b'"),
        ("a.en a.de --num-beams 0", "--num-beams must be from 1 to 1000, but it is 0"),
        ("a.en a.de --output no/folder", "is in a folder that does not exist"),
        ("a.en a.de --output b.en", "--output b.en exists already"),
        ("empty.en empty.en", "There is no text in"),
        ("a.en a.de --altered upper,lower", "'lower': choose from upper,title,typos,no_final_mark"),
        ("a.en a.de --altered=", "--altered has ''"),
        ("a.en a.de --altered=upper --sentences --format=csv", "do not fit into one table"),
    ],
    "explore": [
        ("one --num-beams 0", "--num-beams must be from 1 to 1000, but it is 0."),
        ("one --output .", "--output . is a folder: name a file."),
        ("one --output no/page.html", "--output no/page.html is in a folder that does not exist."),
        ("\u2002", "There is no text to explore."),
        ("one" + "\u2003one" * 300, "tokens, but a page shows from 1 to 200: shorten it."),
        ("one --target-language fr", "--target-language is 'fr'"),
    ],
    "demo": [
        ("--num-beams 11", "--num-beams must be from 1 to 10, but it is 11."),
        ("--port 0", "--port must be from 1 to 65535, but it is 0."),
        ("--examples nowhere.txt", "There is no file 'nowhere.txt'."),
    ],
    "serve": [
        ("--port 70000", "--port must be from 0 to 65535, but it is 70000."),
        ("--deadline 0", "--deadline must be a number of seconds above 0, but it is 0."),
        ("--deadline nan", "--deadline must be a number of seconds above 0, but it is nan."),
        ("--workers 0", "--workers must be at least 1, but it is 0."),
        ("--char-limit 0", "--char-limit must be at least 1, but it is 0."),
        ("--direction english", "--direction must be a source and a target language, as en-de, but it is"),
        ("--direction en-de", "--direction is for a model whose config names no languages"),
        ("--api-keys nowhere.txt", "There is no file 'nowhere.txt'."),
        ("--api-keys empty.en", "empty.en has no API key"),
        ("--engine auto --dtype auto", "--dtype is for torch, but --engine is auto"),
        ("--compute-type int8", "needs engine=ctranslate2 or engine=auto, but engine is torch."),
        ("--model TEACHER --engine ctranslate2", "with approximate."),
        ("--engine onnx", "engine=onnx is no longer there: use engine=ctranslate2"),
    ],
    "convert MODEL out --to onnx": [("--sentence \udcff", "--sentence is not UTF-8: '\\udcff'")],
    "average --output out": [
        ("RUN/checkpoint-9", "which does not exist"),
        ("RUN", "RUN is a run folder: select its checkpoints with --last N or --best N"),
        ("RUN/tokenizer", "model.safetensors cannot be read"),
        ("RUN/checkpoint-8 --output .", "exists already"),
        ("MODEL --last 1", "recipe.yaml"),
        ("RUN --last 0", "--last must be at least 1, but it is 0"),
        ("RUN --last 1 --best 1", "--last and --best exclude each other"),
        ("RUN --best 2 --by loss", "has fewer checkpoints than --best 2 asks for: 1"),
        ("RUN/checkpoint-8 RUN/checkpoint-12 --last 1", "take one run folder, but 2 folders are given"),
    ],
    "push RUN": [
        ("", "There is no repository to publish to: give --repo-id USER/NAME"),
        ("--repo-id me/m --static", "--static is for --space, which is not given"),
        ("--repo-id me/m --space me/demo --javascript .", "--javascript is for --static, which is not given"),
    ],
    "check": [
        ("a.en", "name its columns, e.g. --columns en de, or both its files"),
        ("a.en a.de a.en", "A text is one file or two, but 3 are given"),
        ("a.en a.de --columns en de", "--columns applies to one file or dataset"),
        ("a.en missing.de", "There is no file 'missing.de'"),
        ("missing.tsv --columns en de", "missing.tsv"),
        ("", "There is no text to check: give a recipe"),
        ("--data.source_language=fr", "There is no training text"),
        ("a.en a.de --output clean.txt", "--output clean.txt must end in .tsv"),
        ("a.en a.de --output a.en", "exists already: choose another file"),
        ("a.en a.de --json no/where.json", "is in a folder that does not exist"),
        ("a.en a.de --output a.tsv --rejected ./a.tsv", "is given for two outputs"),
        ("a.en a.de --output link/a.tsv --rejected a.tsv", "is given for two outputs"),
        ("a.en a.de --limits ratio=3", "--limits has 'ratio=3', but the limits are max_length,"),
        ("a.en a.de --limits max_length=long", "--limits max_length must be an integer, but it is 'long'"),
        ("a.en a.de --limits min_letters=1.5", "--limits min_letters must be from 0 to 1, but it is 1.5"),
        ("a.en a.de --limits max_urls=1 --limits max_urls=2", "--limits has max_urls twice"),
        ("a.en a.de --limits max_ratio=nan", "--limits max_ratio must be from 1 to"),
        ("a.en a.de --limits max_ratio=0.5", "--limits max_ratio must be from 1 to"),
        ("a.en a.de --plot lengths.jpg", "lengths.jpg must end in .png"),
        ("a.en a.de --data.tran_files=x", "did you mean"),
        ("my.yaml a.en", "A recipe is checked alone"),
        ("bert.yaml", "bert.yaml has no sentence pairs (task: masked_lm), and only these are checked"),
    ],
    "backtranslate my.yaml --backtranslation.model=RUN --backtranslation.text=a.de --backtranslation.output=p.tsv": [
        ("--backtranslation.model=null", "backtranslation.model must have a value, but it is None"),
        ("--backtranslation.text=null", "backtranslation.text must have a value"),
        ("--backtranslation.text=nowhere.en", "There is no file 'nowhere.en'"),
        ("--backtranslation.output=null", "backtranslation.output must have a value"),
        ("--backtranslation.output=pairs.txt", "backtranslation.output must end in .tsv"),
        ("--backtranslation.output=no/p.tsv", "backtranslation.output no/p.tsv is in a folder that does not exist"),
        ("--backtranslation.text=t.tsv --backtranslation.output=t.tsv", "is one of the files of backtranslation.text"),
        ("", "translates en-de, but for the data section of this recipe, it must translate de-en"),
        ("--backtranslation.top_k=5 --backtranslation.method=beam", "backtranslation.top_k (5) has no effect"),
        ("--device cuda:99", "--device is 'cuda:99', but torch finds cpu"),
    ],
    "distill my.yaml --teacher.model=RUN --teacher.num_beams=3 --teacher.folder=taught": [
        (
            "--teacher.model=null --teacher.folder=null --teacher.num_beams=8",
            "teacher.model has no value: name the model that teaches",
        ),
        ("--teacher.model=null", "has no effect without teacher.model: set it"),
        ("--teacher.model=[]", "teacher.model must name at least one, but it is []"),
        ("--teacher.text=nowhere.en", "There is no file 'nowhere.en'"),
        ("--teacher.n_best=4", "teacher.n_best (4) must not be above teacher.num_beams (3)"),
        ("--teacher.choose=bleu --teacher.n_best=1", "to choose from, but teacher.n_best is 1"),
        ("--teacher.choose=bleu --teacher.num_beams=1", "to choose from, but teacher.num_beams is 1"),
        ("--teacher.drop_worst=0.2", "has no effect without teacher.backward_model"),
        ("--task=text_to_text", "teacher.model is for the task 'translation', but task is 'text_to_text'"),
        ("--teacher.folder=a.en", "is a file: name a folder"),
        ("--teacher.folder=a.en/below", "teacher.folder a.en/below cannot be made: Not a directory"),
        ("--teacher.folder=student --run_dir=student", "teacher.folder student is the folder of the run"),
        # What is wrong with the student alone.
        ("--data.validation_files=nowhere.tsv", "nowhere.tsv"),
        ("--tokenizer.path=nowhere", "The tokenizer nowhere cannot be loaded: "),
        ("--initialize.from=nowhere", "initialize.from is 'nowhere'"),
        ("--model.d_model=9", "d_model"),
    ],
    "shortlist my.yaml": [
        ("--task=causal_lm", "A shortlist is for models that translate"),
        ("--run_dir=nowhere", "nowhere has no model yet: train the recipe first, or name its run by --run_dir"),
        ("--run_dir=RUN --data.train_files=nowhere.tsv", "nowhere.tsv"),
        ("--shortlist.candidates=0", "shortlist.candidates must be at least 1"),
    ],
}
# Verbs that read their models from a recipe, or have them among their arguments.
WITHOUT_MODEL = ("convert", "average", "push", "check", "backtranslate", "distill", "shortlist")


@pytest.fixture
def folder_of_texts(tmp_path, monkeypatch) -> Path:
    """The folder that wrong commands run in, with texts and a recipe."""
    rows = ['{"id": 1, "en": "one"}\n', '{"id": "x", "en": "two"}\n']
    texts = {
        "a.en": "one\ntwo\n",
        "a.de": "eins\nzwei\n",
        "b.en": "one\n",
        "long.en": "one\n" * 9,
        "empty.en": "",
        "t.tsv": "one\n",
        "t.jsonl": rows[0],
        "mixed.jsonl": "".join(rows),
        "bert.yaml": "task: masked_lm\ndata: {train_files: a.en}\n",
        "my.yaml": "data: {train_files: {en: a.en, de: a.de}}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.en").write_bytes(b"one\ntwo\xff\n")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "more", "words"),
    [(command, *case) for command, cases in WRONG.items() for case in cases],
    ids=[f"{command.split()[0]} {more[:70]}" for command, cases in WRONG.items() for more, _ in cases],
)
def test_what_is_wrong_is_one_sentence_and_nothing_is_written(
    tiny_run, teacher, folder_of_texts, monkeypatch, capsys, command, more, words
) -> None:
    before = {path: path.is_file() and path.read_bytes() for path in folder_of_texts.iterdir()}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n")))
    verb, *others = command.split(" ")
    arguments = [*others, *more.split(" ")] if more else others
    if verb not in WITHOUT_MODEL:
        arguments[:0] = ["--model", "MODEL"]
    for name, path in (("MODEL", tiny_run / "model"), ("RUN", tiny_run), ("TEACHER", teacher)):
        arguments = [word.replace(name, str(path)) for word in arguments]
        words = words.replace(name, str(path))
    assert main([verb, *arguments]) == 2
    said = capsys.readouterr()
    # Reading text may show a bar.
    assert words in said.err.splitlines()[-1] and said.err.count("hf-vaswani: ") == 1 and not said.out
    assert {path: path.is_file() and path.read_bytes() for path in folder_of_texts.iterdir()} == before


def test_an_error_has_no_secret_of_a_url(capsys) -> None:
    assert main(["translate", "--model", ".", "https://me:SECRET@host/a.txt?sig=SECRET"]) == 2
    said = capsys.readouterr().err
    assert "There is no file 'https:/host/a.txt'" in said and "SECRET" not in said


def test_out_of_memory_is_one_sentence_and_other_errors_of_torch_are_not(monkeypatch, capsys) -> None:
    from hf_vaswani.translation import loading

    arguments = ["translate", "--model", "."]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n")))
    monkeypatch.setattr(loading, "load_translator", lambda name: torch.empty(2**60, dtype=torch.int8))
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("hf-vaswani: Out of memory: ") and "memory" in said[27:] and said.count("\n") == 1
    monkeypatch.setattr(loading, "load_translator", lambda name: torch.zeros(2, 3) @ torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        main(arguments)
    monkeypatch.setattr(loading, "load_translator", lambda name: bytearray(2**62))
    assert main(arguments) == 2 and capsys.readouterr().err == "hf-vaswani: Out of memory.\n"


def fail_with(monkeypatch, error: BaseException) -> None:
    from hf_vaswani.translation import loading

    def fail(name):
        raise error

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n")))
    monkeypatch.setattr(loading, "load_translator", fail)


@pytest.mark.parametrize(
    ("text", "is_of_memory"),
    [
        ("CUDA error: an illegal memory access was encountered", False),
        ("unsupported memory format option ChannelsLast", False),
        ("cannot pin memory of a sparse tensor", False),
        ("CUDA out of memory. Tried to allocate 20.00 GiB", True),
        ("MPS backend out of memory", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes", True),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True),
        ("std::bad_alloc", True),
    ],
)
def test_out_of_memory_is_said_only_of_memory(monkeypatch, capsys, text, is_of_memory) -> None:
    fail_with(monkeypatch, RuntimeError(text))
    arguments = ["translate", "--model", "."]
    if is_of_memory:
        assert main(arguments) == 2 and capsys.readouterr().err == f"hf-vaswani: Out of memory: {text}\n"
    else:
        with pytest.raises(RuntimeError, match=text):
            main(arguments)


@pytest.mark.parametrize(
    "error", [ValueError("bad"), OSError("bad"), ImportError("bad"), MemoryError(), KeyboardInterrupt("bad")]
)
def test_a_variable_shows_the_traceback_of_any_error(monkeypatch, capsys, error) -> None:
    for value, is_shown in (("1", True), ("0", False), ("", False)):
        fail_with(monkeypatch, error)
        monkeypatch.setenv("HF_VASWANI_DEBUG", value)
        assert main(["translate", "--model", "."]) > 0
        said = capsys.readouterr().err
        assert said.splitlines()[-1].startswith("hf-vaswani: ") and ("in fail\n" in said) == is_shown


@pytest.mark.process
def test_a_closed_pipe_ends_a_verb_quietly_and_a_full_disk_is_reported_once(tiny_run, texts) -> None:
    command = f"{sys.executable} -m hf_vaswani.cli translate {texts[0] / 'a.txt'} --model {tiny_run / 'model'}"
    closed, full = (
        subprocess.run(["bash", "-c", f"{command} {output}"], capture_output=True, text=True, cwd=ROOT)
        for output in ("| true; exit ${PIPESTATUS[0]}", "> /dev/full")
    )
    assert closed.returncode == 0 and "rror" not in closed.stderr, closed.stderr
    assert (full.returncode, full.stderr.count("\n")) == (2, 1) and "Standard output cannot be written" in full.stderr


ENTRY_POINTS = {
    "module": ["-m", "hf_vaswani.cli", "translate", "--model", "nowhere"],
    "script": ["-c", "import sys, hf_vaswani_start; sys.exit(hf_vaswani_start.main())", "translate"],
    "launcher": [str(ROOT / "train.py"), "none.yaml"],
}


@pytest.mark.process
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_ctrl_c_while_libraries_are_imported_is_quiet(entry_point) -> None:
    command = [sys.executable, *ENTRY_POINTS[entry_point]]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = {seconds: subprocess.Popen(command, **output) for seconds in (0.3, 0.8, 1.6)}
    began = time.monotonic()
    for seconds, process in processes.items():
        time.sleep(max(0, began + seconds - time.monotonic()))
        process.send_signal(signal.SIGINT)
    for process in processes.values():
        out, err = process.communicate(timeout=60)
        # A fast machine may reach the verb's own error, or its own message, before the signal.
        assert (process.returncode, err) in ((130, ""), (130, "hf-vaswani: stopped.\n")) or process.returncode == 2
        assert "Traceback" not in err and not out


@pytest.mark.process
def test_importing_keeps_signal_handlers_and_starting_makes_threads_sleep() -> None:
    """Importing the package changes no handler; the entry points set the policy before torch is loaded."""
    program = (
        "import os, signal, sys, hf_vaswani_start as start\n"
        "start.before_imports()\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE' and 'torch' not in sys.modules\n"
        "start.after_imports()\n"
        "import hf_vaswani\n"
        "assert 'torch' in sys.modules and signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=environment)


BLOCKED = """
import json, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from hf_vaswani.cli import main
for arguments in json.loads(sys.argv[2]):
    print("exit code", main(arguments), file=sys.stderr)
"""
TRAIN = "accelerate,datasets,evaluate,jinja2,sacrebleu,tabulate,pandas,pyarrow,matplotlib"
CONVERT = "ctranslate2,onnx,onnxruntime,onnxscript,sentencepiece"


@pytest.mark.process
def test_each_extra_works_without_the_others(tiny_run, tmp_path) -> None:
    """See also `test_the_convert_extra_is_enough`."""
    (tmp_path / "text").write_text("one two\n")
    (tmp_path / "my.yaml").write_text("data: {train_files: text.tsv}\n")
    model, text = str(tiny_run / "model"), str(tmp_path / "text")
    for blocked, codes, *commands in (
        (
            TRAIN,
            [0, 2, 2],
            ["convert", model, str(tmp_path / "ctranslate2"), "--to", "ctranslate2"],
            ["train", str(tmp_path / "my.yaml")],
            ["evaluate", "--model", model, "--data", text, text],
        ),
        (f"{TRAIN},{CONVERT}", [0, 0], ["translate", "--model", model, text], ["score", "--model", model, text, text]),
    ):
        command = [sys.executable, "-c", BLOCKED, blocked, json.dumps(commands)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"^exit code (\d)$", done.stderr, re.MULTILINE) == [str(code) for code in codes], done.stderr
        assert done.stderr.count("pip install 'hf_vaswani[train]'") == codes.count(2), done.stderr


def test_full_or_closed_standard_streams_are_named(tiny_run, texts, monkeypatch, capsys) -> None:
    arguments = ["translate", str(texts[0] / "a.txt"), "--model", str(tiny_run / "model")]
    for verb in (arguments, ["--version"]):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert main(verb) == 2
            monkeypatch.undo()
        assert capsys.readouterr().err == "hf-vaswani: Standard output cannot be written: No space left on device.\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert main(arguments) == 2 and "Standard output is closed" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["translate", *arguments[2:]]) == 2 and "Standard input is closed" in capsys.readouterr().err
