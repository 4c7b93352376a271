# Draftgate's commands. `make serve` and `make test` set up everything they need.
#   make PYTHON=/path/to/python3.11 setup     another interpreter
#   make serve ARGS="--draft-len 2"           more options for the command
PYTHON ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(READY) ## make the virtual environment and install pinned dependencies

# The stamp is written last: an environment without it is half made and is built again.
$(READY): pyproject.toml constraints.txt requirements-wheels.txt
	@scripts/make_venv.sh $(VENV) "$(PYTHON)"
	@touch $@

.PHONY: serve
serve: $(READY) ## prepare the model once, start Triton and the gateway, stay up
	@$(BIN)/draftgate serve $(ARGS)

.PHONY: test
test: $(READY) ## run the tests
	@$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

.PHONY: test-slow
test-slow: $(READY) ## run the tests that take minutes
	@$(BIN)/python -m pytest -m slow $(ARGS)

DRAFTER := drafters/smollm2-135m-instruct-eagle3
MODEL := models/smollm2-135m-instruct-fp8

# Hours on two cores. Each stage goes on where it stopped; answers that are there are kept.
.PHONY: drafter
drafter: $(READY) ## train the EAGLE-3 drafter again, from prompts to weights
	@$(BIN)/python -m training prepare --model-dir $(MODEL)
	@$(BIN)/python -m training answers --model-dir $(MODEL) --work build/drafter
	@$(BIN)/python -m training head --model-dir $(MODEL) --work build/drafter --out $(DRAFTER)

.PHONY: lint
lint: $(READY) ## check style, types and protos
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code

.PHONY: proto
proto: $(READY) ## generate the Python code of the protos
	@$(BIN)/python scripts/generate_protos.py

.PHONY: clean
clean: ## remove the virtual environment, caches and the prepared model
	@rm -rf $(VENV) build models .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
