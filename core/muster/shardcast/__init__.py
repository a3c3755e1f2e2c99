"""Broadcast of policy weights: manifest, chunk store, origin, relay, fetcher.

`publish`, `Relay` and `fetch` are enough to broadcast any large file. Roots, domains and addresses
come as arguments: the chain's client is not imported here.
"""

from muster.shardcast.connections import ServerLimits as ServerLimits
from muster.shardcast.digests import file_digest as file_digest, state_hash as state_hash
from muster.shardcast.fetcher import Fetcher as Fetcher
from muster.shardcast.manifest import (
    ChunkSpan as ChunkSpan,
    Manifest as Manifest,
    ManifestFile as ManifestFile,
)
from muster.shardcast.relay import Relay as Relay
from muster.shardcast.room import (
    FileRoom as FileRoom,
    NamedOnChain as NamedOnChain,
    RoomRefusal as RoomRefusal,
)
from muster.shardcast.server import ShardServer as ShardServer
from muster.shardcast.simple import fetch as fetch, publish as publish
from muster.shardcast.store import (
    ChunkStore as ChunkStore,
    PublishedOtherwise as PublishedOtherwise,
)
from muster.shardcast.trust import Trust as Trust, TrustedRoot as TrustedRoot
