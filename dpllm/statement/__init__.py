"""The privacy statement: one typed value, how it is worded and drawn, and how that of a base model is read and carried on.

Comes in: a JSON value, a base model's card. Goes out: a record, Markdown, a figure, a lineage. Must not know torch, the model,
any row of data, or a run directory.
"""
