"""The JavaScript library: where it is found, what is refused in its place, and fetching it, with an npm of our own."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_vaswani.serving import javascript
from hf_vaswani.serving.javascript import ADVICE, PACKAGES, javascript_files

from ..conftest import ROOT

CONTENT = {name: f"{name} of {package.specifier}".encode() for package in PACKAGES for name in package.files}
# A file of an archive that is not needed, as archives have many.
UNNEEDED = "package/dist/other.js"
NPM = """#!{python} -S
import shutil, sys, time
from pathlib import Path

with open("{folder}/calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
{lines}
for path in Path("{folder}").glob("*.tgz"):
    shutil.copy(path, ".")
"""


@pytest.fixture(autouse=True)
def small_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the packages small files."""

    def small(package: javascript.Package) -> javascript.Package:
        return replace(package, files={name: hashlib.sha256(CONTENT[name]).hexdigest() for name in package.files})

    monkeypatch.setattr(javascript, "PACKAGES", tuple(map(small, PACKAGES)))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, in a process that may use the network."""
    monkeypatch.setattr(javascript, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(javascript, "is_offline_mode", lambda: False)
    return tmp_path / "cache"


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Callable[[], list[str]]]:
    """Puts a program `npm` on the path; returns what lists its calls. It packs these files, after its own lines."""

    def make(lines: str = "", content: dict[str, bytes] = CONTENT) -> Callable[[], list[str]]:
        folder = tmp_path / "bin"
        write_archives(folder, content)
        program = folder / "npm"
        program.write_text(NPM.format(python=sys.executable, folder=folder, lines=lines))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        calls = folder / "calls"
        return lambda: calls.read_text().splitlines() if calls.exists() else []

    return make


def write_archives(folder: Path, content: dict[str, bytes] = CONTENT) -> None:
    folder.mkdir(exist_ok=True)
    for package in PACKAGES:
        with tarfile.open(folder / package.archive, "w:gz") as archive:
            for name in (UNNEEDED, *(f"package/dist/{name}" for name in package.files)):
                entry = tarfile.TarInfo(name)
                entry.size = len(content.get(Path(name).name, b""))
                archive.addfile(entry, io.BytesIO(content.get(Path(name).name, b"")))


def write_modules(folder: Path, *, deep: bool = False) -> None:
    """Writes what npm installs; `deep`, ONNX Runtime is in the folder of the package that needs it."""
    for package in PACKAGES:
        inner = folder / "@huggingface/transformers/node_modules" if deep else folder
        dist = (inner if package.name == "onnxruntime-web" else folder) / package.name / "dist"
        dist.mkdir(parents=True)
        for name in package.files:
            (dist / name).write_bytes(CONTENT[name])


def assert_found(found: dict[str, bytes]) -> None:
    assert {name: content for name, content in found.items() if name != "NOTICES.txt"} == CONTENT
    assert b"Apache-2.0" in found["NOTICES.txt"]


def test_npm_fetches_it_once(npm, cache, caplog) -> None:
    calls = npm()
    caplog.set_level("INFO")
    assert_found(javascript_files())
    assert_found(javascript_files())
    (call,) = calls()
    assert call.startswith("pack @huggingface/transformers@4.3.2 onnxruntime-web@1.31.0-dev.20260914-8d85527a0 ")
    (said,) = caplog.messages
    assert "with npm, once" in said
    assert {path.name for path in cache.rglob("*") if path.is_file()} == {".4.3.2.lock", *CONTENT}


def test_a_damaged_cache_is_fetched_anew(npm, cache) -> None:
    calls = npm()
    javascript_files()
    (wasm,) = cache.rglob("*.wasm")
    wasm.write_bytes(b"damaged")
    assert_found(javascript_files())
    assert wasm.read_bytes() == CONTENT[wasm.name] and len(calls()) == 2


def test_of_two_processes_one_fetches_it(npm) -> None:
    calls = npm("time.sleep(0.3)")
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(javascript_files, (None, None)):
            assert_found(found)
    assert len(calls()) == 1


def installed(folder: Path) -> None:
    write_modules(folder / "node_modules")


def installed_beside_another_version(folder: Path) -> None:
    write_modules(folder / "node_modules", deep=True)
    other = folder / "node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"another version")


def side_by_side(folder: Path) -> None:
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    "write", [installed, write_modules, installed_beside_another_version, side_by_side, write_archives]
)
def test_a_folder_that_has_it_is_enough(npm, cache, tmp_path, write) -> None:
    calls = npm()
    write(tmp_path / "mine")
    assert_found(javascript_files(tmp_path / "mine"))
    assert calls() == [] and not cache.exists()


def changed(folder: Path) -> None:
    side_by_side(folder)
    (folder / "ort-wasm-simd-threaded.mjs").write_bytes(b"changed")


def incomplete(folder: Path) -> None:
    side_by_side(folder)
    (folder / "ort-wasm-simd-threaded.wasm").unlink()


def truncated(folder: Path) -> None:
    write_archives(folder)
    archive = folder / PACKAGES[0].archive
    archive.write_bytes(archive.read_bytes()[:100])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: None, "mine does not exist. "),
        (incomplete, "mine has no ort-wasm-simd-threaded.wasm of onnxruntime-web@1.31.0-dev.20260914-8d85527a0. "),
        (truncated, "huggingface-transformers-4.3.2.tgz is damaged: "),
        (
            changed,
            "ort-wasm-simd-threaded.mjs is not that of onnxruntime-web@1.31.0-dev.20260914-8d85527a0: its SHA-256 is "
            + hashlib.sha256(b"changed").hexdigest(),
        ),
    ],
    ids=["missing", "incomplete", "truncated", "changed"],
)
def test_a_folder_with_something_else_is_refused(npm, tmp_path, write, words) -> None:
    """Also if npm and the cache have it: a folder that is named is what is wanted."""
    calls = npm()
    javascript_files()
    write(tmp_path / "mine")
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        javascript_files(tmp_path / "mine")
    assert str(error.value).endswith(ADVICE) and len(calls()) == 1


def test_a_registry_with_something_else_is_refused(npm, cache) -> None:
    npm(content=CONTENT | {"transformers.min.js": b"changed"})
    with pytest.raises(
        ValueError, match=r"transformers.min.js is not that of @huggingface/transformers@4.3.2: its SHA"
    ):
        javascript_files()
    assert not list(cache.rglob("*.js")) + list(cache.rglob("*.wasm"))


FAILS = """sys.stderr.write('''npm warn config something
npm error code EAI_AGAIN
npm error syscall getaddrinfo
npm error errno EAI_AGAIN
npm error request to https://registry failed, reason: getaddrinfo EAI_AGAIN
npm error A complete log of this run can be found in: /home/me/.npm
''')
sys.exit(1)"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (FAILS, "npm failed: request to https://registry failed, reason: getaddrinfo EAI_AGAIN. "),
        ("sys.exit(7)", "npm failed: exit code 7. "),
        ("time.sleep(60)", "npm takes more than 0.5 seconds. "),
    ],
    ids=["network", "silent", "slow"],
)
def test_when_npm_fails_a_sentence_says_what_to_do(npm, cache, monkeypatch, lines, words) -> None:
    npm(lines)
    monkeypatch.setattr(javascript, "TIME_LIMIT", 0.5)
    with pytest.raises(ValueError) as error:
        javascript_files()
    assert str(error.value) == f"The JavaScript library cannot be fetched: {words}{ADVICE}"
    assert not list(cache.rglob("4.3.2"))


def test_without_npm_or_a_network_a_sentence_says_what_to_do(npm, cache, monkeypatch, tmp_path) -> None:
    calls = npm()
    monkeypatch.setattr(javascript, "is_offline_mode", lambda: True)
    with pytest.raises(ValueError) as error:
        javascript_files()
    assert str(error.value) == f"The JavaScript library cannot be fetched: HF_HUB_OFFLINE is set. {ADVICE}"
    monkeypatch.setattr(javascript, "is_offline_mode", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError) as error:
        javascript_files()
    assert str(error.value) == f"The JavaScript library cannot be fetched: there is no npm. {ADVICE}"
    assert calls() == [] and not cache.exists()


def test_the_manual_has_the_command_of_the_advice() -> None:
    (command,) = re.findall("`(npm pack .+?)`", ADVICE)
    assert command.split() == ["npm", "pack", *(package.specifier for package in PACKAGES)]
    assert f"`{command}`" in (ROOT / "docs" / "serving.md").read_text("utf-8")


def test_a_cache_that_cannot_be_written_is_named(npm, monkeypatch, tmp_path) -> None:
    npm()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(javascript, "HF_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="cannot be kept: .* Set HF_HOME to a folder that can be written"):
        javascript_files()


def notices() -> tuple[str, str]:
    """The entries of the notices, and the texts of licences."""
    text = Path(javascript.__file__).with_name("notices.txt").read_text("utf-8")
    entries, *texts = text.split("-" * 100)
    return entries, "".join(texts)


def test_the_notices_name_each_package_and_have_each_licence() -> None:
    entries, texts = notices()
    for package in PACKAGES:
        assert f"{package.name} {package.version}\n" in entries
        assert all(name in entries for name in package.files)
    # The last line of each entry is its licence; that of MPL-2.0 may be an address.
    licences = set(re.findall(r"^    (\S+(?:, whose text is at https://\S+.*)?)\n(?! )", entries, re.MULTILINE))
    assert {each for each in licences if each not in texts} == {
        "MPL-2.0, whose text is at https://www.mozilla.org/MPL/2.0/. The source code is at "
        "https://gitlab.com/libeigen/eigen."
    }
    assert {"MIT", "Apache-2.0", "BSD-3-Clause"} < licences


@pytest.mark.extras
def test_what_npm_has_today_is_what_is_pinned(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(javascript, "PACKAGES", PACKAGES)
    if shutil.which("npm") is None:
        pytest.skip("needs npm, and there is none")
    try:
        found = javascript_files()
    except ValueError as error:
        if "npm failed" in str(error):
            pytest.skip(f"needs a network: {error}")
        raise
    assert len(found["ort-wasm-simd-threaded.wasm"]) > 10_000_000
    # What the library contains by the names in its readable form, and which ONNX Runtime it needs.
    transformers, runtime = PACKAGES
    subprocess.run(["npm", "pack", transformers.specifier], cwd=tmp_path, check=True, capture_output=True)
    with tarfile.open(tmp_path / transformers.archive) as archive:
        package = json.load(archive.extractfile("package/package.json"))
        readable = archive.extractfile("package/dist/transformers.js").read().decode()
    assert package["dependencies"][runtime.name] == runtime.version
    bundled = set(re.findall(r"^\s*// .*/\.pnpm/([\w@.+-]+)@([\w.-]+)/node_modules/", readable, re.MULTILINE))
    assert len(bundled) == 4
    for name, version in bundled:
        assert f"{name.replace('+', '/')} {version}" in notices()[0]
