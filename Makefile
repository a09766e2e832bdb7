# The daily habits. `make` alone lists them.
.DEFAULT_GOAL := help
CUDA ?= cuda13
.PHONY: help setup test fast slow gpu lint format types check golden bench all

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup:  ## install fagen and the tools into the active environment (CUDA=cuda12 for CUDA 12)
	pip install -e ".[$(CUDA),dev]"

test:  ## every test but the slow ones; what needs a GPU is skipped where there is none
	pytest

fast:  ## the tests of a change in progress: those that need no GPU, a process for each core
	pytest -n auto -m "not gpu and not slow"

slow:  ## the tests that compile kernels by the hundred, or with nvcc: half an hour on two cores
	pytest -m slow

gpu:  ## the tests that need a device
	pytest -m gpu

lint:  ## style, without changing anything
	ruff check .
	ruff format --check .

format:  ## fix the style
	ruff check --fix .
	ruff format .

types:  ## mypy --strict
	mypy

check:  ## compile and judge every stored record and a sample of each space
	fagen check

golden:  ## rewrite tests/golden after a template changed; read the diff
	python tests/test_golden.py

bench:  ## measure against the peers and rewrite the README's table and picture
	fagen bench --sm80-config benchmarks/results/h200_sm80_template.yaml \
	  --json benchmarks/results/h200.json --readme README.md --plot benchmarks/results/h200.png

all: lint types test  ## what has to pass before a change lands
