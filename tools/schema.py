"""Write the JSON Schema of study files (`make schema`). Run it after a change of a key."""

from __future__ import annotations

import json
from pathlib import Path

from oelm.experiments.study_file import schema

FILE = Path(schema.__file__).with_name("study.schema.json")

if __name__ == "__main__":
    FILE.write_text(json.dumps(schema.study_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(FILE)
