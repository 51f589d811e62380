"""Modes of models that several threads use, and the ends of their work."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from hf_vaswani.model.sharing_vaswani import IN_USE, end_if_over, ended_by, evaluation_mode

from ..conftest import ROOT


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


FORKS = """
import os, threading, time
from hf_vaswani.model.sharing_vaswani import LOCK

def fork():
    child = os.fork()
    if not child:
        with LOCK:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with LOCK:
    # As a tokenizer does that starts a process while it is called.
    print(fork(), flush=True)
inside, leave = threading.Event(), threading.Event()

def hold():
    with LOCK:
        inside.set()
        leave.wait()

thread = threading.Thread(target=hold)
thread.start()
inside.wait()
threading.Timer(0.1, leave.set).start()
# No child inherits what another thread holds.
print(fork(), leave.is_set(), flush=True)
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_is_forked_whoever_holds_the_lock() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60
    )
    assert done.stdout.split() == [b"7", b"7", b"True"], done.stderr[-2000:]


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
