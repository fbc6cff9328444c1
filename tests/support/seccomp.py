"""Makes the kernel refuse chosen system calls to this process, for good: for child processes only.

No root is needed. The filter is classic BPF: load the number of the call, compare, answer.
"""

from __future__ import annotations

import ctypes
import platform
import struct

__all__ = ["FORBID_RINGS", "refuse"]

FORBID_RINGS = """
import errno, sys
from seccomp import refuse
if not refuse("io_uring_setup", errno=errno.EPERM):
    print("no seccomp")
    sys.exit(0)
"""
"""How the program of a child process begins that may make no rings."""

NUMBERS = {
    "x86_64": {
        "read": (17, 295, 327),
        "write": (18, 296, 328),
        "fallocate": (285,),
        "seccomp": (317,),
    },
    "aarch64": {
        "read": (67, 69, 286),
        "write": (68, 70, 287),
        "fallocate": (47,),
        "seccomp": (277,),
    },
}
"""Numbers of pread64, preadv and preadv2, of pwrite64, pwritev and pwritev2, and so on."""
SAME_EVERYWHERE = {"io_uring_setup": (425,), "io_uring_enter": (426,), "io_uring_register": (427,)}

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_TSYNC = 1
LOAD_NUMBER, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ANSWER_ERRNO, ALLOW = 0x0005_0000, 0x7FFF_0000


class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def refuse(*calls: str, errno: int) -> bool:
    """Answer ``errno`` to these calls from now on, in all threads; ``False`` if that cannot be."""
    numbers = NUMBERS.get(platform.machine(), {}) | SAME_EVERYWHERE
    if "seccomp" not in numbers:
        return False
    refused = [number for call in calls for number in numbers[call]]
    code = [(LOAD_NUMBER, 0, 0, 0)]
    for index, number in enumerate(refused):
        # Jump over the comparisons that follow and over ALLOW.
        code.append((IF_EQUAL, len(refused) - index, 0, number))
    code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ANSWER_ERRNO | errno)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = Program(len(code), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    (number,) = numbers["seccomp"]
    arguments = (SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(program))
    return bool(libc.syscall(number, *arguments) == 0)
