# Two commands do all the set-up: `make lab` and `make test`. `make help` lists the rest.
# They need a Python 3.11 to 3.13 and touch nothing outside this folder.

VENV ?= .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check --no-input

# The first Python in the supported range; `make PYTHON=/path/to/python lab` takes another.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c '$(SUPPORTED)' >/dev/null 2>&1; then echo $$p; break; fi; done)

# What an installation is made from. Source files are not: it is editable.
INPUTS := pyproject.toml constraints.txt $(wildcard extensions/jupyter-config/*.json) \
  $(wildcard extensions/labextensions/*/*.json extensions/labextensions/*/static/*) \
  $(wildcard extensions/labextensions/*/schemas/*/*)

# Processes of tests; those that look at time run while the others wait.  A third of the time
# a test waits for processes that it has started: one more than two cores keeps these busy.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help lab demo test lint types bench doctor constraints clean compiled

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Variables: PYTHON (interpreter), VENV (environment), ARGS (for pytest or the lab),'
	@echo '             WORKERS (processes of tests; 0: this one)'

lab: $(VENV)/.notebook compiled  ## install, then start JupyterLab with the quickstart open
	@$(BIN)/python -m pathways_lab lab $(ARGS)

demo: $(VENV)/.notebook compiled  ## run the quickstart headless and leave the executed notebook
	@$(BIN)/python -m pathways_lab demo $(ARGS)

test: $(VENV)/.dev compiled  ## run all tests (ARGS="-m 'not cluster and not browser'" for the pure ones)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev  ## style of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## strict type check
	$(BIN)/mypy

bench: $(VENV)/.dev compiled  ## all benchmarks in their short form (ARGS="--peers-python PATH" for the peers)
	@$(BIN)/python -m benchmarks $(ARGS)

doctor: $(VENV)/.notebook  ## check this machine and say what to do
	@$(BIN)/python -m pathways_lab doctor

constraints:  ## rewrite constraints.txt (needs PYTHON311 and PYTHON313)
	$(PYTHON311) tools/constraints.py $(PYTHON311) $(PYTHON313) > constraints.new
	mv constraints.new constraints.txt

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A lab starts many processes, and some machines are told to write no bytecode at first use:
# each process would compile what it imports.
compiled: | $(VENV)/.created
	@$(BIN)/python -m compileall -q -j 0 pathways_lab >/dev/null 2>&1 || true

$(VENV)/.created:
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 to 3.13 found. Install one, or name it:' \
		'make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)'; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo '$(PYTHON) is not a Python 3.11 to 3.13.'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Packages are compiled by all cores at once instead of by pip one after another.
define install
	$(PIP) install --no-compile -c constraints.txt -e '.[$(1)]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
endef

$(VENV)/.notebook: $(INPUTS) | $(VENV)/.created
	$(call install,notebook)
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(VENV)/.created
	$(call install,dev)
	@touch $(VENV)/.notebook $@
