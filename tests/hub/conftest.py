"""Runs on running text that were never trained: their folders have all records, and a model with random weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_vaswani import (
    VaswaniConfig,
    VaswaniForCausalLM,
    VaswaniForConditionalGeneration,
    VaswaniForMaskedLM,
)
from hf_vaswani.recipe import TrainingRecipe
from hf_vaswani.records import Environment, Progress, Result, Text, Validation
from hf_vaswani.run_folder import digests, write_environment, write_progress, write_result, write_validations

CLASSES = {"masked_lm": VaswaniForMaskedLM, "causal_lm": VaswaniForCausalLM}
MEASURES = {
    "masked_lm": {"accuracy": 0.4125, "loss": 3.25, "perplexity": 25.79},
    "causal_lm": {"loss": 3.25, "perplexity": 25.79, "word_perplexity": 1234.5, "byte_perplexity": 2.5},
    "span_corruption": {"loss": 3.25, "perplexity": 25.79},
    "denoise": {"loss": 3.25, "perplexity": 25.79},
}


@pytest.fixture
def text_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the folder of a run on running text."""

    def make(task: str, result: dict[str, Any] | None = None, **sections: Any) -> Path:
        run = tmp_path / "my-run"
        data = {"train_files": "train.txt", "validation_files": "/home/me/dev.txt", "test_files": "/home/me/test.txt"}
        recipe = {"task": task} | {name: keys for name, keys in sections.items() if name != "data"}
        recipe["data"] = data | sections.get("data", {})
        config = VaswaniConfig(vocab_size=40, d_model=16, d_ff=24, num_heads=2, encoder_layers=2, decoder_layers=3)
        model = CLASSES.get(task, VaswaniForConditionalGeneration)(config)
        for folder in (run / "model", run / "checkpoint-6"):
            model.save_pretrained(folder)
            (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        counts = {"train": 9000, "validation": 50, "test": 77}
        write_environment(
            run,
            Environment(
                python="3.11",
                packages={},
                processes=1,
                cpu_threads=1,
                mixed_precision="no",
                seed=1,
                command=["train.py", "my.yaml"],
                data=[Text(direction="en", pairs=counts)],
            ),
        )
        values = {"scores": MEASURES[task], "averaged": ["checkpoint-6"]} | (result or {})
        write_result(run, Result(6, files=digests(run / "model"), **values))
        write_validations(run, [Validation(6, MEASURES[task] | {"loss": 3.5})], TrainingRecipe(best_by="loss"))
        write_progress(run / "checkpoint-6", Progress(6, {}, {}, {}, 0, 1.0, digests(run / "checkpoint-6")))
        (run / "training.jsonl").write_text('{"step": 3, "loss": 4.0}\n{"step": 6, "loss": 3.0}\n')
        return run

    return make
