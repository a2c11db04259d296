#!/usr/bin/python3
"""A worker or a server of a job over verbs, written from the headers of the protocol and made with pyverbs: it shares
no code with ours, so what ours puts on the wire is what the headers say.

pyverbs_member.py worker DEVICE ADDRESS    worker 1 of 2: pushes, and checks the means that come back
pyverbs_member.py server DEVICE            the only server: says "listening ADDRESS", returns each gradient

Both: --elements, --partition-bytes, --steps, as tests/verbs/engines.py has them. Prints "verified" when all went well.
Needs the system's Python, with the package python3-pyverbs.
"""

import argparse
import random
import socket
import struct
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

JOB = b"engines"
RECEIVES = 256
SLOTS = 4
LIMIT_S = 40

# native/fabric/tcp/frame.h
FRAME = struct.Struct("<IB3xIIIIQQ")  # magic, type, credits, immediate, key, 0, address, length
FRAME_MAGIC = 0x3154524A
HELLO, HELLO_REPLY, WRITE = 1, 2, 3
HELLO_BODY = struct.Struct(
    "<QIHHHHI"
)  # incarnation, worker, version, bytes of: job, token, payload; 0
# native/fabric/verbs/frame.h
PARAMETERS = struct.Struct("<IIII16sQIIHHBBBB64s")
PARAMETERS_MAGIC = 0x3156524A
MESSAGE = struct.Struct("<IIII")  # type, generation, received, granted; then parameters
READY = 1
# native/engine/wire.h
HEADER = struct.Struct("<IHHBBHIqQQQIIQ")
HEADER_MAGIC = 0x5344524A
VERSION = 2
PUSH = 1
RESULT, CREDIT = 1, 2
GRANT = struct.Struct("<QQII")  # address, stride, key, slots

MAILBOX = (
    0x1000  # where the other side is told to write its messages; only its frames are looked at
)


def gradient(elements: int, worker: int, step: int) -> list[float]:
    return [(i * 13 + worker * 7 + step) % 97 / 8.0 for i in range(elements)]


def floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


class Member:
    """One queue pair, its memory, and the signalling connection."""

    def __init__(self, device: str, memory: int) -> None:
        self.context = Context(name=device)
        self.mtu = self.context.query_port(1).active_mtu
        self.gid_index, self.gid = self.ipv4_gid()
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.pd = PD(self.context)
        self.mr = MR(self.pd, memory, access)
        self.cq = CQ(self.context, RECEIVES + 64)
        capacity = QPCap(max_send_wr=64, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = access
        initial = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=capacity)
        self.qp = QP(self.pd, initial, attributes)
        self.psn = random.getrandbits(24)
        for _ in range(RECEIVES):
            self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.mr.buf, 1, self.mr.lkey)]))
        self.received: list[int] = []  # immediates of writes, in order
        self.completed = 0
        self.posted = 0

    def ipv4_gid(self) -> tuple[int, bytes]:
        for entry in self.context.query_gid_table(256):
            raw = bytes.fromhex(entry.gid_str().replace(":", ""))
            if entry.gid_type == e.IBV_GID_TYPE_ROCE_V2 and raw[:12] == bytes(10) + b"\xff\xff":
                return entry.gid_index, raw
        raise SystemExit("the device has no RoCE v2 GID with an IPv4 address")

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
                self.qp.qp_num,
                self.psn,
                RECEIVES // 2,
                self.gid,
                MAILBOX,
                1,
                1 << 20,
            ),
            *(0, 0xFFFF, self.mtu, 1, 1, 0, b"pyverbs"),
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
        text = ":".join(gid.hex()[i : i + 4] for i in range(0, 32, 4))
        attributes = QPAttr(port_num=1, cur_qp_state=e.IBV_QPS_INIT)
        attributes.path_mtu = min(mtu, self.mtu)
        attributes.dest_qp_num = number
        attributes.rq_psn, attributes.sq_psn = psn, self.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.timeout, attributes.retry_cnt = 16, 6
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 6
        route = GlobalRoute(dgid=GID(text), sgid_index=self.gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.qp.to_rts(attributes)
        ready = MESSAGE.pack(READY, 0, 0, RECEIVES // 2) + self.parameters()
        self.frame(WRITE, ready, immediate=0, key=self.mailbox_key, address=self.mailbox)
        _, body = self.next_frame(WRITE)
        assert MESSAGE.unpack(body[: MESSAGE.size])[:2] == (READY, 0), body

    # The queue pair.

    def write(self, offset: int, length: int, address: int, key: int, immediate: int) -> None:
        """`length` bytes of our memory at `offset` go to `address` of the other side."""
        request = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,  # pyverbs insists on one, if of no bytes
            sg=[SGE(self.mr.buf + offset, length, self.mr.lkey)],
            send_flags=e.IBV_SEND_SIGNALED,
            imm_data=socket.htonl(immediate),
        )
        request.set_wr_rdma(key, address)
        self.qp.post_send(request)
        self.posted += 1

    def wait(self, done) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < deadline, (
                f"waited in vain; immediates so far: {self.received}"
            )
            for completion in self.cq.poll(16)[1]:
                assert completion.status == e.IBV_WC_SUCCESS, (
                    f"completion status {completion.status}"
                )
                if completion.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM:
                    self.received.append(socket.ntohl(completion.imm_data))
                elif completion.opcode == e.IBV_WC_RDMA_WRITE:
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


def work(args: argparse.Namespace) -> None:
    """One partition at a time: in slot 0, answered into the second half of our memory."""
    results = HEADER.size + args.partition_bytes
    member = Member(args.device, 2 * results)
    host, _, port = args.address.rpartition(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as connection:
        member.signal_over(connection)
        member.hello(HELLO, 1, bytes([2, 1]) + bytes(14), b"")
        address, stride, key, slots = GRANT.unpack(member.take_hello(HELLO_REPLY))
        assert stride >= HEADER.size + args.partition_bytes and slots > 0
        member.connect_queue_pair()
        for step in range(args.steps):
            mine = floats(gradient(args.elements, 1, step))
            ours, theirs = (gradient(args.elements, worker, step) for worker in (1, 0))
            means = floats([(a + b) / 2 for a, b in zip(ours, theirs, strict=True)])
            for number, (begin, length) in enumerate(pieces(args)):
                there = member.mr.buf + results
                header = HEADER.pack(
                    *(HEADER_MAGIC, VERSION, 0, PUSH, 0, 0, number, step, 2, length),
                    *(there, member.mr.rkey, 77, 0),
                )
                member.mr.write(header + mine[begin : begin + length], HEADER.size + length)
                member.write(0, HEADER.size + length, address, key, 0)
                answers = sorted(member.next_immediate() for _ in range(2))
                assert answers == [RESULT << 24 | 77, CREDIT << 24 | 0], answers
                got = member.mr.read(length, results)
                assert got == means[begin : begin + length], f"step {step}: another mean came back"
        print("verified", flush=True)


def serve(args: argparse.Namespace) -> None:
    """The mean of one worker is its own gradient: it goes back out of the slot in which it landed."""
    stride = HEADER.size + args.partition_bytes
    member = Member(args.device, SLOTS * stride)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        print(f"listening 127.0.0.1:{listener.getsockname()[1]}", flush=True)
        connection, _ = listener.accept()
    with connection:
        member.signal_over(connection)
        member.take_hello(HELLO)
        member.hello(HELLO_REPLY, 0, b"", GRANT.pack(member.mr.buf, stride, member.mr.rkey, SLOTS))
        member.connect_queue_pair()
        for number in range(args.steps * len(pieces(args))):
            slot = member.next_immediate()
            fields = HEADER.unpack(member.mr.read(HEADER.size, slot * stride))
            magic, version, flow, kind, dtype, _, partition, step, incarnation, length = fields[:10]
            assert (magic, version, flow, kind, dtype) == (HEADER_MAGIC, VERSION, 0, PUSH, 0), (
                fields
            )
            begin, expected = pieces(args)[partition]
            assert (incarnation, length) == (1, expected), fields
            assert step == number // len(pieces(args)), fields
            payload = member.mr.read(length, slot * stride + HEADER.size)
            right = floats(gradient(args.elements, 0, step))[begin : begin + length]
            assert payload == right, f"step {step}: other bytes landed than were pushed"
            address, key, tag = fields[10:13]
            member.write(slot * stride + HEADER.size, length, address, key, RESULT << 24 | tag)
            # The slot may be written again once the answer has left it.
            member.wait(lambda: member.completed == member.posted)
            member.write(0, 0, 0, 0, CREDIT << 24 | slot)
        member.wait(lambda: member.completed == member.posted)
        print("verified", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("role", choices=("worker", "server"))
    parser.add_argument("device")
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("--elements", type=int, default=2000)
    parser.add_argument("--partition-bytes", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    (work if args.role == "worker" else serve)(args)


if __name__ == "__main__":
    sys.exit(main())
