"""An update: its loss, its gradients, and what is left out."""

import math
from contextlib import contextmanager

import pytest
import torch

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.interruption import Interruption
from hf_vaswani.recipe import TrainingRecipe


def test_gradients_are_clipped_only_on_request() -> None:
    from accelerate import Accelerator

    from hf_vaswani.training.loop import _update

    moved = []
    for clip_norm in (None, 0.01):
        torch.manual_seed(0)
        config = VaswaniConfig(vocab_size=30, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1)
        model = VaswaniForConditionalGeneration(config).train()
        before = [p.detach().clone() for p in model.parameters()]
        ids = torch.arange(4, 10)[None]
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        recipe = TrainingRecipe(clip_norm=clip_norm)
        _update(Accelerator(), model, torch.optim.SGD(model.parameters(), lr=1.0), [batch], recipe, Interruption())
        moved.append(
            sum((p - b).square().sum() for p, b in zip(model.parameters(), before, strict=True)).sqrt().item()
        )
    assert moved[0] > 0.1
    assert moved[1] == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(("over", "epsilon"), [("others", 0.25), ("all", 0.2)])
def test_who_shares_the_label_smoothing(over, epsilon) -> None:
    """Over all V tokens is torch's own label_smoothing; over the others, V / (V - 1) = 5 / 4 of it."""
    from accelerate import Accelerator

    from hf_vaswani.training.loop import _update

    torch.manual_seed(0)
    config = VaswaniConfig(
        vocab_size=5, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0
    )
    model = VaswaniForConditionalGeneration(config).train()
    ids = torch.tensor([[3, 4, 2]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    logits = model(**batch).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, ids[0], label_smoothing=epsilon)
    recipe = TrainingRecipe(label_smoothing=0.2, label_smoothing_over=over)
    update = _update(
        Accelerator(), model, torch.optim.SGD(model.parameters(), lr=1.0), [batch], recipe, Interruption()
    )
    assert update.loss == pytest.approx(expected.item())


def test_epsilon_over_all_tokens_by_hand() -> None:
    """V = 5, epsilon = 0.2: each of the five has 0.04, so the four others have 0.16."""
    from hf_vaswani.training.loop import _epsilon_without_target

    assert _epsilon_without_target(0.2, 5) == pytest.approx(0.16)


def test_labels_are_counted_where_the_model_is() -> None:
    """Counts of several objectives are stacked, and a batch may have the labels of one alone."""
    import torch

    from hf_vaswani.training.loop import _count_labels

    device = torch.device("meta")
    labels = torch.full((2, 3), -100, device=device)
    assert _count_labels([labels, labels], device).device == _count_labels([], device).device == device
    cpu = torch.device("cpu")
    assert int(_count_labels([torch.tensor([[1, -100], [2, 3]]), torch.tensor([[4]])], cpu)) == 4
    assert int(_count_labels([], cpu)) == 0


def test_an_update_does_not_depend_on_how_it_is_split() -> None:
    """Two uneven batches added up are one batch: the loss is per token of the update, not a mean of means."""
    from accelerate import Accelerator

    from hf_vaswani.training.loop import _update

    long = {"input_ids": torch.randint(4, 30, (3, 6)), "labels": torch.randint(4, 30, (3, 7))}
    short = {"input_ids": torch.randint(4, 30, (1, 6)), "labels": torch.full((1, 7), -100)}
    short["labels"][0, :2] = 5
    both = {name: torch.cat([long[name], short[name]]) for name in long}
    results = []
    for batches in ([both], [long, short]):
        torch.manual_seed(0)
        config = VaswaniConfig(
            vocab_size=30, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0
        )
        model = VaswaniForConditionalGeneration(config).double().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in batches]
        update = _update(Accelerator(), model, optimizer, batches, TrainingRecipe(), Interruption())
        results.append((update.loss, update.tokens, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert results[0][1] == results[1][1] == 23
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    torch.testing.assert_close(results[0][2], results[1][2], atol=1e-7, rtol=0)


def tiny_update():
    from accelerate import Accelerator

    torch.manual_seed(0)
    config = VaswaniConfig(vocab_size=30, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1)
    model = VaswaniForConditionalGeneration(config).train()
    ids = torch.arange(4, 10)[None]
    return Accelerator(), model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def test_an_infinite_gradient_of_a_finite_loss_is_left_out() -> None:
    from hf_vaswani.training.loop import _update

    accelerator, model, batch = tiny_update()
    before = [weight.detach().clone() for weight in model.parameters()]
    next(model.model.encoder.layers[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    update = _update(
        accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0), [batch], TrainingRecipe(), Interruption()
    )
    assert math.isfinite(update.loss) and not math.isfinite(update.gradient_norm) and not update.finite
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def test_the_last_batch_of_an_update_is_synchronised_and_weighs_as_many_processes() -> None:
    """As one of three processes, each with its share of one sum, of which DDP takes the mean."""
    from hf_vaswani.training.loop import _update

    accelerator, model, batch = tiny_update()
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
    update = _update(OneOfThree(), model, optimizer, [batch, batch], TrainingRecipe(), interruption)
    assert [entry == "no sync" for entry in seen] == [True, False, False]
    assert sum(seen[1:]) == pytest.approx(update.loss)
    assert (update.tokens, update.stop) == (3 * 2 * 6, True)


def scaled_update():
    """As in fp16, with a scaler that starts at 8."""
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator, model, batch = tiny_update()
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
    from hf_vaswani.training.loop import _update

    scaled, model, optimizer, batch = scaled_update()
    infinite = model.lm_head.register_forward_hook(lambda _, __, logits: logits * math.inf)
    assert not _update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite
    infinite.remove()
    before = model.lm_head.weight.detach().clone()
    assert _update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite
    assert scaled.scaler.get_scale() == 4.0 and not torch.equal(model.lm_head.weight, before)


def test_in_fp16_infinite_gradients_count_once_they_cannot_be_scaled_any_less() -> None:
    from hf_vaswani.training.loop import _update

    scaled, model, optimizer, batch = scaled_update()
    before = [weight.detach().clone() for weight in model.parameters()]
    next(model.model.encoder.layers[0].parameters()).register_hook(lambda gradient: gradient * math.inf)
    found = [_update(scaled, model, optimizer, [batch], TrainingRecipe(), Interruption()).finite for _ in range(5)]
    # At 8, 4 and 2 the scaler still looks for its scale.
    assert found == [True, True, True, False, False]
    assert all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
