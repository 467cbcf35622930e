"""Reading and writing files safely: atomic writes, checksums, locks, size limits on untrusted JSON and YAML.

Input: paths, and content from any source. Output: complete files, or one clear error for each problem.
"""
