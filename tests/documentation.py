"""
Runs the blocks and shell lines of the documentation: each in a child, forked from a process that has imported the
libraries, which takes seconds, but not the package.
"""

import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

SECONDS = 120


def run_script(arguments: list[str]) -> None:
    """Runs `python SCRIPT ...` or `python -m MODULE ...` in this process."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def check_recipe(arguments: list[str]) -> None:
    """Reads the recipe that a launcher would train."""
    from hf_vaswani.recipe_file import load_recipe

    assert arguments[0] == "train.py"
    load_recipe(arguments[1:])


def accelerate(arguments: list[str], start: Callable[[list[str]], None]) -> None:
    """Runs `accelerate launch ...` up to where it starts processes, and `start` in the place of these."""
    import torch.distributed.run
    from accelerate.commands import launch

    popen_of_subprocess = subprocess.Popen

    def popen(command: list[str], env: dict[str, str]) -> Any:
        subprocess.Popen = popen_of_subprocess
        os.environ.update(env)
        start(command[1:])
        return SimpleNamespace(wait=lambda: 0, returncode=0)

    subprocess.Popen = popen
    torch.distributed.run.run = lambda options: start([options.training_script, *options.training_script_args])
    assert arguments[0] == "launch"
    launch.launch_command(launch.launch_command_parser().parse_args(arguments[1:]))


def torchrun(arguments: list[str]) -> None:
    """Parses the options of `torchrun ...`, and runs its script once in this process."""
    from torch.distributed.run import parse_args

    options = parse_args(arguments)
    module = ["-m"] if options.module else []
    run_script([*module, options.training_script, *options.training_script_args])


def redirected(words: list[str]) -> list[str]:
    """Opens the files of `<` and `>`, and returns the other words."""
    for sign, flags, number in (("<", os.O_RDONLY, 0), (">", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1)):
        if sign in words:
            i = words.index(sign)
            os.dup2(os.open(words[i + 1], flags, 0o644), number)
            words = words[:i] + words[i + 2 :]
    return words


def run_line(line: str, is_check: bool) -> None:
    """Runs one line of a shell; a check only reads the options of a launcher and the recipe."""
    program, *arguments = redirected(shlex.split(line, comments=True))
    if program == "export":
        os.environ.update(word.split("=", 1) for word in arguments)
    elif program == "echo":
        print(*arguments, flush=True)
    elif program == "accelerate":
        accelerate(arguments, check_recipe if is_check else run_script)
    elif program == "torchrun":
        torchrun(arguments)
    elif program == "python":
        run_script(arguments)
    elif program == "hf-vaswani":
        from hf_vaswani_start import main

        sys.exit(main(arguments))
    elif program == "sacrebleu":
        from sacrebleu.sacrebleu import main as score

        sys.argv[1:] = arguments
        score()
    else:
        raise ValueError(f"{program} is not a program of the documentation.")


def in_child(task: dict[str, Any]) -> NoReturn:
    """Runs one task, and ends the process with its exit code."""
    signal.alarm(SECONDS)
    code = 0
    try:
        if task["kind"] == "python":
            exec(compile(task["text"], f"<{task['page']}>", "exec"), {"__name__": "__main__"})
        else:
            run_line(task["text"], task["kind"] == "check")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Reads tasks as JSON from standard input, and prints their exit codes and output as JSON."""
    # Whatever an import makes of this module is made once.
    import datasets  # noqa: F401
    import evaluate  # noqa: F401
    from accelerate.commands import launch  # noqa: F401
    from transformers import AutoModelForSeq2SeqLM, MarianMTModel, pipeline  # noqa: F401

    results = []
    for task in json.load(sys.stdin):
        log = Path("output.log")
        log.write_bytes(b"")
        child = os.fork()
        if not child:
            for number in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
            in_child(task)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        results.append({"code": code, "output": log.read_text("utf-8", errors="replace")})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
