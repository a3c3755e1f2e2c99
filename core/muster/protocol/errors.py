"""Every error Muster raises on purpose.

MusterError
├── ConfigError (ValueError)            a setting, file or argument the user can mend
├── NotYet (RuntimeError)               the same command will succeed later by itself
├── WalletError (ValueError)            keystore missing, malformed, or the password is wrong
├── ChainError (RuntimeError)
│   ├── ChainUnreachable                the RPC endpoint does not answer
│   │   └── ChainInconsistent           it contradicts itself, or knows less than before
│   ├── WrongChain                      it answers for another chain or other contracts
│   ├── RpcError                        it refuses a request; carries its code and data
│   ├── ContractRevert                  a call or transaction reverted; carries the decoded error
│   └── TransactionLost                 a sent transaction has no receipt in time
├── ProtocolError (ValueError)          bytes that do not follow docs/protocol.md
│   ├── EncodingError                   a message, record or file that does not parse
│   ├── DeltaError                      a weight delta that does not parse or fit its base
│   ├── AdapterError                    a low-rank adapter that cannot be merged with its base
│   ├── ProofError                      a TOPLOC proof that does not parse
│   └── SignatureError                  a signature that is malformed or by the wrong key
├── ApiError (RuntimeError)             the orchestrator refused a request; carries status and code
├── PolicyUnavailable (RuntimeError)    no relay delivers a version that matches the chain
│   └── PolicyBroken                    its weights are not finite: nobody may compute with it
├── TaskError (ValueError)              a task set or verifier that breaks its contract
├── EngineError (RuntimeError)          an inference engine failed: its machine or its policy
│   ├── SampleUnfit (ValueError)        what it was asked to compute fits no machine's policy
│   ├── EngineSilent                    a policy or sample makes its process hang
│   ├── DeviceLost                      a GPU failed: its process cannot use it any more
│   └── ValidatorDisturbed              a validator that fails what it knows to be good
├── TrainingCollapsed (RuntimeError)    the policy collapsed, and training was told to stop then
└── StorageError (OSError)              a disk that is full, a database or folder that is corrupt
    └── StorageFailed                   a full or failing disk or bucket, or too many open files: a
                                        later try may succeed

Expected outcomes (a rejected submission, a failed check) are values, not exceptions.
"""

import errno

_PASSING_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)
_SQLITE_IOERR, _SQLITE_FULL = 10, 13


class MusterError(Exception):
    """Root of all errors raised on purpose; `hint` says what the user can do next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def install_hint(extra: str) -> str:
    """Return how to get what an extra brings. It names no package of an index: whoever had
    registered the name there would run code beside the user's keys.
    """
    return f"install the extra `{extra}`: docs/guides/install.md"


class ConfigError(MusterError, ValueError):
    """A setting, file or argument that the user can mend."""


class NotYet(MusterError, RuntimeError):
    """The request is not possible yet; later the same request will succeed."""


class WalletError(MusterError, ValueError):
    """A keystore is missing or malformed, or its password is wrong."""


class ChainError(MusterError, RuntimeError):
    """Talking to the chain failed."""


class ChainUnreachable(ChainError):
    """The RPC endpoint does not answer."""


class ChainInconsistent(ChainUnreachable):
    """The RPC endpoint contradicts itself, or knows less than it did before."""


class WrongChain(ChainError):
    """The RPC endpoint serves another chain, or the contracts are not at the recorded addresses."""


class RpcError(ChainError):
    """The RPC endpoint refused a request.

    `code` is the JSON-RPC error code, `data` the bytes that came with it (a revert's, if any).
    """

    def __init__(
        self, message: str, *, code: int, data: bytes = b"", hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.data = data


class ContractRevert(ChainError):
    """A call or transaction reverted.

    `name` and `args_` are the decoded custom error. `name` is the bare selector when the ABI does
    not know it, and `NO_REASON` when there are no bytes: it ran out of gas, or the endpoint gave no
    reason. `tx` is the transaction hash when one was sent.
    """

    NO_REASON = "without a reason"

    def __init__(
        self,
        name: str,
        args_: tuple[object, ...] = (),
        *,
        tx: str | None = None,
        hint: str | None = None,
    ) -> None:
        shown = ", ".join(str(a) for a in args_)
        super().__init__(f"the contract refused: {name}({shown})", hint=hint)
        self.name = name
        self.args_ = args_
        self.tx = tx


class TransactionLost(ChainError):
    """A transaction was sent but no receipt came in time; `tx` is its hash.

    `is_remembered` tells that a later process finds it in a journal, and does not send it again.
    """

    def __init__(self, message: str, *, tx: str, is_remembered: bool) -> None:
        hint = (
            "it may still be mined: run the same command again, which waits for it"
            if is_remembered
            else f"it may still be mined: look for {tx} on chain before you run the command again, "
            "which would send another one"
        )
        super().__init__(message, hint=hint)
        self.tx = tx
        self.is_remembered = is_remembered


class ProtocolError(MusterError, ValueError):
    """Bytes that do not follow docs/protocol.md."""


class EncodingError(ProtocolError):
    """A message, record or file does not parse, or a value does not fit its field."""


class DeltaError(ProtocolError):
    """A weight delta does not parse, or does not fit the version it is applied to.

    `reason` is "format" (not a delta), "base" (made against another version), "target" (makes other
    files than announced), "truncated", "bounds" (reads outside the base or writes outside the
    target), "block" (a malformed block), "adapter" (merges with an adapter that is not there) or
    "trailing" (goes on after its end).
    """

    def __init__(self, message: str, *, reason: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class AdapterError(ProtocolError):
    """The files of a low-rank adapter cannot be merged with the base.

    `reason` is "missing" (a file or tensor), "config" (another kind of adapter), "rank" (shapes
    that are not of its rank), "unexpected" (a tensor that is no update), "base" (made for another
    base) or "bounds" (the file is too short).
    """

    def __init__(self, message: str, *, reason: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class ProofError(ProtocolError):
    """A TOPLOC proof does not parse, or hidden states cannot be proven.

    `reason` is "count", "length", "modulus", "coefficient" or "hidden".
    """

    def __init__(self, message: str, *, reason: str = "hidden", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class SignatureError(ProtocolError):
    """A signature is malformed, not canonical, or made by the wrong key."""


class ApiError(MusterError, RuntimeError):
    """The orchestrator refused a request.

    `status` is the HTTP status, `code` the machine-readable reason in its answer.
    """

    def __init__(self, message: str, *, status: int, code: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed later: nobody answered, or was too busy."""
        return self.status >= 500 or self.status in (408, 429)


class PolicyUnavailable(MusterError, RuntimeError):
    """No relay delivers a policy version whose manifest matches the chain."""


class PolicyBroken(PolicyUnavailable):
    """A published version has weights that are not finite, so that nobody may compute with it."""


class TaskError(MusterError, ValueError):
    """A task set or verifier breaks its contract."""


class EngineError(MusterError, RuntimeError):
    """An inference engine failed, which says nothing about the samples that it had to compute."""


class SampleUnfit(EngineError, ValueError):
    """No machine can compute the sample with the loaded policy: wrong lengths or token ids."""


class EngineSilent(EngineError):
    """An engine's process hung each time that it was asked: its policy or a sample is to blame."""


class DeviceLost(EngineError):
    """A GPU failed, and whatever this process asks of it fails too; another process may succeed."""


class ValidatorDisturbed(EngineError):
    """A validator lacks what it needs to judge, or fails known good work: it must not sign."""


class TrainingCollapsed(MusterError, RuntimeError):
    """Training was told to stop when the policy collapses, and it has."""


class StorageError(MusterError, OSError):
    """A disk is full, or a database or folder is corrupt."""


class StorageFailed(StorageError):
    """A disk is full, a disk or bucket failed, or too many files are open: the same may succeed
    later.
    """


def storage_error_of(
    error: BaseException, message: str, *, hint: str | None = None
) -> StorageError:
    """Return the error of a failed file operation; StorageFailed if a later try may succeed."""
    return (StorageFailed if may_pass(error) else StorageError)(message, hint=hint)


def may_pass(error: BaseException) -> bool:
    """Return whether an error of the operating system, or of SQLite, says that a disk is full or
    fails, or that too many files are open.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return getattr(error, "errno", None) in _PASSING_ERRNOS or code in (_SQLITE_IOERR, _SQLITE_FULL)
