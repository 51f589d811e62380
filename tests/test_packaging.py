"""What the package declares and what is built from it: dependencies, wheel, source distribution."""

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from .conftest import ROOT
from .test_house import MODULES, PACKAGE, imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# The extras that a file of the ground floor or a wing may need; one that is missing here needs none.
NEEDED = {
    "recipe": {"train"},
    "recipe_file": {"train"},
    "run_folder": {"train"},
    "processes": {"train"},
    "metrics": {"train"},
    "corpus": {"clean"},
    "data": {"train"},
    "training": {"train", "adapt"},
    "hub": {"train", "viz"},
    "conversion": {"convert"},
    "visualization": {"viz"},
    "scale": {"scale"},
    "serving": {"demo", "serve"},
    "cli": {"train", "clean", "viz", "serve"},
}
# Modules, and what is beside them: pages, licences, the card's template, the built-in corpus.
KINDS = {".py", ".html", ".css", ".js", ".txt", ".md", ".xz"}


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in requirements}


@pytest.fixture(scope="module")
def distributions() -> Mapping[str, list[str]]:
    """The distributions of every package that can be imported."""
    return importlib.metadata.packages_distributions()


@pytest.mark.parametrize("module", MODULES)
def test_every_import_is_declared(module, distributions) -> None:
    declared = names(PROJECT["dependencies"])
    for extra in NEEDED.get(module.split(".")[0], ()):
        declared |= names(PROJECT["optional-dependencies"][extra])
    roots = {name.split(".")[0] for name in imports(MODULES[module])} - set(sys.stdlib_module_names)
    for root in roots - {"hf_vaswani", "hf_vaswani_start"}:
        found = {name.lower().replace("_", "-") for name in distributions[root]}
        assert found & declared, f"{module} imports {root}, which is of {found}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.mark.process
def test_the_wheel_has_the_package_and_nothing_else(built) -> None:
    found = {name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name}
    files = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.suffix in KINDS}
    assert found == files | {"hf_vaswani_start.py"}
    assert {Path(name).suffix for name in files} == KINDS


@pytest.mark.process
def test_the_source_distribution_builds_the_same_wheel(built, tmp_path) -> None:
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    for name in ("train.py", "constraints.txt", "configs/quickstart.yaml", "tests/conftest.py"):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=folder, check=True)
    wheel = next((folder / "dist").glob("*.whl"))
    contents = [
        {name: archive.read(name) for name in archive.namelist()}
        for archive in (zipfile.ZipFile(wheel), zipfile.ZipFile(built[0]))
    ]
    assert contents[0] == contents[1]


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel alone; what it depends on is lent from the tests'."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    program = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(program), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(built[0])], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A path that stands in a .pth file is searched, but the .pth files in it are not read: no editable install here.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin"


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_an_installed_wheel_has_every_verb(installed, tmp_path) -> None:
    version = run(installed / "hf-vaswani", "--version", cwd=tmp_path)
    assert version == f"hf-vaswani {importlib.metadata.version('hf_vaswani')}\n"
    verbs = re.findall(r"^    (\w+)\b", run(installed / "hf-vaswani", "--help", cwd=tmp_path), re.M)
    assert {"train", "translate", "convert", "serve"} < set(verbs)
    program = f"""
import hf_vaswani
from hf_vaswani.cli import main
assert hf_vaswani.__file__.startswith({str(installed.parent)!r}), hf_vaswani.__file__
for verb in {verbs}:
    try:
        code = main([verb, "--help"])
    except SystemExit as stop:
        code = stop.code
    assert not code, verb
"""
    shown = run(installed / "python", "-c", program, cwd=tmp_path)
    assert {f"hf-vaswani {verb}" for verb in verbs} <= set(re.findall(r"hf-vaswani \w+", shown))


@pytest.mark.process
def test_an_installed_wheel_renders_a_card(installed, tiny_run, tmp_path) -> None:
    program = f"""
import sys
from pathlib import Path
from hf_vaswani.hub import card
from hf_vaswani.run_folder import read_result
assert str(card.TEMPLATE).startswith({str(installed.parent)!r}), card.TEMPLATE
run = Path(sys.argv[1])
files = card.card_files(run, run / "model", read_result(run), None, "main")
print(files["README.md"].decode())
"""
    shown = run(installed / "python", "-c", program, tiny_run, cwd=tmp_path)
    assert shown == (tiny_run / "model" / "README.md").read_text("utf-8") + "\n"
