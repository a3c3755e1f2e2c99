"""Files that are on the disk whole, or not at all."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from muster.lifecycle import sync_path
from muster.protocol.errors import StorageError, storage_error_of


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; its file replaces `path` atomically, and then survives a power
    failure. Raises StorageError, and leaves no partial file, when the write fails. Only one process
    may write a path at a time: the temporary path is always the same, so that a killed process
    leaves at most one file.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        sync_path(partial)
        partial.replace(path)
        sync_path(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        # A partial file may occupy the last free space.
        with contextlib.suppress(OSError):
            partial.unlink()


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file as `whole_file` does."""
    with whole_file(path) as partial:
        partial.write_bytes(data)


def cannot_write(path: Path, error: OSError) -> StorageError:
    """Return the error of a file that the disk refuses."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "the disk is full: free some space; nodes then continue by themselves"
    else:
        hint = "check the disk, and the folder's owner and permissions"
    return storage_error_of(error, f"cannot write {path}: {error.strerror}", hint=hint)
