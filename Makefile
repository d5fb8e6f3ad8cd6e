# make demo | test | check | wheel-check | docs: each makes .venv, installs what is missing, runs. `make help` lists
# them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
WORKERS ?= auto

# Where a GPU and a torch >= 2.11 are there already, the venv sees that torch instead of a new one.
define HAS_TORCH
import sys
try:
    import torch
except ImportError:
    sys.exit(1)
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(0 if version >= (2, 11) and torch.cuda.is_available() else 1)
endef
export HAS_TORCH

.DEFAULT_GOAL := help
.PHONY: help demo test check wheel-check docs install clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/'

demo: $(STAMP)  ## train a CLIP on handwritten digits on four ranks (about two minutes)
	$(BIN)/gpp demo $(ARGS)

test: $(STAMP)  ## run the tests, one worker a core, e.g. make test WORKERS=0 ARGS="tests/plan -x"
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

check: $(STAMP)  ## lint, formatting, types, import rules, documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --durations=0 tests/test_imports.py
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

wheel-check: $(STAMP)  ## build sdist and wheel, install the wheel elsewhere, and train and plan with it
	$(BIN)/python .ci/wheel.py

docs: $(STAMP)  ## write the generated pages anew and build all of them into build/site
	$(BIN)/python .ci/docs.py
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site

install: $(STAMP)  ## only make .venv and install

$(STAMP): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gpp_plugin needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12"; exit 1; }
	@if $(PYTHON) -c "$$HAS_TORCH" 2>/dev/null; then \
	  echo "using the torch that $(PYTHON) has"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q -c constraints.txt $(TORCH); \
	fi
	$(BIN)/pip install -q -c constraints.txt setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/pip install -q --no-build-isolation -c constraints.txt -e ".[hf,megatron,demo,report,test,dev]"
	@touch $(STAMP)

clean:  ## remove .venv and what the tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
