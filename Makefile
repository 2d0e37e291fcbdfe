PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Touched once everything is installed: nothing is installed again until what is asked for changes.
INSTALLED := $(VENV)/.installed
# What `make test` runs, by markers (pyproject.toml says what each means).
FAST := not extended and not process and not engines
PROCESS_TESTS := tests/distributed/test_launch.py tests/util/test_signals.py tests/distributed/test_world.py tests/distributed/test_heartbeat.py tests/training/test_evaluation.py \
  tests/shards/test_collective_sampler.py tests/distributed/test_shared_memory.py tests/data/test_writer.py \
  tests/equivalence/test_4_ranks.py tests/equivalence/test_5_ranks.py tests/equivalence/test_8_resumed.py tests/test_own_sampler.py

.PHONY: help demo quick test test-process check format clean bench-peers test-slurm test-hosts test-elastic test-faults test-soak reproduce-history test-interop test-engines test-extended planted convs test-oldest
help:
	@echo "make demo    train GraphSAGE on a built-in graph"
	@echo "make test    run the tests"
	@echo "make quick   ruff, and every method once (half a minute)"
	@echo "make test-process  ranks and commands in new processes, killed and interrupted (some minutes)"
	@echo "make check   ruff (format and lint) and pyright"
	@echo "make format  let ruff rewrite the files"
	@echo "make test-faults  kill runs in many ways and see that they resume (some minutes)"
	@echo "make test-soak   300 epochs, and again with random kills: memory, files and threads do not grow"
	@echo "make test-hosts  two hosts of network namespaces, and a link that breaks (root, Linux)"
	@echo "make test-elastic  two hosts by torchrun --nnodes 1:2, one of which is lost: the other continues (Linux)"
	@echo "make test-slurm  train by sbatch on a Slurm cluster of one node, made for the test (root, Debian)"
	@echo "make test-oldest  the tests with the oldest torch and PyG that are allowed, in an environment of their own (6 GB)"
	@echo "make test-interop  JAX, TensorFlow, Paddle and GammaGL beside torch, in an environment of their own (6 GB)"
	@echo "make test-engines  Ray Train, Lightning Fabric, Accelerate and torchrun, in an environment of their own (4 GB; some minutes)"
	@echo "make planted  plant faults one by one and see that the tests catch them (some minutes; ARGS=--gpu on a GPU)"
	@echo "make convs   run every conv, norm and model of PyG in every mode, and write docs/convs.md (some minutes)"
	@echo "make bench-peers  environments of the libraries that benchmarks compare with"
	@echo "make reproduce-history  published accuracies of historical training, run again (an hour)"
	@echo "make clean   remove compiled kernels and caches"

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/hopline train demo

# Two at a time, and a worker that has nothing left takes tests of the other, but for those that look at what the whole
# machine shares; threads that wait leave their core to the other.
test: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist worksteal --durations=20 -m '$(FAST) and not alone'
	$(BIN)/python -m pytest -m '$(FAST) and alone'

# Everything once: what one runs while working.
quick: $(INSTALLED)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/python -m pytest --durations=3 tests/test_tiny.py

# Processes started, ended and killed as users do it: each a new interpreter, where `make test` forks from a warm one.
test-process: $(INSTALLED)
	$(BIN)/python -m pytest --spawn -m 'not extended' $(PROCESS_TESTS)

test-extended: $(INSTALLED)
	$(BIN)/python -m pytest -m extended

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The oldest versions that pyproject.toml allows, in an environment of their own (6 GB, since torch comes with CUDA).
.venv-oldest/.installed: pyproject.toml
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.8.0 torch-geometric==2.7.0 'numba==0.61.*' 'numpy==1.26.*' pymetis==2025.2.1 'typer==0.15.*' \
	  'rich==13.7.*' 'psutil==5.9.*' 'pyarrow==15.*' 'scipy==1.11.*' pytest pytest-xdist hypothesis
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

test-oldest: .venv-oldest/.installed
	OMP_WAIT_POLICY=PASSIVE .venv-oldest/bin/python -m pytest -n 2 --dist worksteal -m '$(FAST) and not alone'

# DGL's last release on PyPI: it wants an old torch, so it gets an environment of its own (about 5 GB).
.venv-dgl/.installed:
	$(PYTHON) -m venv .venv-dgl
	.venv-dgl/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.2.1 torchdata==0.7.1 'numpy<2' dgl==2.1.0 pandas pyyaml pydantic
	touch $@

# PyG's own loader needs pyg-lib, which is not on PyPI, or torch-sparse, which is compiled here (about ten minutes).
# hopline is installed beside it: benchmarks/pyg_script.py runs one script with either loader, and
# .venv-pyg/bin/python -m pytest tests/methods/sampled/test_pyg_loader.py compares their batches.
.venv-pyg/.installed: pyproject.toml constraints.txt
	test -x .venv-pyg/bin/python || $(PYTHON) -m venv .venv-pyg
	.venv-pyg/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  torch scipy setuptools wheel ninja pytest
	.venv-pyg/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	.venv-pyg/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  torch-scatter torch-sparse
	-.venv-pyg/bin/python -m pip install --quiet --disable-pip-version-check pyg-lib
	touch $@

bench-peers: $(INSTALLED) .venv-dgl/.installed .venv-pyg/.installed

# The other frameworks, in an environment of their own: 6 GB, and they want other versions of small packages.
.venv-interop/.installed: pyproject.toml constraints.txt
	test -x .venv-interop/bin/python || $(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-interop/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[interop,scipy]' pytest triton
	-.venv-interop/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt tensorlayerx gammagl
	touch $@

test-interop: .venv-interop/.installed
	.venv-interop/bin/python -m pytest -rsP --durations=0 tests/interop tests/interop/test_interop.py tests/interop/test_dlpack.py tests/distributed/test_shared_memory.py

# Engines that start processes: they want many packages, and versions of their own.
.venv-engines/.installed: pyproject.toml constraints.txt
	test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e . 'ray[train]' lightning accelerate pyyaml pytest hypothesis
	touch $@

test-engines: .venv-engines/.installed
	.venv-engines/bin/python -m pytest -rsP --durations=0 -m 'engines or not engines' tests/engines

test-slurm: $(INSTALLED)
	PYTHON=$(BIN)/python bash tests/slurm/run.sh

test-hosts: $(INSTALLED)
	PYTHON=$(BIN)/python bash tests/hosts/run.sh

test-elastic: $(INSTALLED)
	PYTHON=$(BIN)/python bash tests/hosts/elastic.sh

test-soak: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python -m tests.soak

test-faults: $(INSTALLED)
	$(BIN)/python tests/faults.py

# Faults planted one by one in a copy: what the tests must catch. ARGS='--only NAME', '--gpu', '--list'.
planted: $(INSTALLED)
	$(BIN)/python tests/planted.py --jobs 2 $(ARGS)

# Every cell of docs/convs.md against plain PyG; fails if one is wrong. ARGS='--only GCNConv', '--device cuda --jobs 8'.
convs: $(INSTALLED)
	$(BIN)/python -m tests.conv_table --jobs 2 $(ARGS)

reproduce-history: $(INSTALLED)
	$(BIN)/python benchmarks/reproduce_history.py --data $${HOPLINE_TEST_DATA:-../shared/data}

clean:
	find src tests -name '*.nb[ic]' -delete
	rm -rf .pytest_cache .ruff_cache
