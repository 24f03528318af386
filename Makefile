# Everything that a newcomer, a developer or CI runs. `make help` lists it.
# The environment is built from requirements.lock; its stamp is the lock's checksum, so a changed
# lock is installed before the next target runs and an unchanged one costs nothing.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
LOCK := $(shell cat requirements.lock pyproject.toml | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(LOCK)

DATA ?= data
PORT ?= 8400
JOBS ?= 2

.PHONY: help venv demo patching up test lint format parity parity-full fuzz mutants lock clean

help:  ## list the targets
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

venv: $(STAMP)  ## build .venv from requirements.lock

$(STAMP): requirements.lock pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing requirements.lock into $(VENV)"
	@$(PY) -m pip install --quiet --no-deps --disable-pip-version-check -r requirements.lock
	@PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check -e .
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP)  ## the sentiment study, end to end; PROMPTS=file takes other prompts
	@$(PY) -m examples.sentiment --out demo $(if $(PROMPTS),--prompts $(PROMPTS))

patching: $(STAMP)  ## activation patching in two Jobs: a heat map of Layer x position
	@$(PY) -m examples.patching $(ARGS)

up: $(STAMP)  ## run the whole service on this machine; DATA=folder PORT=number
	@$(PY) -m tiller up --data-dir $(DATA) --port $(PORT)

test: $(STAMP)  ## the whole test suite, in JOBS processes; ARGS="-k lease" passes arguments to pytest
	@$(PY) -m pytest -n $(JOBS) --no-loadscope-reorder $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: $(STAMP)  ## let ruff repair and format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

parity: $(STAMP)  ## each op, site, form, family and condition against Hugging Face (long)
	@TILLER_PARITY=full $(PY) -m pytest tests/parity $(ARGS)

parity-full: $(STAMP)  ## the same, with 5,000 random requests instead of 200
	@TILLER_PARITY=full TILLER_PARITY_DRAWS=5000 $(PY) -m pytest tests/parity $(ARGS)

fuzz: $(STAMP)  ## schemathesis over the whole API, 500 examples an operation, a new seed
	@TILLER_SCHEMATHESIS_EXAMPLES=500 $(PY) -m pytest -s tests/openapi_fuzz $(ARGS)

mutants: $(STAMP)  ## break one small thing after the other in a copy; a test must see each
	@$(PY) -m tests.mutants.run $(ARGS)

bench-%: $(STAMP)  ## run bench/%.py and write its figures to bench/results
	@$(PY) -m bench.$*

lock: $(STAMP)  ## write the installed versions into requirements.lock
	@sed -n '/^#/p' requirements.lock > requirements.lock.new
	@$(PY) -m pip freeze --all --exclude-editable --exclude pip --exclude wheel --exclude torchvision \
		--exclude torchaudio --exclude torchcodec | sed 's/^\(torch==[0-9.]*\)+cpu$$/\1/' \
		>> requirements.lock.new
	@mv requirements.lock.new requirements.lock
	@$(PY) -m tests.containers.locks  # the images' own

clean:  ## remove caches and the demo's output; .venv and data stay
	@rm -rf demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find app bench examples tests tiller worker -name __pycache__ -prune -exec rm -rf {} +
