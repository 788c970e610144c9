"""plan.yaml to plain values, with the line of every key, before anything judges what they mean.

Scalars follow the YAML 1.2 core schema (`on`, `no` and dates stay text, `1e-3` is a number), because a plan is read by people who never
learnt the surprises of 1.1. Only plain values come out: tags that name a type are refused, so no object is ever built from a plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

PLAN_BYTES_MAX = 1024 * 1024
NODES_MAX = 20_000
DEPTH_MAX = 32

Path = tuple[str | int, ...]

_CORE_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong with a plan. `line` is 0 when it concerns the file as a whole."""

    line: int
    path: str
    what: str
    fix: str


@dataclass(slots=True)
class Tree:
    """The plain value of a file, the line of each key and item, and what was wrong with its text."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    node_count: int = 0

    def line(self, path: Path) -> int:
        """The line of that key, or of the nearest one around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def fault(self, path: Path, what: str, fix: str) -> None:
        """Note that something is wrong at that key, once."""
        fault = Fault(line=self.line(path), path=dotted(path), what=what, fix=fix)
        if fault not in self.faults:
            self.faults.append(fault)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 core and without merge keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name and shape)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def dotted(path: Path) -> str:
    """`candidates.slow.command[0]`; the whole file is `plan`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "plan"


def read_tree(text: str) -> Tree:
    """The value and lines of a YAML text. Syntax errors, repeated keys and foreign tags become faults."""
    tree = Tree()
    if len(text.encode(errors="surrogatepass")) > PLAN_BYTES_MAX:
        tree.faults.append(Fault(line=0, path="plan", what=f"the file is over {PLAN_BYTES_MAX} bytes", fix="a plan is short: name data by path"))
        return tree
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError) as fault:
        tree.faults.append(_syntax_fault(fault))
        return tree
    if node is not None:
        tree.value = _plain(tree, node, ())
    return tree


def _syntax_fault(fault: Exception) -> Fault:
    mark = getattr(fault, "problem_mark", None)
    problem = getattr(fault, "problem", None) or str(fault).split("\n")[0] or type(fault).__name__
    fix = "indent with spaces" if "\\t" in problem else "check the indentation, quotes and brackets at this line"
    return Fault(line=mark.line + 1 if mark else 0, path="plan", what=f"not YAML: {problem}", fix=fix)


def _plain(tree: Tree, node: yaml.Node, path: Path) -> Any:
    tree.lines.setdefault(path, node.start_mark.line + 1)
    tree.node_count += 1
    # Aliases share nodes, so a small text can stand for a huge tree: both bounds are on what is unfolded.
    if tree.node_count > NODES_MAX or len(path) > DEPTH_MAX:
        if tree.node_count <= NODES_MAX + 1:
            _refuse(tree, node, path, f"more than {NODES_MAX} values or {DEPTH_MAX} levels", "write a smaller plan, without nested anchors")
            tree.node_count = NODES_MAX + 1
        return None
    if node.tag not in _CORE_TAGS:
        _refuse(tree, node, path, f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not read", "write plain values without a ! tag")
        return None
    if isinstance(node, yaml.MappingNode):
        return _mapping(tree, node, path)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(tree, item, (*path, index)) for index, item in enumerate(node.value)]
    return _scalar(tree, node, path)


def _mapping(tree: Tree, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
        if not key:
            _refuse(tree, key_node, path, "a key must be a word", "write `key: value`")
            continue
        if key == "<<":
            _refuse(tree, key_node, path, "merge keys (<<) are not read", "put what candidates share under `defaults:`")
            continue
        if key in lines:
            fault = Fault(line=line, path=dotted((*path, key)), what=f"{key!r} stands twice: lines {lines[key]} and {line}", fix=_twice_fix(path))
            tree.faults.append(fault)
            continue
        lines[key] = tree.lines[(*path, key)] = line
        found[key] = _plain(tree, value_node, (*path, key))
    return found


def _twice_fix(path: Path) -> str:
    return "give one of the two another name" if path in (("candidates",), ("hosts",)) else "remove one of the two"


def _scalar(tree: Tree, node: yaml.Node, path: Path) -> Any:
    kind, text = node.tag.rsplit(":", 1)[-1], str(node.value)
    try:
        if kind == "int":
            return int(text, 0) if text[:2].lower() in ("0x", "0o") else int(text)
        if kind == "float":
            return float(text.replace(".inf", "inf").replace(".nan", "nan").replace(".Inf", "inf").replace(".NaN", "nan"))
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
    except (ValueError, KeyError):
        _refuse(tree, node, path, f"{text!r} is no {kind}", "write a plain number, true or false")
        return None
    return None if kind == "null" else text


def _refuse(tree: Tree, node: yaml.Node, path: Path, what: str, fix: str) -> None:
    tree.faults.append(Fault(line=node.start_mark.line + 1, path=dotted(path), what=what, fix=fix))
