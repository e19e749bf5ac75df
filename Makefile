# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SEEDS  ?= 1

.PHONY: demo test check slow screenshots docs site clean help

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' Makefile | sed 's/:.*##/\t/'

demo: $(VENV)/.demo  ## the main job on the embedded data set: five arms, a table, figures, report.html
	$(BIN)/safari run --preset demo --seeds $(SEEDS)

test: check  ## everything that must hold: style, types, tests, doctests, documented examples
	# One thread a worker: two workers with two threads each would only wait for each other.
	# The page is tested in Chromium (Debian: apt-get install chromium); without one, -rs says what was skipped.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -rs

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(VENV)/.dev  ## the tests that take minutes
	$(BIN)/pytest -m slow

screenshots: $(VENV)/.dev  ## take the page's pictures again, from a fresh run of the demo
	$(BIN)/python tools/make_screenshots.py

docs: $(VENV)/.dev  ## write again the pages that are made from the code
	$(BIN)/python tools/make_docs.py
	$(BIN)/python evidence/make_tables.py

site: $(VENV)/.dev  ## the documentation and an API reference as plain HTML, in site/
	$(BIN)/python tools/make_site.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: a range would fetch the CUDA build.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -r constraints.txt
	$(PIP) -e ".[plots,view]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e ".[dev]" -e ./evidence
	@touch $@

clean:  ## remove the virtual environment and caches, never your runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
