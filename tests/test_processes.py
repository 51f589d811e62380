"""The processes of a launch meet within minutes, or say that they did not; then they wait for the work."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from threading import Barrier, Thread, current_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_vaswani import processes
from hf_vaswani.processes import (
    Processes,
    build_accelerator,
    close_process_group,
    on_every_process,
    on_main_process,
)
from hf_vaswani.recipe import TrainingRecipe

from .children import Child, free_port, run, run_launched, run_python, worlds
from .conftest import tiny_recipe


@pytest.mark.process
@pytest.mark.parametrize(("rank", "verb"), [(0, "train"), (1, "train"), (1, "translate")])
def test_a_process_that_never_comes_is_not_waited_for_long(tmp_path, rank, verb) -> None:
    """As when the launcher is killed before its workers have met."""
    program = (
        "import sys; from datetime import timedelta; from hf_vaswani import processes; "
        "processes.RENDEZVOUS_TIMEOUT = timedelta(seconds=2); "
        "from hf_vaswani.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--model", "a/b"] if verb == "translate" else tiny_recipe(tmp_path)
    arguments += [] if verb == "translate" else ["--run_dir", str(tmp_path / "run")]
    environment = worlds()[rank]
    end = run(tmp_path / "outputs", run_python, ["-c", program, verb, *arguments], environment=environment)
    assert end.code == 2, end.err[-2000:]
    assert "The 2 processes of this launch did not all meet" in end.sentence
    assert "Traceback" not in end.err and not (tmp_path / "run").exists()


@pytest.mark.process
def test_those_who_have_met_wait_for_each_other_as_long_as_it_takes(tmp_path) -> None:
    """Longer than for the meeting: one reads the text while the others wait."""
    assert processes.RENDEZVOUS_TIMEOUT.total_seconds() <= 600 < processes.TRAINING_TIMEOUT.total_seconds()
    program = (
        "import time; from datetime import timedelta; from hf_vaswani import processes; "
        "from hf_vaswani.recipe import TrainingRecipe; processes.RENDEZVOUS_TIMEOUT = timedelta(seconds=4); "
        "accelerator = processes.build_accelerator(TrainingRecipe(), 'run', str); "
        "print(processes.on_main_process(accelerator, lambda: time.sleep(5) or 7))"
    )
    ends = run_launched(tmp_path, run_python, ["-c", program])
    assert [end.out for end in ends] == ["7\n", "7\n"], [end.err for end in ends]


def in_turns(monkeypatch, function) -> list[object]:
    """What two processes get that play one after the other, or the errors that they raise."""
    told: list[object] = []

    def broadcast(objects):
        told[:] = told or objects
        return list(told)

    monkeypatch.setattr("accelerate.utils.broadcast_object_list", broadcast)
    found = []
    for index in (0, 1):
        try:
            found.append(function(SimpleNamespace(num_processes=2, process_index=index)))
        except (Exception, SystemExit) as error:
            found.append(error)
    return found


class UnpicklableError(KeyError):
    def __init__(self, *, word: str) -> None:
        super().__init__(word)

    def __reduce__(self):
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("a.jsonl is damaged."), ValueError, "a.jsonl is damaged."),
        (FileNotFoundError(2, "No such file", "a.txt"), OSError, "[Errno 2] No such file: 'a.txt'"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError, "'utf-8' codec can't decode byte 0xff"),
        (ModuleNotFoundError("Training needs peft"), ImportError, "Training needs peft"),
        (UnpicklableError(word="a bug"), RuntimeError, "UnpicklableError: 'a bug'"),
        (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError, "OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_whatever_the_main_process_fails_with_ends_all(monkeypatch, error, kind, text) -> None:
    def fail():
        raise error

    first, second = in_turns(monkeypatch, lambda launch: on_main_process(launch, fail))
    assert first is error and type(second) is kind and str(second).startswith(text)
    pickle.dumps(second)


def test_a_result_of_the_main_process_is_everybodys_and_made_once(monkeypatch) -> None:
    numbers = iter([7])
    assert in_turns(monkeypatch, lambda launch: on_main_process(launch, next, numbers)) == [7, 7]


def test_results_are_shared_by_all_and_so_is_the_error_of_one(monkeypatch) -> None:
    """Nobody waits for a process that has failed; in place of two processes there are two threads."""
    barrier, told = Barrier(2), dict[str, list[object]]()

    def gather(objects: list[object]) -> list[object]:
        told[current_thread().name] = objects
        barrier.wait(20)
        return [*told["0"], *told["1"]]

    def outcomes(*functions: Callable[[], object]) -> list[object]:
        found: list[object] = [None, None]

        def run(index: int) -> None:
            launch: Any = SimpleNamespace(num_processes=2, process_index=index)
            try:
                found[index] = on_every_process(launch, functions[index])
            except Exception as error:
                found[index] = error

        threads = [Thread(target=run, args=(index,), name=str(index)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found

    def fail() -> None:
        raise FileNotFoundError(2, "No such file", "a.txt")

    monkeypatch.setattr("accelerate.utils.gather_object", gather)
    assert outcomes(lambda: 3, lambda: "four") == [[3, "four"]] * 2
    other, own = outcomes(lambda: 3, fail)
    assert isinstance(own, FileNotFoundError) and type(other) is OSError and str(other) == str(own)
    first, second = outcomes(fail, fail)
    assert isinstance(first, FileNotFoundError) and isinstance(second, FileNotFoundError)
    alone: Any = SimpleNamespace(num_processes=1, process_index=0)
    assert on_every_process(alone, lambda: 5) == [5]


@pytest.mark.parametrize(("error", "code"), [(ValueError("bad line"), 2), (KeyError("a bug"), 1)])
def test_an_error_of_a_translation_is_told_by_the_main_process_alone(monkeypatch, error, code) -> None:
    def fail():
        raise error

    def translate(launch):
        this = Processes()
        this.num_processes, this.process_index = launch.num_processes, launch.process_index
        return this.on_main_process(fail)

    first, second = in_turns(monkeypatch, translate)
    assert first is error and isinstance(second, SystemExit) and second.code == code


def test_a_process_alone_reads_chunks_to_the_end() -> None:
    alone = Processes()
    assert (alone.num_processes, alone.process_index, alone.is_main_process) == (1, 0, True)
    assert list(alone.chunks(iter("abcde"), 2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert alone.gather("part") == ["part"]


@pytest.mark.process
def test_translating_in_one_process_needs_no_accelerate() -> None:
    program = (
        "import sys; sys.modules.update(accelerate=None); "
        "from hf_vaswani.processes import Processes; from hf_vaswani.translation import lines; "
        "print(*Processes().chunks(['one', 'two'], 1))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "['one'] ['two']\n", done.stderr[-2000:]


@pytest.fixture
def tiny() -> TrainingRecipe:
    return TrainingRecipe(cpu_threads=3)


def test_a_training_has_the_threads_of_its_recipe(tiny) -> None:
    before = torch.get_num_threads()
    try:
        build_accelerator(tiny, "run", str)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("processes_here", "before", "expected"), [(None, 3, 3), (None, 9, 4), (2, 9, 2), (9, 3, 1)])
def test_threads_are_a_share_of_the_processors_or_fewer(monkeypatch, processes_here, before, expected) -> None:
    asked = []
    monkeypatch.setattr(processes, "processors", lambda: 8 if processes_here is None else 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    processes.limit_threads(processes_here)
    assert asked == [expected]


def test_a_training_on_a_gpu_has_no_more_threads_than_processors(tiny, monkeypatch) -> None:
    """What it computes on the processor would be stopped by the quota."""
    asked = []
    gpu = SimpleNamespace(type="cuda")
    launched = SimpleNamespace(
        num_processes=1, is_main_process=True, distributed_type=SimpleNamespace(value="NO"), device=gpu, log_with=[]
    )
    monkeypatch.setattr("accelerate.Accelerator", lambda **_: launched)
    monkeypatch.setattr(processes, "limit_threads", lambda: asked.append(True))
    build_accelerator(tiny, "run", str)
    assert asked == [True]


# ---- Processors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {}, 64),
        # The quota of a group holds for those within it.
        ("0::/pods/one\n", {"pods/cpu.max": "300000 100000", "pods/one/cpu.max": "max 100000"}, 3),
        # The path is that of the host, which a container does not see.
        ("0::/../../kubepods/one\n", {"cpu.max": "200000 100000"}, 2),
        (
            "5:memory:/a\n3:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "600000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            6,
        ),
        ("3:cpu,cpuacct:/docker/1\n", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 4),
        # Half a processor more is worth a thread that is stopped half of the time.
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", {"cpu.max": "340000 100000"}, 3),
        ("0::/\n", {"cpu.max": "20000 100000"}, 1),
        ("nonsense", {"cpu.max": "nonsense"}, 64),
        ("0::/\n", {"cpu.max": "1 0"}, 64),
    ],
)
def test_processors_are_those_of_the_affinity_and_of_the_quota(monkeypatch, tmp_path, groups, files, expected) -> None:
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text)
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(processes, "CGROUPS", tmp_path / "mounted")
    monkeypatch.setattr(processes, "OWN_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    assert processes.processors() == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert processes.threads_of_a_process() == max(1, expected // 2)
    monkeypatch.setattr(processes, "OWN_CGROUPS", tmp_path / "nowhere")
    assert processes.processors() == 64
    # As Python 3.13 has it; and without either, as elsewhere than on Linux.
    monkeypatch.setattr(os, "process_cpu_count", lambda: 5, raising=False)
    assert processes.processors() == 5
    monkeypatch.delattr(os, "process_cpu_count")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processes.processors() == 128


# ---- Refused at the launch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp8", "must be no, bf16 or fp16, but it is fp8"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "cannot be launched with DeepSpeed: launch it on one device"),
        ("ACCELERATE_USE_MEGATRON_LM", "1", "cannot be launched with Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "cannot be launched with a parallelism_config"),
        ("ACCELERATE_MIXED_PRECISION", "no", "cannot be launched with XLA"),
    ],
)
def test_other_launches_are_refused_by_name(tiny, monkeypatch, variable, value, words) -> None:
    monkeypatch.setenv(variable, value)
    launched = SimpleNamespace(num_processes=1, distributed_type=SimpleNamespace(value="XLA"))
    monkeypatch.setattr("accelerate.Accelerator", lambda **_: launched)
    with pytest.raises(ValueError, match=words):
        build_accelerator(tiny, "run", str)


@pytest.mark.parametrize(
    ("kind", "asked", "on_cpu"),
    [
        (None, "", True),
        ("cuda", "", False),
        ("cuda", "true", True),
        ("xpu", "", False),
        ("npu", "", False),
        ("mps", "", True),
    ],
)
def test_several_processes_compute_on_whatever_the_machine_has(
    tiny, monkeypatch, caplog, accelerators, kind, asked, on_cpu
) -> None:
    """And they are refused if Accelerate does not see them: each would train a model of its own in one folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    accelerators(kind, 2)
    found = []

    def alone(cpu: bool, **_: object) -> SimpleNamespace:
        found.append(cpu)
        return SimpleNamespace(num_processes=1, process_index=0, wait_for_everyone=lambda: None)

    monkeypatch.setattr("accelerate.PartialState", alone)
    monkeypatch.setattr(processes, "end_with_launcher", lambda: None)
    for join in (lambda: build_accelerator(tiny, "run", str), Processes):
        with pytest.raises(ValueError, match="2 processes were launched, but Accelerate sees 1"):
            join()
    assert found == [on_cpu] * 2
    assert ("Several processes cannot meet on MPS" in caplog.text) == (kind == "mps")
    caplog.clear()
    # One of them says it.
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="2 processes were launched"):
        Processes()
    assert "MPS" not in caplog.text


@pytest.mark.parametrize(("kind", "count"), [("cuda", 1), ("xpu", 3)])
def test_two_processes_do_not_meet_on_one_device(tiny, monkeypatch, accelerators, kind, count) -> None:
    """Accelerate gives a device to several, which wait for each other without end, or fail in the network's words."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    accelerators(kind, count)
    words = f"4 processes were launched on this machine, .* torch finds {count} of the kind {kind}: launch {count}, or"
    for join in (lambda: build_accelerator(tiny, "run", str), Processes):
        with pytest.raises(ValueError, match=words):
            join()
    # Without such a launcher, each may see its own device alone.
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert processes._computes_on_cpu() is False


@pytest.mark.parametrize(("kind", "expected"), [("cuda", "cpu"), (None, "cpu")])
def test_a_training_that_is_to_use_the_cpu_does(tiny, monkeypatch, accelerators, kind, expected) -> None:
    """With `accelerate launch --cpu`, also on a machine with a GPU."""
    accelerators(kind)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    asked = []

    class StoppedError(Exception):
        pass

    def start(**settings: Any) -> Any:
        asked.append(settings["cpu"])
        if "timeout" in settings:
            return SimpleNamespace(num_processes=1, process_index=0, device=torch.device(expected))
        raise StoppedError

    monkeypatch.setattr("accelerate.PartialState", start)
    monkeypatch.setattr("accelerate.Accelerator", start)
    with pytest.raises(StoppedError):
        build_accelerator(tiny, "run", str)
    assert asked == [True, True]


MEETING = """
import os, sys
from hf_vaswani.processes import use_own_store
use_own_store()
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print(os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_USE_AGENT_STORE"])
"""


@pytest.mark.process
def test_processes_after_a_restart_do_not_meet_where_those_before_it_did(tmp_path) -> None:
    from torch.distributed import TCPStore

    launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gone = free_port()
    launcher.set("hf_vaswani/port", str(gone))
    restarted = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    restarted["MASTER_PORT"] = str(launcher.port)
    started = [
        Child(tmp_path / world["RANK"], run_python, ["-c", MEETING], environment=world | restarted)
        for world in reversed(worlds())
    ]
    said = [child.end().out.split() for child in started]
    assert said[0] == said[1] and said[0][1] == "False"
    assert said[0][0] not in (str(gone), str(launcher.port))


@pytest.mark.process
def test_the_process_group_is_closed_while_python_is_alive() -> None:
    """However a process ends: a thread of gloo that needs Python's lock after that would abort it."""
    program = (
        "import atexit, sys; from torch import distributed; from hf_vaswani.processes import Processes; "
        # Called last.
        "atexit.register(lambda: print('closed' if not distributed.is_initialized() else 'open')); "
        "processes = Processes(); print(processes.gather(processes.process_index)); "
    )
    ends = {"pass": 0, "sys.exit(2)": 2, "raise ValueError('bad')": 1}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program + end],
            env=os.environ | world | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for end, world in zip(ends, worlds(3), strict=True)
    ]
    said = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == list(ends.values()), said
    assert [out for out, _ in said] == ["[0, 1, 2]\nclosed\n"] * 3


def test_a_group_with_gloo_for_one_kind_of_device_is_closed() -> None:
    """As in FSDP that offloads weights, whose group is of NCCL and gloo."""
    from torch import distributed

    distributed.init_process_group("cpu:gloo,cuda:gloo", store=distributed.HashStore(), rank=0, world_size=1)
    close_process_group()
    assert not distributed.is_initialized()


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell a process that its parent has died")
def test_a_process_ends_with_its_launcher(tmp_path) -> None:
    program = (
        "import os, sys, time; from hf_vaswani.processes import end_with_launcher\n"
        "if os.fork() == 0:\n"
        "    end_with_launcher()\n"
        "    pipe = open(sys.argv[1], 'w')\n"
        "    print('ready', file=pipe, flush=True)\n"
        "time.sleep(60)\n"
    )
    os.mkfifo(tmp_path / "pipe")
    launcher = Child(tmp_path / "outputs", run_python, ["-c", program, str(tmp_path / "pipe")])
    with open(tmp_path / "pipe") as pipe:
        assert pipe.readline() == "ready\n"
        launcher.process.kill()
        killed = time.monotonic()
        # The pipe ends when the process that writes to it has ended.
        assert pipe.read() == "" and time.monotonic() - killed < 20
    launcher.end(0)
