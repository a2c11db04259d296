"""A server's checkpoints: when one is due, the copy at the step boundary, the thread that writes it, and restoring.

Training waits for the copy alone, and in part not even for that: it is made after the step was published, while the
workers compute. The coordinator (`savepoints.py`) knows of every server's file, and says when a step has become a
checkpoint or never will; until then a server begins no other.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxrdma import checkpoint
from jaxrdma.checkpoint import Bytes, DamagedError, Image, Manifest, Part
from jaxrdma.cluster import ClusterSpec
from jaxrdma.control import (
    LAST,
    VERSION,
    ClientMessage,
    FlowAgreed,
    FlowReady,
    RescueCommit,
    RescueCommitted,
    RescueSave,
    RescueSaved,
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
from jaxrdma.errors import ConfigError
from jaxrdma.plan import ITEM_BYTES, Plan
from jaxrdma.savepoints import Seldom
from jaxrdma.update import StatePart


class Holder(Protocol):
    """What a server holds of a model: the parameters, as views of bytes, and the optimizer state."""

    def parameters(self) -> list[Bytes]:
        """The server's piece of each leaf."""
        ...

    def state_parts(self) -> list[StatePart]:
        """What the state consists of."""
        ...

    def state(self) -> list[Bytes]:
        """The bytes of each of these, now."""
        ...

    def load_state(self, fill: Callable[[StatePart, Bytes], None]) -> None:
        """Replace them by what `fill` writes."""
        ...


class _Share:
    """What is saved of one server's part of a model."""

    def __init__(self, server: int, plan: Plan, holder: Holder) -> None:
        self.server = server
        self.holder = holder
        self._pieces = plan.pieces(server)
        self.leaf_parts = [
            checkpoint.parameter_part(leaf, spec.dtype, ITEM_BYTES[spec.dtype], ranges)
            for leaf, (spec, ranges) in enumerate(zip(plan.leaves, self._pieces, strict=True))
        ]

    def parts(self) -> list[Part]:
        """Of parameters and state."""
        return self.leaf_parts + [self.part_of(part) for part in self.holder.state_parts()]

    def part_of(self, state: StatePart) -> Part:
        """A state array's place in the whole array, by which it is found again on other servers."""
        ranges = self._pieces[state.leaf] if state.along else [(0, state.elements)]
        return Part(state.leaf, state.slot, state.dtype, _item_bytes(state.dtype), ranges)

    def read(self, reader: checkpoint.Reader) -> None:
        """Replace all of it by what a checkpoint has."""
        for part, view in zip(self.leaf_parts, self.holder.parameters(), strict=True):
            if view.size:
                reader.read(part, view)
        parts = self.holder.state_parts()
        held = [leaf for leaf, part in enumerate(self.leaf_parts) if part.bytes]
        reader.check_slots([-1, *held], [(part.leaf, part.slot) for part in parts])
        self.holder.load_state(lambda part, view: reader.read(self.part_of(part), view))


class _Model:
    """One model: what is saved of it, and where its saving stands. Of the server's main thread."""

    def __init__(
        self,
        spec: ClusterSpec,
        agreed: FlowAgreed,
        plan: Plan,
        holder: Holder,
        copy: tuple[int, Holder] | None,
    ) -> None:
        assert spec.checkpoint is not None
        self.agreed = agreed
        self.holder = holder
        self.folder = checkpoint.model_folder(spec.checkpoint, agreed.flow)
        held = [s for s in range(plan.servers) if plan.server_bytes(s)]
        self.holds = spec.index in held
        self.keeps = self.holds and spec.index == held[0]  # the one that writes manifests
        own = _Share(spec.index, plan, holder)
        self.shares = [own]  # and that of the server whose copy is kept here
        if copy is not None and copy[0] in held:
            self.shares.append(_Share(copy[0], plan, copy[1]))
        self.image = Image(own.parts()) if self.holds else Image([])
        self.found: dict[int, Manifest] = {}
        self.step = 0
        self.saved = 0  # the newest step that is a checkpoint; of step 0 there is none
        # The step that is being saved, until the coordinator says how that ended; and whether it is the job's last.
        self.open: tuple[int, bool] | None = None
        self.wanted: int | None = None  # a step to come that the coordinator named
        self.void: set[int] = set()  # steps to come that another server has missed already
        self.last = False  # whether the save of the job's end is asked for and not begun
        # Set while no thread reads the image; the writer sets it, the main thread clears it.
        self.rested = threading.Event()
        self.rested.set()
        self.cancelled = threading.Event()


class Saver:
    """The checkpoints of all models of one server. Owns the thread `jaxrdma-checkpoint`; to be closed.

    All methods belong to the server's main thread.

    **Arguments:**

    - `spec`: the cluster; `spec.checkpoint` is a folder.
    - `send`: takes messages for the coordinator, from any thread.
    - `say`: prints one line, from any thread.

    **Raises:** `ConfigError` if the folder cannot be made or written in.
    """

    def __init__(
        self, spec: ClusterSpec, send: Callable[[ClientMessage], None], say: Callable[[str], None]
    ) -> None:
        assert spec.checkpoint is not None
        self._spec = spec
        self._send = send
        self._say = say
        self._rule = SaveRule(spec.checkpoint_steps or 0, spec.checkpoint_seconds or 0.0)
        self._models: dict[int, _Model] = {}
        self._name = checkpoint.shard_name(spec.index, spec.num_servers)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._seldom = Seldom()  # of the thread
        folder = Path(spec.checkpoint)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"checkpoint folder {folder}: {error.strerror}") from None
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"checkpoint folder {folder}: this user may not write there")
        self._thread = threading.Thread(target=self._write_all, name="jaxrdma-checkpoint")
        self._thread.start()

    def close(self) -> None:
        """End the thread. What is being written is given up; of it nothing is left."""
        self._closing.set()
        self._jobs.put(None)
        self._thread.join()

    # --- beginning ---

    def prepare(
        self,
        agreed: FlowAgreed,
        plan: Plan,
        holder: Holder,
        copy: tuple[int, Holder] | None = None,
    ) -> FlowReady:
        """Look for checkpoints of a new model, and make room for its copy.

        `copy`: another server, and its part, of which a copy is kept here: it is restored too.

        **Raises:** `MismatchError` if the newest is of another model; `OSError`.
        """
        model = self._models[agreed.flow] = _Model(self._spec, agreed, plan, holder, copy)
        if self._spec.checkpoint_restore == "never":
            return FlowReady(agreed.flow, model.holds, self._rule)
        whole, damaged = checkpoint.find(model.folder)
        for manifest in whole[:1]:
            folder = checkpoint.step_folder(model.folder, manifest.step)
            fingerprint = agreed.update_fingerprint
            update = fingerprint if self._spec.checkpoint_restore == "auto" else None
            checkpoint.check_model(manifest, folder, agreed.leaves, update)
        model.found = {manifest.step: manifest for manifest in whole}
        return FlowReady(agreed.flow, model.holds, self._rule, list(model.found), damaged)

    def restore(self, message: Restore) -> Restored:
        """Read this server's share of a checkpoint into the place of its parameters and state.

        **Raises:** `MismatchError` if it is of another model.
        """
        model = self._models[message.flow]
        manifest = model.found[message.step]
        folder = checkpoint.step_folder(model.folder, message.step)
        update = model.agreed.update_fingerprint
        checkpoint.check_model(
            manifest,
            folder,
            model.agreed.leaves,
            update if self._spec.checkpoint_restore == "auto" else None,
        )
        try:
            with checkpoint.Reader(folder, manifest) as reader:
                for share in model.shares:
                    share.read(reader)
        except DamagedError as error:
            return Restored(message.flow, message.step, str(error))
        return Restored(message.flow, message.step)

    def started(self, flow: int, restored: int | None) -> None:
        """The model begins, at the step that was restored or at 0. Before its parameters are published.

        **Raises:** `OSError` if what is in the way of new checkpoints cannot be moved.
        """
        model = self._models.get(flow)
        if model is None:
            return
        model.found = {}
        model.step = model.saved = restored or 0
        if not model.keeps:
            return
        if self._spec.checkpoint_restore == "never":
            aside = checkpoint.set_aside(model.folder)
            if aside is not None:
                self._tell(f"model {flow} begins anew; its checkpoints were set aside as {aside}")
        elif restored is not None:
            checkpoint.retire_after(model.folder, restored)

    # --- saving ---

    def after_step(self, flow: int, step: int) -> None:
        """`step` has been published, and the next one is not begun: save it if it is due."""
        model = self._models.get(flow)
        if model is None or not model.holds:
            return
        model.step = step
        by_steps = self._rule.steps > 0 and step % self._rule.steps == 0
        wanted = model.wanted == step
        if wanted:
            model.wanted = None
        if step in model.void:
            model.void.discard(step)
            self._send(SaveMissed(flow, step, step))
        elif wanted or by_steps:
            self._begin(model)

    def handle(self, message: SaveAt | SaveCommit | SaveEnded) -> None:
        """What the coordinator says of saving."""
        model = self._models[message.flow]
        match message:
            case SaveAt(step=step):
                self._save_at(model, step)
            case SaveCommit():
                manifest = self._manifest(model, message.step, message.shards)
                self._jobs.put(lambda: self._commit(model, manifest, message.last))
            case SaveEnded():
                self._ended(model, message)

    def rescue(self, message: RescueSave, read: Callable[[int], Sequence[Bytes]]) -> None:
        """Save what servers held of a step, this one or the one whose copy is kept here; the job has failed.

        `read`: by server, the parts of its share as they were; called on the thread.
        """
        model = self._models[message.flow]
        model.cancelled.set()  # of a save that nobody will make a checkpoint
        self._jobs.put(lambda: self._write_rescue(model, message, read))

    def commit_rescue(self, message: RescueCommit) -> None:
        """Make a checkpoint of what all have saved."""
        model = self._models[message.flow]
        manifest = self._manifest(model, message.step, message.shards)

        def commit() -> None:
            problem = ""
            try:
                checkpoint.commit(model.folder, manifest)
            except Exception as error:
                problem = f"server {self._spec.index} could not write the manifest: {error}"
            self._send(RescueCommitted(message.flow, message.step, problem))

        self._jobs.put(commit)

    def _manifest(self, model: _Model, step: int, shards: list[ShardFile]) -> Manifest:
        return Manifest(
            format=checkpoint.FORMAT,
            release=VERSION,
            job=self._spec.job,
            flow=model.agreed.flow,
            step=step,
            leaves=model.agreed.leaves,
            update=model.agreed.update_fingerprint,
            servers=self._spec.num_servers,
            shards=shards,
        )

    def _save_at(self, model: _Model, step: int) -> None:
        if step == LAST:
            model.last = True
            self._begin_last(model)
        elif step > model.step:
            model.wanted = step
        elif step < model.step:
            self._send(SaveMissed(model.agreed.flow, step, model.step))
        else:
            self._begin(model)  # the parameters are still those of this step

    def _ended(self, model: _Model, message: SaveEnded) -> None:
        if message.saved:
            model.saved = message.step
        if model.wanted == message.step and not message.last:
            model.wanted = None
            self._send(SaveMissed(model.agreed.flow, message.step, model.step))
        elif message.step > model.step:
            model.void.add(message.step)
        if model.open == (message.step, message.last):
            model.open = None
            if not message.saved:
                model.cancelled.set()
                folder = checkpoint.step_folder(model.folder, message.step)
                self._jobs.put(lambda: checkpoint.drop(folder, self._name))
        if model.last:
            self._begin_last(model)

    def _begin_last(self, model: _Model) -> None:
        if model.open is not None:
            return  # comes again when that has ended
        model.last = False
        if model.saved == model.step:
            self._send(SaveMissed(model.agreed.flow, model.step, model.step, last=True))
            return
        model.rested.wait()  # training is over: there is nothing else to do
        self._begin(model, last=True)

    def _begin(self, model: _Model, last: bool = False) -> None:
        """Copy, and let the thread write."""
        flow, step = model.agreed.flow, model.step
        if model.open is not None or not model.rested.is_set():
            before = f"step {model.open[0]}" if model.open is not None else "one that was given up"
            busy = f"server {self._spec.index} is still saving {before}"
            self._send(SaveMissed(flow, step, step, busy, last, skipped=True))
            return
        model.open = (step, last)
        model.rested.clear()
        model.cancelled.clear()
        model.image.copy([*model.holder.parameters(), *model.holder.state()])
        self._jobs.put(lambda: self._write(model, step, last))

    # --- the thread ---

    def _write_all(self) -> None:
        for job in iter(self._jobs.get, None):
            if not self._closing.is_set():
                job()

    def _write(self, model: _Model, step: int, last: bool) -> None:
        flow = model.agreed.flow
        folder = checkpoint.step_folder(model.folder, step)
        try:
            shard = checkpoint.write_shard(
                folder,
                self._name,
                model.image,
                lambda: self._closing.is_set() or model.cancelled.is_set(),
            )
            answer: ClientMessage = ShardSaved(flow, step, shard, last)
        except InterruptedError:
            answer = SaveMissed(flow, step, step, last=last)
        except Exception as error:  # whatever a file system does, training goes on
            problem = f"server {self._spec.index} could not write {folder / self._name}: {error}"
            self._tell_failure(f"step {step} of model {flow} is not saved: {error}", last)
            answer = SaveMissed(flow, step, step, problem, last)
        model.rested.set()  # before the coordinator can ask for the next
        self._send(answer)

    def _write_rescue(
        self, model: _Model, message: RescueSave, read: Callable[[int], Sequence[Bytes]]
    ) -> None:
        folder = checkpoint.step_folder(model.folder, message.step)
        files: list[ShardFile] = []
        problem = ""
        try:
            for share in model.shares:
                if share.server in message.parts:
                    image = Image(share.parts())
                    image.copy(read(share.server))
                    name = checkpoint.shard_name(share.server, self._spec.num_servers)
                    files.append(checkpoint.write_shard(folder, name, image, self._closing.is_set))
        except Exception as error:
            problem = f"server {self._spec.index} could not write in {folder}: {error}"
        self._send(RescueSaved(message.flow, message.step, files, problem))

    def _commit(self, model: _Model, manifest: Manifest, last: bool) -> None:
        problem = ""
        try:
            checkpoint.commit(model.folder, manifest)
        except Exception as error:
            problem = f"server {self._spec.index} could not write the manifest: {error}"
            text = f"step {manifest.step} of model {manifest.flow} is not saved: {error}"
            self._tell_failure(text, last)
        else:
            try:
                checkpoint.prune(model.folder, self._spec.checkpoint_keep)
            except Exception as error:
                text = f"old checkpoints of {model.folder} cannot be removed: {error}"
                self._tell_failure(text, last)
            else:
                self._seldom.reset()
        self._send(SaveCommitted(manifest.flow, manifest.step, problem, last))

    def _tell_failure(self, text: str, last: bool) -> None:
        if last:
            self._seldom.reset()
        said = self._seldom.filter(text if last else f"{text}; training goes on", time.monotonic())
        if said:
            self._tell(said)

    def _tell(self, text: str) -> None:
        self._say(f"server {self._spec.index}: {text}")


def _item_bytes(dtype: str) -> int:
    import ml_dtypes

    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        return np.dtype(getattr(ml_dtypes, dtype)).itemsize  # bfloat16 and its like
