"""Equation 3 of the paper and the other schedules, in numbers worked out by hand; Adam, AdamW and Muon."""

import copy
from typing import get_args

import pytest
import torch

from hf_vaswani.recipe import Optimizer, TrainingRecipe, resume_marks
from hf_vaswani.training.optimization import OPTIMIZERS, build_optimizer, build_schedule, noam


def test_noam_of_the_paper() -> None:
    # 512^-0.5 = 0.0441942, 4000^-1.5 = 3.95285e-6, 4000^-0.5 = 0.0158114
    assert noam(1, 512, 4000) == pytest.approx(0.0441942 * 3.95285e-6, rel=1e-5)
    assert noam(4000, 512, 4000) == pytest.approx(0.0441942 * 0.0158114, rel=1e-5)
    assert noam(16000, 512, 4000) == pytest.approx(noam(4000, 512, 4000) / 2)
    assert noam(100, 512, 4000, factor=2.0) == pytest.approx(2 * noam(100, 512, 4000))


def test_what_a_checkpoint_restores_is_fixed_when_a_run_resumes() -> None:
    """The recipe's value would be read, and then replaced by that of the saved optimizer."""
    keys = {"peak_learning_rate", *(key for _, keys in OPTIMIZERS.values() for key in keys)}
    assert {resume_marks()[f"training.{key}"] for key in keys} == {"fixed"}


def adam(*parameters: torch.nn.Parameter, **keywords: float) -> torch.optim.Optimizer:
    return build_optimizer("adam", [("", parameter) for parameter in parameters], **keywords)


def rates_of(kind: str, peak: float, warmup_steps: int, max_steps: int, factor: float = 1.0) -> list[float]:
    """The learning rate with which each update is made."""
    optimizer = adam(torch.nn.Parameter(torch.zeros(2)), learning_rate=peak)
    schedule = build_schedule(optimizer, kind, 64, warmup_steps, max_steps, factor)
    rates = []
    for _ in range(max_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == rates[-1:]
        optimizer.step()
        schedule.step()
    return rates


def test_the_schedule_starts_at_step_one() -> None:
    assert rates_of("noam", 1.0, 5, 8, 1.5) == pytest.approx([noam(step, 64, 5, 1.5) for step in range(1, 9)])


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        # 0.1 * sqrt(4 / step): sqrt(4/5) = 0.894427, sqrt(4/9) = 2/3, sqrt(4/16) = 1/2
        ("inverse_sqrt", {5: 0.0894427, 9: 0.1 * 2 / 3, 16: 0.05}),
        ("constant", {5: 0.1, 9: 0.1, 16: 0.1}),
        # Step 16 would be the end of a half-wave that is 12 long, so 10 is its middle. cos 30 degrees = 0.866025
        ("cosine", {6: 0.05 * 1.866025, 10: 0.05, 14: 0.05 * 0.133975}),
    ],
)
def test_the_other_schedules_by_hand(kind, rates) -> None:
    """Warm-up of 4 updates to 0.1 in a straight line, of which the first is not lost; then each its own way."""
    seen = rates_of(kind, 0.1, 4, 15 if kind == "cosine" else 16)
    assert seen[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert {step: seen[step - 1] for step in rates} == pytest.approx(rates, rel=1e-5)
    assert min(seen) > 0


def test_every_optimizer_of_a_recipe_can_be_built_from_its_keys() -> None:
    assert set(OPTIMIZERS) == set(get_args(Optimizer))
    for name, (_, keys) in OPTIMIZERS.items():
        keywords = {key: getattr(TrainingRecipe(), key) for key in keys}
        assert build_optimizer(name, [("", torch.nn.Parameter(torch.zeros(2)))], **keywords).param_groups


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_decay_shrinks_matrices_alone_and_only_on_request(weight_decay) -> None:
    """Without gradients nothing else moves: each update takes off rate * decay, which is 0.1 * 0.5."""
    matrix, vector = torch.nn.Parameter(torch.full((2, 3), 8.0)), torch.nn.Parameter(torch.full((3,), 8.0))
    optimizer = adam(vector, matrix, weight_decay=weight_decay, learning_rate=0.1)
    for _ in range(2):
        matrix.grad, vector.grad = torch.zeros_like(matrix), torch.zeros_like(vector)
        optimizer.step()
    left = 8.0 * (1 - 0.05) ** 2 if weight_decay else 8.0
    torch.testing.assert_close(matrix.detach(), torch.full((2, 3), left))
    assert vector.tolist() == [8.0] * 3


def test_adamw_moves_by_the_gradient_as_adam_does() -> None:
    """Decoupled: the decay is not in the running means, so that the two differ by the decay alone."""
    ends = []
    for weight_decay in (0.0, 0.5):
        weight = torch.nn.Parameter(torch.full((1, 2), 8.0))
        weight.grad = torch.tensor([[1.0, -3.0]])
        adam(weight, weight_decay=weight_decay, learning_rate=0.1).step()
        ends.append(weight.detach())
    # The first step of Adam is the rate, whatever the gradient's size.
    torch.testing.assert_close(ends[0], torch.tensor([[7.9, 8.1]]))
    torch.testing.assert_close(ends[0] - ends[1], torch.full((1, 2), 0.1 * 0.5 * 8))


def test_muon_takes_matrices_of_layers_and_adam_the_rest() -> None:
    generator = torch.Generator().manual_seed(0)
    inner, embedding, vector = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (7, 5), (5,)))
    named = {"shared.weight": embedding, "encoder.layers.0.fc1.weight": inner, "encoder.layers.0.fc1.bias": vector}
    optimizer = build_optimizer("muon", named.items(), learning_rate=0.1)
    for weight in (inner, embedding, vector):
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()
    # Adam's first step is the rate; Muon's has the gradient's singular vectors, and singular values near
    # rate * 0.2 * sqrt(5), which its iterations leave somewhat apart.
    for weight in (embedding, vector):
        torch.testing.assert_close(weight.detach(), -0.1 * weight.grad.sign())
    left, _, right = torch.linalg.svd(inner.grad, full_matrices=False)
    turned = -(left.T @ inner.detach() @ right.T) / (0.1 * 0.2 * 5**0.5)
    assert turned.diagonal().min() > 0.6 and turned.diagonal().max() < 1.2, turned
    torch.testing.assert_close(turned, turned.diagonal().diag(), atol=0.03, rtol=0)


def test_muon_and_adam_are_one_to_a_schedule_and_to_a_saved_state() -> None:
    """Saved after 3 of 6 steps and loaded into another, whose schedule and whose every step then are the same."""

    def build() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,))]
        named = zip((".layers.0.weight", ".layers.0.bias"), weights, strict=True)
        optimizer = build_optimizer("muon", named, learning_rate=0.1, weight_decay=0.5)
        return weights, optimizer, build_schedule(optimizer, "cosine", 4, 2, 6)

    def step(weights, optimizer, schedule, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        schedule.step()

    one, two = build(), build()
    for seed in range(3):
        step(*one, seed)
    for weight, other in zip(one[0], two[0], strict=True):
        other.data.copy_(weight.data)
    for whole, loaded in zip(one[1:], two[1:], strict=True):
        loaded.load_state_dict(copy.deepcopy(whole.state_dict()))
    for seed in range(3, 6):
        rates = [[group["lr"] for group in part.param_groups] for trained in (one, two) for part in trained[1].parts]
        assert rates[:2] == rates[2:] and len({rate for part in rates for rate in part}) == 1
        assert rates[0][0] == one[2].get_last_lr()[0] < 0.1
        step(*one, seed)
        step(*two, seed)
        assert all(torch.equal(weight, other) for weight, other in zip(one[0], two[0], strict=True))
        assert not torch.equal(one[0][0], torch.ones(4, 4))
