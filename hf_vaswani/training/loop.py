"""The training loop (Section 5), on Accelerate: trains a recipe to a run folder with a scored model."""

import json
import logging
import math
import re
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import distributed

from ..averaging import average_checkpoints, load_stored
from ..extras import extra
from ..files import append_line, atomic_folder, atomic_write_bytes, atomic_write_text, digest, find_damage
from ..hub.card import PICTURE, card_files
from ..hub.publishing import Publisher, is_due
from ..interruption import Interrupted, Interruption, ends_after_sigterm, exclusive, stopped_by_sigterm
from ..metrics import compare_sets, measure_of, score, tokenizer_of
from ..model.heads_vaswani import VaswaniClassifier
from ..model.modeling_vaswani import VaswaniForConditionalGeneration, VaswaniPreTrainedModel
from ..processes import build_accelerator, close_process_group, on_main_process
from ..recipe import MEASURED_TASKS, Recipe, TrainingRecipe
from ..records import Result, public
from ..run_folder import (
    CURVE,
    ENVIRONMENT,
    MODEL,
    NONFINITE,
    RECIPE,
    RESULT,
    START,
    START_TRANSLATIONS,
    TRANSLATIONS,
    Resume,
    check_checkpoint,
    check_resume,
    checkpoint_folder,
    checkpoints_to_average,
    digests,
    find_resume,
    has_stalled,
    known_validations,
    list_checkpoints,
    places_of_text,
    read_environment,
    read_recipe,
    read_result,
    read_validations,
    translations_file,
    write_environment,
    write_result,
)
from ..translation.quantization import fastest_training, float32_products
from ..translation.shortlist import FILE as SHORTLIST
from .batch_size import tokens_that_fit
from .comparison import check_loading, offer_checkpoint, translate_tests
from .consistency import TwoPasses
from .distillation import with_teacher_text
from .preparation import Run, describe_environment, prepare
from .start import resumed_recipe
from .state import TrainState, build_state, save_checkpoint
from .tasks import check_model
from .transfer import check_peft
from .update import Launched, Outcome, Updater
from .validation import choose_alignment_layer, finite, measure, score_altered, translate_and_score, validate

with extra("train"):
    from accelerate import Accelerator
    from accelerate.utils import gather_object, set_seed
    from tqdm.auto import tqdm

logger = logging.getLogger(__name__)


# Seconds that the processes of an earlier launch may take to end.
SHUTDOWN_GRACE = 60
# Messages of a first and of a second Ctrl-C during the updates.
NOTICE = (
    "Stopping after this update, and its validation if one is due. Press Ctrl-C again to stop at once, without a "
    "checkpoint."
)
AT_ONCE = "stopped at once, without a checkpoint of the current update."


def train(recipe: Recipe) -> Result:
    """
    Trains the model of a recipe, or resumes where an earlier call stopped.

    A run folder without a checkpoint is started anew. One with checkpoints of the same recipe is resumed from the
    newest; a complete one only returns its result again. SIGTERM and Ctrl-C finish the running update, write a
    checkpoint, and raise [`Interrupted`]. If that takes a minute after SIGTERM, the process ends without it.

    Args:
        recipe ([`Recipe`]): the experiment.

    Returns:
        [`Result`]: the content of `test.json` in the run folder.

    Raises:
        ValueError: the recipe or its data cannot be trained on, or the run folder belongs to another recipe.
        OSError: a file cannot be read or written; earlier checkpoints are intact.
        Interrupted: a signal asked the training to stop.
    """
    recipe = check_recipe(with_teacher_text(recipe))
    text = f"stopped. Everything in {recipe.run_dir} is intact; the same command again resumes."
    late = (
        f"SIGTERM asked the training of {recipe.run_dir} to stop, but it got no further: stopped at once, without a "
        "checkpoint of the current update. The same command again resumes from the last checkpoint."
    )
    with ends_after_sigterm(late), stopped_by_sigterm(text), _lost_processes_as_os_error():
        accelerator = build_accelerator(recipe.training, recipe.run_dir, partial(_precision_of_auto, recipe))
        result = on_main_process(accelerator, _result_if_complete, recipe)
        if result is not None:
            on_main_process(accelerator, _complete, recipe, accelerator, result)
            logger.info(f"{recipe.run_dir} is complete; delete it or name another --run_dir to train again")
            return result
        return _train_to_the_end(recipe, accelerator, text)


def check_recipe(recipe: Recipe) -> Recipe:
    """
    Checks what needs neither training text nor other processes.

    Args:
        recipe ([`Recipe`]): the experiment.

    Returns:
        [`Recipe`]: completed from the record of its run, see [`resumed_recipe`].

    Raises:
        ValueError: the recipe cannot be trained, or the run folder belongs to another recipe.
    """
    resume = find_resume(Path(recipe.run_dir))
    recipe = resumed_recipe(recipe, resume)
    if recipe.initialize.from_ is None:
        check_model(recipe)
    check_packages(recipe)
    check_resume(recipe, resume)
    return recipe


def check_packages(recipe: Recipe) -> None:
    """
    Raises an `ImportError` if a package is missing that the recipe needs, or a `ValueError` if the metrics cannot be
    computed as it asks.
    """
    if recipe.task not in MEASURED_TASKS:
        for part in (recipe.data, *recipe.more_data, *recipe.named_sets.values()):
            how = tokenizer_of(recipe.evaluation.tokenize, part.target_language), recipe.evaluation.lowercase
            score(["text"], ["text"], *how, sources=["text"])
    if recipe.training.adapter is not None:
        check_peft()


def _precision_of_auto(recipe: Recipe, device: torch.device) -> str:
    """Returns the precision of the run's newest checkpoint; without one, the fastest of this machine."""
    resume = find_resume(Path(recipe.run_dir))
    if resume is not None:
        return str(resume.progress.launch["mixed_precision"])
    dtype, why = fastest_training(device, recipe.model.d_model)
    precision = "bf16" if dtype == torch.bfloat16 else "no"
    logger.info(f"training.mixed_precision auto is {precision}, because {why}")
    return precision


def _train_to_the_end(recipe: Recipe, accelerator: Accelerator, text: str) -> Result:
    """Reads the data, trains, and scores the model; `text` is the message of a signal outside of the updates."""
    with _locked(Path(recipe.run_dir), accelerator):
        resume = on_main_process(accelerator, _intact_resume, recipe)
        if resume is None and recipe.hub.not_worse_than not in (None, "start", "last_push"):
            # Days later, at the end of the training, would be late.
            on_main_process(accelerator, check_loading, str(recipe.hub.not_worse_than), "hub.not_worse_than")
        _warn_of_warmup(recipe.training)
        # All processes draw the same initial weights; `build_state` then gives each a dropout of its own.
        set_seed(recipe.seed)
        run = prepare(recipe, accelerator, resume, tokens_that_fit)
        logger.info(f"{recipe.run_dir} {'starts' if resume is None else f'resumes from {resume.checkpoint.name}'}")
        with _trackers(run):
            state = build_state(run, resume)
            # Only the main process talks to the Hub.
            publisher = Publisher(run.folder, recipe.hub, state.step) if accelerator.is_main_process else None
            with Interruption(NOTICE, AT_ONCE) as interruption:
                try:
                    _train(run, state, interruption, publisher)
                except RuntimeError as error:
                    if "DataLoader worker" not in str(error):
                        raise
                    raise OSError(
                        "A worker process of training.data_workers died, perhaps for lack of memory, or of space in "
                        f"/dev/shm: {error} The same command again resumes from the last checkpoint."
                    ) from error
            if interruption.signal is not None:
                # It arrived after the last update had looked for it.
                raise Interrupted(text, 128 + interruption.signal)
            result = _finish(run, state.plain_model(), state.step, state.seconds)
        if publisher is not None:
            publisher.wait()
    return result


def _warn_of_warmup(training: TrainingRecipe) -> None:
    if training.schedule != "noam" and training.warmup_steps >= training.max_steps:
        logger.warning(
            f"training.warmup_steps ({training.warmup_steps:,}) is not below training.max_steps "
            f"({training.max_steps:,}): the learning rate never reaches training.peak_learning_rate"
        )


@contextmanager
def _locked(run_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Locks the run folder; the main process holds the lock, and every process hears if another training has it."""
    # The processes of a launcher that was killed finish their update and write a checkpoint.
    patience = SHUTDOWN_GRACE if accelerator.num_processes > 1 else 0
    with ExitStack() as stack:
        on_main_process(accelerator, lambda: stack.enter_context(exclusive(run_dir, patience)))
        yield


@contextmanager
def _lost_processes_as_os_error() -> Iterator[None]:
    """Turns the errors of waiting for a process that has ended into an `OSError` of one sentence."""
    try:
        yield
    # gloo has no error class of its own.
    except RuntimeError as error:
        if not re.search(r"gloo|NCCL|Connection (closed|reset) by peer|Broken pipe", str(error)):
            raise
        raise OSError(
            "Another process of this training has ended or cannot be reached; see its own message. The same command "
            f"again resumes from the last checkpoint. ({str(error).splitlines()[0].split('. ')[0]})"
        ) from error


@contextmanager
def _trackers(run: Run) -> Iterator[None]:
    """Opens the trackers, and at the end, whatever ends the block, closes them and the process group."""
    accelerator, together = run.accelerator, False
    accelerator.init_trackers("hf_vaswani", {key: str(value) for key, value in public(run.recipe.flat()).items()})
    try:
        yield
        together = True
    except Interrupted:
        together = True
        raise
    finally:
        close_process_group()
        if together or not distributed.is_initialized():
            accelerator.end_training()
        else:
            # Closing a group of GPUs may wait for processes that have not met the error. It ends with this process.
            for tracker in accelerator.trackers:
                tracker.finish()


def _intact_resume(recipe: Recipe) -> Resume | None:
    """Finds the checkpoint to resume from, now that no other training writes there, and checks its files."""
    run_dir = Path(recipe.run_dir)
    resume = find_resume(run_dir)
    check_resume(recipe, resume)
    if resume is not None:
        check_checkpoint(resume.checkpoint, resume.progress)
    elif (run_dir / RESULT).is_file():
        damage = _damage_of_the_result(run_dir)
        what = f"{damage}, and there is" if damage else f"{run_dir} has the result of a training, but"
        raise ValueError(
            f"{what} no checkpoint to resume from: delete the folder to train again, or name another --run_dir."
        )
    return resume


# ---- The loop ----------------------------------------------------------------------------------------------------


def _train(run: Run, state: TrainState, interruption: Interruption, publisher: Publisher | None) -> None:
    """Makes one update after the other; logs, validates and saves at the intervals of the recipe."""
    training, accelerator = run.recipe.training, run.accelerator
    last = state.step >= training.max_steps or on_main_process(accelerator, _has_stalled, run.recipe, state.step)
    updates = run.updates.after(state.position)
    passes = TwoPasses(training, run.recipe.seed, state.model)
    updater = Updater(accelerator, state.wrapped, state.optimizer, training, state.ema)
    pending = deque[_Pending]()
    if state.step == 0 and run.recipe.initialize.from_ is not None and "validation" in run.sets:
        # The curves begin with the scores of the model that the run starts from.
        validate(run, state.eval_model(), 0)
    predicted = "labels" if isinstance(state.model, VaswaniClassifier) else "target tokens"
    saved, seconds = time.monotonic(), 60 * (training.save_every_minutes or math.inf)
    with closing(_Progress(accelerator, state.step, training.max_steps, predicted)) as progress:
        while not last:
            batches, position = next(updates)
            numbers = [batch.pop("numbers") for batch in batches]
            batches = [passes(*batch, state.step) for batch in zip(batches, numbers, strict=True)]
            rate = float(state.schedule.get_last_lr()[0])
            # The clock of the main process decides for all.
            due = accelerator.is_main_process and time.monotonic() - saved >= seconds
            with passes.loss(), float32_products(training.matmul_precision, accelerator.device):
                update = updater(batches, interruption, due, is_first=state.step == 0)
            _advance(state, position)
            step = state.step
            pending.append(_Pending(step, rate, numbers, update))
            last = step == training.max_steps
            is_whole = last or step % training.validate_every == 0 or step % training.save_every == 0
            stop = save = False
            # The outcome on a GPU is read one update later, but always before a validation or a checkpoint.
            while len(pending) > (updater.runs_ahead and not (is_whole or stop or save)):
                outcome = _settle(run, state, pending.popleft(), progress)
                stop, save = stop or outcome.stop, save or outcome.save
            if (step % training.validate_every == 0 or last) and "validation" in run.sets:
                validate(run, state.eval_model(), step)
                if not last and on_main_process(accelerator, _has_stalled, run.recipe, step):
                    last = True
                    logger.info(f"update {step}: stopping early, no new best in {training.patience} validations")
                progress.restart_clock()
            if step % training.save_every == 0 or last or stop or save:
                save_checkpoint(run, state)
                saved = time.monotonic()
                if step % training.save_every == 0 and is_due(run.recipe.hub, step // training.save_every):
                    offer_checkpoint(run, state, publisher)
                progress.restart_clock()
            last = last or stop
    asked = torch.tensor(interruption.signal is not None, device=accelerator.device, dtype=torch.int)
    if accelerator.reduce(asked, "sum"):
        saved_in = checkpoint_folder(run.folder, state.step)
        raise Interrupted(
            f"stopped. Everything is saved in {saved_in}; run the same command again to resume.",
            128 + (interruption.signal or signal.SIGTERM),
        )


class _Pending(NamedTuple):
    """An update: its number, its learning rate, the numbers of its pairs, and its outcome, perhaps not yet known."""

    step: int
    rate: float
    numbers: list[torch.Tensor]
    update: Launched


def _settle(run: Run, state: TrainState, pending: _Pending, progress: "_Progress") -> Outcome:
    """Waits for an update, counts and logs it; raises a `ValueError` after too many non-finite ones in a row."""
    outcome = pending.update.outcome()
    state.nonfinite = 0 if outcome.finite else state.nonfinite + 1
    if not outcome.finite:
        _note_nonfinite(run, state.nonfinite, pending, outcome)
    progress.show(pending.step, outcome)
    if pending.step % run.recipe.training.log_every == 0:
        _log(run, pending.step, outcome, pending.rate, progress.speed)
    return outcome


def _advance(state: TrainState, position: dict[str, Any]) -> None:
    """Moves learning rate, step and position past an update."""
    with warnings.catch_warnings():
        # A skipped update uses up its learning rate, too.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        state.schedule.step()
    state.step += 1
    state.position = position


def _log(run: Run, step: int, update: Outcome, rate: float, speed: float) -> None:
    """Logs an update to `training.jsonl` and the trackers."""
    values = {"loss": update.loss, "gradient_norm": update.gradient_norm, "learning_rate": rate}
    run.accelerator.log(values | {"target_tokens_per_second": speed}, step=step)
    if run.accelerator.is_main_process:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_line(run.folder / CURVE, json.dumps({"step": step, **finite}))


def _note_nonfinite(run: Run, in_a_row: int, pending: _Pending, outcome: Outcome) -> None:
    """Logs a skipped update with its pairs; raises a `ValueError` after too many in a row."""
    mine = [int(number) for batch in pending.numbers for number in batch]
    pairs = sorted(gather_object(mine))
    line = {"step": pending.step, "loss": str(outcome.loss), "gradient_norm": str(outcome.gradient_norm)}
    path = run.folder / NONFINITE
    if run.accelerator.is_main_process:
        append_line(path, json.dumps(line | {"learning_rate": pending.rate, "pairs": pairs}))
    some = ", ".join(map(str, pairs[:10])) + (f" and {len(pairs) - 10} more" if len(pairs) > 10 else "")
    what = f"update {pending.step}: loss {outcome.loss}, gradient norm {outcome.gradient_norm}"
    what += f", learning rate {pending.rate:.3g}"
    logger.warning(f"Skipped non-finite {what}, pairs {some}")
    limit = run.recipe.training.max_nonfinite_updates
    if in_a_row >= limit:
        checkpoints = list_checkpoints(run.folder)
        kept = f"{checkpoints[-1]} is intact" if checkpoints else "there is no checkpoint yet"
        raise ValueError(
            f"The training stopped after {limit} updates in a row with a non-finite loss or gradient "
            f"(training.max_nonfinite_updates); the last was {what}, with pairs {some} of the training text, counted "
            f"from 1. {path} lists all of them; {kept}."
        )


class _Progress:
    """Progress bar with step, loss, target tokens or labels per second and remaining time."""

    def __init__(self, accelerator: Accelerator, step: int, max_steps: int, predicted: str) -> None:
        self.step = step
        self.predicted = predicted
        self.speed = 0.0
        self.bar = tqdm(
            total=max_steps, initial=step, desc="Training", unit=" updates", disable=not accelerator.is_main_process
        )
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes the time since the last update from the speed, which is that of training alone."""
        self.since = time.monotonic()
        self.tokens = 0

    def show(self, step: int, update: Outcome) -> None:
        """Counts an update, and refreshes the bar about once a second."""
        self.step = step
        self.tokens += update.tokens
        seconds = time.monotonic() - self.since
        if seconds < 1:
            return
        self.speed = self.tokens / seconds
        self.bar.set_postfix_str(f"loss {update.loss:.3f}, {self.speed:,.0f} {self.predicted}/s", refresh=False)
        self.bar.update(step - self.bar.n)
        self.restart_clock()

    def close(self) -> None:
        """Leaves the bar on a line of its own."""
        self.bar.update(self.step - self.bar.n)
        self.bar.close()


def _has_stalled(recipe: Recipe, step: int) -> bool:
    """Returns whether patience had run out after an update."""
    validations = [line for line in read_validations(Path(recipe.run_dir)) if line.step <= step]
    return has_stalled(validations, recipe.training, recipe.training.patience)


# ---- The end -----------------------------------------------------------------------------------------------------


def _finish(run: Run, model: VaswaniPreTrainedModel, step: int, seconds: float) -> Result:
    """Averages checkpoints, scores the mean on the test set, and then writes the model folder."""
    chosen = on_main_process(run.accelerator, checkpoints_to_average, run.folder, run.recipe.training)
    on_main_process(run.accelerator, _warn_of_no_gain, run.recipe)
    load_stored(model, average_checkpoints(chosen))
    averaged = [checkpoint.name for checkpoint in chosen]
    result = Result(step, averaged=averaged, seconds=round(seconds, 1), model=str(run.folder / MODEL))
    translations: dict[str, list[str]] = {}
    earlier: dict[str, list[str]] = {}
    if "test" in run.sets and run.recipe.task in MEASURED_TASKS:
        scores, sets = measure(run, model, "test")
        each = {name: finite(part) for name, part in (sets or {}).items()}
        result = replace(result, scores=finite(scores), sets=each or None)
    elif "test" in run.sets:
        translator = cast(VaswaniForConditionalGeneration, model)
        translations, scored = translate_and_score(run, translator, "test", run.recipe.evaluation.num_beams)
        samples = [
            {"source": source, "translation": translation, "reference": reference}
            for pairs in run.sets["test"]
            for source, translation, reference in islice(
                zip(pairs.source, translations[pairs.name], pairs.target, strict=True), 5
            )
        ]
        altered = score_altered(run, translator, run.recipe.evaluation.num_beams)
        result = replace(result, **scored, altered=altered, samples=samples)
        if run.start is not None:
            earlier = translate_tests(run, run.folder / START)
            how = run.recipe.evaluation.tokenize, run.recipe.evaluation.lowercase
            texts = run.sets["test"], earlier, translations
            result = replace(result, before=on_main_process(run.accelerator, compare_sets, *texts, *how))
    written = {TRANSLATIONS: translations, START_TRANSLATIONS: earlier}
    result = on_main_process(run.accelerator, _write_result, run, model, result, written)
    run.accelerator.wait_for_everyone()
    return result


def _warn_of_no_gain(recipe: Recipe) -> None:
    """Warns if no validation is better than the first, which is that of the model that the training started from."""
    training = recipe.training
    validations = known_validations(Path(recipe.run_dir))
    from_the_start = len(validations) > 1 and validations[0].step == 0
    if from_the_start and has_stalled(validations, training, len(validations) - 1):
        best = measure_of(training.best_by)
        what = f"a {'higher' if best.is_higher_better else 'lower'} {best.title}"
        logger.warning(f"no validation has {what} than that before the first update")


def _write_result(
    run: Run, model: VaswaniPreTrainedModel, result: Result, texts: dict[str, dict[str, list[str]]]
) -> Result:
    """Writes model, translations, `test.json` and card, in this order: a result implies a complete model."""
    # The old result belongs to the model that is replaced now.
    (run.folder / RESULT).unlink(missing_ok=True)
    # The entries of the vocabulary translate each other after more updates, too.
    shortlist = run.folder / MODEL / SHORTLIST
    kept = shortlist.read_bytes() if shortlist.is_file() else None
    choose_alignment_layer(run, model)
    with atomic_folder(run.folder / MODEL) as folder:
        model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
    written = {}
    for stem, translations in texts.items():
        for name, lines in translations.items():
            file = translations_file(stem, name, len(translations))
            atomic_write_text(run.folder / file, "".join(line + "\n" for line in lines))
            written[file] = digest(run.folder / file)
    result = replace(result, files=digests(run.folder / MODEL), translations=written)
    if kept is not None:
        atomic_write_bytes(shortlist, kept)
    write_result(run.folder, result)
    _write_card(run.recipe, result)
    return result


def _write_card(recipe: Recipe, result: Result) -> None:
    run_dir = Path(recipe.run_dir)
    # The picture comes first: a card implies its picture.
    repo_id, revision = recipe.hub.repo_id, recipe.hub.revision
    for name, content in card_files(run_dir, run_dir / MODEL, result, repo_id, revision, recipe).items():
        atomic_write_bytes(run_dir / MODEL / name, content)


def _result_if_complete(recipe: Recipe) -> Result | None:
    """Returns the result of a run that has nothing left to do, unless model, translations or result are damaged."""
    folder = Path(recipe.run_dir)
    if not (folder / RESULT).is_file():
        return None
    damage = _damage_of_the_result(folder)
    try:
        result = read_result(folder)
        # Some or all of the checkpoints may have been deleted since.
        averaged = [checkpoint.name for checkpoint in checkpoints_to_average(folder, recipe.training)]
        complete = (not list_checkpoints(folder) or result.averaged == averaged) and (
            result.step >= recipe.training.max_steps or _has_stalled(recipe, result.step)
        )
        # Where the text is elsewhere, it is read again, and compared.
        complete = complete and _has_its_text_there(recipe, folder)
    # Resuming reports the error.
    except (OSError, ValueError):
        complete = False
    if damage is not None and list_checkpoints(folder):
        logger.warning(f"{damage}: it is written again from the checkpoints")
    # The run folder may have been moved.
    return replace(result, model=str(folder / MODEL)) if complete and damage is None else None


def _has_its_text_there(recipe: Recipe, folder: Path) -> bool:
    """Returns whether a recipe has its text where its run had it, as far as that is recorded."""
    with suppress(ValueError):
        return places_of_text(recipe) == places_of_text(read_recipe(folder))
    return True


def _damage_of_the_result(folder: Path) -> str | None:
    """Returns the damage to model, translations or `test.json` as the beginning of a sentence, if any."""
    try:
        result = read_result(folder)
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    if not (folder / MODEL).is_dir():
        return f"{folder / MODEL} is missing"
    # Earlier versions wrote only the digests of the model, or none.
    return find_damage(folder / MODEL, result.files or {}) or find_damage(folder, result.translations or {})


def _complete(recipe: Recipe, accelerator: Accelerator, result: Result) -> None:
    """Writes the recipe, environment or card that a finished run lacks: it was killed, or they were deleted."""
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
        with exclusive(run_dir):
            for path, task in tasks.items():
                task()
                logger.warning(f"{path} was missing or damaged, and was written again")
