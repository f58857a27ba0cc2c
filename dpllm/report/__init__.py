"""What is said about a run: the model card, and the comparison with a run without differential privacy.

Comes in: files of a run directory. Goes out: Markdown, JSON, a figure. Must not know torch, the model or any row of
data; ``card.py`` must not read ``private/``, while ``compare.py`` does and therefore writes there.
"""
