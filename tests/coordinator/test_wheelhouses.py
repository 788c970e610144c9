"""The wheels of a lock, chosen by the real pip out of a folder of wheels made by hand."""

from __future__ import annotations

import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from small_wheels import lock_of, small_wheel

from fleetd.campaign import EnvironmentPlan
from fleetd.coordinator.environments import kept_lock
from fleetd.coordinator.trees import tree_fault
from fleetd.coordinator.wheelhouses import Wanted, Wheelhouses, check_complete, pip_wheel, platforms, unpacked_bytes
from fleetd.environments import Interpreter
from fleetd.paths import CampaignPaths, StatePaths
from fleetd.pip_words import last_words, pip_fault, without_secrets
from fleetd.plan_lock import Pin, read_lock_file
from policies.errors import DataDamaged, NoRoom, RequestRefused

SPARK = Interpreter(
    program="python3", version="3.12.3", implementation="cpython", machine="aarch64", abi="cp312", libc="glibc 2.39",
    markers={"platform_machine": "aarch64", "python_version": "3.12", "sys_platform": "linux"},
)


def wanted(lock: Path, source: str, interpreter: Interpreter = SPARK) -> Wanted:
    read, _ = read_lock_file(lock)
    return Wanted(lock_sha256=read.sha256, pins=read.for_host(interpreter.markers), interpreter=interpreter, source=source)


@pytest.fixture
def houses(tmp_path: Path) -> Wheelhouses:
    return Wheelhouses(StatePaths(tmp_path / "state"))


def test_pip_chooses_for_the_host_and_not_for_this_machine_and_the_same_lock_gives_the_same_wheels_later(houses: Wheelhouses, tmp_path: Path) -> None:
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}-cp{sys.version_info[0]}{sys.version_info[1]}-manylinux_2_17_x86_64"
    small_wheel(tmp_path / "wheels", "alpha", tag=here)
    fits = small_wheel(tmp_path / "wheels", "alpha", tag="cp312-cp312-manylinux_2_28_aarch64")
    beta = small_wheel(tmp_path / "wheels", "beta", requires=("alpha>=1", "gamma; python_version < '3.0'"))
    asked = wanted(lock_of(tmp_path / "lock", fits, beta), str(tmp_path / "wheels"))

    found = houses.get(asked)
    names = {entry.path for entry in found.entries}
    assert {f"wheels/{fits.name}", f"wheels/{beta.name}", "requirements.txt"} < names and not any("x86_64" in name for name in names)
    assert sum(name.startswith("pip-") for name in names) == 1 and tree_fault(found.folder, found.digest) is None
    assert [line.split(" --hash=sha256:")[0] for line in (found.folder / "requirements.txt").read_text().splitlines()] == ["alpha==1.0", "beta==1.0"]
    inside = [each for wheel in (fits, beta) for each in zipfile.ZipFile(wheel).infolist()]
    assert unpacked_bytes(found) == sum(each.file_size for each in inside) + sum(each.file_size for each in inside if each.filename.endswith(".py"))
    inode = found.folder.stat().st_ino
    again = Wheelhouses(StatePaths(tmp_path / "state")).get(asked)
    assert (again.digest, again.wheels, again.folder.stat().st_ino) == (found.digest, found.wheels, inode), "nothing was fetched a second time"
    assert houses.get(replace(asked, source="registry")).wheels == "registry"


def test_a_package_without_a_wheel_for_the_hosts_machine_is_named_with_its_line_and_nothing_is_kept(houses: Wheelhouses, tmp_path: Path) -> None:
    beta = small_wheel(tmp_path / "wheels", "beta")
    alpha = small_wheel(tmp_path / "wheels", "alpha", tag="cp312-cp312-manylinux_2_28_x86_64")
    with pytest.raises(RequestRefused) as caught:
        houses.get(wanted(lock_of(tmp_path / "lock", beta, alpha), str(tmp_path / "wheels")))
    assert caught.value.title == "there is no wheel of alpha==1.0 for cp312 on aarch64, glibc 2.39"
    assert caught.value.where == "line 2 of the lock, alpha==1.0" and "as `wheels`" in caught.value.fix
    assert os.listdir(tmp_path / "state" / "wheelhouses") == []


def test_a_lock_that_lacks_what_its_packages_need_is_refused_by_name_before_anything_travels(tmp_path: Path) -> None:
    beta = small_wheel(tmp_path, "beta", requires=("alpha>=2", "gamma; platform_machine == 'x86_64'", "delta; extra == 'more'", "epsilon"))
    alpha = small_wheel(tmp_path, "alpha")
    asked = wanted(lock_of(tmp_path / "lock", beta, alpha), "auto")
    with pytest.raises(RequestRefused) as caught:
        check_complete(asked, dict(zip(asked.pins, (beta, alpha), strict=True)))
    assert caught.value.what == "it does not have alpha>=2 (for beta, and it has 1.0), epsilon (for beta)"


def test_a_lock_that_was_edited_after_the_check_is_refused_and_a_kept_one_outlives_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("six==1.17.0\n", encoding="utf-8")
    asked, paths = EnvironmentPlan(lock=str(lock), lock_sha256=read_lock_file(lock)[0].sha256), CampaignPaths(tmp_path / "campaign")
    assert kept_lock(paths, asked).pins == (Pin(name="six", version="1.17.0", line=1),)
    lock.write_text("six==1.16.0\n", encoding="utf-8")
    assert kept_lock(paths, asked).pins[0].version == "1.17.0"
    with pytest.raises(RequestRefused, match="the lock changed since the plan was checked"):
        kept_lock(CampaignPaths(tmp_path / "other"), asked)


def test_platform_tags_go_up_to_the_hosts_glibc_and_no_further() -> None:
    tags = platforms(SPARK)
    assert tags[0] == "manylinux_2_39_aarch64" and "manylinux2014_aarch64" in tags and "manylinux_2_40_aarch64" not in tags
    assert platforms(replace(SPARK, libc="")) == ("musllinux_1_2_aarch64", "musllinux_1_1_aarch64", "linux_aarch64")


def test_the_newest_pip_is_taken_and_a_folder_of_ones_own_counts(tmp_path: Path) -> None:
    bundled = pip_wheel(tmp_path)
    newer = tmp_path / "pip-99.0-py3-none-any.whl"
    newer.touch()
    (tmp_path / "pip-1.0-py3-none-any.whl").touch()
    assert bundled.name.startswith("pip-") and pip_wheel(tmp_path) == newer


@pytest.mark.parametrize(("said", "kind", "title"), [
    ("ERROR: Could not find a version that satisfies the requirement x==1 (from versions: 2)\nERROR: No matching distribution found for x==1",
     RequestRefused, "there is no wheel of x==1"),
    ("Retrying … NewConnectionError('…')\nERROR: No matching distribution found for x==1", RequestRefused, "the package index can't be reached"),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. …\n    alpha==1.0 from file:///w/alpha-1.0-py3-none-any.whl (from -r "
     "/w/lock (line 1)):\n        Expected sha256 aa\n             Got        bb\n",
     DataDamaged, "the bytes of alpha==1.0 are not those that the lock names"),
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", NoRoom, "no room for the packages"),
    ("Traceback\nKeyError: 'x'", RequestRefused, "pip has failed"),
])
def test_what_pip_says_is_told_in_our_words(said: str, kind: type, title: str) -> None:
    found = pip_fault(said)
    assert (found.kind, found.title) == (kind, title)


def test_addresses_are_shown_without_their_secrets() -> None:
    said = "Looking in indexes: https://me:s3cret@host:8443/simple?token=s3cret, https://s3cret@other/x#sha256=1\nERROR: 403 for url: http://a:s3cret@b/c"
    assert without_secrets(said) == "Looking in indexes: https://host:8443/simple https://other/x\nERROR: 403 for url: http://b/c"
    assert last_words(said) == "ERROR: 403 for url: http://b/c"
