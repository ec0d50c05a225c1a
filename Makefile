# Every command of the project. `make help` lists them. All of them share one environment, .venv, which is
# built from pyproject.toml when it is missing or stale; a machine needs only Python >= 3.11, make and git.
SHELL := /bin/bash
VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# The tested release. pip takes a CPU build that lies on the machine or the registry's build; on a machine whose
# torch must be another one (CUDA, say) write `make TORCH='torch==2.11.0' test`.
TORCH ?= torch==2.13.0
EXTRAS ?= dev,interop
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
# What the environment was built of stands in the stamp. What is given (`make TORCH=torch==2.14.1 test`) and is not in it
# has it built anew; what is not given is as it was built.
GIVEN := $(foreach name,TORCH EXTRAS PYTHON,$(if $(filter file,$(origin $(name))),,$(name)=$($(name))))
OTHER := $(foreach of,$(GIVEN),$(shell grep -qxF '$(of)' $(STAMP) 2>/dev/null || echo yes))
# Over all cores; a worker that has nothing left takes tests from another. One file or one test is quicker without:
# `.venv/bin/python -m pytest tests/layout -k boxes`. Bytecode is kept, whatever the environment says: the tests start
# some hundred processes.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: FORCE help env demo test test-more test-all check-cuda check-cuda-all lint format notebooks bench-peers-env clean
.DELETE_ON_ERROR:

help:  ## list these commands
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-18s %s\n", $$1, $$2}'

env: $(STAMP)  ## build the environment (.venv) if it is missing or stale

# torch first and with pip: only pip sees a build that lies on the machine, and a looser range would fetch the
# newest CUDA build. The rest goes through uv where there is one.
$(STAMP): pyproject.toml $(if $(OTHER),FORCE)
	@if [ -z "$(PYTHON)" ]; then \
		echo "fmegatron needs Python >= 3.11, and no python3 on the PATH is one. Install it (Debian: apt-get install python3 python3-venv)." >&2; exit 1; fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$(PYTHON) cannot make environments. Install the missing part (Debian: apt-get install python3-venv) and run make again." >&2; exit 1; fi
	@test "$$($(PY) --version 2>&1)" = "$$($(PYTHON) --version)" || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@echo "building $(VENV) with $$($(PY) --version): $(TORCH), then .[$(EXTRAS)] (a few minutes the first time)"
	@$(PY) -m pip install -qq --disable-pip-version-check '$(TORCH)'
	@if command -v uv >/dev/null; then uv pip install --quiet --python $(PY) -e '.[$(EXTRAS)]'; \
		else $(PY) -m pip install -qq --disable-pip-version-check -e '.[$(EXTRAS)]'; fi
	@rm -f $@-more $@-cuda && printf '%s\n' 'TORCH=$(TORCH)' 'EXTRAS=$(EXTRAS)' 'PYTHON=$(PYTHON)' > $@

demo: $(STAMP)  ## train on 4 ranks, stop, resume on 2 with another mesh, sample, plot: under 10 minutes on 2 cores
	@$(PY) experiments/demo.py

test: $(STAMP)  ## the default tests, doctests included, over all cores: 5 to 10 minutes on 2
	@$(PYTEST) $(ARGS)

test-more: $(STAMP)  ## the same and those marked medium, before a landing: 15 to 30 minutes on 2
	@$(PYTEST) -m 'not slow' $(ARGS)

# SEEDS=fresh: sampled campaigns draw other cases, and a failed test prints the line that repeats it.
test-all: $(VENV)/.stamp-more  ## the same and the full sweeps, and what needs the extras logs, data and eval
	@$(PYTEST) -m 'slow or not slow' $(if $(SEEDS),--fresh-seeds=$(SEEDS)) $(ARGS)

$(VENV)/.stamp-more: $(STAMP)
	@if command -v uv >/dev/null; then uv pip install --quiet --python $(PY) -e '.[logs,data,eval]'; \
		else $(PY) -m pip install -qq --disable-pip-version-check -e '.[logs,data,eval]'; fi
	@touch $@

# Triton with its assembler is 700 MB: an extra of its own. What was assembled is kept in the user's folder of caches.
$(VENV)/.stamp-cuda: $(STAMP)
	@if command -v uv >/dev/null; then uv pip install --quiet --python $(PY) -e '.[cuda-check]'; \
		else $(PY) -m pip install -qq --disable-pip-version-check -e '.[cuda-check]'; fi
	@touch $@

check-cuda: $(VENV)/.stamp-cuda  ## what an H100 would make of the steps of a cover, without a GPU: minutes of 2 cores
	@$(PY) -m tests.cuda.check $(ARGS)

check-cuda-all: $(VENV)/.stamp-cuda  ## the same, and the code and machine code of every case
	@$(PY) -m tests.cuda.check --all $(ARGS)

lint: $(STAMP)  ## ruff (lint and format) and pyright (types); nothing is changed
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m basedpyright --level error

format: $(STAMP)  ## ruff: fix and format in place
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

notebooks: $(STAMP)  ## run every notebook again and write its outputs back
	@$(VENV)/bin/jupyter-execute --inplace notebooks/*.ipynb

# Peers live apart: what they need must never be what the project needs. Megatron without its CUDA dependencies.
.venv-peers/.stamp:
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check '$(TORCH)'
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check numpy safetensors jax orbax-checkpoint packaging pyyaml einops grain torchdata
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check --no-deps megatron-core==0.16.1
	@touch $@

bench-peers-env: .venv-peers/.stamp  ## an environment of their own for the peers that benchmarks compare with

# One file a benchmark: experiments/benchmarks/NAME.py; JSON lines on stdout, a table for people on stderr.
bench-%: $(STAMP)  ## benchmark NAME: step, init, layout, checkpoint, parallel, pipeline, context, moe, data, interop, generate, plan, loop, faults, gpu
	@if [ ! -f experiments/benchmarks/$*.py ]; then echo "no benchmark '$*'; there are: $$(cd experiments/benchmarks 2>/dev/null && ls *.py | sed 's/.py//' | xargs)" >&2; exit 1; fi
	@$(PY) experiments/benchmarks/$*.py

clean:  ## remove the environment, caches and runs/
	rm -rf $(VENV) .venv-peers runs .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
