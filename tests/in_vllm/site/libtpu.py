"""A stand-in for libtpu: vLLM chooses the TPU platform if the module exists."""

__version__ = "0.0.48"


def get_library_path():
    return "/nonexistent/libtpu.so"
