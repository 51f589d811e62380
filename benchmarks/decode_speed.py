"""How fast does it translate? Compared with `MarianMTModel.generate` and CTranslate2, all with the same weights.

    python benchmarks/decode_speed.py MODEL_FOLDER SOURCE.txt [--threads 1] [--rounds 3]
    python benchmarks/decode_speed.py {tiny,256,base} [--threads 1] [--rounds 3]
    python benchmarks/decode_speed.py {tiny,256,base} --device cuda [--rounds 3]

Each engine runs in its own processes. With `--threads 2`, CTranslate2 has two single-threaded workers, and each of the
others is two single-threaded processes that share the sentences. In each round the engines take turns on the same
sentences, sorted by length, with the same batch size and search settings (log-probability divided by length, at most
60 tokens). Reading and writing text is not timed. The table has sentences and tokens per second (median of the
rounds), the speedup of the first engine over each other one (computed within each round: median, minimum and maximum),
and the number of translations that equal those of the first.

`tiny`, `256` and `base` (the paper's base model, vocabulary of 37 000) are untrained models that read random ids and
never generate an end: they generate 20 tokens per sentence. CTranslate2 (`pip install ctranslate2`) is skipped if it
is not installed. On a GPU, ours and Marian are compared, each with bfloat16 and float32: of Marian the weights, as its
users would load it, and of ours the products. Ours is also measured without CUDA graphs. `--engines` adds CTranslate2
there, if its build can use the GPU.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer, MarianMTModel
from transformers.utils.logging import disable_progress_bar

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.conversion.marian import to_marian
from hf_vaswani.translation.quantization import autocast_to, to_int8

LONGEST = 60
# Sentences of a round, by batch size.
SENTENCES = {1: 48, 32: 256, 128: 256}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 5000,
        "d_model": 128,
        "d_ff": 256,
        "num_heads": 4,
        "encoder_layers": 4,
        "decoder_layers": 4,
    },
    "256": {
        "vocab_size": 8000,
        "d_model": 256,
        "d_ff": 1024,
        "num_heads": 4,
        "encoder_layers": 3,
        "decoder_layers": 3,
    },
    "base": {"vocab_size": 37_000},
}
RULES = {"length_penalty": 1.0, "early_stopping": True}
OUR_RULES = {"length_penalty_type": "power", "finish_candidates": "top"}
ENGINES = ("ours", "ours bfloat16", "ours int8", "Marian", "CTranslate2 float32", "CTranslate2 int8")
NO_GRAPHS = ", no graphs"
GPU_ENGINES = (
    *("ours bfloat16", f"ours bfloat16{NO_GRAPHS}", "Marian bfloat16"),
    *("ours", f"ours{NO_GRAPHS}", "Marian"),
)


# ---- The same weights for all engines ----------------------------------------------------------------------------


def save_for_ctranslate2(model: VaswaniForConditionalGeneration, folder: Path, quantization: str) -> None:
    """Writes the model in CTranslate2's format, with ids as token names."""
    from hf_vaswani.conversion.ctranslate2 import VaswaniLoader

    loader = VaswaniLoader()
    spec = loader.get_model_spec(model.requires_grad_(False))
    loader.set_vocabulary(spec, [str(id_) for id_ in range(model.config.vocab_size)])
    for name in ("eos", "decoder_start"):
        setattr(spec.config, f"{name}_token", str(getattr(model.config, f"{name}_token_id")))
    for name in ("bos", "unk"):
        setattr(spec.config, f"{name}_token", str(model.config.pad_token_id))
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir()
    spec.save(str(folder))


def prepare(model_name: str, source: Path | None, folder: Path, engines: Sequence[str]) -> list[list[int]]:
    """Writes the model for the engines, and returns the ids of the sentences."""
    if model_name in SIZES:
        torch.manual_seed(1)
        model = VaswaniForConditionalGeneration(VaswaniConfig(**SIZES[model_name])).eval()
        lengths = torch.randint(8, 22, (max(SENTENCES.values()),)).tolist()
        sentences = [[*torch.randint(4, model.config.vocab_size, (length,)).tolist(), 2] for length in lengths]
    else:
        if source is None:
            raise SystemExit("A trained model needs a text to translate: give it after the model.")
        model = VaswaniForConditionalGeneration.from_pretrained(model_name).eval()
        lines = source.read_text(encoding="utf-8").splitlines()[: max(SENTENCES.values())]
        sentences = AutoTokenizer.from_pretrained(model_name)(lines)["input_ids"]
    for name in engines:
        if name.startswith("ours"):
            model.save_pretrained(folder / name)
        elif name.startswith("Marian"):
            to_marian(model).save_pretrained(folder / name)
        elif importlib.util.find_spec("ctranslate2"):
            save_for_ctranslate2(model, folder / name, name.split()[-1])
    return sentences


# ---- One engine in its own process -------------------------------------------------------------------------------


class InTransformers:
    """`generate()` of ours or of Marian."""

    def __init__(self, folder: Path, device: str) -> None:
        torch.set_num_threads(1)
        is_ours, is_bfloat16 = folder.name.startswith("ours"), "bfloat16" in folder.name
        kind = VaswaniForConditionalGeneration if is_ours else MarianMTModel
        self.rules = RULES | (OUR_RULES if is_ours else {})
        self.model = kind.from_pretrained(folder).eval().to(device)
        # Of ours, products alone are in bfloat16.
        self.dtype = torch.bfloat16 if is_bfloat16 and is_ours else None
        if is_bfloat16 and not is_ours:
            self.model = self.model.bfloat16()
        if folder.name.endswith("int8"):
            self.model = to_int8(self.model)

    def translate(self, sentences: list[list[int]], batch: int, beams: int, longest: int) -> list[list[int]]:
        """Translates sentences, given and returned as ids."""
        pad, eos = self.model.config.pad_token_id, self.model.config.eos_token_id
        found = []
        for start in range(0, len(sentences), batch):
            part = sentences[start : start + batch]
            width = max(map(len, part))
            ids = torch.tensor([row + [pad] * (width - len(row)) for row in part]).to(self.model.device)
            rules = self.rules if beams > 1 else {}
            with torch.inference_mode(), autocast_to(self.dtype, self.model.device):
                rows = self.model.generate(
                    ids, attention_mask=(ids != pad).long(), num_beams=beams, max_new_tokens=longest, **rules
                )
            found += [[id_ for id_ in row if id_ not in (pad, eos)] for row in rows[:, 1:].tolist()]
        return found


class InCTranslate2:
    """`translate_batch`, with one worker per thread."""

    def __init__(self, folder: Path, threads: int, device: str) -> None:
        import ctranslate2

        kind = folder.name.split()[-1]
        self.translator = ctranslate2.Translator(
            str(folder), device=device, inter_threads=threads, intra_threads=1, compute_type=kind
        )

    def translate(self, sentences: list[list[int]], batch: int, beams: int, longest: int) -> list[list[int]]:
        """Translates sentences, given and returned as ids."""
        results = self.translator.translate_batch(
            [[str(id_) for id_ in row] for row in sentences],
            max_batch_size=batch,
            beam_size=beams,
            length_penalty=1.0,
            max_decoding_length=longest,
        )
        return [[int(token) for token in result.hypotheses[0]] for result in results]


def serve(folder: Path, threads: int, device: str) -> None:
    """Reads one task per line, and answers each with one line."""
    is_ctranslate2 = folder.name.startswith("CTranslate2")
    engine = InCTranslate2(folder, threads, device) if is_ctranslate2 else InTransformers(folder, device)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        task = json.loads(line)
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        start = time.perf_counter()
        found = engine.translate(**task)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answers.write(json.dumps({"found": found, "seconds": seconds, "grown": peak - before}) + "\n")
        answers.flush()


# ---- The table ---------------------------------------------------------------------------------------------------


class Engine:
    """One or several serving processes; several share the sentences."""

    def __init__(self, folder: Path, threads: int, device: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if folder.name.endswith(NO_GRAPHS):
            environment["HF_VASWANI_CUDA_GRAPHS"] = "0"
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", str(folder), "--threads", str(threads), "--device", device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for _ in range(1 if folder.name.startswith("CTranslate2") else threads)
        ]

    def ask(self, sentences: list[list[int]], **task: Any) -> dict[str, Any]:
        """Sends one task, and returns its answer."""
        count = len(self.processes)
        for number, process in enumerate(self.processes):
            assert process.stdin
            process.stdin.write(json.dumps(task | {"sentences": sentences[number::count]}) + "\n")
            process.stdin.flush()
        found: list[list[int]] = [[] for _ in sentences]
        seconds, grown = 0.0, 0
        for number, process in enumerate(self.processes):
            assert process.stdout
            line = process.stdout.readline()
            if not line:
                raise SystemExit("An engine ended early; its error is above.")
            answer = json.loads(line)
            found[number::count] = answer["found"]
            seconds, grown = max(seconds, answer["seconds"]), grown + answer["grown"]
        return {"found": found, "seconds": seconds, "grown": grown}

    def stop(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.communicate()


def row_of(rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    """
    The cells of a row: sentences and tokens per second of each engine, then the speedup of the first one over each of
    the others, and the number of equal translations.
    """
    found = {name: answer["found"] for name, answer in rounds[0].items()}
    first = next(iter(found))
    count = len(found[first])
    cells, ratios, equal = [], [], []
    for name, translations in found.items():
        seconds = median(turn[name]["seconds"] for turn in rounds)
        tokens = sum(len(row) + 1 for row in translations)
        cells.append(f"{count / seconds:,.0f} / {tokens / seconds:,.0f}")
        if name != first:
            by = [turn[name]["seconds"] / turn[first]["seconds"] for turn in rounds]
            ratios.append(f"{median(by):.2f} ({min(by):.2f} to {max(by):.2f})")
            equal.append(str(sum(a == b for a, b in zip(translations, found[first], strict=True))))
    return [*cells, *ratios, f"{', '.join(equal)} of {count}"]


def compare(folder: Path, names: list[str], sentences: list[list[int]], arguments: argparse.Namespace) -> None:
    """Prints the table, with a row for each batch size and beam size."""
    engines = {name: Engine(folder / name, arguments.threads, arguments.device) for name in names}
    titles = ["batch", "beam", *names, *(f"vs. {name}" for name in names[1:]), "equal translations"]
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    longest = 20 if arguments.model in SIZES else LONGEST
    for batch in arguments.batches:
        some = sentences[:: len(sentences) // SENTENCES[batch] or 1][: SENTENCES[batch]]
        some = sorted(some, key=len, reverse=True)
        for beams in arguments.beams:
            task = {"batch": batch, "beams": beams, "longest": longest}
            for name in names:
                engines[name].ask(some[: 2 * batch], **task)
            rounds = [{name: engines[name].ask(some, **task) for name in names} for _ in range(arguments.rounds)]
            print(f"| {' | '.join([str(batch), str(beams), *row_of(rounds)])} |", flush=True)
    for engine in engines.values():
        engine.stop()
    if arguments.memory and arguments.device == "cpu":
        some = sorted(sentences[:128], key=len)
        print("\nMemory growth of a process for one batch of 128 with beam size 4 (MB):\n")
        for name in names:
            engine = Engine(folder / name, 1, arguments.device)
            engine.ask(some[:1], batch=1, beams=1, longest=2)
            grown = engine.ask(some, batch=128, beams=4, longest=longest)["grown"]
            print(f"- {name}: {grown / 2**20:,.0f}", flush=True)
            engine.stop()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help=f"folder of a trained model, or one of {', '.join(SIZES)}")
    parser.add_argument("source", nargs="?", type=Path, help="text to translate, one sentence per line")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine; default: 1")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; default: 3")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 32, 128], choices=list(SENTENCES), help="batch sizes"
    )
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4], help="beam sizes; default: 1 4")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where they compute; default: cpu")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=[*dict.fromkeys((*ENGINES, *GPU_ENGINES, "CTranslate2 bfloat16"))],
        help="engines to compare, with the first of them; default: all that the device has",
    )
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="also measure memory growth"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    disable_progress_bar()
    if arguments.serve:
        serve(arguments.serve, arguments.threads, arguments.device)
        return
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch finds no GPU on this machine.")
    engines = arguments.engines or (GPU_ENGINES if on_gpu else ENGINES)
    with tempfile.TemporaryDirectory() as folder:
        sentences = prepare(arguments.model, arguments.source, Path(folder), engines)
        names = [name for name in engines if (Path(folder) / name).is_dir()]
        versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
        print(f"{versions}, {arguments.model}, {arguments.threads} threads")
        if on_gpu:
            print(torch.cuda.get_device_name())
        compare(Path(folder), names, sentences, arguments)


if __name__ == "__main__":
    main()
