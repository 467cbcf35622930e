"""Install the low-precision guard in every Python process that a test starts.

Python imports a module of this name at startup; tests/conftest.py puts this folder on PYTHONPATH.
"""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent

if "FORBID_LOW_PRECISION_MATMUL" in os.environ:
    import low_precision_guard

    low_precision_guard.install_with_torch()

# Python imports only the first module `sitecustomize` on the path, so run the one that this file hides.
hidden = PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if Path(path or ".").resolve() != HERE]
)
if hidden is not None and hidden.loader is not None:
    from importlib.util import module_from_spec

    hidden.loader.exec_module(module_from_spec(hidden))
