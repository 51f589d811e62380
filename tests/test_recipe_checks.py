"""Values out of their range, and keys that contradict each other, are named."""

import math
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

import pytest

from hf_vaswani.data.tokenizer import SPECIAL_TOKENS
from hf_vaswani.recipe import (
    LABEL_TASKS,
    MEASURED_TASKS,
    PAIR_TASKS,
    TEXT_TASKS,
    Recipe,
    SourceRecipe,
    Task,
    declared_keys,
)
from hf_vaswani.recipe_checks import check_ranges
from hf_vaswani.recipe_file import load_recipe

from .conftest import assert_refused, write_recipe


def test_models_to_compare_with(tmp_path) -> None:
    for than in ("last_push", "user/model@v2", str(tmp_path)):
        assert load_recipe(["--run_dir=x", f"--hub.not_worse_than={than}"]).hub.not_worse_than == than
    started = load_recipe(["--run_dir=x", "--initialize.from=user/model", "--hub.not_worse_than=start"])
    assert started.hub.not_worse_than == "start"


def numbers(recipe: Recipe) -> Iterator[tuple[str, Any, Field]]:
    """Yields every numeric key of a recipe: its name, its section and its field."""
    sections = {"": recipe} | {f"{part.name}.": getattr(recipe, part.name) for part in fields(Recipe)}
    sections |= {f"more_data[{i}].": source for i, source in enumerate(sections.pop("more_data."))}
    for prefix, section in sections.items():
        if hasattr(section, "__dataclass_fields__"):
            hints = get_type_hints(type(section))
            for part in fields(section):
                kinds = getattr(hints[part.name], "__args__", (hints[part.name],))
                if int in kinds or float in kinds:
                    yield prefix + part.name, section, part


def test_every_number_of_a_recipe_has_a_finite_range() -> None:
    recipe = Recipe(more_data=[SourceRecipe()])
    check_ranges(recipe)
    names = []
    for name, section, part in numbers(recipe):
        names.append(name)
        before = getattr(section, part.name)
        for value in (math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e30, 99999999999999999999):
            setattr(section, part.name, value)
            with pytest.raises(ValueError) as error:
                check_ranges(recipe)
            assert str(error.value).startswith(f"{name} must be "), value
            assert len(str(error.value)) < 200
        setattr(section, part.name, before)
    check_ranges(recipe)
    assert {"seed", "data.weight", "more_data[0].weight", "model.d_model", "hub.min_bleu"} < set(names)


def test_keys_that_agree_are_accepted(tmp_path) -> None:
    text = (
        "training: {schedule: cosine, peak_learning_rate: 0.001, average_best: 9, validate_every: 50, keep_last: 1}\n"
    )
    training = load_recipe([write_recipe(tmp_path, text)]).training
    assert (training.schedule, training.peak_learning_rate, training.average_best) == ("cosine", 0.001, 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training: {max_steps: 0}\n", ["training.max_steps", "0"]),
        ("training: {average_last: 9, keep_last: 3}\n", ["average_last (9)", "keep_last (3)"]),
        ("training: {average_best: 2, save_every: 500}\n", ["average_best", "save_every (500)", "every (1000)"]),
        (
            "training: {tokens_per_update: 9, accumulation_steps: 2}\n",
            ["training.accumulation_steps (2)", "tokens_per_update (9)", "leave one of them out"],
        ),
        ("training: {schedule: cosine}\n", ["training.schedule 'cosine'", "training.peak_learning_rate"]),
        ("training: {peak_learning_rate: 0.1}\n", ["peak_learning_rate (0.1)", "'noam'", "learning_rate_factor"]),
        (
            "training: {schedule: constant, peak_learning_rate: 0.1, learning_rate_factor: 2}\n",
            ["learning_rate_factor (2.0)", "'constant'", "training.peak_learning_rate"],
        ),
        ("tokenizer: {kind: words, bpe_dropout: 0.1}\n", ["tokenizer.bpe_dropout (0.1)", "'bpe'", "'words'"]),
        ("evaluation: {max_length_offset: null}\n", ["max_length_offset", "max_length", "not both be null"]),
        ("more_data:\n- {weight: 1}\n- {weight: -1}\n", ["more_data[1].weight", "above 0", "-1"]),
        ("more_data:\n- {train_split: null}\n", ["more_data[0].train_split must be a string, but it is null"]),
        ("training: {trackers: null}\n", ["training.trackers must be a list, as in [a, b], but", "null"]),
        ('run_dir: "a\\0b"\n', ["run_dir", "control characters", r"'a\x00b'"]),
        ("data: {prefix: ''}\n", ["data.prefix must not be blank", "''", "null is no prefix"]),
        ("more_data: [{prefix: ' <bt>'}]\n", ["more_data[0].prefix", "spaces around it", "' <bt>'"]),
        ('data: {prefix: "a\\tb"}\n', ["data.prefix must not contain control characters", r"'a\tb'"]),
        *(
            (f"data: {{prefix: {token}}}\n", [f"data.prefix is {token!r}, a special token", "as in <bt>"])
            for token in SPECIAL_TOKENS
        ),
        ("validation_sets: {a: {prefix: <2fr>}}\n", ["validation_sets.a.prefix is '<2fr>'", "data.target_tag"]),
        ("backtranslation: {num_beams: 2}\n", ["backtranslation.num_beams (2) has no effect", "'sampling'"]),
        ("backtranslation: {method: beam, temperature: 2}\n", ["backtranslation.temperature (2.0)", "'beam'"]),
        ("backtranslation: {output: pairs}\n", ["backtranslation.output must end in .tsv", "'pairs'"]),
        ("validation_sets: {en-de: {dataset: a/b}}\n", ["validation_sets.en-de has the name of a direction"]),
        ("validation_sets: {a.b: {dataset: a/b}}\n", ["the name 'a.b', but a name consists of at most 60 letters"]),
        ("hub: {not_worse_than: start}\n", ["hub.not_worse_than is 'start', but the run starts from no model"]),
        (
            "initialize: {from: a/b, parts: [encoder]}\nhub: {not_worse_than: start}\n",
            ["with initialize.parts, the run does not start from the whole model: name the model itself, a/b"],
        ),
        (
            "initialize: {from: a/b, vocabulary: transfer}\nhub: {not_worse_than: start}\n",
            ["with initialize.vocabulary 'transfer', the run does not start from the whole model"],
        ),
        # Longer than the name of a file can be.
        (f"hub: {{not_worse_than: {'x' * 300}}}\n", ["hub.not_worse_than must be start, last_push, the folder of"]),
        ("initialize: {parts: [encoder]}\n", ["initialize.parts (['encoder']) has no effect without initialize.from"]),
        ("initialize: {from: a/b, add_tokens: [<2de>, <2de>]}\n", ["initialize.add_tokens has an entry twice"]),
        ("initialize: {from: a/b, add_tokens: [' <2de>']}\n", ["blank entries or spaces around an entry"]),
        (f"hub: {{repo_id: {'x' * 9000}}}\n", ["hub.repo_id must have the form user/name, but it is 'xxx"]),
        ("backtranslation: {text: []}\n", ["backtranslation.text", "[]"]),
        ("training: {simcut: {}, r_drop: {}}\n", ["training.simcut and training.r_drop exclude each other"]),
        ("training: {adapter: {}}\n", ["training.adapter requires initialize.from"]),
        *(
            (f"initialize: {{from: a/b{start}}}\ntraining: {{adapter: {{}}{more}}}\n", [f"adapter excludes {key}"])
            for key, start, more in (
                ("training.freeze", "", ", freeze: [encoder]"),
                ("training.optimizer", "", ", optimizer: muon"),
                ("training.ema_decay", "", ", ema_decay: 0.9"),
                ("initialize.vocabulary", ", vocabulary: transfer", ""),
                ("initialize.add_tokens", ", add_tokens: [<2fr>]", ""),
                ("initialize.parts", ", parts: [encoder]", ""),
            )
        ),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path, text, words) -> None:
    assert_refused([write_recipe(tmp_path, text)], *words)


# ---- Running text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # One check reads the tasks of each key beside its declaration: a family, one task, and several.
        ("--training.simcut={}", "training.simcut is for pairs of texts, but task is 'masked_lm': leave the key out."),
        ("--more_data+={prefix:_a}", "more_data[0].prefix is for pairs of texts"),
        ("--task=tagging --data.document_column=a", "data.document_column is for running text, but task is 'tagging'"),
        ("--task=tagging --data.pair_column=a", "data.pair_column is for the task 'classification', but task is"),
        ("--task=translation --hub.min_score=0.5", "is for running text or labelled text or the task 'text_to_text'"),
        ("--hub.min_score=30 --training.best_by=accuracy", "hub.min_score must be at least 0 and at most 1, but"),
        (
            "--hub.min_score=0.5",
            "hub.min_score (0.5) is a share from 0 to 1, but training.best_by is 'loss': set that to 'accuracy', or "
            "leave hub.min_score out",
        ),
        (
            "--training.best_by=f1",
            "training.best_by is 'f1', but task 'masked_lm' has no F1: set it to 'loss' or 'acc",
        ),
        ("--task=text_to_text --hub.min_score=0.5", "training.best_by is 'bleu': set that to 'exact_match', or leave"),
        ("--task=text_to_text --training.best_by=accuracy", "has no accuracy: set it to 'bleu' or 'exact_match' or"),
        ("--task=denoise --training.best_by=accuracy", "task 'denoise' has no accuracy: set it to 'loss'."),
        ("--objective.next_sentence=true --objective.unit=lines", "next_sentence needs objective.unit 'blocks'"),
        ("--task=denoise --objective.noise=[fragment,fragment]", "objective.noise must name one or more kinds, each"),
        ("--objective.noise_rate=1", "objective.noise_rate must be above 0 and below 1, but it is 1"),
        ("--training.tokens_per_batch=256", "objective.block_length (512) must not be above training.tokens"),
        (
            "--model.position_encoding=learned --model.max_position_embeddings=128",
            "objective.block_length (512) must not be above model.max_position_embeddings (128)",
        ),
        ("--task=classification --data.pair_column=a --more_data+={weight:_2}", "pair_column must be set for all"),
    ],
)
def test_a_task_has_its_own_keys(tmp_path, keys, message) -> None:
    path = write_recipe(tmp_path, "task: masked_lm\ndata: {train_files: text.txt}\n")
    assert_refused([path, *(word.replace(":_", ": ") for word in keys.split())], message)


def test_keys_of_other_tasks_are_declared() -> None:
    tasks = {name: part.metadata["tasks"] for name, part in declared_keys().items() if part.metadata["tasks"]}
    assert all(set(each) < set(get_args(Task)) for each in tasks.values())
    assert tasks["data.streaming"] == tasks["data.target_tag"] == (*PAIR_TASKS, *TEXT_TASKS)
    assert tasks["objective.unit"] == tasks["objective.block_length"] == MEASURED_TASKS
    assert tasks["data.label_column"] == LABEL_TASKS and tasks["objective.noise"] == ("denoise",)
    assert tasks["hub.min_bleu"] == tasks["hub.not_worse_than"] == tasks["training.adapter"] == PAIR_TASKS
    assert tasks["objective.next_sentence"] == tasks["objective.whole_words"] == ("masked_lm",)


def test_a_task_has_its_own_defaults(tmp_path) -> None:
    path = write_recipe(tmp_path, "task: masked_lm\ndata: {train_files: text.txt}\n")
    training = load_recipe([path]).training
    assert (training.best_by, training.label_smoothing) == ("loss", 0.0)
    published = load_recipe([path, "--hub.repo_id=me/m", "--training.best_by=accuracy", "--hub.min_score=0.5"])
    assert (published.training.best_by, published.hub.min_score) == ("accuracy", 0.5)
    assert load_recipe([path, "--task=translation"]).training.best_by == "bleu"
    assert load_recipe([path, "--training.label_smoothing=0.2"]).training.label_smoothing == 0.2
    # The resolved recipe of a run says the same.
    again = tmp_path / "again.yaml"
    again.write_text(load_recipe([path, "--run_dir=x"]).as_yaml(), encoding="utf-8")
    assert load_recipe([str(again)]).training == training
