PYTHON ?= python3
BIN = .venv/bin

.PHONY: quickstart test test-oldest lint format

quickstart: .venv/installed  ## train a first model on the built-in corpus
	$(BIN)/python train.py configs/quickstart.yaml

# Two processes of one thread each: most of what is tested is too small for more.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test: .venv/installed  ## run the tests
	$(PYTEST)

test-oldest: .venv/installed  ## run the tests of pipelines and of the search with the oldest transformers that is supported
	$(BIN)/pip install --quiet --upgrade --no-deps --target .oldest transformers==5.20.0
	PYTHONPATH=$(CURDIR)/.oldest $(PYTEST) tests/test_pipeline.py tests/test_remote_code.py tests/test_decoding.py

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
