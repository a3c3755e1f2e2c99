"""The compiled kernel: the same bytes, figures and refusals as numpy."""

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from kernel_building import ROOT, SCRIPT, compile_kernel, needs_compiler

from muster.protocol.errors import ProofError
from muster.toploc import kernel
from muster.toploc.chunks import Chunks, Patterns, cut
from muster.toploc.kernel import Kernel
from muster.toploc.portable import Portable, choose
from muster.toploc.proofs import prove_chosen, verify_chosen
from muster.toploc.wire import ChunkShape


@pytest.fixture(scope="module")
def compiled() -> Kernel:
    found = kernel.load()
    if found is None:
        pytest.skip("no compiled kernel")
    return found


@st.composite
def chunks_of_patterns(draw: st.DrawFn) -> Chunks:
    """Chunks from all equal to all different, around every size that the kernel branches at."""
    tokens, width = draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 15, 32, 129, 700]))
    topk = draw(st.sampled_from([1, 2, 15, 16, 17, 100, 128, 129]))
    lowest = draw(st.integers(0, 0x7F7F))
    spread = draw(st.sampled_from([1, 2, 40, 0x7F80 - lowest]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    magnitudes = random.integers(lowest, min(0x7F80, lowest + spread), (tokens, width))
    signs = random.integers(0, 2, magnitudes.shape) << 15
    sample = (magnitudes | signs).astype(np.uint16)
    return cut([sample], chunk_tokens=draw(st.sampled_from([1, 7, 32])), topk=topk)


def large_chunk(values: int, seed: int = 0) -> Chunks:
    """One chunk of 65,536 and one of 163,840 elements with `values` different magnitudes."""
    random = np.random.default_rng(seed)
    rows = [random.integers(0x7F00 - values, 0x7F00, (32, width)) for width in (2048, 5120)]
    chunks = [row.astype(np.uint16).reshape(1, -1) for row in rows]
    sizes = np.array([c.size for c in chunks], np.uintp)
    return Chunks(chunks, 1, [1, 1], sizes, np.full(2, 128, np.uintp))


def changed(chunks: Chunks, seed: int) -> Chunks:
    """The chunks with some bits of some entries flipped, all still finite."""
    random = np.random.default_rng(seed)
    samples: list[Patterns] = []
    for sample in chunks.samples:
        flips = random.integers(0, 0x10000, sample.shape) & random.integers(
            0, 0x10000, sample.shape
        )
        flipped = np.where(random.random(sample.shape) < 0.5, sample ^ flips, sample)
        is_finite = (flipped & 0x7F80) != 0x7F80
        samples.append(np.where(is_finite, flipped, sample).astype(np.uint16))
    return Chunks(samples, chunks.chunk_tokens, chunks.counts, chunks.sizes, chunks.points)


@given(chunks_of_patterns())
def test_proofs_equal_those_of_numpy(compiled: Kernel, chunks: Chunks) -> None:
    assert compiled.build(chunks) == Portable().build(chunks)


@given(chunks_of_patterns(), st.integers(0, 99))
def test_figures_equal_those_of_numpy(compiled: Kernel, chunks: Chunks, seed: int) -> None:
    proofs, other = Portable().build(chunks), changed(chunks, seed)
    assert compiled.verify(other, proofs) == Portable().verify(other, proofs)


@pytest.mark.parametrize("values", [1, 3, 200, 0x7F00])
def test_chunks_larger_than_the_field_equal_those_of_numpy(compiled: Kernel, values: int) -> None:
    chunks = large_chunk(values)
    proofs = compiled.build(chunks)
    assert proofs == Portable().build(chunks)
    other = changed(chunks, seed=1)
    assert compiled.verify(other, proofs) == Portable().verify(other, proofs)


@given(chunks_of_patterns(), st.integers(0, 99))
def test_entries_chosen_elsewhere_give_the_same(
    compiled: Kernel, chunks: Chunks, seed: int
) -> None:
    proofs, other = compiled.build(chunks), changed(chunks, seed)
    found = compiled.verify(other, proofs)
    points, compared = chunks.points.tolist(), chunks.compared.tolist()
    for i, (own, changed_own) in enumerate(zip(chunks, other, strict=True)):
        chosen = choose(own[None], points[i])
        for backend in (compiled, Portable()):
            assert backend.build_chosen(chosen) == [proofs[i]]
            seen = choose(changed_own[None], compared[i])
            assert backend.verify_chosen(seen, [proofs[i]], points[i]) == [found[i]]


@pytest.mark.parametrize("backend", ["compiled", "portable"])
def test_entries_chosen_elsewhere_are_refused_like_others(backend: str, compiled: Kernel) -> None:
    proves: Kernel | Portable = compiled if backend == "compiled" else Portable()
    rows = np.random.default_rng(0).integers(0, 0x7F80, (3, 70_000)).astype(np.uint16)
    proofs = proves.build_chosen(choose(rows, 16))
    seen = choose(rows, 16)
    assert {each.exponent_mismatches for each in proves.verify_chosen(seen, proofs, 16)} == {0}
    for place, word, reason in [(0, 65498, "modulus"), (0, 7, "modulus"), (5, 65497, "coeffi")]:
        words = np.frombuffer(proofs[2], ">u2").copy()
        words[place] = word
        with pytest.raises(ProofError, match=reason):
            proves.verify_chosen(seen, [*proofs[:2], words.tobytes()], 16)
    rows[1, 3] = 0x7F80
    broken = choose(rows, 16)
    with pytest.raises(ProofError, match="NaN or infinity"):
        proves.build_chosen(broken)
    with pytest.raises(ProofError, match="NaN or infinity"):
        proves.verify_chosen(broken, proofs, 16)


@pytest.mark.parametrize("points", [15, 17])
def test_more_or_fewer_chosen_entries_than_are_compared_are_refused(points: int) -> None:
    rows = np.random.default_rng(0).integers(0, 0x7F80, (2, 600)).astype(np.uint16)
    proofs, shape = prove_chosen(choose(rows, 16)), ChunkShape(600, 16)
    assert len(verify_chosen(choose(rows, 16), proofs, shape)) == 2
    with pytest.raises(ProofError, match=f"{points} entries of chunks of 600"):
        verify_chosen(choose(rows, points), proofs, shape)


@pytest.mark.parametrize("topk", [1, 16, 300, 1024, 5000])
def test_any_number_of_points_equals_numpy(compiled: Kernel, topk: int) -> None:
    random = np.random.default_rng(topk)
    chunks = cut(
        [random.integers(0, 0x7F80, (32, 160)).astype(np.uint16)], chunk_tokens=32, topk=topk
    )
    proofs = compiled.build(chunks)
    assert proofs == Portable().build(chunks)
    assert compiled.verify(chunks, proofs)[0].exponent_mismatches == 0


def test_threads_may_share_the_kernel(compiled: Kernel) -> None:
    samples = [large_chunk(values=200, seed=seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(compiled.build, samples))
    assert together == [compiled.build(chunks) for chunks in samples]


@needs_compiler
def test_kernel_is_in_use_where_there_is_a_compiler() -> None:
    assert kernel.load() is not None


@needs_compiler
def test_narrowest_instruction_set_gives_the_same_proofs(tmp_path: Path, compiled: Kernel) -> None:
    narrow = Kernel(compile_kernel(tmp_path / "narrow.so", "-DWIDEST_VECTORS="))
    chunks = large_chunk(values=200)
    assert narrow.build(chunks) == compiled.build(chunks)
    assert narrow.source == compiled.source == SCRIPT.source_digest(kernel.FOLDER)


def test_numpy_is_used_where_no_kernel_was_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kernel.load(tmp_path) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no compiled kernel" in caplog.text


def test_numpy_is_used_when_the_kernel_is_of_other_sources(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(kernel.FOLDER, tmp_path, dirs_exist_ok=True)
    assert kernel.load(tmp_path) is not None
    with (tmp_path / "field.h").open("a") as source:
        source.write("/* changed */\n")
    assert kernel.load(tmp_path) is None
    assert "is stale" in caplog.text


class App:
    """The part of hatchling's application that the hook uses."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture
def _quick_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without optimisation: tests check files and their places, not their speed."""
    monkeypatch.setattr(SCRIPT, "FLAGS", [*SCRIPT.FLAGS, "-O0"])


def run_hook(root: Path, version: str) -> tuple[App, dict[str, Any]]:
    for folder in SCRIPT.FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("*.so"))
    app, build_data = App(), {"force_include": {}, "pure_python": True}
    hook = SCRIPT.KernelHook(str(root), {}, None, None, str(root), "wheel", app)
    hook.initialize(version, build_data)
    return app, build_data


@needs_compiler
@pytest.mark.usefixtures("_quick_compilation")
def test_wheel_carries_a_kernel_for_its_platform(tmp_path: Path) -> None:
    app, build_data = run_hook(tmp_path, "standard")
    library = tmp_path / SCRIPT.TOPLOC / "proofs.so"
    assert build_data["force_include"] == SCRIPT.DATA | {
        str(library): "muster/toploc/native/proofs.so",
        str(tmp_path / SCRIPT.SHARDCAST / "delta.so"): "muster/shardcast/native/delta.so",
        str(tmp_path / SCRIPT.PROTOCOL / "keccak.so"): "muster/protocol/native/keccak.so",
        str(tmp_path / SCRIPT.INFERENCE / "choices.so"): "muster/inference/native/choices.so",
    }
    assert build_data["tag"].startswith("py3-none-")
    assert not build_data["pure_python"]
    assert kernel.load(library.parent) is not None
    assert app.warnings == []


@needs_compiler
@pytest.mark.usefixtures("_quick_compilation")
def test_editable_installation_has_its_kernel_in_the_source_tree(tmp_path: Path) -> None:
    _, build_data = run_hook(tmp_path, "editable")
    assert build_data == {"force_include": {}, "pure_python": True}
    assert kernel.load(tmp_path / SCRIPT.TOPLOC) is not None


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no C compiler"), ("false", "false failed")]
)
def test_installation_works_without_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    app, build_data = run_hook(tmp_path, "standard")
    assert build_data == {"force_include": SCRIPT.DATA, "pure_python": True}
    assert len(app.warnings) == len(SCRIPT.FOLDERS)
    assert all(reason in warning for warning in app.warnings)
    assert not (tmp_path / SCRIPT.TOPLOC / "proofs.so").exists()
