# Every target sets up what it needs first: system packages (as root), .venv, kvfs in it. See tools/bootstrap.sh.
SHELL := /bin/bash
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest -q

.PHONY: help setup demo demo-vllm test test-heavy test-device test-vllm check lint format bench bench-vllm bench-peers torture soak clean

help:
	@echo 'make demo    run a prompt cold, warm, after a restart and after its eviction, on a real mount'
	@echo 'make test    the tests, real mounts included'
	@echo 'make test-heavy  the rest of the tests: what takes long, and further variants'
	@echo 'make test-device  the code for GPUs: the real kvikio on a libcuda of our own, and on the GPU if there is one'
	@echo 'make demo-vllm  a prompt through two vLLM servers, one after the other (3.5 GB to set up the first time)'
	@echo 'make test-vllm  the tests with a real vLLM, in an environment of its own'
	@echo 'make check   before a change lands: lint, types, layers, and the tests of make test; .ci/run does more'
	@echo 'make format  bring the sources into the form that `make check` asks for'
	@echo 'make bench   what each path reaches, beside the limit of the hardware, some minutes'
	@echo 'make bench-vllm  a real vLLM with kvfs beside vLLM alone, shared system prompts, tens of minutes (FLAGS=…)'
	@echo 'make bench-peers  LMCache in an environment of its own beside kvfs, in turns (1.2 GB to set up the first time)'
	@echo 'make torture kill -9 of a loaded daemon, KVFS_KILLS times; a power loss at every step, KVFS_TORN times'
	@echo 'make soak    all the long tests: that, and the store against its model for much longer'
	@echo 'make clean   remove .venv and what was built'

setup:
	@tools/bootstrap.sh dev

demo:
	@tools/bootstrap.sh demo
	@$(PYTHON) -m kvfs.tools.demo

test: setup
	$(PYTEST)

test-heavy: setup
	$(PYTEST) -m heavy

test-device: setup
	tools/bootstrap_kvikio.sh
	$(PYTEST) -m 'fakecuda or gpu'

demo-vllm:
	@tools/bootstrap.sh demo
	@$(PYTHON) -m kvfs.tools.demo_vllm

test-vllm: setup
	tools/bootstrap_vllm.sh
	$(PYTEST) -m vllm tests/engines/vllm

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

check: lint
	$(PYTEST)

format: setup
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

bench: setup
	.venv/bin/kvfs bench

bench-vllm: setup
	@$(PYTHON) -c 'from kvfs.tools.demo import model; model.prepare(print)'
	tools/bootstrap_vllm.sh
	.venv/bin/kvfs bench vllm --plot bench-vllm.png $(FLAGS)

bench-peers: setup
	tools/bootstrap_lmcache.sh
	.venv/bin/kvfs bench peers $(FLAGS)

torture: setup
	$(PYTEST) -m slow -s tests/faults/test_kill_loop.py tests/faults/test_crash_points.py

soak: export KVFS_KILLS ?= 3000
soak: export KVFS_TORN ?= 40
soak: setup
	$(PYTEST) -m slow -s

clean:
	rm -rf .venv build dist *.egg-info demo bench-vllm.png .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
