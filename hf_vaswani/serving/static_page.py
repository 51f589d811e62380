"""A page that translates in the browser, without any server: as a folder, or as one HTML file."""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..model.sentences_vaswani import LANGUAGE_TAG
from .browser_rules import sentence_script

# Files of a model for transformers.js that a page needs.
MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("onnx/encoder_model_quantized.onnx", "onnx/decoder_model_merged_quantized.onnx"),
)
NOTICES, PAGE, SERVICE_WORKER, FILES = NAMES = ("NOTICES.txt", "index.html", "service_worker.js", "files")


@dataclass(frozen=True)
class StaticPage:
    """
    A page that translates without a server.

    Args:
        title (`str`): its title.
        facts (`dict[str, Any]`): what the page needs to know of the model: its languages and its limits.
        files (`dict[str, bytes]`): files of the model and of the JavaScript library, by name.
        notices (`str`): licences of the library.
    """

    title: str
    facts: dict[str, Any]
    files: dict[str, bytes]
    notices: str = field(repr=False)

    def folder(self, hosts: Sequence[str] = ()) -> dict[str, bytes]:
        """
        Returns the files of a folder that a web server may show, by name.

        Args:
            hosts (`Sequence[str]`): sources to which the web server may redirect, beside itself.
        """
        listed, found = [], {}
        for name, content in self.compressed().items():
            # A file that changes gets another name, so that nobody mixes versions. No server decompresses this ending.
            url = f"{FILES}/{Path(name).name}.{hashlib.sha256(content).hexdigest()[:12]}.bin"
            listed.append({"name": name, "url": url, "bytes": len(content)})
            found[url] = content
        page = self._page({"isSingle": False, "files": listed}, " ".join(("'self'", *hosts)))
        worker = _read("service_worker.js")
        return {PAGE: page, SERVICE_WORKER: worker.encode(), NOTICES: self.notices.encode(), **found}

    def single_file(self) -> bytes:
        """Returns the page as one HTML file, which contains all others."""
        compressed = self.compressed()
        listed = [{"name": name, "bytes": len(content)} for name, content in compressed.items()]
        content = "".join(
            f'<script data-file="{name}" type="application/octet-stream">{base64.b64encode(each).decode()}</script>\n'
            for name, each in compressed.items()
        )
        return self._page({"isSingle": True, "files": listed}, "'none'", content)

    def compressed(self) -> dict[str, bytes]:
        """Returns the files as gzip, always with the same bytes."""
        return {name: gzip.compress(content, 9, mtime=0) for name, content in self.files.items()}

    def _page(self, more: dict[str, Any], connections: str, content: str = "") -> bytes:
        """Puts the parts of the page together. `connections` are what it may load beside itself."""
        style, script = _read("static.css"), _read("static.js")
        policy = (
            f"default-src 'none'; style-src '{_digest(style)}'; "
            f"script-src '{_digest(script)}' blob: data: 'wasm-unsafe-eval'; worker-src 'self' blob:; "
            f"connect-src {connections}; img-src data:; base-uri 'none'; form-action 'none'"
        )
        parts = {
            "POLICY": html.escape(policy),
            "TITLE": html.escape(self.title),
            "STYLE": style,
            "NOTICES": html.escape(self.notices),
            "FACTS": _json(self.facts | more),
            "CONTENT": content,
            "SCRIPT": script,
        }
        before, *rest = _read("static.html").split("{{")
        pieces = (part.split("}}", 1) for part in rest)
        return (before + "".join(parts[name] + behind for name, behind in pieces)).encode()


def make_page(folder: Path, title: str, javascript: Mapping[str, bytes], language: str | None = None) -> StaticPage:
    """
    Makes a page of a model.

    Args:
        folder (`Path`): the model, as it was converted for transformers.js.
        title (`str`): title of the page.
        javascript (`Mapping[str, bytes]`): files of the JavaScript library, with the notices of its licences.
        language (`str`, *optional*): target language that is chosen at first, of a model with several.

    Raises:
        ValueError: the model does not translate into the language.
    """
    model = {name: (folder / name).read_bytes() for name in MODEL_FILES}
    config, settings, tokenizer = (json.loads(model[name]) for name in MODEL_FILES[:3])
    pairs = config["language_pairs"] or []
    added = [each["content"] for each in tokenizer["added_tokens"]]
    tags = {tag[2:-1]: tag for tag in added if LANGUAGE_TAG.fullmatch(tag)}
    codes = list(dict.fromkeys(pair[1] for pair in pairs)) or list(tags)
    if language is not None and language not in codes:
        raise ValueError(
            f"The model does not translate into {language!r}, only into {', '.join(codes) or 'one language'}."
        )
    facts = {
        "sources": list(dict.fromkeys(pair[0] for pair in pairs)),
        "languages": [{"code": code, "tag": tags.get(code)} for code in codes],
        "language": language,
        # In tokens: the longest sentence that is translated in one piece, and the limit of a translation.
        "longest": config["longest_sentence"],
        "maxNewTokens": settings["max_length"],
    }
    scripts = {name: content for name, content in javascript.items() if name != NOTICES}
    worker = sentence_script() + _read("worker.js")
    return StaticPage(title, facts, {"worker.js": worker.encode(), **scripts, **model}, javascript[NOTICES].decode())


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _json(content: Any) -> str:
    """Returns JSON for a script, which "<" could end."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _digest(text: str) -> str:
    """Returns the digest of a script or a style, as a Content-Security-Policy has it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
