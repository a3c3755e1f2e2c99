"""Models whose input and output embeddings are one tensor, published as deltas."""

import json
from pathlib import Path

import torch
from delta_tensors import Files, TensorBytes, applied, safetensors, sizes_of
from shardcast_policies import delta_of, publish, read_back
from transformers import LlamaConfig, LlamaForCausalLM

from muster.shardcast import ChunkStore, Manifest

WEIGHTS = "model.safetensors"


def tied_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def saved(model: LlamaForCausalLM, folder: Path) -> Files:
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@torch.no_grad()
def step(model: LlamaForCausalLM) -> None:
    """Move every 50th weight by one representable value."""
    for weights in model.parameters():
        weights.view(-1).view(torch.int16)[::50] += 1


def broadcast(folder: Path, first: Files, second: Files) -> tuple[Files, Manifest]:
    """Return the second version as rebuilt from its delta, and its manifest."""
    store = ChunkStore(folder / "store")
    publish(store, first, 1, anchor_every=8)
    manifest = publish(store, second, 2, anchor_every=8)
    return applied(folder, first, delta_of(store, manifest), sizes_of(second)), manifest


def test_tied_model_is_still_tied_after_a_delta(tmp_path: Path) -> None:
    model = tied_model()
    first = saved(model, tmp_path / "first")
    step(model)
    second = saved(model, tmp_path / "second")
    made, manifest = broadcast(tmp_path, first, second)
    assert made == second
    assert manifest.broadcast_bytes < manifest.total_bytes / 10
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.bfloat16)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_tied_tensor_that_is_written_twice_is_rebuilt_twice(tmp_path: Path) -> None:
    first, second = ({WEIGHTS: twice(data)} for data in (BEFORE, AFTER))
    made, manifest = broadcast(tmp_path, first, second)
    assert made == second
    assert manifest.broadcast_bytes < manifest.total_bytes / 10


def test_file_whose_tensors_overlap_is_published_whole(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "store")
    publish(store, {WEIGHTS: two_names_for(BEFORE)}, anchor_every=8)
    manifest = publish(store, {WEIGHTS: two_names_for(AFTER)}, 2, anchor_every=8)
    assert (manifest.kind, manifest.delta) == ("full", None)
    assert read_back(store, manifest) == {WEIGHTS: two_names_for(AFTER)}


BEFORE = bytes(range(256)) * 40
AFTER = BEFORE[:100] + b"\x01\x3c" + BEFORE[102:]


def twice(data: bytes) -> bytes:
    return safetensors({"embed": TensorBytes("BF16", data), "head": TensorBytes("BF16", data)})


def two_names_for(data: bytes) -> bytes:
    """Return a file that safetensors refuses, and a delta treats as plain bytes."""
    entry = {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": [0, len(data)]}
    header = json.dumps({"embed": entry, "head": entry}).encode()
    return len(header).to_bytes(8, "little") + header + data
