import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # any import of it fails, as where it is not installed
import kernels, worker
for package in (worker, kernels):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
assert "torch" in sys.modules
"""


def test_no_module_needs_triton_to_be_imported() -> None:
    """The CPU image carries no triton."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
