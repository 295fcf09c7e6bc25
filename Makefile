# make train   sets everything up and runs the main job
# make test    sets everything up and runs the tests that prove each promise once
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip would compile what it installs on one core, for minutes. The first command compiles what it imports by itself, a
# sixth of it; for the many processes of the tests all cores compile everything, but for what nothing here imports.
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# Packages have files for later Pythons, which do not compile.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x transformers/models $(VENV)/lib/python3*/site-packages || true

# Processes of the tests compile the source once, not each for itself. Three for two cores: tests wait for hosts to start.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder

.PHONY: train test test-all test-further again check slow gpu soak mutants docs docs-settings docs-images cluster-files dist sbom licences try-install clean

train: $(VENV)/.installed
	$(BIN)/orchestrator train $(ARGS)

test: check
	$(PYTEST) -m 'not slow and not gpu and not extended' $(ARGS)

# the same, then further proofs
test-all: test test-further

# more cases, more hosts, more faults
test-further: $(VENV)/.installed-dev
	$(PYTEST) -m 'extended and not slow and not gpu' $(ARGS) || [ $$? = 5 ]  # 5: ARGS chose no such test

# the tests that failed last, if they are few, one after another
MOST_AGAIN := 4
again: $(VENV)/.installed-dev
	@$(BIN)/python -m harness.failed_tests $(MOST_AGAIN)
	$(BIN)/python -m pytest -m 'not slow and not gpu' --last-failed --last-failed-no-failures none -v $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow --timeout=3600 $(ARGS)

# hosts killed a hundred times over one run, and plain Ray Train beside it; make soak ARGS='--minutes 10 --every 60' for the goodput
soak: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.recovery.chaos --plain 5 $(ARGS)

# mutation testing of the numeric core; make mutants ARGS='--count 100 --seed 0 experts/moe/gate.py'
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutation.run $(ARGS)

# the documentation site, in site/; a link that leads nowhere fails
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# docs/settings.md, docs/coming-from.md and docs/combinations.md, from the settings of the code
docs-settings: $(VENV)/.installed-dev
	$(BIN)/python docs/generate_settings.py
	$(BIN)/python docs/generate_coming_from.py
	$(BIN)/python -m docs.generate_combinations

# docs/images, from small runs and their pages in Chromium
docs-images: $(VENV)/.installed-dev
	$(BIN)/python -m docs.take_screenshots $(ARGS)

# the files of cluster/, as 'orchestrator launch' writes them
cluster-files: $(VENV)/.installed-dev
	$(BIN)/python cluster/generate.py

# wheel and source distribution, in dist/
dist: $(VENV)/.installed-dev
	$(BIN)/python -m release.build

# dist/sbom.json: the packages that this one needs, in CycloneDX's form; make sbom ARGS='--extras hf s3'
sbom: $(VENV)/.installed-dev
	$(BIN)/python -m release.sbom $(ARGS)

# licences of all dependencies; one that is unknown or not allowed fails
licences: $(VENV)/.installed-dev
	$(BIN)/python -m release.licences $(ARGS)

# both distributions in new environments, outside of the repository; make try-install PYTHONS='python3.11 python3.13'
PYTHONS ?= $(PYTHON)
try-install: $(VENV)/.installed-dev
	$(BIN)/python -m release.try_install --pythons $(PYTHONS)

# tests on a GPU, with the packages of $(PYTHON): several processes share it, then those that need it alone run.
# make gpu ARGS='--outcomes FILE' keeps each outcome; with --rest the tests that passed there are left out
GPU_TESTS := $(PYTHON) -m pytest -p harness.outcomes tests/gpu
gpu:
	$(GPU_TESTS) -m 'gpu and not whole_gpu and not slow' -n 4 --dist worksteal $(ARGS); first=$$?; \
	$(GPU_TESTS) -m 'gpu and (whole_gpu or slow)' --timeout=3600 $(ARGS); second=$$?; \
	[ $$first -eq 0 -o $$first -eq 5 ] && [ $$second -eq 0 -o $$second -eq 5 ]

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed; found: $$($(PYTHON) --version). Use: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes the first time) ..."
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV), with what the tests need (a few minutes the first time) ..."
	$(PIP) -e '.[dev]'
	$(COMPILE)
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache .hypothesis *.egg-info
