"""What a host measures of itself, one part after the other."""

__all__ = ["ALL", "MEMORY", "PRODUCTS"]

PRODUCTS = ("float32", "float16", "bfloat16")  # dtypes of matrix products
MEMORY = ("copy", "sum", "row")
ALL = (*PRODUCTS, *MEMORY)
