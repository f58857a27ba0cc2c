"""Sections of a recipe in general: reading them, listing their keys, and explaining errors.

Comes in: YAML, command-line arguments, types, and pydantic's errors. Goes out: values, and lines for people. Must not know which
sections exist.
"""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, model_validator
from pydantic_core import PydanticCustomError

from dpllm.errors import ConfigError


class Section(BaseModel):
    """A part of the recipe: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """A copy with new values at dotted keys, as in ``config.changed({"privacy.epsilon": 3.0})``; they are not checked.

        Raises:
            KeyError: There is no such key, or its section is null.
        """
        update: dict[str, Any] = {}
        for key, value in values.items():
            section, _, inner_key = key.partition(".")
            previous: Any = update.get(section, getattr(self, section, None))
            if section not in type(self).model_fields or (inner_key and not isinstance(previous, Section)):
                raise KeyError(key)
            update[section] = previous.changed({inner_key: value}) if inner_key else value
        return self.model_copy(update=update)

    @model_validator(mode="before")
    @classmethod
    def _flag_is_no_number(cls, values: Any) -> Any:
        """Without this check, pydantic reads ``epsilon: yes`` as 1.0 and ``public: 1`` as true."""
        for key, field in cls.model_fields.items() if isinstance(values, dict) else ():
            if key in values and (field.annotation is bool) != isinstance(values[key], bool):
                expected = "true or false" if field.annotation is bool else "something other than true or false"
                raise PydanticCustomError(
                    "flag", "should be {wanted}", {"key": key, "wanted": expected, "got": values[key]}
                )
        return values


def number_or_auto(of: str, largest: int | None = None) -> Callable[[Any, ValidatorFunctionWrapHandler], Any]:
    """Reads a positive whole number, or auto; a wrong value gives one error, not one for each type."""
    limit = " or more" if largest is None else f" to {largest:,}"

    def read_either(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            raise ValueError(f"should be a whole number of {of}, 1{limit}, or auto") from None

    return read_either


class UnclearYAML(yaml.YAMLError):
    """YAML with a duplicate key, or with anchors or a depth that could exhaust memory."""


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None:  # aliases have it too
            raise UnclearYAML(
                f"line {event.start_mark.line + 1} has an anchor or an alias (& or *), with which a few lines can expand beyond "
                "memory. Write the value itself."
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                continue  # PyYAML refuses it below
            if key in lines:
                raise UnclearYAML(
                    f"the key {key!r} appears twice, in lines {lines[key]} and {line}, and the run could use only one of the "
                    "two. Remove the other."
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Parses a YAML text.

    Raises:
        YAMLError: The text is not YAML; ``UnclearYAML`` for a duplicate key, an anchor or too deep nesting.
    """
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except RecursionError:
        raise UnclearYAML("is nested too deeply. A recipe is sections of keys: write only those.") from None
    except ValueError as error:  # such as an impossible date
        raise yaml.YAMLError(str(error)) from None


def _file(path: Path) -> Path:
    """The file of a recipe; builtin:lora/e2e.yaml is in the wheel, or in the repository of an editable installation."""
    name = str(path)
    if not name.startswith("builtin:"):
        return path
    embedded = Path(__file__).parent / "builtin"
    return (embedded if embedded.is_dir() else Path(__file__).parents[2] / "recipes") / name.removeprefix("builtin:")


def read_recipe(path: Path) -> dict[str, Any]:
    """The values of a recipe file, unchecked.

    Raises:
        ConfigError: The file is missing, or its YAML is broken or unclear.
    """
    try:
        raw = read_yaml(_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such recipe. Recipes are under recipes/, such as recipes/lora/e2e.yaml; outside the repository "
            "type builtin:lora/e2e.yaml."
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, but a recipe is a YAML file. Type the file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a recipe ({type(error).__name__}).") from None
    except UnclearYAML as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f" at line {mark.line + 1}" if mark else ""
        if mark and mark.buffer and mark.buffer[mark.pointer : mark.pointer + 1] == "\t":
            raise ConfigError(
                f"{path}: has a tab{position}, which YAML does not accept as spaces. Type spaces there."
            ) from None
        raise ConfigError(f"{path}: is not valid YAML{position}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections (model, adapter, data, privacy, train, ...).")
    return raw


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Turns ``--a.b value`` and ``--a.b=value`` into {"a.b": value}; values are read as YAML.

    Raises:
        ConfigError: An argument is not of that form.
    """
    overrides: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"{word!r} is not an override: type --section.key value, as in --privacy.epsilon 3")
        key, separator, text = word[2:].partition("=")
        if not separator:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"--{key} needs a value: type --{key} VALUE")
            text = remaining.pop(0)
        overrides[key.replace("-", "_")] = _value(text)
    return overrides


def _value(text: str) -> Any:
    """The value of a command-line argument; file names are kept as typed, since YAML would read "notes #1" as notes."""
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        return text
    plain = isinstance(value, str) and text[:1] not in "'\"!|>"
    file = value is not None and not isinstance(value, bool | str) and os.path.exists(text)
    return text if plain or file else value


def describe(section: type[Section], prefix: str = "") -> str:
    """Every key of a recipe or section, with its default and meaning."""
    lines = []
    for key, field in section.model_fields.items():
        nested = sections_of(field.annotation)
        if prefix or not nested:
            default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)}"
            text = " ".join((field.description or "").split())
            lines.append(f"  --{prefix}{key}" + (f" ({default})" if prefix else ""))
            lines += textwrap.wrap(text, 80, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines += [describe(inner, f"{prefix}{key}.") for inner in nested]
    return "\n".join(lines)


def sections_of(annotation: Any) -> list[type[Section]]:
    """The recipe sections inside a type, through Optional, unions and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_of(inner)]


def builtin_flags(data: Any) -> list[str]:
    """The keys of section ``data`` that say whether rows are public, of those rows that are all builtin."""
    if not isinstance(data, Mapping):
        return []
    sources = {"public": data.get("train"), "eval_public": data.get("eval")}
    listed = {flag: named if isinstance(named, list) else [named] for flag, named in sources.items() if named}
    return [flag for flag, named in listed.items() if all(str(name).startswith("builtin:") for name in named)]


def explain(error: ValidationError, recipe: type[Section]) -> list[str]:
    """One line for each problem of a recipe: key, problem, and the closest known key."""
    lines = []
    for problem in error.errors(include_url=False):
        *parents, last = [str(part) for part in problem["loc"]] or ["recipe"]
        sections, shown = [recipe], list[str]()
        for part in parents:
            # pydantic's path contains the chosen branch of a union, which users never typed.
            if branch := [s for s in sections if "method" in s.model_fields and part in _choices(s)]:
                sections = branch
            elif part in _fields(sections):
                sections = sections_of(_fields(sections)[part].annotation)
                shown.append(part)
        fields, kind = _fields(sections), problem["type"]
        if last in fields or kind in ("extra_forbidden", "missing"):
            shown.append(last)
        key, got = ".".join(shown) or "recipe", problem.get("input")
        if kind == "extra_forbidden":
            near = difflib.get_close_matches(last, fields, n=1, cutoff=0.5)
            lines.append(
                f"{key}: unknown key; " + (f"did you mean {near[0]}?" if near else f"known keys: {', '.join(fields)}")
            )
        elif kind == "flag":
            lines.append(f"{key}.{problem['ctx']['key']}: {problem['msg']} (got {_short(problem['ctx']['got'])})")
        elif kind == "missing":
            lines.append(f"{key}: required, and missing")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            suffix = "" if isinstance(got, dict | Section) else f" (got {_short(got)})"
            lines.append(f"{key}: {message[0].lower()}{message[1:]}{suffix}")
    return list(dict.fromkeys(lines))


def _short(value: Any) -> str:
    text = "a section" if isinstance(value, dict | Section) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _choices(section: type[Section]) -> tuple[Any, ...]:
    return get_args(section.model_fields["method"].annotation)


def _fields(sections: Sequence[type[Section]]) -> dict[str, Any]:
    return {key: field for section in sections for key, field in section.model_fields.items()}
