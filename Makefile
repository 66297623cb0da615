# `make demo` and `make test` do all of their own set-up, in .venv, on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# One thread each: several are slower on small busy machines, and change the order of sums.
export OMP_NUM_THREADS ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: megatron trl vllm miniature demo test lint unit soak format models benchmark clean

demo: $(READY)
	$(BIN)/routebook demo --out runs/demo.routes

test: lint unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -n 2

# The state machine over the engine, 100,000 examples: about forty minutes of two cores.
soak: $(READY)
	$(BIN)/python -m tests.engine.soak --examples 100000 --seed 0

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

models: $(READY)
	$(BIN)/python -m tests.model_table docs/models.md

# Minutes each, but for the last, which takes ten; on a busy machine only the ratios of CPU time mean something.
benchmark: $(READY)
	$(BIN)/python -m benchmarks.engine_speed
	$(BIN)/python -m benchmarks.ledger_speed
	$(BIN)/python -m benchmarks.executor_speed
	$(BIN)/python -m benchmarks.format_speed
	$(BIN)/python -m benchmarks.ingest_speed
	$(BIN)/python -m benchmarks.server_speed
	$(BIN)/python -m benchmarks.server_load --minutes 10

# The bridge to megatron-core and the chain of verl, each in an environment of its own under build/peers.
megatron: $(READY)
	tests/replay/peer.sh megatron-0.16.1
	tests/replay/peer.sh megatron-0.19.2
	tests/replay/peer.sh verifiers

# R3 in TRL's GRPOTrainer, and the example on top of it, likewise.
trl: $(READY)
	tests/replay/peer.sh trl

# Rows inside vLLM against plain transformers, in an environment for each release; an hour or more.
vllm: $(READY)
	tests/hosts/vllm/run.sh 0.27.1
	tests/hosts/vllm/run.sh 0.32.0

# GRPO with and without R3, in small; see docs/miniature.md.
miniature: $(READY)
	tests/replay/peer.sh trl -m examples.grpo_arithmetic --short

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
