"""A backend of Triton that is there and compiles nothing: the interpreter runs all kernels.

Triton imports it before it meets the first kernel, in whichever process and with whichever environment.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
