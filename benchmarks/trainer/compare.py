"""Training speed beside others: ours, Hugging Face's Trainer and a plain PyTorch loop, in turns, on the same data, model and threads.

    python benchmarks/trainer/compare.py [--threads N] [--clock wall|processor] [--cell VOCABULARY:WINDOW ...] [--keep FILE] [--write]

Every contender is a process of its own that keeps its model; a round gives each the same number of steps, one contender at a
time, and measures two matrix products as well, torch's own and oneDNN's. What is compared is therefore the same minute of the same machine. `--keep`
gathers cells over several calls, `--write` puts them into docs/training.md. On a machine that others use, `--clock processor` with
one thread counts the seconds that a contender really had. Exit status 1: a cell is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import stage
from page import PAGE, write_part

HERE = Path(__file__).resolve().parent
WHO = ("ours", "trainer", "plain", "matmul", "onednn")
LIMITS = WHO[3:]
CELLS = ("8000:256", "8000:1024", "48000:256", "48000:1024")
ROUNDS = 5
STEPS_A_TURN = {8000: 2}  # one step takes long enough elsewhere
MATMUL_BLOCKS = 2
MATMUL_GFLOP = 2 * 1024**3 * 20 / 1e9
MANY_WORDS, TRAINER_RATIO_MIN, LIMIT_SHARE_MIN = 48_000, 1.2, 0.8
LOSS_DIFFERENCE_MAX = 2e-3
"""Nats. Equal arithmetic in another order differs by rounding, and the Trainer rounds what it logs to four places."""
ANSWER_SECONDS_MAX = 600


class Contender:
    """A process that trains when asked."""

    def __init__(self, who: str, cell: stage.Cell, shards: Path, work: Path, clock: str) -> None:
        work.mkdir()
        self._clock = clock
        ask_end, self._ask = os.pipe()
        self._tell, tell_end = os.pipe()
        threads = str(cell.threads)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(work / "output.txt", "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "contender.py"), who, json.dumps(cell.to_json()), str(shards), str(work),
                 "--ask", str(ask_end), "--tell", str(tell_end)],
                env={**kept, **offline, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}, pass_fds=(ask_end, tell_end),
                stdout=output, stderr=subprocess.STDOUT,
            )
        os.close(ask_end)
        os.close(tell_end)
        self._answers, self.who, self.work = os.fdopen(self._tell), who, work
        self.losses: list[float] = []
        self._answer()

    def take(self, steps: int) -> float:
        """Seconds for so many steps."""
        os.write(self._ask, f"{steps}\n".encode())
        return self._answer()

    def close(self) -> None:
        os.close(self._ask)
        self._process.wait(timeout=ANSWER_SECONDS_MAX)
        if self.who == "ours":
            logged = [json.loads(line) for line in (self.work / "log.jsonl").read_text().splitlines()]
            self.losses = [record["loss"] for record in logged if "loss" in record]

    def _answer(self) -> float:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"{self.who} ended early:\n{(self.work / 'output.txt').read_text()[-2000:]}")
        said = json.loads(line)
        self.losses = said["losses"]
        return float(said[self._clock])


def measure(cell: stage.Cell, rounds: int, clock: str) -> dict[str, Any]:
    """Tokens per second of each round and contender, GFLOP/s of the matrix product, and how far the losses lie apart."""
    steps = STEPS_A_TURN.get(cell.vocabulary, 1)
    with tempfile.TemporaryDirectory(prefix="fleetd-bench-") as folder:
        shards = stage.make_shards(Path(folder) / "shards", cell.vocabulary)
        contenders = {who: Contender(who, cell, shards, Path(folder) / who, clock) for who in WHO}
        found: dict[str, list[float]] = {who: [] for who in WHO}
        for number in range(rounds):
            for who in (*WHO[number % 3:3], *WHO[:number % 3], *LIMITS):  # nobody is always first
                seconds = contenders[who].take(MATMUL_BLOCKS if who in LIMITS else steps)
                found[who].append(MATMUL_BLOCKS * MATMUL_GFLOP / seconds if who in LIMITS else steps * cell.tokens / seconds)
            print(f"{cell.name}: round {number + 1}: " + ", ".join(f"{who} {values[-1]:.0f}" for who, values in found.items()),
                  file=sys.stderr, flush=True)
        for contender in contenders.values():
            contender.close()
        losses = [contenders[who].losses for who in WHO[:3]]
    apart = max(max(each) - min(each) for each in zip(*losses, strict=False))
    return {**cell.to_json(), "clock": clock, "rounds": found, "loss_apart": apart, "losses_compared": min(map(len, losses))}


def ratios(measured: dict[str, Any], other: str) -> list[float]:
    """Ours over another, round by round."""
    rounds = measured["rounds"]
    return [mine / theirs for mine, theirs in zip(rounds["ours"], rounds[other], strict=True)]


def faults_of(measured: dict[str, Any]) -> list[str]:
    """What is not as it should be: somebody faster in every round, the Trainer too near where words are many, or losses apart."""
    name = cell_of(measured).name
    faults = [f"{name}: {other} is faster in every round" for other in ("trainer", "plain") if max(ratios(measured, other)) < 1]
    if measured["vocabulary"] == MANY_WORDS and (ratio := statistics.median(ratios(measured, "trainer"))) < TRAINER_RATIO_MIN:
        faults.append(f"{name}: {ratio:.2f} times the Trainer, {TRAINER_RATIO_MIN} is asked")
    if measured["loss_apart"] > LOSS_DIFFERENCE_MAX:
        faults.append(f"{name}: losses lie {measured['loss_apart']:.2g} apart, so this is not the same training")
    return faults


def share_of_limit(measured: dict[str, Any], limits: tuple[str, ...] = LIMITS) -> float:
    """GFLOP/s of our training over that of the quickest matrix product in the same round, the median of the rounds."""
    flops = cell_of(measured).flops_a_token()
    rounds = measured["rounds"]
    quickest = map(max, zip(*(rounds[limit] for limit in limits), strict=True))
    return statistics.median(mine * flops / 1e9 / limit for mine, limit in zip(rounds["ours"], quickest, strict=True))


def cell_of(measured: dict[str, Any]) -> stage.Cell:
    return stage.Cell(**{key: measured[key] for key in ("vocabulary", "window", "threads", "tokens")})


def table(measured: list[dict[str, Any]]) -> str:
    head = ("model", "threads, clock, tokens a step", "ours", "Trainer", "plain loop", "ours / Trainer", "ours / plain", "torch's product",
            "ours of it", "oneDNN's", "ours of it", "losses apart")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for each in measured:
        speeds = [spread(each["rounds"][who], ",.0f") for who in WHO[:3]]
        beside = [spread(ratios(each, other), ".2f") for other in WHO[1:3]]
        limits = [(f"{statistics.median(each['rounds'][limit]):.0f} GFLOP/s", f"{share_of_limit(each, (limit,)):.0%}") for limit in LIMITS]
        how = f"{each['threads']}, {each['clock']}, {each['tokens']:,}"
        cells = [cell_of(each).name, how, *speeds, *beside, *sum(limits, ()), f"{each['loss_apart']:.1e}"]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=stage.TOKENS_A_STEP, help="in one step")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cell", action="append", choices=CELLS, help="only these")
    parser.add_argument("--keep", metavar="FILE", help="add the figures to this JSON file, and show all that it holds")
    parser.add_argument("--write", action="store_true", help="write docs/training.md")
    parser.add_argument("--page", action="store_true", help="measure nothing more: show what is kept")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(Path(given.keep).read_text()) if given.keep and Path(given.keep).exists() else {}
    cells = kept.setdefault("cells", {})
    for name in () if given.page else given.cell or CELLS:
        vocabulary, window = map(int, name.split(":"))
        cells[name] = measure(stage.Cell(vocabulary=vocabulary, window=window, threads=given.threads, tokens=given.tokens), given.rounds, given.clock)
        if given.keep:
            Path(given.keep).write_text(json.dumps(kept, indent=1))
    measured = [cells[name] for name in CELLS if name in cells]
    faults = [fault for each in measured for fault in faults_of(each)]
    if len(measured) == len(CELLS) and (best := max(map(share_of_limit, measured))) < LIMIT_SHARE_MIN:
        faults.append(f"the best cell reaches {best:.0%} of the matrix product, {LIMIT_SHARE_MIN:.0%} is asked")
    print(table(measured))
    if given.write:
        write_part(PAGE, "speed", table(measured))
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
