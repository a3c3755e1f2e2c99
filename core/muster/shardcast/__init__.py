"""Broadcast of policy weights: manifest, chunk store, origin, relay, fetcher.

`publish`, `Relay` and `fetch` are all that is needed to broadcast any large file. Roots, domains
and addresses come as arguments: the chain's client is a sibling that is not imported here.
"""

from muster.shardcast.connections import ServerLimits
from muster.shardcast.digests import file_digest, state_hash
from muster.shardcast.fetcher import Fetcher
from muster.shardcast.manifest import ChunkSpan, Manifest, ManifestFile
from muster.shardcast.relay import Relay
from muster.shardcast.room import Admission, Room, RoomRefusal
from muster.shardcast.server import ShardServer
from muster.shardcast.simple import fetch, publish
from muster.shardcast.store import ChunkStore
from muster.shardcast.trust import Trust, TrustedRoot

__all__ = [
    "Admission",
    "ChunkSpan",
    "ChunkStore",
    "Fetcher",
    "Manifest",
    "ManifestFile",
    "Relay",
    "Room",
    "RoomRefusal",
    "ServerLimits",
    "ShardServer",
    "Trust",
    "TrustedRoot",
    "fetch",
    "file_digest",
    "publish",
    "state_hash",
]
