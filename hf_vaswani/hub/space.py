"""The demo of a published model as a Space of the Hub, where anybody can try it."""

import importlib.metadata
import json
import re
from pathlib import Path

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from ..files import read_json
from ..recipe import HubRecipe
from ..records import public_text
from ..run_folder import RESULT, read_result
from .publishing import PublishingError, publishing_errors

PACKAGE = Path(__file__).resolve().parent.parent
# The demo page and what it imports; the package is not on the index that Spaces install from.
PARTS = (
    *("__init__.py", "version.py", "extras.py", "files.py", "memory.py", "removed_tasks.py"),
    *("model/*.py", "serving/*.py", "visualization/*"),
    *(f"translation/{name}.py" for name in ("__init__", "alignment", "markup", "placement", "precision", "shortlist")),
)
APP = '''"""The demo of {model}, written by hf-vaswani push --space."""

import hf_vaswani  # registers the model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vaswani.serving.demo import build_demo, serve_demo

MODEL, REVISION = {model!r}, {revision!r}
EXAMPLES = {examples}

model = AutoModelForSeq2SeqLM.from_pretrained(MODEL, revision=REVISION)
tokenizer = AutoTokenizer.from_pretrained(MODEL, revision=REVISION)
demo = build_demo(model, tokenizer, MODEL, EXAMPLES)
if __name__ == "__main__":
    serve_demo(demo, "0.0.0.0", 7860)
'''


def push_space(run_dir: Path, folder: Path, hub: HubRecipe, space_id: str, revision: str) -> str:
    """
    Publishes the demo of a model in one commit.

    Args:
        run_dir (`Path`): the run folder.
        folder (`Path`): the model, which is published.
        hub ([`HubRecipe`]): repository of the model; the Space of a private model is private.
        space_id (`str`): the Space, as user/name.
        revision (`str`): commit of the model.

    Returns:
        `str`: URL of the Space.

    Raises:
        PublishingError: the Hub refused, or could not be reached; or the model is private, and the Space is not.
    """
    files = space_files(run_dir, folder, str(hub.repo_id), revision)
    with publishing_errors(folder, space_id, "main"):
        api = HfApi()
        # The account may make repositories private by default, and so the model, although the recipe says nothing.
        is_private = hub.private or api.model_info(str(hub.repo_id)).private
        api.create_repo(
            space_id, repo_type="space", space_sdk="gradio", private=is_private or hub.private, exist_ok=True
        )
        head = api.space_info(space_id)
        if is_private and not head.private:
            raise PublishingError(
                f"The demo of {folder} is not published: {hub.repo_id} is private, and the Space {space_id} public: "
                "make it private on the Hub, or use another --space."
            )
        names = {each.rfilename for each in head.siblings or []}
        # Files of an earlier version of the package.
        old = [name for name in names - set(files) if name.startswith("hf_vaswani/")]
        api.create_commit(
            space_id,
            [
                *(CommitOperationAdd(name, content) for name, content in sorted(files.items())),
                *(CommitOperationDelete(name) for name in sorted(old)),
            ],
            commit_message=f"The demo of {hub.repo_id} at {revision[:8]}",
            repo_type="space",
            parent_commit=head.sha,
        )
        return f"{api.endpoint}/spaces/{space_id}"


def check_space(folder: Path) -> None:
    """Raises a `ValueError` if a model cannot have a demo."""
    config = read_json(folder / "config.json")
    if not config.get("is_encoder_decoder", True):
        raise ValueError(f"--space is the demo of a model that translates, but {folder} does not.")


def space_files(run_dir: Path, folder: Path, repo_id: str, revision: str) -> dict[str, bytes]:
    """
    Returns the files of a Space, by name.

    Args:
        run_dir (`Path`), folder (`Path`): the run, and its model.
        repo_id (`str`), revision (`str`): where the model is published, and the commit.
    """
    samples = (read_result(run_dir).samples or []) if (run_dir / RESULT).is_file() else []
    examples = [public_text(re.sub(r"^<2[^<>\s]+> ?", "", str(sample["source"]))) for sample in samples]
    header = {
        "title": repo_id.split("/")[-1],
        "sdk": "gradio",
        "sdk_version": _version("gradio") or "6.0.0",
        "python_version": "3.12",
        "app_file": "app.py",
        "models": [repo_id],
        "pinned": False,
    }
    readme = f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n"
    readme += (
        f"The demo of [{repo_id}](https://huggingface.co/{repo_id}): translations, the words that belong "
        "together, and the explorer. If the model is private, give the Space a secret HF_TOKEN that may read it.\n"
    )
    listed = json.dumps(examples, ensure_ascii=False, indent=4)
    app = APP.format(model=repo_id, revision=revision, examples=listed)
    found = {"README.md": readme, "app.py": app, "requirements.txt": _requirements()}
    files = {name: text.encode() for name, text in found.items()}
    for part in PARTS:
        for path in sorted(PACKAGE.glob(part)):
            if path.is_file():
                files[f"hf_vaswani/{path.relative_to(PACKAGE).as_posix()}"] = path.read_bytes()
    return files


def _requirements() -> str:
    """Returns the dependencies of the package without extras, in the versions that are installed here."""
    needed = [each for each in importlib.metadata.requires("hf_vaswani") or [] if "extra ==" not in each]
    names = [re.match(r"[\w.-]+", each) for each in needed]
    pinned = [(name[0], _version(name[0])) for name in names if name is not None]
    # A local version, such as torch's 2.13.0+cpu, is on no index.
    return "".join(f"{name}=={str(version).split('+')[0]}\n" for name, version in pinned)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
