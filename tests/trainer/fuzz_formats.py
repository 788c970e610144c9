"""A fuzzer over every parser of the trainer: mutated files in, a typed refusal or a value out, and nothing else.

    python tests/trainer/fuzz_formats.py --inputs 1000000 --seed 7           (or: make fuzz INPUTS=1000000)
    python tests/trainer/fuzz_formats.py --seed 7 --only corpus --number 1234     one input again, its files kept

Each input is a pure function of (seed, target, number). A fault is any exception that is no ExplainedError, a refusal that does not
name the file, an input that takes longer than INPUT_SECONDS_MAX, or memory beyond the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]

from fuzz_targets import Target, make_targets  # noqa: E402

from policies.errors import ExplainedError  # noqa: E402

INPUT_SECONDS_MAX = 60.0
MEMORY_BYTES_MAX = 3 * 1024 * 1024 * 1024
"""Address space beyond what the process had when it began: every single input stays far below it."""
FAULTS_MAX = 20
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, -(2**63), 0.0, 0.5, -0.5, 1e308, 1e-320, "", "x", "0", "\0",
    "../x", "/etc/passwd", "a" * 5000, "\u202e", [], {}, [[]], [None], {"a": 1}, [1, 2, 3], ["x"] * 50,
)
TOKENS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 20000, b'{"a":' * 5000, b'"\\ud800"', b"\xff\xfe", b"\0", b"{", b"}", b",")


@dataclass(slots=True)
class Outcome:
    """How often each target took or refused its input, and what went wrong."""

    taken: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return sum(self.taken.values()) + sum(self.refused.values()) + len(self.faults)


def fuzz(
    targets: dict[str, Target], folder: Path, *, inputs: int, seed: int, on_progress: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Feed `inputs` mutated inputs to the targets in turn. Stops early at FAULTS_MAX faults."""
    outcome, names = Outcome(), list(targets)
    with memory_limit(MEMORY_BYTES_MAX):
        for number in range(inputs):
            name = names[number % len(names)]
            feed(targets[name], name, folder / name, seed=seed, number=number, outcome=outcome)
            if len(outcome.faults) >= FAULTS_MAX:
                break
            if number % 20_000 == 19_999:
                on_progress(outcome)
    return outcome


def feed(target: Target, name: str, folder: Path, *, seed: int, number: int, outcome: Outcome) -> None:
    """One input: lay the files out, let the target read them, put everything back."""
    files = mutate(target, random.Random(f"{seed} {name} {number}"))
    changed = lay_out(folder, target.files, files)
    try:
        with time_limit(INPUT_SECONDS_MAX):
            target.read(folder)
    except ExplainedError as error:
        if not names_its_place(error, folder):
            outcome.faults.append(f"{name} {number}: the refusal names no place: {error}")
        outcome.refused[name] = outcome.refused.get(name, 0) + 1
    except BaseException as fault:
        if isinstance(fault, KeyboardInterrupt):
            raise
        outcome.faults.append(f"--seed {seed} --only {name} --number {number} ({', '.join(changed)}): {traceback.format_exc(limit=-6)}")
    else:
        outcome.taken[name] = outcome.taken.get(name, 0) + 1
    finally:
        lay_out(folder, files, target.files)


def names_its_place(error: ExplainedError, folder: Path) -> bool:
    return (str(folder) in error.where or any(path.name in error.where for path in folder.iterdir())) and bool(error.what) and bool(error.fix)


def lay_out(folder: Path, before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Turn a folder that holds `before` into one that holds `after`. Returns the names that changed."""
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    for name in changed:
        if name in after:
            (folder / name).write_bytes(after[name])
        else:
            (folder / name).unlink(missing_ok=True)
    return sorted(changed)


def mutate(target: Target, draw: random.Random) -> dict[str, bytes]:
    """One file changed once to three times; then, half of the time, the digests made right again so that the parsing goes on."""
    files = dict(target.files)
    name = draw.choice(target.mutable)
    if draw.random() < 0.02:
        del files[name]
        return files
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        files[name] = change(files[name], draw, other=files[draw.choice(target.mutable)])
    return target.mend(files) if target.mend is not None and draw.random() < 0.5 else files


def change(data: bytes, draw: random.Random, *, other: bytes) -> bytes:
    if data[:1] in (b"{", b"[") and draw.random() < 0.6:
        return change_json(data, draw)
    if len(data) > 8 and 2 <= int.from_bytes(data[:8], "little") <= len(data) - 8 and draw.random() < 0.6:
        return change_header(data, draw)
    place, length = draw.randrange(len(data) + 1), draw.choice((1, 1, 2, 4, 8, 64))
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: data[:place], lambda: b"", lambda: data + bytes(draw.choice((1, 4, 512))), lambda: POINTER, lambda: other,
        lambda: data[:place] + bytes(length) + data[place + length:], lambda: data[:place] + draw.randbytes(length) + data[place + length:],
        lambda: data[:place] + draw.randbytes(length) + data[place:], lambda: data[:place] + data[place + length:],
        lambda: data[:place] + draw.choice(TOKENS) + data[place:], lambda: data + data, lambda: bytes(len(data)),
        lambda: data[:place] + draw.choice((1, 255, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + data[place + 8:],
        lambda: flipped(data, place, draw), lambda: flipped(data, place, draw), lambda: flipped(data, place, draw),
    )
    return draw.choice(ways)()


def flipped(data: bytes, place: int, draw: random.Random) -> bytes:
    place = min(place, len(data) - 1)
    return data if not data else data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1:]


def change_json(data: bytes, draw: random.Random) -> bytes:
    """A change that leaves JSON (or nearly): a value replaced, a key lost, renamed or doubled, a word put in the place of a value."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data + draw.choice(TOKENS)
    places = list(places_of(value))
    if not places:
        return draw.choice(TOKENS)
    holder, key = draw.choice(places)
    way = draw.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[draw.choice(("schema", "x", "", "\0", "__metadata__", str(key) + " ", "a" * 2000))] = holder.pop(key)
    elif way == 2:
        holder[key] = "@@"
        word = draw.choice((*TOKENS, b'1,"x":1,"x":2'))
        return json.dumps(value).encode().replace(b'"@@"', word)
    elif way == 3 and isinstance(holder, dict):
        text, name = json.dumps(value), json.dumps(key)
        return text.replace(f"{name}:", f'{name}: {json.dumps(draw.choice(VALUES))}, {name}:', 1).encode()
    elif way == 4 and type(holder[key]) in (int, float):
        holder[key] = holder[key] + draw.choice((-1, 1, 0.5, 2**40))
    else:
        holder[key] = draw.choice(VALUES)
    return json.dumps(value).encode()


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places_of(value[key])


def change_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file with its header changed as JSON, the length made right."""
    length = int.from_bytes(data[:8], "little")
    header = change_json(data[8:8 + length], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + length:]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def expire(number: int, frame: Any) -> None:
        raise TimeoutError(f"one input took over {seconds} seconds")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit(beyond_bytes: int) -> Iterator[None]:
    """No more address space than there is now plus `beyond_bytes`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + beyond_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def laid_out(only: str | None = None, place: Path | None = None) -> Iterator[tuple[dict[str, Target], Path]]:
    """The targets and a folder that holds the sound files of each, in memory where the machine has such a place."""
    shared = Path("/dev/shm") if place is None else place
    folder = Path(tempfile.mkdtemp(prefix="fleetd-fuzz-", dir=shared if os.access(shared, os.W_OK) else None))
    try:
        targets = {name: target for name, target in make_targets(folder).items() if only in (None, name)}
        for name, target in targets.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            lay_out(folder / name, {}, target.files)
        yield targets, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tell(outcome: Outcome) -> None:
    print(f"{outcome.inputs} inputs, {len(outcome.faults)} faults", *outcome.faults[-1:], file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one target")
    parser.add_argument("--place", type=Path, help="where the files lie meanwhile (default: memory)")
    parser.add_argument("--number", type=int, help="this one input of --only, and say where its files lie")
    asked = parser.parse_args()
    began = time.monotonic()
    with laid_out(asked.only, asked.place) as (targets, folder):
        if asked.number is not None:
            kept = Path(tempfile.mkdtemp(prefix="fleetd-fuzz-input-"))
            lay_out(kept, {}, mutate(targets[asked.only], random.Random(f"{asked.seed} {asked.only} {asked.number}")))
            print(f"the files of this input: {kept}")
            targets[asked.only].read(kept)
            return 0
        outcome = fuzz(targets, folder, inputs=asked.inputs, seed=asked.seed, on_progress=tell)
    for name in targets:
        print(f"{name:14} taken {outcome.taken.get(name, 0):8}   refused {outcome.refused.get(name, 0):8}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{outcome.inputs} inputs, seed {asked.seed}, {len(outcome.faults)} faults, {time.monotonic() - began:.0f} s, peak memory {peak} MiB")
    print("\n".join(outcome.faults))
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
