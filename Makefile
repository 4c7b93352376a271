# Draftgate's commands. `make serve` and `make test` set up everything they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'
