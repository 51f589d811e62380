"""An update: its loss, its gradients, and what is left out."""

import math
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_vaswani.interruption import Interruption
from hf_vaswani.model import kernels_vaswani
from hf_vaswani.recipe import RDropRecipe, SimCutRecipe, TrainingRecipe
from hf_vaswani.training import consistency, optimization
from hf_vaswani.training import update as update_module
from hf_vaswani.training.consistency import TwoPasses
from hf_vaswani.training.optimization import build_optimizer, build_schedule, noam
from hf_vaswani.training.update import Outcome, Updater, _count_labels

from .. import networks
from ..cuda_graphs import updates_of_a_gpu

Batch = dict[str, torch.Tensor]


def tiny_model(**fields: Any) -> torch.nn.Module:
    return networks.tiny_model(**fields).train()


def tiny_batch(*ids: int) -> Batch:
    rows = torch.tensor([ids or range(4, 10)])
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows}


def update(model: torch.nn.Module, *batches: Batch, accelerator: Any = None, **training: Any) -> Outcome:
    """Makes an update by SGD with a learning rate of 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    updater = Updater(accelerator or Accelerator(), model, optimizer, TrainingRecipe(**training))
    return updater(list(batches), Interruption()).outcome()


@pytest.mark.parametrize(("clip_norm", "lowest", "highest"), [(None, 0.1, math.inf), (0.01, 0.0099, 0.0101)])
def test_gradients_are_clipped_only_on_request(clip_norm, lowest, highest) -> None:
    model = tiny_model()
    before = [weight.detach().clone() for weight in model.parameters()]
    update(model, tiny_batch(), clip_norm=clip_norm)
    moved = [(weight - old).norm() for weight, old in zip(model.parameters(), before, strict=True)]
    assert lowest < torch.stack(moved).norm() < highest


@pytest.mark.parametrize(("over", "epsilon"), [("others", 0.25), ("all", 0.2)])
def test_who_shares_the_label_smoothing(over, epsilon) -> None:
    """Over all V tokens is torch's own label_smoothing; over the others, V / (V - 1) = 5 / 4 of it."""
    model, batch = tiny_model(vocab_size=5, dropout=0), tiny_batch(3, 4, 2)
    logits = model(**batch).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][0], label_smoothing=epsilon)
    found = update(model, batch, label_smoothing=0.2, label_smoothing_over=over)
    assert found.loss == pytest.approx(expected.item())


def test_labels_are_counted_where_the_model_is() -> None:
    """Counts of several objectives are stacked, and a batch may have the labels of one alone."""
    device = torch.device("meta")
    labels = torch.full((2, 3), -100, device=device)
    assert _count_labels([labels, labels], device).device == _count_labels([], device).device == device
    cpu = torch.device("cpu")
    assert int(_count_labels([torch.tensor([[1, -100], [2, 3]]), torch.tensor([[4]])], cpu)) == 4
    assert int(_count_labels([], cpu)) == 0


def test_an_update_does_not_depend_on_how_it_is_split() -> None:
    """Two uneven batches added up are one batch: the loss is per token of the update, not a mean of means."""
    long = {"input_ids": torch.randint(4, 30, (3, 6)), "labels": torch.randint(4, 30, (3, 7))}
    short = {"input_ids": torch.randint(4, 30, (1, 6)), "labels": torch.full((1, 7), -100)}
    short["labels"][0, :2] = 5
    both = {name: torch.cat([long[name], short[name]]) for name in long}
    results = []
    for batches in ([both], [long, short]):
        model = tiny_model(dropout=0).double()
        found = update(model, *(batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches))
        results.append((found.loss, found.tokens, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert results[0][1] == results[1][1] == 23
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    torch.testing.assert_close(results[0][2], results[1][2], atol=1e-7, rtol=0)


def test_an_infinite_gradient_of_a_finite_loss_is_left_out() -> None:
    model = tiny_model()
    before = [weight.detach().clone() for weight in model.parameters()]
    next(model.model.encoder.layers[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    found = update(model, tiny_batch())
    assert math.isfinite(found.loss) and not math.isfinite(found.gradient_norm) and not found.finite
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def test_the_last_batch_of_an_update_is_synchronised_and_weighs_as_many_processes() -> None:
    """As one of three processes, each with its share of one sum, of which DDP takes the mean."""
    accelerator, model, batch = Accelerator(), tiny_model(), tiny_batch()
    seen: list[object] = []

    class OneOfThree:
        num_processes = 3

        @contextmanager
        def no_sync(self, _):
            seen.append("no sync")
            yield

        def backward(self, loss):
            seen.append(loss.item())
            loss.backward()

        def reduce(self, tensor, _):
            return tensor * 3

        def __getattr__(self, name):
            return getattr(accelerator, name)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    interruption = Interruption()
    interruption.signal = 15
    found = Updater(OneOfThree(), model, optimizer, TrainingRecipe())([batch, batch], interruption).outcome()
    assert [entry == "no sync" for entry in seen] == [True, False, False]
    assert sum(seen[1:]) == pytest.approx(found.loss)
    assert (found.tokens, found.stop) == (3 * 2 * 6, True)


def scaled_update():
    """As in fp16, with a scaler that starts at 8."""
    accelerator, model, batch = Accelerator(), tiny_model(), tiny_batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)

    class Scaled:
        def __init__(self):
            self.scaler = scaler

        def backward(self, loss):
            scaler.scale(loss).backward()

        def clip_grad_norm_(self, parameters, most):
            scaler.unscale_(optimizer.optimizer)
            return torch.nn.utils.clip_grad_norm_(parameters, most)

        def __getattr__(self, name):
            return getattr(accelerator, name)

    updater = Updater(Scaled(), model, optimizer, TrainingRecipe())
    return scaler, model, lambda: updater([batch], Interruption()).outcome()


def test_in_fp16_an_update_after_one_that_was_left_out_goes_on() -> None:
    """The scaler hears of it, too: it takes an optimizer's gradients once between two of its own updates."""
    scaler, model, update = scaled_update()
    infinite = model.lm_head.register_forward_hook(lambda _, __, logits: logits * math.inf)
    assert not update().finite
    infinite.remove()
    before = model.lm_head.weight.detach().clone()
    assert update().finite
    assert scaler.get_scale() == 4.0 and not torch.equal(model.lm_head.weight, before)


def test_in_fp16_infinite_gradients_count_once_they_cannot_be_scaled_any_less() -> None:
    _, model, update = scaled_update()
    before = [weight.detach().clone() for weight in model.parameters()]
    next(model.model.encoder.layers[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    found = [update().finite for _ in range(5)]
    # At 8, 4 and 2 the scaler still looks for its scale.
    assert found == [True, True, True, False, False]
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))


# ---- A step that the device makes alone --------------------------------------------------------------------------


def trained(optimizer: str, runs_ahead: bool, updates: int, average: float | None = None, **training: Any) -> Any:
    """Makes updates of one model in one way or the other; the fourth update of each ten has an infinite loss."""
    model = tiny_model(dropout=0)
    recipe = TrainingRecipe(optimizer=optimizer, ema_decay=average, warmup_steps=5, **training)
    built = build_optimizer(optimizer, model.named_parameters(), weight_decay=0.01)
    schedule = build_schedule(built, "noam", 16, 5, 100, factor=0.05)
    accelerator = Accelerator()
    wrapped, prepared, schedule = accelerator.prepare(model, built, schedule)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(average)) if average else None
    updater = Updater(accelerator, wrapped, prepared, recipe, ema)
    updater.runs_ahead = runs_ahead
    outcomes, factor = [], torch.ones(())
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * factor)
    for number in range(updates):
        factor.fill_(math.inf if number % 10 == 3 else 1.0)
        launched = updater([networks.with_labels() for _ in range(2)], Interruption(), is_first=number == 0)
        schedule.step()
        outcomes.append(launched.outcome())
    return updater, outcomes, [each.detach() for each in (ema or model).parameters()], built.state_dict()


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_the_device_makes_the_steps_that_the_host_makes(
    monkeypatch, cuda_graphs, optimizer, captured, average
) -> None:
    # In bfloat16, the last digit of a rate would be many of an update.
    monkeypatch.setattr(optimization, "has_bfloat16", lambda _: False)
    settings = {"updates": 16, "average": average, "clip_norm": 1.0}
    _, expected, weights, state = trained(optimizer, False, **settings)
    if captured:
        updates_of_a_gpu(monkeypatch)
    _, found, other_weights, other_state = trained(optimizer, True, **settings)
    # Of the passes of two batches of one shape, and of the step.
    assert [graph.replays for graph in cuda_graphs.made] == ([2 * 16 - 2, 16 - 2] if captured else [])
    assert [each.finite for each in found] == [number % 10 != 3 for number in range(16)]
    for one, other in zip(expected, found, strict=True):
        assert one[1] == other[1] and one[3:] == other[3:]
        assert one[:3] == pytest.approx(other[:3], rel=1e-4, nan_ok=True)
    torch.testing.assert_close(other_weights, weights, atol=2e-5, rtol=1e-4)
    parts = (state.values(), other_state.values()) if optimizer == "muon" else ([state], [other_state])
    for one, other in zip(*parts, strict=True):
        assert one["param_groups"] == other["param_groups"]
        torch.testing.assert_close(other["state"], one["state"], atol=1e-5, rtol=1e-3)


def test_update_1000_uses_the_learning_rate_of_update_1000(monkeypatch, cuda_graphs) -> None:
    """Adam's steps have the size of the rate if the gradient is always the same."""
    updates_of_a_gpu(monkeypatch)
    model = torch.nn.Linear(1, 1, bias=False)
    built = build_optimizer("adam", model.named_parameters())
    schedule = build_schedule(built, "noam", 16, 5, 1000)
    accelerator = Accelerator()
    model, optimizer, schedule = accelerator.prepare(model, built, schedule)
    updater = Updater(accelerator, model, optimizer, TrainingRecipe())
    (weight,) = model.parameters()
    weight.grad = torch.zeros_like(weight)
    for step in range(1, 1001):
        weight.grad.fill_(2.0)
        before = weight.item()
        updater._step_on_device(torch.zeros(()), False)
        if step in (1, 2, 3, 4, 5, 6, 100, 999, 1000):
            assert before - weight.item() == pytest.approx(noam(step, 16, 5), rel=1e-3), step
        schedule.step()
    assert [graph.replays for graph in cuda_graphs.made] == [998]


def test_the_state_of_a_captured_step_has_numbers(monkeypatch, cuda_graphs) -> None:
    """Schedules set them, and a checkpoint is to be that of any other training."""
    updates_of_a_gpu(monkeypatch)
    _, _, _, state = trained("muon", True, 5)
    for part in state.values():
        for group in part["param_groups"]:
            assert isinstance(group["lr"], float) and not group.get("capturable")


def test_gradients_that_move_are_captured_again(monkeypatch, cuda_graphs) -> None:
    updates_of_a_gpu(monkeypatch)
    updater, *_ = trained("adam", True, 3)
    before = len(cuda_graphs.made)
    for parameter in updater.plain.parameters():
        parameter.grad = None
    for _ in range(4):
        weights = [each.detach().clone() for each in updater.plain.parameters()]
        assert updater([networks.with_labels()], Interruption()).outcome().finite
        assert any(not torch.equal(old, new) for old, new in zip(weights, updater.plain.parameters(), strict=True))
    assert [graph.replays for graph in cuda_graphs.made[before:]] == [2, 2]


def test_a_batch_for_a_gpu_tells_where_padding_is(monkeypatch) -> None:
    """With a mask of two dimensions, transformers would read from the GPU whether there is any."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    model = tiny_model(dropout=0)
    updater = Updater(Accelerator(), model, torch.optim.SGD(model.parameters(), lr=1.0), TrainingRecipe())
    padded, whole = networks.with_labels(), networks.batch()
    whole["labels"] = whole.pop("decoder_input_ids")
    assert updater._ready(dict(padded))["attention_mask"].dim() == 4
    assert "attention_mask" not in updater._ready(dict(whole))
    for data in (padded, whole):
        expected, found = model(**data), model(**updater._ready(dict(data)))
        torch.testing.assert_close(found.logits, expected.logits)


def of_shapes(updater: Updater, passes: TwoPasses, shapes: list[tuple[int, int]]) -> list[Outcome]:
    """Makes an update of each two shapes, with other tokens each."""
    outcomes, generator = [], torch.Generator().manual_seed(3)
    for number, (first, second) in enumerate(pairwise([*shapes, shapes[0]])):
        batches = []
        for rows, width in (first, second):
            ids = torch.randint(4, 40, (2, rows, width), generator=generator)
            mask = torch.ones_like(ids[0])
            mask[0, 3:] = ids[0, 0, 3:] = 0
            ids[1, -1, 2:] = -100
            batch = {"input_ids": ids[0], "attention_mask": mask, "labels": ids[1]}
            batches.append(passes(batch, torch.arange(rows), number))
        with passes.loss():
            outcomes.append(updater(batches, Interruption(), is_first=number == 0).outcome())
    return outcomes


@pytest.mark.parametrize("training", [{}, {"r_drop": RDropRecipe()}, {"simcut": SimCutRecipe(p=0.3)}], ids=str)
def test_passes_are_captured_by_the_shapes_of_batches(monkeypatch, cuda_graphs, training) -> None:
    """The third time that a shape occurs; the same numbers come out."""
    shapes, found = [(2, 8), (3, 8), (2, 8), (2, 16), (3, 8)] * 4, []
    for captured in (False, True):
        if captured:
            updates_of_a_gpu(monkeypatch)
        model = tiny_model(dropout=0)
        recipe, accelerator = TrainingRecipe(clip_norm=1.0, **training), Accelerator()
        built = build_optimizer("adam", model.named_parameters(), learning_rate=1e-3)
        updater = Updater(accelerator, *accelerator.prepare(model, built), recipe)
        found.append((of_shapes(updater, TwoPasses(recipe, 1, model), shapes), list(model.parameters())))
    assert updater.captures_passes and len(updater.graphs) == 3
    # Each shape occurs twice without its graph.
    assert sorted(graph.replays for graph in cuda_graphs.made) == [6, 14, 14, 18]
    for one, other in zip(*(outcomes for outcomes, _ in found), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-3)


def test_the_graphs_of_the_last_shapes_are_kept(monkeypatch, cuda_graphs) -> None:
    monkeypatch.setattr(update_module, "MAX_SHAPES", 2)
    updates_of_a_gpu(monkeypatch)
    model, recipe = tiny_model(dropout=0), TrainingRecipe()
    built = build_optimizer("adam", model.named_parameters(), learning_rate=1e-3)
    updater = Updater(Accelerator(), *Accelerator().prepare(model, built), recipe)
    of_shapes(updater, TwoPasses(recipe, 1, model), [(2, 8), (3, 8), (2, 8), (4, 8), (2, 8)])
    assert [dict(key)["labels"] for key in updater.graphs] == [(4, 8), (2, 8)]


def test_passes_that_cannot_be_captured_are_not_tried_again(monkeypatch, cuda_graphs, caplog) -> None:
    """Here, because a hook reads from the GPU. All then run as they are."""
    updates_of_a_gpu(monkeypatch)
    model, recipe = tiny_model(dropout=0), TrainingRecipe()
    model.model.encoder.register_forward_hook(lambda _, __, output: output[0].sum().item() and None)
    built = build_optimizer("adam", model.named_parameters(), learning_rate=1e-3)
    updater = Updater(Accelerator(), *Accelerator().prepare(model, built), recipe)
    outcomes = of_shapes(updater, TwoPasses(recipe, 1, model), [(2, 8), (3, 8)] * 6)
    assert all(each.finite for each in outcomes) and not updater.captures_passes
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("A pass runs without a CUDA graph, because its capture failed: operation not permitted")


def test_an_update_whose_memory_runs_out_is_made_again_without_graphs(monkeypatch, cuda_graphs, caplog) -> None:
    """In the middle of it, when some gradients have been added up."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shapes, found, full = [(2, 8), (3, 8), (2, 8), (3, 8), (2, 8), (4, 8), (2, 8), (3, 8)], [], True
    make = Updater._pass

    def out_of_memory(self: Updater, batch: Batch) -> None:
        nonlocal full
        make(self, batch)
        if full and len(batch["labels"]) == 4:
            full = False
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for captured in (False, True):
        if captured:
            updates_of_a_gpu(monkeypatch)
            monkeypatch.setattr(Updater, "_pass", out_of_memory)
        model, recipe = tiny_model(dropout=0), TrainingRecipe()
        built = build_optimizer("adam", model.named_parameters(), learning_rate=1e-3)
        updater = Updater(Accelerator(), *Accelerator().prepare(model, built), recipe)
        found.append((of_shapes(updater, TwoPasses(recipe, 1, model), shapes), list(model.parameters())))
    assert not full and not updater.graphs and not updater.captures_passes
    for one, other in zip(*(outcomes for outcomes, _ in found), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-3)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "Passes run without CUDA graphs from now on, because memory has run out"
    ]


class OneDevice(TorchDispatchMode):
    """Fails for an operator that has a tensor on the CPU among others: a GPU would copy it, and wait."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = [each for each in tree_leaves((arguments, keywords)) if isinstance(each, torch.Tensor)]
        assert {each.device.type for each in found} <= {"meta"}, function
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("training", [{}, {"r_drop": RDropRecipe()}], ids=str)
def test_all_tensors_of_passes_and_of_muon_are_on_the_device(monkeypatch, training) -> None:
    monkeypatch.setattr(kernels_vaswani, "type_of_products", lambda _: torch.float32)
    monkeypatch.setattr(consistency, "type_of_products", lambda _: torch.float32)
    device = torch.device("meta")
    with device:
        model = networks.tiny_model().train()
        batch = networks.with_labels()
        mask = torch.ones(3, 1, 1, batch["input_ids"].shape[1], dtype=torch.bool)
        if training:
            target = model.prepare_decoder_input_ids_from_labels(batch["labels"]).repeat(2, 1)
            batch |= {"input_ids": batch["input_ids"].repeat(2, 1), "decoder_input_ids": target}
        batch["attention_mask"] = mask.repeat(1 + bool(training), 1, 1, 1)
        more = {"epsilon_ls": 0.1, "num_items_in_batch": torch.ones((), dtype=torch.long), "loss_only": True}
    with TwoPasses(TrainingRecipe(**training), 1, model).loss(), OneDevice():
        model(**batch, **more).loss.backward()
    matrices = [each for each in model.parameters() if each.dim() == 2]
    optimizer = optimization.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer.found_inf = torch.zeros((), device=device)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros((), device=device)
    with OneDevice():
        optimizer.step()
