# `make setup check fmt test test-all demo docs bench clean`: every verb works on a fresh clone.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Many small processes share few cores: one thread each, and idle threads must not spin.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

BENCHES := adapter asynchrony audit blobs calibration dashboard data delta diloco export forgers gas history hostile index inference orchestrator redteam resume rpc-faults sft shardcast simulator size sync tasks toploc trainer worker

.PHONY: setup vllm lock check fmt test test-vllm test-gpu test-all audit coverage-contracts mutate-contracts mutate demo example-length example-calculator example-reasoning claims docs bench bench-gpu $(BENCHES:%=bench-%) clean

setup: $(VENV)/.installed node_modules/.installed

# Sources of the build hook: a change there installs again.
KERNEL := $(wildcard tools/build_kernel.py core/muster/*/native/*.[ch])

$(VENV)/.installed: pyproject.toml constraints.txt $(KERNEL)
	@PYTHON='$(PYTHON)' tools/prerequisites
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

NPM_INSTALL := npm install --no-save --ignore-scripts --no-audit --no-fund --loglevel=error
# npm 9 skips Foundry's binaries: optional packages that declare Node.js 20 without needing it.
FOUNDRY = linux-$(subst aarch64,arm64,$(subst x86_64,amd64,$(shell uname -m)))@$(shell sed -n 's/.*foundry-rs.forge": "\(.*\)".*/\1/p' package.json)

# Not `npm ci`: it needs lock entries for every platform's binaries, which not every registry has.
node_modules/.installed: package.json package-lock.json
	@PYTHON='$(PYTHON)' tools/prerequisites
	$(NPM_INSTALL)
	@ls node_modules/@foundry-rs/*-*/bin/* >/dev/null 2>&1 || $(NPM_INSTALL) @foundry-rs/anvil-$(FOUNDRY) @foundry-rs/forge-$(FOUNDRY)
	@touch $@

# The newest versions that pyproject.toml allows, of everything that `make setup` installs, for every Python and platform.
# They are constraints: pip takes those that it needs here, and any build of the same torch version.
lock: .envs/uv/.installed
	.envs/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --extra dev --extra gpu --upgrade --no-header \
	  --no-annotate --no-emit-index-url --no-emit-find-links --output-file constraints.txt pyproject.toml

.envs/uv/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

# The vLLM engine on a CPU, in an environment of its own: 2.5 GB, some minutes.
vllm: .envs/vllm/.installed

.envs/vllm/.installed: core/muster/inference/vllm/requirements-cpu.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry --no-ansi core client orchestrator trainer app lab
	tools/forge fmt --check
	tools/forge build --quiet
	$(BIN)/python contracts/script/export_artifacts.py --check
	$(BIN)/python tools/count_lines.py

fmt: setup
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	tools/forge fmt

# All parts side by side, or some: `make test ARGS=networks`. The output of each is in runs/tests/.
test: setup
	@$(BIN)/python tools/run_tests.py $(ARGS)

# Compares the engine on vLLM with the one on transformers, alone and in a network.
test-vllm: setup vllm
	$(BIN)/python -m pytest -q tests/vllm_engine
	$(BIN)/python -m pytest -q -m vllm tests/conformance/engines tests/redteam

# Tests and figures for one GPU. Some parts: ARGS="noise replay"; without a GPU: DEVICE=cpu.
DEVICE ?= cuda

test-gpu: setup
	$(BIN)/python -m benchmarks.gpu.run --checks --device $(DEVICE) $(ARGS)

bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu.run --device $(DEVICE) $(ARGS)

test-all: setup vllm
	FOUNDRY_PROFILE=deep tools/forge test
	HYPOTHESIS_PROFILE=wide $(BIN)/python -m pytest -q

# Static analysis and proofs; makes contracts/.envs/audit.
audit: setup
	contracts/script/audit.sh

coverage-contracts: setup
	contracts/script/coverage.sh

# Half an hour for 200 mutants of the Python code that money and proofs depend on.
mutate: setup
	$(BIN)/python tools/mutate.py $(ARGS)

# Hours; `make mutate-contracts ARGS='--sample 150'` draws some.
mutate-contracts: setup
	$(BIN)/python contracts/script/mutate.py $(ARGS)

demo: setup
	$(BIN)/muster demo $(ARGS)

# Some minutes: runs on a network of their own, and their plots.
example-length: setup
	$(BIN)/python -m benchmarks.training.lessons length $(ARGS)

example-calculator: setup
	$(BIN)/python -m benchmarks.training.lessons calculator $(ARGS)

# 43 minutes of two cores: texts, pretraining, a data run, fine-tuning, reinforcement; docs/runs/reasoning.md. A toy
# of it in a minute: ARGS=--small. With ARGS="--out DIR" it resumes after an interruption.
example-reasoning: setup
	$(BIN)/python -m benchmarks.reasoning $(ARGS)

# The claims of the papers behind Muster, measured again: docs/claims.md. Seven minutes of one core, or some of the
# studies: ARGS="clip filters"; ARGS=page writes the page from existing figures.
claims: setup
	$(BIN)/python -m benchmarks.claims $(ARGS)

# Pages that are generated from the code, and the site: open runs/site/index.html.
docs: setup
	$(BIN)/python tools/write_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(BENCHES:%=bench-%)

bench-gas: setup
	$(BIN)/python -m benchmarks.chain.gas

bench-blobs: setup
	$(BIN)/python -m benchmarks.chain.blobs

bench-adapter: setup
	$(BIN)/python -m benchmarks.training.adapter

bench-asynchrony: setup
	$(BIN)/python -m benchmarks.training.asynchrony

# Some minutes: a million submissions are written first.
bench-audit: setup
	$(BIN)/python -m benchmarks.chain.audit $(ARGS)

bench-calibration: setup
	$(BIN)/python -m benchmarks.proofs.calibration

bench-forgers: setup
	$(BIN)/python -m benchmarks.proofs.forgers

# Some minutes: each fault of an RPC endpoint for ten seconds.
bench-rpc-faults: setup
	$(BIN)/python -m benchmarks.chain.rpc_faults $(ARGS)

# Some minutes: a million events, read through an endpoint that fails.
bench-sync: setup
	$(BIN)/python -m benchmarks.chain.sync $(ARGS)

# Half an hour of one core; resumes from runs/redteam/trials.jsonl.
bench-redteam: setup
	$(BIN)/python -m benchmarks.proofs.redteam $(ARGS)

# Some minutes: 30 lives of a trainer.
bench-resume: setup
	$(BIN)/python -m benchmarks.training.resume $(ARGS)

bench-worker: setup
	$(BIN)/python -m benchmarks.inference.worker $(ARGS)

# Some minutes and 3 GB: a million submissions are written first.
bench-dashboard: setup
	$(BIN)/python -m benchmarks.orchestrator.dashboard $(ARGS)

# Ten minutes and 6 GB: a million submissions are written into two databases first.
bench-orchestrator: setup
	$(BIN)/python -m benchmarks.orchestrator.orchestrator $(ARGS)

# Some minutes, as root: relays' links are emulated. ARGS="network files" leaves them out.
bench-hostile: setup
	$(BIN)/python -m benchmarks.shardcast.hostile $(ARGS)

bench-history: setup
	$(BIN)/python -m benchmarks.proofs.history

# A quarter of an hour of one core: networks of up to 10,000 workers. ARGS="--up-to 1000" for minutes.
bench-simulator: setup
	$(BIN)/python -m benchmarks.orchestrator.simulator $(ARGS)

# Half an hour of one core, 5 GB; each part alone: ARGS="--parts q06 mid".
bench-size: setup
	$(BIN)/python -m benchmarks.inference.size $(ARGS)
	$(BIN)/python -m benchmarks.training.size
	$(BIN)/python -m benchmarks.training.context

bench-tasks: setup
	$(BIN)/python -m benchmarks.tasks.tasks

bench-toploc: setup benchmarks/.envs/toploc/.installed
	$(BIN)/python -m benchmarks.proofs.toploc

bench-diloco: setup
	$(BIN)/python -m benchmarks.training.diloco $(ARGS)

# 103 M parameters; ARGS='--shapes mid q06' takes Qwen3-0.6B's shape too, and 9 GB.
bench-export: setup
	$(BIN)/python -m benchmarks.training.export $(ARGS)

# A million synthetic rows as a data set, exported and checked; 5 GB of disk, some ten minutes.
bench-data: setup
	$(BIN)/python -m benchmarks.training.data_set $(ARGS)

bench-delta: setup
	$(BIN)/python -m benchmarks.training.delta

# The reference's wheel is linked to an old torch, so it is built here with this project's torch.
benchmarks/.envs/toploc/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy setuptools wheel ninja
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-binary toploc toploc==0.1.6
	@touch $@

bench-index: setup
	$(BIN)/python -m benchmarks.chain.index

bench-shardcast: setup benchmarks/.envs/shardcast/.installed
	$(BIN)/python -m benchmarks.shardcast.shardcast $(ARGS)

benchmarks/.envs/shardcast/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check shardcast==0.3.2
	@touch $@

bench-trainer: setup benchmarks/.envs/trl/.installed
	$(BIN)/python -m benchmarks.training.trainer

bench-sft: setup benchmarks/.envs/trl/.installed
	$(BIN)/python -m benchmarks.training.sft

bench-inference: setup benchmarks/.envs/trl/.installed
	$(BIN)/python -m benchmarks.inference.inference

# TRL, with which losses and speed of trainer and fine-tuning are compared. torch first: see docs/decisions/0002.
benchmarks/.envs/trl/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 trl==1.16.0 psutil
	@touch $@

clean:
	rm -rf out cache runs .mypy_cache .ruff_cache .pytest_cache
