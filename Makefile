# make demo   sets up .venv and trains the default model on the CPU
# make test   sets up .venv with the test tools, checks style and runs all tests
# make clean  removes .venv; runs/ stays

PYTHON := .venv/bin/python
DEMO := JAX_PLATFORMS=cpu $(PYTHON)

.PHONY: demo test clean

demo: .venv/installed
	@echo "== a sparse model: ReLU, L1 on the hidden activations"
	$(DEMO) train.py configs/tiny.yaml
	@echo "== its dense twin: SiLU, no L1"
	$(DEMO) train.py configs/tiny.yaml run_dir=runs/tiny-dense model.activation=silu l1_coefficient=0
	@echo "== a sample of the sparse model"
	$(DEMO) -m twell_jax.generate runs/tiny --prompt "def "

test: .venv/installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	$(PYTHON) -m pytest

.venv/installed: pyproject.toml .ci/venv
	bash .ci/venv
	$(PYTHON) -m pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(PYTHON) -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv
