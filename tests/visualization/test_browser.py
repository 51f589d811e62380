"""The explorer's page in a real browser, used by pointer and keyboard: `make test-browser`."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_vaswani import VaswaniEncoderModel, VaswaniForCausalLM
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.visualization.explorer import explore

from ..conftest import PICTURES
from ..networks import tiny_config, tiny_model
from ..pages import opened, quickstart

pytestmark = pytest.mark.browser

SENTENCE = "The old woman reads a red book in the garden."


@pytest.fixture(scope="module")
def translator() -> tuple[Any, Any]:
    return quickstart([SENTENCE, "Die alte Frau liest ein rotes Buch im Garten."])


@pytest.fixture(scope="module")
def pages(translator, tmp_path_factory) -> dict[str, Path]:
    """Pages of a translation, a decoder and an encoder."""
    folder = tmp_path_factory.mktemp("pages")
    letters = train_tokenizer(["abc ab ca"], 20, kind="characters")
    torch.manual_seed(0)
    made = {
        "translation": explore(*translator, SENTENCE, name="quickstart", settings={"num_beams": 4}),
        "greedy": explore(*translator, SENTENCE, settings={"num_beams": 1}),
        "decoder": explore(tiny_model(kind=VaswaniForCausalLM), letters, "abc ab"),
        "encoder": explore(VaswaniEncoderModel(tiny_config()).eval(), letters, "abc ab"),
    }
    for name, page in made.items():
        page.save(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture
def open_page(browser, pages) -> Iterator[Any]:
    """Opens a page, see [`opened`]."""
    with ExitStack() as stack:

        def open_(name: str, width: int = 1400, scheme: str = "light") -> Any:
            page = opened(browser, pages[name].as_uri(), (width, 900), ("data:",), silent=True, color_scheme=scheme)
            return stack.enter_context(page)

        yield open_


LIGHT, DARK = "rgb(255, 255, 255)", "rgb(21, 24, 29)"


def background(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["translation", "greedy", "decoder", "encoder"])
def test_pages_fit_the_window(open_page, name, width, scheme) -> None:
    page = open_page(name, width, scheme)
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert (background(page) == DARK) == (scheme == "dark")
    sections = page.locator("main > section")
    assert sections.count() == page.locator("nav a").count() >= 4
    for i in range(sections.count()):
        assert sections.nth(i).bounding_box()["width"] <= width
    page.screenshot(path=PICTURES / f"{name}_{width}_{scheme}.png", full_page=True)


def linked(page: Any, label: str) -> list[str]:
    return page.locator(f"[aria-label={label}] .word.linked").all_inner_texts()


def test_words_are_linked_by_pointer_and_keyboard(open_page) -> None:
    page = open_page("translation")
    words, press = page.evaluate("data.words"), page.keyboard.press
    source, target = ([part[0] for part in words[side] if len(part) > 1] for side in ("source", "target"))
    i, _, attention = words["links"][0]
    group = page.locator("[aria-label=Source]")
    group.locator(".word").nth(i).hover()
    assert linked(page, "Source") == [source[i]]
    assert linked(page, "Translation") == [target[link[1]] for link in words["links"] if link[0] == i]
    assert f"{100 * attention:.1f} %" in page.locator("#words .reading").inner_text()
    page.mouse.move(0, 0)
    assert linked(page, "Translation") == []
    # One stop of the Tab key, then arrow keys.
    group.locator(".word").first.focus()
    assert linked(page, "Source") == [source[0]]
    for key, word in (("ArrowRight", source[1]), ("End", source[-1])):
        press(key)
        assert linked(page, "Source") == [word]
    assert source[-1] in page.locator("#live").inner_text()
    press("Tab")
    assert linked(page, "Translation")[0] == target[0]
    assert "probability" in page.locator("#live").inner_text()
    # A click holds the links.
    press("Enter")
    page.locator("h1").hover()
    press("Tab")
    assert linked(page, "Translation")[0] == target[0]
    assert page.locator('.word[aria-pressed="true"]').count() == 1


def test_the_slider_shows_each_step(open_page) -> None:
    page = open_page("translation")
    search, table = page.evaluate("data.search"), page.locator("#search table").first
    count = len(search["steps"])

    def at(number: int) -> bool:
        return bool(page.locator("#search output").inner_text() == f"Step {number} of {count}")

    page.get_by_label("Step of the search").focus()
    for number, step in enumerate(search["steps"], start=1):
        rows = table.locator("tbody tr")
        assert at(number) and rows.count() == len(step["candidates"])
        names = [search["tokens"][str(each[1])] for each in step["candidates"]]
        assert rows.locator("td:nth-child(2)").all_text_contents() == names
        assert [rows.nth(i).get_attribute("class") for i in range(rows.count())] == [
            "done" if each[6] else "kept" if each[5] is not None and number < count else "pruned"
            for each in step["candidates"]
        ]
        page.keyboard.press("ArrowRight")
    # The column of the step is in sight.
    now = "[...document.querySelectorAll('#search .now')].map(each => each.getBoundingClientRect())[0]"
    assert page.evaluate(f"{now}.right <= innerWidth && {now}.left >= 0")
    page.keyboard.press("Home")
    assert at(1)
    page.get_by_role("button", name="Next step").click()
    assert at(2)
    page.locator("#search svg .node").last.click()
    assert at(count)
    # With minus signs in place of hyphens.
    assert re.sub(r"-(?=\d)", "−", search["stop"]) in page.locator("#search").inner_text()


def test_attention_is_read_by_keyboard(open_page) -> None:
    page = open_page("translation")
    attention, buttons = page.evaluate("data.attention"), page.locator("#attention .grid button")
    layers, heads = attention["cross"]["shape"][:2]
    assert buttons.count() == layers * heads
    chosen = page.locator('#attention [aria-checked="true"]').get_attribute("aria-label")
    assert chosen.startswith(f"Layer {layers}, head 1;")
    page.locator("#attention input[value=encoder]").check()
    buttons.first.focus()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator("#attention h3").inner_text().startswith("Encoder, layer 2, head 2:")
    page.locator("#attention canvas.large").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    names = attention["encoder"]["rows"]
    text = page.locator("#attention .reading").inner_text()
    assert text.startswith(f"{names[1]} attends to {names[2]}: ")
    assert "attends to" in page.locator("#live").inner_text()


# Of each small picture of a head, between the colours for 0 and 1: the greatest difference of a pixel from its weight,
# and the least difference of a pixel from the full colour.
DIFFERENCES = """() => {
    const { shape: [, heads, rows, columns], weights } = data.attention.cross;
    const raw = bytes(weights), [low, high] = [colour("surface"), colour("accent")];
    const far = (one, image, i) => one.map((value, part) => Math.abs(value - image[4 * i + part]));
    const found = [];
    document.querySelectorAll("#attention .grid canvas").forEach((small, head) => {
        const image = small.getContext("2d").getImageData(0, 0, columns, rows).data;
        let most = 0, least = 999;
        for (let i = 0; i < rows * columns; i += 1) {
            const place = 2 * (head * rows * columns + i);
            const share = (raw[place] + 256 * raw[place + 1]) / 65535;
            most = Math.max(most, ...far(between(low, high, share), image, i));
            least = Math.min(least, far(high, image, i).reduce((sum, value) => sum + value));
        }
        found.push([most, least]);
    });
    return found;
}"""


def test_the_picture_of_a_head_has_its_weights_and_may_have_the_full_colour(open_page) -> None:
    page = open_page("translation")
    switch = page.get_by_label("Full colour for the largest weight")
    for switch_it in (lambda: None, switch.check, switch.uncheck):
        switch_it()
        most, least = zip(*page.evaluate(DIFFERENCES), strict=True)
        assert (max(least) <= 3) == switch.is_checked()
        assert switch.is_checked() or max(most) <= 1


def test_embeddings_name_their_neighbours(open_page) -> None:
    page = open_page("translation")
    points = page.evaluate("data.embeddings.plots[0].points")
    page.locator("#embeddings .dot").last.focus()
    page.keyboard.press("Home")
    assert points[0][0] in page.locator("#embeddings caption").inner_text()
    names = page.locator("#embeddings tbody tr td:first-child").all_text_contents()
    assert names == [near[0] for near in points[0][4]]


def test_colours_change_by_a_button_and_paper_is_white(open_page) -> None:
    page = open_page("translation", scheme="dark")
    page.get_by_role("button", name="Light colours").click()
    assert background(page) == LIGHT
    page.get_by_role("button", name="Dark colours").click()
    assert background(page) == DARK
    for event, colour in (("beforeprint", LIGHT), ("afterprint", DARK)):
        page.evaluate(f"dispatchEvent(new Event('{event}'))")
        assert background(page) == colour
    assert page.pdf(format="A4", print_background=True).startswith(b"%PDF")


@pytest.mark.parametrize("name", ["translation", "decoder", "encoder"])
def test_everything_has_a_name_for_a_screen_reader(open_page, name) -> None:
    page = open_page(name)
    unnamed = page.evaluate(
        """() => {
            const all = document.querySelectorAll("button, input, section, [role], canvas:not([aria-hidden]), svg");
            const isNamed = (each) => each.getAttribute("aria-label") || each.getAttribute("aria-labelledby")
                || each.textContent.trim() || each.closest("label");
            return [...all].filter((each) => !isNamed(each)).map((each) => each.outerHTML.slice(0, 80));
        }"""
    )
    assert unnamed == []
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1


def test_a_notebook_shows_the_page_in_a_frame(browser, translator, tmp_path) -> None:
    page = browser.new_page(reduced_motion="reduce")
    (tmp_path / "notebook.html").write_text(explore(*translator, SENTENCE)._repr_html_(), encoding="utf-8")
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("#attention canvas.large").wait_for()
    assert frame.locator("h1").inner_text() == "Transformer explorer"
    # The links move within the page.
    frame.get_by_role("link", name="Embeddings").click()
    place = frame.locator("#embeddings").evaluate("section => section.getBoundingClientRect().top")
    assert -5 < place < 400
    assert frame.locator("h1").count() == 1
    assert frame.locator("h2#embeddings-title").evaluate("title => title === document.activeElement")
    page.close()


def test_the_picture_of_the_manual(open_page) -> None:
    page = open_page("translation", 1200)
    page.get_by_role("group", name="Translation").locator(".word").last.focus()
    page.get_by_label("Step of the search").evaluate(
        "slider => { slider.value = 3; slider.dispatchEvent(new Event('input')); }"
    )
    for name in ("search", "attention"):
        page.locator(f"#{name}").screenshot(path=PICTURES / f"explorer_{name}.png")
        assert (PICTURES / f"explorer_{name}.png").stat().st_size > 1000
