"""A recipe is read and overridden, and every mistake in its file or on the command line is named."""

import pytest

from hf_vaswani import recipe_file
from hf_vaswani.recipe import (
    AdapterRecipe,
    AugmentRecipe,
    DataRecipe,
    EvaluationSetRecipe,
    InitializeRecipe,
    Recipe,
    SimCutRecipe,
    SourceRecipe,
    TrainingRecipe,
)
from hf_vaswani.recipe_file import load_recipe

from .conftest import CONFIGS, ROOT, assert_refused, write_recipe

SOURCES = "more_data: [{target_language: fr, train_files: {en: a, fr: b}, weight: 2}]"
SETS = "validation_sets: {domain: {validation_files: {en: a, de: b}}, general: {dataset: user/text}}"
LAW = ["--validation_sets.law.test_files={en: e, de: f}", "--validation_sets.law.license", "cc0-1.0"]
LAW_SET = "law: {test_files: {en: e, de: f}, license: cc0-1.0}"
REVISIONS = ("3e5af5a715980209a8ccefc8fbabff332217a91f", "1e3", "2024", "0x1f", "1e-4b")


@pytest.mark.parametrize(
    ("text", "options", "same"),
    [
        (
            "training: {max_steps: 7}",
            ["--training.max_steps", "500", "--training.clip_norm=1"],
            "training: {max_steps: 500, clip_norm: 1.0}",
        ),
        (
            "data: {}",
            ["--data.source_column=0", "--run_dir", "elsewhere"],
            "data: {source_column: 0}\nrun_dir: elsewhere",
        ),
        # `no` is a string wherever the key takes one.
        (
            "training: {mixed_precision: no}",
            ["--data.target_language", "no", "--data.test_files={en: a, no: b}"],
            "training: {mixed_precision: 'no'}\ndata: {target_language: 'no', test_files: {en: a, 'no': b}}",
        ),
        (
            "training: {adam_epsilon: 1e-4, clip_norm: 1e2, warmup_steps: 10, weight_decay: 1.e-4}",
            ["--training.learning_rate_factor=+1.5E-3"],
            "training: {adam_epsilon: 0.0001, clip_norm: 100.0, warmup_steps: 10, weight_decay: 0.0001, "
            "learning_rate_factor: 0.0015}",
        ),
        *(
            (
                "initialize: {from: a}",
                [f"--initialize.revision={each}"],
                f"initialize: {{from: a, revision: '{each}'}}",
            )
            for each in REVISIONS
        ),
        ("training: {trackers: [a]}", ["--training.trackers+", "b"], "training: {trackers: [a, b]}"),
        (
            "training: {trackers: [a]}",
            ["--training.trackers=[c]", "--training.trackers+=d", "--training.trackers+", "[e]"],
            "training: {trackers: [c, d, e]}",
        ),
        # Quotes around numbers, and the booleans of YAML 1.1, as version 0.1 reads them.
        (
            "seed: '5'\nmodel: {dropout: '0.2'}\ndata: {source_column: '0'}",
            ["--training.compile=yes", "--data.streaming", "off"],
            "seed: 5\nmodel: {dropout: 0.2}\ntraining: {compile: true}\ndata: {source_column: 0}",
        ),
        # Dotted keys in a file.
        (
            "training.max_steps: 7\ntraining: {save_every: 5, simcut.p: 0.1}\ntraining.simcut.alpha: 2",
            [],
            "training: {max_steps: 7, save_every: 5, simcut: {alpha: 2, p: 0.1}}",
        ),
        # An alias is the same object in two places.
        (
            "more_data: [&s {train_files: a.tsv}, *s]",
            ["--more_data.weight=2"],
            "more_data: [{train_files: a.tsv}, {train_files: a.tsv, weight: 2}]",
        ),
        (
            SOURCES,
            ["--more_data.weight=0.5", "--more_data.train_files", "{en: c, fr: d}"],
            "more_data: [{target_language: fr, train_files: {en: c, fr: d}, weight: 0.5}]",
        ),
        (SOURCES, ["--more_data+", "{target_language: es}"], f"{SOURCES[:-1]}, {{target_language: es}}]"),
        (SOURCES, ["--more_data", "[]"], "more_data: []"),
        (
            "training: {simcut: {}, adapter: {rank: 8}}\ninitialize: {from: a}",
            ["--training.simcut.alpha", "2", "--training.adapter", "null", "--initialize.from=b"],
            "training: {simcut: {alpha: 2.0, p: 0.05}}\ninitialize: {from: b}",
        ),
        (
            SETS,
            ["--validation_sets.domain.test_files", "{en: c, de: d}", "--validation_sets.web.dataset", "user/web"],
            "validation_sets: {domain: {validation_files: {en: a, de: b}, test_files: {en: c, de: d}}, "
            "general: {dataset: user/text}, web: {dataset: user/web}}",
        ),
        # Files by language, for a set that the recipe does not have, and several keys of it.
        (SETS, LAW, f"{SETS[:-1]}, {LAW_SET}}}"),
        (SETS, ["--validation_sets={}", *LAW], f"validation_sets: {{{LAW_SET}}}"),
        ("data: {}", LAW, f"validation_sets: {{{LAW_SET}}}"),
    ],
)
def test_an_option_is_a_line_of_the_file_and_a_saved_recipe_is_equal(tmp_path, text, options, same) -> None:
    recipe = load_recipe([write_recipe(tmp_path, text + "\n"), *options])
    assert recipe == load_recipe([write_recipe(tmp_path, same + "\n")])
    (tmp_path / "saved.yaml").write_text(recipe.as_yaml(), "utf-8")
    assert load_recipe([str(tmp_path / "saved.yaml")]) == recipe


def test_a_recipe_states_only_what_differs(tmp_path) -> None:
    recipe = load_recipe([write_recipe(tmp_path, OPTIONS)])
    assert recipe == Recipe(
        run_dir="runs/mine",
        data=DataRecipe(augment=AugmentRecipe(upper=0.07)),
        initialize=InitializeRecipe("user/model", revision="v2"),
        training=TrainingRecipe(
            simcut=SimCutRecipe(alpha=3.0, p=0.05), adapter=AdapterRecipe(rank=8, target=["q_proj"])
        ),
        validation_sets={"domain": EvaluationSetRecipe(validation_files={"en": "a", "de": "b"})},
        more_data=[SourceRecipe(weight=2.0)],
    )
    assert recipe.flat()["initialize.from"] == "user/model"


OPTIONS = """
data: {augment: {upper: 0.07}}
more_data: [{weight: 2}]
initialize: {from: user/model, revision: v2}
training: {simcut: {}, adapter: {rank: 8, target: [q_proj]}}
validation_sets: {domain: {validation_files: {en: a, de: b}}}
"""


def test_a_recipe_is_read_once_and_without_docstrings(tmp_path, monkeypatch) -> None:
    """They are for `--help`, and take longer than everything else together."""
    path, texts = write_recipe(tmp_path, "seed: 5\n"), []
    loader = recipe_file._Loader
    monkeypatch.setattr(recipe_file, "_Loader", lambda text, where: texts.append(text) or loader(text, where))
    monkeypatch.setattr(recipe_file, "docstrings", lambda _: pytest.fail("A docstring is read."))
    assert load_recipe([path]).seed == 5 and texts == ["seed: 5\n"]


@pytest.mark.parametrize("arguments", [["--help"], ["no.yaml", "-h"]])
def test_help_has_every_key_with_type_default_and_meaning(capsys, arguments) -> None:
    with pytest.raises(SystemExit) as stop:
        load_recipe(arguments, "hf-vaswani train", "Trains.")
    said = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and said.startswith("usage: hf-vaswani train RECIPE.yaml")
    assert "--training.max_steps (an integer; default: 100000) Number of updates of the parameters" in said
    assert all(f"--{key} " in said for key in ("initialize.from", "reverse", *Recipe().flat()))


def test_two_recipes_are_one_and_the_command_line_wins(tmp_path) -> None:
    first = write_recipe(tmp_path, "model: {d_model: 64, d_ff: 128}\nmore_data: [{weight: 2}]\n")
    (tmp_path / "second.yaml").write_text("model: {d_ff: 99}\n", "utf-8")
    recipe = load_recipe([first, "--recipe", str(tmp_path / "second.yaml"), "--model.num_heads=4", "--seed", "3"])
    assert (recipe.model.d_model, recipe.model.d_ff, recipe.model.num_heads, recipe.seed) == (64, 99, 4, 3)
    assert recipe.given == {"model.d_model", "model.d_ff", "model.num_heads", "more_data", "seed"}


DIRECTIONS = """
data: {train_files: a.tsv, source_column: english, target_column: german}
more_data: [{train_files: {en: b.en, de: b.de}, weight: 2}]
validation_sets:
  one: {test_files: a.tsv, source_column: english, target_column: german}
  two: {source_language: en, target_language: fr, test_files: c.tsv}
diversification: {models: 2}
"""


def test_a_reversed_recipe_reads_the_same_text(tmp_path) -> None:
    path = write_recipe(tmp_path, DIRECTIONS)
    recipe, other = load_recipe([path]), load_recipe([path, "--reverse"])
    assert other.run_dir == f"{recipe.run_dir}-reverse" and other.language_pairs == [["de", "en"]]
    assert (other.data.source_column, other.data.target_column) == ("german", "english")
    assert other.data.train_files == recipe.data.train_files and other.more_data[0].weight == 2
    sets = other.named_sets
    assert (sets["one"].source_language, sets["one"].target_language) == ("de", "en")
    assert sets["one"].source_column == "german"
    assert (sets["two"].source_language, sets["two"].target_language) == ("fr", "en")
    # The record of the run is that of the other direction.
    (tmp_path / "saved.yaml").write_text(other.as_yaml(), "utf-8")
    assert load_recipe([str(tmp_path / "saved.yaml")]).flat() == other.flat()
    assert load_recipe([path, "--reverse", "--run_dir", "here"]).run_dir == "here"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("task: causal_lm", "--reverse needs task 'translation', but the task is 'causal_lm'."),
        ("hub: {repo_id: me/mine}", "hub.repo_id is 'me/mine', which is of the recipe's own direction"),
        ("initialize: {from: m}", "none, as in --initialize.from null"),
    ],
)
def test_what_belongs_to_one_direction_is_not_reversed(tmp_path, more, message) -> None:
    path = write_recipe(tmp_path, more)
    assert_refused([path, "--reverse"], message)
    named = ["--hub.repo_id", "null", "--initialize.from", "null", "--task", "translation"]
    assert load_recipe([path, "--reverse", *named]).hub.repo_id is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.simcut", "3", "must have `key: value` lines under 'training.simcut', but it has 3"),
        ("objective", "{foo: 3}", "unknown key 'objective.foo': did you mean 'objective."),
        ("training.simcut", "{beta: 3}", "unknown key 'training.simcut.beta': did you mean 'training.simcut.p'"),
        ("training.simcut", "{alpha: x}", "training.simcut.alpha must be a number, but it is 'x'"),
        ("training.simcut", "{p: 1.0}", "training.simcut.p must be above 0 and below 1, but it is 1.0"),
        ("training.adapter", "{target: q_proj}", "target must be a list, as in [a, b], but it is or has 'q_proj'"),
        ("training.adapter", "{rank: null}", "training.adapter.rank must be an integer, but it is null"),
        ("initialize.parts", "[x]", "initialize.parts must be a list of 'encoder', 'decoder', 'embeddings' or null"),
        ("validation_sets", "3", "must have names under 'validation_sets', each with `key: value` lines"),
        ("validation_sets", "{a: {weight: 3}}", "unknown key 'validation_sets.a.weight': did you mean 'validation_"),
    ],
)
def test_a_wrong_value_below_a_key_is_named_in_a_file_and_on_the_command_line(tmp_path, key, value, message) -> None:
    section, _, name = key.partition(".")
    path = write_recipe(tmp_path, f"{section}: {{{name}: {value}}}\n" if name else f"{section}: {value}\n")
    assert_refused([path], message)
    assert_refused(["--run_dir", "x", f"--{key}", value], message)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainig: {max_steps: 3}\n", ["'trainig'", "'training'"]),
        ("training: {max_stepps: 3}\n", ["'training.max_stepps'", "'training.max_steps'"]),
        ("training: {max_steps: three}\n", ["training.max_steps", "an integer", "'three'"]),
        ("- a\n", ["key: value", "['a']"]),
        ("", ["key: value"]),
        ("training: {compile: maybe}\n", ["training.compile must be true or false, but it is 'maybe'"]),
        ("training: {patience: ''}\n", ["training.patience must be an integer or null, but it is ''"]),
        ("more_data.weight: 2\n", ["outside of 'more_data': write it below 'more_data'"]),
        ("device: cuda\n", ["unknown key 'device': --help lists all keys."]),
        ("training.max_step: 2\n", ["unknown key 'training.max_step': did you mean 'training.max_steps'?"]),
        ("training: 5\ntraining.max_steps: 2\n", ["`key: value` lines under 'training', but it has 5"]),
        ("seed: '5.5'\n", ["seed must be an integer, but it is '5.5'"]),
        ("seed: true\n", ["seed must be an integer, but it is True"]),
        ("hub: {license: 3}\n", ["hub.license must be a string or null, but it is 3"]),
        ("training: {max_steps: [}\n", ["YAML", "line 1"]),
        ("more_data: {weight: 2}\n", ["list", "'more_data'", "{'weight': 2}"]),
        ("more_data: [{}]\n", ["list", "'more_data'", "[{}]"]),
        ("more_data:\n- {wieght: 2}\n", ["'more_data[0].wieght'", "'more_data.weight'"]),
        ("more_data:\n- {streaming: true}\n", ["'more_data[0].streaming'"]),
        ("more_data:\n- {weight: two}\n", ["more_data[0].weight must be a number, but it is 'two'"]),
        ("more_data:\n- {weight: 1, weight: 2}\n", ["'weight'", "line 2"]),
        ("training: {mixed_precision: fp8}\n", ["must be 'no', 'bf16', 'fp16', 'auto' or null, but it is 'fp8'"]),
        (f"training: {{weight_decay: 1{400 * '0'}}}\n", ["mine.yaml", "401 digits", "line 1"]),
        (f"seed: 0x{5000 * 'f'}\n", ["mine.yaml", "5002 digits", "line 1"]),
        ("data: &a\n  train_files: *a\n", ["mine.yaml", "alias *a", "line 2"]),
        ("data: &a [x, x]\nmore_data: &b [*a, *a, *a]\n", ["alias *a", "line 2"]),
        (f"data: {{train_files: {'[' * 5000}{']' * 5000}}}\n", ["mine.yaml", "20 levels", "line 1"]),
        ("".join(" " * i + "a:\n" for i in range(900)), ["mine.yaml", "20 levels", "line 21"]),
        (f"more_data: {[5] * 20_000}\n", ["10,000 entries"]),
        ("seed: !!timestamp x\n", ["mine.yaml", "'!!timestamp'", "line 1"]),
        ('seed: 1\ndata: {dataset: "\\ud84c\\udcb6"}\n', ["mine.yaml", "surrogate", "line 2"]),
        ("seed: 2001-99-99\n", ["seed", "an integer", "2001-99-99"]),
        ("data: " + "x" * 5000, ["'data'", "xxx ... xxx"]),
        ("tokenizer: {kind: " + "x" * 5000 + "}", ["tokenizer.kind", "'wordpiece'", "xxx ... xxx"]),
        ("? " + "x" * 5000 + "\n: 1\n", ["unknown key", "xxx ... xxx"]),
        ("#" * 2_000_000, ["2,000,000 bytes"]),
        ("seed: 1\0\n", ["mine.yaml", "YAML", "#x0000"]),
        ("training:\n\tmax_steps: 1\n", ["mine.yaml", "YAML", "line 2"]),
        ("extends: [a]\n", ["must have the path of another recipe under 'extends', but it has ['a']"]),
        ("extends: nowhere.yaml\n", ["nowhere.yaml' does not exist"]),
        ("extends: mine.yaml\n", ["extends 'mine.yaml', which extends this recipe in turn"]),
        ("extends: other.yaml\n", ["other.yaml' extends 'mine.yaml', which extends this recipe in turn"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, words) -> None:
    (tmp_path / "other.yaml").write_text("extends: mine.yaml\n", "utf-8")
    assert_refused([write_recipe(tmp_path, text)], *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--training.max_step", "5"], ["training.max_step'", "'training.max_steps'"]),
        (["--seed+", "2"], ["adds to seed, which is no list: it is 1"]),
        (["--hub.license+", "mit"], ["hub.license must be a string or null, but it is ['mit']"]),
        (["stray"], ["The command line has 'stray', but an option was expected"]),
        (["--seed"], ["The command line has --seed without a value, as in --seed=VALUE"]),
        (["--run_dir", "--seed", "2"], ["The command line has --run_dir without a value"]),
        (["--training.max_steps", "!!timestamp x"], ["'!!timestamp'"]),
        (["--more_data", "[[[["], ["more_data", "a list", "[[[["]),
        (["--more_data", "[" * 3000], ["20 levels", "[[[ ... [[["]),
        (["--more_data", "&a [*a]"], ["alias *a"]),
        (["--training.weight_decay=1" + "0" * 400], ["401 digits", "000 ... 000"]),
        (["--training.adam_epsilon", "1e400"], ["training.adam_epsilon", "at most 1", "inf"]),
        (["--training", str(CONFIGS[0])], ["--training", CONFIGS[0].name, "keys one by one"]),
        (["--recipe", str(ROOT)], ["a folder"]),
        (["--run_dir", "\udcff"], ["run_dir", r"'\udcff'"]),
    ],
)
def test_an_odd_value_on_the_command_line_is_named(tmp_path, arguments, words) -> None:
    assert_refused([write_recipe(tmp_path, "seed: 1\n"), *arguments], *words)


def test_a_recipe_extends_another_file(tmp_path) -> None:
    """Keys are those of the other file, which it names from its own folder, unless it states them itself."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "base.yaml").write_text("seed: 7\nmodel: {d_model: 64, d_ff: 32}\ntraining: {max_steps: 9}\n", "utf-8")
    path = tmp_path / "rows" / "a.yaml"
    path.write_text("extends: ../base.yaml\nmodel: {d_ff: 16}\n", "utf-8")
    recipe = load_recipe([str(path), "--training.max_steps=5"])
    assert (recipe.seed, recipe.model.d_model, recipe.model.d_ff, recipe.training.max_steps) == (7, 64, 16, 5)
    assert recipe.given == {"seed", "model.d_model", "model.d_ff", "training.max_steps"}
    assert recipe.run_dir == "runs/a" and "extends" not in recipe.as_yaml()


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
