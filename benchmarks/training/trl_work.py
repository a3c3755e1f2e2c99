"""The work that Muster and TRL share in benchmarks: a model, prompts, random lengths."""

import json
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import HERE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TRL = [str(HERE / ".envs/trl/bin/python"), "-m", "benchmarks.training.trl_reference"]
VOCABULARY = 512
EOS, PAD = 1, 0
PROMPTS, GROUP, PROMPT_TOKENS = 4, 8, 32
SHORTEST, LONGEST = 8, 96


def build_model(folder: Path) -> Path:
    """Write the model: Qwen3, 4 layers of width 256, 3.28 M parameters, words as tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def draw_step(seed: int, *, is_fixed: bool) -> list[list[dict[str, list[int]]]]:
    """Return the groups of a step: prompts of 32 tokens, completions that end in EOS.

    Lengths are lognormal (median 28, sigma 0.6) within 8 to 96, or all 96.
    """
    rng = random.Random(seed)
    groups = []
    for _ in range(PROMPTS):
        prompt = [rng.randrange(2, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        lengths = [LONGEST if is_fixed else draw_length(rng) for _ in range(GROUP)]
        groups.append(
            [
                {
                    "prompt": prompt,
                    "completion": [*(rng.randrange(2, VOCABULARY) for _ in range(n - 1)), EOS],
                }
                for n in lengths
            ]
        )
    return groups


def draw_length(rng: random.Random, median: int = 28, longest: int = LONGEST) -> int:
    """Return a lognormal length, sigma 0.6, within bounds."""
    return min(longest, max(SHORTEST, round(math.exp(rng.gauss(math.log(median), 0.6)))))


class Side:
    """A process that takes a step on request, and reports its CPU seconds."""

    said: list[dict[str, Any]]
    """Its other output, parsed from lines of JSON."""

    def __init__(self, command: list[str], request: dict[str, Any], scratch: Path) -> None:
        scratch.mkdir(exist_ok=True)
        path = scratch / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        self.said = []
        self._process = subprocess.Popen(
            [*command, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def step(self) -> float:
        """Return the CPU seconds of the next step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("step_s "):
                return float(line.split()[1])
            if line.startswith('{"'):
                self.said.append(json.loads(line))
        raise SystemExit(
            f"error: this command ended: {self._process.args!r}; run it by hand to see why"
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def measured_apart(command: list[str], request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Measure in a separate process; return its last line of output, as JSON."""
    path = scratch / "request.json"
    path.write_text(json.dumps(request), encoding="utf-8")
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[1:]} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
