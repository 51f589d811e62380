"""The page that needs no server: what is in it, and that it loads nothing else."""

import base64
import gzip
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from hf_vaswani.serving.static_page import MODEL_FILES, make_page

JAVASCRIPT = {
    "transformers.min.js": b"export const env = {};",
    "ort-wasm-simd-threaded.mjs": b"export default 1;",
    "ort-wasm-simd-threaded.wasm": bytes(range(256)) * 40,
    "NOTICES.txt": "One <licence> & another: ©".encode(),
}


@pytest.fixture
def model(tmp_path):
    """A folder with the files of a model into two languages, without weights."""
    tags = [{"content": "<2de>", "special": False}, {"content": "<2pt_BR>", "special": False}]
    contents: dict[str, Any] = {
        "config.json": {"language_pairs": [["en", "de"], ["en", "pt_BR"]], "longest_sentence": 128},
        "generation_config.json": {"max_length": 1076},
        "tokenizer.json": {"added_tokens": [{"content": "<bt>", "special": False}, *tags]},
        "tokenizer_config.json": {},
    }
    (tmp_path / "onnx").mkdir()
    for name in MODEL_FILES:
        content = contents.get(name)
        (tmp_path / name).write_bytes(name.encode() if content is None else json.dumps(content).encode())
    return tmp_path


class Parts(HTMLParser):
    """The scripts and styles of a page by their attributes, as a browser finds them, and its policy."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.scripts, self.style, self.policy, self.title = list[tuple[dict, str]](), "", "", ""
        self.now = ("", {})
        self.feed(page.decode())

    def handle_starttag(self, tag, attrs) -> None:
        self.now = (tag, dict(attrs))
        if tag == "meta" and self.now[1].get("http-equiv") == "Content-Security-Policy":
            self.policy = self.now[1]["content"]

    def handle_data(self, data) -> None:
        tag, attributes = self.now
        if tag == "script":
            self.scripts.append((attributes, data))
        elif tag == "style":
            self.style += data
        elif tag == "title":
            self.title += data
        self.now = ("", {})

    @property
    def facts(self) -> dict:
        return next(json.loads(text) for attributes, text in self.scripts if attributes.get("id") == "facts")


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def files_of(page, is_single: bool) -> tuple[Parts, dict[str, bytes]]:
    """Returns the parts of a page, and its files as the page finds them."""
    if is_single:
        parts = Parts(page.single_file())
        written = {each["data-file"]: base64.b64decode(text) for each, text in parts.scripts if "data-file" in each}
        return parts, written
    folder = page.folder()
    parts = Parts(folder["index.html"])
    return parts, {each["name"]: folder[each["url"]] for each in parts.facts["files"]}


@pytest.mark.parametrize("is_single", [False, True])
def test_the_files_are_complete_and_as_large_as_the_page_says(model, is_single) -> None:
    parts, files = files_of(make_page(model, "A model", JAVASCRIPT), is_single)
    assert parts.facts["isSingle"] == is_single
    assert {each["name"]: each["bytes"] for each in parts.facts["files"]} == {n: len(files[n]) for n in files}
    found = {name: gzip.decompress(content) for name, content in files.items()}
    assert "function sentenceSpans" in found.pop("worker.js").decode()
    expected = {name: content for name, content in JAVASCRIPT.items() if name != "NOTICES.txt"}
    assert found == expected | {name: (model / name).read_bytes() for name in MODEL_FILES}


def test_no_part_of_a_page_names_a_host(model) -> None:
    page = make_page(model, "A model", JAVASCRIPT)
    written = [page.folder()["index.html"], page.single_file(), page.folder()["service_worker.js"]]
    assert not re.search(rb"\w://", b"".join([*written, page.files["worker.js"]]))


@pytest.mark.parametrize("is_single", [False, True])
def test_the_browser_runs_the_pages_own_script_alone_and_asks_nobody_else(model, is_single) -> None:
    parts, _ = files_of(make_page(model, "A model", JAVASCRIPT), is_single)
    ((_, script),) = [each for each in parts.scripts if not each[0]]
    rules = dict(rule.strip().split(" ", 1) for rule in parts.policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["form-action"] == "'none'"
    assert rules["script-src"].split()[0] == f"'sha256-{digest(script)}'"
    assert rules["style-src"] == f"'sha256-{digest(parts.style)}'"
    assert rules["connect-src"] == ("'none'" if is_single else "'self'")
    assert not re.search(r"https?:|\*|unsafe-inline|unsafe-eval(?<!wasm-unsafe-eval)", parts.policy)


def test_a_folder_has_what_it_lists_and_nothing_else(model) -> None:
    folder = make_page(model, "A model", JAVASCRIPT).folder()
    urls = {each["url"] for each in Parts(folder["index.html"]).facts["files"]}
    assert folder.keys() == {"index.html", "service_worker.js", "NOTICES.txt", *urls}
    assert folder["NOTICES.txt"] == JAVASCRIPT["NOTICES.txt"]


def test_the_same_page_has_the_same_bytes_and_what_changes_another_name(model) -> None:
    before = make_page(model, "A model", JAVASCRIPT).folder()
    assert make_page(model, "A model", JAVASCRIPT).folder() == before
    (model / MODEL_FILES[-1]).write_bytes(b"other weights")
    after = make_page(model, "A model", JAVASCRIPT).folder()
    added, removed = after.keys() - before.keys(), before.keys() - after.keys()
    assert [re.sub(r"\.\w+\.bin", "", *each) for each in (added, removed)] == [f"files/{MODEL_FILES[-1][5:]}"] * 2


def test_titles_and_notices_are_text(model) -> None:
    title = "</title><script>alert(1)</script> & {{FACTS}}"
    page = make_page(model, title, JAVASCRIPT).single_file().decode()
    parts = Parts(page.encode())
    assert unescape(parts.title) == title
    assert [attributes for attributes, _ in parts.scripts].count({}) == 1
    assert "One &lt;licence&gt; &amp; another: ©" in page


def test_the_languages_are_those_of_the_model_with_their_tags(model) -> None:
    facts = make_page(model, "A model", JAVASCRIPT, "pt_BR").facts
    assert facts == {
        "sources": ["en"],
        "languages": [{"code": "de", "tag": "<2de>"}, {"code": "pt_BR", "tag": "<2pt_BR>"}],
        "language": "pt_BR",
        "longest": 128,
        "maxNewTokens": 1076,
    }
    with pytest.raises(ValueError, match="does not translate into 'fr', only into de, pt_BR"):
        make_page(model, "A model", JAVASCRIPT, "fr")


def test_a_model_that_names_no_languages_has_those_of_its_tags(model) -> None:
    (model / "config.json").write_text('{"longest_sentence": 128, "language_pairs": null}')
    assert make_page(model, "A model", JAVASCRIPT).facts["languages"][0] == {"code": "de", "tag": "<2de>"}
    (model / "tokenizer.json").write_text('{"added_tokens": []}')
    assert make_page(model, "A model", JAVASCRIPT).facts["languages"] == []
