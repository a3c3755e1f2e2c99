"""Tokens a second of vLLM by itself, run by the Python of vLLM's environment.

    plain_vllm.py MODEL DEVICE SAMPLES PROMPT TOKENS CALLS

vLLM's own sampler at temperature 1, without proofs; the other options are those of Muster's engine.
Prints a line per call, the first of which warms up.
"""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    """Generate, and print how fast."""
    model, device, *numbers = sys.argv[1:]
    samples, prompt, tokens, calls = map(int, numbers)
    is_cpu = device == "cpu"
    # Models allow 40,960 positions; the cache must have room for at least one sample.
    room = {"kv_cache_memory_bytes": 1 << 30} if is_cpu else {"gpu_memory_utilization": 0.9}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        enforce_eager=is_cpu,
        max_model_len=prompt + tokens,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        async_scheduling=False,
        disable_log_stats=True,
        **room,
    )
    how = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for _ in range(calls):
        asked = [{"prompt_token_ids": list(range(10, 10 + prompt))} for _ in range(samples)]
        began = time.perf_counter()
        llm.generate(asked, how, use_tqdm=False)
        print(samples * tokens / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main()
