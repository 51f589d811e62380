"""Entry points, exit codes and standard output, whatever the verb."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

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
def test_a_closed_pipe_ends_a_verb_quietly(tiny_run, texts) -> None:
    command = f"{sys.executable} -m hf_vaswani.cli translate {texts[0] / 'a.txt'} --model {tiny_run / 'model'}"
    script = f"{command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "rror" not in done.stderr, done.stderr


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
    model, text = str(tiny_run / "model"), str(tmp_path / "text")
    for blocked, codes, *commands in (
        (
            TRAIN,
            [0, 2, 2],
            ["convert", model, str(tmp_path / "ctranslate2"), "--to", "ctranslate2"],
            ["train", "none.yaml"],
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


@pytest.mark.process
def test_full_standard_output_is_reported_once(tiny_run, texts) -> None:
    command = f"{sys.executable} -m hf_vaswani.cli translate {texts[0] / 'a.txt'} --model {tiny_run / 'model'}"
    done = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "Standard output cannot be written" in done.stderr
