"""A server in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Served:
    """A running server."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, log: Path) -> None:
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

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=120)


@contextmanager
def serve(model: Path, log: Path, *arguments: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "hf_vaswani.cli", "serve", "--model", str(model), "--port", "0", *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stderr=file, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, start_new_session=True
        )
    try:
        for _ in range(600):
            if match := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text()):
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        assert match
        served = Served(process, int(match[1]), log)
        assert json.loads(served.get("/health")) == {"status": "ok"}
        yield served
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
