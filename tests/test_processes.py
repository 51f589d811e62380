"""The processes of a launch meet within minutes, or say that they did not; then they wait for the work."""

import os
import socket
import subprocess
import sys

import pytest

from .conftest import tiny_recipe


@pytest.mark.parametrize(("rank", "verb"), [("0", "train"), ("1", "train"), ("1", "translate")])
def test_a_process_that_never_comes_is_not_waited_for_long(tmp_path, rank, verb) -> None:
    """As when the launcher is killed before its workers have met."""
    program = (
        "import sys; from datetime import timedelta; from hf_vaswani import processes; "
        "processes.MEETING = timedelta(seconds=2); from hf_vaswani.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--model", "a/b"] if verb == "translate" else tiny_recipe(tmp_path)
    arguments += [] if verb == "translate" else ["--run_dir", str(tmp_path / "run")]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", program, verb, *arguments],
        env={**os.environ, **world, "RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert "The 2 processes of this launch did not all meet" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_those_who_have_met_wait_for_each_other_as_long_as_it_takes(tmp_path) -> None:
    """Longer than for the meeting: one reads the text while the others wait."""
    from hf_vaswani import processes
    from hf_vaswani.training import preparation

    assert processes.MEETING.total_seconds() <= 600 < preparation.WORK.total_seconds()
    program = (
        "import time; from datetime import timedelta; from hf_vaswani import preparation, processes; "
        "from hf_vaswani.recipe import Recipe; processes.MEETING = timedelta(seconds=4); "
        "accelerator = preparation.build_accelerator(Recipe()); "
        "print(preparation.by_the_first(accelerator, lambda: time.sleep(6) or 7))"
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **world, "RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in ("0", "1")
    ]
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [out for out, _ in said] == ["7\n", "7\n"], said
