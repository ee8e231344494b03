# Every target does its own set-up in .venv. Needs Python 3.10 or later and a C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/ready
SOURCES := $(shell find csrc vmm_kv -type f -not -path '*/__pycache__/*' 2>/dev/null)

.PHONY: setup demo test test-bindings lint bench clean
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

# The oldest bindings that are supported, each in an environment of its own under .venv-bindings (CI has the newest).
test-bindings: test-bindings-cuda test-bindings-hip

test-bindings-cuda: OLD_BINDING := cuda-python>=12.6,<13
test-bindings-hip: OLD_BINDING := hip-python>=7.2,<7.3
test-bindings-%:
	$(PYTHON) -m venv .venv-bindings/$*
	.venv-bindings/$*/bin/python -m pip install --quiet --constraint constraints.txt . pytest pytest-timeout '$(OLD_BINDING)'
	.venv-bindings/$*/bin/pytest -p no:cacheprovider -k $* tests/testing/test_bindings_smoke.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Takes minutes, with one ladder on each of two cores. Writes benchmarks/results/startup_host.json, .md and .png.
bench: $(STAMP)
	$(BIN)/python benchmarks/mapping.py
	$(BIN)/python benchmarks/startup.py --jobs 2 --pairs 7 --output benchmarks/results

clean:
	rm -rf .venv .venv-bindings build dist
