"""Task sets that can be made here: the toy families, and those that installed packages announce.

A package adds one with an entry point in the group `muster.task_sets`:

    [project.entry-points."muster.task_sets"]
    my_set = "my_package:make_task_set"

which is a function of (count, seed) that returns a `TaskSet`, the same for the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version

from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import TaskError
from muster.tasks import toys
from muster.tasks.task_set import TaskSet
from muster.tasks.verifier import source_files

ENTRY_POINT_GROUP = "muster.task_sets"
"""Where packages announce task sets."""


@dataclass(frozen=True, slots=True)
class SetMaker:
    """Makes a task set of any size."""

    name: str
    """What it is called."""
    make: Callable[[int, int], TaskSet]
    """Returns so many problems for a seed; raises TaskError when there are not as many."""
    package: str
    """The distribution that brings it."""
    version: str
    """That distribution's version."""
    module: str
    """The module it is in."""

    @property
    def code_hash(self) -> str:
        """The Keccak-256 over the sources of its top-level package, or of its module here."""
        name = self.module if self.module.startswith("muster.") else self.module.split(".")[0]
        return hex0x(keccak(b"".join(keccak(data) for data in source_files(name))))


_TOYS = {"arithmetic": toys.make_arithmetic, "reverse": toys.make_reverse, "sort": toys.make_sort}


@cache
def installed_makers() -> Mapping[str, SetMaker]:
    """Return the task sets that can be made in this installation, by name."""
    return load_makers(entry_points(group=ENTRY_POINT_GROUP))


def maker_of(name: str) -> SetMaker:
    """Return what makes a task set; raises TaskError when nothing does."""
    known = installed_makers()
    if name not in known:
        raise TaskError(
            f"nothing here makes a task set {name!r}",
            hint="install the package that brings it; there are: " + ", ".join(sorted(known)),
        )
    return known[name]


def load_makers(points: Iterable[EntryPoint]) -> dict[str, SetMaker]:
    """Return the toy families and the makers of the entry points, by name.

    Raises TaskError when two have one name, or one cannot be imported.
    """
    own = version("muster-rl")
    found = {
        name: SetMaker(name, make, "muster-rl", own, toys.__name__) for name, make in _TOYS.items()
    }
    for point in points:
        if point.name in found:
            raise TaskError(
                f"two task sets are called {point.name!r}, one is {point.value}",
                hint="uninstall one of the packages",
            )
        found[point.name] = _load(point)
    return found


def _load(point: EntryPoint) -> SetMaker:
    try:
        make = point.load()
    except (ImportError, AttributeError) as error:
        raise TaskError(f"cannot load the task set {point.value}: {error}") from error
    if not callable(make):
        raise TaskError(f"{point.value} is no function of count and seed")
    package, release = (point.dist.name, point.dist.version) if point.dist else ("?", "0")
    return SetMaker(point.name, make, package, release, point.module)
