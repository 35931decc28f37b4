# make quickstart   set-up, then both workflows end to end on the embedded tasks (CPU)
# make test         set-up, then the tests
# make test-all     lint, documentation, and all tests: the slow ones and those that need PyTorch,
#                   the TPU compiler or SmolLM2, which it installs (what .ci/run calls)
# make docs         set-up, then the documentation in build/docs
# make setup        .venv alone; PYTHON=/path/to/python3.12 chooses its Python (3.11 to 3.13)

SHELL := /bin/bash
VENV  := .venv
RUN   := $(VENV)/bin/python
# What .venv is filled from, and a copy of it as it was then: set-up is skipped while it is unchanged.
NEEDS := requirements.txt requirements/dev.txt
STAMP := $(VENV)/requirements.installed
# What a Python must do to make .venv, what the one in .venv must do, and which one it comes from.
FITS  := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
WORKS := import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
FROM  := import sys; print(sys.version_info[:2], sys.base_prefix)

# Two workers with half of the tests each, so that a file's tests share what they compiled; the one
# that ends first takes over some of the other's.
TEST    := $(RUN) -m pytest -n 2 --dist worksteal
# The checkpoint that a test compares with PyTorch; README makes the same folder.
SMOLLM2 := $(CURDIR)/data/smollm2

.PHONY: setup test test-all quickstart lint docs

# A .venv that no set-up finished, that another one made, or whose Python does not work is made anew.
setup:
	@set -e; \
	whole() { \
	  [ -f $(STAMP) ] && $(RUN) -c '$(WORKS)' && \
	  { [ -z "$(PYTHON)" ] || [ "$$($(PYTHON) -c '$(FROM)')" = "$$($(RUN) -c '$(FROM)')" ]; }; \
	} 2>/dev/null; \
	if [ -n "$(PYTHON)" ] && ! $(PYTHON) -c '$(FITS)' 2>/dev/null; then \
	  echo "PYTHON=$(PYTHON) is not Python 3.11, 3.12 or 3.13 with venv" >&2; \
	  exit 2; \
	fi; \
	if ! whole; then \
	  for python in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	    if $$python -c '$(FITS)' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "No Python 3.11, 3.12 or 3.13 with venv was found. Get one, for instance with" >&2; \
	    echo "  apt install python3.11 python3.11-venv    or    uv python install 3.12" >&2; \
	    echo "and name it if it is not on the PATH: make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python3.12" >&2; \
	    exit 2; \
	  fi; \
	  echo "Setting up $(VENV) with $$found"; \
	  rm -rf $(VENV); \
	  $$found -m venv $(VENV); \
	elif cat $(NEEDS) | cmp -s - $(STAMP); then \
	  exit 0; \
	fi; \
	rm -f $(STAMP); \
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt; \
	cat $(NEEDS) > $(STAMP)

test: setup
	$(TEST) -m 'not slow' $(ARGS)

test-all: lint docs
	@cmp -s requirements/test-all.txt $(VENV)/test-all.installed || { \
	  $(RUN) -m pip install --quiet --disable-pip-version-check -r requirements/test-all.txt && \
	  cp requirements/test-all.txt $(VENV)/test-all.installed; }
	@[ -d $(SMOLLM2) ] || $(RUN) -m launch.prepare_data smollm2 $(SMOLLM2)
	SRPO_SMOLLM2=$(SMOLLM2) $(TEST) --no-skips $(ARGS)

quickstart: setup
	$(RUN) -m launch.quickstart $(ARGS)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m mypy srpo_jax models envs launch benchmarks

docs: setup
	@$(RUN) -c 'import mkdocstrings, material' 2>/dev/null || $(RUN) -m pip install --quiet -r requirements/docs.txt
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
