"""From a recipe to a trained model: `train(load_recipe("recipes/smoke/elastic.yaml"), data, out)`.

`session` runs attempts until the last step is done. `trainer` is transformers' Trainer with our order of samples
(`order`), rules for bad steps (`spikes`) and checkpoints (`checkpoints`).
"""

from elastic_memory.training.recipe import Recipe, load_recipe, variants
from elastic_memory.training.session import Resume, train

__all__ = ["Recipe", "Resume", "load_recipe", "train", "variants"]
