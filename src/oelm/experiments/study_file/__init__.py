"""Study files: YAML files that describe the data, model, arms, budget and questions of a study.

`load.load_study()` reads a study file and returns experiments like those of the catalogue. `schema.py` makes
the JSON Schema of the format for editors. `oelm init` writes a copy of template.yaml.
"""
