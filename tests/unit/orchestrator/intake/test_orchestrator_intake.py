import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from orchestrator_bench import Bench, refused
from orchestrator_fakes import submission_for

from muster.api.signing import SUBMISSION_HEADER, SUBMISSION_SIGNATURE_HEADER
from muster.chain import WorkerStatus
from muster.orchestrator.db.query import plain
from muster.protocol.encoding import canonical_json, hex0x
from muster.protocol.errors import ApiError
from muster.protocol.ids import PolicyVersion, RunId
from muster.protocol.messages import Submission

BODY = b"a file of rollouts"


async def lease(bench: Bench, node: int = 0) -> Submission:
    return submission_for((await bench.lease(node)).ticket, BODY)


async def send(
    bench: Bench, submission: Submission, body: bytes = BODY, *, node: int = 0, signer: int = 0
) -> None:
    async with bench.node(node) as api:
        signature = bench.network.sign_submission(submission, signer)
        await api.submit(submission, signature, body)


async def refusal(bench: Bench, submission: Submission, **arguments: Any) -> tuple[int, str]:
    return await refused(send(bench, submission, **arguments))


def leftovers(bench: Bench) -> list[str]:
    return [p.name for p in bench.services.settings.files.rglob("*.part")]


async def test_upload_is_kept_when_it_fills_its_ticket(bench: Bench) -> None:
    submission = await lease(bench)
    await send(bench, submission)
    path = await bench.services.files.find(submission.file_hash)
    assert isinstance(path, Path)
    assert path.read_bytes() == BODY
    assert leftovers(bench) == []
    async with bench.api() as api:
        assert (await api.submission_state(submission.file_hash)).state == "received"


async def test_upload_is_harmless_when_repeated(bench: Bench) -> None:
    submission = await lease(bench)
    await send(bench, submission)
    await send(bench, submission)
    await bench.commit()
    await send(bench, submission)
    assert await bench.commit() is False
    assert len(bench.network.chain.ledger.committed) == 1


async def test_upload_is_harmless_when_repeated_at_the_same_moment(bench: Bench) -> None:
    submission = await lease(bench)
    await asyncio.gather(*(send(bench, submission) for _ in range(8)))
    await bench.commit()
    assert [count for _, count, _ in bench.network.chain.ledger.committed] == [1]
    assert leftovers(bench) == []


async def test_upload_is_refused_when_another_slot_has_the_file(bench: Bench) -> None:
    await send(bench, await lease(bench, 0))
    assert await refusal(bench, await lease(bench, 1), node=1, signer=1) == (409, "file_taken")


async def test_upload_is_refused_when_no_ticket_was_given_out(bench: Bench) -> None:
    leased = await lease(bench)
    submission = replace(leased, index=leased.index + 1)
    assert await refusal(bench, submission) == (409, "ticket_unknown")


async def test_upload_is_refused_when_the_ticket_is_another_workers(bench: Bench) -> None:
    submission = await lease(bench, 0)
    assert await refusal(bench, submission, node=1, signer=1) == (422, "bad_submission")


async def test_upload_passes_at_the_deadline_and_is_late_after_it(bench: Bench) -> None:
    submission = await lease(bench)
    deadline = bench.network.chain.time + 60
    bench.set_chain_time(deadline + 1)
    assert await refusal(bench, submission) == (409, "lease_expired")
    bench.set_chain_time(deadline)
    await send(bench, submission)


async def test_upload_may_claim_every_token_of_its_samples(bench: Bench) -> None:
    await send(bench, replace(await lease(bench), units=32))


async def test_upload_is_late_when_the_deadline_passes_while_it_streams(bench: Bench) -> None:
    submission = await lease(bench)

    async def slow() -> Any:
        yield BODY[:5]
        bench.set_chain_time(bench.network.chain.time + 61)
        yield BODY[5:]

    response = await raw_put(bench, submission, slow())
    assert response.json()["error"]["code"] == "lease_expired"
    assert await bench.services.files.find(submission.file_hash) is None
    assert leftovers(bench) == []


@pytest.mark.parametrize(
    "change",
    [
        {"policy_version": PolicyVersion(7)},
        {"rollouts": 0},
        {"rollouts": 65_536},
        {"units": 0},
        {"units": 33},
        {"units": 1 << 32},
    ],
)
async def test_upload_is_refused_when_the_claim_is_out_of_range(
    bench: Bench, change: dict[str, Any]
) -> None:
    submission = replace(await lease(bench), **change)
    assert await refusal(bench, submission) == (422, "bad_submission")


async def test_upload_is_refused_when_the_run_is_another(bench: Bench) -> None:
    submission = replace(await lease(bench), run_id=RunId(2))
    assert await refusal(bench, submission) == (404, "run_unknown")


async def test_upload_is_refused_when_another_key_signed_the_submission(bench: Bench) -> None:
    submission = await lease(bench)
    assert await refusal(bench, submission, signer=1) == (422, "bad_submission_signature")


async def test_upload_is_refused_when_the_worker_was_banned_meanwhile(bench: Bench) -> None:
    submission = await lease(bench)
    bench.network.worker(0).status = WorkerStatus.BANNED
    assert await refusal(bench, submission) == (403, "worker_not_active")


async def raw_put(
    bench: Bench,
    submission: Submission,
    content: Any,
    *,
    path: str | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """PUT with full control: the request is signed for the submission's file hash."""
    path = path or f"/v1/submissions/{submission.run_id}/{submission.step}/{submission.index}"
    node = bench.network.keys.nodes[0]
    signed = bench.signed(node, "PUT", path, body_hash=submission.file_hash)
    signed[SUBMISSION_HEADER] = canonical_json(submission.to_json()).decode()
    signed[SUBMISSION_SIGNATURE_HEADER] = hex0x(bench.network.sign_submission(submission))
    async with bench.http() as http:
        return await http.put(path, content=content, headers=signed | (headers or {}))


async def test_upload_is_refused_when_the_body_is_not_what_was_signed(bench: Bench) -> None:
    submission = await lease(bench)
    response = await raw_put(bench, submission, b"something else")
    assert (response.status_code, response.json()["error"]["code"]) == (422, "file_hash_mismatch")
    assert leftovers(bench) == []
    await send(bench, submission)


async def test_upload_is_refused_unread_when_no_file_of_the_recipe_is_so_large(
    bench: Bench,
) -> None:
    submission = await lease(bench)
    # Four rows of at most 272 completion tokens, and the file's frame.
    assert 1 << 20 < bench.services.intake.max_file_bytes < 2 << 20

    async def unread() -> Any:
        pytest.fail("the body was read")
        yield b""

    headers = {"content-length": str(bench.services.intake.max_file_bytes + 1)}
    response = await raw_put(bench, submission, unread(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_upload_is_cut_off_when_it_streams_too_much(bench: Bench) -> None:
    submission = await lease(bench)
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 1 << 22
            yield bytes(1 << 22)

    response = await raw_put(bench, submission, endless())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert sent <= bench.services.intake.max_file_bytes + (2 << 22)
    assert leftovers(bench) == []


async def test_upload_is_refused_when_the_path_names_another_slot(bench: Bench) -> None:
    submission = await lease(bench)
    path = f"/v1/submissions/1/1/{submission.index + 1}"
    response = await raw_put(bench, submission, BODY, path=path)
    assert response.json()["error"]["code"] == "bad_submission"


@pytest.mark.parametrize("value", ["", "{", "[]", "null", '{"run_id": 1}', "x" * 5000, "[" * 2000])
async def test_upload_is_refused_when_the_claim_does_not_parse(bench: Bench, value: str) -> None:
    submission = await lease(bench)
    response = await raw_put(bench, submission, BODY, headers={SUBMISSION_HEADER: value})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "bad_submission")


async def test_uploads_that_come_together_are_decided_one_by_one(bench: Bench) -> None:
    leases = [await bench.lease(number) for number in range(3)]

    async def submit(number: int, body: bytes) -> str:
        submission = submission_for(leases[number].ticket, body)
        signature = bench.network.sign_submission(submission, number)
        try:
            async with bench.node(number) as api:
                await api.submit(submission, signature, body)
        except ApiError as error:
            return error.code
        return "ok"

    answers = await asyncio.gather(
        *(submit(number, b"file %d" % number) for number in range(3)), submit(0, b"another file")
    )
    assert sorted(answers) == ["ok", "ok", "ok", "slot_taken"]
    assert answers[1:3] == ["ok", "ok"]
    kept = {stored.submission.file_hash for stored in bench.services.files.submissions()}
    [rows] = await bench.services.database.ask(plain("SELECT file_hash FROM submissions"))
    assert {file_hash for (file_hash,) in rows} == kept
    assert len(kept) == 3
