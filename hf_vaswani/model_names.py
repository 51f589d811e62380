"""From the name of a model to its folder: a run, a model, a checkpoint, or an id on the Hub with its revision."""

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.file_download import repo_folder_name

from .files import split_revision

# Names in the folder of a run, and in that of a model.
RUN_MODEL, RUN_RECIPE, CONFIG = "model", "recipe.yaml", "config.json"
# Weights of other libraries, and what lies in folders of a repository, such as an ONNX export.
IGNORED = ["*.h5", "*.msgpack", "*.ot", "*/*"]
# Maximum length of a message of the Hub's client in an error message.
MAX_MESSAGE_CHARS = 300


def resolve_model(name: str | Path, key: str = "The model") -> Path:
    """
    Returns the folder of a model. All verbs and all keys of a recipe find their models by this function.

    Args:
        name (`str` or `Path`): folder of a model or of a checkpoint; folder of a run, for its `model/`; or an id on
            the Hub, which may end in `@revision`, and is downloaded. A file is returned as it is, for formats whose
            models are files.
        key (`str`): option or key of the recipe that has the name, for error messages.

    Raises:
        ValueError: there is no such model, or it cannot be downloaded.
    """
    path, name = Path(name), str(name)
    if not is_on_hub(name, key):
        if path.is_file() or (path / CONFIG).is_file():
            return path
        if (path / RUN_MODEL / CONFIG).is_file():
            return path / RUN_MODEL
        if (path / RUN_RECIPE).is_file():
            raise ValueError(f"{key} is {name!r}, a run that has no model yet: name one of its checkpoints.")
        return path
    repository, revision = split_revision(name)
    try:
        # A repository may have the same weights again as a pickle.
        folder = Path(snapshot_download(repository, revision=revision, ignore_patterns=[*IGNORED, "*.bin"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(repository, revision=revision, ignore_patterns=IGNORED))
        return folder
    # The client raises its own errors, and those of its HTTP library, which are no OSError.
    except Exception as error:
        said = " ".join(str(error).split())[:MAX_MESSAGE_CHARS]
        is_absent = isinstance(error, (OSError, ValueError))
        what = "is neither a local folder nor a model on the Hub" if is_absent else "cannot be downloaded"
        raise ValueError(f"{key} is {name!r}, which {what}: {said}") from error


def title_of(name: str, folder: Path) -> str:
    """Returns what people call a model: its id on the Hub, or the name of its run or its folder."""
    if is_on_hub(name):
        return name
    folder = folder.resolve()
    return folder.parent.name if folder.name == RUN_MODEL else folder.name


def is_on_hub(name: str, key: str = "The model") -> bool:
    """
    Returns whether the name of a model is an id on the Hub, and not a path.

    Args:
        name (`str`), key (`str`): as in [`resolve_model`].

    Raises:
        ValueError: it is neither.
    """
    if name and os.path.exists(name):
        return False
    parts = Path(split_revision(name)[0]).parts
    if len(parts) != 2 or os.path.isabs(name):
        raise ValueError(f"{key} is {name!r}, which does not exist; a Hub id has the form user/name or user/name@v2.")
    return True


def with_revision(names: Sequence[str], revision: str | None, option: str = "--revision") -> list[str]:
    """
    Returns the names of models with the revision that an option gives to those that have none.

    Args:
        names (`Sequence[str]`): names of models, as in [`resolve_model`].
        revision (`str`, *optional*): branch, tag or commit.
        option (`str`): the option, for error messages.

    Raises:
        ValueError: the revision is empty or has no use, because each model is local or names its own.
    """
    if revision is None:
        return list(names)
    if not revision:
        raise ValueError(f"{option} is empty: give a branch, tag or commit.")
    found = [
        name if os.path.exists(name) or split_revision(name)[1] is not None else f"{name}@{revision}" for name in names
    ]
    if found == list(names):
        raise ValueError(
            f"{option} {revision} has no use: {', '.join(names)} {'is' if len(names) == 1 else 'are'} local or "
            f"{'names a revision' if len(names) == 1 else 'name revisions'}."
        )
    return found


def commit_of(name: str, repo_type: str = "model", revision: str | None = None) -> str | None:
    """
    Returns the commit of a repository that was downloaded last.

    Args:
        name (`str`): id on the Hub, with or without `@revision`.
        repo_type (`str`): `"model"`, or `"dataset"`.
        revision (`str`, *optional*): branch, tag or commit; by default that of the name, or the main branch.

    Returns:
        `str`: commit, or `None` for a local path, and for what the cache does not have.
    """
    if os.path.exists(name):
        return None
    name, named = split_revision(name)
    revision = revision or named or constants.DEFAULT_REVISION
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=repo_type)
    if (folder / "snapshots" / revision).is_dir():
        return revision
    reference = folder / "refs" / revision
    return reference.read_text("utf-8").strip() if reference.is_file() else None
