"""Build the library beside the Python sources, for work in a checkout: `python .../build_inplace.py`.

What follows goes to CMake: `-DFXOPT_SANITIZE=ON`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE / "build"

if __name__ == "__main__":
    options = ["-DFXOPT_SANITIZE=OFF", f"-DPython_EXECUTABLE={sys.executable}", *sys.argv[1:]]
    subprocess.run(["cmake", "-S", HERE, "-B", BUILD, "-G", "Ninja", *options], check=True)
    subprocess.run(["cmake", "--build", BUILD], check=True)
    target = HERE / "src" / "fxopt_cpu" / "_kernels.so"
    unfinished = target.with_suffix(".so.new")
    shutil.copy(BUILD / "_kernels.so", unfinished)
    unfinished.replace(target)  # processes that have the old file loaded keep it
