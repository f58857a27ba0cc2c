"""dpllm: fine-tune causal language models with differential privacy, audit them, publish the card."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpllm.comparison.compare import DPComparison as DPComparison

__version__ = "0.1.0"
__all__ = ["DPComparison", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads what is heavy once it is asked for, so that ``import dpllm`` stays quick."""
    if name == "DPComparison":
        from dpllm.comparison.compare import DPComparison

        return DPComparison
    raise AttributeError(f"module 'dpllm' has no attribute {name!r}")
