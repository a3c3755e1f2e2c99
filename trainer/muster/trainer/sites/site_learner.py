"""The learner of one site among several that train one policy and exchange little data (DiLoCo).

A training step at a site, `SiteLearner.step`:

  1. meet      fix the sites that take part; a site that joins receives site 0's state
  2. train     take inner AdamW steps on the site's own share of the step's groups; a site whose
               policy is then not finite ends, before it sends anything
  3. exchange  average the movements of all sites, sent as int8; each number is sent twice
  4. agree     the step counts only if every site has the whole mean and trained on the same
               records; else it is taken again from 1, without the sites that are gone or read
               other records than site 0, so no accepted file is lost
  5. step      apply Nesterov momentum to the mean; all sites hold the same weights, bit by bit

All sites read the same training stream with the same cursor; site i of K takes groups i, i + K, …
of a step. Only site 0 publishes, and its state is the run's: steps of another site beyond it were
never published, and are discarded when that site joins. A joining site receives the mean movements
that it missed if it has the state before them, and otherwise the whole state.

DiLoCo's outer step is pure arithmetic. Every site takes its own inner steps from the same weights;
the mean of their movements is the gradient of a Nesterov step (Douillard et al. 2023, arXiv
2311.08105, algorithm 1). Movements are sent as int8 with a float32 scale per block, rounded to the
nearest (ties to even), as in INTELLECT-1.

Every operation is one rounding of float32 in a fixed order, so sites that start from the same
weights and receive the same bytes hold the same weights, whatever their processors.

All sites hold the same weights and the same momentum after every step, and both follow from the
mean movements. A site that still has the state of an earlier version of this run therefore needs
only the means that it missed, as they were sent (`OuterHistory`): a byte per weight and version.
Other sites receive the whole state. Optimiser moments belong to each site: a site that returns
continues with its own.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from safetensors.torch import load as from_bytes, save as to_bytes
from torch import Tensor

from muster.protocol.encoding import hex0x
from muster.protocol.errors import TrainingCollapsed
from muster.protocol.ids import PolicyVersion, Step, to_hash32
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.persistence import below
from muster.trainer.measure.figures import StepFigures
from muster.trainer.publish.policies import BASE, PolicyShelf
from muster.trainer.recover.checkpoint import Checkpoints, TrainerState
from muster.trainer.sites.meeting import Meeting, Newcomer, Round, SiteLost, as_tensor, lost_site
from muster.trainer.stream.reader import Cursor

logger = logging.getLogger(__name__)

VELOCITY = "outer."
"""Prefix of the outer momentum in a site's state."""
HEAD_BYTES = 64 << 20
"""Most bytes of the header: values that the flow keeps from step to step, and names."""


class SiteLearner:
    """A learner that trains together with those of other sites."""

    def __init__(
        self,
        inner: Learner,
        meeting: Meeting,
        outer: OuterStep,
        checkpoints: Checkpoints,
        shelf: PolicyShelf,
        *,
        max_async_level: int,
    ) -> None:
        self.members: list[int] = []
        """Sites that took the last step together."""
        self.outer_bytes = 0
        """Bytes that this site sent to others for outer steps."""
        self.heal_bytes = 0
        """Bytes that this site sent to sites that joined."""
        self._inner = inner
        self._meeting = meeting
        self._outer = outer
        self._checkpoints = checkpoints
        self._shelf = shelf
        self._max_async_level = max_async_level
        self._round: Round | None = None
        self._history = OuterHistory()

    @property
    def learning_rate_scale(self) -> float:
        """Factor on the recipe's learning rate: below 1 where the run rolled back before it had
        sites. It is part of the run's state, the same at every site."""
        return self._inner.learning_rate_scale

    @learning_rate_scale.setter
    def learning_rate_scale(self, scale: float) -> None:
        self._inner.learning_rate_scale = scale

    def join(self) -> None:
        """Bring this site to the run's state, starting from its own where possible, and save it.
        Not for site 0.

        Blocking; raises SiteLost when site 0 does not let this site in.
        """
        version, saved = BASE, self._checkpoints.newest()
        if saved is not None:
            self.restore(self._checkpoints.read(saved.folder, self))
            version = saved.state.version
        has_policies = all(self._shelf.has(v) for v in self._needed(version))
        digest = self._digest(version, self._inner.weights()) if has_policies else ""
        logger.info("asking to take part", extra={"policy_version": version})
        self._round = self._meeting.ask({"version": version, "digest": digest})
        self._come_to(self._round, version)

    def step(self, step: Step, groups: Sequence[Sequence[Rollout]]) -> StepFigures:
        """Take a training step together with all sites that are present.

        Raises TrainingCollapsed when this site's own steps made a policy that is not finite,
        SiteLost when site 0 is gone or trains on other groups.
        """
        records = _named(groups)
        before = _on_host(self._inner.state())
        weights = below(before, "model.")
        while True:
            round_ = self._begin()
            place, count = round_.rank, len(round_.members)
            figures = self._inner.step(step, groups[place::count])
            self._require_finite(round_, step)
            mean = self._exchange(round_, self._movement(weights, parts=count))
            self.outer_bytes += round_.sent_bytes
            trained_on = None if mean is None else records
            if self._meeting.agree(round_, trained_on=trained_on) and mean is not None:
                break
            logger.warning("step taken again: a site was lost", extra={"step": step})
            self._inner.restore(before)
        self._advance(PolicyVersion(step), weights, mean)
        self.members = round_.members
        logger.info(
            "outer step",
            extra={"step": step, "sites": round_.members, "sent_bytes": round_.sent_bytes},
        )
        return figures

    def fault(self, formats: Mapping[str, torch.dtype]) -> str | None:
        """Return what of the policy is not finite, also in these formats of its weights; None when
        all is: the same at every site.
        """
        return self._inner.fault(formats)

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's weights: the same at every site."""
        return self._inner.weights()

    def pieces(self, formats: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the weights in these formats, some rows at a time."""
        return self._inner.pieces(formats)

    def hold(self) -> Callable[[], None]:
        """Keep the tensors unchanged until the returned function is called."""
        return self._inner.hold()

    def start_again(self, base: Mapping[str, Tensor]) -> None:
        """Continue from version 0, without optimiser and momentum."""
        self._outer.velocity.clear()
        self._inner.start_again(base)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Continue from a policy's weights, without momentum."""
        self._outer.velocity.clear()
        self._inner.load(weights)

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next step depends on: the inner state and the outer
        momentum."""
        own = {VELOCITY + name: value for name, value in self._outer.velocity.items()}
        return self._inner.state() | own

    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return tensors to read a saved state into."""
        own = {name: torch.zeros(size) for name, size in sizes.items() if _is_outer(name)}
        rest = {name: size for name, size in sizes.items() if not _is_outer(name)}
        return self._inner.like(rest) | own

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a result of `state`."""
        self._inner.restore({n: value for n, value in state.items() if not _is_outer(n)})
        self._outer.velocity = {
            n.removeprefix(VELOCITY): value.clone() for n, value in state.items() if _is_outer(n)
        }

    # 1. meet

    def _begin(self) -> Round:
        """Return the round of the next attempt, after its joining sites have received their
        state."""
        joined_in, self._round = self._round, None
        if joined_in is not None:
            return joined_in
        round_ = self._meeting.gather()
        if round_.rank == 0:
            for newcomer in round_.newcomers:
                self._hand_over(round_, newcomer)
        self.heal_bytes += round_.sent_bytes
        round_.sent_bytes = 0
        return round_

    def _hand_over(self, round_: Round, newcomer: Newcomer) -> None:
        """Send a joining site what it lacks: the flow's state, and the missed means or all
        tensors."""
        state = self._checkpoints.latest or TrainerState(BASE, Cursor(), 0, 0)
        means = self._missed(state.version, newcomer.knows)
        head = {
            "state": _plain(state),
            "means": None if means is None else [[len(part) for part in m.parts] for m in means],
        }
        if means is None:
            data = to_bytes(_separate(self._tensors(state.version)))
        else:
            data = b"".join(part.numpy().tobytes() for mean in means for part in mean.parts)
        try:
            to = round_.members.index(newcomer.site)
            round_.send_all(json.dumps(head).encode(), to)
            round_.send_all(data, to)
        except SiteLost:
            # The exchange of the step will notice that it is gone.
            logger.warning("site lost while it joined", extra={"site": newcomer.site})
        way = "state" if means is None else f"{len(means)} means"
        logger.info(
            "site joined",
            extra={"site": newcomer.site, "sent_bytes": round_.sent_bytes, "sent": way},
        )

    def _missed(self, version: PolicyVersion, knows: Mapping[str, Any]) -> list[Mean] | None:
        """Return the means that a site missed; None when it needs the whole state."""
        if knows["version"] == version:
            is_same = knows["digest"] == self._digest(version, self._inner.weights())
            return [] if is_same else None
        return self._history.since(PolicyVersion(knows["version"]), knows["digest"])

    def _tensors(self, version: PolicyVersion) -> dict[str, Tensor]:
        """Return the state that sites share, and the older policies that a step may need."""
        found = {f"weights.{name}": value for name, value in self._inner.weights().items()}
        found |= {VELOCITY + name: value for name, value in self._outer.velocity.items()}
        for needed in self._needed(version)[:-1]:
            learned = self._shelf.learned(needed)
            found |= {f"policy.{needed}.{name}": value for name, value in learned.items()}
        return found

    def _needed(self, version: PolicyVersion) -> list[PolicyVersion]:
        """Return the versions, without the base, that steps after `version` may need."""
        oldest = max(1, version - self._max_async_level)
        return [PolicyVersion(v) for v in range(oldest, version + 1)]

    def _come_to(self, round_: Round, own: PolicyVersion) -> None:
        """Receive and apply what site 0 sends."""
        shared = [*self._inner.weights().values(), *self._outer.velocity.values()]
        limit = HEAD_BYTES + (3 + self._max_async_level) * 2 * byte_count(shared)
        head = json.loads(round_.receive_all(0, limit=limit))
        data = round_.receive_all(0, limit=limit)
        state = _state(head["state"])
        if head["means"] is None:
            self._take_over(state.version, from_bytes(data))
        else:
            self._replay(own, _means(head["means"], data))
        if state.version:
            self._checkpoints.save(state, self.state()).result()
        logger.info(
            "joined the run",
            extra={"policy_version": state.version, "had": own, "received_bytes": len(data)},
        )

    def _replay(self, own: PolicyVersion, means: Sequence[Mean]) -> None:
        """Take the missed outer steps, and write their policies."""
        needed = self._needed(PolicyVersion(own + len(means)))
        for version, mean in enumerate(means, start=own + 1):
            self._advance(PolicyVersion(version), _on_host(self._inner.weights()), mean)
            if version in needed:
                self._shelf.write(PolicyVersion(version), self._inner.weights())

    def _take_over(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the run's state, and discard this site's own."""
        self._history.clear()
        self._checkpoints.forget()
        self._inner.load(below(tensors, "weights."))
        self._outer.velocity = below(tensors, VELOCITY)
        for needed in self._needed(version)[:-1]:
            self._shelf.write(needed, below(tensors, f"policy.{needed}."))
        if version:
            self._shelf.write(version, self._inner.weights())

    def _digest(self, version: int, weights: Mapping[str, Tensor]) -> str:
        """Return a digest of a version's weights and momentum, to compare two sites."""
        hasher = blake3(version.to_bytes(8, "big"))
        for state in (weights, self._outer.velocity):
            for name, value in sorted(state.items()):
                hasher.update(name.encode() + b"\0" + value.detach().cpu().numpy().tobytes())
            hasher.update(b"\0")
        return hasher.hexdigest()

    # 2. train

    def _require_finite(self, round_: Round, step: Step) -> None:
        """Leave the run when this site's policy is not finite: the mean would be so at all
        sites."""
        fault = self._inner.fault({})
        if fault is None:
            return
        # Without connections the exchange ends, and without heartbeats this site counts as dead.
        round_.close()
        self._meeting.close()
        site = round_.members[round_.rank]
        raise TrainingCollapsed(
            f"site {site} left step {step}: its own policy is not finite ({fault})",
            hint="it sent nothing of this step. If the other sites go on, look for a fault of "
            "this machine, then start the site again; if all sites say the same, start "
            f"a new run from version {step - 1} with a smaller learning rate",
        )

    # 3. exchange

    def _movement(self, weights: Mapping[str, Tensor], *, parts: int) -> Tensor:
        """Return the movement since `weights`, old minus new, as one vector on the host."""
        after = self._inner.weights()
        return joined({name: old - after[name].cpu() for name, old in weights.items()}, parts)

    def _exchange(self, round_: Round, own_P: Tensor) -> Mean | None:
        """Return the mean over sites; None when a site was lost during the exchange."""
        try:
            return mean_over_sites(round_, own_P)
        except SiteLost as error:
            logger.warning("exchange failed", extra={"error": str(error)})
            return None

    # 5. step

    def _advance(self, version: PolicyVersion, weights: Mapping[str, Tensor], mean: Mean) -> None:
        """Take a version's outer step from the weights of the one before."""
        digest = self._digest(version - 1, weights)
        moved = split(mean.vector(), weights)
        self._inner.load(self._outer.apply(weights, moved))
        # Beyond this the whole state, weights and momentum, takes fewer bytes.
        most_bytes = 2 * byte_count([*weights.values()])
        self._history.add(version, digest, mean, most_bytes=most_bytes)


def mean_over_sites(round_: Round, own_P: Tensor) -> Mean:
    """Return the mean of all members' vectors, the same bytes at each member.

    Each member averages one part of the vector: it receives that part from all members as int8 and
    returns the mean as int8. Raises SiteLost when a member is lost, or sends what is not finite.
    """
    count, me = len(round_.members), round_.rank
    parts = own_P.chunk(count)
    size = byte_size(len(parts[0]))
    others = [i for i in range(count) if i != me]
    with lost_site("the sites' movements"):
        sending = [round_.start_send(quantised(parts[i]), i) for i in others]
        received = {i: restored(_receive(round_, size, i)) for i in others}
        for wait in sending:
            wait()
    received[me] = restored(quantised(parts[me]))
    mine = quantised(mean_of([received[i] for i in range(count)]))
    with lost_site("the sites' means"):
        sending = [round_.start_send(mine, i) for i in others]
        means = {i: _receive(round_, size, i) for i in others}
        for wait in sending:
            wait()
    means[me] = mine
    return Mean([means[i] for i in range(count)])


def _receive(round_: Round, size: int, sender: int) -> Tensor:
    """Return the bytes of `quantised` from a member; raises SiteLost when they are not finite."""
    data = round_.receive(size, sender)
    if not bool((_scales(data) * LARGEST).isfinite().all()):
        raise SiteLost(
            f"site {round_.members[sender]} sent numbers that are not finite",
            hint="stop that site and look for a fault of its machine",
        )
    return data


def _named(groups: Sequence[Sequence[Rollout]]) -> str:
    """Return a digest of a step's rollouts and their order, to compare two sites."""
    hasher = blake3()
    for group in groups:
        hasher.update(repr(group).encode())
    return hasher.hexdigest()


def _is_outer(name: str) -> bool:
    return name.startswith(VELOCITY)


def _means(sizes: Sequence[Sequence[int]], data: bytes) -> list[Mean]:
    """Return the means, given the sizes of their parts and all bytes one after the other."""
    parts = iter(torch.split(as_tensor(data), [n for mean in sizes for n in mean]) if sizes else ())
    return [Mean([next(parts) for _ in mean]) for mean in sizes]


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the host's memory, where sites exchange and take outer steps."""
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that share no memory; the file format refuses tensors that do."""
    return {name: t.contiguous() for name, t in _on_host(tensors).items()}


def _plain(state: TrainerState) -> dict[str, Any]:
    value = asdict(state)
    last = state.cursor.last
    value["cursor"] = {"position": state.cursor.position, "last": last and hex0x(last)}
    return value


def _state(value: dict[str, Any]) -> TrainerState:
    cursor = value.pop("cursor")
    last = cursor["last"]
    return TrainerState(**value, cursor=Cursor(cursor["position"], last and to_hash32(last)))


# ----------------------------------------------------------------- the outer step

BLOCK = 256
"""Numbers that share a scale, which adds 1.6 % to their bytes."""
LARGEST = 127


def quantised(values_P: Tensor) -> Tensor:
    """Return numbers as bytes: int8 codes, then each block's scale in float32.

    `values_P` is finite float32, with a multiple of BLOCK numbers. The rounding error is at most
    half a scale: 1/254 of the block's largest number.
    """
    blocks_KB = values_P.view(-1, BLOCK)
    scale_K = blocks_KB.abs().amax(1) / LARGEST
    safe_K = torch.where(scale_K > 0, scale_K, torch.ones_like(scale_K))
    codes_KB = (blocks_KB / safe_K[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return torch.cat([codes_KB.flatten().view(torch.uint8), scale_K.view(torch.uint8)])


def restored(data: Tensor) -> Tensor:
    """Return the numbers [P] from the bytes of `quantised`."""
    scale_K = _scales(data)
    codes_KB = data[: len(scale_K) * BLOCK].view(torch.int8).view(-1, BLOCK)
    return codes_KB.float().mul_(scale_K[:, None]).flatten()


def _scales(data: Tensor) -> Tensor:
    """Return the scales [K] in the bytes of `quantised`."""
    blocks = len(data) // (BLOCK + 4)
    return data[blocks * BLOCK :].clone().view(torch.float32)


def byte_size(numbers: int) -> int:
    """Return the bytes of this many numbers, which must be a multiple of BLOCK."""
    return numbers // BLOCK * (BLOCK + 4)


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of vectors, added up in the order given."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts))


@dataclass(slots=True)
class OuterStep:
    """Nesterov momentum on the sites' mean movement."""

    learning_rate: float
    """Factor on the mean movement; 1 with momentum 0 is plain averaging of weights."""
    momentum: float
    """Decay of earlier movements."""
    velocity: dict[str, Tensor] = field(default_factory=dict)
    """Momentum so far, by weight."""

    def apply(
        self, weights: Mapping[str, Tensor], moved: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the weights after the step; `moved` is old minus new, averaged over sites."""
        after = {}
        for name, weight in weights.items():
            velocity = self.velocity.get(name, torch.zeros_like(weight))
            # Separate operations: a fused one rounds only once, and not every processor fuses.
            velocity = velocity * self.momentum
            velocity = velocity + moved[name]
            step = velocity * self.momentum
            step = (step + moved[name]) * self.learning_rate
            self.velocity[name] = velocity
            after[name] = weight - step
        return after


def joined(tensors: Mapping[str, Tensor], parts: int) -> Tensor:
    """Return tensors as one vector, in order of name, padded so that each part has whole blocks."""
    size = sum(tensor.numel() for tensor in tensors.values())
    flat = next(iter(tensors.values())).new_zeros(size + -size % (parts * BLOCK))
    for name, part in split(flat, tensors).items():
        part.copy_(tensors[name])
    return flat


def split(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in a vector of `joined`."""
    found, start = {}, 0
    for name in sorted(like):
        size = like[name].numel()
        found[name] = flat[start : start + size].view(like[name].shape)
        start += size
    return found


class Mean(NamedTuple):
    """The sites' mean movement in one step, as it was sent."""

    parts: list[Tensor]
    """The bytes that each member made."""

    def vector(self) -> Tensor:
        """Return the numbers, with their padding."""
        return torch.cat([restored(part) for part in self.parts])

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))


class _Step(NamedTuple):
    digest: str
    mean: Mean


class OuterHistory:
    """The newest outer steps, as long as they take fewer bytes than the state."""

    def __init__(self) -> None:
        self._steps: OrderedDict[PolicyVersion, _Step] = OrderedDict()

    def add(self, version: PolicyVersion, digest: str, mean: Mean, *, most_bytes: int) -> None:
        """Add the mean that made a version; `digest` is that of the state before."""
        newest = next(reversed(self._steps), None)
        if newest is not None and newest + 1 != version:
            self._steps.clear()
        self._steps[version] = _Step(digest, mean)
        while sum(step.mean.size for step in self._steps.values()) > most_bytes:
            self._steps.popitem(last=False)

    def since(self, version: PolicyVersion, digest: str) -> list[Mean] | None:
        """Return the means since a version with this state; None when they are unknown."""
        first = self._steps.get(PolicyVersion(version + 1))
        if first is None or first.digest != digest:
            return None
        return [step.mean for v, step in self._steps.items() if v > version]

    def clear(self) -> None:
        """Forget all means, because the state now comes from another site."""
        self._steps.clear()


def byte_count(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
