PYTHON ?= python3
BIN = .venv/bin

.PHONY: quickstart test test-process test-smoke test-all test-gpu gpu-report test-browser pictures test-portable \
	test-portable-default test-extras test-oldest test-newest test-quickstart campaign docs lint format

quickstart: .venv/installed  ## train a first model on the built-in corpus
	$(BIN)/python train.py configs/quickstart.yaml

# Two processes of one thread each: most of what is tested is too small for more.
TWO_PROCESSES = -n 2 --dist worksteal
# Compiled tests are kept: to rewrite their assertions takes ten seconds.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest $(TWO_PROCESSES)

test: .venv/installed  ## run the tests of every module
	$(PYTEST)

test-process: .venv/installed  ## run the tests that start other processes: launchers, servers, packaging, the manual's lines
	$(PYTEST) -m "process and not slow"

# One of each kind: torchrun, accelerate launch, a program that is stopped, README's lines, pages in a browser if there
# is one, and most ways to translate with the quickstart's model. In one run, because to start costs ten seconds.
PAGES = tests/visualization/test_browser.py tests/serving/test_browser.py \
	tests/serving/test_browser_rules.py::test_a_worker_in_a_browser_handles_texts_as_python_does
SMOKE = tests/training/test_launch.py tests/training/test_two_processes.py::test_torchrun_is_what_the_forked_processes_are \
	tests/test_interruption.py::test_asked_to_stop_it_saves_and_says_how_to_resume \
	"tests/test_documentation.py::test_every_block_and_every_shell_line_runs[README.md]" $(PAGES) tests/test_quickstart.py
test-smoke: quickstart  ## run a few of these, README's lines, pages, and the quickstart's model
	HF_VASWANI_QUICKSTART=runs/quickstart $(PYTEST) -m "(process or browser or quickstart) and not slow" $(SMOKE)

EVERYTHING = -m "not extras and not browser and not quickstart"
test-all: .venv/installed  ## run both, and the tests that are slow
	$(PYTEST) $(EVERYTHING)

test-gpu: .venv/installed  ## compare the GPU of this machine with its CPU
	$(BIN)/pytest tests/test_gpu.py

gpu-report: .venv/installed  ## test and measure on the GPU of this machine, for ten minutes; writes build/gpu_report
	$(BIN)/python benchmarks/gpu_report.py

# The versions that pages without a server have, where npm can fetch them.
MODULES = .venv/javascript/node_modules
SPECIFIERS = from hf_vaswani.serving.javascript import PACKAGES; print(*(package.specifier for package in PACKAGES))
$(MODULES): hf_vaswani/serving/javascript.py | .venv/installed
	npm install --prefix $(@D) --ignore-scripts --no-audit --no-fund $$($(BIN)/python -c "$(SPECIFIERS)") && touch $@ || \
		echo "Tests in Node.js are skipped."

test-browser: .venv/installed $(MODULES)  ## run the tests in Chromium or Chrome, and in Node.js, if there are any
	OMP_NUM_THREADS=1 $(BIN)/pytest -m browser $(PAGES) tests/conversion/test_transformersjs.py

pictures: quickstart  ## make the manual's pictures of pages, of the quickstart's model
	HF_VASWANI_PICTURES=docs/pictures $(BIN)/pytest -m browser -k manual $(PAGES)

# What a training has learned, judged anew where it ends elsewhere: by other instructions, threads and seeds. What runs
# on all cores otherwise has one thread here, so that parts differ in one thing.
PORTABLE = $(BIN)/pytest -m portable

test-portable: test-portable-default  ## run the tests of what is learned as other processors would
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PORTABLE)
	OMP_NUM_THREADS=1 $(PORTABLE)
	OMP_NUM_THREADS=2 $(PORTABLE)
	for seed in 2 3 4; do HF_VASWANI_TEST_SEED=$$seed OMP_NUM_THREADS=1 $(PORTABLE) || exit 1; done

test-portable-default: .venv/installed  ## the first part of it: without any of the processor's vector instructions
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default $(PORTABLE)

test-extras: .venv/installed  ## install each extra alone in a fresh environment, and use it; fetch what npm has
	$(BIN)/pytest -m extras tests/test_extras.py tests/serving/test_javascript.py

docs: .venv/installed  ## build the manual into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-quickstart: quickstart  ## translate with the quickstart's model in every way
	HF_VASWANI_QUICKSTART=runs/quickstart $(PYTEST) -m quickstart tests/test_quickstart.py

# What calls most of transformers: pipelines, the search, the code that travels, and the contract with transformers.
OF_TRANSFORMERS = $(addprefix tests/model/test_, pipeline.py remote_code.py search.py cache.py contract.py)

test-oldest: quickstart  ## run the tests of pipelines and of the search with the oldest transformers that is supported
	$(BIN)/pip install --quiet --upgrade --no-deps --target .oldest transformers==5.20.0
	PYTHONPATH=$(CURDIR)/.oldest $(PYTEST) $(EVERYTHING) $(OF_TRANSFORMERS)
	PYTHONPATH=$(CURDIR)/.oldest HF_VASWANI_QUICKSTART=runs/quickstart $(PYTEST) -m quickstart tests/test_quickstart.py

# What users get. First the lines of README, in a folder of their own, with the versions that pip takes today: the base
# package translates with the model of an earlier version. Then, with the extras and the newest transformers, even one
# that pyproject.toml does not allow yet: the quickstart, trained and used in every way, and the tests of what calls most
# of transformers, trains, resumes and converts.
define README_LINES
import hf_vaswani
from transformers import pipeline
translator = pipeline("translation", model="run/model")
found = [output["translation_text"] for output in translator(open("test.en").read().splitlines())]
assert found == open("test.de").read().splitlines(), found
endef
export README_LINES

test-newest:  ## run README's lines, the quickstart and the tests of test-oldest with the newest versions of everything
	rm -rf .newest
	$(PYTHON) -m venv .newest
	.newest/bin/pip install --quiet .
	folder=$$(mktemp -d) && $(PYTHON) -m tarfile -e tests/saved/run_0.1.0.tar.xz $$folder && cd $$folder && \
		$(CURDIR)/.newest/bin/python -c "$$README_LINES" && \
		$(CURDIR)/.newest/bin/hf-vaswani translate --model run/model < test.en | cmp - test.de
	.newest/bin/pip install --quiet '.[train,adapt,clean,viz,convert,serve,dev]'
	.newest/bin/pip install --quiet --upgrade transformers
	.newest/bin/pip list
	.newest/bin/pytest -m quickstart tests/test_quickstart.py
	OMP_NUM_THREADS=1 .newest/bin/pytest $(TWO_PROCESSES) $(EVERYTHING) $(OF_TRANSFORMERS) tests/test_earlier_versions.py \
		tests/conversion/test_ctranslate2.py tests/conversion/test_onnx.py tests/conversion/test_transformersjs.py

# What `make test-process` has a small share of: 25 minutes on two cores. SEED draws the attacks, and is printed.
ifndef SEED
SEED := $(shell od -An -N2 -tu2 /dev/urandom | tr -d ' ')
endif

campaign: .venv/installed  ## attack everything that is written or read; docs/reliability.md says how and why
	@echo "make campaign SEED=$(SEED)"
	CAMPAIGN_SEED=$(SEED) $(PYTEST) -m process tests/campaign

lint: .venv/installed  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed  ## put format and imports in order
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

# All cores compile what is installed, where pip takes one, and only what is likely to be used. A few files are templates,
# and no Python.
SELDOM_USED = '/(pip|ray|tests?|torch/testing|transformers/models)/'
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[train,adapt,clean,viz,convert,demo,serve,scale,docs,dev]'
	$(BIN)/python -m compileall -qq -j 0 -x $(SELDOM_USED) .venv/lib || true
	touch $@
