"""A page to try a translation model in a browser, made with Gradio."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from ..extras import extra
from ..model.pipeline_vaswani import VaswaniTranslationPipeline
from ..model.rules_vaswani import SEARCH_SETTINGS
from ..model.sentences_vaswani import LanguageTags, longest_source, sentence_spans
from ..translation.alignment import Alignment, ended_by, translate_and_align
from ..visualization.explorer import explore, marked_parts
from .batcher import EndCriteria, OverdueError

# Unless its user wants it, a page says nothing to anybody. Read when gradio is imported.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
with extra("demo"):
    import gradio

# In characters.
MAX_CHARACTERS = 5000
MAX_BEAMS, MAX_TRANSLATIONS = 10, 5
# In seconds, for the translation of a text.
DEADLINE = 30.0
# Colours of words that belong together, in turn: light enough for dark letters.
COLOURS = ("#8ecae6", "#ffd166", "#a7e8bd", "#f4a9a8", "#cdb4f6", "#ffb27d", "#9be3de", "#e5c1e9")

# Words of a text, each with the number of its colour or None.
Words = list[tuple[str, str | None]]


@dataclass(frozen=True)
class Answer:
    """
    What the page shows of a text.

    Attributes:
        translations (`list[str]`): the translations, best first.
        source (`list[tuple[str, str | None]]`), target (`list[tuple[str, str | None]]`): the text and its best
            translation in parts. Those that belong together have the same colour, by its number.
    """

    translations: list[str]
    source: Words
    target: Words


class DemoTranslator:
    """
    Translates for the page.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.pipeline = VaswaniTranslationPipeline(model, tokenizer)
        tags = LanguageTags(tokenizer, model.config)
        self.tags = {code: tag for code, tag in tags.by_language.items() if code in (tags.targets or tags.by_language)}

    def settings(self, num_beams: float, alpha: float) -> dict[str, Any]:
        """Returns the settings of `generate()`; greedy search has no length penalty."""
        found: dict[str, Any] = {"num_beams": int(num_beams)}
        if num_beams > 1:
            found["length_penalty"] = float(alpha)
        else:
            # They have no effect on greedy search, and transformers would warn about each.
            found |= {"length_penalty": None, "early_stopping": None}
        return found

    def answer(self, text: str, language: str | None, num_beams: float, alpha: float, count: float) -> Answer:
        """
        Translates a text, sentence by sentence.

        Args:
            text (`str`): the text.
            language (`str`, *optional*): target language, for models with several.
            num_beams (`float`), alpha (`float`): beam size and length penalty.
            count (`float`): number of translations; at most `num_beams`.

        Raises:
            ValueError: the text is too long, or no translation is asked for.
            OverdueError: the translation was not ready by the deadline.
        """
        if count < 1 or num_beams < 1:
            raise ValueError(f"At least one translation and one beam are needed, not {count:g} and {num_beams:g}.")
        if not text.strip():
            return Answer([], [], [])
        check_length(text)
        language = language if language in self.tags else None
        count = min(int(count), int(num_beams))
        until = time.monotonic() + DEADLINE

        def end_if_over() -> None:
            if time.monotonic() > until:
                raise OverdueError(DEADLINE)

        settings = self.settings(num_beams, alpha) | {"stopping_criteria": [EndCriteria(end_if_over)]}
        settings |= {"num_return_sequences": count, "longest_sentence": longest_source([self.model], self.tokenizer)}
        with ended_by(end_if_over):
            ((best, *others),) = translate_and_align(
                self.pipeline, [text], "words", split_sentences=True, tgt_lang=language, **settings
            )
        # Behind a tag, the text begins later.
        begin = len(text) - len(self.pipeline.tags.split(text)[1])
        aligned = [part.moved(begin, 0) for part in best[1]]
        return Answer([best[0], *(other for other, _ in others)], *coloured(text, best[0], aligned))

    def explorer(self, text: str, language: str | None, num_beams: float, alpha: float) -> str:
        """Returns the explorer's page of the first sentence of a text, as a frame."""
        if not text.strip():
            return ""
        check_length(text)
        start, end = sentence_spans(text)[0]
        sentence = LanguageTags(self.tokenizer).put(text[start:end], language if language in self.tags else None)
        settings = self.settings(num_beams, alpha)
        return explore(self.model, self.tokenizer, sentence, settings=settings)._repr_html_()


def check_length(text: str) -> None:
    """Raises a `ValueError` if a text is too long. The browser's limit does not hold for programs."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"The text has {len(text):,} characters, but at most {MAX_CHARACTERS:,} are translated.")


def coloured(source: str, target: str, aligned: Sequence[Alignment]) -> tuple[Words, Words]:
    """
    Gives words that belong together the same colour.

    Args:
        source (`str`), target (`str`): a text and its translation.
        aligned (`Sequence[Alignment]`): the alignments of its sentences.
    """
    marks: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
    number = 0
    for alignment in aligned:
        for group in _groups(alignment.links()):
            for side, spans in enumerate((alignment.source_spans, alignment.target_spans)):
                marks[side].extend((*spans[word], number % len(COLOURS)) for word in {link[side] for link in group})
            number += 1
    parts = [marked_parts(text, sorted(side)) for text, side in zip((source, target), marks, strict=True)]
    first, second = ([(part, None if i is None else str(i)) for part, i in side] for side in parts)
    return first, second


def _groups(links: Sequence[tuple[int, int]]) -> list[set[tuple[int, int]]]:
    """Returns the links of words that are joined by links, in the order of their first source word."""
    groups: list[set[tuple[int, int]]] = []
    for link in links:
        joined = [group for group in groups if any(link[0] == other[0] or link[1] == other[1] for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append({link}.union(*joined))
    return sorted(groups, key=min)


def said(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose errors, if a user can mend them, are shown on the page."""

    @wraps(function)
    def call(*values: Any) -> Any:
        try:
            return function(*values)
        except (ValueError, OverdueError) as error:
            raise gradio.Error(str(error)) from error

    return call


def build_demo(
    model: Any, tokenizer: Any, name: str, examples: Sequence[str] = (), language: str | None = None
) -> Any:
    """
    Builds the page.

    Args:
        model ([`VaswaniForConditionalGeneration`]): the model.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        name (`str`): name of the model.
        examples (`Sequence[str]`): texts to choose from.
        language (`str`, *optional*): target language that is chosen at first, of a model with several.

    Returns:
        [`gradio.Blocks`]: `launch()` serves it.
    """
    translator = DemoTranslator(model, tokenizer)

    def translate(text: str, language: str | None, num_beams: float, alpha: float, count: float) -> tuple[Any, ...]:
        answer = translator.answer(text, language, num_beams, alpha, count)
        others = "\n".join(f"{number}. {each}" for number, each in enumerate(answer.translations[1:], start=2))
        return "".join(answer.translations[:1]), others, answer.source, answer.target, ""

    with gradio.Blocks(title=name, analytics_enabled=False) as demo:
        gradio.Markdown(f"# {name}")
        with gradio.Row():
            with gradio.Column():
                text = gradio.Textbox(label="Text", lines=5, max_length=MAX_CHARACTERS, autofocus=True)
                languages = list(translator.tags)
                chosen = language or (languages[0] if languages else None)
                to = gradio.Dropdown(languages, value=chosen, label="Language", visible=len(languages) > 1)
                button = gradio.Button("Translate", variant="primary")
            with gradio.Column():
                translation = gradio.Textbox(label="Translation", lines=5, interactive=False, buttons=["copy"])
                others = gradio.Textbox(label="Alternatives", lines=2, interactive=False)
        num_beams, alpha, count = _search_settings(model.generation_config)
        colours = {str(number): colour for number, colour in enumerate(COLOURS)}
        with gradio.Row():
            words = [
                gradio.HighlightedText(label=label, color_map=colours, show_inline_category=False, interactive=False)
                for label in ("Words of the text", "Words of the translation")
            ]
        if examples:
            gradio.Examples([[example] for example in examples], inputs=[text])
        look = gradio.Button("Look inside")
        frame = gradio.HTML(padding=False)
        search = [text, to, num_beams, alpha]
        button.click(said(translate), [*search, count], [translation, others, *words, frame], api_name="translate")
        look.click(said(translator.explorer), search, frame, api_name="explore")
    return demo


def _search_settings(config: Any) -> list[Any]:
    """Returns sliders for the number of beams, the length penalty and the number of translations."""
    beams = min(config.num_beams or 4, MAX_BEAMS)
    default = SEARCH_SETTINGS["length_penalty"].by_type[config.length_penalty_type]
    penalty = default if config.length_penalty is None else config.length_penalty
    with gradio.Accordion("Search", open=False), gradio.Row():
        return [
            gradio.Slider(1, MAX_BEAMS, value=beams, step=1, label="Beams"),
            gradio.Slider(0, max(2, penalty), value=penalty, step=0.1, label="Length penalty α"),
            gradio.Slider(1, MAX_TRANSLATIONS, value=min(3, beams), step=1, label="Translations"),
        ]


def serve_demo(demo: Any, host: str, port: int, *, block: bool = True) -> str:
    """
    Serves a page until it is stopped.

    Args:
        demo ([`gradio.Blocks`]): the page.
        host (`str`), port (`int`): where to listen; `"0.0.0.0"` is every network of the machine.
        block (`bool`): wait until Ctrl-C.

    Returns:
        `str`: its address.
    """
    # The fonts of the system: none is loaded from another host.
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    settings = {"server_name": host, "server_port": port, "share": False, "quiet": True, "theme": theme}
    _, address, _ = demo.launch(prevent_thread_lock=not block, footer_links=["api"], **settings)
    return str(address)
