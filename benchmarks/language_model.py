"""Is the language model of this package as good as transformers' GPT-2? Perplexity after the same updates.

    python benchmarks/language_model.py PYTHON_DOCS_FOLDER RUNS_FOLDER [--section.key value ...]

configs/family/python_docs_gpt.yaml trains `VaswaniForCausalLM`, whose settings make it GPT-2. The same loop trains
`GPT2LMHeadModel` of as many parameters, on the same batches, with the same optimizer and schedule; only the initial
weights and the dropout are drawn otherwise. All options after the folders override keys of both trainings. An
interrupted training is resumed, and a complete one is not repeated. Prints the table, and text that our model writes.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, pipeline, set_seed

import hf_vaswani.training.state
from hf_vaswani import VaswaniConfig, VaswaniForCausalLM
from hf_vaswani.recipe_file import load_recipe
from hf_vaswani.records import Result
from hf_vaswani.training.loop import train

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "family" / "python_docs_gpt.yaml"
PROMPTS = ("Return the number of", "If the file does not exist,", "The :mod:`json` module")


def gpt2_config(config: VaswaniConfig) -> GPT2Config:
    """Returns the config of transformers' GPT-2 of the same sizes."""
    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_position_embeddings,
        n_embd=config.d_model,
        n_layer=config.decoder_layers,
        n_head=config.num_heads,
        n_inner=config.d_ff,
        activation_function=config.activation_function,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
        layer_norm_epsilon=config.layer_norm_eps,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )


class Gpt2(GPT2LMHeadModel):
    """transformers' GPT-2, for the training loop."""

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__(gpt2_config(config))

    def forward(self, *, epsilon_ls: float = 0.0, loss_only: bool = False, **batch: Any) -> Any:
        """Takes the arguments of the loop; there is no label smoothing."""
        return super().forward(**batch, use_cache=False)


def trained(kind: type[torch.nn.Module], run: Path, options: list[str]) -> Result:
    """Trains a run with models of a class, and returns its result."""
    hf_vaswani.training.state.model_class = lambda recipe: kind  # type: ignore[assignment,return-value]
    return train(load_recipe([str(RECIPE), f"--run_dir={run}", *options]))


def main() -> None:
    """Trains both models, and prints the table and the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the text of configs/python_docs_en_es.yaml")
    parser.add_argument("runs", type=Path, help="folder for the runs")
    arguments, more = parser.parse_known_args()
    files = {"train": "train", "validation": "valid", "test": "test"}
    options = [f"--data.{split}_files={arguments.folder / name}.tsv.gz" for split, name in files.items()]
    # One process in place of the two that the recipe is made for.
    options += ["--training.accumulation_steps=2", *more]
    print("| model | perplexity | of a word | of a byte |\n|---|---:|---:|---:|")
    for kind in (VaswaniForCausalLM, Gpt2):
        measures = trained(kind, arguments.runs / kind.__name__, options).scores
        found = [measures[name] for name in ("perplexity", "word_perplexity", "byte_perplexity")]
        print(f"| {kind.__mro__[kind is Gpt2].__name__} | {found[0]:.2f} | {found[1]:.1f} | {found[2]:.3f} |")
    write = pipeline("text-generation", model=str(arguments.runs / "VaswaniForCausalLM" / "model"))
    set_seed(1)
    for prompt in PROMPTS:
        text = write(prompt, max_new_tokens=40, do_sample=True, top_p=0.9)[0]["generated_text"]
        print(f"\n> {text}")


if __name__ == "__main__":
    main()
