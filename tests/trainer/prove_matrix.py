"""`make prove`: tiny trainings stopped in every way and taken up again, each compared bit for bit with its undisturbed twin.

Every attempt is a process of its own that gets real signals. Most are forked from this one after it has imported torch, since
the import is most of what a tiny training costs; those of the column "another environment" are started from nothing. The table
goes to docs/exactness.md; the exit status is 32 when a cell differs. TRAINER_KILL_SEED repeats the moments of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import zxell_reference
from trainer_stage import GPT2, LLAMA, last_step, log_of, logged_losses, make_run, make_shards, make_task

from policies.facts import TrainerExit
from policies.manifest import directory_digest, manifest_entries
from trainer import __main__ as command
from trainer.checkpoint import steps_in
from trainer.environment import fix_arithmetic
from trainer.fingerprint import code_digest
from trainer.formats.zxell_continue import import_run

ROOT = Path(__file__).resolve().parent.parent.parent
SEED = int(os.environ.get("TRAINER_KILL_SEED", random.SystemRandom().randrange(10**6)))
STEPS = 150
ATTEMPT_SECONDS_MAX = 120.0
TRIES_MAX = 10
MEMORY_FOLDER = "/dev/shm"
CALM = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
ROWS: dict[str, dict[str, Any]] = {
    "LM gpt2": {"model": {"config": {**GPT2, **CALM}}},
    "LM llama": {"model": {"config": LLAMA}},
    "with dropout (gpt2)": {"model": {"config": GPT2}},
    "with accumulation (llama, 4 x 1)": {"model": {"config": LLAMA}, "micro_batch": 1},
    "across epochs (gpt2, dropout)": {"model": {"config": GPT2}, "data": "small"},
    "drawn as zxell draws (llama)": {"model": {"config": {**LLAMA, "num_key_value_heads": 2}}, "sampler": "zxell"},
    "zxell import (from its step 20)": {},
}
IMPORTED_AT = 20
"""Where zxell's own trainer, as the tests write it from its description, leaves the run that the last row takes over."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`digest` of the last checkpoint, `at` which steps the attempts before ended."""

    digest: str
    at: tuple[int, ...]
    is_equal: bool


def fork_attempt(run_dir: Path, *words: str) -> int:
    """A process that runs one command on `run_dir`. SIGTERM is blocked until the trainer listens, as its host does it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(run_dir / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os._exit(command.main([*(words or ("train",)), str(run_dir)]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return child


def end_of(child: int, until: Callable[[], bool] = lambda: False, number: int = signal.SIGTERM) -> int:
    """The exit status; once `until` holds, the signal is sent."""
    is_sent, give_up_at = False, time.monotonic() + ATTEMPT_SECONDS_MAX
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if not is_sent and until():
            os.kill(child, number)
            is_sent = True
        if time.monotonic() > give_up_at:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError("an attempt took too long")
        time.sleep(0.002)


def finish(run_dir: Path) -> None:
    status = end_of(fork_attempt(run_dir))
    assert status == TrainerExit.FINISHED, (status, (run_dir / "output.txt").read_text())


def untouched(run_dir: Path) -> Path:
    """Where the run directory lies as it was before any attempt."""
    return run_dir.with_name(f"{run_dir.name}-untouched")


def interrupt(run_dir: Path, dice: random.Random, number: int, last: int) -> int:
    """One attempt that is ended by a signal at a random moment, before step `last`. Returns the step it had reached."""
    for _ in range(TRIES_MAX):
        begun = max([0, *(record["step"] for record in log_of(run_dir) if "loss" in record)])
        at = dice.randint(begun + 1, max(begun + 1, last))
        wait, seen = dice.uniform(0.0, 0.02), []

        def is_time(at: int = at, wait: float = wait, seen: list[float] = seen) -> bool:
            if not seen and any("loss" in record and record["step"] >= at for record in log_of(run_dir)):
                seen.append(time.monotonic())
            return bool(seen) and time.monotonic() - seen[0] >= wait

        status = end_of(fork_attempt(run_dir), is_time, number)
        if status in (TrainerExit.STOPPED, -signal.SIGKILL):
            return max(record["step"] for record in log_of(run_dir) if "loss" in record)
        assert status == TrainerExit.FINISHED, (status, (run_dir / "output.txt").read_text())
        shutil.rmtree(run_dir)  # it was too fast for us: once more from the beginning
        shutil.copytree(untouched(run_dir), run_dir)
    raise TimeoutError(f"no attempt of {TRIES_MAX} could be interrupted")


def sigterm(run_dir: Path, dice: random.Random) -> tuple[int, ...]:
    at = (interrupt(run_dir, dice, signal.SIGTERM, STEPS - 30),)
    finish(run_dir)
    return at


def sigkill(run_dir: Path, dice: random.Random) -> tuple[int, ...]:
    at = tuple(interrupt(run_dir, dice, signal.SIGKILL, last) for last in (STEPS // 2, STEPS - 30))
    finish(run_dir)
    return at


def three_stops(run_dir: Path, dice: random.Random) -> tuple[int, ...]:
    at = tuple(interrupt(run_dir, dice, signal.SIGTERM, last) for last in (40, 80, 115))
    finish(run_dir)
    return at


def other_environment(run_dir: Path, dice: random.Random) -> tuple[int, ...]:
    """Taken up by a process started from nothing, with other variables, from a copy of the code in another place."""
    at = (interrupt(run_dir, dice, signal.SIGTERM, STEPS - 30),)
    elsewhere = run_dir.parent / "elsewhere"
    if not elsewhere.exists():
        for name in ("trainer", "policies"):
            shutil.copytree(ROOT / name, elsewhere / name, ignore=shutil.ignore_patterns("__pycache__"))
    variables = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(elsewhere), "PYTHONHASHSEED": str(dice.randint(1, 10**6)), "LC_ALL": "C", "TZ": "Asia/Tokyo",
        "HOME": "/", "OMP_NUM_THREADS": "3", "MALLOC_TOP_PAD_": "65536", "PYTHONMALLOC": "malloc", "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run([sys.executable, "-m", "trainer", "train", str(run_dir)], env=variables, cwd=elsewhere, umask=0o077, capture_output=True,
                          text=True, timeout=ATTEMPT_SECONDS_MAX)
    assert done.returncode == TrainerExit.FINISHED, done.stderr
    return at


COLUMNS: dict[str, Callable[[Path, random.Random], tuple[int, ...]]] = {
    "SIGTERM": sigterm, "SIGKILL twice, at random moments": sigkill, "three stops in a row": three_stops, "another environment": other_environment,
}


def digest_of(run_dir: Path) -> str:
    manifest = json.loads((run_dir / f"checkpoints/step-{STEPS:09d}/manifest.json").read_text())
    return directory_digest(manifest_entries(manifest))


def row_of(root: Path, name: str, changes: dict[str, Any], dice: random.Random) -> tuple[str, dict[str, Cell], str]:
    """The digest of the undisturbed twin, the cells, and what `prove` says of the run that was killed."""
    folder = root / name.split(" (")[0].replace(" ", "-")
    folder.mkdir()
    twin = new_run(root, folder, "twin", changes)
    finish(twin)
    cells = {}
    for number, (column, disturb) in enumerate(COLUMNS.items()):
        run_dir = new_run(root, folder, f"cell-{number}", changes)
        shutil.copytree(run_dir, untouched(run_dir))
        at = disturb(run_dir, dice)
        is_equal = digest_of(run_dir) == digest_of(twin) and logged_losses(run_dir) == logged_losses(twin) and last_step(run_dir) == STEPS
        cells[column] = Cell(digest=digest_of(run_dir), at=at, is_equal=is_equal)
        print(f"{name}: {column}: interrupted at {at}: {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    said = {TrainerExit.FINISHED: "exact", TrainerExit.GATE_FAILED: "INEXACT"}.get(
        TrainerExit(end_of(fork_attempt(folder / "cell-1", "prove", "--from", str(min(steps_in(folder / "cell-1/checkpoints")))))), "UNKNOWN")
    return digest_of(twin), cells, said


def new_run(root: Path, folder: Path, name: str, changes: dict[str, Any]) -> Path:
    """A run directory before its first attempt; the row without changes is the one that goes on from a run of zxell."""
    if not changes:
        in_a_child(lambda: import_run(root / "zxell/run", folder / name, root / "zxell/shards"))
        return folder / name
    terms = {"steps": STEPS, "checkpoint": {"every_steps": 20, "every_seconds": None, "keep": 2}, "validation": {"every_steps": 50, "batch": 8}}
    given = {key: value for key, value in changes.items() if key != "data"}
    return make_run(folder, name, make_task(root / changes.get("data", "large"), root / "val", **{**terms, **given}))


def in_a_child(work: Callable[[], Any]) -> None:
    """Torch starts threads when it computes, and a process that has some can't be forked safely: so this one never computes."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def make_zxell_run(folder: Path) -> None:
    """A run of zxell that stands at step 20 of 150."""
    torch.set_num_threads(1)
    zxell = zxell_reference.Training(
        zxell_reference.TINY, {**zxell_reference.ARGS, "steps": STEPS, "ckpt_every": 20, "eval_every": 50},
        zxell_reference.train_shards(zxell_reference.write_shards(folder / "shards")))
    zxell.go(IMPORTED_AT)
    zxell.save(folder / "run", ["train_000.bin", "train_001.bin"])


def document(rows: dict[str, tuple[str, dict[str, Cell], str]], environment: dict[str, Any], code: str) -> str:
    head = ["training", "undisturbed", *COLUMNS, "`prove` of the killed one, from its first checkpoint"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, (digest, cells, said) in rows.items():
        shown = [f"{'bit-equal' if cell.is_equal else '**different**'} `{cell.digest[:12]}`, ended at {', '.join(map(str, cell.at))}"
                 for cell in cells.values()]
        lines.append("| " + " | ".join([name, f"`{digest[:12]}`", *shown, said]) + " |")
    facts = ", ".join(f"{key} {environment[key]}" for key in ("torch", "numpy", "transformers", "device", "cpu_capability", "threads", "precision"))
    return TEXT.format(steps=STEPS, table="\n".join(lines), facts=facts, code=code[:12], seed=SEED)


TEXT = """# Exactness, as it was proved here

`make prove` writes this page. Each row is a tiny training of {steps} steps; each cell is the same training, interrupted by real signals to real
processes at random moments, taken up again by new processes, and compared with the undisturbed twin. **Bit-equal** means: the last checkpoint
directories have the same digest, so weights, both moments and counters of AdamW, every random stream, the cursor of the data, every loss and every
validation score are the same bits; and the losses in `log.jsonl` are the same numbers, step for step.

{table}

Made with {facts}; code `{code}`; moments from seed {seed} (`TRAINER_KILL_SEED={seed} make prove`). After a SIGKILL the run goes on from the last
checkpoint that verifies, so steps after it are taken twice, and the second time gives the same losses.

**Another environment** stands in for another host of the same kind: a process started from nothing, another working directory, a copy of the code in
another place, another hash seed, locale, time zone, home, file mask and allocator, and a thread count in the environment that the task overrules.

**Not proved on this page:** CUDA (the settings are made strict and recorded, but nothing here ran on an accelerator); a second physical machine;
bf16; more than one thread; another CPU kind or another build of torch, numpy, safetensors or transformers, which a resume refuses by name. Code that
changed between two attempts is not refused: the log says from which step on exactness is not claimed.

**A plan can ask for it**: `proof: {{steps: 20, required: false}}` of a candidate lets a fresh process take its last steps again when the training
is over, under the same cap and never beyond the cutoff. With `compile: true` the body's arithmetic is `torch.compile`'s: another training than
without (its losses differ in the last places), refused under another compiler or processor, and bit-equal to itself over a stop and a resume within
one process (`tests/trainer/long_compiled.py`); between processes that each compile for themselves that was not shown yet: ask `prove`.

For your own run: `fleetd-trainer prove RUN_DIR` takes the newest stretch between two checkpoints again and says for each part exact, inexact from
which step, or unknown and why; exit 0 exact, 32 inexact, 30 not provable. `--from STEP`, `--steps N`, `--json`, `--record` (evidence/exactness.json).
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", type=int, action="append", choices=range(len(ROWS)), help="only these; the page is written once all are there")
    parser.add_argument("--keep", metavar="FILE", help="gather rows over several calls, all of the same code and seed")
    parser.add_argument("--page", action="store_true", help="prove nothing more: write the page of what is kept")
    given = parser.parse_args()
    fix_arithmetic(1)
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401 (imported once here, not in every child)

    import trainer.prove  # noqa: F401

    code, kept = code_digest(), read_kept(given.keep)
    assert kept.setdefault("made by", [code, SEED]) == [code, SEED], "rows of other code, or from another seed"
    for number in () if given.page else given.row or range(len(ROWS)):
        name = list(ROWS)[number]
        kept.setdefault("rows", {})[name], kept["environment"] = proved(name)
        if given.keep:
            Path(given.keep).write_text(json.dumps(kept, indent=1))
    rows = {name: as_row(kept["rows"][name]) for name in ROWS if name in kept["rows"]}
    is_proved = all(said == "exact" and all(cell.is_equal for cell in cells.values()) for _, cells, said in rows.values())
    if len(rows) == len(ROWS):
        (ROOT / "docs/exactness.md").write_text(document(rows, kept["environment"], code))
    print(f"{'every cell is bit-equal' if is_proved else f'NOT EXACT, TRAINER_KILL_SEED={SEED}'}: {len(rows)} of {len(ROWS)} rows, docs/exactness.md")
    return 0 if is_proved else TrainerExit.GATE_FAILED


def proved(name: str) -> tuple[Any, dict[str, Any]]:
    """One row, and the environment that it was made in. Its moments are drawn from the seed and its name, so it can be repeated alone."""
    # In memory where there is such a place: thousands of syncs of a busy disk are waiting, and not what is proved here.
    with tempfile.TemporaryDirectory(prefix="prove-", dir=MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None) as folder:
        root = Path(folder)
        make_shards(root / "large", split="train", shards=2, documents=300, seed=1)
        make_shards(root / "small", split="train", shards=2, documents=20, seed=1)
        make_shards(root / "val", split="val", shards=1, documents=12, seed=2, scored=True)
        in_a_child(lambda: make_zxell_run(root / "zxell"))
        row = row_of(root, name, dict(ROWS[name]), random.Random(f"{SEED} {name}"))
        state = json.loads(next(root.glob(f"*/twin/checkpoints/step-{STEPS:09d}/trainer.json")).read_text())
    return [row[0], {column: asdict(cell) for column, cell in row[1].items()}, row[2]], state["environment"]


def read_kept(path: str | None) -> dict[str, Any]:
    return json.loads(Path(path).read_text()) if path and Path(path).exists() else {}


def as_row(kept: Any) -> tuple[str, dict[str, Cell], str]:
    digest, cells, said = kept
    return digest, {column: Cell(digest=cell["digest"], at=tuple(cell["at"]), is_equal=cell["is_equal"]) for column, cell in cells.items()}, said


if __name__ == "__main__":
    sys.exit(main())
