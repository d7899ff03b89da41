# embedlm: everything from a clean checkout. `make help` lists the targets.
#
#   make run   VENV=/path/to/env    use an environment you already have; its torch is left alone
#   make test  VENV_FLAGS=--system-site-packages     a new .venv that sees the system's torch
#   make test  PYTHON=python3.12 PIP_FLAGS="--extra-index-url ..."

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
PIP_FLAGS ?=
PROMPT ?= Explain in two sentences why the sky is blue.
PYTEST_FLAGS ?= -q
# Processes that test at the same time. Each takes up to 1.5 GB, and engines have threads of their own.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n < 4 ? n : 4)))

PY := $(VENV)/bin/python
INTEROP := build/interop
WHEEL_TOOLS := build/wheel-tools
DIST ?= dist
LEVELS ?= all
DOCS_TOOLS := build/docs-tools
SITE ?= build/site
CONSTRAINTS := $(VENV)/embedlm-constraints.txt
REQUIREMENTS := $(VENV)/embedlm-requirements.txt
PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS)
NATIVE := CMakeLists.txt $(shell find kernels/cpu -name '*.cpp' -o -name '*.c' -o -name '*.h' -o -name '*.hpp' -o -name '*.inl' 2>/dev/null)
BUILT_FROM := pyproject.toml $(wildcard $(NATIVE))
# `make run` needs one level of the native module, that of this CPU: a third of the compiler's work. An environment
# that has all of them keeps them.
READY = $(VENV)/.embedlm-$(if $(wildcard $(VENV)/.embedlm-installed),installed,here)

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-arm test-windows aot aot-cache gpu test-interop build wheels release docs release-notes native packages models browser demo-model lint sanitize fuzz frontier bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(READY) demo-model ## set up for this machine, fetch the demo model and stream an answer (PROMPT="...")
	$(PY) -m sdk run --stats --prompt "$(PROMPT)"

RUN_TESTS = $(PY) .ci/tests.py --workers $(WORKERS) $(PYTEST_FLAGS)

test: $(VENV)/.embedlm-dev models browser ## set up, build and run the tests but for the slow ones, which it counts
	@$(RUN_TESTS) -m "not slow"

test-all: $(VENV)/.embedlm-dev models browser ## the same with the slow tests
	@$(RUN_TESTS)

test-arm: | $(PY) ## the native module for 64-bit ARM in an emulator, with an ARM Python (40 minutes; Debian, Ubuntu)
	.ci/arm.sh $(abspath $(PY))

test-windows: $(WHEEL_TOOLS)/.embedlm-tools $(VENV)/.embedlm-installed demo-model ## the wheel for Windows under Wine (20 minutes of CPU time; apt install wine64)
	.ci/windows.sh $(abspath $(WHEEL_TOOLS)/bin/python) "$$($(PY) -c 'import sdk; print(sdk.demo_model())')" $(abspath $(PY))

aot: $(VENV)/.embedlm-dev ## compile every new or changed GPU kernel for every card, without one
	$(PY) tests/gpu/aot/sweep.py $(if $(ACCEPT),--accept)

aot-%: $(VENV)/.embedlm-dev # the same for one of sm_75 sm_80 sm_89 sm_90 sm_100 sm_120 gfx90a gfx942
	$(PY) tests/gpu/aot/sweep.py $* $(if $(ACCEPT),--accept)

aot-cache: $(VENV)/.embedlm-dev ## the kernels of tests/card and of the bench, compiled for a card elsewhere
	$(PY) tests/gpu/aot/cache.py make $(if $(LIBRARY),--library $(LIBRARY))

gpu: ## on a machine with a GPU: PARTS="A B C", or parts of them; in GPU_SECONDS (780); results in $$OUT (build/gpu)
	$(PYTHON) .ci/gpu.py $(PARTS)

test-interop: $(VENV)/.embedlm-dev ## exchange files with auto-gptq, autoawq, gptqmodel, llm-compressor, llama.cpp; clients of the server
	$(PY) tests/interop/environments.py $(INTEROP) --pip-flags="$(PIP_FLAGS)"
	$(PY) -m pytest $(PYTEST_FLAGS) --timeout 1800 tests/interop

build: $(VENV)/.embedlm-installed ## install this checkout (editable) with its native module

wheels: $(WHEEL_TOOLS)/.embedlm-tools ## build dist/: source archive, wheels of all systems, bills of materials, hashes (ONLY="win_amd64 ...")
	@echo "embedlm: compiling the native module and packing (2 to 4 minutes of CPU time for each architecture)"
	@$(WHEEL_TOOLS)/bin/python .ci/wheels.py $(DIST) $(if $(ONLY),--only $(ONLY))

release: $(WHEEL_TOOLS)/.embedlm-tools ## the same for the version that this commit's tag names, with its notes; refuses changes that are not committed
	@$(WHEEL_TOOLS)/bin/python .ci/release.py $(DIST)

docs: $(DOCS_TOOLS)/.embedlm-tools ## build the documentation site in build/site; a dead link or anchor is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS_TOOLS)/bin/python -m mkdocs build --quiet --strict --clean --site-dir $(abspath $(SITE))
	@echo "embedlm: open $(SITE)/index.html, or serve it: $(DOCS_TOOLS)/bin/python -m mkdocs serve"

release-notes: ## print the notes of VERSION=0.1.0 (or Unreleased) from CHANGELOG.md
	@$(PYTHON) .ci/release_notes.py "$(VERSION)"

models: build ## fetch the three real models the tests use into the user's cache
	$(PY) -m sdk fetch-demo --gemma --minilm

browser: ## install Chromium and Xvfb for tests of pages and windows, as root on Debian; elsewhere say what to do
	@.ci/browser.sh

demo-model: $(READY)
	@$(PY) -m sdk fetch-demo

lint: $(VENV)/.embedlm-dev ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -p sdk
	$(PY) -m mypy --platform win32 -m sdk.kernels.system
	$(PY) -m mypy --platform darwin -m sdk.kernels.system

sanitize: $(VENV)/.embedlm-dev ## the kernels under valgrind and the address, undefined-behaviour and thread sanitizers
	.ci/sanitize.sh $(abspath $(PY))

fuzz: $(VENV)/.embedlm-dev ## damaged model files for ten minutes
	$(PY) tests/loaders/fuzz.py --seconds 600 --seed $$RANDOM

frontier: $(VENV)/.embedlm-dev models ## what every weight format and KV type loses: baselines, tables and plots (an hour)
	$(PY) -m tests.accuracy.frontier

bench: build demo-model ## tokens per second for 1 and 8 streams on the demo model
	$(PY) -m sdk bench --streams 1,8

clean: ## remove everything this Makefile made, except the models in the user's cache
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f $(VENV)/.embedlm-dev $(VENV)/.embedlm-installed $(VENV)/.embedlm-here $(CONSTRAINTS) $(REQUIREMENTS)
	find sdk quant kernels models loaders tests -name __pycache__ -prune -exec rm -rf {} +

# --- stamps: each step runs again only when what it was made from has changed ---

define NEW_ENVIRONMENT  # NEW_ENVIRONMENT folder flags
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "embedlm: $(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "embedlm: Python 3.10 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	@echo "embedlm: creating the environment $(1)"
	@$(PYTHON) -m venv $(2) $(1)
endef

define INSTALL_TOOLS  # INSTALL_TOOLS folder requirements
	@echo "embedlm: downloading and installing the tools of $(2)"
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r $(2) || { \
	  echo "embedlm: the tools are missing, and pip could not install them. This needs a package index, once;" \
	    "name another one with PIP_FLAGS=\"--index-url ...\"" >&2; exit 1; }
endef

$(PY):
	$(call NEW_ENVIRONMENT,$(VENV),$(VENV_FLAGS))

$(WHEEL_TOOLS)/.embedlm-tools: .ci/requirements-wheels.txt
	$(call NEW_ENVIRONMENT,$(WHEEL_TOOLS))
	$(call INSTALL_TOOLS,$(WHEEL_TOOLS),$<)
	@touch $@

$(DOCS_TOOLS)/.embedlm-tools: .ci/requirements-docs.txt
	$(call NEW_ENVIRONMENT,$(DOCS_TOOLS))
	$(call INSTALL_TOOLS,$(DOCS_TOOLS),$<)
	@touch $@

# The constraint goes into every pip call. An environment that has torch keeps exactly that torch;
# without an NVIDIA driver the release with a CPU build is asked for; with one, pyproject's range.
$(CONSTRAINTS): .ci/constraints-cpu.txt | $(PY)
	@set -e; if found=$$($(PY) -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null); then \
	  echo "torch==$$found" > $@; echo "embedlm: keeping torch $$found"; \
	elif command -v nvidia-smi >/dev/null || [ -e /proc/driver/nvidia ]; then \
	  : > $@; \
	else \
	  cp $< $@; echo "embedlm: no NVIDIA driver; where torch is asked for, it is the CPU build: $$(grep '^torch' $@)"; \
	fi

# The stamp is written only if the native module was built, so that the next `make` tries again.
NOTE_BUILT = if $(PY) -m sdk doctor --only native; then touch $@; else rm -f $@; fi

# The compiler runs while packages are downloaded.
$(VENV)/.embedlm-installed: $(CONSTRAINTS) $(BUILT_FROM)
	@$(MAKE) --no-print-directory --jobs=2 packages native LEVELS=all
	@$(NOTE_BUILT)

$(VENV)/.embedlm-here: $(CONSTRAINTS) $(BUILT_FROM)
	@$(MAKE) --no-print-directory --jobs=2 packages native LEVELS=host
	@$(NOTE_BUILT)

packages: $(CONSTRAINTS)
	@echo "embedlm: downloading and installing packages"
	@sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml > $(REQUIREMENTS)
	@$(PIP_INSTALL) --quiet --progress-bar off -r $(REQUIREMENTS)
	@echo "embedlm: packages are installed"

native: $(CONSTRAINTS)
	@echo "embedlm: compiling the native module ($(if $(filter host,$(LEVELS)),for this CPU: 40 seconds,2 minutes) of CPU time)"
	@SKBUILD_CMAKE_DEFINE="EMBEDLM_LEVELS=$(LEVELS)" CMAKE_BUILD_PARALLEL_LEVEL=$(shell nproc) \
	  $(PIP_INSTALL) --quiet --progress-bar off --no-deps -e .
	@$(PY) -c 'from importlib.metadata import files; exit(not any(f.name.startswith("_native.") for f in files("embedlm")))' || \
	  echo "embedlm: the native module did not compile; this shows why: $(PY) -m pip install -v --no-deps --editable ." >&2

# embedlm is installed by then: this installs what the extra asks for, without a second build.
$(VENV)/.embedlm-dev: $(VENV)/.embedlm-installed .ci/constraints-dev.txt
	@echo "embedlm: downloading and installing what the tests need, torch among it"
	@cp .ci/constraints-dev.txt $(VENV)/embedlm-constraints-dev.txt
	@if $(PY) -c 'import torch; raise SystemExit(torch.version.cuda is None)'; then \
	  grep -v '^triton' .ci/constraints-dev.txt > $(VENV)/embedlm-constraints-dev.txt; fi
	@$(PIP_INSTALL) --quiet --progress-bar off -c $(VENV)/embedlm-constraints-dev.txt "embedlm[dev]"
	@touch $@
