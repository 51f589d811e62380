"""A server under load: requests that are odd, damaged or cut, workers that are killed, and a stop at any moment.

All the while, ordinary clients ask for translations, and each must get that of its own sentence.
"""

import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from transformers import pipeline

from hf_vaswani.data.tokenizer import train_tokenizer
from tests.children import LIMIT
from tests.networks import random_model
from tests.serving.served import serve, workers_of

from .judge import FULL, Campaign

SENTENCES = [f"{one} {two}" for one in ("one", "two three", "nine", "four") for two in ("five", "six", "seven eight")]
# Answers to requests that are wrong, or for which there is no room.
REFUSALS = {400, 403, 404, 405, 408, 413, 429}
# Longer than any answer takes, shorter than the server waits for the rest of a request.
PATIENCE = 20.0

GOOD = {"q": SENTENCES[0], "source": "en", "target": "de", "format": "text", "alternatives": 0}
ODD: list[Any] = [
    None, True, -1, 0, 10**30, 1e308, float("nan"), "", " ", "\0", "\ud800", "<2de> ", "de\r\nX: y", "🙂" * 50,
    "one " * 3000, "x" * 4999, "</s> <pad> <unk>", "<b>one <i>two</b></i>", "&amp;&#0;&#x110000;", "one\n\n\ntwo. ",
    [], [""], ["one", None], ["one"] * 101, [["one"]], {}, {"q": "one"}, ["<p>one"] * 3,
    "AUTO", "auto", "html", "en-US",
]  # fmt: skip
FIELDS = [
    b"q=one", b"source=en", b"target=de", b"q=%ff", b"q=%", b"=", b"alternatives=9", b"format=html", b"\xff=1",
    b"q=" + b"%F0%9F%99%82" * 30, b"api_key=", b"&" * 40, b"alternatives=1e9",
]  # fmt: skip
PATHS = ["/", "//", "/translate/", "/../etc/passwd", "/%00", "/%ff", "/?" + "a=b&" * 100, "/metrics", "/spec"]
METHODS = ["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "POST"]
INSERTED = [b"\r\n", b"\0", b"\xff", b": ", b"X" * 70_000, b"Transfer-Encoding: chunked\r\n"]
MEDIA = ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", "\xff"]


@pytest.fixture(scope="module")
def expected(teacher: Path) -> dict[str, str]:
    found = pipeline("translation", model=str(teacher))(SENTENCES)
    return {sentence: each["translation_text"] for sentence, each in zip(SENTENCES, found, strict=True)}


class Clients:
    """Ask for one sentence after the other, and compare the answers."""

    def __init__(self, port: int, expected: dict[str, str], count: int, patient: bool) -> None:
        self.port, self.expected, self.patient = port, expected, patient
        self.answers, self.wrong, self.over = 0, list[str](), False
        self.threads = [threading.Thread(target=self.ask, args=[i], daemon=True) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.over:
            sentence = draw.choice(SENTENCES)
            try:
                status, answer = post(self.port, json.dumps(GOOD | {"q": sentence}).encode())
            except (OSError, http.client.HTTPException) as error:
                if not self.over and not self.patient:
                    self.wrong.append(f"no answer to {sentence!r}: {error!r}")
                # Its worker is dead, or the server has ended.
                time.sleep(0.05)
                continue
            if status == 429:
                continue
            if (status, answer) != (200, {"translatedText": self.expected[sentence]}):
                self.wrong.append(f"{status} and {answer!r} to {sentence!r}")
            self.answers += 1

    def end(self) -> None:
        self.over = True
        for thread in self.threads:
            thread.join(PATIENCE)
            if thread.is_alive():
                self.wrong.append("an answer that does not come")


@contextmanager
def clients(port: int, expected: dict[str, str], count: int = 3, patient: bool = False) -> Iterator[Clients]:
    found = Clients(port, expected, count, patient)
    try:
        yield found
    finally:
        found.end()


def request_of(body: bytes, media: str = "application/json", path: str = "/translate", method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_answer(connection: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    content = answer.read()
    is_json = (answer.getheader("Content-Type") or "").startswith("application/json")
    return answer.status, json.loads(content) if is_json else content.decode()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def post(port: int, body: bytes, *more: str) -> tuple[int, Any]:
    """Sends a request, made by [`request_of`], and returns status and content of the answer."""
    with connect(port) as connection:
        connection.sendall(request_of(body, *more))
        return read_answer(connection)


# ---- Requests ----------------------------------------------------------------------------------------------------


def wrong_answer(status: int, answer: Any, strict: bool) -> str | None:
    """Judges an answer to a request that may be wrong; uvicorn itself answers in plain text what is not HTTP."""
    if status == 200:
        return None
    said = answer.get("error") if isinstance(answer, dict) else None
    if status not in REFUSALS or (strict and not said):
        return f"{status} and {answer!r}"
    return None


def odd_values(port: int, campaign: Campaign) -> tuple[str, str | None]:
    draw = campaign.random
    body = dict(GOOD)
    for name in draw.sample([*body, "api_key"], draw.choice([1, 1, 2, 3])):
        body[name] = draw.choice(ODD)
    if draw.random() < 0.2:
        body.pop(draw.choice(list(body)))
    path = draw.choice(["/translate", "/translate", "/translate", "/detect"])
    sent = json.dumps(body)
    status, answer = post(port, sent.encode("utf-8", "surrogatepass"), "application/json", path)
    wrong = wrong_answer(status, answer, strict=True)
    if wrong is None and status == 200 and path == "/translate":
        found, asked = answer["translatedText"], body["q"]
        same = len(found) == len(asked) if isinstance(asked, list) else isinstance(found, str)
        wrong = None if same else f"{answer!r}"
    return f"{path} {sent[:500]}", wrong


def odd_form(port: int, campaign: Campaign) -> tuple[str, str | None]:
    draw = campaign.random
    body, media = b"&".join(draw.sample(FIELDS, draw.randrange(1, 7))), draw.choice(MEDIA)
    if "multipart" in media:
        head = b'--x\r\nContent-Disposition: form-data; name="q"\r\n\r\n%s\r\n'
        parts = [head % each for each in draw.sample(FIELDS[:3], 2)]
        body = b"".join([*parts, draw.choice([b"--x--\r\n", b"--x", b""])])
    return f"{media} {body[:500]!r}", wrong_answer(*post(port, body, media), strict=True)


def damaged_bytes(port: int, campaign: Campaign) -> tuple[str, str | None]:
    draw = campaign.random
    sent = bytearray(request_of(json.dumps(GOOD).encode()))
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        place = draw.randrange(len(sent))
        way = draw.choice(["flip", "cut", "insert", "repeat"])
        if way == "flip":
            sent[place] ^= 1 << draw.randrange(8)
        elif way == "cut":
            del sent[place : place + draw.randrange(1, 9)]
        else:
            sent[place:place] = draw.choice(INSERTED) if way == "insert" else sent[place : place + 40]
        if not sent:
            break
    wrong = None
    with connect(port) as connection:
        # It may see their end, or close the connection in the middle of them, which then cannot be shut down: ENOTCONN
        # is no `ConnectionError`.
        with suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError, http.client.HTTPException):
            wrong = wrong_answer(*read_answer(connection), strict=False)
    return f"{bytes(sent[:1000])!r}", wrong


def cut_off(port: int, campaign: Campaign) -> tuple[str, str | None]:
    draw = campaign.random
    sent = request_of(json.dumps(GOOD | {"q": SENTENCES * 5}).encode())
    end = draw.randrange(len(sent) + 1)
    connection = connect(port)
    connection.sendall(sent[:end])
    if reset := draw.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(draw.choice([0, 0, 0.01, 0.1]))
    connection.close()
    return f"{'reset' if reset else 'closed'} after {end} of {len(sent)} bytes", None


def slow_and_twice(port: int, campaign: Campaign) -> tuple[str, str | None]:
    request = request_of(json.dumps(GOOD).encode())
    sent = request + request.replace(b"Host: x", b"Host: x\r\nConnection: close")
    places = sorted(campaign.random.sample(range(len(sent)), 5))
    with connect(port) as connection:
        for start, end in zip([0, *places], [*places, len(sent)], strict=True):
            connection.sendall(sent[start:end])
            time.sleep(0.02)
        with connection.makefile("rb") as stream:
            found = stream.read()
    answer = found.split(b"\r\n")[-1]
    right = found.count(b"HTTP/1.1 200 OK") == 2 and answer.endswith(b"}") and found.count(answer) == 2
    return f"two requests in pieces, cut at {places}", None if right else repr(found)


def other_paths(port: int, campaign: Campaign) -> tuple[str, str | None]:
    path, method = campaign.random.choice(PATHS), campaign.random.choice(METHODS)
    return f"{method} {path}", wrong_answer(*post(port, b"", "application/json", path, method), strict=True)


REQUESTS = [odd_values, odd_form, damaged_bytes, cut_off, slow_and_twice, other_paths]


def test_odd_requests_change_nothing_for_others(campaign: Campaign, teacher, expected, tmp_path) -> None:
    with serve(teacher, tmp_path / "log") as served:
        server = psutil.Process(served.process.pid)
        handles = 0
        with clients(served.port, expected) as asking:
            for make, _ in campaign.drawn(
                [(make, i) for make in REQUESTS for i in range(300)], 18, 60, lambda each: each[0]
            ):
                already = served.log.read_text().count("Traceback")
                try:
                    attack, wrong = make(served.port, campaign)
                except (OSError, http.client.HTTPException, ValueError) as error:
                    attack, wrong = make.__name__, f"{error!r}"
                if served.log.read_text().count("Traceback") > already:
                    wrong = wrong or "a traceback in the log"
                campaign.note(f"{make.__name__}: {attack}", wrong)
                handles = handles or server.num_fds()
        for wrong in asking.wrong:
            campaign.note("an ordinary client", wrong)
        assert asking.answers
        # Connections that clients have left are closed.
        until = time.monotonic() + PATIENCE
        while server.num_fds() > handles + 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert server.num_fds() <= handles + 2
        assert served.stop() == 0


# ---- Memory and time ---------------------------------------------------------------------------------------------

# In seconds: short, because a model that was not trained seldom ends a translation.
DEADLINE = 5.0
# Of a request, as many as the server takes.
CHARACTERS = 5000
SCRIPTS = ["x", "one ", "ส", "漢", "😀", "👩‍👩‍👧", "e\u0301\u0302", "7", "-", "\u200b", "!?", "ß. ", "\u202e", "\x00"]
MARKS = [
    "<b>", "</b>", "<p>", "<br/>", "<!--", "&amp;", "&#x1F600;", "<2de>", "{x}", "%s", "https://a.b/c?d=e", "`one`",
]  # fmt: skip


def memory(process: int, name: str) -> int:
    """Returns the memory of a process in bytes: `VmRSS`, or its peak `VmHWM`."""
    status = Path("/proc", str(process), "status").read_text()
    (found,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(found)


def hostile_text(draw: random.Random) -> str:
    """Draws lines of very different lengths and scripts, with or without boundaries and tags."""
    lines, left = list[str](), CHARACTERS
    while left > 0:
        letters, length = draw.choice(SCRIPTS), min(left, draw.choice([1, 1, 10, 100, 1000, 5000]))
        marks = "".join(draw.choices(MARKS, k=draw.choice([0, 0, 1, 5])))
        lines += [(marks + letters * length)[:length]] * draw.choice([1, 1, 1, 60])
        left = CHARACTERS - sum(len(line) + 1 for line in lines)
    return draw.choice(["\n", "\n", " ", ""]).join(lines)[:CHARACTERS]


def hostile_request(draw: random.Random) -> dict[str, Any]:
    text = hostile_text(draw)
    places = sorted(draw.sample(range(len(text)), draw.choice([0, 0, 1, 50])))
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    options = {"format": draw.choice(["text", "html"]), "alternatives": draw.choice([0, 0, 3, 10])}
    return GOOD | options | {"q": parts if len(parts) > 1 else text}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose memory shows, and which reads every byte."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = train_tokenizer([], 260, kind="bytes")
    model = random_model(vocab_size=len(tokenizer), d_model=64, d_ff=2048, num_heads=4)
    model.config.language_pairs = [["en", "de"]]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much memory was taken")
def test_hostile_requests_are_bounded_in_memory_and_time(campaign: Campaign, wide: Path, tmp_path: Path) -> None:
    with serve(wide, tmp_path / "log", "--deadline", str(DEADLINE)) as served:
        server, small = served.process.pid or 0, json.dumps(GOOD).encode()
        assert post(served.port, small)[0] == 200
        idle = memory(server, "VmRSS")
        # The same number of characters in sentences of one length.
        line = "One two three four five six seven eight nine ten, one two three four five."
        even = "\n".join([line] * (CHARACTERS // (len(line) + 1)))
        for options in ({}, {"format": "html"}, {"alternatives": 10}, {"format": "html", "alternatives": 10}):
            post(served.port, json.dumps(GOOD | {"q": even} | options).encode())
        most = 2 * (memory(server, "VmHWM") - idle)
        for number in campaign.drawn(range(200), 4, 150):
            request = hostile_request(random.Random(f"{campaign.random.random()} {number}"))
            shown = f"{request['format']}, {request['alternatives']} alternatives, {str(request['q'])[:300]!r}"
            # From here on, the peak is that of this request.
            Path("/proc", str(server), "clear_refs").write_text("5")
            before, start = memory(server, "VmRSS"), time.monotonic()
            try:
                status, answer = post(served.port, json.dumps(request).encode())
                seconds = time.monotonic() - start
                after, _ = post(served.port, small)
            except (OSError, http.client.HTTPException) as error:
                campaign.note(shown, f"{error!r}")
                continue
            if seconds > 2 * DEADLINE:
                campaign.note(shown, f"{seconds:.1f} s")
            if (status not in (200, 503) and wrong_answer(status, answer, strict=True)) or after != 200:
                campaign.note(shown, f"{status} and {str(answer)[:500]}, and then {after}")
            peak = memory(server, "VmHWM")
            if peak - before > most:
                campaign.note(shown, f"{peak - before >> 20} MB, of at most {most >> 20}")
            # Compiled products of more shapes take some for good.
            if peak - idle > 2 * most:
                campaign.note(
                    shown, f"{peak - idle >> 20} MB with what requests before it left, of at most {most >> 19}"
                )
                break
        assert json.loads(served.get("/health")) == {"status": "ok"}
        assert "Traceback" not in served.log.read_text()
        assert served.stop() == 0


# ---- Processes ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not FULL, reason="only in `make campaign`: starting a worker takes ten seconds")
def test_workers_are_replaced_under_load(campaign: Campaign, teacher, expected, tmp_path) -> None:
    with serve(teacher, tmp_path / "log", "--workers", "2") as served:
        with clients(served.port, expected, patient=True) as asking:
            for at in campaign.drawn(range(6), 1, 60):
                victims = workers_of(served.process.pid)
                victims = victims if campaign.random.random() < 0.3 else [campaign.random.choice(victims)]
                time.sleep(campaign.random.random())
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)
                # One may have been killed while the other was starting.
                until, answers = time.monotonic() + 3 * LIMIT, asking.answers
                while time.monotonic() < until:
                    there = workers_of(served.process.pid)
                    if len(there) == 2 and not {*victims} & {*there} and asking.answers > answers + 20:
                        break
                    time.sleep(0.1)
                else:
                    campaign.note(f"{len(victims)} of 2 workers killed, for the {at}th time", "no replacement answers")
        for wrong in asking.wrong:
            campaign.note("an ordinary client", wrong)
        assert served.stop() == 0


def test_stopped_at_any_moment_it_answers_what_it_has(campaign: Campaign, teacher, expected, tmp_path) -> None:
    together = 0
    attacks = [(how, round(0.05 * i, 2)) for how in ("SIGTERM", "SIGINT") for i in range(40)]
    for how, moment in campaign.drawn(attacks, 2, 40, by=lambda each: each[0]):
        with serve(teacher, tmp_path / f"{how}-{moment}") as served:
            with clients(served.port, expected, patient=True) as asking:
                time.sleep(moment)
                code = served.stop(getattr(signal, how))
            said = served.log.read_text()
        answered = said.count("POST /translate 200")
        together += answered
        wrong = f"exit code {code}: {said[-2000:]}" if code != 0 or "Traceback" in said else None
        if answered != asking.answers:
            wrong = wrong or f"{asking.answers} of {answered} answers arrived"
        campaign.note(f"{how} after {moment} s of load", "; ".join(asking.wrong) or wrong)
    # Otherwise nothing was at stake; a small campaign may have a single attack, before the first answer.
    assert together or not FULL
