"""Empty CUDA libraries, for a torch that is built for CUDA: the real ones are 4 GB, and a CPU needs none.

    python make/vllm/stubs.py FOLDER

FOLDER gets a shared library for each that torch links to, with a function that fails for each name that torch
asks of it. ``LD_LIBRARY_PATH=FOLDER`` lets that torch import and compute on a CPU.
"""

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SYSTEM = re.compile(
    r"^(libc\.|libm\.|libdl\.|libpthread\.|librt\.|libgcc_s|libstdc|ld-linux|libgomp|libutil\.)"
)
CUDA = re.compile(r"^(cu[A-Z_a-z0-9]|cublas|cudnn|nccl|nvshmem|nvrtc|__cuda|nvtx|nvJitLink|cupti|nvml)")
RETURNS = {
    "cudaGetLastError": "int {}(void){{return 0;}}",
    "cudaPeekAtLastError": "int {}(void){{return 0;}}",
    "cudaStreamIsCapturing": "int {}(void*s,int*status){{*status=0;return 0;}}",
    "cudaGetDeviceCount": "int {}(int*count){{*count=0;return 100;}}",
}


def output(*command):
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def body(name):
    """A C function ``name`` that fails, or answers what torch asks as it is imported."""
    if re.search(r"(ErrorString|ErrorName|StatusString|[gG]etErrorString)$", name):
        return f'const char*{name}(void){{return "stub";}}'
    return RETURNS.get(name, "int {}(void){{return 100;}}").format(name)


def versions_of(library):
    """Library by version name, for the versions that ``library`` needs."""
    found, current = {}, None
    for line in output("readelf", "-V", "-W", library).splitlines():
        if match := re.search(r"File: (\S+)", line):
            current = match[1]
        if (match := re.search(r"Name: (\S+)", line)) and current:
            found[match[1]] = current
    return found


def build(folder, name, plain, versions):
    """One library: ``plain`` names, and names by version."""
    source, script = folder / f"{name}.c", folder / f"{name}.map"
    names = sorted(plain.union(*versions.values()))
    source.write_text("\n".join(map(body, names)) or "int stub_(void){return 0;}")
    command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}"]
    if versions:
        local = "local: *;" if not plain else ""
        parts = [
            f"{version} {{ global: {'; '.join(sorted(own))}; {local if not at else ''} }};"
            for at, (version, own) in enumerate(versions.items())
        ]
        script.write_text("\n".join(parts))
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, "-o", folder / name, source], check=True)


def main(folder):
    """Build every library that torch links to and that is not there into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (spec,) = importlib.util.find_spec("torch").submodule_search_locations
    libraries = sorted(path for path in (Path(spec) / "lib").iterdir() if ".so" in path.name)
    here = {path.name for path in libraries}
    needed, defined, of_version = set(), set(), {}
    for path in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.+?)\]", output("readelf", "-d", path)))
        lines = output("nm", "-D", "--defined-only", path).splitlines()
        defined |= {line.split()[-1].split("@")[0] for line in lines}
        of_version |= versions_of(path)
    missing = sorted(name for name in needed - here if not SYSTEM.match(name))
    named, plain = defaultdict(lambda: defaultdict(set)), set()
    for path in libraries:
        for line in output("nm", "-D", "--undefined-only", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.lstrip("@")
            if version and of_version.get(version) in missing:
                named[of_version[version]][version].add(name)
            elif not version and name not in defined and CUDA.match(name):
                plain.add(name)
    for name in missing:  # nothing says which library has the names without a version: each may
        build(folder, name, set() if name in named else plain, named.get(name, {}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
