"""The verb that teaches a small model by a large one: distill."""

import argparse
import contextlib
import copy
import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import (
    add_recipe_verb,
    choose_device,
    load_recorded,
    make_folder,
    print_table,
    require_file,
    take_device,
    warn_split,
)
from .runs import check_trainable, train_recipe

if TYPE_CHECKING:
    from ..processes import Processes
    from ..recipe import Recipe
    from ..translation.growing_file import GrowingFile
    from .inputs import LoadedModels

PURPOSE = (
    "Translates the training text of a recipe with its teacher, and trains the recipe's model on the translations. "
    "--device chooses where the teacher computes, e.g. --device cuda:1."
)


def add_verbs(verbs: Any) -> None:
    """Adds the verb to the command line, with its function under `run`."""
    add_recipe_verb(verbs, "distill", "train a small model on the translations of a large one", _distill)


def _distill(options: argparse.Namespace) -> None:
    from ..recipe_file import load_recipe

    device, arguments = take_device(options.arguments, "hf-vaswani distill")
    recipe = load_recipe(arguments, "hf-vaswani distill", PURPOSE)
    if recipe.teacher.model is None:
        raise ValueError("teacher.model has no value: name the model that teaches; --help explains it.")
    from ..processes import Processes
    from ..training.distillation import with_pairs
    from ..training.loop import check_packages

    # Other processes do not hear of a package that is missing.
    check_packages(recipe)
    processes = Processes()
    processes.on_main_process(lambda: _check_files(recipe))
    # The translation takes hours: what is wrong with the student is said before.
    processes.on_main_process(lambda: check_trainable(with_pairs(recipe)))
    before = _teach(recipe, processes, device)
    # The student is trained where the teachers were, which cycles of references may still hold.
    gc.collect()
    result = train_recipe(recipe)
    if result is None:
        return
    after = result.sets or dict.fromkeys(before, result.scores)
    rows = [
        {"test set": name, "": who, "BLEU": scores[name]["bleu"], "chrF": scores[name]["chrf"]}
        for name in before
        for who, scores in (("teacher", before), ("student", after))
    ]
    if rows:
        sys.stdout.write("\n")
        print_table(rows)


def _teach(recipe: "Recipe", processes: "Processes", device: str) -> dict[str, dict[str, float]]:
    """Loads the teachers, takes the steps, and returns the scores of the teacher by test set."""
    from ..interruption import exclusive, stopped_by_sigterm
    from ..training.distillation import PAIRS, teacher_folder

    folder = teacher_folder(recipe)
    with stopped_by_sigterm("stopped. The same command goes on."), contextlib.ExitStack() as stack:
        work = _Work(recipe, processes, device)
        # Nothing is written if a model cannot be loaded.
        processes.on_main_process(lambda: make_folder(folder, "teacher.folder"))
        processes.on_main_process(lambda: stack.enter_context(exclusive(folder / PAIRS)))
        return work.run()


def _check_files(recipe: "Recipe") -> None:
    from ..training.distillation import check_pairs_folder, teacher_folder, text_files

    folder = teacher_folder(recipe)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"teacher.folder {folder} is a file: name a folder.")
    if folder.resolve() == Path(recipe.run_dir).resolve():
        raise ValueError(f"teacher.folder {folder} is the folder of the run: name another one.")
    check_pairs_folder(recipe)
    for file in text_files(recipe.teacher):
        require_file(file)


class _Work:
    """The steps of all sources, which all processes take together."""

    def __init__(self, recipe: "Recipe", processes: "Processes", device: str) -> None:
        from ..training.distillation import teacher_names
        from ..translation.backtranslation import check_direction, set_search

        self.recipe, self.processes = recipe, processes
        self.rows: list[dict[str, Any]] = []
        names, chosen = teacher_names(recipe.teacher), choose_device(device)
        self.teacher, self.teachers = load_recorded(names, "teacher.model", chosen)
        self.own_search = copy.deepcopy(self.teacher.models[0].generation_config)
        set_search(self.teacher.models[0], "beam", num_beams=recipe.teacher.num_beams)
        # The language tags that sentences need, by direction.
        self.tags: dict[tuple[str, str], str] = {}
        for source, target in recipe.language_pairs:
            for name, model in zip(names, self.teacher.models, strict=True):
                tag = check_direction("teacher.model", name, model, self.teacher.tokenizer, source, target)
                self.tags[source, target] = tag
        self.backward: LoadedModels | None = None
        if (other := recipe.teacher.backward_model) is not None:
            self.backward, (self.backward_name,) = load_recorded([other], "teacher.backward_model", chosen)
            for source, target in recipe.language_pairs:
                model, tokenizer = self.backward.models[0], self.backward.tokenizer
                tag = check_direction("teacher.backward_model", other, model, tokenizer, target, source)
                self.tags[target, source] = tag

    def run(self) -> dict[str, dict[str, float]]:
        """Takes all steps, prints their table, and returns the scores of the teacher by test set."""
        from ..training.distillation import Steps, named_parts, teacher_scores, write_pairs

        parts = named_parts(self.recipe)
        files = [self._source(number, Steps(self.recipe, name, part)) for number, (name, part) in enumerate(parts)]
        counts = self.processes.on_main_process(lambda: write_pairs(self.recipe, files))
        self.rows.append({"step": "pairs", "lines": f"{sum(counts):,}", "time": ""})
        if self.processes.is_main_process:
            print_table(self.rows)
            sys.stdout.write("\n")
            sys.stdout.flush()
        teacher = self.teacher
        teacher.models[0].generation_config = self.own_search
        return self.processes.on_main_process(
            lambda: teacher_scores(self.recipe, teacher.models, teacher.tokenizer, self.teachers, self.tags)
        )

    def _source(self, number: int, steps: Any) -> "GrowingFile":
        """Takes the steps of one source, and returns the file of the last one."""
        from ..training.distillation import (
            BackwardScore,
            Choice,
            Translation,
            digest_of,
            sentences_of,
            size_of_lists,
        )
        from ..translation.backtranslation import settings_of

        recipe, teacher = self.recipe, self.teacher
        source, target = steps.part.source_language, steps.part.target_language
        text, count = self.processes.on_main_process(lambda: digest_of(sentences_of(recipe, number)))
        n_best = size_of_lists(recipe.teacher)
        translate = Translation(teacher.models, teacher.tokenizer, self.tags[source, target], n_best)
        first = steps.translations(self.teachers, settings_of(teacher.models[0].generation_config), text)
        self._take(first, count, lambda: sentences_of(recipe, number), translate)
        lines_split = sum(self.processes.gather(translate.translator.lines_split))
        if self.processes.is_main_process:
            warn_split(lines_split, translate.translator.longest)
        scoring = recipe.evaluation
        choose = Choice(recipe.teacher.choose, scoring.tokenize, scoring.lowercase)
        second = self.processes.on_main_process(steps.chosen)
        self._take(second, count, first.lines, choose, is_quick=True)
        if self.backward is None:
            return second
        score = BackwardScore(self.backward.models[0], self.backward.tokenizer, self.tags[target, source])
        third = self.processes.on_main_process(lambda: steps.scored(self.backward_name))
        self._take(third, count, second.lines, score, is_quick=True)
        return third

    def _take(
        self,
        file: "GrowingFile",
        count: int,
        items: Callable[[], Iterable[Any]],
        work: Callable[[int, list[Any]], Sequence[str]],
        is_quick: bool = False,
    ) -> None:
        """Takes a step: fills its file, unless it is complete."""
        from tqdm.auto import tqdm

        from ..translation.growing_file import grow

        def begin() -> int | None:
            if is_quick:
                file.remove_if_other()
            return file.begin()

        processes, start = self.processes, time.monotonic()
        done = processes.on_main_process(begin)
        if done is not None:
            name = file.path.name
            disable = None if processes.is_main_process else True
            with tqdm(initial=done, total=count, desc=name, unit=" lines", disable=disable) as bar:
                for written in grow(processes, file, items(), done, work):
                    bar.update(written)
            processes.on_main_process(file.finish)
        seconds = time.monotonic() - start
        took = "done before" if done is None else f"{seconds:,.0f} s" + (f" from line {done:,}" if done else "")
        self.rows.append({"step": file.path.name, "lines": f"{count:,}", "time": took})
