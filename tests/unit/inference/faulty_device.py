"""The process of a transformers engine whose device fails on demand.

It is run like `muster.inference.vllm.child`. The file `fault` beside the policy folder names the
error of torch that the next pass raises. After an AcceleratorError every later pass in the same
process fails too, as in CUDA.
"""

import runpy
import sys
from pathlib import Path
from typing import Any


def serve_faulty(number: int) -> None:
    import torch

    from muster.inference import transformers_engine
    from muster.inference.vllm.host import serve

    class Faulty(transformers_engine.TransformersEngine):
        """It is replaced with the process, and so is whether its device is lost."""

        fault = Path("/nowhere")
        is_lost = False

        def load_policy(self, folder: Path, version: Any) -> None:
            self.fault = folder.parent / "fault"
            super().load_policy(folder, version)

        def _prefilled(self, samples: Any) -> Any:
            if self.fault.exists():
                error = getattr(torch, self.fault.read_text())
                self.fault.unlink()
                self.is_lost = error is torch.AcceleratorError
                raise error("CUDA error: it failed" if self.is_lost else "CUDA out of memory")
            if self.is_lost:
                raise torch.AcceleratorError("CUDA error: it failed before")
            return super()._prefilled(samples)

    transformers_engine.TransformersEngine = Faulty  # type: ignore[misc]
    serve(number)


if __name__ == "__main__":
    import muster

    core = next(each for each in muster.__path__ if (Path(each) / "inference").is_dir())
    child = runpy.run_path(f"{core}/inference/vllm/child.py")
    child["make_importable"](sys.argv[2:])
    serve_faulty(int(sys.argv[1]))
