# make demo         sets up .venv, trains the default model and its dense twin on the CPU, and compares them
# make test         sets up .venv with the test tools, checks style and types, reads the documentation
#                   and runs the tests, but for those that train or measure from end to end, further cases ("slow"),
#                   and comparisons with packages that .venv need not have ("peers")
# make test-all     the same with all tests: it adds these packages to .venv, and Tunix to a .venv-tunix of its own
# make test-oldest  sets up .venv-oldest with the oldest JAX that pyproject.toml allows, checks style and
#                   types and runs all tests but the comparisons
# make docs         sets up .venv with Sphinx and builds the documentation site in docs/_build/html
# make clean        removes .venv, .venv-oldest and .venv-tunix; runs/ stays

PYTHON := .venv/bin/python
OLDEST_JAX := $(shell sed -n 's/^ *"jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)

define check_style_and_types
	$(1)/bin/ruff check
	$(1)/bin/ruff format --check
	$(1)/bin/mypy
endef

# There is a worker for each logical core ("auto" would count two threads of a core once); a BLAS with
# threads of its own would only wait actively beside them.
define run_tests
	OPENBLAS_NUM_THREADS=1 $(1)/bin/python -m pytest --numprocesses logical --dist worksteal $(2)
endef

# Tunix wants earlier versions of what the other packages need.
TUNIX_TESTS := tests/twell_jax/test_tunix.py

# Warnings are errors.
define build_docs
	JAX_PLATFORMS=cpu $(PYTHON) -m sphinx -W --keep-going --quiet --builder $(1) docs docs/_build/$(1)
endef

.PHONY: demo test test-all test-oldest checks style-and-types docs docs-without-pages clean

demo: .venv/installed
	bash .ci/demo

test: checks
	$(call run_tests,.venv,-m "not slow and not peers")

# A test that lacks a package then fails: tests/packages.py
test-all: export TWELL_TESTS_REQUIRE_PACKAGES = 1
test-all: checks .venv/installed-peers .venv/assembler .venv-tunix/installed-dev
	$(call run_tests,.venv,--ignore $(TUNIX_TESTS))
	$(call run_tests,.venv-tunix,$(TUNIX_TESTS))

checks: .venv/installed-dev
	$(MAKE) .venv/installed-docs
	$(MAKE) --jobs=2 style-and-types docs-without-pages  # either computes on one core

style-and-types: .venv/installed-dev
	$(call check_style_and_types,.venv)

test-oldest: .venv-oldest/installed-dev
	$(call check_style_and_types,.venv-oldest)
	$(call run_tests,.venv-oldest)

.venv/installed: pyproject.toml .ci/venv
	bash .ci/venv .venv
	$(PYTHON) -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(PYTHON) -m pip install --quiet --editable '.[dev]'
	touch $@

# On Linux, the registry's torch comes with 4 GB of CUDA's libraries. To have one without them:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-all
.venv/installed-peers: .venv/installed-dev
	$(PYTHON) -m pip install --quiet --editable '.[dev,peers]'
	touch $@

# What assembles kernels: JAX's CUDA plugin and ptxas, in a folder that JAX does not look into.
.venv/assembler: .venv/installed
	rm -rf $@ $@.part
	$(PYTHON) -m pip install --quiet --no-deps --target $@.part nvidia-cuda-nvcc \
		jax-cuda13-pjrt==$$($(PYTHON) -c 'import jaxlib; print(jaxlib.__version__)')
	mv $@.part $@

.venv-tunix/installed-dev: pyproject.toml .ci/venv
	bash .ci/venv .venv-tunix
	.venv-tunix/bin/python -m pip install --quiet --editable '.[dev,tunix]'
	touch $@

.venv-oldest/installed-dev: pyproject.toml .ci/venv
	bash .ci/venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --editable '.[dev]' 'jax==$(OLDEST_JAX)'
	touch $@

docs: .venv/installed-docs
	$(call build_docs,html)

# With the warnings of `docs`, in three quarters of the time.
docs-without-pages: .venv/installed-docs
	$(call build_docs,dummy)

.venv/installed-docs: .venv/installed
	$(PYTHON) -m pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-tunix
