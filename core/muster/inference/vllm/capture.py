"""Takes hidden states out of vLLM's model runner: a worker extension.

vLLM mixes `HiddenStates` into its worker class; `LLM.collective_rpc` calls its methods. Everything
here depends on private names of one version of vLLM, so the version is pinned
(`muster.inference.vllm.launcher`).

Generation captures exactly the rows whose logits tokens are chosen from, one per token, whatever
the scheduler did: a prompt prefilled in parts or found in the prefix cache, a batch that changes at
every step, a request preempted and computed again. A prefill captures rows by position; they are
examined here, and no row leaves the worker. Axes: R requests of a step, N tokens of a step, H
hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from muster.inference.blocks import examine_rows
from muster.inference.device_proofs import build_proofs, builder_on
from muster.inference.engine import Examined, Sample
from muster.inference.forward import to_rows
from muster.inference.vllm.frames import PolicyShape
from muster.protocol.errors import ProofError
from muster.protocol.recipe import ProofRecipe

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unprovable:
    """A ProofError as a value. Of the errors that vLLM's workers on several GPUs raise or return,
    only the text arrives.
    """

    message: str
    """The error's text."""


def _or_unprovable(work: Callable[P, T]) -> Callable[P, T | Unprovable]:
    @wraps(work)
    def returning(*args: P.args, **kwargs: P.kwargs) -> T | Unprovable:
        try:
            return work(*args, **kwargs)
        except ProofError as error:
            return Unprovable(str(error))

    return returning


class HiddenStates:
    """Extension of vLLM's worker."""

    muster_captures: dict[int, Any]
    """The active captures, by the number of their call: `see` is called after every step until
    `close`. Each is ChosenRows or PromptRows, for its own requests."""
    model_runner: Any
    """The worker's model runner."""

    def muster_watch(self) -> None:
        """Look at every step from now on."""
        self.muster_captures = {}
        runner = self.model_runner
        execute: Callable[..., Any] = runner.execute_model

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = execute(*args, **kwargs)
            # None after a step without tokens.
            if runner.execute_model_state is not None:
                for capture in self.muster_captures.values():
                    capture.see(runner, runner.execute_model_state)
            return output

        runner.execute_model = watched

    def muster_repack(self) -> None:
        """After a reload, make heads use the weights that they share with the embeddings.

        On a CPU vLLM multiplies by a packed copy, and `reload_weights` packs again only the weights
        that it loaded. A head that shares the embeddings' weights would keep the former policy's
        copy.
        """
        for layer in self.model_runner.get_model().modules():
            # Layers with weights of their own keep only the packed copy.
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def muster_generate(self, call: int, requests: list[str], chunk_tokens: int, topk: int) -> None:
        """Build proofs of the tokens that are generated for requests from now on."""
        proof = ProofRecipe(chunk_tokens=chunk_tokens, topk=topk)
        self.muster_captures[call] = ChosenRows(requests, proof, self.model_runner.device)

    @_or_unprovable
    def muster_take(self, call: int, requests: list[str]) -> list[tuple[int, list[bytes]]]:
        """Return the number of rows and the proofs of ended requests, or Unprovable."""
        return self.muster_captures[call].take(requests)  # type: ignore[no-any-return]

    def muster_prefill(self, call: int, spans: dict[str, tuple[int, int]]) -> None:
        """Keep rows of requests from now on: from one position up to, not including, another."""
        self.muster_captures[call] = PromptRows(spans)

    @_or_unprovable
    def muster_examine(
        self,
        call: int,
        request: str,
        sample: Sample,
        shape: PolicyShape,
        proof: ProofRecipe,
        temperature: float,
    ) -> Examined:
        """Return the findings about a sample from its request's kept rows, or Unprovable."""
        with torch.inference_mode():
            (found,) = examine_rows(
                [sample],
                [self.muster_captures[call].rows(request)],
                self.model_runner.model.compute_logits,
                vocab_size=shape.vocab_size,
                eos=shape.eos_token_ids,
                proof=proof,
                temperature=temperature,
            )
        return found

    @_or_unprovable
    def muster_build(self, call: int, request: str, proof: ProofRecipe) -> list[bytes]:
        """Return the proofs of a request's kept rows, or Unprovable."""
        return build_proofs([self.muster_captures[call].rows(request)], proof)[0]

    def muster_drop(self, call: int, request: str) -> None:
        """Forget a request's rows."""
        self.muster_captures[call].drop(request)

    def muster_rest(self, call: int) -> None:
        """End the capture of a call."""
        if (capture := self.muster_captures.pop(call, None)) is not None:
            capture.close()


class ChosenRows:
    """Proofs of the rows that the tokens of some requests are chosen from."""

    def __init__(
        self, requests: Sequence[str], proof: ProofRecipe, device: torch.device | str
    ) -> None:
        self._wanted = set(requests)
        self._builder = builder_on(device, proof)
        self._slots: dict[str, int] = {}
        self._rows: list[int] = []
        self._free: list[int] = []
        self._failure: ProofError | None = None

    def see(self, runner: Any, state: Any) -> None:
        """Take one row for each of its requests whose token of this step is kept."""
        batch = runner.input_batch
        requests = batch.req_ids
        # For a partial prompt, vLLM computes logits too, and discards the token.
        is_part_R = runner.discard_request_mask.np[: len(requests)]
        rows_RH = state.sample_hidden_states
        if len(rows_RH) != len(requests):
            raise RuntimeError(f"{len(rows_RH)} rows for {len(requests)} requests")
        is_wanted_R = np.array([request in self._wanted for request in requests], bool)
        kept = np.flatnonzero(is_wanted_R & ~is_part_R)
        if len(kept) < len(requests):
            requests = [requests[i] for i in kept]
            rows_RH = rows_RH[torch.from_numpy(kept).to(rows_RH.device)]
        self.add(requests, rows_RH)

    def add(self, requests: Sequence[str], rows_RH: torch.Tensor) -> None:
        """Take one more row of each given request."""
        if self._failure is not None or not requests:
            return
        slots_R = np.array([self._slot(request) for request in requests])
        try:
            self._builder.add(slots_R, to_rows(rows_RH))
        except ProofError as error:
            # If raised here, it would interrupt vLLM in the middle of a step.
            self._failure = error

    def take(self, requests: Sequence[str]) -> list[tuple[int, list[bytes]]]:
        """Return the number of rows and the proofs of ended requests, and forget them."""
        if self._failure is not None:
            raise self._failure
        slots = [self._slots.pop(request) for request in requests]
        self._builder.end(np.array(slots))
        taken = [(self._rows[slot], self._builder.take(slot)) for slot in slots]
        self._free += slots
        return taken

    def close(self) -> None:
        """End the builder's thread."""
        self._builder.close()

    def _slot(self, request: str) -> int:
        """Return a request's place in the builder, and count one more row for it."""
        slot = self._slots.get(request)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._rows)
            self._slots[request] = slot
            self._rows[slot : slot + 1] = [0]
        self._rows[slot] += 1
        return slot


class PromptRows:
    """Rows of prompts, by position."""

    def __init__(self, spans: Mapping[str, tuple[int, int]]) -> None:
        self._spans = dict(spans)
        self._parts: dict[str, list[torch.Tensor]] = {request: [] for request in spans}

    def see(self, runner: Any, state: Any) -> None:
        """Take the wanted rows of this step that are not there yet."""
        batch, counts = runner.input_batch, state.scheduler_output.num_scheduled_tokens
        row = 0
        for place, request in enumerate(batch.req_ids):
            computed = int(batch.num_computed_tokens_cpu[place])
            self.add(request, computed, state.hidden_states[row : row + counts[request]])
            row += counts[request]

    def add(self, request: str, position: int, rows_NH: torch.Tensor) -> None:
        """Take the wanted ones among some rows of a request; the first row is at `position`."""
        if request not in self._spans:
            return
        first, end = self._spans[request]
        parts = self._parts[request]
        # After a preemption the same positions are computed again; the first rows are kept.
        wanted = first + sum(map(len, parts))
        end = min(end, position + len(rows_NH))
        if position <= wanted < end:
            # Copied, because vLLM writes the next step into the same memory.
            parts.append(rows_NH[wanted - position : end - position].clone())

    def rows(self, request: str) -> torch.Tensor:
        """Return all rows of a request; raises RuntimeError when some are missing."""
        parts, (first, end) = self._parts[request], self._spans[request]
        if sum(map(len, parts)) != end - first:
            raise RuntimeError(
                f"{sum(map(len, parts))} of {end - first} rows of a prompt were seen"
            )
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]

    def drop(self, request: str) -> None:
        """Forget a request's rows."""
        del self._parts[request], self._spans[request]

    def close(self) -> None:
        """Drop everything."""
        self._parts.clear()
        self._spans.clear()
