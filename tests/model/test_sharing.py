"""Modes of models that several threads use."""

import threading

from torch import nn

from hf_vaswani.model.sharing_vaswani import IN_USE, evaluation_mode


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
