from .attention import DotProductAttention

__all__ = ["DotProductAttention"]
