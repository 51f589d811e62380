"""The verbs that take a recipe, beside train: backtranslate, distill, shortlist."""

import argparse
import contextlib
import copy
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import (
    add_recipe_verb,
    check_output,
    choose_device,
    load_recorded,
    print_table,
    require_file,
    take_device,
    text_lines,
    warn_split,
)
from .runs import check_trainable, train_recipe

if TYPE_CHECKING:
    from ..data.reading import Source
    from ..processes import Processes
    from ..recipe import Recipe
    from ..translation.growing_file import GrowingFile
    from .inputs import LoadedModels

# Descriptions of the verbs, for their --help.
BACKTRANSLATE = (
    "Translates text in the target language into synthetic sources, by the backtranslation section of a recipe. "
    "--device chooses where, e.g. --device cuda:1, and --tokens-per-batch the size of batches."
)
DISTILL = (
    "Translates the training text of a recipe with its teacher, and trains the recipe's model on the translations. "
    "--device chooses where the teacher computes, e.g. --device cuda:1, and --tokens-per-batch its batches."
)
SHORTLIST = (
    "Writes the likely translations of each entry of a model's vocabulary, from the training text of its recipe."
)
# In tokens: a pair that is longer on one side is no part of a shortlist.
MAX_TOKENS = 512


def add_verbs(verbs: Any) -> None:
    """Adds the verbs to the command line, each with its function under `run`."""
    add_recipe_verb(verbs, "backtranslate", "make source sentences for text in the target language", _backtranslate)
    add_recipe_verb(verbs, "distill", "train a small model on the translations of a large one", _distill)
    add_recipe_verb(verbs, "shortlist", "find the likely translations of each entry of the vocabulary", _shortlist)


# ---- backtranslate -----------------------------------------------------------------------------------------------


def _backtranslate(options: argparse.Namespace) -> None:
    from ..recipe_file import load_recipe

    place, arguments = take_device(options.arguments, "hf-vaswani backtranslate")
    recipe = load_recipe(arguments, "hf-vaswani backtranslate", BACKTRANSLATE)
    given = recipe.backtranslation
    for key, value in (("model", given.model), ("text", given.text), ("output", given.output)):
        if not value:
            raise ValueError(f"backtranslation.{key} must have a value, but it is {value!r}: --help explains it.")
    files, output = _files(recipe), Path(str(given.output))
    from ..interruption import exclusive, stopped_by_sigterm
    from ..processes import Processes

    processes = Processes()
    processes.on_main_process(lambda: _check_pairs(files, output))
    with stopped_by_sigterm("stopped. The same command goes on."), contextlib.ExitStack() as stack:
        processes.on_main_process(lambda: stack.enter_context(exclusive(output)))
        _write_pairs(recipe, files, output, processes, place)


def _files(recipe: "Recipe") -> list[Path]:
    text = recipe.backtranslation.text
    return [Path(name) for name in (text if isinstance(text, list) else [str(text)])]


def _check_pairs(files: list[Path], output: Path) -> None:
    for file in files:
        require_file(file)
        if output.is_file() and output.samefile(file):
            raise ValueError(f"backtranslation.output {output} is one of the files of backtranslation.text.")
    check_output(output, "backtranslation.output")


def _write_pairs(recipe: "Recipe", files: list[Path], output: Path, processes: Any, place: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    from ..files import digest
    from ..model.sentences_vaswani import MAX_POSITIONS
    from ..translation.backtranslation import (
        Backtranslator,
        check_direction,
        count_pairs,
        sentences_of,
        set_search,
        settings_of,
    )
    from ..translation.budgets import tokens_on
    from ..translation.growing_file import GrowingFile, grow

    given, languages = recipe.backtranslation, (recipe.data.source_language, recipe.data.target_language)
    name = str(given.model)
    loaded, (recorded,) = load_recorded([name], "backtranslation.model", choose_device(place.device))
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
        budget = place.tokens_per_batch or tokens_on(model.device)
        # Random numbers are drawn batch by batch. Records without a budget have that of a CPU.
        if given.method == "sampling" and budget != MAX_POSITIONS:
            settings["--tokens-per-batch"] = budget
        pairs = GrowingFile(output, settings, "backtranslation.output", languages, loaded.times)
        return pairs, pairs.begin()

    pairs, done = processes.on_main_process(begin)
    if done is not None:
        translate = Backtranslator(model, tokenizer, tag, recipe.seed, place.tokens_per_batch)
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


# ---- distill -----------------------------------------------------------------------------------------------------


def _distill(options: argparse.Namespace) -> None:
    from ..recipe_file import load_recipe

    place, arguments = take_device(options.arguments, "hf-vaswani distill")
    recipe = load_recipe(arguments, "hf-vaswani distill", DISTILL)
    if recipe.teacher.model is None:
        raise ValueError("teacher.model has no value: name the model that teaches; --help explains it.")
    from ..processes import Processes
    from ..training.distillation import with_pairs
    from ..training.loop import check_packages
    from ..translation.budgets import return_unused_memory

    # Other processes do not hear of a package that is missing.
    check_packages(recipe)
    processes = Processes()
    processes.on_main_process(lambda: _check_folder(recipe))
    # The translation takes hours: what is wrong with the student is said before.
    processes.on_main_process(lambda: check_trainable(with_pairs(recipe)))
    before = _teach(recipe, processes, place)
    # The student is trained where the teachers were. Cycles of references may still hold them, and torch their memory,
    # which neither other libraries nor graphs could have.
    gc.collect()
    return_unused_memory()
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


def _teach(recipe: "Recipe", processes: "Processes", place: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Loads the teachers, takes the steps, and returns the scores of the teacher by test set."""
    from ..interruption import exclusive, stopped_by_sigterm
    from ..training.distillation import PAIRS, teacher_folder

    folder = teacher_folder(recipe)
    with stopped_by_sigterm("stopped. The same command goes on."), contextlib.ExitStack() as stack:
        work = _Work(recipe, processes, place)
        # Nothing is written if a model cannot be loaded.
        processes.on_main_process(lambda: _make_folder(folder))
        processes.on_main_process(lambda: stack.enter_context(exclusive(folder / PAIRS)))
        return work.run()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"teacher.folder {folder} cannot be made: {error.strerror or error}.") from error


def _check_folder(recipe: "Recipe") -> None:
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

    def __init__(self, recipe: "Recipe", processes: "Processes", place: argparse.Namespace) -> None:
        from ..training.distillation import teacher_names
        from ..translation.backtranslation import check_direction, set_search

        self.recipe, self.processes, self.tokens_per_batch = recipe, processes, place.tokens_per_batch
        self.rows: list[dict[str, Any]] = []
        names, chosen = teacher_names(recipe.teacher), choose_device(place.device)
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
        times = self.teacher.times
        files = [
            self._source(number, Steps(self.recipe, name, part, times)) for number, (name, part) in enumerate(parts)
        ]
        counts = self.processes.on_main_process(lambda: write_pairs(self.recipe, files))
        self.rows.append({"step": "pairs", "lines": f"{sum(counts):,}", "time": ""})
        if self.processes.is_main_process:
            print_table(self.rows)
            sys.stdout.write("\n")
            sys.stdout.flush()
        teacher = self.teacher
        teacher.models[0].generation_config = self.own_search
        how = self.teachers, self.tags, self.tokens_per_batch
        return self.processes.on_main_process(
            lambda: teacher_scores(self.recipe, teacher.models, teacher.tokenizer, *how)
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
        how = self.tags[source, target], n_best, self.tokens_per_batch
        translate = Translation(teacher.models, teacher.tokenizer, *how)
        first = steps.translations(self.teachers, settings_of(teacher.models[0].generation_config), text)
        self._take(first, count, lambda: sentences_of(recipe, number), translate)
        lines_split = sum(self.processes.gather(translate.translator.lines_split))
        if self.processes.is_main_process:
            warn_split(lines_split, translate.translator.longest)
        choose = Choice(recipe.teacher.choose, steps.tokenize, recipe.evaluation.lowercase)
        second = self.processes.on_main_process(steps.chosen)
        self._take(second, count, first.lines, choose, is_quick=True)
        if self.backward is None:
            return second
        backward, tag = self.backward, self.tags[target, source]
        score = BackwardScore(backward.models[0], backward.tokenizer, tag, self.tokens_per_batch)
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

        def begin() -> "tuple[GrowingFile, int | None]":
            if is_quick:
                file.remove_if_other()
            return file, file.begin()

        processes, start = self.processes, time.monotonic()
        # All go on in the blocks that the main process has found.
        file, done = processes.on_main_process(begin)
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


# ---- shortlist ---------------------------------------------------------------------------------------------------


def _shortlist(options: argparse.Namespace) -> None:
    from ..recipe_file import load_recipe

    recipe = load_recipe(options.arguments, "hf-vaswani shortlist", SHORTLIST)
    from ..corpus.lexicon import likely_translations
    from ..data.tokenizer import load_tokenizer
    from ..files import atomic_write_text
    from ..model.configuration_vaswani import VaswaniConfig
    from ..recipe import PAIR_TASKS
    from ..run_folder import MODEL
    from ..training.distillation import with_teacher_text
    from ..training.preparation import task_data
    from ..translation.shortlist import FILE

    if recipe.task not in PAIR_TASKS:
        raise ValueError(f"A shortlist is for models that translate, but the task is {recipe.task!r}.")
    folder = Path(recipe.run_dir) / MODEL
    if not folder.is_dir():
        raise ValueError(f"{recipe.run_dir} has no model yet: train the recipe first, or name its run by --run_dir.")
    start = time.monotonic()
    recipe = with_teacher_text(recipe)
    tokenizer = load_tokenizer(str(folder))
    data = task_data(recipe)
    parts = [data.read_training(number) for number in range(len(data.sources))]
    sources, targets = _ids(parts, tokenizer, recipe)
    if not sources:
        raise ValueError(f"The training text has no pairs of at most {MAX_TOKENS} tokens with text on both sides.")
    settings, size = recipe.shortlist, VaswaniConfig.from_pretrained(folder).vocab_size
    frequent = [entry for entry, _ in Counter(chain.from_iterable(targets)).most_common(settings.frequent)]
    translations = likely_translations(sources, targets, size, settings.candidates, frequent)
    words = tokenizer.convert_ids_to_tokens(list(range(size)))
    content = {
        "frequent": [words[entry] for entry in frequent],
        "translations": {words[entry]: [words[other] for other in row] for entry, row in translations.items()},
    }
    atomic_write_text(folder / FILE, json.dumps(content, ensure_ascii=False, indent=0) + "\n")
    row = {
        "pairs": f"{len(sources):,}",
        "entries with translations": f"{len(translations):,} of {size:,}",
        "seconds": round(time.monotonic() - start, 1),
        "file": str(folder / FILE),
    }
    print_table([row])
    sys.stdout.flush()


def _ids(parts: "list[Source]", tokenizer: Any, recipe: "Recipe") -> tuple[list[list[int]], list[list[int]]]:
    """Returns the ids of evenly spaced pairs of all sources, without pairs that are too long or lack a side."""
    from ..data.encoding import encode_rows
    from ..data.tables import named_errors

    share = recipe.shortlist.max_pairs // len(parts) or 1
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for part in parts:
        pairs = part.splits["train"]
        if hasattr(pairs, "select"):
            count = min(share, len(pairs))
            pairs = pairs.select([i * len(pairs) // count for i in range(count)])
        rows = list(islice(named_errors(iter(pairs), part.origin("train")), share))
        texts = [[row[side] for row in rows] for side in ("source", "target")]
        encoded = encode_rows(texts[0], texts[1], range(len(rows)), tokenizer, part.source_prefix)
        for source, target in zip(*(encoded[f"{side}_ids"].to_pylist() for side in ("source", "target")), strict=True):
            # Their products would fill the memory.
            if max(len(source), len(target)) <= MAX_TOKENS:
                sources.append(source)
                targets.append(target)
    return sources, targets
