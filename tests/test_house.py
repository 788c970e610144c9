"""House rules as data: who may import whom, how long a file may be, and that the tree is one that a stranger can read."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 80

NUMPY_POLICIES = {"policies/crossfit.py", "policies/calibration.py", "policies/resampling.py"}
OWN = {"policies", "fleetd", "trainer"}
HOST_PACKAGES = {"psutil", "pynvml"}


def rooms() -> list[tuple[str, Path]]:
    return [(path.relative_to(ROOT).as_posix(), path) for top in sorted(OWN) for path in sorted((ROOT / top).rglob("*.py"))]


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it, as full dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module in OWN | {"fleetd"}}
    return found


def is_plan(room: str) -> bool:
    return room.startswith("fleetd/plan") and room.count("/") == 1


def faults_of(room: str, module: str) -> str | None:
    """Why this import is not allowed in this room, or None. The table of docs/ARCHITECTURE.md, as code."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names or top == "__future__":
        return None
    if top == "policies":
        return None
    folder = room.split("/")[0]
    if folder == "policies":
        return None if top == "numpy" and room in NUMPY_POLICIES else "policies import the standard library only"
    if folder == "trainer":
        return "the trainer never imports fleetd" if top == "fleetd" else None
    if top == "trainer":
        return "fleetd never imports the trainer"
    process = room.split("/")[1] if room.count("/") > 1 else ""
    if top == "fleetd":
        parts = module.split(".")
        target = parts[1] if len(parts) > 1 else ""
        if target in {"host", "coordinator", "screens"}:
            daemon_door = process == "screens" and module.startswith("fleetd.coordinator.daemon")
            return None if target == process or daemon_door else f"{target} is another process"
        return "plan.py needs pydantic, which a host does not have" if target.startswith("plan") and process == "host" else None
    if process == "host":
        return None if top in HOST_PACKAGES else "a host has psutil and nvidia-ml-py only"
    if process == "":
        return None if is_plan(room) and top in {"packaging", "pydantic", "pydantic_core", "yaml"} else "shared vocabulary is standard library only"
    return "fleetd never imports torch" if top in {"torch", "transformers", "safetensors"} else None


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone, and leaves out the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize(("room", "path"), rooms(), ids=[room for room, _ in rooms()])
def test_every_import_is_in_the_table(room: str, path: Path) -> None:
    faults = {module: why for module in imports_of(path) if (why := faults_of(room, module))}
    assert not faults


@pytest.mark.parametrize(("room", "module"), [
    ("policies/memory.py", "numpy"),
    ("fleetd/host/supervisor.py", "pydantic"),
    ("fleetd/host/supervisor.py", "fleetd.plan"),
    ("fleetd/host/agent.py", "fleetd.coordinator.decide"),
    ("fleetd/coordinator/pipeline.py", "torch"),
    ("fleetd/coordinator/loop.py", "trainer.loop"),
    ("fleetd/model.py", "psutil"),
    ("trainer/loop.py", "fleetd.paths"),
])
def test_the_table_refuses_what_it_should(room: str, module: str) -> None:
    assert faults_of(room, module)


@pytest.mark.parametrize(("room", "path"), rooms(), ids=[room for room, _ in rooms()])
def test_files_and_functions_fit_a_reader(room: str, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES_MAX, "two rooms with one idea each?"
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    }
    assert not long


@pytest.mark.parametrize(("room", "path"), rooms(), ids=[room for room, _ in rooms()])
def test_every_module_says_what_it_is(room: str, path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_decision_reads_a_clock_or_the_world() -> None:
    """Policies and both `decide.py` get moments and facts as arguments."""
    forbidden = {"time", "os", "subprocess", "random", "socket", "pathlib", "fleetd.clock", "fleetd.files"}
    pure = [path for room, path in rooms() if room.startswith("policies/") or path.name.startswith("decide")]
    assert len(pure) > 5
    assert not {(path.name, module) for path in pure for module in imports_of(path) & forbidden}


def test_nothing_unpickles() -> None:
    """No pickle anywhere, and torch.load only ever with weights_only=True."""
    for room, path in rooms():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not {"pickle", "dill", "shelve", "joblib"} & {name.split(".")[0] for name in imports_of(path)}, room
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords), room
