"""What goes wrong in a story and when. Every fault ends by itself; none begins after the heal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from fleetd.coordinator.host_keys import HostKey
from policies.facts import GIB
from tests.sim.ambushes import Ambushes
from tests.sim.coordinator import CRASHES, Office
from tests.sim.machine import Machine, Process
from tests.sim.rivals import Rival
from tests.sim.world import World

STEPS = (-3600.0, -40.0, -8.0, 8.0, 40.0, 3600.0)
DEATHS = ("signalled", "before_write", "created")
SHIM_DEATHS = ("claimed", "forked", "recorded", "opened", "ended", "told")


class Faults(Ambushes):
    def __init__(self, world: World, office: Office, machines: list[Machine], *, heals_at: float, edition: int) -> None:
        self.world, self.office, self.machines, self.heals_at = world, office, machines, heals_at
        self.kinds: tuple[Callable[[], None], ...] = (
            self._crash, self._crash, self._crash_between, self._crash_between, self._cut, self._cut, self._slow, self._lose, self._repeat,
            self._impostor, self._reboot, self._reboot, self._step_host, self._step_office, self._full_host, self._crowd_host, self._full_office,
            self._kill_supervisor, self._kill_supervisor, self._supervisor_dies_between, self._shim_dies_between, self._shim_dies_between,
            self._hang_supervisor, self._kill_shim, self._kill_trainer, self._kill_both, self._hide, self._hog, self._rot, self._unkillable,
            self._unkillable, self._freeze_trainer, self._damage_job, self._damage_journal, self._lose_history, self._forget_in_silence,
        )
        if edition > 1:
            self.kinds = (*self.kinds, self._hold_a_start, self._hold_a_start, self._rival)
        if edition > 2:
            self.kinds = (
                *self.kinds, self._reboot_at_backoff, self._cut_at_backoff, self._forget_a_failure, self._cut_at_stopping, self._cut_at_stuck,
            )

    def plan(self, count: int, about: tuple[str, ...] = (), within: float = 1.0) -> None:
        """So many faults at random moments; often of a few kinds only, so that some stories are about one thing."""
        kinds = self.kinds if self.world.chance(0.6) else tuple(self.world.random.sample(self.kinds, 4))
        if about:
            kinds = tuple(getattr(self, f"_{name}") for name in about)
        for _ in range(count):
            self.world.after(self.world.between(0.0, self.heals_at * within), self._happen, self.world.random.choice(kinds))

    def _happen(self, kind: Callable[[], None]) -> None:
        """What finds nobody to befall says nothing, and was no fault."""
        if self.world.seconds < self.heals_at:
            before = self.world.said
            kind()
            if self.world.said > before:
                self.world.fault()

    def _for_a_while(self, low: float, high: float, end: Callable[[], None]) -> None:
        seconds = min(self.world.between(low, high), max(0.0, self.heals_at - self.world.seconds))
        self.world.after(seconds, end)

    def _machine(self) -> Machine:
        return self.world.random.choice(self.machines)

    def _network(self) -> Any:
        return self.office.networks[self._machine().name]

    def _pick(self, role: str) -> Process | None:
        found = [process for machine in self.machines for process in machine.processes.values() if process.role == role and process.is_alive]
        return self.world.random.choice(found) if found else None

    # The coordinator.

    def _crash(self) -> None:
        self.office.crash("at rest", self.world.between(0.2, 40.0))

    def _crash_between(self) -> None:
        """At the next tick that has something to write down."""
        loop = self.office.loop
        if loop is not None:
            loop.crash_at = self.world.random.choice(CRASHES)

    def _lose_history(self) -> None:
        self.office.lose_history()

    def _step_office(self) -> None:
        self.office.machine.step_clock(self.world.random.choice(STEPS))

    def _full_office(self) -> None:
        self._fill(self.office.machine)

    def _damage_job(self) -> None:
        kind = self.world.random.choice(("preflight", "stage", "freeze", "stage_evaluation", "judge", "report", "predictions", "checkpoint"))
        if self.world.chance(0.3):
            self.office.archive.fails[kind] = 1
            self.world.say("coordinator", f"the next {kind} finds damaged bytes")

    # The network.

    def _cut(self) -> None:
        network = self._network()
        network.is_cut = True
        self.world.say("network", f"the road to {network.machine.name} is cut")
        self._for_a_while(2.0, 150.0, lambda: self._mend(network))

    def _mend(self, network: Any) -> None:
        network.is_cut, network.loss, network.repeat, network.impostor, network.delay_seconds = False, 0.0, 0.0, None, (0.001, 0.02)
        self.world.say("network", f"the road to {network.machine.name} is good")

    def _slow(self) -> None:
        network = self._network()
        network.delay_seconds = (0.1, 4.0)
        self.world.say("network", f"the road to {network.machine.name} is slow")
        self._for_a_while(10.0, 120.0, lambda: self._mend(network))

    def _lose(self) -> None:
        network = self._network()
        network.loss = self.world.between(0.05, 0.5)
        self.world.say("network", f"the road to {network.machine.name} loses {network.loss:.0%}")
        self._for_a_while(10.0, 120.0, lambda: self._mend(network))

    def _repeat(self) -> None:
        network = self._network()
        network.repeat = 0.5
        self.world.say("network", f"the road to {network.machine.name} repeats orders")
        self._for_a_while(20.0, 200.0, lambda: self._mend(network))

    def _impostor(self) -> None:
        """Somebody else answers at the host's address: open connections break, new ones meet another key."""
        network = self._network()
        network.impostor = self.world.random.choice((network.machine.old_key, HostKey(kind="ssh-ed25519", blob=b"somebody else")))
        self.world.say("network", f"somebody else answers for {network.machine.name}")
        self._for_a_while(5.0, 100.0, lambda: self._mend(network))

    def _hold_a_start(self) -> None:
        """The next order to start stays in a buffer on its way, and the road breaks: a person may fence the host before the order comes."""
        network = self._network()

        def hold() -> None:
            self.world.fault()
            self.world.say("network", f"an order to start is held up on its way to {network.machine.name}, and the road is cut")
            network.is_cut = True
            self._for_a_while(35.0, 120.0, lambda: self._mend(network))

        network.holds_start = hold
        self.world.after(max(0.0, self.heals_at - self.world.seconds), partial(setattr, network, "holds_start", None))

    def _rival(self) -> None:
        Rival(self.world, self.office, self._machine(), ends_by=self.heals_at).begin()

    # Hosts.

    def _reboot(self) -> None:
        self._power(self._machine(), self.world.between(3.0, 60.0))

    def _power(self, machine: Machine, down_seconds: float) -> None:
        if machine.is_up:
            self.world.say(machine.name, f"loses its power for {down_seconds:.0f} s")
            machine.power_off()
            self.world.after(min(down_seconds, max(1.0, self.heals_at - self.world.seconds)), self._power_on, machine)

    def _power_on(self, machine: Machine) -> None:
        steps = self.world.chance(0.2 if machine.kept is None else 0.5)
        if steps and machine.kept is not None:
            machine.offset_seconds = self.world.random.choice(STEPS)  # a clock whose battery is empty shows anything, from the first moment on
        machine.power_on()
        if steps and machine.kept is None:
            machine.step_clock(self.world.random.choice(STEPS))
        self.world.say(machine.name, "is up again")

    def _step_host(self) -> None:
        self._machine().step_clock(self.world.random.choice(STEPS))

    def _full_host(self) -> None:
        self._fill(self._machine())

    def _crowd_host(self) -> None:
        """Small records still fit, checkpoints do not."""
        machine = self._machine()
        machine.is_disk_crowded = True
        self.world.say(machine.name, "its disk has no room for checkpoints")

        def free() -> None:
            machine.is_disk_crowded = False
            self.world.say(machine.name, "its disk has room for checkpoints again")

        self._for_a_while(5.0, 120.0, free)

    def _full_host_for_long(self) -> None:
        """Longer than any silence of a trainer that is not stalled."""
        self._fill(self._machine(), 80.0)

    def _fill(self, machine: Machine, least_seconds: float = 1.0) -> None:
        if machine.is_disk_full:
            return
        machine.is_disk_full = True
        self.world.say(machine.name, "its disk is full")

        def free() -> None:
            machine.is_disk_full = False
            self.world.say(machine.name, "its disk has room again")

        self._for_a_while(least_seconds, 140.0, free)

    def _hog(self) -> None:
        """Somebody else takes memory until little or nothing is left above the floor."""
        machine = self._machine()
        machine.hog_bytes = max(0, machine.available_bytes() - self.world.random.choice((0, GIB // 8, GIB // 3)))
        self.world.say(machine.name, f"a stranger takes {machine.hog_bytes / GIB:.1f} GiB")

        def give_back() -> None:
            machine.hog_bytes = 0

        self._for_a_while(2.0, 40.0, give_back)

    def _hide(self) -> None:
        machine = self._machine()
        machine.is_hiding = True
        self.world.say(machine.name, "processes can't be read any more")

        def show() -> None:
            machine.is_hiding, machine.shows_since = False, self.world.seconds
            self.world.say(machine.name, "processes can be read again")

        self._for_a_while(1.0, 60.0, show)

    def _rot(self) -> None:
        """A checkpoint's bytes go bad on disk."""
        found = [checkpoint for machine in self.machines for run in machine.runs.values() for checkpoint in run.checkpoints.values()]
        if found:
            checkpoint = self.world.random.choice(found)
            checkpoint.is_whole = False
            self.world.say("disk", f"step {checkpoint.step}, {checkpoint.digest[:8]}, is damaged")

    # Processes.

    def _kill(self, role: str) -> None:
        process = self._pick(role)
        if process is not None:
            self.world.say(process.machine.name, f"somebody kills {process!r}")
            process.leave(int(signal.SIGKILL))

    def _kill_supervisor(self) -> None:
        self._kill("supervisor")

    def _kill_shim(self) -> None:
        self._kill("shim")

    def _kill_trainer(self) -> None:
        self._kill("trainer")

    def _kill_both(self) -> None:
        shim = self._pick("shim")
        if shim is not None:
            supervisors = [each for each in shim.machine.processes.values() if each.run_id == shim.run_id and each.role == "supervisor"]
            for process in (shim, *supervisors):
                process.leave(int(signal.SIGKILL))
            self.world.say(shim.machine.name, f"somebody kills {shim!r} and its supervisor")

    def _supervisor_dies_between(self) -> None:
        runs = [run for machine in self.machines for run in machine.runs.values() if run.is_locked()]
        if runs:
            self.world.random.choice(runs).supervisor.dies_at = self.world.random.choice(DEATHS)

    def _shim_dies_between(self) -> None:
        runs = [run for machine in self.machines for run in machine.runs.values() if run.is_locked()]
        if runs:
            self.world.random.choice(runs).shim_dies_at = self.world.random.choice(SHIM_DEATHS)

    def _hang_supervisor(self) -> None:
        process = self._pick("supervisor")
        if process is not None:
            process.hung_until = min(self.heals_at, self.world.seconds + self.world.between(3.0, 60.0))
            self.world.say(process.machine.name, f"{process!r} hangs until {process.hung_until:.0f}")

    def _freeze_trainer(self) -> None:
        process = self._pick("trainer")
        if process is not None:
            process.hung_until = min(self.heals_at, self.world.seconds + self.world.between(3.0, 80.0))
            self.world.say(process.machine.name, f"{process!r} is frozen until {process.hung_until:.0f}")

    def _damage_journal(self) -> None:
        """A supervisor's journal is damaged and its supervisor dies; the next one salvages what still reads."""
        runs = [run for machine in self.machines if machine.is_up for run in machine.runs.values() if run.is_locked()]
        if runs:
            run = self.world.random.choice(runs)
            run.damage_spool()
            self.world.say(run.machine.name, f"the journal of {run.spec.candidate} is damaged, {len(run.spool.entries)} notices still read")
            run.supervisor.process.leave(int(signal.SIGKILL))

    def _forget_in_silence(self) -> None:
        """A road is cut for a short while, and a run on its host loses what it had to tell meanwhile."""
        network = self._network()
        network.is_cut = True
        self.world.say("network", f"the road to {network.machine.name} is cut for a short while")

        def forget() -> None:
            runs = [run for run in network.machine.runs.values() if network.machine.is_up and run.spool.last > run.acknowledged]
            if runs:
                run = self.world.random.choice(runs)
                run.damage_spool()
                self.world.say(run.machine.name, f"the journal of {run.spec.candidate} is damaged, {len(run.spool.entries)} notices still read")
                if run.is_locked():
                    run.supervisor.process.leave(int(signal.SIGKILL))
            self._mend(network)

        self._for_a_while(6.0, 26.0, forget)

    def _unkillable(self) -> None:
        """A process waits in the kernel: it does not die, whatever it is sent. At times its leader does."""
        process = self._pick(self.world.random.choice(("trainer", "worker")))
        if process is not None:
            if process.role == "worker" and process.parent is not None and process.parent.role == "trainer" and self.world.chance(0.7):
                self.world.after(self.world.between(0.5, 20.0), process.parent.leave, int(self.world.random.choice((9, 11, 256, 5120))))
            process.unkillable_until = min(self.heals_at, self.world.seconds + self.world.between(20.0, 150.0))
            self.world.say(process.machine.name, f"{process!r} waits in the kernel until {process.unkillable_until:.0f}")
