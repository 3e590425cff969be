import os
from pathlib import Path

# read when torch is imported, here or in a service: spinning threads starve their neighbours
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from services import embedded_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where the default model is."""
    return Path(os.environ.get("SEAMLINE_CACHE_DIR", ROOT / ".cache"))


@pytest.fixture(scope="session")
def embedded_model_path(cache_dir: Path) -> Path:
    """The default model's file."""
    if not embedded_model.is_present(cache_dir):
        pytest.fail("the default model is not there: run `make setup`")
    return embedded_model.path_in(cache_dir)
