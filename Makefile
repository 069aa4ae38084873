# Each target does all of its own set-up: a machine with Python 3.11+ and make needs nothing else.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python -m
READY  := $(VENV)/.ready

.PHONY: demo dist test test-slow test-faults test-wheel test-browser docs test-gpu test-transformers mutants check bench bench-gpu clean help
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)   ## see the memory at work, on any machine
	$(VENV)/bin/elastic demo

test: docs       ## the documentation built, and the test suite
	OMP_NUM_THREADS=1 $(RUN) pytest -n auto -m 'not gpu and not slow and not faults' $(ARGS)

test-slow: $(READY)    ## the tests that take minutes each
	$(RUN) pytest -m slow $(ARGS)

test-faults: $(READY)  ## kills, full disks, damaged files
	$(RUN) pytest -m faults $(ARGS)

# Its tests are in the source distribution alone; nothing of it is kept here.
TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints.txt)
SOURCES      := build/transformers-$(TRANSFORMERS)
$(SOURCES): $(READY)
	$(RUN) pip download --quiet --no-deps --no-binary transformers --dest build transformers==$(TRANSFORMERS)
	tar -xzf $@.tar.gz -C build
	touch $@

test-transformers: $(SOURCES)  ## transformers' own tests on every memory, and those of other clients; needs the network once
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt parameterized peft bitsandbytes \
	  datasets trl torchao lm_eval
	OMP_NUM_THREADS=1 TRANSFORMERS_SOURCES=$(SOURCES) $(RUN) tests.mixins $(ARGS)

mutants: $(READY)      ## break each guarded line and expect a red test: ten minutes; ARGS="checkpoints" chooses
	$(RUN) tests.mutants $(ARGS)

dist: $(READY)         ## wheel and source distribution in dist/
	$(RUN) build --no-isolation

test-wheel: $(READY)   ## a wheel in an empty environment: demo, tables, training
	$(RUN) pytest -m slow tests/test_wheel.py $(ARGS)

test-browser: $(READY) ## the report and the microscope in headless Chromium (Debian: apt install chromium)
	$(RUN) pip install --quiet --disable-pip-version-check playwright
	OMP_NUM_THREADS=1 $(RUN) pytest tests/browser $(ARGS)

docs: $(READY)         ## the documentation as a site, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet --site-dir build/site

test-gpu:        ## on a machine with CUDA; uses the interpreter's own packages
	$(PYTHON) -m pytest -m gpu $(ARGS)

check: $(READY)  ## lint, types, import order of the tree, shapes of the mathematics
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) pytest tests/test_tree.py
	OMP_NUM_THREADS=1 $(RUN) pytest -n auto -m 'not gpu and not slow' -k 'not bad_input' \
	  tests/test_hippo.py tests/test_sampling.py tests/test_operators.py \
	  --jaxtyping-packages=elastic_memory.hippo,elastic_memory.sampling,elastic_memory.operators,beartype.beartype

bench: $(READY)  ## a short version of the benchmarks
	$(VENV)/bin/elastic bench

H200 := benchmarks/results/$$what-h200-$(shell date +%F).json
bench-gpu:       ## most tables of docs/speed.md, on a machine with one H200: half an hour
	PYTHONPATH=. $(PYTHON) benchmarks/operators.py --device cuda --out benchmarks/results
	what=decoding; PYTHONPATH=. $(PYTHON) benchmarks/decoding.py --preset 100m --rows 1 64 --out $(H200)
	what=streaming; PYTHONPATH=. $(PYTHON) benchmarks/streaming.py --preset 100m --batches 1 64 --full --out $(H200)
	what=roofline; PYTHONPATH=. $(PYTHON) benchmarks/roofline.py --presets 100m 200m 400m --out $(H200)
	what=peers; PYTHONPATH=. $(PYTHON) benchmarks/peers.py --packages peers --out $(H200)
	PYTHONPATH=. $(PYTHON) -m elastic_memory.cli reproduce speed --tier paper

clean:
	rm -rf $(VENV) build dist *.egg-info
