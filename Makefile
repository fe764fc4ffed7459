# Each target does its own set-up: on a machine with Python 3.11 or newer, pip and make,
# `make demo` or `make test` alone is enough. A second run starts at once.

PYTHON ?= python3
VENV := .venv
BENCH_VENV := benchmarks/.venv
PACKAGES := -p ringfeed.sharding -p ringfeed.pipeline -p ringfeed.workers

# The stamp lies in build/ beside the links of the strict editable install: neither outlives the other.
STAMP := build/installed
FILES := build/files
PACKAGE_FILES := $(sort $(shell find sharding pipeline workers -name '*.py' -o -name py.typed))

.PHONY: demo test test-unit test-ray test-dist lint types format bench bench-venv venv clean FORCE

demo: $(STAMP)
	$(VENV)/bin/ringfeed demo

test: $(STAMP)
	$(VENV)/bin/python -m pytest tests

test-unit: $(STAMP)
	$(VENV)/bin/python -m pytest tests/unit tests/property tests/golden

test-ray: $(STAMP)
	$(VENV)/bin/python -m pytest -m ray tests

test-dist: $(STAMP)
	$(VENV)/bin/python -m pytest -m dist tests

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: $(STAMP)
	$(VENV)/bin/mypy $(PACKAGES)
	$(VENV)/bin/mypy tests

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(STAMP)
	@set -e; for bench in benchmarks/bench_*.py; do \
		echo "== $$bench"; $(VENV)/bin/python $$bench; \
	done

bench-venv: $(BENCH_VENV)/installed

venv: $(STAMP)

clean:
	rm -rf build dist *.egg-info .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find sharding pipeline workers tests benchmarks -name __pycache__ -not -path '*/.venv/*' -prune -exec rm -rf {} +

# The strict editable install links single files, so a new or a removed file needs a new install.
$(STAMP): pyproject.toml constraints.txt $(FILES) $(VENV)/pyvenv.cfg
	$(VENV)/bin/python -m pip install -c constraints.txt setuptools
	$(VENV)/bin/python -m pip install -c constraints.txt --no-build-isolation \
		--config-settings editable_mode=strict -e '.[dev]'
	@touch $@

# Rewritten, and so newer than the stamp, only when the list has changed.
$(FILES): FORCE
	@mkdir -p $(@D)
	@printf '%s\n' $(PACKAGE_FILES) | cmp -s - $@ || printf '%s\n' $(PACKAGE_FILES) > $@

# The second form is for systems that ship pip but not ensurepip (Debian without python3-venv).
$(VENV)/pyvenv.cfg $(BENCH_VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"ringfeed needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}; say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(@D) || { $(PYTHON) -m venv --clear --without-pip $(@D) \
		&& $(PYTHON) -m pip --python $(@D)/bin/python install pip; } || { rm -rf $(@D); exit 1; }

$(BENCH_VENV)/installed: benchmarks/requirements.txt $(BENCH_VENV)/pyvenv.cfg $(STAMP)
	$(BENCH_VENV)/bin/python -m pip install --no-deps -r benchmarks/requirements.txt
	cp $(VENV)/lib/python3*/site-packages/__editable__.ringfeed-*.pth $(BENCH_VENV)/lib/python3*/site-packages/
	@touch $@
