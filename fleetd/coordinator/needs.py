"""What a plan asks of its hosts, computed on the coordinator's side: memory by candidate, bytes of data and of checkpoints, programs, modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetd.campaign import CandidatePlan, HostPlan, Plan
from fleetd.coordinator.staging import files_shown
from fleetd.environments import PLAIN_PYTHONS
from policies.room import Offer, Wanted
from policies.surveys import HostSurvey, ProgramAsked
from policies.workloads import WorkloadSight

TRAINER_MODULES = ("numpy", "safetensors", "torch", "transformers")
BUILD_MODULES = ("venv", "zlib")
"""What an environment is built with."""
PIECES_SUFFIX = ".model"
"""Of a SentencePiece tokenizer beside token shards: the trainer looks into it, and needs one module more."""
BYTES_PER_WEIGHT = 12
"""A checkpoint holds each weight and its two moments in fp32."""
EXTRA_CHECKPOINTS = 3
"""Kept besides the newest: the unchanged base, the best, and the one being written."""


def candidates_of(plan: Plan, host: str) -> list[CandidatePlan]:
    """Those that may run on this host."""
    return [candidate for candidate in plan.candidates if candidate.host in ("any", host)]


def trainer_modules(plan: Plan) -> tuple[str, ...]:
    """What the interpreter of our trainer has to have for this plan."""
    has_pieces = any(name.endswith(PIECES_SUFFIX) for role in plan.data for name in role.include if role.shard_split is not None)
    return (*TRAINER_MODULES, "sentencepiece") if has_pieces else TRAINER_MODULES


def wanted_by(plan: Plan) -> tuple[Wanted, ...]:
    """Every line of the plan that needs room, with the evaluation after the freeze."""
    lines: list[tuple[str, str, Any]] = [(each.name, each.host, each) for each in plan.candidates]
    lines += [("after_freeze", "any", plan.after_freeze)] if plan.after_freeze.evaluate else []
    return tuple(
        Wanted(name=name, host=host, host_bytes=terms.memory_host_bytes, accelerator_bytes=terms.memory_accelerator_bytes, demand=terms.memory_demand)
        for name, host, terms in lines
    )


def offer_of(plan: Plan, host: HostPlan, survey: HostSurvey, displaced: tuple[WorkloadSight, ...], environment_bytes: int) -> Offer:
    """A host as it was found, and what the plan wants to put on its disk; `environment_bytes`: of an environment that is to be built."""
    found = [process for sight in displaced for process in sight.processes]
    return Offer(
        host=host.name, capacity_bytes=host.capacity_bytes, floor_bytes=host.floor_bytes, total_bytes=survey.memory_total_bytes,
        available_bytes=survey.memory_available_bytes, freed_bytes=sum(each.host_bytes or 0 for each in found),
        has_accelerator=bool(survey.accelerators), cap_grade=survey.cap_grade, cap_means=survey.cap_means, disk_free_bytes=survey.disk_free_bytes,
        data_bytes=data_bytes(plan), environment_bytes=environment_bytes,
        checkpoint_bytes=checkpoint_bytes(candidates_of(plan, host.name)), root=host.root,
    )


def programs_of(plan: Plan, host: HostPlan) -> tuple[ProgramAsked, ...]:
    """The commands that may run there, to be looked for by the host itself; not the Python of an environment."""
    return tuple(
        ProgramAsked(
            candidate=each.name, program=each.command[0], working_directory=each.working_directory, path=each.environment.get("PATH"),
        ) for each in candidates_of(plan, host.name)
        if each.command is not None and (host.environment is None or each.command[0] not in PLAIN_PYTHONS)
    )


def data_bytes(plan: Plan) -> int:
    """What all roles hold; files that can't be seen count for nothing, registration names them."""
    total = 0
    for role in plan.data:
        source = Path(plan.directory) / role.path
        try:
            total += sum((source / name).stat().st_size for name in files_shown(source, role))
        except OSError:
            continue
    return total


def checkpoint_bytes(candidates: list[CandidatePlan]) -> int:
    """Of all that are kept at once, estimated from the models' sizes; a config of odd types counts for nothing, the trainer names the key."""
    total = 0
    for candidate in candidates:
        try:
            if candidate.task is not None:
                weights = weight_count(candidate.task["model"]["config"])
                total += weights * BYTES_PER_WEIGHT * (candidate.task["checkpoint"]["keep"] + EXTRA_CHECKPOINTS)
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
    return total


def weight_count(config: dict[str, Any]) -> int:
    """Weights of a GPT-2 or Llama model, near enough for disk space: embeddings, attention and feed-forward, no norms or biases."""
    if config.get("model_type") == "gpt2":
        width, layers = int(config.get("n_embd", 768)), int(config.get("n_layer", 12))
        inner = int(config.get("n_inner") or 4 * width)
        tables = int(config.get("vocab_size", 50257)) + int(config.get("n_positions", 1024))
        return tables * width + layers * (4 * width**2 + 2 * width * inner)
    width, layers = int(config.get("hidden_size", 0)), int(config.get("num_hidden_layers", 0))
    heads = int(config.get("num_attention_heads", 1)) or 1
    kv_width = width * int(config.get("num_key_value_heads", heads)) // heads
    tables = 1 if config.get("tie_word_embeddings") else 2
    block = 2 * width**2 + 2 * width * kv_width + 3 * width * int(config.get("intermediate_size", 0))
    return tables * int(config.get("vocab_size", 0)) * width + layers * block
