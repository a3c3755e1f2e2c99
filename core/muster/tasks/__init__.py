"""Tasks: the problems of a model, and the grading of its answers.

A run pins one task set on chain by its Merkle root. Workers, validators and the trainer grade with
the same verifiers, which third parties add by entry point. Nothing here knows models, tokens or the
chain.
"""

from muster.tasks.document import (
    document_root as document_root,
    has_root as has_root,
    root_of_bytes as root_of_bytes,
)
from muster.tasks.problem import Problem as Problem
from muster.tasks.registry import (
    check_task_set as check_task_set,
    dialogue_of as dialogue_of,
    identities as identities,
    require_pinned as require_pinned,
    runs_completions as runs_completions,
    verify as verify,
    verify_all as verify_all,
)
from muster.tasks.task_set import TaskSet as TaskSet
from muster.tasks.verifier import (
    Done as Done,
    Environment as Environment,
    Grade as Grade,
    Graded as Graded,
    Reply as Reply,
    Undecided as Undecided,
    Verifier as Verifier,
)
