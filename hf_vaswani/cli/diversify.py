"""The verb that trains on the translations of several models of both directions: diversify."""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import add_recipe_verb, make_folder, print_table
from .runs import check_trainable

if TYPE_CHECKING:
    from ..recipe import Recipe

PURPOSE = (
    "Trains models of both directions on the pairs of a recipe, and the recipe's model on all their translations."
)


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    add_recipe_verb(verbs, "diversify", "train on translations by several models of both directions", _diversify)


def _diversify(options: argparse.Namespace) -> None:
    from ..recipe_file import load_recipe

    recipe = load_recipe(options.arguments, "hf-vaswani diversify", PURPOSE)
    from ..interruption import exclusive_file
    from ..run_folder import RESULT, read_result
    from ..training.diversification import (
        backtranslation_recipe,
        check_diversification,
        check_same,
        check_text,
        diversified_folder,
        final_recipe,
        members_of,
        recipe_of,
        write_texts,
    )

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "hf-vaswani diversify starts the processes of its trainings itself: start it without a launcher, and name "
            "the launcher in diversification.launcher."
        )
    check_diversification(recipe)
    settings, folder = recipe.diversification, diversified_folder(recipe)
    launcher = _launcher(settings.launcher)
    if folder.resolve() == Path(recipe.run_dir).resolve():
        raise ValueError(f"diversification.folder {folder} is the folder of the run: name another one.")
    members = members_of(recipe)
    # The trainings take hours: what is wrong with the last one, or with the text, is said before.
    check_trainable(final_recipe(recipe))
    check_text(recipe)
    for member in members:
        check_same(member, settings.num_beams)
    make_folder(folder, "diversification.folder")
    with exclusive_file(folder / "recipes"):
        write_texts(recipe)
        for member in members:
            run = Path(member.recipe.run_dir)
            _run(launcher, "train", member.recipe, recipe_of(member), run / RESULT)
            translation = backtranslation_recipe(member, settings.num_beams)
            _run(launcher, "backtranslate", translation, recipe_of(member, is_translation=True), member.output)
        _run(launcher, "train", final_recipe(recipe), folder / "final.yaml", Path(recipe.run_dir) / RESULT)
    runs = {member.name: Path(member.recipe.run_dir) for member in members} | {"diversified": Path(recipe.run_dir)}
    results = {name: read_result(run) for name, run in runs.items()}
    rows = [
        {"model": name, "BLEU": result.bleu, "chrF": result.chrf, "folder": str(result.model)}
        for name, result in results.items()
        if result.bleu is not None
    ]
    if rows:
        sys.stdout.write("\n")
        print_table(rows)


def _launcher(command: str | None) -> list[str]:
    """Returns the words of the command that starts a module."""
    try:
        words = [sys.executable] if command is None else shlex.split(command)
    except ValueError as error:
        raise ValueError(f"diversification.launcher is {command!r}, which is no command: {error}.") from error
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"diversification.launcher is {command!r}, which is no command here.")
    return words


def _run(launcher: list[str], verb: str, recipe: "Recipe", path: Path, result: Path) -> None:
    """Writes a recipe, and runs a verb with it, which does nothing again that is done and leaves a file."""
    from ..files import atomic_write_text

    atomic_write_text(path, recipe.as_yaml())
    sys.stdout.write(f"\nhf-vaswani {verb} {path}\n")
    sys.stdout.flush()
    # Its own lines go where these do.
    child = subprocess.Popen([*launcher, "-m", "hf_vaswani.cli", verb, str(path)], stdout=sys.__stdout__)
    with _signals_passed_on(child):
        code = child.wait()
    if code:
        raise ValueError(f"hf-vaswani {verb} {path} ended with exit code {code}: see its own message.")
    if not result.is_file():
        raise ValueError(
            f"hf-vaswani {verb} {path} ended without an error, and without {result}: does diversification.launcher, "
            f"{shlex.join(launcher)!r}, run the command behind it?"
        )


@contextlib.contextmanager
def _signals_passed_on(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """
    Waits for a child that Ctrl-C, SIGTERM or SIGUSR1 stops, so that it leaves a checkpoint, and then stops, too. The
    child gets SIGTERM for both of the latter, because launchers pass on no SIGUSR1.
    """
    from ..interruption import STOPS, Interrupted

    received: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        # A terminal sends Ctrl-C to both.
        if number != signal.SIGINT:
            child.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, *STOPS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Interrupted("stopped. The same command goes on.", 128 + received[0])
