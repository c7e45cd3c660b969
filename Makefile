# Nightjar. `make demo` and `make test` are all a new user needs; both may be run again at any time.

PYTHON      ?= python3
# cpu | cuda | newest: which lock file is installed. newest: the newest torch, on a CPU.
DEVICE      ?= cpu
# The package index that serves torch for DEVICE; empty: the default index. Nothing else comes from it.
TORCH_INDEX ?=
PIP         := .venv/bin/python -m pip --disable-pip-version-check -q
# pip would compile 19,000 files, which takes a minute; nightjar imports 3,000 of them (USED).
LOCKED      := $(PIP) install --no-deps --require-hashes --no-compile
USED        := import pipeline.cli, pipeline.stages.release, pipeline.training.trainer, torch._inductor.compile_fx
INSTALLED   := .venv/.installed-$(DEVICE)
# What nightjar sets for its own processes (pipeline/core/cpus.py): a benchmark's threads sleep as soon as those of a training.
GOMP_SPINCOUNT ?= 1000
export GOMP_SPINCOUNT
# Some images forbid bytecode: every process of a test would compile what it imports, a second each time.
unexport PYTHONDONTWRITEBYTECODE
UV          := .venv/bin/uv pip compile -q --universal --python-version 3.11 --no-header --no-annotate --generate-hashes

.PHONY: help install demo test test-all test-changed test-image lint docs lock clean bench-train bench-checkpoint \
	bench-quality bench-plan bench-plan-random bench-ingest bench-mappings bench-predict bench-partition bench-ssd \
	bench-towers bench-towers-quality bench-gate bench-nights bench-busy bench-defaults bench-startup bench-scaling \
	gpu-check bench-models bench-epochs bench-hogwild bench-widths bench-negatives bench-calibration bench-pages \
	bench-ensembles bench-days bench-large-batches

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# git clean removes the compiled kernels, and not the note that they were installed. Without a C compiler there are none.
C_SOURCES := $(wildcard pipeline/plugins/*/native/*.c)
NOT_BUILT := $(foreach source,$(C_SOURCES),$(if $(wildcard $(basename $(source)).*.so),,not-built))
.PHONY: not-built

$(INSTALLED): requirements/$(DEVICE).txt requirements/torch-$(DEVICE).txt requirements/dev.txt pyproject.toml \
		$(wildcard pipeline/plugins/*/native/*.[ch]) $(if $(shell command -v cc),$(firstword $(NOT_BUILT)))
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing requirements/$(DEVICE).txt into .venv"
	@$(LOCKED) -r requirements/$(DEVICE).txt -r requirements/dev.txt
	@$(LOCKED) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -r requirements/torch-$(DEVICE).txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@.venv/bin/python -c "$(USED)"
	@touch $@

install: $(INSTALLED) ## create .venv and install the lock file of DEVICE

demo: install ## install, then run the main job: synthetic clicks in, an evaluated model out
	@.venv/bin/nightjar run experiment=demo run=demo
	@echo "demo done: look at store/runs/demo/report.html and store/runs/demo/result.json; next: .venv/bin/nightjar demo"

# One file of tests more at a time than there are CPUs to use: a quarter of a test's time is waiting for ranks and disks.
WORKERS = $(shell .venv/bin/python -c "from pipeline.core.cpus import available_cpus; print(available_cpus() + 1)")

# A file of tests stays in one process: many train once for all of their tests, and work that is stolen from a file would
# train a second time. Files with slow tests begin first (tests/conftest.py). A test that ends its process ends the run:
# xdist would give what is left of its file, that test first, to process after process.
SPREAD = --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# More of pytest's options, such as OPTIONS="--random-order".
OPTIONS =
# What make test runs: the cheapest proof of each promise (CONTRIBUTING.md, "Checks").
CHEAPEST = not slow and not image

test: install ## install, then test every promise at its cheapest level
	@.venv/bin/python -m pytest -n $(WORKERS) $(SPREAD) -m "$(CHEAPEST)" $(OPTIONS)

# Images have targets of their own: they need root, buildah, debootstrap and a network.
# Clusters come first, and wait half an hour for their pods. A test of three nights there may take longer than the 20
# minutes after which a test counts as hung (pyproject.toml).
test-all: install ## every test this machine can run: all grids, walks of the docs, clusters, nights
	@.venv/bin/python -m pytest -n $(WORKERS) $(SPREAD) -o faulthandler_timeout=7200 -m "not image" $(OPTIONS)

# A race that one thread always wins on this machine: make the other one win (tests/slow_threads).
.PHONY: test-slow-main
test-slow-main: install ## make test with a slow main thread: finds races
	@PYTHONPATH=tests/slow_threads SLOW_THREADS=main .venv/bin/python -m pytest -n $(WORKERS) $(SPREAD) -m "$(CHEAPEST)" $(OPTIONS)

.PHONY: test-slow-others
test-slow-others: install ## make test with all threads but the main one slow
	@PYTHONPATH=tests/slow_threads SLOW_THREADS=others .venv/bin/python -m pytest -n $(WORKERS) $(SPREAD) -m "$(CHEAPEST)" $(OPTIONS)

.PHONY: bench-luck
bench-luck: install ## make test ten times in random order, five times beside busy loops (150 minutes)
	@.venv/bin/python -m benchmarks.luck

test-changed: install ## the tests of make test that import or read what changed since main
	@.venv/bin/python -m tests.changed -n $(WORKERS) $(SPREAD) -m "$(CHEAPEST)" $(OPTIONS)

.PHONY: test-ray
test-ray: install ## ingestion by Ray, on two nodes of this machine (installs the extra ray)
	@.venv/bin/pip install -q "ray>=2.40"
	@.venv/bin/python -m pytest -m ray tests/plugins/ray

.PHONY: test-mlflow
test-mlflow: install ## runs and versions in a real MLflow server (installs MLflow into .venv-mlflow)
	@test -x .venv-mlflow/bin/mlflow || $(PYTHON) -m venv .venv-mlflow
	@.venv-mlflow/bin/python -m pip --disable-pip-version-check install -q "mlflow>=2.10"
	@.venv/bin/python -m pytest -m mlflow --mlflow=.venv-mlflow tests/plugins/trackers

.PHONY: test-control
test-control: install ## the table of faults of the control plane, on a real API server (minutes of waiting; few CPUs)
	@.venv/bin/python -m tests.controlplane.table

# Mutants drawn of each module (tests/mutants.py); MUTANTS_OPTIONS: --module, --seed, --json and others.
MUTANTS ?= 12

.PHONY: mutants
mutants: install ## small faults in seven modules, one at a time: which of them make test finds (installs Cosmic Ray; 1 hour)
	@.venv/bin/pip install -q "cosmic-ray>=8.4"
	@.venv/bin/python -m tests.mutants -m "$(CHEAPEST)" --sample $(MUTANTS) $(MUTANTS_OPTIONS)

# A build may take longer than other tests (pyproject.toml); each of its commands has a limit of its own.
UNLIMITED = -o faulthandler_timeout=0

test-image: install ## build the image and run a whole chain in it (minutes; root, buildah, debootstrap)
	@.venv/bin/python -m pytest $(UNLIMITED) -m "not cuda_image" tests/project/test_image.py

.PHONY: test-image-cuda
test-image-cuda: install ## build the image for CUDA, too, and run doctor in it (20 minutes, 30 GB of disk)
	@.venv/bin/python -m pytest $(UNLIMITED) -m cuda_image tests/project/test_image.py

docs: install ## write docs/configuration.md from the declarations of the settings
	@.venv/bin/nightjar explain --markdown > docs/configuration.md

lint: install ## ruff and mypy
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy --num-workers auto

bench-scaling: install ## samples/s on 1, 2 and 4 ranks of one thread each
	@.venv/bin/python -m benchmarks.scaling

.PHONY: bench-dryrun
bench-dryrun: install ## metadata of a rank, seconds and memory of dry runs of 64 and 512 ranks
	@.venv/bin/python -m benchmarks.dryrun

bench-epochs: install ## test NE of a training that stops by itself, against the best number of epochs found by hand
	@.venv/bin/python -m benchmarks.epochs

bench-ensembles: install ## test NE of an ensemble from one training, against the best single model of equal time
	@.venv/bin/python -m benchmarks.ensembles

bench-hogwild: install ## threads without locks against synchronous training: spread of log loss, samples/s
	@.venv/bin/python -m benchmarks.hogwild

bench-large-batches: install ## NE and samples/s of batches of 4,096 to 131,072 rows by rule of the learning rate (15 minutes)
	@.venv/bin/python -m benchmarks.large_batches

bench-train: install ## samples/s of the training loop against a plain TorchRec loop
	@.venv/bin/python -m benchmarks.train

bench-checkpoint: install ## bytes, stall, capacity and disk rates of checkpoints, against full float32 ones and dd
	@.venv/bin/python -m benchmarks.checkpoint

bench-pages: install ## lookups and updates of tables in memory pages of 2 MiB, against pages of 4 KiB
	@.venv/bin/python -m benchmarks.pages

bench-ssd: install ## samples/s with tables on SSD, 8, 4 and 2 times the memory limit, against all in memory; uses fio where it is installed
	@.venv/bin/python -m benchmarks.ssd

bench-ingest: install ## rows/s of ingestion against a plain Polars script and NumPy, memory at 4 times the rows and with 1,024 columns; the reader
	@.venv/bin/python -m benchmarks.ingest
	@.venv/bin/python -m benchmarks.ingest --columns 1024 --rows 20000000 --times 2
	@.venv/bin/python -m benchmarks.reader

.PHONY: bench-reading
bench-reading: install ## rows and bytes that 1 to 64 ranks read of one dataset, their order, resumed positions (3 minutes)
	@.venv/bin/python -m benchmarks.reading

.PHONY: bench-lanes
bench-lanes: install ## test NE of 64 lanes against one lane, ten seeds of the demo's log and of one that drifts (50 minutes of processor time)
	@.venv/bin/python -m benchmarks.lanes

.PHONY: bench-ingest-scale
bench-ingest-scale: install ## rows/s of ingestion by Ray with 1, 2 and 4 workers, what the driver hears (8 minutes on 2 cores; needs Ray)
	@.venv/bin/python -m benchmarks.ingest_scale

bench-quality: install ## test NE after restoring 1 to 100 times from quantised checkpoints, against never
	@.venv/bin/python -m benchmarks.checkpoint_quality

bench-partition: install ## planted feature blocks found by the tower partitioner, and test NE against strided towers
	@.venv/bin/python -m benchmarks.towers_partition

bench-towers: install ## step time over slow links between hosts, flat, SPTT and DMT (network namespaces: root, iproute2)
	@.venv/bin/python -m benchmarks.towers

.PHONY: bench-bipartite
bench-bipartite: install ## embedding hosts against a flat cluster: NE, bytes, Twitter's shape (network namespaces: root, iproute2)
	@.venv/bin/python -m benchmarks.bipartite

bench-towers-quality: install ## test NE of DMT with 2 towers against flat, with the module and bytes of bench-towers
	@.venv/bin/python -m benchmarks.towers_quality

bench-nights: install ## ten simulated nights that drift: NE of nightly warm starts, from scratch, frozen (15 minutes)
	@.venv/bin/python -m benchmarks.nights

bench-models: install ## test NE, AUC, samples/s and parameters of every ranker on the same rows (20 minutes)
	@.venv/bin/python -m benchmarks.models

.PHONY: bench-search
bench-search: install ## planted widths and interactions that nightjar search finds, cost and NE of its model (20 minutes)
	@.venv/bin/python -m benchmarks.search

bench-widths: install ## test NE of widths by frequency at half the bytes, against one width (10 minutes)
	@.venv/bin/python -m benchmarks.widths

bench-days: install ## ingestion of rows over 4,000 days, split by day and with histories, against two days (3 minutes)
	@.venv/bin/python -m benchmarks.days

bench-busy: install ## training under a cgroup's quota against pinned CPUs, and beside busy loops (10 minutes)
	@.venv/bin/python -m benchmarks.busy

bench-defaults: install ## ten nights of 60,000 rows with nothing set but the logs: gain, verdicts, NE against frozen
	@.venv/bin/python -m benchmarks.defaults

# The real log that one of its figures is taken on; left out where the file is missing.
ADULT ?= ../shared/data/adult.data

bench-startup: install ## seconds of Adult, the demo's evaluation and a night of 60,000 rows, against torchrun for every stage
	@.venv/bin/python -m benchmarks.startup --adult $(ADULT)

.PHONY: bench-thirty-nights
bench-thirty-nights: install ## thirty nights on a real API server, a fault every third: verdicts, NE against frozen (1 hour)
	@.venv/bin/python -m tests.controlplane.thirty_nights

.PHONY: bench-init
bench-init: install ## AUC with the schemas of nightjar init beside hand-written ones, on eleven logs
	@.venv/bin/python -m benchmarks.init

bench-gate: install ## the gate's paired bootstrap of 300,000 rows against drawing rows one by one
	@.venv/bin/python -m benchmarks.gate

.PHONY: bench-judge
bench-judge: install ## seconds and memory of nightjar judge on ten million scores, in 50 slices
	@.venv/bin/python -m benchmarks.judge

.PHONY: bench-year
bench-year: install ## a simulated year of nights on the gate alone: wrong promotions, needless holds
	@.venv/bin/python -m benchmarks.year

.PHONY: bench-culprits
bench-culprits: install ## nights with ten kinds of harm: what nightjar bisect names, after how many replays (10 minutes)
	@.venv/bin/python -m benchmarks.culprits

bench-predict: install ## predicted steps and memory of nine rankers and four blocks on four logs, 1 and 2 threads (15 minutes)
	@.venv/bin/python -m benchmarks.predict

.PHONY: bench-predict-random
bench-predict-random: install ## predicted step time and memory against measured ones, for ten random models
	@.venv/bin/python -m benchmarks.predict_random

# The real logs that its figures are also taken on; synthetic ones alone where the file is missing.
CRITEO ?= ../shared/data/criteo_sample.tsv

.PHONY: bench-ranks
bench-ranks: install ## predict, evaluate and publish on 1, 2 and 4 ranks with equal shares of the CPUs, and equal scores (4 minutes)
	@.venv/bin/python -m benchmarks.ranks

.PHONY: bench-compile
bench-compile: install ## ms of every ranker's forward and backward pass, compiled and not (6 minutes)
	@.venv/bin/python -m benchmarks.compiling

.PHONY: bench-calibration
bench-calibration: install ## calibration at a click rate of 0.2 %, overall and in ten slices, before and after isotonic
	@.venv/bin/python -m benchmarks.calibration

.PHONY: bench-tasks
bench-tasks: install ## test NE of a rare label, learnt alone or with the click it depends on (MMoE, ESMM)
	@.venv/bin/python -m benchmarks.tasks

.PHONY: bench-ranking
bench-ranking: install ## GAUC and NE with a pairwise or listwise loss beside the log loss, against the log loss alone (5 minutes)
	@.venv/bin/python -m benchmarks.ranking

.PHONY: bench-optimizers
bench-optimizers: install ## steps of Shampoo and Adagrad to the same NE, row updates of lazy Adam
	@.venv/bin/python -m benchmarks.optimizers

.PHONY: bench-sequences bench-sequences-speed bench-sequences-step
bench-sequences: install ## share of the reachable gain of DIN, HSTU and a sum where the last similar item decides (20 minutes)
	@.venv/bin/python -m benchmarks.sequences_quality

bench-sequences-speed: install ## CPU seconds of sequences' blocks against padded samples, and against samples of one length
	@.venv/bin/python -m benchmarks.sequences_speed

bench-sequences-step: install ## CPU seconds and peak memory of a training step with histories of unlike lengths, against like ones
	@.venv/bin/python -m benchmarks.sequences_step

bench-mappings: install ## test NE of the four id mappings at equal rows, on logs whose ids behave alike in groups
	@.venv/bin/python -m benchmarks.mappings $(if $(wildcard $(CRITEO)),--criteo $(CRITEO))

bench-negatives: install ## NE, calibration and seconds of training on 10 % of the rows without a click (10 minutes)
	@.venv/bin/python -m benchmarks.negatives

.PHONY: bench-tune
bench-tune: install ## a study of 24 trials on Adult, killed twice: trials lost or doubled, AUC of the best, steps saved (20 minutes)
	@.venv/bin/python -m benchmarks.tune --adult $(ADULT)

bench-plan: install ## the plan of MLPerf's DLRMv2 tables against TorchRec's planners, SSD, 1,000 tables (4 minutes)
	@.venv/bin/python -m benchmarks.plan

bench-plan-random: install ## 200 random planning cases against TorchRec's planner, in both cost models (10 minutes)
	@.venv/bin/python -m benchmarks.plan_random

.PHONY: bench-auto
bench-auto: install ## predicted and measured steps of first runs with hardware=auto, 1, 2 and 4 threads (3 minutes)
	@.venv/bin/python -m benchmarks.auto_hardware

.PHONY: bench-sealed
bench-sealed: install ## 20 predictions sealed before their runs, models x batches x threads: errors (30 minutes on 2 cores)
	@.venv/bin/python -m benchmarks.sealed

.PHONY: bench-plan-mlperf
bench-plan-mlperf: install ## predicted steps of MLPerf's DLRM-DCNv2 on 8, 16 and 128 H100s beside published ones
	@.venv/bin/python -m benchmarks.plan_mlperf

# WHEELS: the folder of an earlier `python -m benchmarks.gpu_check pack FOLDER`, on a machine without a package index.
gpu-check: ## the tests and runs that need a GPU, and one JSON line (PYTHON needs torch for CUDA)
	@$(PYTHON) -m benchmarks.gpu_check run $(if $(WHEELS),--wheels $(WHEELS))

# torch itself wants the CUDA libraries; the CPU lock leaves them out.
CUDA_PACKAGES := triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti \
	nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand \
	nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink \
	nvidia-nvshmem-cu13 nvidia-nvtx

lock: ## write requirements/*.txt anew from pyproject.toml and requirements/*.in; torch of DEVICE from TORCH_INDEX
	@cd requirements && ../$(UV) --override overrides-cpu.txt $(CUDA_PACKAGES:%=--no-emit-package %) \
		--no-emit-package torch ../pyproject.toml cpu.in -o cpu.txt
	@cd requirements && ../$(UV) --override overrides-cuda.txt --no-emit-package torch ../pyproject.toml cuda.in -o cuda.txt
	@cd requirements && ../$(UV) --override overrides-cpu.txt --no-emit-package torch ../pyproject.toml newest.in -o newest.txt
	@cd requirements && ../$(UV) --no-deps torch-newest.in -o torch-newest.txt
	@cd requirements && ../$(UV) dev.in -o dev.txt
	@cd requirements && ../$(UV) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch-$(DEVICE).in -o torch-$(DEVICE).txt
	@wc -l requirements/*.txt

clean: ## remove .venv and what tests and runs left in this folder
	@rm -rf .venv store demo-store outputs multirun .pytest_cache .mypy_cache .ruff_cache *.egg-info
