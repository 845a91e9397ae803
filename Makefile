# Every target sets up .venv by itself. `make check-hardware` is a good first one.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test lint check-gpu check-hardware clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with the pinned versions (only when the pins have changed)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"trainfit needs Python 3.11 or newer, and $(PYTHON) is {v.major}.{v.minor}; try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

check-hardware: setup ## What this machine can do, and the settings for it
	@$(BIN)/trainfit check

check-gpu: setup ## One line per GPU
	@$(BIN)/trainfit check --short

lint: setup ## ruff, mypy --strict, import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## Lint, then every test that needs no GPU
	$(BIN)/pytest -n 2

clean: ## Remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
