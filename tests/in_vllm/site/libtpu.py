"""What vLLM looks for to choose its TPU platform."""

__version__ = "0.0.48"


def get_library_path():
    return "/nonexistent/libtpu.so"
