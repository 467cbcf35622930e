"""Formats of the report: HTML, Markdown, LaTeX and CSV."""
