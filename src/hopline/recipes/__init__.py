"""Named runs. A recipe is a function that returns a `RunConfig`; its docstring says what to expect."""

from hopline.recipes.named import arxiv, cora, demo, papers100m, products
from hopline.run import RunConfig

RECIPES = {recipe.__name__: recipe for recipe in (demo, cora, arxiv, products, papers100m)}

__all__ = ["RECIPES", "RunConfig", "arxiv", "cora", "demo", "papers100m", "products"]
