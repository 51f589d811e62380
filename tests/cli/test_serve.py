"""hf-vaswani explore, demo and serve, in processes of their own where they serve."""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlencode

import pytest
from transformers import BertConfig, BertModel, pipeline

from hf_vaswani import VaswaniForCausalLM, VaswaniForMaskedLM
from hf_vaswani.cli import main
from hf_vaswani.cli import serve as cli
from hf_vaswani.cli.main import _parser
from hf_vaswani.cli.serve import _examples
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.model.sentences_vaswani import LanguageTags
from hf_vaswani.serving import server
from hf_vaswani.serving.static_page import MODEL_FILES

from ..campaign.verbs import verb
from ..children import Child, free_port
from ..networks import tiny_config
from ..serving.served import serve, workers_of

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")


SENTENCES = ["one two three", "nine", "four five six", "seven eight one two"]
if importlib.util.find_spec("gradio") is None:
    pytest.skip("the extra `demo` is not installed", allow_module_level=True)


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


@pytest.fixture(scope="module")
def expected(teacher) -> list[str]:
    found = pipeline("translation", model=str(teacher))(SENTENCES)
    return [each["translation_text"] for each in found]


@pytest.mark.process
def test_running_requests_finish_before_the_end(teacher, expected, tmp_path) -> None:
    with serve(teacher, tmp_path / "log") as served, ThreadPoolExecutor(8) as threads:
        assert served.translate(SENTENCES) == expected
        answers = [threads.submit(served.translate, SENTENCES * 20) for _ in range(8)]
        while "hf_vaswani_waiting_texts 0.0" in served.get("/metrics"):
            assert not all(answer.done() for answer in answers)
        assert served.stop() == 0
        assert [answer.result() for answer in answers] == [expected * 20] * 8
    log = served.log.read_text()
    assert log.count("POST /translate 200") == 9 and "Traceback" not in log
    with pytest.raises(OSError, match="refused"):
        served.get("/health")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_interrupt_asyncio_while_it_starts(teacher, monkeypatch, number) -> None:
    make, made = asyncio.new_event_loop, []

    def make_under_attack() -> asyncio.AbstractEventLoop:
        signal.raise_signal(number)
        made.append(make())
        return made[0]

    monkeypatch.setattr(asyncio.events, "new_event_loop", make_under_attack)
    assert main(["serve", "--model", str(teacher), "--port", "0"]) == 0
    assert made and made[0].is_closed()


@pytest.mark.process
def test_several_workers_answer_and_count_together(teacher, expected, tmp_path) -> None:
    with serve(teacher, tmp_path / "log", "--workers", "2") as served, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(served.translate, SENTENCES * 10))
        assert found == expected * 10
        assert "hf_vaswani_texts_total 40.0" in served.get("/metrics")
        assert served.stop(signal.SIGINT) == 0
        assert len(re.findall("POST /translate 200", served.log.read_text())) == 40


@pytest.mark.process
def test_workers_end_with_their_parent(teacher, tmp_path) -> None:
    with serve(teacher, tmp_path / "log", "--workers", "2") as served:
        served.process.kill()
        # A worker that is still importing notices when it has done so.
        for _ in range(1200):
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with suppress(OSError):
                    free.bind(("127.0.0.1", served.port))
                    break
            time.sleep(0.1)
        else:
            raise AssertionError("The port is still taken.")


@pytest.mark.process
def test_broken_clients_change_nothing_for_others(teacher, expected, tmp_path) -> None:
    head = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    body = json.dumps({"q": SENTENCES * 20, "source": "en", "target": "de"}).encode()
    whole = head.replace(b"1000", str(len(body)).encode()) + body
    pieces = [b"", b"nonsense\r\n\r\n", head[:30], head + b'{"q"', b"GET / HTTP/9.9\r\n\r\n", b"X" * 200_000, whole]
    with serve(teacher, tmp_path / "log") as served:
        for piece in pieces:
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.sendall(piece)
            assert served.translate(SENTENCES) == expected
        # One that keeps its connection, and says nothing more.
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(head)
            assert served.translate(SENTENCES) == expected
        assert "Traceback" not in served.log.read_text()
        assert served.stop() == 0


def serve_what_does_not_end(arguments: list[str]) -> int:
    """Serves a model whose translations cannot be ended, with little time for requests that run."""

    def translate(self: Any, kind: Any, texts: list[str]) -> Any:
        time.sleep(60)

    cli.GRACE, cli.LAST = 2, 1
    server.BatchTranslator.__call__ = translate
    return main(arguments)


@pytest.mark.process
def test_the_process_ends_in_time_whatever_runs(teacher, tmp_path) -> None:
    with (
        serve(teacher, tmp_path / "log", by=serve_what_does_not_end) as served,
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(served.translate, "nine")
        time.sleep(0.5)
        start = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - start < 30 and isinstance(answer.exception(), (OSError, HTTPException))
        assert "A translation did not end, and was left." in served.log.read_text()


def serve_with_little_time(arguments: list[str]) -> int:
    """Serves with little time for requests that run."""
    cli.GRACE, cli.LAST = 2, 1
    return main(arguments)


@pytest.mark.process
def test_workers_that_answer_nothing_end_in_time(teacher, expected, tmp_path) -> None:
    with serve(teacher, tmp_path / "log", "--workers", "2", by=serve_with_little_time) as served:
        assert served.translate(SENTENCES) == expected
        # Neither hears that it is to end, and the parent asks them whether they live.
        for worker in workers_of(served.process.pid or 0):
            os.kill(worker, signal.SIGSTOP)
        time.sleep(1)
        start = time.monotonic()
        assert served.stop() == 0 and time.monotonic() - start < 30


def test_a_worker_whose_device_has_failed_ends(monkeypatch) -> None:
    killed, batchers = threading.Event(), [SimpleNamespace(is_broken=False) for _ in range(2)]
    state = SimpleNamespace(batchers=batchers)
    monkeypatch.setattr(cli, "make_app", lambda options: SimpleNamespace(state=state))
    monkeypatch.setattr(cli, "atexit", SimpleNamespace(register=lambda *_: None))
    monkeypatch.setattr(cli, "time", SimpleNamespace(sleep=lambda _, wait=time.sleep: wait(0.001)))
    monkeypatch.setattr(os, "kill", lambda process, number: killed.set())
    cli.make_worker(cast(Any, None))
    assert not killed.wait(0.05)
    batchers[1].is_broken = True
    assert killed.wait(10)


@pytest.mark.process
def test_the_parent_of_workers_loads_no_model(teacher, monkeypatch, capsys, tmp_path) -> None:
    started = []
    monkeypatch.setattr(cli, "make_app", lambda options: pytest.fail("It loads the models."))
    monkeypatch.setattr("uvicorn.supervisors.Multiprocess.run", lambda workers: started.append(workers))
    command = ["serve", "--workers", "2", "--port", "0", "--model"]
    assert main([*command, str(teacher)]) == 0 and len(started) == 1
    # What is wrong with a model is said nevertheless.
    damaged = tmp_path / "damaged"
    shutil.copytree(teacher, damaged)
    (damaged / "config.json").write_text("{")
    assert main([*command, str(damaged)]) == 2 and len(started) == 1
    assert "config.json" in capsys.readouterr().err


def test_a_batch_has_the_size_that_is_given(teacher) -> None:
    options = ["serve", "--model", str(teacher), "--tokens-per-batch", "77"]
    loaded = cli._load(str(teacher), _parser().parse_args(options), "cpu")
    assert loaded.limits(loaded.model, 4, 4)[:2] == (77, 77)
    many = cli._load(str(teacher), _parser().parse_args(options), "cpu", 3)
    assert [each.limits.keywords["processes"] for each in (loaded, many)] == [1, 3]
    if importlib.util.find_spec("ctranslate2") is not None:
        loaded = cli._load(
            str(teacher), _parser().parse_args([*options, "--engine", "ctranslate2", "--approximate"]), "cpu"
        )
        assert loaded.engine.translator.tokens_per_batch == 77
    assert main([*options[:-1], "0", "--port", "0"]) == 2


def test_workers_share_the_accelerators(accelerators, monkeypatch, tmp_path) -> None:
    """Each has its place as long as it lives."""
    monkeypatch.setattr(cli, "_locks", [])
    accelerators("xpu", 2)

    def place(workers: int, *more: str) -> tuple[str, int]:
        device, sharing = cli._place(_parser().parse_args(["serve", "--model", "m", "--workers", str(workers), *more]))
        return str(device), sharing

    assert place(3) == ("xpu", 3), "the process that tries the models"
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert [place(3) for _ in range(4)] == [("xpu:0", 2), ("xpu:1", 2), ("xpu:0", 2), ("xpu", 3)]
    assert place(3, "--device", "xpu:1") == ("xpu:1", 3) and place(3, "--device", "cpu") == ("cpu", 3)
    cli._locks.pop(1).release()
    assert place(3) == ("xpu:1", 2)


def test_workers_share_the_processors(teacher, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("hf_vaswani.processes.processors", lambda: 6)
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr(cli, "_load", lambda *_: None)
    monkeypatch.setattr(server, "build_server", lambda *_, **__: None)
    for workers in (1, 2, 4, 8):
        cli.make_app(_parser().parse_args(["serve", "--model", str(teacher), "--workers", str(workers)]))
    assert asked == [6, 3, 1, 1]


@pytest.mark.process
def test_keys_are_read_from_a_file(teacher, tmp_path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("\nsesame\n", encoding="utf-8")
    with serve(teacher, tmp_path / "log", "--api-keys", str(keys)) as served:
        with pytest.raises(urllib.error.HTTPError, match="403"):
            served.translate("one")
        body = json.dumps({"q": "nine", "source": "en", "target": "de", "api_key": "sesame"}).encode()
        assert b"translatedText" in served.post(body)
        assert "sesame" not in served.log.read_text()


@pytest.mark.process
def test_a_long_text_fits_into_the_address(teacher, tmp_path) -> None:
    # Text without words takes no time.
    fields = {"q": "★★" * 10_000, "source": "en", "target": "de", "format": "text", "api_key": "none"}
    with serve(teacher, tmp_path / "log", "--char-limit", "20000") as served:
        address = f"http://127.0.0.1:{served.port}/translate?{urlencode(fields)}"
        answer = urllib.request.urlopen(urllib.request.Request(address, b"", method="POST"), timeout=120).read()
        assert json.loads(answer) == {"translatedText": fields["q"]} and len(address) > 2**16
        assert served.translate(["nine"] * 3) == served.translate(["nine"]) * 3
        assert "★" not in served.log.read_text() and "%E2" not in served.log.read_text()


def test_a_taken_port_is_one_sentence(teacher, capsys, tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    assert main(["serve", "--model", str(teacher), "--api-keys", str(tmp_path / "empty.txt")]) == 2
    assert "has no API key" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(teacher), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot be listened at: Address already in use." in capsys.readouterr().err


# ---- A page without a server -------------------------------------------------------------------------------------


@pytest.fixture
def static(teacher, tmp_path, monkeypatch):
    """Calls `demo --static` in an empty folder, with files in place of a converted model and of the library."""

    def convert(source, destination, to):
        assert source == teacher and to == "transformers.js"
        for name in MODEL_FILES:
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            (destination / name).write_text(
                '{"longest_sentence": 1, "language_pairs": null, "max_length": 2, "added_tokens": []}'
            )
        return ["Greedy translations: the same", "Note: Search greedily.", "Note: It ignores settings: top_p=0.5."]

    library = dict.fromkeys(("transformers.min.js", "NOTICES.txt"), b"library")
    monkeypatch.setattr("hf_vaswani.conversion.convert.convert", convert)
    monkeypatch.setattr("hf_vaswani.serving.javascript.javascript_files", lambda folder: library)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: main(["demo", "--model", str(teacher), *arguments])


def test_a_page_is_written_as_a_folder(static, teacher, caplog, capfd) -> None:
    assert static("--static", "page") == 0
    assert {path.name for path in Path("page").iterdir()} >= {
        "index.html",
        "service_worker.js",
        "NOTICES.txt",
        "files",
    }
    assert f"<title>{teacher.name}</title>" in Path("page/index.html").read_text("utf-8")
    assert (
        caplog.messages[-2] == "Note: It ignores settings: top_p=0.5."
        and "Note: Search greedily." not in caplog.messages
    )
    assert re.fullmatch(r"page: 0\.\d MB; put it on .* --directory page", caplog.messages[-1])
    # It is replaced as a whole, if that is wanted.
    Path("page/files/old.bin").write_text("old")
    Path("page/.git").mkdir()
    assert static("--static", "page", "--force") == 2 and "a folder with '.git'" in capfd.readouterr().err
    Path("page/.git").rmdir()
    assert (
        static("--static", "page") == 2 and "page already exists: use --force to replace it." in capfd.readouterr().err
    )
    assert static("--static", "page", "--force") == 0
    assert not Path("page/files/old.bin").exists()


def test_a_page_is_written_as_one_file(static, caplog) -> None:
    assert static("--static", "page.html", "--single-file") == 0
    assert Path("page.html").read_text("utf-8").startswith("<!doctype html>")
    assert re.fullmatch(r"page\.html: 0\.\d MB; open it in a browser\.", caplog.messages[-1])
    assert static("--static", "page.html", "--single-file") == 2
    assert static("--static", "page.html", "--single-file", "--force") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--single-file"], "--single-file is for --static, which is not given."),
        (["--javascript", "folder"], "--javascript is for --static, which is not given."),
        (["--static", "page.html"], "--static page.html would be a folder: add --single-file for one HTML file."),
        (
            ["--static", "own", "--force"],
            "own is a folder with 'diary.txt', which is not of a page: name another one.",
        ),
        (["--static", "own/diary.txt", "--force"], "own/diary.txt is a file: use --single-file to replace it by one"),
        (["--static", "own", "--single-file"], "own is a folder: name a file."),
        (["--static", "nowhere/page.html", "--single-file"], "in a folder that does not exist"),
        (["--static", "nowhere/page"], "in a folder that does not exist"),
        (["--static", "page", "--port", "80"], "--port is for a page with a server, but --static is given."),
        (["--static", "page", "--num-beams", "4"], "--num-beams is for a page with a server, but --static is given."),
        (["--static", "page", "--target-language", "fr"], "does not translate into 'fr', only into one language."),
    ],
)
def test_options_of_a_page_that_do_not_fit_are_refused_in_a_sentence(static, capfd, arguments, message) -> None:
    Path("own").mkdir()
    Path("own/diary.txt").write_text("dear diary")
    assert static(*arguments) == 2
    assert message in capfd.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["own"] and Path("own/diary.txt").exists()
