"""The training loop (Section 5), on Accelerate: from a recipe to a run folder with a scored model in it."""

import json
import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..averaging import average_checkpoints
from ..data.batching import Batch
from ..files import append_line, atomic_folder, atomic_write_bytes, atomic_write_text, digest, find_damage
from ..hub.card import PICTURE, card_files
from ..hub.publishing import Publisher
from ..interruption import Interrupted, Interruption, exclusive_run, stopped_by_sigterm
from ..metrics import score
from ..model.configuration_vaswani import VaswaniConfig
from ..model.modeling_vaswani import VaswaniForConditionalGeneration
from ..processes import build_accelerator, on_main_process
from ..recipe import Recipe, TrainingRecipe
from ..run_folder import (
    CURVE,
    ENVIRONMENT,
    MODEL,
    NONFINITE,
    RECIPE,
    RESULT,
    Result,
    check_checkpoint,
    checkpoint_folder,
    checkpoint_to_resume,
    checkpoints_to_average,
    digests,
    has_stalled,
    list_checkpoints,
    read_environment,
    read_recipe,
    read_result,
    read_validations,
    write_environment,
    write_result,
)
from .preparation import Run, describe_environment, prepare
from .state import Trainee, build_trainee, save_checkpoint
from .validation import translate_and_score, validate

try:
    from accelerate import Accelerator
    from accelerate.utils import gather_object, send_to_device, set_seed
    from tqdm.auto import tqdm
except ImportError as error:
    raise ImportError(f"Training needs {error.name}: pip install 'hf_vaswani[train]'") from error

logger = logging.getLogger(__name__)

TRANSLATIONS = "test_translations.txt"


def train(recipe: Recipe) -> Result:
    """
    Trains the model of a recipe, or goes on where an earlier call was stopped.

    A run folder without a checkpoint is started anew. One with checkpoints of the same recipe is resumed from the
    newest; when it is complete, only its result is returned again. SIGTERM and Ctrl-C end the running update, write a
    checkpoint, and raise [`Interrupted`].

    Args:
        recipe ([`Recipe`]): the experiment.

    Returns:
        `dict[str, Any]`: what `test.json` in the run folder says: `step`, `averaged` (checkpoints), `model` (the
        folder that `from_pretrained` loads) and, with a test set, what [`translate_and_score`] says of it, and
        `samples`.

    Raises:
        ValueError: the data or the recipe cannot be trained on, or the run folder belongs to another recipe.
        OSError: a file cannot be read or written; checkpoints written before are whole.
        Interrupted: somebody asked it to stop.
    """
    # Wrong settings of the model and of the score are to show now, and not after the data, or at the first validation.
    VaswaniConfig(**asdict(recipe.model))
    score(["text"], ["text"], recipe.evaluation.tokenize, recipe.evaluation.lowercase)
    checkpoint_to_resume(recipe)
    text = f"stopped. What {recipe.run_dir} has is whole; the same command again goes on with it."
    with stopped_by_sigterm(text), _in_company():
        accelerator = build_accelerator(recipe)
        result = on_main_process(accelerator, _result_if_complete, recipe)
        if result is not None:
            on_main_process(accelerator, _complete, recipe, accelerator, result)
            logger.info(f"{recipe.run_dir} is complete; delete it or name another --run_dir to train anew")
            return result
        return _train_to_the_end(recipe, accelerator, text)


def _train_to_the_end(recipe: Recipe, accelerator: Accelerator, text: str) -> Result:
    """Everything from the data to the model; `text` says what a signal outside of the updates leaves behind."""
    with _locked(Path(recipe.run_dir), accelerator):
        # Looked up again, now that nobody else writes there.
        checkpoint = on_main_process(accelerator, _checkpoint_to_go_on_from, recipe)
        # The same first weights in all processes; `build_trainee` then gives each a dropout of its own.
        set_seed(recipe.seed)
        run = prepare(recipe, accelerator, checkpoint)
        logger.info(f"{recipe.run_dir} {'starts anew' if checkpoint is None else f'resumes from {checkpoint.name}'}")
        accelerator.init_trackers("hf_vaswani", {key: str(value) for key, value in recipe.flat().items()})
        trainee = build_trainee(run, checkpoint)
        # Only the first process talks to the Hub.
        publisher = Publisher(run.folder, recipe.hub, trainee.step) if accelerator.is_main_process else None
        with Interruption() as interruption:
            try:
                _train(run, trainee, interruption, publisher)
            except Interrupted:
                _end(accelerator)
                raise
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise OSError(
                    f"A process of training.data_workers ended, perhaps for want of memory: {error} The same command "
                    "again goes on from the last checkpoint."
                ) from error
        if interruption.signal is not None:
            # It came after the last update had asked for it.
            raise Interrupted(text, 128 + interruption.signal)
        result = _finish(run, trainee.whole or trainee.bare, trainee.step, trainee.seconds)
        _end(accelerator)
        if publisher is not None:
            publisher.wait()
    return result


@contextmanager
def _locked(run_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Locks the run folder; the main process holds the lock, and every process hears if another training has it."""
    with ExitStack() as stack:
        on_main_process(accelerator, lambda: stack.enter_context(exclusive_run(run_dir)))
        yield


@contextmanager
def _in_company() -> Iterator[None]:
    """One sentence where another process of the training has ended, and this one waited for it."""
    try:
        yield
    # gloo has no error class of its own.
    except RuntimeError as error:
        if not re.search(r"gloo|NCCL|Connection (closed|reset) by peer|Broken pipe", str(error)):
            raise
        raise OSError(
            "Another process of this training has ended, or cannot be reached; its own message says why. The same "
            f"command again goes on from the last checkpoint. ({str(error).splitlines()[0].split('. ')[0]})"
        ) from error


def _end(accelerator: Accelerator) -> None:
    """Closes the trackers and the process group."""
    if accelerator.num_processes > 1:
        # gloo's threads need Python's lock to let go of the tensors they sent last, and the end of the group waits for
        # these threads without giving that lock away: for ever, if they have not come to it yet.
        time.sleep(0.5)
    accelerator.end_training()


def _checkpoint_to_go_on_from(recipe: Recipe) -> Path | None:
    """The newest checkpoint, once every file of it was compared with its digest."""
    checkpoint, run_dir = checkpoint_to_resume(recipe), Path(recipe.run_dir)
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    elif (run_dir / RESULT).is_file():
        damage = _damage_of_the_result(run_dir)
        what = f"{damage}, and there is" if damage else f"{run_dir} has the result of a training, but"
        raise ValueError(
            f"{what} no checkpoint to go on from; delete the folder to train anew, or name another --run_dir."
        )
    return checkpoint


# ---- The loop ----------------------------------------------------------------------------------------------------


def _train(run: Run, trainee: Trainee, interruption: Interruption, publisher: Publisher | None) -> None:
    """An update after the other, validated and saved every so often."""
    training, accelerator = run.recipe.training, run.accelerator
    last = trainee.step >= training.max_steps or on_main_process(accelerator, _has_stalled, run.recipe, trainee.step)
    updates = run.updates.after(trainee.position)
    with closing(_Progress(accelerator, trainee.step, training.max_steps)) as progress:
        while not last:
            batches, position = next(updates)
            numbers = [batch.pop("numbers") for batch in batches]
            rate = float(trainee.schedule.get_last_lr()[0])
            update = _update(accelerator, trainee.model, trainee.optimizer, batches, training, interruption)
            with warnings.catch_warnings():
                # Also an update that is left out has its learning rate.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                trainee.schedule.step()
            # The average starts as a copy of the first weights, even if their update was left out.
            if trainee.ema is not None and (update.finite or trainee.step == 0):
                trainee.ema.update_parameters(trainee.bare)
            step = trainee.step = trainee.step + 1
            trainee.position = position
            trainee.nonfinite = 0 if update.finite else trainee.nonfinite + 1
            if not update.finite:
                _note_nonfinite(run, trainee, update, rate, numbers)
            progress.show(step, update)
            if step % training.log_every == 0:
                _log(run, step, update, rate, progress.speed)
            last = step == training.max_steps
            if (step % training.validate_every == 0 or last) and "validation" in run.sets:
                validate(run, trainee.to_validate(), step)
                if not last and on_main_process(accelerator, _has_stalled, run.recipe, step):
                    last = True
                    logger.info(f"update {step}: {training.patience} validations without a new best; that is the end")
                progress.restart_clock()
            if step % training.save_every == 0 or last or update.stop:
                save_checkpoint(run, trainee)
                if publisher is not None and step % training.save_every == 0:
                    publisher.offer(checkpoint_folder(run.folder, step), step // training.save_every)
                progress.restart_clock()
            last = last or update.stop
    asked = accelerator.reduce(torch.tensor(interruption.asked, device=accelerator.device, dtype=torch.int), "sum")
    if asked:
        raise interruption.error(checkpoint_folder(run.folder, trainee.step))


class _Update(NamedTuple):
    """What one update says of itself, the same in every process."""

    # The smoothed loss, in nats per target token.
    loss: float
    tokens: int
    gradient_norm: float
    # Whether both are finite; if not, the update was left out.
    finite: bool
    # Whether some process was asked to stop.
    stop: bool


def _update(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    training: TrainingRecipe,
    interruption: Interruption,
) -> _Update:
    """One step of the optimizer, on this process's batches of an update."""
    batches = send_to_device(batches, accelerator.device)
    # The loss is divided by the target tokens of the whole update: in a mean of the batches' means, a token of a small
    # batch would weigh more than one of a large batch.
    tokens = torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum()
    tokens = accelerator.reduce(tokens, "sum")
    epsilon = training.label_smoothing
    if training.label_smoothing_over == "all":
        epsilon = _epsilon_of_the_others(epsilon, accelerator.unwrap_model(model).config.vocab_size)
    loss = torch.zeros((), device=accelerator.device)
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        with accelerator.no_sync(model) if left else nullcontext():
            share = model(**batch, epsilon_ls=epsilon, num_items_in_batch=tokens, loss_only=True).loss
            # Gradients are averaged over the processes, but each process has only its share of one sum.
            accelerator.backward(share * accelerator.num_processes)
        loss += share.detach()
    loss, stop = accelerator.reduce(torch.stack([loss, loss.new_tensor(interruption.asked)]), "sum").tolist()
    # With an infinite bound nothing is clipped, but the norm is known.
    norm = accelerator.clip_grad_norm_(model.parameters(), training.clip_norm or math.inf)
    norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    # In fp16 an infinite gradient is at first the scaler's business: it leaves the step out by itself and scales less.
    scaled = accelerator.scaler is not None and not math.isfinite(norm) and accelerator.scaler.get_scale() > 1
    finite = math.isfinite(loss) and (math.isfinite(norm) or scaled)
    if finite:
        optimizer.step()
    elif accelerator.scaler is not None:
        # The step would have told the scaler that it is done with this update's gradients.
        accelerator.scaler.update()
    optimizer.zero_grad()
    return _Update(loss, int(tokens), norm, finite, stop > 0)


def _epsilon_of_the_others(epsilon: float, vocab_size: int) -> float:
    """Spread over all V tokens, epsilon / V of it falls to the true one; the others share this rest."""
    return epsilon * (vocab_size - 1) / vocab_size


def _log(run: Run, step: int, update: _Update, rate: float, speed: float) -> None:
    """A line in `training.jsonl`, and a point of the trackers' curves."""
    values = {"loss": update.loss, "gradient_norm": update.gradient_norm, "learning_rate": rate}
    run.accelerator.log(values | {"target_tokens_per_second": speed}, step=step)
    if run.accelerator.is_main_process:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_line(run.folder / CURVE, json.dumps({"step": step, **finite}))


def _note_nonfinite(run: Run, trainee: Trainee, update: _Update, rate: float, numbers: list[torch.Tensor]) -> None:
    """Writes down an update that was left out, with its pairs; raises `ValueError` when there were too many."""
    mine = [int(number) for batch in numbers for number in batch]
    pairs = sorted(gather_object(mine))
    line = {"step": trainee.step, "loss": str(update.loss), "gradient_norm": str(update.gradient_norm)}
    path = run.folder / NONFINITE
    if run.accelerator.is_main_process:
        append_line(path, json.dumps(line | {"learning_rate": rate, "pairs": pairs}))
    some = ", ".join(map(str, pairs[:10])) + (f" and {len(pairs) - 10} more" if len(pairs) > 10 else "")
    what = f"update {trainee.step}: loss {update.loss}, gradient norm {update.gradient_norm}, learning rate {rate:.3g}"
    logger.warning(f"Left out {what}, pairs {some}")
    limit = run.recipe.training.max_nonfinite_updates
    if trainee.nonfinite >= limit:
        checkpoints = list_checkpoints(run.folder)
        kept = f"{checkpoints[-1]} is as it was" if checkpoints else "there was no checkpoint yet"
        raise ValueError(
            f"The training stopped after {limit} updates in a row without a finite loss and gradient "
            f"(training.max_nonfinite_updates); the last was {what}, with the pairs {some} of the training text, "
            f"counted from 1. {path} has all of them; {kept}."
        )


class _Progress:
    """The bar: step, loss, target tokens per second, time left."""

    def __init__(self, accelerator: Accelerator, step: int, max_steps: int) -> None:
        self.step = step
        self.speed = 0.0
        self.bar = tqdm(
            total=max_steps, initial=step, desc="Training", unit=" updates", disable=not accelerator.is_main_process
        )
        self.restart_clock()

    def restart_clock(self) -> None:
        """Forgets the time since the last numbers, so that the speed is that of training alone."""
        self.since = time.monotonic()
        self.tokens = 0

    def show(self, step: int, update: _Update) -> None:
        """Takes an update's numbers, and shows them about once a second."""
        self.step = step
        self.tokens += update.tokens
        seconds = time.monotonic() - self.since
        if seconds < 1:
            return
        self.speed = self.tokens / seconds
        self.bar.set_postfix_str(f"loss {update.loss:.3f}, {self.speed:,.0f} target tokens/s", refresh=False)
        self.bar.update(step - self.bar.n)
        self.restart_clock()

    def close(self) -> None:
        """Leaves the bar as it is, on a line of its own."""
        self.bar.update(self.step - self.bar.n)
        self.bar.close()


def _has_stalled(recipe: Recipe, step: int) -> bool:
    """Whether patience was at its end after that update."""
    training = recipe.training
    validations = [line for line in read_validations(Path(recipe.run_dir)) if line.step <= step]
    return training.patience is not None and has_stalled(validations, training.best_by, training.patience)


# ---- The end -----------------------------------------------------------------------------------------------------


def _finish(run: Run, model: VaswaniForConditionalGeneration, step: int, seconds: float) -> Result:
    """Averages checkpoints, scores the mean on the test set, and only then writes the model folder."""
    chosen = on_main_process(run.accelerator, _checkpoints_to_average, run.recipe)
    # Tied weights are stored once, so the other names of that matrix are missing.
    model.load_state_dict(average_checkpoints(chosen), strict=False)
    averaged = [checkpoint.name for checkpoint in chosen]
    result = Result(step, averaged, seconds=round(seconds, 1), model=str(run.folder / MODEL))
    translations: dict[str, list[str]] = {}
    if "test" in run.sets:
        translations, scored = translate_and_score(run, model, "test", run.recipe.evaluation.num_beams)
        samples = [
            {"source": source, "translation": translation, "reference": reference}
            for pairs in run.sets["test"]
            for source, translation, reference in islice(
                zip(pairs.source, translations[pairs.name], pairs.target, strict=True), 5
            )
        ]
        result = replace(result, **scored, samples=samples)
    result = on_main_process(run.accelerator, _write_result, run, model, result, translations)
    run.accelerator.wait_for_everyone()
    return result


def _write_result(
    run: Run, model: VaswaniForConditionalGeneration, result: Result, translations: dict[str, list[str]]
) -> Result:
    """Writes model, translations, `test.json` and card, in this order: where there is a result, the model is whole."""
    # The result that is there belongs to the model that is replaced now.
    (run.folder / RESULT).unlink(missing_ok=True)
    with atomic_folder(run.folder / MODEL) as folder:
        model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
    written = {}
    for name, lines in translations.items():
        file = TRANSLATIONS if len(translations) == 1 else TRANSLATIONS.replace(".", f".{name}.")
        atomic_write_text(run.folder / file, "".join(line + "\n" for line in lines))
        written[file] = digest(run.folder / file)
    result = replace(result, files=digests(run.folder / MODEL), translations=written)
    write_result(run.folder, result)
    _write_card(run.recipe, result)
    return result


def _write_card(recipe: Recipe, result: Result) -> None:
    run_dir = Path(recipe.run_dir)
    # The picture comes first, so that the card, once it is there, has it.
    for name, content in card_files(run_dir, run_dir / MODEL, result, recipe.hub.repo_id, recipe.hub.revision).items():
        atomic_write_bytes(run_dir / MODEL / name, content)


def _checkpoints_to_average(recipe: Recipe) -> list[Path]:
    training = recipe.training
    return checkpoints_to_average(
        Path(recipe.run_dir), training.save_every, training.average_last, training.average_best, training.best_by
    )


def _result_if_complete(recipe: Recipe) -> Result | None:
    """Returns the content of `test.json` if the run has nothing left to do and none of its results is damaged."""
    folder = Path(recipe.run_dir)
    if not (folder / RESULT).is_file():
        return None
    damage = _damage_of_the_result(folder)
    try:
        result = read_result(folder)
        # Some of them may have been deleted meanwhile, or all.
        averaged = [checkpoint.name for checkpoint in _checkpoints_to_average(recipe)]
        complete = (not list_checkpoints(folder) or result.averaged == averaged) and (
            result.step >= recipe.training.max_steps or _has_stalled(recipe, result.step)
        )
    # Whoever goes on from the checkpoints will hear of it.
    except (OSError, ValueError):
        complete = False
    if damage is not None and list_checkpoints(folder):
        logger.warning(f"{damage}: it is made again from the checkpoints")
    # The run's folder may have got another name since.
    return replace(result, model=str(folder / MODEL)) if complete and damage is None else None


def _damage_of_the_result(folder: Path) -> str | None:
    """Describes the damage to model, translations or `test.json` as the beginning of a sentence, if there is any."""
    try:
        result = read_result(folder)
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    if not (folder / MODEL).is_dir():
        return f"{folder / MODEL} is missing"
    # Earlier versions noted the digests of the model alone, or none.
    return find_damage(folder / MODEL, result.files or {}) or find_damage(folder, result.translations or {})


def _complete(recipe: Recipe, accelerator: Accelerator, result: Result) -> None:
    """Writes what a finished run lacks beside its model: it was killed before that, or somebody has deleted it."""
    run_dir = Path(recipe.run_dir)
    card, picture = run_dir / MODEL / "README.md", run_dir / MODEL / PICTURE
    tasks: dict[Path, Callable[[], None]] = {}
    try:
        read_recipe(run_dir)
    except ValueError:
        tasks[run_dir / RECIPE] = lambda: atomic_write_text(run_dir / RECIPE, recipe.as_yaml())
    try:
        read_environment(run_dir)
    except ValueError:
        tasks[run_dir / ENVIRONMENT] = lambda: write_environment(run_dir, describe_environment(recipe, accelerator))
    if not card.is_file() or (PICTURE in card.read_text("utf-8", errors="replace") and not picture.is_file()):
        tasks[card] = lambda: _write_card(recipe, result)
    if tasks:
        with exclusive_run(run_dir):
            for path, task in tasks.items():
                task()
                logger.warning(f"{path} was missing or damaged, and is written again")
