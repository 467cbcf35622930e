"""Read untrusted YAML. Files that are too large, nested too deeply or have aliases raise UsageError.

Only true, false, null and decimal numbers have a type of their own, all else is text. PyYAML alone follows
YAML 1.1, which reads 0300 as 192, 12:30 as 750 and `no` as false.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from oelm.errors import UsageError
from oelm.files.read import MAX_DEPTH, MIB, read_text, refuse_half_characters
from oelm.units import bytes_text

YAML_BYTES = MIB // 4  # largest accepted file; a config.yaml has about 2 KB


def read_yaml_with_lines(path: Path | str) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file, and {dotted name of a key: line number}, e.g. {"arms.a[0]": 7}."""
    value, node = _load(read_text(path, max_bytes=YAML_BYTES), str(path))
    return value, dict(_lines(node)) if node is not None else {}


def _lines(node: yaml.Node, place: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{place}.{key.value}" if place else str(key.value)
            yield name, key.start_mark.line + 1
            yield from _lines(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield f"{place}[{number}]", item.start_mark.line + 1
            yield from _lines(item, f"{place}[{number}]")


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text; `where` is the name of the file, for error messages.

    >>> parse_yaml("[" * 100_000, "config.yaml")
    Traceback (most recent call last):
    oelm.errors.UsageError: config.yaml: not valid YAML (line 1: nested deeper than 50 levels)
    """
    return _load(text, where)[0]


def _load(text: str, where: str) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML text, and the root of its node tree, which contains the line numbers."""
    if len(text) > YAML_BYTES:
        raise UsageError(f"{where}: larger than {bytes_text(YAML_BYTES)}, the limit for this kind of file")
    try:
        loader = _BoundedLoader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise UsageError(f"{where}: not valid YAML ({line}{error.problem or error.context})") from None
    # For invalid values such as `!!int x`, PyYAML raises the errors of int(), float() and datetime().
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
        message = " ".join(str(error).split())
        raise UsageError(f"{where}: not valid YAML ({message})") from None
    if "\\" in text:  # a lone UTF-16 surrogate can only be written as an escape sequence
        refuse_half_characters(value, where)
    return value, node


try:  # libyaml's parser is seven times faster than the one in Python
    from yaml.cyaml import CParser  # type: ignore[attr-defined]

    _PARSER: Any = CParser
    _BASES: tuple[Any, ...] = (Composer, CParser, SafeConstructor, Resolver)
except ImportError:
    _PARSER, _BASES = yaml.SafeLoader, (yaml.SafeLoader,)


class _BoundedLoader(*_BASES):  # type: ignore[misc]
    """A yaml.SafeLoader that limits the nesting depth, and parses with libyaml (fast) if it is installed.

    PyYAML's own CSafeLoader recurses in C without a limit, so that 100,000 `[` cause a segmentation fault.
    """

    _depth = 0
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # without those of YAML 1.1; filled below

    def __init__(self, stream: str) -> None:
        _PARSER.__init__(self, stream)
        if _PARSER is not yaml.SafeLoader:
            for base in (Composer, SafeConstructor, Resolver):
                base.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _marked("aliases (*name) are not supported: write the value in place of the alias", event)
        if self._depth > MAX_DEPTH:
            raise _marked(f"nested deeper than {MAX_DEPTH} levels", event)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _marked(f"the key '{key.value}' appears twice", key)
                seen.add((key.tag, key.value))
        return node


# PyYAML writes the texts "1e5" and "0900" without quotes, so they are no numbers here. `convert()` turns them
# into numbers if the type of the field is a number.
_EXPONENT = r"([eE][-+][0-9]+)?"
_PLAIN_TYPES = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (
        rf"[-+]?[0-9]+\.[0-9]*{_EXPONENT}|\.[0-9]+{_EXPONENT}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
for _name, (_pattern, _first) in _PLAIN_TYPES.items():
    _BoundedLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})\Z"), _first
    )
_BoundedLoader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node))
)


def _marked(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
