# What a user types. Everything is installed into .venv, nothing elsewhere.
#   make PYTHON=/path/to/python3.12 setup    uses another Python for it

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BEGIN := $(shell date +%s)

# Images of containers set it; then every process that the demo and the tests start compiles all of mlxdist again.
unexport PYTHONDONTWRITEBYTECODE

# On a terminal pip shows its downloads and, with --verbose, what is compiled; in a pipe or a file errors alone.
pip = @if [ -t 1 ]; then how=$(1); else how='--quiet --quiet'; fi; \
  $(BIN)/python -m pip --disable-pip-version-check install $$how
# What builds mlxdist, what it needs, and what the demo and the tests need.
REQUIREMENTS = import tomllib; of = tomllib.load(open("pyproject.toml", "rb")); project = of["project"]; \
  extras = [project["optional-dependencies"][name] for name in ("lm", "test", "bench")]; \
  lines = sum(extras, of["build-system"]["requires"] + project["dependencies"]); \
  print(*(line for line in lines if not line.startswith("mlxdist")), sep="\n")

# Python sources run from where they are. Only their list is built in, so a new or removed file means a new build.
FILES := $(sort $(shell find mlxdist native -name '*.py' -o -name '*.[ch]' -o -name '*.cpp'))
FILES := $(filter-out native/tests/%,$(FILES))
NATIVE := native/CMakeLists.txt $(wildcard native/cmake/*) $(filter native/%,$(FILES))

.PHONY: help setup lint demo test test-long test-rxe sanitize fuzz chaos check-macos docs clean FORCE
.DELETE_ON_ERROR:

help:
	@echo "make setup        make $(VENV), install mlxdist and what it needs, build the native code (once)"
	@echo "make lint         check form, types, imports and C: ruff, mypy, import-linter, clang-format, clang-tidy, shellcheck"
	@echo "make demo         two ranks train a small language model and generate text with it"
	@echo "make test         run the tests"
	@echo "make test-long    the tests that take minutes: builds from nothing and for macOS, random programs, large arrays"
	@echo "make test-rxe     real verbs over soft-RoCE, in a virtual machine; needs Debian packages, and says which"
	@echo "make sanitize     the tests in C under the address, undefined-behaviour and thread sanitizers; test-long has them, too"
	@echo "make fuzz         fuzz everything that reads bytes from outside, for SECONDS=60 each; needs clang"
	@echo "make chaos        collectives while ranks are killed and stopped and messages are lost, for MINUTES=60"
	@echo "make check-macos  compile all native code for macOS on arm64 and look up every symbol it needs; on any machine"
	@echo "make docs         build the documentation site in build/site; a broken link is an error"
	@echo "make clean        remove $(VENV) and everything built"

setup: $(VENV)/.built
	@$(if $(filter $@,$(MAKECMDGOALS)),echo 'mlxdist is set up in $(VENV). Next: make demo; or $(BIN)/mlxdist --help')

# What clang-tidy reads is what the build has compiled.
SHELL_SCRIPTS = $(shell git grep -lE '^#!.*sh$$' -- .ci scripts)
C_SOURCES = $(shell git ls-files '*.c' '*.h' '*.cpp')
# GCC compiles the kernels for processors that clang would need other flags for.
TIDY = $(filter %.c %.cpp,$(filter-out native/tests/% native/reduce/kernels_% tests/% benchmarks/%,$(C_SOURCES)))
lint: setup $(VENV)/.lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/run-clang-tidy.py -quiet -clang-tidy-binary $(BIN)/clang-tidy -p $(firstword $(wildcard build/*/)) $(TIDY)
	$(BIN)/shellcheck --severity=warning -x $(SHELL_SCRIPTS)

demo: setup
	$(BIN)/mlxdist launch -n 2 -- $(BIN)/python examples/train_and_generate.py

# Three files at a time: tests of ranks and jobs wait more than they compute.
test: setup
	$(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --durations=10

test-long: setup check-macos $(VENV)/.atheris $(VENV)/.lm-eval
	$(BIN)/python -m pytest -m long --durations=40

test-rxe: setup
	$(BIN)/python -m pytest -m rxe

sanitize: setup
	$(BIN)/python -m pytest -m sanitize

SECONDS ?= 60
fuzz: setup $(VENV)/.atheris
	$(BIN)/python scripts/fuzz.py --seconds $(SECONDS)

MINUTES ?= 60
chaos: setup
	$(BIN)/python scripts/chaos.py --minutes $(MINUTES)

# Two builds, against MLX's wheels for macOS 14 and 26, which it takes from PyPI once.
check-macos: $(VENV)/.ziglang
	$(BIN)/python scripts/macos/check.py

docs: setup $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis demo-model demo.json
	find mlxdist native tests examples scripts -name __pycache__ -prune -exec rm -rf {} +

# MLX and nanobind come first: the native code is compiled against the MLX that is installed.
$(VENV)/.built: $(VENV)/.packages $(VENV)/.files $(NATIVE) mlxdist/version.py
	@echo '3/3 mlxdist: compiling its C and C++ ...'
	$(call pip,--verbose) --no-build-isolation --no-deps --editable .
	@touch $@ && echo "set up in $$(($$(date +%s) - $(BEGIN))) s"

$(VENV)/.packages: pyproject.toml constraints.txt | $(VENV)/.python
	@echo '2/3 Python packages: MLX, mlx-lm, what builds mlxdist and tests it ...'
	@$(BIN)/python -c '$(REQUIREMENTS)' > $(VENV)/requirements.txt
	$(call pip) --constraint constraints.txt --requirement $(VENV)/requirements.txt
	@touch $@

$(VENV)/.lint: $(VENV)/.packages
	$(call pip) --constraint constraints.txt $$($(BIN)/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["lint"])')
	@touch $@

$(VENV)/.ziglang: $(VENV)/.packages
	$(call pip) --constraint constraints.txt ziglang
	@touch $@

# The fuzzer for Python. 35 MB, only for those who fuzz; where there is no wheel of it the tests go without.
$(VENV)/.atheris: $(VENV)/.packages
	-$(call pip) --only-binary atheris atheris
	@touch $@

# For `mlx_lm evaluate`; with what it needs 200 MB.
$(VENV)/.lm-eval: $(VENV)/.packages
	-$(call pip) --constraint constraints.txt lm-eval==0.4.13
	@touch $@

$(VENV)/.docs: $(VENV)/.packages
	$(call pip) --constraint constraints.txt $$($(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
	  print(*project["project"]["optional-dependencies"]["docs"])')
	@touch $@

$(VENV)/.files: FORCE | $(VENV)/.python
	@echo '$(FILES)' | cmp -s - $@ || echo '$(FILES)' > $@

$(VENV)/.python:
	@$(PYTHON) scripts/check_machine.py
	@echo '1/3 a virtual environment in $(VENV), with $(PYTHON) ...'
	@$(PYTHON) -m venv $(VENV)
	@touch $@
