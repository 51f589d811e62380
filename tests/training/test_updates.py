"""An update: its loss, its gradients, and what is left out."""

import math
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from hf_vaswani.interruption import Interruption
from hf_vaswani.recipe import TrainingRecipe
from hf_vaswani.training.loop import _count_labels, _Update, _update

from .. import networks

Batch = dict[str, torch.Tensor]


def tiny_model(**fields: Any) -> torch.nn.Module:
    return networks.tiny_model(**fields).train()


def tiny_batch(*ids: int) -> Batch:
    rows = torch.tensor([ids or range(4, 10)])
    return {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows}


def update(model: torch.nn.Module, *batches: Batch, accelerator: Any = None, **training: Any) -> _Update:
    """Makes an update by SGD with a learning rate of 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    recipe = TrainingRecipe(**training)
    return _update(accelerator or Accelerator(), model, optimizer, list(batches), recipe, Interruption())


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
    found = _update(OneOfThree(), model, optimizer, [batch, batch], TrainingRecipe(), interruption)
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

    return Scaled(), model, optimizer, batch


def test_in_fp16_an_update_after_one_that_was_left_out_goes_on() -> None:
    """The scaler hears of it, too: it takes an optimizer's gradients once between two of its own updates."""
    scaled, model, optimizer, batch = scaled_update()
    infinite = model.lm_head.register_forward_hook(lambda _, __, logits: logits * math.inf)
    assert not _update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite
    infinite.remove()
    before = model.lm_head.weight.detach().clone()
    assert _update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite
    assert scaled.scaler.get_scale() == 4.0 and not torch.equal(model.lm_head.weight, before)


def test_in_fp16_infinite_gradients_count_once_they_cannot_be_scaled_any_less() -> None:
    scaled, model, optimizer, batch = scaled_update()
    before = [weight.detach().clone() for weight in model.parameters()]
    next(model.model.encoder.layers[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    found = [_update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite for _ in range(5)]
    # At 8, 4 and 2 the scaler still looks for its scale.
    assert found == [True, True, True, False, False]
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
