"""The parts of a comparison: what is read of each run, its figures, and how they are shown.

Comes in: run directories. Goes out: JSON, a table, Markdown, pictures. Must not know torch, a model or any row of data;
``sides.py`` alone reads files, and alone decides what may be published.
"""
