"""A run that starts from a model: of any format, with its settings, resumed exactly, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import MarianTokenizer

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.cli import main
from hf_vaswani.data.tokenizer import TARGET_FILE, load_tokenizer
from hf_vaswani.recipe import InitializeRecipe, Recipe
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.records import Progress, Validation
from hf_vaswani.run_folder import Resume, read_validations
from hf_vaswani.training.start import load_start, resumed_recipe
from hf_vaswani.training.transfer import part_of
from hf_vaswani.translation.batches import log_probabilities
from hf_vaswani.translation.loading import load_translator

from ..campaign.verbs import on_the_hub
from ..children import End, run
from ..conftest import THREADS, dear, write_pairs
from ..conversion.fairseq_folders import simple_folder
from ..conversion.marian_folders import marian_folder, npz_folder, spms  # noqa: F401
from ..hub_server import HubServer
from ..networks import tiny_model
from .runs import same_weights, weights


def adaptation(folder: Path, start: Path | str, *, scored: bool = False) -> list[str]:
    """Returns a recipe that continues from a model on `write_pairs` and says nothing of the network."""
    source, target = write_pairs(folder)
    files = f"{{en: {source}, de: {target}}}"
    splits = ("train", *(("validation", "test") if scored else ()))
    training = {"max_steps": 4, "tokens_per_batch": 256, "schedule": "constant", "peak_learning_rate": 0.001}
    training |= {"warmup_steps": 1, "validate_every": 4, "save_every": 2, "average_last": 1, "cpu_threads": THREADS}
    arguments = [f"--data.{split}_files={files}" for split in splits]
    return [
        *arguments,
        *(f"--training.{key}={value}" for key, value in training.items()),
        f"--initialize.from={start}",
    ]


def adapt(folder: Path, start: Path | str, *more: str, run: str = "run", scored: bool = False) -> int:
    """Continues from a model by [`adaptation`]."""
    return main(["train", *adaptation(folder, start, scored=scored), "--run_dir", str(folder / run), *more])


def resolved(run: Path) -> dict:
    return yaml.safe_load((run / "recipe.yaml").read_text("utf-8"))


def test_a_run_starts_from_the_model_of_a_run_with_its_settings(tiny_run, tmp_path, capsys) -> None:
    assert adapt(tmp_path, tiny_run, "--evaluation.max_length=9") == 0, capsys.readouterr()
    run = tmp_path / "run"
    assert same_weights(run / "start", tiny_run / "model")
    assert (run / "start" / "tokenizer.json").read_text() == (tiny_run / "model" / "tokenizer.json").read_text()
    recipe = resolved(run)
    assert (recipe["model"]["d_model"], recipe["model"]["encoder_layers"], recipe["model"]["dropout"]) == (16, 1, 0.1)
    vocabulary = json.loads((run / "start" / "tokenizer.json").read_text())["model"]["vocab"]
    assert recipe["tokenizer"]["vocab_size"] == len(vocabulary)
    assert (recipe["evaluation"]["num_beams"], recipe["evaluation"]["length_penalty"]) == (2, 0.8)
    # Given, so not the model's.
    assert recipe["evaluation"]["max_length"] == 9
    published = VaswaniForConditionalGeneration.from_pretrained(run / "model")
    assert (published.generation_config.max_length, published.generation_config.num_beams) == (9, 2)
    assert published.config.dropout == 0.1
    assert not same_weights(run / "start", run / "model")


@pytest.mark.slow
def test_without_a_learning_rate_to_speak_of_the_model_stays_what_it_was(tiny_run, tmp_path, caplog) -> None:
    assert adapt(tmp_path, tiny_run / "model", "--training.peak_learning_rate=1e-30", scored=True) == 0
    assert same_weights(tmp_path / "run" / "start", tmp_path / "run" / "model")
    ours, theirs = (json.loads((run / "test.json").read_text())["bleu"] for run in (tmp_path / "run", tiny_run))
    assert ours == theirs
    assert "no validation has a higher BLEU than that before the first update" in caplog.text


@pytest.mark.slow
def test_it_resumes_bit_for_bit_without_the_original(tiny_run, tmp_path, capsys) -> None:
    shutil.copytree(tiny_run, tmp_path / "original")
    assert adapt(tmp_path, tmp_path / "original", run="whole", scored=True) == 0
    assert adapt(tmp_path, tmp_path / "original", "--training.max_steps=2", scored=True) == 0
    shutil.rmtree(tmp_path / "original")
    capsys.readouterr()
    assert adapt(tmp_path, tmp_path / "original", "--model.d_model=32", scored=True) == 2
    assert "model.d_model is 16 there and 32 here" in capsys.readouterr().err
    assert adapt(tmp_path, tmp_path / "original", scored=True) == 0
    assert same_weights(tmp_path / "run" / "checkpoint-4", tmp_path / "whole" / "checkpoint-4")
    # The resolved recipe is the same experiment.
    assert main(["train", str(tmp_path / "run" / "recipe.yaml"), "--training.max_steps=6"]) == 0
    start = tmp_path / "run" / "start" / "config.json"
    start.write_text(start.read_text() + " ")
    capsys.readouterr()
    assert adapt(tmp_path, tmp_path / "original", "--training.max_steps=8", scored=True) == 2
    assert f"{start} was changed or damaged" in capsys.readouterr().err


@pytest.fixture
def deep(tiny_run, tmp_path):
    """Saves a model of four and three layers."""
    config = VaswaniConfig.from_pretrained(tiny_run / "model", encoder_layers=4, decoder_layers=3, alignment_layer=2)
    VaswaniForConditionalGeneration(config).save_pretrained(tmp_path / "deep")
    load_translator(tiny_run / "model")[1].save_pretrained(tmp_path / "deep")
    return tmp_path / "deep"


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        ({"decoder": 1}, {"encoder": [0, 1, 2, 3], "decoder": [0]}),
        ({"encoder": 2, "decoder": 2}, {"encoder": [0, 3], "decoder": [0, 2]}),
        dear({"encoder": 3}, {"encoder": [0, 2, 3], "decoder": [0, 1, 2]}),
    ],
)
def test_layers_are_dropped_for_a_shallower_model(layers, kept, deep, tmp_path, capsys) -> None:
    more = [f"--model.{stack}_layers={count}" for stack, count in layers.items()]
    assert adapt(tmp_path, deep, *more) == 0, capsys.readouterr()
    whole, start = weights(deep), weights(tmp_path / "run" / "start")
    for name, weight in start.items():
        stack = part_of(name)
        if ".layers." in name:
            front, number, rest = re.fullmatch(r"(.+\.layers\.)(\d+)(\..+)", name).groups()
            name = f"{front}{kept[stack][int(number)]}{rest}"
        assert torch.equal(weight, whole[name])
    for stack, numbers in kept.items():
        assert resolved(tmp_path / "run")["model"][f"{stack}_layers"] == len(numbers)
    model, _ = load_translator(tmp_path / "run" / "model")
    assert model.config.decoder_layers == len(kept["decoder"])
    # The same command again finds its run complete.
    assert adapt(tmp_path, deep, *more) == 0
    assert "is complete" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model.decoder_layers=5"], "model.decoder_layers is 5, but the model"),
        (["--model.decoder_layers=1", "--hub.not_worse_than=start"], "drops layers of"),
        (["--model.encoder_layers=1", "--training.adapter={rank: 2}"], "training.adapter needs the whole model"),
    ],
)
def test_layers_that_cannot_be_dropped_are_one_sentence(more, words, deep, tmp_path, capsys) -> None:
    assert adapt(tmp_path, deep, *more, scored=True) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["opus", dear("npz"), dear("fairseq")])
def test_a_foreign_model_is_converted(spms, tmp_path, kind, capsys) -> None:  # noqa: F811
    folder = tmp_path / kind
    folder.mkdir()
    start = folder
    if kind == "opus":
        marian_folder(folder, spms)
    elif kind == "npz":
        npz_folder(folder, spms)
        start = folder / "model.npz"
    else:
        simple_folder(folder)
    assert main(["convert", str(start), str(tmp_path / "converted"), "--to", "vaswani"]) == 0
    assert adapt(tmp_path, start, "--training.max_steps=1") == 0, capsys.readouterr()
    assert same_weights(tmp_path / "run" / "start", tmp_path / "converted")
    published, original = (
        VaswaniForConditionalGeneration.from_pretrained(tmp_path / name) for name in ("run/model", "converted")
    )
    for name in ("position_offset", "layer_norm_eps", "decoder_start_token_id", "sinusoid_layout", "vocab_size"):
        assert getattr(published.config, name) == getattr(original.config, name), name
    for name in ("num_beams", "length_penalty_type", "bad_words_ids", "forced_eos_token_id"):
        assert getattr(published.generation_config, name) == getattr(original.generation_config, name), name


@pytest.mark.process
def test_a_model_on_the_hub_is_downloaded_at_its_revision(tiny_run, tmp_path) -> None:
    files = {path.name: path.read_bytes() for path in (tiny_run / "model").iterdir() if path.is_file()}
    with HubServer() as hub:
        revision = hub.commit("alice/base", files)
        hub.commit("alice/base", {"model.safetensors": b"another model"})

        def start(name: str, *more: str) -> End:
            arguments = ["train", *adaptation(tmp_path, name, scored=True), *more, "--run_dir", str(tmp_path / "run")]
            return run(tmp_path / "outputs", on_the_hub, arguments, hub.environment(tmp_path / "home"))

        lost = start("alice/other")
        assert lost.code == 2 and "alice/other" in lost.sentence
        assert not (tmp_path / "run").exists()
        done = start("alice/base", f"--initialize.revision={revision}")
        assert done.code == 0, done.err
    assert same_weights(tiny_run / "model", tmp_path / "run" / "start")
    assert ModelCard.load(tmp_path / "run" / "model" / "README.md").data.base_model == "alice/base"


def test_a_direction_is_added_and_a_vocabulary_exchanged(tiny_run, tmp_path, capsys) -> None:
    assert adapt(tmp_path, tiny_run, "--data.target_tag=true") == 2
    assert 'lacks <2de>: set initialize.add_tokens: ["<2de>"]' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert adapt(tmp_path, tiny_run, "--data.target_tag=true", '--initialize.add_tokens=["<2de>"]') == 0
    old, new = weights(tiny_run / "model"), weights(tmp_path / "run" / "start")
    name = "model.encoder.embed_tokens.weight"
    assert torch.equal(new[name][:-1], old[name]) and len(new[name]) == len(old[name]) + 1
    exchange = ["--initialize.vocabulary=transfer", "--tokenizer.kind=words", "--tokenizer.vocab_size=30"]
    assert adapt(tmp_path, tiny_run, *exchange, run="exchanged") == 0, capsys.readouterr()
    assert len(weights(tmp_path / "exchanged" / "start")[name]) == 24
    assert resolved(tmp_path / "exchanged")["tokenizer"]["kind"] == "words"


def test_a_prefix_is_an_entry_that_is_added(tiny_run, tmp_path, capsys) -> None:
    source, target = write_pairs(tmp_path)
    more = f"--more_data=[{{train_files: {{en: {source}, de: {target}}}, prefix: <bt>}}]"
    assert adapt(tmp_path, tiny_run, more) == 2
    said = capsys.readouterr().err
    assert "more_data[0].prefix is '<bt>', but the vocabulary of" in said
    assert 'lacks <bt>: set initialize.add_tokens: ["<bt>"]' in said
    add = '--initialize.add_tokens=["<bt>"]'
    assert adapt(tmp_path, tiny_run, more, add) == 0
    tokenizer = load_tokenizer(str(tmp_path / "run" / "model"))
    # It absorbs the spaces around it, as a language tag does.
    assert tokenizer("<bt> one")["input_ids"] == [len(tokenizer) - 1, *tokenizer("one")["input_ids"]]
    assert adapt(tmp_path, tiny_run, more.replace("<bt>", "<tb>"), add) == 2
    said = capsys.readouterr().err
    assert "belongs to another recipe: more_data is" in said and "backtranslation" not in said
    # A model that has the entry needs nothing.
    assert adapt(tmp_path, tmp_path / "run", more, run="again") == 0


def test_an_unfinished_run_gives_its_best_checkpoint(tiny_run, tmp_path, monkeypatch) -> None:
    """By the validation set that counts, and not by the mean of all."""
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("model", "test*"))
    recipe = resolved(run)
    recipe["training"]["best_set"] = "domain"
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    bleu = {4: (1.0, 9.0), 8: (2.0, 3.0), 12: (1.5, 8.0)}
    lines = [
        Validation(
            step, {"loss": 1.0, "bleu": (law + web) / 2}, sets={"domain": {"bleu": law}, "general": {"bleu": web}}
        )
        for step, (law, web) in bleu.items()
    ]
    monkeypatch.setattr("hf_vaswani.training.start.known_validations", lambda run_dir: lines)
    model, _ = load_start(Recipe(initialize=InitializeRecipe(from_=str(run))))
    best = weights(run / "checkpoint-8")
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in best.items())


def test_only_some_parts_are_taken(tiny_run, tmp_path, caplog) -> None:
    parts = ["--initialize.parts=[encoder]", "--training.max_steps=1", "--training.best_by=loss"]
    assert adapt(tmp_path, tiny_run, *parts, scored=True) == 0
    before, after = (validation.scores["loss"] for validation in read_validations(tmp_path / "run"))
    assert after < before and "before the first update" not in caplog.text
    old, new = weights(tiny_run / "model"), weights(tmp_path / "run" / "start")
    for name in new:
        if "norm" not in name:
            assert torch.equal(old[name], new[name]) == (part_of(name) == "encoder"), name


@pytest.mark.slow
def test_the_vocabulary_of_a_foreign_model_is_exchanged(spms, tmp_path) -> None:  # noqa: F811
    marian_folder(tmp_path, spms)
    exchange = ["--initialize.vocabulary=transfer", "--tokenizer.kind=words", "--tokenizer.vocab_size=30"]
    assert adapt(tmp_path, tmp_path, *exchange, "--training.max_steps=1", run="exchanged") == 0
    assert main(["convert", str(tmp_path), str(tmp_path / "converted"), "--to", "vaswani"]) == 0
    old, new = (load_tokenizer(str(tmp_path / folder)) for folder in ("converted", "exchanged/start"))
    rows, changed = (
        weights(tmp_path / folder)["model.encoder.embed_tokens.weight"] for folder in ("converted", "exchanged/start")
    )
    # A piece of the source's model, one of the target's, and two words that either spells with several.
    lengths = []
    for word in ("two", "zwei", "eight", "sieben"):
        spellings = [old(word)["input_ids"], old(text_target=word)["input_ids"]]
        pieces = min(([id_ for id_ in ids[:-1] if id_ != old.unk_token_id] for ids in spellings), key=len)
        torch.testing.assert_close(changed[new(word)["input_ids"][0]], rows[pieces].mean(dim=0), atol=1e-6, rtol=0)
        lengths.append(len(pieces))
    assert lengths[:2] == [1, 1] and min(lengths[2:]) > 1


@pytest.mark.slow
def test_a_foreign_model_continues_on_its_own_pieces(spms, tmp_path) -> None:  # noqa: F811
    marian = marian_folder(tmp_path, spms)
    assert adapt(tmp_path, tmp_path, "--training.max_steps=1", scored=True) == 0
    theirs = MarianTokenizer.from_pretrained(tmp_path)
    sources, targets = ((tmp_path / f"text.{language}").read_text("utf-8").splitlines() for language in ("en", "de"))
    total = tokens = 0.0
    for source, target in zip(sources, targets, strict=True):
        labels = theirs(text_target=target, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            loss = marian(**theirs(source, return_tensors="pt"), labels=labels).loss
        total, tokens = total + loss.item() * labels.numel(), tokens + labels.numel()
    first = json.loads((tmp_path / "run" / "validations.jsonl").read_text("utf-8").splitlines()[0])
    assert (first["step"], first["loss"]) == (0, pytest.approx(total / tokens, rel=1e-4))
    model, tokenizer = load_translator(tmp_path / "run" / "start", torch.float32)
    found = log_probabilities(model, tokenizer, sources, targets)
    assert -sum(value for value, _ in found) == pytest.approx(total, rel=1e-4)
    # So does a training that starts from the new model.
    assert (tmp_path / "run" / "model" / TARGET_FILE).is_file()


@pytest.mark.parametrize("switches", [["encoder"], ["embeddings"], ["decoder", "embeddings"]], ids="-".join)
def test_frozen_parts_stay_and_the_others_learn(tmp_path, tiny_run, switches) -> None:
    more = ["--training.optimizer=muon", "--training.ema_decay=0.5", "--training.weight_decay=0.1"]
    assert adapt(tmp_path, tiny_run, f"--training.freeze=[{','.join(switches)}]", *more) == 0
    old, new = weights(tmp_path / "run" / "start"), weights(tmp_path / "run" / "checkpoint-4")
    for name in new:
        assert torch.equal(old[name], new[name]) == (part_of(name) in switches), name
    state = torch.load(tmp_path / "run" / "checkpoint-4" / "optimizer.bin")
    held = sum(len(part["state"]) for part in state.values())
    assert held == sum(part_of(name) not in switches for name in new)


def test_every_weight_has_a_part() -> None:
    names = [name for name, _ in tiny_model(position_encoding="learned", norm_position="pre").named_parameters()]
    parts = {part: [name for name in names if part_of(name) == part] for part in ("encoder", "decoder", "embeddings")}
    assert sum(map(len, parts.values())) == len(names)
    assert "model.encoder.norm.weight" in parts["encoder"]
    assert sorted(parts["embeddings"]) == [
        "model.decoder.positions.table.weight", "model.encoder.embed_tokens.weight",
        "model.encoder.positions.table.weight",
    ]  # fmt: skip


def test_a_warm_up_without_an_end_is_a_warning(tiny_run, tmp_path, caplog) -> None:
    assert adapt(tmp_path, tiny_run, "--training.warmup_steps=4") == 0
    assert "training.warmup_steps (4) is not below training.max_steps (4)" in caplog.text


def test_another_start_is_the_only_difference_that_is_named(tiny_run, tmp_path, capsys) -> None:
    assert adapt(tmp_path, tiny_run) == 0
    other = tiny_run / ".." / tiny_run.name
    assert adapt(tmp_path, other) == 2
    assert f"initialize.from is {str(tiny_run)!r} there and {str(other)!r} here. " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--initialize.from=nowhere"], "initialize.from is 'nowhere', which does not exist"),
        (["--initialize.from=no/where"], "neither a local folder nor a model on the Hub"),
        (["--initialize.from=FOLDER/empty"], "The format of"),
        (["--initialize.from=FOLDER/damaged"], "damaged/model.safetensors"),
        (["--initialize.revision=v1"], "initialize.revision v1 has no use: "),
        (
            ["--initialize.from=no/where@v1", "--initialize.revision=v2"],
            "initialize.revision v2 has no use: no/where@v1 is local or names a revision",
        ),
        (["--model.d_model=256"], "model.d_model is 256, but the model"),
        (["--tokenizer.kind=unigram"], "tokenizer.kind is 'unigram', but the model"),
        (["--tokenizer.split_digits=true"], "tokenizer.split_digits is True, but the model"),
        (["--tokenizer.path=x"], "tokenizer.path is 'x', but the model"),
        (["--tokenizer.decoder_start=pad"], "tokenizer.decoder_start is 'pad', but the model"),
        (["--training.freeze=[head]"], "training.freeze"),
        (["--training.freeze=[encoder,decoder,embeddings]"], "nothing to train"),
        (["--initialize.parts=[]"], "initialize.parts must have at least one part"),
        (["--initialize.vocabulary=transfer", '--initialize.add_tokens=["<2de>"]'], "leave one of them out"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tiny_run, tmp_path, capsys, more, words) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("model", "damaged"):
        shutil.copytree(tiny_run / "model", tmp_path / name)
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    more = [word.replace("FOLDER", str(tmp_path)) for word in more]
    capsys.readouterr()
    assert adapt(tmp_path, tmp_path / "model", *more) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said, said
    assert not (tmp_path / "run").exists()


def test_a_run_of_a_preset_of_0_1_keeps_the_size_of_its_updates(tmp_path) -> None:
    """Its presets had no `tokens_per_update`, and those of today have it."""
    key = "training.tokens_per_update"
    recipe = load_recipe([f"--{key}=25000", "--run_dir", str(tmp_path)])
    recorded = recipe.flat()
    earlier = {name: value for name, value in recorded.items() if name != key}
    for record, size in ((recorded, 25000), (earlier, None)):
        resume = Resume(
            tmp_path,
            Progress(step=2, position={}, data={}, launch={}, nonfinite=0, seconds=1.0, files={}, recipe=record),
        )
        assert resumed_recipe(recipe, resume).training.tokens_per_update == size
    # Without checkpoints, a finished run has its recipe.
    (tmp_path / "test.json").write_text("{}")
    for text, size in ((recipe.as_yaml(), 25000), (re.sub("  tokens_per_update: .*\n", "", recipe.as_yaml()), None)):
        (tmp_path / "recipe.yaml").write_text(text)
        assert resumed_recipe(recipe, None).training.tokens_per_update == size
