"""Benchmarks that compare oelm with other tools. They are not part of the installed package.

python -m benchmarks step -o benchmarks/results/step.json
python -m benchmarks page          # writes docs/performance.md from the results
"""
