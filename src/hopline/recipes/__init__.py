"""Runs by name: `hopline train cora`. A recipe is a function that returns a `RunConfig`.

The docstring of a recipe has the command, the model, the dataset and the result to expect. `standard` has
demo, cora, arxiv, products and papers100m. `gas` has the settings of GNNAutoScale's runs, as tables. The
folder imports from `run`.
"""

from collections.abc import Callable
from functools import partial

from hopline.recipes.gas import PREFIX, history
from hopline.recipes.standard import arxiv, cora, demo, papers100m, products
from hopline.run.settings import RunConfig

RECIPES = {recipe.__name__: recipe for recipe in (demo, cora, arxiv, products, papers100m)}
"""The recipes that help lists, by name. Those of `gas` are too many for it."""


def find_recipe(name: str) -> Callable[[], RunConfig]:
    """Return the recipe of a name.

    A name that is no recipe is taken for a dataset, with the default settings.
    """
    if name in RECIPES:
        return RECIPES[name]
    return partial(history, name) if name.startswith(PREFIX) else partial(RunConfig, data=name)


__all__ = ["RECIPES", "RunConfig", "arxiv", "cora", "demo", "find_recipe", "history", "papers100m", "products"]
