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
    "pip install .": "installs",
    "pip install '.[train,viz]'": "installs",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "installs",
    "hf-vaswani push runs/my --not-worse-than last_push": "depends on what was published before",
    "hf-vaswani renew me/my-model": "needs a model on the Hub",
    "make quickstart": "installs, and trains for minutes",
    "make test": "installs, and runs the tests",
    "make test-process": "installs, and runs tests",
    "hf-vaswani demo --model runs/quickstart/model": "serves until it is stopped",
    "hf-vaswani serve --model runs/quickstart/model": "serves until it is stopped",
    "curl -s localhost:5000/translate -H 'Content-Type: application/json' "
    """-d '{"q": "The cat sleeps.", "source": "en", "target": "de"}'""": "needs the server",
    "hf-vaswani serve --model runs/quickstart/model --port 5000": "serves until it is stopped",
    "hf-vaswani serve --model runs/en-de/model --model runs/de-en/model --model me/opus-fr-en "
    "--direction fr-en": "serves until it is stopped",
    "pip install '.[serve]'": "installs",
    "docker compose up --build": "needs Docker",
    "docker build -t hf-vaswani .": "needs Docker",
    "docker run -p 5000:5000 -v ./runs/my/model:/model hf-vaswani --model /model --workers 2": "needs Docker",
    "hf-vaswani translate --model me/my-model --table s3://bucket/text --column en --to-column de "
    "--output s3://bucket/translated --engine-cluster ray --engine ctranslate2 --compute-type int8": "needs a bucket",
    "torchrun --standalone --nproc_per_node=8 --max-restarts=3 train.py configs/my.yaml "
    "--training.save_every_minutes 10": "starts eight processes",
    "python benchmarks/tables.py runs/student/model test.en --num-beams 1": "takes minutes",
    "python benchmarks/soak.py runs/student/model test.en": "takes half an hour",
    "sbatch configs/jobs/slurm.sh configs/my.yaml --training.save_every_minutes 20": "needs Slurm",
    "kubectl apply -f configs/jobs/jobset.yaml": "needs Kubernetes",
    "make lint": "installs, and checks everything",
    "make format": "changes files",
    "make campaign": "takes 25 minutes",
    "make campaign SEED=7": "takes 25 minutes",
    "MODELS=1 bash configs/jobs/diversify.sh configs/my.yaml runs/diversified": "trains three times",
    "python benchmarks/parity.py": "takes minutes",
    "python benchmarks/train_throughput.py": "takes hours",
    "python benchmarks/decode_speed.py runs/quickstart/model in.txt --threads 1": "takes minutes",
    "python benchmarks/decode_speed.py 256 --threads 1 --rounds 5": "takes minutes",
    "python benchmarks/decode_speed.py base --device cuda --batches 32 128 --beams 4 --rounds 2": "needs a GPU",
    "python train.py configs/multi30k_en_de.yaml --training.tokens_per_batch 16384 --training.max_steps 2000 "
    "--training.peak_learning_rate 0.005 --training.warmup_steps 250 --training.save_every 60 "
    "--training.mixed_precision no --model.dropout 0.1 --training.r_drop.alpha 5.0": "needs a GPU",
    "python benchmarks/search_rules.py multi30k/test.en multi30k/test.de runs/multi30k/model": "needs Multi30k",
    "python benchmarks/pareto.py multi30k runs/pareto": "takes a day, and needs Multi30k",
    "python benchmarks/serving.py runs/multi30k/model multi30k/test.en": "takes minutes, and needs Multi30k",
    "python benchmarks/data_scale.py multi30k": "takes minutes, and needs Multi30k",
    "python benchmarks/continued_marian.py multi30k runs/marian --training.cpu_threads 1 "
    "--training.mixed_precision bf16 --training.max_steps 1000 --training.validate_every 250 "
    "--training.save_every 250": "takes 40 minutes, and needs Multi30k",
    "python benchmarks/alignment_errors.py runs/quickstart": "needs the whole training",
    "python benchmarks/classification.py python_docs runs/classification --training.cpu_threads 1": "takes an hour",
    "python benchmarks/language_model.py python_docs runs/gpt --training.cpu_threads 1 "
    "--training.mixed_precision bf16": "takes 40 minutes",
    "python benchmarks/text_to_text.py python_docs multi30k runs/tasks --training.cpu_threads 1": "takes two hours",
    "python benchmarks/few_pairs.py python_docs runs/few --training.cpu_threads 1 "
    "--training.mixed_precision bf16": "takes half a day",
    "python benchmarks/language_model_speed.py --rounds 3 --new_tokens 32": "takes minutes",
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
            rest = [line for line in shell_lines(text) if line not in NOT_RUN]
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
    listed = set(NOT_RUN)
    assert listed <= LINES
    for pattern in [*END_EARLY, NEED_GPUS.pattern + ".*"]:
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


def test_a_block_without_a_language_is_no_command() -> None:
    for page in RUN:
        for block in blocks(page, ""):
            assert not re.search(r"^(hf-vaswani|python|accelerate|torchrun|make|pip) ", block, flags=re.MULTILINE)


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


def test_the_manual_links_to_itself_only() -> None:
    """A page of the manual is also read as part of the site, which has no other folders of the repository."""
    for page in PAGES[1:]:
        assert "](../" not in TEXTS[page], page


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("nav:")[1]
    assert set(re.findall(r"[\w-]+\.md", navigation)) == {Path(page).name for page in PAGES[1:]}


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


def test_the_readme_is_a_front_page() -> None:
    assert len(README.splitlines()) <= 150


def test_the_readmes_tree_is_the_tree() -> None:
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
