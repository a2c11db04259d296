"""A reliable queue pair and its memory, by pyverbs."""

import socket

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


class Pair:
    def __init__(self, device: str, memory: int, receives: int) -> None:
        self._context = Context(name=device)
        self.mtu = self._context.query_port(1).active_mtu
        self._gid_index, self.gid = self._ipv4_gid()
        self._pd = PD(self._context)
        self._mr = MR(self._pd, memory, ACCESS)
        self.address, self.key = self._mr.buf, self._mr.rkey
        self._cq = CQ(self._context, receives + 64)
        capacity = QPCap(max_send_wr=64, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        initial = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=capacity)
        self._qp = QP(self._pd, initial, attributes)
        self.number = self._qp.qp_num
        for _ in range(receives):
            self._qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self._mr.buf, 1, self._mr.lkey)]))

    def _ipv4_gid(self) -> tuple[int, bytes]:
        for entry in self._context.query_gid_table(256):
            raw = bytes.fromhex(entry.gid_str().replace(":", ""))
            if entry.gid_type == e.IBV_GID_TYPE_ROCE_V2 and raw[:12] == bytes(10) + b"\xff\xff":
                return entry.gid_index, raw
        raise SystemExit("the device has no RoCE v2 GID with an IPv4 address")

    def connect(self, number: int, psn: int, gid: bytes, mtu: int, own_psn: int) -> None:
        text = ":".join(gid.hex()[i : i + 4] for i in range(0, 32, 4))
        attributes = QPAttr(port_num=1, cur_qp_state=e.IBV_QPS_INIT)
        attributes.path_mtu = mtu
        attributes.dest_qp_num = number
        attributes.rq_psn, attributes.sq_psn = psn, own_psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 4
        attributes.timeout, attributes.retry_cnt = 16, 6
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 6
        route = GlobalRoute(dgid=GID(text), sgid_index=self._gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self._qp.to_rts(attributes)

    def put(self, offset: int, data: bytes) -> None:
        self._mr.write(data, len(data), offset)

    def get(self, offset: int, length: int) -> bytes:
        return self._mr.read(length, offset)

    def write(self, offset: int, length: int, address: int, key: int, immediate: int) -> None:
        self._post(e.IBV_WR_RDMA_WRITE_WITH_IMM, offset, length, address, key, immediate)

    def read(self, offset: int, length: int, address: int, key: int) -> None:
        self._post(e.IBV_WR_RDMA_READ, offset, length, address, key, 0)

    def _post(
        self, opcode: int, offset: int, length: int, address: int, key: int, immediate: int
    ) -> None:
        request = SendWR(
            opcode=opcode,
            num_sge=1,  # pyverbs insists on one, if of no bytes
            sg=[SGE(self._mr.buf + offset, length, self._mr.lkey)],
            # Who is written to may sleep until something solicited comes.
            send_flags=e.IBV_SEND_SIGNALED | e.IBV_SEND_SOLICITED,
            imm_data=socket.htonl(immediate),
        )
        request.set_wr_rdma(key, address)
        self._qp.post_send(request)

    def poll(self) -> list[tuple[str, int]]:
        """What happened, and with which immediate."""
        found: list[tuple[str, int]] = []
        for completion in self._cq.poll(16)[1]:
            assert completion.status == e.IBV_WC_SUCCESS, f"completion status {completion.status}"
            if completion.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM:
                found.append(("arrived", socket.ntohl(completion.imm_data)))
            elif completion.opcode in (e.IBV_WC_RDMA_WRITE, e.IBV_WC_RDMA_READ):
                found.append(("completed", 0))
            else:
                found.append(("other", 0))
        return found
