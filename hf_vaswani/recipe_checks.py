"""Checks of a recipe's values: ranges, forms, and keys that contradict each other."""

import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, is_dataclass
from typing import Any, get_args

from .metrics import measure_of
from .recipe import (
    FAMILIES,
    HEAD_TASKS,
    MATRIX_OPTIMIZERS,
    MEASURED_TASKS,
    RANKED_BY,
    Part,
    Recipe,
    keys_of,
    shortened,
    shown,
)

# The special tokens of every vocabulary that is trained here.
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def check_ranges(recipe: Recipe) -> None:
    """
    Checks the values of a recipe, and that its keys agree with each other.

    Args:
        recipe ([`Recipe`]): the recipe.

    Raises:
        ValueError: a number is out of its range or not finite, a string has control characters, a key is of another
            task, or two keys contradict each other; the message names the keys.
    """
    flat = recipe.flat()
    for name, value, part, default in _keys(recipe):
        tasks, needs = part.metadata["tasks"], part.metadata["needs"]
        _check_value(name, value, part.metadata["bounds"])
        if part.name == "prefix" and value is not None:
            _check_prefix(name, value)
        if value != default and tasks is not None and recipe.task not in tasks:
            raise ValueError(f"{name} is for {_named(tasks)}, but task is {recipe.task!r}: leave the key out.")
        if value != default and needs is not None and flat[needs] is None:
            raise ValueError(f"{name} ({shown(value)}) has no effect without {needs}: set it.")
    for rules in (_training_rules, _start_rules, _task_rules, _hub_rules, _other_rules):
        for is_broken, message in rules(recipe):
            if is_broken:
                raise ValueError(message)
    hub = recipe.hub
    if hub.repo_id is not None:
        check_repo_id(hub.repo_id, "hub.repo_id")
    check_branch(hub.revision, "hub.revision")
    if hub.not_worse_than not in (None, "start", "last_push") and not os.path.isdir(str(hub.not_worse_than)):
        try:
            # A revision may follow the id.
            check_repo_id(str(hub.not_worse_than).partition("@")[0], "")
        except ValueError as error:
            raise ValueError(
                "hub.not_worse_than must be start, last_push, the folder of a model or its id on the Hub, user/name, "
                f"but it is {shown(hub.not_worse_than)}."
            ) from error


def apply_task_defaults(recipe: Recipe) -> None:
    """Fills the keys whose default depends on the task, unless they are given: changes the recipe."""
    if "training.best_by" not in recipe.given:
        recipe.training.best_by = RANKED_BY[recipe.task][0]
    # The papers of these objectives have none.
    if recipe.task in MEASURED_TASKS and "training.label_smoothing" not in recipe.given:
        recipe.training.label_smoothing = 0.0


def _keys(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, "Field[Any]", Any]]:
    """Yields each key of a recipe or a part of it: its dotted name, its value, its field and its default."""
    kind: Any = type(section)
    defaults = kind()
    for name, (part, hint) in keys_of(kind).items():
        value, key = getattr(section, part.name), f"{prefix}{name}"
        if not is_dataclass(hint):
            yield key, value, part, getattr(defaults, part.name)
        below = {key: value}
        if isinstance(value, list):
            below = {f"{key}[{i}]": item for i, item in enumerate(value)}
        elif isinstance(value, dict):
            below = {f"{key}.{i}": item for i, item in value.items()}
        for inner, item in below.items():
            if is_dataclass(item):
                yield from _keys(item, f"{inner}.")


def _named(tasks: tuple[str, ...]) -> str:
    """Returns tasks as messages name them, a family by what it reads."""
    families = [family for family in FAMILIES if set(family) <= set(tasks)]
    others = [repr(task) for task in tasks if not any(task in family for family in families)]
    named = [FAMILIES[family] for family in families] + ([f"the task {' or '.join(others)}"] if others else [])
    return " or ".join(named)


def _check_value(name: str, value: Any, bounds: Mapping[str, float]) -> None:
    # A NaN compares false with every bound.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and not all(COMPARISONS[word](value, bound) for word, bound in bounds.items()):
        expected = " and ".join(f"{word.replace('_', ' ')} {bound:,}" for word, bound in bounds.items())
        raise ValueError(f"{name} must be {expected}, but it is {shown(value)}.")
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    texts = [part for part in parts if isinstance(part, str)]
    if any(re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text) for text in texts):
        raise ValueError(f"{name} must not contain control characters, but it is {shown(value)}.")


def _check_prefix(name: str, prefix: str) -> None:
    """Refuses a prefix that would not be encoded as it is written, or that means something else."""
    if not prefix or prefix != prefix.strip():
        raise ValueError(
            f"{name} must not be blank or have spaces around it, because one space follows it anyway, but it is "
            f"{shown(prefix)}: null is no prefix."
        )
    if prefix in SPECIAL_TOKENS:
        raise ValueError(f"{name} is {prefix!r}, a special token of the vocabulary: choose another word, as in <bt>.")
    # It loads torch, which the help of a recipe does without.
    from .model.sentences_vaswani import LANGUAGE_TAG

    if LANGUAGE_TAG.fullmatch(prefix):
        raise ValueError(
            f"{name} is {prefix!r}, which is a language tag: set data.target_tag instead, or choose another word, as "
            "in <bt>."
        )


# ---- Keys that are valid on their own, but contradict each other: whether they do, and what is said then ---------


def _training_rules(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    training = recipe.training
    is_noam, peak = training.schedule == "noam", training.peak_learning_rate
    yield (
        is_noam and peak is not None,
        f"training.peak_learning_rate ({peak}) has no effect with training.schedule 'noam', whose peak is given by "
        "equation 3: set training.learning_rate_factor instead, or choose another schedule.",
    )
    yield (
        not is_noam and peak is None,
        f"training.schedule {training.schedule!r} requires training.peak_learning_rate.",
    )
    yield (
        not is_noam and training.learning_rate_factor != 1,
        f"training.learning_rate_factor ({training.learning_rate_factor}) has no effect with training.schedule "
        f"{training.schedule!r}: set training.peak_learning_rate instead.",
    )
    yield (
        training.tokens_per_update is not None and training.accumulation_steps != 1,
        f"training.accumulation_steps ({training.accumulation_steps}) has no effect with training.tokens_per_update "
        f"({training.tokens_per_update}), from which it follows: leave one of them out.",
    )
    yield (
        training.simcut is not None and training.r_drop is not None,
        "training.simcut and training.r_drop exclude each other: set one of them to null.",
    )
    yield (
        len(set(training.freeze)) == len(get_args(Part)) and recipe.task not in HEAD_TASKS,
        "training.freeze names all parts of the model, which leaves nothing to train: remove one of them.",
    )
    yield (
        training.average_best is None and training.average_last > training.keep_last,
        f"training.average_last ({training.average_last}) must not be above training.keep_last "
        f"({training.keep_last}): checkpoints are averaged from disk.",
    )
    save, validate = training.save_every, training.validate_every
    ranking = "average_best" if training.average_best is not None else "keep_best" if training.keep_best else None
    yield (
        ranking is not None and save % validate > 0,
        f"training.{ranking} ranks checkpoints by their validation, so training.save_every ({save}) must be a "
        f"multiple of training.validate_every ({validate}).",
    )
    yield (
        recipe.hub.every_n_checkpoints is not None and save % validate > 0,
        "hub.every_n_checkpoints publishes a checkpoint with the score of its validation, so training.save_every "
        f"({save}) must be a multiple of training.validate_every ({validate}).",
    )
    measures = RANKED_BY[recipe.task]
    yield (
        training.best_by not in measures,
        f"training.best_by is {training.best_by!r}, but task {recipe.task!r} has no "
        f"{measure_of(training.best_by).title}: set it to {' or '.join(map(repr, measures))}.",
    )


def _start_rules(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    initialize, training = recipe.initialize, recipe.training
    added = initialize.add_tokens
    yield (
        initialize.parts == [],
        "initialize.parts must have at least one part, but it is []: null takes all parts.",
    )
    yield (
        bool(added) and initialize.vocabulary == "transfer",
        "initialize.add_tokens extends the vocabulary of the model, but initialize.vocabulary 'transfer' exchanges "
        "it: leave one of them out.",
    )
    yield (
        not all(token and token == token.strip() for token in added),
        f"initialize.add_tokens must not have blank entries or spaces around an entry, but it is {added}.",
    )
    yield len(set(added)) < len(added), f"initialize.add_tokens has an entry twice: {added}."
    if training.adapter is None:
        return
    yield (
        initialize.from_ is None,
        "training.adapter requires initialize.from, the model that the adapters are added to.",
    )
    untrained = "new embeddings would stay untrained"
    for key, is_set, reason in (
        ("initialize.parts", initialize.parts is not None, "parts with random weights would stay random"),
        ("initialize.vocabulary 'transfer'", initialize.vocabulary == "transfer", untrained),
        ("initialize.add_tokens", bool(added), untrained),
        ("training.freeze", bool(training.freeze), "adapters leave all weights as they are"),
        (
            f"training.optimizer {training.optimizer!r}",
            training.optimizer in MATRIX_OPTIMIZERS,
            "it is for whole matrices: use 'adam'",
        ),
        ("training.ema_decay", training.ema_decay is not None, "the average of factors is not that of their products"),
        (
            "hub.every_n_checkpoints",
            recipe.hub.every_n_checkpoints is not None,
            "only the model at the end is published whole",
        ),
    ):
        yield is_set, f"training.adapter excludes {key}: {reason}."


def _task_rules(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    objective = recipe.objective
    yield (
        not objective.noise or len(set(objective.noise)) < len(objective.noise),
        f"objective.noise must name one or more kinds, each once, but it is {objective.noise}.",
    )
    yield (
        objective.next_sentence and objective.unit == "lines",
        "objective.next_sentence needs objective.unit 'blocks', because it cuts blocks at an end of line, but the "
        "unit is 'lines'.",
    )
    limits: dict[str, int] = {}
    # With `auto`, the budget is measured later.
    if recipe.training.tokens_per_batch != "auto":
        limits["training.tokens_per_batch"] = recipe.training.tokens_per_batch
    if recipe.model.position_encoding == "learned":
        limits["model.max_position_embeddings"] = recipe.model.max_position_embeddings
    for key, limit in limits.items():
        yield (
            recipe.task in MEASURED_TASKS and objective.block_length > limit,
            f"objective.block_length ({objective.block_length}) must not be above {key} ({limit}).",
        )
    sources: list[Any] = [recipe.data, *recipe.more_data, *recipe.validation_sets.values()]
    yield (
        len({part.pair_column is None for part in sources}) > 1,
        "pair_column must be set for all sources and validation sets, or for none.",
    )
    directions, kind = ["-".join(pair) for pair in recipe.language_pairs], "direction"
    if recipe.task in MEASURED_TASKS:
        directions, kind = [source for source, _ in recipe.language_pairs], "language"
    for name in recipe.validation_sets:
        yield (
            not re.fullmatch(r"[\w-]{1,60}", name),
            f"validation_sets has the name {shown(name)}, but a name consists of at most 60 letters, digits, _ or -.",
        )
        yield (
            name in directions,
            f"validation_sets.{name} has the name of a {kind}, by which the sets of data and more_data are called: "
            "choose another name.",
        )


def _hub_rules(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    hub, initialize, best_by = recipe.hub, recipe.initialize, recipe.training.best_by
    yield (
        hub.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", hub.license),
        f"hub.license must be a licence identifier of the Hub, such as apache-2.0, but it is {hub.license!r}.",
    )
    shares = [measure for measure in RANKED_BY[recipe.task] if measure not in ("loss", "bleu")]
    advice = f"set that to {' or '.join(map(repr, shares))}, or leave" if shares else "leave"
    yield (
        hub.min_score is not None and best_by not in shares,
        f"hub.min_score ({hub.min_score}) is a share from 0 to 1, but training.best_by is {best_by!r}: {advice} "
        "hub.min_score out.",
    )
    is_start = hub.not_worse_than == "start"
    yield (
        is_start and initialize.from_ is None,
        "hub.not_worse_than is 'start', but the run starts from no model: set initialize.from.",
    )
    key = "parts" if initialize.parts is not None else "vocabulary 'transfer'"
    yield (
        is_start and (initialize.parts is not None or initialize.vocabulary == "transfer"),
        f"hub.not_worse_than is 'start', but with initialize.{key}, the run does not start from the whole model: name "
        f"the model itself, {initialize.from_}.",
    )


def _other_rules(recipe: Recipe) -> Iterator[tuple[bool, str]]:
    tokenizer, initialize, back, teacher = recipe.tokenizer, recipe.initialize, recipe.backtranslation, recipe.teacher
    is_kept = initialize.from_ is not None and initialize.vocabulary == "keep"
    yield (
        tokenizer.bpe_dropout > 0 and tokenizer.kind != "bpe" and tokenizer.path is None and not is_kept,
        f"tokenizer.bpe_dropout ({tokenizer.bpe_dropout}) skips merges, which only tokenizer.kind 'bpe' has, but the "
        f"kind is {tokenizer.kind!r}.",
    )
    yield (
        recipe.evaluation.max_length_offset is None and recipe.evaluation.max_length is None,
        "evaluation.max_length_offset and evaluation.max_length must not both be null.",
    )
    for name in ("num_beams",) if back.method == "sampling" else ("top_k", "temperature"):
        value = getattr(back, name)
        yield (
            value != getattr(type(back)(), name),
            f"backtranslation.{name} ({value}) has no effect with backtranslation.method {back.method!r}: leave it "
            "out, or choose the other method.",
        )
    yield (
        back.output is not None and not back.output.endswith(".tsv"),
        "backtranslation.output must end in .tsv, by which a recipe recognizes its format, but it is "
        f"{shown(back.output)}.",
    )
    texts = {"backtranslation.text": back.text, "teacher.model": teacher.model, "teacher.text": teacher.text}
    for key, value in texts.items():
        yield value == [], f"{key} must name at least one, but it is []."
    n_best = teacher.num_beams if teacher.n_best is None else teacher.n_best
    yield (
        n_best > teacher.num_beams,
        f"teacher.n_best ({n_best}) must not be above teacher.num_beams ({teacher.num_beams}).",
    )
    yield (
        teacher.choose != "model" and n_best == 1,
        f"teacher.choose is {teacher.choose!r}, which needs translations to choose from, but teacher."
        f"{'num_beams' if teacher.num_beams == 1 else 'n_best'} is 1.",
    )


# ---- Names on the Hub --------------------------------------------------------------------------------------------


def check_repo_id(repo_id: str, where: str) -> None:
    """
    Checks the id of a repository on the Hub, without asking the Hub.

    Args:
        repo_id (`str`): the id.
        where (`str`): its name in the error message.

    Raises:
        ValueError: the id is not valid.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") != 1:
            raise HFValidationError("it must contain one slash.")
    except HFValidationError as error:
        said = shortened(str(error), 200)
        raise ValueError(f"{where} must have the form user/name, but it is {shown(repo_id)}: {said}") from error


def check_branch(name: str, where: str) -> None:
    """
    Checks the name of a branch.

    Args:
        name (`str`): the name.
        where (`str`): its name in the error message.

    Raises:
        ValueError: git does not allow the name.
    """
    if not re.fullmatch(r"[\w][\w./-]*", name) or ".." in name or "//" in name or name.endswith(("/", ".", ".lock")):
        raise ValueError(f"{where} must be the name of a branch, such as main or v2, but it is {name!r}.")
