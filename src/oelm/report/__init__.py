"""Documents from an analysis: HTML, Markdown, LaTeX, CSV, figures and translations."""
