"""FSDP2 on two CPU processes: sharded updates are those of the whole model, and so are its checkpoints."""

import json
import os

import pytest

from hf_vaswani import VaswaniConfig, VaswaniForMaskedLM, VaswaniForSequenceClassification
from hf_vaswani.cli import main
from hf_vaswani.training.state import vocabulary_modules

from ..children import End, run_launched
from ..conftest import tiny_recipe
from ..networks import tiny_model
from .runs import assert_close_weights, validations
from .task_recipes import recipe


def train_on_cpus(arguments: list[str]) -> int:
    """
    Runs the verb train on CPUs that Accelerate takes for GPUs: it shards on accelerators only. Told that gloo on the
    CPU is one, it goes the same way.
    """
    import accelerate
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from hf_vaswani import processes
    from hf_vaswani.cli import main

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    processes._computes_on_cpu = lambda: False
    accelerator = accelerate.Accelerator
    accelerate.Accelerator = lambda cpu, **rest: accelerator(**rest)
    return main(["train", *arguments])


@pytest.fixture
def train(launch, tmp_path):
    """Runs the verb train in two processes that share the weights, with the settings of fsdp2.yaml."""
    settings = {key: value for key, value in launch("fsdp2").environment.items() if "FSDP" in key}

    def run(*arguments: str) -> list[End]:
        return run_launched(tmp_path / "outputs", train_on_cpus, list(arguments), environment=settings)

    return run


def assert_trained(ends: list[End]) -> None:
    assert [end.code for end in ends] == [0, 0], [end.err[-3000:] for end in ends]


def test_a_classifier_has_no_output_over_the_vocabulary() -> None:
    config = VaswaniConfig.from_dict(tiny_model().config.to_dict() | {"is_encoder_decoder": False})
    model = VaswaniForSequenceClassification(config)
    assert vocabulary_modules(model) == [model.model.encoder.embed_tokens]
    model = VaswaniForMaskedLM(config)
    assert vocabulary_modules(model) == [model.model.encoder.embed_tokens, model.lm_head]


@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    [
        ["--initialize.from=RUN", "--training.freeze=[encoder]"],
        # A matrix over the vocabulary is sharded once, however many names it has.
        ["--model.share_embeddings=true"],
        ["--model.share_embeddings=false"],
        ["--model.share_embeddings=false", "--model.tie_word_embeddings=false"],
    ],
)
def test_a_run_by_fsdp2_is_saved_resumed_validated_and_published(tmp_path, tiny_run, train, options) -> None:
    """
    The whole command, stopped and continued, makes the model that one process makes of the same batches. The number of
    batches in an epoch is odd, so that one of the processes has none in some update.
    """
    settings = {"max_steps": 4, "save_every": 2, "validate_every": 2, "schedule": "constant", "tokens_per_batch": 88}
    arguments = tiny_recipe(tmp_path, scored=True, peak_learning_rate=0.001, **settings)
    arguments += ["--model.dropout=0", "--training.clip_norm=1", "--training.simcut.p=0.2", "--evaluation.num_beams=1"]
    arguments += [option.replace("RUN", str(tiny_run)) for option in options]
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert main(["train", *arguments, "--training.accumulation_steps=4", "--run_dir", str(alone)]) == 0
    arguments += ["--training.accumulation_steps=2", "--run_dir", str(run)]
    for max_steps in (2, 4):
        assert_trained(train(*arguments, f"--training.max_steps={max_steps}"))
    for name in ("checkpoint-2", "checkpoint-4", "model"):
        assert_close_weights(run / name, alone / name, atol=1e-6)
    shards = list((run / "checkpoint-4").rglob("*.distcp"))
    assert {path.parent.name for path in shards} == {"optimizer_0", "pytorch_model_fsdp_0"}
    losses = [[line["loss"] for line in validations(folder)] for folder in (run, alone)]
    assert len(losses[0]) == 2 + ("freeze" in options[-1]) and losses[0] == pytest.approx(losses[1], rel=1e-5)
    # A damaged shard is one sentence, too, whether its digest shows it or its reader.
    for folder, words in (
        ("optimizer_0", "checkpoint-4 could not be loaded"),
        ("pytorch_model_fsdp_0", "was changed"),
    ):
        next(path for path in shards if path.parent.name == folder).write_bytes(b"")
        ends = train(*arguments, "--training.max_steps=6")
        assert words in "".join(end.err for end in ends) and {end.code for end in ends} != {0}, ends


@pytest.mark.process
@pytest.mark.parametrize("task", ["next_sentence", "causal_lm", "classification"])
def test_a_model_of_one_stack_by_fsdp2(tmp_path, train, task) -> None:
    """Stopped and continued, it is the model that one process makes of the same batches."""
    arguments = [*recipe(tmp_path, task, max_steps=4, save_every=2, validate_every=2), "--model.dropout=0"]
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert main(["train", *arguments, "--training.accumulation_steps=2", "--run_dir", str(alone)]) == 0
    for max_steps in (2, 4):
        assert_trained(train(*arguments, "--run_dir", str(run), f"--training.max_steps={max_steps}"))
    for name in ("checkpoint-4", "model"):
        assert_close_weights(run / name, alone / name, atol=1e-5, rtol=1e-4)
    ours, theirs = (json.loads((folder / "test.json").read_text("utf-8")) for folder in (run, alone))
    assert ours["measures"] == pytest.approx(theirs["measures"], rel=1e-4)
