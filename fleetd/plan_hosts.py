"""The machines of plan.yaml: how each is reached, what it gives, whose Python trains there, and whose work makes room. Part of `plan_model`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fleetd.plan_types import ADDRESS, Command, Duration, Positive, Section, Size
from fleetd.plan_units import Seconds, SizeBytes
from policies.facts import GIB


class RestartSection(Section):
    """How a displaced process is started again."""

    command: Command | None = None
    """Its program and arguments; needed."""
    working_directory: str | None = None
    """A path on the host; null is where the process was."""
    environment: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = []
    """Names of variables whose values are taken from the process; PATH, HOME, USER, SHELL and LANG always are."""
    output: str | None = None
    """A file on the host for its output; null is one below the host's root."""


class DisplaceSection(Section):
    """Work of others that makes room: a systemd unit, or a process by its command line."""

    unit: Annotated[str, Field(pattern=r"^[A-Za-z0-9:_.@\\-]+\.(service|scope)$")] | None = None
    """A systemd unit, such as vllm.service."""
    user_unit: bool = False
    """Whether it is a unit of the login's own service manager."""
    process: str | None = None
    """A regular expression, searched in the command line."""
    uid: Annotated[int, Field(ge=0)] | None = None
    """For a process: whose it is; needed."""
    count: Positive = 1
    """For a process: how many match; those below a matching one belong to it."""
    restart: RestartSection | None = None
    grace: Duration = Seconds(60)
    """How long it may take to end once it is asked."""
    force: bool = False
    """Kill what has not ended by then; else the launch waits for a person."""
    optional: bool = False
    """It may be absent."""


class DataFromSection(Section):
    """A fast line between two hosts: this one takes data and models from the other, which has them first. `data_from: spark-a` is enough where
    that name reaches it."""

    host: str = ""
    """The neighbour: another host of this plan; needed."""
    address: Annotated[str, Field(pattern=ADDRESS)] | None = None
    """How this host reaches it, such as its address on the fast line; null is the neighbour's name."""
    user: Annotated[str, Field(pattern=ADDRESS)] | None = None
    """The login there; null is the one that the coordinator uses."""
    port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """The port of its ssh server; null is 22."""
    identity_file: str | None = None
    """A private key on this host; null is what its own ssh offers. No agent is forwarded."""


def _named_neighbour(value: object) -> object:
    return {"host": value} if isinstance(value, str) else value


NeighbourName = Annotated[DataFromSection, BeforeValidator(_named_neighbour, json_schema_input_type=DataFromSection | str)]


class EnvironmentSection(Section):
    """Packages for the trainer: an isolated environment that fleetd builds on the host, from a lock and nothing else."""

    lock: str | None = None
    """A requirements file of exact pins (name==version), with or without hashes; relative paths start at the plan; needed."""
    wheels: str = "auto"
    """`auto`: this machine fetches them and brings them to the host. `registry`: the host fetches them. Else a directory of wheels here."""
    python: str | None = None
    """Python of the host that it is built from; null is the coordinator's own, over ssh the host's python3."""


class HostSection(Section):
    """One machine."""

    transport: Literal["local", "ssh"] = "local"
    """How the coordinator reaches it; `local` is this machine, `ssh` whatever `ssh ADDRESS` reaches."""
    address: Annotated[str, Field(pattern=ADDRESS)] | None = None
    """For ssh: a name of your SSH configuration, a host name or an address; null is the name of this host."""
    user: Annotated[str, Field(pattern=ADDRESS)] | None = None
    """For ssh: the login; null is what your SSH configuration says."""
    port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """For ssh: the port; null is what your SSH configuration says."""
    identity_file: str | None = None
    """For ssh: a private key; null is what your SSH configuration and agent offer."""
    proxy_jump: Annotated[str, Field(pattern=ADDRESS)] | None = None
    """For ssh: a host to go through, as for `ssh -J`; null is what your SSH configuration says."""
    ssh_config: str | None = None
    """For ssh: a configuration file to read instead of your own, as for `ssh -F`."""
    root: str = ""
    """Directory for releases, data and runs. Relative paths start at the plan; over ssh it is a path on the host and starts with /."""
    python: str | None = None
    """Python that runs the trainer; null is the coordinator's own, over ssh the host's python3."""
    agent_python: str | None = None
    """Python (3.10 or newer) that runs agent and supervisor; null is the coordinator's own, over ssh the host's python3."""
    environment: EnvironmentSection | None = None
    """Build the trainer's Python here from a lock, in place of `python`; its keys go before those at the top of the plan."""
    capacity: Size | None = None
    """Memory that fleetd may hand out; null is what the host reports."""
    floor: Size = SizeBytes(GIB)
    """Memory of the host that always stays free."""
    displace: dict[str, DisplaceSection] = {}
    """Work that makes room before the first run starts there, in this order, and comes back in the reverse one with `fleetd restore`."""
    data_from: NeighbourName | None = None
    """For ssh: a neighbour from which this host takes data and models; what it can't give comes from the coordinator."""
