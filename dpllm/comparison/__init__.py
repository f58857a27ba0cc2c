"""Runs side by side: what is read of each, its figures, how they are shown; and a sweep, which makes the runs.

Comes in: run directories. Goes out: JSON, a table, Markdown, pictures. But for ``sweep.py`` and ``tasks.py``, which train and
score, it must not know torch, a model or any row of data; ``compare.py`` alone reads files of the runs, and alone decides what
may be published.
"""
