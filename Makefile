# Every target sets up .venv by itself. `make check-hardware` is a good first one.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Tests start many processes: each would compile all of the source where none may write byte code.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup test style types tests test-gpu soak fuzz lint docs compat check-gpu check-hardware clean \
	nli-train-auto nli-train-4090 nli-train-3090 nli-train-low-mem nli-train-cpu hpo-demo gpt-train

# make nli-train-auto DATA_DIR=path/to/redsm5 MODEL=google/gemma-3-1b-it ARGS='training.num_epochs=5'
# Without DATA_DIR a small model trains on synthetic data.
NLI = $(BIN)/trainfit train nli $(if $(DATA_DIR),data.data_dir='$(DATA_DIR)') $(if $(MODEL),model.name='$(MODEL)')

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv with the pinned versions (only when the pins have changed)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"trainfit needs Python 3.11 or newer, and $(PYTHON) is {v.major}.{v.minor}; try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

check-hardware: setup ## What this machine can do, and the settings for it
	@$(BIN)/trainfit check

check-gpu: setup ## One line per GPU
	@$(BIN)/trainfit check --short

nli-train-auto: setup ## Detect, plan, train five folds of NLI and show the scores
	@$(NLI) hardware=auto cv.folds=5 $(ARGS)

nli-train-4090: setup ## NLI with the settings for an RTX 4090
	@$(NLI) hardware=gpu_4090 cv.folds=5 $(ARGS)

nli-train-3090: setup ## NLI with the settings for an RTX 3090
	@$(NLI) hardware=gpu_3090 cv.folds=5 $(ARGS)

nli-train-low-mem: setup ## NLI with the settings for a GPU of 8 to 12 GB
	@$(NLI) hardware=gpu_low_mem cv.folds=5 $(ARGS)

nli-train-cpu: setup ## NLI without a GPU
	@$(NLI) hardware=cpu cv.folds=5 $(ARGS)

gpt-train: setup ## Pretrain a small GPT; on Python's own source without DATA_DIR
	@$(BIN)/trainfit train gpt $(if $(DATA_DIR),data.data_dir='$(DATA_DIR)') $(if $(MODEL),model.name='$(MODEL)') $(ARGS)

hpo-demo: setup ## A study of the small model on synthetic data: 12 trials, 3 folds, 2 workers
	@$(BIN)/trainfit hpo nli --workers 2 $(ARGS)

lint: style types ## ruff, import layers, mypy --strict

test: style ## Lint, and every test that needs no GPU
	@$(MAKE) --no-print-directory -j 2 types tests

style: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

# Two processes of tests share two cores: a second thread in each would only wait.
THREADS ?= 1
tests: setup
	OMP_NUM_THREADS=$(THREADS) $(BIN)/pytest -n 2 --dist worksteal $(ARGS)

docs: setup ## The site of the documentation, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

# On a GPU machine without .venv: make test-gpu GPU_PYTHON=python3. A process of tests takes up to 11 GB
# of the GPU and keeps a core and more busy.
GPU_PYTHON ?= $(BIN)/python
GPU_WORKERS ?= $(shell mib=$$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1); \
	cores=$$(($$(nproc) * 3 / 4)); count=$$(($${mib:-0} / 11000)); \
	[ $$count -lt $$cores ] || count=$$cores; [ $$count -gt 1 ] && echo $$count || echo 1)
GPU_TESTS = PYTHONPATH=src:tests:$(PYTHONPATH) $(GPU_PYTHON) -m pytest -p gpu_record -o faulthandler_timeout=300
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup) ## The tests that need a GPU; their record is runs/test-gpu.json
	@rm -f runs/test-gpu.json; failed=0; \
	$(GPU_TESTS) -m 'gpu and not alone' -n $(GPU_WORKERS) $(ARGS) || failed=1; \
	$(GPU_TESTS) -m 'gpu and alone' $(ARGS) || failed=1; \
	exit $$failed

# All of them, or those that can end within MINUTES, in an order that changes with the commit.
MINUTES ?=
SEED ?= $(shell printf '%d' 0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 0))
soak: setup ## The long tests; MINUTES=20 runs a part that changes with the commit
	OMP_NUM_THREADS=$(THREADS) TRAINFIT_SOAK=1 TRAINFIT_SOAK_MINUTES=$(MINUTES) $(BIN)/pytest -m soak -n 2 --dist worksteal \
		-p randomly --randomly-seed=$(SEED) -o faulthandler_timeout=960 $(ARGS)

# A failure prints the SEED and CASE that repeat it. KIND=words: cases of one kind.
fuzz: setup ## Hostile commands, configurations and files: none may crash, hang or be taken
	$(BIN)/python tests/fuzz/fuzz.py --cases $(or $(N),3000) --seed $(SEED) \
		$(if $(CASE),--case $(CASE)) $(if $(KIND),--kind $(KIND)) $(ARGS)

compat: setup ## A smoke set at the lowest and the highest versions, in fresh environments
	$(BIN)/python benchmarks/compat.py $(ARGS)

clean: ## Remove .venv and caches
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
