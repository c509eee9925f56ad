# One task file for people and CI. `make demo` runs the main job; `make test` passes the tests.
PY     ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SETUP  := .stamps/setup

.PHONY: setup demo test test-gpu check bench bench-gpu bench-failures stress soak chaos fuzz coverage clean help

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

bench-gpu: setup ## device memory between two processes; needs a GPU
	$(BIN)/python -m pip install -q ".[cuda]"
	$(BIN)/python -m benchmarks.gpu

test-gpu: setup  ## the tests that need a GPU, KILLS=13 for 52 killed processes
	$(BIN)/python -m pip install -q ".[cuda]"
	$(BIN)/python -m pytest -m gpu tests/gpu

bench-failures: setup  ## break things under kvferry and its peers; table and JSON
	$(BIN)/python -m benchmarks.failures

stress: setup    ## at least five minutes of load, leavers and killed processes
	$(BIN)/python -m pytest -m stress -s

soak: setup      ## 100,000 simulated hand-offs through faults, on 1,000 seeds; some minutes
	$(BIN)/kvferry chaos --seeds 1000 --steps 200

FUZZ_EXAMPLES ?= 20000
fuzz: setup      ## new inputs for every parser and table; FUZZ_EXAMPLES for each, 20000 by default
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest --timeout=0 \
		tests/protocol/test_fuzz_protocol.py tests/protocol/test_fuzz_http.py \
		$(wildcard tests/protocol/test_properties_*.py)

COVERED := src/kvferry/handoff.py src/kvferry/protocol/*.py
coverage: setup  ## fail below 95 % of lines and branches, in any file of the hand-off or the protocol
	$(BIN)/python -m pytest tests/unit/protocol tests/protocol/test_handoff_effects.py \
		tests/faults/test_handoff.py $(wildcard tests/protocol/test_properties_*.py) \
		--cov=kvferry.protocol --cov=kvferry.handoff --cov-branch --cov-report=term-missing
	@for file in $(wildcard $(COVERED)); do \
		$(BIN)/coverage report --include=$$file --fail-under=95 >/dev/null \
			|| { echo "$$file: less than 95 % is covered" >&2; exit 1; }; \
	done

chaos: setup     ## ten minutes of killed, frozen and cut off processes under load; root for the network
	$(BIN)/kvferry chaos --processes --minutes 10 --clients 64

clean:           ## remove what make made
	rm -rf .venv .venv-bench .stamps build dist src/*.egg-info src/kvferry/memory/*.so
