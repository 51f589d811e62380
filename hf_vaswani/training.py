"""The training loop (Section 5), on Accelerate: from a recipe to a run folder with a scored model in it."""

import ctypes
import json
import logging
import os
import platform
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from .batching import PairCollator, TokenBudgetBatchSampler
from .checkpoints import (
    PROGRESS,
    RECIPE,
    VALIDATIONS,
    average_checkpoints,
    best_checkpoints,
    checkpoint_to_resume,
    list_checkpoints,
    read_progress,
    read_validations,
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
    from accelerate.utils import ProjectConfiguration, gather_object, load, send_to_device, set_seed
    from datasets import Dataset
    from tqdm.auto import tqdm
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "sacrebleu", "safetensors")
RESULT = "test.json"
MODEL = "model"
TOKENIZER = "tokenizer"
TRANSLATIONS = "test_translations.txt"
ENVIRONMENT = "environment.json"


@dataclass
class _Run:
    """What every part of a run looks at, and none changes."""

    recipe: Recipe
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    pairs: dict[str, Dataset]
    encoded: dict[str, Dataset]

    @property
    def folder(self) -> Path:
        return Path(self.recipe.run_dir)


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
    # Wrong settings of the model and of the score are to show now, and not after the data, or at the first validation.
    VaswaniConfig(**asdict(recipe.model))
    score(["text"], ["text"], recipe.evaluation.tokenize, recipe.evaluation.lowercase)
    checkpoint = checkpoint_to_resume(recipe)
    result = _result_if_complete(recipe)
    accelerator = _build_accelerator(recipe)
    if result is not None:
        logger.info(f"{recipe.run_dir} is complete; delete it or name another --run_dir to train anew")
        return result
    set_seed(recipe.seed, device_specific=True)
    run = _read_data(recipe, accelerator, checkpoint)
    logger.info(f"{recipe.run_dir} {'starts anew' if checkpoint is None else f'resumes from {checkpoint.name}'}")
    accelerator.init_trackers("hf_vaswani", {key: str(value) for key, value in recipe.flat().items()})
    sampler = _build_sampler(run)
    model = _build_model(run)
    training = recipe.training
    optimizer = build_optimizer(
        model.parameters(),
        training.adam_beta1,
        training.adam_beta2,
        training.adam_epsilon,
        training.weight_decay,
        training.peak_learning_rate or 1.0,
    )
    schedule = build_schedule(
        optimizer,
        training.schedule,
        recipe.model.d_model,
        training.warmup_steps,
        training.max_steps,
        training.learning_rate_factor,
    )
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    position = {"step": 0, "epoch": 0, "update": 0, "data": sampler.lengths.sum(axis=0).tolist()}
    if checkpoint is not None:
        position = _load_checkpoint(accelerator, checkpoint, position["data"])
    _train_until(training.max_steps, position, run, sampler, model, optimizer, schedule)
    result = _finish(run, accelerator.unwrap_model(model))
    accelerator.end_training()
    return result


def _train_until(
    max_steps: int,
    position: dict[str, Any],
    run: _Run,
    sampler: TokenBudgetBatchSampler,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler,
) -> None:
    """The loop: an update after the other, validated and saved every so often."""
    step, epoch, update = (position[key] for key in ("step", "epoch", "update"))
    training = run.recipe.training
    loader = DataLoader(
        run.encoded["train"],
        batch_sampler=sampler,
        collate_fn=PairCollator(run.tokenizer.pad_token_id),
        # Its own generator: without one, a loader draws from the generator that the dropout uses.
        generator=torch.Generator(),
    )
    with closing(_Progress(run.accelerator, step, max_steps)) as progress:
        while step < max_steps:
            sampler.set_position(epoch, update)
            batches = iter(loader)
            for count in sampler.batches_of_updates()[update:]:
                rate = float(schedule.get_last_lr()[0])
                loss, tokens = _update(run.accelerator, model, optimizer, list(islice(batches, count)), training)
                schedule.step()
                step, update = step + 1, update + 1
                progress.show(step, loss, tokens, rate)
                if step % training.validate_every == 0 or step == max_steps:
                    _validate(run, model, step)
                    progress.restart_clock()
                if step % training.save_every == 0 or step == max_steps:
                    _save_checkpoint(run, position | {"step": step, "epoch": epoch, "update": update})
                    progress.restart_clock()
                if step == max_steps:
                    break
            else:
                epoch, update = epoch + 1, 0


def _update(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, torch.Tensor]],
    training: TrainingRecipe,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of Adam. Returns the smoothed loss per target token, and the target tokens, of all processes."""
    batches = send_to_device(batches, accelerator.device)
    # The loss is divided by the target tokens of the whole update: in a mean of the batches' means, a token of a small
    # batch would weigh more than one of a large batch.
    tokens = accelerator.reduce(torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum(), "sum")
    epsilon = training.label_smoothing
    if training.label_smoothing_over == "all":
        epsilon = _epsilon_of_the_others(epsilon, accelerator.unwrap_model(model).config.vocab_size)
    loss = torch.zeros((), device=accelerator.device)
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        with accelerator.no_sync(model) if left else nullcontext():
            share = model(**batch, epsilon_ls=epsilon, num_items_in_batch=tokens).loss
            # Gradients are averaged over the processes, but each process has only its share of one sum.
            accelerator.backward(share * accelerator.num_processes)
        loss += share.detach()
    if training.clip_norm is not None:
        accelerator.clip_grad_norm_(model.parameters(), training.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(loss, "sum"), tokens


def _epsilon_of_the_others(epsilon: float, vocab_size: int) -> float:
    """Spread over all V tokens, epsilon / V of it falls to the true one; the others share this rest."""
    return epsilon * (vocab_size - 1) / vocab_size


class _Progress:
    """The bar: step, loss, learning rate, target tokens per second, time left; and the trackers' curves of these."""

    def __init__(self, accelerator: Accelerator, step: int, max_steps: int) -> None:
        self.accelerator = accelerator
        self.step = step
        self.bar = tqdm(
            total=max_steps, initial=step, desc="Training", unit=" updates", disable=not accelerator.is_main_process
        )
        self.restart_clock()

    def restart_clock(self) -> None:
        """Forgets the time since the last numbers, so that the speed is that of training alone."""
        self.since = time.monotonic()
        self.tokens = torch.zeros((), device=self.accelerator.device)

    def show(self, step: int, loss: torch.Tensor, tokens: torch.Tensor, rate: float) -> None:
        """Takes an update's numbers; reads them off the device about once a second, because that waits for it."""
        self.step = step
        self.tokens += tokens
        seconds = time.monotonic() - self.since
        if seconds < 1:
            return
        speed = self.tokens.item() / seconds
        self.bar.set_postfix_str(f"loss {loss.item():.3f}, lr {rate:.2e}, {speed:,.0f} target tokens/s", refresh=False)
        self.bar.update(step - self.bar.n)
        self.accelerator.log(
            {"loss": loss.item(), "learning_rate": rate, "target_tokens_per_second": speed}, step=step
        )
        self.restart_clock()

    def close(self) -> None:
        """Leaves the bar as it is, on a line of its own."""
        self.bar.update(self.step - self.bar.n)
        self.bar.close()


def _save_checkpoint(run: _Run, progress: dict[str, Any]) -> None:
    """One folder with the state of model, optimizer, schedule and random numbers, and the position in the data."""
    accelerator, folder = run.accelerator, run.folder / f"checkpoint-{progress['step']}"
    with written_whole(folder) if accelerator.is_main_process else nullcontext(temporary_name(folder)) as temporary:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary))
        if accelerator.is_main_process:
            (temporary / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        training = run.recipe.training
        remove_old_checkpoints(run.folder, training.keep_last, training.average_best or 0)
    # Nobody goes on to read a folder that the first process has not renamed yet.
    accelerator.wait_for_everyone()


def _load_checkpoint(accelerator: Accelerator, checkpoint: Path, data: list[int]) -> dict[str, Any]:
    """Everything as it was, and the position in the data, which must be the data of then."""
    progress = read_progress(checkpoint)
    if progress["data"] != data:
        raise ValueError(
            f"The training text is not that of {checkpoint}, which had {progress['data'][0]} source and "
            f"{progress['data'][1]} target tokens; now there are {data[0]} and {data[1]}."
        )
    try:
        # Accelerate goes on without a word where the random numbers cannot be read, so they are looked at here.
        load(checkpoint / f"random_states_{accelerator.process_index}.pkl")
        accelerator.load_state(str(checkpoint))
    except (OSError, RuntimeError, EOFError, SafetensorError, UnpicklingError) as error:
        raise ValueError(
            f"{checkpoint} was damaged after it was written; delete it to go on from the one before: {error}"
        ) from error
    return progress


# ---- Validation and test -----------------------------------------------------------------------------------------


def _translate(run: _Run, model: VaswaniForConditionalGeneration, sentences: list[str], num_beams: int) -> list[str]:
    """Translates a corpus, every process its share of it."""
    mine = slice(run.accelerator.process_index, None, run.accelerator.num_processes)
    part = translate_corpus(
        model,
        run.tokenizer,
        sentences[mine],
        tokens_per_batch=run.recipe.evaluation.tokens_per_batch,
        progress=run.accelerator.is_main_process,
        num_beams=num_beams,
    )
    translations = dict(gather_object(list(zip(range(len(sentences))[mine], part, strict=True))))
    return [translations[i] for i in range(len(sentences))]


def _translate_and_score(
    run: _Run, model: VaswaniForConditionalGeneration, split: str, num_beams: int
) -> tuple[list[str], dict[str, Any]]:
    """Translations of a split, and their BLEU with its signature."""
    evaluation = run.recipe.evaluation
    translations = _translate(run, model, list(run.pairs[split]["source"]), num_beams)
    return translations, score(
        translations, list(run.pairs[split]["target"]), evaluation.tokenize, evaluation.lowercase
    )


@torch.no_grad()
def _validation_loss(run: _Run, model: torch.nn.Module) -> float:
    """Cross-entropy without smoothing, in nats per target token."""
    encoded, accelerator = run.encoded["validation"], run.accelerator
    lengths = pair_lengths(encoded)
    sampler = TokenBudgetBatchSampler(
        lengths,
        # Nothing is left out here: the budget grows to the longest pair.
        max(run.recipe.training.tokens_per_batch, int(lengths.max())),
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
    )
    collator = PairCollator(run.tokenizer.pad_token_id)
    total = torch.zeros(2, device=accelerator.device)
    model.eval()
    for batch in DataLoader(encoded, batch_sampler=sampler, collate_fn=collator, generator=torch.Generator()):
        batch = send_to_device(batch, accelerator.device)
        tokens = (batch["labels"] != -100).sum()
        total += torch.stack([model(**batch, num_items_in_batch=1).loss, tokens])
    model.train()
    loss, tokens = accelerator.reduce(total, "sum").tolist()
    return loss / tokens


def _validate(run: _Run, model: torch.nn.Module, step: int) -> None:
    """Loss and BLEU on the validation set: a line in the log, a line in validations.jsonl."""
    if "validation" not in run.pairs:
        return
    loss = _validation_loss(run, model)
    bare = run.accelerator.unwrap_model(model)
    _, scored = _translate_and_score(run, bare, "validation", run.recipe.evaluation.validation_num_beams)
    logger.info(f"update {step}: validation loss {loss:.3f}, BLEU {scored['bleu']:.2f} ({scored['signature']})")
    run.accelerator.log({"validation_loss": loss, "validation_bleu": scored["bleu"]}, step=step)
    if run.accelerator.is_main_process:
        # A resumed run comes again through updates that it had already validated.
        lines = [line for line in read_validations(run.folder) if line["step"] < step]
        lines.append({"step": step, "loss": loss, **scored})
        best = max(line["bleu"] for line in lines)
        text = "".join(json.dumps(line | {"best": line["bleu"] == best}) + "\n" for line in lines)
        write_text(run.folder / VALIDATIONS, text)


def _finish(run: _Run, model: VaswaniForConditionalGeneration) -> dict[str, Any]:
    """Averages checkpoints, scores the mean on the test set, and only then writes the model folder."""
    chosen = _checkpoints_to_average(run.recipe)
    # Tied weights are stored once, so the other names of that matrix are missing.
    model.load_state_dict(average_checkpoints(chosen), strict=False)
    result: dict[str, Any] = {
        "step": read_progress(list_checkpoints(run.folder)[-1])["step"],
        "averaged": [checkpoint.name for checkpoint in chosen],
        "model": str(run.folder / MODEL),
    }
    translations: list[str] = []
    if "test" in run.pairs:
        translations, scored = _translate_and_score(run, model, "test", run.recipe.evaluation.num_beams)
        rows = zip(run.pairs["test"]["source"], translations, run.pairs["test"]["target"], strict=True)
        names = ("source", "translation", "reference")
        result |= scored | {"samples": [dict(zip(names, row, strict=True)) for row in islice(rows, 5)]}
    if run.accelerator.is_main_process:
        with written_whole(run.folder / MODEL) as folder:
            model.save_pretrained(folder)
            run.tokenizer.save_pretrained(folder)
        write_text(run.folder / TRANSLATIONS, "".join(line + "\n" for line in translations))
        write_text(run.folder / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    run.accelerator.wait_for_everyone()
    return result


def _checkpoints_to_average(recipe: Recipe) -> list[Path]:
    folder, training = Path(recipe.run_dir), recipe.training
    if training.average_best is not None:
        return best_checkpoints(folder, training.average_best)
    return list_checkpoints(folder)[-training.average_last :]


# ---- Before the loop ---------------------------------------------------------------------------------------------


def _build_accelerator(recipe: Recipe) -> Accelerator:
    launched = int(os.environ.get("WORLD_SIZE", 1))
    on_cpu = launched > 1 and not torch.cuda.is_available()
    precision = recipe.training.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision == "fp16" and not torch.accelerator.is_available():
        raise ValueError("training.mixed_precision fp16 needs a GPU; on a CPU choose no or bf16.")
    trackers = recipe.training.trackers
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=recipe.training.mixed_precision,
        log_with=trackers or None,
        project_config=ProjectConfiguration(project_dir=recipe.run_dir),
        step_scheduler_with_optimizer=False,
    )
    if accelerator.num_processes != launched:
        raise ValueError(
            f"{launched} processes were launched, but Accelerate sees {accelerator.num_processes}: "
            "each would train a model of its own."
        )
    # Every process has the same to say, so one of them says it.
    logger.setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    available = [str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with]
    if set(trackers) - set(available):
        raise ValueError(f"training.trackers asks for {trackers}, but of these only {available} are installed.")
    if accelerator.device.type == "cpu":
        # `accelerate launch` gives a process a single thread unless it is told otherwise.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        torch.set_num_threads(recipe.training.cpu_threads or share)
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


def _result_if_complete(recipe: Recipe) -> dict[str, Any] | None:
    """What `test.json` says, if nothing is left to train, to average or to score."""
    folder = Path(recipe.run_dir)
    chosen = [checkpoint.name for checkpoint in _checkpoints_to_average(recipe)]
    try:
        result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        complete = result["averaged"] == chosen and result["step"] >= recipe.training.max_steps
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if complete and (folder / MODEL).is_dir() else None


def _read_data(recipe: Recipe, accelerator: Accelerator, checkpoint: Path | None) -> _Run:
    """Text, tokenizer and ids. The run folder is made once the text is known to be readable."""
    pairs = load_pairs(**asdict(recipe.data), seed=recipe.seed)
    for split in ("train", *pairs):
        sides = [pairs[split]["source"], pairs[split]["target"]] if split in pairs else [[], []]
        if not any(source.strip() and target.strip() for source, target in zip(*sides, strict=True)):
            raise ValueError(f"The {split} set is empty: the recipe's data section gives no pairs of text for it.")
    if recipe.training.average_best is not None and "validation" not in pairs:
        raise ValueError(
            "training.average_best needs a validation set, which the recipe's data section does not give."
        )
    if accelerator.is_main_process:
        _write_run_files(recipe, accelerator, checkpoint)
    folder = Path(recipe.run_dir) / TOKENIZER
    with accelerator.local_main_process_first():
        if checkpoint is None and accelerator.is_local_main_process:
            tokenizer = _make_tokenizer(recipe, pairs["train"])
            with written_whole(folder) as temporary:
                tokenizer.save_pretrained(temporary)
        tokenizer = load_tokenizer(str(folder))
        encoded = {split: encode_pairs(rows, tokenizer) for split, rows in pairs.items()}
    limit = _longest_side(recipe)
    for split in set(encoded) - {"train"}:
        if limit is not None and len(encoded[split]) and (longest := int(pair_lengths(encoded[split]).max())) > limit:
            raise ValueError(
                f"The {split} set has a side of {longest} tokens, but model.max_position_embeddings is {limit}."
            )
        if empty := len(pairs[split]) - len(encoded[split]):
            logger.warning(f"The {split} set has {empty} pairs with an empty side, and they count in its BLEU")
    return _Run(recipe, accelerator, tokenizer, pairs, encoded)


def _make_tokenizer(recipe: Recipe, rows: Dataset) -> PreTrainedTokenizerBase:
    if recipe.tokenizer.path is not None:
        return load_tokenizer(recipe.tokenizer.path)
    texts = (text for batch in rows.iter(1000) for text in (*batch["source"], *batch["target"]))
    return train_tokenizer(texts, recipe.tokenizer.vocab_size, recipe.tokenizer.kind)


def _build_sampler(run: _Run) -> TokenBudgetBatchSampler:
    lengths = pair_lengths(run.encoded["train"])
    budget = run.recipe.training.tokens_per_batch
    sampler = TokenBudgetBatchSampler(
        lengths,
        budget,
        seed=run.recipe.seed,
        batches_per_update=run.recipe.training.accumulation_steps,
        num_processes=run.accelerator.num_processes,
        process_index=run.accelerator.process_index,
        max_length=_longest_side(run.recipe),
    )
    source_tokens, target_tokens = lengths.sum(axis=0)
    logger.info(f"{len(lengths):,} training pairs, {source_tokens:,} source and {target_tokens:,} target tokens")
    empty = len(run.pairs["train"]) - len(lengths)
    if empty or sampler.skipped:
        logger.warning(
            f"Left out: {empty} pairs with an empty side, {sampler.skipped} with a side above {sampler.limit} tokens "
            f"({'training.tokens_per_batch' if sampler.limit == budget else 'model.max_position_embeddings'})"
        )
    return sampler


def _longest_side(recipe: Recipe) -> int | None:
    """Tokens that the model takes at most: only a learned table of positions has an end."""
    return recipe.model.max_position_embeddings if recipe.model.position_encoding == "learned" else None


def _build_model(run: _Run) -> VaswaniForConditionalGeneration:
    tokenizer, evaluation = run.tokenizer, run.recipe.evaluation
    start = getattr(tokenizer, f"{run.recipe.tokenizer.decoder_start}_token_id")
    config = VaswaniConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id if start is None else start,
        **asdict(run.recipe.model),
    )
    model = VaswaniForConditionalGeneration(config)
    model.generation_config.update(
        num_beams=evaluation.num_beams,
        # transformers saves no setting for which a single beam has no use.
        length_penalty=evaluation.length_penalty if evaluation.num_beams > 1 else None,
        early_stopping=evaluation.early_stopping if evaluation.num_beams > 1 else None,
        finish_candidates=evaluation.finish_candidates,
        length_penalty_type=evaluation.length_penalty_type,
        max_length_offset=evaluation.max_length_offset,
        max_length=evaluation.max_length,
    )
    logger.info(
        f"{model.num_parameters():,} parameters, on {run.accelerator.device} x {run.accelerator.num_processes}"
    )
    return model


def _write_run_files(recipe: Recipe, accelerator: Accelerator, checkpoint: Path | None) -> None:
    """What somebody needs to repeat the run: the whole recipe; versions, machine, command, revision of the code."""
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    recipe.save(run_dir / RECIPE)
    if checkpoint is not None:
        return
    # Of this package's own repository: an installed one may lie inside somebody else's.
    root, revision = Path(__file__).parent.parent, ""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        revision = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    environment = {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "git_revision": revision or None,
        "machine": platform.platform(),
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "cpu_threads": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "seed": recipe.seed,
        "command": sys.argv,
    }
    write_text(run_dir / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
