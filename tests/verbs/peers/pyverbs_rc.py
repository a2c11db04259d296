#!/usr/bin/python3
"""One or both ends of a reliable connection by pyverbs: an independent peer, which knows nothing of ours.

pyverbs_rc.py loop DEVICE DEVICE          both ends in this process
pyverbs_rc.py server DEVICE PORT          waits for a client, then takes what that writes
pyverbs_rc.py client DEVICE HOST PORT     writes with immediates, reads back; with --stream, goes on writing

Prints "verified" when all went well. Needs the system's Python, with the package python3-pyverbs.
"""

import argparse
import random
import re
import socket
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

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
RECEIVES = 16
CONTROL_S = 60  # for what the other end says over TCP
COMPLETION_S = 30  # longer than any retries that are asked for here


def ipv4_gid(context: Context) -> int:
    """The RoCE v2 entry of port 1 that carries an IPv4 address."""
    for entry in context.query_gid_table(256):
        raw = bytes.fromhex(entry.gid_str().replace(":", ""))
        if entry.gid_type == e.IBV_GID_TYPE_ROCE_V2 and raw[:12] == bytes(10) + b"\xff\xff":
            return entry.gid_index
    raise SystemExit("the device has no RoCE v2 GID with an IPv4 address")


class End:
    def __init__(self, device: str, options: argparse.Namespace) -> None:
        self.options = options
        self.size = options.size
        self.context = Context(name=device)
        self.mtu = self.context.query_port(1).active_mtu
        self.gid_index = ipv4_gid(self.context)
        self.pd = PD(self.context)
        self.mr = MR(self.pd, self.size, ACCESS)
        self.cq = CQ(self.context, 2 * RECEIVES)
        capacity = QPCap(max_send_wr=8, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        self.qp = QP(
            self.pd,
            QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=capacity),
            attributes,
        )
        self.psn = random.getrandbits(24)
        for _ in range(RECEIVES):
            self.post_receive()

    def post_receive(self) -> None:
        # pyverbs insists on a place for data, even where only an immediate comes.
        self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.mr.buf, 1, self.mr.lkey)]))

    def describe(self) -> str:
        gid = self.context.query_gid(1, self.gid_index)
        return f"{self.qp.qp_num} {self.psn} {gid} {self.mtu} {self.mr.rkey} {self.mr.buf}"

    def connect(self, other: str) -> None:
        number, psn, gid, mtu, rkey, address = other.split()
        self.rkey, self.address = int(rkey), int(address)
        attributes = QPAttr(port_num=1, cur_qp_state=e.IBV_QPS_INIT)
        attributes.path_mtu = min(int(mtu), self.mtu)
        attributes.dest_qp_num = int(number)
        attributes.rq_psn, attributes.sq_psn = int(psn), self.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.timeout, attributes.retry_cnt = self.options.timeout, self.options.retry
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 6
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.qp.to_rts(attributes)

    def post(self, opcode: int, immediate: int = 0) -> None:
        request = SendWR(
            opcode=opcode,
            num_sge=1,
            sg=[SGE(self.mr.buf, self.size, self.mr.lkey)],
            send_flags=e.IBV_SEND_SIGNALED,
            imm_data=socket.htonl(immediate),
        )
        request.set_wr_rdma(self.rkey, self.address)
        self.qp.post_send(request)

    def completion(self):
        deadline = time.monotonic() + COMPLETION_S
        while time.monotonic() < deadline:
            count, completions = self.cq.poll(1)
            if count:
                return completions[0]
        raise SystemExit("no completion came")

    def expect(self, opcode: int) -> int:
        """A good completion of this kind; its immediate."""
        found = self.completion()
        if found.status != e.IBV_WC_SUCCESS or found.opcode != opcode:
            raise SystemExit(f"expected opcode {opcode}, got {found.opcode}, {status(found)}")
        return socket.ntohl(found.imm_data)

    def write(self, index: int, pattern: bytes) -> None:
        self.mr.write(pattern, self.size)
        self.post(e.IBV_WR_RDMA_WRITE_WITH_IMM, index)
        self.expect(e.IBV_WC_RDMA_WRITE)

    def take(self, index: int, pattern: bytes) -> None:
        immediate = self.expect(e.IBV_WC_RECV_RDMA_WITH_IMM)
        assert immediate == index, f"expected the immediate {index}, got {immediate}"
        assert self.mr.read(self.size, 0) == pattern, f"write {index} brought other bytes"
        self.post_receive()

    def read_back(self, pattern: bytes) -> None:
        self.mr.write(bytes(self.size), self.size)
        self.post(e.IBV_WR_RDMA_READ)
        self.expect(e.IBV_WC_RDMA_READ)
        assert self.mr.read(self.size, 0) == pattern, "read other bytes than were written"

    def stream(self) -> None:
        """Writes without immediates, which nobody need answer, until it fails."""
        say("streaming")
        last = time.monotonic()
        while True:
            self.post(e.IBV_WR_RDMA_WRITE)
            found = self.completion()
            now = time.monotonic()
            if found.status != e.IBV_WC_SUCCESS:
                say(f"{status(found)} {now - last:.3f} s after the last success")
                return
            last = now


def status(completion) -> str:
    names = {getattr(e, name): name for name in dir(e) if re.fullmatch(r"IBV_WC_\w+_ERR", name)}
    return names.get(completion.status, str(completion.status))


def say(text: str) -> None:
    print(text, flush=True)


def pattern(index: int, size: int) -> bytes:
    return random.Random(index).randbytes(size)


def loop(devices: list[str], options: argparse.Namespace) -> None:
    writer, taker = (End(device, options) for device in devices)
    writer.connect(taker.describe())
    taker.connect(writer.describe())
    for index in range(options.writes):
        bytes_written = pattern(index, options.size)
        writer.write(index, bytes_written)
        taker.take(index, bytes_written)
    writer.read_back(bytes_written)
    say("verified")


def far(end: End, connection: socket.socket, options: argparse.Namespace, writes: bool) -> None:
    """One end, the other is behind `connection`; they go in step, a line each."""
    connection.settimeout(CONTROL_S)
    file = (
        connection.makefile()
    )  # to read: one for both ways would forget at a write what it has read ahead

    def exchange(line: str) -> str:
        connection.sendall(line.encode() + b"\n")
        answer = file.readline().strip()
        if not answer:
            raise SystemExit("the other end is gone")
        return answer

    end.connect(exchange(end.describe()))
    exchange("connected")
    for index in range(options.writes):
        data = pattern(index, options.size)
        if writes:
            end.write(index, data)
        else:
            end.take(index, data)
        exchange("next")
    if writes:
        end.read_back(data)
    exchange("done")
    say("verified")
    if options.stream and writes:
        end.stream()
    elif options.stream:
        connection.settimeout(None)
        file.readline()  # until the client is gone, or somebody ends us


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("role", choices=("loop", "server", "client"))
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--size", type=int, default=65536)
    parser.add_argument("--writes", type=int, default=8)
    parser.add_argument("--timeout", type=int, default=14, help="4.096 us * 2^TIMEOUT per try")
    # 7, the most that fits, means for ever to rdma_rxe.
    parser.add_argument("--retry", type=int, default=6, help="how many tries after the first")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    if options.role == "loop":
        loop(options.arguments, options)
        return
    device, *where = options.arguments
    end = End(device, options)
    if options.role == "server":
        with socket.create_server(("", int(where[0]))) as listener:
            listener.settimeout(CONTROL_S)
            say("listening")
            connection, _ = listener.accept()
    else:
        connection = socket.create_connection((where[0], int(where[1])), CONTROL_S)
    with connection:
        far(end, connection, options, writes=options.role == "client")


if __name__ == "__main__":
    sys.exit(main())
