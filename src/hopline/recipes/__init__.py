"""Named runs. A recipe is a function that returns a `RunConfig`; its docstring says what to expect.

`standard` has demo, cora, arxiv, products and papers100m; `gas` has GNNAutoScale's tables as data. It stands on
`run`.
"""

from collections.abc import Callable
from functools import partial

from hopline.recipes.gas import PREFIX, history
from hopline.recipes.standard import arxiv, cora, demo, papers100m, products
from hopline.run.settings import RunConfig

RECIPES = {recipe.__name__: recipe for recipe in (demo, cora, arxiv, products, papers100m)}


def find_recipe(name: str) -> Callable[[], RunConfig]:
    """The recipe of that name, or of the tables of `history`; for any other name a run on the dataset called so."""
    if name in RECIPES:
        return RECIPES[name]
    return partial(history, name) if name.startswith(PREFIX) else partial(RunConfig, data=name)


__all__ = ["RECIPES", "RunConfig", "arxiv", "cora", "demo", "find_recipe", "history", "papers100m", "products"]
