"""The text of a run as a model card names it: paths, which may be private, are reduced to names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..recipe import PAIR_TASKS, Files, Recipe, SourceRecipe
from ..records import Environment, Text, public
from .tasks import TASKS

# Keys of recipes, and their sections, whose strings may be paths.
PATHS = (
    *("dataset", "path", "run_dir", "recipe", "from", "not_worse_than"),
    *("model", "text", "output", "folder", "backward_model"),
)


def named_sources(recipe: Recipe) -> list[tuple[str, SourceRecipe]]:
    """Returns the sources of training text by direction or language, and then the validation sets by their names."""
    sources = [recipe.data, *recipe.more_data]
    if recipe.task in PAIR_TASKS:
        trained = [(f"{part.source_language}-{part.target_language}", part) for part in sources]
    else:
        trained = [(part.source_language, part) for part in sources]
    return [*trained, *recipe.named_sets.items()]


def languages_of(recipe: Recipe) -> list[str]:
    """Returns the language codes of a recipe's training text, in its order."""
    sources = [recipe.data, *recipe.more_data]
    codes = [part.source_language for part in sources]
    if recipe.task in PAIR_TASKS:
        codes = [code for part in sources for code in (part.source_language, part.target_language)]
    if recipe.task == "text_to_text":
        # A target may be no language, for example a label.
        codes = [code for code in codes if re.fullmatch(r"[a-z]{2}([-_]\w+)?", code)]
    return list(dict.fromkeys(codes))


def datasets_on_the_hub(recipe: Recipe, environment: Environment) -> set[str]:
    """Returns the datasets that were not local folders when the run began; none if the run did not record it."""
    found = zip(named_sources(recipe), environment.data or [], strict=False)
    names = {part.dataset for (_, part), noted in found if not noted.dataset_is_local}
    return {name for name in names if name not in (None, "pocket") and is_hub_id(str(name))}


def is_hub_id(name: str) -> bool:
    """Returns whether a name has the form of an id on the Hub, with or without a revision; a URL or path has not."""
    return re.fullmatch(r"([\w.-]+/)?[\w.-]+(@[\w./-]+)?", name) is not None


def text_name(part: SourceRecipe, split: str, on_hub: set[str]) -> str:
    """Returns the name of a split's text, or "" without one."""
    files: Files = getattr(part, f"{split}_files")
    if files is not None:
        # Two line-aligned files are of two languages, or of a text and its labels.
        sides = (part.source_language, part.target_language, "label")
        names = [files[side] for side in sides if side in files] if isinstance(files, dict) else [files]
        return ", ".join(names_only(f"{split}_files", names, on_hub))
    name = getattr(part, f"{split}_split")
    if part.dataset is None or name is None:
        return ""
    if part.dataset == "pocket":
        return f"the synthetic corpus built into hf_vaswani ({name})"
    config = f", {part.dataset_config}" if part.dataset_config else ""
    return f"{names_only('dataset', part.dataset, on_hub)}{config} ({name})"


def describe_texts(recipe: Recipe, environment: Environment, on_hub: set[str]) -> Iterator[str]:
    """Describes each source and each named set in one line: texts, numbers of pairs or lines, licence."""
    sources, unit = named_sources(recipe), TASKS[recipe.task].unit
    notes = [*(environment.data or []), *[Text(pairs={})] * len(sources)]
    for (name, part), noted in zip(sources, notes, strict=False):
        texts, pairs, held_out = [], noted.pairs, noted.held_out or {}
        # Only the splits of the sources count as training text.
        is_source = name not in recipe.validation_sets
        for split, title in (("train", "trained on"), ("validation", "validated on"), ("test", "tested on")):
            if (text := text_name(part, split, on_hub)) and (is_source or split != "train"):
                count = f"{pairs[split]:,} {unit}" if split in pairs else ""
                if split in held_out:
                    count += f", {held_out[split]:,} of them with a sentence of the training text"
                texts.append(f"{title} {text}" + (f" ({count})" if count else ""))
        licence = f"; licence of the text: {part.license}" if part.license else ""
        yield f"{name}: {'; '.join(texts)}{licence}."


def names_only(key: str, value: Any, on_hub: set[str]) -> Any:
    """Reduces the paths in the value of a recipe's key to the names of files and folders, and other URLs to paths."""
    if isinstance(value, dict):
        inner = key.endswith("_files")
        return {name: names_only(key if inner else name, each, on_hub) for name, each in value.items()}
    if isinstance(value, list):
        return [names_only(key, each, on_hub) for each in value]
    value, is_path = public(value), key.endswith("_files") or key in PATHS
    return Path(value).name if is_path and isinstance(value, str) and value not in on_hub else value
