"""On a GPU, the models compute what they compute on the CPU. Skipped where there is none."""

import copy
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hf_vaswani import VaswaniForCausalLM, VaswaniForMaskedLM, alignments
from hf_vaswani.cli import main
from hf_vaswani.data.batching import BatchOrder, PairCollator
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.interruption import Interruption
from hf_vaswani.model.generation_vaswani import FastSearchMixin
from hf_vaswani.recipe import RDropRecipe, SimCutRecipe, TrainingRecipe
from hf_vaswani.training import optimization
from hf_vaswani.training.consistency import TwoPasses
from hf_vaswani.training.optimization import build_optimizer, build_schedule
from hf_vaswani.training.preparation import is_accelerator
from hf_vaswani.training.update import Updater
from hf_vaswani.translation import static_search
from hf_vaswani.translation.batches import log_probabilities, translate_corpus, translate_n_best
from hf_vaswani.translation.budgets import TOO_LARGE
from hf_vaswani.translation.quantization import has_bfloat16
from hf_vaswani.visualization.search_record import record_search

from .children import free_port
from .conftest import ROOT, tiny_recipe
from .networks import batch, gradients, random_batch, random_model, tiny_model, with_labels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def graphs_with_any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_VASWANI_CUDA_GRAPHS", "1")


def on_gpu(value: Any) -> Any:
    """Copies a model, or tensors by name."""
    return {k: v.to(GPU) for k, v in value.items()} if isinstance(value, dict) else copy.deepcopy(value).to(GPU)


def sentences(count: int, padded: bool = True) -> dict[str, torch.Tensor]:
    """Returns random sources of 9 tokens, with padding on both sides."""
    ids, mask, _ = random_batch(range(3, 51), range(3, 51), (count, 9, 8))
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids.clamp(min=3)}


# ---- Passes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", [{}, {"norm_position": "pre", "position_encoding": "learned"}], ids=str)
def test_logits(attention, fields) -> None:
    model, inputs = tiny_model(**fields), batch()
    inputs["attention_mask"][0, 4:] = 0
    model.set_attn_implementation(attention)
    expected = model(**inputs).logits
    found = on_gpu(model)(**on_gpu(inputs)).logits
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"norm_position": "pre"}, {"tie_word_embeddings": False}], ids=str)
def test_loss_and_gradients(fields) -> None:
    model, inputs = tiny_model(dropout=0.0, **fields).train(), with_labels()
    theirs = on_gpu(model)
    losses = [each(**data).loss for each, data in ((model, inputs), (theirs, on_gpu(inputs)))]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-4)
    expected, found = gradients(model), gradients(theirs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].cpu(), gradient, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", [{}, {"simcut": SimCutRecipe(p=0.3)}, {"r_drop": RDropRecipe()}], ids=str)
def test_few_shapes_have_the_loss_and_gradients_of_the_cpu(kind) -> None:
    """A batch with rows and columns of padding on the GPU, and without them on the CPU."""
    rows = [{"number": n, "source_ids": [4 + n % 7] * n, "target_ids": [5 + n % 5] * (n + 2)} for n in range(1, 18)]
    found = []
    for device in (torch.device("cpu"), GPU):
        made = PairCollator(0, order=BatchOrder(99, few_shapes=is_accelerator(device)))(rows)
        model, numbers = tiny_model().to(device), made.pop("numbers")
        passes = TwoPasses(TrainingRecipe(**kind), 1, model)
        inputs = {name: part.to(device) for name, part in passes(made, numbers, 3).items()}
        with passes.loss():
            loss = model(**inputs, epsilon_ls=0.1, num_items_in_batch=170, loss_only=True).loss
        loss.backward()
        found.append((loss.cpu(), {name: part.cpu() for name, part in gradients(model).items()}))
    assert len(inputs["labels"]) == 18
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)


def test_dropout_has_its_rate() -> None:
    from hf_vaswani.model.modeling_vaswani import VaswaniDropout

    output = VaswaniDropout(0.3).train()(torch.ones(1_000_000, device=GPU))
    assert float((output == 0).float().mean()) == pytest.approx(0.3, abs=0.005)
    assert float(output.mean()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", [VaswaniForCausalLM, VaswaniForMaskedLM])
def test_single_stacks(kind) -> None:
    model = tiny_model(kind=kind)
    ids = batch()["input_ids"]
    torch.testing.assert_close(
        on_gpu(model)(input_ids=ids.to(GPU)).logits.cpu(), model(input_ids=ids).logits, atol=1e-4, rtol=1e-4
    )


# ---- Search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1},
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty_type": "power", "finish_candidates": "top"},
        {"num_beams": 3, "early_stopping": False, "max_new_tokens": 9, "min_new_tokens": 4},
        {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "bad_words_ids": [[5], [7, 8]]},
        {"num_beams": 2, "forced_bos_token_id": 9, "suppress_tokens": [11, 12]},
    ],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
def test_translations(settings, padded) -> None:
    model, inputs = random_model(), sentences(9, padded)
    expected = model.generate(**inputs, **settings)
    found = on_gpu(model).generate(**on_gpu(inputs), **settings).cpu()
    # Hypotheses of almost equal scores may change places.
    assert found.shape == expected.shape
    assert (found == expected).all(dim=1).float().mean() > 0.8


@pytest.mark.parametrize("beams", [1, 3])
def test_ensembles(beams) -> None:
    models, inputs = [random_model(seed) for seed in range(2)], sentences(5, True)
    expected = models[0].generate(**inputs, num_beams=beams, ensemble=models[1:])
    theirs = [on_gpu(model) for model in models]
    found = theirs[0].generate(**on_gpu(inputs), num_beams=beams, ensemble=theirs[1:]).cpu()
    assert found.shape == expected.shape and (found == expected).float().mean() > 0.9


def test_sampling() -> None:
    model, inputs = on_gpu(random_model()), on_gpu(sentences(5, True))
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(model.generate(**inputs, do_sample=True, max_new_tokens=8))
    assert found[0].device.type == "cuda" and torch.equal(*found)


def test_a_text_goes_on() -> None:
    model = tiny_model(kind=VaswaniForCausalLM)
    prompt = sentences(5, False)["input_ids"].clamp(max=39)
    for beams in (1, 3):
        settings = {"num_beams": beams, "max_new_tokens": 8}
        found = on_gpu(model).generate(prompt.to(GPU), **settings).cpu()
        assert (found == model.generate(prompt, **settings)).float().mean() > 0.9


# ---- Searches by CUDA graphs -------------------------------------------------------------------------------------

CAPTURED = {
    "greedy search": {"num_beams": 1},
    "beam search": {"num_beams": 4},
    "sampling": {"num_beams": 1, "do_sample": True, "top_k": 0},
}


@pytest.fixture
def by_graphs(monkeypatch):
    """Yields the module of these searches, as if there had been none in this process."""
    monkeypatch.setattr(static_search, "PROVED", set())
    monkeypatch.setattr(static_search, "TURNED_OFF", set())
    static_search.KEPT.clear()
    yield static_search
    static_search.KEPT.clear()


def searched(module, model, inputs, captures: bool, **settings) -> Any:
    """Returns what the steps of a search find, as graphs or as they are."""
    outcome: list[Any] = []

    def search(*call: Any) -> Any:
        with module.in_fixed_places(GPU):
            run = module.StaticSearch(*call, captures=captures)
            outcome.extend((run, run.run()))
        return outcome[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastSearchMixin, "at_home", staticmethod(search))
        torch.manual_seed(1)
        found = model.generate(**inputs, **settings, return_dict_in_generate=True)
    assert outcome[0].has_replayed or not captures
    return found


@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CAPTURED)
def test_graphs_compute_what_was_captured(by_graphs, caplog, kind, dtype, count) -> None:
    """To the last bit, from the second search on without a step that is not a replay."""
    model, inputs, settings = on_gpu(random_model()), on_gpu(sentences(count)), CAPTURED[kind]
    settings = settings | {"max_new_tokens": 30}
    with torch.inference_mode(), torch.autocast("cuda", dtype, enabled=dtype is not None):
        expected = searched(by_graphs, model, inputs, False, **settings)
        for _ in range(3):
            found = searched(by_graphs, model, inputs, True, **settings)
            assert torch.equal(found.sequences, expected.sequences)
            if kind == "beam search":
                assert torch.equal(found.sequences_scores, expected.sequences_scores)
    assert not [each for each in caplog.records if "CUDA graph" in each.message]


@pytest.mark.parametrize("count", [1, 32])
@pytest.mark.parametrize("kind", ["greedy search", "beam search"])
def test_graphs_find_what_the_cpu_finds(by_graphs, caplog, kind, count) -> None:
    model, inputs, settings = random_model(), sentences(count), CAPTURED[kind] | {"max_new_tokens": 30}
    expected, theirs = model.generate(**inputs, **settings), on_gpu(model)
    for _ in range(2):
        found = theirs.generate(**on_gpu(inputs), **settings).cpu()
        assert found.shape == expected.shape
        assert (found == expected).all(dim=1).float().mean() > 0.8
    assert (kind, True) in by_graphs.PROVED and not by_graphs.TURNED_OFF and not caplog.records
    assert any(each.graph for _, each in by_graphs.KEPT[theirs].steps.values())


def test_sampling_draws_what_it_draws_without_graphs(by_graphs, monkeypatch) -> None:
    model, inputs, found = on_gpu(random_model()), on_gpu(sentences(8)), []
    for variable in ("1", "1", "0"):
        monkeypatch.setenv("HF_VASWANI_CUDA_GRAPHS", variable)
        torch.manual_seed(1)
        found.append(model.generate(**inputs, do_sample=True, max_new_tokens=20))
    assert ("sampling", True) in by_graphs.PROVED and not by_graphs.TURNED_OFF
    assert torch.equal(found[0], found[1])
    assert (found[0] == found[2]).all(dim=1).float().mean() > 0.8


def test_graphs_read_weights_that_were_trained(by_graphs) -> None:
    model, inputs = on_gpu(random_model()), on_gpu(sentences(8))
    settings = {"num_beams": 2, "max_new_tokens": 20}
    before = searched(by_graphs, model, inputs, True, **settings).sequences
    kept = by_graphs.KEPT[model]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    found, expected = (searched(by_graphs, model, inputs, each, **settings).sequences for each in (True, False))
    assert by_graphs.KEPT[model] is kept
    assert torch.equal(found, expected) and not torch.equal(found, before)


def test_threads_search_by_graphs_in_turn(by_graphs) -> None:
    models, inputs = [on_gpu(random_model(seed)) for seed in range(2)], on_gpu(sentences(8))
    settings = {"num_beams": 4, "max_new_tokens": 20}
    expected = [searched(by_graphs, model, inputs, False, **settings).sequences for model in models]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: models[number % 2].generate(**inputs, **settings), range(16)))
    assert all(torch.equal(each, expected[number % 2]) for number, each in enumerate(found))


@pytest.mark.parametrize("beams", [1, 4])
def test_a_search_by_graphs_waits_for_the_gpu_every_other_step(by_graphs, beams) -> None:
    model, inputs = on_gpu(random_model()), on_gpu(sentences(8, True))
    model.lm_head.weight.data[model.config.eos_token_id] = 0
    waits = []
    for length in (10, 30):
        settings = {"num_beams": beams, "max_new_tokens": length, "eos_token_id": None}
        for _ in range(3):
            model.generate(**inputs, **settings)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            model.generate(**inputs, **settings)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("called a synchronizing" in str(each.message) for each in found))
    # Where the search moves to other buffers; events do not count.
    assert waits[1] - waits[0] <= 4, waits


@pytest.mark.parametrize("beams", [1, 4])
def test_a_step_of_the_search_waits_for_the_gpu_once(beams) -> None:
    """How many translations are unfinished decides about the next step; nothing else is read back."""
    model, inputs = on_gpu(random_model()), on_gpu(sentences(8, True))
    waits = []
    for length in (10, 30):
        settings = {"num_beams": beams, "max_new_tokens": length, "min_new_tokens": length}
        model.generate(**inputs, **settings)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning) as found:
                model.generate(**inputs, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("called a synchronizing" in str(each.message) for each in found))
    # And once more where memory grows.
    assert (waits[1] - waits[0]) / 20 <= 1.1, waits


@pytest.mark.parametrize("beams", [1, 4])
def test_bfloat16_is_near(beams) -> None:
    model, inputs = on_gpu(random_model()), on_gpu(sentences(9, True))
    assert has_bfloat16(GPU)
    logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    expected = model.generate(**inputs, num_beams=beams, max_new_tokens=8)
    with torch.autocast("cuda", torch.bfloat16):
        rounded = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
        found = model.generate(**inputs, num_beams=beams, max_new_tokens=8)
    assert (logits - rounded.float()).norm() < 0.03 * logits.norm()
    assert (found[:, 1] == expected[:, 1]).float().mean() > 0.6


# ---- Around the models -------------------------------------------------------------------------------------------


def test_scores_alignments_and_records() -> None:
    tokenizer = train_tokenizer(["ab abc bca cab"], 20, kind="characters")
    model = tiny_model(vocab_size=40, decoder_layers=3, eos=1.0)
    theirs, sources, targets = on_gpu(model), ["abc cab", "ab", "bca ab abc"], ["cab abc", "ab ab ab", "abc"]
    for found, expected in zip(
        log_probabilities(theirs, tokenizer, sources, targets),
        log_probabilities(model, tokenizer, sources, targets),
        strict=True,
    ):
        assert found == (pytest.approx(expected[0], abs=1e-3), expected[1])
    for one, other in zip(
        alignments(theirs, tokenizer, sources, targets), alignments(model, tokenizer, sources, targets), strict=True
    ):
        torch.testing.assert_close(one.probabilities.cpu(), other.probabilities, atol=1e-4, rtol=0)
    for model_ in (model, theirs):
        model_.generation_config.num_beams = 3
    expected_lists = translate_n_best(model, tokenizer, sources, 2)
    for one, other in zip(translate_n_best(theirs, tokenizer, sources, 2), expected_lists, strict=True):
        assert [score for score, *_ in one] == pytest.approx([score for score, *_ in other], abs=1e-3)
    ids = torch.tensor([[5, 9, 17, 30, 12, 2]])
    found_record, record = (
        record_search(each, ids.to(each.device), num_beams=3) for each in (on_gpu(random_model()), random_model())
    )
    assert [each.score for each in found_record.hypotheses] == pytest.approx(
        [each.score for each in record.hypotheses], abs=1e-3
    )


# ---- Updates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [{}, {"ema_decay": 0.9}, {"clip_norm": 0.5}], ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_captured_updates_are_those_of_the_cpu(monkeypatch, optimizer, training) -> None:
    """Twelve, of which the fourth is skipped, with another learning rate each."""
    monkeypatch.setattr(optimization, "has_bfloat16", lambda _: False)
    found = []
    for cpu in (True, False):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = Accelerator(cpu=cpu), tiny_model(dropout=0).train()
        recipe = TrainingRecipe(optimizer=optimizer, **training)
        built = build_optimizer(optimizer, model.named_parameters(), weight_decay=0.01)
        schedule = build_schedule(built, "noam", 16, 5, 100, factor=0.05)
        wrapped, prepared, schedule = accelerator.prepare(model, built, schedule)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if "ema_decay" in training else None
        updater, passes = Updater(accelerator, wrapped, prepared, recipe, average), TwoPasses(recipe, 1, model)
        outcomes = []
        for number in range(12):
            data = [with_labels(), with_labels()]
            if number == 3:
                # The passes add to it, whether they are replayed or not.
                weight = model.model.encoder.layers[0].feed_forward.fc1.weight
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad.fill_(torch.inf)
            with passes.loss():
                outcomes.append(updater(data, Interruption(), is_first=number == 0).outcome())
            schedule.step()
        assert updater.runs_ahead is not cpu and (cpu or updater.captured.graph is not None)
        found.append((outcomes, [each.detach().cpu() for each in (average or model).parameters()]))
    (expected, weights), (outcomes, theirs) = found
    assert [each.finite for each in outcomes] == [number != 3 for number in range(12)]
    assert [each.loss for each in outcomes] == pytest.approx([each.loss for each in expected], rel=1e-3)
    torch.testing.assert_close(theirs, weights, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (96, 96)])
def test_muon_is_that_of_torch(shape) -> None:
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape, device=GPU)) for _ in range(2))
    ours.grad = theirs.grad = torch.randn(shape, device=GPU)
    optimization.Muon([ours], 1.0, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.Muon([theirs], 1.0, adjust_lr_fn="match_rms_adamw").step()
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()


# ---- Commands ----------------------------------------------------------------------------------------------------


def run(*arguments: str, **variables: str) -> str:
    """Runs a command of the package in a process of its own, and returns what it prints."""
    process = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16", "auto"])
def test_a_run_is_trained_and_resumed(tmp_path, precision) -> None:
    """Its text is made anew by a worker process, and its validations translate as it is trained."""
    made = ["--tokenizer.bpe_dropout=0.1", "--evaluation.validate_in_mixed_precision=true"]
    arguments = [*tiny_recipe(tmp_path, scored=True, mixed_precision=precision), *made]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("hf_vaswani.cli", "train", *arguments, "--run_dir", str(whole))
    run("hf_vaswani.cli", "train", *arguments, "--run_dir", str(parts), "--training.max_steps=8")
    run("hf_vaswani.cli", "train", *arguments, "--run_dir", str(parts))
    losses = [
        [json.loads(line)["loss"] for line in (folder / "validations.jsonl").read_text().splitlines()[-1:]]
        for folder in (whole, parts)
    ]
    assert losses[0] and losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert json.loads((whole / "environment.json").read_text())["device"].startswith("cuda")


def test_auto_finds_a_batch_that_fits(tmp_path) -> None:
    """Of an update that no GPU holds at once."""
    sizes = ["--model.d_model=512", "--model.d_ff=2048", "--model.num_heads=8", "--training.tokens_per_batch=auto"]
    arguments = [*tiny_recipe(tmp_path, max_steps=1, save_every=1), *sizes, "--training.tokens_per_update=1000000000"]
    run("hf_vaswani.cli", "train", *arguments, "--run_dir", str(tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "environment.json").read_text())["tokens_at_once"]
    assert 10_000 < found < 10**9


def test_translate_uses_the_gpu(tiny_run, tmp_path, monkeypatch, capsys) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("one two\n\nnine\n", encoding="utf-8")
    model = str(tiny_run / "model")
    assert main(["translate", "--model", model, str(source), "--output", str(output), "--alignment"]) == 0
    hidden = run("hf_vaswani.cli", "translate", "--model", model, str(source), CUDA_VISIBLE_DEVICES="")
    found = output.read_text(encoding="utf-8").splitlines()
    assert [line.split(" ||| ")[0] for line in found] == hidden.splitlines()


# ---- Budgets and devices -----------------------------------------------------------------------------------------


def test_batches_of_a_gpu_translate_as_those_of_a_cpu() -> None:
    """A thousand sentences at a time, and the few that a CPU takes."""
    tokenizer = train_tokenizer(["ab abc bca cab"], 20, kind="characters")
    model = on_gpu(tiny_model(vocab_size=40, eos=1.0))
    lines = [" ".join(["ab", "cab", "bca", "abc"][: 1 + i % 4]) + "c" * (i % 7) for i in range(3000)]
    rows = []
    generate = model.generate
    model.generate = lambda **inputs: rows.append(len(inputs["input_ids"])) or generate(**inputs)
    settings = {"num_beams": 3, "max_new_tokens": 8}
    found, expected = (translate_corpus(model, tokenizer, lines, most, **settings) for most in (None, 256))
    assert max(rows) > 1000 and min(rows) < 100
    # Hypotheses of almost equal scores may change places.
    assert sum(one == other for one, other in zip(found, expected, strict=True)) > 0.95 * len(lines)


def test_a_batch_that_does_not_fit_into_the_memory_is_translated_in_halves(caplog) -> None:
    tokenizer = train_tokenizer(["ab abc bca cab"], 20, kind="characters")
    model = on_gpu(tiny_model(vocab_size=50_000))
    lines, settings = ["ab cab"[: 1 + i % 6] for i in range(4000)], {"num_beams": 4, "max_new_tokens": 3}
    expected = translate_corpus(model, tokenizer, lines, 2**11, **settings)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**28) / total))
    try:
        found = translate_corpus(model, tokenizer, lines, 2**16, **settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert model in TOO_LARGE and caplog.text.count("does not fit into the memory of this GPU") == 1
    assert sum(one == other for one, other in zip(found, expected, strict=True)) > 0.95 * len(lines)


@pytest.mark.parametrize("verb", ["translate", "score", "align", "evaluate"])
def test_a_device_that_is_named_computes_as_the_cpu(tiny_run, tmp_path, capsys, verb) -> None:
    files = [str(tmp_path / name) for name in ("text.en", "text.de")]
    for name, words in zip(files, ("one two three", "eins zwei drei"), strict=True):
        lines = [" ".join(words.split()[: 1 + i % 3]) for i in range(40)]
        Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    given = {"translate": files[:1], "evaluate": ["--format", "csv", "--data", *files]}.get(verb, files)
    found = []
    for device in ("cuda:0", "cpu"):
        assert main([verb, "--model", str(tiny_run / "model"), "--device", device, *given]) == 0
        found.append(capsys.readouterr().out)
    numbers = [[float(number) for number in re.findall(r"-?\d+\.?\d*", text)] for text in found]
    assert found[0] and numbers[0] == pytest.approx(numbers[1], abs=2e-3)
    assert re.sub(r"[\d.-]+", "", found[0]) == re.sub(r"[\d.-]+", "", found[1])


def test_a_server_translates_on_the_gpu_as_a_pipeline_on_the_cpu(teacher) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from fastapi.testclient import TestClient
    from transformers import pipeline

    from hf_vaswani.cli.main import _parser
    from hf_vaswani.cli.serve import make_app

    app = make_app(_parser().parse_args(["serve", "--model", str(teacher), "--device", "cuda:0"]))
    texts = ["one two three", "nine", "four five"] * 30
    with TestClient(app) as client:
        answer = client.post("/translate", json={"q": texts, "source": "en", "target": "de"}).json()
    expected = [each["translation_text"] for each in pipeline("translation", model=str(teacher), device="cpu")(texts)]
    assert app.state.batchers[0].max_texts == 512
    assert sum(one == other for one, other in zip(answer["translatedText"], expected, strict=True)) > 60


def test_the_workers_of_a_server_have_the_gpu_and_their_parent_has_not(teacher) -> None:
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    psutil, port = pytest.importorskip("psutil"), free_port()

    def has_gpu(process: Any) -> bool:
        files = Path(f"/proc/{process.pid}/fd").iterdir()
        return any("/dev/nvidia" in os.readlink(file) for file in files if os.path.lexists(file))

    command = [sys.executable, "-m", "hf_vaswani.cli", "serve", "--model", str(teacher), "--workers", "2"]
    server = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT)
    try:
        until, answered = time.monotonic() + 120, False
        while not answered:
            assert time.monotonic() < until and server.poll() is None
            time.sleep(0.5)
            with suppress(OSError):
                answered = urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).status == 200
        parent = psutil.Process(server.pid)
        workers = [each for each in parent.children() if "spawn_main" in " ".join(each.cmdline())]
        assert len(workers) == 2 and not has_gpu(parent)
        # One of them has answered.
        assert any(map(has_gpu, workers))
    finally:
        server.terminate()
        server.wait(90)


def test_an_engine_computes_on_the_gpu_and_torch_has_no_copy_there(teacher, tmp_path, capsys, caplog) -> None:
    library = pytest.importorskip("ctranslate2", reason="the extra `convert` is not installed")
    if not library.get_cuda_device_count():
        pytest.skip("this CTranslate2 was built without CUDA")
    (tmp_path / "in.txt").write_text("one two three\nnine\nfour five\n" * 9, encoding="utf-8")
    command = ["translate", "--model", str(teacher), str(tmp_path / "in.txt"), "--engine", "ctranslate2"]
    caplog.set_level("INFO")
    torch.cuda.empty_cache()
    before, found = torch.cuda.memory_allocated(), []
    for device in ("cuda:0", "cpu"):
        assert main([*command, "--approximate", "--device", device]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] and "cuda:0" in caplog.text
    assert torch.cuda.memory_allocated() == before


def test_a_gpu_can_be_left_alone(tmp_path) -> None:
    arguments = [*tiny_recipe(tmp_path, max_steps=2), "--run_dir", str(tmp_path / "run")]
    run("hf_vaswani.cli", "train", *arguments, ACCELERATE_USE_CPU="true")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["device"] == "cpu"


def test_more_processes_than_gpus_are_one_sentence(tmp_path) -> None:
    count = torch.cuda.device_count() + 1
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command = [*launch, str(ROOT / "train.py"), *tiny_recipe(tmp_path), "--run_dir", str(tmp_path / "run")]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    words = f"{count} processes were launched on this machine, but each needs a device of its own"
    assert process.returncode and words in process.stderr and not (tmp_path / "run").exists()


def test_fully_sharded_training(tmp_path) -> None:
    arguments = tiny_recipe(tmp_path)
    folder = tmp_path / "sharded"
    launch = ["accelerate.commands.launch", "--config_file", str(ROOT / "configs" / "accelerate" / "fsdp2.yaml")]
    run(*launch, "--num_processes", "1", str(ROOT / "train.py"), *arguments, "--run_dir", str(folder))
    assert (folder / "model" / "model.safetensors").is_file()


def test_a_page_of_a_model_on_the_gpu(tiny_run, tmp_path) -> None:
    from transformers import AutoTokenizer, pipeline

    from hf_vaswani.visualization.explorer import explore

    translate = pipeline("translation", model=str(tiny_run / "model"), device="cuda")
    tokenizer = AutoTokenizer.from_pretrained(tiny_run / "model")
    page = tmp_path / "page.html"
    explore(translate.model, tokenizer, "one two").save(page)
    assert page.stat().st_size > 10_000
