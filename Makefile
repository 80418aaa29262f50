PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# With an accelerator the newest torch that pip finds is taken; without one, a pinned CPU wheel.
ACCELERATOR := $(shell nvidia-smi -L 2>/dev/null | head -n 1; ls /dev/kfd /dev/davinci0 2>/dev/null | head -n 1)
CONSTRAINTS := $(if $(ACCELERATOR),,-c constraints-cpu.txt)

# Tests wait for processes of their own more than they compute: two at a time.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: quickstart install test test-long lint docs clean

quickstart: $(VENV)/.installed
	$(BIN)/polyreme train examples/quickstart.toml

install: $(VENV)/.developed

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.developed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[dev]'
	touch $@

test: $(VENV)/.developed
	$(PYTEST) -m 'not long'

test-long: $(VENV)/.developed
	$(PYTEST) -m long

lint: $(VENV)/.developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.developed
	$(BIN)/python -m polyreme.spec.reference > docs/spec.md
	$(BIN)/python -m polyreme.api.algorithms docs/algorithms.md

clean:
	rm -rf $(VENV) build dist runs src/*.egg-info
