"""The training objective: how samples become a gradient; in a recipe, fields of `[training]`.

Every loss has its own parameters; those that a document leaves out are filled in for its loss, so
that the pinned document states all of them. A parameter that the chosen loss ignores must keep its
default. The formulas are in docs/losses.md.
"""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from muster.protocol.documents import DocumentPart

LossName = Literal[
    "two_sided",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "ratio_clamp",
    "truncated_is",
    "masked_is",
    "dppo",
]
"""The losses that `muster.trainer.learn.losses` knows."""

AdvantageName = Literal["std", "mean", "leave_one_out", "max_rl"]
"""The advantages that `muster.trainer.learn.advantages` knows."""

LOSS_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "two_sided": {},
    "grpo": {"aggregation": "sequence"},
    "dr_grpo": {"aggregation": "constant", "advantage": "mean"},
    "dapo": {"clip_epsilon_high": 0.28},
    "gspo": {"aggregation": "sequence", "clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4},
    "cispo": {"clip_epsilon": 1.0, "clip_epsilon_high": 4.0},
    "ratio_clamp": {"ratio_high": 8.0},
    "truncated_is": {"ratio_high": 2.0},
    "masked_is": {"ratio_low": 0.5, "ratio_high": 5.0},
    "dppo": {},
}
"""Defaults of a loss that differ from those of the fields."""

SAMPLE_LOSSES: Final = frozenset({"gspo"})
"""Losses in which a token's loss depends on other tokens of its sample."""

_EPSILON_LOSSES = {"two_sided", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo"}
_USED_BY: Final[dict[str, set[str]]] = {
    "clip_epsilon": _EPSILON_LOSSES,
    "clip_epsilon_high": _EPSILON_LOSSES,
    "clip_delta": {"two_sided"},
    "ratio_low": {"masked_is"},
    "ratio_high": {"ratio_clamp", "truncated_is", "masked_is"},
}


class ObjectiveRecipe(DocumentPart):
    """Advantage, loss and regularisers. Defaults are INTELLECT-2's."""

    loss: LossName = "two_sided"
    """The policy loss."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """What the loss is a mean over, always of a whole optimiser step: all completion tokens; the
    tokens of each sample, then all samples; all samples, their sums divided by max_new_tokens."""
    clip_epsilon: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower clip of the ratio: 1 minus this; for dppo how far a token's probability may fall."""
    clip_epsilon_high: Annotated[float, Field(gt=0, le=1000)] = 0.2
    """Upper clip of the ratio: 1 plus this; for dppo how far a token's probability may rise.
    Without a default of the loss: clip_epsilon."""
    clip_delta: Annotated[float, Field(gt=1)] = 4.0
    """Upper bound of the ratio when the advantage is negative (two_sided)."""
    ratio_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Tokens with a smaller ratio are left out (masked_is)."""
    ratio_high: Annotated[float, Field(gt=1)] = 8.0
    """Bound of the ratio (ratio_clamp, truncated_is); tokens above are left out (masked_is)."""
    decoupled: bool = False
    """Whether the ratio is to the proximal policy, the weights at the start of the training step,
    and the behaviour policy only weighs the tokens (decoupled PPO)."""
    correction: Literal["truncate", "mask"] = "truncate"
    """What happens to a weight proximal / behaviour outside its bounds: it is bounded, or 0."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether that weight is a token's, or the product over its sample."""
    correction_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Lower bound of that weight."""
    correction_high: Annotated[float, Field(gt=1)] = 5.0
    """Upper bound of that weight."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term to the base model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = "k3"
    """Estimator of the KL term and its gradient."""
    drift_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-ratio to the behaviour policy."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the entropy bonus."""
    advantage: AdvantageName = "std"
    """Advantage of a reward: its difference from the group's mean, divided by the standard
    deviation (std); the difference alone (mean); the difference from the mean of the others
    (leave_one_out); the difference divided by the mean (max_rl)."""
    length_reward: Literal["exact", "max", "clip"] = "exact"
    """How a sample's length changes its reward; unused without target lengths."""
    length_alpha: Annotated[float, Field(ge=0)] = 0.0003
    """Reward per token of distance to the target (exact, max)."""
    length_delta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the reward at exactly the target (max)."""
    length_advantage: Literal["joint", "std", "mean"] = "joint"
    """Whether the length part is added to the reward (joint), or normalised separately and then
    added to the advantage of the task reward."""
    length_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the length part when it is normalised separately."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        """Fill in missing fields with the defaults of the chosen loss."""
        if not isinstance(value, dict):
            return value
        filled = {**LOSS_DEFAULTS.get(str(value.get("loss", "two_sided")), {}), **value}
        if "clip_epsilon" in filled:
            filled.setdefault("clip_epsilon_high", filled["clip_epsilon"])
        return filled

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        for name, losses in _USED_BY.items():
            self._refuse_unused(name, self.loss in losses, f"loss {self.loss!r}")
        for name in ("correction", "correction_level", "correction_low", "correction_high"):
            self._refuse_unused(name, self.decoupled, "an objective that is not decoupled")
        self._refuse_unused(
            "length_delta", self.length_reward == "max", f"length_reward {self.length_reward!r}"
        )
        self._refuse_unused(
            "length_weight", self.length_advantage != "joint", "length_advantage 'joint'"
        )
        if self.loss == "two_sided" and self.clip_delta <= 1 + self.clip_epsilon_high:
            raise ValueError(f"clip_delta {self.clip_delta} must exceed 1 + clip_epsilon_high")
        if self.loss in SAMPLE_LOSSES and self.aggregation != "sequence":
            raise ValueError(
                f"aggregation {self.aggregation!r} with loss {self.loss!r}: its ratio is a "
                "sample's, so long samples would count more; set aggregation to 'sequence'"
            )
        return self

    def _refuse_unused(self, name: str, used: bool, where: str) -> None:
        value, default = getattr(self, name), type(self).model_fields[name].default
        if not used and value != default:
            raise ValueError(f"{name} {value!r} has no effect with {where}: leave it at {default}")
