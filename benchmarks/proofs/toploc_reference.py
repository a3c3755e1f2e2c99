"""The reference library's side of bench-toploc; runs in an environment of its own.

    python -m benchmarks.proofs.toploc_reference

Reads one JSON request per line, answers with one JSON line: what was timed, and what it returned.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import toploc
import torch

ARGUMENTS = {"decode_batching_size": 32, "topk": 128, "skip_prefill": True}


def load(path: str) -> torch.Tensor:
    """Return [tokens, hidden] in bfloat16."""
    return torch.from_numpy(np.load(path).view(np.int16)).view(torch.bfloat16)


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return CPU seconds of one call, over all threads, and its result."""
    # Verification sets the process's OpenMP threads to all cores.
    torch.set_num_threads(1)
    started = time.process_time()
    for _ in range(repeats):
        result = call()
    return (time.process_time() - started) / repeats, result


def main() -> None:
    """Serve requests until the input ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        hidden = load(asked["hidden"])
        repeats = asked["repeats"]
        # Both forms of input that the library takes; the benchmark quotes the faster.
        forms: dict[str, Any] = {"tensor": hidden, "list of rows": list(hidden)}
        answer: dict[str, Any] = {"build_s": {}, "verify_s": {}}
        for form, activations in forms.items():
            build = partial(toploc.build_proofs_bytes, activations, **ARGUMENTS)
            answer["build_s"][form], proofs = timed(build, repeats)
            verify = partial(toploc.verify_proofs_bytes, activations, proofs, **ARGUMENTS)
            answer["verify_s"][form], _ = timed(verify, repeats)
        other = load(asked["other"])
        results = toploc.verify_proofs_bytes(other, proofs, **ARGUMENTS)
        answer["proofs"] = [proof.hex() for proof in proofs]
        answer["results"] = [
            [r.exp_mismatches, r.mant_err_mean, r.mant_err_median] for r in results
        ]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
