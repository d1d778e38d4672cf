# The short way to everything; CMakeLists.txt holds how it is built. `make help` lists the targets.
#
# Each target first lets tools/install-dependencies install what it needs (MEGALOOM_INSTALL=no leaves that out).
# Build folders: build/ (normal), build-asan/, build-tsan/, build-fuzz/.

MAKEFLAGS += --no-print-directory

BUILD ?= build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# More options for the first configuration of build/, such as -DMEGALOOM_MPI=OFF.
CMAKE_OPTIONS ?=
# Texts for the demo: a folder, one document a file. Without it, the Perl manuals of the Debian package perl-doc.
DATA ?=
# A Python environment with torch, for `make bench-torch`; made outside the tree.
VENV ?=
# Seconds that `make fuzz` gives each reader.
FUZZ_SECONDS ?= 60
# Where `make install` puts everything; DESTDIR, as packagers know it, comes in front.
PREFIX ?= /usr/local
DESTDIR ?=
# Which tests `make test` runs, and how (any options of ctest).
TESTS ?=

# Tests start more ranks than a small machine has cores, and CI runs as root.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export OMPI_MCA_rmaps_base_oversubscribe = 1

CTEST = ctest --output-on-failure --no-label-summary --parallel $(JOBS)
FUZZ = $(patsubst tests/fuzz/%.c,fuzz_%,$(filter-out tests/fuzz/driver.c,$(wildcard tests/fuzz/*.c)))

LEAK_LIST = $(CURDIR)/tests/sanitizer-suppressions
# ThreadSanitizer of gcc 12 cannot place its shadow where the kernel spreads mappings widely.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

# build.ninja is there after a configuration that worked; from then on ninja configures again when it has to.
define configure
test -f "$(1)/build.ninja" || cmake -S . -B "$(1)" -G Ninja $(2)
endef

# Each target is one line of commands that use all cores by themselves.
.NOTPARALLEL:

.PHONY: all test test-long check check-format check-arrows check-code sanitize sanitize-threads fuzz demo demo-long \
        install uninstall bench bench-checkpoint bench-loader bench-torch format clean help install-build install-check

all: install-build ## build into build/; the command is build/megaloom
	@$(call configure,$(BUILD),$(CMAKE_OPTIONS))
	@cmake --build "$(BUILD)" --parallel $(JOBS)

test: all ## build, then run the tests (TESTS='-R layout' narrows them)
	@$(CTEST) --test-dir "$(BUILD)" --no-tests=error -LE '^long$$' $(TESTS)

test-long: all ## the same with the tests that take minutes
	@$(CTEST) --test-dir "$(BUILD)" --no-tests=error $(TESTS)

check: check-format check-arrows check-code ## format, arrows between folders, cppcheck

check-format: install-check
	@tools/check-format

check-arrows:
	@tools/check-arrows

check-code: install-check
	@tools/check-code -j $(JOBS)

# Leaves out what starts processes by mpirun, whose libraries leak, and the command-line cases.
sanitize: install-build ## all tests but those of MPI and of the command under AddressSanitizer and UBSan
	@$(call configure,build-asan,-DMEGALOOM_WERROR=ON -DMEGALOOM_SANITIZE=address$(,)undefined)
	@cmake --build build-asan --parallel $(JOBS)
	@ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 \
	    LSAN_OPTIONS=suppressions=$(LEAK_LIST):print_suppressions=0 \
	    $(CTEST) --test-dir build-asan --no-tests=error -LE '^(mpi|cli|long)$$' $(TESTS)

# Left out: tests that start the same ranks again and again to compare numbers or files, which take too long here.
sanitize-threads: install-build ## the tests that start thread ranks under ThreadSanitizer
	@$(call configure,build-tsan,-DMEGALOOM_WERROR=ON -DMEGALOOM_SANITIZE=thread -DMEGALOOM_MPI=OFF)
	@cmake --build build-tsan --parallel $(JOBS)
	@TSAN_OPTIONS=second_deadlock_stack=1 \
	    $(FIXED_ADDRESSES) $(CTEST) --test-dir build-tsan --no-tests=error -LE '^(mpi|cli|long)$$' \
	    -R '^(unit\.(base|comm|runtime|tensor|parallel|pipeline)_|unit\.data_preprocess$$|parallel\.|golden\.hf$$|example)' \
	    -E '^parallel\.(save_load|reshard_offline|resume_exactly|load_model|lent_buffers|plan_memory|plan_traffic)$$' $(TESTS)

fuzz: install-check install-build ## each reader of files for a minute of random input (FUZZ_SECONDS)
	@$(call configure,build-fuzz,-DCMAKE_C_COMPILER=clang -DMEGALOOM_FUZZ=ON -DMEGALOOM_SENTENCEPIECE=OFF -DMEGALOOM_WERROR=ON -DMEGALOOM_SANITIZE=address$(,)undefined)
	@cmake --build build-fuzz --parallel $(JOBS) --target $(FUZZ)
	@LSAN_OPTIONS=suppressions=$(LEAK_LIST):print_suppressions=0 tools/run-fuzzers build-fuzz $(FUZZ_SECONDS)

demo: all ## train a small Llama on the Perl manuals, or on DATA=path/to/texts
	@tools/run-demo "$(BUILD)" examples/demo.yaml "$(DATA)"

demo-long: all ## the same for about 20 minutes
	@tools/run-demo "$(BUILD)" examples/demo-long.yaml "$(DATA)"

install: all ## put headers, libraries, the command and its manual below PREFIX (/usr/local)
	@DESTDIR="$(DESTDIR)" cmake --install "$(BUILD)" --prefix "$(PREFIX)"

uninstall: ## remove what install put below PREFIX
	@tools/uninstall "$(DESTDIR)$(PREFIX)"

bench: all ## the speed of training, as a table and BUILD/bench-train.json (ROUNDS=3, MODELS="small gpt2")
	@cmake --build $(BUILD) --parallel $(JOBS) --target bench_train
	@bench/run-train $(BUILD)

bench-loader: all ## the speed of the loader beside what training takes from it (ROUNDS=5, MTOKENS=100)
	@cmake --build $(BUILD) --parallel $(JOBS) --target bench_data
	@bench/run-loader $(BUILD)

bench-checkpoint: all ## saving and loading against the disk of FOLDER=. (MIB=2048)
	@cmake --build $(BUILD) --parallel $(JOBS) --target bench_checkpoint
	@for ranks in 1 2; do $(BUILD)/bench_checkpoint --ranks $$ranks --folder $(or $(FOLDER),.) --mib $(or $(MIB),2048); done

bench-torch: all ## the same beside PyTorch from VENV=path/to/venv
	@test -x "$(VENV)/bin/python" || { echo "bench-torch: give VENV=path, a Python environment with torch" >&2; exit 2; }
	@cmake --build $(BUILD) --parallel $(JOBS) --target bench_train
	@bench/run-train $(BUILD) "$(VENV)/bin/python"

format: install-check ## lay all C files out as .clang-format says
	@tools/check-format --fix

clean: ## remove the build folders
	rm -rf "$(BUILD)" build-asan build-tsan build-fuzz

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' Makefile

install-build:
	@tools/install-dependencies build

install-check:
	@tools/install-dependencies check

, := ,
