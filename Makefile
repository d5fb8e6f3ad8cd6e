# make demo | test | test-all | test-gpu | soak | check | wheel-check | docs: each makes .venv, installs what is missing, runs.
# `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
WORKERS ?= auto
# A folder of wheels, for machines that reach no package index: installed from it alone, whatever versions there are,
# without the tools of `make check`.
WHEELS ?=
EXTRAS := hf,megatron,demo,report,test
ifeq ($(WHEELS),)
PIP_FLAGS := -q -c constraints.txt
EXTRAS := $(EXTRAS),dev
else
PIP_FLAGS := -q --no-index --find-links $(abspath $(WHEELS))
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all claims mutants test-gpu soak check wheel-check docs install clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/'

demo: $(STAMP)  ## train a CLIP on handwritten digits on four ranks (about two minutes)
	$(BIN)/gpp demo $(ARGS)

PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

test: $(STAMP)  ## run the tests, one worker a core, e.g. make test WORKERS=0 ARGS="tests/plan -x"
	$(PYTEST) $(ARGS)

test-all: $(STAMP)  ## with those that tests/tiers.toml leaves out of `make test`: an hour or more, for nights and releases
	$(PYTEST) --tier all $(ARGS)

test-gpu: $(STAMP)  ## on CUDA devices: make test-gpu WHEELS=dir ARGS="-k swap"; ARGS=--quick: nine minutes; ARGS="--device cpu" is a dry run
	$(BIN)/python -m tests.gpu $(ARGS)

soak: $(STAMP)  ## what is too long for any tests: make soak ARGS="fuzz --count 20000"
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m tests.soak $(ARGS)

claims: $(STAMP)  ## run the cheap commands behind the numbers of README and docs again; ARGS="--only zoo", "--list", "--all"
	$(BIN)/python .ci/claims.py $(ARGS)

mutants: $(STAMP)  ## plant faults one at a time and count which of them the tests see; ARGS="--layer costs", "--only kfkb"
	$(BIN)/python -m tests.mutants $(ARGS)

check: $(STAMP)  ## lint, formatting, types, import rules, documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --tier all --durations=0 tests/test_imports.py tests/test_counts.py
	$(BIN)/python .ci/docs.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

wheel-check: $(STAMP)  ## build, install elsewhere, train and plan; PYTHONS="python3.12 python3.13" too; ARGS=--quick is short
	WHEEL_PYTHONS="$(or $(PYTHONS),$(WHEEL_PYTHONS))" $(BIN)/python .ci/wheel.py $(ARGS)

docs: $(STAMP)  ## write the generated pages anew and build all of them into build/site
	$(BIN)/python .ci/docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

install: $(STAMP)  ## only make .venv and install

$(STAMP): setup.py constraints.txt .ci/make_venv.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gpp_plugin needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12"; exit 1; }
	@# Where a GPU and a torch >= 2.11 are there already, .venv sees that torch instead of a new one.
	@$(PYTHON) .ci/make_venv.py $(VENV)
	@ls $(VENV)/lib/python*/site-packages/packages_of_the_caller.pth >/dev/null 2>&1 \
	  || $(BIN)/pip install $(PIP_FLAGS) $(TORCH)
	@for name in $(if $(WHEELS),setuptools wheel); do ls $(abspath $(WHEELS))/$$name-*.whl >/dev/null 2>&1 \
	  || { echo "WHEELS=$(WHEELS) has no $$name-*.whl, which installs this package; elsewhere: pip download --no-deps $$name"; exit 1; }; done
	$(BIN)/pip install $(PIP_FLAGS) setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/pip install $(PIP_FLAGS) --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $(STAMP)

clean:  ## remove .venv and what the tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
