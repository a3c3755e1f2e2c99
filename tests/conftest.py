"""Shared by every test: hypothesis profiles, one torch thread, secrets in logs, listed skips, slow
networks.
"""

import atexit
import gc
import os
from shutil import rmtree
from tempfile import mkdtemp

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, settings
from secret_scan import SecretScan
from skips import SkipList

from muster.telemetry import KeyValueFormatter

# Use neither the user's networks nor a devnet of this machine.
os.environ["XDG_CONFIG_HOME"] = mkdtemp(prefix="muster-tests-")
atexit.register(rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

settings.register_profile(
    "default",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    max_examples=40,
    derandomize=True,  # the same examples at each run; the profiles below draw others
)
settings.register_profile(
    "wide", parent=settings.get_profile("default"), max_examples=200, derandomize=False
)
settings.register_profile("deep", parent=settings.get_profile("wide"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for a slow network (slow_network.py) and for engines on a GPU."""
    parser.addoption(
        "--latency-s",
        type=float,
        default=0.0,
        help="what answers over the network usually take longer",
    )
    parser.addoption(
        "--device", default="cpu", help="where the engines of tests/conformance/engines compute"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Search what tests log and print for the secrets that they use."""
    gc.set_threshold(20_000, 20, 50)
    if (latency_s := config.getoption("latency_s")) > 0:
        from slow_network import SlowNetwork

        SlowNetwork(latency_s).install()
    config.pluginmanager.register(SkipList(), "skip-list")
    scan = SecretScan()
    config.pluginmanager.register(scan, "secret-scan")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Show the fields of log lines too when a test fails, such as why a step was refused."""
    plugin = session.config.pluginmanager.get_plugin("logging-plugin")
    plugin.report_handler.setFormatter(KeyValueFormatter("test"))


def pytest_collection_finish() -> None:
    """Keep imports out of garbage collection, which took a fifth of all tests' time."""
    gc.collect()
    gc.freeze()
