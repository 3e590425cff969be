# The two commands: `make serve` and `make test`. Everything else: `make help`.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# a contract may not break what stood before: main, or on main itself, before its last change
PROTO_BASE ?= $(shell git log -n 1 --skip 1 --format=%H -- protos/seamline)
export SEAMLINE_CACHE_DIR ?= $(CURDIR)/.cache
export PATH := $(CURDIR)/$(BIN):$(PATH)
PROTOS := $(sort $(wildcard protos/seamline/*/v1/*.proto))
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --mypy_out=quiet:$(1) \
	--grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS:protos/%=%)

.DEFAULT_GOAL := help
.PHONY: help setup serve test check fmt proto proto-check bench

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Seamline needs Python 3.11 or later; set PYTHON=..." >&2; exit 1; }
	@echo "Creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "The venv module is missing; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Seamline (a few minutes, once) ..."
	@$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[all]' | \
		{ grep -E '^ *(Downloading|Installing|Successfully)' || true; } | cut -c1-100
	@$(BIN)/python -c 'import torch, grpc, fastapi'
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "Installing the development tools ..."
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

setup: $(VENV)/.dev ## Create the virtual environment, install, fetch the default model
	@$(BIN)/seamline fetch-model

serve: $(VENV)/.serve ## Run the whole stack on 127.0.0.1 (PORT=8000, ARGS="--max-model-len 4096")
	@exec $(BIN)/seamline serve --port $(PORT) $(ARGS)

test: setup ## Run the tests (ARGS="-k name")
	@$(BIN)/pytest $(ARGS)

check: $(VENV)/.dev proto-check ## Lint, types, import rules, contracts
	$(BIN)/buf lint
	@if [ -n "$(PROTO_BASE)" ]; then echo "buf breaking --against $(PROTO_BASE)"; \
		$(BIN)/buf breaking --against '.git#ref=$(PROTO_BASE)'; fi
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

fmt: $(VENV)/.dev ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/buf format -w

proto: $(VENV)/.dev ## Regenerate the code of the contracts
	@rm -rf protos/gen && mkdir -p protos/gen
	@cd . && $(call PROTOC,protos/gen)

proto-check: $(VENV)/.dev ## Fail when the generated code is not what the contracts say
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && $(call PROTOC,$$dir) && \
		diff -r -x __pycache__ "$$dir" protos/gen >&2 || { echo "protos/gen is stale: run make proto" >&2; exit 1; }

bench: $(VENV)/.dev ## Served benchmark and the seam's microbenchmark
	@$(BIN)/python -m bench.seam
	@$(BIN)/python -m bench.served $(ARGS)
