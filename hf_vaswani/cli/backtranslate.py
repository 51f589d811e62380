"""The verb that makes synthetic sources for text in the target language: backtranslate."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import add_recipe_verb, choose_device, load_recorded, require_file, take_device, text_lines, warn_split

if TYPE_CHECKING:
    from ..recipe import Recipe

PURPOSE = (
    "Translates text in the target language into synthetic sources, by the backtranslation section of a recipe. "
    "--device chooses where, e.g. --device cuda:1."
)


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    add_recipe_verb(verbs, "backtranslate", "make source sentences for text in the target language", _backtranslate)


def _backtranslate(options: argparse.Namespace) -> None:
    from ..recipe_file import load_recipe

    device, arguments = take_device(options.arguments, "hf-vaswani backtranslate")
    recipe = load_recipe(arguments, "hf-vaswani backtranslate", PURPOSE)
    given = recipe.backtranslation
    for key, value in (("model", given.model), ("text", given.text), ("output", given.output)):
        if not value:
            raise ValueError(f"backtranslation.{key} must have a value, but it is {value!r}: --help explains it.")
    files, output = _files(recipe), Path(str(given.output))
    from ..interruption import exclusive, stopped_by_sigterm
    from ..processes import Processes

    processes = Processes()
    processes.on_main_process(lambda: _check_files(files, output))
    with stopped_by_sigterm("stopped. The same command goes on."), contextlib.ExitStack() as stack:
        processes.on_main_process(lambda: stack.enter_context(exclusive(output)))
        _write_pairs(recipe, files, output, processes, device)


def _files(recipe: "Recipe") -> list[Path]:
    text = recipe.backtranslation.text
    return [Path(name) for name in (text if isinstance(text, list) else [str(text)])]


def _check_files(files: list[Path], output: Path) -> None:
    for file in files:
        require_file(file)
        if output.is_file() and output.samefile(file):
            raise ValueError(f"backtranslation.output {output} is one of the files of backtranslation.text.")
    if output.is_dir():
        raise ValueError(f"backtranslation.output {output} is a folder: name a file.")
    if not output.parent.is_dir():
        raise ValueError(f"backtranslation.output {output} is in a folder that does not exist.")
    if not os.access(output.parent, os.W_OK):
        raise ValueError(f"backtranslation.output {output} is in a folder that cannot be written to.")


def _write_pairs(recipe: "Recipe", files: list[Path], output: Path, processes: Any, device: str) -> None:
    from tqdm.auto import tqdm

    from ..files import digest
    from ..translation.backtranslation import (
        Backtranslator,
        check_direction,
        count_pairs,
        sentences_of,
        set_search,
        settings_of,
    )
    from ..translation.growing_file import GrowingFile, grow

    given, languages = recipe.backtranslation, (recipe.data.source_language, recipe.data.target_language)
    name = str(given.model)
    loaded, (recorded,) = load_recorded([name], "backtranslation.model", choose_device(device))
    model, tokenizer = loaded.models[0], loaded.tokenizer
    tag = check_direction("backtranslation.model", name, model, tokenizer, languages[1], languages[0])
    set_search(model, given.method, given.top_k, given.temperature, given.num_beams)

    def begin() -> tuple[GrowingFile, int | None]:
        # Everything that decides about the pairs, in the words of the recipe.
        settings = {"data.source_language": languages[0], "data.target_language": languages[1], "seed": recipe.seed}
        settings |= {f"backtranslation.{key}": value for key, value in asdict(given).items() if key != "output"}
        settings["backtranslation.model"] = recorded
        settings["search"] = settings_of(model.generation_config)
        settings["backtranslation.text"] = [f"{file.name}, SHA-256 {digest(file)}" for file in files]
        pairs = GrowingFile(output, settings, "backtranslation.output", languages)
        return pairs, pairs.begin()

    pairs, done = processes.on_main_process(begin)
    if done is not None:
        translate = Backtranslator(model, tokenizer, tag, recipe.seed)
        with tqdm(initial=done, unit=" pairs", disable=None if processes.is_main_process else True) as bar:
            for count in grow(processes, pairs, sentences_of(_lines(files)), done, translate):
                bar.update(count)
        lines_split = sum(processes.gather(translate.translator.lines_split))
        if processes.is_main_process:
            warn_split(lines_split, translate.translator.longest)
            pairs.finish()
    if processes.is_main_process:
        count, empty = count_pairs(output)
        without = f", {empty:,} without a source, which a training skips" if empty else ""
        sys.stdout.write(f"{'Pairs' if done is not None else 'Complete'}  {output} ({count:,}{without})\n")


def _lines(files: list[Path]) -> Iterator[str]:
    for file in files:
        yield from text_lines(file)
