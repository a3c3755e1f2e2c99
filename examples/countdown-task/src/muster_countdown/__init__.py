"""The countdown task: reach a number by arithmetic over given numbers."""

from muster_countdown.task_set import make_task_set
from muster_countdown.verifier import VERIFIER

__all__ = ["VERIFIER", "make_task_set"]
