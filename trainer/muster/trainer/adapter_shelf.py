"""Policy folders of a run that trains an adapter: the base merged with it, and the adapter beside.

The merged weights are what workers sample from, byte for byte, and in the base's own number
formats; of the adapter, which is all that travels, nothing is lost in them that was not lost for
the workers too (`muster.shardcast.adapter`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from muster.protocol.encoding import hex0x
from muster.protocol.errors import AdapterError, StorageError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import AdapterRecipe, Recipe
from muster.shardcast import state_hash
from muster.shardcast.adapter import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    Adapter,
    merged_weight,
    read_factors,
)
from muster.trainer.adapter import peft_config
from muster.trainer.policies import (
    BASE,
    WEIGHTS_FILE,
    DTypeName,
    PolicyShelf,
    fresh_folder,
    policy_files,
    read_tensors,
)

_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_PATTERNS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}


class AdapterShelf(PolicyShelf):
    """Policy versions that are adapters over version 0."""

    def __init__(
        self,
        folder: Path,
        recipe: AdapterRecipe,
        *,
        dtype: DTypeName = "float32",
        in_memory: int = 4,
    ) -> None:
        """`dtype` is the adapter's; merged weights have the base's."""
        super().__init__(folder, dtype=dtype, in_memory=in_memory)
        self._recipe = recipe

    def write(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> Path:
        """Write a version, given its adapter; returns its folder. Deterministic."""
        stored = {n: t.detach().to("cpu", self._dtype, copy=True) for n, t in weights.items()}
        base = policy_files(self.path(BASE))
        with fresh_folder(self.path(version)) as fresh:
            for name, path in base.items():
                if not name.endswith((".safetensors", ".safetensors.index.json")):
                    shutil.copyfile(path, fresh / name)
            save_file(stored, fresh / WEIGHTS_NAME, metadata={"format": "pt"})
            description = peft_config(self._recipe, hex0x(state_hash(base))).to_dict()
            text = json.dumps(description, indent=2, sort_keys=True, default=sorted)
            (fresh / CONFIG_NAME).write_text(text + "\n")
            merged = self._merged(fresh)
            save_file(merged, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        self._remember(version, merged)
        return self.path(version)

    def learned(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """Return a version's adapter; raises StorageError when it is none of this run's."""
        base = hex0x(state_hash(policy_files(self.path(BASE))))
        try:
            adapter = _adapter_in(self.path(version))
        except AdapterError as error:
            raise StorageError(f"version {version} cannot be gone on from: {error}") from error
        if adapter.base != base:
            raise StorageError(f"version {version} is over the base {adapter.base}, not {base}")
        return read_tensors([adapter.path])

    def _merged(self, folder: Path) -> dict[str, Tensor]:
        """Return the base's weights merged with the adapter in a folder."""
        adapter = _adapter_in(folder)
        merged = dict(self.weights(BASE))
        for name, merge in adapter.merges.items():
            weight = merged.get(name)
            if weight is None or tuple(weight.shape) != (merge.rows, merge.columns):
                raise AdapterError(f"the base has no {name} for the adapter", reason="base")
            patterns = weight.contiguous().view(_PATTERNS[weight.dtype]).flatten().numpy()
            made = merged_weight(patterns, read_factors(merge, adapter.path), _CODES[weight.dtype])
            merged[name] = torch.from_numpy(made).view(weight.dtype).view(weight.shape)
        return merged


def open_shelf(folder: Path, recipe: Recipe, *, dtype: DTypeName) -> PolicyShelf:
    """Return the policies of a run, in a folder."""
    # Those that a step may need, and the one it makes.
    in_memory = recipe.training.max_async_level + 2
    if recipe.adapter.rank:
        return AdapterShelf(folder, recipe.adapter, dtype=dtype, in_memory=in_memory)
    return PolicyShelf(folder, dtype=dtype, in_memory=in_memory)


def _adapter_in(folder: Path) -> Adapter:
    return Adapter({name: folder / name for name in (CONFIG_NAME, WEIGHTS_NAME)})
