"""`muster explain`: what it asks the orchestrator for, and which one it needs."""

import pytest
from worlds.cases import RECORD, SUBMISSION, make_view_batch

from muster.client.cli.explain import _entries
from muster.lifecycle import free_port
from muster.protocol.errors import ApiError

BATCH = make_view_batch([SUBMISSION.leaf()], [RECORD])


async def test_another_orchestrator_is_told_apart_by_the_option_that_names_it() -> None:
    with pytest.raises(ApiError, match="no source shows the submissions of batch") as caught:
        await _entries(BATCH, f"http://127.0.0.1:{free_port()}")
    assert caught.value.hint == (
        f"check --orchestrator: only the orchestrator of run {BATCH.run_id} shows this batch"
    )


async def test_nobody_is_asked_without_an_orchestrator() -> None:
    assert await _entries(BATCH, None) == []
