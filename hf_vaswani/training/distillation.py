"""
Sequence-level knowledge distillation (Kim and Rush, 2016): a student learns the translations of a teacher in place of
the targets of its training text.

Each source of the recipe, `data` and `more_data`, has its steps in the folder of the teacher, each with a file that
the next one reads: the n-best lists of the teacher, the translation chosen of each, its score under a model of the
other direction, and at last the pairs, which a training reads as its text.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.pairs import evaluation_texts
from ..files import atomic_folder, atomic_write_text, digest, find_damage, read_json, read_lines, tsv_cell
from ..metrics import score, sentence_scorer, tokenizer_of
from ..model.sentences_vaswani import longest_source
from ..recipe import Recipe, SourceRecipe, TeacherRecipe
from ..run_folder import unchangeable
from ..translation.backtranslation import settings_of
from ..translation.batches import log_probabilities
from ..translation.growing_file import GrowingFile, different_settings
from ..translation.lines import LineTranslator
from .preparation import task_data

# The folder that a training reads: two files for each source, and a record of their settings.
PAIRS = "pairs"
RECORD = "record.json"
# Scores of the teacher.
SCORES = "teacher.json"


# ---- The text of the student -------------------------------------------------------------------------------------


def teacher_folder(recipe: Recipe) -> Path:
    """Returns the folder of the teacher's translations."""
    return Path(recipe.teacher.folder or f"{recipe.run_dir}.teacher")


def with_teacher_text(recipe: Recipe) -> Recipe:
    """
    Exchanges the training text of a recipe for the pairs of its teacher.

    Args:
        recipe ([`Recipe`]): the experiment.

    Returns:
        [`Recipe`]: with the files of the pairs as its training text, or as it was if it has no teacher.

    Raises:
        ValueError: there are no pairs yet, or they are of other settings.
    """
    if recipe.teacher.model is None:
        return recipe
    place = teacher_folder(recipe) / PAIRS
    advice = "Run hf-vaswani distill with this recipe first."
    if not (place / RECORD).is_file():
        raise ValueError(f"teacher.model is set, but {place} has no translations of the teacher yet. {advice}")
    try:
        given, recorded = pairs_settings(recipe), read_json(place / RECORD)
        damage = find_damage(place, recorded.get("files", {}))
    except ValueError as error:
        raise ValueError(f"{error} {advice}") from error
    if damage:
        raise ValueError(f"{damage}. {advice}")
    names = [name for name in given if name != "sources" or not _has_teacher_text(recipe)]
    if changes := different_settings(*({name: record.get(name) for name in names} for record in (recorded, given))):
        raise ValueError(f"{place} has translations of other settings: {changes}. {advice}")
    return with_pairs(recipe)


def with_pairs(recipe: Recipe) -> Recipe:
    """Returns a recipe with the files of its teacher's pairs as its training text, whether they are there or not."""
    own, *more = pairs_files(recipe)
    more_data = [replace(part, train_files=files) for part, files in zip(recipe.more_data, more, strict=True)]
    found = replace(recipe, data=replace(recipe.data, train_files=own), more_data=more_data)
    found.given = recipe.given
    return found


def pairs_files(recipe: Recipe) -> list[dict[str, str]]:
    """Returns the two files of pairs of each source, by language."""
    place = teacher_folder(recipe) / PAIRS
    return [
        {language: str(place / f"{name}.{language}") for language in (part.source_language, part.target_language)}
        for name, part in named_parts(recipe)
    ]


def named_parts(recipe: Recipe) -> list[tuple[str, SourceRecipe]]:
    """Returns the sources of a recipe with their names in the folder of the teacher."""
    return [("data", recipe.data), *((f"more_data.{i}", part) for i, part in enumerate(recipe.more_data))]


def pairs_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the settings of the pairs in the words of the recipe, as JSON would return them."""
    keys = ["source_language", "target_language", "dataset", "dataset_config", "train_split", "train_files"]
    keys += ["source_column", "target_column"]
    sources = [{key: getattr(part, key) for key in keys} for _, part in named_parts(recipe)]
    settings = {key: value for key, value in unchangeable(recipe).items() if key.startswith("teacher.")}
    found: dict[str, Any] = json.loads(json.dumps(settings | {"sources": sources}))
    return found


def _has_teacher_text(recipe: Recipe) -> bool:
    """Returns whether the training text of a recipe is the teacher's already, as in the record of a run."""
    return [part.train_files for _, part in named_parts(recipe)] == pairs_files(recipe)


# ---- What the teacher translates ---------------------------------------------------------------------------------

# A source sentence, and its target in the training text, which may be missing.
Sentence = tuple[str, str | None]


def sentences_of(recipe: Recipe, number: int) -> Iterator[Sentence]:
    """
    Reads the sentences of one source of a recipe for its teacher.

    Args:
        recipe ([`Recipe`]): the experiment.
        number (`int`): 0 is `data`, 1 the first source of `more_data`.

    Yields:
        `tuple[str, str | None]`: source and target of each training pair with a source, then the lines of
        `teacher.text` without targets if the source is `data`.

    Raises:
        ValueError: the training text is that of a teacher, or cannot be read.
        FileNotFoundError: a file or dataset does not exist.
    """
    if _has_teacher_text(recipe):
        raise ValueError(
            f"The training text of this recipe, in {teacher_folder(recipe) / PAIRS}, is what the teacher wrote: give "
            "the recipe of the student, not the record of its run."
        )
    batches = task_data(recipe).read_training(number).batches("train")
    rows = (row for batch in batches for row in zip(batch["source"], batch["target"], strict=True))
    known: Iterator[Sentence] = ((tsv_cell(text).strip(), tsv_cell(target).strip()) for text, target in rows)
    more: Iterator[Sentence] = iter(())
    if number == 0:
        more = ((tsv_cell(line).strip(), None) for file in text_files(recipe.teacher) for line in read_lines(file))
    return (sentence for sentence in chain(known, more) if sentence[0])


def text_files(teacher: TeacherRecipe) -> list[Path]:
    """Returns the files of `teacher.text`."""
    text = teacher.text
    return [Path(name) for name in ([] if text is None else text if isinstance(text, list) else [text])]


def teacher_names(teacher: TeacherRecipe) -> list[str]:
    """Returns the names of the teacher's models."""
    return teacher.model if isinstance(teacher.model, list) else [str(teacher.model)]


def size_of_lists(teacher: TeacherRecipe) -> int:
    """Returns the number of translations of each sentence that are kept."""
    return teacher.n_best or teacher.num_beams


def digest_of(sentences: Iterable[Sentence]) -> tuple[str, int]:
    """Returns the SHA-256 of sentences, in hexadecimal, and their number."""
    found, count = hashlib.sha256(), 0
    for count, (source, target) in enumerate(sentences, start=1):  # noqa: B007 (the number of the last one)
        found.update(f"{source}\t{target}\n".encode("utf-8", "surrogatepass"))
    return found.hexdigest(), count


# ---- Steps -------------------------------------------------------------------------------------------------------


class Translation:
    """
    First step: n-best lists of a block of sentences, as lines of JSON.

    Args:
        models (`list` of [`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): teacher or ensemble, with the
            search set in the generation config of the first one.
        tag (`str`): language tag to put in front of each sentence, or nothing.
        n_best (`int`): size of the lists.
        tokens_per_batch (`int`, *optional*): token budget of a batch; by default that of the device.
    """

    def __init__(
        self,
        models: list[Any],
        tokenizer: PreTrainedTokenizerBase,
        tag: str,
        n_best: int,
        tokens_per_batch: int | None = None,
    ) -> None:
        is_greedy = (models[0].generation_config.num_beams or 1) == 1
        lists = None if is_greedy else n_best
        self.translator = LineTranslator(models, tokenizer, lists, tokens_per_batch=tokens_per_batch)
        self.tag = tag

    def __call__(self, block: int, sentences: list[Sentence]) -> list[str]:
        """Returns `{"source": ..., "target": ..., "translations": [[score, text], ...]}` for each sentence."""
        texts = [f"{self.tag} {source}" if self.tag else source for source, _ in sentences]
        return [
            json.dumps(
                {
                    "source": source,
                    "target": target,
                    "translations": [[round(score, 4), tsv_cell(text).strip()] for score, text in candidates],
                },
                ensure_ascii=False,
            )
            for (source, target), candidates in zip(sentences, self.translator(texts), strict=True)
        ]


class Choice:
    """
    Second step: the translation that the student learns, of a block of n-best lists.

    Args:
        choose (`str`): `"model"`, `"bleu"` or `"chrf"`.
        tokenize (`str`), lowercase (`bool`): how sentences are scored, see [`score`].
    """

    COLUMNS = ("rank", "score")

    def __init__(self, choose: str, tokenize: str, lowercase: bool) -> None:
        self.scorer = None if choose == "model" else sentence_scorer(choose, tokenize, lowercase)

    def __call__(self, block: int, lines: list[str]) -> list[str]:
        """Returns source, translation, its place in the list from 1, and its score by `choose`, by tabs."""
        return [self._entry(json.loads(line)) for line in lines]

    def _entry(self, entry: dict[str, Any]) -> str:
        candidates, target = entry["translations"], entry["target"]
        scores = [score for score, _ in candidates]
        place = 0
        if self.scorer is not None and target:
            scores = [self.scorer(text, target) for _, text in candidates]
            # Ties go to the translation that the teacher ranks higher.
            place = max(range(len(scores)), key=scores.__getitem__)
        return f"{entry['source']}\t{candidates[place][1]}\t{place + 1}\t{scores[place]:.4f}"


class BackwardScore:
    """
    Third step: the log-probability per token of each source of a block, given its translation.

    Args:
        model ([`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): model of the other direction.
        tag (`str`): language tag to put in front of each translation, or nothing.
        tokens_per_batch (`int`, *optional*): token budget of a batch; by default that of the device.
    """

    COLUMNS = ("log_probability",)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tag: str,
        tokens_per_batch: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.tag, self.tokens_per_batch = model, tokenizer, tag, tokens_per_batch
        self.longest = longest_source([model], tokenizer)

    def __call__(self, block: int, lines: list[str]) -> list[str]:
        """Returns source, translation and log-probability in nats, by tabs; -inf if one is empty or too long."""
        pairs = [line.split("\t")[:2] for line in lines]
        scores = [-math.inf] * len(pairs)
        texts = [f"{self.tag} {text}" if self.tag else text for _, text in pairs]
        chosen = [i for i, pair in enumerate(pairs) if all(pair) and self._fits(pair[0]) and self._fits(texts[i])]
        sides = [texts[i] for i in chosen], [pairs[i][0] for i in chosen]
        found = log_probabilities(self.model, self.tokenizer, *sides, self.tokens_per_batch)
        for i, (log_probability, tokens) in zip(chosen, found, strict=True):
            scores[i] = log_probability / tokens
        return [f"{source}\t{text}\t{score:.4f}" for (source, text), score in zip(pairs, scores, strict=True)]

    def _fits(self, text: str) -> bool:
        return len(self.tokenizer(text, verbose=False)["input_ids"]) <= self.longest


@dataclass(frozen=True)
class Steps:
    """
    The files of the steps of one source.

    Args:
        recipe ([`Recipe`]): the experiment.
        name (`str`): name of the source, from [`named_parts`].
        part ([`SourceRecipe`]): the source.
        times (`int`): how many times as much text as a CPU the teacher's device works on at a time.
    """

    recipe: Recipe
    name: str
    part: SourceRecipe
    times: int = 1

    @property
    def tokenize(self) -> str:
        """sacreBLEU's tokenizer for the translations."""
        return tokenizer_of(self.recipe.evaluation.tokenize, self.part.target_language)

    def translations(self, teachers: Sequence[str], search: dict[str, Any], text: str) -> GrowingFile:
        """
        Returns the file of the first step.

        Args:
            teachers (`Sequence[str]`): digests of the models.
            search (`dict[str, Any]`): settings of their search.
            text (`str`): digest of the sentences.
        """
        settings = {
            "languages": [self.part.source_language, self.part.target_language],
            "teacher.model": list(teachers),
            "teacher.num_beams": self.recipe.teacher.num_beams,
            "teacher.n_best": size_of_lists(self.recipe.teacher),
            "search": search,
            "text": f"SHA-256 {text}",
        }
        return self._file("translations.jsonl", settings)

    def chosen(self) -> GrowingFile:
        """Returns the file of the second step, once the first one is complete."""
        settings = {
            "translations": digest(self._path("translations.jsonl")),
            "teacher.choose": self.recipe.teacher.choose,
            "evaluation.tokenize": self.tokenize,
            "evaluation.lowercase": self.recipe.evaluation.lowercase,
        }
        return self._file("chosen.tsv", settings, Choice.COLUMNS)

    def scored(self, model: str) -> GrowingFile:
        """Returns the file of the third step, once the second one is complete; `model` is a digest."""
        settings = {"chosen": digest(self._path("chosen.tsv")), "teacher.backward_model": model}
        return self._file("scored.tsv", settings, BackwardScore.COLUMNS)

    def _file(self, name: str, settings: dict[str, Any], columns: Sequence[str] = ()) -> GrowingFile:
        languages = (self.part.source_language, self.part.target_language)
        names = (*languages, *columns) if columns else ()
        return GrowingFile(self._path(name), settings, "teacher.folder", names, self.times)

    def _path(self, name: str) -> Path:
        return teacher_folder(self.recipe) / f"{self.name}.{name}"


# ---- The pairs ---------------------------------------------------------------------------------------------------


def kept(file: GrowingFile, drop_worst: float) -> Iterator[tuple[str, str]]:
    """
    Drops the worst pairs of a scored file, and those whose translation is empty.

    Args:
        file ([`GrowingFile`]): complete file of the second or third step.
        drop_worst (`float`): share of the pairs to drop, by their last column; ties are dropped from the end.

    Yields:
        `tuple[str, str]`: source and translation of the others, in their order.
    """
    dropped: set[int] = set()
    if drop_worst:
        scores = [float(line.rsplit("\t", 1)[1]) for line in file.lines()]
        order = sorted(range(len(scores)), key=lambda i: (scores[i], -i))
        dropped = set(order[: int(drop_worst * len(scores))])
    for i, line in enumerate(file.lines()):
        source, translation = line.split("\t")[:2]
        if i not in dropped and translation:
            yield source, translation


def check_pairs_folder(recipe: Recipe) -> None:
    """Raises a `ValueError` if the folder of the pairs has files that no distillation has written."""
    place = teacher_folder(recipe) / PAIRS
    if not place.exists():
        return
    names = {path.name for path in place.iterdir()} if place.is_dir() else {place.name}
    # Those of a recipe with more sources, or with other languages, are called alike.
    foreign = sorted(name for name in names - {RECORD} if not re.fullmatch(r"(data|more_data\.\d+)\..+", name))
    if foreign or (names and RECORD not in names):
        raise ValueError(
            f"{place} is to have the pairs of the student, but it has something else already, "
            f"{sorted(foreign or names)[0]!r}: name another teacher.folder."
        )


def write_pairs(recipe: Recipe, files: Sequence[GrowingFile]) -> list[int]:
    """
    Writes the pairs that a training reads, unless they are there and intact.

    Args:
        recipe ([`Recipe`]): the experiment.
        files (`Sequence[GrowingFile]`): the file of the last step of each source.

    Returns:
        `list[int]`: number of pairs of each source.

    Raises:
        ValueError: no pair is left, or the folder has other files.
        OSError: the files cannot be written.
    """
    check_pairs_folder(recipe)
    place, teacher = teacher_folder(recipe) / PAIRS, recipe.teacher
    record = pairs_settings(recipe) | {"steps": [digest(file.path) for file in files]}
    # A damaged record is no reason to stop: the pairs are written again in no time.
    with suppress(ValueError):
        found = read_json(place / RECORD)
        is_same = {key: found.get(key) for key in record} == record
        if is_same and find_damage(place, found["files"]) is None:
            return list(found["pairs"])
    share = teacher.drop_worst if teacher.backward_model is not None else 0.0
    counts: list[int] = []
    digests: dict[str, str] = {}
    with atomic_folder(place) as temporary:
        for file, names in zip(files, pairs_files(recipe), strict=True):
            sides = [temporary / Path(name).name for name in names.values()]
            with sides[0].open("w", encoding="utf-8") as sources, sides[1].open("w", encoding="utf-8") as targets:
                count = 0
                for count, (source, target) in enumerate(kept(file, share), start=1):  # noqa: B007 (the number of the last one)
                    sources.write(f"{source}\n")
                    targets.write(f"{target}\n")
            if not count:
                raise ValueError(f"{file.path} has no pair for the student: all translations are empty.")
            counts.append(count)
            digests |= {side.name: digest(side) for side in sides}
        content = json.dumps(record | {"pairs": counts, "files": digests}, indent=2, ensure_ascii=False)
        (temporary / RECORD).write_text(content + "\n", encoding="utf-8")
    return counts


# ---- The teacher's scores ----------------------------------------------------------------------------------------


def teacher_scores(
    recipe: Recipe,
    models: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    teachers: Sequence[str],
    tags: Mapping[tuple[str, str], str],
    tokens_per_batch: int | None = None,
) -> dict[str, dict[str, float]]:
    """
    Scores the teacher on the test sets of the recipe by its own search settings, unless its scores are there.

    Args:
        recipe ([`Recipe`]): the experiment.
        models (`list` of [`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerBase`]): teacher or ensemble.
        teachers (`Sequence[str]`): digests of the models.
        tags (`Mapping[tuple[str, str], str]`): language tag, or nothing, in front of each sentence, by direction.
        tokens_per_batch (`int`, *optional*): token budget of a batch; by default that of the device.

    Returns:
        `dict[str, dict[str, float]]`: BLEU and chrF by test set.
    """
    sources = [source for source in task_data(recipe).read_evaluation() if "test" in source.splits]
    directions = [[source.source_language, str(source.target_language)] for source in sources]
    # The teacher translates the directions of the training text, and may know no other.
    sets = {
        text.name: (pair, text.plain, text.target)
        for text, pair in zip(evaluation_texts(sources, "test"), directions, strict=True)
        if pair in recipe.language_pairs
    }
    by_set = {name: tokenizer_of(recipe.evaluation.tokenize, pair[1]) for name, (pair, _, _) in sets.items()}
    lowercase = recipe.evaluation.lowercase
    scoring = {"tokenize": " and ".join(dict.fromkeys(by_set.values())), "lowercase": lowercase}
    text = hashlib.sha256(json.dumps(sets).encode()).hexdigest()
    record = {"models": list(teachers), "text": f"SHA-256 {text}"} | scoring
    record["search"] = settings_of(models[0].generation_config)
    path = teacher_folder(recipe) / SCORES
    with suppress(ValueError):
        found = read_json(path)
        if {key: found.get(key) for key in record} == record:
            return dict(found["sets"])
    scores: dict[str, dict[str, float]] = {}
    translate = LineTranslator(models, tokenizer, tokens_per_batch=tokens_per_batch)
    for name, (pair, plain, references) in sets.items():
        tag = tags[pair[0], pair[1]]
        lines = [f"{tag} {line}" if tag and line.strip() else line for line in plain]
        translations = [candidates[0][1] for candidates in translate(lines)]
        scores[name] = score(translations, references, by_set[name], lowercase, metrics=("bleu", "chrf"))
        del scores[name]["signatures"]
    atomic_write_text(path, json.dumps(record | {"sets": scores}, indent=2) + "\n")
    return scores
