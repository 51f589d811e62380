"""A run that is stopped loses nothing: resumed, it ends with the same bits as an uninterrupted one."""

import ctypes
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.cli import main
from hf_vaswani.interruption import (
    Interrupted,
    Interruption,
    delayed_signals,
    ends_after_sigterm,
    exclusive,
    stopped_by_sigterm,
)
from hf_vaswani.run_folder import list_checkpoints
from hf_vaswani.training.optimization import noam
from hf_vaswani.training.update import Updater

from . import children
from .campaign.verbs import verb
from .children import Child, rarely_switching, wait_for
from .conftest import ROOT, dear, tiny_recipe
from .cuda_graphs import updates_of_a_gpu


def start(arguments: list[str], run: Path, **settings: Any) -> Child:
    """Starts a training, in which a thread that waits for another one without releasing Python's lock hangs."""
    outputs = run.with_name(f"{run.name}-outputs-{settings.get('environment', {}).get('RANK', 0)}")
    return Child(outputs, rarely_switching, verb, ["train", *arguments, "--run_dir", str(run)], **settings)


def train(arguments: list[str], run: Path) -> int | None:
    return start(arguments, run).end().code


def bits(run: Path) -> dict[str, Any]:
    """Everything a run leaves behind, except times and the names of its own folder."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.name in ("progress.json", "test.json"):
            found[name] = json.loads(path.read_text("utf-8")) | {"seconds": None, "model": None}
        elif name not in ("recipe.yaml", "environment.json"):
            found[name] = path.read_bytes() if path.suffix in (".safetensors", ".jsonl", ".txt") else None
    return found


@pytest.fixture
def launch() -> Iterator[Callable[..., list[Child]]]:
    """Starts a training on two processes; kills those that outlive the test."""
    started: list[Child] = []

    def two(arguments: list[str], run: Path) -> list[Child]:
        ranks = [start(arguments, run, environment=world) for world in children.worlds()]
        started.extend(ranks)
        return ranks

    yield two
    for child in started:
        child.end(0)


@pytest.mark.process
@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 0)])
def test_asked_to_stop_it_saves_and_says_how_to_resume(tmp_path, number, code, workers) -> None:
    """
    The real `python train.py` with its data workers, as a job system stops it: with the signal handlers, threads and
    workers of an interpreter of its own, which no forked process has in the same way.
    """
    arguments = tiny_recipe(tmp_path, max_steps=10**6, save_every=50, keep_last=2, data_workers=workers)
    run = tmp_path / "run"
    command = [sys.executable, str(ROOT / "train.py"), *arguments, "--run_dir", str(run)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    wait_for(lambda: (run / "checkpoint-50").is_dir() or process.poll() is not None)
    # To the process group and to the process, as launchers do.
    os.killpg(process.pid, number)
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=120)
    newest = list_checkpoints(run)[-1]
    step = int(newest.name.removeprefix("checkpoint-"))
    assert process.returncode == code, stderr[-2000:]
    sentence = f"train.py: stopped. Everything is saved in {newest}; run the same command again to resume."
    assert stderr.strip().splitlines()[-1] == sentence and step >= 50 and "Traceback" not in stderr
    # Resumed, it ends with the bits of an uninterrupted run; at an end that is not far.
    last = step - step % 50 + 50
    arguments = [*arguments, f"--training.max_steps={last}"]
    assert train(arguments, run) == 0
    assert [path.name for path in list_checkpoints(run)] == [f"checkpoint-{last - 50}", f"checkpoint-{last}"]
    whole = run.with_name("whole")
    assert train(arguments, whole) == 0
    assert bits(run) == bits(whole)


@pytest.mark.process
def test_one_of_two_processes_asked_to_stop_stops_both_at_one_update(tmp_path, launch) -> None:
    from accelerate.utils import load

    arguments = tiny_recipe(tmp_path, max_steps=10**6, save_every=10, keep_last=1, average_last=1)
    run = tmp_path / "run"
    processes = launch(arguments, run)
    wait_for(lambda: bool(list_checkpoints(run)))
    os.kill(processes[1].process.pid, signal.SIGUSR1)
    assert [child.end(30).code for child in processes] == [143, 138]
    (checkpoint,) = list_checkpoints(run)
    # Each has a dropout of its own.
    for process in (0, 1):
        generator = torch.Generator()
        generator.set_state(load(checkpoint / f"random_states_{process}.pkl")["torch_manual_seed"])
        assert generator.initial_seed() == process + 1


def test_a_second_ctrl_c_acts_at_once_and_a_second_sigterm_does_not() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interruption(at_once="without a checkpoint") as interruption:
        signal.raise_signal(signal.SIGINT)
        # A launcher forwards the same Ctrl-C at once.
        signal.raise_signal(signal.SIGINT)
        interruption.since -= 2
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match="without a checkpoint"):
            signal.raise_signal(signal.SIGINT)
        assert interruption.signal == signal.SIGINT
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_delayed_signals_act_at_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), delayed_signals():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    with pytest.raises(Interrupted), stopped_by_sigterm(), delayed_signals():
        signal.raise_signal(signal.SIGTERM)
        done = False
    assert not done


def wait_forever(in_library: bool, ready: Path) -> None:
    """Waits in C, where no handler of Python is called, or for an update that never comes."""
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    with ends_after_sigterm("too late.", 0.5), Interruption():
        ready.touch()
        while True:
            if in_library:
                libc.pthread_mutex_lock(lock)
            else:
                time.sleep(9)


@pytest.mark.process
@pytest.mark.parametrize("in_library", [True, False])
def test_sigterm_ends_a_training_that_gets_no_further(tmp_path, in_library) -> None:
    child = Child(tmp_path / "outputs", wait_forever, in_library, tmp_path / "ready")
    wait_for((tmp_path / "ready").exists)
    time.sleep(0.2)
    os.kill(child.process.pid or 0, signal.SIGTERM)
    end = child.end(30)
    assert (end.code, end.sentence) == (143, "too late.")


def test_a_block_that_ends_after_sigterm_in_time_leaves_the_process_alone() -> None:
    before = signal.set_wakeup_fd(-1)
    with pytest.raises(Interrupted), ends_after_sigterm("too late.", 0.2), stopped_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    # Nor does the signal of a child count, which inherits everything.
    with ends_after_sigterm("too late.", 0.05):
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        time.sleep(0.2)
    time.sleep(0.1)
    assert signal.set_wakeup_fd(before) == -1


def full_shared_memory(arguments: list[str], run: str) -> int:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    for name in ("_share_filename_cpu_", "_share_fd_cpu_", "_new_using_filename_cpu", "_new_using_fd_cpu"):
        setattr(torch.UntypedStorage, name, full)
    return main(["train", *arguments, "--run_dir", run])


@pytest.mark.process
def test_a_worker_that_cannot_hand_over_a_batch_ends_the_training(tmp_path) -> None:
    """As with a full /dev/shm. Otherwise the training would wait forever."""
    arguments = tiny_recipe(tmp_path, max_steps=3, data_workers=1)
    end = Child(tmp_path / "outputs", full_shared_memory, arguments, str(tmp_path / "run")).end()
    assert end.code == 2 and "A worker process of training.data_workers died" in end.sentence, end.err[-2000:]
    assert "cannot hand over a batch: No space left on device" in end.err


def test_a_folder_that_is_being_trained_is_refused(tmp_path, capsys) -> None:
    arguments = [*tiny_recipe(tmp_path, max_steps=1), "--run_dir", str(tmp_path / "run")]
    with FileLock(tmp_path / ".run.lock"):
        assert main(["train", *arguments]) == 2
    assert "run is being written by another process" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["train", *arguments]) == 0
    assert not (tmp_path / ".run.lock").exists()


def test_a_lock_that_its_holder_leaves_while_another_asks_for_it_has_one_holder(tmp_path, monkeypatch) -> None:
    """The file that the other has opened is removed before it is locked: who locked it would be alone with it."""
    fcntl = pytest.importorskip("fcntl")
    asked, left, lock = threading.Event(), threading.Event(), fcntl.flock
    entered, done = threading.Event(), threading.Event()

    def late(file: int, operation: int) -> None:
        if threading.current_thread() is other and operation & fcntl.LOCK_EX:
            asked.set()
            left.wait(20)
        lock(file, operation)

    def wait_and_hold() -> None:
        with exclusive(tmp_path / "run", 20):
            entered.set()
            done.wait(20)

    other = threading.Thread(target=wait_and_hold)
    monkeypatch.setattr(fcntl, "flock", late)
    with exclusive(tmp_path / "run"):
        other.start()
        assert asked.wait(20)
    left.set()
    assert entered.wait(20)
    with pytest.raises(ValueError, match="is being written by another process"), exclusive(tmp_path / "run"):
        pass
    done.set()
    other.join()


@pytest.mark.process
def test_a_child_of_a_pool_ends_silently() -> None:
    """It inherits this process's handler of SIGTERM, with which pools end their children."""
    program = (
        "import multiprocessing, time\n"
        "from hf_vaswani.interruption import stopped_by_sigterm\n"
        "context = multiprocessing.get_context('fork')\n"
        # Python loses signals that arrive while it forks.
        "ready = context.Event()\n"
        "def wait():\n"
        "    ready.set()\n"
        "    time.sleep(60)\n"
        "with stopped_by_sigterm():\n"
        "    child = context.Process(target=wait)\n"
        "    child.start()\n"
        "    assert ready.wait(30)\n"
        "    child.terminate()\n"
        "    child.join(30)\n"
        "print(child.exitcode)\n"
    )
    end = children.python("-c", program)
    assert (end.out, end.err) == ("-15\n", "")


@pytest.mark.parametrize(
    "place",
    [
        "data.pairs.PairData.make_tokenizer",
        dear("data.pairs.PairData.build_updates"),
        "training.state.forget_after",
        "training.loop._train",
        dear("training.loop.translate_and_score"),
        "training.loop.card_files",
    ],
)
def test_asked_to_stop_outside_the_updates_it_ends_with_a_sentence(tmp_path, capsys, monkeypatch, place) -> None:
    arguments = ["train", *tiny_recipe(tmp_path, scored=True, max_steps=2), "--run_dir", str(tmp_path / "run")]
    owner_name, name = place.rsplit(".", 1)
    owner = pkgutil.resolve_name(f"hf_vaswani.{owner_name}")
    function, before = getattr(owner, name), signal.getsignal(signal.SIGTERM)

    def asked(*options: Any, **more: Any) -> Any:
        found = function(*options, **more)
        # As if a launcher forwarded the signal.
        signal.raise_signal(signal.SIGTERM)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, asked)
        assert main(arguments) == 143
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error == f"hf-vaswani: stopped. Everything in {tmp_path / 'run'} is intact; the same command again resumes."
    assert not list(tmp_path.rglob(".*"))
    assert signal.getsignal(signal.SIGTERM) == before
    assert main(arguments) == 0
    assert (tmp_path / "run" / "model" / "README.md").is_file()
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_loses_the_other_one_ends_with_an_error(tmp_path, launch, victim) -> None:
    run = tmp_path / "run"
    arguments = tiny_recipe(tmp_path, max_steps=10**6, save_every=10, keep_last=1, average_last=1)
    processes = launch(arguments, run)
    wait_for(lambda: bool(list_checkpoints(run)))
    os.kill(processes[victim].process.pid, signal.SIGKILL)
    end = processes[1 - victim].end()
    assert end.code == 2 and "Traceback" not in end.err, end.err[-2000:]


# ---- Non-finite updates ------------------------------------------------------------------------------------------


def poison(monkeypatch, updates: Collection[int]) -> None:
    """Makes the loss of these updates infinite, counted from 1, without changing their gradients."""
    forward, count = VaswaniForConditionalGeneration.forward, 0

    def poisoned(self, *args, **kwargs):
        nonlocal count
        outputs = forward(self, *args, **kwargs)
        if self.training and outputs.loss is not None:
            count += 1
            if count in updates:
                outputs.loss = outputs.loss + float("inf")
        return outputs

    monkeypatch.setattr(VaswaniForConditionalGeneration, "forward", poisoned)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_update_with_a_non_finite_loss_is_skipped_and_logged(tmp_path, monkeypatch, steps_by) -> None:
    poison(monkeypatch, {3, 5})
    switches = {"max_steps": 6, "save_every": 1, "keep_last": 6, "max_nonfinite_updates": 2, "ema_decay": 0.9}
    assert main(["train", *tiny_recipe(tmp_path, **switches), "--run_dir", str(tmp_path / "run")]) == 0
    for file in ("model", "ema"):
        weights = [load_file(tmp_path / "run" / f"checkpoint-{n}" / f"{file}.safetensors") for n in range(1, 7)]
        moved = [any(not torch.equal(one[name], two[name]) for name in one) for one, two in pairwise(weights)]
        assert moved == [True, False, True, False, True]
    skipped = lines(tmp_path / "run" / "nonfinite_updates.jsonl")
    assert [line["step"] for line in skipped] == [3, 5]
    # The schedule advances all the same.
    assert [line["learning_rate"] for line in skipped] == pytest.approx([noam(3, 16, 10), noam(5, 16, 10)])


@pytest.mark.variants(2)
@pytest.mark.parametrize("stop", [1, 2])
def test_a_stop_among_skipped_updates_changes_nothing(tmp_path, monkeypatch, stop) -> None:
    """Neither the number of updates in a row that ends the run, nor the start of the moving average."""
    switches = {"save_every": 1, "keep_last": 9, "max_nonfinite_updates": 4, "ema_decay": 0.75, "average_last": 1}
    averages = []
    for steps, name in (((3,), "whole"), ((1, 3), "parted")):
        for number, max_steps in enumerate(steps):
            poison(monkeypatch, set() if number else {1})
            arguments = tiny_recipe(tmp_path, max_steps=max_steps, **switches)
            assert main(["train", *arguments, "--run_dir", str(tmp_path / name)]) == 0
            monkeypatch.undo()
        averages.append(load_file(tmp_path / name / "checkpoint-3" / "ema.safetensors"))
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    poison(monkeypatch, range(1, 99))
    run = tmp_path / "never"
    for max_steps, code in ((stop, 0), (9, 2)):
        assert main(["train", *tiny_recipe(tmp_path, max_steps=max_steps, **switches), "--run_dir", str(run)]) == code
    assert [line["step"] for line in lines(run / "nonfinite_updates.jsonl")] == [1, 2, 3, 4]


def test_too_many_skipped_updates_stop_the_run_and_keep_its_last_checkpoint(
    tmp_path, monkeypatch, capsys, steps_by
) -> None:
    arguments = tiny_recipe(tmp_path, max_steps=30, save_every=4, max_nonfinite_updates=3, keep_last=3, log_every=1)
    arguments += ["--run_dir", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        poison(patch, range(6, 100))
        assert main(["train", *arguments]) == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    skipped = lines(tmp_path / "run" / "nonfinite_updates.jsonl")
    assert [line["step"] for line in skipped] == [6, 7, 8]
    rate, pairs = skipped[-1]["learning_rate"], ", ".join(map(str, skipped[-1]["pairs"][:10]))
    words = ["3 updates in a row", "update 8: loss inf", f"learning rate {rate:.3g}", "checkpoint-4", pairs]
    assert all(word in sentence for word in words), sentence
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    curve = lines(tmp_path / "run" / "training.jsonl")
    assert [line["loss"] is None for line in curve] == [False] * 5 + [True] * 2
    # Without the cause, it resumes from there, and log entries of later updates are removed.
    assert main(["train", *arguments, "--training.max_steps=8"]) == 0
    assert not (tmp_path / "run" / "nonfinite_updates.jsonl").exists()


def test_a_run_of_a_gpu_writes_what_any_other_run_writes(tmp_path, monkeypatch, cuda_graphs) -> None:
    """Although it knows each update one later: the curve, the weights, and where a signal stops it."""
    settings = {"max_steps": 12, "log_every": 1, "ema_decay": 0.9, "validate_every": 4, "save_every": 4}
    arguments, runs = tiny_recipe(tmp_path, scored=True, **settings), [tmp_path / "host", tmp_path / "device"]
    for run in runs:
        with monkeypatch.context() as patch:
            if run.name == "device":
                updates_of_a_gpu(patch)
            stop_in_update(patch, 6)
            # The host learns of the signal with the outcome.
            stopped = 6 if run.name == "host" else 7
            assert main(["train", *arguments, "--run_dir", str(run)]) == 128 + signal.SIGTERM
            assert [path.name for path in list_checkpoints(run)] == ["checkpoint-4", f"checkpoint-{stopped}"]
        with monkeypatch.context() as patch:
            if run.name == "device":
                updates_of_a_gpu(patch)
            assert main(["train", *arguments, "--run_dir", str(run)]) == 0
    assert len(cuda_graphs.made) == 2 and all(graph.replays for graph in cuda_graphs.made)
    for one, other in zip(*(lines(run / "training.jsonl") for run in runs), strict=True):
        assert one["step"] == other["step"] and one["learning_rate"] == other["learning_rate"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    for file in ("model", "ema"):
        one, other = (load_file(run / "checkpoint-12" / f"{file}.safetensors") for run in runs)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def stop_in_update(monkeypatch, number: int) -> None:
    """Sends this process SIGTERM within an update, counted from 1."""
    gradients, count = Updater._gradients, 0

    def stopped(self, batches):
        nonlocal count
        count += 1
        if count == number:
            signal.raise_signal(signal.SIGTERM)
        return gradients(self, batches)

    monkeypatch.setattr(Updater, "_gradients", stopped)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_destructor_is_not_lost(number) -> None:
    """Python drops errors raised there; the signal acts as soon as the destructor has returned."""
    done = []

    class Last:
        def __del__(self) -> None:
            signal.raise_signal(number)
            done.append(True)

    with pytest.raises(KeyboardInterrupt) as stopped, stopped_by_sigterm():
        last = Last()
        del last
        assert done
        time.sleep(5)
    if number == signal.SIGTERM:
        assert isinstance(stopped.value, Interrupted) and stopped.value.exit_code == 143
    else:
        assert not isinstance(stopped.value, Interrupted)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
