"""How fast does it translate? Ours beside `MarianMTModel.generate` and CTranslate2, all with the same weights.

    python benchmarks/decode_speed.py MODEL_FOLDER SOURCE.txt [--threads 1] [--rounds 3]
    python benchmarks/decode_speed.py {tiny,256,base} [--threads 1] [--rounds 3]

Each engine lives in processes of its own. With `--threads 2`, CTranslate2 has two workers of one thread, and the
others are two processes of one thread each, which take sentences in turns. All engines take turns with the same
sentences, sorted by length, in batches of as many sentences, by the same rules (the log-probability divided by the
length; a translation ends after 60 tokens). Reading and writing text is no part of it. The table has sentences and
tokens a second (medians of the rounds), by how much ours is faster than each other engine (taken within a round: the
median, the least and the largest), and how many translations of those others are the same as ours.

`tiny`, `256` and `base` (the paper's, 37 000 entries) are models with their first weights, which read random ids and
never end: they make 20 tokens a sentence. CTranslate2 (`pip install ctranslate2`) is left out where it is not
installed.
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
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer, MarianMTModel
from transformers.utils.logging import disable_progress_bar

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.conversion.marian import to_marian
from hf_vaswani.translation.quantization import to_int8

LONGEST = 60
# Sentences of a turn, by batch.
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
ENGINES = ("ours", "ours int8", "Marian", "CTranslate2 float32", "CTranslate2 int8")


# ---- The same weights for everybody ------------------------------------------------------------------------------


def save_for_ctranslate2(model: VaswaniForConditionalGeneration, folder: Path, quantization: str) -> None:
    """The same in CTranslate2's format, with the ids as the tokens' names."""
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


def prepare(model_name: str, source: Path | None, folder: Path) -> list[list[int]]:
    """Writes the model for every engine, and returns the ids of the sentences."""
    if model_name in SIZES:
        torch.manual_seed(1)
        model = VaswaniForConditionalGeneration(VaswaniConfig(**SIZES[model_name])).eval()
        lengths = torch.randint(8, 22, (max(SENTENCES.values()),)).tolist()
        sentences = [[*torch.randint(4, model.config.vocab_size, (length,)).tolist(), 2] for length in lengths]
    else:
        if source is None:
            raise SystemExit("Which text is to be translated? Give it behind the model.")
        model = VaswaniForConditionalGeneration.from_pretrained(model_name).eval()
        lines = source.read_text(encoding="utf-8").splitlines()[: max(SENTENCES.values())]
        sentences = AutoTokenizer.from_pretrained(model_name)(lines)["input_ids"]
    for name in ("ours", "ours int8"):
        model.save_pretrained(folder / name)
    to_marian(model).save_pretrained(folder / "Marian")
    if importlib.util.find_spec("ctranslate2"):
        for quantization in ("float32", "int8"):
            save_for_ctranslate2(model, folder / f"CTranslate2 {quantization}", quantization)
    return sentences


# ---- One engine, in its own process ------------------------------------------------------------------------------


class InTransformers:
    """`generate()` of either model."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        kind = VaswaniForConditionalGeneration if folder.name.startswith("ours") else MarianMTModel
        self.rules = RULES | (OUR_RULES if folder.name.startswith("ours") else {})
        self.model = kind.from_pretrained(folder).eval()
        if folder.name.endswith("int8"):
            self.model = to_int8(self.model)

    def translate(self, sentences: list[list[int]], batch: int, beams: int, longest: int) -> list[list[int]]:
        """Ids of sentences -> those of their translations."""
        pad, eos = self.model.config.pad_token_id, self.model.config.eos_token_id
        found = []
        for start in range(0, len(sentences), batch):
            part = sentences[start : start + batch]
            width = max(map(len, part))
            ids = torch.tensor([row + [pad] * (width - len(row)) for row in part])
            rules = self.rules if beams > 1 else {}
            with torch.inference_mode():
                rows = self.model.generate(
                    ids, attention_mask=(ids != pad).long(), num_beams=beams, max_new_tokens=longest, **rules
                )
            found += [[id_ for id_ in row if id_ not in (pad, eos)] for row in rows[:, 1:].tolist()]
        return found


class InCTranslate2:
    """`translate_batch`, with a worker a thread."""

    def __init__(self, folder: Path, threads: int) -> None:
        import ctranslate2

        kind = folder.name.split()[-1]
        self.translator = ctranslate2.Translator(
            str(folder), inter_threads=threads, intra_threads=1, compute_type=kind
        )

    def translate(self, sentences: list[list[int]], batch: int, beams: int, longest: int) -> list[list[int]]:
        """Ids of sentences -> those of their translations."""
        results = self.translator.translate_batch(
            [[str(id_) for id_ in row] for row in sentences],
            max_batch_size=batch,
            beam_size=beams,
            length_penalty=1.0,
            max_decoding_length=longest,
        )
        return [[int(token) for token in result.hypotheses[0]] for result in results]


def serve(folder: Path, threads: int) -> None:
    """Reads one task a line, and answers each with one line."""
    engine = InCTranslate2(folder, threads) if folder.name.startswith("CTranslate2") else InTransformers(folder)
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
    """A process that serves; or several, which take sentences in turns."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", str(folder), "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for _ in range(1 if folder.name.startswith("CTranslate2") else threads)
        ]

    def ask(self, sentences: list[list[int]], **task: Any) -> dict[str, Any]:
        """One task, one answer."""
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
                raise SystemExit("An engine has ended; its words are above.")
            answer = json.loads(line)
            found[number::count] = answer["found"]
            seconds, grown = max(seconds, answer["seconds"]), grown + answer["grown"]
        return {"found": found, "seconds": seconds, "grown": grown}

    def stop(self) -> None:
        """Ends it."""
        for process in self.processes:
            process.communicate()


def row_of(rounds: list[dict[str, dict[str, Any]]]) -> list[str]:
    """
    Of some rounds: for each engine sentences and tokens a second, for the other engines by how much ours is faster and
    how many of their translations are the same as ours.
    """
    found = {name: answer["found"] for name, answer in rounds[0].items()}
    count = len(found["ours"])
    cells, ratios, equal = [], [], []
    for name, translations in found.items():
        seconds = median(turn[name]["seconds"] for turn in rounds)
        tokens = sum(len(row) + 1 for row in translations)
        cells.append(f"{count / seconds:,.0f} / {tokens / seconds:,.0f}")
        if name != "ours":
            by = [turn[name]["seconds"] / turn["ours"]["seconds"] for turn in rounds]
            ratios.append(f"{median(by):.2f} ({min(by):.2f} to {max(by):.2f})")
            equal.append(str(sum(a == b for a, b in zip(translations, found["ours"], strict=True))))
    return [*cells, *ratios, f"{', '.join(equal)} of {count}"]


def compare(folder: Path, names: list[str], sentences: list[list[int]], arguments: argparse.Namespace) -> None:
    """Prints the table, a row for each batch and beam."""
    engines = {name: Engine(folder / name, arguments.threads) for name in names}
    titles = ["batch", "beam", *names, *(f"than {name}" for name in names[1:]), "equal translations"]
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
    if arguments.memory:
        some = sorted(sentences[:128], key=len)
        print("\nMemory that a process grows by, for one batch of 128 with a beam of 4 (MB):\n")
        for name in names:
            engine = Engine(folder / name, 1)
            engine.ask(some[:1], batch=1, beams=1, longest=2)
            grown = engine.ask(some, batch=128, beams=4, longest=longest)["grown"]
            print(f"- {name}: {grown / 2**20:,.0f}", flush=True)
            engine.stop()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help=f"folder of a trained model, or one of {', '.join(SIZES)}")
    parser.add_argument("source", nargs="?", type=Path, help="text to translate, one sentence a line")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], choices=list(SENTENCES))
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    disable_progress_bar()
    if arguments.serve:
        serve(arguments.serve, arguments.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        sentences = prepare(arguments.model, arguments.source, Path(folder))
        names = [name for name in ENGINES if name in arguments.engines and (Path(folder) / name).is_dir()]
        versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
        print(f"{versions}, {arguments.model}, {arguments.threads} threads")
        compare(Path(folder), names, sentences, arguments)


if __name__ == "__main__":
    main()
