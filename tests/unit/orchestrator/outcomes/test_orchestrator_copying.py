"""A validator that copies: before a batch is posted, no answer to anybody reveals a verdict.

Two worlds differ only in the outcomes that the first validator signed. The other validator gets
the same answers in both, whatever it asks.
"""

import os
import re
from pathlib import Path
from random import Random

import pytest
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import Network

from muster.api.routes import ROUTES
from muster.protocol.checking import Checking, fingerprints_hash
from muster.protocol.eip712 import digest, sign
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.messages import Reason, Submission, Verdict

PAGES = (
    "/", "/workers", "/submissions", "/submissions/{file_hash}", "/submissions?verdict=rejected",
    "/cases", "/samples", "/network", "/search?q=1%2F1", "/search?q=1:0",
)  # fmt: skip
ENDLESS = frozenset({"/v1/events"})
OF_THE_PROCESS = re.compile(r"^(process|python)_|_seconds|_total|_created|^#", re.MULTILINE)


async def ask(bench: Bench, key: bytes, path: str) -> str:
    """The answer to a validator, without the fields about this process."""
    signed = bench.signed(key, "GET", path)
    async with bench.http() as http:
        answer = await http.get(path, headers=signed)
    if path != "/metrics":
        return f"{answer.status_code} {answer.text}"
    return "\n".join(x for x in answer.text.splitlines() if not OF_THE_PROCESS.search(x))


async def hand_in(bench: Bench, place: int, records: bytes) -> list[bytes]:
    """Commit to fingerprints and hand in outcomes; returns the secrets that must not leak."""
    number, root = bench.order(1)[place], bench.network.view.batches[1].root
    key = bench.network.keys.validators[number]
    message = Checking(1, root, keccak(records), fingerprints_hash([b""]))
    checking = sign(digest(bench.services.domain, message.struct_hash()), key)
    signature = bench.network.sign_outcomes(number, 1, root, records)
    async with bench.validator(number) as api:
        await api.post_checking(message, checking)
        await api.post_outcomes(1, records, signature)
    return [keccak(records), message.fingerprints_hash, checking, signature, records]


async def learnt(bench: Bench, submission: Submission, lazy: int) -> dict[str, str]:
    """All answers to a validator, by request."""
    known = {
        "run_id": 1, "batch_id": 1, "file_hash": hex0x(submission.file_hash), "step": 1, "index": 0,
        "leaf": hex0x(submission.leaf()), "document_hash": hex0x(bench.network.recipe.hash()),
    }  # fmt: skip
    routes = [r.path for r in ROUTES if r.method == "GET" and r.path not in ENDLESS]
    paths = [path.format_map(known) for path in [*routes, *PAGES]]
    paths.append("/v1/batches?state=committed")
    key = bench.network.keys.validators[bench.order(1)[lazy]]
    return {path: await ask(bench, key, path) for path in paths}


async def world(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, reason: Reason, seconds: int
) -> dict[str, str]:
    folder.mkdir()
    with monkeypatch.context() as same:
        same.setattr(os, "urandom", Random(23).randbytes)
        network = Network()
    async with open_bench(folder, network) as bench:
        submission = await bench.upload()
        await bench.commit()
        secrets = await hand_in(bench, 0, network.judge([submission], verdict, reason))
        bench.set_chain_time(network.chain.time + seconds)
        answers = await learnt(bench, submission, 1)
        for path, answer in answers.items():
            leaked = [each for each in secrets if each.hex() in answer.lower()]
            assert not leaked, path
        return answers


@pytest.mark.sqlite_only
@pytest.mark.parametrize("seconds", [0, 60])
async def test_copying_validator_is_told_the_same_whatever_the_first_one_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    accepted = await world(
        tmp_path / "accepted", monkeypatch, Verdict.ACCEPTED, Reason.NONE, seconds
    )
    trap = await world(tmp_path / "trap", monkeypatch, Verdict.FRAUD, Reason.WRONG_SEED, seconds)
    assert {path for path in accepted if accepted[path] != trap[path]} == set()
    assert len(accepted) > 20


async def test_honest_quorum_posts_and_then_all_is_shown(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    records = bench.network.judge([submission])
    for place in (0, 1):
        await hand_in(bench, place, records)
    await bench.record()
    assert bench.network.view.batches[1].records is not None
    async with bench.validator(2) as api:
        shown = (await api.checking(1)).commitments
    assert {each.records_hash for each in shown} == {keccak(records)}
    assert len(shown) == 2


async def test_alarm_of_one_calls_more_as_soon_as_the_other_has_spoken(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    await hand_in(bench, 0, bench.network.judge([submission], Verdict.FRAUD, Reason.WRONG_SEED))
    [(_, before)] = await bench.services.outcomes.calls(limit=1)
    await hand_in(bench, 1, bench.network.judge([submission]))
    [(_, after)] = await bench.services.outcomes.calls(limit=1)
    assert (len(before.called), len(after.called)) == (2, 3)
