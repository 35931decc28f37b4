# make quickstart   set-up, then both workflows end to end on the embedded tasks (CPU)
# make test         set-up, then the tests
# make docs         set-up, then the documentation in build/docs
# make setup        .venv alone; PYTHON=/path/to/python3.12 chooses its Python (3.11 to 3.13)

SHELL := /bin/bash
VENV  := .venv
RUN   := $(VENV)/bin/python
# The requirements that .venv was last filled from: set-up is skipped while they are unchanged.
STAMP := $(VENV)/requirements.installed
# What a Python must do to make .venv, what the one in .venv must do, and which one it comes from.
FITS  := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
WORKS := import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
FROM  := import sys; print(sys.version_info[:2], sys.base_prefix)

.PHONY: setup test quickstart lint docs

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
	elif cmp -s requirements.txt $(STAMP); then \
	  exit 0; \
	fi; \
	rm -f $(STAMP); \
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt; \
	cp requirements.txt $(STAMP)

test: setup
	$(RUN) -m pytest -n 2 $(ARGS)

quickstart: setup
	$(RUN) -m launch.quickstart $(ARGS)

lint: setup
	@$(RUN) -m ruff --version >/dev/null 2>&1 || $(RUN) -m pip install --quiet 'ruff>=0.9'
	@$(RUN) -m mypy --version >/dev/null 2>&1 || $(RUN) -m pip install --quiet 'mypy>=2.4'
	$(RUN) -m ruff check .
	$(RUN) -m mypy srpo_jax models envs launch benchmarks

docs: setup
	@$(RUN) -c 'import mkdocstrings, material' 2>/dev/null || $(RUN) -m pip install --quiet 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=1,<2'
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
