"""The demo of a published model as a Space of the Hub, where anybody can try it: with a server, or without one."""

import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi

from ..files import read_json
from ..model.sentences_vaswani import LANGUAGE_TAG
from ..recipe import HubRecipe
from ..records import public_text
from ..run_folder import RESULT, read_result
from .publishing import PublishingError, commit_files, publishing_errors

PACKAGE = Path(__file__).resolve().parent.parent
# Files of both kinds of demos. Those that an earlier push has left are removed, and no others.
OURS = re.compile(
    r"app\.py|requirements\.txt|hf_vaswani/.+|index\.html|service_worker\.js|NOTICES\.txt|files/[^/]+\.[0-9a-f]{12}\.bin"
)
# Where the Hub may redirect a browser that asks for a large file of a Space.
HOSTS = ("https://huggingface.co", "https://*.hf.co")
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


def push_space(
    run_dir: Path,
    folder: Path,
    hub: HubRecipe,
    space_id: str,
    revision: str,
    page: Mapping[str, bytes] | None = None,
) -> str:
    """
    Publishes the demo of a model in one commit.

    Args:
        run_dir (`Path`): the run folder.
        folder (`Path`): the model, which is published.
        hub ([`HubRecipe`]): repository of the model; the Space of a private model is private.
        space_id (`str`): the Space, as user/name.
        revision (`str`): commit of the model.
        page (`Mapping[str, bytes]`, *optional*): files of a page that translates in the browser, which is the demo
            then; they contain the model. The Space of a gated model is private, too.

    Returns:
        `str`: URL of the Space.

    Raises:
        PublishingError: the Hub refused, or could not be reached; or the model is private, and the Space is not.
    """
    repo_id = str(hub.repo_id)
    files: dict[str, bytes | None] = {
        **(space_files(run_dir, repo_id, revision) if page is None else static_files(repo_id, page))
    }
    with publishing_errors(folder, space_id, "main"):
        api = HfApi()
        model = api.model_info(repo_id)
        # The account may make repositories private by default, and so the model, although the recipe says nothing.
        reason = "private" if hub.private or model.private else "gated" if page is not None and model.gated else None
        sdk, is_private = "gradio" if page is None else "static", reason is not None
        api.create_repo(space_id, repo_type="space", space_sdk=sdk, private=is_private, exist_ok=True)
        head = api.space_info(space_id)
        if is_private and not head.private:
            raise PublishingError(
                f"The demo of {folder} is not published: {repo_id} is {reason}, and the Space {space_id} public: "
                "make it private on the Hub, or use another --space."
            )
        names = {each.rfilename for each in head.siblings or [] if OURS.fullmatch(each.rfilename)}
        files |= dict.fromkeys(names - set(files))
        commit_files(space_id, head, files, f"The demo of {repo_id} at {revision[:8]}", repo_type="space")
        return f"{api.endpoint}/spaces/{space_id}"


def check_space(folder: Path) -> None:
    """Raises a `ValueError` if a model cannot have a demo."""
    if not read_json(folder / "config.json").get("is_encoder_decoder", True):
        raise ValueError(f"--space is the demo of a model that translates, but {folder} does not.")


def space_files(run_dir: Path, repo_id: str, revision: str) -> dict[str, bytes]:
    """
    Returns the files of a Space, by name: its app, and this package beside it. A Space is built with nothing but its
    requirements.txt, so these cannot name a wheel among its files, and the package is on no index.

    Args:
        run_dir (`Path`): the run.
        repo_id (`str`), revision (`str`): where the model is published, and the commit.
    """
    samples = (read_result(run_dir).samples or []) if (run_dir / RESULT).is_file() else []
    examples = [public_text(re.sub(f"^{LANGUAGE_TAG.pattern} ?", "", str(sample["source"]))) for sample in samples]
    readme = _readme(
        repo_id,
        {
            "sdk": "gradio",
            "sdk_version": _version("gradio") or "6.0.0",
            "python_version": "3.12",
            "app_file": "app.py",
        },
        "translations, the words that belong together, and the explorer. If the model is private, give the Space a "
        "secret HF_TOKEN that may read it.",
    )
    listed = json.dumps(examples, ensure_ascii=False, indent=4)
    app = APP.format(model=repo_id, revision=revision, examples=listed)
    found = {"README.md": readme, "app.py": app, "requirements.txt": _requirements()}
    files = {name: text.encode() for name, text in found.items()}
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            files[path.relative_to(PACKAGE.parent).as_posix()] = path.read_bytes()
    return files


def static_files(repo_id: str, page: Mapping[str, bytes]) -> dict[str, bytes]:
    """
    Returns the files of a Space that runs nothing, and shows a page, by name.

    Args:
        repo_id (`str`): where the model is published.
        page (`Mapping[str, bytes]`): the files of the page, with its `index.html`.
    """
    readme = _readme(
        repo_id,
        {"sdk": "static", "app_file": "index.html"},
        "it translates in the browser, and sends the text nowhere. Its files contain the model, and the software "
        "whose licences are in NOTICES.txt.",
    )
    return {**page, "README.md": readme.encode()}


def _readme(repo_id: str, settings: Mapping[str, Any], what: str) -> str:
    """Returns the README of a Space, by whose header the Hub knows how to run it."""
    header = {"title": repo_id.split("/")[-1], **settings, "models": [repo_id], "pinned": False}
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n"
        f"The demo of [{repo_id}](https://huggingface.co/{repo_id}): {what}\n"
    )


def _requirements() -> str:
    """Returns the dependencies of the package without extras, in the versions that are installed here."""
    needed = [each for each in importlib.metadata.requires("hf_vaswani") or [] if "extra ==" not in each]
    names = [match[0] for each in needed if (match := re.match(r"[\w.-]+", each))]
    # A local version, such as torch's 2.13.0+cpu, is on no index.
    return "".join(f"{name}=={str(_version(name)).split('+')[0]}\n" for name in names)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
