"""Equation 3 of the paper and the other schedules, in numbers worked out by hand; Adam and AdamW."""

import pytest
import torch

from hf_vaswani.optimization import build_optimizer, build_schedule, noam


def test_noam_of_the_paper() -> None:
    # 512^-0.5 = 0.0441942, 4000^-1.5 = 3.95285e-6, 4000^-0.5 = 0.0158114
    assert noam(1, 512, 4000) == pytest.approx(0.0441942 * 3.95285e-6, rel=1e-5)
    assert noam(4000, 512, 4000) == pytest.approx(0.0441942 * 0.0158114, rel=1e-5)
    assert noam(16000, 512, 4000) == pytest.approx(noam(4000, 512, 4000) / 2)
    assert noam(100, 512, 4000, factor=2.0) == pytest.approx(2 * noam(100, 512, 4000))


def rates_of(kind: str, peak: float, warmup_steps: int, max_steps: int, factor: float = 1.0) -> list[float]:
    """The learning rate with which each update is made."""
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(2))], learning_rate=peak)
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


def test_noam_is_the_inverse_square_root_with_the_peak_that_it_has() -> None:
    assert rates_of("noam", 1.0, 4, 12) == pytest.approx(rates_of("inverse_sqrt", noam(4, 64, 4), 4, 12))


def test_adam_has_the_papers_constants() -> None:
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(2))])
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.Adam
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_decay_shrinks_matrices_alone_and_only_on_request(weight_decay) -> None:
    """Without gradients nothing else moves: each update takes off rate * decay, which is 0.1 * 0.5."""
    matrix, vector = torch.nn.Parameter(torch.full((2, 3), 8.0)), torch.nn.Parameter(torch.full((3,), 8.0))
    optimizer = build_optimizer([vector, matrix], weight_decay=weight_decay, learning_rate=0.1)
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
        build_optimizer([weight], weight_decay=weight_decay, learning_rate=0.1).step()
        ends.append(weight.detach())
    # The first step of Adam is the rate, whatever the gradient's size.
    torch.testing.assert_close(ends[0], torch.tensor([[7.9, 8.1]]))
    torch.testing.assert_close(ends[0] - ends[1], torch.full((1, 2), 0.1 * 0.5 * 8))
