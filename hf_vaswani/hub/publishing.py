"""Publishing on the Hub: only with a score, not below another model, in one commit, and beside a training."""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    SpaceInfo,
    get_session,
    get_token,
    snapshot_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..adapters import has_adapter
from ..files import CODE, digest, is_renewed, read_json, temporary_name
from ..metrics import COMPARED_BY, METRICS, Comparison, measure_of
from ..recipe import PAIR_TASKS, HubRecipe, Recipe
from ..recipe_file import load_recipe
from ..records import Scored, Verdict, from_json, public_text, to_json
from ..run_folder import (
    EMA_WEIGHTS,
    MODEL,
    PROGRESS,
    RECIPE,
    RESULT,
    WEIGHTS,
    checkpoint_folders,
    checkpoint_step,
    has_checkpoint_name,
    known_validations,
    read_progress,
    read_result,
)
from .card import card_files
from .code import installed_code, renewed_files
from .evaluation import main_score

logger = logging.getLogger(__name__)

# Timeout in seconds of the Hub's client, which has none by default.
HUB_TIMEOUT = 120
# Folder of checkpoints that wait to be published.
UNPUBLISHED = "unpublished"
# Their comparison with the model that they must not be worse than.
VERDICT = "verdict.json"
# Level of the test whether a model is worse than another one.
SIGNIFICANT = 0.05
# The entries of the vocabulary that translate each other, beside the weights.
SHORTLIST = "shortlist.json"
LEFT_BY_AN_EARLIER_PUSH = re.compile(
    r"model-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json|shortlist\.json|\w+_vaswani\.py"
)


class PublishingError(OSError):
    """The Hub refused a request, or could not be reached; the message says what to do."""


# ---- Score -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """
    A model or a checkpoint whose score is high enough for publishing.

    Attributes:
        run_dir (`Path`), folder (`Path`): the run folder, and its `model` or one of its checkpoints.
        hub ([`HubRecipe`]): destination, minimum BLEU or score, and the model that this one must not be worse than.
        recipe ([`Recipe`]): that of the run.
        scored ([`Result`] or [`Validation`]): test of the model, or validation of the checkpoint.
    """

    run_dir: Path
    folder: Path
    hub: HubRecipe
    recipe: Recipe
    scored: Scored


def read_candidate(run_dir: Path, folder: Path, hub: HubRecipe, recipe: Recipe | None = None) -> Candidate:
    """
    Reads what decides whether a model or a checkpoint may be published, and what its card says.

    Args:
        run_dir (`Path`), folder (`Path`), hub ([`HubRecipe`]): as in [`Candidate`].
        recipe ([`Recipe`], *optional*): that of the run, if it has been read.

    Raises:
        ValueError: the score is missing or too low, or a record is damaged.
    """
    scored = _read_score(run_dir, folder)
    candidate = Candidate(run_dir, folder, hub, recipe or load_recipe([str(run_dir / RECIPE)]), scored)
    if has_adapter(folder):
        raise ValueError(f"{folder} is not published: it has only adapters. Publish the model of the finished run.")
    if (fault := _score_fault(candidate)) is not None:
        raise ValueError(f"{folder} is not published: its {fault}.")
    return candidate


def _read_score(run_dir: Path, folder: Path) -> Scored:
    """Reads the test of a model, or the validation of a checkpoint, with the digests of the files that were scored."""
    if not folder.is_dir():
        raise ValueError(f"The folder {folder} does not exist.")
    if has_checkpoint_name(folder):
        progress = read_progress(folder)
        lines = [line for line in known_validations(run_dir) if line.step == progress.step]
        if not lines:
            raise ValueError(f"{folder} has no score, because it was not validated: it is not published.")
        return replace(lines[-1], seconds=progress.seconds, files=progress.files)
    path = run_dir / RESULT
    if not path.is_file():
        raise ValueError(f"{run_dir} has no result: it is not a run folder, or its training is not finished.")
    try:
        result = read_result(run_dir)
    except ValueError as error:
        raise ValueError(f"{error} Repeat the training command to write it again from the checkpoints.") from error
    if not result.scores:
        raise ValueError(f"{folder} has no score, because the run has no test set: it is not published.")
    if result.files is None:
        raise ValueError(
            f"{path} was written by an older version, which did not record the scored files: {folder} is not "
            "published."
        )
    return result


def _score_fault(candidate: Candidate) -> str | None:
    """Returns what is wrong with a score, or `None` if it is high enough."""
    recipe, scores, hub = candidate.recipe, candidate.scored.scores, candidate.hub
    name, value = main_score(recipe, candidate.scored)
    if recipe.task in PAIR_TASKS:
        bleu = scores.get("bleu")
        # A NaN fails this comparison, but would pass `bleu < min_bleu`.
        if bleu is None or not bleu >= hub.min_bleu:
            return f"BLEU is {'missing' if bleu is None else f'{bleu:.2f}'}, and hub.min_bleu is {hub.min_bleu:.2f}"
    else:
        # A model whose loss is NaN still has an accuracy.
        for each, number in ((name, value), ("loss", scores.get("loss"))):
            if number is None or not math.isfinite(number):
                return f"{measure_of(each).title} is missing or not finite"
    if hub.min_score is not None and not (value is not None and value >= hub.min_score):
        shown = measure_of(name).shown
        return f"{measure_of(name).title} is {shown(value)}, and hub.min_score is {shown(hub.min_score)}"
    return None


def is_worse(comparison: Comparison) -> bool:
    """Returns whether the BLEU of a model is significantly below that of the one it is compared with."""
    before, after = comparison.before[COMPARED_BY], comparison.after[COMPARED_BY]
    has_fallen = after < before if METRICS[COMPARED_BY].is_higher_better else after > before
    return has_fallen and comparison.p < SIGNIFICANT


def check_not_worse(folder: Path, than: str | None, verdict: Verdict | None) -> None:
    """
    Raises a `ValueError` if a model is significantly worse on a test set than `than`, the model of
    `hub.not_worse_than`, or was not compared with it.
    """
    if than is None:
        return
    if verdict is None or verdict.than != than:
        raise ValueError(f"{folder} is not published: it was not compared with {than} (hub.not_worse_than).")
    if not verdict.sets:
        logger.info(f"hub.not_worse_than: nothing was published before {folder}, so it is compared with nothing")
    metric = METRICS[COMPARED_BY]
    scores = " and ".join(
        f"on {name}, its {metric.title} is {metric.shown(each.after[COMPARED_BY])}, and that of {than} is "
        f"{metric.shown(each.before[COMPARED_BY])} (p = {each.p:.3f})"
        for name, each in verdict.sets.items()
        if is_worse(each)
    )
    if scores:
        raise ValueError(
            f"{folder} is not published, because it is significantly worse than hub.not_worse_than: {scores}."
        )


# ---- Commit ------------------------------------------------------------------------------------------------------


def push_checkpoint(candidate: Candidate, verdict: Verdict | None = None) -> str:
    """
    Publishes a model or a checkpoint in one commit: weights, config, generation config, tokenizer, card, shortlist, if
    there is one, and the code of this version of the package.

    Args:
        candidate ([`Candidate`]): the model, with its score.
        verdict ([`Verdict`], *optional*): the comparison with the model of `not_worse_than`. Without it, nothing is
            published if that is set.

    Returns:
        `str`: URL of the commit; without changes, that of the last commit.

    Raises:
        ValueError: the model is significantly worse than the other one or was not compared with it, or a file differs
            from the one that was scored.
        PublishingError: the Hub refused, or could not be reached.
    """
    run_dir, folder, hub = candidate.run_dir, candidate.folder, candidate.hub
    recipe, scored = candidate.recipe, candidate.scored
    check_not_worse(folder, hub.not_worse_than, verdict)
    repo_id, revision = str(hub.repo_id), hub.revision
    name, value = main_score(recipe, scored)
    files: dict[str, str | bytes | None] = {
        **_scored_files(folder, scored.files or {}),
        **card_files(run_dir, folder, scored, repo_id, revision, recipe),
    }
    # It was written after the model was scored, and is that of the checkpoints as well.
    if (run_dir / MODEL / SHORTLIST).is_file():
        files[SHORTLIST] = str(run_dir / MODEL / SHORTLIST)
    with publishing_errors(folder, repo_id, revision):
        api = HfApi()
        head = _prepare_branch(api, folder, hub)
        # Shards of weights, code files and a shortlist that this model does not have.
        files |= {name: None for name in _names(head) - set(files) if LEFT_BY_AN_EARLIER_PUSH.fullmatch(name)}
        message = f"{folder.name}: {measure_of(name).title} {value:.2f} after {scored.step:,} updates"
        return commit_files(repo_id, head, files, message, revision)


def renew_published_code(repo_id: str, revision: str = "main") -> str | None:
    """
    Replaces the code that a model on the Hub was published with by that of this version, in one commit.

    Args:
        repo_id (`str`): repository, as user/name.
        revision (`str`): branch.

    Returns:
        `str`: URL of the commit, or `None` if the repository has this code already.

    Raises:
        PublishingError: the Hub refused, or could not be reached; or the repository has no Vaswani model.
    """
    with publishing_errors(f"New code of {repo_id}", repo_id, revision):
        api = HfApi()
        head = api.model_info(repo_id, revision=revision)
        names = _names(head)
        if "config.json" not in names:
            raise PublishingError(f"{repo_id} ({revision}) has no config.json: it is no model.")

        def download(name: str) -> Path:
            return Path(api.hf_hub_download(repo_id, name, revision=head.sha))

        try:
            files = renewed_files(f"{repo_id} ({revision})", names, download)
        except ValueError as error:
            # The client's error for a lost connection is a ValueError, too.
            if type(error) is not ValueError:
                raise
            raise PublishingError(str(error)) from error
        if not files:
            return None
        return commit_files(repo_id, head, files, "Renew the model's code", revision)


def commit_files(
    repo_id: str,
    head: ModelInfo | SpaceInfo,
    files: Mapping[str, str | bytes | None],
    message: str,
    revision: str = "main",
    repo_type: str = "model",
) -> str:
    """
    Commits files, of which those with `None` are deleted, on top of the state of the branch that `head` describes. The
    Hub refuses if it has another one by now. Returns the URL of the commit; without changes, that of the last one.
    """
    commit = HfApi().create_commit(
        repo_id,
        [
            CommitOperationDelete(name) if content is None else CommitOperationAdd(name, content)
            for name, content in sorted(files.items())
        ],
        commit_message=message,
        revision=revision,
        repo_type=repo_type,
        parent_commit=head.sha,
    )
    return str(commit.commit_url)


def last_push(folder: Path, hub: HubRecipe) -> Path | None:
    """
    Downloads the model that the repository has now, without which `folder` cannot be judged.

    Returns:
        `Path`: its folder in the cache, or `None` if nothing was published there.

    Raises:
        PublishingError: the Hub refused, or could not be reached.
    """
    repo_id, revision = str(hub.repo_id), hub.revision
    with publishing_errors(folder, repo_id, revision):
        try:
            head = HfApi().model_info(repo_id, revision=revision)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return None
        if "config.json" not in _names(head):
            return None
        return Path(snapshot_download(repo_id, revision=head.sha, allow_patterns=["*.json", "*.safetensors"]))


def _names(head: ModelInfo) -> set[str]:
    return {each.rfilename for each in head.siblings or []}


def _prepare_branch(api: HfApi, folder: Path, hub: HubRecipe) -> ModelInfo:
    """Creates repository and branch if necessary, and returns the branch's state; refuses one that must not change."""
    repo_id, revision = str(hub.repo_id), hub.revision
    api.create_repo(repo_id, private=hub.private, exist_ok=True)
    if hub.private and not api.model_info(repo_id).private:
        raise PublishingError(
            f"{folder} is not published: hub.private is true, but {repo_id} is public. Make it private on the Hub, or "
            "use another hub.repo_id."
        )
    if revision != "main":
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    head = api.model_info(repo_id, revision=revision)
    if "config.json" in _names(head):
        config = read_json(Path(api.hf_hub_download(repo_id, "config.json", revision=head.sha)))
        if config.get("model_type") != "vaswani":
            raise PublishingError(
                f"{folder} is not published: {repo_id} ({revision}) has a model of another type, "
                f"{config.get('model_type')!r}. Use another hub.repo_id."
            )
    return head


def _scored_files(folder: Path, scored: dict[str, str]) -> dict[str, str | bytes]:
    """Returns the files that were scored, and the code of this version, by their names on the Hub."""
    found: dict[str, str | bytes] = {}
    for name, sha256 in scored.items():
        path = folder / name
        if is_renewed(path):
            continue
        if not path.is_file() or digest(path) != sha256:
            what = "was changed" if path.is_file() else "was deleted"
            raise ValueError(f"{path} {what} since the model was scored: {folder} is not published.")
        # If there is a moving average, it was validated.
        found[WEIGHTS if name == EMA_WEIGHTS else name] = str(path)
    code = installed_code(read_json(folder / "config.json"))
    return {name: path for name, path in found.items() if not name.endswith(CODE)} | code


@contextlib.contextmanager
def publishing_errors(what: Path | str, repo_id: str, revision: str) -> Iterator[None]:
    """Turns every error of the Hub's client into a [`PublishingError`] that says what to do."""
    client = get_session()
    before, client.timeout = client.timeout, HUB_TIMEOUT
    try:
        yield
    except PublishingError:
        raise
    # The client raises its own errors, those of its HTTP library, RuntimeError and ValueError.
    except Exception as error:
        sentence = f"{what} could not be published: {_advice(error, repo_id, revision)}"
        token = get_token()
        raise PublishingError(public_text(sentence.replace(token, "(the token)") if token else sentence)) from None
    finally:
        client.timeout = before


def _advice(error: Exception, repo_id: str, revision: str) -> str:
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token for the Hub. Log in with `hf auth login`, or set HF_TOKEN."
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set. Unset it, and repeat the command."
    # After its last attempt to upload a file, the client raises an error that only names the file.
    refusal = error if isinstance(error, HfHubHTTPError) else error.__cause__
    status = refusal.response.status_code if isinstance(refusal, HfHubHTTPError) else None
    said = " ".join(str(getattr(refusal, "server_message", None) or error).split())
    if status == 401:
        # The Hub answers the same to a wrong token and to none.
        what = "does not know this token" if get_token() else "requires a token"
        return f"the Hub {what}. Log in with `hf auth login`, or set HF_TOKEN to a token with write permission."
    if status == 403:
        return (
            f"the token may not write to {repo_id} ({said}). Use a token with write permission, of the owner or of a "
            "member of the organization."
        )
    if status in (409, 412):
        return (
            f"somebody else has changed {repo_id} ({revision}) in the meantime. Check what it contains now; the same "
            "command commits on top of it."
        )
    if (status is not None and status < 500 and status != 429) or type(error) is ValueError:
        return f"the Hub refused the request for {repo_id} ({revision}): {said}"
    trouble = "has received too many requests" if status == 429 else "failed, or could not be reached"
    return (
        f"the Hub {trouble} ({type(error).__name__}: {said}). The repository has either the old or the new version, "
        "never a mixture; repeat the command to publish the new one."
    )


# ---- During a training -------------------------------------------------------------------------------------------


def push_waiting(run_dir: Path, hub: HubRecipe) -> None:
    """
    Publishes the newest of the checkpoints that wait to be published, and discards the others. It is discarded too if
    its score is too low by now, or if it was not compared with the model that it must not be worse than. A
    [`PublishingError`] keeps them.
    """
    waiting = checkpoint_folders(run_dir / UNPUBLISHED)
    if not waiting:
        return
    try:
        kept = waiting[-1] / VERDICT
        verdict = from_json(Verdict, read_json(kept)) if kept.is_file() else None
        address = push_checkpoint(read_candidate(run_dir, waiting[-1], hub), verdict)
        logger.info(f"Published {waiting[-1].name}: {address}")
    except ValueError as error:
        logger.warning(str(error))
    for folder in waiting:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        # The folder is not empty if another checkpoint has arrived in the meantime.
        (run_dir / UNPUBLISHED).rmdir()


def is_due(hub: HubRecipe, number: int) -> bool:
    """Returns whether the `number`-th checkpoint of a run is to be published."""
    return hub.every_n_checkpoints is not None and number % hub.every_n_checkpoints == 0


class Publisher:
    """
    Publishes checkpoints in a background thread of a training.

    Args:
        run_dir (`Path`): the run folder.
        hub ([`HubRecipe`]): destination, frequency and minimum BLEU or score.
        step (`int`): updates of the checkpoint that the run resumes from, or 0. Waiting checkpoints of later updates
            are discarded, because the training will write them again.
    """

    def __init__(self, run_dir: Path, hub: HubRecipe, step: int) -> None:
        self.run_dir, self.hub = run_dir, hub
        if hub.repo_id is not None and get_token() is None:
            logger.warning(
                f"There is no token for the Hub, and publishing to {hub.repo_id} requires one: log in with "
                "`hf auth login`, or set HF_TOKEN"
            )
        for folder in checkpoint_folders(run_dir / UNPUBLISHED):
            if checkpoint_step(folder) > step:
                shutil.rmtree(folder)
        self.threads: list[threading.Thread] = []
        self.lock = threading.Lock()

    def offer(self, checkpoint: Path, verdict: Verdict | None) -> None:
        """Publishes a checkpoint in the background, if its score is high enough and it is not worse than it may be."""
        try:
            scored = read_candidate(self.run_dir, checkpoint, self.hub).scored
            check_not_worse(checkpoint, self.hub.not_worse_than, verdict)
            self._keep(checkpoint, [*(scored.files or {}), PROGRESS], verdict)
        except (ValueError, OSError) as error:
            logger.warning(str(error))
            return
        # A daemon: the program's end does not wait for it, and checkpoints that still wait are kept.
        self.threads.append(threading.Thread(target=self._push, daemon=True))
        self.threads[-1].start()

    def _keep(self, checkpoint: Path, names: list[str], verdict: Verdict | None) -> None:
        """Links or copies the files, because the training will delete the checkpoint later."""
        kept = self.run_dir / UNPUBLISHED / checkpoint.name
        temporary = temporary_name(kept)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name in names:
            try:
                os.link(checkpoint / name, temporary / name)
            except OSError:
                shutil.copyfile(checkpoint / name, temporary / name)
        if verdict is not None:
            (temporary / VERDICT).write_text(json.dumps(to_json(verdict)), encoding="utf-8")
        shutil.rmtree(kept, ignore_errors=True)
        temporary.rename(kept)

    def _push(self) -> None:
        # If several checkpoints arrive during a push, the next thread publishes the newest one.
        with self.lock:
            try:
                push_waiting(self.run_dir, self.hub)
            # No error in publishing may end a training.
            except Exception as error:
                logger.warning(f"{error} It is retried with the next checkpoint, or at the end.")

    def wait(self) -> None:
        """Waits until everything is published."""
        if any(thread.is_alive() for thread in self.threads):
            logger.info("Waiting until a checkpoint is published")
        for thread in self.threads:
            thread.join()
