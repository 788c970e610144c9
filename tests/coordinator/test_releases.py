"""The code a host gets: complete enough to run there, named by its digest, and without the coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetd.coordinator.couriers import LocalCourier, TreeKind
from fleetd.coordinator.releases import Releases, code_digest, code_files, installation
from fleetd.paths import StatePaths
from policies.errors import RequestRefused


def stage_release(courier: LocalCourier, place: Path) -> str:
    return Releases(StatePaths(place / "state")).stage(courier)


def test_a_release_holds_policies_vocabulary_host_and_trainer_and_nothing_of_the_coordinator() -> None:
    paths = list(code_files(installation()))
    for needed in ("policies/facts.py", "fleetd/__init__.py", "fleetd/model.py", "fleetd/paths.py", "fleetd/host/__init__.py", "trainer/__init__.py"):
        assert needed in paths
    assert not [path for path in paths if path.startswith(("fleetd/coordinator", "fleetd/screens", "fleetd/plan"))]
    assert all(path.endswith(".py") for path in paths)


def test_a_staged_release_is_compiled_and_its_vocabulary_imports_from_there_alone(quick_path: Path) -> None:
    courier = LocalCourier("gx10", quick_path / "root")
    digest = stage_release(courier, quick_path)
    folder = Path(courier.tree_path(TreeKind.RELEASES, digest))
    assert list(folder.rglob("__pycache__/*.pyc"))
    script = "import fleetd, fleetd.model, fleetd.files, policies.facts; print(fleetd.__file__, fleetd.files.sync_folder.__code__.co_filename)"
    # -S: without the site packages, so that nothing but the release can answer.
    done = subprocess.run([sys.executable, "-S", "-c", script], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True, cwd="/")
    assert all(word.startswith(str(folder)) for word in done.stdout.split())


def test_byte_code_changes_no_digest_and_a_second_staging_copies_nothing(quick_path: Path) -> None:
    courier = LocalCourier("gx10", quick_path / "root")
    digest = stage_release(courier, quick_path)
    assert courier.tree_fault(TreeKind.RELEASES, digest) is None
    folder = Path(courier.tree_path(TreeKind.RELEASES, digest))
    before = {path: path.stat().st_ino for path in folder.rglob("*")}
    assert stage_release(courier, quick_path) == digest
    assert {path: path.stat().st_ino for path in folder.rglob("*")} == before
    assert os.listdir(quick_path / "root" / "releases").count(digest) == 1


def test_one_changed_byte_of_code_is_another_release(quick_path: Path) -> None:
    for name in ("policies", "fleetd/host", "trainer"):
        (quick_path / name).mkdir(parents=True)
        (quick_path / name / "a.py").write_text("x = 1\n")
    before = code_files(quick_path)
    (quick_path / "trainer" / "a.py").write_text("x = 2\n")
    assert code_files(quick_path) != before
    assert len(code_digest()) == 64


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_a_host_whose_python_cannot_read_the_release_is_refused_and_keeps_no_half_of_it(quick_path: Path, python: str) -> None:
    courier = LocalCourier("gx10", quick_path / "root", python)
    with pytest.raises(RequestRefused) as caught:
        stage_release(courier, quick_path)
    assert python in caught.value.where
    assert os.listdir(quick_path / "root" / "releases") == [".lock"]
