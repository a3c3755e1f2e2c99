"""The recipe: everything about a run that workers, validators and the trainer must agree on.

Its Keccak-256 is pinned on chain as `RunRegistry.recipeHash`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from muster.protocol.documents import Document, DocumentPart, Lines, Since
from muster.protocol.ids import Hash32, PolicyVersion, Step
from muster.protocol.mixture import Lengths, PartFilters, TasksRecipe
from muster.protocol.objective import ObjectiveRecipe
from muster.protocol.seeds import part_of

MAX_RECORDED_UNITS = (1 << 32) - 1
"""Most units that an outcome record can count."""


class SamplingRecipe(DocumentPart):
    """How rollouts are generated."""

    problems_per_submission: Annotated[int, Field(ge=1, le=4096)]
    """Groups of every ticket, and so of the submission that fills it."""
    samples_per_problem: Annotated[int, Field(ge=2, le=1024)]
    """Samples in one group (G in GRPO)."""
    temperature: Annotated[float, Field(gt=0, le=10)]
    """Softmax temperature T; top-p is 1."""
    max_new_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    """Limit of a completion, EOS included; also the unit cap per sample."""
    target_lengths: Lengths = ()
    """Length budgets in tokens, of which one is drawn per problem; empty for none."""

    @property
    def submission_samples(self) -> int:
        """Samples of a whole submission."""
        return self.problems_per_submission * self.samples_per_problem

    @property
    def max_units(self) -> int:
        """The most units that one submission can be worth."""
        return min(self.submission_samples * self.max_new_tokens, MAX_RECORDED_UNITS)


Markup = Annotated[str, Field(max_length=8_192), Lines()]
"""A text by the run's owner that is part of every prompt."""


class ChatFrame(DocumentPart):
    """The markup of a chat template around the texts of a prompt, and around a reply."""

    begin: Markup = ""
    """Before the first text: the system text if there is one, else the problem's."""
    middle: Markup = ""
    """Between the system text and the problem's; empty without a system text."""
    end: Markup = ""
    """After the problem's text, up to where the model begins."""
    reply_begin: Markup = ""
    """Between the end-of-sequence token of a turn and the text that replies to it."""
    reply_end: Markup = ""
    """After the text of the reply, up to where the model continues."""


class PromptRecipe(DocumentPart):
    """How a problem's text becomes the model's prompt, and where its answer begins."""

    form: Literal["plain", "chat"] = "plain"
    """The problem's text alone, or a message of a conversation."""
    system: Markup = ""
    """Chat: the system text; empty for the template's default."""
    thinking: Literal["template", "on", "off"] = "template"
    """Chat: the template's thinking switch; `template` leaves it as it is."""
    answer_after: Annotated[str, Field(max_length=64)] = ""
    """Token that ends a thought. Verifiers read the text after its last occurrence in a turn, and
    none if it does not occur; empty for the whole turn."""
    length_request: Literal["user", "system"] = "user"
    """Where the prompt states a length budget: after the problem's text, or after the system
    text."""
    reply_role: Literal["none", "user", "tool"] = "none"
    """Chat: role of the messages with which a task's environment replies; none without replies."""
    tools: Annotated[Literal["none", "python"], Since(3)] = "none"
    """Chat: functions that the template describes to the model: none, or the Python tool's."""
    template_hash: Annotated[str, Field(pattern="^(0x[0-9a-f]{64})?$")] = ""
    """Chat: Keccak-256 of the template's UTF-8 text. Creating a run fills it in, and refuses a
    model with another template if it is given."""
    frame: ChatFrame = ChatFrame()
    """Chat: the template's markup. Creating a run fills it in: nobody else runs the template."""

    @property
    def has_system(self) -> bool:
        """Whether prompts have a system text."""
        return bool(self.system) or self.length_request == "system"

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.form == "plain":
            chat = ("system", "thinking", "length_request", "reply_role", "tools", "template_hash")
            for name in chat:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is for form 'chat'")
        if self.tools != "none" and self.reply_role == "none":
            raise ValueError("tools need reply_role: whose message an output is")
        if self.thinking == "on" and not self.answer_after:
            raise ValueError("thinking 'on' needs answer_after, the token that ends a thought")
        if self.thinking == "off" and self.answer_after:
            raise ValueError("thinking 'off' leaves nothing for answer_after to wait for")
        return self


class ProofRecipe(DocumentPart):
    """TOPLOC parameters."""

    chunk_tokens: Annotated[int, Field(ge=1, le=1024)] = 32
    """Completion tokens per proof."""
    topk: Annotated[int, Field(ge=1, le=1024)] = 128
    """Values per proof."""


class OptimizerRecipe(DocumentPart):
    """How a gradient changes the weights. Defaults are INTELLECT-2's."""

    learning_rate: Annotated[float, Field(gt=0)] = 3e-7
    """AdamW learning rate after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 25
    """Training steps of linear warm-up."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the gradient's mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """AdamW's decay of the gradient's square."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.1
    """Gradient clip, L2 norm over all parameters."""


class TrainingRecipe(OptimizerRecipe, ObjectiveRecipe):
    """The training step. Defaults are INTELLECT-2's."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Training steps of the run; 0 until stopped."""
    submissions_per_step: Annotated[int, Field(ge=1)]
    """Accepted submissions that one training step consumes."""
    max_async_level: Annotated[int, Field(ge=0, le=64)] = 2
    """How many versions old a rollout's policy may be when it is trained on."""
    optimizer_steps: Annotated[int, Field(ge=1)] = 8
    """Optimiser steps per training step."""
    outer_learning_rate: Annotated[float, Field(gt=0, le=2)] = 0.7
    """With several trainer sites: the outer step's share of their mean movement (DiLoCo)."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """With several trainer sites: Nesterov momentum of the outer step."""

    def may_train_on(self, version: PolicyVersion, step: Step) -> bool:
        """Return whether a training step may use rollouts of a policy version. Step s starts from
        version s - 1, which is the newest version then.
        """
        return step - 1 - version <= self.max_async_level


class AdapterRecipe(DocumentPart):
    """What is trained: all weights, or a low-rank adapter over them (LoRA), without dropout."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rank of every update; 0 for no adapter: all weights are trained."""
    alpha: Annotated[float, Field(gt=0, le=1 << 20)] = 32.0
    """Updates are scaled by alpha / rank."""
    target_modules: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,128}$")], ...], Field(max_length=64)
    ] = ()
    """Linear layers that get an update, by the end of their names; empty for all except the
    head."""


class VerifierIdentity(DocumentPart):
    """The verifier that grades a task type; another verifier's scores may differ."""

    task_type: Annotated[str, Field(min_length=1, max_length=64)]
    """The task type."""
    name: Annotated[str, Field(min_length=1, max_length=128)]
    """The verifier's name."""
    version: Annotated[str, Field(min_length=1, max_length=64)]
    """The verifier's version."""
    code_hash: Annotated[str, Field(pattern="^0x[0-9a-f]{64}$")]
    """Keccak-256 over the verifier's source and the versions of its dependencies."""


class FilterRecipe(PartFilters):
    """Which accepted rollouts are trained on. Groups without task advantage never are."""

    refill_submissions: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Accepted submissions that a training step may consume beyond its share to replace groups
    that were left out; 0 for none."""
    max_mismatch: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Largest distance between a sample's mean surprise and the mean entropy of the policy version
    that claims to have sampled it, in nats per token; 0 for any."""


class HardwareRecipe(DocumentPart):
    """Requirements on a node that leases work; 0 for none."""

    min_memory_mb: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Main memory, in MiB."""
    min_gpu_memory_mb: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Memory of its largest GPU, in MiB."""
    min_units_per_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Units per second from lease to upload, for the best of its first tickets."""


class BreakerRecipe(DocumentPart):
    """The circuit breaker: slashing pauses when too many independent workers fail one check."""

    max_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weighted share of failing workers at one check above which slashing pauses; 1 for never."""
    min_workers: Annotated[int, Field(ge=1, le=1 << 20)] = 3
    """Least number of workers that fail the check."""
    window_s: Annotated[int, Field(ge=1, le=1 << 32)] = 3600
    """Seconds of outcomes that count; outcomes before the last pause never do."""
    proven_after: Annotated[int, Field(ge=0, le=1 << 32)] = 8
    """With so many accepted submissions before the window a worker has full weight."""
    newcomer_weight: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Weight of a worker with fewer accepted submissions."""


@dataclass(frozen=True, slots=True)
class PartRules:
    """The rules for the problems of a part; in a run without parts, for all problems."""

    name: str
    """Name of the part; empty in a run without parts."""
    target_lengths: tuple[int, ...]
    """Length budgets in tokens; empty for none."""
    filters: PartFilters
    """Which of its rollouts are trained on."""


class Recipe(Document):
    """A run's recipe."""

    NAME: ClassVar[str] = "recipe"
    MAX_BYTES: ClassVar[int] = 64 * 1024

    schema_version: Annotated[int, Field(ge=1, le=4)] = 4
    """Version of this document's form."""
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the run, for people."""
    sampling: SamplingRecipe
    """How rollouts are generated."""
    tasks: Annotated[TasksRecipe, Since(3)] = TasksRecipe()
    """The parts of the task set that problems come from."""
    prompt: Annotated[PromptRecipe, Since(2)] = PromptRecipe()
    """How prompts are made."""
    proof: ProofRecipe = ProofRecipe()
    """How generation is proven."""
    training: TrainingRecipe
    """How the policy learns."""
    verifiers: Annotated[tuple[VerifierIdentity, ...], Field(max_length=64)] = ()
    """The verifiers by task type; creating a run fills them in. Verifiers not listed are not
    pinned."""
    allows_judge: bool = False
    """Whether the task set may hold problems whose grades validators cannot replay."""
    filters: FilterRecipe = FilterRecipe()
    """Which rollouts are trained on."""
    adapter: AdapterRecipe = AdapterRecipe()
    """Whether all weights or an adapter are trained."""
    hardware: HardwareRecipe = HardwareRecipe()
    """Requirements on nodes."""
    breaker: BreakerRecipe = BreakerRecipe()
    """When slashing pauses because many workers fail the same check."""
    min_software: Annotated[str, Field(pattern=r"^(\d{1,5}(\.\d{1,5}){0,3})?$")] = ""
    """Oldest version of this software that workers and validators may run; empty for any."""

    def rules_of(self, part: str = "") -> PartRules:
        """Return the rules of a part; for a name that the recipe does not have, the run's own
        rules.
        """
        lengths, filters = self.sampling.target_lengths, self.filters
        found = next((each for each in self.tasks.parts if each.name == part), None)
        if found is None:
            return PartRules("", lengths, filters)
        own = found.target_lengths
        return PartRules(part, lengths if own is None else own, found.filters or filters)

    def parts_of(self, seed: Hash32, step: Step) -> list[PartRules]:
        """Return the part of each problem of a ticket with this seed and step."""
        count, parts = self.sampling.problems_per_submission, self.tasks.parts
        if not parts:
            return [self.rules_of()] * count
        rules = [self.rules_of(part.name) for part in parts]
        weights = self.tasks.weights_at(step)
        return [rules[part_of(seed, problem, weights)] for problem in range(count)]

    @property
    def rules(self) -> list[PartRules]:
        """The rules of each part, in order; in a run without parts, one set for all problems."""
        return [self.rules_of(part.name) for part in self.tasks.parts] or [self.rules_of()]

    @property
    def skips_problems(self) -> bool:
        """Whether tickets skip problems that a policy version sets aside."""
        return any(rules.filters.pool_revisit for rules in self.rules)

    @property
    def longest_budget(self) -> int:
        """The largest length budget of any part, in tokens; -1 without budgets."""
        lengths = (length for rules in self.rules for length in rules.target_lengths)
        return max(lengths, default=-1)

    @model_validator(mode="after")
    def _only_budgets_are_asked_for(self) -> Self:
        if self.prompt.length_request == "system" and self.longest_budget < 0:
            raise ValueError("prompt.length_request 'system' needs sampling.target_lengths")
        return self

    @model_validator(mode="after")
    def _every_part_comes_up(self) -> Self:
        for part in self.tasks.parts:
            if not part.comes_up(self.training.steps):
                raise ValueError(
                    f"part {part.name!r} has weight 0 at every step of the run: leave it out, or "
                    "give it a weight at one of them"
                )
        return self

    @model_validator(mode="after")
    def _max_rl_divides_by_a_positive_mean(self) -> Self:
        training = self.training
        joint = self.longest_budget >= 0 and training.length_advantage == "joint"
        if training.advantage == "max_rl" and joint and training.length_reward == "exact":
            raise ValueError(
                "advantage 'max_rl' divides by the mean reward, which an exact length reward can "
                "make negative: set length_advantage to 'std' or 'mean', or length_reward to 'max'"
            )
        return self
