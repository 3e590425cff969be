"""From a request's bytes to a checked schema; every error names the parameter at fault."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from services.errors import InvalidArgumentError, UnimplementedError

MAX_DEPTH: Final = 64
"""Of an object that a template takes; no schema of tools or documents comes near it."""


class Schema(BaseModel):
    """Strict as OpenAI is: no conversions between types, no NaN or infinity.

    Unknown fields are kept apart, for the response to name them.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )


M = TypeVar("M", bound=Schema)


def _check_depth(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for items in children for v in items if isinstance(v, dict | list)]
        if not level:
            return value
    raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")


FreeObject = Annotated[dict[str, Any], AfterValidator(_check_depth)]
"""A JSON object of the client's own making, which recursion over it survives."""


def fault_of(param: str, message: str) -> PydanticCustomError:
    """What a validator of a whole body raises to name the parameter at fault."""
    return PydanticCustomError("parameter", "{message}", {"param": param, "message": message})


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Errors: InvalidArgumentError."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError("the body must be a JSON object")
    return value


def check_supported(value: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuses parameters that are known and not built, unless their value asks for nothing.

    Args:
        value: the body.
        neutral: the values that ask for nothing, per parameter; null always does.

    Errors: UnimplementedError.
    """
    for param, allowed in neutral.items():
        given = value.get(param)
        # compared with their types: 0 asks for log-probabilities where false does not
        if given is None or any(type(given) is type(v) and given == v for v in allowed):
            continue
        raise UnimplementedError(f"the parameter {param} is not supported", param=param)


def validate(schema: type[M], value: Mapping[str, Any]) -> M:
    """Checks a body. Errors: InvalidArgumentError naming the first parameter at fault."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        # of the forms that a parameter may have, the one that fits furthest
        param, fault = max(
            ((_param(_location(fault), value), fault) for fault in faults),
            key=lambda pair: pair[0].count(".") + pair[0].count("["),
        )
        reason = fault["msg"].removeprefix("Value error, ")
        message = f"{param}: {reason}" if param else reason
        raise InvalidArgumentError(message, param=param or None) from error


def ignored_params(model: BaseModel, prefix: str = "") -> Iterator[str]:
    """The names of the fields that the schemas do not know, dotted."""
    for name in model.model_extra or {}:
        yield f"{prefix}{name}"
    for name in type(model).model_fields:
        for item in _models_in(getattr(model, name)):
            yield from ignored_params(item, f"{prefix}{name}.")


def _models_in(value: object) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _models_in(item)


def _location(fault: ErrorDetails) -> tuple[str | int, ...]:
    named = fault.get("ctx", {}).get("param")
    return (*fault["loc"], named) if isinstance(named, str) else fault["loc"]


def _param(loc: Sequence[str | int], value: Any) -> str:  # noqa: ANN401 - JSON values
    """`messages[0].content` from a location, without pydantic's names of union members."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            if not isinstance(value, list) or part >= len(value):
                break
            path += f"[{part}]"
            value = value[part]
        elif isinstance(value, dict):
            path += f".{part}" if path else part
            value = value.get(part)
    return path
