"""The demo and the page of the server in a real browser: `make test-browser`."""

import socket
import threading
from collections.abc import Iterator

import pytest

from ..children import free_port
from ..conftest import PICTURES
from ..pages import opened, quickstart

pytestmark = pytest.mark.browser

SENTENCES = ["The old woman reads a red book in the garden.", "The cat sleeps."]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serves the demo."""
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    from hf_vaswani.serving.demo import build_demo, serve_demo

    demo = build_demo(*quickstart(SENTENCES), "quickstart", SENTENCES)
    yield serve_demo(demo, "127.0.0.1", free_port(), block=False)
    demo.close()


@pytest.mark.parametrize("width", [400, 1200])
def test_a_text_is_translated_and_explored(browser, address, width) -> None:
    with opened(browser, address, (width, 900), ("data:", "blob:", "about:")) as page:
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


def test_an_example_is_translated_in_the_picture_of_the_manual(browser, address) -> None:
    with opened(browser, address, (1100, 740), ("data:", "blob:", "about:")) as page:
        page.get_by_role("button", name=SENTENCES[0]).click()
        # The server puts an example into its place.
        page.wait_for_function("document.querySelectorAll('textarea')[0].value.length > 0")
        page.get_by_role("button", name="Translate").click()
        page.wait_for_function("document.querySelectorAll('textarea')[1].value.length > 0")
        page.wait_for_timeout(1000)
        page.screenshot(path=PICTURES / "demo.png", full_page=True)


# ---- The page of the server --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Serves the same models by the server."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
    import uvicorn

    from hf_vaswani import VaswaniTranslationPipeline
    from hf_vaswani.serving.server import Limits, build_server

    model, tokenizer = quickstart(SENTENCES)
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


# `server.png` is the picture of the manual.
@pytest.mark.parametrize(
    ("picture", "size"), [("server_400", (400, 900)), ("server_1200", (1200, 900)), ("server", (900, 480))]
)
def test_the_server_has_a_page(browser, server, picture, size) -> None:
    with opened(browser, server, size, ()) as page:
        assert page.get_by_label("From").inner_text() == "English" and page.get_by_label("to").inner_text() == "German"
        page.get_by_label("Text", exact=True).fill(" ".join(SENTENCES))
        page.get_by_label("Alternatives", exact=True).check()
        page.get_by_role("button", name="Translate").click()
        page.locator("#others li").nth(2).wait_for()
        assert page.get_by_label("Translation", exact=True).inner_text().strip()
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        page.screenshot(path=PICTURES / f"{picture}.png", full_page=True)
        # More than the limit can be pasted by a program only, and is refused in words.
        page.evaluate("part.text.maxLength = 1000")
        page.get_by_label("Text", exact=True).fill("x" * 201)
        page.get_by_role("button", name="Translate").click()
        page.get_by_role("alert").get_by_text("at most 200 are accepted").wait_for()
