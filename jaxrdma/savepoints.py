"""Which step all servers of a model restore, and which they save: what the coordinator decides, without any I/O.

Restoring: every server says which checkpoints it finds; the newest that all find is read by all, and if one of them
cannot read its share, the next older is.

Saving: a checkpoint is of one step on all servers. By number of steps that is arithmetic, and every server begins by
itself. By seconds the coordinator names a step; a server that has passed it says so, and a later one is named, twice as
far ahead. Either way each server answers once for each step, with its file or with why there is none. When all have a
file, one server writes the manifest; when one has none, the others remove theirs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxrdma.control import (
    LAST,
    CoordinatorMessage,
    FlowReady,
    FlowStart,
    Restore,
    Restored,
    SaveAt,
    SaveCommit,
    SaveCommitted,
    SaveEnded,
    SaveMissed,
    SaveRule,
    ShardFile,
    ShardSaved,
)

# For the servers to save the last step when all workers have left: a few hundred GB on a slow file system.
LAST_SAVE_SECONDS = 600.0

# Between two lines on failures that follow each other, or on skipped steps.
SELDOM_SECONDS = 60.0

Answer = FlowReady | Restored | ShardSaved | SaveMissed | SaveCommitted


@dataclass
class Orders:
    """What a decision leads to.

    - `messages`: for servers, by index.
    - `start`: for everybody, when the model may begin.
    - `notes`: lines for people.
    - `problem`: kind, text and server of a failure that ends the job.
    """

    messages: list[tuple[int, CoordinatorMessage]] = field(
        default_factory=list[tuple[int, CoordinatorMessage]]
    )
    start: FlowStart | None = None
    notes: list[str] = field(default_factory=list[str])
    problem: tuple[str, str, int] | None = None


class Seldom:
    """Lets a line of one kind through at most once a minute, and tells how many were held back. Has no clock."""

    def __init__(self) -> None:
        self._next = -math.inf
        self._held = 0

    def filter(self, text: str, now: float) -> str:
        """The line to be printed, or nothing."""
        if now < self._next:
            self._held += 1
            return ""
        more = f" (and {self._held} more like this since the last such line)" if self._held else ""
        self._next, self._held = now + SELDOM_SECONDS, 0
        return text + more

    def reset(self) -> None:
        """The next line is news again."""
        self._next = -math.inf


@dataclass
class _Save:
    """One step: the files so far, and who has answered. `ended`: all were told that it will be no checkpoint."""

    shards: dict[int, ShardFile] = field(default_factory=dict[int, ShardFile])
    answered: set[int] = field(default_factory=set[int])
    ended: bool = False
    committing: bool = False


class Savepoints:
    """The checkpoints of one model, as a state machine: answers of servers and times in, `Orders` out.

    **Arguments:**

    - `flow`: the model's number.
    - `servers`: how many there are.
    """

    def __init__(self, flow: int, servers: int) -> None:
        self._flow = flow
        self._servers = servers
        self._ready: dict[int, FlowReady] = {}
        self._holders: list[int] = []
        self._rule: SaveRule | None = None
        self._common: set[int] = set()
        self._restoring: int | None = None
        self._restored: dict[int, Restored] = {}
        self._problems: list[str] = []  # with newer checkpoints than the one that is tried
        self._started = False
        self._saves: dict[tuple[int, bool], _Save] = {}  # by step, and whether at the job's end
        self._saved = 0  # the newest step that is a checkpoint
        self._first = True  # whether none was saved yet
        self._failures, self._skips = Seldom(), Seldom()
        self._since = 0.0  # when the last save by seconds ended
        self._reached = 0
        self._asked: int | None = None  # the step that was named
        self._again = False
        self._margin = 1  # how far ahead of what a server has reached a step is named
        self._finishing = False
        self._last: dict[int, int] = {}  # by server: the step it ended at
        self._finished = False

    @property
    def busy(self) -> bool:
        """Whether the last step is still to be saved."""
        return self._finishing and not self._finished

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0: there is none."""
        return self._saved

    def waits_for(self) -> list[int]:
        """The servers that are to answer before the model can begin, or the last step is saved."""
        if self._finishing:
            late = [server for server in self._holders if server not in self._last]
            return late or self._holders[:1]
        if len(self._ready) < self._servers:
            return [server for server in range(self._servers) if server not in self._ready]
        return [server for server in self._holders if server not in self._restored]

    def doing(self) -> str:
        """What those are waited for to do."""
        if self._finishing:
            return "save the last step"
        if self._restoring is not None:
            return f"read the checkpoint of step {self._restoring}"
        return "be ready"

    def handle(self, server: int, answer: Answer, now: float) -> Orders:
        """What a server's answer leads to. One that fits nothing that was asked is a problem of kind "protocol"."""
        match answer:
            case FlowReady():
                if server in self._ready:
                    return Orders()
                self._ready[server] = answer
                return self._begin(now) if len(self._ready) == self._servers else Orders()
            case Restored():
                fits = answer.step == self._restoring and server not in self._restored
                if self._started or server not in self._holders or not fits:
                    break_ = (
                        f"has read the checkpoint of step {answer.step}, which nobody asked for"
                    )
                    return Orders(problem=("protocol", break_, server))
                self._restored[server] = answer
                done = len(self._restored) == len(self._holders)
                return self._judge_restored(now) if done else Orders()
            case _:
                if not self._started or server not in self._holders or self._rule is None:
                    break_ = (
                        f"saves step {answer.step} of model {self._flow}, of which it holds nothing"
                    )
                    return Orders(problem=("protocol", break_, server))
        if isinstance(answer, SaveCommitted):
            return self._committed(answer, now)
        return self._answered(server, answer, now)

    # --- restoring ---

    def _begin(self, now: float) -> Orders:
        self._holders = [server for server, ready in sorted(self._ready.items()) if ready.holds]
        rules = {server: ready.rule for server, ready in self._ready.items() if ready.holds}
        for server, rule in sorted(rules.items()):
            first = self._holders[0]
            if rule != rules[first]:
                text = (
                    f"server {server} {_describe(rule)}, server {first} {_describe(rules[first])}. Set "
                    "JAXRDMA_CHECKPOINT, _CHECKPOINT_STEPS and _CHECKPOINT_SECONDS alike on every server."
                )
                return Orders(problem=("mismatch", text, server))
            self._rule = rule
        found = [set(self._ready[server].found) for server in self._holders]
        damaged = [text for server in self._holders for text in self._ready[server].damaged]
        self._common = set[int].intersection(*found) if found else set()
        for server, steps in zip(self._holders, found, strict=True):
            missed = set[int]().union(*found) - steps
            if missed and not self._common:
                other = next(s for s in self._holders if max(missed) in self._ready[s].found)
                text = (
                    f"server {server} does not find the checkpoint of step {max(missed)} of model {self._flow} that "
                    f"server {other} finds: all servers must reach one folder under the path of JAXRDMA_CHECKPOINT"
                )
                return Orders(problem=("mismatch", text, server))
        self._problems = list(dict.fromkeys(damaged))
        return self._try_newest(now)

    def _try_newest(self, now: float) -> Orders:
        if self._common:
            self._restoring = max(self._common)
            self._restored = {}
            return Orders(_each(self._holders, Restore(self._flow, self._restoring)))
        if not self._problems:
            return self._start(now, None)
        text = (
            f"no checkpoint of model {self._flow} can be read: {self._problems[0]}. Bring back a copy, or begin anew "
            "with --checkpoint-restore never, which sets them aside"
        )
        return Orders(problem=("checkpoint", text, self._holders[0]))

    def _judge_restored(self, now: float) -> Orders:
        assert self._restoring is not None
        problems = [restored.problem for restored in self._restored.values() if restored.problem]
        if not problems:
            return self._start(now, self._restoring)
        self._common.discard(self._restoring)
        self._problems = [*dict.fromkeys(problems), *self._problems]
        return self._try_newest(now)

    def _start(self, now: float, step: int | None) -> Orders:
        self._started = True
        self._since = now
        if step is None:
            return Orders(start=FlowStart(self._flow))
        self._saved = self._reached = step
        text = f"model {self._flow} goes on from the checkpoint of step {step}"
        notes = [f"{text}; a newer one is damaged: {problem}" for problem in self._problems]
        return Orders(start=FlowStart(self._flow, step, text), notes=notes or [text])

    # --- saving ---

    def tick(self, now: float) -> Orders:
        """What the passing of time leads to: a save by seconds."""
        rule = self._rule
        if (
            rule is None or not rule.seconds or rule.steps == 1
        ):  # with 1, every step is saved anyway
            return Orders()
        idle = self._started and not self._finishing and self._asked is None and not self._saves
        return self._ask() if idle and now - self._since >= rule.seconds else Orders()

    def finish(self) -> Orders:
        """All workers have left: let the servers save the step they are at."""
        if self._rule is None or not self._started or not self._holders:
            return Orders()
        self._finishing = True
        orders = Orders()
        if self._asked is not None and (self._asked, False) not in self._saves:
            # Nobody will reach it any more.
            save = self._saves[self._asked, False] = _Save()
            self._end(self._asked, False, save, orders)
        orders.messages += _each(self._holders, SaveAt(self._flow, LAST))
        return orders

    def _ask(self) -> Orders:
        assert self._rule is not None
        step = max(self._reached, self._saved) + self._margin
        if self._rule.steps > 0 and step % self._rule.steps == 0:
            step += 1  # that one is saved anyway, and each server shall answer once for a step
        self._asked = step
        return Orders(_each(self._holders, SaveAt(self._flow, step)))

    def _answered(self, server: int, answer: ShardSaved | SaveMissed, now: float) -> Orders:
        orders = Orders()
        if answer.last:
            self._last[server] = answer.step
        if isinstance(answer, SaveMissed):
            self._reached = max(self._reached, answer.reached)
            if answer.last and answer.step == self._saved:
                return self._maybe_finished(orders)
        save = self._saves.setdefault((answer.step, answer.last), _Save())
        save.answered.add(server)
        if isinstance(answer, ShardSaved):
            save.shards[server] = answer.shard
        elif not save.ended:
            self._end(answer.step, answer.last, save, orders)
            if answer.problem:
                seldom = self._skips if answer.skipped else self._failures
                self._tell(seldom, answer, now, orders)
            elif answer.step == self._asked and answer.reached > answer.step:
                self._again = True
                self._margin *= 2
        if len(save.answered) < len(self._holders):
            return self._maybe_finished(orders)
        if not save.ended:
            save.committing = True
            shards = [save.shards[holder] for holder in self._holders]
            orders.messages.append(
                (self._holders[0], SaveCommit(self._flow, answer.step, shards, answer.last))
            )
            return orders
        self._forget(answer.step, answer.last, now)
        if self._again and not self._finishing:
            orders.messages += self._ask().messages
        self._again = False
        return self._maybe_finished(orders)

    def _committed(self, answer: SaveCommitted, now: float) -> Orders:
        save = self._saves.get((answer.step, answer.last))
        if save is None or not save.committing:
            break_ = f"has committed step {answer.step}, which nobody asked for"
            return Orders(problem=("protocol", break_, self._holders[0]))
        orders = Orders()
        saved = not answer.problem
        orders.messages += _each(
            self._holders, SaveEnded(self._flow, answer.step, saved, answer.last)
        )
        self._reached = max(self._reached, answer.step)
        if saved:
            self._saved = answer.step
            if answer.step == self._asked:
                self._margin = max(1, self._margin // 2)
            if self._first or answer.last:
                size = sum(shard.bytes for shard in save.shards.values())
                which = "last" if answer.last else "first"
                orders.notes.append(
                    f"model {self._flow}: step {answer.step} is saved, the {which} of this job; {size:,} bytes"
                )
            self._first = False
            self._failures.reset()
        else:
            self._tell(self._failures, answer, now, orders)
        self._forget(answer.step, answer.last, now)
        return self._maybe_finished(orders)

    def _end(self, step: int, last: bool, save: _Save, orders: Orders) -> None:
        """There will be no checkpoint of this step."""
        save.ended = True
        orders.messages += _each(self._holders, SaveEnded(self._flow, step, False, last))

    def _forget(self, step: int, last: bool, now: float) -> None:
        del self._saves[step, last]
        if step == self._asked and not last:
            self._asked = None
            self._since = now

    def _maybe_finished(self, orders: Orders) -> Orders:
        """Once all have answered for the last time, what is incomplete stays so."""
        if not self._finishing or len(self._last) < len(self._holders):
            return orders
        if any(save.committing for save in self._saves.values()):
            return orders
        for (step, last), save in self._saves.items():
            if not save.ended:
                self._end(step, last, save, orders)
                ends = ", ".join(f"server {s} at step {n}" for s, n in sorted(self._last.items()))
                orders.notes.append(
                    f"model {self._flow}: the last step is not saved, for not all ended at one: {ends}"
                )
        self._finished = True
        return orders

    def _tell(
        self,
        seldom: Seldom,
        answer: SaveMissed | SaveCommitted,
        now: float,
        orders: Orders,
    ) -> None:
        newest = f"the newest checkpoint is that of step {self._saved}"
        newest = newest if self._saved else "there is no checkpoint yet"
        text = f"model {self._flow}: step {answer.step} is not saved: {answer.problem}; "
        if answer.last:
            orders.notes.append(f"{text}it was the last of this job, and {newest}")
        else:
            orders.notes += filter(None, [seldom.filter(f"{text}training goes on, {newest}", now)])


def _each(
    servers: Iterable[int], message: CoordinatorMessage
) -> list[tuple[int, CoordinatorMessage]]:
    return [(server, message) for server in servers]


def _describe(rule: SaveRule | None) -> str:
    if rule is None:
        return "saves no checkpoints"
    parts = [f"every {rule.steps} steps"] if rule.steps else []
    parts += [f"every {rule.seconds:g} s"] if rule.seconds else []
    return f"saves {' and '.join(parts) or 'at the end alone'}"
