# Every target works on a fresh machine with Python 3.11 or later and make: the environment is made first,
# and made again only when pyproject.toml changes. Another interpreter and other versions have another one.
.DELETE_ON_ERROR:
.PHONY: help install demo test test-heavy test-transformers test-aot test-typed test-oldest test-vllm test-full versions lint format hooks figures docs dist clean

DEFAULT_PYTHON := $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
PYTHON ?= $(DEFAULT_PYTHON)
# Installed before everything else, so that no dependency brings in another build of torch.
TORCH ?= torch==2.13.0
# The version that tests run with; unset: the newest.
TRANSFORMERS ?= transformers
# A file of versions that nothing installed may leave (pip's --constraint); unset: none.
CONSTRAINTS ?=
# The published implementation, only for parity tests. Its own pins conflict with ours.
REFERENCE ?= dflash==0.1.0
PYTEST_ARGS ?=
TYPED ?= tests/cache tests/decoding tests/bridge/test_border.py tests/bridge/test_lowered.py
# Test processes; each may come to hold 3 GB.
WORKERS ?= 2

# `.venv` is the default interpreter with the default versions. Any other environment is named for its own:
# .venv-3.13, .venv-3.12-torch-transformers-5.15
VERSION_OF = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
INTERPRETER := $(call VERSION_OF,$(PYTHON))
$(if $(INTERPRETER),,$(error PYTHON=$(PYTHON): no such interpreter))
$(if $(filter 2.% 3.6 3.7 3.8 3.9 3.10,$(INTERPRETER)),$(error PYTHON=$(PYTHON): Python $(INTERPRETER) is too old; name 3.11 or later, as in PYTHON=python3.12))
SETS := $(filter-out torch==2.13.0,$(TORCH)) $(filter-out transformers,$(TRANSFORMERS)) $(basename $(notdir $(CONSTRAINTS)))
UNLIKE := $(strip $(filter-out $(call VERSION_OF,$(DEFAULT_PYTHON)),$(INTERPRETER)) $(SETS))
VENV := .venv$(if $(UNLIKE),-$(shell echo '$(strip $(INTERPRETER) $(SETS))' | sed 's/[^A-Za-z0-9.]\{1,\}/-/g; s/-$$//'))
BIN := $(VENV)/bin
# Of most modules that are installed none is ever imported, so what the demo imports is compiled alone. Others are
# kept as they are compiled, even if the caller sets PYTHONDONTWRITEBYTECODE, as many containers do: else each
# process compiles them anew.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
QUIETLY := $(BIN)/python make/quietly.py
# Stamps: empty files whose age says when a part of the environment was installed.
WITH_DEMO := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed
WITH_REFERENCE := $(VENV)/.installed-$(REFERENCE)
WITH_DOCS := $(VENV)/.installed-docs
WITH_DIST := $(VENV)/.installed-dist
WITH_LIBTPU := $(VENV)/.installed-libtpu
LIBTPU := $(CURDIR)/$(VENV)/libtpu
VLLM := .venv-vllm
WITH_VLLM := $(VLLM)/.installed
# Two OpenMP threads on busy cores are many times slower than one.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Most of the tests' time would be the compiler's, on programs that run once: without optimisation, XLA's older
# emitters and one LLVM module a program take 0.4 of it. The further cases compile as users do.
COMPILE_FAST := XLA_FLAGS="$$($(BIN)/python tests/support/__init__.py)"

help:
	@echo "make demo      a real pair answers a question, plainly and with DFlash"
	@echo "make test      run the tests (PYTEST_ARGS='-k name' to choose)"
	@echo "make test-heavy run the further cases that make test leaves out"
	@echo "make test-transformers run what transformers' own generation tests ask, of more families"
	@echo "make test-aot  compile for TPUs that are not there (installs libtpu)"
	@echo "make test-typed run the core's tests with every annotation checked"
	@echo "make test-oldest run make test with the lowest versions that pyproject.toml states"
	@echo "make test-vllm run the vLLM plug-in in vLLM, on the CPU (installs 4 GB; VLLM_PYTHON=... names a Python 3.12)"
	@echo "make test-full all but test-vllm; two and a half hours or so"
	@echo "make versions  run the tests, and keep the environment's versions in docs/results"
	@echo "make lint      check format, style and types;  make format  rewrite"
	@echo "make figures   fill the tables of README and docs from docs/results"
	@echo "make docs      build the site into build/site; warnings are errors"
	@echo "make dist      build and check what is uploaded, and run what is installed from there"
	@echo "make hooks     run the lint checks before every git commit"

install: $(INSTALLED)

demo: $(WITH_DEMO)
	$(BIN)/torch-dflash demo

test: $(WITH_REFERENCE)
	$(ONE_THREAD) $(COMPILE_FAST) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-heavy: $(WITH_REFERENCE)
	$(ONE_THREAD) $(BIN)/python -m pytest -m heavy -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)
	$(ONE_THREAD) $(BIN)/python -m pytest --hypothesis-profile=drawn tests/decoding/test_rule_kinds.py tests/decoding/test_rule_texts.py

# Its further cases are heavy ones, so `make test` and `make test-heavy` together run them too.
test-transformers: $(INSTALLED)
	$(ONE_THREAD) $(COMPILE_FAST) $(BIN)/python -m pytest -m "not aot" -n $(WORKERS) tests/transformers_suite $(PYTEST_ARGS)

test-aot: $(WITH_REFERENCE) $(WITH_LIBTPU)
	PYTHONPATH="$(LIBTPU)" $(ONE_THREAD) $(BIN)/python -m pytest -m aot $(PYTEST_ARGS)

# On the core's paths every annotation of both packages is executed: by jaxtyping, and by beartype. Not where
# drafters are read from files: a config takes fields that its signature does not name, which jaxtyping refuses.
test-typed: $(WITH_REFERENCE)
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
		-m "not aot" --jaxtyping-packages=torch_dflash,jax_bridge,beartype.beartype \
		--ignore=tests/decoding/test_lossless_layouts.py $(TYPED) $(PYTEST_ARGS)

test-oldest:
	$(MAKE) test CONSTRAINTS=build/lowest.txt

build/lowest.txt: pyproject.toml make/lowest.py
	@mkdir -p build
	$(PYTHON) make/lowest.py > $@

# vLLM's environment is its own: no version in it is moved. Its tests see none of the others' options.
test-vllm: $(WITH_VLLM)
	PYTHONPATH="$(CURDIR)/tests/in_vllm/site" LD_LIBRARY_PATH="$(CURDIR)/$(VLLM)/stubs" $(ONE_THREAD) $(VLLM)/env/bin/python -m pytest \
	    -c tests/in_vllm/pytest.ini --confcutdir tests/in_vllm tests/in_vllm $(PYTEST_ARGS)

test-full: test test-heavy test-aot test-typed test-oldest

# Keeps the versions of an environment in docs/results, if all tests pass there.
versions: $(WITH_REFERENCE)
	$(MAKE) test PYTEST_ARGS="--junitxml=build/tests.xml $(PYTEST_ARGS)"
	$(BIN)/python make/versions.py build/tests.xml

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python make/blocks.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: $(INSTALLED)
	$(BIN)/pre-commit install

figures: $(INSTALLED)
	$(BIN)/python benchmarks/figures.py

docs: $(WITH_DOCS)
	$(BIN)/python -m mkdocs build --strict

# What is built needs none of the checkout: it is installed where nothing else of ours lies, beside the same dependencies.
dist: $(WITH_DIST)
	rm -rf build/dist build/installed
	$(BIN)/python -m build --outdir build/dist
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/check-wheel-contents build/dist/*.whl
	$(BIN)/python -m venv build/installed
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$(build/installed/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
	build/installed/bin/python -m pip --disable-pip-version-check install --quiet --no-deps build/dist/*.whl
	cd build/installed && bin/torch-dflash --version && bin/python -I ../../make/smoke.py

clean:
	rm -rf .venv .venv-* build .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Order-only: the age of the interpreter's link says nothing about what is installed.
$(WITH_DEMO): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@rm -f $(VENV)/.installed*
	@$(QUIETLY) "install torch" $(INSTALL) "$(TORCH)"
	@$(QUIETLY) "install torch-dflash" $(INSTALL) --upgrade -e ".[demo]" "$(TRANSFORMERS)"
	@$(QUIETLY) "compile what is imported" $(BIN)/python -c "import torch_dflash.cli.comparison, jax_bridge.runtime"
	@touch $@

$(INSTALLED): $(WITH_DEMO)
	@$(QUIETLY) "install what tests need" $(INSTALL) -e ".[demo,train,grammar,serve,dev]"
	@touch $@

$(WITH_REFERENCE): $(INSTALLED)
	@$(QUIETLY) "install $(REFERENCE)" $(INSTALL) --no-deps "$(REFERENCE)"
	@touch $@

$(WITH_DOCS): $(INSTALLED)
	@$(QUIETLY) "install what docs need" $(INSTALL) -e ".[docs]"
	@touch $@

$(WITH_DIST): $(INSTALLED)
	@$(QUIETLY) "install what builds need" $(INSTALL) build check-wheel-contents twine
	@touch $@

$(WITH_VLLM): $(wildcard make/vllm/*)
	@rm -rf $(VLLM) && mkdir -p $(VLLM)
	sh make/vllm/install.sh $(VLLM)
	@touch $@

# The compiler that the installed jax asks for, without the rest of its tpu extra. It lies in a
# folder of its own: beside jax, every program would look for a TPU and print that there is none.
$(WITH_LIBTPU): $(INSTALLED)
	@$(QUIETLY) "install libtpu" $(INSTALL) --no-deps --upgrade --target "$(LIBTPU)" "$$($(BIN)/python -c \
	    'from importlib.metadata import requires; \
	    print(next(r.split(";")[0].strip() for r in requires("jax") if r.startswith("libtpu")))')"
	@touch $@
