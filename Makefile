# Every target sets itself up from nothing: a virtual environment in .venv with the locked requirements.
#
#   PYTHON=python3.12   the interpreter for .venv (default: the first of python3.11, 3.12, 3.13, python3 that is >= 3.11)
#   ARGS="-k lease"     more arguments for the program behind `test`, `chaos`, `mutants`, `bench` and `run`
#   ENGINE=redis,sqlite PEERS=none|all|bullmq,huey RUNS=1 SCALE=0.05 FIGURES=drain,latency
#                       with `bench`: a part of it (default: every engine, its three best peers, three runs)
#   UPGRADE=1           with `lock`: take the newest versions instead of keeping the pinned ones

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
ARGS ?=
UPGRADE ?=
ENGINE ?=
PEERS ?=
RUNS ?=
SCALE ?=
FIGURES ?=
NAME ?= --help

VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
READY := $(VENV)/.ready
LOCK := requirements/dev.txt
# -qq: errors only
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# What the fault runs write, and the report that is made of it.
CHAOS := build/chaos

.PHONY: help run test chaos mutants check bench study lock clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(READY)  ## a live demo on SQLite: workers that crash, jobs that fail, none that gets lost
	@$(BIN)/holdfast demo $(ARGS)

test: $(READY)  ## run all tests, on private servers of their own
	@scripts/install_servers
	@$(BIN)/python scripts/run_tests $(ARGS)

chaos: $(READY)  ## fault runs on every engine and their report; ARGS="--cells F7 --runs 20" runs a part
	@scripts/install_servers
	@$(BIN)/python -m tests.chaos --out $(CHAOS) $(or $(ARGS),--runs 3 --kills 1000 --server-kills 100)
	@$(BIN)/python -m tests.chaos report $(CHAOS) > $(CHAOS)/report.md
	@echo "the report: $(CHAOS)/report.md"

mutants: $(READY)  ## mutation testing of lifecycle, leases and settlement
	@$(BIN)/python -m tests.mutation $(ARGS)

check: $(READY)  ## formatting, lint, types and the direction of imports
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python -m mypy --strict src tests
	@$(BIN)/lint-imports --no-logo

bench: $(READY)  ## measure every engine beside its peers: ENGINE=redis PEERS=bullmq,taskiq for a part
	@scripts/install_servers
	@PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks run $(if $(ENGINE),--engine $(ENGINE)) $(if $(PEERS),--peers $(PEERS)) \
		$(if $(RUNS),--runs $(RUNS)) $(if $(SCALE),--scale $(SCALE)) $(if $(FIGURES),--figures $(FIGURES)) $(ARGS)

study: $(READY)  ## run a single benchmark behind a decision record: NAME=redis-memory
	@PYTHONPATH="$(CURDIR)" $(BIN)/python -m benchmarks study $(NAME) $(ARGS)

lock: $(CREATED)  ## pin all development requirements again, with hashes (UPGRADE=1: newest versions)
	@$(BIN)/python -c 'import piptools' 2>/dev/null || $(PIP) install pip-tools
	@echo "pinning $(LOCK)"
	@CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/python -m piptools compile --quiet \
		--generate-hashes --allow-unsafe --strip-extras --newline lf \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
		$(if $(UPGRADE),--upgrade) --extra dev --output-file $(LOCK) pyproject.toml
	@if grep -nE '://|^ *-(-index|-extra|-find|-trusted|i |f )|file:/| @ ' $(LOCK); then \
		echo "$(LOCK): the lines above name an address and must not be committed" >&2; exit 1; fi

clean:  ## remove the environment, the caches and the builds
	@rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(CREATED):
	@scripts/create_venv $(VENV) $(PYTHON)
	@touch $@

$(READY): $(CREATED) pyproject.toml $(LOCK)
	@echo "installing $(LOCK) into $(VENV)"
	@$(PIP) install --require-hashes -r $(LOCK)
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
