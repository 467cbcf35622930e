"""From run folders to tables, verdicts, figures and the report."""
