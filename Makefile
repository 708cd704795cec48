# The two commands of the README are `make demo` and `make test`.

PYTHON := .venv/bin/python
CARGO ?= cargo
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
export DESTDIR
CAMPAIGN_SEQUENCES ?= 100000
CAMPAIGN_KILLS ?= 250 # of each kind
FUZZ_SECONDS ?= 300
SOAK_MINUTES ?= 60
FUZZ_BYTES_MAX := 1208 # the settings and 200 operations
LOOM_CRATES := dormouse-timeline dormouse-alloc dormouse-device dormouse-storage dormouse-offload

# Tests run the libraries of the development profile: debug assertions on, and no second build with LTO.
TEST_LIBS := $(CURDIR)/target/debug

.PHONY: demo test lib test-lib cli wheel install docs python check test-rust test-loom test-kernels test-python test-benches test-gpu test-oldest standin bench-alloc bench-offload bench-schedule bench-models test-programs bench-programs test-trainers test-verl test-megatron bench-trainers bench-parallel bench-replay bench-history bench-see test-page pictures soak traces gpu-bundle kernels fuzz-alloc campaign test-disks sanitize clean

demo: lib python ## one shared-prefix update of a real language model, dense and through dormouse
	$(PYTHON) -m dormouse.demo run $(if $(FULL),--full)

# Loom's build and the Python suites keep one core each busy, so two of them run at a time.
test: check test-rust ## the tests; ALL=1: also every case of each Python test, and the slow ones
	$(MAKE) -j2 --output-sync=target test-loom test-python test-kernels test-benches test-gpu

lib: ## target/release/libdormouse.so and libdormouse_preload.so
	$(CARGO) build --release --locked -p dormouse -p dormouse-preload

cli: ## target/release/dormouse, the program
	$(CARGO) build --release --locked -p dormouse-cli

wheel: python ## target/wheel/dormouse-*.whl: the package, both libraries and the program, as `pip install .` installs them
	rm -rf target/wheel
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir target/wheel .
	$(PYTHON) -m auditwheel show target/wheel/*.whl

# Trainers' packages are not in .venv, so the module for Megatron-core has no page.
PYTHON_API := dormouse $(addprefix dormouse.,hf history trl verl openrlhf nemo_rl)

docs: python ## pages of the three APIs, without warnings: target/doc (Rust), target/docs/python, target/docs/c; needs doxygen
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	mkdir -p target/docs
	doxygen ffi/Doxyfile
	PYTHONPATH=python $(PYTHON) -W error::UserWarning -W error::RuntimeWarning -m pdoc --docformat restructuredtext \
		--output-directory target/docs/python $(PYTHON_API)

# DORMOUSE_BUILT names a folder that has the libraries and the program already.
install: $(if $(DORMOUSE_BUILT),,lib cli) ## the C library, header, preload library and program below $(DESTDIR)$(PREFIX)
	scripts/install $(or $(DORMOUSE_BUILT),target/release) $(PREFIX) $(LIBDIR)

python: ## the checkout's own Python environment in .venv
	scripts/setup-python

check: ## formatting, lints, documentation
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

# All targets: with the features of the tests' own dependencies, so that `cargo test` compiles nothing anew.
test-lib: ## the libraries that the tests load, in target/debug, and all Rust tests
	$(CARGO) build --workspace --exclude dormouse-preload --all-features --all-targets --locked
	$(CARGO) build -p dormouse-preload --locked

test-rust: test-lib
	DORMOUSE_TEST_LIBS=$(TEST_LIBS) $(CARGO) test --workspace --all-features --locked

test-loom: ## the lock-free pieces under loom's exhaustive scheduler
	RUSTFLAGS="--cfg loom" $(CARGO) test --profile loom --lib --locked --target-dir target/loom \
		$(addprefix -p ,$(LOOM_CRATES)) loom

fuzz-alloc: ## random operations on the allocator; needs a nightly compiler and `cargo install cargo-fuzz`
	mkdir -p target/fuzz/found
	cd alloc/fuzz && $(CARGO) +nightly fuzz run --fuzz-dir . --target-dir $(CURDIR)/target/fuzz \
		--sanitizer none operations $(CURDIR)/target/fuzz/found corpus/operations -- \
		-max_total_time=$(FUZZ_SECONDS) -max_len=$(FUZZ_BYTES_MAX)

campaign: ## random sequences on files and devices that fail, then processes killed; CAMPAIGN_SEED=… runs one again, CAMPAIGN_FIRST=… begins with a seed
	CAMPAIGN_SEQUENCES=$(CAMPAIGN_SEQUENCES) CAMPAIGN_FIRST=$(CAMPAIGN_FIRST) CAMPAIGN_SEED=$(CAMPAIGN_SEED) \
		CAMPAIGN_LENGTH=$(CAMPAIGN_LENGTH) $(CARGO) test --locked -p dormouse-offload --lib -- campaign --nocapture --test-threads=1
	$(if $(CAMPAIGN_SEED),,CAMPAIGN_KILLS=$(CAMPAIGN_KILLS) $(CARGO) test --locked -p dormouse-offload --test killed -- \
		--nocapture --test-threads=1)

test-disks: ## real file systems on loop devices that fill up, shut down, lose their device or flip bits; needs root
	$(CARGO) build --release --locked -p dormouse-offload --example disk_faults
	tests/disk-faults/run

sanitize: ## tests under AddressSanitizer, ThreadSanitizer, Miri and valgrind; needs a nightly toolchain with rust-src and miri
	scripts/sanitize

kernels: python ## compiles kernels/cuda/ into the fat binary that is committed beside it
	$(PYTHON) scripts/build-kernels

test-kernels: python
	$(PYTHON) scripts/build-kernels --check

# In parts by name, so that two cores share the longest suite.
PYTHON_PARTS := a-c d-l m-r s-z
TEST_PYTHON := $(addprefix test-python-,$(PYTHON_PARTS))
.PHONY: $(TEST_PYTHON)
# ALL=1: every case of every test, as continuous integration runs them.
PYTEST_PYTHON = PYTHONPATH=python DORMOUSE_LIB=$(TEST_LIBS)/libdormouse.so \
	LD_PRELOAD=$(TEST_LIBS)/libdormouse_preload.so $(PYTHON) -m pytest -q $(if $(ALL),,--few-cases) python/tests

test-python: $(TEST_PYTHON)

$(TEST_PYTHON): test-python-%: test-lib python
	$(PYTEST_PYTHON) --ignore-glob='*/test_[!$*]*'

test-benches: test-lib python ## what the benchmarks themselves are made of
	DORMOUSE_LIB=$(TEST_LIBS)/libdormouse.so $(PYTHON) -m pytest -q benches

standin: python ## a GPU for tests where there is none: driver, CUDA runtime, NVML
	$(CARGO) build --release --locked -p dormouse-standin-cuda
	$(PYTHON) tests/standin-cudart/build
	ln -sf ../release/libstandin_cuda.so target/standin/libcuda.so.1

PYTEST_GPU = PYTHONPATH=python DORMOUSE_LIB=$(TEST_LIBS)/libdormouse.so LD_PRELOAD=$(CURDIR)/target/standin/libcudart.so.13 \
	LD_LIBRARY_PATH=$(CURDIR)/target/standin $(PYTHON) -m pytest -q python/tests_gpu

# ALL=1: again while the host is ahead of the GPU, by works that take time and by more of them.
test-gpu: test-lib python ## real PyTorch, and dormouse in it, on the stand-in GPU
	$(PYTHON) tests/standin-cudart/build
	ln -sf ../debug/libstandin_cuda.so target/standin/libcuda.so.1
	$(PYTEST_GPU)
	$(if $(ALL),STANDIN_CUDA_RUN_AHEAD=1 STANDIN_CUDA_WORK_NS=20000 $(PYTEST_GPU))
	$(if $(ALL),STANDIN_CUDA_RUN_AHEAD=4 $(PYTEST_GPU))

OLDEST := $(CURDIR)/target/oldest
ON_OLDEST = PYTHONPATH=python DORMOUSE_LIB=$(TEST_LIBS)/libdormouse.so LD_PRELOAD=$(OLDEST)/libcudart.so.13 LD_LIBRARY_PATH=$(OLDEST)

test-oldest: test-lib python ## as test-gpu on the oldest torch that is supported, and the GPU suite at small sizes; not in `make test`: they are downloaded
	scripts/setup-oldest
	mkdir -p $(OLDEST)
	target/oldest-venv/bin/python tests/standin-cudart/build $(OLDEST)
	ln -sf ../debug/libstandin_cuda.so $(OLDEST)/libcuda.so.1
	$(ON_OLDEST) target/oldest-venv/bin/python -m pytest -q python/tests_gpu
	$(ON_OLDEST) target/oldest-venv/bin/python scripts/gpu-suite --tiny --limit tests=900 --lib $(TEST_LIBS)/libdormouse.so \
		--gpu-check $(TEST_LIBS)/gpu-check --out $(OLDEST)/results

bench-alloc: lib standin ## caching allocators side by side: target/bench/alloc.json, and a table
	$(PYTHON) benches/alloc/bench.py

bench-offload: python ## the file tier beside fio and DeepNVMe, what marks cost, how long trainers wait: target/bench/offload.json, and a table
	$(CARGO) build --release --locked -p dormouse-storage -p dormouse-offload --examples
	$(PYTHON) benches/offload/bench.py $(if $(DEEPSPEED_PYTHON),--deepspeed-python $(DEEPSPEED_PYTHON))

bench-schedule: lib python ## planning and balance beside others, simulated steps beside measured ones: target/bench/schedule.json, and a table
	$(CARGO) build --release --locked -p dormouse-schedule -p dormouse-parallel --examples
	$(PYTHON) benches/schedule/bench.py

bench-models: lib python ## every causal architecture of transformers, exact or refused: docs/models.md, target/bench/models.json, and a table
	$(PYTHON) benches/models/bench.py

test-programs: lib python ## other people's programs under the preload library: same results as without it
	scripts/setup-programs
	$(PYTHON) benches/programs/bench.py --check --out target/bench/programs-check.json

bench-programs: lib python ## what they cost beside glibc: target/bench/programs.json, and a table
	scripts/setup-programs
	$(PYTHON) benches/programs/bench.py

test-trainers: test-lib python ## TRL's trainers and DeepSpeed's engine with shared prompts beside the unmodified ones; not in `make test`: their packages are downloaded
	scripts/setup-trainers
	PYTHONPATH=python DORMOUSE_LIB=$(TEST_LIBS)/libdormouse.so LD_PRELOAD=$(TEST_LIBS)/libdormouse_preload.so \
		target/trainers-venv/bin/python -m pytest -q python/tests_trainers

test-verl: test-lib python ## verl's actor worker with shared prompts beside the unmodified one; not in `make test`: verl's packages are downloaded
	scripts/setup-verl
	PYTHONPATH=python DORMOUSE_LIB=$(TEST_LIBS)/libdormouse.so LD_PRELOAD=$(TEST_LIBS)/libdormouse_preload.so \
		target/verl-venv/bin/python -m pytest -q python/tests_verl
	PYTHONPATH=python DORMOUSE_LIB=$(TEST_LIBS)/libdormouse.so LD_PRELOAD=$(TEST_LIBS)/libdormouse_preload.so \
		target/verl-venv/bin/python -m pytest -q python/tests/test_token_scores.py

test-megatron: test-lib python ## Megatron-core with shared prompts beside itself, on one to four ranks over gloo; not in `make test`: it is downloaded
	scripts/setup-megatron
	PYTHONPATH=python DORMOUSE_LIB=$(TEST_LIBS)/libdormouse.so LD_PRELOAD=$(TEST_LIBS)/libdormouse_preload.so \
		target/megatron-venv/bin/python -m pytest -q python/tests_megatron

bench-trainers: lib python ## lines and seconds of other people's trainers with shared prompts: target/bench/trainers.json, and a table
	scripts/setup-trainers
	target/trainers-venv/bin/python benches/trainers/bench.py

bench-parallel: lib python ## Megatron's schedule with shared prompts, played pipelines, plans of 4,096 ranks: target/bench/parallel.json, and a table
	$(CARGO) build --release --locked -p dormouse-parallel --example plan_ranks
	scripts/setup-megatron
	target/megatron-venv/bin/python benches/parallel/bench.py

bench-replay: lib python ## 100 updates of SmolLM2 on the recorded rollouts, dense and shared: target/bench/replay.json, a table and a picture
	$(PYTHON) benches/replay/bench.py

bench-history: lib python ## drafts beside prompt lookup and n-grams, filtered tokens beside masked ones, assignment beside random: target/bench/history.json, and a table
	$(CARGO) build --release --locked -p dormouse-history --examples
	$(PYTHON) benches/history/bench.py

bench-see: lib cli wheel ## what recording costs, how fast a page of a million events opens, the wheel: target/bench/see.json, and a table
	$(CARGO) build --release --locked -p dormouse-timeline --examples
	scripts/setup-browser
	$(PYTHON) benches/see/bench.py

test-page: ## a dump's page in a real browser: clicked, dragged, touched, compared; not in `make test`: the browser is downloaded
	$(CARGO) build --release --locked -p dormouse-timeline --example synthetic_step
	scripts/setup-browser
	target/browser-venv/bin/python -m pytest -q timeline/tests/page

pictures: ## the documents' pictures of the page, taken by the browser
	$(CARGO) build --release --locked -p dormouse-timeline --example synthetic_step
	scripts/setup-browser
	target/browser-venv/bin/python timeline/tests/page/pictures.py

soak: lib python ## steps for SOAK_MINUTES: does anything grow? target/bench/soak.json, and a table
	$(CARGO) build --release --locked -p dormouse-offload --example soak_steps
	$(PYTHON) benches/soak/soak.py --minutes $(SOAK_MINUTES)

traces: lib standin ## records and generates benches/traces/ anew
	$(PYTHON) benches/traces/generate.py --all
	$(PYTHON) benches/traces/record.py --all

gpu-bundle: lib python ## target/gpu-bundle.tar.gz: what a machine with a GPU needs, without cargo or network
	$(CARGO) build --release --locked -p dormouse-gpu-check
	$(PYTHON) scripts/gpu_suite/bundle.py

clean:
	rm -rf target .venv
