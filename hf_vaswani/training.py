"""The training loop (Section 5), on Accelerate: from a recipe to a run folder with a scored model in it."""

import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedTokenizerBase

from .batching import PairCollator, TokenBudgetBatchSampler
from .checkpoints import (
    PROGRESS,
    RECIPE,
    average_checkpoints,
    checkpoint_to_resume,
    list_checkpoints,
    read_progress,
    remove_old_checkpoints,
    temporary_name,
    write_text,
    written_whole,
)
from .configuration_vaswani import VaswaniConfig
from .data import encode_pairs, load_pairs, pair_lengths
from .evaluation import score, translate_corpus
from .modeling_vaswani import VaswaniForConditionalGeneration
from .optimization import build_optimizer, build_schedule
from .recipe import Recipe, TrainingRecipe
from .tokenizer import load_tokenizer, train_tokenizer

try:
    from accelerate import Accelerator
    from accelerate.logging import get_logger
    from accelerate.utils import ProjectConfiguration, gather_object, send_to_device, set_seed
    from datasets import Dataset
    from tqdm.auto import tqdm
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = get_logger(__name__)

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "sacrebleu", "safetensors")
RESULT = "test.json"
VALIDATIONS = "validations.jsonl"
MODEL = "model"
TRANSLATIONS = "test_translations.txt"
ENVIRONMENT = "environment.json"


def train(recipe: Recipe) -> dict[str, Any]:
    """
    Trains the model of a recipe, or goes on where an earlier call was stopped.

    A run folder without a checkpoint is started anew. One with checkpoints of the same recipe is resumed from the
    newest; when it is complete, only its result is returned again.

    Args:
        recipe ([`Recipe`]): the experiment.

    Returns:
        `dict[str, Any]`: what `test.json` in the run folder says: `step`, `model` (the folder that `from_pretrained`
        loads) and, with a test set, `bleu`, `signature` and `samples`.

    Raises:
        ValueError: the data or the recipe cannot be trained on, or the run folder belongs to another recipe.
        OSError: a file cannot be read or written; checkpoints written before are whole.
    """
    run_dir = Path(recipe.run_dir)
    checkpoint = checkpoint_to_resume(recipe)
    result = _result_if_complete(recipe, checkpoint)
    accelerator = _build_accelerator(recipe)
    if result is not None:
        logger.info(f"{run_dir} is complete; delete it or name another --run_dir to train anew")
        return result
    logger.info(f"{run_dir} starts anew" if checkpoint is None else f"{run_dir} resumes from {checkpoint.name}")

    set_seed(recipe.seed)
    pairs = load_pairs(**asdict(recipe.data), seed=recipe.seed)
    if not len(pairs.get("train", ())):
        raise ValueError("The training set is empty: the recipe's data section gives no training pairs.")
    if accelerator.is_main_process:
        _write_run_files(recipe, accelerator)
    with accelerator.local_main_process_first():
        tokenizer = _run_tokenizer(recipe, pairs["train"], accelerator, checkpoint)
        encoded = {split: encode_pairs(rows, tokenizer) for split, rows in pairs.items() if split != "test"}
    sampler = _build_sampler(recipe, pairs, encoded, accelerator)
    loader = DataLoader(
        encoded["train"],
        batch_sampler=sampler,
        collate_fn=PairCollator(tokenizer.pad_token_id),
        # Its own generator: without one, a loader draws from the generator that the dropout uses.
        generator=torch.Generator(),
    )
    model = _build_model(recipe, tokenizer)
    logger.info(f"{model.num_parameters():,} parameters on {accelerator.device} x {accelerator.num_processes}")
    training = recipe.training
    optimizer = build_optimizer(model.parameters(), training.adam_beta1, training.adam_beta2, training.adam_epsilon)
    schedule = build_schedule(optimizer, recipe.model.d_model, training.warmup_steps, training.learning_rate_factor)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    step = epoch = update = 0
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        step, epoch, update = (read_progress(checkpoint)[key] for key in ("step", "epoch", "update"))

    progress = _Progress(accelerator, step, training.max_steps)
    while step < training.max_steps:
        sampler.set_position(epoch, update)
        batches = iter(loader)
        for count in sampler.batches_of_updates()[update:]:
            rate = schedule.get_last_lr()[0]
            loss, tokens = _update(accelerator, model, optimizer, list(islice(batches, count)), training)
            schedule.step()
            step, update = step + 1, update + 1
            progress.show(step, loss, tokens, rate)
            is_last = step == training.max_steps
            if step % training.validate_every == 0 or is_last:
                _validate(recipe, accelerator, model, tokenizer, pairs, encoded, step)
            if step % training.save_every == 0 or is_last:
                _save_checkpoint(accelerator, run_dir, {"step": step, "epoch": epoch, "update": update})
                if accelerator.is_main_process:
                    remove_old_checkpoints(run_dir, training.keep_last)
            if is_last:
                break
        else:
            epoch, update = epoch + 1, 0
    progress.close()
    result = _finish(recipe, accelerator, accelerator.unwrap_model(model), tokenizer, pairs, step)
    accelerator.end_training()
    return result


def _update(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, torch.Tensor]],
    training: TrainingRecipe,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of Adam. Returns the smoothed loss in nats per target token, and the target tokens, of all processes."""
    batches = send_to_device(batches, accelerator.device)
    # The loss is divided by the target tokens of the whole update: in a mean of the batches' means, a token of a small
    # batch would weigh more than one of a large batch.
    tokens = accelerator.reduce(torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum(), "sum")
    loss = torch.zeros((), device=accelerator.device)
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        with accelerator.no_sync(model) if left else nullcontext():
            share = model(**batch, label_smoothing=training.label_smoothing, num_items_in_batch=tokens).loss
            # Gradients are averaged over the processes, but each process has only its share of one sum.
            accelerator.backward(share * accelerator.num_processes)
        loss += share.detach()
    if training.clip_norm is not None:
        accelerator.clip_grad_norm_(model.parameters(), training.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(loss, "sum"), tokens


class _Progress:
    """The bar: step, loss, learning rate, target tokens per second, time left; and the trackers' curves of these."""

    def __init__(self, accelerator: Accelerator, step: int, max_steps: int) -> None:
        self.accelerator = accelerator
        self.bar = tqdm(
            total=max_steps, initial=step, desc="Training", unit=" updates", disable=not accelerator.is_main_process
        )
        self.since, self.tokens = time.monotonic(), torch.zeros((), device=accelerator.device)
        self.updates_unseen = 0

    def show(self, step: int, loss: torch.Tensor, tokens: torch.Tensor, rate: float) -> None:
        """Takes an update's numbers; reads them off the device about once a second, because that waits for it."""
        self.tokens += tokens
        self.updates_unseen += 1
        seconds = time.monotonic() - self.since
        if seconds < 1:
            return
        speed = self.tokens.item() / seconds
        self.bar.set_postfix_str(f"loss {loss.item():.3f}, lr {rate:.2e}, {speed:,.0f} target tokens/s", refresh=False)
        self.bar.update(self.updates_unseen)
        self.accelerator.log({"loss": loss.item(), "learning_rate": rate, "target_tokens_per_second": speed}, step=step)
        self.since, self.updates_unseen = time.monotonic(), 0
        self.tokens.zero_()

    def close(self) -> None:
        self.bar.update(self.updates_unseen)
        self.bar.close()


def _save_checkpoint(accelerator: Accelerator, run_dir: Path, progress: dict[str, int]) -> None:
    """One folder with the state of model, optimizer, schedule and random numbers, and the position in the data."""
    folder = run_dir / f"checkpoint-{progress['step']}"
    with written_whole(folder) if accelerator.is_main_process else nullcontext(temporary_name(folder)) as temporary:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
        if accelerator.is_main_process:
            (temporary / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
        accelerator.wait_for_everyone()


# ---- Validation and test -----------------------------------------------------------------------------------------


def _translate(
    recipe: Recipe,
    accelerator: Accelerator,
    model: VaswaniForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    num_beams: int,
) -> list[str]:
    """Translates a corpus, every process its share of it."""
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    part = translate_corpus(
        model,
        tokenizer,
        sentences[mine],
        tokens_per_batch=recipe.evaluation.tokens_per_batch,
        progress=accelerator.is_main_process,
        num_beams=num_beams,
    )
    translations = dict(gather_object(list(zip(range(len(sentences))[mine], part, strict=True))))
    return [translations[i] for i in range(len(sentences))]


@torch.no_grad()
def _validation_loss(
    accelerator: Accelerator, model: torch.nn.Module, encoded: Dataset, pad_token_id: int, tokens_per_batch: int
) -> float:
    """Cross-entropy without smoothing, in nats per target token."""
    lengths = pair_lengths(encoded)
    # Nothing is left out here: the budget grows to the longest pair.
    sampler = TokenBudgetBatchSampler(
        lengths,
        max(tokens_per_batch, int(lengths.max())),
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
    )
    total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
    model.eval()
    for batch in DataLoader(
        encoded, batch_sampler=sampler, collate_fn=PairCollator(pad_token_id), generator=torch.Generator()
    ):
        batch = send_to_device(batch, accelerator.device)
        tokens = (batch["labels"] != -100).sum()
        total += torch.stack([model(**batch, num_items_in_batch=1).loss.double(), tokens.double()])
    model.train()
    total = accelerator.reduce(total.float() if accelerator.device.type == "mps" else total, "sum")
    return float(total[0] / total[1])


def _validate(
    recipe: Recipe,
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    pairs: dict[str, Dataset],
    encoded: dict[str, Dataset],
    step: int,
) -> None:
    """Loss and BLEU on the validation set: a line in the log, a line in validations.jsonl."""
    if "validation" not in pairs:
        return
    loss = _validation_loss(
        accelerator, model, encoded["validation"], tokenizer.pad_token_id, recipe.training.tokens_per_batch
    )
    bare = accelerator.unwrap_model(model)
    sources, references = list(pairs["validation"]["source"]), list(pairs["validation"]["target"])
    beams = recipe.evaluation.validation_num_beams
    translations = _translate(recipe, accelerator, bare, tokenizer, sources, beams)
    scored = score(translations, references, recipe.evaluation.tokenize, recipe.evaluation.lowercase)
    logger.info(f"update {step}: validation loss {loss:.3f}, BLEU {scored['bleu']:.2f} ({scored['signature']})")
    accelerator.log({"validation_loss": loss, "validation_bleu": scored["bleu"]}, step=step)
    if accelerator.is_main_process:
        path = Path(recipe.run_dir) / VALIDATIONS
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
        # A resumed run comes again through updates that it had already validated.
        lines = [line for line in lines if line["step"] < step] + [{"step": step, "loss": loss, **scored}]
        best = max(line["bleu"] for line in lines)
        write_text(path, "".join(json.dumps(line | {"best": line["bleu"] == best}) + "\n" for line in lines))


def _finish(
    recipe: Recipe,
    accelerator: Accelerator,
    model: VaswaniForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    pairs: dict[str, Dataset],
    step: int,
) -> dict[str, Any]:
    """Averages the last checkpoints, scores the mean on the test set, and only then writes the model folder."""
    run_dir = Path(recipe.run_dir)
    last = list_checkpoints(run_dir)[-recipe.training.average_last :]
    # Tied weights are stored once, so the other names of that matrix are missing.
    model.load_state_dict(average_checkpoints(last), strict=False)
    result: dict[str, Any] = {"step": step, "averaged": [path.name for path in last], "model": str(run_dir / MODEL)}
    translations: list[str] = []
    if "test" in pairs:
        sources, references = list(pairs["test"]["source"]), list(pairs["test"]["target"])
        translations = _translate(recipe, accelerator, model, tokenizer, sources, recipe.evaluation.num_beams)
        result |= score(translations, references, recipe.evaluation.tokenize, recipe.evaluation.lowercase)
        rows = zip(sources, translations, references, strict=True)
        result["samples"] = [dict(zip(("source", "translation", "reference"), row, strict=True)) for row in islice(rows, 5)]
    if accelerator.is_main_process:
        with written_whole(run_dir / MODEL) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        if translations:
            write_text(run_dir / TRANSLATIONS, "".join(line + "\n" for line in translations))
        write_text(run_dir / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    accelerator.wait_for_everyone()
    return result


# ---- Before the loop ---------------------------------------------------------------------------------------------


def _build_accelerator(recipe: Recipe) -> Accelerator:
    launched = int(os.environ.get("WORLD_SIZE", 1))
    on_cpu = launched > 1 and not torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=recipe.training.mixed_precision,
        log_with=recipe.training.trackers or None,
        project_config=ProjectConfiguration(project_dir=recipe.run_dir),
        step_scheduler_with_optimizer=False,
    )
    if accelerator.num_processes != launched:
        raise ValueError(
            f"{launched} processes were launched, but Accelerate sees {accelerator.num_processes}: "
            "each would train a model of its own."
        )
    if accelerator.device.type == "cpu":
        # `accelerate launch` gives a process a single thread unless it is told otherwise.
        share = max(1, len(os.sched_getaffinity(0)) // launched) if hasattr(os, "sched_getaffinity") else None
        threads = recipe.training.cpu_threads or share
        if threads is not None:
            torch.set_num_threads(threads)
        _keep_freed_memory()
    return accelerator


def _keep_freed_memory() -> None:
    """
    Asks glibc to keep large blocks that are freed for the next one, instead of handing them back to the kernel, which
    then has to zero the pages of every step's logits anew. Elsewhere this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # noqa: N806 (the C library's names)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def _result_if_complete(recipe: Recipe, checkpoint: Path | None) -> dict[str, Any] | None:
    path = Path(recipe.run_dir) / RESULT
    if checkpoint is None or not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    step = read_progress(checkpoint)["step"]
    return result if result["step"] == step >= recipe.training.max_steps else None


def _run_tokenizer(
    recipe: Recipe, rows: Dataset, accelerator: Accelerator, checkpoint: Path | None
) -> PreTrainedTokenizerBase:
    """The run's own tokenizer: made once by the first process, read back from the run folder by all of them."""
    run_dir = Path(recipe.run_dir)
    if checkpoint is None and accelerator.is_local_main_process:
        if recipe.tokenizer.path is None:
            texts = (text for batch in rows.iter(1000) for text in (*batch["source"], *batch["target"]))
            tokenizer = train_tokenizer(texts, recipe.tokenizer.vocab_size)
        else:
            tokenizer = load_tokenizer(recipe.tokenizer.path)
        tokenizer.save_pretrained(run_dir)
    return load_tokenizer(str(run_dir))


def _build_sampler(
    recipe: Recipe, pairs: dict[str, Dataset], encoded: dict[str, Dataset], accelerator: Accelerator
) -> TokenBudgetBatchSampler:
    lengths = pair_lengths(encoded["train"])
    budget = recipe.training.tokens_per_batch
    sampler = TokenBudgetBatchSampler(
        lengths,
        budget,
        seed=recipe.seed,
        batches_per_update=recipe.training.accumulation_steps,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
    )
    empty = len(pairs["train"]) - len(lengths)
    logger.info(
        f"{len(lengths) - sampler.skipped} training pairs, {lengths.sum(0)[0]} source and {lengths.sum(0)[1]} target "
        "tokens"
    )
    if empty or sampler.skipped:
        logger.warning(
            f"Left out: {empty} pairs with an empty side, {sampler.skipped} with a side above {budget} tokens "
            "(training.tokens_per_batch)"
        )
    return sampler


def _build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> VaswaniForConditionalGeneration:
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
    config = VaswaniConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=bos,
        **asdict(recipe.model),
    )
    model = VaswaniForConditionalGeneration(config)
    model.generation_config = GenerationConfig.from_model_config(config)
    model.generation_config.update(
        num_beams=recipe.evaluation.num_beams,
        length_penalty=recipe.evaluation.length_penalty,
        max_length=recipe.evaluation.max_length,
    )
    return model


def _write_run_files(recipe: Recipe, accelerator: Accelerator) -> None:
    """What somebody needs to repeat the run: the whole recipe; versions, machine, command, revision of the code."""
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    recipe.save(run_dir / RECIPE)
    here = Path(__file__).parent
    git = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    environment = {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "git_revision": git.stdout.strip() or None,
        "machine": platform.platform(),
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "cpu_threads": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "seed": recipe.seed,
        "command": sys.argv,
    }
    write_text(run_dir / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
