# One command per question: `make install`, `make test`, `make check`. See README.md.

VENV   ?= .venv
SHARED ?= ../shared
DEMO_ARGS ?=
# Extra arguments for pytest, e.g. PYTEST_ARGS="-n auto -k store".
PYTEST_ARGS ?=
# APT=no: never install redis-server, skip the tests that need it.
APT    ?= yes

PY     := $(VENV)/bin/python
LOCKS  := requirements/runtime.txt requirements/dev.txt
STAMP  := $(VENV)/.installed
# uv must never fetch an interpreter from the network.
export UV_PYTHON_DOWNLOADS = never

.DEFAULT_GOAL := help
.PHONY: conformance conformance-peers help install demo test check format lint types layers lock redis-server test-harness test-sglang bench soak sim-fuzz

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with the locked packages and Roost in editable form.

# The first interpreter that runs and is new enough; a pyenv shim may exist and yet not run.
$(STAMP): $(LOCKS) pyproject.toml
	@test -x $(PY) || { \
	  for p in python3 python3.13 python3.12 python3.11; do \
	    if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "$$p -> $(VENV)"; $$p -m venv $(VENV) || exit 1; break; \
	    fi; \
	  done; \
	  test -x $(PY) || { echo "Roost needs Python 3.11 or newer; none of python3, python3.13, python3.12, python3.11 is." >&2; exit 1; }; }
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# 130 is Ctrl-C: one of the two ways to leave it, and no error.
demo: install ## Watch Roost before simulated replicas, in a minute (DEMO_ARGS="--once --json FILE").
	@$(VENV)/bin/roost demo $(DEMO_ARGS) || { code=$$?; [ $$code = 130 ] || exit $$code; }

test: install redis-server ## Run the tests (on a fresh machine: install first).
	$(PY) -m pytest $(PYTEST_ARGS)

# Best effort: the tests that need a real redis-server say why they are skipped where there is none.
redis-server:
	@if command -v redis-server >/dev/null 2>&1; then :; \
	elif [ "$(APT)" = yes ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	  echo "installing redis-server for the tests"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get install -y -qq --no-install-recommends redis-server >/dev/null 2>&1 \
	    || { apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server; } >/dev/null 2>&1; } \
	  || echo "redis-server could not be installed: tests against it will be skipped"; \
	else echo "no redis-server: tests against it will be skipped"; fi

check: install ## Everything: format, lint, types, layers, tests.
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -m mypy --strict
	$(VENV)/bin/lint-imports
	$(MAKE) test

format: install ## Format and apply the safe fixes.
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

lint: install ## Format and lint, without changing anything.
	$(PY) -m ruff format --check
	$(PY) -m ruff check

types: install ## Types only.
	$(PY) -m mypy --strict

layers: install ## Layers only.
	$(VENV)/bin/lint-imports

test-harness: install ## Real coding-agent CLIs through Roost (needs ../shared/harness).
	@test -d $(SHARED)/harness || { echo "make test-harness: $(SHARED)/harness is not there; it brings the agent CLIs. Set SHARED=DIR if it lies elsewhere." >&2; exit 2; }
	ROOST_SHARED=$(abspath $(SHARED)) $(PY) -m pytest tests/harness -m harness $(PYTEST_ARGS)

test-sglang: install ## Real SGLang servers on the CPU behind Roost (needs ../shared/sglang-cpu).
	@test -d $(SHARED)/sglang-cpu || { echo "make test-sglang: $(SHARED)/sglang-cpu is not there; it brings SGLang for the CPU. Set SHARED=DIR if it lies elsewhere." >&2; exit 2; }
	ROOST_SHARED=$(abspath $(SHARED)) $(PY) -m pytest tests/sglang -m sglang $(PYTEST_ARGS)

conformance: install redis-server ## Rules for routers, tried on Roost (CONFORMANCE_ARGS="--only streams --json FILE").
	$(PY) -m tests.conformance $(CONFORMANCE_ARGS)

# Other routers, each in an environment of its own, in the versions whose configuration was read.
PEERS_DIR ?= $(HOME)/.cache/roost-peers
PEERS     := sglang-router==0.3.2 smg==1.13.0 vllm-router==0.1.17
conformance-peers: install redis-server ## The same for sglang-router, SMG and vllm-router beside it (from PyPI, into PEERS_DIR).
	@mkdir -p $(PEERS_DIR)
	@for spec in $(PEERS); do name=$${spec%%==*}; \
	  test -x $(PEERS_DIR)/$$name/bin/python || $(PY) -m venv $(PEERS_DIR)/$$name || exit 1; \
	  $(PEERS_DIR)/$$name/bin/python -m pip install --quiet --disable-pip-version-check $$spec || exit 1; \
	done
	@for name in roost sglang-router smg vllm-router; do \
	  PEERS_DIR=$(PEERS_DIR) $(PY) -m tests.conformance --adapter $$name --json $(PEERS_DIR)/$$name.json || [ $$? = 1 ] || exit 1; \
	done
	$(PY) -m tests.conformance --side-by-side $(foreach n,roost sglang-router smg vllm-router,$(PEERS_DIR)/$(n).json) > $(PEERS_DIR)/side-by-side.md
	@echo "$(PEERS_DIR)/side-by-side.md"

bench: install ## What placing a turn costs here: identify, decide, store round trips.
	$(PY) -m tests.bench.placement

# How long things go wrong. Seeds are drawn; SOAK_ARGS="--seed N" repeats one.
MINUTES ?= 30
soak: install ## Two routers, Redis and six simulated replicas under faults (MINUTES=30, SOAK_ARGS="--json FILE --plot FILE.png").
	$(PY) -m tests.soak --minutes $(MINUTES) $(SOAK_ARGS)

SECONDS ?= 600
sim-fuzz: install ## New seeds of the simulated fleet, on every core (SECONDS=600, SIM_ARGS="--replicas 50").
	$(VENV)/bin/roost simulate --fuzz $(SECONDS) $(SIM_ARGS)

# Locks carry hashes and no registry host, so that any mirror serves; uv is wanted on the PATH or in the venv.
UV := $(if $(wildcard $(VENV)/bin/uv),$(VENV)/bin/uv,uv)
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-emit-index-url --no-emit-find-links pyproject.toml
lock: ## Renew requirements/*.txt (LOCK_ARGS=--upgrade for newer versions).
	$(COMPILE) $(LOCK_ARGS) -o requirements/runtime.txt
	$(COMPILE) $(LOCK_ARGS) --extra dev -o requirements/dev.txt
	@! grep -nE '[a-z]+://|^-' $(LOCKS) || { echo "a lock names a host, a path or an option" >&2; exit 1; }
