"""Which policies have finite weights: each is looked at once, before it is loaded.

Workers make no work of another policy, and validators, jurors and auditors reject it. The published
bytes decide, which are the same everywhere; not what an engine makes of them on some machine.
"""

import asyncio
from collections import defaultdict
from pathlib import Path

from muster.protocol.errors import PolicyBroken
from muster.protocol.ids import Hash32, PolicyVersion
from muster.shardcast.delta_layout import require_finite


class FinitePolicies:
    """Remembers what was found of each policy."""

    def __init__(self) -> None:
        self.broken: dict[Hash32, PolicyBroken] = {}
        """Policies whose weights are not finite, by root."""
        self._finite: set[Hash32] = set()
        self._looking = defaultdict[Hash32, asyncio.Lock](asyncio.Lock)

    async def require(self, root: Hash32, version: PolicyVersion, folder: Path) -> None:
        """Raise PolicyBroken when a weight of a policy is not finite, and StorageError when they
        cannot be read; its verified files lie in `folder`.
        """
        async with self._looking[root]:
            if root in self._finite:
                return
            if root in self.broken:
                raise self.broken[root]
            try:
                await asyncio.to_thread(require_finite, folder, version)
            except PolicyBroken as error:
                self.broken[root] = error
                raise
            self._finite.add(root)
