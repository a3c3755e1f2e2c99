"""Writes vectors/trl_losses.json: losses and gradients as TRL 1.16.0 computes them.

    make benchmarks/.envs/trl/.installed
    benchmarks/.envs/trl/bin/python tests/conformance/generate_trl.py

Runs in TRL's environment, without this project. `GRPOTrainer._compute_loss` is called as it is, on
a trainer that has no model: its log-probabilities and entropies are the vectors' own.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import GRPOConfig, GRPOTrainer

VERSION = "1.16.0"
LENGTHS = (5, 1, 8, 3)
LONGEST = 10

DAPO: dict[str, Any] = {"loss_type": "dapo", "epsilon_high": 0.28}

# Their options, then the recipe's that mean the same.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"loss": "grpo"}),
    "grpo_two_sided": (
        {"loss_type": "grpo", "delta": 1.5},
        {"loss": "two_sided", "clip_delta": 1.5, "aggregation": "sequence"},
    ),
    "dapo_two_sided": (
        {"loss_type": "dapo", "delta": 1.5},
        {"loss": "two_sided", "clip_delta": 1.5},
    ),
    "bnpo": ({"loss_type": "bnpo"}, {"loss": "grpo", "aggregation": "token"}),
    "dapo": (DAPO, {"loss": "dapo"}),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": LONGEST}, {"loss": "dr_grpo"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        | {"epsilon": 3e-4, "epsilon_high": 4e-4},
        {"loss": "gspo"},
    ),
    "gspo_wide": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss": "gspo", "clip_epsilon": 0.2, "clip_epsilon_high": 0.2},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss": "cispo"}),
    "k3": (
        {**DAPO, "beta": 0.3, "use_bias_correction_kl": False},
        {"loss": "dapo", "kl_coefficient": 0.3},
    ),
    "k3_weighted": (
        {**DAPO, "beta": 0.3, "use_bias_correction_kl": True},
        {"loss": "dapo", "kl_coefficient": 0.3, "kl_estimator": "k3_weighted"},
    ),
    "entropy": ({**DAPO, "entropy_coef": 0.05}, {"loss": "dapo", "entropy_coefficient": 0.05}),
}
for level in ("token", "sequence"):
    for kind in ("truncate", "mask"):
        CASES[f"correction_{level}_{kind}"] = (
            {**DAPO, "vllm_importance_sampling_mode": f"{level}_{kind}"},
            {"loss": "dapo", "decoupled": True, "correction": kind}
            | {"correction_level": level, "correction_low": 0.5, "correction_high": 2.0},
        )


def make_inputs() -> dict[str, torch.Tensor]:
    """Return padded tensors [B, T] in float64, ratios from about 0.1 to 10."""
    generator = torch.Generator().manual_seed(11)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    logp = -normal(1.5).abs() - 0.05
    mask = torch.arange(shape[1])[None, :] < torch.tensor(LENGTHS)[:, None]
    inputs = {
        "logp": logp,
        "old": logp + normal(0.5),
        "sampler": logp + normal(0.6),
        "reference": logp + normal(0.5),
        "entropy": normal(1.0).abs(),
    }
    inputs = {name: (value * 1e4).round() / 1e4 * mask for name, value in inputs.items()}
    advantages = torch.tensor([1.2, -0.7, -0.9, 0.4], dtype=torch.float64)
    return inputs | {"mask": mask.long(), "advantages": advantages}


def make_trainer(options: dict[str, Any]) -> Any:
    """Return what `_compute_loss` reads of a trainer, with the configuration's own values."""
    corrects = "vllm_importance_sampling_mode" in options
    args = GRPOConfig(
        output_dir="unused", report_to=[], use_cpu=True, **{"epsilon_high": None, **options}
    )
    trainer = SimpleNamespace(
        args=args,
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        beta=args.beta,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high if args.epsilon_high is not None else args.epsilon,
        max_completion_length=args.max_completion_length,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=corrects,
        vllm_importance_sampling_correction=corrects,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=args.entropy_coef,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda tensor: tensor,
            gather_for_metrics=lambda tensor: tensor,
            reduce=lambda tensor, **_: tensor,
        ),
        _metrics={"eval": defaultdict(list)},
    )
    return trainer


def correction(inputs: dict[str, torch.Tensor], mode: str) -> torch.Tensor:
    """Return the weights old / sampler, as `_generate_and_score_completions` makes them inline."""
    difference = (inputs["old"] - inputs["sampler"]) * inputs["mask"]
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        return ratio.clamp(0.5, 2.0)
    return ratio.masked_fill((ratio < 0.5) | (ratio > 2.0), 0.0)


def run(options: dict[str, Any], inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return TRL's loss and its gradients."""
    trainer = make_trainer(options)
    logp = inputs["logp"].clone().requires_grad_()
    entropy = inputs["entropy"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logp, entropy, None)
    mask = inputs["mask"]
    batch = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": inputs["advantages"],
        "old_per_token_logps": inputs["old"],
        "ref_per_token_logps": inputs["reference"],
        "num_items_in_batch": mask.sum(),
    }
    mode = options.get("vllm_importance_sampling_mode")
    if mode:
        batch["importance_sampling_ratio"] = correction(inputs, mode)
    loss = GRPOTrainer._compute_loss(trainer, None, batch)
    by_logp, by_entropy = torch.autograd.grad(loss, [logp, entropy], allow_unused=True)
    return {
        "loss": float(loss.detach()),
        "by_logp": by_logp.tolist(),
        "by_entropy": None if by_entropy is None else by_entropy.tolist(),
    }


def main() -> None:
    """Write the vectors."""
    if trl.__version__ != VERSION:
        raise SystemExit(f"error: this is TRL {trl.__version__}, the vectors are of {VERSION}")
    inputs = make_inputs()
    cases = {
        name: {"recipe": recipe, "trl": options, **run(options, inputs)}
        for name, (options, recipe) in CASES.items()
    }
    document = {
        "made_by": f"trl {VERSION}",
        "longest": LONGEST,
        "inputs": {name: value.tolist() for name, value in inputs.items()},
        "cases": cases,
    }
    path = Path(__file__).parent / "vectors" / "trl_losses.json"
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
