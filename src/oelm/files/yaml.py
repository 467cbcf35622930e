"""Read untrusted YAML with limits on its size and depth, and without aliases; problems raise `UsageError`."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from oelm.errors import UsageError
from oelm.files.read import MAX_DEPTH, MIB, refuse_half_characters
from oelm.units import bytes_text

YAML_BYTES = MIB // 4  # largest accepted file; a config.yaml has about 2 KB


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text; `where` names the source in errors.

    >>> parse_yaml("[" * 100_000, "config.yaml")
    Traceback (most recent call last):
    oelm.errors.UsageError: config.yaml: not valid YAML (line 1: nested deeper than 50 levels)
    """
    if len(text) > YAML_BYTES:
        raise UsageError(f"{where}: larger than {bytes_text(YAML_BYTES)}, the limit for this kind of file")
    try:
        value = yaml.load(text, _BoundedLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise UsageError(f"{where}: not valid YAML ({line}{error.problem or error.context})") from None
    # For invalid values such as `!!int x` or `2026-13-45`, PyYAML raises the errors of int() and datetime().
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
        message = " ".join(str(error).split())
        raise UsageError(f"{where}: not valid YAML ({message})") from None
    if "\\" in text:  # only an escape sequence can contain half a UTF-16 pair
        refuse_half_characters(value, where)
    return value


try:  # libyaml's parser is seven times faster than the one in Python
    from yaml.cyaml import CParser  # type: ignore[attr-defined]

    _PARSER: Any = CParser
    _BASES: tuple[Any, ...] = (Composer, CParser, SafeConstructor, Resolver)
except ImportError:
    _PARSER, _BASES = yaml.SafeLoader, (yaml.SafeLoader,)


class _BoundedLoader(*_BASES):  # type: ignore[misc]
    """A yaml.SafeLoader that limits the depth, and parses with the fast libyaml where it is installed.

    PyYAML's own CSafeLoader recurses in C without a limit, so 100,000 `[` cause a segmentation fault.
    """

    _depth = 0

    def __init__(self, stream: str) -> None:
        _PARSER.__init__(self, stream)
        if _PARSER is not yaml.SafeLoader:
            for base in (Composer, SafeConstructor, Resolver):
                base.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _marked("aliases (*name) are not supported; write the value out", event)
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


def _marked(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
