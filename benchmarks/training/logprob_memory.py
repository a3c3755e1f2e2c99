"""CPU seconds and extra memory of one way to compute log-probabilities, in a separate process.

    python -m benchmarks.training.logprob_memory request.json

The request holds {"form": "full" | "recompute" | "one_pass"}.

The work: log-probabilities of 2,048 tokens from hidden states of width 1024 and a head of 151,936
rows, bfloat16, and the gradients of both for a weighted sum. "full" is log_softmax of all logits,
as Hugging Face models are commonly trained. Extra memory is the growth of the peak resident size,
the gradients included.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from muster.trainer.learn.logprob import Head, token_logprobs, token_objective

TOKENS, WIDTH, VOCABULARY = 2048, 1024, 151_936


def peak_mb() -> float:
    """Return the largest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def backward(form: str, hidden: Tensor, weight: Tensor, targets: Tensor, slope: Tensor) -> Tensor:
    """Make the gradients of sum(slope * logp); returns the sum."""
    head = Head(weight, None)
    if form == "one_pass":
        total, *_ = token_objective(
            hidden, head, targets, 1.0, lambda logp, _entropy, rows: slope[rows] * logp
        )
    elif form == "recompute":
        total = (slope * token_logprobs(hidden, head, targets, 1.0)[0]).sum()
    else:
        logits = torch.nn.functional.linear(hidden, weight)
        logp = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        total = (slope * logp.gather(1, targets[:, None]).squeeze(1)).sum()
    total.backward()  # type: ignore[no-untyped-call]  # torch's stub
    return total.detach()


def main(form: str) -> None:
    """Measure one form and print it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).to(torch.bfloat16).requires_grad_()
    weight = torch.empty(VOCABULARY, WIDTH, dtype=torch.bfloat16).normal_(std=0.02).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    slope = torch.linspace(-1, 1, TOKENS)
    # Kernels are loaded and threads started before the clock and the peak are read.
    few = hidden[:2].detach().requires_grad_(), weight[:64].detach().requires_grad_()
    backward(form, *few, targets[:2] % 64, slope[:2])
    before, started = peak_mb(), time.process_time()
    total = backward(form, hidden, weight, targets, slope)
    seconds = time.process_time() - started
    assert hidden.grad is not None
    print(
        json.dumps(
            {
                "cpu_s": seconds,
                "extra_mb": peak_mb() - before,
                "sum": float(total),
                "norm": float(hidden.grad.float().norm()),
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["form"])
