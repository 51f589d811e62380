"""Shows docstrings in Hugging Face's form, as (`int`, *optional*) and [`VaswaniModel`], without their marks."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Takes the marks out of types and references on a finished page."""
    html = re.sub(r"\[`(\w+)`\]", r"`\1`", html)
    html = re.sub(r"<code>~([\w.]+)</code>", r"<code>\1</code>", html)
    html = re.sub(r"<code>`[^<]*</code>", lambda found: re.sub("[`*]", "", found[0]), html)
    return re.sub(r"\[(<code>~?[\w.]+</code>)\]", r"\1", html)
