# What a user and a developer run; `make help` lists it. Needs Python 3.11 or later with pip, and make.
# Variables: PYTHON (which interpreter makes the environment), VENV (where), RECIPE and ARGS (for `train`),
# TESTS and ARGS (for `test` and `soak`), JOBS (how many tests run at a time), ARGS (for `bench`).

PYTHON ?= python3
VENV ?= .venv
RECIPE ?= recipes/byte-gpt.toml
TESTS ?=
ARGS ?=
JOBS ?= 3
TORCH = 2.13.0
# Debian packages, each with a program of its name.
SYSTEM = chromium prometheus
# Programs of the engines that start jobs, and their Debian packages.
ENGINES = slurmctld slurmd srun munged mpirun
ENGINE_PACKAGES = slurmctld slurmd slurm-client munge openmpi-bin

BIN = $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help system engines venv train test soak bench check format docs site constraints clean

help: ## list the targets
	@echo "make TARGET [PYTHON=python3] [VENV=.venv]"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

system: ## install the Debian packages that some tests need, as root; no service is started
	@missing="$$(for tool in $(SYSTEM); do command -v $$tool >/dev/null || echo $$tool; done)"; \
	if test -n "$$missing"; then \
		test -e /usr/sbin/policy-rc.d || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d && remove=1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; code=$$?; \
		test -z "$$remove" || rm /usr/sbin/policy-rc.d; \
		exit $$code; \
	fi

engines: $(VENV)/.dev ## install Slurm, Open MPI and a validator for Kubernetes, for tests; as root on Debian
	@$(PIP_INSTALL) -e '.[engines]'
	@missing="$$(for tool in $(ENGINES); do PATH="$$PATH:/usr/sbin" command -v $$tool >/dev/null || echo $$tool; done)"; \
	if test -n "$$missing"; then \
		test -e /usr/sbin/policy-rc.d || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d && remove=1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(ENGINE_PACKAGES) >/dev/null; code=$$?; \
		test -z "$$remove" || rm /usr/sbin/policy-rc.d; \
		exit $$code; \
	fi

venv: $(VENV)/.core ## make .venv with what training needs

train: $(VENV)/.core ## train the byte-level GPT of recipes/byte-gpt.toml (RECIPE=, ARGS=)
	$(BIN)/paceline train $(RECIPE) $(ARGS)

test: $(VENV)/.dev ## run the CPU test suite (TESTS=, ARGS=); the capability report goes to build/
	@mkdir -p build
	@$(BIN)/python -m compileall -q src  # else, where Python keeps no bytecode, each of many processes compiles it
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15 --capability-report=build/capabilities.json $(TESTS) $(ARGS)

soak: $(VENV)/.soak ## run the long tests
	@$(BIN)/python -m compileall -q src  # else, where Python keeps no bytecode, each of many processes compiles it
	$(BIN)/python -m pytest --soak -m soak --durations=15 --timeout=3600 $(TESTS) $(ARGS)

bench: $(VENV)/.bench ## measure speed against other libraries
	$(BIN)/python -m benchmarks $(ARGS)

check: $(VENV)/.dev ## lint, format, types, import layers, spelling, ratchets, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/python tools/ratchets.py
	$(BIN)/python tools/capabilities.py --check
	$(BIN)/python tools/site.py --check

format: $(VENV)/.dev ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev ## write docs/capabilities.md and the pages of docs/reference
	$(BIN)/python tools/capabilities.py
	$(BIN)/python tools/metrics_page.py
	$(BIN)/python tools/reference_pages.py

site: $(VENV)/.docs ## build the documentation site in build/site; a dead link is an error
	$(BIN)/python tools/site.py

constraints: ## resolve the newest versions in a fresh environment and write constraints.txt
	$(PYTHON) tools/constraints.py --torch $(TORCH)

clean: ## remove build products and caches; .venv and runs stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say what an environment holds. Pip runs again only if the project file or the pins changed.

$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Paceline needs Python 3.11 or later; name one: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing Paceline and what training needs into $(VENV)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing what tests and checks need into $(VENV)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.soak: $(VENV)/.dev
	@echo "installing what the walk of a first day needs into $(VENV)"
	@$(PIP_INSTALL) -e '.[walk]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	@echo "installing what the documentation site needs into $(VENV)"
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "installing what the benchmarks compare with into $(VENV)"
	@$(PIP_INSTALL) -e '.[bench]'
	@touch $@
