# make quickstart   set-up, then both workflows end to end on the embedded tasks (CPU)
# make test         set-up, then the tests
# make setup        .venv alone; PYTHON=/path/to/python3.12 chooses its Python (3.11 to 3.13)

SHELL := /bin/bash
VENV  := .venv
RUN   := $(VENV)/bin/python
# The requirements that .venv was last filled from: set-up is skipped while they are unchanged.
STAMP := $(VENV)/requirements.installed

.PHONY: setup test quickstart lint

setup:
	@if cmp -s requirements.txt $(STAMP) && $(RUN) -c '' 2>/dev/null; then exit 0; fi; \
	set -e; \
	if ! $(RUN) -c '' 2>/dev/null; then \
	  for python in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	    then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "No Python 3.11, 3.12 or 3.13 with venv was found. Get one, for instance with" >&2; \
	    echo "  apt install python3.11 python3.11-venv    or    uv python install 3.12" >&2; \
	    echo "and name it if it is not on the PATH: make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python3.12" >&2; \
	    exit 2; \
	  fi; \
	  rm -rf $(VENV); \
	  echo "Setting up $(VENV) with $$found"; \
	  $$found -m venv $(VENV); \
	fi; \
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt; \
	cp requirements.txt $(STAMP)

test: setup
	$(RUN) -m pytest -n 2 $(ARGS)

quickstart: setup
	$(RUN) -m launch.quickstart $(ARGS)

lint: setup
	@$(RUN) -m ruff --version >/dev/null 2>&1 || $(RUN) -m pip install --quiet 'ruff>=0.9'
	$(RUN) -m ruff check .
