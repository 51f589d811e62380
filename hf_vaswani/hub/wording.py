"""The wording of a model card: what it says of the task and of the text of a run, without folders and secrets."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import read_json
from ..model.sentences_vaswani import language_tag
from ..recipe import LABEL_TASKS, PAIR_TASKS, Files, Recipe, SourceRecipe
from ..records import Environment, Text, public


@dataclass(frozen=True)
class CardTask:
    """
    The words of a card for the model of a task.

    Attributes:
        model (`str`): the kind of model, as in "a translation model".
        name (`str`): the name of the task.
        purpose (`str`): the objective, in words that follow "trained".
        hub_task (`str`): the Hub's id of the task.
        per (`str`): the loss is in nats per this unit.
        paper (`str`): the paper of the objective, besides Vaswani et al.
        auto_class (`str`): the Auto class that loads the model.
    """

    model: str
    name: str
    purpose: str
    hub_task: str
    per: str
    paper: str = ""
    auto_class: str = "AutoModelForSeq2SeqLM"


# The Hub files sequence-to-sequence models under text-generation, since it has no text2text-generation any more.
TASKS = {
    "translation": CardTask("translation model", "Translation", "", "translation", "target token"),
    "text_to_text": CardTask(
        "text-to-text model",
        "Text to text",
        "for several tasks, which are told apart by the beginning of a text",
        hub_task="translation",
        per="target token",
        paper="T5",
    ),
    "masked_lm": CardTask(
        "masked language model",
        "Masked language modelling",
        "to predict masked tokens",
        hub_task="fill-mask",
        per="masked token",
        paper="BERT",
        auto_class="AutoModelForMaskedLM",
    ),
    "causal_lm": CardTask(
        "causal language model",
        "Causal language modelling",
        "to predict each next token",
        hub_task="text-generation",
        per="token",
        paper="GPT",
        auto_class="AutoModelForCausalLM",
    ),
    "span_corruption": CardTask(
        "sequence-to-sequence language model",
        "Span corruption",
        "to write the spans that a text lacks",
        hub_task="text-generation",
        per="target token",
        paper="T5",
    ),
    "denoise": CardTask(
        "sequence-to-sequence language model",
        "Denoising",
        "to restore corrupted text",
        hub_task="text-generation",
        per="target token",
        paper="BART",
    ),
    "classification": CardTask(
        "text classifier",
        "Text classification",
        "to label texts",
        hub_task="text-classification",
        per="text",
        paper="BERT",
        auto_class="AutoModelForSequenceClassification",
    ),
    "tagging": CardTask(
        "token classifier",
        "Token classification",
        "to label the words of a text",
        hub_task="token-classification",
        per="label",
        paper="BERT",
        auto_class="AutoModelForTokenClassification",
    ),
}
# The pipelines of transformers, and how the examples call them.
PIPELINES = {
    "translation": "translator",
    "fill-mask": "fill",
    "text-generation": "generator",
    "text-classification": "classifier",
    "token-classification": "tagger",
}
# The examples are not from the run's text, which may be private.
EXAMPLES = {"de": ("Die Katze", "schläft."), "en": ("The cat", "sleeps."), "fr": ("Le chat", "dort.")}
# Keys of recipes, and their sections, whose strings may be paths.
PATHS = (
    *("dataset", "path", "run_dir", "recipe", "from", "not_worse_than"),
    *("model", "text", "output", "folder", "backward_model"),
)


# ---- The task ----------------------------------------------------------------------------------------------------


def pipeline_of(task: str) -> str | None:
    """Returns the pipeline for the model of a task, or `None` if transformers has no pipeline that loads it."""
    kind = TASKS[task]
    is_loaded = task in PAIR_TASKS or kind.auto_class != "AutoModelForSeq2SeqLM"
    return kind.hub_task if is_loaded else None


def purpose_of(recipe: Recipe) -> str:
    """Returns what a model was trained for, in words that follow "trained"; "" for translation."""
    more = " and whether one segment continues the other" if recipe.objective.next_sentence else ""
    return TASKS[recipe.task].purpose + more


def papers_of(recipe: Recipe, stacks: tuple[str, ...]) -> set[str]:
    """Returns the papers that a card cites besides Vaswani et al., by the names of their models."""
    if stacks == ("decoder",):
        return {"GPT"}
    if recipe.task == "denoise":
        return {"MASS" if noise == "fragment" else "BART" for noise in recipe.objective.noise}
    return {TASKS[recipe.task].paper} - {""}


def options_of(recipe: Recipe) -> str:
    """Returns the further arguments of the example's call, beginning with a comma; "" for none."""
    if recipe.task in PAIR_TASKS and recipe.data.target_tag:
        return f', tgt_lang="{recipe.data.target_language}"'
    # Masks are special tokens, which the tokenizers of translation do not recognize in text.
    more = {"causal_lm": ", max_new_tokens=20", "denoise": ", split_special_tokens=False"}
    return more.get(recipe.task, "")


def example_of(recipe: Recipe, folder: Path) -> str:
    """
    Returns what the example's call gives to the model, as Python writes it: a text with the prefix or the tag that the
    model was trained with, or a pair of texts.
    """
    language, objective = recipe.data.source_language, recipe.objective
    begin, end = EXAMPLES.get(language, ("...", ""))
    text = f"{begin} {end}".strip()
    if recipe.task == "causal_lm":
        text = begin
    elif recipe.task == "span_corruption":
        text = f"{begin} <extra_0>."
    elif recipe.task == "masked_lm" or (recipe.task == "denoise" and objective.noise != ["permutation"]):
        text = f"{begin} {_mask_token(folder)}."
    if recipe.task not in PAIR_TASKS and recipe.data.target_tag:
        text = f"{language_tag(language)} {text}"
    if recipe.data.prefix is not None:
        text = f"{recipe.data.prefix} {text}"
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if recipe.data.pair_column is None else f'{{"text": {quoted}, "text_pair": {quoted}}}'


def _mask_token(folder: Path) -> str:
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("mask_token") if path.is_file() else None
    return str((token.get("content") if isinstance(token, dict) else token) or "<mask>")


# ---- The text ----------------------------------------------------------------------------------------------------


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
    sources = named_sources(recipe)
    unit = "pairs" if recipe.task in PAIR_TASKS else "texts" if recipe.task in LABEL_TASKS else "lines"
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
