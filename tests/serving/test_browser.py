"""The demo and the page of the server in a real browser: `make test-browser`."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.data.tokenizer import train_tokenizer

from ..conftest import PICTURES, ROOT
from ..networks import tiny_model

pytestmark = pytest.mark.browser

QUICKSTART = ROOT / "runs" / "quickstart" / "model"
SENTENCES = ["The old woman reads a red book in the garden.", "The cat sleeps."]


def load() -> tuple[Any, Any]:
    """Returns the model of the quickstart and its tokenizer if it was trained here, else one with random weights."""
    if QUICKSTART.is_dir():
        return AutoModelForSeq2SeqLM.from_pretrained(QUICKSTART), AutoTokenizer.from_pretrained(QUICKSTART)
    tokenizer = train_tokenizer(SENTENCES * 3, 290)
    model = tiny_model(3, eos=-1e4, vocab_size=290, num_heads=4)
    model.generation_config.update(max_new_tokens=8, suppress_tokens=[0, 1, 2, 3])
    return model, tokenizer


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serves the demo."""
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    from hf_vaswani.serving.demo import build_demo, serve_demo

    model, tokenizer = load()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    demo = build_demo(model, tokenizer, "quickstart", SENTENCES)
    yield serve_demo(demo, "127.0.0.1", port, block=False)
    demo.close()


def visit(browser: Any, address: str, width: int, height: int = 900) -> tuple[Any, list[str], list[str]]:
    page = browser.new_page(viewport={"width": width, "height": height})
    requests: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    return page, requests, problems


@pytest.mark.parametrize("width", [400, 1200])
def test_a_text_is_translated_and_explored(browser, address, width) -> None:
    page, requests, problems = visit(browser, address, width)
    page.get_by_label("Text", exact=True).fill(" ".join(SENTENCES))
    page.get_by_role("button", name="Translate").click()
    page.wait_for_function("document.querySelectorAll('textarea')[1].value.length > 0")
    assert page.locator("textarea").nth(2).input_value().startswith("2. ")
    page.get_by_role("button", name="Look inside").click()
    frame = page.frame_locator("iframe")
    frame.locator("#attention canvas.large").wait_for()
    assert SENTENCES[0] in frame.locator("#words").inner_text()
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    page.screenshot(path=PICTURES / f"demo_{width}.png", full_page=True)
    page.close()
    assert not problems
    assert all(url.startswith((address, "data:", "blob:", "about:")) for url in requests)


def test_the_picture_of_the_manual(browser, address) -> None:
    page, _, _ = visit(browser, address, 1100, 740)
    page.get_by_role("button", name=SENTENCES[0]).click()
    # The server puts an example into its place.
    page.wait_for_function("document.querySelectorAll('textarea')[0].value.length > 0")
    page.get_by_role("button", name="Translate").click()
    page.wait_for_function("document.querySelectorAll('textarea')[1].value.length > 0")
    page.wait_for_timeout(1000)
    page.screenshot(path=PICTURES / "demo.png", full_page=True)
    page.close()
    assert (PICTURES / "demo.png").stat().st_size > 1000


# ---- The page of the server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Serves the same models by the server."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
    import uvicorn

    from hf_vaswani import VaswaniTranslationPipeline
    from hf_vaswani.serving.server import Limits, build_server

    model, tokenizer = load()
    model.config.language_pairs = [["en", "de"]]
    model.generation_config.num_beams = 4
    app = build_server({"one": VaswaniTranslationPipeline(model, tokenizer)}, limits=Limits(200))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=running.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        running.should_exit = True
        thread.join()


@pytest.mark.parametrize("width", [400, 1200])
def test_the_server_has_a_page(browser, server, width) -> None:
    page, requests, problems = visit(browser, server, width)
    assert page.get_by_label("From").inner_text() == "English" and page.get_by_label("to").inner_text() == "German"
    page.get_by_label("Text", exact=True).fill(" ".join(SENTENCES))
    page.get_by_label("Alternatives", exact=True).check()
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Translate").click()
    page.locator("#others li").nth(2).wait_for()
    assert page.get_by_label("Translation", exact=True).inner_text().strip()
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    page.screenshot(path=PICTURES / f"server_{width}.png", full_page=True)
    # More than the limit can be pasted by a program only, and is refused in words.
    page.evaluate("part.text.maxLength = 1000")
    page.get_by_label("Text", exact=True).fill("x" * 201)
    page.get_by_role("button", name="Translate").click()
    page.get_by_role("alert").get_by_text("at most 200 are accepted").wait_for()
    page.close()
    assert not problems
    assert all(url.startswith(server) for url in requests)


def test_the_picture_of_the_server_for_the_manual(browser, server) -> None:
    page, _, _ = visit(browser, server, 900, 480)
    page.get_by_label("Text", exact=True).fill(" ".join(SENTENCES))
    page.get_by_label("Alternatives", exact=True).check()
    page.get_by_role("button", name="Translate").click()
    page.locator("#others li").nth(2).wait_for()
    page.screenshot(path=PICTURES / "server.png", full_page=True)
    page.close()
    assert (PICTURES / "server.png").stat().st_size > 1000
