"""The sandbox for untrusted programs: Linux only, and unavailable where it is not safe.

It consists of an unused user id for each run, resource limits, all namespaces of bubblewrap over a
read-only /usr, a filter of system calls, a memory cap for the whole group if control groups allow
it, an output cap and a deadline. A self-test attacks the sandbox before the first program runs.

    sandbox.py   runs a job       command.py  how it is started     self_test.py  whether it holds
    runner.py    runs inside      per_run.py  user id, control group   seccomp.py  system calls
"""

from muster.tasks.sandbox.command import Limits as Limits
from muster.tasks.sandbox.sandbox import (
    Outcome as Outcome,
    Sandbox as Sandbox,
    SandboxJob as SandboxJob,
    SandboxUnavailable as SandboxUnavailable,
    TestRun as TestRun,
)
from muster.tasks.sandbox.self_test import Level as Level, shared_sandbox as shared_sandbox
