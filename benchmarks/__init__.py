"""Benchmarks against other tools. Not part of the installed package.

python -m benchmarks step -o benchmarks/results/step.json
python -m benchmarks page          # docs/performance.md from the results
"""
