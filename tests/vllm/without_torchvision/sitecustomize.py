"""vLLM's LLaVA imports torchvision for Pixtral's images alone, which no test shows to it, and torchvision is not
installed: its wheels for CPUs are of an index of their own. Python imports this file at its start, where it is on the
path, and finds the one module that is imported in its place; a use of it raises.
"""

from __future__ import annotations

import sys
from types import ModuleType

_transforms = ModuleType("torchvision.transforms.v2")
_transforms.functional = ModuleType("torchvision.transforms.v2.functional")  # type: ignore[attr-defined]
sys.modules[_transforms.__name__] = _transforms
