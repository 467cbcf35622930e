"""A method is data."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    name: str
