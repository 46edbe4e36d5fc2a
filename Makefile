# Everything runs in .venv, which the first target that needs it creates.
#   make demo   the main job: a prefill/decode cluster answers a question, KV blocks ferried over UCX
#   make test   the tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := smollm2-135m-instruct
PYTEST := $(BIN)/python -m pytest
QUICK := --quiet --durations=10 -m "not full and not netns"
SOURCES := cluster engine connectors kernels tests

.PHONY: demo parity-table test test-processes test-logic test-full test-netns test-faults soak lint types imports check bench clean
.DEFAULT_GOAL := demo

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "blockferry needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/blockferry fetch-model $(MODEL)
	$(BIN)/blockferry generate configs/smollm2-pd-cpu.yaml "What is the capital of France?"

# Two halves side by side, as tests that start processes often wait.
test: $(INSTALLED)
	$(BIN)/blockferry fetch-model $(MODEL)
	$(MAKE) --jobs=2 test-processes test-logic

test-processes: $(INSTALLED)
	$(PYTEST) $(QUICK) tests/integration

test-logic: $(INSTALLED)
	$(PYTEST) $(QUICK) --ignore=tests/integration

# Every family in every pair of choices, and the table of it in README.md.
parity-table: $(INSTALLED)
	$(PYTEST) -m "not full" --parity-table README.md tests/integration/test_family_*.py tests/integration/test_encoder_decoder.py

# The whole parity table and every long test, real hybrid weights included.
test-full: $(INSTALLED)
	$(BIN)/blockferry fetch-model $(MODEL)
	$(BIN)/blockferry fetch-model gemma3-270m
	$(PYTEST) -m "full"

# Three hosts in network namespaces, joined by `ray up`, and lost under load. Needs root, openssh-server, rsync and iproute2.
test-netns: $(INSTALLED)
	$(BIN)/blockferry fetch-model $(MODEL)
	$(PYTEST) -m "netns and not full"

# Deployments that are broken under load: processes killed and frozen, links cut. Part of it needs what test-netns needs.
test-faults: $(INSTALLED)
	$(PYTEST) tests/integration/test_faults.py tests/integration/test_link_faults.py tests/integration/test_pd_worker.py tests/integration/test_handoff_faults.py

# 20,000 short requests, an instance killed every minute, clients that leave.
soak: $(INSTALLED)
	$(PYTEST) -s --soak-requests 20000 tests/integration/test_soak.py

lint: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	PYTHONPATH=.ns $(BIN)/lint-imports

check: lint types imports

bench: $(INSTALLED)
	$(BIN)/blockferry bench kv
	$(BIN)/blockferry bench transfer
	$(BIN)/blockferry bench serve --config configs/smollm2-mixed-cpu.yaml

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
