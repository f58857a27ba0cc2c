"""Accounting events as fields of files: read once, when the file is read; a malformed one makes the file invalid."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from dpllm.errors import ConfigError
from dpllm.privacy import events


def _read(value: Any, *, of_run: bool = False, released: bool = False, draws: bool = False) -> Any:
    try:
        event = value if isinstance(value, events.Event) else events.read(value)
        if of_run:
            events.step_of(event)
        noise = isinstance(event, events.SelfComposed) and isinstance(event.event, events.Gaussian) and event.count
        if released and not (noise or (isinstance(event, events.PureDP) and event.epsilon > 0)):  # none is free
            raise ConfigError(f"{event.to_json()} is no release: neither Gaussian sums nor an epsilon above 0.")
        if draws and not (isinstance(event, events.BoundedRange) and event.count):
            raise ConfigError(f"{event.to_json()} is no event of draws, and draws are all that texts were released by.")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return event


_STORED = (
    PlainSerializer(lambda event: event.to_json()),
    WithJsonSchema({"type": "object", "additionalProperties": True}),
)
Event = Annotated[events.Event, PlainValidator(_read), *_STORED]
"""An accounting event, see ``dpllm.privacy.events``."""
RunEvent = Annotated[events.RunEvent, PlainValidator(lambda value: _read(value, of_run=True)), *_STORED]
"""That of a run's steps."""
_PURE = {"type": {"const": "pure_dp"}, "epsilon": {"type": "number", "exclusiveMinimum": 0}}
_SUM = {"type": {"const": "gaussian"}, "noise_multiplier": {"type": "number", "exclusiveMinimum": 0}}
_SUMS = {"type": {"const": "self_composed"}, "count": {"type": "integer", "minimum": 1}}


def _object(properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


ReleaseEvent = Annotated[
    events.PureDP | events.SelfComposed,
    PlainValidator(lambda value: _read(value, released=True)),
    _STORED[0],
    WithJsonSchema({"anyOf": [_object(_PURE), _object({**_SUMS, "event": _object(_SUM)})]}),
]
"""That of one release: with a delta of 0, or Gaussian sums."""
BoundedRange = Annotated[events.BoundedRange, PlainValidator(lambda value: _read(value, draws=True)), *_STORED]
"""That of one text or more, drawn token by token."""
