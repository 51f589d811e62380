"""The verb demo."""

import importlib.util
import os
import signal
import socket
import time
import urllib.request
from pathlib import Path

import pytest

if importlib.util.find_spec("gradio") is None:
    pytest.skip("the extra `demo` is not installed", allow_module_level=True)

from hf_vaswani.cli import main
from hf_vaswani.cli.demo import _examples
from hf_vaswani.model.sentences_vaswani import LanguageTags

from ..campaign.verbs import verb
from ..children import Child, free_port


def test_examples_are_lines_or_samples_of_the_test(tiny_run, tmp_path) -> None:
    samples = _examples(None, tiny_run / "model", LanguageTags(object()))
    assert samples
    assert all(
        set(sample.split()) <= set("zero one two three four five six seven eight nine".split()) for sample in samples
    )
    (tmp_path / "my.txt").write_text("one\n\ntwo\n" + "three\n" * 20, encoding="utf-8")
    assert _examples(tmp_path / "my.txt", tiny_run / "model", None) == ["one", "two", *["three"] * 4]
    assert _examples(None, Path("me/model"), None) == []


@pytest.mark.process
def test_it_serves_a_page_until_it_is_stopped(teacher, tmp_path) -> None:
    port = free_port()
    child = Child(tmp_path / "outputs", verb, ["demo", "--model", str(teacher), "--port", str(port)])
    try:
        for _ in range(600):
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}").read().decode()
                break
            except OSError:
                assert child.process.is_alive()
                time.sleep(0.2)
        assert str(teacher) in page
    finally:
        os.kill(child.process.pid or 0, signal.SIGINT)
        end = child.end()
    assert f"http://127.0.0.1:{port} (Ctrl-C stops it)" in end.err
    assert end.code in (0, 130)


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
