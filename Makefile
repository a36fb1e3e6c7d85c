# Each target sets up what it needs in .venv, so that every one of them works on a fresh clone.
#
#   make demo     the main job: a conductor, two prefill and two decode workers with a real
#                 transformer, one pool over two nodes, and an overload
#   make test     the tests that fit in ten minutes on two cores
#   make coverage   the same, and which lines they did not run: a third longer
#   make test-slow  the kill -9 and corruption campaigns
#   make lint     ruff and mypy
#   make bench    the performance tables: store, network, conductor, kernels and HBM tier, each row
#                 against a limit measured in the same run
#
# Demo, tests and the network's table start a Redis of their own: apt-get install redis-server.
# As root, test-slow also breaks networks, in namespaces of its own: apt-get install iptables.
#
# TORCH names the torch requirement. The default is the release that this project is tested with;
# on a machine without a GPU, choose a CPU build, for example: make demo TORCH=torch==2.13.0+cpu

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PACKAGES := kvstore messenger kernels conductor bench
# Nearly all files of tests stay whole, as their fixtures start servers. `loadfile` would keep all of
# them whole, but runs only one of several tests with one name, as those of schemathesis have. The
# slow campaigns measure, and have the cores alone.
PARALLEL := --numprocesses logical --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv demo test coverage test-slow lint format bench clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[engines,kernels,bench,redis,conductor,dev]"
	touch $@

# Type checkers do not follow editable installs: they read this folder of links instead.
build/links/tiffin: Makefile
	mkdir -p $@
	for package in $(PACKAGES); do ln -sfn ../../../$$package $@/$$package; done
	touch $@

demo: venv
	$(BIN)/tiffin demo

test: venv
	$(BIN)/pytest $(PARALLEL)

coverage: venv
	$(BIN)/pytest $(PARALLEL) --cov --cov-report=term-missing:skip-covered

test-slow: venv
	$(BIN)/pytest -m slow

lint: venv build/links/tiffin
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(addprefix build/links/tiffin/,$(PACKAGES))

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	$(BIN)/tiffin bench store
	$(BIN)/tiffin bench network
	$(BIN)/tiffin bench conductor
	$(BIN)/tiffin bench kernels
	$(BIN)/tiffin bench hbm

clean:
	rm -rf $(VENV) build out
