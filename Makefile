# Octavo. Everything runs in .venv, which `make` creates with any Python 3.11 or later.
#
#   make demo     a service on the embedded model: three questions, receipts, metrics, a live page, stopped again
#   make serve    the service, until Ctrl-C
#   make check    style, types and the fast tests, in under a minute: before a commit
#   make test     the whole CPU suite
#   make bench    this machine's CPU, Octavo and others on it, in one run

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
# Where torch brings no compiler of kernels, the one of the images' torch (tests/test_dependencies.py): Hopper's kernels are
# compiled by it, and what they must not be is looked for in what it makes of them. So is CUDA C++, by the one of CUDA.
TRITON := 3.7.1
CUDA_COMPILER := nvidia-cuda-nvrtc~=13.0 cuda-bindings~=13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
FOLDERS := wire blockmgr grammar model worker gateway cli
PROTOS := $(wildcard proto/octavo/*/*.proto)
# Images of Python and some shells keep no bytecode: each of hundreds of processes would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: types check coverage help demo serve test test-isa interop test-interop ray test-cluster test-wheels test-gpu sanitize-gpu sim faults-long soak bench bench-peers bench-gpu bench-tp lint format proto breaking lock sbom audit pin-images install dev clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: install ## start a service on the embedded model, ask three questions, show receipts, metrics and the live page, stop it
	@$(BIN)/octavo tour

serve: install ## serve the embedded model until Ctrl-C
	@$(BIN)/octavo serve

# What does not fit into a minute is named at the end; style and types are looked at meanwhile, and told behind the tests.
# mypy keeps what it knows in .mypy_cache. A recipe that itself named make's variable would run under `make -n`, too.
LINT = $(MAKE) --no-print-directory lint
check: dev ## style, types and the fast tests, in under a minute on two cores; says what it left out
	@said=$$(mktemp); MAKEFLAGS= $(LINT) >$$said 2>&1 & style=$$!; status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.check || status=$$?; \
	wait $$style || status=$$?; cat $$said; rm $$said; exit $$status

# First what mostly computes, in one process more than there are cores, for some wait; then what starts services or looks at
# the time, two files a core, for they wait more than they compute: others may be asked for by ALONE_JOBS=2. The longest
# files go first (tests/conftest.py). With RERUNS=1, as in CI, a test that fails is run once more, and the closing lines name
# it: on a machine that others use, one stall of seconds is no reason to run half an hour again, but each name there is to be
# looked into.
CORES := $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)'
CPU_JOBS ?= $(shell n=$$($(CORES)); echo $$((n < 8 ? n + 1 : 8)))
ALONE_JOBS ?= $(shell n=$$($(CORES)); echo $$((n < 4 ? 2 * n : 8)))
RERUNS ?= 0
RERUN := --reruns $(RERUNS) -rR
SPREAD := --dist loadfile --no-loadscope-reorder
test: dev ## the whole CPU suite
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --record-seconds $(RERUN) -n $(CPU_JOBS) $(SPREAD) -m "not gpu and not alone"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --record-seconds $(RERUN) -n $(ALONE_JOBS) $(SPREAD) -m "alone and not gpu"

# Without kernels for GPUs, which coverage cannot follow, and their tests.
COVERAGE := --cov --cov-report= --cov-append
NO_KERNELS := --ignore tests/model/gpu --ignore tests/model/kernels --ignore tests/worker/runners/cuda
coverage: dev ## how much of the code the tests pass through, by file in out/coverage.md; three quarters of an hour on a busy machine
	@mkdir -p out && rm -f .coverage .coverage.*
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(COVERAGE) -n 2 --dist loadfile -m "not gpu and not alone and not long" $(NO_KERNELS)
	@$(BIN)/python -m pytest $(COVERAGE) -m "alone and not gpu and not long" --ignore tests/interop
	@$(BIN)/python -m coverage report --format=markdown --skip-covered > out/coverage.md
	@tail -n 1 out/coverage.md

# What computes on the CPU, as lesser CPUs do it: OCTAVO_CPU_ISA hides instructions from our kernels and from torch. All
# tests of the model are in, but for files that the one run in `make test` says everything of: those that go through the
# classes of CPUs themselves, compute nothing, compose ranks of what others compute, or count which numbers are drawn
# (tests/structure/test_isa_tests.py). A service has to start and to answer. Of the CPU's own class nothing is hidden, so
# that it would be `make test` again.
ISAS ?= avx2 vnni
ISA_TESTS := tests/model tests/bench/cpu tests/worker/loading/test_weight_format.py tests/worker/loading/test_deterministic_loading.py \
	tests/worker/runners/test_runner_memory.py tests/cli/tools/test_doctor_cpu.py tests/cli/tools/test_doctor_deterministic.py \
	tests/cli/tools/test_check_numerics.py \
	tests/cli/serve/test_serve.py::test_generate_gives_the_same_text_streamed_whole_and_by_ids
NO_ISA := --ignore tests/model/checkpoint --ignore tests/model/cpu/test_isa.py --ignore tests/model/cpu/test_native.py \
	--ignore tests/model/cpu/test_team.py --ignore tests/model/test_parallel.py --ignore tests/model/test_parallel_packed.py \
	--ignore tests/model/test_ranks_end.py --ignore tests/model/sampling/test_sampler_frequencies.py --ignore tests/model/kernels --ignore tests/model/gpu
test-isa: dev ## the tests that depend on the kind of CPU, with instructions hidden, ISAS="avx2 vnni", in a few minutes
	@for isa in $(ISAS); do \
		beyond=$$($(BIN)/python -c 'import sys; from octavo.model.cpu.isa import Isa, machine_isa; \
			print(Isa[sys.argv[1].upper()] - machine_isa())' $$isa); \
		[ $$beyond -le 0 ] || { echo "$$isa: not this CPU, skipped"; continue; }; \
		[ $$beyond != 0 ] || { echo "$$isa: all that this CPU has, as make test runs it, skipped"; continue; }; \
		echo "with no better instructions than $$isa"; \
		OCTAVO_CPU_ISA=$$isa OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(RERUN) -n $(CPU_JOBS) $(SPREAD) -m "not gpu" $(NO_ISA) $(ISA_TESTS); \
	done

# Each client has an environment of its own under .interop/ (or $$OCTAVO_INTEROP_DIR), made on the first run.
interop: dev ## the environments of test-interop, from PyPI and npm; says which cannot be made
	@$(BIN)/python -m tests.support.services.interop

# Not together with the others: what must be free within seconds is looked at here. Those of others mostly wait for each
# other: three files at once.
INTEROP_JOBS ?= 3
test-interop: interop ## clients and gateways of others against a running service: smg with openai, tritonclient, NVIDIA Dynamo, gRPC for Node
	@OCTAVO_INTEROP=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(RERUN) -ra -n $(INTEROP_JOBS) $(SPREAD) tests/interop

# By its requirement alone, for the extra would build this checkout anew.
RAY := $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"])'
ray: dev ## what test-cluster needs, from PyPI
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(PIP) install -q "$$($(RAY))" >/dev/null 2>&1 || true

# With small object stores; each cluster is a head and a few raylets on loopback, up in some five seconds.
test-cluster: ray ## a Ray cluster of several raylets on this machine, hosts killed under streams; left out where ray cannot be installed
	@if $(BIN)/python -c 'import ray' 2>/dev/null; then \
		OCTAVO_RAYLETS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(RERUN) -ra -s tests/cluster; \
	else echo "left out: ray cannot be installed here"; fi

test-wheels: dev ## the wheels in new environments of each Python that is found here, and `octavo tour` there, in some ten minutes
	@$(BIN)/python deploy/try_wheels.py

GPU_TESTS := tests/gpu tests/model/kernels tests/model/gpu
JOBS ?= 8
test-gpu: dev ## the tests that need a CUDA device, JOBS=8 at once since compiling kernels takes longest
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:benchmark -n $(JOBS) -m "not alone" $(GPU_TESTS)
	@$(BIN)/python -m pytest -p no:benchmark -m alone $(GPU_TESTS)

sanitize-gpu: dev ## every kernel under compute-sanitizer, memcheck and racecheck, in a few minutes on 16 cores
	@$(BIN)/python -m bench.gpu.sanitize

SEEDS ?= 0:100
sim: dev ## simulate the whole service under faults, SEEDS=0:1000 and more with SIM="--requests 1000 --jobs 4 --shrink"
	@$(BIN)/python -m sim --seeds $(SEEDS) $(SIM)

faults-long: dev ## the proofs that take minutes: fifty killed workers, ten thousand cancels; figures into docs/reliability.json
	@OCTAVO_FIGURES=docs/reliability.json OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m long tests/faults

SOAK ?= --minutes 30 --seed 1
soak: dev ## half an hour at 70 % load under random faults, SOAK="--minutes 5 --seed 2" for another; figures as above
	@OCTAVO_FIGURES=docs/reliability.json OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --json out/soak.json $(SOAK)

BENCH ?=
bench: dev ## this CPU's limits, Octavo, transformers and installed peers on the same work, as ratios; ten minutes and more; BENCH=--quick
	@OMP_WAIT_POLICY=passive $(BIN)/python -m bench.cpu.compare $(BENCH)

# In an environment of their own; llama.cpp is compiled, which takes minutes. ISA: once more for lesser instructions.
ISA ?=
bench-peers: dev ## OpenVINO GenAI and llama.cpp for `make bench`, in .bench-peers; ISA=avx2 for `OCTAVO_CPU_ISA=avx2 make bench`
	@$(BIN)/python -m bench.cpu.peers.install $(if $(ISA),--isa $(ISA))

SHAPE ?= 0.5B
LOAD_GENERATOR ?=
bench-gpu: dev ## steps, engine and transformers on a CUDA device, against the floor, JSON in out/; SHAPE=7B; LOAD_GENERATOR=FILE: gRPC too
	@$(BIN)/python -m bench.gpu.step --shape $(SHAPE) --profile --json out/gpu_step.json
	@$(BIN)/python -m bench.gpu.engine --shape $(SHAPE) --profile --json out/gpu_engine.json
	@$(BIN)/python -m bench.gpu.hf --shape $(SHAPE) --json out/gpu_hf.json
	@test -z "$(LOAD_GENERATOR)" || for cache in on off; do \
		$(BIN)/python -m bench.gpu.grpc --shape $(SHAPE) --load-generator "$(LOAD_GENERATOR)" \
			--out "out/gpu_grpc_cache_$$cache.json" -- --prefix-cache "$$cache"; done

# How long its parts may take, and how to run them one at a time: the module's text.
TP_SHAPE ?= 7B
RANKS ?= 1 2
TP ?=
bench-tp: dev ## one rank and several on this host's GPUs, in turns, beside the bars; TP_SHAPE=72B RANKS=2 TP="--brief --request"
	@$(BIN)/python -m bench.gpu.tensor_parallel --shape $(TP_SHAPE) --ranks $(RANKS) --json out/tensor_parallel_$(TP_SHAPE).json $(TP)

lint: dev ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

# mypy follows no mapping of folders to packages; in a folder of links they are where their names say.
types: dev
	@rm -rf .cache/types && mkdir -p .cache/types/octavo
	@ln -s $(CURDIR)/proto/octavo/* $(foreach folder,$(FOLDERS),$(CURDIR)/$(folder)) .cache/types/octavo/
	@MYPYPATH=.cache/types:integrations/dynamo $(BIN)/mypy -p octavo -p sim -p octavo_dynamo -p bench

format: dev ## rewrite the code in the one style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# An older generator than what the server runs with: stubs run with its versions of grpcio and protobuf and with later ones,
# and these are the lower ends of what proto/pyproject.toml allows.
GENERATOR := .venv-proto
proto: $(GENERATOR)/.installed dev ## generate the stubs from the .proto files, and docs/api-reference.md
	@$(GENERATOR)/bin/python -m grpc_tools.protoc -Iproto --plugin=protoc-gen-mypy=$(GENERATOR)/bin/protoc-gen-mypy \
		--python_out=proto --grpc_python_out=proto --mypy_out=proto $(PROTOS)
	@$(BIN)/python proto/contract.py page

# buf is no package of Python's; npm brings it. Where it cannot be had, tests/client/test_contract.py alone compares.
BUF := .cache/buf/node_modules/.bin/buf
breaking: ## buf: is the contract in style, and does it break callers of what was released
	@test -x $(BUF) || npm install --silent --no-save --no-fund --no-audit --prefix .cache/buf "@bufbuild/buf@^1.50" >/dev/null 2>&1 \
		|| { echo "left out: buf cannot be had from npm here"; exit 0; }; \
	$(BUF) lint && for released in proto/released/*.binpb; do $(BUF) breaking proto --against "$$released" || exit 1; done \
		&& echo "the contract breaks nobody"

# The tools have an environment of their own. UPGRADE=--upgrade takes the newest versions that pyproject.toml allows.
SUPPLY := .venv-supply-chain
UPGRADE ?=
LOCK = $(SUPPLY)/bin/uv pip compile --quiet --no-config --default-index https://pypi.org/simple --universal \
	--python-version 3.12 --generate-hashes --no-annotate --custom-compile-command "make lock" $(UPGRADE)
lock: $(SUPPLY)/.installed ## deploy/locks anew, from pyproject.toml and PyPI; UPGRADE=--upgrade for newer versions
	@for role in gateway worker-cpu worker-cuda; do \
		$(BIN)/python deploy/requirements.py $$role | $(LOCK) -o deploy/locks/$$role.txt - >/dev/null; done
	@$(LOCK) -o deploy/locks/smg.txt deploy/locks/smg.in >/dev/null

SBOM ?= out
sbom: $(SUPPLY)/.installed ## what each image has inside, as CycloneDX documents in out/
	@mkdir -p $(SBOM)
	@torch=$$(sed -n 's/^TORCH = "\(.*\)"/torch==\1+cpu/p' deploy/install_torch.py); \
	for lock in deploy/locks/*.txt; do role=$$(basename "$$lock" .txt); \
		{ cat "$$lock"; if [ "$$role" = worker-cpu ]; then echo "$$torch"; fi; } \
			| PYTHONWARNINGS=ignore $(SUPPLY)/bin/cyclonedx-py requirements --output-reproducible \
				--pyproject pyproject.toml -o "$(SBOM)/sbom-$$role.cdx.json" -; done
	@ls $(SBOM)/sbom-*.cdx.json

audit: $(SUPPLY)/.installed ## known vulnerabilities of what the images install
	@for lock in deploy/locks/*.txt; do \
		$(SUPPLY)/bin/pip-audit --disable-pip --require-hashes -r "$$lock"; done

pin-images: ## the images of others by the digests that their tags have now; needs docker
	@$(or $(PYTHON),python3) deploy/pin_images.py

$(GENERATOR)/.installed: Makefile
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(GENERATOR)/bin/python || $(PYTHON) -m venv $(GENERATOR)
	@$(GENERATOR)/bin/python -m pip --disable-pip-version-check install -q "grpcio-tools==1.72.1" "mypy-protobuf>=4,<6" "setuptools<81"
	@touch $@

$(SUPPLY)/.installed: deploy/supply-chain.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(SUPPLY)/bin/python || $(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/python -m pip --disable-pip-version-check install -q -r deploy/supply-chain.txt
	@touch $@

install: $(VENV)/.installed ## the environment to run Octavo

dev: $(VENV)/.installed-dev ## the environment to work on Octavo

clean: ## remove the environment
	rm -rf $(VENV)

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found; install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

# torch comes first: a plain range would bring gigabytes of CUDA's libraries where there is no GPU.
$(VENV)/.torch: $(VENV)/.created
	@$(BIN)/python deploy/install_torch.py --python $(BIN)/python
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py proto/pyproject.toml $(VENV)/.torch
	@echo "installing octavo and what it needs"
	@$(PIP) install --progress-bar on -e ./proto -e .
	@touch $@

# In a new environment at once: what is to be built of this checkout takes as long again after `make install`.
$(VENV)/.installed-dev: pyproject.toml setup.py proto/pyproject.toml $(VENV)/.torch
	@echo "installing what tests and linters need"
	@$(PIP) install --progress-bar on -e ./proto -e ".[dev]" \
		$$($(BIN)/python -c 'import torch; print("" if torch.version.cuda else "triton==$(TRITON) $(CUDA_COMPILER)")')
	@touch $(VENV)/.installed $@
