"""The methods of the library, by which they are found. A further method is added here.

The module imports no torch.
"""

from __future__ import annotations

from typing import TypeAlias, get_args

from hopline.contract import Method
from hopline.methods.full_batch.settings import FullBatch
from hopline.methods.historical.settings import Historical
from hopline.methods.sampled.settings import Sampled

ListedMethod: TypeAlias = Sampled | Historical | FullBatch
METHODS: tuple[type[ListedMethod], ...] = get_args(ListedMethod)
"""Their classes. Where none is named, the first is meant."""
DEFAULT: Method = METHODS[0]()
"""The method of a run that names none."""
