"""Comparison of runs: their figures, and how they are shown; also sweeps and choices, which train the runs.

Comes in: run directories. Goes out: JSON, a table, Markdown, pictures. Except for the modules that train or score runs, it must
not know torch, a model or any row of data. Of the others, only ``compare.py`` reads files of runs and decides what to publish.
"""
