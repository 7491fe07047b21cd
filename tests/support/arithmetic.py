"""Products in another type than the weights': (dtype of the pair, options of `td.compile`)."""

from typing import Any

ARITHMETIC: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("float32", {"quantize": "int8"}),
    "float32 in bfloat16": ("float32", {"compute": "bfloat16"}),
    "bfloat16": ("bfloat16", {}),
    "bfloat16 in float32": ("bfloat16", {"compute": "float32"}),
    "bfloat16 in int8": ("bfloat16", {"quantize": "int8"}),
}
