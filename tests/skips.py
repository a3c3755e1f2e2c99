"""Why a test may be skipped. A test that is skipped for any other reason fails.

Everything that tests need beside Linux and the README's prerequisites is installed by `make setup`,
so each reason here is about what a machine does not allow or does not have.
"""

from collections.abc import Iterator

import pytest

ALLOWED = {
    "no sandbox: ": "programs run nowhere but in a sandbox that holds: user namespaces, Linux",
    "only root can change users": "a user id of its own for each run needs root",
    "this process may not make control groups": "a cap for all processes needs a control group",
    "no filter for this architecture": "the filter of system calls is for x86-64 and ARM64",
    "no Linux": "sendfile's options and /proc are Linux's",
    "file systems may not be mounted here": "a full disk is played with a small file system",
    "the kernel has no bbr": "links are emulated by the kernel (slow tests)",
    "links cannot be emulated: ": "network namespaces need rights (slow tests)",
    "systemd is not installed": "units are checked by systemd's own program",
    "the guide's ports are in use: ": "the guides name their ports, and another program has them",
    "no vLLM: ": "the engine is installed by `make vllm`, 2.5 GB (slow tests)",
}
"""The beginnings of allowed reasons, and the cause of each."""


class SkipList:
    """A pytest plugin that fails the tests whose reason is not listed."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Turn a skip without a listed reason into a failure."""
        report = yield
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith(tuple(ALLOWED)):
                report.outcome = "failed"
                report.longrepr = (
                    f"skipped for a reason that tests/skips.py does not list: {reason}"
                )
        return report
