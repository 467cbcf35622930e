"""Sections of the report: each module builds the content of one or a few of them."""
