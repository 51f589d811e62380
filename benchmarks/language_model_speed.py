"""How fast does a language model write? Compared with transformers' GPT-2 of the same sizes.

    python benchmarks/language_model_speed.py [--threads 1] [--rounds 5] [--new_tokens 64]

`VaswaniForCausalLM` and `GPT2LMHeadModel` have random weights, and continue prompts of 16 random tokens by
`generate()`. In each round they take turns. Prints new tokens per second (median of the rounds), and our speedup,
computed within each round: median, minimum and maximum.
"""

import argparse
import time
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from language_model import RECIPE, gpt2_config
from transformers import GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from hf_vaswani import VaswaniConfig, VaswaniForCausalLM
from hf_vaswani.recipe_file import load_recipe

PROMPT = 16
# Fields beside those of configs/family/python_docs_gpt.yaml.
SIZES: dict[str, dict[str, Any]] = {
    "python_docs_gpt": {"vocab_size": 8000},
    "GPT-2 small": {
        "vocab_size": 50257,
        "d_model": 768,
        "d_ff": 3072,
        "num_heads": 12,
        "decoder_layers": 12,
        "max_position_embeddings": 1024,
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling, top-p 0.9": {"do_sample": True, "top_p": 0.9},
    "4 beams": {"do_sample": False, "num_beams": 4},
}
BATCHES = (1, 32)


def seconds(model: Any, prompts: torch.Tensor, new_tokens: int, way: dict[str, Any]) -> float:
    """Returns the time of a call of `generate()` in which no text ends early."""
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": 0, **way}
    torch.manual_seed(1)
    start = time.perf_counter()
    written = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    taken = time.perf_counter() - start
    if written.shape[1] != prompts.shape[1] + new_tokens:
        raise RuntimeError(f"{type(model).__name__} wrote {written.shape[1] - prompts.shape[1]} tokens.")
    return taken


def main() -> None:
    """Times both models, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--new_tokens", type=int, default=64, help="tokens that each text gets")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    fields = asdict(load_recipe([str(RECIPE)]).model)
    print("| model | search | batch | ours, tokens/s | GPT-2, tokens/s | speedup |\n|---|---|---:|---:|---:|---:|")
    for name, sizes in SIZES.items():
        config = VaswaniConfig(**(fields | sizes))
        models = VaswaniForCausalLM(config).eval(), GPT2LMHeadModel(gpt2_config(config)).eval()
        for way, options in WAYS.items():
            for batch in BATCHES:
                prompts = torch.randint(4, config.vocab_size, (batch, PROMPT))
                rounds = [
                    [seconds(model, prompts, arguments.new_tokens, options) for model in models]
                    for _ in range(arguments.rounds + 1)
                ][1:]
                speeds = [batch * arguments.new_tokens / median(times) for times in zip(*rounds, strict=True)]
                ratios = [theirs / ours for ours, theirs in rounds]
                spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                print(f"| {name} | {way} | {batch} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
