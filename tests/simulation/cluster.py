"""One simulated pool from one seed: its faults, and the invariants that must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .blocks import KEYS
from .clients import Stranger, User
from .network import Network
from .nodes import Machinery, SimulatedNode
from .world import START_S, Violation, World, patched

if TYPE_CHECKING:
    from collections.abc import Callable

    from .world import Process

# The kinds of `Violation`, and the invariant that each breaks.
INVARIANTS = {
    "bytes": "a get returns the bytes of its key, or fewer blocks",
    "reason": "a get that returns fewer blocks than asked for says why, and no other does",
    "findable": "what a node can be asked for is whole: its own header, its key's bytes",
    "removed": "what was removed from the pool is not there again, as long as a node remembers it",
    "commit": "a header that does not belong to its extent is not committed",
    "lease": "a lease ends once",
    "conservation": "free + reserved + committed + quarantined = capacity, and all of core.check()",
    "deadline": "a call ends by its deadline and a grace of half a second",
    "convergence": "after a calm the directory names what the nodes have, and nothing else",
    "leak": "after a calm nothing is held, reserved, quarantined, waiting or moving",
    "exception": "no thread of the product ends by an error that it did not expect",
}

NODES, USERS = 3, 3
FAULTS_UNTIL_S = 5.0
# Users stop at this time; all that they left has to end until CALM_S.
USERS_UNTIL_S = 6.5
CALM_S = 40.0
CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run. Equal seeds give equal reports."""

    seed: int
    trace: int
    steps: int
    checked: int
    virtual_s: float


def simulate(seed: int) -> Report:
    """Simulate one run. Raises Violation, whose message has the seed and the last events."""
    world = World(seed)
    try:
        with world.rules():
            cluster = Cluster(world)
            with patched(cluster.machinery.patches()):
                try:
                    cluster.run()
                finally:
                    cluster.end()
    except Violation as error:
        lines = "\n  ".join(world.events)
        told = f"{error} [seed {seed}, {world.now - START_S:.3f} s]\n  {lines}"
        raise Violation(error.kind, told.removeprefix(f"{error.kind}: ")) from error
    checked = sum(user.checked for user in cluster.users)
    return Report(seed, world.trace, world.steps, checked, world.now - START_S)


class Cluster:
    """Nodes, users, a stranger, and the injection of faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.network = Network(world)
        self.machinery = Machinery(world, self.network)
        self.dice = world.random
        self.nodes = self.machinery.nodes
        for number in range(1, NODES + 1):
            self.nodes.append(SimulatedNode(self.machinery, number))
        until = START_S + USERS_UNTIL_S
        self.users = [
            User(
                self.machinery,
                f"user{number}",
                verify="off" if number % 2 else "always",
                home=self.nodes[number % NODES] if self.dice.random() < 0.4 else None,
                until=until,
            )
            for number in range(1, USERS + 1)
        ]
        self.strangers = [Stranger(self.machinery, "stranger1", until)]
        # Without forgery the directory must be exact at the end; with it, complete.
        self.forgery = self.dice.random() < 0.4

    def run(self) -> None:
        """Run with faults, then without, and check the invariants."""
        world = self.world
        for node in self.nodes:
            node.start()
        world.call_at(START_S + 0.3, self._begin)
        self._at(self.dice.uniform(0.5, 1.0), self._strike)
        self._at(CHECK_S, self._check)
        world.run(START_S + FAULTS_UNTIL_S)
        self._calm_down()
        while not self._settled():
            if world.now > START_S + CALM_S:
                self._complain()
            world.run(world.now + CHECK_S)
        for node in self.nodes:
            node.check()

    def end(self) -> None:
        """End the run, even after an error: no fiber and no descriptor is left."""
        self.world.end()
        for node in self.nodes:
            if node.node is not None:
                node.node.dram.close()

    def _begin(self) -> None:
        for user in self.users:
            user.start()
        self.strangers[0].start()

    def _at(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.call_at(self.world.now + delay_s, action)

    def _check(self) -> None:
        for node in self.nodes:
            if node.up:
                try:
                    node.check()
                except Violation as error:
                    self.world.fail(error)
        self._at(CHECK_S, self._check)

    # -- faults ----------------------------------------------------------------------------------

    def _strike(self) -> None:
        if self.world.now > START_S + FAULTS_UNTIL_S:
            return
        faults: dict[Callable[[], None], int] = {
            self._break: 6,
            self._stop: 5,
            self._stop_reader: 5,
            self._cut_off_reader: 4,
            self._crash_node: 3,
            self._retire_node: 3,
            self._crash_user: 2,
            self._vanish: 2,
            self._partition: 4,
            self._slow_disk: 3,
            self._fail_disk: 1,
            self._rot: 3,
            self._silence_directory: 5,
            self._lose_answers: 4,
            self._flush: 1,
            self._falsify: 4 if self.forgery else 0,
        }
        fault = self.dice.choices(list(faults), list(faults.values()))[0]
        self.world.note(f"fate: {fault.__name__[1:]}")
        fault()
        self._at(self.dice.uniform(0.05, 0.5), self._strike)

    def _break(self) -> None:
        self.network.break_one()

    def _stop(self) -> None:
        processes = [node.process for node in self.nodes] + [user.process for user in self.users]
        self._stop_for(self.dice.choice(processes), self.dice.uniform(0.1, 2.5))

    def _stop_reader(self) -> None:
        """Stop a reader in the middle of a read, for longer than its leases live."""
        user, seconds = self.dice.choice(self.users), self.dice.uniform(0.3, 2.5)
        self.network.trap(user.name, lambda _: self._stop_for(user.process, seconds))

    def _cut_off_reader(self) -> None:
        """The same by a partition: the node goes on sending, and nothing arrives for a while."""
        user, seconds = self.dice.choice(self.users), self.dice.uniform(0.8, 2.5)

        def cut_off(node: str) -> None:
            self.world.note(f"fate: {node} to {user.name} for {seconds:.2f} s")
            self.network.wall(node, user.name)
            self._at(seconds, lambda: self.network.heal(node, user.name))

        self.network.trap(user.name, cut_off)

    def _stop_for(self, process: Process | None, seconds: float) -> None:
        if process is not None and not process.dead and not process.stopped:
            self.world.note(f"fate: {process.name} for {seconds:.2f} s")
            process.stop()
            self._at(seconds, process.go_on)

    def _crash_node(self) -> None:
        node = self.dice.choice(self.nodes)
        if node.up:
            self.world.note(f"fate: {node.name}")
            node.crash(silently=self.dice.random() < 0.4)
            self._at(self.dice.uniform(0.1, 1.5), node.start)

    def _retire_node(self) -> None:
        """A node writes its blocks back and stops, for longer than its registration lives."""
        node = self.dice.choice(self.nodes)
        process, running = node.process, node.node
        if process is None or running is None or not node.up:
            return

        def retire() -> None:
            running._flush()
            self.world.call_at(self.world.now, stop)

        def stop() -> None:
            if node.node is running:
                self.world.note(f"fate: {node.name} stops")
                node.crash(silently=False)
                self._at(self.dice.uniform(2.0, 4.0), node.start)

        self.world.spawn(process, retire, f"{node.name} retires")

    def _crash_user(self) -> None:
        user = self.dice.choice(self.users)
        if user.process is not None and not user.process.dead and not user.finished:
            self.world.note(f"fate: {user.name}")
            user.crash(silently=self.dice.random() < 0.5)
            self._at(self.dice.uniform(0.1, 1.0), user.start)

    def _vanish(self) -> None:
        """The stranger's machine disappears with its leases; another one starts elsewhere."""
        stranger = self.strangers[-1]
        if not stranger.finished:
            stranger.vanish()
            self.strangers.append(
                Stranger(self.machinery, f"stranger{len(self.strangers) + 1}", stranger.until)
            )
            self.strangers[-1].start()

    def _partition(self) -> None:
        names = [node.name for node in self.nodes] + [user.name for user in self.users]
        one, other = self.dice.sample(names, 2)
        cut_off = self.machinery.directory.cut_off
        self.network.wall(one, other)
        if self.dice.random() < 0.5:
            self.network.wall(other, one)
        if self.dice.random() < 0.3:
            cut_off.add(one)

        def heal() -> None:
            self.network.heal(one, other)
            self.network.heal(other, one)
            cut_off.discard(one)

        self._at(self.dice.uniform(0.2, 2.0), heal)

    def _slow_disk(self) -> None:
        disk = self.dice.choice(self.nodes).disk
        disk.slow = True
        self._at(self.dice.uniform(0.3, 1.5), lambda: setattr(disk, "slow", False))

    def _fail_disk(self) -> None:
        disk = self.dice.choice(self.nodes).disk
        disk.failing = True
        self._at(self.dice.uniform(0.1, 0.5), lambda: setattr(disk, "failing", False))

    def _rot(self) -> None:
        for node in self.nodes:
            node.disk.rot(self.dice)

    def _silence_directory(self) -> None:
        self.machinery.directory.down = True
        self._at(self.dice.uniform(0.1, 1.0), self._restore_directory)

    def _restore_directory(self) -> None:
        self.machinery.directory.down = False

    def _lose_answers(self) -> None:
        self.machinery.directory.unanswered = 0.5
        self._at(1.0, lambda: setattr(self.machinery.directory, "unanswered", 0.0))

    def _flush(self) -> None:
        self.machinery.directory.flush()

    def _falsify(self) -> None:
        directory = self.machinery.directory
        kind = self.dice.randrange(4)
        if kind == 0:
            directory.remember()
        elif kind == 1:
            directory.roll_back()
        elif kind == 2:
            directory.forge(self.dice.sample(KEYS, 6))
        else:
            directory.lose(self.dice.sample(KEYS, 6))

    # -- the calm --------------------------------------------------------------------------------

    def _calm_down(self) -> None:
        """Inject no more faults; lasting ones end now or at their planned time."""
        self.world.note("fate: calm")
        self.network.heal()
        self.machinery.directory.cut_off.clear()
        directory = self.machinery.directory
        directory.down, directory.unanswered = False, 0.0
        for node in self.nodes:
            node.disk.slow = node.disk.failing = False

    def _settled(self) -> bool:
        """Whether all clients have finished and no work is left."""
        if not all(actor.finished for actor in [*self.users, *self.strangers]):
            return False
        if not all(node.up for node in self.nodes):
            return False
        try:
            self._check_rest()
        except Violation:
            return False
        return True

    def _complain(self) -> None:
        """The calm is over: raise a Violation that names what has not come to rest."""
        for actor in [*self.users, *self.strangers]:
            if not actor.finished:
                raise Violation("deadline", f"{actor.name} never finished")
        self._check_rest()
        raise Violation("deadline", "a node never came up")

    def _check_rest(self) -> None:
        for node in self.nodes:
            node.check_empty_handed()
        said = self.machinery.directory.locations()
        for node in self.nodes:
            assert node.node is not None
            have, named = set(node.node.core.index), said.pop(node.published_number(), set())
            missing, wrong = have - named, named - have
            if missing or (wrong and not self.forgery):
                raise Violation(
                    "convergence",
                    f"{node.name} has {len(have)} blocks: {len(missing)} are not in the directory, "
                    f"{len(wrong)} are there and not here",
                )
        if said:
            raise Violation("convergence", f"the directory names {sorted(said)}, who have gone")
