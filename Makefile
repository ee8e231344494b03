# Every target does its own set-up in .venv. Needs Python 3.10 or later and a C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/ready
SOURCES := $(shell find csrc vmm_kv -type f -not -path '*/__pycache__/*' 2>/dev/null)

.PHONY: setup demo test lint bench clean
.DELETE_ON_ERROR:

setup: $(STAMP)

.venv/pip:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(STAMP): .venv/pip pyproject.toml constraints.txt CMakeLists.txt $(SOURCES)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -e '.[test,bench]'
	touch $@

demo: $(STAMP)
	$(BIN)/vmm-kv demo

# Editable: child processes of the tests start in this folder and must find the compiled part.
test: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/mapping.py

clean:
	rm -rf .venv build dist
