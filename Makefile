PYTHON ?= python3
BIN = .venv/bin

.PHONY: quickstart test lint format

quickstart: .venv/installed  ## train a first model on the built-in corpus
	$(BIN)/python train.py configs/quickstart.yaml

test: .venv/installed  ## run the tests
	$(BIN)/pytest

lint: .venv/installed  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed  ## put format and imports in order
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[train,viz,dev]'
	touch $@
