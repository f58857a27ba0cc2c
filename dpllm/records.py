"""Records: frozen values that are stored as JSON and accept no unknown fields.

Comes in: JSON. Goes out: typed values, or a list of problems. Must not know what any of them means.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator

from dpllm.errors import ConfigError

Json = dict[str, Any]

_MOST_PROBLEMS, _LONGEST = 20, 100


def _as_given(value: Any, check: Any) -> Any:
    """A number as in the file: 1 is not written back as 1.0."""
    check(value)
    return value


_GIVEN = WrapValidator(_as_given)
Number = Annotated[float, _GIVEN]
NotNegative = Annotated[float, Field(ge=0), _GIVEN]
Positive = Annotated[float, Field(gt=0), _GIVEN]
Share = Annotated[float, Field(ge=0, le=1), _GIVEN]
Between0And1 = Annotated[float, Field(gt=0, lt=1), _GIVEN]
Count = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Value = TypeVar("_Value")
ByCopies = dict[Annotated[str, Field(pattern=r"^[0-9]+$")], _Value]
"""Number of times each canary was planted -> value."""


class NotAStatement(ConfigError):
    """A value is not a privacy statement or a part of one.

    Attributes:
        problems: Violations of the schema, one line each.
    """

    def __init__(self, problems: list[str]) -> None:
        """Names the first few."""
        self.problems = problems
        super().__init__(
            f"the privacy statement does not keep to its schema ({'; '.join(problems[:3])}), so no reader could rely on its "
            "fields. It is damaged, or of another version of dpllm: take it from where it was published, or read it with that."
        )

    @classmethod
    def of(cls, error: ValidationError, *, tag: bool = False) -> Self:
        """Says where values are wrong, and why, without quoting any.

        Args:
            error: The error of pydantic.
            tag: Whether its locations begin with the kind of statement.
        """
        lines = []
        for problem in error.errors(include_url=False)[:_MOST_PROBLEMS]:
            place = ".".join(map(str, problem["loc"][tag:])) or "the block"
            place = "guarantee" if problem["type"].startswith("union_tag") else place
            lines.append(f"{place[:_LONGEST]}: {problem['msg'].removeprefix('Value error, ')[:_LONGEST]}")
        return cls(lines)


class Record(BaseModel):
    """A part of the statement: immutable, without unknown fields, and without conversion between types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    @classmethod
    def pick(cls, source: Json, **others: Any) -> Self:
        """Takes the fields of this part from a larger JSON object.

        Args:
            source: Contains these fields; its other fields are ignored.
            others: Fields that are missing in ``source`` or differ from it: JSON values, or parts.

        Raises:
            NotAStatement: A field is missing or has a value that the schema does not allow.
        """
        names = {field.alias or name for name, field in cls.model_fields.items()}
        part = {name: value for name, value in {**source, **others}.items() if name in names}
        try:
            # A lone surrogate, from a name that is not UTF-8, is written as a question mark.
            return cls.model_validate_json(
                json.dumps(part, default=lambda inner: inner.to_json(), ensure_ascii=False).encode(errors="replace")
            )
        except ValidationError as error:
            raise NotAStatement.of(error) from None

    @classmethod
    def checked(cls, value: object) -> Self:
        """The complete JSON value as this part; raises NotAStatement."""
        try:
            return cls.model_validate_json(json.dumps(value, allow_nan=False))
        except ValidationError as error:
            raise NotAStatement.of(error) from None

    def to_json(self) -> Json:
        """The fields that were set, in the order of the class."""
        copy: Json = json.loads(json.dumps(self.model_dump(exclude_unset=True, by_alias=True, warnings=False)))
        return copy
