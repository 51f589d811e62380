"""To the Hub, with a score or not at all: the gate, one commit of everything, and pushes beside a training."""

import contextlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

from ..files import digest, read_json, temporary_name
from ..recipe import HubRecipe
from ..run_folder import (
    EMA_WEIGHTS,
    PROGRESS,
    RESULT,
    WEIGHTS,
    Scored,
    checkpoint_folders,
    checkpoint_step,
    has_checkpoint_name,
    known_validations,
    read_progress,
    read_result,
)
from .card import card_files

logger = logging.getLogger(__name__)

# Seconds without a byte after which the Hub counts as lost. By itself its client waits for ever.
ANSWER_SECONDS = 120
# Checkpoints that are to be published, or could not be.
UNPUBLISHED = "unpublished"
LEFT_BY_AN_EARLIER_PUSH = re.compile(r"model-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json|\w+_vaswani\.py")


class PublishingError(OSError):
    """The Hub refused, or could not be reached; says what to do. What was there before is there as it was."""


# ---- The score comes first ---------------------------------------------------------------------------------------


def read_score(run_dir: Path, folder: Path) -> Scored:
    """
    What is known of a model or a checkpoint of a run.

    Args:
        run_dir (`Path`): the run's folder.
        folder (`Path`): `model`, or one that is called `checkpoint-N`.

    Returns:
        [`Result`] of a model or [`Validation`] of a checkpoint, with the digests of the files that were scored.

    Raises:
        ValueError: it has no score.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no {folder}.")
    if has_checkpoint_name(folder):
        progress = read_progress(folder)
        lines = [line for line in known_validations(run_dir) if line.step == progress.step]
        if not lines:
            raise ValueError(f"{folder} has no BLEU, because it was not validated: it is not published.")
        return replace(lines[-1], seconds=progress.seconds, files=progress.files)
    path = run_dir / RESULT
    if not path.is_file():
        raise ValueError(f"{run_dir} has no result: it is not the folder of a run, or its training is not over.")
    try:
        result = read_result(run_dir)
    except ValueError as error:
        raise ValueError(f"{error} The command of the training makes it again from the checkpoints.") from error
    if result.bleu is None:
        raise ValueError(f"{folder} has no BLEU, because the run has no test set: it is not published.")
    if result.files is None:
        raise ValueError(
            f"{path} is of an older version, and does not say what was scored: {folder} is not published."
        )
    return result


def check_score(folder: Path, bleu: float | None, min_bleu: float) -> None:
    """
    The gate.

    Raises:
        ValueError: the BLEU is below the least; names both.
    """
    # Not "below", so that what is no number does not pass.
    if bleu is None or not bleu >= min_bleu:
        raise ValueError(f"{folder} is not published: its BLEU is {bleu:.2f}, and hub.min_bleu is {min_bleu:.2f}.")


# ---- One commit --------------------------------------------------------------------------------------------------


def push_checkpoint(run_dir: Path, folder: Path, hub: HubRecipe) -> str:
    """
    Publishes a model or a checkpoint, in one commit: weights, config, generation config, tokenizer, code, card.

    Args:
        run_dir (`Path`): the run's folder.
        folder (`Path`): its `model`, or one of its checkpoints.
        hub ([`HubRecipe`]): where to, and from which BLEU on.

    Returns:
        `str`: the address of the commit. Where everything is on the Hub already, there is no new one.

    Raises:
        ValueError: the BLEU is too low, or missing, or a file is not the one that was scored.
        PublishingError: the Hub refused, or could not be reached.
    """
    scored = read_score(run_dir, folder)
    check_score(folder, scored.bleu, hub.min_bleu)
    repo_id, revision = str(hub.repo_id), hub.revision
    files = _scored_files(folder, scored.files or {}) | card_files(run_dir, folder, scored, repo_id, revision)
    with _in_one_sentence(folder, repo_id, revision):
        api = HfApi()
        api.create_repo(repo_id, private=hub.private, exist_ok=True)
        if hub.private and not api.model_info(repo_id).private:
            raise PublishingError(
                f"{folder} is not published: hub.private is true, but {repo_id} is public. Make it private on the "
                "Hub, or name another hub.repo_id."
            )
        if revision != "main":
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = api.model_info(repo_id, revision=revision)
        names = {each.rfilename for each in there.siblings or []}
        if "config.json" in names:
            config = read_json(Path(api.hf_hub_download(repo_id, "config.json", revision=there.sha)))
            if config.get("model_type") != "vaswani":
                raise PublishingError(
                    f"{folder} is not published: {repo_id} ({revision}) has a model of another kind, "
                    f"{config.get('model_type')!r}, which would be mixed with this one. Name another hub.repo_id."
                )
        # Weights in several files, or code, that an earlier push left and this one does not have.
        old = [name for name in names - set(files) if LEFT_BY_AN_EARLIER_PUSH.fullmatch(name)]
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, content) for name, content in sorted(files.items())),
                *(CommitOperationDelete(name) for name in sorted(old)),
            ],
            commit_message=f"{folder.name}: BLEU {scored.bleu:.2f} after {scored.step:,} updates",
            revision=revision,
            # What somebody else has published meanwhile is not to be written over.
            parent_commit=there.sha,
        )
    return str(commit.commit_url)


def _scored_files(folder: Path, scored: dict[str, str]) -> dict[str, str | bytes]:
    """The files of a model by the names that they get on the Hub: those that were scored, and no other."""
    found: dict[str, str | bytes] = {}
    for name, sha256 in scored.items():
        path = folder / name
        if not path.is_file() or digest(path) != sha256:
            what = "was changed" if path.is_file() else "is missing"
            raise ValueError(f"{path} {what} since the model was scored: {folder} is not published.")
        # What was validated is the moving average, where there is one.
        found[WEIGHTS if name == EMA_WEIGHTS else name] = str(path)
    return found


@contextlib.contextmanager
def _in_one_sentence(folder: Path, repo_id: str, revision: str) -> Iterator[None]:
    """Whatever goes wrong between here and the Hub, as a [`PublishingError`] that says what to do."""
    client = get_session()
    before, client.timeout = client.timeout, ANSWER_SECONDS
    try:
        yield
    except PublishingError:
        raise
    # The client has its own errors, those of its HTTP library, RuntimeError and ValueError.
    except Exception as error:
        sentence = f"{folder} could not be published: {_advice(error, repo_id, revision)}"
        token = get_token()
        raise PublishingError(sentence.replace(token, "(the token)") if token else sentence) from None
    finally:
        client.timeout = before


def _advice(error: Exception, repo_id: str, revision: str) -> str:
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token for the Hub: log in by `hf auth login`, or put one into HF_TOKEN."
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE says that there is no network: unset it, and give the command again."
    # Of an upload that it has tried often enough, the client only says which file it was.
    refusal = error if isinstance(error, HfHubHTTPError) else error.__cause__
    status = refusal.response.status_code if isinstance(refusal, HfHubHTTPError) else None
    said = " ".join(str(getattr(refusal, "server_message", None) or error).split())
    if status == 401:
        # The Hub says the same to those that have no token at all.
        whose = "does not know this token" if get_token() else "wants a token"
        return f"the Hub {whose}: log in by `hf auth login`, or put a token with the right to write into HF_TOKEN."
    if status == 403:
        return (
            f"the token may not write to {repo_id}. It takes one with the right to write, of the owner or of a member "
            f"of the organization ({said})."
        )
    if status in (409, 412):
        return (
            f"somebody has changed {repo_id} ({revision}) meanwhile. Look at what is there now; the same command "
            "again puts this on top of it."
        )
    if (status is not None and status < 500 and status != 429) or type(error) is ValueError:
        return f"the Hub refused it for {repo_id} ({revision}): {said}"
    trouble = "has had too many requests from here" if status == 429 else "failed, or could not be reached"
    again = "What is there is whole, be it the old or the new; the same command again makes sure of it."
    return f"the Hub {trouble} ({type(error).__name__}: {said}). {again}"


# ---- Beside a training -------------------------------------------------------------------------------------------


def _waiting(run_dir: Path) -> list[Path]:
    """Checkpoints that are to be published, the oldest first."""
    return checkpoint_folders(run_dir / UNPUBLISHED)


def push_waiting(run_dir: Path, hub: HubRecipe) -> None:
    """
    Publishes the newest of the checkpoints that could not be published before; it takes the place of the older ones.
    What is not good enough any more is dropped.

    Args:
        run_dir (`Path`): the run's folder.
        hub ([`HubRecipe`]): where to, and from which BLEU on.

    Raises:
        PublishingError: the Hub refused, or could not be reached; they stay.
    """
    waiting = _waiting(run_dir)
    if not waiting:
        return
    try:
        logger.info(f"{waiting[-1].name} is published: {push_checkpoint(run_dir, waiting[-1], hub)}")
    except ValueError as error:
        logger.warning(str(error))
    for folder in waiting:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        # If nothing has come meanwhile.
        (run_dir / UNPUBLISHED).rmdir()


class Publisher:
    """
    Publishes checkpoints in a thread, while the training goes on.

    Args:
        run_dir (`Path`): the run's folder.
        hub ([`HubRecipe`]): where to, which checkpoints, from which BLEU on.
        step (`int`): updates of the checkpoint that the run goes on from, or 0; what waits of later ones will come
            again.
    """

    def __init__(self, run_dir: Path, hub: HubRecipe, step: int) -> None:
        self.run_dir, self.hub = run_dir, hub
        if hub.repo_id is not None and get_token() is None:
            logger.warning(
                f"There is no token for the Hub, and {hub.repo_id} will want one: log in by `hf auth login`, or put "
                "one into HF_TOKEN"
            )
        for folder in _waiting(run_dir):
            if checkpoint_step(folder) > step:
                shutil.rmtree(folder)
        self.thread: threading.Thread | None = None
        self.more = False
        self.lock = threading.Lock()

    def offer(self, checkpoint: Path, number: int) -> None:
        """Takes the `number`-th checkpoint, if its turn has come and its BLEU is high enough."""
        if self.hub.every_n_checkpoints is None or number % self.hub.every_n_checkpoints:
            return
        try:
            scored = read_score(self.run_dir, checkpoint)
            check_score(checkpoint, scored.bleu, self.hub.min_bleu)
            self._keep(checkpoint, [*(scored.files or {}), PROGRESS])
        except (ValueError, OSError) as error:
            logger.warning(str(error))
            return
        with self.lock:
            self.more = True
            if self.thread is None:
                # The end of the program does not wait for it: what it has not published by then is kept.
                self.thread = threading.Thread(target=self._push, daemon=True)
                self.thread.start()

    def _keep(self, checkpoint: Path, names: list[str]) -> None:
        """Other names for the files, because the checkpoint will be deleted when its time has come."""
        kept = self.run_dir / UNPUBLISHED / checkpoint.name
        temporary = temporary_name(kept)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name in names:
            try:
                os.link(checkpoint / name, temporary / name)
            except OSError:
                shutil.copyfile(checkpoint / name, temporary / name)
        shutil.rmtree(kept, ignore_errors=True)
        temporary.rename(kept)

    def _push(self) -> None:
        while True:
            with self.lock:
                if not self.more:
                    self.thread = None
                    return
                self.more = False
            try:
                push_waiting(self.run_dir, self.hub)
            # Nothing that happens here may end a training.
            except Exception as error:
                logger.warning(f"{error} It is kept, and tried again with the next one, or at the end.")

    def wait(self) -> None:
        """Waits until the thread has nothing left to do."""
        thread = self.thread
        if thread is not None:
            logger.info("Waiting for a checkpoint that is being published")
            thread.join()
