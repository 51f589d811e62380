"""README and the manual: every block of code and every shell line runs, and names, links and recipes are right."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
import yaml

from hf_vaswani.recipe import SECTIONS
from hf_vaswani.recipe_file import load_recipe

from .conftest import ROOT, THREADS, write_pairs
from .hub_server import Access, HubServer

# In the order in which they run: what later pages translate with is trained, and published, before.
PAGES = ["README.md", "docs/training.md", "docs/publishing.md"]
PAGES += sorted({path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")} - set(PAGES))
RUN = [*PAGES, "CONTRIBUTING.md"]
TEXTS = {page: (ROOT / page).read_text("utf-8") for page in [*RUN, "SECURITY.md"]}
README = TEXTS["README.md"]

# Lines that are not run, and why.
NOT_RUN = {
    r"pip install .*|make .*": "installs, and mostly takes minutes",
    r"hf-vaswani (demo|serve) .*|curl .*localhost.*": "serves until it is stopped, or needs npm",
    r"docker .*|kubectl .*|sbatch .*": "needs Docker, Kubernetes or Slurm",
    r"python benchmarks/.*|MODELS=1 bash configs/jobs/diversify.sh .*": "takes minutes to days",
    r".* s3://.*": "needs a bucket",
    r"torchrun .*--nproc_per_node=8 .*": "starts eight processes",
    r"python train.py configs/multi30k_en_de.yaml .*": "needs a GPU",
    r"hf-vaswani push .* --not-worse-than last_push": "depends on what was published before",
    r"hf-vaswani renew me/.*": "needs a model on the Hub",
}
# Lines whose launcher's options and recipe are read, but which need GPUs.
NEED_GPUS = re.compile(r"accelerate launch --config_file configs/accelerate/")
# Lines that end with exit code 2 here, and what they say; all before that works.
END_EARLY = {
    r"python train.py configs/multi30k_en_de_fr.yaml .*": "bentrevett/multi30k",
    r"torchrun .* configs/multi30k_en_de.yaml .*": "tok/train.lc.norm.tok.en",
    r"torchrun .* configs/python_docs_en_es.yaml": "python_docs/train.tsv.gz",
    r"hf-vaswani distill configs/students/python_docs.yaml": "runs/python_docs_en_es",
    r"hf-vaswani evaluate .* --data bentrevett/multi30k .*": "bentrevett/multi30k",
    r"hf-vaswani convert Helsinki-NLP/opus-mt-en-de .*": "Helsinki-NLP/opus-mt-en-de",
    r"hf-vaswani push .* --min-bleu 30 .*": "min_bleu is",
}
# The models here are trained for fewer updates.
SMALLER = {
    "checkpoint-700": "checkpoint-12",
    "checkpoint-19000": "checkpoint-15",
    "checkpoint-20000": "checkpoint-20",
    "--checkpoint 20000": "--checkpoint 20",
    "--training.max_steps 500": "--training.max_steps 8",
}
SMALL = {
    "tokenizer": {"vocab_size": 300},
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1},
    "training": {
        "max_steps": 20,
        "tokens_per_batch": 256,
        "warmup_steps": 10,
        "validate_every": 5,
        "save_every": 5,
        "average_last": 2,
        "cpu_threads": None if THREADS == "null" else int(THREADS),
    },
    "evaluation": {"max_length": 12},
}
# Blocks of `python` run. Those of `py` need a server that listens, and the package of another program.
FENCE = r"^```(\w*)\n(.*?)^```$"
TOKEN = "hf_the_writing_token"
DOMAIN = ("train", "dev", "test")


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of the languages."""
    found = re.findall(FENCE, TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def shell_lines(text: str) -> list[str]:
    """The commands of a block, one line each, without comments."""
    found = [shlex.join(shlex.split(line, comments=True)) for line in text.replace("\\\n", " ").splitlines()]
    return [re.sub("'([<>])'", r"\1", line) for line in found if line]


LINES = {line for page in RUN for text in blocks(page, "bash") for line in shell_lines(text)}


def tasks(page: str) -> list[dict[str, str]]:
    """Everything that runs for a page, in its order."""
    found = []
    for language, text in re.findall(FENCE, TEXTS[page], flags=re.DOTALL | re.MULTILINE):
        if language == "python":
            found.append({"kind": "python", "text": text})
        elif language == "bash":
            rest = [line for line in shell_lines(text) if not any(re.fullmatch(known, line) for known in NOT_RUN)]
            found += [{"kind": "check" if NEED_GPUS.match(line) else "shell", "text": line} for line in rest]
    return [task | {"page": page} for task in found]


def small_recipe(text: str, path: Path, **more: Any) -> None:
    """Writes a recipe of the documentation with the sizes of these tests."""
    path.write_text(yaml.safe_dump(yaml.safe_load(text) | SMALL | more), encoding="utf-8")


@pytest.fixture(scope="module")
def workplace(tiny_run: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the documentation's commands find what they name."""
    folder = tmp_path_factory.mktemp("documentation")
    for name in ("train.py", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", folder / "configs")
    small_recipe(blocks("README.md", "yaml")[0], folder / "configs" / "my.yaml", hub={"repo_id": "me/my-model"})
    small_recipe(blocks("docs/data.md", "yaml")[0], folder / "configs" / "multilingual.yaml")
    bert, topics, several = blocks("docs/family.md", "yaml")
    small_recipe(bert, folder / "configs" / "bert.yaml")
    # Its vocabulary and sizes are those of the start.
    small_recipe(topics, folder / "configs" / "topics.yaml", tokenizer={}, model={})
    small_recipe(several, folder / "configs" / "tasks.yaml")
    small_recipe(blocks("docs/distilling.md", "yaml")[0], folder / "configs" / "student.yaml")
    (folder / "runs").mkdir()
    (folder / "runs" / "big").symlink_to(teacher)
    (folder / "runs" / "quickstart").symlink_to(tiny_run)
    for name in ("a", "b"):
        (folder / "runs" / name).symlink_to(tiny_run)
    corpus = folder / "corpus"
    corpus.mkdir()
    source, target = (path.read_text("utf-8") for path in write_pairs(corpus))
    for name in ("train", "dev", "more"):
        for language, text in (("en", source), ("de", target), ("fr", target)):
            (corpus / f"{name}.{language}").write_text(text, encoding="utf-8")
    for name in ("documents", "held-out"):
        (corpus / f"{name}.txt").write_text(source.replace("\n", "\n\n", 60), encoding="utf-8")
    labelled = [f"{line}\t{('sport', 'other')[i % 2]}\n" for i, line in enumerate(source.splitlines())]
    for name in ("topics", "topics.dev", "topics.test"):
        (corpus / f"{name}.tsv").write_text("en\ttopic\n" + "".join(labelled), encoding="utf-8")
    pairs = list(zip(source.splitlines(), target.splitlines(), strict=True))[:20]
    rows = [json.dumps({"translation": {"en": english, "de": german}}) for english, german in pairs]
    (corpus / "test.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    (folder / "sentences.jsonl").write_text("".join(f"{json.dumps({'en': pair[0]})}\n" for pair in pairs), "utf-8")
    (corpus / "domain").mkdir()
    (corpus / "mono.de").write_text("\n".join(german for _, german in pairs), encoding="utf-8")
    for path in (corpus / "dev.tsv", folder / "test.tsv", *(corpus / "domain" / f"{name}.tsv" for name in DOMAIN)):
        path.write_text("en\tde\n" + "".join(f"{english}\t{german}\n" for english, german in pairs), encoding="utf-8")
    for name, side in (("in.txt", 0), ("test.en", 0), ("test.de", 1), ("mine.txt", 1), ("baseline.txt", 0)):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def results(workplace: Path, request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """Exit code and output of everything that the chosen pages run; README is the first, and needs no other."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    # Of a model that all formats can express.
    quickstart = workplace / "runs" / "quickstart" / "model"
    model = AutoModelForSeq2SeqLM.from_pretrained(quickstart)
    model.config.layer_norm_eps = 1e-5
    model.save_pretrained(workplace / "mine")
    AutoTokenizer.from_pretrained(quickstart).save_pretrained(workplace / "mine")

    chosen = {item.callspec.params["page"] for item in request.session.items if "results" in item.fixturenames}
    # Later pages use what earlier ones have made.
    pages = RUN if chosen - {RUN[0]} else RUN[:1]
    todo = [{"kind": "shell", "page": "docs/data.md", "text": "hf-vaswani train configs/multilingual.yaml"}]
    todo = [task for task in [*todo, *(task for page in RUN for task in tasks(page))] if task["page"] in pages]
    smaller = [task.copy() for task in todo]
    for task in smaller:
        for before, after in SMALLER.items():
            task["text"] = re.sub(rf"{re.escape(before)}\b", after, task["text"])
    with HubServer(tokens={TOKEN: Access("me", "write")}) as hub:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "documentation.py")],
            input=json.dumps(smaller),
            capture_output=True,
            text=True,
            cwd=workplace,
            env=environment,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return {(task["page"], task["text"]): result for task, result in zip(todo, json.loads(done.stdout), strict=True)}


@pytest.mark.process
@pytest.mark.parametrize("page", RUN)
def test_every_block_and_every_shell_line_runs(results, page) -> None:
    for task in tasks(page):
        result = results[page, task["text"]]
        words = [words for pattern, words in END_EARLY.items() if re.fullmatch(pattern, task["text"])]
        assert result["code"] == (2 if words else 0), f"{task['text']}\n{result['output']}"
        assert all(word in result["output"] for word in words), f"{task['text']}\n{result['output']}"
        assert "Traceback" not in result["output"], f"{task['text']}\n{result['output']}"


def test_the_exceptions_are_lines_of_the_documentation() -> None:
    for pattern in [*NOT_RUN, *END_EARLY, NEED_GPUS.pattern + ".*"]:
        assert any(re.fullmatch(pattern, line) for line in LINES), pattern
    text = "".join(TEXTS.values())
    for words in SMALLER:
        assert words in text


def test_what_is_not_run_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    text = "".join(TEXTS.values())
    for names in re.findall(r"(?:hf_vaswani|\.)\[([a-z,]+)\]", text):
        assert set(names.split(",")) <= set(extras), names
    for target in re.findall(r"^make ([\w-]+)|`make ([\w-]+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, flags=re.MULTILINE), target
    for path in re.findall(r"(?:configs|benchmarks|tests)/[a-z0-9_/]+\.(?:yaml|py)", text):
        own = [f"configs/{name}.yaml" for name in ("my", "bert", "topics", "tasks", "student")]
        assert path in own or (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_the_recipes_are_recipes(tmp_path, page) -> None:
    for number, block in enumerate(blocks(page, "yaml")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block, encoding="utf-8")
        recipe = load_recipe([str(path)])
        flat = recipe.flat()
        for section, values in yaml.safe_load(block).items():
            if section in SECTIONS:
                assert {key: flat[f"{section}.{key}"] for key in values} == values


def test_links_lead_somewhere() -> None:
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if re.match(r"https?://", target):
                continue
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.is_file(), f"{page} links to {target}"
            if path.suffix != ".md":
                continue
            headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}
            assert not anchor or anchor in anchors, f"{page} links to {target}"


def test_the_manual_is_a_site() -> None:
    """Every page is in its navigation, links only to others, and has no command in a block without a language."""
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("nav:")[1]
    assert set(re.findall(r"[\w-]+\.md", navigation)) == {Path(page).name for page in PAGES[1:]}
    for page in PAGES[1:]:
        assert "](../" not in TEXTS[page], page
    for block in (block for page in RUN for block in blocks(page, "")):
        assert not re.search(r"^(hf-vaswani|python|accelerate|torchrun|make|pip) ", block, flags=re.MULTILINE)


def messages() -> list[str]:
    """Every string of the package; an ellipsis stands for each value in it."""
    found = []
    for path in (ROOT / "hf_vaswani").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "…" for part in parts]
            found += ["".join(map(str, texts))] if isinstance(node, ast.JoinedStr | ast.Constant) else []
    return found


def test_the_errors_that_are_explained_are_errors_of_the_package() -> None:
    known = messages()
    rows = re.findall(r"^\| (`+) ?(.+?) ?\1 \| ", TEXTS["docs/troubleshooting.md"], flags=re.MULTILINE)
    assert rows
    unknown = [message for _, message in rows if not any(message.rstrip("…. ") in text for text in known)]
    assert not unknown, "\n".join(unknown)


# ---- README ------------------------------------------------------------------------------------------------------


def test_the_readme_is_a_front_page_with_the_tree() -> None:
    assert len(README.splitlines()) <= 150
    tree = README.split("## Files")[1].split("```")[1]
    found = set()
    for line in tree.strip("\n").splitlines():
        names = line[:36].split()
        base = ROOT / "hf_vaswani" if line.startswith("  ") else ROOT
        for name in names:
            assert (base / name).exists(), name
            found.add(name.rstrip("/"))
    wings = {path.name for path in (ROOT / "hf_vaswani").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert wings <= found


def test_the_readmes_names_exist() -> None:
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "hf_vaswani").rglob("*.py")]
    defined = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        if isinstance(node, ast.ClassDef):
            defined |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    for cell in re.findall(r"^\| (?:\d|first).*\| (.+) \|$", README, flags=re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", cell):
            assert name in defined, name


def test_the_architecture_names_every_module() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", TEXTS["docs/architecture.md"], flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    modules = [path.stem for path in (ROOT / "hf_vaswani").rglob("*.py") if not path.stem.startswith("__")]
    assert set(modules) <= set(named)


def test_the_names_of_the_reference_exist() -> None:
    names = re.findall(r"^::: ([\w.]+)$", TEXTS["docs/api.md"], flags=re.MULTILINE)
    assert names
    assert not [name for name in names if locate(name) is None]


# ---- The site ----------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_site_asks_no_other_host(tmp_path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=[\"']?([^\"'\s>]+)", text)
        assert loaded
        for address in loaded:
            assert not re.match(r"(https?:)?//", address), f"{page} loads {address}"
        # The theme loads its program for these from elsewhere.
        assert 'class="mermaid"' not in text
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text("utf-8")), sheet
