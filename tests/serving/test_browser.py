"""The demo in a real browser: `make test-browser`."""

import socket
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


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serves the model of the quickstart if it was trained here, else one with random weights."""
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    from hf_vaswani.serving.demo import build_demo, serve_demo

    if QUICKSTART.is_dir():
        model = AutoModelForSeq2SeqLM.from_pretrained(QUICKSTART)
        tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    else:
        tokenizer = train_tokenizer(SENTENCES * 3, 290)
        model = tiny_model(3, eos=-1e4, vocab_size=290, num_heads=4)
        model.generation_config.update(max_new_tokens=8, suppress_tokens=[0, 1, 2, 3])
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
    page.get_by_role("button", name="Translate").click()
    page.wait_for_function("document.querySelectorAll('textarea')[1].value.length > 0")
    page.wait_for_timeout(1000)
    page.screenshot(path=PICTURES / "demo.png", full_page=True)
    page.close()
    assert (PICTURES / "demo.png").stat().st_size > 1000
