"""A recipe is read, overridden and checked, and every mistake in it gets an error that names it."""

import math
import re
import runpy
from collections.abc import Iterator
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from hf_vaswani import VaswaniConfig
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.recipe import (
    SECTIONS,
    AdapterRecipe,
    AugmentRecipe,
    DataRecipe,
    EvaluationRecipe,
    EvaluationSetRecipe,
    InitializeRecipe,
    ModelRecipe,
    RDropRecipe,
    Recipe,
    SimCutRecipe,
    SourceRecipe,
    TokenizerRecipe,
    TrainingRecipe,
    check_ranges,
    check_repo_id,
    load_recipe,
)

from .conftest import ROOT

# The files of configs/accelerate are settings of `accelerate launch`, not recipes.
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "accelerate")


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_recipe_states_only_what_differs(tmp_path) -> None:
    recipe = load_recipe([write(tmp_path, "model: {d_model: 64}\n")])
    assert recipe.model.d_model == 64
    assert recipe.model.d_ff == Recipe().model.d_ff
    assert recipe.run_dir == "runs/mine"


def test_overrides_win_and_are_typed(tmp_path) -> None:
    path = write(tmp_path, "training: {max_steps: 7}\n")
    recipe = load_recipe(
        [path, "--training.max_steps", "500", "--data.train_files", "{en: a.en, de: a.de}", "--data.source_column=0",
         "--training.clip_norm=1", "--run_dir", "elsewhere"]
    )  # fmt: skip
    assert recipe.training.max_steps == 500
    assert recipe.data.train_files == {"en": "a.en", "de": "a.de"}
    assert recipe.data.source_column == 0
    assert recipe.training.clip_norm == 1.0
    assert recipe.run_dir == "elsewhere"


def test_a_saved_recipe_is_complete_and_loads_as_an_equal_one(tmp_path) -> None:
    recipe = load_recipe([write(tmp_path, "seed: 5\ndata: {train_files: {en: a, de: b}}\n")])
    (tmp_path / "saved.yaml").write_text(recipe.as_yaml(), "utf-8")
    assert load_recipe([str(tmp_path / "saved.yaml")]) == recipe


SOURCES = "data: {target_language: de}\nmore_data:\n- {target_language: fr, train_files: {en: a, fr: b}, weight: 2}\n"


def test_more_sources_are_read_saved_and_compared(tmp_path) -> None:
    path = write(tmp_path, SOURCES)
    recipe = load_recipe([path])
    assert recipe.more_data == [SourceRecipe(target_language="fr", train_files={"en": "a", "fr": "b"}, weight=2.0)]
    (tmp_path / "saved.yaml").write_text(recipe.as_yaml(), "utf-8")
    assert load_recipe([str(tmp_path / "saved.yaml")]).flat() == recipe.flat()
    # The command line overrides the last source, adds one, or replaces them all.
    last = load_recipe([path, "--more_data.weight=0.5", "--more_data.train_files", "{en: c, fr: d}"])
    assert (last.more_data[0].weight, last.more_data[0].train_files) == (0.5, {"en": "c", "fr": "d"})
    assert last.more_data[0].target_language == "fr"
    assert last.flat() != recipe.flat()
    two = load_recipe([path, "--more_data+", "{target_language: es}"])
    assert [source.target_language for source in two.more_data] == ["fr", "es"]
    assert load_recipe([path, "--more_data", "[]"]).more_data == []


OPTIONS = """
data: {augment: {upper: 0.07}}
initialize: {from: user/model, revision: v2}
training: {simcut: {}, adapter: {rank: 8, target: [q_proj]}}
validation_sets: {domain: {validation_files: {en: a, de: b}}, general: {dataset: user/text}}
"""


def test_keys_below_keys_are_read_saved_and_overridden(tmp_path) -> None:
    path = write(tmp_path, OPTIONS)
    recipe = load_recipe([path])
    assert recipe.data.augment == AugmentRecipe(upper=0.07)
    assert recipe.initialize == InitializeRecipe("user/model", revision="v2")
    assert recipe.training.simcut == SimCutRecipe(alpha=3.0, p=0.05)
    assert recipe.training.adapter == AdapterRecipe(rank=8, target=["q_proj"])
    assert recipe.validation_sets == {
        "domain": EvaluationSetRecipe(validation_files={"en": "a", "de": "b"}),
        "general": EvaluationSetRecipe(dataset="user/text"),
    }
    assert recipe.flat()["initialize.from"] == "user/model"
    (tmp_path / "saved.yaml").write_text(recipe.as_yaml(), "utf-8")
    assert load_recipe([str(tmp_path / "saved.yaml")]) == recipe
    overrides = ["--training.simcut.alpha", "2", "--training.adapter", "null", "--initialize.from=other/model"]
    overrides += ["--training.r_drop", "null", "--validation_sets.domain.test_files", "{en: c, de: d}"]
    changed = load_recipe([path, *overrides, "--validation_sets.web.dataset", "user/web"])
    assert changed.training.simcut == SimCutRecipe(alpha=2.0) and changed.training.adapter is None
    assert changed.initialize.from_ == "other/model"
    assert changed.validation_sets["domain"].test_files == {"en": "c", "de": "d"}
    assert changed.validation_sets["domain"].validation_files == {"en": "a", "de": "b"}
    assert changed.validation_sets["web"].dataset == "user/web"
    # Files by language, for a set that the recipe does not have, and several keys of it.
    new = ["--validation_sets.law.test_files={en: e, de: f}", "--validation_sets.law.license", "cc0-1.0"]
    law = EvaluationSetRecipe(test_files={"en": "e", "de": "f"}, license="cc0-1.0")
    assert load_recipe([path, *new]).validation_sets == recipe.validation_sets | {"law": law}
    assert load_recipe(["--run_dir", "x", *new]).validation_sets == {"law": law}
    assert load_recipe([path, "--validation_sets={}", *new]).validation_sets == {"law": law}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.simcut", "3", "must have `key: value` lines under 'training.simcut', but it has 3"),
        ("training.simcut", "{beta: 3}", "unknown key 'training.simcut.beta': did you mean 'training.simcut.p'"),
        ("training.simcut", "{alpha: x}", "training.simcut.alpha must be a number, but it is 'x'"),
        ("training.simcut", "{p: 1.0}", "training.simcut.p must be above 0 and below 1, but it is 1.0"),
        ("training.adapter", "{target: q_proj}", "training.adapter.target must be a list, but it is 'q_proj'"),
        ("training.adapter", "{rank: null}", "training.adapter.rank must have a value, for example its default 16"),
        (
            "training.freeze",
            "[foo]",
            "training.freeze must be a list of 'encoder', 'decoder', 'embeddings', but",
        ),
        ("evaluation.altered", "upper", "evaluation.altered must be a list of 'upper', 'title', "),
        ("initialize.parts", "[x]", "initialize.parts must be a list of 'encoder', 'decoder', 'embeddings' or null"),
        ("initialize.vocabulary", "x", "initialize.vocabulary must be 'keep' or 'transfer', but it is 'x'"),
        (
            "validation_sets",
            "3",
            "must have names under 'validation_sets', each with `key: value` lines, but",
        ),
        ("validation_sets", "{a: }", "must have names under 'validation_sets', each with `key: value` lines"),
        ("validation_sets", "{a: {weight: 3}}", "unknown key 'validation_sets.a.weight': did you mean 'validation_"),
    ],
)
def test_a_wrong_value_below_a_key_is_named_in_a_file_and_on_the_command_line(tmp_path, key, value, message) -> None:
    section, _, name = key.partition(".")
    path = write(tmp_path, f"{section}: {{{name}: {value}}}\n" if name else f"{section}: {value}\n")
    for arguments in ([path], ["--run_dir", "x", f"--{key}", value]):
        with pytest.raises(ValueError) as error:
            load_recipe(arguments)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "value", ["{}.Class", "{{class_path: {}.Class}}", "{{class_path: {}.Class, init_args: {{}}}}"]
)
def test_a_recipe_never_imports_a_class(tmp_path, monkeypatch, value) -> None:
    """jsonargparse imports a class by the path that stands in place of a dataclass."""
    (tmp_path / "imported_by_a_recipe.py").write_text("raise SystemExit('imported')\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    value = value.format("imported_by_a_recipe")
    keys = ("data", "training.simcut", "data.augment", "validation_sets.a")
    for key, item in [(key, value) for key in keys] + [("more_data", f"[{value}]")]:
        section, _, name = key.partition(".")
        path = write(tmp_path, f"{section}: {{{name}: {item}}}\n" if name else f"{section}: {item}\n")
        for arguments in ([path], ["--run_dir", "x", f"--{key}", item]):
            with pytest.raises(ValueError, match=rf"{section}.*class|lines|one by one"):
                load_recipe(arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("validation_sets: {en-de: {dataset: a/b}}", "validation_sets.en-de has the name of a direction"),
        ("validation_sets: {a.b: {dataset: a/b}}", "has the name 'a.b', but a name consists of at most 60 letters"),
        ("validation_sets: {../x: {dataset: a/b}}", "has the name '../x', but a name consists of"),
        ("hub: {not_worse_than: start}", "hub.not_worse_than is 'start', but the run starts from no model"),
        ("hub: {not_worse_than: lastpush}", "hub.not_worse_than must be start, last_push, the folder of a model or"),
        ("hub: {not_worse_than: ''}", "hub.not_worse_than must be start, last_push"),
    ],
)
def test_sets_and_models_to_compare_with_are_checked(tmp_path, text, message) -> None:
    with pytest.raises(ValueError) as error:
        load_recipe([write(tmp_path, text + "\n")])
    assert message in str(error.value)


def test_models_to_compare_with(tmp_path) -> None:
    for than in ("last_push", "user/model", str(tmp_path)):
        path = write(tmp_path, f"hub: {{not_worse_than: {than}}}\n")
        assert load_recipe([path]).hub.not_worse_than == than
    path = write(tmp_path, "initialize: {from: user/model}\nhub: {not_worse_than: start}\n")
    assert load_recipe([path]).hub.not_worse_than == "start"


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


def test_the_model_section_is_the_configuration() -> None:
    """Names and defaults are equal, except for settings that follow from the data, the tokenizer or transformers."""
    # Only converted fairseq models have a `position_offset`, and `language_pairs` follow from the data.
    decided = {"vocab_size", "use_cache", "is_encoder_decoder", "is_decoder", "position_offset", "language_pairs"}
    config = VaswaniConfig()
    own = {name for name in VaswaniConfig.__annotations__ if name not in decided and not name.endswith("token_id")}
    section = {field.name: field.default for field in fields(ModelRecipe)}
    assert set(section) == own
    assert section == {name: getattr(config, name) for name in section}


def test_the_kinds_of_vocabularies_are_those_that_can_be_trained() -> None:
    """The tokenizer is used without the training extra, so it cannot import the recipe's type."""
    assert get_type_hints(TokenizerRecipe)["kind"] == get_type_hints(train_tokenizer)["kind"]


def test_the_defaults_of_training_are_the_papers() -> None:
    """Sections 5.1 to 5.4 and 6.1, base model."""
    assert TrainingRecipe() == TrainingRecipe(
        max_steps=100_000,
        tokens_per_batch=25_000,
        accumulation_steps=1,
        schedule="noam",
        warmup_steps=4000,
        learning_rate_factor=1.0,
        peak_learning_rate=None,
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-9,
        weight_decay=0.0,
        label_smoothing=0.1,
        label_smoothing_over="others",
        clip_norm=None,
        average_last=5,
        average_best=None,
    )
    assert TokenizerRecipe() == TokenizerRecipe(kind="bpe", vocab_size=37_000, path=None, decoder_start="bos")
    assert EvaluationRecipe() == EvaluationRecipe(
        num_beams=4,
        length_penalty=0.6,
        length_penalty_type="gnmt",
        max_length_offset=50,
        max_length=None,
        finish_candidates="all",
        early_stopping=None,
        validation_num_beams=1,
        tokenize="13a",
        lowercase=False,
    )


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


def test_schedules_and_averages_that_agree_are_accepted(tmp_path) -> None:
    text = "training: {schedule: cosine, peak_learning_rate: 0.001, average_best: 9, validate_every: 50}\n"
    training = load_recipe([write(tmp_path, text)]).training
    assert (training.schedule, training.peak_learning_rate, training.average_best) == ("cosine", 0.001, 9)
    assert load_recipe([write(tmp_path, "training: {average_best: 9, average_last: 9, keep_last: 1}\n")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainig: {max_steps: 3}\n", ["'trainig'", "'training'"]),
        ("training: {max_stepps: 3}\n", ["'training.max_stepps'", "'training.max_steps'"]),
        ("model: {dropuot: 0.3}\n", ["'model.dropuot'", "'model.dropout'"]),
        ("training: {max_steps: three}\n", ["training.max_steps", "an integer", "'three'"]),
        ("training: {max_steps: 0}\n", ["training.max_steps", "0"]),
        ("training: {label_smoothing: 1.0}\n", ["label_smoothing", "below 1", "1.0"]),
        ("training: {average_last: 9, keep_last: 3}\n", ["average_last (9)", "keep_last (3)"]),
        ("training: {average_best: 2, save_every: 500}\n", ["average_best", "save_every (500)", "every (1000)"]),
        ("training: {schedule: linear}\n", ["training.schedule", "linear", "inverse_sqrt"]),
        ("training: {schedule: cosine}\n", ["training.schedule 'cosine'", "training.peak_learning_rate"]),
        ("training: {peak_learning_rate: 0.1}\n", ["peak_learning_rate (0.1)", "'noam'", "learning_rate_factor"]),
        (
            "training: {schedule: constant, peak_learning_rate: 0.1, learning_rate_factor: 2}\n",
            ["learning_rate_factor (2.0)", "'constant'", "training.peak_learning_rate"],
        ),
        ("training: {schedule: constant, peak_learning_rate: 0}\n", ["peak_learning_rate", "above 0"]),
        ("training: {weight_decay: -0.1}\n", ["training.weight_decay", "at least 0", "-0.1"]),
        ("training: {label_smoothing_over: both}\n", ["label_smoothing_over", "both", "others"]),
        ("tokenizer: {kind: syllables}\n", ["tokenizer.kind", "syllables", "wordpiece"]),
        ("tokenizer: {kind: words, bpe_dropout: 0.1}\n", ["tokenizer.bpe_dropout (0.1)", "'bpe'", "'words'"]),
        ("model: {norm_position: middle}\n", ["model.norm_position", "middle", "post"]),
        ("training: 5\n", ["'training'", "5"]),
        ("- a\n", ["key: value", "['a']"]),
        ("", ["key: value"]),
        ("seed: 1\ntraining: {max_steps: 3}\ntraining: {seed: 4}\n", ["'training'", "line 3"]),
        ("training:\n  mixed_precision: no\n", ["a bare no in line 2", "'no' in quotes"]),
        ("data: {train_files: {en: a, no: b}}\n", ["a bare no in line 1", "'no' in quotes"]),
        ("tokenizer: {vocab_size: null}\n", ["tokenizer.vocab_size", "null"]),
        ("training: {clip_norm: 0}\n", ["training.clip_norm", "above 0"]),
        ("training: {adam_beta1: 1.0}\n", ["training.adam_beta1", "below 1"]),
        ("evaluation: {max_length: 1}\n", ["evaluation.max_length", "at least 2"]),
        ("evaluation: {max_length_offset: null}\n", ["max_length_offset", "max_length", "not both be null"]),
        ("evaluation: {length_penalty_type: wu}\n", ["length_penalty_type", "wu", "gnmt"]),
        ("training: {max_steps: [}\n", ["YAML", "line 1"]),
        ("data: {weight: 0}\n", ["data.weight", "above 0"]),
        ("data: {stream_window: 0}\n", ["data.stream_window", "at least 1"]),
        ("more_data: {weight: 2}\n", ["list", "'more_data'", "{'weight': 2}"]),
        ("more_data: [5]\n", ["list", "'more_data'", "[5]"]),
        ("more_data: [{}]\n", ["list", "'more_data'", "[{}]"]),
        ("more_data:\n- {wieght: 2}\n", ["'more_data.wieght'", "'more_data.weight'"]),
        ("more_data:\n- {weight: 1}\n- {weight: -1}\n", ["more_data[1].weight", "above 0", "-1"]),
        ("more_data:\n- {train_split: null}\n", ["more_data[0].train_split", "null"]),
        ("more_data:\n- {streaming: true}\n", ["'more_data.streaming'"]),
        ("more_data:\n- {weight: two}\n", ["more_data", "weight", "two"]),
        ("more_data:\n- {weight: 1, weight: 2}\n", ["'weight'", "line 2"]),
        ("training: {schedule: constant, peak_learning_rate: .inf}\n", ["peak_learning_rate", "at most 10", "inf"]),
        ("training: {schedule: constant, peak_learning_rate: 1e30}\n", ["peak_learning_rate", "at most 10", "1e+30"]),
        ("evaluation: {length_penalty: .nan}\n", ["evaluation.length_penalty", "at least -10", "nan"]),
        ("training: {tokens_per_batch: 99999999999999999999}\n", ["tokens_per_batch", "2,000,000", "99999999999999"]),
        ("training: {cpu_threads: 100000}\n", ["training.cpu_threads", "at most 1,024", "100000"]),
        ("training: {mixed_precision: fp8}\n", ["mixed_precision must be 'no', 'bf16', 'fp16' or null", "'fp8'"]),
        ("training: {trackers: null}\n", ["training.trackers", "[]", "null"]),
        (f"training: {{weight_decay: 1{400 * '0'}}}\n", ["mine.yaml", "401 digits", "line 1"]),
        (f"seed: 0x{5000 * 'f'}\n", ["mine.yaml", "5002 digits", "line 1"]),
        ("data: &a\n  train_files: *a\n", ["mine.yaml", "alias *a", "line 2"]),
        ("data: &a [x, x]\nmore_data: &b [*a, *a, *a]\n", ["alias *a", "line 2"]),
        (f"data: {{train_files: {'[' * 5000}{']' * 5000}}}\n", ["mine.yaml", "20 levels", "line 1"]),
        ("".join(" " * i + "a:\n" for i in range(900)), ["mine.yaml", "20 levels", "line 21"]),
        (f"more_data: {[5] * 20_000}\n", ["10,000 entries"]),
        ("seed: !!timestamp x\n", ["mine.yaml", "'!!timestamp'", "line 1"]),
        ('seed: 1\ndata: {dataset: "\\ud84c\\udcb6"}\n', ["mine.yaml", "surrogate", "line 2"]),
        ("\nseed: !!int ''\n", ["'!!int'", "line 2"]),
        ("training: {compile: !!bool maybe}\n", ["'!!bool'", "line 1"]),
        ("seed: 2001-99-99\n", ["seed", "an integer", "2001-99-99"]),
        ("data: " + "x" * 5000, ["'data'", "xxx ... xxx"]),
        ("tokenizer: {kind: " + "x" * 5000 + "}", ["tokenizer.kind", "'wordpiece'", "xxx ... xxx"]),
        ("? " + "x" * 5000 + "\n: 1\n", ["unknown key", "xxx ... xxx"]),
        (f"more_data: {[5] * 2000}\n", ["'more_data'", "[5, 5"]),
        ("#" * 2_000_000, ["2,000,000 bytes"]),
        ("seed: 1\0\n", ["mine.yaml", "YAML", "#x0000"]),
        ('run_dir: "a\\0b"\n', ["run_dir", "control characters", r"'a\x00b'"]),
        ("training:\n\tmax_steps: 1\n", ["mine.yaml", "YAML", "line 2"]),
        ("[a, b]: 1\n", ["mine.yaml", "YAML", "line 1"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, words) -> None:
    with pytest.raises(ValueError) as error:
        load_recipe([write(tmp_path, text)])
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_mistake_on_the_command_line_is_named(tmp_path) -> None:
    path = write(tmp_path, "seed: 1\n")
    with pytest.raises(ValueError, match="training.max_step'.*'training.max_steps'"):
        load_recipe([path, "--training.max_step", "5"])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        load_recipe(["nowhere.yaml"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--training.max_steps", "!!timestamp x"], ["'!!timestamp'"]),
        (["--more_data", "[[[["], ["more_data", "a list", "[[[["]),
        (["--more_data", "[" * 3000], ["20 levels", "[[[ ... [[["]),
        (["--more_data", "&a [*a]"], ["alias *a"]),
        (["--training.weight_decay=1" + "0" * 400], ["401 digits", "000 ... 000"]),
        (["--training.adam_epsilon", "1e400"], ["training.adam_epsilon", "at most 1", "inf"]),
        (["--training.mixed_precision", "fp8"], ["training.mixed_precision", "'bf16', 'fp16' or null", "'fp8'"]),
        (["--training", "{max_steps: &a [*a]}"], ["alias *a"]),
        (["--training", str(CONFIGS[0])], ["--training", CONFIGS[0].name, "keys one by one"]),
        (["--recipe", str(ROOT)], ["a folder"]),
        (["--run_dir", "\udcff"], ["run_dir", r"'\udcff'"]),
    ],
)
def test_an_odd_value_on_the_command_line_is_named(tmp_path, arguments, words) -> None:
    with pytest.raises(ValueError) as error:
        load_recipe([write(tmp_path, "seed: 1\n"), *arguments])
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value)) < 500


def test_a_recipe_is_a_utf_8_file(tmp_path) -> None:
    for path, words in ((tmp_path, "a folder"), ("/dev/null", "not a regular file")):
        with pytest.raises(ValueError, match=words):
            load_recipe([str(path)])
    path = tmp_path / "mine.yaml"
    path.write_bytes("seed: 1\n".encode("utf-16"))
    with pytest.raises(ValueError, match=r"mine\.yaml' is not UTF-8"):
        load_recipe([str(path)])
    path.write_bytes("seed: 5\n".encode("utf-8-sig"))
    assert load_recipe([str(path)]).seed == 5


def test_an_alias_may_stand_for_the_files_of_two_splits(tmp_path) -> None:
    recipe = load_recipe([write(tmp_path, "data: {train_files: &files {en: a, de: b}, test_files: *files}\n")])
    assert recipe.data.train_files == recipe.data.test_files == {"en": "a", "de": "b"}


def test_help_lists_every_key_with_type_and_default(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        load_recipe(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key in Recipe().flat():
        assert f"--{key} " in text, key
    assert "Number of updates of the parameters (Section 5.2). (type: int, default: 100000)" in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_loads_and_builds_its_model(path) -> None:
    import torch

    from hf_vaswani import VaswaniForConditionalGeneration

    recipe = load_recipe([str(path)])
    with torch.device("meta"):
        model = VaswaniForConditionalGeneration(
            VaswaniConfig(vocab_size=recipe.tokenizer.vocab_size, **asdict(recipe.model))
        )
    assert model.num_parameters() > 0


def test_transformer_tiny_has_the_published_size() -> None:
    import torch

    from hf_vaswani import VaswaniForConditionalGeneration

    recipe = load_recipe([str(ROOT / "configs" / "multi30k_en_de.yaml")])
    with torch.device("meta"):
        model = VaswaniForConditionalGeneration(VaswaniConfig(vocab_size=9700, **asdict(recipe.model)))
    # The published 2.57 M include biases in the attention: 4 * 128 in each of 12.
    assert model.num_parameters() + 12 * 4 * 128 == pytest.approx(2.57e6, rel=0.01)


def test_the_reference_of_all_keys_is_up_to_date() -> None:
    """Run `python docs/generate_recipe.py` after a change of hf_vaswani/recipe.py."""
    page = (ROOT / "docs" / "recipe.md").read_text("utf-8")
    assert page == runpy.run_path(str(ROOT / "docs" / "generate_recipe.py"))["render"]()
    section = ""
    found = []
    for line in page.splitlines():
        if line.startswith("## "):
            section = "" if line == "## Top level" else f"{line[3:]}."
        if row := re.fullmatch(r"\| `([\w.]+)` \|(?: [^|]+ \|){2}[^|]* \| [A-Z`][^|]+\. \|", line):
            found.append(section + row[1])
    options = {"data.augment": AugmentRecipe, "training.simcut": SimCutRecipe, "training.r_drop": RDropRecipe}
    options |= {"training.adapter": AdapterRecipe, "validation_sets.NAME": EvaluationSetRecipe}
    inner = [f"{name}.{part.name}" for name, option in options.items() for part in fields(option)]
    assert sorted(found) == sorted([*Recipe().flat(), *inner])


def test_the_recipe_of_the_reference_is_a_recipe(tmp_path) -> None:
    page = (ROOT / "docs" / "recipe.md").read_text("utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert load_recipe([write(tmp_path, text)]).training.mixed_precision == "bf16"


def test_a_repository_id_of_any_length_is_refused_in_a_short_message() -> None:
    with pytest.raises(ValueError, match=r"^hub\.repo_id must have the form user/name, but it is 'xxx") as error:
        check_repo_id("x" * 9000, "hub.repo_id")
    assert len(str(error.value)) < 400
