"""The kinds of single values in plan.yaml, each with what an editor and an error say of it; `plan_hosts` and `plan_model` put them together."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from fleetd.plan_units import Refused, Seconds, SizeBytes, parse_deadline, parse_duration, parse_size

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
SEED_MAX = 2**63 - 1
COMMAND_WORDS_MAX = 4096
ADDRESS = r"^[A-Za-z0-9_\[:][A-Za-z0-9_.:@%,\[\]-]{0,254}$"
"""What may stand on ssh's command line: nothing that it could take for an option."""
SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$", re.IGNORECASE)

class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


Size = Annotated[SizeBytes, PlainValidator(parse_size), WithJsonSchema(
    {"anyOf": [{"type": "string", "pattern": r"^\d+(\.\d+)?\s*([KMGT]i?B|B)?$"}, {"type": "integer", "minimum": 0}],
     "examples": ["16GiB", "500MB", 1024]})]
Duration = Annotated[Seconds, PlainValidator(parse_duration), WithJsonSchema(
    {"anyOf": [{"type": "string", "pattern": r"^(\d+(\.\d+)?\s*(ms|[dhms])\s*)+$"}, {"const": 0}], "examples": ["15m", "2h30m", "90s", "1d"]})]
Deadline = Annotated[Any, PlainValidator(parse_deadline), WithJsonSchema({"type": "string", "examples": ["30m", "12h", "2026-12-01T06:00:00+01:00"]})]


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        raise Refused("a command is a list of words, not one string", f"write [{', '.join(value.split())}], or [sh, -c, {value!r}] for shell syntax")
    if not isinstance(value, list) or not value or len(value) > COMMAND_WORDS_MAX:
        raise Refused("a command is a list of words", "write it such as [python3, train.py, --lr, '0.001']")
    wrong = next((word for word in value if not isinstance(word, (str, int, float)) or isinstance(word, bool) or "\0" in str(word)), None)
    if wrong is not None:
        raise Refused(f"{wrong!r} is no word of a command", "write each word as text, in quotes where needed")
    return [str(word) for word in value]


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refused("environment holds NAME: value pairs", "write it such as {OMP_NUM_THREADS: '1'}")
    if "lock" in value:
        raise Refused(
            "the environment of a candidate holds variables, no packages", "write environment: {lock: …} at the top of the plan, or in a host"
        )
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise Refused(f"{name!r} is no name of a variable", "use letters, digits and _, not beginning with a digit")
        if name.startswith("FLEETD_"):
            raise Refused(f"{name} belongs to fleetd", "choose a name that does not begin with FLEETD_")
        if not isinstance(text, (str, int, float)) or isinstance(text, bool) or "\0" in str(text):
            raise Refused(f"{name} is {text!r}, and a variable holds text", f"write {name}: \"…\" in quotes")
        if SECRET_NAME.search(name) and str(text):
            raise Refused(
                f"{name} looks like a secret, and a plan is copied into journal and report", "let the command read it from a file on the host"
            )
    return {str(name): str(text) for name, text in value.items()}


def _model_config(value: object) -> dict[str, Any] | str:
    if isinstance(value, (dict, str)) and value:
        return value
    raise Refused("config is the path of a Transformers config.json, or its content", "write config: model/config.json, or the keys themselves")


Command = Annotated[list[str], PlainValidator(_words), WithJsonSchema(
    {"type": "array", "items": {"type": ["string", "number"]}, "minItems": 1, "examples": [["python3", "train.py"], ["sh", "-c", "echo hello"]]})]
Environment = Annotated[dict[str, str], PlainValidator(_environment), WithJsonSchema(
    {"type": "object", "additionalProperties": {"type": ["string", "number"]}, "examples": [{"OMP_NUM_THREADS": "1"}]})]
ModelConfig = Annotated[Any, PlainValidator(_model_config), WithJsonSchema(
    {"anyOf": [{"type": "object"}, {"type": "string"}], "examples": ["model/config.json", {"model_type": "llama", "hidden_size": 128}]})]

Positive = Annotated[int, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
SplitName = Literal["train", "validation", "calibration", "test", "holdout"]
ReservedName = Literal["calibration", "test", "holdout"]
