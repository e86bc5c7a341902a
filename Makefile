# Every command that a user or CI needs. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# SGLang pins its own torch and needs 11 GB, so it has an environment of its own.
VENV_ENGINE ?= .venv-engine

# Further arguments, such as `make test PYTEST_ARGS="-k tiers"`.
TRAIN_ARGS ?=
COMPARE_ARGS ?=
PYTEST_ARGS ?=
# Processes that run tests side by side. An engine test keeps a core and up to 2 GiB busy.
PYTEST_WORKERS ?= 2

TRACES := training/data/traces/h200_llama3-8b-shape_eagle3_fa3
H200_NOTES := "KV capacity: the speculative server's log gives tokens and a usage rounded to 0.01; \
the capacities that fit every decode line are 693,316 to 697,039 (the server without speculation: \
725,062 to 732,988)."
KIMI_NOTES := "Assumed: 3 draft steps, accept length 2.88 (InferenceX golden value of Kimi K2.5 \
EAGLE-3 at 3 steps, measured on other hardware), 48 running requests with speculation (SGLang's \
default)."
DEPTHS_NOTES := "Assumed: independent acceptance of 0.7 a draft token, which sets the level of the \
costs; 64 running requests with speculation."
SHARE_WHY := "assumed: 594.7 tok/s at depth 1 with accept length 1.85 against 447.2 without \
speculation, GLM-4.7-FP8 in training/data/tables/sglang_pr23336_glm-4.7-fp8_accept_len.csv"
FLASH_NOTES := "Assumed: 3 draft steps, accept length 2.095 (the source prints an acceptance of \
36.5%, read as correct over proposed drafts), 64 running requests with speculation. Two batch \
sizes only: 8 and 64."

.DEFAULT_GOAL := help
.PHONY: help train test test-engine lint check calibrations validate clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(VENV)/.train ## train the policy, then compare it with the baselines
	$(BIN)/python -m training.ppo $(TRAIN_ARGS)
	$(BIN)/python -m training.compare $(COMPARE_ARGS)

test: $(VENV)/.dev ## run the tests
	$(BIN)/pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-engine: $(VENV_ENGINE)/.installed ## run the tests on the real SGLang engine, on a CPU
	$(VENV_ENGINE)/bin/python -m pytest tests/engine -W default \
	    -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.dev ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test test-engine ## what CI runs

calibrations: $(VENV)/.train ## make the shipped calibrations again
	$(BIN)/python -m training.calibrate \
	    $(TRACES)_native.jsonl.gz \
	    $(TRACES)_native_second-run.jsonl.gz \
	    $(TRACES)_speculative.jsonl.gz \
	    $(TRACES)_zero-step-skips-draft-extend.jsonl.gz \
	    -o checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json \
	    --kv-capacity-tokens 695000 --chunk-tokens 16384 --costs-only --notes $(H200_NOTES)
	$(BIN)/python -m training.calibrate \
	    training/data/tables/kimi_k2.5_8gpu_throughput.csv \
	    -o checkpoints/calibrations/kimi-k2.5-8gpu-table.json \
	    --num-steps 3 --accept-len 2.88 --costs-only --notes $(KIMI_NOTES)

	$(BIN)/python -m training.calibrate training/data/tables/sglang_pr22246_qwen3-235b.csv \
	    -o checkpoints/calibrations/qwen3-235b-table.json \
	    --speculative-max-running-requests 64 --costs-only --notes $(DEPTHS_NOTES)
	$(BIN)/python -m training.complete checkpoints/calibrations/qwen3-235b-table.json \
	    -o checkpoints/calibrations/qwen3-235b-table.json --native-share 0.719 --why $(SHARE_WHY)
	$(BIN)/python -m training.calibrate training/data/tables/sglang_pr22246_glm-4.7-fp8.csv \
	    -o checkpoints/calibrations/glm-4.7-fp8-table.json \
	    --speculative-max-running-requests 64 --costs-only --notes $(DEPTHS_NOTES)
	$(BIN)/python -m training.complete checkpoints/calibrations/glm-4.7-fp8-table.json \
	    -o checkpoints/calibrations/glm-4.7-fp8-table.json --native-share 0.719 --why $(SHARE_WHY)
	$(BIN)/python -m training.calibrate \
	    training/data/tables/vllm_recipes_pr923_qwen3.8-flash-next.csv \
	    -o checkpoints/calibrations/qwen3.8-flash-next-table.json \
	    --num-steps 3 --accept-len 2.095 --speculative-max-running-requests 64 --costs-only \
	    --notes $(FLASH_NOTES)

validate: $(VENV)/.train ## show how far the simulator can be believed; fails if a bound is missed
	$(BIN)/python -m training.validate -o checkpoints/validation.json

clean: ## remove build outputs and caches
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## the same, and remove the virtual environments
	rm -rf $(VENV) $(VENV_ENGINE)

# The files .train and .dev say that the extra of that name is installed.
$(VENV)/.train: constraints.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.dev: constraints.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.train

$(VENV_ENGINE)/.installed: constraints-engine.txt pyproject.toml
	$(PYTHON) -m venv $(VENV_ENGINE)
	$(VENV_ENGINE)/bin/python -m pip install -c constraints-engine.txt \
	    sglang==0.5.23 pytest pytest-timeout pytest-xdist safetensors \
	    gymnasium matplotlib stable-baselines3 tyro wandb
	$(VENV_ENGINE)/bin/python -m pip install --no-deps -e .
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "specgovernor needs Python 3.11 or newer, but '$(PYTHON)' is" \
	        "$$($(PYTHON) --version 2>&1); give another with make PYTHON=python3.11" >&2; \
	    exit 1; \
	}
	$(PYTHON) -m venv $(VENV)
