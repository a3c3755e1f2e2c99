"""A whole network whose policy has Qwen3-0.6B's shape: 151,936 tokens, bfloat16, chat prompts.

    python -m benchmarks.inference.network [--weights adapter] [--device cpu] [--tokens 256]
        [--calibration FILE]

Every process is real: a trainer, a relay, an orchestrator, one worker, two validators. The run ends
when the trainer has taken all its steps on accepted work; the weights are random, so little is
learned. `sized_network_s` is the time from the worker's start to the end of the last step;
`sized_network_rejected` counts submissions of the honest worker that were not accepted, including
late ones. The detail has each step's figures and each version's download size. Limits are
calibrated first, on the device, unless --calibration names a file of them.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks import report
from benchmarks.gpu.network import run_to_the_end
from benchmarks.inference.size import EOS, VOCAB, write_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from muster.app.demo.keys import cast
from muster.app.demo.local_network import PARAMETERS, Network, NetworkOptions
from muster.protocol.messages import Verdict
from muster.shardcast.manifest import Manifest

PATIENCE_S = 900
"""Deadlines in seconds: two CPU cores generate a submission in minutes."""
PATIENT = {"outcome_deadline_s": PATIENCE_S, "unbonding_s": 3_600, "change_delay_s": 3_600}
"""Contract parameters that are long compared with that."""
WORDS = ("system", "user", "assistant", *"0123456789= \n")
"""Tokens of prompts."""
SHARE = 256
"""One token in this many ends a completion, and one is decoded as 1, the answer to every problem:
random weights are right when they write exactly one of the latter. Other tokens that do not occur
in prompts are decoded as nothing.
"""
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
RECIPE = """
name = "{weights} of 0.6B parameters, {tokens} tokens"

[sampling]
problems_per_submission = 2
samples_per_problem = 4
temperature = 1.0
max_new_tokens = {tokens}

[prompt]
form = "chat"
system = "0=0"

[training]
steps = {steps}
submissions_per_step = 2
max_async_level = 2
optimizer_steps = 1
learning_rate = 1e-5
warmup_steps = 0
kl_coefficient = 0.0
entropy_coefficient = 0.0
"""
ADAPTER = """
[adapter]
rank = 8
alpha = 16.0
"""


@dataclass(frozen=True, slots=True)
class Size:
    """Options of the measurement."""

    weights: str
    """"adapter" or "full"."""
    device: str
    tokens: int
    """Longest completion."""
    steps: int
    shape: str = "q06"
    """Name in `benchmarks.training.export.SHAPES`."""
    calibration: Path | None = None
    """File of the limits. If it does not exist, the limits are measured and written to it."""


class SizedNetwork(Network):
    """A network whose base model has a realistic size."""

    def __init__(self, folder: Path, size: Size) -> None:
        recipe = folder / "recipe.toml"
        text = RECIPE + (ADAPTER if size.weights == "adapter" else "")
        recipe.write_text(text.format(weights=size.weights, tokens=size.tokens, steps=size.steps))
        people = cast(0, honest=0, cheats=(), validators=2, jurors=0)
        options = NetworkOptions(
            folder,
            folder / "deployments",
            people,
            recipe,
            size.steps,
            0,
            rpc_port=0,
            lease_s=PATIENCE_S,
            parameters=PARAMETERS.model_copy(update=PATIENT),
        )
        environment = {
            **{f"MUSTER_{name}_DEVICE": size.device for name in ("WORKER", "VALIDATOR", "TRAINER")},
            **{f"MUSTER_{name}_DTYPE": "bfloat16" for name in ("WORKER", "VALIDATOR")},
            # All processes share one device.
            **{f"MUSTER_{name}_MEMORY_SHARE": "0.2" for name in ("WORKER", "VALIDATOR")},
            "MUSTER_ORCHESTRATOR_CALL_TIMEOUT_S": str(PATIENCE_S),
        }
        super().__init__(options, environment=environment)
        self._size = size

    async def prepare_model(self) -> None:
        """Write a model of random weights and its problems, and calibrate limits."""
        await asyncio.to_thread(write_chat_model, self.folder / "model", self._size.shape)
        for name, first, count in (("tasks", 1_000, 64), ("held-out", 2_000, 2)):
            rows = self.folder / f"{name}-rows.jsonl"
            rows.write_text("".join(problem(first + i) for i in range(count)))
            out = ["--out", str(self.folder / f"{name}.jsonl")]
            await self._run(f"{name}-import", ["tasks", "import", str(rows), *out])
        own, kept = self.folder / "calibration.json", self._size.calibration
        if kept is not None and kept.exists():
            shutil.copy(kept, own)
            return
        await self.calibrate()
        if kept is not None:
            shutil.copy(own, kept)

    async def calibrate(self) -> None:
        """Calibrate the limits of bfloat16 on the device."""
        await self._run(
            "calibrate",
            ["calibrate", "--model", str(self.folder / "model"), "--profile", "quick"],
            ["--task-set", str(self.folder / "tasks.jsonl"), "--dtype", "bfloat16"],
            ["--recipe", str(self.options.recipe), "--device", self._size.device],
            ["--out", str(self.folder / "calibration.json"), "--threads", "2"],
        )


def problem(number: int) -> str:
    """Return a row of a task set."""
    row = {
        "problem_id": str(number),
        "task_type": "exact_match",
        "prompt": f"{number}=",
        "gold_standard_solution": "1",
    }
    return json.dumps(row) + "\n"


def write_chat_model(folder: Path, shape: str, vocab: int = VOCAB) -> None:
    """Write a model of random weights whose tokenizer spells digits in the frame of a chat."""
    write_model(folder, shape, vocab=vocab)
    eos, few = vocab - (VOCAB - EOS), vocab // SHARE
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        settings["eos_token_id"] = list(range(eos - few + 1, eos + 1))
        (folder / name).write_text(json.dumps(settings))
    marks = {"<|endoftext|>": eos - 2, "<|im_start|>": eos - 1, "<|im_end|>": eos}
    texts = ["<unk>", *WORDS, *(f"one{i}" for i in range(few))]
    vocabulary = {text: i for i, text in enumerate(texts)} | marks
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join([*WORDS[:3], r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Sequence([decoders.Replace(Regex(r"one\d+"), "1"), decoders.Fuse()])
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<unk>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


async def measure(size: Size) -> tuple[dict[str, float], dict[str, Any]]:
    """Return figures and details of one run."""
    with tempfile.TemporaryDirectory(prefix="muster-sized-") as name:
        async with SizedNetwork(Path(name), size) as network:
            began = time.monotonic()
            run_id = await network.begin()
            prepared = time.monotonic()
            verdicts = await run_to_the_end(network, run_id)
            seconds = time.monotonic() - prepared
            log = (network.trainer_state / "metrics.jsonl").read_text().splitlines()
            store = network.folder / "origin" / "runs" / str(run_id)
            manifests = [
                Manifest.from_bytes(path.read_bytes()) for path in store.glob("*/manifest.json")
            ]
    metrics = {
        "sized_network_s": seconds,
        "sized_network_accepted": float(verdicts.count(Verdict.ACCEPTED)),
        "sized_network_rejected": float(len(verdicts) - verdicts.count(Verdict.ACCEPTED)),
    }
    return metrics, {
        "shape": size.shape,
        "weights": size.weights,
        "device": size.device,
        "tokens": size.tokens,
        "prepared_s": prepared - began,
        "others": [verdict.name for verdict in verdicts if verdict is not Verdict.ACCEPTED],
        "steps": [json.loads(line) for line in log],
        "versions": [_sizes(manifest) for manifest in sorted(manifests, key=lambda m: m.version)],
    }


def _sizes(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of a version, and of the download for a node that has the version before."""
    total = manifest.total_bytes
    return {
        "version": manifest.version,
        "bytes": total,
        "downloaded": manifest.delta.size if manifest.delta else total,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", choices=("adapter", "full"), default="adapter")
    parser.add_argument("--device", default="cpu", help="device, as torch names it")
    parser.add_argument("--tokens", type=int, default=256, help="longest completion")
    parser.add_argument("--steps", type=int, default=3, help="training steps")
    parser.add_argument("--shape", default="q06", help="shape of the model")
    parser.add_argument("--calibration", type=Path, help="file of the measured limits")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args(arguments)
    size = Size(args.weights, args.device, args.tokens, args.steps, args.shape, args.calibration)
    metrics, detail = asyncio.run(measure(size))
    on = "" if args.device == "cpu" else f", {torch.cuda.get_device_name(args.device)}"
    report.write(
        f"network-{args.weights}{'' if args.device == 'cpu' else '-gpu'}",
        metrics,
        detail,
        measured_on=report.machine() + on,
        folder=args.results,
    )
    return int(metrics["sized_network_rejected"] > 0)


if __name__ == "__main__":
    sys.exit(main())
