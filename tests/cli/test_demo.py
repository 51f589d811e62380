"""The verb demo."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the extra `demo` is not installed")

from hf_vaswani.cli import main
from hf_vaswani.cli.demo import _examples


def test_examples_are_lines_or_samples_of_the_test(tiny_run, tmp_path) -> None:
    samples = _examples(None, tiny_run / "model", ("",))
    assert samples
    assert all(
        set(sample.split()) <= set("zero one two three four five six seven eight nine".split()) for sample in samples
    )
    (tmp_path / "my.txt").write_text("one\n\ntwo\n" + "three\n" * 20, encoding="utf-8")
    assert _examples(tmp_path / "my.txt", tiny_run / "model", ()) == ["one", "two", *["three"] * 4]
    assert _examples(None, Path("me/model"), ()) == []


def test_it_serves_a_page_until_it_is_stopped(teacher) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_vaswani.cli", "demo", "--model", str(teacher), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        for _ in range(600):
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}").read().decode()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.2)
        assert str(teacher) in page
    finally:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert f"http://127.0.0.1:{port} (Ctrl-C stops it)" in error
    assert process.returncode in (0, 130)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-beams", "11"], "--num-beams must be from 1 to 10, but it is 11."),
        (["--port", "0"], "--port must be from 1 to 65535, but it is 0."),
        (["--examples", "nowhere.txt"], "There is no file 'nowhere.txt'."),
    ],
)
def test_bad_input_is_one_sentence(teacher, capfd, arguments, message) -> None:
    assert main(["demo", "--model", str(teacher), *arguments]) == 2
    assert capfd.readouterr().err == f"hf-vaswani: {message}\n"


def test_a_port_in_use_is_named(teacher, capfd) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["demo", "--model", str(teacher), "--port", str(port)]) == 2
    assert str(port) in capfd.readouterr().err
