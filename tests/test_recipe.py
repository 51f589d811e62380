"""A recipe has the keys and the defaults that it should, and every preset is a model."""

import re
import runpy
from dataclasses import asdict, fields
from typing import Any, get_args, get_type_hints

import pytest
import torch
import transformers
from transformers import GenerationConfig

from hf_vaswani import VaswaniConfig
from hf_vaswani.conversion.settings import approximated_settings, unsupported_settings
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.model.rules_vaswani import DEFAULTS, SEARCH_SETTINGS
from hf_vaswani.recipe import (
    SECTIONS,
    DataRecipe,
    EvaluationRecipe,
    EvaluationSetRecipe,
    ModelRecipe,
    Recipe,
    TokenizerRecipe,
    TrainingRecipe,
    declared_keys,
    resume_marks,
)
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.training.tasks import config_of_task, model_class, search_of

from .conftest import CONFIGS, ROOT


def test_a_named_set_has_the_languages_of_the_data_unless_it_says_others() -> None:
    sets = {"a": EvaluationSetRecipe(dataset="x/y", validation_split=None), "b": EvaluationSetRecipe("en", "fr")}
    recipe = Recipe(data=DataRecipe(source_language="de", target_language="cs"), validation_sets=sets)
    pairs = {name: (part.source_language, part.target_language) for name, part in recipe.named_sets.items()}
    assert pairs == {"a": ("de", "cs"), "b": ("en", "fr")}
    assert recipe.named_sets["a"].dataset == "x/y" and recipe.named_sets["a"].validation_split is None
    assert recipe.language_pairs == [["de", "cs"]]


def test_flat_names_every_key_as_the_command_line_does() -> None:
    flat = Recipe().flat()
    assert flat["training.max_steps"] == 100_000
    assert flat["seed"] == 1
    assert sum(len(value) if name in SECTIONS else 1 for name, value in asdict(Recipe()).items()) == len(flat)


def test_every_key_says_whether_a_resumed_run_may_change_it() -> None:
    """A key without the mark is missing here, and `resume_marks` fails."""
    marks = resume_marks()
    assert set(Recipe().flat()) <= set(marks) and set(marks.values()) == {"fixed", "free", "place", "unread"}
    options = ("data.augment.", "training.simcut.", "training.r_drop.", "training.adapter.")
    assert {mark for name, mark in marks.items() if name.startswith(options)} == {"fixed"}
    # They change the last bits of numbers, as another processor does, or nothing.
    free = {"evaluation.tokens_per_batch", "training.compile", "training.gradient_checkpointing", "training.log_every"}
    assert {marks[key] for key in free} == {"free"} and marks["training.schedule"] == "fixed"


@pytest.mark.parametrize(
    ("tokens", "at_once", "processes", "batches"),
    [
        (None, 1000, 8, (1000, 3)),
        (25_000, 25_000, 1, (25_000, 1)),
        (25_000, 25_000, 8, (3125, 1)),
        (24_000, 1000, 8, (1000, 3)),
        # Rounded down: 2 processes x 4 batches of 875.
        (7000, 1000, 2, (875, 4)),
        (7001, 1000, 3, (777, 3)),
    ],
)
def test_an_update_has_the_same_size_in_any_number_of_processes(tokens, at_once, processes, batches) -> None:
    steps = 3 if tokens is None else 1
    training = TrainingRecipe(tokens_per_batch=at_once, accumulation_steps=steps, tokens_per_update=tokens)
    assert training.batches(processes) == batches


@pytest.mark.parametrize(
    ("tokens", "steps", "found", "batches"),
    [
        # On a CPU, the default.
        (None, 1, None, (25_000, 1)),
        (None, 2, 25_000, (25_000, 2)),
        (30_000, 1, None, (15_000, 1)),
        # An update has the size that it has there.
        (None, 2, 60_000, (50_000, 1)),
        (None, 2, 20_000, (16_666, 3)),
        (24_000, 1, 2000, (2000, 6)),
    ],
)
def test_auto_divides_an_update_and_does_not_change_it(tokens, steps, found, batches) -> None:
    training = TrainingRecipe(tokens_per_batch="auto", accumulation_steps=steps, tokens_per_update=tokens)
    assert training.batches(2 if tokens else 1, found) == batches
    number = TrainingRecipe(tokens_per_batch=1000, accumulation_steps=steps, tokens_per_update=tokens)
    assert number.batches(1, found) == number.batches(1)


def test_the_model_section_is_the_configuration() -> None:
    """Names and defaults are equal, except for settings that follow from the data, the tokenizer or transformers."""
    # Only converted fairseq models have a `position_offset`, and `language_pairs` follow from the data.
    decided = {"vocab_size", "use_cache", "is_encoder_decoder", "is_decoder", "position_offset", "language_pairs"}
    # `type_vocab_size` follows from the task, and the dropout of a classifier is that of its model.
    decided |= {"type_vocab_size", "classifier_dropout"}
    # Training chooses the layer at its end, and records the longest sentence that it has read.
    decided |= {"alignment_layer", "alignment_shift", "longest_sentence"}
    config = VaswaniConfig()
    own = {name for name in VaswaniConfig.__annotations__ if name not in decided and not name.endswith("token_id")}
    section = {field.name: field.default for field in fields(ModelRecipe)}
    assert set(section) == own
    assert section == {name: getattr(config, name) for name in section}


def test_the_kinds_of_vocabularies_are_those_that_can_be_trained() -> None:
    """The tokenizer is used without the training extra, so it cannot import the recipe's type."""
    assert get_type_hints(TokenizerRecipe)["kind"] == get_type_hints(train_tokenizer)["kind"]


def test_the_defaults_of_training_are_the_papers() -> None:
    """Sections 5.1 to 5.4 and 6.1, base model; but the search has rules that CTranslate2 follows as well."""
    training = TrainingRecipe()
    assert (training.max_steps, training.tokens_per_batch, training.accumulation_steps) == (100_000, 25_000, 1)
    assert (training.schedule, training.warmup_steps, training.learning_rate_factor) == ("noam", 4000, 1.0)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (training.label_smoothing, training.label_smoothing_over) == (0.1, "others")
    assert (training.weight_decay, training.clip_norm) == (0.0, None)
    assert (training.average_last, training.average_best) == (5, None)
    assert TokenizerRecipe() == TokenizerRecipe(kind="bpe", vocab_size=37_000, path=None, decoder_start="bos")
    assert EvaluationRecipe() == EvaluationRecipe(num_beams=4, length_penalty=0.6, max_length_offset=50)


def test_the_search_settings_of_a_recipe_are_rows_of_the_table_with_its_choices() -> None:
    keys = get_type_hints(EvaluationRecipe)
    assert keys.keys() & (vars(GenerationConfig()).keys() | DEFAULTS.keys()) <= SEARCH_SETTINGS.keys()
    assert search_of(EvaluationRecipe()).keys() == SEARCH_SETTINGS.keys() & keys.keys()
    for name, setting in SEARCH_SETTINGS.items():
        assert name not in keys or not setting.choices or set(get_args(keys[name])) == set(setting.choices)


def test_an_engine_follows_the_default_search_exactly() -> None:
    settings = GenerationConfig(**search_of(EvaluationRecipe()))
    assert not unsupported_settings(settings, "CTranslate2") and not approximated_settings(settings)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_loads_and_builds_its_model(path) -> None:
    assert built(load_recipe([str(path)])).num_parameters() > 0


def built(recipe: Recipe) -> Any:
    """Returns the model of a recipe, without memory for its weights."""
    settings = asdict(recipe.model) | config_of_task(recipe)
    with torch.device("meta"):
        return model_class(recipe)(VaswaniConfig(vocab_size=recipe.tokenizer.vocab_size, **settings))


def test_the_family_has_the_sizes_of_the_papers() -> None:
    """Those of BERT and GPT are compared with transformers' in tests/model/test_heads.py."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        theirs = {
            "bert_base": transformers.BertForPreTraining(transformers.BertConfig()),
            "bert_large": transformers.BertForPreTraining(transformers.BertConfig(**sizes)),
            "gpt": transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig()),
            "t5_small": transformers.T5ForConditionalGeneration(transformers.T5Config()),
        }
    ours = {name: built(load_recipe([str(ROOT / "configs" / "family" / f"{name}.yaml")])) for name in theirs}
    counts = {name: (ours[name].num_parameters(), theirs[name].num_parameters()) for name in theirs}
    for name in ("bert_base", "bert_large", "gpt"):
        assert counts[name][0] == counts[name][1], name
    # T5 has 8 x 32 relative positions in each stack, and no biases: none in 32 LayerNorms of 512, and none in 12
    # feed-forward networks of 2048 and 512.
    mine, its = counts["t5_small"]
    assert mine - its == 32 * 512 + 12 * (2048 + 512) - 2 * 8 * 32


def test_transformer_tiny_has_the_published_size() -> None:
    model = built(load_recipe([str(ROOT / "configs" / "multi30k_en_de.yaml"), "--tokenizer.vocab_size=9700"]))
    # The published 2.57 M include biases in the attention: 4 * 128 in each of 12.
    assert model.num_parameters() + 12 * 4 * 128 == pytest.approx(2.57e6, rel=0.01)


def test_the_reference_of_all_keys_is_up_to_date() -> None:
    """It is generated from hf_vaswani/recipe.py; an old one is replaced, and then to be committed."""
    path = ROOT / "docs" / "recipe.md"
    page = runpy.run_path(str(ROOT / "docs" / "generate_recipe.py"))["render"]()
    if path.read_text("utf-8") != page:
        path.write_text(page, encoding="utf-8")
        pytest.fail("docs/recipe.md was out of date, and was generated anew: commit it.")
    section = ""
    found = []
    for line in page.splitlines():
        if line.startswith("## "):
            section = "" if line == "## Top level" else f"{line[3:]}."
        if row := re.fullmatch(r"\| `([\w.]+)` \|(?: [^|]+ \|){2}[^|]* \| [A-Z`][^|]+\. \|", line):
            found.append(section + row[1])
    assert sorted(found) == sorted(name for name in declared_keys() if not name.startswith("more_data."))
