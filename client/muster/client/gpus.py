"""The NVIDIA GPUs of this machine, as far as the driver can be asked."""

from __future__ import annotations

from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """A GPU."""

    name: str
    """What its maker calls it."""
    free_bytes: int
    """Memory that nobody uses."""
    total_bytes: int
    """All of its memory."""


class NoDriverError(Exception):
    """NVML says why no GPU can be seen."""


def list_gpus() -> list[Gpu]:
    """Return the GPUs, by number.

    Raises ImportError when there is no library to ask, NoDriverError when the library cannot tell.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVML's own errors, of no class that older libraries have
        raise NoDriverError(str(error)) from error
    try:
        return [_gpu(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception as error:  # a GPU that was lost, or may not be asked
        raise NoDriverError(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, number: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(str(nvml.nvmlDeviceGetName(handle)), int(memory.free), int(memory.total))


def find_gpu(device: str) -> Gpu | None:
    """Return the GPU that a device such as `cuda:1` names; None when none is seen there."""
    number = device.partition(":")[2] or "0"
    try:
        return list_gpus()[int(number)] if number.isdecimal() else None
    except (ImportError, NoDriverError, IndexError):
        return None
