"""The EVM chain: deployment, typed contract clients, transactions, events, and a view of them.

    async with await connect("http://127.0.0.1:8545") as chain:
        print(await chain.w3.eth.block_number, await chain.ledger.batch_count())
        view = await read_view(chain, ChainView())

`w3` is web3.py over the same endpoint, `ledger` one of nine typed contracts. The chain is the
source of truth. Nothing here knows the orchestrator, files or models.
"""

from muster.chain.abi import Event as Event, Receipt as Receipt
from muster.chain.connection import Chain as Chain
from muster.chain.deployment import (
    Deployment as Deployment,
    load_deployment as load_deployment,
    save_deployment as save_deployment,
)
from muster.chain.lookup import (
    Named as Named,
    NameKind as NameKind,
    NothingNamed as NothingNamed,
    SubmissionPlace as SubmissionPlace,
    find_named as find_named,
    find_outcome as find_outcome,
    find_worker as find_worker,
    is_named as is_named,
    prefix_of as prefix_of,
)
from muster.chain.name_index import NameIndex as NameIndex
from muster.chain.reader import (
    EventReader as EventReader,
    Poll as Poll,
    apply_poll as apply_poll,
    find_run as find_run,
    follow as follow,
    read_until as read_until,
    read_view as read_view,
)
from muster.chain.send_journal import JournalStore as JournalStore, SendJournal as SendJournal
from muster.chain.sender import SendPolicy as SendPolicy, TransactionSender as TransactionSender
from muster.chain.stake_losses import (
    STATE_WORDS as STATE_WORDS,
    Loss as Loss,
    loss_of as loss_of,
    losses as losses,
    reason_of as reason_of,
)
from muster.chain.structs import (
    ZERO_ADDRESS as ZERO_ADDRESS,
    Batch as Batch,
    BatchStatus as BatchStatus,
    BlockId as BlockId,
    CaseStatus as CaseStatus,
    CourtTerms as CourtTerms,
    Funds as Funds,
    LeasedWork as LeasedWork,
    Member as Member,
    NodeConsent as NodeConsent,
    Offence as Offence,
    OutcomeProof as OutcomeProof,
    PauseCause as PauseCause,
    Permit as Permit,
    PolicyCheckpoint as PolicyCheckpoint,
    RewardClaim as RewardClaim,
    RunConfig as RunConfig,
    RunTerms as RunTerms,
    StakeAccount as StakeAccount,
    StandingOutcome as StandingOutcome,
    WorkerAccount as WorkerAccount,
    WorkerStatus as WorkerStatus,
)
from muster.chain.view import ChainView as ChainView
from muster.chain.view_parts import (
    BatchView as BatchView,
    CaseView as CaseView,
    CheckpointView as CheckpointView,
    ClaimView as ClaimView,
    MemberView as MemberView,
    PauseView as PauseView,
    PaymentView as PaymentView,
    RunView as RunView,
    SlashState as SlashState,
    SlashView as SlashView,
    StakeView as StakeView,
    StreamItem as StreamItem,
    WorkerView as WorkerView,
)

connect = Chain.connect
