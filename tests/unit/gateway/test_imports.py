import subprocess
import sys

FORBIDDEN = ("torch", "transformers", "triton", "gguf", "numpy")


def test_the_gateway_loads_no_model_library() -> None:
    """Nor gguf, nor numpy through it: they load only to convert a file that is not cached yet."""
    code = (
        "import sys, gateway.app, gateway.__main__\n"
        f"print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
