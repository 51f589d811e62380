"""
Data diversification (Nguyen et al., 2020): the recipes of its models, and the text that they translate.

A recipe becomes one for the models of its own direction, one for those of the other direction, and one for the model
that learns the pairs and all translations. Trainings and translations are those of the verbs `train` and
`backtranslate`.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..data.sources import read_training_source
from ..data.tables import named_errors
from ..files import atomic_lines, tsv_cell
from ..recipe import HubRecipe, Recipe, SourceRecipe
from ..recipe_file import load_recipe
from ..run_folder import CHANGEABLE

# Keys of a recipe that change no finished model, that its models do not have, or that follow from the folder.
OF_THE_END = ("max_steps", "average_last", "average_best", "best_by", "best_set", "patience")
HARMLESS = (
    *(CHANGEABLE - {f"training.{key}" for key in OF_THE_END}),
    *("hub.", "diversification.", "shortlist."),
    *(f"backtranslation.{key}" for key in ("model", "text", "output")),
)


@dataclass(frozen=True)
class Member:
    """
    One model that translates the pairs.

    Attributes:
        name (`str`): such as `"forward.1"`.
        recipe ([`Recipe`]): what it is trained by, its folder included.
        text (`Path`): the side of the pairs that it translates.
        output (`Path`): its translations, with their sources, as a source of pairs.
    """

    name: str
    recipe: Recipe
    text: Path
    output: Path


def diversified_folder(recipe: Recipe) -> Path:
    """Returns the folder for models and translations."""
    return Path(recipe.diversification.folder or f"{recipe.run_dir}.diversified")


def check_diversification(recipe: Recipe) -> None:
    """Raises a `ValueError` if a recipe has pairs of several directions, or a start that not all models can have."""
    if recipe.task != "translation":
        raise ValueError(f"Diversification needs task 'translation', but the task is {recipe.task!r}.")
    if len(recipe.language_pairs) > 1:
        pairs = ", ".join("-".join(pair) for pair in recipe.language_pairs)
        raise ValueError(f"Diversification needs sources of one direction, but those of the recipe are {pairs}.")
    if recipe.initialize.from_ is not None and recipe.diversification.directions != "forward":
        raise ValueError(
            f"initialize.from is {recipe.initialize.from_}, from which models of the other direction cannot start: "
            "set diversification.directions: forward, or start from random weights."
        )
    if recipe.teacher.model is not None:
        raise ValueError("A recipe has either a teacher (teacher.model) or a diversification: remove one of them.")


def members_of(recipe: Recipe) -> list[Member]:
    """Returns the models that translate the pairs, those of the recipe's own direction first."""
    settings, folder = recipe.diversification, diversified_folder(recipe)
    (source, target) = recipe.language_pairs[0]
    members = []
    for direction, language in (("forward", source), ("backward", target)):
        if settings.directions not in ("both", direction):
            continue
        for i in range(settings.models):
            name = f"{direction}.{i + 1}"
            own = copy.deepcopy(recipe) if direction == "forward" else reversed_recipe(recipe)
            own.run_dir, own.seed, own.hub = str(folder / name), recipe.seed + i, HubRecipe()
            members.append(Member(name, own, folder / f"text.{language}", folder / f"{name}.tsv"))
    return members


def reversed_recipe(recipe: Recipe) -> Recipe:
    """Returns a recipe of the other direction, on the same text."""
    found = copy.deepcopy(recipe)
    found.given = recipe.given
    # Languages of a validation set that are not given are those of `data`, which change sides as well.
    for part in (found.data, *found.more_data, *found.validation_sets.values()):
        for name in ("language", "column"):
            sides = [getattr(part, f"{side}_{name}") for side in ("target", "source")]
            part.__dict__ |= dict(zip((f"source_{name}", f"target_{name}"), sides, strict=True))
    return found


def final_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe of the model that learns the pairs and all translations."""
    found = copy.deepcopy(recipe)
    found.given = recipe.given
    source, target = recipe.language_pairs[0]
    outputs = [str(member.output) for member in members_of(recipe)]
    found.more_data += [
        SourceRecipe(source_language=source, target_language=target, train_files=output, prefix=recipe.data.prefix)
        for output in outputs
    ]
    return found


def backtranslation_recipe(member: Member, num_beams: int) -> Recipe:
    """Returns the recipe by which `hf-vaswani backtranslate` translates the text of a model."""
    found = reversed_recipe(member.recipe)
    settings = found.backtranslation
    settings.model, settings.text, settings.output = member.recipe.run_dir, str(member.text), str(member.output)
    settings.method, settings.num_beams, settings.top_k, settings.temperature = "beam", num_beams, None, 1.0
    return found


def recipe_of(member: Member, is_translation: bool = False) -> Path:
    """Returns the file with the recipe of a model's training, or of its translation."""
    return member.output.with_name(f"{member.name}{'.translation' * is_translation}.yaml")


def check_same(member: Member, num_beams: int) -> None:
    """
    Checks that a model that is trained or translates already is one of this recipe: with more updates, for example,
    its training would go on, and its translations would be those of another model.

    Raises:
        ValueError: its recipe was another one.
    """
    for is_translation, recipe in ((False, member.recipe), (True, backtranslation_recipe(member, num_beams))):
        path = recipe_of(member, is_translation)
        if not path.is_file():
            continue
        try:
            there = load_recipe([str(path)]).flat()
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error} Name another diversification.folder.") from error
        here = recipe.flat()
        different = [key for key in here if there[key] != here[key] and not key.startswith(HARMLESS)]
        if different:
            changes = ", ".join(f"{key} was {there[key]!r} and is {here[key]!r}" for key in different)
            raise ValueError(
                f"The models in {path.parent} are those of other settings: {changes}. Name another "
                "diversification.folder."
            )


def check_text(recipe: Recipe) -> None:
    """Raises a `ValueError` or a `FileNotFoundError` if the training text cannot be opened."""
    for part in (recipe.data, *recipe.more_data):
        read_training_source(recipe, part)


def write_texts(recipe: Recipe) -> None:
    """
    Writes the sides of the training pairs that are to be translated, each sentence once.

    Raises:
        ValueError: the text cannot be read, has no pairs, or is another one than that of models that are trained.
        FileNotFoundError: a file or dataset does not exist.
    """
    members = members_of(recipe)
    is_begun = any(recipe_of(member).is_file() for member in members)
    for path in dict.fromkeys(member.text for member in members):
        lines = [f"{sentence}\n" for sentence in dict.fromkeys(_sentences(recipe, path.suffix.removeprefix(".")))]
        if is_begun and path.is_file():
            with path.open(encoding="utf-8", newline="\n") as file:
                if list(file) != lines:
                    raise ValueError(
                        f"By {path}, the models in its folder learned another text than the recipe has now: give the "
                        "text back, or name another diversification.folder."
                    )
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_lines(path) as file:
            file.writelines(lines)


def _sentences(recipe: Recipe, language: str) -> Iterator[str]:
    """Yields the sentences of one side of all training pairs."""
    for part in (recipe.data, *recipe.more_data):
        source = read_training_source(recipe, part)
        side = "source" if part.source_language == language else "target"
        for batch in named_errors(source.pairs["train"].iter(1000), source.origin("train")):
            yield from (text for cell in batch[side] if (text := tsv_cell(cell).strip()))
