"""What `builtin:` names: a small language model and a small private-looking dataset, both embedded.

In: a name from a recipe, such as "builtin:clinic". Out: the path of a file or directory inside the
package. They make the first command on a fresh machine run without a download. Everything here is
public and synthetic; each directory has a README that says how it was made. This module reads no
file and knows nothing of models, data formats or privacy.
"""

from __future__ import annotations

from pathlib import Path

from dpllm.errors import ConfigError

_HERE = Path(__file__).resolve().parent

NAMES: dict[str, Path] = {
    "builtin:tiny": _HERE / "tiny",
    "builtin:clinic": _HERE / "clinic" / "train.jsonl",
    "builtin:clinic/eval": _HERE / "clinic" / "eval.jsonl",
    "builtin:clinic/pairs": _HERE / "clinic" / "pairs.jsonl",
    "builtin:clinic/pairs_eval": _HERE / "clinic" / "pairs_eval.jsonl",
}
"""Every name, and the file or directory that it stands for."""


def path(name: str) -> Path:
    """Returns the file or directory that a `builtin:` name stands for.

    Raises:
        ConfigError: Nothing embedded has this name.
    """
    if name not in NAMES:
        raise ConfigError(f"{name!r} is not embedded in dpllm. Use one of: {', '.join(NAMES)}.")
    return NAMES[name]
