"""The run book tells the truth: every command that it or an error names exists, and its state table is the one the program obeys.

Commands are parsed by the real command line and the real trainer command, without being run; `tests/live/test_runbook_commands.py` runs some.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from fleetd.screens.cli import app
from policies import errors
from policies.facts import CampaignStage, Reason, RunState, TrainerExit
from trainer.__main__ import _parser

ROOT = Path(__file__).resolve().parent.parent
RUN_BOOK = ROOT / "FLEET_RUN.md"
PAGES = (RUN_BOOK, ROOT / "README.md", *sorted((ROOT / "examples").rglob("*.md")))
SHOWN_BY = ("fleetd", "policies", "trainer")

COMMAND = re.compile(r"(?<![\w./-])(fleetd-trainer|fleetd)((?: [^ ,;()`\n]+)+)")
"""A command as it stands in a sentence: words with one space between them, up to a comma, a bracket, a second space or the end of the line."""
PLACEHOLDER = "X"
ENDS_A_COMMAND = re.compile(r"[.:?!]$")
GOES_ON_IN_PROSE = re.compile(r" (shows|lists|goes|until|then)\b.*")
"""What may follow a command in a sentence: "fleetd status lists them". The command before it has to be whole all the same."""
FLEETD_ITSELF = frozenset({"runs", "staged", "again", "met", "plan", PLACEHOLDER})
"""Words after which `fleetd` is the program's name and no command: "the user that fleetd runs as", "the newer fleetd again"."""


@dataclass(frozen=True)
class Named:
    """A command that a page or an error names. `is_whole`: somebody may copy it as it stands, so nothing may be missing or too much."""

    where: str
    text: str
    is_whole: bool


def commands_in(text: str, where: str, *, is_whole: bool) -> list[Named]:
    """Every command in a sentence, without the prose that follows it."""
    found = (GOES_ON_IN_PROSE.sub("", ENDS_A_COMMAND.sub("", match.group(0))) for match in COMMAND.finditer(text))
    return [Named(where, command, is_whole) for command in found if command.split()[1] not in FLEETD_ITSELF]


def fault_of(text: str, *, is_whole: bool) -> str | None:
    """Why this command can't be typed, or None when it can."""
    try:
        program, *words = shlex.split(text, comments=True)
    except ValueError as fault:
        return str(fault)
    return _fault_of_trainer(words, is_whole=is_whole) if program == "fleetd-trainer" else _fault_of_fleetd(words, is_whole=is_whole)


def _fault_of_fleetd(words: list[str], *, is_whole: bool) -> str | None:
    group: Any = typer.main.get_command(app)
    try:
        top = group.make_context("fleetd", list(words))
        with top:
            rest = [*top._protected_args, *top.args] if hasattr(top, "_protected_args") else [*top.protected_args, *top.args]
            name, command, rest = group.resolve_command(top, rest)
            command.make_context(name, rest, parent=top)
    except SystemExit:
        return None
    except Exception as fault:
        if type(fault).__name__ in ("Exit", "NoArgsIsHelpError"):
            return None
        if not is_whole and ("requires an argument" in str(fault) or type(fault).__name__ == "MissingParameter"):
            return None
        return f"{type(fault).__name__}: {' '.join(str(fault.format_message() if hasattr(fault, 'format_message') else fault).split())}"
    return None


def _fault_of_trainer(words: list[str], *, is_whole: bool) -> str | None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            _parser().parse_args(words)
        except SystemExit as end:
            is_short = "are required" in said.getvalue() and not is_whole
            return None if end.code in (0, None) or is_short else " ".join(said.getvalue().split())
    return None


def named_by_page(path: Path) -> Iterator[Named]:
    """Commands in code blocks and code spans. A line of a block that shows output is no command unless it begins with one or with a prompt."""
    in_block = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{path.relative_to(ROOT)}:{number}"
        if line.lstrip().startswith("```"):
            in_block = not in_block
        elif in_block:
            typed = line.strip().removeprefix("$ ")
            if typed.startswith(("fleetd ", "fleetd-trainer ")):
                yield Named(where, typed.split("  #")[0].split("  ")[0], True)
        else:
            for span in re.findall(r"`([^`]+)`", line):
                if span.startswith(("fleetd ", "fleetd-trainer ")):
                    yield Named(where, span, len(span.split()) > 2)  # a verb alone names the command, it does not ask for it


def text_of(node: ast.AST) -> str | None:
    """A string as a reader sees it, with a placeholder for what is filled in. None when the node is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or PLACEHOLDER for part in node.values)
    if isinstance(node, ast.IfExp):
        return "\n".join(text for part in (node.body, node.orelse) if (text := text_of(part)) is not None)
    return None


def named_by_code(path: Path) -> Iterator[Named]:
    """Commands in every string that somebody may see: all but docstrings. Those in a `fix` are copied, so they have to be whole."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    places = {id(part) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "where" for part in ast.walk(node.value)}
    fixes = {id(part) for value in fix_values(tree) for part in ast.walk(value)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        is_string = isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in docstrings and id(node) not in inner | places
        if is_string and (text := text_of(node)):
            yield from commands_in(text, f"{path.relative_to(ROOT)}:{node.lineno}", is_whole=id(node) in fixes)


def fix_values(tree: ast.AST) -> Iterator[ast.AST]:
    """What is handed over as `fix=`, or assigned to a name `fix`, alone or in a tuple."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "fix":
            yield node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == "fix":
                    yield node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)  # `first, *rest = ...` has fewer
                    yield from (value for name, value in pairs if isinstance(name, ast.Name) and name.id == "fix")


def every_command() -> list[Named]:
    code = [path for top in SHOWN_BY for path in sorted((ROOT / top).rglob("*.py"))]
    return [*(named for page in PAGES if page.exists() for named in named_by_page(page)), *(named for path in code for named in named_by_code(path))]


def test_every_command_that_a_page_or_an_error_names_can_be_typed() -> None:
    named = every_command()
    assert len(named) > 40, "the search finds commands"

    faults = [f"{each.where}  {each.text}: {fault}" for each in named if (fault := fault_of(each.text, is_whole=each.is_whole))]

    assert not faults, "\n" + "\n".join(faults)


def test_the_search_finds_a_command_that_does_not_exist() -> None:
    named = commands_in("see daemon.log, then fleetd doctor X; the user that fleetd runs as", "here", is_whole=True)

    assert [each.text for each in named] == ["fleetd doctor X"]
    assert "No such command" in str(fault_of("fleetd doctor X", is_whole=True))
    assert "No such option" in str(fault_of("fleetd stop one --gently", is_whole=True))
    assert "Missing argument" in str(fault_of("fleetd launch", is_whole=True))
    assert "invalid choice" in str(fault_of("fleetd-trainer sing DIR", is_whole=True))
    assert fault_of("fleetd stop one --graceful", is_whole=True) is None


def test_every_verb_is_in_the_run_book() -> None:
    group: Any = typer.main.get_command(app)
    text = RUN_BOOK.read_text(encoding="utf-8")

    assert [verb for verb in group.commands if not re.search(rf"fleetd {verb}\b", text)] == []


def drawings() -> ModuleType:
    """`docs/draw_states.py`, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("draw_states", ROOT / "docs" / "draw_states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_states_in_the_run_book_are_drawn_from_the_table_in_force() -> None:
    module = drawings()

    assert module.drawn_in(RUN_BOOK.read_text(encoding="utf-8")) == module.drawing(), "python docs/draw_states.py --write"


def test_a_way_that_the_table_does_not_allow_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    module = drawings()
    monkeypatch.setitem(module.RUN_WAYS, "risen again", (RunState.FAILED, RunState.RUNNING))

    with pytest.raises(errors.IllegalTransition):
        module.drawing()


def rows_below(heading: str) -> list[str]:
    """The first cell of every row in the tables below a heading, without its code marks."""
    body = re.split(rf"^#+ {re.escape(heading)}$", RUN_BOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    body = re.split(r"^#+ ", body, flags=re.MULTILINE)[0]
    return [found.strip().strip("`") for found in re.findall(r"^\| ([^|]+) \|", body, flags=re.MULTILINE)]


@pytest.mark.parametrize(("heading", "words"), [
    ("When you see a run", [state.value for state in RunState]),
    ("When you see a campaign", [stage.value for stage in CampaignStage]),
    ("Reason words", [reason.value for reason in Reason]),
    ("Errors by exit code", [str(code) for name, code in vars(errors).items() if name.startswith("EXIT_")]),
    ("Add your own trainer", [str(int(status)) for status in TrainerExit]),
])
def test_every_word_and_number_that_a_person_can_meet_has_its_row(heading: str, words: list[str]) -> None:
    rows = rows_below(heading)

    assert [word for word in words if word not in rows] == []


def test_every_link_in_the_run_book_leads_somewhere() -> None:
    text = RUN_BOOK.read_text(encoding="utf-8")
    anchors = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}
    # A heading that ends in punctuation keeps the space before it as a dash.
    anchors |= {f"{anchor}-" for anchor in anchors}

    assert [link for link in re.findall(r"\]\(#([^)]+)\)", text) if link not in anchors] == []


def test_every_file_that_the_run_book_names_exists() -> None:
    text = RUN_BOOK.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:docs|examples|policies|tests)/[\w./-]+)`", text)) | {"CHANGELOG.md"}

    assert len(named) > 4
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
