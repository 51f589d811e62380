"""The job files of configs/jobs: read as their systems read them, and run here as far as that goes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from hf_vaswani.cli import main
from hf_vaswani.recipe_file import load_recipe

from ..campaign.runs import difference, result, traces
from ..children import free_port
from ..conftest import CONFIGS, ROOT, tiny_recipe, write_recipe

JOBS = ROOT / "configs" / "jobs"
SLURM = JOBS / "slurm.sh"


def torchrun_options(arguments: list[str]):
    return get_args_parser().parse_args(arguments)


# ---- Slurm -------------------------------------------------------------------------------------------------------

PROGRAMS = {
    # Without the machines, `srun` is what it starts.
    "srun": 'exec "$@"',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; echo other; else echo "$@" > "$REQUESTS"; fi',
}


@pytest.fixture
def slurm(tmp_path):
    """Starts the script as Slurm does, on one machine with one process and without a GPU."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    # The script computes the port from the number of the job.
    job = free_port() % 20000
    # Slurm starts a copy of the script in the folder of the command.
    for name in ("train.py", "hf_vaswani_start.py", "hf_vaswani"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "REQUESTS": str(tmp_path / "requests"),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(job),
        "SLURM_ARRAY_TASK_ID": "7",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
    }

    def start(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(SLURM), *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.mark.process
@pytest.mark.slow
def test_slurm_before_the_time_is_over_the_run_is_saved_and_queued_again(slurm, tmp_path) -> None:
    """
    With the real `torchrun`, on which the script relies: it passes the signal on, waits for the process that saves,
    and ends with an exit code that the script takes for a stop.
    """
    switches = {"max_steps": 300, "save_every": 150, "average_last": 1, "validate_every": 1000, "log_every": 5}
    arguments = [*tiny_recipe(tmp_path, scored=True, **switches), "--evaluation.num_beams=1"]
    run, requests = tmp_path / "runs" / "tiny-7", tmp_path / "requests"
    job = slurm(*arguments)
    until = time.monotonic() + 120
    while not (run / "training.jsonl").is_file():
        assert job.poll() is None and time.monotonic() < until, job.stderr.read()
        time.sleep(0.01)
    # To the script alone, as `B:` in its header asks for.
    job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=60)
    (checkpoint,) = run.glob("checkpoint-*")
    assert "Everything is saved in" in err and job.returncode != 0
    assert requests.read_text().split()[0] == "requeue" and int(checkpoint.name.removeprefix("checkpoint-")) < 150
    requests.unlink()
    job = slurm(*arguments)
    _, err = job.communicate(timeout=180)
    assert job.returncode == 0, err
    assert f"resumes from {checkpoint.name}" in err and not requests.exists()
    whole = tmp_path / "whole"
    assert main(["train", *arguments, "--seed", "7", "--run_dir", str(whole)]) == 0
    right = result(whole) | traces(whole)
    assert difference(right, result(run) | traces(run)) is None


@pytest.mark.process
def test_slurm_a_failure_is_not_queued_again(slurm, tmp_path) -> None:
    (tmp_path / "programs" / "torchrun").write_text("#!/bin/bash\necho missing.yaml >&2\nexit 2\n")
    job = slurm(str(tmp_path / "missing.yaml"))
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (2, "missing.yaml\n")
    assert not (tmp_path / "requests").exists()


@pytest.mark.process
def test_slurm_a_run_without_a_checkpoint_is_not_queued_again(slurm, tmp_path) -> None:
    (tmp_path / "programs" / "torchrun").write_text('#!/bin/bash\ntouch "$REQUESTS.begun"\nexec sleep 60\n')
    job = slurm(str(tmp_path / "tiny.yaml"))
    until = time.monotonic() + 30
    while not (tmp_path / "requests.begun").exists():
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 128 + signal.SIGTERM and not (tmp_path / "requests").exists()
    assert "before runs/tiny-7 had a checkpoint: the job is not queued again" in err


def test_slurm_reads_its_options() -> None:
    lines = [line for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH ")]
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)
    assert {"requeue", "signal", "array", "nodes", "time", "open-mode", "output"} <= options.keys()
    assert options["signal"] == "B:USR1@300" and options["ntasks-per-node"] == "1"
    # Slurm ends at the first command.
    text = SLURM.read_text()
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")


# ---- Kubernetes --------------------------------------------------------------------------------------------------


def test_jobset_starts_processes_that_meet() -> None:
    jobset = yaml.safe_load((JOBS / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, (job,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, *arguments = container["command"]
    options = torchrun_options(arguments)
    assert program == "torchrun"
    assert int(options.nnodes) == spec["parallelism"] == spec["completions"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # JobSet names a pod by job set, job, number of the job and number of the pod; the domain is the job set.
    assert options.rdzv_endpoint.startswith(f"{name}-{job['name']}-0-0.{name}:")
    assert (spec["completionMode"], spec["backoffLimit"], pod["restartPolicy"]) == ("Indexed", 0, "Never")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert all(isinstance(value, str) for value in environment.values())


def test_jobset_trains_a_recipe_with_keys_that_exist(tmp_path) -> None:
    from hf_vaswani.recipe_file import load_recipe

    jobset = yaml.safe_load((JOBS / "jobset.yaml").read_text())
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    script, *arguments = torchrun_options(pod["containers"][0]["command"][1:]).training_script_args
    assert ROOT / script in CONFIGS
    recipe = load_recipe([str(ROOT / script), *arguments])
    assert Path(recipe.run_dir).parts[:2] == ("/", "runs") and recipe.training.save_every_minutes == 20


# ---- Data diversification ----------------------------------------------------------------------------------------


def test_diversification_trains_and_translates_in_both_directions(tmp_path) -> None:
    """With `echo` in place of Python: each line is a command whose recipe is read here."""
    recipe = write_recipe(tmp_path, "data: {source_language: en, target_language: de}")
    (tmp_path / "a.en").write_text("one\ntwo\none\n")
    (tmp_path / "a.de").write_text("eins\nzwei\nein\n")
    command = ["bash", str(JOBS / "diversify.sh"), recipe, "out", "a.en", "a.de", "2"]
    environment = os.environ | {"LAUNCH": "echo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "out" / "text.en").read_text() == "one\ntwo\n"
    assert (tmp_path / "out" / "text.de").read_text() == "eins\nzwei\nein\n"
    *lines, last = (line.split(maxsplit=3) for line in done.stdout.splitlines())
    assert [line[:2] for line in lines] == [["-m", "hf_vaswani.cli"]] * 8
    steps = [(verb, load_recipe(words.split())) for _, _, verb, words in lines]
    assert [verb for verb, _ in steps] == ["train", "backtranslate"] * 4
    found = [(each.run_dir, each.seed, *each.language_pairs) for verb, each in steps if verb == "train"]
    english, german = ["en", "de"], ["de", "en"]
    assert found == [
        ("out/forward.1", 1, english),
        ("out/backward.1", 1, german),
        ("out/forward.2", 2, english),
        ("out/backward.2", 2, german),
    ]
    # A model that writes German makes the sources of the other direction.
    found = [
        (each.backtranslation.model, each.backtranslation.text, each.backtranslation.output, *each.language_pairs)
        for verb, each in steps
        if verb == "backtranslate"
    ]
    assert found[:2] == [
        ("out/forward.1", "out/text.en", "out/forward.1.tsv", german),
        ("out/backward.1", "out/text.de", "out/backward.1.tsv", english),
    ]
    names = ["forward.1", "backward.1", "forward.2", "backward.2"]
    assert re.findall(r"train_files: 'out/(\S+).tsv'", last[3]) == names
    assert last[2] == "train" and "--run_dir out/final" in last[3]
