PYTHON ?= python3
BIN = .venv/bin

.PHONY: quickstart test test-slow test-gpu test-browser pictures test-portable test-portable-default test-extras test-oldest campaign docs lint format

quickstart: .venv/installed  ## train a first model on the built-in corpus
	$(BIN)/python train.py configs/quickstart.yaml

# Two processes of one thread each: most of what is tested is too small for more. Files in the order of tests/conftest.py.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: .venv/installed  ## run the tests
	$(PYTEST)

test-slow: .venv/installed  ## run the tests that take too long for `make test`
	$(PYTEST) -m slow

test-gpu: .venv/installed  ## compare the GPU of this machine with its CPU
	$(BIN)/pytest tests/test_gpu.py

test-browser: .venv/installed  ## run the tests of pages in Chromium or Chrome, if there is one
	OMP_NUM_THREADS=1 $(BIN)/pytest -m browser tests/visualization/test_browser.py tests/serving/test_browser.py

pictures: quickstart  ## make the manual's pictures of pages, of the quickstart's model
	HF_VASWANI_PICTURES=docs/pictures $(BIN)/pytest -m browser -k manual tests/visualization/test_browser.py \
		tests/serving/test_browser.py

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

test-extras: .venv/installed  ## install each extra alone in a fresh environment, and use it
	$(BIN)/pytest -m extras tests/test_extras.py

docs: .venv/installed  ## build the manual into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test-oldest: .venv/installed  ## run the tests of pipelines and of the search with the oldest transformers that is supported
	$(BIN)/pip install --quiet --upgrade --no-deps --target .oldest transformers==5.20.0
	PYTHONPATH=$(CURDIR)/.oldest $(PYTEST) tests/model/test_pipeline.py tests/model/test_remote_code.py \
		tests/model/test_search.py tests/model/test_decoding.py tests/model/test_as_written.py

# What `make test` has a small share of: 25 minutes on two cores. SEED draws the attacks, and is printed.
ifndef SEED
SEED := $(shell od -An -N2 -tu2 /dev/urandom | tr -d ' ')
endif

campaign: .venv/installed  ## attack everything that is written or read; docs/reliability.md says how and why
	@echo "make campaign SEED=$(SEED)"
	CAMPAIGN_SEED=$(SEED) $(PYTEST) tests/campaign

lint: .venv/installed  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed  ## put format and imports in order
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[train,adapt,clean,viz,convert,demo,serve,scale,docs,dev]'
	touch $@
