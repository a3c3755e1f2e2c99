"""The compiled block codec is used where it was made from these very sources, else numpy is."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from muster.shardcast import delta_kernel
from muster.shardcast.delta_kernel import CompiledCodec, NumpyCodec, load_kernel, make_codec

needs_kernel = pytest.mark.skipif(load_kernel() is None, reason="no compiled kernel")


@needs_kernel
def test_compiled_codec_is_in_use() -> None:
    assert isinstance(make_codec(), CompiledCodec)


def test_numpy_is_used_where_no_kernel_was_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_kernel(tmp_path)
    monkeypatch.setattr(delta_kernel, "load_kernel", lambda: library)
    assert isinstance(make_codec(), NumpyCodec)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no compiled kernel" in caplog.text


@needs_kernel
def test_kernel_of_other_sources_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(delta_kernel.FOLDER, tmp_path / "same")
    shutil.copytree(delta_kernel.FOLDER, tmp_path / "changed")
    with (tmp_path / "changed" / "delta.c").open("a") as source:
        source.write("/* changed */\n")
    assert load_kernel(tmp_path / "same") is not None
    assert load_kernel(tmp_path / "changed") is None
    assert "is stale" in caplog.text
