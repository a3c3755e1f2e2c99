"""TRL's side of the benchmarks; runs in its own environment.

    benchmarks/.envs/trl/bin/python -m benchmarks.training.trl_reference request.json

Takes a step for every line of input and prints its CPU seconds as `step_s SECONDS`.

* "train": GRPOTrainer takes the steps of the request. It gets their completions instead of
  generating any, so both sides train on the same tokens. CPU seconds of a step without the time in
  `_prepare_inputs`: generation, rewards and advantages are not counted.
* "sft": SFTTrainer takes the steps of the request, rows padded to the longest of a micro-batch. It
  prints the log-probabilities of the first step's rows before any step, and each step's loss.
* "sample": GRPOTrainer's own generation, CPU seconds of `_generate_single_turn`. A logits processor
  ends every completion at its length, and not before.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

EOS = 1


class Measured(GRPOTrainer):  # type: ignore[misc]  # TRL is not installed beside mypy
    """TRL's trainer with given completions; its parts are timed."""

    work: list[list[list[dict[str, list[int]]]]]
    prepare_s = 0.0
    sample_s = 0.0

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[Any, None, dict[str, Any]]:
        step = self.work[self.state.global_step]
        return [step[int(prompt) % len(step)][0]["prompt"] for prompt in prompts], None, {}

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        rows = [row for group in self.work[self.state.global_step] for row in group]
        waiting: dict[tuple[int, ...], list[list[int]]] = {}
        for row in rows:
            waiting.setdefault(tuple(row["prompt"]), []).append(row["completion"])
        return [waiting[tuple(ids)].pop(0) for ids in prompt_ids], None

    def _prepare_inputs(self, batch: Any) -> Any:
        started = time.process_time()
        inputs = super()._prepare_inputs(batch)
        self.prepare_s += time.process_time() - started
        return inputs


class Sampling(Measured):
    """TRL's trainer with its own generation, which is timed."""

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
        rows = [row for group in self.work[self.state.global_step] for row in group]
        self.model.lengths = [len(row["completion"]) for row in rows]
        started = time.process_time()
        found = GRPOTrainer._generate_single_turn(self, prompt_ids, *rest, **named)
        self.sample_s += time.process_time() - started
        assert sorted(map(len, found[0])) == sorted(self.model.lengths)
        return found


class EndAt(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed there
    """EOS at each row's length, never before."""

    def __init__(self, lengths: list[int], prompt: int) -> None:
        self.lengths, self.prompt = torch.tensor(lengths), prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores that forbid EOS before a row's length and allow nothing else there."""
        last = self.lengths <= ids.shape[1] - self.prompt + 1
        scores[:, EOS] = -torch.inf
        scores[last] = -torch.inf
        scores[last, EOS] = 0.0
        return scores


class SftClock(TrainerCallback):  # type: ignore[misc]  # transformers is not typed there
    """Waits for a line of input before each step; prints the step's time and loss."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        sys.stdin.readline()
        self.started = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        self.step_s = time.process_time() - self.started

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Print the step's loss."""
        if "loss" in logs:
            print(json.dumps({"loss": logs["loss"]}), flush=True)
            print(f"step_s {self.step_s}", flush=True)


def tune(request: dict[str, Any], folder: str) -> None:
    """Fine-tune on the rows of a request; the untrained model is measured first."""
    steps, training = request["work"], request["training"]
    rows = [row for step in steps for row in step]
    config = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=request["micro"],
        gradient_accumulation_steps=len(steps[0]) // request["micro"],
        max_steps=len(steps),
        max_length=None,
        train_sampling_strategy="sequential",
        bf16=False,
        learning_rate=training["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=training["adam_beta2"],
        max_grad_norm=training["max_grad_norm"],
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        completion_only_loss=True,
    )
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(request["model"]),
        train_dataset=Dataset.from_list(
            [
                {
                    "input_ids": row["prompt"] + row["completion"],
                    "completion_mask": [0] * len(row["prompt"]) + [1] * len(row["completion"]),
                }
                for row in rows
            ]
        ),
        callbacks=[SftClock()],
    )
    print(json.dumps({"logprobs": [logprobs(trainer.model, row) for row in steps[0]]}), flush=True)
    trainer.train()


@torch.no_grad()
def logprobs(model: Any, row: dict[str, list[int]]) -> list[float]:
    """Return the log-probabilities of a completion by the forward pass that TRL trains with."""
    tokens = torch.tensor([row["prompt"] + row["completion"]])
    labels = tokens.clone()
    labels[:, : len(row["prompt"])] = -100
    found = model(input_ids=tokens, labels=labels, use_cache=False, fused_lm_head=True).log_probs
    values: list[float] = found.flatten()[-len(row["completion"]) :].tolist()
    return values


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not typed there
    """Waits for a line of input before each step, and prints the step's time."""

    trainer: Measured

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        sys.stdin.readline()
        self.trainer.prepare_s, self.trainer.sample_s = 0.0, 0.0
        self.started = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        trained_s = time.process_time() - self.started - self.trainer.prepare_s
        print(f"step_s {self.trainer.sample_s or trained_s}", flush=True)


def main(path: str) -> None:
    """Take the steps that a request asks for."""
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    torch.set_num_threads(1)
    if request["what"] == "sft":
        with tempfile.TemporaryDirectory() as folder:
            tune(request, folder)
        return
    groups, group = len(request["work"][0]), len(request["work"][0][0])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=request["micro"],
            gradient_accumulation_steps=groups * group // request["micro"],
            num_generations=group,
            max_completion_length=request["longest"],
            max_steps=len(request["work"]),
            bf16=request["dtype"] == "bfloat16",
            learning_rate=1e-6,
            temperature=1.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            gradient_checkpointing=False,
            shuffle_dataset=False,
        )
        model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
        clock = Clock()
        trainer = (Sampling if request["what"] == "sample" else Measured)(
            model=model,
            reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            args=config,
            processing_class=AutoTokenizer.from_pretrained(request["model"]),
            train_dataset=Dataset.from_dict(
                {"prompt": [str(i) for i in range(groups * len(request["work"]))]}
            ),
            callbacks=[clock],
        )
        trainer.work, clock.trainer = request["work"], trainer
        if request["what"] == "sample":
            own = model.generate

            def generate(**options: Any) -> Any:
                prompt = options["input_ids"].shape[1]
                ends = LogitsProcessorList([EndAt(model.lengths, prompt)])
                return own(**options, logits_processor=ends)

            model.generate = generate
        trainer.train()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(sys.argv[1])
