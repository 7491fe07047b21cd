"""Runs first in each process: tpu-inference names compiler options that a CPU's compiler does not know."""

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)
_jit = jax.jit


def jit(*args, **kwargs):
    kwargs.pop("compiler_options", None)
    return _jit(*args, **kwargs)


jax.jit = jit
