"""The shape of plan.yaml: every key with its type, range, default, and the words an editor shows for it.

These are the keys as written. `plan_resolve` turns a file of this shape into the frozen `fleetd.campaign.Plan`; JSON schema and error
texts come from here too, so that a key is described once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from fleetd.plan_hosts import EnvironmentSection, HostSection
from fleetd.plan_types import (
    SEED_MAX,
    Beta,
    Command,
    Deadline,
    Duration,
    Environment,
    Fraction,
    ModelConfig,
    Positive,
    PositiveNumber,
    ReservedName,
    Section,
    Size,
    SplitName,
)
from fleetd.plan_units import Seconds, SizeBytes
from policies.facts import GIB


class ReserveSection(Section):
    """Time kept between the end of training and the deadline, for judging: max(minimum, factor x rows x seconds per row + margin)."""

    minimum: Duration = Seconds(7200)
    """Never less than this."""
    factor: PositiveNumber = 1.3
    """Safety factor on the measured evaluation time."""
    margin: Duration = Seconds(600)
    """Added to the measured evaluation time."""


class DataSection(Section):
    """The files of one role: token shards (`shards`, `split`), a Zrodlo corpus (`corpus`) or any files (`path`, `include`)."""

    shards: str | None = None
    """Directory of token shards with a shards_index.json."""
    split: str | None = None
    """Which split of shards_index.json: train, val or test."""
    corpus: str | None = None
    """Directory of a Zrodlo corpus: corpus.json, tokens.bin and its tokenizer.json."""
    path: str | None = None
    """Directory of other files."""
    include: list[str] | None = None
    """Patterns of files below `path`."""
    tokens_per_document_max: Positive | None = None
    """Score only the first tokens of each document; part of what is registered."""


class MemoryCapSection(Section):
    """A memory cap in two parts. `memory_cap: 16GiB` sets both."""

    host: Size = SizeBytes(16 * GIB)
    """Anonymous and shared memory of the process tree."""
    accelerator: Size = SizeBytes(16 * GIB)
    """Bytes allocated on the accelerator."""
    demand: Literal["enforced", "sampled"] = "sampled"
    """Refuse a host that cannot hold `host` this strongly."""


class PilotSection(Section):
    """The first steps, checked by a fresh process before the rest of the time is spent: predictions reload exactly, memory, one more step."""

    steps: Positive | None = None
    """So many steps are the pilot; needed, fewer than those of the training."""


class ProofSection(Section):
    """At its end the last steps of the training are taken again by a fresh process, and every bit is compared. Never beyond the cutoff."""

    steps: Positive | None = None
    """So many; needed, fewer than those of the training."""
    required: bool = False
    """A run that is not exact can't be chosen."""


class CheckpointSection(Section):
    every_steps: Positive = 250
    """Save after so many steps."""
    every: Duration = Seconds(900)
    """Save after so much time."""
    keep: Positive = 2
    """Newest checkpoints kept besides the best and the unchanged base."""


class ValidationSection(Section):
    every_steps: Positive = 500
    """Validate after so many steps, and at the end."""
    patience: Positive | None = None
    """Stop after so many validations without improvement; null never."""
    batch: Positive = 16
    """Documents or windows scored together."""


class RestartsSection(Section):
    max: Annotated[int, Field(ge=0)] = 5
    """Restarts allowed within the window."""
    window: Duration = Seconds(3600)
    """Length of the sliding window."""
    first: Duration = Seconds(2)
    """First wait; waits double."""
    ceiling: Duration = Seconds(300)
    """Longest wait."""


class StopSection(Section):
    grace_floor: Duration = Seconds(5)
    """Least time given to save after being asked."""
    grace_ceiling: Duration = Seconds(120)
    """Most time given to save after being asked."""


class StallSection(Section):
    launch: Duration = Seconds(600)
    """Longest wait for the first step."""
    floor: Duration = Seconds(600)
    """A stall is never shorter than this."""
    factor: PositiveNumber = 20.0
    """A stall is this many times the slowest recent step."""


class OptimizerSection(Section):
    """AdamW with linear warm-up and cosine decay."""

    lr: PositiveNumber | None = None
    """Peak learning rate; needed."""
    min_lr_ratio: Fraction = 0.1
    """Last learning rate over the peak."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """On tensors of two and more dimensions."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: PositiveNumber = 1e-8
    clip: PositiveNumber = 1.0
    """Largest norm of the gradient."""


class ModelSection(Section):
    config: ModelConfig = ""
    """A Transformers config.json by path, or its keys (GPT-2 and Llama families); needed."""


class TrainingSection(Section):
    """Settings of fleetd's own trainer."""

    task: Literal["language_model"] = "language_model"
    """What is trained."""
    model: ModelSection | None = None
    """The model; needed."""
    window: Positive | None = None
    """Tokens of context; needed."""
    batch: Positive | None = None
    """Windows a step; needed."""
    micro_batch: Positive | None = None
    """Windows on the device at once; null is the whole batch. Divides batch."""
    steps: Positive | None = None
    """Steps in all; needed."""
    seed: Annotated[int, Field(ge=0, le=SEED_MAX)] = 431
    """Decides initial weights and every batch."""
    sampler: Literal["permutation", "zxell"] = "permutation"
    """How windows are drawn: each once an epoch, or at random as zxell does (token shards only)."""
    optimizer: OptimizerSection = OptimizerSection()
    threads: Positive = 1
    """CPU threads; part of what makes a run exact."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:[0-9]+)$")] = "auto"
    """auto, cpu, cuda or cuda:0."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of forward and backward."""
    compile: bool = False
    """torch.compile the model's body; needs g++ and Python's headers on the host. Recorded: it is another training than without."""
    log_every: Positive = 1
    """Steps between training records."""


def _scalar_cap(value: object) -> object:
    return value if isinstance(value, (dict, MemoryCapSection)) else {"host": value, "accelerator": value}


def _nothing_is_empty(value: object) -> object:
    return {} if value is None else value


MemoryCap = Annotated[MemoryCapSection, BeforeValidator(_scalar_cap, json_schema_input_type=MemoryCapSection | Size)]


class CandidateSection(Section):
    """One line of training: `training` (our trainer) or `command` (any program)."""

    host: str = "any"
    """A host's name, or any: the one with most free memory."""
    training: TrainingSection | None = None
    command: Command | None = None
    """A program and its arguments; no shell is involved unless it is named."""
    environment: Environment = {}
    """Variables added for the program."""
    working_directory: str | None = None
    """Where a command runs; relative paths start at the plan; null is its run directory."""
    signal: Literal["leader", "group"] | None = None
    """Who is asked to stop: the process, or its group. Default: leader for training, group for a command."""
    memory_cap: MemoryCap = MemoryCapSection()
    pilot: PilotSection | None = None
    """For fleetd's own trainer; when it fails the campaign ends."""
    proof: ProofSection | None = None
    """For fleetd's own trainer; without time for it before the cutoff it is left out."""
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidationSection = ValidationSection()
    restarts: RestartsSection = RestartsSection()
    stop: StopSection = StopSection()
    stall: StallSection = StallSection()
    on_reboot: Literal["resume", "hold"] = "resume"
    """After a reboot of the host: go on, or wait for a person."""


Candidate = Annotated[CandidateSection, BeforeValidator(_nothing_is_empty)]


class SelectionSection(Section):
    """The fixed rule that chooses one checkpoint."""

    criterion: Literal["token_nll_v1"] = "token_nll_v1"
    minimum_improvement: Annotated[float, Field(ge=0)] = 0.001
    """A later checkpoint of the same run replaces an earlier one only by this much."""


class EvaluationSection(Section):
    """Settings of the evaluation; null takes the chosen candidate's."""

    window: Positive | None = None
    batch: Positive | None = None
    threads: Positive | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda|cuda:[0-9]+)$")] | None = None
    precision: Literal["fp32", "bf16"] | None = None


class AfterFreezeSection(Section):
    """What happens by itself once the selection is frozen."""

    evaluate: list[ReservedName] = []
    """Reserved splits in the order in which they are opened."""
    report: bool = True
    memory_cap: MemoryCap = MemoryCapSection(host=SizeBytes(2 * GIB), accelerator=SizeBytes(2 * GIB))
    training: EvaluationSection = EvaluationSection()


class NotifySection(Section):
    """A command that gets one line of JSON on its standard input."""

    command: Command
    on: Annotated[list[Literal["needs_you", "finished", "failed"]], Field(min_length=1)] = ["needs_you", "finished", "failed"]


class PlanFile(Section):
    """A fleetd campaign: candidate trainings with one goal and one deadline."""

    model_config = ConfigDict(json_schema_extra={"required": ["name", "deadline", "hosts", "candidates"]})

    name: str = ""
    """Name of the campaign: small letters, digits and -; needed."""
    deadline: Deadline = None
    """When everything must be done: a duration from launch, or a moment with its time zone; needed."""
    reserve: ReserveSection = ReserveSection()
    hosts: dict[str, HostSection] = {}
    """Machines by name; needed."""
    environment: EnvironmentSection | None = None
    """Build the trainer's Python from a lock on every host that names no `python`."""
    parity: Literal["off", "report", "require"] | None = None
    """Compare packages and installed files of the hosts' Pythons before the launch; null reports differences between several hosts."""
    data: dict[SplitName, DataSection] = {}
    """Files by role. Reserved roles (calibration, test, holdout) stay sealed until the freeze."""
    defaults: Candidate = CandidateSection()
    """Any key of a candidate, for all of them."""
    candidates: dict[str, Candidate] = {}
    """Trainings by name; needed."""
    selection: SelectionSection = SelectionSection()
    after_freeze: AfterFreezeSection = AfterFreezeSection()
    notify: list[NotifySection] = []
    restore_displaced: bool = False
    """Bring displaced work back by itself once the campaign is over; else `fleetd status` tells of it until somebody does."""
