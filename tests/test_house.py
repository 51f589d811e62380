"""The house's own rules: who imports whom, and what may travel to the Hub."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from hf_vaswani.model.generation_vaswani import TESTED_RELEASES

from .conftest import ROOT

PACKAGE = ROOT / "hf_vaswani"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
WINGS = {"model", "corpus", "data", "training", "translation", "hub", "conversion"}
WINGS |= {"visualization", "serving", "scale", "cli"}

# Who may import whom: a file of the ground floor or a wing, and the files and wings that its modules may import. A
# name with a dot is a single module. Whatever is missing here fails the test.
ALLOWED: dict[str, set[str]] = {
    "extras": set(),
    "recipe": {"extras"},
    "recipe_checks": {"recipe", "metrics", "model"},
    "recipe_file": {"extras", "recipe", "recipe_checks"},
    "files": set(),
    "interruption": set(),
    "metrics": {"extras"},
    "model": set(),
    "records": {"metrics"},
    "run_folder": {"recipe", "recipe_file", "files", "metrics", "records"},
    "memory": set(),
    "captured": set(),
    "processes": {"recipe", "memory"},
    "adapters": {"files"},
    "model_names": {"files"},
    "averaging": {"files", "run_folder", "adapters"},
    "corpus": set(),
    "data": {"extras", "corpus", "records", "files", "interruption", "model"},
    "translation": {
        "captured",
        "files",
        "model_names",
        "adapters",
        "processes",
        "interruption",
        "model",
        "data.tokenizer",
    },
    "hub": {"extras", "adapters", "run_folder", "records", "recipe", "recipe_file", "files", "metrics", "model"},
    "conversion": {"extras", "files", "model_names", "model", "translation", "data.tokenizer"},
    "visualization": {"extras", "files", "model", "translation"},
    "serving": {"extras", "files", "memory", "model", "translation", "visualization"},
    "scale": {"files", "records", "translation.growing_file"},
    "removed_tasks": {"model"},
    "version": set(),
    "__init__": {"model", "translation", "conversion", "removed_tasks", "version"},
}
ALLOWED["training"] = set(ALLOWED) - {"__init__", "visualization", "serving", "scale", "removed_tasks", "version"}
ALLOWED["cli"] = set(ALLOWED) - {"cli"} | {"__init__"}


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, wherever in it; `from . import x` is counted as `.x`."""
    package = ["hf_vaswani", *path.relative_to(PACKAGE).parts[:-1]] if path.is_relative_to(PACKAGE) else []
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) - node.level + 1], node.module or ""] if node.level else [node.module or ""]
            )
            base = base.rstrip(".")
            for alias in node.names:
                module = f"{base}.{alias.name}"
                found.add(module if module.removeprefix("hf_vaswani.") in MODULES else base)
    return found


def own_imports(module: str) -> set[str]:
    """Modules of the package that one of its modules imports."""
    names = {name for name in imports(MODULES[module]) if name.split(".")[0] == "hf_vaswani"}
    return {name.removeprefix("hf_vaswani").lstrip(".") or "__init__" for name in names}


@pytest.mark.parametrize("module", MODULES)
def test_imports_within_the_package_go_one_way(module) -> None:
    room = module.split(".")[0]
    for name in own_imports(module):
        neighbour = name.split(".")[0]
        assert (neighbour == room and room in WINGS) or {name, neighbour} & ALLOWED[room], f"{module} imports {name}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    # A package's `__init__` is no detour: importing a module of a wing loads the wing's, which imports nothing else.
    graph = {module: own_imports(module) - {"__init__"} for module in MODULES}
    assert list(TopologicalSorter(graph).static_order())


def test_the_wings_are_the_folders() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == WINGS
    assert {module.split(".")[0] for module in MODULES} == set(ALLOWED)


TRAVELLING = sorted(path for path in (PACKAGE / "model").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", TRAVELLING, ids=lambda path: path.stem)
def test_travelling_files_import_what_everybody_has(path) -> None:
    assert path.stem.endswith("_vaswani")
    # regex comes with every transformers.
    roots = {name.split(".")[0] for name in imports(path)} - {"hf_vaswani"}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "transformers", "huggingface_hub", "regex"}
    for line in path.read_text("utf-8").splitlines():
        if re.match(r"\s*(from\s+\.|import\s+hf_vaswani|from\s+hf_vaswani)", line):
            assert re.fullmatch(r"from \.\w+_vaswani import .+", line.strip()), line


def test_a_translation_model_travels_with_nine_short_files() -> None:
    """In which a person who opens a model on the Hub finds the paper."""
    files = [path for path in TRAVELLING if path.stem != "heads_vaswani"]
    assert len(files) <= 9
    assert sum(len(path.read_text("utf-8").splitlines()) for path in files) <= 4000


@pytest.mark.process
def test_importing_the_package_is_light() -> None:
    program = (
        "import sys, transformers; before = set(sys.modules); import hf_vaswani; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = {"datasets", "evaluate", "sacrebleu", "matplotlib", "pandas", "pyarrow"}
    assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_test_file_and_a_docstring(module) -> None:
    path = MODULES[module]
    assert ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if path.stem not in {"__init__", "__main__", "version"}:
        folder = ROOT / "tests" / path.relative_to(PACKAGE).parent
        test = folder / f"test_{path.stem.removesuffix('_vaswani')}.py"
        assert test.is_file(), f"{module} has no {test.relative_to(ROOT)}"


@pytest.mark.parametrize("module", MODULES)
def test_every_function_fits_on_a_screen(module) -> None:
    functions = [n for n in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))) if isinstance(n, ast.FunctionDef)]
    assert not [n.name for n in functions if n.end_lineno - n.lineno >= 60]


def test_the_version_is_in_the_changelogs_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## \[Unreleased\]$", text, flags=re.MULTILINE)
    assert "0.x" in text


def test_the_supported_releases_of_transformers_are_the_same_everywhere() -> None:
    """One line of pyproject.toml; what travels to the Hub, the lanes and the manual cannot read it, and repeat it."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    oldest, beyond = re.findall(r'"transformers>=(5\.\d+),<(5\.\d+)"', project)[0]
    newest = f"5.{int(beyond.split('.')[1]) - 1}"
    assert f"{oldest} to {newest}" == TESTED_RELEASES
    for page in ("README.md", "docs/index.md", "docs/architecture.md", "CHANGELOG.md"):
        assert f"transformers {TESTED_RELEASES}" in (ROOT / page).read_text("utf-8"), page
    assert re.search(rf"^transformers=={newest}\.\d+$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert f"transformers=={oldest}.0" in (ROOT / "Makefile").read_text("utf-8")
