# `make` alone lists what there is to do.
.DEFAULT_GOAL := help
VENV ?= $(CURDIR)/.venv
export VENV
PYTHON := $(VENV)/bin/python
# For instance: make test ARGS="-k manifest"
ARGS ?=
# cpu or gpu: which vLLM `make env` installs.
KIND ?= cpu

.PHONY: help env demo test stress fuzz lint format check-dashboard check-deploy check-docker check-unit docs release-check models clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: ## Make or mend .venv, with vLLM for the CPU (KIND=gpu: for NVIDIA GPUs); about 3 minutes the first time
	@bash tools/setup_env.sh $(KIND)

demo: env ## Serve a small real model on two stages and stream eight answers from it
	@$(VENV)/bin/vllm-handoff demo --log-dir .cache/demo $(ARGS)

test: env ## Run every test
	@$(PYTHON) -m pytest $(ARGS)

stress: env ## Random load with known answers for 20 minutes on two stages, with faults (ARGS: see vllm-handoff stress)
	@$(VENV)/bin/vllm-handoff stress --duration 600 --kv-tokens 2500 --rate 60 --structured 0.1 --faults $(ARGS)
	@$(VENV)/bin/vllm-handoff stress --duration 600 --kv-tokens 2500 --rate 60 --structured 0.1 $(ARGS)

fuzz: env ## Fuzz the control plane's decoders with a million inputs, about a minute (ARGS="--seed 1 --inputs 5000000")
	@$(PYTHON) tools/fuzz_messages.py $(ARGS)

lint: env ## Check style (ruff) and types (mypy)
	@bash tools/lint.sh

format: env ## Let ruff mend and format the code, then check it
	@bash tools/lint.sh --fix

check-dashboard: env ## Run every query of the Grafana dashboard against a real Prometheus and a server under load
	@$(PYTHON) tools/check_dashboard.py $(ARGS)

check-docker: ## Run every step of the Dockerfiles in a bare Debian, and the CPU image's demo (root, debootstrap)
	@python3 tools/run_dockerfiles.py $(ARGS)

check-unit: ## Run the unit's life under a real systemd in namespaces (root; IMAGES: what check-docker has kept)
	@python3 tools/run_unit.py $(IMAGES)

check-deploy: env ## Verify the systemd unit, lint the Dockerfiles, check the alert rules
	@bash tools/check_deploy.sh

docs: env ## Build the documentation site into .cache/site, and check its links
	@bash tools/build_docs.sh

release-check: env ## Build wheel and sdist twice and compare, list licences, install the wheel cleanly and serve
	@$(PYTHON) tools/check_release.py $(ARGS)

models: env ## Get every model that tests and the demo use
	@$(PYTHON) tools/models.py --all

clean: ## Remove the environment, the models and everything else that was made here
	rm -rf .venv .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
