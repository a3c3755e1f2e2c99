"""The command line that starts a program in the sandbox, layer by layer."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from muster.tasks.sandbox.limits import Limits

RUNNER = Path(__file__).with_name("runner.py")
"""What runs inside."""
_TMP_BYTES = 16 << 20
# Joins its groups, then becomes what it was given; "--" ends the groups.
_JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs that the sandbox is made of."""

    bubblewrap: str
    """Path of `bwrap`."""
    setpriv: str | None
    """Path of `setpriv`; needed by root only."""
    prlimit: str
    """Path of `prlimit`."""
    python: str
    """Path of a Python that every user can read."""
    python_version: str
    """Its major and minor version."""
    options: frozenset[str]
    """Which options bubblewrap has."""


@cache
def find_tools() -> Tools | str:
    """Return the tools, or why there is no sandbox here."""
    if not sys.platform.startswith("linux"):
        return f"the sandbox needs Linux, this is {sys.platform}"
    found = {name: shutil.which(name) for name in ("bwrap", "prlimit", "setpriv")}
    bubblewrap, prlimit = found["bwrap"], found["prlimit"]
    if bubblewrap is None:
        return "bubblewrap is not installed (Debian, Ubuntu: apt-get install bubblewrap)"
    if prlimit is None or (os.geteuid() == 0 and found["setpriv"] is None):
        return "prlimit and setpriv of util-linux are not installed"
    python = next((path for path in _pythons() if _is_readable_by_all(Path(path))), None)
    if python is None:
        return "there is no Python that every user can read, such as /usr/bin/python3"
    return Tools(
        bubblewrap,
        found["setpriv"],
        prlimit,
        python,
        _said_by(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"),
        frozenset(word for word in _said_by(bubblewrap, "--help").split() if word[:2] == "--"),
    )


def _pythons() -> list[str]:
    return [os.path.realpath(sys.executable), os.path.realpath("/usr/bin/python3")]


def _is_readable_by_all(path: Path) -> bool:
    try:
        modes = [folder.stat().st_mode for folder in (path, *path.parents)]
    except OSError:
        return False
    return all(mode & 0o5 == 0o5 for mode in modes)


def _said_by(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def sandbox_command(
    tools: Tools, limits: Limits, *, user: int | None, groups: list[Path], filter_fd: int | None
) -> list[str]:
    """Return the command that runs the runner in the sandbox."""
    command = []
    if groups:
        command += ["/bin/sh", "-c", _JOIN, "sh", *map(str, groups), "--"]
    if user is not None:
        assert tools.setpriv is not None
        command += [tools.setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        command += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    command += _prlimit(tools, limits, is_counted=user is not None)
    command += _bubblewrap(tools, filter_fd)
    return [*command, tools.python, "-s", "-S", "-B", "-c", RUNNER.read_text()]


def _devices() -> list[str]:
    """Return the devices that programs may have, without what is only called like one: a file that
    took the place of /dev/null would be one that all sandboxes share and write to.
    """
    numbers = {"/dev/null": (1, 3), "/dev/zero": (1, 5), "/dev/urandom": (1, 9)}
    return [path for path, number in numbers.items() if _device_number(path) == number]


def _device_number(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    is_device = stat.S_ISCHR(found.st_mode)
    return (os.major(found.st_rdev), os.minor(found.st_rdev)) if is_device else None


def _prlimit(tools: Tools, limits: Limits, *, is_counted: bool) -> list[str]:
    values = {
        "as": limits.memory_bytes,
        "fsize": limits.file_bytes,
        "nofile": 64,
        "core": 0,
        "cpu": limits.total_cpu_s,
        "memlock": 0,
        "msgqueue": 0,
        "sigpending": 64,
    }
    if is_counted:  # else the limit would count what the user runs besides; the runner sets it
        values["nproc"] = limits.processes
    return [tools.prlimit, *(f"--{name}={value}:{value}" for name, value in values.items())]


def _bubblewrap(tools: Tools, filter_fd: int | None) -> list[str]:
    command = [tools.bubblewrap, "--unshare-user", "--unshare-ipc", "--unshare-pid"]
    command += ["--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if "--disable-userns" in tools.options:
        command += ["--disable-userns"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    command += ["--setenv", "PATH", "/usr/bin", "--setenv", "LANG", "C.UTF-8"]
    command += ["--setenv", "HOME", "/tmp", "--setenv", "PYTHONHASHSEED", "0"]
    command += ["--hostname", "sandbox", "--uid", "1000", "--gid", "1000"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64", "lib32", "bin"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    if not tools.python.startswith("/usr/"):
        prefix = str(Path(tools.python).parent.parent)
        command += ["--ro-bind", prefix, prefix]
    for device in _devices():
        command += ["--dev-bind", device, device]
    # No /proc: it shows more than any program needs.
    if "--size" in tools.options:
        command += ["--size", str(_TMP_BYTES)]
    command += ["--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return [*command, "--"]
