# Everything works on a machine with only Python 3.11 and make; set-up happens when needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Others may be given, and options too: make demo DEMO_OPTIONS='--steps 60'
SERVE_PORT ?= 8000
DOCS_PORT ?= 8001
# A process for each processor, up to four: servers and databases of tests are processes too
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

.PHONY: help install demo look data test test-slow test-all test-browser test-nightly check docs serve bench clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s  %s\n", $$1, $$2}'

install: $(READY)  ## create .venv with everything

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name it with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[train,postgres,dev]'
	@touch $(READY)

demo: $(READY)  ## start the service, train on MNIST within ε = 2, stop the service
	$(BIN)/python scripts/demo.py $(DEMO_OPTIONS)

data: $(READY)  ## fetch the data sets into data/, each checked by its hash
	$(BIN)/accountant-train data --data-dir data

test: $(READY)  ## every test but the slow ones (minutes)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not nightly and not browser"

test-slow: $(READY)  ## the slow ones (half an hour)
	$(BIN)/python -m pytest $(PARALLEL) -m slow

test-browser: $(READY)  ## the pages in Chromium (skipped without one); leaves build/screenshots
	$(BIN)/python -m pytest -m browser

test-all: $(READY)  ## every test but the nightly ones
	$(BIN)/python -m pytest $(PARALLEL) -m "not nightly"

test-nightly: $(READY)  ## 10 000 random cases against references (up to an hour)
	$(BIN)/python -m pytest -m nightly -s

check: $(READY)  ## format, lint, types, import contracts, the documentation as build/site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(SITE) build --strict --quiet --site-dir build/site

docs: $(READY)  ## the documentation on http://127.0.0.1:8001, as it is written
	$(SITE) serve --dev-addr 127.0.0.1:$(DOCS_PORT)

serve: $(READY)  ## run the service on http://127.0.0.1:8000
	$(BIN)/accountant serve --port $(SERVE_PORT)

look: $(READY)  ## run the service on the ledger that the demonstration left
	@test -e runs/mnist/ledger.db || { echo "There is no demonstration yet: make demo"; exit 1; }
	ACCOUNTANT_DATABASE_URL=sqlite:///runs/mnist/ledger.db $(BIN)/accountant serve --port $(SERVE_PORT)

bench: $(READY)  ## print the benchmark tables
	$(BIN)/python benchmarks/accounting.py $(BENCH_OPTIONS)
	$(BIN)/python benchmarks/http.py
	$(BIN)/python benchmarks/responsive.py

clean:  ## remove what make made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build data runs
