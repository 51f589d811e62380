"""
The JavaScript library of a page without a server: @huggingface/transformers, with ONNX Runtime as WebAssembly.

No wheel has them. They are read from a folder of the user, or from the cache of Hugging Face, into which npm fetches
them once. Each file has a pinned SHA-256.
"""

import hashlib
import logging
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import is_offline_mode
from huggingface_hub.constants import HF_HOME

from ..files import atomic_folder

logger = logging.getLogger("hf_vaswani")


@dataclass(frozen=True)
class Package:
    """
    A package of npm.

    Attributes:
        name (`str`), version (`str`): its name and version.
        files (`dict[str, str]`): names of the files that a page needs of its folder `dist`, with their SHA-256.
    """

    name: str
    version: str
    files: dict[str, str]

    @property
    def specifier(self) -> str:
        """The name and version, as npm takes them."""
        return f"{self.name}@{self.version}"

    @property
    def archive(self) -> str:
        """The name of the file that `npm pack` writes."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


# ONNX Runtime is the version on which transformers depends. Licences of both, and of what they contain: notices.txt.
PACKAGES = (
    Package(
        "@huggingface/transformers",
        "4.3.2",
        {"transformers.min.js": "8b5a3171f8876bab2b1820a7d65eb87628e3d30bb5ea85b9dd398e76eb34decb"},
    ),
    Package(
        "onnxruntime-web",
        "1.31.0-dev.20260914-8d85527a0",
        {
            "ort-wasm-simd-threaded.mjs": "c57ca56328877353a575e51bbca6f18450027d6c9bf2307a2cb2c41363b4de9f",
            "ort-wasm-simd-threaded.wasm": "06ba057753da3847e4c24f02d91ab133455b0817c69a44993a9a53a2146df9e3",
        },
    ),
)
NOTICES = "NOTICES.txt"
PACK = ("pack", *(package.specifier for package in PACKAGES))
ADVICE = (
    f"Where there are npm and a network, run `npm {' '.join(PACK)}` in an empty folder, and give that folder with "
    "--javascript FOLDER."
)
# In seconds, for 35 MB.
TIME_LIMIT = 600
# Waiting times between attempts, in milliseconds. With npm's own, a missing network is reported after 70 seconds.
BRIEF = ("--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000")


def javascript_files(folder: Path | None = None) -> dict[str, bytes]:
    """
    Returns the files of the library that a page needs.

    Args:
        folder (`Path`, *optional*): where to find them: the files, or the archives of `npm pack`; or, at any depth,
            what `npm install` wrote. By default, they are in the cache, or npm fetches them.

    Returns:
        `dict[str, bytes]`: `transformers.min.js`, `ort-wasm-simd-threaded.mjs` and `ort-wasm-simd-threaded.wasm`, and
        `NOTICES.txt`, the licences that have to go with them.

    Raises:
        ValueError: the folder lacks a file or has another one, or they cannot be fetched.
        OSError: a file cannot be read, or the cache not be written.
    """
    found = _cached() if folder is None else _read(folder)
    return found | {NOTICES: Path(__file__).with_name("notices.txt").read_bytes()}


def _read(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise ValueError(f"The folder {folder} does not exist. {ADVICE}")
    return {name: _checked(folder, package, name) for package in PACKAGES for name in package.files}


def _checked(folder: Path, package: Package, name: str) -> bytes:
    """Returns the content of a file, wherever in the folder it has the right digest."""
    others = []
    for place, content in _candidates(folder, package, name):
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 == package.files[name]:
            return content
        others.append(
            f"{place} is not that of {package.specifier}: its SHA-256 is {sha256}, not {package.files[name]}"
        )
    raise ValueError(f"{others[0] if others else f'{folder} has no {name} of {package.specifier}'}. {ADVICE}")


def _candidates(folder: Path, package: Package, name: str) -> Iterator[tuple[Path, bytes]]:
    """Yields the files of this name, with their content."""
    for path in sorted(folder.rglob(name)):
        yield path, path.read_bytes()
    archive = folder / package.archive
    if archive.is_file():
        member = f"package/dist/{name}"
        try:
            with tarfile.open(archive) as opened, suppress(KeyError):
                if (content := opened.extractfile(member)) is not None:
                    yield archive / member, content.read()
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise ValueError(f"{archive} is damaged: {error}. {ADVICE}") from error


# ---- npm ---------------------------------------------------------------------------------------------------------


def _cached() -> dict[str, bytes]:
    """Reads the files from the cache, into which they are fetched if it lacks or has damaged ones."""
    place = Path(HF_HOME) / "hf_vaswani" / "javascript" / PACKAGES[0].version
    with suppress(ValueError, OSError):
        return _read(place)
    npm = _npm()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(place.with_name(f".{place.name}.lock")):
            # Another process may have fetched them meanwhile.
            with suppress(ValueError, OSError):
                return _read(place)
            logger.info(f"Fetching {' and '.join(PACK[1:])} with npm, once: {place}")
            found = _fetched(npm)
            with atomic_folder(place) as temporary:
                for name, content in found.items():
                    (temporary / name).write_bytes(content)
            return found
    except OSError as error:
        raise OSError(
            f"The JavaScript library cannot be kept: {error}. Set HF_HOME to a folder that can be written, or give "
            "--javascript FOLDER."
        ) from error


def _npm() -> str:
    if is_offline_mode():
        raise _not_fetched("HF_HUB_OFFLINE is set")
    npm = shutil.which("npm")
    if npm is None:
        raise _not_fetched("there is no npm")
    return npm


def _fetched(npm: str) -> dict[str, bytes]:
    """Has npm fetch the packages by the user's settings, without installing them, and returns the files."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            done = subprocess.run(
                [npm, *PACK, *BRIEF],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=TIME_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _not_fetched(f"npm takes more than {TIME_LIMIT} seconds") from error
        except OSError as error:
            raise _not_fetched(f"npm does not start: {error}") from error
        if done.returncode != 0:
            raise _not_fetched(f"npm failed: {_first_line(done.stderr) or f'exit code {done.returncode}'}")
        return _read(Path(folder))


def _first_line(text: str) -> str | None:
    """Returns the first line of what npm wrote that is about the error, and not a code."""
    lines = [re.sub(r"npm (error|ERR!)", "", line).strip() for line in text.splitlines()]
    return next((line for line in lines if line and not re.match(r"(code|errno|syscall|path|npm \w+) ", line)), None)


def _not_fetched(why: str) -> ValueError:
    return ValueError(f"The JavaScript library cannot be fetched: {why.rstrip('.')}. {ADVICE}")
