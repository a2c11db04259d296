#!/usr/bin/python3
"""A worker or a server of a job over verbs, written from the headers of the protocol: it shares no code with ours, so
what ours puts on the wire is what the headers say.

member.py BINDING worker DEVICE ADDRESS    worker 1 of 2: pushes, and checks the means that come back
member.py BINDING server DEVICE            the only server: says "listening ADDRESS", returns each gradient
member.py BINDING reader DEVICE ADDRESS    worker 1 of 2: reads the parameters where the server keeps them
member.py BINDING library DEVICE           the only server: tells where its parameters lie, and does nothing else

BINDING: what drives the device, pyverbs (of the system's Python, package python3-pyverbs) or ibverbs (from the Python
index). Options: --elements, --partition-bytes, --steps, as tests/verbs/engines.py has them. Prints "verified" when all
went well.
"""

import argparse
import contextlib
import random
import socket
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # left out by an isolated interpreter

JOB = b"engines"
RECEIVES = 256
SLOTS = 4
LIMIT_S = 40

# native/fabric/tcp/frame.h
FRAME = struct.Struct("<IB3xIIIIQQ")  # magic, type, credits, immediate, key, 0, address, length
FRAME_MAGIC = 0x3154524A
HELLO, HELLO_REPLY, WRITE = 1, 2, 3
# incarnation, worker, version, bytes of: job, token, payload; 0
HELLO_BODY = struct.Struct("<QIHHHHI")
# native/fabric/verbs/frame.h
PARAMETERS = struct.Struct("<IIII16sQIIHHBBBBIB3x64s")
PARAMETERS_MAGIC = 0x3256524A
MESSAGE = struct.Struct("<IIII")  # type, generation, received, granted; then parameters
READY = 1
# native/engine/wire.h
# magic, flow, kind, dtype, partition, tag, step, incarnation, bytes, address and 4 keys for the answer
HEADER = struct.Struct("<IHBBIIqQQQ4I")
HEADER_MAGIC = 0x5444524A
VERSION = 10
PUSH, LOCATE = 1, 4
RESULT, CREDIT, RESULT_AND_CREDIT = 1, 2, 5
TAG_BITS = 20
IMMEDIATE_BITS = 24  # above: the low bits of the write's number
GRANT = struct.Struct("<QQ4III")  # address, stride, keys of 4 devices, slots, 0
LOCATION = struct.Struct("<QQQ4I")  # address, bytes, address of the seal, keys of 4 devices
SEAL = struct.Struct("<Qq")  # sequence, step

MAILBOX = (
    0x1000  # where the other side is told to write its messages; only its frames are looked at
)
PARAMETERS_OF = 50  # the "worker" whose gradient of step 0 the parameters are
STEP = 7  # of a library's parameters


def gradient(elements: int, worker: int, step: int) -> list[float]:
    return [(i * 13 + worker * 7 + step) % 97 / 8.0 for i in range(elements)]


def floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


class Member:
    """One queue pair, its memory, and the signalling connection."""

    def __init__(self, binding: str, device: str, memory: int) -> None:
        if binding == "pyverbs":
            from with_pyverbs import Pair
        else:
            from with_ibverbs import Pair
        self.pair = Pair(device, memory, RECEIVES)
        self.psn = random.getrandbits(24)
        self.received: list[int] = []  # immediates of writes, in order
        self.writes = self.arrived = 0
        self.completed = 0
        self.posted = 0

    # The signalling connection.

    def signal_over(self, connection: socket.socket) -> None:
        connection.settimeout(LIMIT_S)
        self.connection = connection

    def frame(
        self, kind: int, body: bytes, immediate: int = 0, key: int = 0, address: int = 0
    ) -> None:
        credits = 8 if kind in (HELLO, HELLO_REPLY) else 0
        header = FRAME.pack(FRAME_MAGIC, kind, credits, immediate, key, 0, address, len(body))
        self.connection.sendall(header + body)

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.connection.recv(count - len(data))
            if not more:
                raise SystemExit("the other side closed the signalling connection")
            data += more
        return data

    def next_frame(self, kind: int) -> tuple[int, bytes]:
        """Immediate and body of the next frame that is not of credits alone."""
        while True:
            magic, found, _, immediate, _, _, _, length = FRAME.unpack(self.exactly(FRAME.size))
            body = self.exactly(length)
            assert magic == FRAME_MAGIC, hex(magic)
            if found == kind:
                return immediate, body
            assert found == 4, f"expected a frame of type {kind}, got {found}: {body!r}"

    def parameters(self) -> bytes:
        return PARAMETERS.pack(
            *(
                PARAMETERS_MAGIC,
                self.pair.number,
                self.psn,
                RECEIVES // 2,
                self.pair.gid,
                MAILBOX,
                1,
                1 << 20,
            ),
            *(0, 0xFFFF, self.pair.mtu, 1, 4, 1, 0, 0, b"independent"),
        )

    def hello(self, kind: int, worker: int, token: bytes, payload: bytes) -> None:
        payload = self.parameters() + payload
        sizes = (len(JOB), len(token), len(payload))
        fixed = HELLO_BODY.pack(worker + 1, worker, VERSION, *sizes, 0)
        self.frame(kind, fixed + JOB + token + payload)

    def take_hello(self, kind: int) -> bytes:
        """Connects the queue pair to what the other side's hello says; the engine's payload."""
        immediate, body = self.next_frame(kind)
        assert kind == HELLO or immediate == 0, f"refused: {body.decode(errors='replace')}"
        payload = body[-HELLO_BODY.unpack(body[: HELLO_BODY.size])[5] :]
        fields = PARAMETERS.unpack(payload[: PARAMETERS.size])
        magic, number, psn, self.depth, gid, self.mailbox, self.mailbox_key = fields[:7]
        assert magic == PARAMETERS_MAGIC, hex(magic)
        self.peer = number, psn, gid, fields[10]
        return payload[PARAMETERS.size :]

    def connect_queue_pair(self) -> None:
        number, psn, gid, mtu = self.peer
        self.pair.connect(number, psn, gid, min(mtu, self.pair.mtu), self.psn)
        ready = MESSAGE.pack(READY, 0, 0, RECEIVES // 2) + self.parameters()
        self.frame(WRITE, ready, immediate=0, key=self.mailbox_key, address=self.mailbox)
        _, body = self.next_frame(WRITE)
        assert MESSAGE.unpack(body[: MESSAGE.size])[:2] == (READY, 0), body

    # The queue pair.

    def write(self, offset: int, length: int, address: int, key: int, immediate: int) -> None:
        """`length` bytes of our memory at `offset` go to `address` of the other side."""
        number = self.writes % 256
        self.pair.write(offset, length, address, key, number << IMMEDIATE_BITS | immediate)
        self.writes += 1
        self.posted += 1

    def read(self, offset: int, length: int, address: int, key: int) -> bytes:
        """What is at `address` of the other side; it comes to `offset` of our memory."""
        self.pair.read(offset, length, address, key)
        self.posted += 1
        self.wait(lambda: self.completed == self.posted)
        return self.pair.get(offset, length)

    def wait(self, done) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < deadline, (
                f"waited in vain; immediates so far: {self.received}"
            )
            for what, immediate in self.pair.poll():
                if what == "arrived":
                    assert immediate >> IMMEDIATE_BITS == self.arrived % 256, hex(immediate)
                    self.arrived += 1
                    self.received.append(immediate % (1 << IMMEDIATE_BITS))
                elif what == "completed":
                    self.completed += 1
                # else: an empty SEND, which brings the sender's receives

    def next_immediate(self) -> int:
        self.wait(lambda: self.received)
        return self.received.pop(0)


def pieces(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Begin and length of each partition, in bytes."""
    whole = 4 * args.elements
    size = args.partition_bytes // 4 * 4
    return [(begin, min(size, whole - begin)) for begin in range(0, whole, size)]


@contextlib.contextmanager
def join(member: Member, args: argparse.Namespace):
    """As worker 1; gives where slot 0 of the server is."""
    host, _, port = args.address.rpartition(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as connection:
        member.signal_over(connection)
        member.hello(HELLO, 1, bytes([2, 1]) + bytes(14), b"")
        address, stride, key, _, _, _, slots, _ = GRANT.unpack(member.take_hello(HELLO_REPLY))
        assert stride >= HEADER.size + args.partition_bytes and slots > 0
        member.connect_queue_pair()
        yield address, key


@contextlib.contextmanager
def receive(member: Member, slot_bytes: int):
    """As the only server, whose slots are at the beginning of its memory, for one worker."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        print(f"listening 127.0.0.1:{listener.getsockname()[1]}", flush=True)
        connection, _ = listener.accept()
    with connection:
        member.signal_over(connection)
        member.take_hello(HELLO)
        grant = GRANT.pack(member.pair.address, slot_bytes, member.pair.key, 0, 0, 0, SLOTS, 0)
        member.hello(HELLO_REPLY, 0, b"", grant)
        member.connect_queue_pair()
        yield


def read_parameters(args: argparse.Namespace) -> None:
    """Asks where each partition lies, and reads it there between two readings of the seal."""
    answers, copy = HEADER.size, 2 * HEADER.size
    member = Member(args.binding, args.device, copy + args.partition_bytes)
    pair = member.pair
    right = floats(gradient(args.elements, PARAMETERS_OF, 0))
    with join(member, args) as (address, key):
        for number, (begin, length) in enumerate(pieces(args)):
            header = HEADER.pack(
                *(HEADER_MAGIC, 0, LOCATE, 0, number, 77, 0, 2, 0),
                *(pair.address + answers, pair.key, 0, 0, 0),
            )
            pair.put(0, header)
            member.write(0, HEADER.size, address, key, 0)
            found = sorted(member.next_immediate() for _ in range(2))
            assert found == [RESULT << TAG_BITS | 77, CREDIT << TAG_BITS | 0], found
            there, size, seal, remote_key, *_ = LOCATION.unpack(pair.get(answers, LOCATION.size))
            assert size == length, (size, length)
            before = SEAL.unpack(member.read(copy, SEAL.size, seal, remote_key))
            got = member.read(copy, length, there, remote_key)
            after = SEAL.unpack(member.read(copy, SEAL.size, seal, remote_key))
            assert before == after and before[0] % 2 == 0 and before[1] == 0, (before, after)
            assert got == right[begin : begin + length], "other parameters were read"
        print("verified", flush=True)


def be_read(args: argparse.Namespace) -> None:
    """Tells where the parameters lie; then the reader takes them by himself."""
    parameters = floats(gradient(args.elements, PARAMETERS_OF, 0))
    stride = HEADER.size + args.partition_bytes
    seal = SLOTS * stride
    answers = seal + HEADER.size
    data = answers + HEADER.size
    member = Member(args.binding, args.device, data + len(parameters))
    pair = member.pair
    pair.put(seal, SEAL.pack(2, STEP))
    pair.put(data, parameters)
    with receive(member, stride):
        for _ in pieces(args):
            slot = member.next_immediate()
            assert slot < SLOTS, slot
            fields = HEADER.unpack(pair.get(slot * stride, HEADER.size))
            assert fields[:3] == (HEADER_MAGIC, 0, LOCATE), fields
            begin, length = pieces(args)[fields[4]]
            place = pair.address + data + begin
            pair.put(answers, LOCATION.pack(place, length, pair.address + seal, pair.key, 0, 0, 0))
            member.write(
                answers, LOCATION.size, fields[9], fields[10], RESULT << TAG_BITS | fields[5]
            )
            member.wait(lambda: member.completed == member.posted)
            member.write(0, 0, 0, 0, CREDIT << TAG_BITS | slot)
        member.wait(lambda: member.completed == member.posted)
        while member.connection.recv(4096):  # until the reader is done
            pass
        print("verified", flush=True)


def work(args: argparse.Namespace) -> None:
    """One partition at a time: in slot 0, answered into the second half of our memory."""
    results = HEADER.size + args.partition_bytes
    member = Member(args.binding, args.device, 2 * results)
    pair = member.pair
    with join(member, args) as (address, key):
        for step in range(args.steps):
            mine = floats(gradient(args.elements, 1, step))
            ours, theirs = (gradient(args.elements, worker, step) for worker in (1, 0))
            means = floats([(a + b) / 2 for a, b in zip(ours, theirs, strict=True)])
            for number, (begin, length) in enumerate(pieces(args)):
                there = pair.address + results
                header = HEADER.pack(
                    *(HEADER_MAGIC, 0, PUSH, 0, number, 77, step, 2, length),
                    *(there, pair.key, 0, 0, 0),
                )
                pair.put(0, header + mine[begin : begin + length])
                member.write(0, HEADER.size + length, address, key, 0)
                answers = [member.next_immediate()]
                if answers != [
                    RESULT_AND_CREDIT << TAG_BITS | 77
                ]:  # the other worker was the later one
                    answers = sorted([*answers, member.next_immediate()])
                    assert answers == [RESULT << TAG_BITS | 77, CREDIT << TAG_BITS | 0], answers
                got = pair.get(results, length)
                assert got == means[begin : begin + length], f"step {step}: another mean came back"
        print("verified", flush=True)


def serve(args: argparse.Namespace) -> None:
    """The mean of one worker is its own gradient: it goes back out of the slot in which it landed."""
    stride = HEADER.size + args.partition_bytes
    member = Member(args.binding, args.device, SLOTS * stride)
    pair = member.pair
    with receive(member, stride):
        for number in range(args.steps * len(pieces(args))):
            slot = member.next_immediate()
            fields = HEADER.unpack(pair.get(slot * stride, HEADER.size))
            magic, flow, kind, dtype, partition, tag, step, incarnation, length = fields[:9]
            assert (magic, flow, kind, dtype) == (HEADER_MAGIC, 0, PUSH, 0), fields
            begin, expected = pieces(args)[partition]
            assert (incarnation, length) == (1, expected), fields
            assert step == number // len(pieces(args)), fields
            payload = pair.get(slot * stride + HEADER.size, length)
            right = floats(gradient(args.elements, 0, step))[begin : begin + length]
            assert payload == right, f"step {step}: other bytes landed than were pushed"
            address, key = fields[9:11]
            member.write(
                slot * stride + HEADER.size, length, address, key, RESULT << TAG_BITS | tag
            )
            # The slot may be written again once the answer has left it.
            member.wait(lambda: member.completed == member.posted)
            member.write(0, 0, 0, 0, CREDIT << TAG_BITS | slot)
        member.wait(lambda: member.completed == member.posted)
        print("verified", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    roles = {"worker": work, "server": serve, "reader": read_parameters, "library": be_read}
    parser.add_argument("binding", choices=("pyverbs", "ibverbs"))
    parser.add_argument("role", choices=roles)
    parser.add_argument("device")
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("--elements", type=int, default=2000)
    parser.add_argument("--partition-bytes", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    roles[args.role](args)


if __name__ == "__main__":
    sys.exit(main())
