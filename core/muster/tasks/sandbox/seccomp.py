"""A filter of system calls that computing programs never need and attacks begin with.

No sockets (the network namespace does not cover all families), no tracing or reading of other
processes, no new namespaces or mounts, no kernel interfaces with a history of holes, no memory that
resource limits do not count. Everything else is allowed: the namespaces are the main protection,
and this filter is an additional one. A program cannot lower its priority either, because at a
deadline a busy machine must be told from a program that waits.
"""

import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); -1 if the call does not exist.
_DENIED = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "personality": (135, 92),
    "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "syslog": (103, 116), "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18), "vhangup": (153, 58), "settimeofday": (164, 170),
    "inotify_init": (253, -1), "inotify_init1": (294, 26),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
}  # fmt: skip
_CLONE = (56, 220)
_PRLIMIT = (302, 261)
_CLONE3 = 435
_NAMESPACE_FLAGS = 0x7E020080
"""CLONE_NEW* flags of all namespaces, including time."""
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program() -> bytes | None:
    """Return the filter in the kernel's format; None on an unsupported architecture."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    column = list(_ARCHITECTURES).index(machine)
    numbers = sorted(pair[column] for pair in _DENIED.values() if pair[column] >= 0)
    refuse = _ERRNO | errno.EPERM
    code = [
        _step(_LOAD, 4),
        _step(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, 0),
        _step(_AT_LEAST, _X32_BIT, 0, 1),
        _step(_RETURN, refuse),
        # clone3 has its flags in memory, where no filter sees them; without it the C library uses
        # clone.
        _step(_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in numbers:
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, refuse)]
    code += [
        # A program may set its own limits, but not those of its runner.
        _step(_EQUAL, _PRLIMIT[column], 0, 4),
        _step(_LOAD, 16),
        _step(_EQUAL, 0, 1, 0),
        _step(_RETURN, refuse),
        _step(_RETURN, _ALLOW),
        _step(_EQUAL, _CLONE[column], 0, 3),
        _step(_LOAD, 16),
        _step(_ANY_BIT, _NAMESPACE_FLAGS, 0, 1),
        _step(_RETURN, refuse),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
