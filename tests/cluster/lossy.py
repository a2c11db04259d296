"""Loses packets that come in by a network device, as a bad cable would. Needs root, and Linux 5.9 or newer.

Usage: lossy.py DEVICE PER_MILLE. Says "lossy", or why it cannot be, and loses until its input ends. Kernels of small
machines have no netem; this is a program of seven instructions that the kernel asks about every packet.
"""

import ctypes
import os
import socket
import struct
import sys

SYS_BPF = 321  # x86-64
PROG_LOAD, LINK_CREATE = 5, 28
TYPE_XDP, ATTACH_XDP = 6, 37
DROP, PASS = 1, 2
RANDOM = 7  # bpf_get_prandom_u32


def instruction(code: int, offset: int = 0, value: int = 0) -> bytes:
    """All of them work on register 0."""
    return struct.pack("<BBhi", code, 0, offset, value)


def program(per_mille: int) -> bytes:
    """Drops a packet of a thousand so often."""
    return b"".join(
        (
            instruction(0x85, value=RANDOM),  # call
            instruction(0x94, value=1000),  # w0 %= 1000
            instruction(0xA6, 2, per_mille),  # if w0 < per_mille, skip two
            instruction(0xB7, value=PASS),
            instruction(0x95),  # exit
            instruction(0xB7, value=DROP),
            instruction(0x95),
        )
    )


def bpf(command: int, attributes: bytes) -> int:
    """A file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    padded = ctypes.create_string_buffer(attributes, 128)
    made = libc.syscall(SYS_BPF, command, padded, len(padded))
    if made < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return made


def lose(device: str, per_mille: int) -> int:
    """For as long as the file descriptor that is returned is open."""
    code = program(per_mille)
    held, license_ = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    load = struct.pack(
        "<IIQQ", TYPE_XDP, len(code) // 8, ctypes.addressof(held), ctypes.addressof(license_)
    )
    loaded = bpf(PROG_LOAD, load)
    return bpf(
        LINK_CREATE, struct.pack("<IIII", loaded, socket.if_nametoindex(device), ATTACH_XDP, 0)
    )


def main() -> None:
    """Until the input ends."""
    try:
        lose(sys.argv[1], int(sys.argv[2]))
    except OSError as error:
        print(error, flush=True)
        return
    print("lossy", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
