# Every target works on a fresh machine with Python 3.11 and make: the environment is made first,
# and made again only when pyproject.toml changes, or other versions are asked for.
.DELETE_ON_ERROR:
.PHONY: help install demo test test-heavy test-transformers test-aot test-typed test-oldest test-full lint format hooks figures docs clean

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
# Installed before everything else, so that no dependency brings in another build of torch.
TORCH ?= torch==2.13.0
# The version that tests run with; unset: the newest.
TRANSFORMERS ?= transformers
# The published implementation, only for parity tests. Its own pins conflict with ours.
REFERENCE ?= dflash==0.1.0
PYTEST_ARGS ?=
TYPED ?= tests/cache tests/decoding tests/bridge/test_border.py tests/bridge/test_lowered.py
# Test processes; each may come to hold 3 GB.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled as they are imported: of most that are installed none ever is. They are kept then, even
# if the caller sets PYTHONDONTWRITEBYTECODE, as many containers do: else each process compiles them anew.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
QUIETLY := $(BIN)/python make/quietly.py
# Stamps: empty files whose age says when a part of the environment was installed. With other versions than those
# that the first is named for, all is installed anew.
WITH_DEMO := $(VENV)/.installed-demo-$(firstword $(shell echo "$(TORCH) $(TRANSFORMERS)" | cksum))
INSTALLED := $(VENV)/.installed
WITH_REFERENCE := $(VENV)/.installed-$(REFERENCE)
WITH_DOCS := $(VENV)/.installed-docs
WITH_LIBTPU := $(VENV)/.installed-libtpu
LIBTPU := $(CURDIR)/$(VENV)/libtpu
# Two OpenMP threads on busy cores are many times slower than one.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Most of the tests' time would be the compiler's, on programs that run once: without optimisation, XLA's older
# emitters and one LLVM module a program take 0.4 of it. The further cases compile as users do.
COMPILE_FAST := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1"

help:
	@echo "make demo      a real pair answers a question, plainly and with DFlash"
	@echo "make test      run the tests (PYTEST_ARGS='-k name' to choose)"
	@echo "make test-heavy run the further cases that make test leaves out"
	@echo "make test-transformers run what transformers' own generation tests ask, of more families"
	@echo "make test-aot  compile for TPUs that are not there (installs libtpu)"
	@echo "make test-typed run the core's tests with every annotation checked"
	@echo "make test-oldest run make test with the oldest transformers that is supported"
	@echo "make test-full all five; two and a half hours or so"
	@echo "make lint      check format, style and types;  make format  rewrite"
	@echo "make figures   fill the tables of README and docs from docs/results"
	@echo "make docs      build the site into build/site; warnings are errors"
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

# In an environment of its own.
test-oldest:
	$(MAKE) test VENV=.venv-oldest TRANSFORMERS="transformers==5.15.*"

test-full: test test-heavy test-aot test-typed test-oldest

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

hooks: $(INSTALLED)
	$(BIN)/pre-commit install

figures: $(INSTALLED)
	$(BIN)/python benchmarks/figures.py

docs: $(WITH_DOCS)
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-oldest build/site .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Order-only: the age of the interpreter's link says nothing about what is installed.
$(WITH_DEMO): pyproject.toml | $(BIN)/python
	@rm -f $(VENV)/.installed*
	@$(QUIETLY) "install torch" $(INSTALL) "$(TORCH)"
	@$(QUIETLY) "install torch-dflash" $(INSTALL) --upgrade -e ".[demo]" "$(TRANSFORMERS)"
	@touch $@

$(INSTALLED): $(WITH_DEMO)
	@$(QUIETLY) "install what tests need" $(INSTALL) -e ".[demo,train,grammar,dev]"
	@touch $@

$(WITH_REFERENCE): $(INSTALLED)
	@$(QUIETLY) "install $(REFERENCE)" $(INSTALL) --no-deps "$(REFERENCE)"
	@touch $@

$(WITH_DOCS): $(INSTALLED)
	@$(QUIETLY) "install what docs need" $(INSTALL) -e ".[docs]"
	@touch $@

# The compiler that the installed jax asks for, without the rest of its tpu extra. It lies in a
# folder of its own: beside jax, every program would look for a TPU and print that there is none.
$(WITH_LIBTPU): $(INSTALLED)
	@$(QUIETLY) "install libtpu" $(INSTALL) --no-deps --upgrade --target "$(LIBTPU)" "$$($(BIN)/python -c \
	    'from importlib.metadata import requires; \
	    print(next(r.split(";")[0].strip() for r in requires("jax") if r.startswith("libtpu")))')"
	@touch $@
