"""A double of vLLM's process: it answers the same frames by arithmetic, and fails on demand.

It is run like `muster.inference.vllm.child`. A policy folder holds `mode`, which says how to fail;
`asked`, beside the folder, has a line for each question to any process so far.
"""

import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HIDDEN, VOCAB, EOS, CONTEXT = 4, 11, 10, 64


def answers(frame: Any, folder: Path) -> Iterator[Any]:
    from muster.inference.engine import Completion
    from muster.inference.vllm import frames
    from muster.inference.vllm.frames import Frame

    mode = (folder / "mode").read_text()
    notes = folder.parent / "asked"
    asked = notes.read_text().count("\n") if notes.exists() else 0
    if frame.kind == "open":
        if mode == "dies opening":
            sys.stderr.write("no room for the model\n")
            os.kill(os.getpid(), 9)
        if mode == "refuses":
            yield Frame({"kind": "refused", "message": "no such model", "hint": "another"})
            return
        shape = frames.PolicyShape(HIDDEN, VOCAB, frozenset({EOS}), CONTEXT)
        yield frames.opened_frame(shape, in_place=False)
        return
    with notes.open("a") as file:
        file.write(f"{frame.kind}\n")
    fails = mode.startswith("always ") or asked == 0
    how = mode.removeprefix("always ").removeprefix("once ")
    if frame.kind == "encode":
        yield Frame({"kind": "done", "tokens": list(frame.header["prompt"].encode())})
    elif frame.kind == "prove":
        for place, (_, completion) in reversed(list(enumerate(frames.pairs_of(frame)))):
            yield frames.completion_frame(place, Completion(completion, [bytes(completion)]))
        yield Frame({"kind": "done"})
    elif frame.kind == "examine":
        samples = frames.samples_of(frame)
        for place, sample in reversed(list(enumerate(samples))):
            if fails and place == 0 and how == "finds nonsense":
                yield Frame({"kind": "nonsense", "message": "hidden states hold NaN"})
                return
            answer = frames.examined_frame(place, found_in(sample))
            if fails and place == 0 and how == "finds too little":
                answer = Frame(answer.header, answer.body[:-1])
            if not (fails and place == 0 and how == "forgets"):
                yield answer
        yield Frame({"kind": "done"})
    elif frame.kind == "generate":
        requests = frames.requests_of(frame)
        for place, request in reversed(list(enumerate(requests))):
            if fails and place == 1:
                yield from failure(how)
            tokens = (request.seed % EOS, len(request.prompt_tokens), EOS)[: request.max_new_tokens]
            if fails and how == "answers too much":
                tokens = (0,) * (request.max_new_tokens + 1)
            if not (fails and how == "forgets" and place == 0):
                yield frames.completion_frame(place, Completion(tokens, [b"a", b"bc"]))
        yield Frame({"kind": "done"})


def found_in(sample: Any) -> Any:
    """Return findings that identify their request."""
    import numpy as np

    from muster.inference.engine import Examined, Replayed
    from muster.toploc import ChunkResult

    def replayed(seed: int, tokens: tuple[int, ...]) -> Replayed:
        ids = np.array(tokens)
        return Replayed((ids / 4 + seed).astype(np.float32), ids[::-1], ids % 2 == 0)

    return Examined(
        replayed(sample.seed, sample.completion_tokens),
        tuple(ChunkResult(len(p), 0.5, 2.0**64, 3, 4, 5) for p in sample.proofs),
        np.array([[share.first] * 8 for share in sample.shares], np.float64).reshape(-1, 8),
        tuple(replayed(redraw.seed, redraw.tokens) for redraw in sample.redraws),
        np.array(sample.completion_tokens) / 16 if sample.redraws else None,
    )


def failure(how: str) -> Iterator[Any]:
    from muster.inference.vllm.frames import Frame

    if how == "dies":
        sys.stderr.write("Killed\n")
        os.kill(os.getpid(), 9)
    if how == "ends":
        sys.exit("out of memory")
    if how == "hangs":
        time.sleep(3600)
    if how == "breaks":
        yield Frame({"kind": "broken", "message": "RuntimeError: no"})
    if how == "talks nonsense":
        os.write(int(sys.argv[1]), b"\xff" * 64)
        time.sleep(3600)
    if how == "is slow":
        for _ in range(4):
            time.sleep(0.2)
            yield Frame({"kind": "alive", "made": [3, 1, 2]})


def main() -> None:
    import socket

    from muster.inference.vllm.frames import Channel, ChannelBroken, Frame

    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    folder = Path("/nowhere")
    while True:
        try:
            frame = channel.receive()
        except ChannelBroken:
            return
        if frame.kind == "cancel":
            continue
        folder = Path(frame.header.get("folder", folder))
        for answer in answers(frame, folder):
            channel.send(Frame({**answer.header, "id": frame.header["id"]}, answer.body))


if __name__ == "__main__":
    package = types.ModuleType("muster")
    package.__path__ = sys.argv[2:]
    sys.modules["muster"] = package
    main()
