"""Checks of a recipe's values: ranges, forms, and keys that contradict each other."""

import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from typing import Any, get_args

from .recipe import (
    LABEL_TASKS,
    MEASURED_TASKS,
    PAIR_TASKS,
    RANKED_BY,
    SECTIONS,
    BacktranslationRecipe,
    EvaluationSetRecipe,
    HubRecipe,
    InitializeRecipe,
    ObjectiveRecipe,
    Part,
    Recipe,
    SourceRecipe,
    TeacherRecipe,
    TrainingRecipe,
    measure_name,
    options_of,
    shortened,
    shown,
    spelled,
)

# Prefixes of this form are language tags, and these are the special tokens of every vocabulary that is trained here.
LANGUAGE_TAG = re.compile(r"<2[^<>\s]+>")
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}

# Keys for which null is a value, although their default is not null.
OPTIONAL = {"validation_split", "test_split", "max_length_offset", "early_stopping"}


def check_ranges(recipe: Recipe) -> None:
    """
    Checks the values of a recipe, and that its keys agree with each other.

    Args:
        recipe ([`Recipe`]): the recipe.

    Raises:
        ValueError: a number is out of its range or not finite, a string has control characters, a value is missing, or
            two keys contradict each other; the message names the keys.
    """
    for name, value, part, default in _keys(recipe):
        if value is None and default is not None and part.name not in OPTIONAL:
            raise ValueError(f"{name} must have a value, for example its default {default!r}, but it is null.")
        _check_value(name, value, part.metadata["bounds"])
        if part.name == "prefix" and value is not None:
            _check_prefix(name, value)
    _check_agreement(recipe.training, has_head=recipe.task in (*LABEL_TASKS, "masked_lm"))
    _check_task(recipe)
    check_best_by(recipe, recipe.training.best_by, "training.best_by")
    _check_initialize(recipe.initialize)
    _check_adapter(recipe)
    _check_hub(recipe.hub, recipe.training)
    check_minima(recipe, "hub.min_bleu", "hub.min_score")
    check_baseline(recipe, "hub.not_worse_than")
    _check_sets(recipe)
    _check_backtranslation(recipe.backtranslation)
    _check_teacher(recipe.teacher, recipe.task)
    tokenizer = recipe.tokenizer
    kept = recipe.initialize.from_ is not None and recipe.initialize.vocabulary == "keep"
    if tokenizer.bpe_dropout and tokenizer.kind != "bpe" and tokenizer.path is None and not kept:
        raise ValueError(
            f"tokenizer.bpe_dropout ({tokenizer.bpe_dropout}) skips merges, which only tokenizer.kind 'bpe' has, but "
            f"the kind is {tokenizer.kind!r}."
        )
    if recipe.evaluation.max_length_offset is None and recipe.evaluation.max_length is None:
        raise ValueError("evaluation.max_length_offset and evaluation.max_length must not both be null.")


def _keys(recipe: Recipe) -> Iterator[tuple[str, Any, "Field[Any]", Any]]:
    """Yields each key of a recipe: its dotted name, its value, its field and its default."""
    sections: list[tuple[str, Any]] = [("", recipe)]
    sections += [(f"{name}.", getattr(recipe, name)) for name in SECTIONS]
    sections += [(f"more_data[{i}].", source) for i, source in enumerate(recipe.more_data)]
    sections += [(f"validation_sets.{name}.", source) for name, source in recipe.validation_sets.items()]
    for prefix, section in sections[:]:
        options = {name: getattr(section, name) for name in options_of(type(section))}
        sections += [(f"{prefix}{name}.", option) for name, option in options.items() if option is not None]
    for prefix, section in sections:
        defaults = type(section)()
        for part in fields(section):
            if prefix or part.name not in SECTIONS:
                name = spelled(prefix + part.name)
                yield name, getattr(section, part.name), part, getattr(defaults, part.name)


def _named_sources(recipe: Recipe) -> list[tuple[str, SourceRecipe | EvaluationSetRecipe]]:
    """Returns the sources of a recipe, training text or not, by the section that has them."""
    more = [(f"more_data[{i}]", part) for i, part in enumerate(recipe.more_data)]
    named = [(f"validation_sets.{name}", part) for name, part in recipe.validation_sets.items()]
    return [("data", recipe.data), *more, *named]


def apply_task_defaults(recipe: Recipe) -> None:
    """Fills the keys whose default depends on the task, unless they are given: changes the recipe."""
    if "training.best_by" not in recipe.given:
        recipe.training.best_by = RANKED_BY[recipe.task][0]
    # The papers of these objectives have none.
    if recipe.task in MEASURED_TASKS and "training.label_smoothing" not in recipe.given:
        recipe.training.label_smoothing = 0.0


def check_best_by(recipe: Recipe, measure: str, where: str) -> None:
    """
    Checks that the task of a recipe has a measure to rank by.

    Args:
        recipe ([`Recipe`]): the recipe.
        measure (`str`): the measure.
        where (`str`): name of the setting in the error message.

    Raises:
        ValueError: validations of that task do not have this measure.
    """
    known = RANKED_BY[recipe.task]
    if measure not in known:
        raise ValueError(
            f"{where} is {measure!r}, but task {recipe.task!r} has no {measure_name(measure)}: set it to "
            f"{' or '.join(map(repr, known))}."
        )


def _check_task(recipe: Recipe) -> None:
    """Refuses keys that the task of a recipe does not have, and blocks that do not fit."""
    training, model, objective = recipe.training, recipe.model, recipe.objective
    _check_labels(recipe)
    if recipe.task in PAIR_TASKS and objective != ObjectiveRecipe():
        raise ValueError(f"objective has no effect with task {recipe.task!r}, which is not about running text.")
    if not objective.noise or len(set(objective.noise)) < len(objective.noise):
        raise ValueError(f"objective.noise must name one or more kinds, each once, but it is {objective.noise}.")
    for name, value, part, default in _keys(recipe):
        tasks = part.metadata["tasks"]
        if tasks is not None and value != default and recipe.task not in tasks:
            kind = "pairs of texts" if tasks == PAIR_TASKS else f"the task {' or '.join(map(repr, tasks))}"
            raise ValueError(f"{name} is for {kind}, but task is {recipe.task!r}: leave the key out.")
    if recipe.task in PAIR_TASKS:
        return
    # A translation model that starts from a BERT keeps the key of that model.
    if model.lm_head_transform and recipe.task != "masked_lm":
        raise ValueError(f"model.lm_head_transform is for the task 'masked_lm', but task is {recipe.task!r}.")
    if objective.next_sentence and (recipe.task != "masked_lm" or objective.unit == "lines"):
        raise ValueError(
            "objective.next_sentence needs task 'masked_lm' and objective.unit 'blocks', because it cuts blocks at an "
            f"end of line, but they are {recipe.task!r} and {objective.unit!r}."
        )
    limits = {"training.tokens_per_batch": training.tokens_per_batch}
    if model.position_encoding == "learned":
        limits["model.max_position_embeddings"] = model.max_position_embeddings
    for key, limit in limits.items():
        if objective.block_length > limit:
            raise ValueError(f"objective.block_length ({objective.block_length}) must not be above {key} ({limit}).")


def _check_labels(recipe: Recipe) -> None:
    """Refuses what labelled text does not have."""
    if recipe.task not in LABEL_TASKS:
        return
    pairs = {part.pair_column is None for _, part in _named_sources(recipe)}
    if len(pairs) > 1:
        raise ValueError("pair_column must be set for all sources and validation sets, or for none.")
    for key, is_set, why in (
        ("data.streaming", recipe.data.streaming, "the labels must be known before the training begins"),
        ("data.target_tag", recipe.data.target_tag, "there is no target language"),
    ):
        if is_set:
            raise ValueError(f"{key} has no meaning for task {recipe.task!r}: {why}. Leave the key out.")


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
    if LANGUAGE_TAG.fullmatch(prefix):
        raise ValueError(
            f"{name} is {prefix!r}, which is a language tag: set data.target_tag instead, or choose another word, as "
            "in <bt>."
        )


def _check_agreement(training: TrainingRecipe, has_head: bool) -> None:
    """Refuses keys that are valid on their own, but contradict each other."""
    if training.schedule == "noam" and training.peak_learning_rate is not None:
        raise ValueError(
            f"training.peak_learning_rate ({training.peak_learning_rate}) has no effect with training.schedule "
            "'noam', whose peak is given by equation 3: set training.learning_rate_factor instead, or choose another "
            "schedule."
        )
    if training.schedule != "noam" and training.peak_learning_rate is None:
        raise ValueError(f"training.schedule {training.schedule!r} requires training.peak_learning_rate.")
    if training.schedule != "noam" and training.learning_rate_factor != 1:
        raise ValueError(
            f"training.learning_rate_factor ({training.learning_rate_factor}) has no effect with training.schedule "
            f"{training.schedule!r}: set training.peak_learning_rate instead."
        )
    if training.tokens_per_update is not None and training.accumulation_steps != 1:
        raise ValueError(
            f"training.accumulation_steps ({training.accumulation_steps}) has no effect with "
            f"training.tokens_per_update ({training.tokens_per_update}), from which it follows: leave one of them out."
        )
    if training.simcut is not None and training.r_drop is not None:
        raise ValueError("training.simcut and training.r_drop exclude each other: set one of them to null.")
    if len(set(training.freeze)) == len(get_args(Part)) and not has_head:
        raise ValueError(
            "training.freeze names all parts of the model, which leaves nothing to train: remove one of them."
        )
    if training.average_best is None and training.average_last > training.keep_last:
        raise ValueError(
            f"training.average_last ({training.average_last}) must not be above training.keep_last "
            f"({training.keep_last}): checkpoints are averaged from disk."
        )
    ranking = "average_best" if training.average_best is not None else "keep_best" if training.keep_best else None
    if ranking is not None and training.save_every % training.validate_every:
        raise ValueError(
            f"training.{ranking} ranks checkpoints by their validation, so training.save_every "
            f"({training.save_every}) must be a multiple of training.validate_every ({training.validate_every})."
        )


def _check_initialize(initialize: InitializeRecipe) -> None:
    """Refuses keys that have no effect without each other, and parts of nothing."""
    defaults = InitializeRecipe()
    for part in fields(initialize):
        value = getattr(initialize, part.name)
        if initialize.from_ is None and value != getattr(defaults, part.name):
            raise ValueError(f"initialize.{part.name} ({shown(value)}) has no effect without initialize.from.")
    if initialize.parts == []:
        raise ValueError("initialize.parts must have at least one part, but it is []: null takes all parts.")
    if initialize.add_tokens and initialize.vocabulary == "transfer":
        raise ValueError(
            "initialize.add_tokens extends the vocabulary of the model, but initialize.vocabulary 'transfer' "
            "exchanges it: leave one of them out."
        )
    if not all(token and token == token.strip() for token in initialize.add_tokens):
        raise ValueError(
            "initialize.add_tokens must not have blank entries or spaces around an entry, but it is "
            f"{initialize.add_tokens}."
        )
    if len(set(initialize.add_tokens)) < len(initialize.add_tokens):
        raise ValueError(f"initialize.add_tokens has an entry twice: {initialize.add_tokens}.")


def _check_adapter(recipe: Recipe) -> None:
    """Refuses keys that have no meaning for adapters."""
    training, initialize = recipe.training, recipe.initialize
    if training.adapter is None:
        return
    if initialize.from_ is None:
        raise ValueError("training.adapter requires initialize.from, the model that the adapters are added to.")
    reasons = [
        ("initialize.parts", initialize.parts is not None, "parts with random weights would stay random"),
        (
            "initialize.vocabulary 'transfer'",
            initialize.vocabulary == "transfer",
            "new embeddings would stay untrained",
        ),
        ("initialize.add_tokens", bool(initialize.add_tokens), "new embeddings would stay untrained"),
        ("training.freeze", bool(training.freeze), "adapters leave all weights as they are"),
        ("training.optimizer 'muon'", training.optimizer == "muon", "Muon is for whole matrices: use 'adam'"),
        ("training.ema_decay", training.ema_decay is not None, "the average of factors is not that of their products"),
        (
            "hub.every_n_checkpoints",
            recipe.hub.every_n_checkpoints is not None,
            "only the model at the end is published whole",
        ),
    ]
    for key, is_set, reason in reasons:
        if is_set:
            raise ValueError(f"training.adapter excludes {key}: {reason}.")


def _check_hub(hub: HubRecipe, training: TrainingRecipe) -> None:
    if hub.repo_id is None and hub.every_n_checkpoints is not None:
        raise ValueError("hub.every_n_checkpoints requires hub.repo_id, the repository to publish to.")
    if hub.repo_id is not None:
        check_repo_id(hub.repo_id, "hub.repo_id")
    check_branch(hub.revision, "hub.revision")
    if hub.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", hub.license):
        raise ValueError(
            f"hub.license must be a licence identifier of the Hub, such as apache-2.0, but it is {hub.license!r}."
        )
    if hub.every_n_checkpoints is not None and training.save_every % training.validate_every:
        raise ValueError(
            "hub.every_n_checkpoints publishes a checkpoint with the score of its validation, so training.save_every "
            f"({training.save_every}) must be a multiple of training.validate_every ({training.validate_every})."
        )


def check_minima(recipe: Recipe, min_bleu: str, min_score: str) -> None:
    """
    Checks that the minimum for publishing is one of a measure that the task has.

    Args:
        recipe ([`Recipe`]): the recipe.
        min_bleu (`str`), min_score (`str`): names of the two settings in the error message.

    Raises:
        ValueError: a minimum is set that the task does not have, or `training.best_by` is no share from 0 to 1.
    """
    hub, task, best_by = recipe.hub, recipe.task, recipe.training.best_by
    if task == "translation":
        if hub.min_score is not None:
            raise ValueError(f"{min_score} is for other tasks, but task is 'translation': set {min_bleu} instead.")
        return
    others = [measure for measure in RANKED_BY[task] if measure not in ("loss", "bleu")]
    if hub.min_bleu != HubRecipe().min_bleu and task not in PAIR_TASKS:
        advice = f"set {min_score} instead" if others else "leave it out"
        raise ValueError(f"{min_bleu} is for pairs of texts, but task is {task!r}: {advice}.")
    if hub.min_score is not None and best_by not in others:
        advice = f"set that to {' or '.join(map(repr, others))}, or leave" if others else "leave"
        raise ValueError(
            f"{min_score} ({hub.min_score}) is a share from 0 to 1, but training.best_by is {best_by!r}: {advice} "
            f"{min_score} out."
        )


def check_baseline(recipe: Recipe, where: str) -> None:
    """
    Checks that `hub.not_worse_than` has the form of a model to compare with.

    Args:
        recipe ([`Recipe`]): the recipe.
        where (`str`): name of the setting in the error message.

    Raises:
        ValueError: the task has no translations to compare; it is `start` in a run that starts from no model, or not
            from a whole one; or neither a word of the manual, a folder nor an id.
    """
    than = recipe.hub.not_worse_than
    if than is not None and recipe.task not in PAIR_TASKS:
        raise ValueError(f"{where} is for pairs of texts, but task is {recipe.task!r}: leave it out.")
    if than == "start" and recipe.initialize.from_ is None:
        raise ValueError(f"{where} is 'start', but the run starts from no model: set initialize.from.")
    if than == "start" and (recipe.initialize.parts is not None or recipe.initialize.vocabulary == "transfer"):
        key = "parts" if recipe.initialize.parts is not None else "vocabulary 'transfer'"
        raise ValueError(
            f"{where} is 'start', but with initialize.{key}, the run does not start from the whole model: name the "
            f"model itself, {recipe.initialize.from_}."
        )
    if than in (None, "start", "last_push") or (than and os.path.isdir(than)):
        return
    try:
        # A revision may follow the id.
        check_repo_id(str(than).partition("@")[0], where)
    except ValueError as error:
        raise ValueError(
            f"{where} must be start, last_push, the folder of a model or its id on the Hub, user/name, but it is "
            f"{shown(than)}."
        ) from error


def check_set_name(name: str) -> None:
    """Refuses a name that could not be part of a key, or of the name of a file."""
    if not re.fullmatch(r"[\w-]{1,60}", name):
        raise ValueError(
            f"validation_sets has the name {shown(name)}, but a name consists of at most 60 letters, digits, _ or -."
        )


def _check_sets(recipe: Recipe) -> None:
    """Refuses validation sets whose names are taken or not valid."""
    directions, kind = ["-".join(pair) for pair in recipe.language_pairs], "direction"
    if recipe.task in MEASURED_TASKS:
        directions, kind = [source for source, _ in recipe.language_pairs], "language"
    for name in recipe.validation_sets:
        check_set_name(name)
        if name in directions:
            raise ValueError(
                f"validation_sets.{name} has the name of a {kind}, by which the sets of data and more_data are "
                "called: choose another name."
            )


def _check_backtranslation(settings: BacktranslationRecipe) -> None:
    """Refuses settings of the other method, which would have no effect, and an output that no recipe could read."""
    defaults = BacktranslationRecipe()
    for name in ("num_beams",) if settings.method == "sampling" else ("top_k", "temperature"):
        value = getattr(settings, name)
        if value != getattr(defaults, name):
            raise ValueError(
                f"backtranslation.{name} ({value}) has no effect with backtranslation.method {settings.method!r}: "
                "leave it out, or choose the other method."
            )
    if settings.output is not None and not settings.output.endswith(".tsv"):
        raise ValueError(
            f"backtranslation.output must end in .tsv, by which a recipe recognizes its format, but it is "
            f"{shown(settings.output)}."
        )
    if settings.text == []:
        raise ValueError("backtranslation.text must have at least one file, but it is [].")


def _check_teacher(settings: TeacherRecipe, task: str) -> None:
    """Refuses settings of the teacher that contradict each other, or would have no effect."""
    defaults = TeacherRecipe()
    if settings.model is None:
        for part in fields(settings):
            if (value := getattr(settings, part.name)) != getattr(defaults, part.name):
                raise ValueError(f"teacher.{part.name} ({shown(value)}) has no effect without teacher.model: set it.")
        return
    if task != "translation":
        raise ValueError(f"teacher.model needs task 'translation', but the task is {task!r}.")
    for name in ("model", "text"):
        if getattr(settings, name) == []:
            raise ValueError(f"teacher.{name} must name at least one, but it is [].")
    n_best = settings.num_beams if settings.n_best is None else settings.n_best
    if n_best > settings.num_beams:
        raise ValueError(f"teacher.n_best ({n_best}) must not be above teacher.num_beams ({settings.num_beams}).")
    if settings.choose != "model" and n_best == 1:
        key = "num_beams" if settings.num_beams == 1 else "n_best"
        raise ValueError(
            f"teacher.choose is {settings.choose!r}, which needs translations to choose from, but teacher.{key} is 1."
        )
    if settings.backward_model is None and settings.drop_worst != defaults.drop_worst:
        raise ValueError(
            f"teacher.drop_worst ({settings.drop_worst}) has no effect without teacher.backward_model: set it."
        )


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
