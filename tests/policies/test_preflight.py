"""What is said of a host before a campaign begins, and what refuses it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from policies.parity import differences, parity_findings
from policies.preflight import Asked, findings, python_findings, same_machine
from policies.surveys import AcceleratorUser, HostSurvey, PackageSurvey, PythonSurvey, SessionTraps

FIT = HostSurvey(
    machine="m1", hostname="spark-a", boot_id="b1", kernel="6.14", architecture="aarch64", now=datetime(2026, 9, 1, tzinfo=timezone.utc),
    utc_offset_seconds=0, clock_synchronised=True, memory_total_bytes=128 * 1024**3, memory_available_bytes=100 * 1024**3, root="/srv/fleetd",
    root_fault=None, disk_free_bytes=10**12, cleaner=None, cap_grade="enforced", cap_means="cgroup v2",
    traps=SessionTraps(user="ada", is_system_user=False, is_lingering=True, removes_ipc=True, kills_processes=False),
)
ASKED = Asked(host="spark-a", transport="ssh", skew_seconds=0.1, uses_accelerator=True)
LEFT_ALONE = replace(FIT.traps, is_lingering=False)


def said(asked: Asked = ASKED, **changes: object) -> list[tuple[bool, str]]:
    return [(each.refuses, each.title) for each in findings(asked, replace(FIT, **changes))]  # type: ignore[arg-type]


def test_a_fit_host_is_left_in_peace() -> None:
    assert said() == []


@pytest.mark.parametrize(("changes", "refuses", "title"), [
    ({"root_fault": "/srv: Read-only file system"}, True, "the host's root can't be used"),
    ({"cleaner": "/usr/lib/tmpfiles.d/tmp.conf: D /tmp 1777 root root 30d"}, False, "old files are removed where the root lies"),
    ({"clock_synchronised": False}, False, "the clock is not synchronised"),
    ({"traps": LEFT_ALONE}, True, "a cut link would break the trainers"),
    ({"traps": replace(LEFT_ALONE, removes_ipc=False, kills_processes=True)}, True, "a cut link would kill the trainers"),
    ({"reboot_pending": ("linux-image",)}, False, "a reboot is pending"),
    ({"reboots_by_itself": True}, False, "the host may reboot by itself"),
    ({"reboots_by_itself": True, "reboot_pending": ()}, False, "the host is about to reboot"),
    ({"accelerator_users": (AcceleratorUser(pid=7, name="vllm", user="bob", bytes=None),)}, False, "others use the accelerator"),
])
def test_each_trap_is_named(changes: dict[str, object], refuses: bool, title: str) -> None:
    assert said(**changes) == [(refuses, title)]


def test_refusals_come_before_what_is_only_worth_knowing() -> None:
    assert [refuses for refuses, _ in said(clock_synchronised=False, root_fault="full", reboot_pending=())] == [True, False, False]


@pytest.mark.parametrize(("skew", "uncertainty", "expected"), [
    (1.9, 0.0, []), (-2.1, 0.0, [(False, "the clocks disagree")]), (2.1, 0.3, []), (61.0, 0.5, [(True, "the clocks disagree")]),
    (-61.0, 5.0, [(False, "the clocks disagree")]), (None, 0.0, []),
])
def test_clocks_are_judged_by_what_is_certain(skew: float | None, uncertainty: float, expected: list[tuple[bool, str]]) -> None:
    assert said(replace(ASKED, skew_seconds=skew, skew_uncertainty_seconds=uncertainty)) == expected


def test_a_root_user_loses_no_shared_memory_and_a_local_host_no_session() -> None:
    assert said(traps=replace(LEFT_ALONE, is_system_user=True)) == []
    assert said(replace(ASKED, transport="local", skew_seconds=None), traps=replace(LEFT_ALONE, kills_processes=True)) == []


def test_our_own_processes_on_the_accelerator_are_no_strangers() -> None:
    ours = AcceleratorUser(pid=7, name="python3", user="ada", bytes=1, is_ours=True)
    assert said(accelerator_users=(ours,)) == []


def test_one_machine_under_two_names_is_found_and_a_cloned_disk_is_not_one() -> None:
    (found,) = same_machine({"spark-a": FIT, "spark-b": FIT}, {"spark-a": None, "spark-b": 1024**3})
    assert found.refuses and found.title == "spark-a and spark-b are one machine" and "129.0 GiB" in found.what
    assert same_machine({"spark-a": FIT, "spark-b": replace(FIT, boot_id="b2")}, {}) == ()


def test_two_names_whose_capacities_fit_the_machine_together_are_only_told() -> None:
    half = 64 * 1024**3
    assert [each.refuses for each in same_machine({"a": FIT, "b": FIT}, {"a": half, "b": half})] == [False]
    assert [each.refuses for each in same_machine({"a": FIT, "b": FIT}, {"a": half, "b": half + 1})] == [True]


PACKAGES = {
    "torch": PackageSurvey(version="2.13.0", files=3, files_sha256="a" * 64), "numpy": PackageSurvey(version="2.3.0", files=2, files_sha256="b" * 64),
}
PYTHON = PythonSurvey(
    program="/opt/env/bin/python", fault=None, version="3.12.3", implementation="cpython", architecture="aarch64", torch="2.13.0+cu130", cuda="13.0",
    packages=PACKAGES, are_files_read=True,
)


def test_an_interpreter_that_lacks_nothing_passes_and_each_fault_is_named() -> None:
    assert python_findings("spark-a", "python", PYTHON) == ()
    (old,) = python_findings("spark-a", "agent_python", replace(PYTHON, version="3.9.18"))
    assert "3.9.18" in old.what and "3.10" in old.what
    (lacking,) = python_findings("spark-a", "python", replace(PYTHON, missing=("safetensors",)))
    assert lacking.fix == "/opt/env/bin/python -m pip install safetensors"
    (broken,) = python_findings("spark-a", "python", PythonSurvey(program="/nowhere", fault="No such file or directory"))
    assert broken.refuses and "No such file" in broken.what


def test_a_changed_installed_file_is_refused_by_its_name() -> None:
    damaged = replace(PACKAGES["numpy"], damaged=("numpy/core.py",), damaged_count=1)
    (found,) = python_findings("spark-a", "python", replace(PYTHON, packages={**PACKAGES, "numpy": damaged}))
    assert found.refuses and "numpy/core.py" in found.what
    assert found.fix == "/opt/env/bin/python -m pip install --force-reinstall --no-deps numpy==2.3.0"
    (of_ours,) = python_findings("spark-a", "python", replace(PYTHON, packages={**PACKAGES, "numpy": damaged}), repair="rm -r it")
    assert of_ours.fix == "rm -r it"


def other(**packages: PackageSurvey) -> PythonSurvey:
    return replace(PYTHON, packages={**PACKAGES, **packages})


def test_equal_hosts_differ_in_nothing() -> None:
    assert differences({"a": PYTHON, "b": PYTHON}, {"a": FIT, "b": FIT}) == ()


@pytest.mark.parametrize(("survey", "line"), [
    (other(numpy=replace(PACKAGES["numpy"], version="2.2.0")), "numpy: 2.3.0 on a, b / 2.2.0 on c"),
    (other(numpy=replace(PACKAGES["numpy"], files_sha256="c" * 64)), "files of numpy 2.3.0: bbbbbbbbbbbb on a, b / cccccccccccc on c"),
    (other(scipy=PackageSurvey(version="1.0", files=1, files_sha256="d" * 64)), "scipy: none on a, b / 1.0 on c"),
    (replace(PYTHON, torch="2.13.0+cpu"), "torch: 2.13.0+cu130 on a, b / 2.13.0+cpu on c"),
    (replace(PYTHON, version="3.12.4"), "python: cpython 3.12.3 on a, b / cpython 3.12.4 on c"),
])
def test_each_difference_names_the_hosts(survey: PythonSurvey, line: str) -> None:
    assert differences({"a": PYTHON, "b": PYTHON, "c": survey}, {}) == (line,)


def test_what_is_yet_to_be_built_is_compared_by_its_versions_alone_and_what_a_host_will_fetch_by_nothing() -> None:
    versions = {name: replace(package, files=0, files_sha256="") for name, package in PACKAGES.items()}
    expected = replace(PYTHON, torch=None, cuda=None, packages=versions, are_files_read=False, is_expected=True)
    assert differences({"a": PYTHON, "b": expected, "c": replace(expected, packages={})}, {}) == ()
    older = replace(expected, packages={**versions, "numpy": replace(versions["numpy"], version="2.2.0")})
    assert differences({"a": PYTHON, "b": older}, {}) == ("numpy: 2.2.0 on b / 2.3.0 on a",)


def test_drivers_are_compared() -> None:
    machines = {"a": replace(FIT, driver="580.1"), "b": replace(FIT, driver="570.9")}
    assert differences({"a": PYTHON, "b": PYTHON}, machines) == ("driver: 570.9 on b / 580.1 on a",)


def test_a_difference_refuses_only_where_parity_is_required() -> None:
    pythons = {"a": PYTHON, "b": replace(PYTHON, torch="2.12.0")}
    assert [each.refuses for each in parity_findings(pythons, {}, required=False)] == [False]
    assert [each.refuses for each in parity_findings(pythons, {}, required=True)] == [True]
    assert parity_findings({"a": PYTHON, "b": PYTHON}, {}, required=True) == ()
