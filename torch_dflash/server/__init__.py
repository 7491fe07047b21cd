"""An OpenAI-compatible server around the slots of an engine."""

try:
    import fastapi  # noqa: F401 - of the extra
    import openai  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    needed = "pip install fastapi openai prometheus-client uvicorn"
    raise ImportError(f"the server needs {error.name}: {needed}.") from error
