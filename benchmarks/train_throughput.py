"""How fast does it train, and in how much memory? Ours beside what a user of transformers or of torch would write.

Each contender is a network of the same sizes, with the same Adam, label smoothing and precision (float32 on a CPU, but
for `tiny-bf16`):

- **ours**: [`VaswaniForConditionalGeneration`] with `loss_only`, in a plain loop.
- **Marian**: `MarianMTModel` in a plain loop on the same batches; the loss is torch's `cross_entropy` of its logits.
- **torch.nn**: stacks of `torch.nn.TransformerEncoderLayer` and `TransformerDecoderLayer` likewise.
- **Trainer**: `Seq2SeqTrainer` with Marian and `DataCollatorForSeq2Seq` on shuffled sentences, so many a batch that it
  has as many target tokens as ours has on average.

They take turns, round after round, and a ratio is one of two times of the same round. glibc hands memory back to the
kernel when it is freed, and gets it page by page again. Each contender runs with glibc's own limits ("default"), and
with limits that keep blocks of less than 4 MiB, and those alone ("kept"). Larger ones would be kept for blocks that
do not fit in, and a peak would grow by half. Peak memory is that of a process of its own.

On a GPU the same runs in bfloat16, with the base model at 25 000 tokens a side.
"""

import argparse
import ctypes
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset, disable_progress_bars
from parity import copy_weights
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.trainer_callback import PrinterCallback

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from hf_vaswani.data.batching import BatchOrder, PairCollator, TokenBudgetBatchSampler
from hf_vaswani.data.encoding import EncodedPairs, encode_pairs, pair_lengths
from hf_vaswani.data.pocket_corpus import draw_splits
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.model.modeling_vaswani import sinusoids
from hf_vaswani.processes import keep_freed_memory
from hf_vaswani.training.optimization import build_optimizer

Batch = dict[str, torch.Tensor]

ROOT = Path(__file__).resolve().parent.parent
MULTI30K = ROOT.parent / "shared" / "data" / "multi30k" / "raw" / "train"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISION = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
EPSILON_LS = 0.1


@dataclass
class Setting:
    """A row of sizes: the model's, the batch's, and how many updates make a turn."""

    sizes: dict[str, Any]
    tokens: int
    updates: int
    synthetic: bool = False
    precision: torch.dtype = PRECISION


TINY = {"vocab_size": 5_000, "d_model": 128, "d_ff": 256, "num_heads": 4, "dropout": 0.25}
TINY |= {"encoder_layers": 4, "decoder_layers": 4}
WIDE = {"d_model": 256, "d_ff": 1024, "num_heads": 4, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.1}
SETTINGS = {
    "tiny": Setting(TINY, tokens=4096, updates=3),
    # As `configs/multi30k_en_de.yaml` has it. On a GPU the row above is the same.
    "tiny-bf16": Setting(TINY, tokens=4096, updates=3, precision=torch.bfloat16),
    "256": Setting(WIDE | {"vocab_size": 8_000}, tokens=4096, updates=2),
    # Nobody has WMT at hand: sentences of its lengths, of random ids.
    "base": Setting({"vocab_size": 37_000}, 25_000 if DEVICE.type == "cuda" else 2_000, updates=1, synthetic=True),
}


# ---- The text ----------------------------------------------------------------------------------------------------


def read_pairs(setting: Setting, source: Path | None, target: Path | None) -> tuple[Dataset, PreTrainedTokenizerBase]:
    """Encoded pairs, and a tokenizer that has the padding token in the same place."""
    if source and target:
        sides = [path.read_text(encoding="utf-8").splitlines() for path in (source, target)]
    else:
        sides = [list(side) for side in zip(*draw_splits(seed=1)["train"], strict=True)]
    tokenizer = train_tokenizer((line for side in sides for line in side), setting.sizes["vocab_size"])
    if not setting.synthetic:
        pairs = Dataset.from_dict({"source": sides[0], "target": sides[1]})
        return encode_pairs(pairs, tokenizer), tokenizer
    random = np.random.default_rng(1)
    lengths = random.lognormal(3.2, 0.55, size=4000).clip(3, 120)
    rows: dict[str, list[Any]] = {"number": list(range(4000)), "source_ids": [], "target_ids": []}
    for length in lengths:
        for name, factor in (("source_ids", 1.0), ("target_ids", random.normal(1, 0.12))):
            rows[name].append(random.integers(4, setting.sizes["vocab_size"], max(2, round(length * factor))).tolist())
    return Dataset.from_dict(rows), tokenizer


class Batches:
    """Our batches of some pairs, and what they are made of."""

    def __init__(self, encoded: Dataset, tokens: int) -> None:
        self.rows: list[dict[str, Any]] = encoded.to_list()
        self.lengths = np.array([[len(row["source_ids"]), len(row["target_ids"])] for row in self.rows])
        self.sampler = TokenBudgetBatchSampler(self.lengths, BatchOrder(tokens))
        self.collator = PairCollator(0)
        batches = self.sampler.batches()
        cells = sum(len(batch) * self.lengths[batch].max(axis=0) for batch in batches)
        self.padding = 1 - self.lengths[np.concatenate(batches)].sum() / cells.sum()
        self.target_tokens = self.lengths[np.concatenate(batches), 1].sum() / len(batches)

    def of_round(self, number: int, count: int) -> list[Batch]:
        """The next `count` batches."""
        batches = self.sampler.batches()
        chosen = [batches[i % len(batches)] for i in range(number * count, (number + 1) * count)]
        made = [self.collator([self.rows[i] for i in batch]) for batch in chosen]
        return [{k: v.to(DEVICE) for k, v in batch.items() if k != "numbers"} for batch in made]


def loader_rate(encoded: Dataset, tokens: int) -> float:
    """Target tokens a second that our loader makes by itself, over an epoch, in this process."""
    lengths = pair_lengths(encoded)
    sampler = TokenBudgetBatchSampler(lengths, BatchOrder(tokens))
    loader = DataLoader(EncodedPairs(encoded), batch_sampler=sampler, collate_fn=PairCollator(0))
    start = time.perf_counter()
    for _ in loader:
        pass
    return int(lengths[:, 1].sum()) / (time.perf_counter() - start)


# ---- The contenders ----------------------------------------------------------------------------------------------


class TorchTransformer(nn.Module):
    """torch's stacks, with a matrix that is both embeddings and output; post-norm, without a norm on top."""

    def __init__(self, config: VaswaniConfig) -> None:
        super().__init__()
        sizes = (config.d_model, config.num_heads, config.d_ff, config.dropout, "relu", config.layer_norm_eps)
        self.source_embedding = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        nn.init.normal_(self.source_embedding.weight, std=config.d_model**-0.5)
        self.target_embedding = self.source_embedding
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*sizes, batch_first=True), config.encoder_layers, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, batch_first=True), config.decoder_layers
        )
        self.dropout = nn.Dropout(config.dropout)
        self.start = config.decoder_start_token_id
        self.register_buffer("table", sinusoids(torch.arange(512), config.d_model), persistent=False)
        # torch drops attention weights and inner activations too, at the same rate; the paper does not.
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = 0.0

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`(batch, length)` -> `(batch, length, d_model)`."""
        embeddings = self.source_embedding(ids) * self.table.shape[1] ** 0.5
        return self.dropout(embeddings + self.table[: ids.shape[1]])

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The logits of shape `(batch, target, vocab_size)`."""
        hidden = attention_mask == 0
        encoded = self.encoder(self.embed(input_ids), src_key_padding_mask=hidden)
        future = nn.Transformer.generate_square_subsequent_mask(labels.shape[1], device=labels.device)
        decoded = self.decoder(
            self.embed(shifted(labels, self.start)),
            encoded,
            tgt_mask=future,
            memory_key_padding_mask=hidden,
            tgt_is_causal=True,
        )
        return nn.functional.linear(decoded, self.source_embedding.weight)


def shifted(labels: torch.Tensor, start: int) -> torch.Tensor:
    """The decoder's input."""
    right = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return right.masked_fill(right == -100, 0)


def our_config(setting: Setting, **fields: Any) -> VaswaniConfig:
    """The sizes, with the ids of our tokenizers."""
    return VaswaniConfig(**setting.sizes | fields, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def build(name: str, config: VaswaniConfig) -> nn.Module:
    """A contender's network, on the device and in training."""
    torch.manual_seed(1)
    if name == "ours":
        model: nn.Module = VaswaniForConditionalGeneration(config)
    elif name == "torch.nn":
        model = TorchTransformer(config)
    else:
        sides = {f"{side}_attention_heads": config.num_heads for side in ("encoder", "decoder")}
        sides |= {f"{side}_ffn_dim": config.d_ff for side in ("encoder", "decoder")}
        model = MarianMTModel(
            MarianConfig(
                vocab_size=config.vocab_size,
                d_model=config.d_model,
                encoder_layers=config.encoder_layers,
                decoder_layers=config.decoder_layers,
                activation_function="relu",
                dropout=config.dropout,
                attention_dropout=0.0,
                activation_dropout=0.0,
                scale_embedding=True,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=config.decoder_start_token_id,
                **sides,
            )
        )
    return model.to(DEVICE).train()


def loss_of(name: str, model: nn.Module, batch: Batch, precision: torch.dtype = PRECISION) -> torch.Tensor:
    """The smoothed loss of a batch, per target token."""
    labels = batch["labels"]
    tokens = (labels != -100).sum()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        if name == "ours":
            return model(**batch, epsilon_ls=EPSILON_LS, num_items_in_batch=tokens, loss_only=True).loss
        if name == "torch.nn":
            logits = model(**batch)
        else:
            ids = shifted(labels, model.config.decoder_start_token_id)
            logits = model(batch["input_ids"], batch["attention_mask"], decoder_input_ids=ids, use_cache=False).logits
    # Ours shares epsilon among the other tokens, torch's among all.
    vocab_size = logits.shape[2]
    smoothing = EPSILON_LS * vocab_size / (vocab_size - 1)
    flat = logits.float().view(-1, vocab_size)
    loss = nn.functional.cross_entropy(flat, labels.view(-1), reduction="sum", label_smoothing=smoothing)
    return loss / tokens


class Loop:
    """A plain loop: forward, backward, Adam."""

    def __init__(self, name: str, config: VaswaniConfig, precision: torch.dtype) -> None:
        self.name, self.model, self.precision = name, build(name, config), precision
        if name == "ours" and DEVICE.type == "cpu" and precision == torch.bfloat16:
            # As our training does there.
            self.model.set_attn_implementation("eager")
        self.optimizer = build_optimizer(self.model.parameters(), learning_rate=1e-4)

    def turn(self, batches: list[Batch], number: int) -> float:
        """Target tokens a second."""
        start = now()
        for batch in batches:
            loss_of(self.name, self.model, batch, self.precision).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return sum(int((batch["labels"] != -100).sum()) for batch in batches) / (now() - start)


class TrainerLoop(TrainerCallback):
    """`Seq2SeqTrainer` as its documentation has it. Its first update of a turn is not counted: it starts up."""

    def __init__(
        self, config: VaswaniConfig, batches: Batches, tokenizer: PreTrainedTokenizerBase, precision: torch.dtype
    ) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        rows = [{"input_ids": row["source_ids"], "labels": row["target_ids"]} for row in batches.rows]
        model = build("Trainer", config)
        collator = DataCollatorForSeq2Seq(tokenizer, model=model)
        self.arguments = Seq2SeqTrainingArguments(
            "/tmp/train_throughput",
            per_device_train_batch_size=max(1, round(batches.target_tokens / batches.lengths[:, 1].mean())),
            label_smoothing_factor=EPSILON_LS,
            use_cpu=DEVICE.type == "cpu",
            bf16=precision == torch.bfloat16,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        optimizer = build_optimizer(model.parameters(), learning_rate=1e-4)
        self.trainer = Seq2SeqTrainer(
            model,
            self.arguments,
            data_collator=lambda features: self.counted(collator(features)),
            train_dataset=rows,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
            callbacks=[self],
        )
        self.trainer.remove_callback(PrinterCallback)

    def counted(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Notes the target tokens that are no padding."""
        self.tokens.append(int((batch["labels"] != -100).sum()))
        return batch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Notes the time."""
        self.times.append(now())

    def turn(self, batches: list[Batch], number: int) -> float:
        """Target tokens a second, of as many updates as there are batches."""
        self.times, self.tokens = [], []
        self.arguments.max_steps, self.arguments.data_seed = len(batches) + 1, number
        self.trainer.train()
        return sum(self.tokens[1 : len(batches) + 1]) / (self.times[-1] - self.times[0])


def now() -> float:
    """The time at which everything so far is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def set_malloc(keep: bool) -> None:
    """glibc's limits: as our training sets them, or as its own rule has them once large blocks were freed."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        if keep:
            keep_freed_memory()
            return
        libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 1 << 26)  # M_TRIM_THRESHOLD


# ---- Do they compute the same? -----------------------------------------------------------------------------------


def losses(setting: Setting, batch: Batch) -> Iterator[tuple[str, float, float]]:
    """Without dropout: a reference, its loss, and that of ours with the weights of the reference."""
    for name, layout in (("Marian", "concatenated"), ("torch.nn", "interleaved")):
        config = our_config(setting, dropout=0.0, sinusoid_layout=layout, layer_norm_eps=1e-5, lm_head_bias=True)
        reference, ours = build(name, config), build("ours", config)
        copy_weights(reference, ours if name == "Marian" else ours.model)
        # A fresh bias is zero, and the model that is timed has none.
        ours.lm_head.bias = None
        with torch.no_grad():
            yield name, loss_of(name, reference, batch).item(), loss_of("ours", ours, batch).item()


# ---- How fast could it be? ---------------------------------------------------------------------------------------


def products(config: VaswaniConfig, batch: Batch) -> list[tuple[int, int, int, int]]:
    """The linear layers as (how many, positions, inputs, outputs)."""
    source, target = batch["input_ids"].numel(), batch["labels"].numel()
    d_model, d_ff, layers = config.d_model, config.d_ff, (config.encoder_layers, config.decoder_layers)
    return [
        # Self-attention of the encoder, and the keys and values of the source; self-attention and the rest.
        (4 * layers[0] + 2 * layers[1], source, d_model, d_model),
        (6 * layers[1], target, d_model, d_model),
        (layers[0], source, d_model, d_ff),
        (layers[0], source, d_ff, d_model),
        (layers[1], target, d_model, d_ff),
        (layers[1], target, d_ff, d_model),
        (1, int((batch["labels"] != -100).sum()), d_model, config.vocab_size),
    ]


def operations(config: VaswaniConfig, batch: Batch) -> float:
    """Floating-point operations of the matrix products of an update, those within attention among them."""
    linear = sum(count * 2 * rows * inputs * outputs for count, rows, inputs, outputs in products(config, batch))
    rows, source, target = *batch["input_ids"].shape, batch["labels"].shape[1]
    pairs = config.encoder_layers * source**2 + config.decoder_layers * (target**2 + target * source)
    # Each product is there once forward and twice backward.
    return 3.0 * (linear + 2 * 2 * rows * pairs * config.d_model)


class MatrixRate:
    """The products of the linear layers of an update and nothing else, into memory that is already there."""

    def __init__(self, config: VaswaniConfig, batch: Batch, precision: torch.dtype) -> None:
        make = {"device": DEVICE, "dtype": precision}
        self.parts = []
        for count, rows, inputs, outputs in products(config, batch):
            states, gradient = torch.randn(rows, inputs, **make), torch.randn(rows, outputs, **make)
            weight = torch.randn(outputs, inputs, **make)
            results = [torch.empty_like(tensor) for tensor in (gradient, states, weight)]
            self.parts.append((count, states, gradient, weight, results))

    def measure(self) -> float:
        """Operations a second."""
        seconds = total = 0.0
        for count, states, gradient, weight, results in self.parts:
            start = now()
            torch.mm(states, weight.T, out=results[0])
            torch.mm(gradient, weight, out=results[1])
            torch.mm(gradient.T, states, out=results[2])
            seconds += count * (now() - start)
            total += count * 6 * states.numel() * len(weight)
        return total / seconds


# ---- The table ---------------------------------------------------------------------------------------------------


def peak_memory(arguments: argparse.Namespace, setting: Setting, name: str, keep: bool) -> float:
    """GiB of a process that makes two updates."""
    command = [sys.executable, __file__, "--model", arguments.model, "--peak", name, "--keep", str(int(keep))]
    command += ["--peak-tokens", str(arguments.peak_tokens or setting.tokens)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak(setting: Setting, name: str, keep: bool, tokens: int) -> None:
    """What that process does: two updates of that many tokens a side, in sentences of 25."""
    config, generator = our_config(setting), torch.Generator().manual_seed(1)
    ids = torch.randint(4, config.vocab_size, (2, tokens // 25, 25), generator=generator).to(DEVICE)
    if keep:
        set_malloc(keep)
    Loop(name, config, setting.precision).turn(
        [{"input_ids": ids[0], "attention_mask": torch.ones_like(ids[0]), "labels": ids[1]}] * 2, 0
    )
    on_gpu = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    print((on_gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) / 2**30)


def spread(values: Iterable[float], form: str = "{:.2f}") -> str:
    """The median, and in brackets the least and the largest."""
    values = list(values)
    middle, least, most = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({least} to {most})"


def compare(arguments: argparse.Namespace, name: str, setting: Setting) -> None:
    """Prints the part of the report on one setting."""
    encoded, tokenizer = read_pairs(setting, arguments.source, arguments.target)
    batches, config = Batches(encoded, setting.tokens), our_config(setting)
    first = batches.of_round(0, 1)[0]
    sizes = ", ".join(f"{key} {value}" for key, value in setting.sizes.items())
    print(f"\n### {name}: {sizes}, {setting.precision}\n")
    print(
        f"Budget {setting.tokens} tokens a side, padding {batches.padding:.1%} of all positions. Loss without dropout:"
    )
    for reference, theirs, ours in losses(setting, first):
        print(f"- {theirs:.6f} {reference}, {ours:.6f} ours with its weights (difference {abs(theirs - ours):.1e})")

    turns: dict[tuple[str, str], Callable[[list[Batch], int], float]] = {}
    loops = {loop: Loop(loop, config, setting.precision) for loop in ("ours", "Marian", "torch.nn")}
    for loop, contender in loops.items():
        turns[loop, "kept"] = turns[loop, "default"] = contender.turn
    turns["Trainer", "default"] = TrainerLoop(config, batches, tokenizer, setting.precision).turn
    matrices, matrix_rates = MatrixRate(config, first, setting.precision), []
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
    shares: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
    for number in range(arguments.rounds + 1):
        turn = batches.of_round(number, setting.updates)
        work = sum(operations(config, batch) for batch in turn)
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in turn)
        order = list(turns) if number % 2 else list(reversed(turns))
        for key in order:
            set_malloc(key[1] == "kept")
            rates[key].append(turns[key](turn, number))
            # Close to its turn: the machine is not as fast all the time.
            matrix_rates.append(matrices.measure())
            shares[key].append(work * rates[key][-1] / tokens / matrix_rates[-1])

    # The first round warms up.
    ours = rates["ours", "kept"][1:]
    peaks = dict.fromkeys(turns, "")
    if arguments.memory:
        peaks |= {
            key: f"{peak_memory(arguments, setting, key[0], key[1] == 'kept'):.2f}" for key in turns if key[0] in loops
        }
    print(
        f"\nMatrix products alone: {spread((rate / 1e9 for rate in matrix_rates[len(turns) :]), '{:.0f}')} GFLOP/s.\n"
    )
    print("| | freed memory | target tokens/s | ours is faster by | of the matrix rate | peak GiB |")
    print("|---" * 6 + "|")
    for key, found in rates.items():
        ratio = spread(mine / its for mine, its in zip(ours, found[1:], strict=True))
        share = "" if key[0] == "Trainer" else spread(shares[key][1:], "{:.0%}")
        print(f"| {key[0]} | {key[1]} | {spread(found[1:], '{:,.0f}')} | {ratio} | {share} | {peaks[key]} |")
    if not setting.synthetic:
        rate = loader_rate(encoded, setting.tokens)
        print(
            f"\nOur loader by itself: {rate:,.0f} target tokens/s, {rate / statistics.median(ours):.0f} times as many."
        )


def main() -> None:
    """Reads the command line."""
    disable_progress_bars()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*SETTINGS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender that count")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peaks as well")
    parser.add_argument("--peak-tokens", type=int, help="tokens a side of the updates whose peak is measured")
    parser.add_argument(
        "--source", type=Path, help="text, one sentence a line; by default Multi30k, or what is built in"
    )
    parser.add_argument("--target", type=Path, help="its translations")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print_peak(SETTINGS[arguments.model], arguments.peak, bool(arguments.keep), arguments.peak_tokens)
        return
    if arguments.source is None and MULTI30K.with_suffix(".en").exists():
        arguments.source, arguments.target = MULTI30K.with_suffix(".en"), MULTI30K.with_suffix(".de")
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"CPU, {arguments.threads} threads"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}")
    for name in SETTINGS if arguments.model == "all" else [arguments.model]:
        chosen = argparse.Namespace(**vars(arguments) | {"model": name})
        compare(chosen, name, SETTINGS[name])


if __name__ == "__main__":
    main()
