# Each target sets up what it needs. TORCH_BACKEND=cpu gives the small CPU build of torch (needs uv and its index).
PYTHON ?= python3
VENV ?= .venv
TORCH_BACKEND ?=
UV := $(shell command -v uv 2>/dev/null)
BIN := $(VENV)/bin

.PHONY: demo test check test-gpu bench serve clean

demo: $(VENV)/.ready
	$(BIN)/crucible compile configs/digits.yaml

test: $(VENV)/.ready
	$(BIN)/python -m pytest

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/size_table.py

test-gpu: $(VENV)/.ready
	$(BIN)/python -m pytest -m gpu

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/run_all.py

serve:
	@echo "The service is not part of this version yet."

$(VENV)/.ready: pyproject.toml constraints.txt
ifdef UV
	test -x $(BIN)/python || uv venv --python $(PYTHON) $(VENV)
	uv pip install --python $(BIN)/python $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) --constraint constraints.txt --editable '.[torch,openvino,rtx,dev]'
else
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[torch,openvino,rtx,dev]'
endif
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true  # torch imports twice as fast; templates of some packages fail
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
