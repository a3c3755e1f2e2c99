"""The EVM chain: deployment, typed contract clients, transactions, events, and what they add up to.

    async with await connect("http://127.0.0.1:8545") as chain:
        print(await chain.w3.eth.block_number, await chain.ledger.batch_count())
        view = await read_view(chain, ChainView())

`w3` is web3.py over the same endpoint, `ledger` one of nine typed contracts. The chain is the
source of truth. Nothing here knows the orchestrator, files or models.
"""

from muster.chain.connection import Chain
from muster.chain.deployment import Deployment, load_deployment, save_deployment
from muster.chain.events import Event, Receipt
from muster.chain.lookup import (
    Named,
    NameKind,
    NothingNamed,
    SubmissionPlace,
    find_named,
    find_outcome,
    find_worker,
    is_named,
    prefix_of,
)
from muster.chain.losses import STATE_WORDS, Loss, loss_of, losses, reason_of
from muster.chain.reader import EventReader, Poll, apply_poll, find_run, follow, read_view
from muster.chain.send_journal import JournalStore, SendJournal
from muster.chain.sender import SendPolicy, TransactionSender
from muster.chain.structs import (
    ZERO_ADDRESS,
    Batch,
    BatchStatus,
    BlockId,
    CaseStatus,
    Claim,
    CourtTerms,
    Funds,
    LeasedWork,
    Member,
    NodeConsent,
    Offence,
    OutcomeProof,
    PauseCause,
    Permit,
    PolicyCheckpoint,
    RunConfig,
    RunTerms,
    StakeAccount,
    Standing,
    WorkerAccount,
    WorkerStatus,
)
from muster.chain.view import ChainView
from muster.chain.view_parts import (
    BatchView,
    CaseView,
    CheckpointView,
    ClaimView,
    MemberView,
    PauseView,
    PaymentView,
    RunView,
    SlashState,
    SlashView,
    StakeView,
    StreamItem,
    WorkerView,
)

connect = Chain.connect

__all__ = [
    "STATE_WORDS",
    "ZERO_ADDRESS",
    "Batch",
    "BatchStatus",
    "BatchView",
    "BlockId",
    "CaseStatus",
    "CaseView",
    "Chain",
    "ChainView",
    "CheckpointView",
    "Claim",
    "ClaimView",
    "CourtTerms",
    "Deployment",
    "Event",
    "EventReader",
    "Funds",
    "JournalStore",
    "LeasedWork",
    "Loss",
    "Member",
    "MemberView",
    "NameKind",
    "Named",
    "NodeConsent",
    "NothingNamed",
    "Offence",
    "OutcomeProof",
    "PauseCause",
    "PauseView",
    "PaymentView",
    "Permit",
    "PolicyCheckpoint",
    "Poll",
    "Receipt",
    "RunConfig",
    "RunTerms",
    "RunView",
    "SendJournal",
    "SendPolicy",
    "SlashState",
    "SlashView",
    "StakeAccount",
    "StakeView",
    "Standing",
    "StreamItem",
    "SubmissionPlace",
    "TransactionSender",
    "WorkerAccount",
    "WorkerStatus",
    "WorkerView",
    "apply_poll",
    "connect",
    "find_named",
    "find_outcome",
    "find_run",
    "find_worker",
    "follow",
    "is_named",
    "load_deployment",
    "loss_of",
    "losses",
    "prefix_of",
    "read_view",
    "reason_of",
    "save_deployment",
]
