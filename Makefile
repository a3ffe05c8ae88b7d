# `make demo` runs STTS on a video; `make test` lints, checks types and runs the tests of every day, `make test-all` also
# the slow ones. All set themselves up in $(VENV) on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The versions that get installed. `make test CONSTRAINTS= VENV=.venv-newest` takes the newest of everything.
CONSTRAINTS ?= constraints.txt

# make demo VIDEO=clip.mp4 QUESTION="..." RATIO=0.3 SELECTOR=cosine CHECKPOINT=user/name
VIDEO ?=
QUESTION ?= What is moving in this video?
CHECKPOINT ?= hub_configs/stts-tiny
RATIO ?= 0.5
SELECTOR ?= scorer
OUT ?= outputs
CLIP := $(if $(VIDEO),$(VIDEO),$(OUT)/sample_clip.mp4)

# Two worker processes with one thread each: many small models are faster that way than one process with two threads.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKERS ?= 2
# Each worker begins with a half of the tests in their order, so that few fixtures of a file are made twice.
PARALLEL := -n $(WORKERS) --dist worksteal
FUZZ_CASES ?= 500

.PHONY: demo docs pictures test test-all test-study coverage fuzz fuzz-bytes test-browser test-matrix test-eval test-vllm test-transformers gpu stts-tiny style lint clean

# Passed on through the environment, so that quotes in them need no care.
export CLIP QUESTION
demo: $(VENV)/.installed $(if $(VIDEO),,$(CLIP))
	@mkdir -p "$(OUT)"
	@$(BIN)/stts-hf run "$$CLIP" "$$QUESTION" --checkpoint "$(CHECKPOINT)" --pruning-ratio $(RATIO) \
		--selector $(SELECTOR) --output "$(OUT)/contact_sheet.png" --time

# Types are checked beside the tests: mypy takes one core only.
test: style
	@$(BIN)/mypy & types=$$!; $(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) --durations=30; tests=$$?; \
		wait $$types && exit $$tests

test-all: test
	$(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) --durations=30 -m "slow and not study"

# Pretraining and the runs of the study, with kills: some minutes. `make test-all` has a miniature of the study.
test-study: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) --durations=30 -m study

# Which lines and branches the tests of `make test-all` run, in build/coverage/html too. MARK="not slow" takes the fast ones.
MARK ?= slow or not slow
coverage: $(VENV)/.installed-dev
	@rm -rf build/coverage
	$(TEST_ENV) $(BIN)/coverage run -m pytest $(PARALLEL) -m "$(MARK)"
	@$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

# New cases by the thousand, FUZZ_CASES of each test: in some minutes. A failure prints what makes it again.
fuzz: $(VENV)/.installed-dev
	FUZZ_CASES=$(FUZZ_CASES) $(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow" tests/fuzz

# Bytes guided by coverage, on Linux: each target gets a fifth of SECONDS. What fails lies in build/fuzz, with its bytes.
SECONDS ?= 600
fuzz-bytes: $(VENV)/.installed-dev
	@$(PIP_INSTALL) "atheris==3.0.0; python_version < '3.12'" "atheris==3.1.0; python_version >= '3.12'"
	@set -e; for target in videos lines questions weights settings; do \
		$(TEST_ENV) $(BIN)/python -m tests.fuzz.bytes_harness $$target build/fuzz -max_total_time=$$(($(SECONDS) / 5)); \
	done

# The demo in Chromium (apt-get install chromium); they are among the slow tests.
test-browser: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest -m slow tests/stts_hf/demo/test_browser.py

# Half an hour, in environments of its own; ENVIRONMENTS="lowest newest" runs some of them.
test-matrix: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python tests/matrix.py $(ENVIRONMENTS)

# Tests with lmms-eval, whose requirements (av<16) exclude those of constraints.txt: in an environment of its own.
test-eval: .venv-eval/.installed
	$(TEST_ENV) .venv-eval/bin/python -m pytest -m "slow or not slow" tests/stts_hf/evaluation \
		tests/modeling/test_video_reading.py

.venv-eval/.installed: pyproject.toml
	@test -x .venv-eval/bin/python || $(PYTHON) -m venv .venv-eval
	@.venv-eval/bin/python -m pip install --quiet --disable-pip-version-check -e ".[benchmarks,visualize]" pytest==9.2.0
	@touch $@

# Tests with vLLM, whose requirements (transformers<5.20) exclude ours: in an environment of its own, on a CPU.
test-vllm: .venv-vllm/.installed
	$(TEST_ENV) .venv-vllm/bin/python -m pytest -m vllm tests/stts_hf/serving

.venv-vllm/.installed: pyproject.toml examples/serving/install.sh
	@PYTHON="$(PYTHON)" sh examples/serving/install.sh .venv-vllm -e .
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check pytest==9.2.0
	@touch $@

# The documentation as a site in build/site; a link that leads nowhere ends it.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# transformers' and PEFT's own common tests over our classes. CHECKOUT=folder takes transformers' from a checkout of the
# installed version, which has those of `generate` and of export too.
test-transformers: $(VENV)/.installed-dev
	@$(PIP_INSTALL) parameterized==0.9.0
	@$(BIN)/python -m tests.suites.fetch $(CHECKOUT)
	$(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) -rx -o verbosity_subtests=0 tests/suites

# Every picture of README, docs and cards, made again (apt-get install chromium).
pictures: $(VENV)/.installed-dev
	PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m examples.pictures

# All that a GPU is for, in parts under nine minutes each; docs/benchmarks/on_a_gpu.md says what. What has a result is not done again.
# INSTALL=0 takes .venv, or else PYTHON, as it is. DEVICE=cpu SIZE=tiny runs all but the kernels, in minutes.
DEVICE ?= auto
SIZE ?= full
HOURS ?= 1.5
INSTALL ?= 1
PARTS ?=
RESULTS ?=
GPU_PYTHON = $(if $(filter 0,$(INSTALL)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(BIN)/python)
gpu: $(if $(filter 0,$(INSTALL)),,$(VENV)/.installed-dev $(if $(filter cpu,$(DEVICE)),,$(VENV)/.installed-gpu))
	PYTHONPATH="src:.$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m examples.gpu --device $(DEVICE) --size $(SIZE) --hours $(HOURS) \
		$(if $(PARTS),--parts $(PARTS)) $(if $(RESULTS),--output $(RESULTS))

# What only a GPU needs, and what is missing is left out of its results: flash-attn where a wheel is there, and vLLM.
$(VENV)/.installed-gpu: examples/serving/install.sh | $(VENV)/.installed-dev
	@$(PIP_INSTALL) --only-binary :all: flash-attn || echo "No wheel of flash-attn: its checks are left out"
	@$(PIP_INSTALL) --only-binary :all: flash-linear-attention causal-conv1d \
		|| echo "No wheels of flash-linear-attention and causal-conv1d: packed rows of Qwen3.5 are left out"
	@VLLM=vllm PYTHON="$(PYTHON)" sh examples/serving/install.sh .venv-vllm-gpu -e . \
		&& .venv-vllm-gpu/bin/python -m pip install --quiet --disable-pip-version-check pytest==9.2.0 \
		|| { rm -rf .venv-vllm-gpu; echo "No vLLM: its part is left out"; }
	@test ! -d .venv-vllm-gpu || VLLM=vllm TRANSFORMERS=5.19.0 PYTHON="$(PYTHON)" \
		sh examples/serving/install.sh .venv-vllm-gpu-stock - || rm -rf .venv-vllm-gpu-stock
	@touch $@

# The tiny checkpoint made anew in an hour: the base learns to do with fewer blocks, then a new scorer what answers need.
STARTED = $(OUT)/stts-tiny
stts-tiny: $(VENV)/.installed-dev
	$(BIN)/python -m examples.study.pretraining docs/study/base --tiny hub_configs/stts-tiny
	test -d $(STARTED)-data || $(BIN)/python -m examples.study make-dataset $(STARTED)-data --seed 609742 --train 600 --validation 1 --test 1 --calm 0.5
	$(BIN)/python -m examples.study run $(STARTED) --dataset $(STARTED)-data --base hub_configs/stts-tiny --without-options \
		--batch-size 8 --answers-steps 2000 --scorer-rate 1e-3 --num-masks 12 --mask-rounds 1 --mask-ratios 0.5 0.9 \
		--ratios 0.5 --seeds 0 --only scorer-answers --keep-checkpoints
	cp $(STARTED)/checkpoints/scorer-answers-layer1-seed0/*.safetensors $(STARTED)/checkpoints/scorer-answers-layer1-seed0/config.json \
		hub_configs/stts-tiny

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

clean:
	rm -rf $(OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(OUT)/sample_clip.mp4: | $(VENV)/.installed
	@echo "Making a sample clip: $@"
	@mkdir -p $(OUT)
	@$(BIN)/python -m stts_hf.visualize.sample_clip "$@"

# Where an installer's own rules exclude the versions of CONSTRAINTS, it takes the newest that it may.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
define install
	@$(PIP_INSTALL) -c "$(or $(CONSTRAINTS),/dev/null)" -e "$(1)" \
		|| { echo "Trying without $(or $(CONSTRAINTS),constraints)"; $(PIP_INSTALL) -e "$(1)"; }
endef

# The stamps follow the files that say what to install, so that a second run installs nothing.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing stts-hf into $(VENV) (PyTorch is large: some minutes the first time)"
	$(call install,.)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/.installed
	$(call install,.[dev])
	@touch $@
