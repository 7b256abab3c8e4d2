# Every target makes what it needs: a clean clone can start with any of them.
.DEFAULT_GOAL := help
.PHONY: help setup build demo test lint format soak mutations versions update-test-names clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup:  ## system packages, .venv, the package and the C++ tests; does only what is missing
	@scripts/setup.sh test

build: setup  ## compile what changed and install it into .venv

demo:  ## train the sample on two ranks; STEPS=20 for a short look
	@scripts/setup.sh demo
	@scripts/demo.sh $(if $(STEPS),--steps $(STEPS))

test: setup  ## all C++ and Python tests
	@scripts/test.sh

lint:  ## clang-format, clang-tidy on changed sources, ruff, mypy
	@scripts/setup.sh lint
	@scripts/lint.sh

format:  ## rewrite all sources in the project's format
	@scripts/setup.sh lint
	@scripts/format.sh

soak: setup  ## sanitizers and repetitions (long)
	@scripts/soak.sh

mutations: setup  ## break the checkpointing engine on purpose, and see its tests fail (long)
	@scripts/mutations.sh

versions: setup  ## build and try the package beside each supported PyTorch (long); VERSIONS="2.12.1 2.13.0" for some
	@scripts/versions.sh $(VERSIONS)

update-test-names: setup  ## rewrite tests/test_names.txt from what the runners find
	@.venv/bin/python scripts/check_test_names.py --build build/editable --update

clean:  ## remove build results, keep .venv
	rm -rf build
