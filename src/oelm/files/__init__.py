"""Read and write files safely: atomic writes, checksums, locks, size limits for untrusted JSON and YAML.

Input: paths, and content from any source. Output: complete files, or errors that name the file.
"""
