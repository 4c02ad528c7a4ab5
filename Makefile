# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
OUT ?= demo
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint lock clean

help:
	@echo "make demo   set up .venv, train, measure, check, draw; results go to ./$(OUT)"
	@echo "make test   set up .venv with the test packages and run every test"
	@echo "make lint   style, types and import rules"
	@echo "make lock   renew the exact versions in requirements/ from pyproject.toml"
	@echo "make clean  remove .venv and caches"

demo: $(VENV)/.ready-demo
	@echo "== Running the demo; results go to ./$(OUT)"
	@$(BIN)/stability demo --out $(OUT) --force

test: $(VENV)/.ready-test
	@echo "== Running the tests"
	@$(BIN)/pytest -n 2 --dist worksteal

lint: $(VENV)/.ready-test
	@echo "== Style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== Types"
	@$(BIN)/mypy
	@echo "== Imports"
	@$(BIN)/lint-imports

$(VENV)/.ready-%: requirements/%.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Expected Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=..."; exit 1; }
	@echo "== Setting up $(VENV) from requirements/$*.txt (exact versions)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/$*.txt
	@if [ -f requirements/$*-no-deps.txt ]; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/$*-no-deps.txt; fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lock: $(VENV)/.ready-test
	@$(BIN)/python -m pip install --quiet pip-tools
	@for extra in demo test; do \
	  $(BIN)/pip-compile --quiet --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header --no-annotate \
	    --allow-unsafe --extra $$extra --output-file requirements/$$extra.txt pyproject.toml requirements/build.in && \
	  sed -i -E 's/^(torch==[0-9.]+)\+.*/\1/; /^--/d; /^pip==/d; /^softmax-stability/d; /^#/d; /^$$/d' requirements/$$extra.txt || exit 1; \
	done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
