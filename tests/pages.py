"""Pages in a real browser: the model that they show, and windows in which nothing may go wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.data.tokenizer import train_tokenizer

from .conftest import ROOT
from .networks import tiny_model

QUICKSTART = ROOT / "runs" / "quickstart" / "model"


def quickstart(text: list[str]) -> tuple[Any, Any]:
    """Returns the model of the quickstart and its tokenizer if it was trained here, else one with random weights."""
    if QUICKSTART.is_dir():
        return AutoModelForSeq2SeqLM.from_pretrained(QUICKSTART), AutoTokenizer.from_pretrained(QUICKSTART)
    model = tiny_model(3, eos=1.0, vocab_size=290, num_heads=4)
    model.generation_config.max_new_tokens = 20
    return model, train_tokenizer(text * 3, 290)


@contextmanager
def opened(
    browser: Any, address: str, size: tuple[int, int], hosts: tuple[str, ...], *, silent: bool = False, **settings: Any
) -> Iterator[Any]:
    """
    Opens a page in a window of a width and a height. Asserts at the end that it had no error and asked nobody but its
    own address and these hosts for anything, and, if it is `silent`, wrote nothing to the console.
    """
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **settings)
    problems, requests = list[str](), list[str]()
    page = context.new_page()
    page.on("console", lambda message: problems.extend([message.text] * silent))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    try:
        page.goto(address)
        yield page
    finally:
        context.close()
    assert not problems
    assert all(url.startswith((address, *hosts)) for url in requests)
