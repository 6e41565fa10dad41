# Every target works on a fresh checkout: it needs Python >= 3.10 and, for what is not installed yet, a package index.
#
#   make demo          set up, then run examples/generate.py on the GPU, or on the CPU where there is none
#   make test          set up, then run every test that needs no GPU
#   make gpu-test      set up, then run the tests that need a CUDA GPU
#   make sanitize      set up, then test the CPU's C++ kernels under address and undefined-behaviour sanitizers
#   make emulate       set up, then test those C++ kernels that this machine may not have: NEON (needs
#                      aarch64-linux-gnu-g++ and qemu-aarch64) and AMX (needs AVX-512 BF16)
#   make lint          set up, then ruff and pyright
#   make matrix        set up, then compile the kernels for every target into build/matrix (hours; narrow it with ARGS)
#   make setup         the environment alone
#
# JOBS=4 runs the tests in so many processes (2 unless told); a file's tests stay in one.
# PYTHON=python3.12 chooses the interpreter. Where it already has torch >= 2.11, that torch is used and left alone;
# elsewhere the versions of constraints.txt are installed. VENV=path puts the environment elsewhere.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PY := $(VENV)/bin/python

.PHONY: setup demo test gpu-test sanitize emulate lint matrix clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt .ci/setup.py
	$(PYTHON) .ci/setup.py $(VENV)
	touch $@

demo: setup
	$(PY) examples/generate.py $(ARGS)

test: setup
	$(PY) -m pytest -n $(JOBS) --dist loadfile -m "not gpu" $(ARGS)

gpu-test: setup
	$(PY) -m pytest -m gpu $(ARGS)

sanitize: setup
	$(PY) .ci/sanitize.py $(ARGS)

emulate: setup
	$(PY) .ci/emulate.py $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

matrix: setup
	$(PY) -m tcport matrix -o build/matrix $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
