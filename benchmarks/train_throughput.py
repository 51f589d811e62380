"""How fast does it train, and in how much memory? Compared with what users of transformers or torch would write.

All contenders have the same sizes, Adam, label smoothing and precision (float32 on a CPU, except `tiny-bf16`):

- **ours**: [`VaswaniForConditionalGeneration`] with `loss_only`, in a plain loop.
- **Marian**: `MarianMTModel` in a plain loop on the same batches; the loss is torch's `cross_entropy` of its logits.
- **torch.nn**: `torch.nn.TransformerEncoderLayer` and `TransformerDecoderLayer` stacks in the same loop.
- **Trainer**: `Seq2SeqTrainer` with Marian and `DataCollatorForSeq2Seq` on shuffled sentences, with a batch size that
  gives as many target tokens per batch as ours on average.

The contenders take turns, and each ratio compares two times of the same round. glibc returns freed memory to the
kernel and later gets it back page by page. Each contender runs with glibc's default limits ("default"), and with
limits that keep freed blocks of less than 4 MiB ("kept"). Keeping larger blocks too would raise peak memory by half,
because other blocks do not fit into them. Peak memory is measured in a separate process.

On a GPU everything runs in bfloat16, with the base model at 25 000 tokens per side.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
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
from hf_vaswani.data.pocket_corpus import read_pocket_corpus
from hf_vaswani.data.tokenizer import train_tokenizer
from hf_vaswani.memory import keep_freed_memory
from hf_vaswani.model.modeling_vaswani import sinusoids
from hf_vaswani.training.optimization import build_optimizer

if TYPE_CHECKING:
    from datasets import Dataset

Rows = list[dict[str, Any]]
Batch = dict[str, torch.Tensor]

ROOT = Path(__file__).resolve().parent.parent
MULTI30K = ROOT.parent / "shared" / "data" / "multi30k" / "raw" / "train"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISION = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
EPSILON_LS = 0.1


@dataclass
class Setting:
    """Sizes of the model and of a batch, and the number of updates in a turn."""

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
    # The precision of `configs/multi30k_en_de.yaml`. On a GPU this equals the setting above.
    "tiny-bf16": Setting(TINY, tokens=4096, updates=3, precision=torch.bfloat16),
    "256": Setting(WIDE | {"vocab_size": 8_000}, tokens=4096, updates=2),
    # Random ids in sentences as long as WMT's, which few have at hand.
    "base": Setting({"vocab_size": 37_000}, 25_000 if DEVICE.type == "cuda" else 2_000, updates=1, synthetic=True),
}


# ---- The text ----------------------------------------------------------------------------------------------------


def read_pairs(
    setting: Setting, source: Path | None, target: Path | None
) -> tuple["Dataset | Rows", PreTrainedTokenizerBase]:
    """Returns encoded pairs, and a tokenizer with the same padding token."""
    if source and target and not setting.synthetic:
        sides = [path.read_text(encoding="utf-8").splitlines() for path in (source, target)]
    else:
        sides = [list(side) for side in zip(*read_pocket_corpus()["train"], strict=True)][:2]
    tokenizer = train_tokenizer((line for side in sides for line in side), setting.sizes["vocab_size"])
    if not setting.synthetic:
        # Random ids need no `datasets`.
        from datasets import Dataset, disable_progress_bars

        from hf_vaswani.data.encoding import encode_pairs

        disable_progress_bars()
        pairs = Dataset.from_dict({"source": sides[0], "target": sides[1]})
        return encode_pairs(pairs, tokenizer), tokenizer
    random = np.random.default_rng(1)
    lengths = random.lognormal(3.2, 0.55, size=4000).clip(3, 120)
    rows: Rows = []
    for number, length in enumerate(lengths):
        row: dict[str, Any] = {"number": number}
        for name, factor in (("source_ids", 1.0), ("target_ids", random.normal(1, 0.12))):
            row[name] = random.integers(4, setting.sizes["vocab_size"], max(2, round(length * factor))).tolist()
        rows.append(row)
    return rows, tokenizer


class Batches:
    """Token-budget batches of encoded pairs, with their padding and size."""

    def __init__(self, encoded: "Dataset | Rows", tokens: int) -> None:
        self.rows: Rows = encoded if isinstance(encoded, list) else encoded.to_list()
        self.lengths = np.array([[len(row["source_ids"]), len(row["target_ids"])] for row in self.rows])
        self.sampler = TokenBudgetBatchSampler(self.lengths, BatchOrder(tokens))
        self.collator = PairCollator(0)
        batches = self.sampler.batches()
        cells = sum(len(batch) * self.lengths[batch].max(axis=0) for batch in batches)
        self.padding = 1 - self.lengths[np.concatenate(batches)].sum() / cells.sum()
        self.target_tokens = self.lengths[np.concatenate(batches), 1].sum() / len(batches)

    def of_round(self, number: int, count: int) -> list[Batch]:
        """Returns the `count` batches of a round."""
        batches = self.sampler.batches()
        chosen = [batches[i % len(batches)] for i in range(number * count, (number + 1) * count)]
        made = [self.collator([self.rows[i] for i in batch]) for batch in chosen]
        return [{k: v.to(DEVICE) for k, v in batch.items() if k != "numbers"} for batch in made]


def loader_rate(encoded: "Dataset", tokens: int) -> float:
    """Measures the target tokens per second of our loader alone, over an epoch in this process."""
    from hf_vaswani.data.encoding import EncodedRows, pair_lengths

    lengths = pair_lengths(encoded)
    sampler = TokenBudgetBatchSampler(lengths, BatchOrder(tokens))
    loader = DataLoader(EncodedRows(encoded), batch_sampler=sampler, collate_fn=PairCollator(0))
    start = time.perf_counter()
    for _ in loader:
        pass
    return int(lengths[:, 1].sum()) / (time.perf_counter() - start)


# ---- The contenders ----------------------------------------------------------------------------------------------


class TorchTransformer(nn.Module):
    """torch's stacks, post-norm without a final norm, with one matrix for both embeddings and the output."""

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
        # torch also drops attention weights and inner activations, at the same rate; the paper does not.
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = 0.0

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeds ids of shape `(batch, length)` to `(batch, length, d_model)`."""
        embeddings = self.source_embedding(ids) * self.table.shape[1] ** 0.5
        return self.dropout(embeddings + self.table[: ids.shape[1]])

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape `(batch, target, vocab_size)`."""
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
    """Shifts labels right to make the decoder's input."""
    right = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return right.masked_fill(right == -100, 0)


def our_config(setting: Setting, **fields: Any) -> VaswaniConfig:
    """Makes a config of these sizes, with the token ids of our tokenizers."""
    return VaswaniConfig(**setting.sizes | fields, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def build(name: str, config: VaswaniConfig) -> nn.Module:
    """Builds a contender's network on the device, in training mode."""
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
    """Computes the smoothed loss of a batch, per target token."""
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
    # Ours spreads epsilon over the other tokens, torch's over all.
    vocab_size = logits.shape[2]
    smoothing = EPSILON_LS * vocab_size / (vocab_size - 1)
    flat = logits.float().view(-1, vocab_size)
    loss = nn.functional.cross_entropy(flat, labels.view(-1), reduction="sum", label_smoothing=smoothing)
    return loss / tokens


class Loop:
    """A plain training loop: forward, backward, Adam."""

    def __init__(self, name: str, config: VaswaniConfig, precision: torch.dtype) -> None:
        self.name, self.model, self.precision = name, build(name, config), precision
        if name == "ours" and DEVICE.type == "cpu" and precision == torch.bfloat16:
            # As in our own training.
            self.model.set_attn_implementation("eager")
        self.optimizer = build_optimizer("adam", self.model.named_parameters(), learning_rate=1e-4)

    def turn(self, batches: list[Batch], number: int) -> float:
        """Trains on the batches, and returns target tokens per second."""
        start = now()
        for batch in batches:
            loss_of(self.name, self.model, batch, self.precision).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return sum(int((batch["labels"] != -100).sum()) for batch in batches) / (now() - start)


class TrainerLoop(TrainerCallback):
    """`Seq2SeqTrainer` as its documentation uses it. The first update of a turn is not timed: it includes start-up."""

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
        optimizer = build_optimizer("adam", model.named_parameters(), learning_rate=1e-4)
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
        """Counts the target tokens, without padding."""
        self.tokens.append(int((batch["labels"] != -100).sum()))
        return batch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records the time."""
        self.times.append(now())

    def turn(self, batches: list[Batch], number: int) -> float:
        """Trains for as many updates as there are batches, and returns target tokens per second."""
        self.times, self.tokens = [], []
        self.arguments.max_steps, self.arguments.data_seed = len(batches) + 1, number
        self.trainer.train()
        return sum(self.tokens[1 : len(batches) + 1]) / (self.times[-1] - self.times[0])


def now() -> float:
    """Returns the time once all queued work is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def set_malloc(keep: bool) -> None:
    """Sets glibc's limits as our training does, or as glibc adapts them after large blocks were freed."""
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
    """Yields each reference, its loss without dropout, and the loss of ours with the same weights."""
    for name, layout in (("Marian", "concatenated"), ("torch.nn", "interleaved")):
        config = our_config(setting, dropout=0.0, sinusoid_layout=layout, layer_norm_eps=1e-5, lm_head_bias=True)
        reference, ours = build(name, config), build("ours", config)
        copy_weights(reference, ours if name == "Marian" else ours.model)
        # The bias is zero, and the timed model has none.
        ours.lm_head.bias = None
        with torch.no_grad():
            yield name, loss_of(name, reference, batch).item(), loss_of("ours", ours, batch).item()


# ---- How fast could it be? ---------------------------------------------------------------------------------------


def products(config: VaswaniConfig, batch: Batch) -> list[tuple[int, int, int, int]]:
    """Lists the linear layers as (count, positions, inputs, outputs)."""
    source, target = batch["input_ids"].numel(), batch["labels"].numel()
    d_model, d_ff, layers = config.d_model, config.d_ff, (config.encoder_layers, config.decoder_layers)
    return [
        # Encoder self-attention with cross-attention keys and values, then the decoder's other projections.
        (4 * layers[0] + 2 * layers[1], source, d_model, d_model),
        (6 * layers[1], target, d_model, d_model),
        (layers[0], source, d_model, d_ff),
        (layers[0], source, d_ff, d_model),
        (layers[1], target, d_model, d_ff),
        (layers[1], target, d_ff, d_model),
        (1, int((batch["labels"] != -100).sum()), d_model, config.vocab_size),
    ]


def operations(config: VaswaniConfig, batch: Batch) -> float:
    """Counts the floating-point operations of the matrix products of an update, including attention."""
    linear = sum(count * 2 * rows * inputs * outputs for count, rows, inputs, outputs in products(config, batch))
    rows, source, target = *batch["input_ids"].shape, batch["labels"].shape[1]
    pairs = config.encoder_layers * source**2 + config.decoder_layers * (target**2 + target * source)
    # Each product runs once forward and twice backward.
    return 3.0 * (linear + 2 * 2 * rows * pairs * config.d_model)


class MatrixRate:
    """The matrix products of an update's linear layers alone, into preallocated memory."""

    def __init__(self, config: VaswaniConfig, batch: Batch, precision: torch.dtype) -> None:
        make = {"device": DEVICE, "dtype": precision}
        self.parts = []
        for count, rows, inputs, outputs in products(config, batch):
            states, gradient = torch.randn(rows, inputs, **make), torch.randn(rows, outputs, **make)
            weight = torch.randn(outputs, inputs, **make)
            results = [torch.empty_like(tensor) for tensor in (gradient, states, weight)]
            self.parts.append((count, states, gradient, weight, results))

    def measure(self) -> float:
        """Measures operations per second."""
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
    """Returns the peak memory in GiB of a process that runs two updates."""
    command = [sys.executable, __file__, "--model", arguments.model, "--peak", name, "--keep", str(int(keep))]
    command += ["--peak-tokens", str(arguments.peak_tokens or setting.tokens)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak(setting: Setting, name: str, keep: bool, tokens: int) -> None:
    """Runs two updates with this many tokens per side in sentences of 25, and prints the peak memory in GiB."""
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
    """Formats the median, with minimum and maximum in brackets."""
    values = list(values)
    middle, least, most = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({least} to {most})"


def compare(arguments: argparse.Namespace, name: str, setting: Setting) -> None:
    """Prints the report of one setting."""
    encoded, tokenizer = read_pairs(setting, arguments.source, arguments.target)
    batches, config = Batches(encoded, setting.tokens), our_config(setting)
    first = batches.of_round(0, 1)[0]
    sizes = ", ".join(f"{key} {value}" for key, value in setting.sizes.items())
    print(f"\n### {name}: {sizes}, {setting.precision}\n")
    print(
        f"Budget {setting.tokens} tokens per side, padding {batches.padding:.1%} of positions. Loss without dropout:"
    )
    for reference, theirs, ours in losses(setting, first):
        print(f"- {theirs:.6f} {reference}, {ours:.6f} ours, same weights (difference {abs(theirs - ours):.1e})")

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
            # Measured right after the turn, because the machine's speed varies.
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
    print("| | freed memory | target tokens/s | our speedup | share of matrix rate | peak GiB |")
    print("|---" * 6 + "|")
    for key, found in rates.items():
        ratio = spread(mine / its for mine, its in zip(ours, found[1:], strict=True))
        share = "" if key[0] == "Trainer" else spread(shares[key][1:], "{:.0%}")
        print(f"| {key[0]} | {key[1]} | {spread(found[1:], '{:,.0f}')} | {ratio} | {share} | {peaks[key]} |")
    if not setting.synthetic:
        rate = loader_rate(encoded, setting.tokens)
        times = rate / statistics.median(ours)
        print(f"\nOur loader alone: {rate:,.0f} target tokens/s, {times:.0f} times the training rate.")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*SETTINGS, "all"], default="all", help="setting; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each contender; default: 5")
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="also measure peak memory"
    )
    parser.add_argument("--tokens", type=int, help="budget of tokens per side; default: the setting's")
    parser.add_argument("--updates", type=int, help="updates of a turn; default: the setting's")
    parser.add_argument("--synthetic", action="store_true", help="random ids in every setting, not only in base")
    parser.add_argument("--peak-tokens", type=int, help="tokens per side for the peak memory; default: the budget")
    parser.add_argument(
        "--source", type=Path, help="source sentences, one per line; default: Multi30k or the built-in corpus"
    )
    parser.add_argument("--target", type=Path, help="their translations, one per line")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads; default: torch's")
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
        setting = SETTINGS[name]
        setting = replace(
            setting,
            tokens=arguments.tokens or setting.tokens,
            updates=arguments.updates or setting.updates,
            synthetic=arguments.synthetic or setting.synthetic,
        )
        compare(chosen, name, setting)


if __name__ == "__main__":
    main()
