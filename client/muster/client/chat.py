"""Talking to a model folder, or to the newest version of a run that is still being trained."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import click
import torch
from transformers import TextIteratorStreamer
from transformers.utils import logging as transformers_logging

from muster.chain import Chain
from muster.client.cli.printing import printable
from muster.client.model import MANIFEST, SUBMISSIONS, manifest_in
from muster.inference.policy_files import LoadedPolicy, load_folder, swap_weights
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, EngineError
from muster.protocol.ids import PolicyVersion, RunId
from muster.shardcast import Fetcher
from muster.shardcast.http_client import ConnectsTo

NEWEST_FILES = 5
"""Submissions that /sources names."""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Settings of answers."""

    max_tokens: int
    """Most tokens of an answer."""
    temperature: float
    """0 for the most likely answer."""
    device: str
    """Where the model computes."""
    dtype: str
    """Number format of the model."""
    sources: bool = False
    """Whether every answer is followed by what trained the model."""


class Live:
    """The newest version of a run, fetched on demand."""

    def __init__(
        self,
        run_id: RunId,
        relays: Sequence[str],
        connects_to: ConnectsTo | None,
        state_dir: Path,
        rpc: str,
        deployments: Path,
    ) -> None:
        self._run_id = run_id
        self._relays, self._connects_to = relays, connects_to
        self._state_dir = state_dir
        self._place = rpc, deployments

    def newest(self) -> tuple[PolicyVersion, Path]:
        """Return the newest version on chain and its folder; raises MusterError."""
        return asyncio.run(self._newest())

    async def _newest(self) -> tuple[PolicyVersion, Path]:
        async with await Chain.connect(*self._place) as chain:
            version = await chain.runs.latest_version(self._run_id)
            if version is None:
                raise ConfigError(f"run {self._run_id} has no version yet", hint="ask again later")
            root = (await chain.runs.checkpoint_of(self._run_id, version)).manifest_root
            cache = self._state_dir / str(chain.chain_id)
        async with Fetcher(self._relays, cache, connects_to=self._connects_to) as fetcher:
            return version, await fetcher.fetch(self._run_id, version, root)


class Speaker:
    """A loaded model that answers; it remembers the conversation if it has a chat template."""

    def __init__(self, source: Path | Live, manners: AnswerSettings) -> None:
        self._source, self._manners = source, manners
        self._policy: LoadedPolicy | None = None
        self._version: PolicyVersion | None = None
        self._said: list[dict[str, str]] = []

    @property
    def policy(self) -> LoadedPolicy:
        """The model in its newest version."""
        if isinstance(self._source, Path):
            return self._policy or self._load(self._source)
        version, folder = self._source.newest()
        if self._policy is None or version != self._version:
            swapped = self._policy is not None and swap_weights(self._policy.model, folder)
            if not swapped:
                self._load(folder)
            click.echo(f"policy {version}", err=True)
            self._version = version
        assert self._policy is not None
        return self._policy

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(getattr(self.policy.tokenizer, "chat_template", None))

    def answer(self, text: str) -> Iterator[str]:
        """Yield an answer piece by piece."""
        policy, manners = self.policy, self._manners
        self._said.append({"role": "user", "content": text})
        tokens = self._encoded(policy, text).to(manners.device)
        streamer = TextIteratorStreamer(
            policy.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        asked: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "streamer": streamer,
            "max_new_tokens": manners.max_tokens,
            "eos_token_id": sorted(policy.eos_token_ids),
            "pad_token_id": min(policy.eos_token_ids, default=0),
            "do_sample": manners.temperature > 0,
        }
        if manners.temperature > 0:
            asked |= {"temperature": manners.temperature, "top_k": 0}
        failures: list[Exception] = []

        def generate() -> None:
            try:
                with torch.inference_mode():
                    policy.model.generate(**asked)
            except Exception as error:  # The caller's thread raises it.
                failures.append(error)
                streamer.end()

        thread = Thread(target=generate, daemon=True)
        thread.start()
        pieces = []
        for piece in streamer:
            pieces.append(piece)
            yield piece
        thread.join()
        if failures:
            raise EngineError(f"the model cannot answer: {failures[0]}") from failures[0]
        self._said.append({"role": "assistant", "content": "".join(pieces)})

    def sources(self) -> str:
        """Return the submissions that trained the model, if its folder names them."""
        if isinstance(self._source, Live):
            return f"policy {self._version}: muster model fetch writes what trained it"
        if not (self._source / MANIFEST).exists():
            return "this folder does not say; `muster model fetch` makes folders that do"
        manifest = manifest_in(self._source)
        lineage = json.loads((self._source / SUBMISSIONS).read_text())
        taken = [each for each in lineage["ingredients"] if each["use"] == "offered"]
        workers = Counter(each["worker"] for each in taken)
        lines = [
            f"run {manifest.run_id} version {manifest.version}, root {hex0x(manifest.root())}",
            f"{len(taken)} submissions of {len(workers)} workers, offered to training; the newest:",
        ]
        for each in taken[-NEWEST_FILES:]:
            place = f"{each['batch_id']}:{each['position']}"
            lines.append(f"  {place} of {each['worker']}: muster explain {place}")
        return "\n".join(lines)

    def _load(self, folder: Path) -> LoadedPolicy:
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self._manners.dtype]
        self._policy = load_folder(folder, dtype=dtype, device=self._manners.device)
        return self._policy

    def _encoded(self, policy: LoadedPolicy, text: str) -> Any:
        if not self.has_template:
            return policy.tokenizer(text, return_tensors="pt").input_ids
        return policy.tokenizer.apply_chat_template(
            self._said, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]


def talk(source: Path | Live, prompts: Sequence[str], manners: AnswerSettings) -> None:
    """Answer the prompts or, if there are none, each line of standard input."""
    transformers_logging.set_verbosity_error()
    if isinstance(source, Path) and not source.is_dir():
        raise ConfigError(f"there is no model folder {source}", hint="muster model fetch makes one")
    speaker = Speaker(source, manners)
    for prompt in prompts:
        _say(speaker, prompt, manners)
    if not prompts:
        _converse(speaker, manners)


def _converse(speaker: Speaker, manners: AnswerSettings) -> None:
    if not speaker.has_template:
        click.echo("no chat template: every line is a prompt of its own", err=True)
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/sources":
                click.echo(speaker.sources())
            case "/help":
                click.echo("/sources  what trained this model\n/exit     end (or Ctrl-D)")
            case text if text.startswith("/"):
                click.echo(f"unknown command {text}: /help lists all")
            case text:
                _say(speaker, text, manners)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _say(speaker: Speaker, text: str, manners: AnswerSettings) -> None:
    for piece in speaker.answer(text):
        click.echo(printable(piece), nl=False)
    click.echo()
    if manners.sources:
        click.echo(speaker.sources())
