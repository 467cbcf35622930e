"""Study files: a YAML file that describes the data, model, arms, budget and questions of a study.

`load.load_study` reads one and returns experiments like those of the catalogue; `schema` describes the format
for editors, and template.yaml is what `oelm init` writes.
"""
