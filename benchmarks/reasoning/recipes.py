"""The lesson's recipes: of its fine-tunings, and of its two runs.

All of them show a model the same prompts: a chat, with its thought switched on.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.reasoning.exercises import BUDGETS

PROMPT = """
[prompt]
form = "chat"
thinking = "on"
answer_after = "</think>"
"""
LONGEST = 72
"""Tokens of a completion at most."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a submission has."""

    problems: int
    samples: int
    """Of each problem."""

    @property
    def text(self) -> str:
        """The recipe's `[sampling]`."""
        return f"""
[sampling]
problems_per_submission = {self.problems}
samples_per_problem = {self.samples}
temperature = 1.0
max_new_tokens = {LONGEST}
"""


TASKS = f"""
[[tasks.parts]]
name = "math"
weight = 3
target_lengths = {list(BUDGETS)}

[[tasks.parts]]
name = "code"
weight = 2

[[tasks.parts]]
name = "words"
weight = 3
"""


def fine_tuning(name: str, *, trained: str, epochs: int, batch_tokens: int, rate: float) -> str:
    """Return the recipe of a fine-tuning; `trained` is "all" or "completion"."""
    return f"""
name = "{name}"

[rows]
trained = "{trained}"
max_tokens = 192
{PROMPT}
[training]
epochs = {epochs}
batch_tokens = {batch_tokens}
learning_rate = {rate}
warmup_steps = 20
final_rate = 0.1
weight_decay = 0.01

[sampling]
max_new_tokens = {LONGEST}
"""


def data_run(sampling: Sampling, submissions: int) -> str:
    """Return the recipe of a run that makes data: one step, which nobody trains."""
    return f"""
name = "lesson: a data run"
{sampling.text}{PROMPT}{TASKS}
[training]
steps = 1
submissions_per_step = {submissions}
"""


def reinforcement(sampling: Sampling, steps: int, submissions: int) -> str:
    """Return the recipe of the reinforcement on the mixture.

    The length part is normalised apart from the task reward, as in `example-length`.
    """
    return f"""
name = "lesson: reinforcement"
{sampling.text}{PROMPT}{TASKS}
[training]
steps = {steps}
submissions_per_step = {submissions}
max_async_level = 1
optimizer_steps = 1
learning_rate = 4e-4
warmup_steps = 2
weight_decay = 0.0
max_grad_norm = 1.0
kl_coefficient = 0.0
entropy_coefficient = 0.0
length_reward = "exact"
length_advantage = "std"
length_alpha = 0.01
"""


def write(folder: Path, name: str, text: str) -> Path:
    """Write a recipe and return its path."""
    path = folder / f"{name}.toml"
    path.write_text(text.lstrip(), encoding="utf-8")
    return path
