import pytest

from gateway.core import ServedModels, default_model_name
from gateway.errors import ModelNotFoundError


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "qwen2.5-7b-instruct"),
        ("model-IQ3_XS.gguf", "model"),
        ("model.F16.gguf", "model"),
        ("plain.gguf", "plain"),
        ("/models/My-Model", "my-model"),
        ("./My-Model", "my-model"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_default_names(model: str, name: str) -> None:
    assert default_model_name(model) == name


def test_names_resolve() -> None:
    models = ServedModels.of(("a", "b"), "x.gguf")
    assert [models.resolve(name) for name in (None, "", "a", "b")] == ["a", "a", "a", "b"]
    with pytest.raises(ModelNotFoundError):
        models.resolve("x")
    assert ServedModels.of((), "/m/X.Q8_0.gguf").names == ("x",)
