# Each target sets up what it needs in .venv, with plain pip. Nothing is installed outside of it.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PLUGINS := $(sort $(dir $(wildcard plugins/[a-z]*/pyproject.toml)))
EDITABLE := -e . $(addprefix -e ,$(PLUGINS:/=))
DEMO := -e . -e plugins/torch -e plugins/hf_rollout -e plugins/processes -e plugins/rewards -e plugins/trainers -e 'plugins/tools[report,tensorboard]'
SOURCES := pyproject.toml constraints.txt requirements-dev.txt requirements-docs.txt $(wildcard plugins/*/pyproject.toml plugins/*/requirements*.txt)
# Tests often wait, for processes and for timeouts: three at once keep two cores busy.
JOBS ?= 3
PYTEST := OMP_NUM_THREADS=1 ENGINE_TEST_FORK=1 $(BIN)/python -m pytest -q --durations=10
# With bytecode kept, a process of the tests compiles neither the project nor the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo demo-control test test-full lint docs scoreboard curves curves-backends bench clean

install: .venv/.installed

.venv/.base: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --upgrade "setuptools>=77" wheel
	$(PIP) torch
	touch $@

.venv/.demo: .venv/.base pyproject.toml $(wildcard plugins/*/pyproject.toml)
	$(PIP) --no-build-isolation $(DEMO)
	touch $@

# torchao lies in a folder of its own for the tests of 8 bits: where it is installed, transformers imports it in every process.
.venv/.installed: .venv/.base $(SOURCES)
	$(PIP) -r requirements-dev.txt
	$(PIP) -r plugins/vllm_rollout/requirements-cpu.txt
	$(PIP) --no-deps -r plugins/vllm_rollout/requirements-cpu-no-deps.txt
	$(PIP) --no-deps --upgrade --target .venv/torchao torchao
	$(PIP) --no-build-isolation $(EDITABLE)
	touch $@ .venv/.demo

# The requirements of verifiers and openenv-core conflict with ours: each lies in an environment that slow tests start.
.venv/.worlds: .venv/.base
	for name in verifiers openenv-core; do $(PYTHON) -m venv .venv/$${name%-core} && .venv/$${name%-core}/bin/python -m pip install --quiet $$name || exit 1; done
	touch $@

# The browser of the slow tests of a report: Debian's, which root can install, and the client that drives it. Without it they are skipped.
.venv/.browser: .venv/.installed
	$(PIP) playwright
	command -v chromium || apt-get install -y chromium || echo "The tests in a browser are skipped: chromium cannot be installed."
	touch $@

# Backends of trackers that slow tests open and read back, in a folder of their libraries: some need other versions than ours.
.venv/.trackers: .venv/.base plugins/tools/pyproject.toml
	$(PIP) --upgrade --target .venv/trackers wandb mlflow-skinny sqlalchemy alembic trackio prometheus-client
	touch $@

demo: .venv/.demo
	$(BIN)/engine demo

demo-control: .venv/.demo
	$(BIN)/engine demo --control --folder demo-control

test: install
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not site"

# Most slow tests wait for each other's ranks or for a process that imports: a few files at a time. Those that use all cores
# with threads, or look at memory over minutes, have the machine for themselves.
test-full: test .venv/.worlds .venv/.browser .venv/.trackers
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "slow and not alone and not families and not gpu"
	$(PYTEST) -m "alone and not gpu"

# Words of the style guide (CONTRIBUTING.md) that have a plainer one: logged or sent, again, next to, continues, fix.
WORDS := told|anew|beside|goes on|go on|going on|mend|mends|mended|mending|whoever|nobody|somebody|way on|of its own|of their own|is there|are there

lint: install
	$(BIN)/ruff check .
	! git grep -nwiE '$(WORDS)' -- engine_core 'plugins/*/src/*.py'
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -m site tests/integration/test_built_site.py

docs: install
	$(BIN)/python docs/references.py
	$(BIN)/python docs/scoreboard.py
	$(BIN)/python docs/model_table.py
	$(BIN)/python docs/algorithm_tables.py
	$(BIN)/python docs/suite_table.py
	$(BIN)/python docs/dataset_table.py
	$(BIN)/python docs/recipe_table.py
	$(BIN)/sphinx-build --quiet --fresh-env --write-all -W --keep-going docs docs/_build
	@echo docs/_build/index.html

# Three hours: every suite of every train engine, and every backend with every family of models. The pages docs/reference/backends.md and
# docs/reference/models.md show the results.
scoreboard: install
	OMP_NUM_THREADS=1 ENGINE_TEST_FORK=1 $(BIN)/python docs/scoreboard.py --record
	OMP_NUM_THREADS=1 ENGINE_TEST_FORK=1 $(BIN)/python docs/model_table.py --record

curves: install
	$(BIN)/python benchmarks/curves/run.py

curves-backends: install
	$(BIN)/python benchmarks/curves/backends.py

bench: install
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv demo demo-control runs build dist docs/_build
