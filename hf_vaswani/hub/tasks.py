"""The parts of a model card that depend on the task: what the model is, and how it is used."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..files import read_json
from ..recipe import PAIR_TASKS, Recipe


@dataclass(frozen=True)
class CardTask:
    """
    The words of a card for the model of a task.

    Attributes:
        model (`str`): the kind of model, as in "a translation model".
        name (`str`): the name of the task.
        purpose (`str`): the objective, in words that follow "trained".
        hub_task (`str`): the Hub's id of the task.
        auto_class (`str`): the Auto class that loads the model.
        per (`str`): the loss is in nats per this unit.
        unit (`str`): the unit in which its text is counted.
        paper (`str`): the paper of the objective, besides Vaswani et al.
    """

    model: str
    name: str
    purpose: str
    hub_task: str
    auto_class: str
    per: str
    unit: str
    paper: str = ""


# The Hub files sequence-to-sequence models under text-generation, since it has no text2text-generation any more.
TASKS = {
    "translation": CardTask(
        "translation model", "Translation", "", "translation", "AutoModelForSeq2SeqLM", "target token", "pairs"
    ),
    "text_to_text": CardTask(
        "text-to-text model",
        "Text to text",
        "for several tasks, which are told apart by the beginning of a text",
        "translation",
        "AutoModelForSeq2SeqLM",
        "target token",
        "pairs",
        "T5",
    ),
    "masked_lm": CardTask(
        "masked language model",
        "Masked language modelling",
        "to predict masked tokens",
        "fill-mask",
        "AutoModelForMaskedLM",
        "masked token",
        "lines",
        "BERT",
    ),
    "causal_lm": CardTask(
        "causal language model",
        "Causal language modelling",
        "to predict each next token",
        "text-generation",
        "AutoModelForCausalLM",
        "token",
        "lines",
        "GPT",
    ),
    "span_corruption": CardTask(
        "sequence-to-sequence language model",
        "Span corruption",
        "to write the spans that a text lacks",
        "text-generation",
        "AutoModelForSeq2SeqLM",
        "target token",
        "lines",
        "T5",
    ),
    "denoise": CardTask(
        "sequence-to-sequence language model",
        "Denoising",
        "to restore corrupted text",
        "text-generation",
        "AutoModelForSeq2SeqLM",
        "target token",
        "lines",
        "BART",
    ),
    "classification": CardTask(
        "text classifier",
        "Text classification",
        "to label texts",
        "text-classification",
        "AutoModelForSequenceClassification",
        "text",
        "texts",
        "BERT",
    ),
    "tagging": CardTask(
        "token classifier",
        "Token classification",
        "to label the words of a text",
        "token-classification",
        "AutoModelForTokenClassification",
        "label",
        "texts",
        "BERT",
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
EXAMPLES = {
    "de": ("Die Katze", "schläft."),
    "en": ("The cat", "sleeps."),
    "fr": ("Le chat", "dort."),
}


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


def usage(recipe: Recipe, folder: Path, model_id: str, pin: str, is_trusted: bool = False) -> str:
    """
    Returns lines of Python that use a model.

    Args:
        recipe ([`Recipe`]): task, languages and prefix of the model.
        folder (`Path`): its folder.
        model_id (`str`): name that the lines load it by.
        pin (`str`): further arguments of the loading, beginning with a comma; "" for none.
        is_trusted (`bool`): whether transformers runs the code that is stored beside the weights.
    """
    load = f'"{model_id}"{pin}' + (", trust_remote_code=True" if is_trusted else "")
    text = json.dumps(example_of(recipe, folder), ensure_ascii=False)
    kind, pipeline = TASKS[recipe.task], pipeline_of(recipe.task)
    if pipeline is None:
        # Masks are special tokens, which the tokenizers of translation do not recognize in text.
        masks = "split_special_tokens=False, " if recipe.task == "denoise" else ""
        lines = [
            f"from transformers import {kind.auto_class}, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({load})",
            f"model = {kind.auto_class}.from_pretrained({load})",
            f'inputs = tokenizer({text}, {masks}return_tensors="pt")',
            "tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True)",
        ]
    else:
        # Only the first token of a word has a label.
        words = ', aggregation_strategy="first"' if recipe.task == "tagging" else ""
        options = ""
        if recipe.data.pair_column is not None:
            text = f'{{"text": {text}, "text_pair": {text}}}'
        if recipe.task in PAIR_TASKS and recipe.data.target_tag:
            options = f', tgt_lang="{recipe.data.target_language}"'
        elif recipe.task == "causal_lm":
            options = ", max_new_tokens=20"
        lines = [
            "from transformers import pipeline",
            "",
            f'{PIPELINES[pipeline]} = pipeline("{pipeline}", model={load}{words})',
            f"{PIPELINES[pipeline]}({text}{options})",
        ]
    return "\n".join(lines)


def example_of(recipe: Recipe, folder: Path) -> str:
    """Returns a text that the model of a recipe can read, with the prefix or the tag that it was trained with."""
    language, objective = recipe.data.source_language, recipe.objective
    begin, end = EXAMPLES.get(language, ("...", ""))
    if recipe.task == "causal_lm":
        text = begin
    elif recipe.task == "span_corruption":
        text = f"{begin} <extra_0>."
    elif recipe.task == "masked_lm" or (recipe.task == "denoise" and objective.noise != ["permutation"]):
        text = f"{begin} {_mask_token(folder)}."
    else:
        text = f"{begin} {end}".strip()
    if recipe.task not in PAIR_TASKS and recipe.data.target_tag:
        text = f"<2{language}> {text}"
    return text if recipe.data.prefix is None else f"{recipe.data.prefix} {text}"


def _mask_token(folder: Path) -> str:
    path = folder / "tokenizer_config.json"
    token = read_json(path).get("mask_token") if path.is_file() else None
    return str((token.get("content") if isinstance(token, dict) else token) or "<mask>")
