"""Sizes and times both sides of the API hold each other to (docs/protocol.md section 11)."""

from __future__ import annotations

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Largest submission file: `muster.protocol.rollouts.MAX_FILE_BYTES`, without its pyarrow."""
MAX_JSON_BYTES = 256 * 1024
"""Largest JSON body of a request."""
MAX_RECORDS_BYTES = 2 * 1024 * 1024
"""Largest body of an outcomes post: 4096 records of 56 bytes as hexadecimal fit four times."""
MAX_FINGERPRINTS_BODY_BYTES = 8 * 1024 * 1024
"""Largest body that shows fingerprints: of 8 million completion tokens, as hexadecimal."""
MAX_HEADER_JSON_BYTES = 2 * 1024
"""Largest `x-muster-submission` header."""
DOWNLOAD_BYTES = 4 * 1024 * 1024
"""How much of a large document a client asks for at a time."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Largest answer a client reads."""
MAX_SMALL_ANSWER_BYTES = 64 * 1024
"""Largest answer that is one ticket, one state or one word."""
MAX_NETWORK_CHARS = 32 * 1024
"""Longest document that says where a run's network is."""
MAX_RELAYS = 64
"""Relays that an orchestrator may name."""

REQUEST_VALIDITY_S = 60
"""A signed request is refused when it was issued longer ago than this."""
REQUEST_FUTURE_S = 30
"""A signed request is refused when it claims to be issued further ahead than this."""
NONCE_LIFE_S = 300
"""How long a signer's nonces are remembered: longer than any request stays valid."""
