# One command for each thing a person wants from a checkout; `make` alone lists them.
# Needs Python >= 3.11 with venv, Rust and a C compiler; what is missing is named with its remedy.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules

# The interpreter that makes the environment; and the environment, made if it is not there.
PYTHON ?= python3
VENV ?= .venv
# Words for the commands behind `make demo`, `make bench`, `make gpu-check`, `make stress`, `make soak`,
# `make mutations` and `make test-ops`, and how long `make fuzz` runs a target.
DEMO ?=
BENCH ?=
GPU_CHECK ?=
STRESS ?=
SOAK ?=
OPS ?=
# The interpreters that `make wheel` installs the wheel into; empty: the oldest and newest on PATH.
PYTHONS ?=
# The folder `test` of a checkout of PyTorch.
TORCH_TESTS ?=
MUTATIONS ?=
SECONDS ?= 60

ENV_PYTHON := $(abspath $(VENV))/bin/python
PIP := $(ENV_PYTHON) -m pip --disable-pip-version-check --no-input
PYTHON_FOLDERS := python tests benches
RUST_MIN := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
# Continuous integration builds what was committed; at a desk a changed manifest updates the lock.
LOCKED := $(if $(CI),--locked)

# rustup's own place for cargo, which a shell started before its installation does not know.
export PATH := $(PATH):$(HOME)/.cargo/bin
# Under another HOME, PATH still leads to cargo, but not to rustup's toolchains: they lie beside it.
CARGO_FOUND := $(shell PATH='$(PATH)' command -v cargo)
RUSTUP_BESIDE := $(abspath $(dir $(CARGO_FOUND))../../.rustup)
ifeq ($(RUSTUP_HOME)$(wildcard $(HOME)/.rustup/toolchains/*),)
ifneq ($(wildcard $(RUSTUP_BESIDE)/toolchains/*),)
export RUSTUP_HOME := $(RUSTUP_BESIDE)
endif
endif

# The wheel is built again when one of these changed. Folders stand among them: a file that went
# away changes its folder only.
SOURCES := $(shell find rust python -name __pycache__ -prune -o -print) \
	$(wildcard Cargo.* pyproject.toml)

# What builds the wheel, in an environment of its own: the pins are for that and for nothing else.
WHEEL_TOOLS := target/wheel/tools
WHEEL_PINS := tests/wheel/requirements.txt
# The newest glibc that the wheel may need. torch's own wheels need this one, so an older one would
# win no machine.
GLIBC_MAX := 2.28

# What is installed is remembered in the environment itself, one stamp for each set of extras; a `+`
# in a stamp's name is a comma for pip. The test extras contain the others.
comma := ,
DEMO_EXTRAS := demo$(if $(findstring --model,$(DEMO)),+transformers)
DEMO_STAMP := $(VENV)/.ssdtrain-$(DEMO_EXTRAS)
TEST_STAMP := $(VENV)/.ssdtrain-demo+test
CONTAINED_STAMPS := $(VENV)/.ssdtrain-demo $(VENV)/.ssdtrain-demo+transformers

.PHONY: help
help: ## this list
	@echo 'make [PYTHON=python3] [VENV=.venv] TARGET'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r target text; do printf '  %-11s %s\n' "$$target" "$$text"; done

.PHONY: demo
demo: need-rust $(DEMO_STAMP) ## train with keep, recompute and offload, and compare; DEMO="--steps 5"
	$(ENV_PYTHON) -m ssdtrain demo $(DEMO)

.PHONY: demo-whole
demo-whole: need-rust $(DEMO_STAMP) ## train with AdamW in a seventh of the memory that it needs; DEMO="--memory 512MiB"
	$(ENV_PYTHON) -m ssdtrain demo --whole $(DEMO)

.PHONY: test
test: lint ## every kind of test, small: lints, cargo test, pytest on the installed wheel
	# What the core does with a GPU is tried on the fake one; without it those tests say so.
	folder=$$(PYTHONPATH=tests/support:tests/fake_device $(ENV_PYTHON) tests/fake_device/fake_build.py); \
	if [ -n "$$folder" ]; then export SSDTRAIN_FAKE_CUDA="$$folder/libcuda.so.1"; fi; \
	if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run $(LOCKED); cargo test --doc $(LOCKED); \
	else \
		cargo test $(LOCKED); \
	fi
	# -P: the checkout is not on sys.path, so the tests import what was installed.
	$(ENV_PYTHON) -P -m pytest -n auto --maxprocesses 4 --dist worksteal

.PHONY: test-long
test-long: need-rust $(TEST_STAMP) ## what takes longer, on top of test: about half an hour
	$(MAKE) loom
	$(MAKE) asan
	$(MAKE) fuzz SECONDS=20
	$(ENV_PYTHON) -P -m pytest -m 'long and not gpu' -n auto --maxprocesses 4 --dist worksteal
	$(MAKE) mutations

.PHONY: lint
lint: need-rust need-rust-lints $(TEST_STAMP) ## cargo fmt, clippy, ruff, mypy, stubtest
	cargo fmt --all --check
	# The fuzz targets are a workspace of their own; a lock that is behind would end `make fuzz` in CI.
	cargo metadata --locked --format-version 1 --manifest-path rust/fuzz/Cargo.toml >/dev/null
	$(ENV_PYTHON) -m ruff check $(PYTHON_FOLDERS)
	$(ENV_PYTHON) -m ruff format --check $(PYTHON_FOLDERS)
	# What takes long goes side by side, and the recipe ends with the last of it.
	trap wait EXIT; \
	$(ENV_PYTHON) -m mypy --strict & strict=$$!; \
	$(ENV_PYTHON) -P -m mypy.stubtest --mypy-config-file tests/support/stubtest.ini \
		--ignore-unused-allowlist --allowlist tests/support/stubtest-allowlist.txt \
		ssdtrain._core & stubs=$$!; \
	PYO3_PYTHON=$(ENV_PYTHON) cargo clippy --workspace --all-targets $(LOCKED) -- -D warnings; \
	wait $$strict; wait $$stubs

.PHONY: bench
bench: need-rust ## raw I/O throughput of the store (cargo bench); BENCH="..."
	cargo bench $(LOCKED) --bench raw_io $(BENCH)

# Whatever installed ssdtrain: here nothing is built and nothing fetched.
GPU_PYTHON := $(if $(wildcard $(ENV_PYTHON)),$(ENV_PYTHON),$(PYTHON))
.PHONY: gpu-check
gpu-check: ## what ssdtrain does on this machine's GPU, in eight minutes; GPU_CHECK="--dir DIR"
	@$(call fail_function); $(GPU_PYTHON) -P -c 'import ssdtrain, torch, pytest' || fail 'ssdtrain,' \
		'PyTorch or pytest is missing in $(GPU_PYTHON). Install them there: $(GPU_PYTHON) -m pip' \
		'install dist/ssdtrain-*.whl pytest (make wheel builds the wheel, also on another machine)'
	$(GPU_PYTHON) benches/gpu_check.py $(if $(findstring --dir,$(GPU_CHECK)),,--dir .) $(GPU_CHECK)

.PHONY: loom
loom: need-rust ## ticket, waker and queue through every order of threads
	RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=target/loom CARGO_PROFILE_RELEASE_LTO=off \
		cargo test $(LOCKED) --release --test loom

# What cargo-fuzz passes, as far as a stable compiler takes it; --target keeps it from build scripts.
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
FUZZ_FLAGS := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
	-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
	-Ccodegen-units=1 -Cdebug-assertions=yes -Coverflow-checks=yes --cfg fuzzing

.PHONY: fuzz
fuzz: need-rust ## request splitter and allocator under libFuzzer; SECONDS=60 for each
	RUSTFLAGS='$(FUZZ_FLAGS)' cargo build $(LOCKED) --release --target $(HOST) \
		--manifest-path rust/fuzz/Cargo.toml --target-dir target/fuzz
	for target in splitter extents; do \
		mkdir -p target/fuzz/corpus/$$target; \
		target/fuzz/$(HOST)/release/$$target -max_total_time=$(SECONDS) -max_len=400 \
			-artifact_prefix=target/fuzz/$$target- target/fuzz/corpus/$$target; \
	done

# Only Rust's own nightly flag switches sanitizers on; RUSTC_BOOTSTRAP lends it to the stable one.
.PHONY: asan
asan: need-rust ## unit tests, conformance and simulation under AddressSanitizer
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/asan \
		cargo test $(LOCKED) --target $(HOST) --lib --test store --test overwrite --test read_into --test simulation

.PHONY: stress
stress: need-rust $(TEST_STAMP) ## kill training 200 times, look for what is left; STRESS="--kills 20"
	PYTHONPATH=tests/support $(ENV_PYTHON) tests/long/stress_kill.py $(STRESS)

.PHONY: soak
soak: need-rust $(TEST_STAMP) ## train over failing disks for 30 minutes; SOAK="--minutes 5"
	PYTHONPATH=tests/support $(ENV_PYTHON) tests/long/soak.py $(SOAK)

.PHONY: test-ops
test-ops: need-rust $(TEST_STAMP) ## every operator sample of torch from the disk; OPS="--part 1/8"
	PYTHONPATH=tests/support $(ENV_PYTHON) tests/long/operators.py $(OPS)

.PHONY: test-torch
test-torch: need-rust $(TEST_STAMP) ## PyTorch's own test_autograd.py; TORCH_TESTS=FOLDER
	@$(call fail_function); test -n '$(TORCH_TESTS)' || fail 'TORCH_TESTS is not set; give the' \
		'folder `test` of a checkout of PyTorch: make TORCH_TESTS=FOLDER test-torch'
	PYTHONPATH=tests/support $(ENV_PYTHON) tests/long/torch_suite.py $(TORCH_TESTS)

.PHONY: mutations
mutations: need-rust $(TEST_STAMP) ## remove each defence: its tests must fail; MUTATIONS="gate"
	PYTHONPATH=tests/support $(ENV_PYTHON) tests/long/mutations.py $(MUTATIONS)

.PHONY: wheel
# Otherwise the linker and what starts it would leave 50 MB in the user's own cache.
wheel: export ZIG_GLOBAL_CACHE_DIR := $(CURDIR)/target/wheel/zig
wheel: export CARGO_ZIGBUILD_CACHE_DIR := $(CURDIR)/target/wheel/zigbuild
wheel: need-rust need-readelf $(WHEEL_TOOLS)/.installed ## dist/: wheel and sdist, proved in fresh environments; PYTHONS="python3.11 python3.13"
	rm -f dist/ssdtrain-*
	# Not --sdist: that builds from the sdist's files, whose times are all the same, and cargo would
	# not see that one of them changed.
	PATH='$(abspath $(WHEEL_TOOLS))/bin':"$$PATH" maturin build --release --locked --zig \
		--compatibility manylinux_$(subst .,_,$(GLIBC_MAX)) --target-dir target/wheel --out dist
	$(WHEEL_TOOLS)/bin/maturin sdist --out dist
	$(WHEEL_TOOLS)/bin/python tests/wheel/distributions.py --glibc-max $(GLIBC_MAX) dist
	$(WHEEL_TOOLS)/bin/python tests/wheel/fresh_install.py dist --scratch target/wheel \
		--pythons '$(PYTHONS)'

.PHONY: defences
defences: $(VENV)/bin/python ## write the table of defences in docs/internals/correctness.md
	PYTHONPATH=tests/support $(ENV_PYTHON) tests/support/defences.py

.PHONY: clean
clean: ## remove what builds and runs left here; the environment stays
	rm -rf target dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf demo.json demo.png demo-whole.json demo-whole.png gpu-check.json ssdtrain-demo-*
	find python tests benches -name __pycache__ -prune -exec rm -rf {} +
	rm -f $(VENV)/.ssdtrain-*

.PHONY: distclean
distclean: clean ## clean, and remove .venv
	rm -rf .venv

# --- the environment ----------------------------------------------------------

# Checks the interpreter that is to make an environment.
define check_python
$(call fail_function); \
	command -v $(PYTHON) >/dev/null || fail '$(PYTHON) was not found; ssdtrain needs Python 3.11' \
		'or newer. Install it: sudo apt-get install python3 python3-venv'; \
	version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
		|| fail '$(PYTHON) does not run. Install Python: sudo apt-get install python3 python3-venv'; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$(PYTHON) is Python" \
		"$$version; ssdtrain needs 3.11 or newer. Install one and name it:" \
		'sudo apt-get install python3.11 python3.11-venv && make PYTHON=python3.11 $(MAKECMDGOALS)'; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || fail "$(PYTHON) has no venv module (or no" \
		"ensurepip), which makes the environment. Install it: sudo apt-get install" \
		"python$$version-venv"
endef

$(VENV)/bin/python:
	@$(check_python)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ssdtrain-%: $(SOURCES) $(VENV)/.ssdtrain-checkout
	@$(call fail_function); \
	$(ENV_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail 'the Python in' \
		'$(VENV) is too old; ssdtrain needs 3.11 or newer. Name another environment: make VENV=...'; \
	$(ENV_PYTHON) -m pip --version >/dev/null 2>&1 || fail '$(VENV) has no pip, which installs' \
		'ssdtrain there. Install it: $(ENV_PYTHON) -m ensurepip'
	@$(ENV_PYTHON) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || \
		echo 'Installing torch into $(VENV) too: about 5 GB and a few minutes, this once.'
	$(PIP) install '.[$(subst +,$(comma),$*)]'
	@touch $@ $(if $(findstring test,$*),$(CONTAINED_STAMPS))

$(WHEEL_TOOLS)/.installed: $(WHEEL_PINS)
	@$(check_python)
	rm -rf $(WHEEL_TOOLS)
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
		-r $(WHEEL_PINS)
	@touch $@

# An environment may serve several checkouts: the one installed last is remembered.
$(VENV)/.ssdtrain-checkout: FORCE | $(VENV)/bin/python
	@echo '$(CURDIR)' | cmp -s - $@ || echo '$(CURDIR)' > $@

.PHONY: FORCE
FORCE:

# --- what a bare machine may lack ---------------------------------------------

fail_function = fail() { echo "make: $$*" >&2; exit 1; }

.PHONY: need-readelf
need-readelf:
	@$(call fail_function); command -v readelf >/dev/null || fail 'readelf was not found; it lists' \
		'which glibc the wheel needs. Install it: sudo apt-get install binutils'

.PHONY: need-rust
need-rust:
	@$(call fail_function); \
	install='sudo apt-get install rustup && rustup default stable (or see https://rustup.rs)'; \
	command -v cargo >/dev/null || fail "cargo was not found; the core of ssdtrain is written in" \
		"Rust. Install Rust $(RUST_MIN) or newer: $$install"; \
	version=$$(rustc --version 2>/dev/null | cut -d' ' -f2) && cargo --version >/dev/null 2>&1 \
		|| fail "cargo and rustc are there but do not run. Choose a toolchain: rustup default stable"; \
	printf '%s\n' '$(RUST_MIN)' "$$version" | sort -CV || fail "Rust is $$version; ssdtrain needs" \
		"$(RUST_MIN) or newer. Update it: rustup update stable; or, if apt installed it: $$install"; \
	command -v cc >/dev/null || fail 'cc was not found; Rust links with the C compiler.' \
		'Install it: sudo apt-get install build-essential'

.PHONY: need-rust-lints
need-rust-lints:
	@$(call fail_function); \
	cargo fmt --version >/dev/null 2>&1 || fail 'cargo fmt was not found; the tests check the' \
		'formatting. Install it: rustup component add rustfmt (Rust from apt: sudo apt-get' \
		'install rustfmt)'; \
	cargo clippy --version >/dev/null 2>&1 || fail 'cargo clippy was not found; the tests check' \
		'lints. Install it: rustup component add clippy (Rust from apt: sudo apt-get install' \
		'rust-clippy)'
