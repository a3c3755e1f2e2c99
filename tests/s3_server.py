"""An S3-speaking server process of the tests' own."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

START_S = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class S3Server:
    """A server on a free port. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "s3.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not self.url:
            assert time.monotonic() < deadline, self._log.read_text()
            assert self._process.poll() is None, self._log.read_text()
            found = [word for word in self._log.read_text().split() if word.startswith("http://")]
            self.url = found[0] if found else ""
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that give a client the address and the credentials."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.url}

    def create(self, bucket: str) -> str:
        """The URL of a new bucket."""
        request = urllib.request.Request(f"{self.url}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        return f"s3://{bucket}"
