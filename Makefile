# What everyone does. Each target sets up what it needs; PYTHON may be any of 3.10 to 3.13.
PYTHON ?= python3
VENV ?= .venv
VLLM ?= 0.32.0
ENGINES_VENV ?= .venv-engines
TRANSFORMERS ?= 5.24.0
VLLM_VENV ?= .venv-vllm$(if $(filter 0.32.0,$(VLLM)),,-$(VLLM))
SOURCES ?= 0.33.0
TRANSFORMERS_DIR = $(abspath .venv-transformers-$(TRANSFORMERS))
WITHOUT_ENGINES = test_adapter.py test_differential.py test_plugin.py test_policies.py test_secondary.py test_worker.py
BIN := $(VENV)/bin
TRACE ?=
ARGS ?=
SOAK_SECONDS ?= 600
SEED ?=
VERSIONS ?=
# Two versions of numba overwrite each other's kernels in one place.
OWN_KERNELS = NUMBA_CACHE_DIR=$(abspath $(VLLM_VENV))/kernels
KERNELS = src/kvoffload/structures/compiled
PYTEST = $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=worksteal
# Processes otherwise compile the same modules each: an import of vLLM then takes 19 s of CPU time instead of 9.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help install kernels replay report test test-slow test-all test-checked engines-env test-engines test-transformers test-vllm test-vllm-sources test-vllm-versions soak soak-adversaries lint sizes format bench bench-vllm gpu-check vllm-env docs dist image-check clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 20

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev --group mutation
	touch $@

install: $(VENV)/installed  ## the environment and the package

kernels: $(VENV)/installed  ## compile all kernels into the checkout, as a wheel has them (`make clean` removes them)
	$(BIN)/python tools/record_kernels.py $(KERNELS)

replay: $(VENV)/installed  ## the main job: run a trace through the manager (TRACE=file, ARGS="--policy arc")
	$(BIN)/kvoffload replay $(TRACE) $(ARGS)

report: $(VENV)/installed-dev  ## the page of an example plan, build/plan.html (ARGS="--budget 5000")
	mkdir -p build
	$(BIN)/kvoffload plan $(or $(TRACE),chat) --model meta-llama/Llama-3.1-8B --gpus 1 --kv-per-gpu 64GB \
		--report build/plan.html --force $(ARGS)

test: $(VENV)/installed-dev  ## the quick tests, four minutes on two cores (ARGS=tests/policies/test_arc.py)
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/installed-dev  ## the tests that `make test` leaves out
	$(PYTEST) -m slow $(ARGS)

test-all: $(VENV)/installed-dev  ## every test, long recordings too, five times as many random examples, 200 kills
	KVOFFLOAD_LONG=1 KVOFFLOAD_KILLS=200 $(PYTEST) --hypothesis-profile=ci $(ARGS)

test-checked: $(VENV)/installed-dev  ## the control plane's tests with kernels that check the bounds of arrays
	rm -rf .checked-kernels
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=.checked-kernels $(PYTEST) -m "not slow" \
		tests/core/test_machine.py tests/policies/test_twins.py tests/structures/test_structs.py $(ARGS)

lint: $(VENV)/installed-dev  ## ruff and mypy --strict
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

sizes:  ## lines by room, and what is longest
	@$(PYTHON) tools/sizes.py

format: $(VENV)/installed-dev  ## let ruff format and sort
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed-dev  ## control plane and copies (beside vLLM's where `make vllm-env` has been)
	@if [ -x $(VLLM_VENV)/bin/python ]; then $(VLLM_VENV)/bin/python bench/control_plane.py $(ARGS); \
	else $(BIN)/python bench/control_plane.py $(ARGS); fi
	$(BIN)/python bench/copies.py

vllm-env:  ## an environment with a CPU build of vLLM 0.32, or of VLLM=0.30.0 (3.4 GB, minutes)
	PYTHON=$(PYTHON) bash tools/vllm_env.sh $(VLLM_VENV) $(VLLM)

test-vllm: vllm-env  ## beside vLLM's manager, in real engines, and in transformers
	$(OWN_KERNELS) $(VLLM_VENV)/bin/python -m pytest tests/vllm $(if $(filter 0.32.0,$(VLLM)),tests/hf_transformers) $(ARGS)

engines-env: vllm-env  ## SGLang and LMCache beside vLLM's environment (330 MB, a minute)
	sh tools/engines_env.sh $(ENGINES_VENV) $(VLLM_VENV)

test-engines: engines-env  ## beside SGLang's controllers and host pools, and LMCache's storage
	$(OWN_KERNELS) $(ENGINES_VENV)/bin/python -m pytest tests/sglang tests/lmcache $(ARGS)

test-transformers: vllm-env  ## the tests of transformers with 5.24, or with TRANSFORMERS=5.22.2 (130 MB)
	[ -d $(TRANSFORMERS_DIR) ] || $(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --target $(TRANSFORMERS_DIR) \
		transformers==$(TRANSFORMERS)
	PYTHONPATH=$(TRANSFORMERS_DIR) $(OWN_KERNELS) $(VLLM_VENV)/bin/python -m pytest tests/hf_transformers $(ARGS)

test-vllm-versions:  ## the same on one version of vLLM after the other, an hour (VERSIONS="0.31.0 0.30.0")
	PYTHON=$(PYTHON) bash tools/vllm_versions.sh .venv-versions $(VERSIONS)

test-vllm-sources: vllm-env  ## tests without engines, on the Python files of vLLM 0.33, which has no CPU build (336 MB)
	PYTHON=$(PYTHON) sh tools/vllm_sources.sh .venv-sources-$(SOURCES) $(SOURCES)
	PYTHONPATH=.venv-sources-$(SOURCES):src $(VLLM_VENV)/bin/python -m pytest $(addprefix tests/vllm/,$(WITHOUT_ENGINES)) $(ARGS)

bench-vllm: vllm-env  ## a recorded trace through real engines: no offload, vLLM's manager, ours (needs KVOFFLOAD_TRACES)
	$(VLLM_VENV)/bin/python bench/vllm_lookup.py
	$(VLLM_VENV)/bin/python bench/vllm_engine.py $(ARGS)
	$(VLLM_VENV)/bin/python bench/vllm_time.py

gpu-check:  ## all that needs a GPU; PYTHON has torch and numba, and vLLM if there is one (ARGS="--device cpu" without a GPU)
	PYTHONPATH=src $(if $(findstring vllm,$(PYTHON)),$(OWN_KERNELS) )$(PYTHON) bench/gpu_check.py $(ARGS)

soak: vllm-env $(VENV)/installed-dev soak-adversaries  ## the adversaries, a million steps with a disk and of a shared pool (half an hour each), 200 kills, sharings, real engines under stress (SOAK_SECONDS=600)
	KVOFFLOAD_STEPS=1000000 KVOFFLOAD_SEED=$(SEED) KVOFFLOAD_KILLS=200 KVOFFLOAD_CRASH_SEEDS=20 \
		$(BIN)/python -m pytest --capture=no tests/tiering/test_disk_machine.py tests/tiers/disk/test_crash.py \
		tests/node/test_processes.py tests/node/test_directory.py tests/node/test_deaths.py
	KVOFFLOAD_STEPS=1000000 KVOFFLOAD_SEED=$(SEED) \
		$(BIN)/python -m pytest --capture=no tests/node/test_manager.py -k any_number_of_steps
	KVOFFLOAD_SHARINGS=300 $(BIN)/python -m pytest tests/tiers/shared/test_sharing_machine.py
	KVOFFLOAD_SOUND_RUNS=200 $(VLLM_VENV)/bin/python -m pytest tests/vllm/test_canary.py
	PYTHONPATH=tests SOAK_SECONDS=$(SOAK_SECONDS) SEED=$(SEED) $(VLLM_VENV)/bin/python tests/support/vllm_soak.py

soak-adversaries: $(VENV)/installed-dev  ## hostile servers and buckets, damaged disks, tiers that raise: counts of each (a quarter of an hour)
	PYTHONPATH=tests $(BIN)/python tests/support/hostile_resp.py --rounds 5 $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/support/hostile_s3.py --rounds 300 $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/support/disk_adversary.py --cases 200 $(if $(SEED),--seed $(SEED))
	KVOFFLOAD_RAISES=2000 $(BIN)/python -m pytest tests/tiers/test_guarded.py

$(VENV)/installed-%: $(VENV)/installed
	$(BIN)/pip install --quiet $(if $(filter docs,$*),--constraint constraints.txt) --group $*
	touch $@

docs: $(VENV)/installed-docs report  ## the documents as a site with a live plan, in build/site; fails on a dead link or a public name without an entry
	$(BIN)/python tools/docs_site.py

dist: $(VENV)/installed-dist  ## wheels, with kernels for each Python, and sdist in dist/, tried in empty environments (ARGS="--torch 3.11", --upload)
	$(BIN)/python tools/packages.py $(ARGS)

image-check: $(VENV)/installed  ## an image with examples/Containerfile compiles nothing when it starts (after `make dist`; root)
	$(BIN)/python tools/image_check.py dist/kvoffload-*.whl $(ARGS)

clean:  ## remove environments and caches
	rm -rf $(VENV) $(VLLM_VENV) $(ENGINES_VENV) .venv-versions .venv-transformers-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist .checked-kernels $(KERNELS)
