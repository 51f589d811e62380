"""The house's own rules: who imports whom, what may travel to the Hub, and that README says what is there."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

PACKAGE = ROOT / "hf_vaswani"
MODULES = {path.stem: path for path in PACKAGE.glob("*.py")}
CONVERSION = {path.stem: path for path in (PACKAGE / "conversion").glob("*.py")}
TRAVELLING = {name for name in MODULES if name.endswith("_vaswani")}

# What each module may import from the package. A module that is missing here fails its test.
ALLOWED: dict[str, set[str]] = {
    "configuration_vaswani": set(),
    "files": set(),
    "decoding_vaswani": set(),
    "search_vaswani": {"decoding_vaswani"},
    "generation_vaswani": {"search_vaswani"},
    "sentences_vaswani": set(),
    "pipeline_vaswani": {"sentences_vaswani"},
    "recipe": set(),
    "pocket_lexicon": set(),
    "pocket_corpus": {"pocket_lexicon"},
    "batching": set(),
    "tokenizer": set(),
    "optimization": set(),
    "metric": set(),
    "visualization": set(),
    "modeling_vaswani": {"configuration_vaswani", "decoding_vaswani", "generation_vaswani", "pipeline_vaswani"},
    "data": {"files", "pocket_corpus", "recipe"},
    "loading": {"files", "generation_vaswani", "tokenizer"},
    "encoding": set(),
    "interruption": set(),
    "processes": set(),
    "streaming": {"batching", "data", "encoding"},
    "corpus": {"batching", "data", "encoding", "recipe", "streaming", "tokenizer"},
    "__init__": TRAVELLING,
}
LEVEL_2 = {"checkpoints", "evaluation", "quantization", "scoring", "sharding"}
for name in LEVEL_2:
    ALLOWED[name] = set(ALLOWED) - {"__init__"} - LEVEL_2
ALLOWED["card"] = {"checkpoints", "files", "recipe", "scoring", "visualization"}
ALLOWED["hub"] = {"card", "checkpoints", "files", "recipe"}
ALLOWED["preparation"] = set(ALLOWED) - {"__init__"}
ALLOWED["validation"] = set(ALLOWED) - {"__init__"}
ALLOWED["trainee"] = set(ALLOWED) - {"__init__"}
ALLOWED["training"] = set(ALLOWED) - {"__init__"}
ALLOWED["translation"] = set(ALLOWED) - {"__init__", "training"}
# What a format may import: of the package what is below it, of its siblings what the two sides are, and its parts.
BELOW_A_FORMAT = {
    "configuration_vaswani",
    "modeling_vaswani",
    "generation_vaswani",
    "evaluation",
    "files",
    "loading",
    "tokenizer",
}
PARTS = {
    "__init__": set(),
    "sides": set(),
    "search": {"sides"},
    "convert": {"search", "sides"},
    "marian": {"sides", "marian_vocabulary"},
    "marian_npz": {"sides", "marian", "marian_vocabulary"},
    "marian_vocabulary": set(),
    "fairseq": {"sides", "fairseq_vocabulary"},
    "fairseq_vocabulary": {"marian_vocabulary"},
    "ctranslate2": {"search", "sides"},
    "onnx": {"search", "sides"},
}
ALLOWED["text_verbs"] = set(ALLOWED) - {"__init__", "training"}
ALLOWED["scoring_verbs"] = set(ALLOWED) - {"__init__", "training"}
ALLOWED["cli"] = set(ALLOWED) - {"__init__"} | {"conversion.convert"}


def imports(path: Path) -> set[str]:
    """Absolute modules as written, modules of the package with a dot before them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                dots = "." * node.level
                found |= {dots + node.module} if node.module else {dots + alias.name for alias in node.names}
            else:
                found.add(node.module or "")
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_within_the_package_go_one_way(module) -> None:
    own = {name[1:] for name in imports(MODULES[module]) if name.startswith(".")}
    assert own <= ALLOWED[module]


@pytest.mark.parametrize("module", sorted(CONVERSION))
def test_a_format_imports_what_is_below_it(module) -> None:
    own = {name for name in imports(CONVERSION[module]) if name.startswith(".")}
    assert {name[2:] for name in own if name.startswith("..")} <= BELOW_A_FORMAT
    assert {name[1:] for name in own if not name.startswith("..")} <= PARTS[module]


@pytest.mark.parametrize("module", sorted(TRAVELLING))
def test_travelling_files_import_what_everybody_has(module) -> None:
    path = MODULES[module]
    roots = {name.split(".")[0] for name in imports(path) if not name.startswith(".")}
    assert roots - set(sys.stdlib_module_names) <= {"torch", "transformers", "huggingface_hub"}
    for line in path.read_text("utf-8").splitlines():
        if re.match(r"\s*(from\s+\.|import\s+hf_vaswani|from\s+hf_vaswani)", line):
            assert re.fullmatch(r"from \.\w+_vaswani import .+", line), line


def test_importing_the_package_is_light() -> None:
    program = (
        "import sys, transformers; before = set(sys.modules); import hf_vaswani; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    heavy = {"datasets", "evaluate", "sacrebleu", "matplotlib", "jsonargparse", "pandas", "pyarrow"}
    assert not heavy & set(done.stdout.split())


def test_every_module_has_a_test_file_and_a_docstring() -> None:
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    elsewhere = {
        "__init__": "pipeline",
        "metric": "scoring",
        "visualization": "card",
        "pocket_lexicon": "pocket_corpus",
        "scoring_verbs": "cli",
        "search_vaswani": "decoding",
        "sentences_vaswani": "pipeline",
        "sharding": "launch",
        "text_verbs": "cli",
        "trainee": "training",
        "validation": "training",
    }
    parts = {"__init__": "convert", "sides": "convert", "search": "convert", "fairseq_vocabulary": "fairseq"}
    parts |= {"marian_npz": "marian", "marian_vocabulary": "marian"}
    for name, path in CONVERSION.items():
        assert parts.get(name, name) in tested, name
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), name
    for name, path in MODULES.items():
        assert elsewhere.get(name, name.removesuffix("_vaswani")) in tested, name
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), name


README = (ROOT / "README.md").read_text("utf-8")


def test_the_readmes_tree_is_the_tree() -> None:
    tree = README.split("## Files")[1].split("```")[1]
    shown = set(re.findall(r"^  (\w+\.py) ", tree, flags=re.MULTILINE))
    assert shown == {path.name for path in PACKAGE.glob("*.py")}
    for name in re.findall(r"^(\S+)", tree, flags=re.MULTILINE):
        assert (ROOT / name).exists(), name


def test_the_readmes_names_and_commands_exist() -> None:
    code = "".join(path.read_text("utf-8") for path in MODULES.values())
    for cell in re.findall(r"^\| \d.*\| (.+) \|$", README, flags=re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", cell):
            assert re.search(rf"(def|class) {name.split('.')[-1]}\b", code), name
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^make (\S+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for path in re.findall(r"configs/[\w/]+\.yaml", README):
        assert path == "configs/my.yaml" or (ROOT / path).is_file(), path


def test_the_readmes_recipe_is_a_recipe(tmp_path) -> None:
    from hf_vaswani.recipe import load_recipe

    (tmp_path / "my.yaml").write_text(re.search(r"```yaml\n(.*?)```", README, flags=re.DOTALL)[1])
    assert load_recipe([str(tmp_path / "my.yaml")]).model.d_model == 256


def test_every_python_block_of_the_readme_runs(tiny_run, tmp_path) -> None:
    """With a small model in the place of the quickstart's."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(tiny_run)
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        done = subprocess.run(
            [sys.executable, "-c", block],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_the_version_is_in_the_changelogs_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## \[Unreleased\]$", text, flags=re.MULTILINE)
    assert "0.x" in text
