"""The job files of configs/jobs: read as their systems read them, and run here as far as that goes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from hf_vaswani.cli import main
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.run_folder import read_recipe

from ..campaign.runs import difference, outcome
from ..children import free_port, wait_for
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
    wait_for(lambda: (run / "training.jsonl").is_file() or job.poll() is not None)
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
    right = outcome(whole)
    assert difference(right, outcome(run)) is None


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
    wait_for(lambda: (tmp_path / "requests.begun").exists() or job.poll() is not None)
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
    jobset = yaml.safe_load((JOBS / "jobset.yaml").read_text())
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    script, *arguments = torchrun_options(pod["containers"][0]["command"][1:]).training_script_args
    assert ROOT / script in CONFIGS
    recipe = load_recipe([str(ROOT / script), *arguments])
    assert Path(recipe.run_dir).parts[:2] == ("/", "runs") and recipe.training.save_every_minutes == 20


# ---- Data diversification ----------------------------------------------------------------------------------------


def diversify(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": programs, "PYTHONPATH": str(ROOT)} | variables
    script = ["bash", str(JOBS / "diversify.sh"), *command]
    return subprocess.run(script, env=environment, cwd=folder, capture_output=True, text=True, check=False)


DIVERSIFIED = """
seed: 5
data: {source_language: en, target_language: es, train_files: a.tsv, prefix: <a>}
hub: {repo_id: me/mine}
"""


@pytest.mark.process
def test_diversify_gives_each_model_its_seed_and_direction(tmp_path) -> None:
    """With a program in place of Python that prints its arguments: each line is a command, whose recipe is read."""
    (tmp_path / "a.tsv").write_text("en\tes\none\tuno\ntwo\tdos\none\tun\n", encoding="utf-8")
    (tmp_path / "words.py").write_text("import json, sys\nprint(json.dumps(sys.argv[3:]))\n")
    recipe, variables = write_recipe(tmp_path, DIVERSIFIED), {"LAUNCHER": "python words.py", "MODELS": "2"}
    done = diversify([recipe, "out"], tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    texts = [(tmp_path / "out.diversified" / f"text.{language}").read_text("utf-8") for language in ("en", "es")]
    assert texts == ["one\ntwo\n", "uno\ndos\nun\n"]
    *lines, (_, *last) = (json.loads(line) for line in done.stdout.splitlines())
    assert [verb for verb, *_ in lines] == ["train", "backtranslate"] * 4
    steps = [load_recipe(words) for _, *words in lines]
    english, spanish = [["en", "es"]], [["es", "en"]]
    names = ["forward.1", "forward.2", "backward.1", "backward.2"]
    outputs = [f"out.diversified/{name}.tsv" for name in names]
    assert [Path(each.run_dir).name for each in steps[::2]] == names
    assert [each.seed for each in steps] == [5, 5, 6, 6] * 2
    assert [each.language_pairs for each in steps[::2]] == [english, english, spanish, spanish]
    assert {each.hub.repo_id for each in steps} == {None}
    # A model that writes Spanish makes the sources of the other direction.
    assert [each.language_pairs for each in steps[1::2]] == [spanish, spanish, english, english]
    assert [Path(str(each.backtranslation.text)).name for each in steps[1::2]] == ["text.en"] * 2 + ["text.es"] * 2
    assert [each.backtranslation.output for each in steps[1::2]] == outputs
    final = load_recipe(last)
    assert (final.run_dir, final.seed, final.hub.repo_id, final.language_pairs) == ("out", 5, "me/mine", english)
    assert [(part.train_files, part.prefix) for part in final.more_data] == [(output, "<a>") for output in outputs]
    # Models of one direction may start from a model.
    start = ["--initialize.from=user/model", "--initialize.revision=v2"]
    done = diversify([recipe, "out", *start], tmp_path, **variables, DIRECTIONS="forward")
    lines = [json.loads(line)[1:] for line in done.stdout.splitlines()]
    assert [load_recipe(words).initialize.from_ for words in lines] == ["user/model"] * 5
    # Wrong input is one sentence before anything is trained, and leaves nothing.
    for command, words in (
        ([recipe], "usage: "),
        (["none.yaml", "wrong"], "The recipe file 'none.yaml' does not exist."),
        ([recipe, "wrong", "--data.train_files=none.tsv"], "There is no file 'none.tsv'"),
        ([recipe, "wrong", *start], "set DIRECTIONS=forward, or start from random weights."),
        ([recipe, "wrong", "--task=text_to_text"], "--reverse needs task 'translation'"),
    ):
        done = diversify(command, tmp_path, **variables)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not done.stdout and not (tmp_path / "wrong.diversified").exists()


@pytest.mark.process
@pytest.mark.slow
def test_diversify_trains_on_the_translations_of_both_directions_and_once(tmp_path) -> None:
    recipe, *options = tiny_recipe(tmp_path, scored=True, max_steps=40, schedule="constant", peak_learning_rate=0.01)
    run, folder = tmp_path / "run", tmp_path / "run.diversified"
    command, once = [recipe, str(run), *options], {"MODELS": "1", "NUM_BEAMS": "1"}
    done = diversify(command, tmp_path, **once)
    assert done.returncode == 0, done.stderr
    names = ["forward.1", "backward.1"]
    assert [read_recipe(folder / name).language_pairs for name in names] == [[["en", "de"]], [["de", "en"]]]
    lines = [(folder / f"{name}.tsv").read_text("utf-8").splitlines() for name in names]
    assert [(rows[0], len(rows)) for rows in lines] == [("de\ten", 101), ("en\tde", 101)]
    final = read_recipe(run)
    assert [part.train_files for part in final.more_data] == [str(folder / f"{name}.tsv") for name in names]
    assert final.language_pairs == [["en", "de"]]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert diversify(command, tmp_path, **once).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == times
    other = diversify([*command, "--data.prefix=<a>"], tmp_path, **once)
    assert other.returncode == 2 and "data.prefix" in other.stderr
