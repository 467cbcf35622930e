"""Make the JSON Schema of study files from the dataclasses of `sections.py`; `make schema` writes it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from typing import Any, Literal, Union

from oelm.experiments.study_file.sections import ArmSection, StudyFile
from oelm.methods.method import Method
from oelm.methods.presets import methods

_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_COMMENT = re.compile(r"^    (\w+): .*?  # (.+)$", re.M)


def study_schema() -> dict[str, Any]:
    """Return the JSON Schema of a study file."""
    schema = _schema_of_fields(StudyFile)
    arm = _schema_of_fields(ArmSection)
    named = {"type": "string", "examples": list(methods())}
    own = _schema_of_fields(Method)
    own["properties"]["base"] = {**named, "description": "method from which the other fields are copied"}
    del own["properties"]["name"], own["required"]
    arm["properties"]["method"] |= {"anyOf": [named, own]}
    schema["properties"]["arms"] |= {"additionalProperties": {"anyOf": [named, arm]}, "minProperties": 1}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "oelm study file",
        **schema,
    }


def _schema_of_fields(cls: Any) -> dict[str, Any]:
    """Return the JSON Schema of a dataclass; the comment on the line of a field becomes its description."""
    hints, comments = typing.get_type_hints(cls), _comments(cls)
    properties, required = {}, []
    for f in dataclasses.fields(cls):
        properties[f.name] = _schema_of(hints[f.name])
        if f.name in comments:
            properties[f.name]["description"] = comments[f.name]
        if f.default is not dataclasses.MISSING:
            if isinstance(f.default, str | int | float):
                properties[f.name]["default"] = f.default
        elif f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type, such as `tuple[float, ...]` or a dataclass."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _schema_of_fields(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        options = [_schema_of(option) for option in arguments if option is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1])}
    return {} if kind is Any else {"type": _PLAIN[kind]}


def _comments(cls: Any) -> dict[str, str]:
    """Return {field: comment on its line} for a dataclass and the dataclasses that it extends."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):  # all base classes except `object`
        found |= dict(_COMMENT.findall(inspect.getsource(base)))
    return found
