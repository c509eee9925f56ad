# One task file for people and CI. `make demo` runs the main job; `make test` passes the tests.
PY     ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SETUP  := .stamps/setup

.PHONY: setup demo test check bench bench-failures stress clean help

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | sort

setup: $(SETUP)  ## make the virtual environment and install kvferry with all that tests need

$(SETUP): pyproject.toml setup.py scripts/setup.sh src/kvferry/memory/_copy.c
	PY="$(PY)" VENV="$(VENV)" sh scripts/setup.sh
	@mkdir -p .stamps && touch $@

demo: setup      ## prefill, decode and router on this machine; eight prompts; a summary
	$(BIN)/kvferry demo

test: setup      ## all tests but the long soaks
	$(BIN)/python -m pytest -m "not stress and not bench and not gpu"

check: setup     ## style, types, size of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/size.py

bench: setup     ## measure against peers and limits; table and JSON
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.handoff_cost

bench-failures: setup  ## break things under kvferry and its peers; table and JSON
	$(BIN)/python -m benchmarks.failures

stress: setup    ## at least five minutes of load, leavers and killed processes
	$(BIN)/python -m pytest -m stress -s

clean:           ## remove what make made
	rm -rf .venv .venv-bench .stamps build dist src/*.egg-info src/kvferry/memory/*.so
