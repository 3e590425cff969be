"""What the HTTP routes and the gRPC servicer work with, built once per gateway."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from gateway.engine_client import EngineClient
from gateway.errors import ModelNotFoundError
from gateway.generation import TextGenerator
from gateway.metrics import GatewayMetrics
from gateway.prompt_encoder import PromptEncoder
from services.errors import UnavailableError

_QUANTIZATION: Final = re.compile(r"[.-](i?q\d\w*|f16|f32|bf16|fp16|fp32|mxfp4)$")


def default_model_name(model: str) -> str:
    """The name under which a model is served when none is given.

    A file or a folder serves under its own name in lower case, a GGUF without its quantisation; a
    hub id serves as it is.
    """
    path = PurePath(model)
    if path.suffix.lower() == ".gguf":
        return _QUANTIZATION.sub("", path.stem.lower())
    is_hub_id = len(path.parts) <= 2 and not model.startswith((".", "/", "~"))
    return model if is_hub_id else path.name.lower()


@dataclass(slots=True, frozen=True)
class ServedModels:
    """The names of the one model that is served.

    Attributes:
        names: at least one; the first is the default and labels the metrics.
        created_unix_s: when the gateway began to serve it.
    """

    names: Sequence[str]
    created_unix_s: int

    @classmethod
    def of(cls, names: Sequence[str], model: str) -> "ServedModels":
        """The configured names, or one made of the model's."""
        return cls(tuple(names) or (default_model_name(model),), int(time.time()))

    def resolve(self, name: str | None) -> str:
        """A served name; none at all means the first. Errors: ModelNotFoundError."""
        if not name:
            return self.names[0]
        if name not in self.names:
            raise ModelNotFoundError(f"The model {name!r} does not exist.", param="model")
        return name


@dataclass(slots=True)
class GatewayCore:
    """The parts of one gateway.

    Attributes:
        root: the model, as configured.
        num_in_flight: generation requests whose response has not ended.
    """

    models: ServedModels
    root: str
    engine: EngineClient
    encoder: PromptEncoder
    generator: TextGenerator
    metrics: GatewayMetrics
    max_request_bytes: int
    num_in_flight: int = 0

    def max_model_len(self) -> int:
        """Longest sequence in tokens. Errors: UnavailableError before the engine was ready."""
        info = self.engine.info
        if info is None:
            raise UnavailableError(self.engine.availability.reason or "the engine is starting")
        return info.max_model_len
