# A machine with only Python 3.11 and make is enough: the first target that needs .venv creates it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Override on the command line: make serve SERVE_PORT=9000, make demo DEMO_OPTIONS='--steps 60'
SERVE_PORT ?= 8000
DOCS_PORT ?= 8001
# What programs need, without what developers need: enough to try the project
TRY_READY := $(VENV)/.ready-to-try
TRY = $(if $(wildcard $(READY)),$(READY),$(TRY_READY))
FLOWER := .venv-flower
FLOWER_READY := $(FLOWER)/.ready
DEMO_LEDGER := ACCOUNTANT_DATABASE_URL=sqlite:///runs/mnist/ledger.db
PICTURES ?= docs/images
# Three test processes: tests start servers and databases, which are processes too, and often wait for them
PARALLEL := -n 3 --dist worksteal
# make test ORDER=7 runs tests in a random order, with this seed
ORDER_OPTIONS = $(if $(ORDER),-p randomly --randomly-seed=$(ORDER) --randomly-dont-reset-seed)
# The tests start hundreds of processes: without compiled modules on disk each start takes 2.5 times as long
unexport PYTHONDONTWRITEBYTECODE
EXTRAS := train,postgres,dev
FLOWER_EXTRAS := train,flower,postgres
LOCKED := train postgres dev images opacus lightning huggingface lora mlflow wandb
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
# Part of the package; moved there when it is whole, as an image may be built at the same time
SERVED_SITE := accountant_service/web/documentation

# An environment with what its constraints say: folder, constraints, packages
define make_environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Python 3.11 or newer is needed; name it with: make PYTHON=python3.11"; exit 1; }
@echo "1 of 3: making the environment $(1)"
@$(PYTHON) -m venv $(1)
@echo "2 of 3: installing uv, which installs the rest"
@$(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(2) uv
@echo "3 of 3: installing the packages"
@$(1)/bin/python scripts/install.py $(1) --constraint $(2) $(3)
@touch $@
endef

.PHONY: help install flower-environment lock demo demo-federated look data serve test test-slow test-flower \
	test-browser test-all test-nightly check site docs pictures drawings bench release man clean

# A line "##@" starts a group, a line "target:  ## text" is an entry of it.
help:  ## show this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Try it
demo: $(TRY)  ## train on MNIST within a budget of ε = 2 and check the certificate (minutes)
	$(BIN)/python scripts/demo.py $(DEMO_OPTIONS)

demo-federated: $(FLOWER_READY)  ## train at eight sites through Flower, each with a budget (3 minutes)
	$(FLOWER)/bin/python -m scripts.demo_federated $(DEMO_OPTIONS)

look: $(TRY)  ## serve the demo's budget, run and certificate on http://127.0.0.1:8000
	@test -e runs/mnist/ledger.db || { echo "Run the demo first: make demo"; exit 1; }
	@echo "A new key to sign in with, for a day: $$($(DEMO_LEDGER) $(BIN)/accountant keys create --scope admin --name look --expires-in-days 1)"
	$(DEMO_LEDGER) $(BIN)/accountant serve --port $(SERVE_PORT)

serve: $(TRY)  ## run the service on http://127.0.0.1:8000
	$(BIN)/accountant serve --port $(SERVE_PORT)

##@ Set up
install: $(READY)  ## create .venv with all dependencies

$(READY): pyproject.toml constraints.txt
	$(call make_environment,$(VENV),constraints.txt,--editable '.[$(EXTRAS)]')

$(TRY_READY): pyproject.toml constraints.txt
	$(call make_environment,$(VENV),constraints.txt,--editable '.[train]')

flower-environment: $(FLOWER_READY)  ## create .venv-flower, for Flower and its own dependencies

$(FLOWER_READY): pyproject.toml constraints-flower.txt overrides-flower.txt
	$(call make_environment,$(FLOWER),constraints-flower.txt,--override overrides-flower.txt \
		--editable '.[$(FLOWER_EXTRAS)]' 'flwr[simulation]' pytest pytest-timeout httpx2)

lock: $(READY)  ## write constraints.txt again: the versions of everything that an environment may hold
	UV_CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/uv pip compile pyproject.toml --quiet --no-annotate \
		$(addprefix --extra ,$(LOCKED)) $(LOCK_OPTIONS) --output-file constraints.txt

data: $(TRY)  ## download the datasets into data/ and check their hashes
	$(BIN)/accountant-train data --data-dir data

##@ Check a change
check: $(READY)  ## formatting, lint, types, import contracts; build the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory site

test: $(READY)  ## the first tier, before every push (three minutes)
	$(BIN)/python -m pytest $(PARALLEL) $(ORDER_OPTIONS) -m "not slow and not nightly and not browser"

test-slow: $(READY)  ## the second tier, without make test and the browser (twelve minutes)
	$(BIN)/python -m pytest $(PARALLEL) $(ORDER_OPTIONS) -m "slow and not nightly"

test-browser: $(READY)  ## the second tier's web pages in Chromium; screenshots in build/screenshots
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ORDER_OPTIONS) -m "browser and not nightly"

test-all: $(READY)  ## the first and the second tier
	$(BIN)/python -m pytest $(PARALLEL) $(ORDER_OPTIONS) -m "not nightly"

test-nightly: $(READY)  ## the third tier; random cases take the date as seed, or NIGHT=20261127 (hours; goes on if interrupted)
	$(BIN)/python -m pytest $(PARALLEL) -m nightly -rfEP --night-log=build/night.jsonl \
		$(if $(NIGHT),--night-seed=$(NIGHT))

test-flower: $(READY) $(FLOWER_READY)  ## Flower's messages, and eight sites that are killed (minutes)
	$(FLOWER)/bin/python -m pytest -W default tests/integration/test_flower.py
	$(BIN)/python -m pytest tests/e2e/test_federated_sites.py

bench: $(READY)  ## print the benchmark tables
	$(BIN)/python benchmarks/accounting.py $(BENCH_OPTIONS)
	$(BIN)/python benchmarks/http.py $(filter --quick,$(BENCH_OPTIONS))
	$(BIN)/python benchmarks/hostile_load.py $(filter --quick,$(BENCH_OPTIONS))

##@ Publish
release: $(READY)  ## build wheel, source archive, bill of materials, man pages, image and checksums in dist/
	$(BIN)/python -m scripts.release

man: $(READY)  ## write man pages of all commands into build/man
	$(BIN)/python -m scripts.man_pages build/man

##@ Write the documentation
site: $(READY)  ## build the documentation into the service, which serves it at /documentation
	$(SITE) build --strict --quiet
	rm -rf $(SERVED_SITE) && mv build/site $(SERVED_SITE)

docs: $(READY)  ## serve the documentation on http://127.0.0.1:8001; reloads on every change
	$(SITE) serve --dev-addr 127.0.0.1:$(DOCS_PORT)

drawings: $(READY)  ## draw the architecture, the concepts and the how-tos again
	$(BIN)/python -m scripts.draw_architecture
	$(BIN)/python -m scripts.draw_concepts
	$(BIN)/python -m scripts.draw_how_tos

pictures: $(READY)  ## take the README's screenshots again (needs Chromium)
	$(BIN)/python -m scripts.pictures $(PICTURES)

##@ Other
clean:  ## delete everything that make created, including data/ and runs/
	rm -f training_client/private_step/kernels/__pycache__/*.nb[ci]
	rm -rf $(SERVED_SITE) $(VENV) $(FLOWER) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build data runs
