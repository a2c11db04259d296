"""A reliable queue pair and its memory, by ibverbs of the Python index."""

import ctypes
from pathlib import Path

import ibverbs as ib

ACCESS = ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE | ib.AccessFlags.REMOTE_READ


class Pair:
    def __init__(self, device: str, memory: int, receives: int) -> None:
        self._context = next(d for d in ib.get_device_list() if d.name == device).open()
        self.mtu = int(self._context.query_port(1).active_mtu)
        self._gid_index = self._ipv4_gid(device)
        self.gid = bytes(self._context.query_gid(1, self._gid_index).raw)
        self._pd = self._context.alloc_pd()
        self._memory = ctypes.create_string_buffer(memory)
        self.address = ctypes.addressof(self._memory)
        self._mr = self._pd.reg_mr(self.address, memory, ACCESS)
        self.key = self._mr.rkey
        self._cq = self._context.create_cq(receives + 64)
        self._qp = self._pd.create_qp(
            ib.QPInitAttr(
                self._cq, self._cq, qp_type=ib.QPType.RC, max_send_wr=64, max_recv_wr=receives
            )
        )
        self.number = self._qp.qp_num
        self._qp.to_init(1, ACCESS)
        for _ in range(receives):
            self._qp.post_recv(ib.RecvWR(wr_id=0))

    @staticmethod
    def _ipv4_gid(device: str) -> int:
        port = Path(f"/sys/class/infiniband/{device}/ports/1")
        for index in range(256):
            try:
                kind = (port / "gid_attrs" / "types" / str(index)).read_text()
            except OSError:
                continue  # an empty slot
            gid = (port / "gids" / str(index)).read_text()
            if "v2" in kind and gid.startswith("0000:0000:0000:0000:0000:ffff:"):
                return index
        raise SystemExit("the device has no RoCE v2 GID with an IPv4 address")

    def connect(self, number: int, psn: int, gid: bytes, mtu: int, own_psn: int) -> None:
        self._qp.to_rtr(
            ib.QPInfo(number, psn, 0, gid, 1, mtu),
            sgid_index=self._gid_index,
            mtu=mtu,
            hop_limit=64,
            max_dest_rd_atomic=4,
        )
        self._qp.to_rts(own_psn, timeout=16, retry_cnt=6, rnr_retry=6, max_rd_atomic=4)

    def put(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self.address + offset, data, len(data))

    def get(self, offset: int, length: int) -> bytes:
        return ctypes.string_at(self.address + offset, length)

    def write(self, offset: int, length: int, address: int, key: int, immediate: int) -> None:
        self._post(ib.WROpcode.RDMA_WRITE_WITH_IMM, offset, length, address, key, immediate)

    def read(self, offset: int, length: int, address: int, key: int) -> None:
        self._post(ib.WROpcode.RDMA_READ, offset, length, address, key, 0)

    def _post(
        self, opcode: int, offset: int, length: int, address: int, key: int, immediate: int
    ) -> None:
        self._qp.post_send(
            ib.SendWR(
                wr_id=1,
                sg_list=[self._mr.sge(length, offset)] if length else [],
                opcode=opcode,
                # Who is written to may sleep until something solicited comes.
                send_flags=ib.SendFlags.SIGNALED | ib.SendFlags.SOLICITED,
                remote_addr=address,
                rkey=key,
                imm_data=immediate,
            )
        )

    def poll(self) -> list[tuple[str, int]]:
        """What happened, and with which immediate."""
        found: list[tuple[str, int]] = []
        for completion in self._cq.poll(16):
            completion.raise_for_status()
            if completion.opcode == ib.WCOpcode.RECV_RDMA_WITH_IMM:
                found.append(("arrived", completion.imm_data))
            elif completion.opcode in (ib.WCOpcode.RDMA_WRITE, ib.WCOpcode.RDMA_READ):
                found.append(("completed", 0))
            else:
                found.append(("other", 0))
        return found
