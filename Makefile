# make demo   sets up .venv, trains the default model and its dense twin on the CPU, and compares them
# make test   sets up .venv with the test tools, checks style and types, builds the documentation
#             and runs all tests
# make docs   sets up .venv with Sphinx and builds the documentation site in docs/_build/html
# make clean  removes .venv; runs/ stays

PYTHON := .venv/bin/python

.PHONY: demo test docs clean

demo: .venv/installed
	bash .ci/demo

test: .venv/installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	$(MAKE) docs
	$(PYTHON) -m pytest --numprocesses auto --dist worksteal

.venv/installed: pyproject.toml .ci/venv
	bash .ci/venv
	$(PYTHON) -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(PYTHON) -m pip install --quiet --editable '.[dev]'
	touch $@

docs: .venv/installed-docs
	JAX_PLATFORMS=cpu $(PYTHON) -m sphinx -W --keep-going --quiet --builder html docs docs/_build/html

.venv/installed-docs: .venv/installed
	$(PYTHON) -m pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv
