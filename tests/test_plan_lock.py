"""A lock pins every package and says nothing else: what it may hold, and how each other line is refused with its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetd.plan import load_plan
from fleetd.plan_lock import read_lock
from policies.errors import PlanInvalid

SHA = "a" * 64
LINUX_ARM = {
    "implementation_name": "cpython", "implementation_version": "3.12.3", "os_name": "posix", "platform_machine": "aarch64",
    "platform_release": "6.14", "platform_system": "Linux", "platform_version": "#1", "platform_python_implementation": "CPython",
    "python_full_version": "3.12.3", "python_version": "3.12", "sys_platform": "linux",
}

PLAN = """\
name: small
deadline: 2h
reserve: {minimum: 10m, margin: 30s}
environment: {lock: requirements.lock}
hosts:
  box: {root: host, capacity: 8GiB, floor: 1GiB}
  spark-a: {transport: ssh, root: /srv/fleetd, environment: {python: python3.12, wheels: registry}}
  own: {root: other, python: /usr/bin/python3}
defaults: {memory_cap: 2GiB}
candidates:
  one: {command: [python, train.py]}
"""


def test_a_lock_as_tools_write_it_is_read_with_hashes_markers_comments_and_joined_lines() -> None:
    lock = read_lock(
        f"# made by a tool\n\nTorch==2.13.0 \\\n    --hash=sha256:{SHA} \\\n    --hash=sha512:{'b' * 128}\n    # via trainer\n"
        f"typing_extensions==4.16.0 ; python_version < '3.13' --hash sha256:{SHA}  # and why\n".encode()
    )
    assert lock.faults == ()
    torch, typing = lock.pins
    assert (torch.name, torch.version, torch.line, torch.hashes) == ("torch", "2.13.0", 3, (f"sha256:{SHA}", f"sha512:{'b' * 128}"))
    assert (typing.name, typing.line, typing.marker, typing.hashes) == ("typing-extensions", 7, 'python_version < "3.13"', (f"sha256:{SHA}",))


def test_markers_are_judged_by_the_host_and_not_by_the_machine_that_reads_the_lock() -> None:
    lock = read_lock(b"a==1\nb==1; platform_machine == 'aarch64'\nc==1; platform_machine == 'x86_64'\nd==1; python_version < '3.12'\n")
    assert [pin.name for pin in lock.for_host(LINUX_ARM)] == ["a", "b"]
    assert [pin.name for pin in lock.for_host({**LINUX_ARM, "platform_machine": "x86_64", "python_version": "3.11"})] == ["a", "c", "d"]


@pytest.mark.parametrize(("line", "expected"), [
    ("numpy", "'numpy' names no one version"),
    ("numpy>=2", "'numpy>=2' names no one version"),
    ("numpy==2.*", "'numpy==2.*' names no one version"),
    ("numpy==2.4,!=2.5", "names no one version"),
    ("numpy==not.a.version!", "is no package with a version"),
    ("-e ./trainer", "an editable folder is another thing on every machine"),
    ("--editable=./trainer", "an editable folder is another thing on every machine"),
    ("-r more.txt", "another file is not part of this lock"),
    ("-c bounds.txt", "another file is not part of this lock"),
    ("--extra-index-url https://me:secret@host/simple", "--extra-index-url is a setting of pip, not a package"),
    ("trainer @ https://me:secret@host/trainer-1.0-py3-none-any.whl", "a package by its address"),
    ("https://me:secret@host/trainer-1.0-py3-none-any.whl", "a package by its address"),
    ("git+ssh://git@host/trainer@v1", "a package by its address"),
    ("./wheels/trainer-1.0-py3-none-any.whl", "a package by its address"),
    ("numpy==2.4 --hash=md5:0123", "is no SHA-2 digest"),
    ("two words", "is no package with a version"),
])
def test_a_line_that_pins_no_package_is_refused_with_its_number_and_without_its_secrets(line: str, expected: str) -> None:
    (fault,) = read_lock(f"# first\nsix==1.17.0{f' --hash=sha256:{SHA}' if 'hash' in line else ''}\n{line}\n".encode()).faults
    assert fault.line == 3 and expected in fault.what and fault.fix
    assert "secret" not in fault.what + fault.fix


def test_a_package_twice_or_without_the_hash_that_others_have_or_none_at_all_is_a_fault() -> None:
    assert [(fault.line, fault.what) for fault in read_lock(b"six==1\nnumpy==2\nSix==1\n").faults] == [(3, "six stands in line 1 already")]
    unhashed = read_lock(f"six==1 --hash=sha256:{SHA}\nnumpy==2\n".encode()).faults
    assert [(fault.line, fault.what) for fault in unhashed] == [(2, "numpy==2 has no --hash, and others have one")]
    assert [fault.what for fault in read_lock(b"# nothing\n").faults] == ["it pins no package"]


def write(folder: Path, plan: str = PLAN, lock: str = "six==1.17.0\n") -> Path:
    (folder / "requirements.lock").write_text(lock, encoding="utf-8")
    path = folder / "plan.yaml"
    path.write_text(plan, encoding="utf-8")
    return path


def test_the_keys_of_a_host_go_before_those_of_the_plan_and_its_own_python_before_both(tmp_path: Path) -> None:
    box, spark, own = load_plan(write(tmp_path)).plan.hosts
    assert box.environment is not None and spark.environment is not None
    assert (box.environment.lock, box.environment.wheels, box.environment.python) == (str(tmp_path / "requirements.lock"), "auto", None)
    assert (spark.environment.lock_sha256, spark.environment.wheels, spark.environment.python) == (
        box.environment.lock_sha256, "registry", "python3.12")
    assert own.environment is None and own.python == "/usr/bin/python3"


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("lock: requirements.lock", "lock: nowhere.lock", ("plan.yaml:4: environment.lock:", "nowhere.lock can't be read: No such file")),
    ("lock: requirements.lock", "wheels: auto", ("plan.yaml:4: environment: environment has no lock",)),
    ("lock: requirements.lock", "lock: requirements.lock, wheels: nowhere", ("plan.yaml:4: environment.wheels:", "nowhere is no directory")),
    ("lock: requirements.lock", "lock: requirements.lock, wheels: .", ("plan.yaml:4: environment.wheels:", "holds no wheel")),
    ("lock: requirements.lock", "requirements: requirements.lock", ("plan.yaml:4: environment.requirements:", "did you mean lock?")),
    ("python: python3.12", "python: bin/python", ("plan.yaml:7: hosts.spark-a.environment.python:", "no whole path")),
    ("python: /usr/bin/python3}", "python: x, environment: {wheels: auto}}", ("plan.yaml:8: hosts.own.python:", "both `python` and `environment`")),
    ("one: {command: [python, train.py]", "one: {command: [x], environment: {lock: l}", ("candidates.one.environment:", "variables, no packages")),
    ("one: {command: [python, train.py]}", "one: {training: {steps: 3}}", ("environment.lock:", "the lock has no numpy, safetensors, torch, transf")),
])
def test_an_environment_that_can_not_be_is_a_fault_at_its_line(tmp_path: Path, old: str, new: str, expected: tuple[str, ...]) -> None:
    with pytest.raises(PlanInvalid) as caught:
        load_plan(write(tmp_path, PLAN.replace(old, new)))
    assert any(all(words in line for words in expected) for line in caught.value.what.split("\n")), caught.value.what


def test_every_fault_of_a_lock_is_told_at_once_with_the_line_of_the_plan_and_that_of_the_lock(tmp_path: Path) -> None:
    with pytest.raises(PlanInvalid) as caught:
        load_plan(write(tmp_path, lock="numpy\n-e .\n"))
    assert [line.strip().split(" — ")[0] for line in caught.value.what.split("\n")] == [
        "plan.yaml:4: environment.lock: requirements.lock:1: 'numpy' names no one version",
        "plan.yaml:4: environment.lock: requirements.lock:2: an editable folder is another thing on every machine",
    ]


def test_the_example_is_a_plan_that_can_be_launched() -> None:
    (host,) = load_plan(Path(__file__).resolve().parents[1] / "examples" / "packages" / "plan.yaml").plan.hosts
    assert host.environment is not None and host.environment.wheels == "auto"
