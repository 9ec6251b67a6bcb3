# Needs Python 3.10 or newer, git, and a C++ compiler (without one the torch kernel is used). Everything else is set up here.
#
#   make setup      .venv with torch, LayerFerry (editable) and the test tools
#   make test       lint, types, the CPU suite, and a wheel built from a clean clone
#   make test-gpu   the GPU suite, on a CUDA machine
#   make soak       the long form of the reliability tests: about five minutes
#   make docs       write the generated pages and pictures of docs/ again
#   make demo       fine-tune a small model and talk to it (outputs/quickstart)
#
# Settings: PYTHON, TORCH (requirement), TORCH_INDEX (an index to take torch from, such as pytorch.org's CPU wheels), WORKERS.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.layerferry-ready
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

# One thread a worker: the tests are small, and two workers share two cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: setup test lint unit wheel test-gpu soak demo docs

setup: $(READY)

# torch first and alone, so that nothing else chooses its version; a torch that is already there stays.
$(READY): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; set PYTHON=")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) --editable '.[data,demo,dev]'
	touch $@

# Types and the wheel take one core each.
test: $(READY)
	$(MAKE) --jobs 2 --output-sync=target lint wheel
	$(MAKE) unit

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

unit: $(READY)
	$(TEST_ENV) $(PY) -m pytest -n $(WORKERS) --dist worksteal --durations 15

wheel: $(READY)
	tools/check_wheel.sh $(PY)

test-gpu: $(READY)
	$(PY) -m pytest -m gpu tests

soak: $(READY)
	$(TEST_ENV) $(PY) -m pytest -m soak -s -n 0 --durations 10 tests/checkpoint tests/reliability

demo: $(READY)
	recipes/quickstart/demo.sh

docs: $(READY)
	$(PY) tools/render_keys.py
	$(PY) tools/render_families.py
	$(PY) tools/render_memory.py
	$(PY) tools/render_cards.py
	$(PY) tools/render_results.py
	$(PY) tools/draw_idea.py
