# make demo: chat with the demo model. make test: every quick test. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin
DEMO := build/models/demo
export QUESTION ?= Why is the sky blue? Answer in two sentences.

.PHONY: help setup model demo test test-long lint bench bench-gateway bench-kernels kernels-report clean
.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1	\2/' | expand -t 24

setup: .venv/.installed  ## Make .venv with this project and its pinned dependencies

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

model: setup  ## Build the demo model in build/models/demo (1.4 GB; returns at once when it is there)
	$(BIN)/moe-runtime demo-model --out $(DEMO)

demo: model  ## Start the demo cluster, ask it a question, serve until Ctrl-C
	$(BIN)/moe-runtime launch configs/demo.yaml --greet "$$QUESTION"

# Tests start several processes at once: one compute thread each, or they fight for the cores.
test: model  ## Run the quick tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow'

test-long: model  ## Run every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: setup  ## ruff, mypy and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: model  ## Compare split, unsplit and transformers; writes build/bench/
	$(BIN)/python benchmarks/bench_serving.py

bench-gateway: model  ## What 64 streams through HTTP cost the engine; writes build/bench/
	$(BIN)/python benchmarks/bench_gateway.py

bench-kernels: setup  ## Expert and linear kernels against the machine's bandwidth and peaks; writes build/bench/
	$(BIN)/python benchmarks/bench_kernels.py

kernels-report: setup  ## Compile every Triton kernel for four GPUs, without one; writes build/bench/
	$(BIN)/python benchmarks/kernels_report.py

clean:  ## Remove what was built, the model too; .venv stays
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
