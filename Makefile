PYTHON ?=
CUDA ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := python -m pip install -qq --disable-pip-version-check
PYTEST := python -m pytest -n $(JOBS) --dist worksteal
FIND_PYTHON := PYTHON='$(PYTHON)' sh tools/find-python.sh
EXTRA := $(if $(CUDA),-cuda$(CUDA))

ifneq ($(filter-out 12 13,$(CUDA)),)
$(error CUDA=$(CUDA) must be 12 or 13, or left out for the CPU)
endif

# The JAX releases that need Python 3.12, by the suffix of their environment's name.
JAX_jax012 := 0.12.*
JAX_jax0112 := 0.11.2
PY312 := jax012 jax0112

# A comma in a call would part its arguments.
AOT := '.[test,aot]'
READBACK := '.[test,readback]'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-py312 $(PY312:%=test-py312-%) test-aot test-readback lint format clean distclean

help: ## show this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile
	@echo
	@echo 'CUDA=12 or CUDA=13   make demo computes on an NVIDIA GPU'
	@echo 'PYTHON=/path/python  the interpreter new environments are made with (>= 3.11; default: the first found)'
	@echo 'JOBS=N               processes that share the tests (default 2)'

demo: $(VENV)/.installed$(EXTRA) ## compare recipes on a tiny trained MoE; writes demo-results/
	$(BIN)/jmoe compare tests/data/tiny-moe/bf16 --text tests/data/heldout.bin --out demo-results

test: lint ## lint, type checks, import contracts and all CPU tests
	$(BIN)/$(PYTEST)

test-py312: ## the CPU tests on Python >= 3.12 with the newer JAX releases
	@if python=$$($(FIND_PYTHON) 3.12 2>/dev/null); then \
	    $(MAKE) --no-print-directory PYTHON="$$python" $(PY312:%=test-py312-%); \
	else \
	    echo 'test-py312: skipped, no Python >= 3.12 was found (PYTHON=/path/to/python names one)'; \
	fi

$(PY312:%=test-py312-%): test-py312-%: .venv-py312-%/.installed
	.venv-py312-$*/bin/$(PYTEST)

test-aot: .venv-aot/.installed ## compile the kernels for GPUs that are not here
	.venv-aot/bin/$(PYTEST) -m aot

test-readback: .venv-readback/.installed ## read written checkpoints with compressed-tensors and transformers
	.venv-readback/bin/$(PYTEST) tests/readback

lint: $(VENV)/.installed-test ## ruff, mypy and import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-test ## let ruff format the code and mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove caches, builds and the demo's results
	rm -rf demo-results build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf $(VENV) .venv-aot .venv-readback $(PY312:%=.venv-py312-%)

# $(call make_venv,DIRECTORY,LEAST VERSION): a half-made environment would pass for a whole one, so it is removed.
define make_venv
@python=$$($(FIND_PYTHON) $(2)) || exit 1; \
echo "making $(1) with $$python"; \
"$$python" -m venv $(1) || { rm -rf $(1); exit 1; }
endef

# $(call install,DIRECTORY,REQUIREMENTS): the stamp is this rule's target.
define install
@echo "installing $(2) into $(1); the first time takes minutes"
@$(1)/bin/$(PIP_INSTALL) -e $(2)
@touch $@
endef

$(VENV)/pyvenv.cfg:
	$(call make_venv,$(VENV),3.11)

$(VENV)/.installed: pyproject.toml $(VENV)/pyvenv.cfg
	$(call install,$(VENV),.)

$(VENV)/.installed-%: pyproject.toml $(VENV)/pyvenv.cfg
	$(call install,$(VENV),'.[$*]')

.venv-aot/pyvenv.cfg:
	$(call make_venv,.venv-aot,3.11)

.venv-aot/.installed: pyproject.toml .venv-aot/pyvenv.cfg
	$(call install,.venv-aot,$(AOT))

.venv-readback/pyvenv.cfg:
	$(call make_venv,.venv-readback,3.11)

.venv-readback/.installed: pyproject.toml .venv-readback/pyvenv.cfg
	$(call install,.venv-readback,$(READBACK))

$(PY312:%=.venv-py312-%/pyvenv.cfg): .venv-py312-%/pyvenv.cfg:
	$(call make_venv,.venv-py312-$*,3.12)

$(PY312:%=.venv-py312-%/.installed): .venv-py312-%/.installed: pyproject.toml .venv-py312-%/pyvenv.cfg
	$(call install,.venv-py312-$*,'.[test]' 'jax==$(JAX_$*)')
