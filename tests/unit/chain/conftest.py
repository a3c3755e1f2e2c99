import pytest
from chain_fakes import FakeNode, History
from chain_histories import begun
from sender_fakes import Pool


@pytest.fixture
def node() -> FakeNode:
    """A node whose chain has only its first block."""
    return FakeNode()


@pytest.fixture
def pool() -> Pool:
    """A node that mines each transaction at once."""
    return Pool()


@pytest.fixture
def history() -> History:
    """A run with two workers and version 0, one committed batch."""
    return begun()
