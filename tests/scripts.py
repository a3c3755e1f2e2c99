"""Imports scripts of the tree, which are in no package, for tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(path: str) -> ModuleType:
    """Return a script as a module of its own, by its path in the tree."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for the module that defines them.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
