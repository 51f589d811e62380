PYTHON ?= python3
BIN = .venv/bin

.PHONY: quickstart test test-oldest campaign lint format

quickstart: .venv/installed  ## train a first model on the built-in corpus
	$(BIN)/python train.py configs/quickstart.yaml

# Two processes of one thread each: most of what is tested is too small for more.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test: .venv/installed  ## run the tests
	$(PYTEST)

test-oldest: .venv/installed  ## run the tests of pipelines and of the search with the oldest transformers that is supported
	$(BIN)/pip install --quiet --upgrade --no-deps --target .oldest transformers==5.20.0
	PYTHONPATH=$(CURDIR)/.oldest $(PYTEST) tests/test_pipeline.py tests/test_remote_code.py tests/test_decoding.py

# What `make test` has a small share of: 15 minutes at most on two cores. SEED draws the attacks, and is printed.
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
	$(BIN)/pip install --quiet -c constraints.txt -e '.[train,viz,convert,dev]'
	touch $@
