# Makefile: the ways to use this tree. `make demo` trains something, `make test` is what CI runs.
#
# PYTHON=... picks the interpreter (3.11 to 3.13) of .venv, JOBS=... how many compilers run at one time.

PYTHON ?= python3
JOBS ?= $(shell nproc)
BIN := .venv/bin
STAMPS := build/stamps
NATIVE := $(shell find native -type f)
NATIVE_TESTS := $(shell find tests/native -type f 2>/dev/null)
CXX_FILES := $(filter %.h %.cc,$(NATIVE) $(NATIVE_TESTS) \
    $(shell find benchmarks tests/fuzz -name '*.cc' -o -name '*.h'))
# What reads bytes of a peer, and for how long `make fuzz` searches each.
FUZZ_TARGETS := hello tcp_frames server_engine worker_engine verbs_signals
FUZZ_SECONDS ?= 60
# The extension module and the handlers are left out: the native tests, whose compiler commands are used, lack them.
TIDY_FILES := $(filter native/base/%.cc native/fabric/%.cc native/engine/%.cc,$(NATIVE))
# What is imported is compiled then: a small part of what is installed.
PIP_INSTALL := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile

# scikit-build-core starts CMake by itself; this reaches it.
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Tests start hundreds of processes, and each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: clang-tidy fuzz help demo test lint format bench wheel clean native-tests python-tests test-verbs
.DELETE_ON_ERROR:

help:
	@echo 'make demo    train on the digits data set with one server and two workers, on this machine'
	@echo 'make test    lint, native tests (plain and under both sanitizers), Python tests, test-verbs'
	@echo 'make test-verbs   what needs an RDMA device, in a virtual machine that has one'
	@echo 'make fuzz    search for bytes that break what reads them, with libFuzzer; FUZZ_SECONDS=60 for each target'
	@echo 'make lint    formatting, types, likely mistakes     make format  let the formatters write'
	@echo 'make bench   against the collectives that JAX has   make wheel   dist/*.whl'
	@echo 'make clean   remove .venv and everything built'

demo: $(STAMPS)/demo
	$(BIN)/jaxrdma launch --servers 1 --workers 2 examples/digits.py

test: $(STAMPS)/dev
	@$(BIN)/python -m tests.guest setup || true
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory native-tests
	@$(MAKE) --no-print-directory python-tests
	@$(MAKE) --no-print-directory test-verbs

# As many at a time as there are processors; but not two pairs of guests, each of which takes them all.
python-tests: $(STAMPS)/dev
	$(BIN)/pytest -n $(JOBS) --ignore tests/guest
	$(BIN)/pytest tests/guest

# Last in `test`: where it cannot run, it says so in the last line, and succeeds.
test-verbs: $(STAMPS)/dev
	@$(BIN)/python -m tests.guest suite

native-tests: native-test-release native-test-asan native-test-tsan

native-test-%: $(STAMPS)/dev
	@echo 'native tests: $*'
	@cd native && ../$(BIN)/cmake --preset $* --log-level=WARNING >/dev/null
	@cd native && ../$(BIN)/cmake --build --preset $* --parallel $(JOBS) >../build/native/$*.log \
	    || { cat ../build/native/$*.log; exit 1; }
	@cd native && ../$(BIN)/ctest --preset $* --parallel $(JOBS) --no-tests=error

# Searches from the kept inputs on; what it finds on the way stays in build/fuzz/, and an input that breaks something is
# written to build/fuzz/crash-... The last lines say how many were run, and how many are worth keeping.
fuzz: $(STAMPS)/dev
	@.ci/system-packages $(PYTHON) fuzz
	@cd native && ../$(BIN)/cmake --preset fuzz --log-level=WARNING >/dev/null
	@cd native && ../$(BIN)/cmake --build --preset fuzz --parallel $(JOBS) >../build/native/fuzz.log \
	    || { cat ../build/native/fuzz.log; exit 1; }
	@mkdir -p $(FUZZ_TARGETS:%=build/fuzz/%)
	@for target in $(FUZZ_TARGETS); do \
	    echo "fuzz: $$target for $(FUZZ_SECONDS) s"; \
	    build/native/fuzz/fuzz_$$target -max_total_time=$(FUZZ_SECONDS) -max_len=2048 -timeout=60 \
	        -artifact_prefix=build/fuzz/crash-$$target- build/fuzz/$$target tests/fuzz/corpus/$$target \
	        >build/fuzz/$$target.log 2>&1 || { tail -n 60 build/fuzz/$$target.log; exit 1; }; \
	    grep '^Done' build/fuzz/$$target.log; \
	    echo "    $$(ls build/fuzz/$$target | wc -l) inputs in build/fuzz/$$target"; \
	done

lint: $(STAMPS)/dev
	$(BIN)/ruff check --quiet --output-format concise .
	$(BIN)/ruff format --quiet --check --output-format concise .
	$(BIN)/basedpyright --level error
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# Slow, and its verdict depends on the system's headers: not part of lint.
clang-tidy: $(STAMPS)/dev
	@cd native && ../$(BIN)/cmake --preset release --log-level=WARNING >/dev/null
	@echo $(TIDY_FILES) | xargs -n 1 -P $(JOBS) $(BIN)/clang-tidy --quiet -p build/native/release 2>/dev/null

format: $(STAMPS)/dev
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CXX_FILES)

bench: $(STAMPS)/dev
	$(BIN)/python benchmarks/against_gloo.py

wheel: $(STAMPS)/dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist

# The environment. `demo` needs less than `dev`; both install the package so that its Python files are used where they
# are, and only a change of the native part or of pyproject.toml builds again. Where .venv has the very jax whose headers
# we build against, a second build needs no environment of its own and compiles only what changed.
PINNED_JAX := $(shell sed -n 's/^ *"jax==\(.*\)",/\1/p' pyproject.toml)
ISOLATION = $(shell $(BIN)/python -c "import jax, nanobind, scikit_build_core as _; \
    print('--no-build-isolation' if jax.__version__ == '$(PINNED_JAX)' else '')" 2>/dev/null)

$(STAMPS)/venv:
	@.ci/system-packages $(PYTHON) build
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo 'jaxrdma needs Python 3.11 or newer; take another by PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS) build/native
	@touch $@

$(STAMPS)/demo: $(STAMPS)/venv pyproject.toml $(NATIVE)
	$(PIP_INSTALL) --editable '.[examples]'
	@touch $@

# Before the build, which leaves verbs out where libibverbs has no headers.
$(STAMPS)/packages: .ci/system-packages
	@.ci/system-packages $(PYTHON) test
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/dev: $(STAMPS)/packages $(STAMPS)/venv pyproject.toml $(NATIVE)
	$(PIP_INSTALL) $(ISOLATION) --editable '.[examples,dev]'
	@touch $@ $(STAMPS)/demo
