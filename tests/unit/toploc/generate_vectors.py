"""Writes vectors.json with the reference library; needs `toploc` built from source and torch.

pip install torch==2.13.0
pip install --no-build-isolation --no-binary toploc toploc==0.1.6
python tests/unit/toploc/generate_vectors.py
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import toploc
import torch
from toploc_cases import CASES, Case


def vector(case: Case) -> dict[str, Any]:
    rows = torch.from_numpy(case.patterns().view("int16")).view(torch.bfloat16)
    other = torch.from_numpy(case.perturbed().view("int16")).view(torch.bfloat16)
    arguments = {"decode_batching_size": case.chunk_tokens, "topk": case.topk, "skip_prefill": True}
    proofs = toploc.build_proofs_bytes(list(rows), **arguments)
    results = toploc.verify_proofs_bytes(other, proofs, **arguments)
    return {
        "label": case.label,
        "proofs": [proof.hex() for proof in proofs],
        "perturbed": [[r.exp_mismatches, r.mant_err_mean, r.mant_err_median] for r in results],
    }


if __name__ == "__main__":
    document = {
        "source": f"toploc {importlib.metadata.version('toploc')}, torch {torch.__version__}",
        "vectors": [vector(case) for case in CASES],
    }
    path = Path(__file__).with_name("vectors.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
