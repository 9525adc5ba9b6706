# make up: a cluster on this machine.  make test: every test.  Each sets up what it needs, once.

VENV := .venv
BIN := $(VENV)/bin
export KVASS_PORT ?= 8000
SOURCES := setup.py $(wildcard common/native/src/*)
LIBRARY := common/native/libkvass.so
SEEDS ?= 10000
# Other ones each time: it prints them, and a failure names its own.
SEEDS_FROM ?= $(shell date +%s)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help up test check soak clean

help: ## Show this text
	@echo "Kvass: LLM serving with prefill and decode apart and the KV cache as a shared store."
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo
	@echo "  KVASS_PORT=8001 make up                                moves the gateway's port"
	@echo "  SEEDS=20000 make soak                                  soaks for longer"
	@echo "  KVASS_UP_ARGS='--prefill 2 --decode 2 --store 3' make up   adds options of 'kvass up'"

up: $(VENV)/installed $(LIBRARY) ## Install, fetch the model, start a cluster; Ctrl-C stops it
	@exec $(BIN)/kvass up --port $(KVASS_PORT) $(KVASS_UP_ARGS)

test: $(VENV)/installed-dev $(LIBRARY) ## Install, then the checks and every test
	@infra/check
	@$(BIN)/pytest -n 2 --dist loadfile -m "not process"
	@exec $(BIN)/pytest -n 2 --dist loadfile -m process

check: $(VENV)/installed-dev $(LIBRARY) ## Format, lint, types, import contracts, tidiness
	@infra/check
	@exec $(BIN)/pytest -q tests/test_tidy.py tests/test_packaging.py

soak: $(VENV)/installed-dev $(LIBRARY) ## Thousands of simulated clusters; property tests, with many more examples
	@$(BIN)/python tests/simulation/repeat.py $(SEEDS_FROM) --count $(SEEDS)
	@$(BIN)/pytest -m "not process and not model" --hypothesis-profile=soak
	@KVASS_FUZZ_S=900 $(BIN)/pytest -s --timeout 0 tests/simulation/test_fuzz_calls.py tests/simulation/test_fuzz_frames.py
	@KVASS_KILLS=500 $(BIN)/pytest -s --timeout 0 tests/processes/test_flash_processes.py -k kills
	@KVASS_CHAOS_S=1200 exec $(BIN)/pytest -s tests/processes/test_chaos.py

clean: ## Remove what was installed and built (not the model's cache)
	rm -rf $(VENV) $(LIBRARY) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: constraints.txt pyproject.toml
	@infra/setup $(VENV)

$(VENV)/installed-dev: constraints.txt pyproject.toml
	@infra/setup $(VENV) dev

# The install above builds it too; this is for sources that have changed since.
$(LIBRARY): $(SOURCES)
	@if command -v g++ >/dev/null; then \
		echo "kvass: compiling its library"; \
		$(BIN)/python setup.py --quiet build_ext --inplace; \
	else echo "kvass: no C++ compiler: it goes on without its compiled library, more slowly"; fi
