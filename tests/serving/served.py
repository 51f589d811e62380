"""A server in a process of its own."""

import faulthandler
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from hf_vaswani import VaswaniTranslationPipeline
from hf_vaswani.data.tokenizer import add_tags, train_tokenizer

from ..campaign.verbs import verb
from ..children import Child
from ..networks import tiny_model


def make_pipeline(*pairs: tuple[str, str]) -> Any:
    """Returns a random model that writes 8 letters, with a tag for each target language if it is given pairs."""
    tokenizer = train_tokenizer(["abc cab. Ab ca."], 20, kind="characters")
    add_tags(tokenizer, list(dict.fromkeys(f"<2{target}>" for _, target in pairs)))
    model = tiny_model(3, vocab_size=len(tokenizer), eos=-1e4)
    model.config.language_pairs = [list(pair) for pair in pairs] or None
    model.generation_config.update(max_new_tokens=8, suppress_tokens=[0, 1, 2, 3])
    return VaswaniTranslationPipeline(model, tokenizer)


def model_of(*pairs: tuple[str, str], device: str = "cpu") -> Any:
    """Returns a pipeline that only knows what it translates."""
    config = SimpleNamespace(language_pairs=[list(pair) for pair in pairs])
    return SimpleNamespace(model=SimpleNamespace(config=config), engine=None, device=torch.device(device))


def echo(kind: Any, texts: list[str]) -> list[list[str]]:
    """Answers `"de: Hello"`, and further translations `"de1: Hello"`, as a batch of translations."""
    _, _, target, _, count = kind
    return [[f"{target}{number or ''}: {text}" for number in range(count)] for text in texts]


def echo_app(*pairs: tuple[str, str], **settings: Any) -> Any:
    """Builds a server whose translations are those of `echo`; its `app.state.kinds` are what was asked of models."""
    from hf_vaswani.serving.server import build_server

    app = build_server({"one": model_of(*pairs)}, **settings)
    app.state.kinds = []

    def translate(kind: Any, texts: list[str]) -> list[list[str]]:
        app.state.kinds.append(kind)
        return echo(kind, texts)

    for batcher in app.state.batchers:
        batcher.translate = translate
    return app


class Served:
    """A running server."""

    def __init__(self, process: BaseProcess, port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def translate(self, text: Any) -> Any:
        body = json.dumps({"q": text, "source": "en", "target": "de"}).encode()
        return json.loads(self.post(body))["translatedText"]

    def post(self, body: bytes) -> bytes:
        address = f"http://127.0.0.1:{self.port}/translate"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        return bytes(urllib.request.urlopen(request, timeout=120).read())

    def get(self, path: str) -> str:
        return str(urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=120).read().decode())

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        os.kill(self.process.pid or 0, number)
        self.process.join(120)
        return self.process.exitcode


def unwatched(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a server, which may live longer than a child that hangs: reading the stacks of its threads can crash it."""
    faulthandler.cancel_dump_traceback_later()
    return function(*arguments)


@contextmanager
def serve(model: Path, folder: Path, *arguments: str, by: Callable[..., Any] = verb) -> Iterator[Served]:
    """
    Runs `hf-vaswani serve`, whose outputs are in the folder, until the end of the block at the latest; `by` is what
    gets the command line in the child process.
    """
    child = Child(folder, unwatched, by, ["serve", "--model", str(model), "--port", "0", *arguments])
    log = folder / "err"
    try:
        until, match = time.monotonic() + 120, None
        while match is None:
            assert time.monotonic() < until and child.process.is_alive(), log.read_text()
            time.sleep(0.05)
            match = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text() if log.exists() else "")
        served = Served(child.process, int(match[1]), log)
        assert json.loads(served.get("/health")) == {"status": "ok"}
        yield served
    finally:
        child.end(0)


def workers_of(server: int) -> list[int]:
    """Returns the ids of the processes that answer."""
    found = []
    for child in psutil.Process(server).children():
        # It may have died since.
        with suppress(psutil.Error):
            found += [child.pid] if "spawn_main" in " ".join(child.cmdline()) else []
    return sorted(found)
