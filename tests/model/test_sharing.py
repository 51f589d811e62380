"""Modes of models that several threads use, and the ends of their work."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from hf_vaswani.model.sharing_vaswani import IN_USE, end_if_over, ended_by, evaluation_mode


def test_the_last_thread_to_leave_gives_modules_their_modes_back() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout())).train()
    model[0].eval()
    inside, leave = threading.Event(), threading.Event()

    def use() -> None:
        with evaluation_mode(model):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    # The other one still translates.
    assert not any(module.training for module in model.modules())
    leave.set()
    thread.join()
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert model not in IN_USE


def test_an_error_gives_the_modes_back() -> None:
    model = nn.Dropout().train()
    try:
        with evaluation_mode(model):
            raise KeyError
    except KeyError:
        pass
    assert model.training


def test_each_thread_is_ended_by_its_own_check() -> None:
    def end() -> None:
        raise TimeoutError

    with ended_by(end), ThreadPoolExecutor(1) as threads:
        with pytest.raises(TimeoutError):
            end_if_over()
        threads.submit(end_if_over).result()
        with ended_by(lambda: None):
            end_if_over()
        with pytest.raises(TimeoutError):
            end_if_over()
    end_if_over()
