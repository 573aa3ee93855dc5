# `make demo` and `make test` need nothing but Python 3.11 or newer; everything is installed into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := constraints/tested.txt
TORCH := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
MEGATRON := $(shell sed -n 's/^megatron-core==//p' $(CONSTRAINTS))
ARGS ?=

# Several ranks share the cores, so each runs one thread.
test test-all conformance bench: export OMP_NUM_THREADS := 1

.PHONY: help venv demo test test-all conformance lint types format bench clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | awk -F'|' '{ printf "%-20s%s\n", $$1, $$2 }'
	@echo "Arguments: make demo ARGS='--steps 10 --plot demo.png', make test ARGS='-k clip'"

venv: $(STAMP)  ## Make .venv with the pinned versions (again when pyproject.toml or constraints change)

# On Linux the plain name may be the CUDA build of several GB, so the CPU build is tried first, by its local version.
# megatron-core is used by one test, of RankGenerator, and its own dependencies are not needed for that.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@python=""; for name in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	  if "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; then python="$$name"; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "make: found no Python 3.11 to 3.14 on PATH (tried python3, python3.11 to python3.14)" >&2; exit 1; fi; \
	if [ ! -x $(BIN)/python ]; then echo "==> making $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV); fi
	@if [ "$$(uname -s)" = Linux ]; then want="torch==$(TORCH)+cpu"; else want="torch==$(TORCH)"; fi; \
	echo "==> installing $$want (the CPU build, about 200 MB)"; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check "$$want" 2>/dev/null \
	  || $(BIN)/python -m pip install -qq --disable-pip-version-check "torch==$(TORCH)"
	@echo "==> installing ep-hooks (editable) and the versions in $(CONSTRAINTS)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[accelerate,transformers,peft,demo,dev]'
	@echo "==> installing megatron-core $(MEGATRON) without its dependencies (one test uses it)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --only-binary :all: 'megatron-core==$(MEGATRON)' \
	  || echo "    no wheel for this platform: that test will be skipped"
	@touch $@

demo: $(STAMP)  ## Train a small MoE on 4 CPU ranks, stock and with ep_hooks, and show both norms
	@echo "==> ep-hooks demo $(ARGS)"
	@$(BIN)/ep-hooks demo $(ARGS)

test: $(STAMP)  ## Run the tests (without the slow ones) and the conformance cases
	@echo "==> pytest"
	@$(BIN)/python -m pytest tests -m "not slow" $(ARGS)
	@$(MAKE) --no-print-directory conformance

test-all: $(STAMP)  ## Run all tests and the conformance cases
	@echo "==> pytest, slow tests too"
	@$(BIN)/python -m pytest tests $(ARGS)
	@$(MAKE) --no-print-directory conformance

conformance: $(STAMP)  ## Run only the conformance cases
	@echo "==> conformance cases"
	@$(BIN)/python tests/conformance/run_cases.py tests/conformance/more_cases.json
	@$(BIN)/python tests/conformance/run_cases.py tests/conformance/cases.json

lint: $(STAMP) types  ## Check style, format and types
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# mypy knows no package-dir, so it is shown the tree as it is installed: integrations inside ep_hooks.
types: $(STAMP)  ## Check types (mypy --strict)
	@echo "==> mypy --strict"
	@rm -rf build/types && mkdir -p build/types/ep_hooks
	@ln -s $(CURDIR)/ep_hooks/* build/types/ep_hooks/ && ln -s $(CURDIR)/integrations build/types/ep_hooks/integrations
	@cd build/types && $(CURDIR)/$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p ep_hooks

format: $(STAMP)  ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP)  ## Run the benchmarks
	@for file in benchmarks/*.py; do echo "==> $$file"; $(BIN)/python "$$file" $(ARGS); done

clean:  ## Remove .venv, caches and build output
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
