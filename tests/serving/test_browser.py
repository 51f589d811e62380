"""The demo, the page of the server and the page without one in a real browser: `make test-browser`."""

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vaswani.data.pocket_corpus import read_pocket_corpus
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.serving.javascript import javascript_files
from hf_vaswani.serving.static_page import StaticPage, make_page

from ..children import free_port
from ..conftest import PICTURES
from ..javascript import FOLDER as JAVASCRIPT
from ..networks import random_model
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


# ---- The page without a server -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A page that was made of a model, in both forms, and what its graphs in 8 bits translate here."""

    folder: Path
    file: Path
    page: StaticPage
    translate: Callable[[list[str]], list[str]]


def make(folder: Path, model: Any, tokenizer: Any, title: str) -> Made:
    """Converts a model, and makes its page of the library that `make test-browser` has installed."""
    pytest.importorskip("onnxscript", reason="the extra `convert` is not installed")
    from hf_vaswani.conversion.convert import convert
    from hf_vaswani.conversion.transformersjs import IN_8_BITS, Graphs

    if not (JAVASCRIPT / "node_modules").is_dir():
        pytest.skip(f"needs @huggingface/transformers in {JAVASCRIPT}, which `make test-browser` installs")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    convert(folder / "model", folder / "graphs", "transformers.js")
    page = make_page(folder / "graphs", title, javascript_files(JAVASCRIPT))
    for name, content in page.folder().items():
        path = folder / "page" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "page.html").write_bytes(page.single_file())
    translate = Graphs(folder / "graphs", IN_8_BITS).translator(tokenizer)
    return Made(folder / "page", folder / "page.html", page, lambda texts: [translate([text])[0] for text in texts])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    """The page of the quickstart's model."""
    return make(tmp_path_factory.mktemp("static"), *quickstart(SENTENCES), "quickstart")


class WebServer:
    """Serves a folder, and records which paths are asked for."""

    def __init__(self, folder: Path, redirects: bool = False) -> None:
        paths = self.paths = list[str]()

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(folder))

            def do_GET(self) -> None:
                paths.append(self.path)
                if redirects and self.path == "/":
                    self.send_response(302)
                    self.send_header("Location", "/index.html")
                    self.end_headers()
                else:
                    super().do_GET()

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def web(made) -> Iterator[WebServer]:
    server = WebServer(made.folder)
    yield server
    server.stop()


def wait_until_ready(page: Any) -> None:
    page.locator("#state[data-ready]").wait_for(state="attached")


def translated(page: Any, text: str) -> str:
    """Translates a text on a page."""
    page.get_by_label("Text", exact=True).fill(text)
    page.locator("#translation[aria-busy=false]").wait_for(state="attached", timeout=60_000)
    return str(page.locator("#translation").text_content())


def sentences() -> list[str]:
    return list(dict.fromkeys(row[0] for row in read_pocket_corpus()["test"]))[:200]


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_page_translates_without_a_server(browser, made, web, form) -> None:
    address = made.file.as_uri() if form == "file" else web.address
    texts = [*sentences(), "1234!", "</s>", ""]
    with opened(browser, address, (900, 500), ("blob:", "data:"), silent=True) as page:
        wait_until_ready(page)
        # In a file, nothing is asked for; in a folder, each file once.
        found = translated(page, "\n".join(texts))
    assert found.split("\n") == [*made.translate(texts[:-3]), "1234!", *made.translate(["</s>"]), ""]
    if form == "folder":
        files = {f"/{name}" for name in made.page.folder()} - {"/index.html", "/NOTICES.txt"}
        assert (
            set(web.paths) == {"/", *files} and sum(path.startswith("/files/") for path in web.paths) == len(files) - 1
        )


def test_a_second_visit_loads_the_page_alone_and_a_third_works_without_a_network(browser, web, made) -> None:
    with opened(browser, web.address, (900, 500), ("blob:",)) as page:
        wait_until_ready(page)
        page.get_by_text("It works without a network, too.").wait_for()
        web.paths.clear()
        page.reload()
        wait_until_ready(page)
        page.get_by_text("It works without a network, too.").wait_for()
        # The browser itself looks whether there is another service worker.
        assert set(web.paths) <= {"/", "/service_worker.js"} and web.paths.count("/") == 1
        web.stop()
        page.context.set_offline(True)
        page.reload()
        assert translated(page, SENTENCES[0]) == made.translate(SENTENCES[:1])[0]


OFFLINE = "It works without a network, too."


def test_what_is_kept_is_the_page_itself(browser, made) -> None:
    """Neither the answer that sends a browser elsewhere nor another file of the folder that was opened."""
    web = WebServer(made.folder, redirects=True)
    with opened(browser, web.address, (900, 500), ("blob:",)) as page:
        page.get_by_text(OFFLINE).wait_for()
        other = page.context.new_page()
        other.goto(f"{web.address}NOTICES.txt")
        page.reload()
        page.get_by_text(OFFLINE).wait_for()
        web.stop()
        page.context.set_offline(True)
        for address in (web.address, f"{web.address}index.html"):
            page.goto(address)
            assert translated(page, SENTENCES[0]) == made.translate(SENTENCES[:1])[0]


def test_a_page_without_room_to_keep_its_files_works_and_promises_nothing(browser, made, web) -> None:
    with opened(browser, web.address, (900, 500), ("blob:",)) as page:
        page.get_by_text(OFFLINE).wait_for()
        quota = {"origin": web.address, "quotaSize": 1000}
        page.context.new_cdp_session(page).send("Storage.overrideQuotaForOrigin", quota)
        page.evaluate("caches.delete(CACHE)")
        for _ in range(2):
            page.reload()
            assert translated(page, SENTENCES[0]) == made.translate(SENTENCES[:1])[0]
            page.wait_for_timeout(300)
            assert not page.get_by_text(OFFLINE).is_visible()


def test_a_new_version_replaces_the_earlier_one(browser, made, tmp_path) -> None:
    shutil.copytree(made.folder, tmp_path / "page")
    web = WebServer(tmp_path / "page")
    other = replace(
        made.page, files={**made.page.files, "config.json": made.page.files["config.json"] + b" "}
    ).folder()
    with opened(browser, web.address, (900, 500), ("blob:",)) as page:
        wait_until_ready(page)
        page.get_by_text("It works without a network, too.").wait_for()
        for name, content in other.items():
            (tmp_path / "page" / name).write_bytes(content)
        web.paths.clear()
        page.reload()
        page.get_by_text("It works without a network, too.").wait_for()
        assert sum(path.startswith("/files/") for path in web.paths) == 1
        kept = page.evaluate(
            "caches.open(CACHE).then((cache) => cache.keys()).then((keys) => keys.map((key) => key.url))"
        )
        assert {url.removeprefix(web.address) for url in kept} == {"", *(name for name in other if "files/" in name)}
    web.stop()


def test_no_other_host_can_be_asked(browser, made, web) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    other.setblocking(False)
    address = f"http://127.0.0.1:{other.getsockname()[1]}/"
    # The browser counts what it refuses as a request.
    with other, opened(browser, web.address, (900, 500), ("blob:", address)) as page:
        wait_until_ready(page)
        assert page.evaluate(f"fetch('{address}').then(() => 'answered', (error) => error.name)") == "TypeError"
        picture = "new Promise((done) => { const i = new Image(); i.onerror = () => done('refused'); i.src = '%s'; })"
        assert page.evaluate(picture % address) == "refused"
        with pytest.raises(BlockingIOError):
            other.accept()


def test_damaged_and_missing_files_are_named(browser, made, tmp_path) -> None:
    for number, (damage, message) in enumerate(
        {
            Path.unlink: "cannot be loaded",
            lambda path: path.write_bytes(path.read_bytes()[:-9]): "is incomplete",
            lambda path: path.write_bytes(path.read_bytes()[:-9] + bytes(9)): "is damaged",
        }.items()
    ):
        shutil.copytree(made.folder, folder := tmp_path / str(number))
        damage(next(folder.glob("files/decoder*")))
        web = WebServer(folder)
        with opened(browser, web.address, (900, 500), ("blob:",)) as page:
            alert = page.get_by_role("alert").filter(has_text=message)
            alert.wait_for()
            assert "onnx/decoder_model_merged_quantized.onnx" in alert.inner_text()
        web.stop()


def test_a_model_of_several_languages_lets_people_choose(browser, tmp_path) -> None:
    tokenizer = train_tokenizer([*SENTENCES, "Die alte Frau liest ein Buch."] * 3, 300, languages=["de", "fr"])
    tagged = tokenizer([f"<2{code}> {SENTENCES[0]}" for code in ("de", "fr")], return_tensors="pt")
    models = (random_model(seed, vocab_size=len(tokenizer)) for seed in range(100))
    model = next(each for each in models if not torch.equal(*each.generate(**tagged, num_beams=1)))
    model.config.language_pairs = [["en", "de"], ["en", "fr"]]
    made = make(tmp_path, model, tokenizer, "two languages")
    with opened(browser, made.file.as_uri(), (900, 500), ("blob:", "data:")) as page:
        wait_until_ready(page)
        found = [translated(page, SENTENCES[0])]
        page.get_by_role("combobox", name="Language").select_option("French")
        found += [translated(page, SENTENCES[0] + " "), translated(page, f"<2de> {SENTENCES[0]}")]
    german, french = made.translate([f"<2{code}> {SENTENCES[0]}" for code in ("de", "fr")])
    assert found == [german, f"{french} ", german] and german != french


# `static.png` is the picture of README and of the manual.
@pytest.mark.parametrize(
    ("picture", "size", "scheme"),
    [("static_400", (400, 900), "dark"), ("static_1200", (1200, 900), "light"), ("static", (900, 400), "light")],
    ids=["narrow", "wide", "manual"],
)
def test_a_page_without_a_server_fits_the_window(browser, made, picture, size, scheme) -> None:
    with opened(browser, made.file.as_uri(), size, ("blob:", "data:"), color_scheme=scheme) as page:
        wait_until_ready(page)
        translated(
            page, "The old teacher gives the little girl a red book.\nThe cat has disappeared. We call my brother."
        )
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
        page.screenshot(path=PICTURES / f"{picture}.png")
