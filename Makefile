# The two commands are `make demo` and `make test`. Both set everything up first, on a machine that has only Python 3.11, venv and make.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
KEYS   ?=
INPUTS ?= 100000
SEED   ?= 0
KILLS  ?= 20
STEPS  ?= 300
SECONDS ?= 60
CUTS   ?= 100
INIT   ?= sshd
STRIDE ?= 1
AT_ONCE ?= 8

.PHONY: demo demo-fleet fence test check bench bench-trainer chaos deadlines full-disk fuzz live clean prove soak fleet-up fleet-down planted power service damage

demo: $(VENV)/ready
	$(RUN) examples/manpages/demo.py

test: check
	$(VENV)/bin/pytest -n 2 --dist loadfile $(KEYS)

check: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/vermin --target=3.10- --no-tips --violations policies fleetd/*.py fleetd/host > /dev/null \
		|| $(VENV)/bin/vermin --target=3.10- --no-tips --violations policies fleetd/*.py fleetd/host

chaos: $(VENV)/ready
	nice -n 5 $(RUN) tests/chaos/chaos.py --kills $(KILLS) --seed $(SEED)

# Every write of coordinator, agent, supervisor and shim finds no room in turn, or each STRIDE-th; then real trainings through full disks.
# The whole of it takes one to two hours on two cores.
full-disk: $(VENV)/ready
	nice -n 5 $(RUN) tests/chaos/full_sweep.py --stride $(STRIDE) --at-once $(AT_ONCE)
	FULL_DISK_STRIDE=$(STRIDE) nice -n 5 $(VENV)/bin/pytest -q tests/coordinator/test_full_disk_jobs.py
	nice -n 5 $(RUN) tests/chaos/full_trainings.py

# Simulated campaigns with faults for so many seconds, from new seeds, or from SEED=n on. From 300 s on every transition has to be reached.
soak: $(VENV)/ready
	$(RUN) -m tests.sim.soak --seconds $(SECONDS) $(if $(filter-out file,$(origin SEED)),--seed $(SEED))

# Three machines in this one, reached over real ssh, to play with: tests/live/fleet/. INIT=systemd boots them as a machine does. Needs root.
fleet-up: $(VENV)/ready
	PYTHONPATH=tests/live $(RUN) -m fleet up $(INIT)

fleet-down: $(VENV)/ready
	PYTHONPATH=tests/live $(RUN) -m fleet down

# The campaign of examples/manpages over real SSH on three test hosts, twice: undisturbed, then with one host cut off, one without power and the
# coordinator killed; both compared. Needs root.
demo-fleet: $(VENV)/ready
	$(RUN) tests/live/demo_fleet.py --steps $(STEPS)

# A test host loses power under two trainings, the coordinator is killed meanwhile: one run goes on, one is held for a person. Needs root.
power: $(VENV)/ready
	PYTHONPATH=tests/live nice -n 5 $(VENV)/bin/pytest -q tests/live/power_stories.py

# For each line of DESIGN section 9, for fences and for who is obeyed, a fault is planted: which story catches it, and after how long.
planted: $(VENV)/ready
	$(RUN) -m tests.sim.soak --planted

# Real trainings run into their cutoff with something broken; the table goes to docs/deadlines.md. SITUATIONS="link down" plays only that.
deadlines: $(VENV)/ready
	OMP_NUM_THREADS=1 $(RUN) tests/live/deadline_matrix.py $(if $(SITUATIONS),"$(SITUATIONS)")

# What the suite has no time for under real systemd: the coordinator as a service, units that make room for a campaign. Needs root.
service: $(VENV)/ready
	$(VENV)/bin/pytest tests/live/fleet/test_service.py tests/live/fleet/long_service.py tests/live/fleet/long_displaced.py

bench: $(VENV)/ready
	$(RUN) benchmarks/run.py

# Training speed beside Hugging Face's Trainer and a plain loop, and what a save costs. Minutes on a quiet machine; writes docs/training.md.
bench-trainer: $(VENV)/ready
	$(VENV)/bin/pip install --quiet --requirement benchmarks/requirements.txt
	$(RUN) benchmarks/trainer/saves.py --write
	$(RUN) benchmarks/trainer/compare.py --write

# Every parser of the trainer, fed with files that were mutated; one seed, one sequence.
fuzz: $(VENV)/ready
	OMP_NUM_THREADS=1 $(RUN) tests/trainer/fuzz_formats.py --inputs $(INPUTS) --seed $(SEED)

# pip compiles what it installs, which keeps imports quick even where PYTHONDONTWRITEBYTECODE is set.
$(VENV)/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --requirement requirements.lock
	$(VENV)/bin/pip install --quiet --no-deps --editable .
	touch $@

# Launches whose connections are cut at random moments, a host that falls silent, a slow line: what became of them, measured. PARTS=cuts: only that.
prove-ssh: $(VENV)/ready
	$(RUN) tests/live/prove_ssh.py $(PARTS) --cuts $(CUTS) --seed $(SEED)

# Tiny trainings stopped by real signals and taken up again, each compared bit for bit with its undisturbed twin: docs/exactness.md.
prove: $(VENV)/ready
	$(RUN) tests/trainer/prove_matrix.py
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q tests/trainer/long_compiled.py

clean:
	rm -rf $(VENV) .demo

# A host that is away is fenced while its trainer lives on, and comes back.
fence: $(VENV)/ready
	nice -n 5 $(VENV)/bin/pytest -q tests/live/fence_stories.py

# A changed byte, another version, a truncated file, a Git LFS pointer: each named before anything starts, on three hosts over real ssh. Needs root.
damage: $(VENV)/ready
	nice -n 5 $(VENV)/bin/pytest -q tests/live/fleet/long_damage.py
