"""Two directions of made-up text, for the tests of pairs and of what all families share."""

from collections import Counter
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_vaswani.data.reading import Source
from hf_vaswani.recipe import DataRecipe, EvaluationSetRecipe, Recipe, SourceRecipe, TokenizerRecipe, TrainingRecipe
from hf_vaswani.training.preparation import batch_order, task_data

# 50 lines of the first source and then 30 of the second, of which these have text on both sides.
GERMAN = set(range(1, 51)) - {4}
FRENCH = set(range(51, 81)) - {51, 80}


def prepared(recipe: Recipe) -> tuple[list[Source], PreTrainedTokenizerBase]:
    """Reads the text of a recipe, and makes its tokenizer."""
    sources = task_data(recipe).read()
    return sources, task_data(recipe).make_tokenizer(sources)


def build_updates(recipe: Recipe, sources: Any, tokenizer: Any, labels: Any = (), *processes: int) -> Any:
    """Builds the updates of a recipe for one of several processes: their number, and the index of this one."""
    return task_data(recipe).build_updates(sources, tokenizer, batch_order(recipe, *processes), labels)


def write(folder: Path, language: str, count: int, empty: tuple[int, ...] = ()) -> dict[str, str]:
    """Writes two files of `count` lines, digits and digits in words; the lines in `empty` have no words."""
    lines = [" ".join(str(number * 7919)) for number in range(1, count + 1)]
    other = ["" if n in empty else f"{language}: {line}" for n, line in enumerate(lines, start=1)]
    files = {"en": folder / f"{language}.{count}.en", language: folder / f"{language}.{count}.{language}"}
    for path, text in zip(files.values(), (lines, other), strict=True):
        path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return {name: str(path) for name, path in files.items()}


def two_directions(folder: Path, weight: float = 1.0, **keys: object) -> Recipe:
    german, french = write(folder, "de", 50, empty=(4,)), write(folder, "fr", 30, empty=(1, 30))
    small = {language: write(folder, language, 5) for language in ("de", "fr")}
    return Recipe(
        data=DataRecipe(train_files=german, validation_files=small["de"], target_tag=True, **keys),
        more_data=[
            SourceRecipe(
                target_language="fr",
                train_files=french,
                validation_files=small["fr"],
                test_files=small["fr"],
                weight=weight,
            )
        ],
        tokenizer=TokenizerRecipe(vocab_size=280),
        training=TrainingRecipe(tokens_per_batch=200),
    )


def epochs(updates, count: int = 1) -> list[Counter[int]]:
    """Counts each pair in each of the first epochs."""
    found: list[Counter[int]] = [Counter() for _ in range(count)]
    for batches, position in updates.after(updates.start):
        for batch in batches:
            found[position["epoch"]].update(batch["numbers"].tolist())
        if position == {"epoch": count - 1, "update": len(updates.sampler.updates())}:
            return found
    raise AssertionError("Updates have no end.")


def named(folder: Path, **sets: Any) -> Recipe:
    """A recipe of two directions with tags, and sets by name."""
    recipe = two_directions(folder)
    recipe.validation_sets = {name: EvaluationSetRecipe(**keys) for name, keys in sets.items()}
    return recipe


def own_text(folder: Path) -> dict[str, str]:
    files = {}
    for language in ("en", "de"):
        files[language] = str(folder / f"own.{language}")
        Path(files[language]).write_text(f"{language}: one\n{language}: two\n")
    return files
