"""Equation 3 of the paper and the other schedules, in numbers worked out by hand; Adam, AdamW and Muon."""

import copy
from typing import get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_vaswani.recipe import Optimizer, TrainingRecipe, resume_marks
from hf_vaswani.training import optimization
from hf_vaswani.training.optimization import (
    OPTIMIZERS,
    Muon,
    build_optimizer,
    build_schedule,
    noam,
    orthogonalized,
)


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


SHAPES = [(8, 8), (8, 24), (24, 8), (8, 8), (5, 3), (24, 8), (1, 7)]


def draw(shapes: list[tuple[int, int]], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("most", [2**20, 200, 1])
@pytest.mark.parametrize(("has_them", "tolerance"), [(True, 0.02), (False, 0.2)])
def test_muon_of_all_matrices_is_that_of_each(monkeypatch, has_them, tolerance, most, is_resumed) -> None:
    """Torch computes each matrix alone, and always in bfloat16, whose error is the larger tolerance."""
    monkeypatch.setattr(optimization, "has_bfloat16", lambda device: has_them)
    monkeypatch.setattr(optimization, "MAX_ELEMENTS", most)
    start = draw(SHAPES, 0)

    def build(kind: type[torch.optim.Optimizer]) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        weights = [torch.nn.Parameter(weight.clone()) for weight in start]
        groups = [{"params": weights[:4]}, {"params": weights[4:], "lr": 0.3, "weight_decay": 0.0, "momentum": 0.5}]
        return weights, kind(groups, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")

    (expected, theirs), (found, ours) = build(torch.optim.Muon), build(Muon)
    for seed in range(1, 4):
        for number, gradient in enumerate(draw(SHAPES, seed)):
            # A matrix may have no gradient, in some steps or in all.
            used = not (number == 3 or (number == 1 and seed == 2))
            expected[number].grad = found[number].grad = gradient if used else None
        before = [weight.detach().clone() for weight in expected]
        for weight, other in zip(found, before, strict=True):
            weight.data.copy_(other)
        theirs.step()
        ours.step()
        for old, one, other in zip(before, expected, found, strict=True):
            assert (other - one).norm() <= tolerance * (one - old).norm(), (seed, old.shape)
        if is_resumed:
            found, ours = build(Muon)
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    states = [{number: state["momentum_buffer"] for number, state in each.state_dict()["state"].items()}
              for each in (theirs, ours)]  # fmt: skip
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]


def test_matrices_are_orthogonalized_exactly_without_bfloat16(monkeypatch) -> None:
    monkeypatch.setattr(optimization, "has_bfloat16", lambda device: False)
    matrices = draw([(6, 9), (6, 9), (9, 6)], 1)
    a, b, c = coefficients = (3.4445, -4.7750, 2.0315)
    for matrix, turned in zip(matrices, orthogonalized(matrices, coefficients, 5, 1e-7), strict=True):
        left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = a * values + b * values**3 + c * values**5
        torch.testing.assert_close(turned.double(), left @ values.diag() @ right, atol=1e-4, rtol=1e-4)
    assert not orthogonalized([torch.zeros(3, 4)], coefficients, 5, 1e-7)[0].any()


def test_the_operations_of_muon_do_not_grow_with_the_layers() -> None:
    """Of a GPU, starting them takes most of the time. Nothing is read from the device."""

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            if not operation.is_view:
                self.names.append(str(operation))
            return operation(*arguments, **(keywords or {}))

    counts = []
    for layers in (1, 6):
        weights = [torch.nn.Parameter(weight) for weight in draw([(8, 8), (8, 24), (24, 8)] * layers, 1)]
        optimizer = Muon(weights, 0.1)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            with Counted() as counted:
                optimizer.step()
        counts.append(len(counted.names))
        assert not [name for name in counted.names if "_local_scalar_dense" in name]
    assert counts[0] == counts[1] <= 64


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
