# Everything a newcomer needs: `make serve` to talk to the bundled model, `make test` to check the whole house.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
# PyPI's torch for Linux is the build for CUDA. PyTorch's own index of CPU builds has the one without, which is far smaller.
TORCH_INDEX ?=
REQUESTS ?= 3000
# Processes that the tests are shared out to, file by file: as many as there are processors, four at most.
WORKERS ?= logical

.PHONY: serve test lint bench slow soak check-cuda-build clean

$(VENV)/.base: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "python3 3.11 or newer is needed; set PYTHON=/path/to/python3"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing dalsegno and its dependencies into $(VENV) (once)"
	$(PIP) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev]'
	@touch $@

NPM_CLIENT := tests/e2e/npm

$(NPM_CLIENT)/node_modules/.installed: $(NPM_CLIENT)/package-lock.json
	@if command -v npm >/dev/null && (cd $(NPM_CLIENT) && npm ci --silent --no-audit --no-fund); \
	then touch $@; else echo "npm or its registry is missing: the npm client will not be tested"; fi

serve: $(VENV)/.base
	$(BIN)/dalsegno serve $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One OpenMP thread: the models in the tests are tiny, and two threads stall each other on a busy machine.
test: lint $(NPM_CLIENT)/node_modules/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m bench models demo $(ARGS)
	$(BIN)/python -m bench models smollm2 $(ARGS)
	$(BIN)/python -m bench observing demo

# The tests that take minutes.
slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --timeout 7200 $(ARGS)

# The real daemon under load with pools that overflow all the time; a plot of it is left in runs/soak.
soak: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m bench soak --requests $(REQUESTS) $(ARGS)

# Needs nvcc and no GPU: our own kernels (seconds), and flashinfer's modules for our shapes (on two cores, two hours). With
# ARGS="--only norm append 'decode*'" only some of them.
check-cuda-build: $(VENV)/.dev
	$(BIN)/python -m bench.gpu.triton_build
	$(BIN)/python -m bench.gpu.build --fetch-headers $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
