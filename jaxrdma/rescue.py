"""With `replicate=1`: what the servers that live save of a job that failed. Decided here without any I/O or clock.

The design, of which this is the coordinator's half (a server's is `mirror.py`):

- Each server's part of a model is kept a second time, by another server, its mirror. The mirror is sent the mean
  gradient of every step, as the server has formed it, and applies the same update to the same numbers. A server answers
  the workers with step n only when its mirror has made step n too. So what a worker has received, two servers hold.
- No server can begin step n + 1 before every worker has sent a gradient for it, and so before every server has
  published step n. Whatever is held is therefore of one of two neighbouring steps, n or n + 1; and as everybody keeps
  the version before his newest as well, there is one step that all hold: the newest such is saved.
- When the job fails, nobody begins another step (`Rescue`), each says which steps it holds (`Held`), the newest common
  one is written, the part of a lost server by its mirror (`RescueSave`, `RescueSaved`), and one server makes the files
  a checkpoint (`RescueCommit`, `RescueCommitted`). Only then are servers and launchers told of the failure. The next
  attempt finds that checkpoint as any other.

The promise: if a worker has received the parameters of step n of a model, the next attempt goes on from step n or a
later one. It holds for the loss of any one server, and of any workers. If a server and its mirror are lost, or a
server is lost while this goes on, or the coordinator is, the job goes on from its last checkpoint.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jaxrdma.control import (
    CoordinatorMessage,
    Held,
    Rescue,
    RescueCommit,
    RescueCommitted,
    RescueSave,
    RescueSaved,
    ShardFile,
)

# For a rescue as a whole: a few hundred GB on a slow file system.
RESCUE_SECONDS = 600.0

Answer = Held | RescueSaved | RescueCommitted


@dataclass(frozen=True)
class Model:
    """A model that has started.

    - `holders`: the servers that have a part of it.
    - `saved`: the step of its newest checkpoint, 0: of none.
    """

    holders: frozenset[int]
    saved: int


@dataclass
class _Saving:
    """One model whose step is decided: who writes, what was written, and whether it is a checkpoint."""

    step: int
    writers: set[int]
    committer: int
    shards: dict[int, list[ShardFile]] = field(default_factory=dict[int, list[ShardFile]])
    committing: bool = False
    done: bool = False


class Rescuer:
    """A rescue, as a state machine: answers of servers in, messages for servers out. Nothing is sent once it is over.

    **Arguments:**

    - `models`: those that have started, by number.
    - `mirrors`: by server, which other one holds its part too.
    - `lost`: the servers that are lost.

    **Attributes:** `over`: nothing more is to be done. `text`: then what came of it, for people.
    """

    def __init__(
        self, models: Mapping[int, Model], mirrors: Sequence[int], lost: Collection[int]
    ) -> None:
        self._models = models
        self._mirrors = mirrors
        self._lost = frozenset(lost)
        self._alive = [server for server in range(len(mirrors)) if server not in self._lost]
        self._held: dict[int, Held] = {}
        self._saving: dict[int, _Saving] = {}
        self.over = False
        self.text = ""

    def begin(self) -> list[tuple[int, CoordinatorMessage]]:
        """Nobody shall begin another step; who holds what?"""
        for model in self._models.values():
            for server in sorted(model.holders & self._lost):
                if (mirror := self._mirrors[server]) in self._lost:
                    return self._give_up(
                        f"server {server} is lost, and so is server {mirror}, which kept a copy of its part"
                    )
        return [(server, Rescue()) for server in self._alive]

    def waits_for(self) -> list[int]:
        """The servers that are to answer."""
        if self.over:
            return []
        if not self._saving:
            return [server for server in self._alive if server not in self._held]
        late: set[int] = set()
        for saving in self._saving.values():
            if saving.committing and not saving.done:
                late.add(saving.committer)
            late |= saving.writers - saving.shards.keys()
        return sorted(late)

    def lose(self, server: int, why: str) -> None:
        """A server is lost while others may still need it."""
        if not self.over and server in self._alive:
            self._give_up(f"meanwhile {why}")

    def stop(self, why: str) -> None:
        """Somebody does not want to wait for it."""
        if not self.over:
            self._give_up(why)

    def late(self, seconds: float) -> None:
        """It has taken too long."""
        names = ", ".join(f"server {server}" for server in self.waits_for())
        self._give_up(f"{names} did not save it within {seconds:.0f} s")

    def handle(self, server: int, answer: Answer) -> list[tuple[int, CoordinatorMessage]]:
        """What a server's answer leads to. One that fits nothing that was asked changes nothing."""
        if self.over or server not in self._alive:
            return []
        match answer:
            case Held():
                if server in self._held or self._saving:
                    return []
                self._held[server] = answer
                return self._decide() if len(self._held) == len(self._alive) else []
            case RescueSaved():
                return self._saved(server, answer)
            case RescueCommitted():
                return self._committed(server, answer)

    def _keeper(self, part: int) -> int:
        """Who writes the part of that server."""
        return self._mirrors[part] if part in self._lost else part

    def _decide(self) -> list[tuple[int, CoordinatorMessage]]:
        steps: dict[tuple[int, int, int], set[int]] = {}
        for server, held in self._held.items():
            for each in held.parts:
                steps[server, each.flow, each.server] = set(each.steps)
        out: list[tuple[int, CoordinatorMessage]] = []
        for flow, model in sorted(self._models.items()):
            wanted: dict[int, list[int]] = {}
            common: set[int] | None = None
            for part in sorted(model.holders):
                keeper = self._keeper(part)
                wanted.setdefault(keeper, []).append(part)
                found = steps.get((keeper, flow, part), set[int]())
                common = found if common is None else common & found
            newest = max(
                (max(s, default=0) for key, s in steps.items() if key[1] == flow), default=0
            )
            if common is None or newest <= model.saved:
                continue  # nothing lies on the servers, or nothing but a checkpoint or the beginning
            if not common:
                return self._give_up(f"the servers hold no step of model {flow} in common")
            step = max(common)
            if step <= model.saved:
                continue
            self._saving[flow] = _Saving(step, set(wanted), min(wanted))
            out += [(who, RescueSave(flow, step, parts)) for who, parts in sorted(wanted.items())]
        if not out:
            self.over = True
            self.text = "there is no step that is not in a checkpoint"
        return out

    def _saved(self, server: int, answer: RescueSaved) -> list[tuple[int, CoordinatorMessage]]:
        saving = self._saving.get(answer.flow)
        if saving is None or server not in saving.writers or server in saving.shards:
            return []
        if answer.problem:
            return self._give_up(answer.problem)
        saving.shards[server] = answer.shards
        if saving.writers - saving.shards.keys():
            return []
        saving.committing = True
        shards = [shard for _, files in sorted(saving.shards.items()) for shard in files]
        shards.sort(key=lambda shard: shard.name)
        return [(saving.committer, RescueCommit(answer.flow, saving.step, shards))]

    def _committed(
        self, server: int, answer: RescueCommitted
    ) -> list[tuple[int, CoordinatorMessage]]:
        saving = self._saving.get(answer.flow)
        if saving is None or not saving.committing or server != saving.committer:
            return []
        if answer.problem:
            return self._give_up(answer.problem)
        saving.done = True
        if all(each.done for each in self._saving.values()):
            self.over = True
            saved = (f"step {s.step} of model {flow}" for flow, s in sorted(self._saving.items()))
            self.text = f"the servers that are left have saved {' and '.join(saved)}"
        return []

    def _give_up(self, why: str) -> list[tuple[int, CoordinatorMessage]]:
        self.over = True
        self.text = f"what came after the last checkpoint is lost: {why}"
        return []
