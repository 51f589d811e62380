"""Equation 3 of the paper, in numbers worked out by hand, and as torch's scheduler."""

import pytest
import torch

from hf_vaswani.optimization import build_optimizer, build_schedule, noam


def test_noam_of_the_paper() -> None:
    # 512^-0.5 = 0.0441942, 4000^-1.5 = 3.95285e-6, 4000^-0.5 = 0.0158114
    assert noam(1, 512, 4000) == pytest.approx(0.0441942 * 3.95285e-6, rel=1e-5)
    assert noam(4000, 512, 4000) == pytest.approx(0.0441942 * 0.0158114, rel=1e-5)
    assert noam(16000, 512, 4000) == pytest.approx(noam(4000, 512, 4000) / 2)
    assert noam(100, 512, 4000, factor=2.0) == pytest.approx(2 * noam(100, 512, 4000))


def test_the_schedule_starts_at_step_one() -> None:
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(2))])
    schedule = build_schedule(optimizer, 64, 5, 1.5)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([noam(step, 64, 5, 1.5) for step in range(1, 9)])


def test_adam_has_the_papers_constants() -> None:
    group = build_optimizer([torch.nn.Parameter(torch.zeros(2))]).param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)
