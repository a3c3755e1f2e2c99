"""Tasks: what a model is asked, and how its answers are graded.

A run pins one task set on chain by its Merkle root. Workers, validators and the trainer grade with
the same verifiers, which third parties add by entry point. Nothing here knows models, tokens or the
chain.
"""

from muster.tasks.document import document_root, root_of_bytes
from muster.tasks.problem import Problem
from muster.tasks.registry import (
    check_task_set,
    dialogue_of,
    identities,
    require_pinned,
    runs_completions,
    verify,
    verify_all,
)
from muster.tasks.task_set import TaskSet
from muster.tasks.verifier import Done, Environment, Grade, Graded, Reply, Undecided, Verifier

__all__ = [
    "Done",
    "Environment",
    "Grade",
    "Graded",
    "Problem",
    "Reply",
    "TaskSet",
    "Undecided",
    "Verifier",
    "check_task_set",
    "dialogue_of",
    "document_root",
    "identities",
    "require_pinned",
    "root_of_bytes",
    "runs_completions",
    "verify",
    "verify_all",
]
