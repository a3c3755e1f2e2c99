"""Runs a kernel compiled with sanitizers through sizes and bytes of all kinds, in its own process.

python sanitized_kernel.py LIBRARY ROUNDS
"""

import sys
from pathlib import Path

import numpy as np

from muster.protocol.errors import ProofError
from muster.toploc.chunks import cut
from muster.toploc.kernel import Kernel


def run_once(kernel: Kernel, random: np.random.Generator) -> None:
    """Prove and verify a sample of random shape and spread, with honest and with random proofs."""
    tokens, width = int(random.integers(1, 40)), int(random.choice([1, 2, 31, 32, 250, 2500]))
    lowest = int(random.integers(0, 0x7F80))
    spread = int(random.choice([1, 2, 100, 0x8000]))
    patterns = lowest + random.integers(0, spread, (tokens, width))
    hidden = (patterns & 0xFFFF).astype(np.uint16)
    topk = int(random.choice([1, 15, 16, 17, 128, 1000]))
    chunks = cut([hidden], chunk_tokens=int(random.choice([1, 8, 32])), topk=topk)
    try:
        proofs = kernel.build(chunks)
        kernel.verify(chunks, proofs)
        kernel.verify(chunks, [random.bytes(len(proof)) for proof in proofs])
        kernel.verify(chunks, [proof[:2] + bytes(len(proof) - 2) for proof in proofs])
    except ProofError:
        pass


if __name__ == "__main__":
    library, rounds = Path(sys.argv[1]), int(sys.argv[2])
    generator = np.random.default_rng(0)
    sanitized = Kernel(library)
    for _ in range(rounds):
        run_once(sanitized, generator)
    sys.stdout.write(f"{rounds} rounds\n")
